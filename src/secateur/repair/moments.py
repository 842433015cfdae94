"""Sums over rows, from which every correction is computed. Their memory does not grow with the data.

A row is one position of one sample: x is what the layer reads there, y what it returns, and e what its output lacks
compared with the original. Each group of a grouped convolution is a regression of its own. Rows may have weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Products of at most this many multiplications use double precision on the CPU too.
_CHEAP = 2**27


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

    @property
    def size(self) -> Tensor:
        """Mean square of the original's output, y + e."""
        return (self.yy + 2 * self.ey + self.ee) / self.rows


class Regression(Moments):
    """Also the sums that a change of weights needs: of x (groups, features), and of its products with x and e."""

    def __init__(self, groups: int, outputs: int, features: int, device: torch.device) -> None:
        super().__init__(groups, outputs, device)
        self.x = self.e.new_zeros(groups, features)
        self._prepare(groups, outputs, features)

    def _prepare(self, groups: int, outputs: int, features: int) -> None:
        self._xx = self.e.new_zeros(groups, features, features)
        self._xe = self.e.new_zeros(groups, features, outputs)

    def _add_inputs(self, e: Tensor, x: Tensor, weights: Tensor | None) -> None:
        # Double precision is slow on the CPU: large products are single there, and only their sums are double.
        cheap = x.numel() * x.shape[-1] <= _CHEAP
        wide = torch.float64 if x.is_cuda or cheap or x.dtype == torch.float64 else torch.float32
        left, right = x.to(wide).transpose(0, 1), e.to(wide).transpose(0, 1)  # (groups, n, ·)
        own = left if weights is None else left * weights.to(wide)[:, None]
        self.x += own.sum(1).double()
        self._xx += own.mT @ left
        self._xe += own.mT @ right

    def move(self, d: Tensor, x: Tensor, weights: Tensor | None = None) -> None:
        """Add d to e. Every row is moved once, in the order in which rows were added.

        Only what `solve` needs is updated, and not in place: a copy of the sums is moved alone.
        """
        own = d if weights is None else d * weights.to(d.dtype)[:, None, None]
        self.e = self.e + own.double().sum(0)
        wide = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
        self._xe = self._xe + x.to(wide).transpose(0, 1).mT @ own.to(wide).transpose(0, 1)

    def solve(self, strength: float, shifts: bool) -> Tensor | None:
        """The change D (groups, features, outputs) of the weights, or None if there is no solution.

        D minimises |e - xD|² / n + strength · v · |D|², where v is the mean variance of the features. With `shifts`,
        x and e are centred.
        """
        n = self.rows
        xx, xe = self._xx / n, self._xe / n
        if shifts:
            mean = self.x / n
            xx -= mean[:, :, None] * mean[:, None, :]
            xe -= mean[:, :, None] * (self.e / n)[:, None, :]
        return _solved(xx, xe, xx.diagonal(dim1=1, dim2=2), strength)

    def gain(self, weight: Tensor) -> Tensor:
        """Sum over rows of e² - (e - xD)², per output."""
        return 2 * (weight * self._xe).sum(1) - (weight * (self._xx @ weight)).sum(1)


class FewRows(Regression):
    """The same for fewer rows than features: it keeps the rows, and its equations have one unknown per row."""

    def _prepare(self, groups: int, outputs: int, features: int) -> None:
        # x and e, times the root of the row's weight, and these roots.
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._moves: tuple[Tensor, ...] = ()

    def _add_inputs(self, e: Tensor, x: Tensor, weights: Tensor | None) -> None:
        # Contiguous copies: a view would keep, and change with, a layer's input.
        left = x.transpose(0, 1).to(torch.float64, memory_format=torch.contiguous_format, copy=True)
        right, root = e.transpose(0, 1).double(), left.new_ones(len(x), 1)
        if weights is not None:
            root = weights.double().sqrt()[:, None]
            left, right = left * root, right * root
        self._parts.append((left, right, root))
        self.x += (root.mT @ left)[:, 0]

    def move(self, d: Tensor, x: Tensor, weights: Tensor | None = None) -> None:
        own = d.double() if weights is None else d * weights.double()[:, None, None]
        self.e = self.e + own.sum(0)
        root = 1.0 if weights is None else weights.double().sqrt()[:, None, None]
        self._moves = (*self._moves, (d.double() * root).transpose(0, 1))

    def solve(self, strength: float, shifts: bool) -> Tensor | None:
        """The change D of the weights, as Xᵀ(XXᵀ / n + ridge)⁻¹e / n."""
        n = self.rows
        x, e, root = self._all()
        if shifts:
            x, e = x - root * (self.x / n)[:, None], e - root * (self.e / n)[:, None]
        found = _solved(x @ x.mT / n, e, x.square().sum(1) / n, strength)
        return None if found is None else x.mT @ found / n

    def gain(self, weight: Tensor) -> Tensor:
        x, e, _ = self._all()
        made = x @ weight
        return (made * (2 * e - made)).sum(1)

    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        if len(self._parts) > 1:
            lefts, rights, roots = zip(*self._parts, strict=True)
            self._parts = [(torch.cat(lefts, 1), torch.cat(rights, 1), torch.cat(roots))]
        ((x, e, root),) = self._parts
        return x, e + torch.cat(self._moves, 1) if self._moves else e, root


def moments_for(groups: int, outputs: int, features: int, rows: int, device: torch.device) -> Moments:
    """Empty sums: with inputs if there are `features`, as rows where these are smaller than the sums."""
    if not features:
        return Moments(groups, outputs, device)
    kind = FewRows if rows <= features else Regression
    return kind(groups, outputs, features, device)


def _solved(matrix: Tensor, right: Tensor, variances: Tensor, strength: float) -> Tensor | None:
    """The solution of symmetric equations with a ridge relative to the mean variance; None if there is none."""
    # Rounding leaves the sums of squares uncertain by about 1e-7 of their size, so the ridge is never below that.
    ridge = (strength * variances.mean(1)).clamp_min(1e-7 * variances.amax(1)).clamp_min(1e-30)
    matrix.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return None if bool((failed > 0).any()) else torch.cholesky_solve(right, factor)
