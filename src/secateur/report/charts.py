"""Line charts as geometry that `chart.html` draws as SVG: themed by the page, readable by keyboard and by ear."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from secateur.report.tables import Table

# The drawing's own units. At phone width one is about a pixel, so that the letters keep their size.
WIDTH, HEIGHT = 400.0, 262.0
_LEFT, _TOP, _BOTTOM = 40.0, 30.0, 42.0
_LETTER = 7.2  # about the width of a bold one, for the room that labels need
_LINE = 14.0  # between two labels
_LONGEST = 16  # letters in a label

Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """One number, with what it says in words. `taken_back` marks a step that was not kept."""

    x: float
    y: float
    text: str
    taken_back: bool = False


@dataclass(frozen=True)
class Series:
    """A line and its name."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Mark:
    """A place in the drawing and the text there."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A point in the drawing. `shape` is an SVG path around (0, 0)."""

    x: float
    y: float
    text: str
    shape: str
    taken_back: bool


@dataclass(frozen=True)
class Line:
    """A series in the drawing: its path, the dashed path to what was taken back, its dots and its label."""

    number: int
    name: str
    path: str
    dashed: str
    dots: Sequence[Dot]
    end: tuple[float, float]
    label: float | None
    label_text: str


@dataclass(frozen=True)
class Chart:
    """A drawing with its words and its numbers."""

    id: str
    title: str
    caption: str
    across: str
    up: str
    table: Table
    summary: str
    width: float
    height: float
    frame: tuple[float, float, float, float]
    columns: Sequence[Mark]
    rows: Sequence[Mark]
    baseline: float | None
    lines: Sequence[Line] = field(repr=False)


def line_chart(
    id: str,
    title: str,
    caption: str,
    across: str,
    up: str,
    series: Sequence[Series],
    table: Table,
    falling: bool = False,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    baseline: float | None = None,
) -> Chart:
    """Lay out lines over one another. `falling` puts the largest x at the left; `bounds` are those that y cannot leave.

    >>> line = Series("lrp", [Point(0, 90, "nothing removed: 90"), Point(50, 80, "half removed: 80")])
    >>> chart = line_chart("c", "Accuracy", "", "removed", "accuracy", [line], Table("t", [], [], []))
    >>> [mark.text for mark in chart.rows]
    ['80', '82', '84', '86', '88', '90']
    """
    xs = [point.x for line in series for point in line.points]
    ys = [point.y for line in series for point in line.points]
    ys += [] if baseline is None else [baseline]
    columns, rows = ticks(min(xs), max(xs)), ticks(min(ys), max(ys), *bounds)
    several = len(series) > 1
    right = 18.0 + (max(len(_short(line.name)) for line in series) * _LETTER + 12 if several else 0)
    frame = (_LEFT, _TOP, WIDTH - right, HEIGHT - _BOTTOM)
    low, high = (columns[-1], columns[0]) if falling else (columns[0], columns[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            frame[0] + (x - low) / (high - low) * (frame[2] - frame[0]),
            frame[3] - (y - rows[0]) / (rows[-1] - rows[0]) * (frame[3] - frame[1]),
        )

    ends = [place(line.points[-1].x, line.points[-1].y) for line in series]
    labels = spread([y for _, y in ends], _LINE, frame[1], frame[3] + 8) if several else [None] * len(series)
    return Chart(
        id, title, caption, across, up, table, _summary(series, across, up), WIDTH, HEIGHT, frame,
        [Mark(place(x, rows[0])[0], number(x)) for x in columns],
        [Mark(place(low, y)[1], number(y)) for y in rows],
        None if baseline is None else place(low, baseline)[1],
        [_line(i, line, place, ends[i], labels[i]) for i, line in enumerate(series)],
    )  # fmt: skip


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


def number(value: float) -> str:
    """A tick's label, without zeros at the end.

    >>> number(97.5), number(100.0), number(-0.25)
    ('97.5', '100', '−0.25')
    """
    return f"{value:.6g}".replace("-", "−")


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


# Told apart by shape as well as by colour: disc, square, triangle, diamond, cross, triangle upside down.
_SHAPES = (
    "M0,-3.2A3.2,3.2 0 1 1 0,3.2A3.2,3.2 0 1 1 0,-3.2Z",
    "M-2.8,-2.8H2.8V2.8H-2.8Z",
    "M0,-3.8L3.6,2.8H-3.6Z",
    "M0,-4L4,0L0,4L-4,0Z",
    "M-1.2,-3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",
    "M0,3.8L3.6,-2.8H-3.6Z",
)


def _line(index: int, series: Series, place: Place, end: tuple[float, float], label: float | None) -> Line:
    dots = [
        Dot(*place(point.x, point.y), point.text, _SHAPES[index % len(_SHAPES)], point.taken_back)
        for point in series.points
    ]
    kept = [dot for dot in dots if not dot.taken_back]
    lost = [dot for dot in dots if dot.taken_back]
    dashed = _path([kept[-1], *lost]) if kept and lost else ""
    return Line(index % len(_SHAPES), series.name, _path(kept), dashed, dots, end, label, _short(series.name))


def _short(name: str) -> str:
    """A label that leaves room for the chart."""
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _path(dots: Sequence[Dot]) -> str:
    return "M" + "L".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in dots) if dots else ""


def _summary(series: Sequence[Series], across: str, up: str) -> str:
    """What the chart shows, in a sentence for those who do not see it."""
    ends = "; ".join(
        f"{line.name} from {number(round(line.points[0].y, 2))} to {number(round(line.points[-1].y, 2))}"
        for line in series
    )
    return f"{up} over {across}: {ends}."
