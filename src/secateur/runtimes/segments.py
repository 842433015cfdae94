"""Segments of a forward pass: calls that are timed together, and what their time depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from secateur.ops.layers import Labels, Mask
from secateur.structure.cost import Work
from secateur.structure.graph import Graph

#: Kernels compute so many channels at once: 8 or 16, by the processor. A layer takes as long as one with the next
#: multiple. What fits the sample models best is taken.
STEPS = (8, 16)
Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Segment:
    """A module with weights, and what follows until the next such module.

    Its time is a sum over `parts`: each is the groups along one or more axes, whose kept shares are multiplied. The
    empty part is the time that stays. Segments of the same `kind` take the same time at the same widths.
    """

    path: str
    kind: str
    parts: tuple[tuple[Labels, ...], ...]

    def shares(self, removed: Mask, step: int) -> Numbers:
        """How much of each part is left."""
        return np.array([math.prod(share(axis, removed, step) for axis in axes) for axes in self.parts])


def share(axis: Labels, removed: Mask, step: int) -> float:
    """How much of an axis is left, in steps."""
    kept = int(np.count_nonzero(~removed[axis]))
    return _stepped(kept, step) / _stepped(len(axis), step)


def _stepped(count: int, step: int) -> int:
    return count if count < STEPS[0] else -(-count // step) * step


def segments_of(graph: Graph) -> list[Segment]:
    """The segments of a model, in order of execution."""
    work = graph.cost_of.work
    paths = {item.site.path for item in work if item.macs}
    anchors = {path for path in paths if not any(other.startswith(f"{path}.") or not path for other in paths - {path})}
    owned: dict[str, list[Work]] = {}
    current = next((item.site.path for item in work if item.site.path in anchors), "")
    for item in work:
        if item.site.path in anchors:
            current = item.site.path
        owned.setdefault(current, []).append(item)
    return [_segment(path, items, graph) for path, items in owned.items()]


def _segment(path: str, items: Sequence[Work], graph: Graph) -> Segment:
    parts: dict[tuple[bytes, ...], tuple[Labels, ...]] = {}
    totals = [0.0, 0.0]
    for item in sorted(items, key=lambda item: not item.macs):  # the module itself first
        totals[item.macs] += item.coefficient * math.prod(map(len, item.axes))
        free = [axis for axis in item.axes if graph.prunable[axis].any()]
        # What lies in a block takes no time at all once the block is gone.
        for axes in (free, *([axis] for axis in free), *([] if parts else [[]])):
            parts.setdefault(tuple(sorted(axis.tobytes() for axis in axes)), (*axes, *item.blocks))
    parts.setdefault((), ())
    sizes = [[len(axis) for axis in axes] for axes in parts.values()]
    kind = f"{'+'.join(sorted({item.site.function for item in items}))}: {totals[1]:.0f} MACs, {totals[0]:.0f} written"
    return Segment(path, f"{kind}, {sizes}", tuple(parts.values()))
