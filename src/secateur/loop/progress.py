"""A line that shows how the loop gets on; nothing at all where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from secateur.results.history import Row
from secateur.running.processes import is_first
from secateur.structure.cost import human


class Progress:
    """Shows step, units, MACs and accuracy on a terminal: with rich if installed, else on one line of plain text.

    If `shown` is a function, it is told the same, terminal or not.
    """

    def __init__(self, shown: bool | Callable[[str], None], steps: int | None, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self._listener = shown if callable(shown) and is_first() else None
        self.shown = shown is True and is_first() and self.stream.isatty()
        self.steps = steps
        self._bar: object | None = None
        self._task: object | None = None
        self._begin = time.perf_counter()

    def __enter__(self) -> Self:
        if self.shown:
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            columns = [TextColumn("pruning"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
            bar = Bar(*columns, console=Console(file=self.stream), transient=True)
            bar.start()
            self._bar, self._task = bar, bar.add_task("", total=self.steps)
        return self

    def __call__(self, row: Row) -> None:
        """Show one finished step."""
        if self._listener is not None:
            self._listener(describe(row))
        if not self.shown:
            return
        text = describe(row)
        if self._bar is not None:
            self._bar.update(self._task, completed=row.step, description=text)  # type: ignore[attr-defined]
        else:
            of = f"/{self.steps}" if self.steps else ""
            taken = time.perf_counter() - self._begin
            print(f"\r{row.step}{of}  {text}  {taken:.0f} s\x1b[K", end="", file=self.stream)

    def note(self, text: str) -> None:
        """Show what a long step is about."""
        if self._listener is not None:
            self._listener(text)
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, description=text)  # type: ignore[attr-defined]
        else:
            print(f"\r{text}  {time.perf_counter() - self._begin:.0f} s\x1b[K", end="", file=self.stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
        elif self.shown:
            print(file=self.stream)


def describe(row: Row) -> str:
    """A step in a few words.

    >>> describe(Row(3, 850, 0.15, 1000, 2_000_000, {"overall": 0.913}))
    '850 units left (15 % gone), 2.00 M MACs, 91.3 %'
    """
    text = f"{row.units} units left ({100 * row.removed:.0f} % gone), {human(row.macs)} MACs"
    return text if row.overall is None else f"{text}, {100 * row.overall:.1f} %"
