"""Figures of the image experiments as PNG. matplotlib is an extra, so it is imported when something is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reproduction.criteria import COLOURS, MARKERS, NAMES
from reproduction.runs import Run, at, filters
from secateur.plans.scores import Values
from secateur.results.comparison import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {**COLOURS, "random": "#8b949e"}
# Rates of Figure 7.
RATES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)


@dataclass(frozen=True)
class Panel:
    """Accuracy curves of several criteria in one frame. `over` is "removed" or "macs"."""

    title: str
    xlabel: str
    over: str
    curves: Mapping[str, Sequence[Curve]]


def panels(mode: str, found: Mapping[str, Sequence[Curve]]) -> list[Panel]:
    """Accuracy over filters, and the same over MACs."""
    gone = "filters masked in %" if mode == "paper" else "filters removed in %"
    return [
        Panel(f"{mode} mode", gone, "removed", found),
        Panel(f"{mode} mode", "MACs really saved in %", "macs", found),
    ]


def curves(panels: Sequence[Sequence[Panel]]) -> bytes:
    """Rows of panels: the mean over draws, and a band of one standard deviation."""
    sheet = _sheet(4.6 * max(map(len, panels)), 3.4 * len(panels))
    axes = sheet.subplots(len(panels), max(map(len, panels)), squeeze=False, sharey="row")
    for row, line in zip(axes, panels, strict=True):
        for axis in row[len(line) :]:
            axis.set_visible(False)
        for axis, panel in zip(row, line, strict=False):
            for criterion, found in panel.curves.items():
                x, mean, band = averaged(found, panel.over)
                colour = _COLOURS.get(criterion)
                axis.plot(x, mean, label=_name(criterion), color=colour, marker=MARKERS.get(criterion), ms=3, lw=1.2)
                axis.fill_between(x, mean - band, mean + band, color=colour, alpha=0.12, lw=0)
            axis.set(title=panel.title, xlabel=panel.xlabel)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("test accuracy in %")
    axes[0][0].legend(frameon=False, fontsize="small")
    return _png(sheet)


def averaged(found: Sequence[Curve], over: str) -> tuple[Values, Values, Values]:
    """In percent: where (filters gone, or MACs saved), the mean over draws, and the standard deviation."""
    grid = np.linspace(0, 1, 41)
    rows = [[at(c, p if over == "removed" else 1 - p, over) for p in grid] for c in found]
    values = 100 * np.array(rows, np.float64)
    known = ~np.isnan(values).any(0)
    return 100 * grid[known], values[:, known].mean(0), values[:, known].std(0)


def scatter(title: str, runs: Sequence[Run], measure: str) -> bytes:
    """Figure 6: a point for every step, LRP upwards and another criterion to the right."""
    sheet = _sheet(4.4, 4)
    axis = sheet.subplots()
    factor = 100 if measure == "overall" else 1
    lines = {(run.draw, run.mode, run.criterion): [row.metrics.get(measure) for row in run.history] for run in runs}
    ends: list[float] = []
    for criterion in dict.fromkeys(run.criterion for run in runs if run.criterion != "lrp"):
        points = [
            (factor * x, factor * y)
            for (draw, mode, name), values in lines.items()
            if name == criterion
            for x, y in zip(values, lines.get((draw, mode, "lrp"), []), strict=False)
            if x is not None and y is not None
        ]
        if points:
            across, up = zip(*points, strict=True)
            ends += [*across, *up]
            axis.plot(
                across, up, MARKERS.get(criterion, "x"), color=_COLOURS.get(criterion), ms=5, alpha=0.7,
                label=_name(criterion),
            )  # fmt: skip
    if ends:
        axis.plot([min(ends), max(ends)], [min(ends), max(ends)], "--", color="#1b1f24", lw=1)
    what = "test accuracy in %" if measure == "overall" else "training loss"
    axis.set(title=title, xlabel=f"{what}, other criterion", ylabel=f"{what}, LRP")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="small")
    return _png(sheet)


def layers(title: str, runs: Sequence[Run]) -> bytes:
    """Figure 7: the share of filters that each convolution keeps, at several rates, one frame per criterion."""
    names = [c for c in _COLOURS if any(run.criterion == c for run in runs)]
    sheet = _sheet(3.6 * len(names), 3.2)
    axes = sheet.subplots(1, len(names), squeeze=False, sharey=True)[0]
    sheet.suptitle(title)
    for axis, criterion in zip(axes, names, strict=True):
        mine = [run for run in runs if run.criterion == criterion]
        whole = np.array(list(filters(mine[0].history[0]).values()))
        end = min(float(run.curve.removed[-1]) for run in mine)
        for i, rate in enumerate([rate for rate in RATES if rate <= end + 0.03] or [end]):
            left = np.mean([list(filters(run.at(rate)).values()) for run in mine], 0)
            axis.plot(np.arange(1, len(whole) + 1), 100 * left / whole, color=f"C{i}", label=f"{100 * rate:.0f} %")
        axis.set(title=_name(criterion), xlabel="convolution, from the input", ylim=(0, 105))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("filters left in %")
    axes[-1].legend(title="gone in all", frameon=False, fontsize="small")
    return _png(sheet)


def heat(title: str, grids: Mapping[str, Mapping[tuple[float, float], float]]) -> bytes:
    """Figure 8: accuracy by share of filters (downwards) and of fully connected neurons (to the right) gone."""
    sheet = _sheet(3.6 * len(grids), 3.6)
    axes = sheet.subplots(1, len(grids), squeeze=False, sharey=True)[0]
    sheet.suptitle(title)
    drawn: Any = None
    for axis, (criterion, cells) in zip(axes, grids.items(), strict=True):
        down, right = sorted({c for c, _ in cells}), sorted({f for _, f in cells})
        values = np.array([[100 * cells.get((c, f), np.nan) for f in right] for c in down])
        # Twenty colours: each is a range of 5 points, as in the paper.
        drawn = axis.pcolormesh(_edges(right), _edges(down), values, vmin=0, vmax=100, cmap=_ranges())
        axis.set(title=_name(criterion), xlabel="neurons gone in %")
    axes[0].set_ylabel("filters gone in %")
    axes[0].invert_yaxis()
    sheet.colorbar(drawn, ax=list(axes), label="test accuracy in %")
    return _png(sheet)


def _edges(centres: Sequence[float]) -> Values:
    half = (centres[1] - centres[0]) / 2 if len(centres) > 1 else 0.025
    return 100 * np.array([centres[0] - half, *(c + half for c in centres)])


def _ranges() -> Any:
    import matplotlib

    return matplotlib.colormaps["inferno"].resampled(20)


def _name(criterion: str) -> str:
    return NAMES.get(criterion, criterion)


def _sheet(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(sheet)
    return sheet


def _png(sheet: Figure) -> bytes:
    content = io.BytesIO()
    # No date or version inside: equal results give equal files.
    sheet.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()
