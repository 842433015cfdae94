"""The classes, reference images and test images of each repetition. They are the same for every criterion and mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reproduction.published import Published, Samples, published
from secateur.data.outputs import match
from secateur.errors import DataError

#: The ImageNet outputs of a class, by WordNet: cats 281-285, dogs 151-268, all birds, planes, cars and pickups.
GROUPS: Mapping[str, tuple[int, ...]] = {
    "cat": tuple(range(281, 286)),
    "dog": tuple(range(151, 269)),
    "aircraft": (404, 895),
    "birds": (*range(7, 25), *range(80, 101), *range(127, 147)),
    "cars": (407, 436, 468, 511, 609, 627, 656, 661, 717, 751, 817),
}

#: The paper tests pairs of data sets on this many images.
_PAIR_TESTS = 2048


@dataclass(frozen=True)
class Draw:
    """One repetition. `outputs` maps each class, in order, to the outputs of the network that belong to it."""

    number: int
    outputs: Mapping[str, tuple[int, ...]]
    reference: Samples
    test: Samples

    @property
    def merged(self) -> bool:
        """Whether some class has several outputs."""
        return any(len(members) > 1 for members in self.outputs.values())


@dataclass(frozen=True)
class Source:
    """The images that draws are made from, and how classes map to outputs. `found` is one set, or a pair of sets."""

    data: str
    found: tuple[Published, ...]

    @classmethod
    def read(cls, data: str, images: Path) -> Source:
        """`data` is ilsvrc, catsdogs or a pair such as aircraft+birds, whose folders are inside `images`."""
        if "+" in data:
            names = data.split("+")
            if len(names) != 2 or not all(name in ("aircraft", "birds", "cars") for name in names):
                raise DataError(
                    f"{data!r} is no pair of aircraft, birds and cars.", fix="use aircraft+birds or similar"
                )
            return cls(data, tuple(published(name, images / name) for name in names))
        if data not in ("ilsvrc", "catsdogs"):
            raise DataError(f"few-shot cannot use {data!r}.", fix="use ilsvrc, catsdogs or, say, aircraft+birds")
        return cls(data, (published(data, images),))

    def draw(self, number: int, classes: int, per_class: int, outputs: int, own: bool) -> Draw:
        """Repetition `number`. `own`: the outputs of the network are the classes of this data set, in their order."""
        rng = np.random.default_rng(number)
        if self.data == "ilsvrc":
            return self._some_classes(rng, number, classes, per_class, outputs, own)
        if self.data == "catsdogs":
            return self._cats_and_dogs(rng, number, per_class, own)
        return self._pair(rng, number, per_class)

    def _some_classes(
        self, rng: np.random.Generator, number: int, classes: int, per_class: int, outputs: int, own: bool
    ) -> Draw:
        (found,) = self.found
        names = found.classes
        if not 2 <= classes <= len(names):
            raise DataError(f"{classes} classes cannot be drawn from {len(names)}.")
        known = {name: (i,) for i, name in enumerate(names)} if own else match(names, outputs)
        chosen = sorted(rng.choice(len(names), classes, replace=False).tolist())
        reference: list[int] = []
        test: list[int] = []
        for label in chosen:
            mine = found.train.of_class(label)
            reference += [mine[i] for i in _picked(rng, len(mine), per_class, names[label])]
            test += found.test.of_class(label)
        return Draw(
            number,
            {names[label]: known[names[label]] for label in chosen},
            _relabelled(found.train.take(reference), chosen),
            _relabelled(found.test.take(test), chosen),
        )

    def _cats_and_dogs(self, rng: np.random.Generator, number: int, per_class: int, own: bool) -> Draw:
        (found,) = self.found
        if found.classes != ("cat", "dog"):
            raise DataError(f"Cats & Dogs has the classes cat and dog, not {', '.join(found.classes)}.")
        reference: list[int] = []
        for label, name in enumerate(found.classes):
            mine = found.train.of_class(label)
            reference += [mine[i] for i in _picked(rng, len(mine), per_class, name)]
        outputs = {"cat": (0,), "dog": (1,)} if own else {name: GROUPS[name] for name in ("cat", "dog")}
        return Draw(number, outputs, found.train.take(reference), found.test)

    def _pair(self, rng: np.random.Generator, number: int, per_class: int) -> Draw:
        reference: list[Samples] = []
        test: list[Samples] = []
        for label, found in enumerate(self.found):
            picked = found.train.take(_picked(rng, len(found.train), per_class, found.name))
            share = min(_PAIR_TESTS // 2, len(found.test))
            held = found.test.take(_picked(rng, len(found.test), share, found.name))
            reference.append(Samples(picked.source, (label,) * len(picked)))
            test.append(Samples(held.source, (label,) * len(held)))
        outputs = {found.name: GROUPS[found.name] for found in self.found}
        return Draw(number, outputs, _joined(reference), _joined(test))


def _picked(rng: np.random.Generator, count: int, wanted: int, name: str) -> list[int]:
    if wanted > count:
        raise DataError(f"class {name!r} has {count} images, {wanted} were asked for.")
    return sorted(rng.choice(count, wanted, replace=False).tolist())


def _relabelled(samples: Samples, chosen: list[int]) -> Samples:
    """Classes numbered as they were chosen."""
    return Samples(samples.source, tuple(chosen.index(label) for label in samples.labels))


def _joined(parts: list[Samples]) -> Samples:
    files: list[Path] = []
    for part in parts:
        assert isinstance(part.source, tuple)
        files += part.source
    return Samples(tuple(files), tuple(label for part in parts for label in part.labels))
