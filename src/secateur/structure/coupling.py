"""Which channels leave together: from edges, grids and frozen labels to groups of labels.

Labels that must leave together are joined by edges; `components` finds the groups, without a Python loop over labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from secateur.ops.layers import Labels, Mask
from secateur.structure.findings import Findings, Grid


class Coupling:
    """The group of every label (its smallest member), and why frozen groups are frozen.

    `why` is indexed by group: the number of the reason in `reasons`, or -1 for a group that is not frozen.
    """

    def __init__(self, total: int, passes: Sequence[Findings]) -> None:
        self._left, self._right = (np.concatenate(side) for side in zip(*(p.edges for p in passes), strict=True))
        self._total = total
        self.root = components(total, self._left, self._right)
        self._frozen = [item for p in passes for item in p.frozen]
        self._settle([grid for p in passes for grid in p.grids])
        self.reasons: list[str] = []
        self.why = np.full(total, -1, np.int64)
        for labels, reason in self._frozen:
            roots = self.root[labels]
            self.why[roots[self.why[roots] < 0]] = self.reason(reason)

    def reason(self, text: str) -> int:
        """The number of a reason; the same words always have the same one."""
        if text not in self.reasons:
            self.reasons.append(text)
        return self.reasons.index(text)

    def _join(self, left: Labels, right: Labels) -> None:
        self._left = np.concatenate([self._left, left.ravel()])
        self._right = np.concatenate([self._right, right.ravel()])

    def _settle(self, grids: list[Grid]) -> None:
        """Decide for each grid which axis its units are slices of; tie what cannot otherwise stay a rectangle."""
        frozen: set[int] = set()
        stays = np.zeros(self._total, np.bool_)
        while True:
            for labels, _ in self._frozen:
                stays[labels] = True
            before, undecided = len(self._left), []
            idle: list[tuple[Labels, str]] = []
            for i, grid in enumerate(grids):
                view, pinned = self.root[grid.labels], dict(grid.pinned)
                live = _live_axes(view, stays[grid.labels])
                if not live:
                    undecided.append(grid)
                    continue
                axis = next((a for a in live if a not in grid.rigid and a not in pinned), None)
                if axis is None and (axis := next((a for a in live if a not in grid.rigid), None)) is not None:
                    kept = _slices(grid.labels, axis)[pinned[axis]]
                    self._frozen.append((kept[kept != 0], grid.reason))
                if axis is None:
                    if i not in frozen:
                        frozen.add(i)
                        self._frozen.append((grid.labels[grid.labels != 0], grid.reason))
                    continue
                line = _slices(view, axis)[:, 0]
                for where, labels in grid.joins:
                    if where != axis:
                        idle.append((labels[labels != 0], grid.reason))
                    elif not np.array_equal(self.root[labels], line):
                        self._join(line, labels)
            if len(self._left) == before:
                if not undecided:
                    self._frozen += idle  # they meet an axis that keeps its size
                    return
                self._tie(undecided[0])
            self.root = components(self._total, self._left, self._right)

    def _tie(self, grid: Grid) -> None:
        """Units of an undecided grid become slices of its last axis that may shrink, so that its factors stay put."""
        free = [a for a in range(grid.labels.ndim) if a not in grid.rigid]
        axis = free[-1] if free else grid.labels.ndim - 1
        rows = _slices(self.root[grid.labels], axis)
        self._join(np.repeat(rows[:, :1], rows.shape[1], 1), rows)


def _live_axes(view: Labels, stays: Mask) -> list[int]:
    """The axes whose index alone decides the group. Slices that stay as a whole are no matter."""
    found = []
    for axis in range(view.ndim):
        rows, whole = _slices(view, axis), _slices(stays, axis).all(1)
        if bool(((rows == rows[:, :1]).all(1) | whole).all()):
            found.append(axis)
    return found


def _slices(view: Any, axis: int) -> Any:
    """One row for each index along an axis."""
    return np.moveaxis(view, axis, 0).reshape(view.shape[axis], -1)


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
