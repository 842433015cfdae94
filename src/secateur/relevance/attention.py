"""Products of two activations: matrix products, and attention as one operation.

Attention is O = A V with A = softmax(L + C), where L = s Q Kᵀ carries relevance and C (masks, position biases) is
constant. Linearised at L, A ≈ J L + A₀: the logits' part J L, and the part A₀ that would be there without them.
The values get all of what A₀ V makes, and share with the logits what (J L) V makes; the logits' half is shared by
queries and keys. This is AttnLRP (arXiv 2402.05602), except that there A₀ keeps its relevance, which then is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.relevance.maps import LinearMap
from secateur.relevance.rules import AlphaBeta, Rule, over, split


@dataclass(frozen=True)
class Attention:
    """How attention passes relevance: all to the values (the weights are a gate), or to queries and keys as well.

    `constant` says where the relevance of A₀ goes: to the "values", or the softmax may "absorb" it as in the paper.
    """

    queries: bool = False
    constant: Literal["values", "absorb"] = "values"
    epsilon: float = 1e-6

    @property
    def absorbs(self) -> bool:
        """Whether relevance is lost by definition."""
        return self.queries and self.constant == "absorb"


class MatmulMap(LinearMap):
    """`weight @ a` (left) or `a @ weight`, the weight being another activation or a constant."""

    def __init__(self, weight: Tensor, left: bool, nonneg_weight: bool = False) -> None:
        super().__init__(weight)
        self.left = left
        self.monotone = nonneg_weight
        if nonneg_weight:
            self.parts = {"positive": weight, "negative": weight.new_zeros(weight.shape)}

    def __call__(self, a: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(weight, a) if self.left else torch.matmul(a, weight)

    def adjoint(self, s: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        back = weight.transpose(-1, -2)
        return (torch.matmul(back, s) if self.left else torch.matmul(s, back)).sum_to_size(a.shape)

    def spread(self, r: Tensor, a: Tensor) -> Tensor:
        dim = -2 if self.left else -1
        shape = list(r.shape)
        shape[dim] = a.shape[dim]
        return (r.sum(dim, keepdim=True) / a.shape[dim]).expand(shape).sum_to_size(a.shape)


def product(rule: Rule, a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of both factors of `a @ b`: each contribution a_ij b_jk is shared half and half."""
    r = r / 2
    if isinstance(rule, AlphaBeta):
        (ap, an), (bp, bn) = split(a), split(b)
        total = (ap @ bp) + (an @ bn)
        if bool((total == 0).any()):  # no positive contribution at all: by size
            stuck = total == 0
            size = a.abs() @ b.abs()
            rest = over(torch.where(stuck, r, 0), size)
            s = over(r, total)
            return (
                ap * (s @ _t(bp)) + an * (s @ _t(bn)) + a.abs() * (rest @ _t(b.abs())),
                bp * (_t(ap) @ s) + bn * (_t(an) @ s) + b.abs() * (_t(a.abs()) @ rest),
            )
        s = over(r, total)
        return ap * (s @ _t(bp)) + an * (s @ _t(bn)), bp * (_t(ap) @ s) + bn * (_t(an) @ s)
    s = r / stabilised(a @ b)
    return a * (s @ _t(b)), b * (_t(a) @ s)


def attend(
    rule: Attention, logits: Tensor, weights: Tensor, values: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """From the relevance of O = weights @ values: that of the logits, divided by the logits, and that of the values."""
    g = r / stabilised(weights @ values, rule.epsilon)
    m = g @ _t(values)
    pulled = weights * (m - (weights * m).sum(-1, keepdim=True)) / 2  # ½ Jᵀ m
    keep = weights.clone() if rule.constant == "values" else weights / 2
    if rule.constant == "values":
        moved = weights * (logits - (weights * logits).sum(-1, keepdim=True))  # J L
        keep -= moved / 2
    return pulled, values * (_t(keep) @ g)


def stabilised(z: Tensor, epsilon: float = 1e-6) -> Tensor:
    """z + ε sign z, with sign 0 = 1."""
    return z + torch.where(z >= 0, epsilon, -epsilon)


def _t(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)
