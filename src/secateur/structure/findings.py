"""Labels, and what a label pass finds out about them: which leave together, frozen ones, grids, costs, producers.

Every index along every axis of every parameter has a label: one integer, never 0 (0 means "no label").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.ops.layers import Labels, Layers, Mask, column, narrow, varying
from secateur.ops.table import Site
from secateur.structure.trace import Step


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter (or buffer). Virtual axes, which no parameter owns, have an empty name."""

    parameter: str
    dim: int
    size: int
    base: int

    @property
    def span(self) -> slice:
        """Where the labels of this axis are in an array that is indexed by label."""
        return slice(self.base, self.base + self.size)

    @cached_property
    def numbers(self) -> Labels:
        """The labels along this axis."""
        return np.arange(self.base, self.base + self.size)

    @cached_property
    def labels(self) -> Tensor:
        """The labels along this axis, as layers have them."""
        return torch.from_numpy(self.numbers)


class AxisTable:
    """Hands out labels axis by axis and remembers whose they are."""

    def __init__(self, axes: Iterable[Axis] = ()) -> None:
        self.axes = list(axes)
        self._by_key = {(axis.parameter, axis.dim): axis for axis in self.axes}

    def of(self, parameter: str, dim: int, size: int) -> Axis:
        """The axis of a parameter; created at first use."""
        return self._by_key.get((parameter, dim)) or self.add(size, parameter, dim)

    def add(self, size: int, parameter: str = "", dim: int = 0) -> Axis:
        """A new axis; without a parameter, for channels that no parameter axis numbers one by one."""
        axis = self._by_key[parameter, dim] = Axis(parameter, dim, size, self.total)
        self.axes.append(axis)
        return axis

    @property
    def total(self) -> int:
        """One more than the largest label."""
        return self.axes[-1].base + self.axes[-1].size if self.axes else 1

    @property
    def owners(self) -> Labels:
        """The axis (position in `axes`) of each label; 0 for label 0."""
        return np.concatenate([[0], np.repeat(np.arange(len(self.axes)), [axis.size for axis in self.axes])])


@dataclass(frozen=True)
class Grid:
    """Labels that vary over several axes: a unit must fill whole slices of one of them, or the tensor is no rectangle.

    `rigid` axes cannot shrink. `joins` are labels along one axis that leave with its slices, should that axis shrink.
    `pinned` says which slices of an axis stay even then.
    """

    labels: Labels
    rigid: frozenset[int]
    joins: tuple[tuple[int, Labels], ...]
    reason: str
    pinned: tuple[tuple[int, Mask], ...] = ()


@dataclass(eq=False, slots=True)
class CostTerm:
    """What one call computes or writes: `coefficient` times the number of kept labels along each axis."""

    site: Site
    coefficient: float
    axes: list[Labels]

    @property
    def total(self) -> float:
        """The cost if everything is kept."""
        return self.coefficient * math.prod(map(len, self.axes))


@dataclass(eq=False, slots=True)
class Written:
    """A tensor that a call writes, and its layers."""

    site: Site
    shape: tuple[int, ...]
    layers: Layers

    @property
    def terms(self) -> list[CostTerm]:
        """How many numbers it has, by whose they are."""
        axes = {over[0]: column(layer) for layer in self.layers if len(over := varying(layer)) == 1}
        if not axes:
            return []
        share = math.prod(self.shape) / math.prod(self.shape[dim] for dim in axes)
        return [CostTerm(self.site, share, [np.abs(line) for line in axes.values()])]


@dataclass(frozen=True)
class NormSite:
    """A norm that mixes channels: which labels it mixes, laid out over the dimensions that it normalises."""

    site: Site
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Requirement:
    """Of these labels at least `least` stay, and a multiple of `multiple`: what a choice or a fast product needs."""

    labels: Labels
    least: int = 1
    multiple: int = 1


@dataclass(frozen=True)
class Producer:
    """Where units are made: the labels number the output channels. Reused weights are called at several sites.

    A column of `rows` has all labels that hold weights of one unit, as those of its gates.
    """

    sites: tuple[Site, ...]
    kind: str
    labels: Labels
    rows: Labels


def _held(layer: Tensor) -> Labels:
    """All labels of a layer. One without repetitions, as of a detector that finds no box, has those that it would
    repeat; one that was cut down to no unit at all has none."""
    sizes = [n if stride else 1 for n, stride in zip(layer.shape, layer.stride(), strict=True)]
    return layer.as_strided(sizes, layer.stride()).reshape(-1).numpy()


