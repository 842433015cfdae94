"""What the loop recorded, as charts: the metric over units and over MACs, of one run or of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from secateur.errors import SecateurError
from secateur.report.charts import Chart, Point, Series, line_chart
from secateur.report.tables import Table
from secateur.results.comparison import Comparison, curve
from secateur.results.history import History, Record, Row

_REMOVED, _LEFT = "units removed, %", "MACs left, %"
T = TypeVar("T")
Two = tuple[T, T]


@dataclass(frozen=True)
class Metric:
    """How the overall metric is written: as an accuracy in percent if all of it lies between 0 and 1."""

    percent: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> Metric:
        """The metric of these numbers."""
        return cls(all(0 <= value <= 1 for value in values))

    @property
    def name(self) -> str:
        """Above an axis or a column."""
        return "accuracy, %" if self.percent else "overall metric"

    @property
    def word(self) -> str:
        """In a sentence."""
        return "accuracy" if self.percent else "overall metric"

    @property
    def bounds(self) -> tuple[float, float]:
        """What no axis needs to go beyond."""
        return (0.0, 100.0) if self.percent else (-math.inf, math.inf)

    def drawn(self, value: float) -> float:
        """On the axis."""
        return 100 * value if self.percent else value

    def bare(self, value: float) -> str:
        """In a table."""
        return f"{100 * value:.2f}" if self.percent else f"{value:.5g}".replace("-", "−")

    def text(self, value: float) -> str:
        """With its unit.

        >>> Metric(True).text(0.9871)
        '98.7 %'
        """
        return f"{100 * value:.1f} %" if self.percent else self.bare(value)

    def change(self, before: float, after: float) -> str:
        """A difference with its sign."""
        gap = after - before
        text = f"{100 * gap:+.1f} points" if self.percent else f"{gap:+.4g}"
        return text.replace("-", "−").replace("+0.0 ", "±0.0 ").replace("−0.0 ", "±0.0 ")


def percent(share: float) -> str:
    """A share in a table."""
    return f"{100 * share:.2f}"


def run_charts(history: History, metric: Metric) -> list[Chart]:
    """One run: over the share of units removed, and over the share of MACs left. A single step makes no curve."""
    rows = [row for row in history if row.overall is not None]
    if len(rows) < 3:
        return []
    whole = max(rows[0].macs, 1)
    first = rows[0].overall
    assert first is not None
    back = " A step that lost too much was taken back: the hollow point." if not all(r.held for r in rows) else ""
    caption = f"Each point is a step; the dashed line is the unpruned network.{back}"

    def series(over_macs: bool) -> Series:
        return Series(metric.word, [_point(row, metric, whole, over_macs) for row in rows])

    def table(head: str, value: Mapping[int, str]) -> Table:
        lines = [
            (str(row.step), value[row.step], metric.bare(row.overall or 0.0), "" if row.held else "taken back")
            for row in rows
        ]
        return Table.of(f"{metric.name} over {head}", ("step",), (head, metric.name, ""), lines)

    tables = (
        table(_REMOVED, {row.step: percent(row.removed) for row in rows}),
        table(_LEFT, {row.step: percent(row.macs / whole) for row in rows}),
    )
    return _charts("", caption, metric, first, ([series(False)], [series(True)]), tables)


def _charts(
    prefix: str, caption: str, metric: Metric, first: float, lines: Two[list[Series]], tables: Two[Table]
) -> list[Chart]:
    """The metric over units removed, and over MACs left."""
    word, common = metric.word.capitalize(), (metric.bounds, metric.drawn(first))
    return [
        line_chart(f"{prefix}units", f"{word} over units removed", caption, _REMOVED, metric.name, lines[0], tables[0],
                   False, *common),
        line_chart(f"{prefix}macs", f"{word} over MACs left", caption, _LEFT, metric.name, lines[1], tables[1],
                   True, *common),
    ]  # fmt: skip


def _point(row: Row, metric: Metric, whole: int, over_macs: bool) -> Point:
    value = row.overall or 0.0
    x = 100 * row.macs / whole if over_macs else 100 * row.removed
    where = f"{x:.1f} % of MACs left" if over_macs else f"{x:.1f} % of units removed"
    back = ", taken back" if not row.held else ""
    return Point(x, metric.drawn(value), f"{where}: {metric.text(value)}{back}", not row.held)


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
    first = next(iter(found.curves.values())).overall[0]
    table = Table.of("All points", ("criterion",), (_REMOVED, _LEFT, metric.name), lines)
    caption = "Labels stand at the ends of the lines; the dashed line is the unpruned network."
    charts = _charts("compare-", caption, metric, float(first), (over_units, over_macs), (table, table))
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
        (name, metric.bare(areas[name][0]), metric.bare(areas[name][1]), metric.bare(found.curves[name].overall[-1]))
        for name in sorted(areas, key=lambda name: -areas[name][1])
    ]
    heads = ("mean over units", "mean over MACs", "at the end")
    made = Table.of(
        f"Mean {metric.word} under each curve{', %' if metric.percent else ''}", ("criterion",), heads, lines
    )
    note = "Means are over the range that all curves cover. Over MACs is what counts: it is what inference costs."
    return replace(made, note=note)


def _agreement(found: Comparison) -> Table | None:
    if not found.spearman:
        return None
    names = list(found.curves)
    lines = [
        (a, *("" if a == b else f"{found.spearman[a, b]:.2f}".replace("-", "−") for b in names)) for a in names
    ]  # fmt: skip
    made = Table.of("How far the rankings agree", ("criterion",), names, lines)
    note = "Spearman's rank correlation of the scores of all groups of the unpruned network: 1 is the same order."
    return replace(made, note=note)
