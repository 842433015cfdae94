"""What the loop recorded, as charts: the metric over units and over MACs, of one run or of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from secateur.errors import SecateurError
from secateur.report.charts import Chart, Point, Series
from secateur.report.document import Table, number, percent
from secateur.results.comparison import Comparison, curve
from secateur.results.history import History, Record, Row

_REMOVED, _LEFT = "units removed", "MACs left"


@dataclass(frozen=True)
class Metric:
    """How the overall metric is written: as an accuracy in percent if all of it lies between 0 and 1."""

    percent: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> Metric:
        return cls(all(0 <= value <= 1 for value in values))

    @property
    def name(self) -> str:
        """Above an axis or a column."""
        return "accuracy, %" if self.percent else "overall metric"

    @property
    def word(self) -> str:
        """In a sentence."""
        return "accuracy" if self.percent else "overall metric"

    def drawn(self, value: float) -> float:
        """On the axis."""
        return 100 * value if self.percent else value

    def bare(self, value: float) -> str:
        """In a table."""
        return percent(value) if self.percent else number(value, ".5g")

    def text(self, value: float) -> str:
        """With its unit.

        >>> Metric(True).text(0.9871)
        '98.7 %'
        """
        return f"{100 * value:.1f} %" if self.percent else self.bare(value)

    def change(self, before: float, after: float) -> str:
        """A difference with its sign."""
        gap = after - before
        text = f"{number(100 * gap, '+.1f')} points" if self.percent else number(gap, "+.4g")
        return text.replace("+0.0 ", "±0.0 ").replace("−0.0 ", "±0.0 ")

    def chart(self, id: str, caption: str, axis: str, first: float, series: Sequence[Series], table: Table) -> Chart:
        """This metric over an axis; `first` is that of the unpruned network."""
        bounds = (0.0, 100.0) if self.percent else (-math.inf, math.inf)
        return Chart(
            id, f"{self.word.capitalize()} over {axis}", caption, f"{axis}, %", self.name, series, table,
            axis == _LEFT, bounds, self.drawn(first),
        )  # fmt: skip


def run_charts(history: History, metric: Metric) -> list[Chart]:
    """One run: over the share of units removed, and over the share of MACs left. A single step makes no curve."""
    rows = [(row, row.overall) for row in history if row.overall is not None]
    if len(rows) < 3:
        return []
    whole, first = max(rows[0][0].macs, 1), rows[0][1]
    chosen = max(i for i, (row, _) in enumerate(rows) if row.held)
    caption = f"Each point is a step; the dashed line is the unpruned network. {_neighbours(rows, chosen, metric)}"
    charts = []
    for id, axis in (("units", _REMOVED), ("macs", _LEFT)):
        points, lines = [], []
        for i, (row, value) in enumerate(rows):
            share, note = row.removed if id == "units" else row.macs / whole, "" if row.held else "taken back"
            if i == chosen:
                note = "the model of this page"
            text = f"{100 * share:.1f} % of {axis}: {metric.text(value)}{note and ', '}{note}"
            points.append(Point(100 * share, metric.drawn(value), text, not row.held, i == chosen))
            lines.append((str(row.step), percent(share), metric.bare(value), note))
        table = Table.of(f"{metric.name} over {axis}, %", ("step",), (f"{axis}, %", metric.name, ""), lines)
        charts.append(metric.chart(id, caption, axis, first, [Series(metric.word, points)], table))
    return charts


def _neighbours(rows: Sequence[tuple[Row, float]], chosen: int, metric: Metric) -> str:
    """The chosen point of the trade-off, and what one step less or more would be."""
    whole = max(rows[0][0].macs, 1)

    def at(place: int) -> str:
        row, value = rows[place]
        return f"{metric.text(value)} at {100 * row.macs / whole:.1f} % of the MACs"

    words = f"The ring is the model of this page: {at(chosen)}."
    if chosen:
        words += f" One step less: {at(chosen - 1)}."
    if chosen + 1 < len(rows):
        return f"{words} One step more: {at(chosen + 1)}; that step lost too much and was taken back: the hollow point."
    return f"{words} The run ended there."


@dataclass(frozen=True)
class Contest:
    """Several criteria on the same task: charts, areas under the curves, and how far the rankings agree."""

    best: str
    charts: list[Chart]
    areas: Table
    agreement: Table | None


def contest(comparison: Comparison | Mapping[str, Record]) -> Contest:
    """Lay out a comparison, or results by name."""
    found = comparison if isinstance(comparison, Comparison) else _gathered(comparison)
    metric = Metric.of(value for line in found.curves.values() for value in line.overall.tolist())
    lines: list[tuple[str, ...]] = []
    over_units, over_macs = [], []
    for name, line in found.curves.items():
        units, macs = [], []
        for removed, left, value in zip(line.removed.tolist(), line.macs.tolist(), line.overall.tolist(), strict=True):
            text = f"{name}: {metric.text(value)}"
            units.append(Point(100 * removed, metric.drawn(value), f"{100 * removed:.1f} % removed, {text}"))
            macs.append(Point(100 * left, metric.drawn(value), f"{100 * left:.1f} % of MACs left, {text}"))
            lines.append((name, percent(removed), percent(left), metric.bare(value)))
        over_units.append(Series(name, units))
        over_macs.append(Series(name, macs))
    first = float(next(iter(found.curves.values())).overall[0])
    table = Table.of("All points", ("criterion",), (f"{_REMOVED}, %", f"{_LEFT}, %", metric.name), lines)
    caption = "Labels stand at the ends of the lines; the dashed line is the unpruned network."
    charts = [
        metric.chart("compare-units", caption, _REMOVED, first, over_units, table),
        metric.chart("compare-macs", caption, _LEFT, first, over_macs, table),
    ]
    return Contest(found.best, charts, _areas(found, metric), _agreement(found))


def _gathered(results: Mapping[str, Record]) -> Comparison:
    curves = {}
    for name, result in results.items():
        if not isinstance(result, Record) or all(row.overall is None for row in result.history):
            raise SecateurError(f"comparison[{name!r}] is no result of prune(…, evaluate=f), so it has no curve.")
        curves[name] = curve(name, result.history)
    if not curves:
        raise SecateurError("there is nothing to compare: give a Comparison, or results by name.")
    return Comparison(curves, {}, {}, {})


def _areas(found: Comparison, metric: Metric) -> Table:
    areas = found.areas()
    lines = [
        (name, *map(metric.bare, (*areas[name], found.curves[name].overall[-1])))
        for name in sorted(areas, key=lambda name: -areas[name][1])
    ]
    heads = ("mean over units", "mean over MACs", "at the end")
    title = f"Mean {metric.word} under each curve{', %' if metric.percent else ''}"
    note = "Means are over the range that all curves cover. Over MACs is what counts: it is what inference costs."
    return replace(Table.of(title, ("criterion",), heads, lines), note=note)


def _agreement(found: Comparison) -> Table | None:
    if not found.spearman:
        return None
    names = list(found.curves)
    lines = [(a, *("" if a == b else number(found.spearman[a, b], ".2f") for b in names)) for a in names]
    note = "Spearman's rank correlation of the scores of all groups of the unpruned network: 1 is the same order."
    return replace(Table.of("How far the rankings agree", ("criterion",), names, lines), note=note)
