"""What a relevance pass knows and writes down: the state that verbs, layers and steps share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from secateur.ops.table import Site
from secateur.relevance.composites import Composite, Place
from secateur.relevance.conservation import Journal, Sum
from secateur.relevance.facts import Facts
from secateur.relevance.rules import Rule
from secateur.relevance.steps import total
from secateur.relevance.weights import LayerSite, SumSite, Weights
from secateur.running.observer import Observer
from secateur.running.tensor_facts import TensorFacts

Absolute = Literal[False, "sample", "element"]


class Deviation(Exception):
    """The forward pass does not make the calls that it made before."""


class Books(Observer):
    """State of one pass, and its books."""

    composite: Composite
    absolute: Absolute
    heat_map: bool
    attentive: set[str]
    gating: bool
    gated: bool
    facts: Facts
    places: dict[Site, tuple[str, int, int]]
    deviates: Callable[[], None]
    _weights: Weights
    _layers: dict[Site, LayerSite]
    _sums: dict[Site, SumSite]
    _fusing: bool
    _fused: int
    _journal: Journal
    _summed: TensorFacts[tuple[int, int, Tensor]]
    _heights: dict[str, tuple[int, torch.device]]
    _rules: dict[tuple[Place, int], Rule]
    _gates: list[tuple[GradientEdge, Tensor]]
    _entries: list[Tensor]
    _embedded: dict[int, str]
    _sinks: list[tuple[str, Tensor]]
    _leaves: set[int]
    _fresh: weakref.ref[Tensor] | None
    _writable: weakref.ref[Tensor] | None
    _count: int
    _doubtful: str

    def place(self, kind: str, path: str, index: int | None = None, first: bool = False) -> Place:
        """Where a rule is asked for. Depth counts the weight layers of this forward pass."""
        return Place(kind, path, float(self._count if index is None else index), first)

    def rule(self, place: Place) -> Rule:
        """The composite's rule; only now is the number of layers known."""
        key = (place, self._count)
        if key not in self._rules:
            depth = place.depth / max(self._count - 1, 1)
            self._rules[key] = self.composite.rule(Place(place.kind, place.path, min(depth, 1.0), place.first))
        return self._rules[key]

    def flow(self, name: object, kind: str, arrived: Sum, passed: Sum, absorbs: bool = False) -> None:
        """Book what arrived at an operation and what it passed on. What scores gates is in addition, and not booked."""
        if not self.gating:
            self._journal.flow(name, kind, arrived, passed, absorbs)

    def sums(self, r: Tensor, channel: int | None) -> Tensor:
        """Sums of relevance that is about to be passed on: by channel where the receiver will ask for these."""
        if channel is None or self.absolute:
            return total(r)
        summed = self._by_channel(r, channel)
        self._summed[r] = (channel % r.dim(), r._version, summed)
        return summed

    def unit_sums(self, site: LayerSite, r: Tensor, besides: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Book one number per unit of a layer, and return them; also sums that add up to what arrived.

        `besides`: only for units that have nothing there.
        """
        known = None if self.absolute else self._summed.get(r)
        if known is not None and known[:2] == (site.channel % r.dim(), r._version):
            summed = known[2]
        else:
            summed = self._by_channel(r, site.channel)
        if besides is not None:
            summed = torch.where(besides == 0, summed, 0)
        self._journal.units(site.name, site.rows, summed)
        return summed, total(r) if self.absolute else summed

    def gate(self, edge: GradientEdge, r: Tensor) -> None:
        """A gate takes no relevance; what makes it is scored, in a further round, by what it lets pass."""
        self._gates.append((edge, r))

    def _by_channel(self, r: Tensor, channel: int) -> Tensor:
        """One number per unit."""
        channel %= r.dim()
        if self.absolute == "element":
            r = r.abs()
        wide = torch.float32 if r.dtype in (torch.float16, torch.bfloat16) else r.dtype
        others = [d for d in range(r.dim()) if d != channel]
        if self.absolute == "sample" and others and others[0] == 0:
            r = r.sum(others[1:], dtype=wide).abs() if others[1:] else r.abs()
            others = [0]
        return r.sum(others, dtype=wide) if others else r
