"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from secateur.data.views import View
from secateur.errors import printable
from secateur.latency.timing import Timing
from secateur.loop.progress import StepDone
from secateur.results.comparison import Curve
from secateur.running.accuracy import PERPLEXITY, between, interval
from secateur.running.progress import Event, Listener
from secateur.structure.cost import Cost, human

# What latencies of other runtimes than PyTorch are called in JSON.
_PREFIXES = {
    "ONNX Runtime": "onnx_", "PyTorch, channels last": "channels_last_", "torch.compile": "compile_",
    "ONNX Runtime, int8": "int8_",
}  # fmt: skip
# More classes than this are not all listed.
_CLASSES = 12


def sides(before: Cost, after: Cost, timings: Sequence[Timing] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two models cost, for JSON: parameters, MACs for one sample, seconds by batch size where measured."""
    prefixes = [_PREFIXES.get(timing.runtime, "") for timing in timings]
    names = [f"{prefix}latency_{timing.batch}" for prefix, timing in zip(prefixes, timings, strict=True)]
    found = (
        {"params": before.params, "macs": before.macs, **dict(zip(names, (t.before for t in timings), strict=True))},
        {"params": after.params, "macs": after.macs, **dict(zip(names, (t.after for t in timings), strict=True))},
    )
    for prefix, timing in zip(prefixes, timings, strict=True):
        if timing.tokens:
            for side, rate in zip(found, timing.rates, strict=True):
                side[f"{prefix}tokens_per_second_{timing.batch}"] = rate
    return found


def table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]], last: Sequence[str] = ()) -> Table:
    """Columns aligned to the left, then columns of numbers aligned to the right, then others to the left."""
    made = Table()
    for name in (*left, *right, *last):
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(printable(cell) for cell in row))
    return made


def change(before: float, after: float) -> str:
    """How much larger a number became.

    >>> change(20, 22), change(20, 90)
    ('+10.0 %', '4.5 times')
    """
    if after >= 2 * before:
        return f"{after / before:.4g} times"
    return f"{100 * (after / before - 1):+.1f} %".replace("-0.0", "+0.0")


def percent(share: float, count: int = 0) -> str:
    """An accuracy, with its 95 % interval if it is known on how many samples it was measured.

    >>> percent(0.9, 20), percent(0.9, 2000), percent(0.9)
    ('90.0 % (70 to 97)', '90.0 % (88.6 to 91.2)', '90.0 %')
    """
    return f"{100 * share:.1f} %" + (f" ({between(share, count)})" if count else "")


def intervals(metrics: Sequence[Mapping[str, float]], counts: Mapping[str, int]) -> dict[str, Any] | None:
    """The 95 % intervals of the first and the last accuracies, for JSON; None if nothing was counted."""
    if not metrics or not counts:
        return None
    sides = {"before": metrics[0], "after": metrics[-1]}
    return {when: {name: interval(side[name], counts[name]) for name in counts} for when, side in sides.items()}


def headline(
    before: Cost,
    after: Cost,
    timings: Sequence[Timing] = (),
    metrics: Sequence[Mapping[str, float]] = (),
    sample: str = "image",
    counts: Mapping[str, int] = MappingProxyType({}),
    more: Iterable[Sequence[str]] = (),
) -> Table:
    """Before and after, side by side. `metrics` are the accuracies before and after, if there are any.

    `counts` says how many samples each accuracy was measured on. `more` are rows of other things.
    """
    rows: list[Sequence[str]] = []
    macs = f"MACs per {sample}"
    for title, old, new in (("parameters", before.params, after.params), (macs, before.macs, after.macs)):
        rows.append((title, human(old), human(new), f"{100 * new / old:.1f} % left" if old else "–"))
    for timing in timings:
        title = f"latency, batch {timing.batch}, {timing.where}"
        speeds: Iterable[str] = (f"{1000 * side:.1f} ms" for side in (timing.before, timing.after))
        if timing.tokens:
            title = f"tokens/s, batch {timing.batch} x {timing.tokens}, {timing.where}"
            speeds = (f"{rate:,.0f}" for rate in timing.rates)
        rows.append((title, *speeds, f"{timing.gain:.2f}x as fast"))
    if metrics:
        first, last = metrics[0], metrics[-1]
        if PERPLEXITY in first:
            was, now = first[PERPLEXITY], last[PERPLEXITY]
            rows.append((PERPLEXITY, f"{was:.2f}", f"{now:.2f}", change(was, now)))
        classes = [name for name in first if name not in ("overall", PERPLEXITY)]
        if len(classes) > _CLASSES:  # those that lost most
            classes = sorted(classes, key=lambda name: last[name] - first[name])[:_CLASSES]
        for name in ["overall", *classes]:
            title, count = f"  {name}", counts.get(name, 0)
            if name == "overall":
                title = "next-token accuracy" if PERPLEXITY in first else "accuracy"
            points = f"{100 * (last[name] - first[name]):+.1f} points"
            rows.append((title, percent(first[name], count), percent(last[name], count), points))
    return table(("",), ("before", "after", "change"), [*rows, *more])


def curves_table(curves: Mapping[str, Curve], places: Sequence[float], over: Literal["units", "macs"]) -> Table:
    """Accuracy of each criterion at shares of units removed (below it the MACs left), or within shares of the MACs."""
    what = "by share of units removed; below it the MACs left" if over == "units" else "by share of the MACs left"
    table = Table(title=f"accuracy in % {what}", title_justify="left")
    table.add_column("criterion", no_wrap=True)
    for place in places:
        table.add_column(f"{100 * place:.0f} %", justify="right")
    for name, curve in curves.items():
        cells = []
        for place in places:
            if over == "units":
                at = int(abs(curve.removed - place).argmin())
                near = abs(float(curve.removed[at]) - place) < 0.02
                cells.append(f"{100 * curve.overall[at]:.1f}\n{100 * curve.macs[at]:.0f}" if near else "–")
            else:
                within = curve.overall[curve.macs <= place]
                cells.append(f"{100 * within[0]:.1f}" if len(within) else "–")
        table.add_row(printable(name), *cells)
    return table


def prepared(view: View) -> str:
    """How images are scaled, in words: enough to do the same elsewhere."""
    how = {"crop": "short side scaled to", "squash": f"squeezed to {view.scaled} x", "pad": "long side scaled to"}
    borders = ", with borders in the colour of the mean" if view.fit == "pad" else ""
    cut = f", then the centre of {view.size} x {view.size}" if view.fit == "crop" or view.scaled != view.size else ""
    black = ", black around the image" if view.fit != "pad" and view.scaled < view.size else ""
    return f"{how[view.fit]} {view.scaled}, {view.interpolation}{borders}{cut}{black}"


def expects(view: View, batch: int | None = None) -> str:
    """What an exported model takes, in words."""
    mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in (view.mean, view.std))
    shape = f"{batch or 'N'} x {view.channels} x {view.size} x {view.size}"
    return f"input {shape} ({prepared(view)}), pixels from 0 to 1, less {mean}, divided by {std}"


class Printer:
    """Prints results (`result`, `json`) on standard output, and notes and stages on standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._begin = time.monotonic()
        # Wide if it is piped: a file has no width.
        self.out = Console(width=None if Console().is_terminal else 160, highlight=False, soft_wrap=False)
        self.err = Console(stderr=True, highlight=False)

    @property
    def seconds(self) -> float:
        """Since the command began."""
        return time.monotonic() - self._begin

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Say what is being done, while it is."""
        if self.err.is_terminal:
            with self.err.status(printable(text)):
                yield
        else:
            self.note(f"{text} …")
            yield

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self.err.print(printable(text), markup=False, soft_wrap=True)

    def progress(self) -> bool | Listener:
        """How a pruning loop shows its progress: as a bar on a terminal, else in lines."""
        return True if self.err.is_terminal else ProgressLines(self)

    def result(self, value: Any) -> None:
        """Print, unless only JSON is wanted."""
        if not self.as_json:
            # A terminal wraps text itself, so that paths and addresses can be copied.
            text = isinstance(value, str)
            self.out.print(printable(value) if text else value, markup=False, soft_wrap=text)

    def json(self, value: Mapping[str, Any]) -> None:
        """Print, if JSON is wanted."""
        if self.as_json:
            print(json.dumps(value, indent=1))


class ProgressLines:
    """Events of a run, line by line, where there is no terminal to draw a bar on.

    Finished steps and new kinds of work are printed at once. An event that differs from an earlier one only in its
    counts is printed if nothing was for some seconds.
    """

    def __init__(self, printer: Printer, seconds: float = 20) -> None:
        self._note, self._seconds = printer.note, seconds
        self._last, self._seen = 0.0, set[Event]()
        self._step: StepDone | None = None

    def __call__(self, event: Event) -> None:
        """Print the event, unless it says nothing new."""
        now = time.monotonic()
        if isinstance(event, StepDone):
            if event == self._step:  # a step too small for any group changes nothing
                return
            self._step = event
        elif event in self._seen and now - self._last < self._seconds:
            return
        else:
            self._seen.add(event)
        self._last = now
        self._note(str(event))
