"""Tables ready to be laid out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cell:
    """A number, with small print below it. `state` is a class of the style sheet; `hint` shows on hovering."""

    text: str
    small: str = ""
    state: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """`heads` name the columns behind the `keys` that name a line."""

    title: str
    keys: Sequence[str]
    heads: Sequence[str]
    lines: Sequence[tuple[Sequence[str], Sequence[Cell]]]
    note: str = ""

    def top(self, count: int) -> Table:
        """Its first lines."""
        return replace(self, lines=self.lines[:count])

    @classmethod
    def of(cls, title: str, keys: Sequence[str], heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
        """A table of plain text: each row has its keys first."""
        count = len(keys)
        return cls(title, keys, heads, [(row[:count], [Cell(text) for text in row[count:]]) for row in rows])
