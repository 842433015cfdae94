"""The progress of a pruning loop: a bar on a terminal, or events for a function of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TextIO

from secateur.errors import printable
from secateur.results.history import Row
from secateur.running.processes import is_first
from secateur.running.progress import Event, Line, Listener
from secateur.structure.cost import human


@dataclass(frozen=True)
class StepDone(Event):
    """A step is complete. `row` is its line of the history.

    >>> print(StepDone(Row(3, 850, 0.15, 1000, 2_000_000, {"overall": 0.913})))
    850 units left (15 % gone), 2.00 M MACs, 91.3 %
    """

    row: Row

    def __str__(self) -> str:
        text = f"{self.row.units} units left ({100 * self.row.removed:.0f} % gone), {human(self.row.macs)} MACs"
        return text if self.row.overall is None else f"{text}, {100 * self.row.overall:.1f} %"


class Progress:
    """Shows events on a terminal: with rich if it is installed, else on one line of plain text.

    If `shown` is a function, it receives the events instead, terminal or not.
    """

    def __init__(self, shown: bool | Listener, steps: int | None, stream: TextIO | None = None) -> None:
        self._listener = shown if callable(shown) and is_first() else None
        self._line = Line(shown is True, stream)
        self._steps = steps
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._line.shown:
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            words = TextColumn("{task.description}", markup=False)
            columns = [TextColumn("pruning"), BarColumn(), words, TimeElapsedColumn()]
            self._bar = Bar(*columns, console=Console(file=self._line.stream), transient=True)
            self._bar.start()
            self._bar.add_task("", total=self._steps)
        return self

    def __call__(self, event: Event) -> None:
        """Show or hand on one event."""
        if self._listener is not None:
            self._listener(event)
        step = event.row.step if isinstance(event, StepDone) else None
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=printable(str(event)))
        elif step is not None:
            self._line(f"{step}{f'/{self._steps}' if self._steps else ''}  {event}")
        else:
            self._line(event)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line.__exit__()