class Findings:
    """Collects what operations say about labels. `where` names the module that is running, for reasons.

    Negative labels, as layers have them, mean the same units as positive ones here.
    """

    def __init__(self, axes: AxisTable, where: Callable[[], str]) -> None:
        self.axes, self.where = axes, where
        self._pairs: list[tuple[Labels, Labels]] = []
        self.frozen: list[tuple[Labels, str]] = []
        self.grids: list[Grid] = []
        self.macs: list[CostTerm] = []
        self.written: list[Written] = []
        self.norms: list[NormSite] = []
        self.heads: list[tuple[Site, Labels]] = []
        self.requirements: list[Requirement] = []
        #: What routers choose among (see `structure.choices`).
        self.choices: list[Any] = []
        self.producers: dict[bytes, Producer] = {}
        #: The channels of norms without parameters, by the module and the attribute that counts them.
        self.counted: dict[tuple[str, str], Labels] = {}
        #: What every call did.
        self.steps: dict[Site, Step] = {}
        #: Names of parameters and buffers that took part, and paths of modules that ran.
        self.seen: set[str] = set()
        self.ran: set[str] = {""}
        #: Names of parameters that the forward writes to.
        self.overwritten: set[str] = set()

    def join(self, a: Labels, b: Labels) -> None:
        """These labels, pair by pair, leave together. A label paired with 0 cannot leave."""
        a, b = a.ravel(), b.ravel()
        # The rest can wait until `edges` does it for all at once.
        if len(a) <= 4096 and np.count_nonzero(a) == len(a) == np.count_nonzero(b):
            self._pairs.append((a, b))
            return
        pairs = np.abs(np.stack([a, b], 1))
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        if not len(pairs):
            return
        if len(pairs) > 4096:
            # Pairs as single numbers sort many times faster than rows.
            keys = np.sort(pairs[:, 0] * self.axes.total + pairs[:, 1])
            pairs = np.stack(np.divmod(keys[np.flatnonzero(np.diff(keys, prepend=-1))], self.axes.total), 1)
        blank = (pairs == 0).any(1)
        if blank.any():
            self.freeze(pairs[blank].max(1), f"meets channels that cannot be removed in {self.where()}")
            pairs = pairs[~blank]
        self._pairs.append((pairs[:, 0], pairs[:, 1]))

    @property
    def edges(self) -> tuple[Labels, Labels]:
        """What was joined: the labels of each pair."""
        empty = np.zeros(0, np.int64)
        left, right = (np.abs(np.concatenate([empty, *(pair[i] for pair in self._pairs)])) for i in (0, 1))
        differ = left != right
        return left[differ], right[differ]

    def tie_rows(self, labels: Labels) -> None:
        """In a 2-d array, the labels of each row leave together."""
        if labels.shape[1] > 1:
            self.join(np.repeat(labels[:, :1], labels.shape[1] - 1, 1), labels[:, 1:])

    def freeze(self, labels: Labels | Tensor | None, reason: str) -> None:
        """These labels can never leave."""
        if labels is None:
            return
        if isinstance(labels, Tensor):
            labels = _held(labels)
        if not labels.size:
            return
        ids = np.unique(np.abs(labels))
        ids = ids[ids != 0]
        if len(ids):
            self.frozen.append((ids, reason))

    def cost(self, site: Site, total: float, *axes: Labels | None) -> None:
        """`total` multiply-accumulates now, proportional to what is kept along each of `axes`."""
        known = [np.abs(axis) for axis in axes if axis is not None]
        for axis in known:
            total /= len(axis)
        self.macs.append(CostTerm(site, total, known))

    def produce(self, labels: Labels, site: Site, kind: str, rows: Labels | None = None) -> None:
        """These labels number units that are made here: filters, neurons. A unit of several `rows` has a column."""
        labels = np.abs(labels)
        key = labels.tobytes()  # a weight may be made of some of the units of another layer
        before = self.producers[key].sites if key in self.producers else ()
        self.producers[key] = Producer((*before, site), kind, labels, labels[None] if rows is None else rows)

    def attend(self, labels: Labels, site: Site) -> None:
        """An attention product with one label per head, or one per sample and head."""
        labels = np.abs(labels)
        self.heads.append((site, labels[np.sort(np.unique(labels, return_index=True)[1])]))

    def require(self, labels: Labels | None, least: int = 1, multiple: int = 1) -> None:
        """So many of these labels must stay."""
        if labels is not None:
            self.requirements.append(Requirement(np.abs(labels), least, multiple))

    def grid(
        self, layer: Tensor, reason: str, rigid: Sequence[int] = (), joins: Sequence[tuple[int, Labels]] = (),
        pinned: Sequence[tuple[int, Mask]] = (),
    ) -> None:  # fmt: skip
        """A layer over several axes, with what is known about them, by the dims of the tensor."""
        dims = varying(layer)
        if not dims:
            return
        if not layer.numel():
            self.freeze(layer, f"{reason}, and the example makes none of it")
            return
        labels = np.abs(narrow(layer).reshape([layer.shape[d] for d in dims]).numpy())
        where = {d: i for i, d in enumerate(dims)}
        fixed = frozenset(where[d] for d in rigid if d in where)
        joined = tuple((where[d], np.abs(j)) for d, j in joins if d in where)
        kept = tuple((where[d], mask) for d, mask in pinned if d in where)
        self.grids.append(Grid(labels, fixed, joined, reason, kept))
