"""What several criteria kept of the metric, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from secateur.plans.scores import Scores, Values
from secateur.results.history import History, written

#: By pair of criteria, a number.
Pairs = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Curve:
    """What a criterion kept of the metric: over the share of units removed, and over the share of MACs left."""

    criterion: str
    removed: Values
    macs: Values
    overall: Values

    def area_over_units(self, upto: float | None = None) -> float:
        """The mean of the metric over the share of units removed, from 0 to `upto` (default: to the end)."""
        end = float(self.removed[-1]) if upto is None else upto
        return _mean(self.removed, self.overall, 0.0, end)

    def area_over_macs(self, downto: float | None = None) -> float:
        """The mean of the metric over the share of MACs left, from all to `downto` (default: to the end)."""
        end = float(self.macs[-1]) if downto is None else downto
        return _mean(1 - self.macs, self.overall, 0.0, 1 - end)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Curves, areas, and how far the criteria agree on the unpruned model. `print` it for the answer in one table.

    `first` and `last` are by fraction of all groups: the overlap |A∩B|/k of the k lowest and the k highest scored;
    `spearman` is the rank correlation over all groups.
    """

    curves: Mapping[str, Curve]
    spearman: Pairs
    first: Mapping[float, Pairs]
    last: Mapping[float, Pairs]
    histories: Mapping[str, History] = field(repr=False, default_factory=dict)
    scores: Mapping[str, Scores] = field(repr=False, default_factory=dict)

    def areas(self) -> dict[str, tuple[float, float]]:
        """For each criterion the mean metric over units and over MACs, on the range that all of them cover."""
        upto = min(float(curve.removed[-1]) for curve in self.curves.values())
        downto = max(float(curve.macs[-1]) for curve in self.curves.values())
        return {n: (c.area_over_units(upto), c.area_over_macs(downto)) for n, c in self.curves.items()}

    @property
    def best(self) -> str:
        """The criterion with the largest area over MACs: what you pay for."""
        areas = self.areas()
        return max(areas, key=lambda name: areas[name][1])

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.curves)}; best over MACs: {self.best}>"

    def __str__(self) -> str:
        areas, width = self.areas(), max(len(name) for name in self.curves)
        lines = [f"{'criterion'.ljust(width)}  area/units  area/MACs      end"]
        for name in sorted(areas, key=lambda n: -areas[n][1]):
            mark = "  ← best over MACs" if name == self.best else ""
            end = self.curves[name].overall[-1]
            lines.append(f"{name.ljust(width)}  {areas[name][0]:10.4f} {areas[name][1]:10.4f} {end:8.4f}{mark}")
        lines += ["", f"{'ranks of'.ljust(2 * width + 5)} Spearman  lowest quarter shared"]
        quarter = self.first[min(self.first, key=lambda f: abs(f - 0.25))]
        for a, b in self.spearman:
            if a < b:
                lines.append(f"{f'{a} / {b}'.ljust(2 * width + 5)} {self.spearman[a, b]:8.3f}  {quarter[a, b]:8.3f}")
        return "\n".join(lines)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything but the scores, as JSON text, also written to `path` if given."""
        areas = self.areas()
        text = json.dumps(
            {
                "best": self.best,
                "criteria": {
                    name: {
                        "removed": c.removed.tolist(), "macs": c.macs.tolist(), "overall": c.overall.tolist(),
                        "area_over_units": areas[name][0], "area_over_macs": areas[name][1],
                    }
                    for name, c in self.curves.items()
                },
                "spearman": _listed(self.spearman),
                "first": {str(f): _listed(pairs) for f, pairs in self.first.items()},
                "last": {str(f): _listed(pairs) for f, pairs in self.last.items()},
            },
            indent=1,
        )  # fmt: skip
        return written(text, path)


def curve(criterion: str, history: History, every: bool = False) -> Curve:
    """The curve of a run that was evaluated at every step; with `every`, a step that was taken back belongs to it."""
    rows = [row for row in history if (row.held or every) and row.overall is not None]
    whole = max(rows[0].macs, 1)
    return Curve(
        criterion,
        np.array([row.removed for row in rows]),
        np.array([row.macs / whole for row in rows]),
        np.array([row.overall for row in rows], np.float64),
    )


def ranks(values: Values) -> Values:
    """Ranks from 0, equal values sharing the mean of theirs.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [1.5, 0.0, 1.5]
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return np.asarray((last - (counts - 1) / 2)[inverse])


def spearman(a: Values, b: Values) -> float:
    """Rank correlation: Pearson's, of the ranks. 0 where one side is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size > 0 else 0.0


def overlap(a: Values, b: Values, k: int) -> float:
    """|A∩B| / k for the k lowest of each. Chance is k / n.

    >>> overlap(np.array([0.0, 1.0, 2.0]), np.array([5.0, 9.0, 4.0]), 2)
    0.5
    """
    lowest = [set(np.argsort(v, kind="stable")[:k].tolist()) for v in (a, b)]
    return len(lowest[0] & lowest[1]) / k


def _mean(x: Values, y: Values, begin: float, end: float) -> float:
    """The mean of the piecewise linear curve through (x, y) between two places."""
    if end <= begin:
        return float(y[0])
    inside = x[(x > begin) & (x < end)]
    at = np.concatenate([[begin], inside, [end]])
    values = np.interp(at, x, y)
    return float(np.sum((values[1:] + values[:-1]) / 2 * np.diff(at)) / (end - begin))


def _listed(pairs: Pairs) -> list[list[Any]]:
    return [[a, b, value] for (a, b), value in pairs.items()]
