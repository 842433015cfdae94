"""What is run: the two readings of the paper's network, how they are trained, and the grid of reference sets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from reproduction.toy import variants
from reproduction.toy.points import CLASSES, Points, points
from reproduction.toy.variants import Variant
from secateur.errors import SecateurError

SETS = tuple(CLASSES)

# The first and last k of 3000 units are compared. In smaller networks k has the same share.
DEPTHS = (125, 250, 500, 1000)
PAPER_WIDTH = 1000

# The share of hidden units that is removed.
REMOVED = 1 / 3

# Independent streams of random numbers.
_TRAINING, _REFERENCE, _TEST = 1, 2, 3


@dataclass(frozen=True)
class Reading:
    """One way to read the experiment: the network, how LRP is computed, and the norm of the weight scores."""

    name: str
    third_relu: bool
    variant: Variant
    norm: Literal[1, 2]
    text: str

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The ways to compute LRP that differ on this network."""
        return tuple(v for v in variants.ALL if not (self.third_relu and v.signed))


READINGS = {
    "paper": Reading(
        "paper",
        True,
        Variant("one", False),
        2,
        "as the paper states it: a ReLU after each hidden layer, LRP-α1β0 from 1, weight scores over their l2 norm",
    ),
    "script": Reading(
        "script",
        False,
        Variant("logit", True),
        1,
        "as published in code: no third ReLU, LRP by positive weights from the logit, weight scores over their l1 norm",
    ),
}

# Reference points per class for which all ways to compute LRP are compared.
VARIANT_SIZES = (5, 20, 100)


@dataclass(frozen=True)
class Recipe:
    """Every number that the results depend on. Two runs with equal recipes give equal results."""

    name: str
    width: int
    sizes: tuple[int, ...]
    seeds: int
    noises: tuple[float, ...] = (0.01, 0.1, 0.3)
    training_points: int = 1000
    test_points: int = 500
    batches: int = 20
    rate: float = 0.02
    momentum: float = 0.9
    dropout: float = 0.5
    steps: int = 500
    spiral_steps: int = 1000
    root: int = 0

    @property
    def views(self) -> tuple[str, ...]:
        """The sets on which accuracy is measured: the training set, and a test set for each level of noise."""
        return ("train", *(str(noise) for noise in self.noises))

    def steps_for(self, name: str) -> int:
        """Steps of training. The spirals take twice as long to separate."""
        return self.spiral_steps if name == "multi" else self.steps

    @property
    def variant_sizes(self) -> tuple[int, ...]:
        """Sizes of reference set for which all ways to compute LRP are compared."""
        return tuple(size for size in self.sizes if size in VARIANT_SIZES)

    def depth(self, k: int) -> int:
        """The number of units that corresponds to k of the paper's 3000."""
        return k * self.width // PAPER_WIDTH

    def training(self, name: str) -> Points:
        """The training set."""
        return points(name, self.training_points, self._rng(_TRAINING, name))

    def reference(self, name: str, size: int, seed: int) -> Points:
        """Unseen points for the criteria. They are the same for all criteria and networks."""
        return points(name, size, self._rng(_REFERENCE, name, size, seed))

    def test(self, name: str, noise: float, seed: int) -> Points:
        """Unseen points with further noise."""
        level = self.noises.index(noise)
        return points(name, self.test_points, self._rng(_TEST, name, level, seed), noise)

    def _rng(self, stream: int, name: str, *more: int) -> np.random.Generator:
        return np.random.default_rng([self.root, stream, SETS.index(name), *more])

    def as_dict(self) -> dict[str, Any]:
        """For hashing and for the record."""
        return asdict(self)


FULL = Recipe("full", width=PAPER_WIDTH, sizes=(1, 2, 5, 10, 20, 50, 100, 200), seeds=50)

# The same experiment with narrower networks and fewer repetitions, for a first look and for the tests.
QUICK = Recipe("quick", width=256, sizes=(1, 5, 20, 100), seeds=5)


def readings(names: list[str] | None) -> list[Reading]:
    """The readings asked for; all by default."""
    unknown = [name for name in names or [] if name not in READINGS]
    if unknown:
        raise SecateurError(f"the network {unknown[0]!r} is not known.", fix=f"use {' or '.join(READINGS)}")
    return [READINGS[name] for name in names or READINGS]
