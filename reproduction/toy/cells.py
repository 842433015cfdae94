"""Cells: neighbouring points of the plane. What a network does changes little within one, so polynomials come close."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Points in a cell, at most: few enough for polynomials to fit, enough for products of matrices to be worth while.
_POINTS = 256

# Exponents of the terms of a polynomial of degree 4: 1, x, y, x², xy, …
_EXPONENTS = [(degree - i, i) for degree in range(5) for i in range(degree + 1)]


@dataclass(frozen=True)
class Cell:
    """Some points, and the terms of polynomials of (place - middle) / size there: terms by points."""

    points: Tensor
    middle: Tensor
    size: Tensor
    terms: Tensor
    _solution: Tensor

    @classmethod
    def of(cls, x: Tensor, points: Tensor) -> Cell:
        """The cell of some rows of `x`."""
        place = x[points].double()
        middle = place.mean(0)
        size = (place - middle).abs().amax(0).clamp(min=1e-9)
        across, up = ((place - middle) / size).T
        terms = torch.stack([across**i * up**j for i, j in _EXPONENTS])
        return cls(points, middle.float(), size.float(), terms.float(), torch.linalg.pinv(terms.T).float())

    def fit(self, values: Tensor) -> Tensor:
        """The best coefficients, terms by rows of values at the points."""
        return self._solution @ values.T


def cells(x: Tensor) -> list[Cell]:
    """Every point in one cell."""
    return [Cell.of(x, points) for points in _halves(x, torch.arange(len(x)))]


def _halves(x: Tensor, points: Tensor) -> Iterator[Tensor]:
    """Halves of halves along the longer side, until they are small."""
    if len(points) <= _POINTS:
        yield points
        return
    place = x[points]
    longer = int((place.amax(0) - place.amin(0)).argmax())
    for half in points[place[:, longer].argsort(stable=True)].chunk(2):
        yield from _halves(x, half)
