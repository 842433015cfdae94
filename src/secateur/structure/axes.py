"""Label numbers for the axes of parameters, and which of them belong together.

Every index along every axis of every parameter has a label: one integer, never 0 (0 means "no label"). Labels that must
leave together are joined by edges; `components` finds the groups, vectorised, without a Python loop over labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from secateur.ops.layers import Labels


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter (or buffer). Virtual axes, which no parameter owns, have an empty name."""

    parameter: str
    dim: int
    size: int
    base: int

    @property
    def labels(self) -> Tensor:
        """The labels along this axis."""
        return torch.arange(self.base, self.base + self.size)


class AxisTable:
    """Hands out labels axis by axis and remembers whose they are."""

    def __init__(self) -> None:
        self.axes: list[Axis] = []
        self._by_key: dict[tuple[str, int], Axis] = {}
        self._next = 1

    def of(self, parameter: str, dim: int, size: int) -> Axis:
        """The axis of a parameter; created at first use."""
        axis = self._by_key.get((parameter, dim))
        if axis is None:
            axis = self._by_key[parameter, dim] = self._issue(parameter, dim, size)
        return axis

    def virtual(self, size: int) -> Axis:
        """Labels for channels that no parameter axis numbers one by one."""
        return self._issue("", 0, size)

    def _issue(self, parameter: str, dim: int, size: int) -> Axis:
        axis = Axis(parameter, dim, size, self._next)
        self.axes.append(axis)
        self._next += size
        return axis

    def copy(self) -> AxisTable:
        """The same axes, to add others to."""
        other = AxisTable()
        other.axes, other._by_key, other._next = list(self.axes), dict(self._by_key), self._next
        return other

    @property
    def total(self) -> int:
        """One more than the largest label."""
        return self._next


def components(total: int, left: Labels, right: Labels) -> Labels:
    """The smallest label of each label's group, given edges `left[i]` – `right[i]`.

    >>> components(5, np.array([1, 3]), np.array([2, 4])).tolist()
    [0, 1, 1, 3, 3]
    """
    root = np.arange(total, dtype=np.int64)
    while len(left):
        a, b = root[left], root[right]
        differ = a != b
        if not differ.any():
            break
        left, right, a, b = left[differ], right[differ], a[differ], b[differ]
        # Hook the larger root onto the smallest root it meets, then flatten all paths.
        np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
        while True:
            flat = root[root]
            if np.array_equal(flat, root):
                break
            root = flat
    return root
