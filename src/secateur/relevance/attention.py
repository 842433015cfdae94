"""Products of two activations: matrix products, and attention as one operation.

Attention is O = A V with A = softmax(L + C), where L = s Q Kᵀ carries relevance and C (masks, position biases) is
constant. Linearised at L, A ≈ J L + A₀: the logits' part J L, and the part A₀ that would be there without them.
The values get the relevance of A₀ V. That of (J L) V goes half to the values and half to the logits, which pass it to
queries and keys. This is AttnLRP (arXiv 2402.05602), except that in the paper A₀ keeps its relevance, which is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.relevance.linear_maps import Bilinear
from secateur.relevance.rules import AlphaBeta, Rule, floor, over, split, stabilised


@dataclass(frozen=True)
class Attention:
    """How attention passes relevance: all to the values (the weights are a gate), or to queries and keys as well.

    `constant` says where the relevance of A₀ goes: to the "values", or the softmax may "absorb" it as in the paper.
    """

    queries: bool = False
    constant: Literal["values", "absorb"] = "values"
    epsilon: float = 1e-9

    @property
    def absorbs(self) -> bool:
        """Whether relevance is lost by definition."""
        return self.queries and self.constant == "absorb"


def product(rule: Rule, function: Bilinear, a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of both factors of a bilinear function (a @ b, einsum): each contribution is shared half and half."""
    r = r / 2
    if not isinstance(rule, AlphaBeta):
        return _factors(function, a, b, r / stabilised(function(a, b)))
    (ap, an), (bp, bn) = split(a), split(b)
    total = function(ap, bp) + function(an, bn)
    stuck = total <= floor(total)  # masked attention has weights of exp(-100), by which nothing can be divided
    s = over(r, total.masked_fill_(stuck, 0))
    (up, down), (vp, vn) = _factors(function, ap, bp, s), _factors(function, an, bn, s)
    shares = up + vp, down + vn
    if bool(stuck.any()):  # no positive contribution at all: by size
        size = function(a.abs(), b.abs())
        size.masked_fill_(size <= floor(size), 0)
        left, right = _factors(function, a.abs(), b.abs(), over(torch.where(stuck, r, 0), size))
        return shares[0] + left, shares[1] + right
    return shares


def _factors(function: Bilinear, a: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of s over all contributions in which an entry of a, or of b, takes part."""
    for_a, for_b = _pulled(function, a, b, s)
    return a * for_a, b * for_b


def _pulled(function: Bilinear, a: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """What comes back to a and to b, if s flows back from their product."""
    with torch.enable_grad():
        left, right = a.detach().requires_grad_(True), b.detach().requires_grad_(True)
        for_a, for_b = torch.autograd.grad(function(left, right), (left, right), s)
    return for_a, for_b


def attend(
    rule: Attention, logits: Tensor, weights: Tensor, values: Tensor, r: Tensor, function: Bilinear = torch.matmul,
    dim: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """From the relevance of O = weights @ values: that of the logits, divided by the logits, and that of the values.

    Another `function` may multiply the two, as an einsum does. The softmax was over `dim`.
    """
    g = r / stabilised(function(weights, values), rule.epsilon)
    keep = weights - _jacobian(weights, logits, dim) / 2 if rule.constant == "values" else weights / 2
    plain = function is torch.matmul and values.dim() > 1
    pulled = (g @ values.mT, keep.mT @ g) if plain else _pulled(function, keep, values, g)
    return _jacobian(weights, pulled[0], dim) / 2, values * pulled[1]


def _jacobian(weights: Tensor, x: Tensor, dim: int) -> Tensor:
    """J x, where J = Jᵀ is the Jacobian of the softmax that gave the weights."""
    return weights * (x - (weights * x).sum(dim, keepdim=True))


def gate_scores(rule: Rule, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of queries and keys as gates: what the attention weights let pass."""
    logits, _ = product(rule, torch.matmul, weights, v, r)
    for_q, for_k = product(rule, lambda a, b: a @ b.mT, q, k, 2 * logits)
    return 2 * for_q, 2 * for_k


def regroup(r: Tensor, groups: int) -> Tensor:
    """Relevance of heads that repeat one head `groups` times, summed for that head."""
    if groups == 1:
        return r
    return r.reshape(*r.shape[:-3], r.shape[-3] // groups, groups, *r.shape[-2:]).sum(-3)
