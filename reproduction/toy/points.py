"""Three sets of points in the plane: two moons, two circles, four spirals.

Points lie at equal distances along each class's curve and then get noise, as in scikit-learn's generators. So a set is
more regular than a random draw. A set of one point per class is the start of the curve; for the spirals, the origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.errors import DataError

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

# Number of classes by name, in the order of the paper's tables.
CLASSES = {"moon": 2, "circle": 2, "multi": 4}

_RADIAL_NOISE = 0.1
_INNER_RADIUS = 0.3
_ANGULAR_NOISE = 0.2


@dataclass(frozen=True)
class Points:
    """Points of the plane and their classes."""

    x: Floats
    y: Integers

    def __len__(self) -> int:
        return len(self.y)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """As (inputs, targets) for a network in single precision."""
        return torch.from_numpy(self.x).float(), torch.from_numpy(self.y)


def points(name: str, per_class: int, rng: np.random.Generator, noise: float = 0.0) -> Points:
    """Draw `per_class` points of each class. `noise` is the size of additional Gaussian noise.

    >>> points("circle", 3, np.random.default_rng(0)).y.tolist()
    [0, 0, 0, 1, 1, 1]
    """
    if name not in CLASSES:
        raise DataError(f"there is no toy set {name!r}; there are {', '.join(CLASSES)}.")
    if per_class < 1:
        raise DataError(f"{per_class} points per class: at least one is needed.")
    curve = {"moon": _moons, "circle": _circles, "multi": _spirals}[name]
    x = curve(per_class, rng)
    if noise:
        x = x + rng.normal(scale=noise, size=x.shape)
    return Points(x, np.repeat(np.arange(CLASSES[name]), per_class))


def _moons(count: int, rng: np.random.Generator) -> Floats:
    """Two half circles. The second is turned upside down and moved into the first."""
    angle = np.linspace(0, np.pi, count)
    upper = np.stack([np.cos(angle), np.sin(angle)], 1)
    lower = np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], 1)
    return _disturbed(np.concatenate([upper, lower]), rng)


def _circles(count: int, rng: np.random.Generator) -> Floats:
    """A circle around a smaller one."""
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)], 1)
    return _disturbed(np.concatenate([circle, _INNER_RADIUS * circle]), rng)


def _spirals(count: int, rng: np.random.Generator) -> Floats:
    """Four arms that start at the origin. Only the angle gets noise."""
    radius = np.linspace(0, 1, count)
    arms = []
    for arm in range(CLASSES["multi"]):
        angle = np.linspace(4 * arm, 4 * (arm + 1), count) + _ANGULAR_NOISE * rng.standard_normal(count)
        arms.append(np.stack([radius * np.sin(angle), radius * np.cos(angle)], 1))
    return np.concatenate(arms)


def _disturbed(x: Floats, rng: np.random.Generator) -> Floats:
    return x + rng.normal(scale=_RADIAL_NOISE, size=x.shape)
