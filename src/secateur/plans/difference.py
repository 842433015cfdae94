"""From one cumulative plan to the next: the plan that turns what the first left into what the second leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from secateur.errors import PlanError
from secateur.plans.plan import AttributeCut, HeadCut, NormCut, Plan
from secateur.structure.cost import Cost


def difference(new: Plan, old: Plan | None) -> Plan:
    """The plan to apply to the model that `old` left, so that it becomes the one that `new` leaves."""
    if old is None:
        return new
    if not set(old.groups) <= set(new.groups):
        raise PlanError("the later plan keeps groups that the earlier one removed; plans of a loop only grow")
    cuts: dict[str, dict[int, tuple[int, ...]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, dims in new.cuts.items():
        before = old.cuts.get(name, {})
        size = list(new.shapes[name])
        for dim, indices in before.items():
            size[dim] -= len(indices)
        made: dict[int, tuple[int, ...]] = {}
        for dim, indices in dims.items():
            left = renumbered(indices, before.get(dim, ()), new.shapes[name][dim])
            if left:
                made[dim] = left
        if made:
            cuts[name], shapes[name] = made, tuple(size)
    gone = set(old.groups)
    return replace(
        new,
        groups=tuple(group for group in new.groups if group not in gone),
        cuts=cuts,
        shapes=shapes,
        heads=_heads(new, old),
        norms=_norms(new, old),
        attributes=_attributes(new, old),
        layers={name: (old.layers[name][1], after) for name, (_, after) in new.layers.items()},
        before=Cost(old.after.params, old.after.macs),
    )


def renumbered(indices: Sequence[int], gone: Sequence[int], size: int) -> tuple[int, ...]:
    """Those of `indices` that are still there once `gone` have left, by their new numbers.

    >>> renumbered([0, 2, 3, 5], [0, 3], size=6)
    (1, 3)
    """
    there = np.ones(size, np.bool_)
    there[list(gone)] = False
    place = np.cumsum(there) - 1
    wanted = np.asarray(indices, np.int64)
    return tuple(place[wanted[there[wanted]]].tolist())


def _heads(new: Plan, old: Plan) -> tuple[HeadCut, ...]:
    before = {head.path: head for head in old.heads}
    made = []
    for head in new.heads:
        known = before.get(head.path)
        gone = known.removed if known is not None else ()
        left = renumbered(head.removed, gone, head.heads)
        if left:
            made.append(HeadCut(head.path, head.heads - len(gone), left))
    return tuple(made)


def _norms(new: Plan, old: Plan) -> tuple[NormCut, ...]:
    before: Mapping[tuple[str, str, int], NormCut] = {(n.path, n.function, n.visit): n for n in old.norms}
    made = []
    for norm in new.norms:
        known = before.get((norm.path, norm.function, norm.visit))
        gone = known.removed if known is not None else ()
        left = renumbered(norm.removed, gone, int(np.prod(norm.shape)))
        if left:
            there = np.ones(int(np.prod(norm.shape)), np.bool_)
            there[list(gone)] = False
            grid = there.reshape(norm.shape)
            # What is left of a rectangle of slices is a rectangle: its sides are what any line still has.
            shape = tuple(
                int(grid.any(axis=tuple(d for d in range(grid.ndim) if d != axis)).sum()) for axis in range(grid.ndim)
            )
            made.append(NormCut(norm.path, norm.function, norm.visit, shape, left))
    return tuple(made)


def _attributes(new: Plan, old: Plan) -> tuple[AttributeCut, ...]:
    before = {(item.path, item.name): item.after for item in old.attributes}
    made = []
    for item in new.attributes:
        had = before.get((item.path, item.name), item.before)
        if had != item.after:
            made.append(AttributeCut(item.path, item.name, had, item.after))
    return tuple(made)
