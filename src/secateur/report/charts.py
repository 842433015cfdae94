"""Line charts as geometry that `chart.html` draws as SVG: themed by the page, readable by keyboard and by ear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from secateur.report.document import Table, number

_LEFT, _TOP, _BOTTOM = 40.0, 30.0, 42.0
_LETTER = 7.2  # about the width of a bold one, for the room that labels need
_LINE = 14.0  # between two labels
_LONGEST = 16  # letters in a label

# Told apart by shape as well as by colour: disc, square, triangle, diamond, cross, triangle upside down.
_SHAPES = (
    "M0,-3.2A3.2,3.2 0 1 1 0,3.2A3.2,3.2 0 1 1 0,-3.2Z",
    "M-2.8,-2.8H2.8V2.8H-2.8Z",
    "M0,-3.8L3.6,2.8H-3.6Z",
    "M0,-4L4,0L0,4L-4,0Z",
    "M-1.2,-3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",
    "M0,3.8L3.6,-2.8H-3.6Z",
)


@dataclass(frozen=True)
class Point:
    """One number, with what it says in words. `taken_back`: a step that was not kept; `chosen`: the last that was."""

    x: float
    y: float
    text: str
    taken_back: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class Series:
    """A line and its name."""

    name: str
    points: Sequence[Point]

    @property
    def short(self) -> str:
        """A label that leaves room for the chart."""
        return self.name if len(self.name) <= _LONGEST else self.name[: _LONGEST - 1] + "…"


@dataclass(frozen=True)
class Line:
    """A series in the drawing. `shape` is an SVG path around (0, 0) that marks each of its `dots`."""

    number: int
    series: Series
    dots: Sequence[Point]
    label: float | None

    @property
    def shape(self) -> str:
        return _SHAPES[self.number]

    @property
    def path(self) -> str:
        return _path([dot for dot in self.dots if not dot.taken_back])

    @property
    def dashed(self) -> str:
        """From the last step that was kept to those that were taken back."""
        kept, lost = ([dot for dot in self.dots if dot.taken_back is back] for back in (False, True))
        return _path([kept[-1], *lost]) if kept and lost else ""


@dataclass(frozen=True)
class Chart:
    """Lines over one another, with words and numbers. `falling` puts the largest x at the left; y stays in `bounds`.

    >>> line = Series("lrp", [Point(0, 90, "nothing removed: 90"), Point(50, 80, "half removed: 80")])
    >>> numbers = Table("t", [], [], [])
    >>> chart = Chart("c", "Accuracy", "", "removed", "accuracy", [line], numbers, False, (0, 100), baseline=90)
    >>> [text for _, text in chart.rows]
    ['80', '82', '84', '86', '88', '90']
    """

    id: str
    title: str
    caption: str
    across: str
    up: str
    series: Sequence[Series]
    table: Table
    falling: bool
    bounds: tuple[float, float]
    baseline: float

    # The drawing's own units. At phone width one is about a pixel, so that the letters keep their size.
    width: ClassVar[float] = 400.0
    height: ClassVar[float] = 262.0

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """The left, top, right and bottom of the lines. Several lines have labels, which need room."""
        labels = max(len(line.short) for line in self.series) * _LETTER + 12 if len(self.series) > 1 else 0
        return _LEFT, _TOP, self.width - (18.0 + labels), self.height - _BOTTOM

    @cached_property
    def _ticks(self) -> tuple[list[float], list[float]]:
        points = [point for line in self.series for point in line.points]
        xs, ys = [point.x for point in points], [self.baseline, *(point.y for point in points)]
        return ticks(min(xs), max(xs)), ticks(min(ys), max(ys), *self.bounds)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is drawn."""
        columns, rows = self._ticks
        low, high = (columns[-1], columns[0]) if self.falling else (columns[0], columns[-1])
        left, top, right, bottom = self.frame
        across, up = (x - low) / (high - low), (y - rows[0]) / (rows[-1] - rows[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    @property
    def columns(self) -> list[tuple[float, str]]:
        """The ticks below the chart: place and label."""
        return [(self.place(x, 0.0)[0], number(x)) for x in self._ticks[0]]

    @property
    def rows(self) -> list[tuple[float, str]]:
        """The ticks beside the chart: place and label."""
        return [(self.place(0.0, y)[1], number(y)) for y in self._ticks[1]]

    @property
    def lines(self) -> list[Line]:
        """The series in the drawing; labels of several are spread so that they can be read."""
        drawn = [
            [replace(point, x=x, y=y) for point in line.points for x, y in [self.place(point.x, point.y)]]
            for line in self.series
        ]
        labels: Sequence[float | None] = [None]
        if len(drawn) > 1:
            labels = spread([dots[-1].y for dots in drawn], _LINE, _TOP, self.height - _BOTTOM + 8)
        whole = zip(self.series, drawn, labels, strict=True)
        return [Line(i % len(_SHAPES), line, dots, label) for i, (line, dots, label) in enumerate(whole)]

    @property
    def summary(self) -> str:
        """What the chart shows, in a sentence for those who do not see it."""
        ends = "; ".join(
            f"{line.name} from {number(round(line.points[0].y, 2))} to {number(round(line.points[-1].y, 2))}"
            for line in self.series
        )
        return f"{self.up} over {self.across}: {ends}."


def ticks(low: float, high: float, floor: float = -math.inf, ceiling: float = math.inf) -> list[float]:
    """Four to seven round numbers around a range; `floor` and `ceiling` bound a range that must be made up.

    >>> ticks(0, 80), ticks(97.2, 98.9)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [97.0, 97.5, 98.0, 98.5, 99.0])
    """
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = max(floor, low - 1), min(ceiling, high + 1)
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.85)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(i * step) for i in range(first, last + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as can be to those wanted, in their order, at least `gap` apart, between `low` and `high`.

    >>> spread([10, 12, 50], 14, 0, 100)
    [10.0, 24.0, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    above = low - gap
    for i in order:
        above = placed[i] = max(float(wanted[i]), above + gap)
    below = high + gap
    for i in reversed(order):
        below = placed[i] = min(placed[i], below - gap)
    return placed


def _path(dots: Sequence[Point]) -> str:
    return "M" + "L".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in dots) if dots else ""
