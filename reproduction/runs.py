"""The output folder of an image experiment: its settings and one file per finished run; and curves of these runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.criteria import CRITERIA
from reproduction.tensor_files import refuse_others
from reproduction.uncoupled import paper_cost, with_paper_costs
from secateur.atomic import write
from secateur.errors import FileFormatError
from secateur.plans.scores import Values
from secateur.results.comparison import Curve
from secateur.results.history import History, Row

_KEPT = "kept "


@dataclass(frozen=True)
class Run:
    """One finished run."""

    draw: int
    mode: str
    criterion: str
    history: History

    @property
    def curve(self) -> Curve:
        """Accuracy over the share of filters gone, and over the share of MACs that are really left."""
        return self._curve([row.macs for row in self.history])

    @property
    def paper_curve(self) -> Curve:
        """The same over MACs as the paper counts them."""
        return self._curve([paper_cost(row, "macs") for row in self.history])

    def _curve(self, macs: Sequence[float]) -> Curve:
        removed = np.array([removed_share(row, self.history[0]) for row in self.history])
        overall = np.array([row.overall for row in self.history], np.float64)
        return Curve(self.criterion, removed, np.array(macs) / max(macs[0], 1), overall)

    def at(self, rate: float) -> Row:
        """The step at which a share of the filters is gone; the last one if the run ended before."""
        shares = [removed_share(row, self.history[0]) for row in self.history]
        return self.history[int(np.argmin(np.abs(np.array(shares) - rate)))]


def noted(counts: Mapping[str, int]) -> dict[str, float]:
    """Filters left per layer, as metrics."""
    return {_KEPT + path: float(count) for path, count in counts.items()}


def filters(row: Row) -> dict[str, float]:
    """Filters left per layer, from a row's metrics."""
    return {key.removeprefix(_KEPT): value for key, value in row.metrics.items() if key.startswith(_KEPT)}


def removed_share(row: Row, first: Row) -> float:
    """The share of convolution filters that is gone. A history also counts fully connected neurons."""
    now, before = filters(row), filters(first)
    return 1 - sum(now.values()) / sum(before.values()) if before else row.removed


def at(curve: Curve, place: float, over: str = "removed") -> float | None:
    """The accuracy at a share of filters gone or (`over="macs"`) of MACs left; None beyond the end of the run."""
    x: Values = curve.removed if over == "removed" else 1 - curve.macs
    place = place if over == "removed" else 1 - place
    return float(np.interp(place, x, curve.overall)) if place <= x[-1] + 5e-3 else None


def by_mode(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by mode, in the order in which the modes appear."""
    return {mode: [run for run in runs if run.mode == mode] for mode in dict.fromkeys(run.mode for run in runs)}


def by_criterion(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by criterion: those of the paper in its order, then others."""
    names = dict.fromkeys(run.criterion for run in runs)
    ordered = [*(name for name in CRITERIA if name in names), *(name for name in names if name not in CRITERIA)]
    return {name: [run for run in runs if run.criterion == name] for name in ordered}


def curves(runs: Sequence[Run]) -> dict[str, list[Curve]]:
    """The curves of some runs by criterion."""
    return {name: [run.curve for run in found] for name, found in by_criterion(runs).items()}


def areas(curves: Mapping[str, Sequence[Curve]], over: str) -> dict[str, float]:
    """The mean of each criterion's curves, over the range that all of them cover."""
    every = [curve for found in curves.values() for curve in found]
    upto = min(float(curve.removed[-1]) for curve in every)
    downto = max(float(curve.macs[-1]) for curve in every)
    return {
        name: float(
            np.mean([c.area_over_units(upto) if over == "removed" else c.area_over_macs(downto) for c in found])
        )
        for name, found in curves.items()
    }


class Folder:
    """The folder of one network and data set. It belongs to one set of settings."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Write down the settings. A folder of other settings is refused; the error names the difference."""
        found = self.settings()
        if found:
            refuse_others(self.path, found, settings)
        else:
            write(self.path / "settings.json", json.dumps(settings, indent=1).encode())

    def settings(self) -> dict[str, Any]:
        """The settings of the runs here; empty if there are none."""
        file = self.path / "settings.json"
        if not file.exists():
            return {}
        found = _read(file)
        return found if isinstance(found, dict) else {}

    def place(self, draw: int, mode: str, criterion: str) -> Path:
        """The file of a run."""
        return self.path / f"{draw:02d}-{mode}-{criterion.replace(':', '_')}.json"

    def checkpoint(self, draw: int, mode: str, criterion: str) -> Path:
        """The file that an unfinished run resumes from."""
        return self.path / "unfinished" / self.place(draw, mode, criterion).with_suffix(".safetensors").name

    def keep(self, run: Run) -> None:
        """Write a finished run and delete its checkpoint."""
        write(self.place(run.draw, run.mode, run.criterion), run.history.to_json().encode())
        self.checkpoint(run.draw, run.mode, run.criterion).unlink(missing_ok=True)

    def runs(self) -> list[Run]:
        """Every finished run, by draw."""
        found = []
        for file in sorted(self.path.glob("[0-9]*-*-*.json")):
            draw, mode, criterion = file.stem.split("-", 2)
            history = History.from_json(json.dumps(with_paper_costs(_read(file))))
            found.append(Run(int(draw), mode, criterion, history))
        return found


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{file} is damaged: {error}") from error
