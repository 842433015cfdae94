"""Sums over rows, from which every correction is computed. Their memory does not grow with the data.

A row is one position of one sample: x is what the layer reads there, y what it returns, and e what its output lacks
compared with the original. Each group of a grouped convolution is a regression of its own. Rows may have weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Self

import torch
from torch import Tensor

# Products of at most this many multiplications use double precision on the CPU too.
_CHEAP = 2**27
# Products of a matrix with itself are symmetric: from this many features on, half of them is computed.
_WIDE = 512


class Moments:
    """Double-precision sums over rows of e, y and their products: (groups, outputs). `rows` is the sum of weights."""

    def __init__(self, groups: int, outputs: int, device: torch.device) -> None:
        self.rows = 0.0
        zeros = torch.zeros(groups, outputs, dtype=torch.float64, device=device)
        self.e, self.y, self.ee, self.yy, self.ey = (zeros.clone() for _ in range(5))

    def add(self, e: Tensor, y: Tensor, x: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add n rows: e and y (n, groups, outputs), x (n, groups, features) if needed, and their weights (n)."""
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
        if x is not None:
            self._add_inputs(e, x, weights)

    def _add_inputs(self, e: Tensor, x: Tensor, weights: Tensor | None) -> None:
        """Sums that need what the layer reads: none here."""

    def join(self, other: Moments) -> None:
        """Add the rows of another one, which is of the same kind or keeps them."""
        self.rows += other.rows
        for name in ("e", "y", "ee", "yy", "ey"):  # not in place: a copy may share them
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def size(self) -> Tensor:
        """Mean square of the original's output, y + e."""
        return (self.yy + 2 * self.ey + self.ee) / self.rows


