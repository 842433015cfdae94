"""One line of text that says what long work is about."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from secateur.running.processes import is_first


class Line:
    """One line of plain text on a terminal, written over and over, and wiped out in the end."""

    def __init__(self, shown: bool, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.shown = shown and is_first() and self.stream.isatty()
        self._begin = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __call__(self, text: str) -> None:
        """Show this, and for how long it has gone on."""
        if self.shown:
            print(f"\r{text}  {time.perf_counter() - self._begin:.0f} s\x1b[K", end="", file=self.stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
