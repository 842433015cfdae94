"""The corrections: a constant per output (mean), a scale and a constant (norm), all weights (ridge).

Everything is found from moments: sums over rows of what a layer reads (x) and of what its output lacks (e), so that
memory does not grow with the data. With groups, each group is a regression of its own. A layer that reads more features
than there are rows keeps the rows instead: they are smaller than their moments. A row may count more than another.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

Method = Literal["mean", "norm", "ridge"]

#: Strengths of the ridge that are tried, relative to the mean variance of what the layer reads.
STRENGTHS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Where nothing is held out to choose with, only ridges from this strength on are tried.
_CAUTIOUS = 1.0
# Products of at most this many multiplications are made in double precision on the CPU too.
_CHEAP = 2**27


class Moments:
    """Sums over rows in double precision, of what is missing, e, and what is given, y: (groups, outputs).

    `rows` is the sum of their weights, which are 1 unless given.
    """

    def __init__(self, groups: int, outputs: int, device: torch.device) -> None:
        self.rows = 0.0
        self._device = device
        self.e, self.y, self.ee, self.yy, self.ey = (self._zeros(groups, outputs) for _ in range(5))

    def add(self, e: Tensor, y: Tensor, x: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Rows e and y, (n, groups, outputs), for a ridge x, (n, groups, features), and what each row counts, (n)."""
        e, y = e.double(), y.double()
        if weights is None:
            self.rows += len(e)
            own_e, own_y = e, y
        else:
            weights = weights.double()
            self.rows += float(weights.sum())
            own_e, own_y = (t * weights[:, None, None] for t in (e, y))
        self.e += own_e.sum(0)
        self.y += own_y.sum(0)
        self.ee += (own_e * e).sum(0)
        self.yy += (own_y * y).sum(0)
        self.ey += (own_e * y).sum(0)

    @property
    def size(self) -> Tensor:
        """Mean square of the original's output, y + e."""
        return (self.yy + 2 * self.ey + self.ee) / self.rows

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


