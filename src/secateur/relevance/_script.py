"""An accelerator: the calls of the forward pass in order, so that the next batch need not find out where each one is.

Finding the place of a call means to follow which module runs. As long as a batch calls the same functions in the same
order as the batch before, the places are known.
"""

from __future__ import annotations

from secateur.ops.table import Function, Site


class Script:
    """The calls of the last batch that was watched in full."""

    def __init__(self) -> None:
        self._calls: list[tuple[Function, Site]] = []
        self._next = 0

    def begin(self, expected: bool) -> None:
        """A batch begins. If it is not expected to make the same calls, they are noted anew."""
        self._next = 0
        if not expected:
            self._calls.clear()

    def note(self, function: Function, site: Site) -> Site:
        self._calls.append((function, site))
        return site

    def follow(self, function: Function) -> Site | None:
        """The place of the next call, or None if another function was called last time."""
        index, self._next = self._next, self._next + 1
        # Equal, not the same: torch makes the getter of a property such as `Tensor.T` anew each time.
        if index >= len(self._calls) or self._calls[index][0] != function:
            return None
        return self._calls[index][1]
