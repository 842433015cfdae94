"""Relevance rules. A rule says how the relevance `r` of a layer's outputs is shared among its inputs `a`.

Notation: z_ij = a_i w_ij is the contribution of input i to output j; z⁺ and z⁻ are its positive and negative parts.
Most rules pull `r_j u_j` back along the positive and `r_j v_j` along the negative contributions, so that their whole
definition is the pair (u, v) in `factors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.errors import CriterionError
from secateur.relevance._kernels import one_kernel
from secateur.relevance.linear_maps import LinearMap

Bias = Literal["spread", "absorb", "ignore"]


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """a⁺ and a⁻ (≤ 0)."""
    return a.clamp(min=0), a.clamp(max=0)


class Rule:
    """Shares relevance. Subclasses define `__call__`, or only `factors`."""

    #: Whether part of the relevance may stay in the layer by definition (biases), so that this is no leak.
    absorbs = False
    #: Whether it divides by sums in which terms can cancel, so that it needs float32 at least.
    cancels = True
    #: Keeps the divisor away from 0.
    epsilon: float = 1e-6

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        """The relevance of the inputs `a`, given the relevance `r` of the outputs."""
        raise NotImplementedError

    def rescue(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor | None:
        """What `__call__` could not pass on, shared in another way; None if the rule lets it be lost."""
        return None

    def add(self, a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of two summands: here by their signed part of the sum. What a does not get, b gets."""
        part = r * a / stabilised(a + b, self.epsilon)
        return part, r - part


