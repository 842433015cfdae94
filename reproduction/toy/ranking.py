"""How similar two rankings are: the share of common first or last k units, and the correlation of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ranks = np.ndarray[Any, np.dtype[np.uint16]]
End = Literal["first", "last"]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over repetitions."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """Of an array of any shape."""
        return cls(float(np.mean(values)), float(np.std(values)))


def doubled_ranks(scores: Floats) -> Ranks:
    """Twice the rank of each score, lowest first. Equal scores share the mean of their ranks, so doubled: integers."""
    ordered = np.sort(scores)
    below = np.searchsorted(ordered, scores, "left")
    upto = np.searchsorted(ordered, scores, "right")
    return (below + upto - 1).astype(np.uint16)


def chosen(ranks: Ranks, k: int, end: End) -> Floats:
    """Rows in which 1 marks the k units that would be removed first, or last. Ties are ordered by index."""
    order = np.argsort(ranks, axis=-1, kind="stable")
    picked = order[..., :k] if end == "first" else order[..., ranks.shape[-1] - k :]
    marks = np.zeros(ranks.shape)
    np.put_along_axis(marks, picked, 1.0, -1)
    return marks


def overlap(a: Floats, b: Floats, k: int) -> Floats:
    """Share of common units of every row of `a` with every row of `b`."""
    shared: Floats = a @ b.T / k
    return shared


def centred(ranks: Ranks) -> Floats:
    """Ranks as rows of mean 0 and length 1. Their products are rank correlations. Constant rows become 0."""
    rows = ranks.astype(np.float64)
    rows -= rows.mean(-1, keepdims=True)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Floats = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit


def over_pairs(table: Floats) -> Spread:
    """Over the pairs of different rows of a symmetric table."""
    if len(table) < 2:
        return Spread(float("nan"), float("nan"))
    return Spread.of(table[np.triu_indices(len(table), 1)])
