"""What long work reports while it runs, and one line of text that shows it on a terminal.

Events are small objects. `str(event)` gives the words. Counts are not compared: two events are equal if they report the
same kind of work, however far it is.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Self, TextIO

from secateur.errors import printable
from secateur.running.processes import is_first


@dataclass(frozen=True)
class Event:
    """Parent of all events."""


# After so many seconds it is known how long the rest will take.
_SURE = 2.0
#: A function that receives events.
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Counted(Event):
    """Work on samples: how many are `done` of the `total`, and about how many seconds the others will take, if known.

    >>> print(Evaluating(done=320, total=800, left=12.4))
    measuring accuracy, 320/800, about 12 s left
    """

    done: int = field(default=0, compare=False, kw_only=True)
    total: int | None = field(default=None, compare=False, kw_only=True)
    left: float | None = field(default=None, compare=False, kw_only=True)

    def _after(self, words: str) -> str:
        counts = f", {self.done}/{self.total}" if self.done and self.total else ""
        return words + counts + ("" if self.left is None else f", about {self.left:.0f} s left")


@dataclass(frozen=True)
class Scoring(Counted):
    """Units are being scored."""

    criterion: str

    def __str__(self) -> str:
        return self._after(f"scoring units by {self.criterion}")


@dataclass(frozen=True)
class Evaluating(Counted):
    """The user's `evaluate` runs."""

    def __str__(self) -> str:
        return self._after("measuring accuracy")


@dataclass(frozen=True)
class Recording(Counted):
    """A repair runs the original model on the samples."""

    def __str__(self) -> str:
        return self._after("repair: recording the original's outputs")


@dataclass(frozen=True)
class Repairing(Event):
    """A repair works on one of several layers. `left` is about how many seconds the others will take, if known.

    >>> print(Repairing("ridge", 3, 53, 42.4))
    repair: ridge, layer 3/53, about 42 s left
    """

    method: str
    layer: int = field(compare=False)
    layers: int = field(compare=False)
    left: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        rest = "" if self.left is None else f", about {self.left:.0f} s left"
        return f"repair: {self.method}, layer {self.layer}/{self.layers}{rest}"


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """A context in which work on samples, also within the user's functions, tells a listener how far it is."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Rate:
    """About how long work will take, by how fast it went in the later half of the time: a machine may become busy."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._marks = deque([(self._begin, 0.0)])  # when how much was done; the first is the last before that half

    def left(self, done: float, total: float) -> float | None:
        """The seconds that are left after so much work was done just now; None where that is not known yet."""
        now = time.perf_counter()
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] <= (self._begin + now) / 2:
            self._marks.popleft()
        then, before = self._marks[0]
        if now - self._begin <= _SURE or done <= before:
            return None
        return (now - then) * max(total - done, 0) / (done - before)


class Pace:
    """Tells whoever listens how far some work is. Call it with the number of samples that were done just now."""

    def __init__(self, event: Counted, total: int | None) -> None:
        self._event, self._total, self._done, self._rate = event, total, 0, Rate()

    def __call__(self, count: int) -> None:
        self._done += count
        left = self._rate.left(self._done, self._total) if self._total else None
        if (listener := _listener.get()) is not None:
            listener(replace(self._event, done=self._done, total=self._total, left=left))


class Line:
    """Shows events on one line of a terminal, each over the one before, and clears it at the end."""

    def __init__(self, shown: bool, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.shown = shown and is_first() and self.stream.isatty()
        self._begin = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __call__(self, event: object) -> None:
        """Show this, and the time since the beginning."""
        if self.shown:
            text = f"{printable(str(event))}  {time.perf_counter() - self._begin:.0f} s"
            print(f"\r{text}\x1b[K", end="", file=self.stream, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
