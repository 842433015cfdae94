"""Formulas that rules apply entry by entry."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.relevance._kernels import one_kernel


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


@one_kernel("template <typename T> T rectified(T z, T b) { T s = z + b; return s < T(0) ? T(0) : s; }")
def rectified(z: Tensor, bias: Tensor) -> Tensor:
    """max(z + bias, 0)."""
    return torch.add(z, bias).relu_()
