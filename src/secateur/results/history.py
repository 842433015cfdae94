"""What a run records: a plain row for each step, and what it ended with."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur import atomic
from secateur.analysis.reasons import Drift
from secateur.errors import FileFormatError
from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.structure.cost import Cost, Price
from secateur.structure.graph import Graph


@dataclass(frozen=True)
class Row:
    """One step. `removed` is the share of units gone; `metrics` what `evaluate` said, with "overall" among it.

    `at_minimum` counts the layers that are down to the units they must keep; `held` is False for a step that lost too
    much and was taken back. `latency` is in seconds, where it was measured. `drift` is how far the heat maps are from
    those of the unpruned model (`secateur.analysis.reasons`), where samples are watched.
    """

    step: int
    units: int
    removed: float
    params: int
    macs: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    part: str = ""
    latency: float | None = None
    at_minimum: int = 0
    held: bool = True
    score_seconds: float = 0.0
    seconds: float = 0.0
    drift: float | None = None

    @property
    def overall(self) -> float | None:
        """The overall metric."""
        return self.metrics.get("overall")


class History:
    """The rows of a run, the unpruned model first.

    >>> history = History([Row(0, 10, 0.0, 100, 1000, {"overall": 0.9})])
    >>> print(history.to_csv().splitlines()[0])
    step,units,removed,params,macs,part,latency,at_minimum,held,score_seconds,seconds,drift,overall
    """

    def __init__(self, rows: list[Row] | None = None) -> None:
        self.rows = rows if rows is not None else []

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as JSON text, also written to `path` if given."""
        return written(json.dumps([asdict(row) for row in self.rows], indent=1), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV text, one column per metric, also written to `path` if given."""
        plain = [name for name in Row.__dataclass_fields__ if name != "metrics"]
        metrics = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*plain, *metrics])
        for row in self.rows:
            writer.writerow([*(getattr(row, name) for name in plain), *map(row.metrics.get, metrics)])
        return written(text.getvalue(), path)

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read rows back."""
        try:
            return cls([_row(item) for item in json.loads(text)])
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FileFormatError(f"not a history: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        return f"<History of {len(self.rows)} rows>"

    def __str__(self) -> str:
        lines = [f"{'step':>4}  {'removed':>8}  {'params':>12}  {'MACs':>14}  overall"]
        for row in self.rows:
            overall = "" if row.overall is None else f"{row.overall:.4f}"
            mark = "" if row.held else "  (taken back)"
            lines.append(
                f"{row.step:4d}  {100 * row.removed:6.1f} %  {row.params:12d}  {row.macs:14d}  {overall}{mark}".rstrip()
            )
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Record:
    """What a run ended with, as reports read it.

    `stopped` says why; `scores` are those that the last removal was based on. `original` is the user's own
    unpruned model, and `settings` what `prune` was asked for. `seen` has the heat maps of the `watched` samples, by
    step. `reasons` says how far its heat maps are from the original's, on a few samples, where that was measured.
    `table` predicts the seconds of a forward pass, where the run had one.
    """

    model: nn.Module
    plan: Plan | None
    history: History
    graph: Graph
    scores: Scores | None
    cost_before: Cost
    cost_after: Cost
    stopped: str
    original: nn.Module | None = field(default=None, repr=False, compare=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    watched: tuple[Any, Tensor | None] | None = field(default=None, repr=False, compare=False)
    seen: Mapping[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    reasons: Drift | None = field(default=None, repr=False, compare=False)
    table: Price | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        name = type(self.model).__name__
        return f"<{type(self).__name__} of {name}: {self.cost_before} → {self.cost_after}; {self.stopped}>"

    def __str__(self) -> str:
        told = [self._unrepaired(), "" if self.reasons is None else self.reasons.summary()]
        lines = [f"{self.cost_before} → {self.cost_after}; {self.stopped}", str(self.history), *filter(None, told)]
        return "\n".join(lines)

    def _unrepaired(self) -> str:
        """A line for whoever may expect a repair, as after steps; empty after one, or after training of one's own."""
        asked = self.settings
        if not asked or asked.get("repair") or asked.get("finetune") or asked.get("one_shot") or len(self.history) < 2:
            return ""
        return "nothing was repaired, as in the paper's algorithm. repair='best' repairs, if there are samples"


# What JSON may hold for a field, by its type.
_KINDS: dict[Any, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "float | None": (int, float, type(None)), "str": (str,), "bool": (bool,),
}  # fmt: skip


def _row(item: Any) -> Row:
    if not isinstance(item, dict):
        raise ValueError(f"expected a row, found {type(item).__name__}")
    known = {name: value for name, value in item.items() if name in Row.__dataclass_fields__}  # older files have more
    for name, value in known.items():
        kinds = _KINDS.get(Row.__dataclass_fields__[name].type)
        if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise ValueError(f"{name} is {value!r}")
    return Row(**{**known, "metrics": {str(k): float(v) for k, v in item.get("metrics", {}).items()}})


def written(text: str, path: str | Path | None) -> str:
    """The text, also written to `path` if given."""
    if path is not None:
        with atomic.naming_failures(path):
            atomic.write(path, text)
    return text
