"""What a model costs: parameters, multiply-accumulates, time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import nn

from secateur.ops.layers import Labels, Mask
from secateur.ops.table import Site
from secateur.running.sandbox import Example
from secateur.structure.blocks import Block
from secateur.structure.findings import Axis, Findings
from secateur.structure.label_pass import watch_copy

#: What reading and writing one number is worth, in MACs: from 100 (two cores) to 300 (large GPUs). The larger figure
#: made the faster models on two cores as well.
MACS_PER_NUMBER = 300

#: What may be spared.
Price = Literal["macs", "params", "time"]
Savings = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Cost:
    """Parameters, multiply-accumulates for the example as it is, and the median latency in seconds if measured."""

    params: int
    macs: int
    latency: float | None = None

    def __str__(self) -> str:
        time_part = "" if self.latency is None else f", {1000 * self.latency:.2f} ms"
        return f"{human(self.params)} parameters, {human(self.macs)} MACs{time_part}"


def human(number: float) -> str:
    """A number with at most four digits and a unit.

    >>> human(25557032), human(512)
    ('25.56 M', '512')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def size_of(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, example: Example) -> int:
    """The multiply-accumulates of one forward pass in evaluation mode."""
    _, _, watched, _ = watch_copy(model, example)
    return round(sum(term.total for term in watched.found.macs))


class CostModel:
    """Cost as a function of which groups are removed; evaluated many times while a plan is sought."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], root: Labels, found: Findings, blocks: Iterable[Block] = ()
    ) -> None:
        """`shapes` are those of the parameters."""
        # What lies in a block costs nothing once the block is gone: its group is one more factor, 1 or 0.
        by_site, by_name = defaultdict[Site, list[Labels]](list), defaultdict[str, list[Labels]](list)
        for block in blocks:
            for known, keys in ((by_site, block.sites), (by_name, block.parameters)):
                for key in keys:
                    known[key].append(np.array([block.group]))  # type: ignore[index]
        self._terms = [(t.coefficient, [*(root[a] for a in t.axes), *by_site[t.site]]) for t in found.macs]
        self._written = [
            (MACS_PER_NUMBER * t.coefficient, [*(root[a] for a in t.axes), *by_site[t.site]]) for t in found.written
        ]
        dims: dict[str, list[Axis]] = {name: [] for name in shapes}
        for axis in found.axes.axes:
            if axis.parameter in dims:
                dims[axis.parameter].append(axis)
        self._params = [
            (
                math.prod(shapes[name]) / math.prod(axis.size for axis in own),
                [*(root[axis.span] for axis in own), *by_name[name]],
            )
            for name, own in dims.items()
        ]

    def __call__(self, removed: Mask) -> Cost:
        """`removed[root]` says whether a group leaves."""
        keep = ~removed
        return Cost(round(_total(self._params, keep)), round(_total(self._terms, keep)))

    def savings(self, removed: Mask, what: Price = "macs") -> Savings:
        """What each group costs as things stand, to first order: what leaves with it when it leaves alone.

        "time" is in MACs, too: those that are computed, and those that could be while numbers are read and written.
        """
        keep = ~removed
        saved = np.zeros(len(keep))
        priced = {"macs": self._terms, "params": self._params, "time": [*self._terms, *self._written]}
        for coefficient, vectors in priced[what]:
            counts = [int(np.count_nonzero(keep[vector])) for vector in vectors]
            for i, vector in enumerate(vectors):
                others = float(np.prod(counts[:i] + counts[i + 1 :]))
                np.add.at(saved, vector[keep[vector]], coefficient * others)
        return saved


def _total(terms: list[tuple[float, list[Labels]]], keep: Mask) -> float:
    total = 0.0
    for coefficient, vectors in terms:
        for vector in vectors:
            coefficient *= int(np.count_nonzero(keep[vector]))
        total += coefficient
    return total