class Regression(Moments):
    """Also the sums that a change of weights needs: of x (groups, features), and of its products with x and e.

    Double precision is slow on the CPU, so that `single` sums of products are single precision there.
    """

    def __init__(self, groups: int, outputs: int, features: int, device: torch.device, single: bool = False) -> None:
        super().__init__(groups, outputs, device)
        self.x = self.e.new_zeros(groups, features)
        self._wide = torch.float32 if single and device.type == "cpu" else torch.float64
        self._factor: tuple[tuple[float, bool], Tensor | None] | None = None
        self._prepare(groups, outputs, features)

    def _prepare(self, groups: int, outputs: int, features: int) -> None:
        self._xx = self.x.new_zeros(groups, features, features, dtype=self._wide)
        self._xe = self.x.new_zeros(groups, features, outputs, dtype=self._wide)

    def _add_inputs(self, e: Tensor, x: Tensor, weights: Tensor | None) -> None:
        left, right = x.to(self._wide).transpose(0, 1), e.to(self._wide).transpose(0, 1)  # (groups, n, ·)
        own = left if weights is None else left * weights.to(self._wide)[:, None]
        self.x += own.sum(1).double()
        self._gather(own, left, right)

    def _gather(self, own: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the products. Only the upper triangle of the symmetric one is kept up to date."""
        self._factor = None
        _add_product(self._xx, own.mT, left)
        self._xe.baddbmm_(own.mT, right)

    def join(self, other: Moments) -> None:
        super().join(other)
        assert isinstance(other, Regression)
        self.x, self._xe = self.x + other.x, self._xe.clone()
        if not isinstance(other, FewRows):
            self._factor = None
            self._xx += other._xx.to(self._wide)
            self._xe += other._xe.to(self._wide)
            return
        for x, e, _ in other.parts:
            self._gather(x.to(self._wide), x.to(self._wide), e.to(self._wide))

    def move(self, d: Tensor, x: Tensor, weights: Tensor | None = None, later: bool = False) -> None:
        """Add d to e. Every row is moved once, in the order in which rows were added; `later` ones have joined.

        Only what `solve` needs is updated, and not in place: a copy of the sums is moved alone.
        """
        own = d if weights is None else d * weights.to(d.dtype)[:, None, None]
        self.e = self.e + own.double().sum(0)
        wide = torch.promote_types(self._wide, x.dtype)
        self._xe = self._xe + x.to(wide).transpose(0, 1).mT @ own.to(wide).transpose(0, 1)

    def solve(self, strength: float, shifts: bool) -> Tensor | None:
        """The change D (groups, features, outputs) of the weights, or None if there is no solution.

        D minimises |e - xD|² / n + strength · v · |D|², where v is the mean variance of the features. With `shifts`,
        x and e are centred.
        """
        n, mean = self.rows, self.x / self.rows
        if self._factor is None or self._factor[0] != (strength, shifts):
            self._factor = None  # two at a time would be much
            xx = _whole(self._xx).div_(n)
            if shifts:
                xx.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)
            self._factor = (strength, shifts), _factored(xx, xx.diagonal(dim1=1, dim2=2).clone(), strength)
        factor = self._factor[1]
        if factor is None:
            return None
        xe = self._xe.double() / n
        if shifts:
            xe.baddbmm_(mean[:, :, None], (self.e / n)[:, None, :], alpha=-1)
        return _solved(factor, xe)

    def snapshot(self) -> Self:
        """A copy that can be moved alone, and that later joins leave as it is."""
        return copy(self)

    def spare(self) -> None:
        """Free what another solution computes again: it is large."""
        self._factor = None

    def gain(self, weight: Tensor) -> Tensor:
        """Sum over rows of e² - (e - xD)², per output."""
        return 2 * (weight * self._xe).sum(1) - (weight * (_whole(self._xx) @ weight)).sum(1)


class FewRows(Regression):
    """The same for few rows: it keeps them, and its equations have one unknown per row."""

    def _prepare(self, groups: int, outputs: int, features: int) -> None:
        #: x and e, times the root of the row's weight, and these roots.
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        #: With or without shifts: the products of rows, and the variances of features.
        self._gram: tuple[bool, Tensor, Tensor] | None = None
        self._moves: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = (), ()

    def _add_inputs(self, e: Tensor, x: Tensor, weights: Tensor | None) -> None:
        self._factor = self._gram = None
        # Contiguous copies: a view would keep, and change with, a layer's input.
        left = x.transpose(0, 1).to(self._wide, memory_format=torch.contiguous_format, copy=True)
        right, root = e.transpose(0, 1).to(self._wide), left.new_ones(len(x), 1)
        if weights is not None:
            root = weights.to(self._wide).sqrt()[:, None]
            left, right = left * root, right * root
        self.parts.append((left, right, root))
        self.x += (root.mT @ left)[:, 0].double()

    def join(self, other: Moments) -> None:
        Moments.join(self, other)
        assert isinstance(other, FewRows)
        self._factor = self._gram = None
        self.x, self.parts = self.x + other.x, [*self.parts, *other.parts]

    def move(self, d: Tensor, x: Tensor, weights: Tensor | None = None, later: bool = False) -> None:
        own = d.double() if weights is None else d * weights.double()[:, None, None]
        self.e = self.e + own.sum(0)
        root = 1.0 if weights is None else weights.double().sqrt()[:, None, None]
        first, last = self._moves
        made = (d.double() * root).transpose(0, 1)
        self._moves = (first, (*last, made)) if later else ((*first, made), last)

    def solve(self, strength: float, shifts: bool) -> Tensor | None:
        """The change D of the weights, as Xᵀ(XXᵀ / n + ridge)⁻¹e / n."""
        n = self.rows
        if self._factor is None or self._factor[0] != (strength, shifts):
            self._factor = None
            if self._gram is None or self._gram[0] != shifts:
                x = self._all()[0]
                gram, parts = x.new_zeros(len(x), x.shape[1], x.shape[1]), list[Tensor]()
                for part in self._features(shifts):
                    _add_product(gram, part, part.mT)
                    parts.append(part.square().sum(1, dtype=torch.float64) / n)
                self._gram = shifts, gram, torch.cat(parts, 1)
            _, gram, variances = self._gram
            self._factor = (strength, shifts), _factored(_whole(gram).div_(n), variances, strength)
        factor, (x, e, root) = self._factor[1], self._all()
        if factor is None:
            return None
        e = e.double() - root * (self.e / n)[:, None] if shifts else e.double()
        solved = _solved(factor, e).div_(n).to(x.dtype)
        return torch.cat([part.mT @ solved for part in self._features(shifts)], 1).double()

    def _features(self, shifts: bool) -> Iterator[Tensor]:
        """X, centred with `shifts`, some features at a time: as a whole it would be large."""
        x, _, root = self._all()
        for begin in range(0, x.shape[-1], _WIDE):
            part = x[..., begin : begin + _WIDE]
            if shifts:
                part = part - root * (self.x[:, None, begin : begin + _WIDE] / self.rows).to(x.dtype)
            yield part

    def gain(self, weight: Tensor) -> Tensor:
        x, e, _ = self._all()
        made = x @ weight.to(x.dtype)
        return (made * (2 * e - made)).sum(1, dtype=torch.float64)

    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.parts) > 1:
            lefts, rights, roots = zip(*self.parts, strict=True)
            self.parts = [(torch.cat(lefts, 1), torch.cat(rights, 1), torch.cat(roots))]
        ((x, e, root),) = self.parts
        moves = self._moves[0] + self._moves[1]
        return x, e + torch.cat(moves, 1) if moves else e, root


def moments_for(
    groups: int, outputs: int, features: int, rows: int, device: torch.device, *, keep: bool = False, exact: bool = True
) -> Moments:
    """Empty sums: with inputs if there are `features`, as rows if asked to `keep` them or where these are smaller.

    Unless they are `exact`, sums of many products on a CPU are single precision.
    """
    if not features:
        return Moments(groups, outputs, device)
    # With two rows for three features both take the same memory.
    kind = FewRows if keep or 3 * rows <= 2 * features else Regression
    return kind(groups, outputs, features, device, not exact and rows * groups * features**2 > _CHEAP)


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of a matrix and its transpose. Only the upper triangle, in blocks, is kept up to date."""
    size = sums.shape[-1]
    step = size if size < _WIDE or sums.is_cuda else -(-size // 8)  # a GPU waits for many small products
    for begin in range(0, size, step):
        rows = slice(begin, begin + step)
        sums[:, rows, begin:].baddbmm_(left[:, rows], right[..., begin:])


def _whole(upper: Tensor) -> Tensor:
    """A symmetric matrix in double precision from its upper triangle of blocks, with no further copy of it."""
    made = upper.to(torch.float64, copy=True)
    if made.is_cuda:  # it is whole
        return made
    size = made.shape[-1]
    for begin in range(0, size, _WIDE):
        rows, rest = slice(begin, begin + _WIDE), slice(begin + _WIDE, None)
        made[:, rest, rows] = made[:, rows, rest].mT
        block = made[:, rows, rows]
        made[:, rows, rows] = block.triu() + block.triu(1).mT
    return made


def _factored(matrix: Tensor, variances: Tensor, strength: float) -> Tensor | None:
    """The Cholesky factor of a matrix with a ridge relative to the mean variance; None if there is none.

    It takes the matrix's place: both at a time would be much."""
    # Rounding leaves the sums of squares uncertain by about 1e-7 of their size, so the ridge is never below that.
    ridge = (strength * variances.mean(1)).clamp_min(1e-7 * variances.amax(1)).clamp_min(1e-30)
    matrix.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    failed = torch.empty(len(matrix), dtype=torch.int32, device=matrix.device)
    factor = matrix.mT  # columns side by side, as LAPACK wants them
    torch.linalg.cholesky_ex(factor, out=(factor, failed))
    return None if bool((failed > 0).any()) else factor


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    """The solution by a Cholesky factor. (`torch.cholesky_solve` copies the factor.)"""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved
