"""Cells: groups of neighbouring points. Within a cell, activations are close to polynomials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# The largest number of points in a cell. Polynomials fit better with fewer, matrix products are faster with more.
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
        """The least-squares coefficients (terms by rows) for rows of values at the points."""
        return self._solution @ values.T


def cells(x: Tensor) -> list[Cell]:
    """Divide the points into cells."""
    return [Cell.of(x, points) for points in _halves(x, torch.arange(len(x)))]


def _halves(x: Tensor, points: Tensor) -> Iterator[Tensor]:
    """Halve along the longer side again and again until the parts are small."""
    if len(points) <= _POINTS:
        yield points
        return
    place = x[points]
    longer = int((place.amax(0) - place.amin(0)).argmax())
    for half in points[place[:, longer].argsort(stable=True)].chunk(2):
        yield from _halves(x, half)
