"""Least squares without negative coefficients."""

from __future__ import annotations

from typing import Any

import numpy as np

_ROUNDS = 500
Array = np.ndarray[Any, np.dtype[np.float64]]


def nonnegative(rows: Array, wanted: Array) -> Array:
    """The x ≥ 0 that minimises |rows x - wanted|², one coordinate after the other.

    >>> nonnegative(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), np.array([2.0, -1.0, 2.0]))
    array([2., 0.])
    """
    square, right = rows.T @ rows, rows.T @ wanted
    # Of parts that always change together, as those of a chain of equal widths, all get a share.
    square = square + 1e-9 * np.trace(square) / max(len(square), 1) * np.eye(len(square))
    found = np.zeros(len(right))
    for _ in range(_ROUNDS):
        before = found.copy()
        for i in range(len(found)):
            rest = right[i] - square[i] @ found + square[i, i] * found[i]
            found[i] = max(rest / square[i, i], 0.0) if square[i, i] > 0 else 0.0
        if np.abs(found - before).max(initial=0) <= 1e-10 * max(found.max(initial=0), 1e-30):
            break
    # Near the end steps become small. What is positive is solved for at once.
    used = found > 1e-9 * max(found.max(initial=0), 1e-30)
    exact = np.zeros_like(found)
    exact[used] = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0]
    return exact if (exact >= 0).all() else found
