"""Ways to compute LRP on the toy networks: where it starts, and how it treats negative inputs.

Without the third ReLU, inputs of the output layer have both signs. By its definition, α1β0 then counts every positive
product, also that of a negative input and a negative weight. The numbers in the published logs need a simpler reading:
it takes the positive weights and ignores the sign of the input. Units with negative output then get negative relevance
and are removed first. With the third ReLU both readings are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from secateur.criteria.relevance import LRP
from secateur.relevance.composites import Composite, On
from secateur.relevance.linear_maps import LinearMap
from secateur.relevance.rules import AlphaBeta, Rule, over


@dataclass(frozen=True)
class PositiveWeights(Rule):
    """R_i = Σ_j a_i w⁺_ij / Σ_i a_i w⁺_ij r_j for inputs a of both signs."""

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        """See the class."""
        return layer.adjoint(over(r, layer(a, layer.positive)), layer.positive, a).mul_(a)


_POSITIVE_OUTPUT = Composite(On(PositiveWeights(), modules="output"), On(AlphaBeta(1, 0)), name="positive-weights")


@dataclass(frozen=True)
class Variant:
    """One way to compute LRP. `signed`: positive weights with inputs of both signs, instead of positive products."""

    start: Literal["one", "logit"]
    signed: bool

    @property
    def name(self) -> str:
        """A short, unique name."""
        return f"lrp:{'positive-weights' if self.signed else 'alpha1beta0'}:{self.start}"

    @property
    def text(self) -> str:
        """The name in tables."""
        return f"{'positive weights' if self.signed else 'α1β0'}, from {'1' if self.start == 'one' else 'the logit'}"

    def criterion(self, name: str | None = None) -> LRP:
        """The criterion that computes it."""
        composite = _POSITIVE_OUTPUT if self.signed else "alpha1beta0"
        return LRP(name=name or self.name, composite=composite, start=self.start)


ALL = (Variant("one", False), Variant("logit", False), Variant("one", True), Variant("logit", True))
