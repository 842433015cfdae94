"""What a model costs: parameters, multiply-accumulates, time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import nn

from secateur.ops.layers import Labels, Mask
from secateur.ops.table import Site
from secateur.running.sandbox import Example
from secateur.structure.blocks import Block
from secateur.structure.findings import Axis, CostTerm, Findings
from secateur.structure.label_pass import watch_copy

Savings = np.ndarray[tuple[int], np.dtype[np.float64]]
#: Terms of a sum: a coefficient, and the groups along each axis, whose kept numbers multiply it.
Terms = Sequence[tuple[float, Sequence[Labels]]]


class Price(Protocol):
    """What a model costs in one currency, as a function of which groups are removed."""

    def __call__(self, removed: Mask) -> float:
        """The cost without these groups."""

    def savings(self, removed: Mask) -> Savings:
        """What each group costs as things stand, to first order: what leaves with it when it leaves alone."""


@dataclass(frozen=True)
class TermPrice:
    """A cost that is a sum of terms."""

    terms: Terms

    def __call__(self, removed: Mask) -> float:
        """The cost without these groups."""
        found, keep = 0.0, ~removed
        for coefficient, vectors in self.terms:
            for vector in vectors:
                coefficient *= int(np.count_nonzero(keep[vector]))
            found += coefficient
        return found

    def savings(self, removed: Mask) -> Savings:
        """What leaves with each group when it leaves alone, to first order."""
        return first_order(self.terms, ~removed)


@dataclass(frozen=True)
class Work:
    """What one call does: `coefficient` times the number of kept groups along each axis. `macs`, or numbers written."""

    site: Site
    macs: bool
    coefficient: float
    axes: tuple[Labels, ...]
    #: The blocks that it lies in, each a factor of 1 or 0.
    blocks: tuple[Labels, ...] = ()

    @property
    def term(self) -> tuple[float, tuple[Labels, ...]]:
        """For a sum of terms."""
        return self.coefficient, (*self.axes, *self.blocks)


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
        self._root, self._blocks, self._calls, self._written = root, by_site, list(found.steps), found.written
        self._macs = [self._work(term, macs=True) for term in found.macs]
        dims: dict[str, list[Axis]] = {name: [] for name in shapes}
        for axis in found.axes.axes:
            if axis.parameter in dims:
                dims[axis.parameter].append(axis)
        params = [
            (
                math.prod(shapes[name]) / math.prod(axis.size for axis in own),
                [*(root[axis.span] for axis in own), *by_name[name]],
            )
            for name, own in dims.items()
        ]
        #: The cost in each currency.
        self.prices = {
            "macs": TermPrice([item.term for item in self._macs]),
            "params": TermPrice(params),
        }

    def _work(self, term: CostTerm, macs: bool) -> Work:
        axes = tuple([self._root[axis] for axis in term.axes])
        return Work(term.site, macs, term.coefficient, axes, tuple(self._blocks.get(term.site, ())))

    @cached_property
    def work(self) -> list[Work]:
        """What the calls do, in order of execution."""
        order = {site: place for place, site in enumerate(self._calls)}
        written = [self._work(term, macs=False) for item in self._written for term in item.terms]
        return sorted([*self._macs, *written], key=lambda item: order.get(item.site, len(order)))

    def __call__(self, removed: Mask) -> Cost:
        """`removed[root]` says whether a group leaves."""
        return Cost(round(self.prices["params"](removed)), round(self.prices["macs"](removed)))


def first_order(terms: Terms, keep: Mask) -> Savings:
    """What leaves with each group of the terms when it leaves alone, to first order."""
    saved = np.zeros(len(keep))
    for coefficient, vectors in terms:
        counts = [int(np.count_nonzero(keep[vector])) for vector in vectors]
        for i, vector in enumerate(vectors):
            others = float(np.prod(counts[:i] + counts[i + 1 :]))
            np.add.at(saved, vector[keep[vector]], coefficient * others)
    return saved
