"""The corrections: a constant per output (mean), a scale and a constant (norm), all weights (ridge).

Everything is found from moments: sums over rows of what a layer reads (x) and of what its output lacks (e), so that
memory does not grow with the data. With groups, each group is a regression of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["mean", "norm", "ridge"]

#: Strengths of the ridge that are tried, relative to the mean variance of what the layer reads.
STRENGTHS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3)


@dataclass
class Moments:
    """Sums over rows, in double precision: x (groups, features), e and y (groups, outputs)."""

    rows: float
    x: Tensor
    e: Tensor
    y: Tensor
    xx: Tensor | None
    xe: Tensor | None
    ee: Tensor
    yy: Tensor
    ey: Tensor

    @classmethod
    def empty(cls, groups: int, features: int, outputs: int, device: torch.device, full: bool) -> Moments:
        """No rows yet. Without `full`, the products that only a ridge needs are left out."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        xx, xe = (zeros(groups, features, features), zeros(groups, features, outputs)) if full else (None, None)
        x = zeros(groups, features)
        e, y, ee, yy, ey = (zeros(groups, outputs) for _ in range(5))
        return cls(0.0, x, e, y, xx, xe, ee, yy, ey)

    def add(self, x: Tensor | None, e: Tensor, y: Tensor) -> None:
        """Rows x (n, groups, features); what is missing, e, and what is given, y, (n, groups, outputs)."""
        self.rows += len(e)
        e64, y64 = e.double(), y.double()
        self.e += e64.sum(0)
        self.y += y64.sum(0)
        self.ee += e64.square().sum(0)
        self.yy += y64.square().sum(0)
        self.ey += (e64 * y64).sum(0)
        if x is None or self.xx is None or self.xe is None:
            return
        # Products in the data's own precision on the CPU, where double is slow; their sums always in double.
        wide = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
        left, right = x.to(wide).transpose(0, 1), e.to(wide).transpose(0, 1)  # (groups, n, ·)
        self.x += left.sum(1).double()
        self.xx += left.mT @ left
        self.xe += left.mT @ right

    def __add__(self, other: Moments) -> Moments:
        def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            return None if a is None or b is None else a + b

        return Moments(
            self.rows + other.rows, self.x + other.x, self.e + other.e, self.y + other.y, plus(self.xx, other.xx),
            plus(self.xe, other.xe), self.ee + other.ee, self.yy + other.yy, self.ey + other.ey,
        )  # fmt: skip


@dataclass(frozen=True)
class Correction:
    """What to do to a layer: multiply its outputs by `scale`, add `weight` (groups, features, outputs), add `shift`.

    `name` says which kind it is, for choosing and for the report.
    """

    name: str
    shift: Tensor | None = None
    scale: Tensor | None = None
    weight: Tensor | None = None


def nothing() -> Correction:
    """Leave the layer as it is."""
    return Correction("none")


def by_mean(fit: Moments) -> Correction:
    """The constant that makes the means right."""
    return Correction("mean", shift=fit.e / fit.rows)


def by_norm(fit: Moments, shifts: bool) -> Correction:
    """Scale and constant that make mean and variance those of the original's output t = y + e."""
    n = fit.rows
    mean_y, mean_t = fit.y / n, (fit.y + fit.e) / n
    var_y = (fit.yy / n - mean_y.square()).clamp_min(0)
    var_t = ((fit.yy + 2 * fit.ey + fit.ee) / n - mean_t.square()).clamp_min(0)
    # A channel that hardly varies on the data gives no evidence for a scale.
    sure = (var_y > 1e-8 * var_y.mean().clamp_min(1e-30)) & (var_t > 0)
    scale = torch.where(sure, (var_t / var_y.clamp_min(1e-30)).sqrt(), 1.0).clamp(0.25, 4.0)
    return Correction("norm", shift=mean_t - scale * mean_y if shifts else None, scale=scale)


def by_ridge(fit: Moments, strength: float, shifts: bool) -> Correction:
    """The change D of the weights and the constant c with least |e - xD - c|² / n + strength · mean variance · |D|²."""
    assert fit.xx is not None
    assert fit.xe is not None
    n = fit.rows
    xx, xe = fit.xx / n, fit.xe / n
    mean_x, mean_e = fit.x / n, fit.e / n
    if shifts:
        xx = xx - mean_x[:, :, None] * mean_x[:, None, :]
        xe = xe - mean_x[:, :, None] * mean_e[:, None, :]
    diagonal = xx.diagonal(dim1=1, dim2=2)
    # Rounding leaves the sums of squares uncertain by about 1e-7 of their size, so the ridge is never below that.
    ridge = (strength * diagonal.mean(1)).clamp_min(1e-7 * diagonal.amax(1)).clamp_min(1e-30)
    system = xx + torch.diag_embed(ridge[:, None].expand_as(diagonal))
    factor, failed = torch.linalg.cholesky_ex(system)
    if bool((failed > 0).any()):
        return nothing()
    weight = torch.cholesky_solve(xe, factor)
    shift = mean_e - (mean_x[:, None, :] @ weight)[:, 0] if shifts else None
    return Correction(f"ridge {strength:g}", shift=shift, weight=weight)


def error(correction: Correction, held: Moments) -> Tensor:
    """Mean square that the output still lacks on other rows, per output (groups, outputs)."""
    n = held.rows
    if correction.scale is not None:  # e' = e + y - scale · y - shift
        less = 1 - correction.scale
        square = held.ee + 2 * less * held.ey + less.square() * held.yy
        mean = held.e + less * held.y
    else:
        square, mean = held.ee, held.e
        if correction.weight is not None:
            assert held.xx is not None
            assert held.xe is not None
            d = correction.weight
            square = square - 2 * (d * held.xe).sum(1) + (d * (held.xx @ d)).sum(1)
            mean = mean - (held.x[:, None, :] @ d)[:, 0]
    if correction.shift is not None:
        square = square - 2 * correction.shift * mean + n * correction.shift.square()
    return (square / n).clamp_min(0)


def candidates(method: Method, fit: Moments, shifts: bool) -> Iterator[Correction]:
    """Corrections to choose from, the mildest first."""
    yield nothing()
    if shifts:
        yield by_mean(fit)
    if method == "norm" or (method == "ridge" and fit.xx is None):
        yield by_norm(fit, shifts)
    elif method == "ridge":
        for strength in STRENGTHS:
            yield by_ridge(fit, strength, shifts)


def remake(name: str, fit: Moments, shifts: bool) -> Correction:
    """The correction of that name from other rows."""
    if name == "none":
        return nothing()
    if name == "mean":
        return by_mean(fit)
    if name == "norm":
        return by_norm(fit, shifts)
    return by_ridge(fit, float(name.removeprefix("ridge ")), shifts)