class Contributions(Rule):
    """A rule that is defined by the factors (u, v) of positive and negative contributions."""

    #: Whether `factors` looks at z⁻ at all.
    needs_negative = True

    def factors(self, positive: Tensor, negative: Tensor, bias: Tensor | None, r: Tensor) -> tuple[Tensor, Tensor]:
        """u_j and v_j from Σ_i z⁺_ij, Σ_i z⁻_ij, the bias and r_j. May overwrite the two sums."""
        raise NotImplementedError

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        negative = self.needs_negative
        u, v = self.factors(contributions(layer, a, 1), contributions(layer, a, -1) if negative else r, layer.bias, r)
        shared = pull(layer, a, u, 1)
        return shared.add_(pull(layer, a, v, -1)) if negative else shared

    def add(self, a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        (ap, an), (bp, bn) = split(a), split(b)
        u, v = self.factors(ap + bp, an + bn, None, r)
        part = ap.mul_(u).add_(an.mul_(v))
        return part, r - part


def contributions(layer: LinearMap, a: Tensor, sign: int) -> Tensor:
    """Σ_i z⁺_ij (sign 1) or Σ_i z⁻_ij (sign -1)."""
    if layer.monotone:
        return layer(_part(a, sign), layer.positive)
    same = layer.positive if sign > 0 else layer.negative
    if layer.nonneg:
        return layer(a, same)
    other = layer.negative if sign > 0 else layer.positive
    plus, minus = split(a)
    return layer(plus, same).add_(layer(minus, other))


def pull(layer: LinearMap, a: Tensor, s: Tensor, sign: int) -> Tensor:
    """Σ_j z⁺_ij s_j (sign 1) or Σ_j z⁻_ij s_j (sign -1)."""
    if layer.monotone:
        return _part(a, sign).mul_(layer.adjoint(s, layer.positive, a))
    same = layer.positive if sign > 0 else layer.negative
    if layer.nonneg:
        return layer.adjoint(s, same, a).mul_(a)
    other = layer.negative if sign > 0 else layer.positive
    plus, minus = split(a)
    return layer.adjoint(s, same, a).mul_(plus).add_(layer.adjoint(s, other, a).mul_(minus))


def _part(a: Tensor, sign: int) -> Tensor:
    return a.clamp(min=0) if sign > 0 else a.clamp(max=0)


@dataclass(frozen=True)
class AlphaBeta(Contributions):
    """R_i = Σ_j (α z⁺_ij / Σz⁺ + β z⁻_ij / Σz⁻) r_j with α + β = 1. The bias takes no relevance.

    (2, -1) and (2, 1) mean the same: the second is the convention with α - β = 1. Where one side of an output is
    empty the other side takes all of it, so that relevance is conserved.
    """

    alpha: float = 1.0
    beta: float = 0.0

    cancels = False

    def __post_init__(self) -> None:
        if abs(self.alpha + self.beta - 1) > 1e-6 and abs(self.alpha - self.beta - 1) > 1e-6:
            raise CriterionError(
                f"α + β (or α - β) must be 1 for relevance to be conserved, got {self.alpha}, {self.beta}.",
                fix="AlphaBeta(1, 0) or AlphaBeta(2, -1)",
            )

    @property
    def needs_negative(self) -> bool:  # type: ignore[override]
        return self.beta != 0

    def factors(self, positive: Tensor, negative: Tensor, bias: Tensor | None, r: Tensor) -> tuple[Tensor, Tensor]:
        if self.beta == 0:
            return over_positive(r, positive), negative
        no_positive, no_negative = positive == 0, negative == 0
        u, v = over(r, positive), over(r, negative)
        return torch.where(no_negative, u, self.alpha * u), torch.where(no_positive, v, (1 - self.alpha) * v)

    def rescue(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor | None:
        """The relevance of outputs without positive contributions."""
        # Such an output is positive through its bias alone. Its relevance goes to its negative contributions in
        # proportion to their size, and to all inputs evenly if there are none.
        positive = contributions(layer, a, 1)
        if self.beta != 0:
            stuck = (positive == 0) & (contributions(layer, a, -1) == 0)
            return layer.spread(torch.where(stuck, r, 0), a)
        least = floor(r)
        lost = r * (least / (positive + least))
        negative = contributions(layer, a, -1)
        silent = negative > -1e5 * least
        shared = pull(layer, a, over(lost, negative.masked_fill_(silent, 0)), -1)
        return shared + layer.spread(torch.where(silent, lost, 0), a)

    def add(self, a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        return by_positive_parts(a, b, r) if self.beta == 0 else super().add(a, b, r)


@dataclass(frozen=True)
class ZPlus(AlphaBeta):
    """R_i = Σ_j z⁺_ij / Σz⁺ r_j: another name of α1β0."""


class WithBias(Rule):
    """A rule by which the bias takes part. Its share is spread, absorbed, or it is ignored as if it were 0."""

    bias: Bias

    @property
    def absorbs(self) -> bool:  # type: ignore[override]
        return self.bias == "absorb"

    def output(self, layer: LinearMap, a: Tensor) -> Tensor:
        """The layer's output z_j, in which the bias may be ignored."""
        z = layer(a, layer.weight)
        return z if layer.bias is None or self.bias == "ignore" else z + layer.bias

    def rescue(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor | None:
        """Outputs that are exactly 0: evenly."""
        return layer.spread(torch.where(self.output(layer, a) == 0, r, 0), a)


@dataclass(frozen=True)
class Epsilon(WithBias):
    """R_i = Σ_j z_ij / (z_j + ε sign z_j) r_j, where z_j is the layer's output.

    The bias's share of z_j is spread evenly over the inputs (default: relevance is conserved), absorbed, or the bias
    is ignored as if it were 0.
    """

    epsilon: float = 1e-6
    bias: Bias = "spread"

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        s = r / stabilised(self.output(layer, a), self.epsilon)
        shared = layer.adjoint(s, layer.weight, a).mul_(a)
        return shared if layer.bias is None or self.bias != "spread" else shared + layer.spread(s * layer.bias, a)


@dataclass(frozen=True)
class Norm(Epsilon):
    """R_i = Σ_j z_ij / Σ_i z_ij r_j: shares in proportion to the signed contributions, without the bias."""

    bias: Bias = "ignore"


@dataclass(frozen=True)
class Gamma(WithBias, Contributions):
    """R_i = Σ_j (z_ij + γ z^±_ij) / (z_j + γ z^±_j) r_j, with z⁺ where the output z_j is positive and z⁻ elsewhere."""

    gamma: float = 0.25
    bias: Bias = "spread"

    def factors(self, positive: Tensor, negative: Tensor, bias: Tensor | None, r: Tensor) -> tuple[Tensor, Tensor]:
        if bias is not None and self.bias != "ignore":
            positive, negative = positive + bias.clamp(min=0), negative + bias.clamp(max=0)
        more = 1 + self.gamma
        up = positive + negative >= 0
        s = over(r, torch.where(up, more * positive + negative, positive + more * negative))
        return torch.where(up, more * s, s), torch.where(up, s, more * s)

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        u, v = self.factors(contributions(layer, a, 1), contributions(layer, a, -1), layer.bias, r)
        shared = pull(layer, a, u, 1).add_(pull(layer, a, v, -1))
        if layer.bias is None or self.bias != "spread":
            return shared
        return shared + layer.spread(layer.bias.clamp(min=0) * u + layer.bias.clamp(max=0) * v, a)


@dataclass(frozen=True)
class Box(Rule):
    """z^B, for inputs in [low, high]: contributions a_i w_ij - low_i w⁺_ij - high_i w⁻_ij, all ≥ 0.

    `low` and `high` are numbers, or tensors that broadcast against the input (pixels after normalisation). Left out,
    they are the least and greatest value of each channel of each sample.
    """

    low: float | Tensor | None = None
    high: float | Tensor | None = None

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        dims = [*range(2, a.dim())] if a.dim() > 2 else [-1]
        least = a.amin(dims, keepdim=True) if self.low is None else self.low
        most = a.amax(dims, keepdim=True) if self.high is None else self.high
        bounds = [torch.as_tensor(bound, dtype=a.dtype, device=a.device) for bound in (least, most)]
        low, high = (bound.expand_as(a).contiguous() for bound in bounds)
        z = layer(a, layer.weight) - layer(low, layer.positive) - layer(high, layer.negative)
        s = over(r, z)
        shared = a * layer.adjoint(s, layer.weight, a) - low * layer.adjoint(s, layer.positive, a)
        return shared - high * layer.adjoint(s, layer.negative, a)


class ValueFree(Rule):
    """A rule that does not look at the values of the inputs. Two summands share evenly."""

    cancels = False

    def add(self, a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        return r / 2, r / 2


@dataclass(frozen=True)
class WSquare(ValueFree):
    """R_i = Σ_j w²_ij / Σ_i w²_ij r_j, for any inputs."""

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        square = layer.weight.square()
        return layer.adjoint(over(r, layer(torch.ones_like(a), square).expand_as(r).clone()), square, a)

    def rescue(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor | None:
        """Outputs whose weights are all 0: evenly."""
        dead = layer(torch.ones_like(a), layer.weight.square()) == 0
        return layer.spread(torch.where(dead, r, 0), a)


@dataclass(frozen=True)
class Flat(ValueFree):
    """R_i = Σ_j r_j / (number of inputs of j)."""

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        return layer.spread(r, a)


@dataclass(frozen=True)
class Pass(ValueFree):
    """R_i = r_i, for layers whose output has the shape of the input."""

    def __call__(self, layer: LinearMap, a: Tensor, r: Tensor) -> Tensor:
        if a.shape != r.shape:
            raise CriterionError(
                f"relevance cannot pass unchanged from shape {tuple(r.shape)} to {tuple(a.shape)}.",
                fix="Pass() only for layers whose output has the shape of the input: On(Pass(), modules=…)",
            )
        return r


# -- formulas that work entry by entry ---------------------------------------------------------------------------------
def over(r: Tensor, z: Tensor) -> Tensor:
    """r / z, and 0 where z is 0. Overwrites z."""
    dead = z == 0
    return torch.div(r, z.masked_fill_(dead, 1), out=z).masked_fill_(dead, 0)


def stabilised(z: Tensor, epsilon: float = 1e-6) -> Tensor:
    """z + ε sign z, with sign 0 = 1."""
    return torch.where(z >= 0, z + epsilon, z - epsilon)


def floor(z: Tensor) -> float:
    """Sums below this (masked attention has exp(-100) = 4e-44) count as 0."""
    return 1e-6 if z.dtype == torch.float16 else 1e-25


@one_kernel("template <typename T> T over_positive(T r, T z) { return r / (z + T(1e-25)); }")
def over_positive(r: Tensor, z: Tensor) -> Tensor:
    """r / z for z ≥ 0. It is finite where z is 0, because all contributions are 0 there. May overwrite z."""
    return torch.div(r, z.add_(floor(z)), out=z)


@one_kernel(
    """
    template <typename T> void by_positive_parts(T a, T b, T r, T& first, T& second) {
        T part = (a > T(0) ? a : a * T(1e-12)) + T(1e-25);
        T whole = (b > T(0) ? b : b * T(1e-12)) + part;
        first = part / whole * r;
        second = r - first;
    }""",
    outputs=2,
)
def by_positive_parts(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """r shared between two summands by their positive parts.

    Negative parts count 10^-12 times, so that they decide only where neither summand is positive. The shares are then
    by size. Of two zeros the first takes all. What a does not get, b gets.
    """
    part = F.leaky_relu(a, 1e-12).add_(1e-25)
    whole = F.leaky_relu(b, 1e-12).add_(part)
    part = part.div_(whole).mul_(r)
    return part, r - part