class Regression(Moments):
    """What a ridge needs besides: sums of x (groups, features), of its products with itself and with e."""

    def __init__(self, groups: int, outputs: int, features: int, device: torch.device) -> None:
        super().__init__(groups, outputs, device)
        self.x = self._zeros(groups, features)
        self._xx, self._xe = self._zeros(groups, features, features), self._zeros(groups, features, outputs)

    def add(self, e: Tensor, y: Tensor, x: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add rows."""
        super().add(e, y, weights=weights)
        assert x is not None
        # Double precision is slow on the CPU, so that only sums are double there where products are many.
        cheap = x.numel() * x.shape[-1] <= _CHEAP
        wide = torch.float64 if x.is_cuda or cheap or x.dtype == torch.float64 else torch.float32
        left, right = x.to(wide).transpose(0, 1), e.to(wide).transpose(0, 1)  # (groups, n, ·)
        own = left if weights is None else left * weights.to(wide)[:, None]
        self.x += own.sum(1).double()
        self._xx += own.mT @ left
        self._xe += own.mT @ right

    def renewed(self) -> Self:
        """The same rows, of which some will be moved. Only what a ridge needs is kept up to date."""
        twin = copy(self)
        twin.e, twin._xe = self.e.clone(), self._xe.clone()
        return twin

    def move(self, d: Tensor, x: Tensor, weights: Tensor | None = None) -> None:
        """Rows lack d more than they did. Every row is moved once, in the order in which rows were added."""
        own = d if weights is None else d * weights.to(d.dtype)[:, None, None]
        self.e += own.double().sum(0)
        wide = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
        self._xe += x.to(wide).transpose(0, 1).mT @ own.to(wide).transpose(0, 1)

    def solve(self, strength: float, shifts: bool) -> Tensor | None:
        """The change D (groups, features, outputs) of the weights, or None if there is no solution.

        D has the least |e - xD|² / n + strength · v · |D|², where v is the mean variance of the features. With
        `shifts`, x and e are taken about their means.
        """
        n = self.rows
        xx, xe = self._xx / n, self._xe / n
        if shifts:
            mean = self.x / n
            xx -= mean[:, :, None] * mean[:, None, :]
            xe -= mean[:, :, None] * (self.e / n)[:, None, :]
        ridge = _ridge(xx.diagonal(dim1=1, dim2=2), strength)
        xx.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        factor, failed = torch.linalg.cholesky_ex(xx)
        return None if bool((failed > 0).any()) else torch.cholesky_solve(xe, factor)

    def gain(self, weight: Tensor) -> Tensor:
        """Sum over rows of e² - (e - xD)², per output."""
        return 2 * (weight * self._xe).sum(1) - (weight * (self._xx @ weight)).sum(1)


class FewRows(Regression):
    """The same from the rows themselves, for more features than rows: the equations have one unknown per row."""

    def __init__(self, groups: int, outputs: int, features: int, device: torch.device) -> None:
        Moments.__init__(self, groups, outputs, device)
        self.x = self._zeros(groups, features)
        # Rows times the root of their weight, and these roots.
        self._lefts: list[Tensor] = []
        self._rights: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._moves: list[Tensor] = []

    def add(self, e: Tensor, y: Tensor, x: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add rows."""
        Moments.add(self, e, y, weights=weights)
        assert x is not None
        # Contiguous copies: a view would keep, and change with, a layer's input.
        left = x.transpose(0, 1).to(torch.float64, memory_format=torch.contiguous_format, copy=True)
        right, root = e.transpose(0, 1).double(), left.new_ones(len(x), 1)
        if weights is not None:
            root = weights.double().sqrt()[:, None]
            left, right = left * root, right * root
        self._lefts.append(left)
        self._rights.append(right)
        self._roots.append(root)
        self.x += (root.mT @ left)[:, 0]

    def renewed(self) -> Self:
        """The same rows, of which some will be moved."""
        twin = copy(self)
        twin.e, twin._moves = self.e.clone(), []
        return twin

    def move(self, d: Tensor, x: Tensor, weights: Tensor | None = None) -> None:
        """Rows lack d more."""
        own = d.double() if weights is None else d * weights.double()[:, None, None]
        self.e += own.sum(0)
        root = 1.0 if weights is None else weights.double().sqrt()[:, None, None]
        self._moves.append((d.double() * root).transpose(0, 1))

    def solve(self, strength: float, shifts: bool) -> Tensor | None:
        """The change D of the weights, as Xᵀ(XXᵀ / n + ridge)⁻¹e / n."""
        n = self.rows
        x, e, root = self._all()
        if shifts:
            x, e = x - root * (self.x / n)[:, None], e - root * (self.e / n)[:, None]
        ridge = _ridge(x.square().sum(1) / n, strength)
        inner = x @ x.mT / n
        inner.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        factor, failed = torch.linalg.cholesky_ex(inner)
        return None if bool((failed > 0).any()) else x.mT @ torch.cholesky_solve(e, factor) / n

    def gain(self, weight: Tensor) -> Tensor:
        """Sum over rows of e² - (e - xD)², per output."""
        x, e, _ = self._all()
        made = x @ weight
        return (made * (2 * e - made)).sum(1)

    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        if len(self._lefts) > 1:
            self._lefts, self._rights = [torch.cat(self._lefts, 1)], [torch.cat(self._rights, 1)]
            self._roots = [torch.cat(self._roots)]
        e = self._rights[0] + torch.cat(self._moves, 1) if self._moves else self._rights[0]
        return self._lefts[0], e, self._roots[0]


def _ridge(variances: Tensor, strength: float) -> Tensor:
    # Rounding leaves the sums of squares uncertain by about 1e-7 of their size, so the ridge is never below that.
    return (strength * variances.mean(1)).clamp_min(1e-7 * variances.amax(1)).clamp_min(1e-30)


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


def by_ridge(fit: Regression, strength: float, shifts: bool) -> Correction:
    """New weights, by a ridge on their change, and the constant that goes with them. See `Regression.solve`."""
    weight = fit.solve(strength, shifts)
    if weight is None:
        return nothing()
    shift = (fit.e - (fit.x[:, None, :] @ weight)[:, 0]) / fit.rows if shifts else None
    return Correction(f"ridge {strength:g}", shift=shift, weight=weight)


def error(correction: Correction, held: Moments) -> Tensor:
    """Mean square that the output still lacks on other rows, per output (groups, outputs)."""
    square, mean = held.ee, held.e
    if correction.scale is not None:  # e' = e + y - scale · y - shift
        less = 1 - correction.scale
        square = square + 2 * less * held.ey + less.square() * held.yy
        mean = mean + less * held.y
    if correction.weight is not None:
        assert isinstance(held, Regression)
        square = square - held.gain(correction.weight)
        mean = mean - (held.x[:, None, :] @ correction.weight)[:, 0]
    if correction.shift is not None:
        square = square - 2 * correction.shift * mean + held.rows * correction.shift.square()
    return (square / held.rows).clamp_min(0)


def simple(method: Method, fit: Moments, shifts: bool) -> Iterator[Correction]:
    """Corrections that leave the weights' directions alone, the mildest first."""
    yield nothing()
    if shifts:
        yield by_mean(fit)
    if method == "norm" or (method == "ridge" and not isinstance(fit, Regression)):
        yield by_norm(fit, shifts)


def best_of(
    method: Method, fit: Moments, held: Moments, shifts: bool, weight: Tensor | float = 1.0, near: str = ""
) -> tuple[Correction, float, float]:
    """The correction that leaves the least error on the held-out rows; that error, and the one without correction.

    Outputs count by `weight`. Ridges are tried from the one called `near` on, for as long as it gets better in one
    direction or the other. Where no rows are held out, only strong ridges are tried.
    """
    seen = held if held.rows else fit

    def cost(option: Correction) -> float:
        return float((weight * error(option, seen)).sum())

    tried = [(cost(option), option) for option in simple(method, fit, shifts)]
    first = tried[0][0]
    if method == "ridge" and isinstance(fit, Regression):
        grid = [s for s in STRENGTHS if held.rows or s >= _CAUTIOUS]
        names = [f"ridge {s:g}" for s in grid]
        begin = names.index(near) if near in names else min(2, len(grid) - 1)

        def at(place: int) -> float:
            option = by_ridge(fit, grid[place], shifts)
            tried.append((cost(option), option))
            return tried[-1][0]

        middle = at(begin)
        for way in (1, -1):
            last, place = middle, begin + way
            while 0 <= place < len(grid) and (now := at(place)) < last:
                last, place = now, place + way
            if last < middle:
                break  # better on this side, so not on the other
    least, best = min(tried, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"))
    return best, least, first


def remake(name: str, fit: Moments, shifts: bool) -> Correction:
    """The correction of that name from other rows."""
    if name == "mean":
        return by_mean(fit)
    if name == "norm":
        return by_norm(fit, shifts)
    if isinstance(fit, Regression) and name.startswith("ridge "):
        return by_ridge(fit, float(name.removeprefix("ridge ")), shifts)
    return nothing()
