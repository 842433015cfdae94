"""What long work reports while it runs, and one line of text that shows it on a terminal.

Events are small objects. `str(event)` gives the words. Counts are not compared: two events are equal if they report the
same kind of work, however far it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, TextIO

from secateur.errors import printable
from secateur.running.processes import is_first


@dataclass(frozen=True)
class Event:
    """Parent of all events."""


#: A function that receives events.
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Scoring(Event):
    """Units are being scored."""

    criterion: str

    def __str__(self) -> str:
        return f"scoring units by {self.criterion}"


@dataclass(frozen=True)
class Evaluating(Event):
    """The user's `evaluate` runs."""

    def __str__(self) -> str:
        return "measuring accuracy"


@dataclass(frozen=True)
class Recording(Event):
    """A repair runs the original model on the samples."""

    def __str__(self) -> str:
        return "repair: recording the original's outputs"


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
