"""Ways to compute LRP on the toy networks: from where it starts, and what it does where inputs are negative.

Without the third ReLU the output layer reads numbers of both signs. α1β0 by its definition then counts every positive
product, a negative input with a negative weight too. The published logs are met only by a simpler reading that takes
the positive weights whatever the sign of the input; there units of negative output get negative relevance, and leave
first. With the third ReLU both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from secateur.criteria.relevance import LRP
from secateur.relevance.composites import Composite, On
from secateur.relevance.maps import LinearMap
from secateur.relevance.pointwise import over
from secateur.relevance.rules import AlphaBeta, Rule


@dataclass(frozen=True)
class PositiveWeights(Rule):
    """R_i = Σ_j a_i w⁺_ij / Σ_i a_i w⁺_ij r_j for inputs a of either sign."""

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        """See the class."""
        return layer.adjoint(over(r, layer(a, layer.positive)), layer.positive, a).mul_(a)


_POSITIVE_OUTPUT = Composite(On(PositiveWeights(), modules="output"), On(AlphaBeta(1, 0)), name="positive-weights")


@dataclass(frozen=True)
class Variant:
    """One way to compute LRP. `signed`: positive weights with inputs of either sign, instead of positive products."""

    start: Literal["one", "logit"]
    signed: bool

    @property
    def name(self) -> str:
        """A short name that no other variant has."""
        return f"lrp:{'positive-weights' if self.signed else 'alpha1beta0'}:{self.start}"

    @property
    def text(self) -> str:
        """For readers."""
        return f"{'positive weights' if self.signed else 'α1β0'}, from {'1' if self.start == 'one' else 'the logit'}"

    def criterion(self, name: str | None = None) -> LRP:
        """The criterion that computes it."""
        composite = _POSITIVE_OUTPUT if self.signed else "alpha1beta0"
        return LRP(name=name or self.name, composite=composite, start=self.start)


ALL = (Variant("one", False), Variant("logit", False), Variant("one", True), Variant("logit", True))
