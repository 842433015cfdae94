"""What was lost and what was gained: samples that both networks answer differently, and which classes are confused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from secateur.analysis.reasons import Viewer, of_every_class
from secateur.nest import select_samples
from secateur.report.changes import Names, Passage, Sample, name_of, pairs
from secateur.report.document import Cell, Page, Table
from secateur.running.accuracy import Accuracy
from secateur.running.batches import Data, batches, size_of
from secateur.running.sandbox import seeded

_LOST, _GAINED = 4, 2  # shown
_MATRIX = 12  # classes; more do not fit beside each other
_PAIRS = 15  # confusions that are not folded away

T = TypeVar("T")
#: Some test samples by their places: batches of inputs.
Pick = Callable[[Sequence[int]], Iterable[Any]]


@dataclass(frozen=True)
class Answers:
    """The class of each test sample, what both networks say, and the samples themselves."""

    targets: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]
    pick: Pick | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, old: Accuracy, new: Accuracy, data: Data) -> Answers | None:
        """What was measured on the same data; None if there is not one answer per sample."""
        if not old.answers or list(old.targets) != list(new.targets):
            return None
        return cls(old.targets, old.answers, new.answers, lambda places: in_order(_picked, data, places))

    @property
    def lost(self) -> list[int]:
        """Places of the samples that were right and are wrong now."""
        return [i for i, (t, b, a) in enumerate(self._all()) if b == t != a]

    @property
    def gained(self) -> list[int]:
        """Places of those that were wrong and are right now."""
        return [i for i, (t, b, a) in enumerate(self._all()) if b != t == a]

    def _all(self) -> Iterable[tuple[int, int, int]]:
        return zip(self.targets, self.before, self.after, strict=True)

    def confused(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
        """How often each class got each answer, before and after."""
        before = Counter(zip(self.targets, self.before, strict=True))
        return before, Counter(zip(self.targets, self.after, strict=True))


def in_order(read: Callable[..., T], *given: Any) -> T:
    """What a function that reads the test data returns. A loader that shuffles gives them in the same order to all."""
    with seeded(0, 0):
        return read(*given)


def _picked(data: Data, places: Sequence[int]) -> list[Any]:
    """Samples of the data by their places, batch by batch."""
    begin, left, found = 0, sorted(places), []
    for inputs, _ in batches(data, 32):
        if not left:
            break
        end = begin + size_of(inputs)
        mine = [place - begin for place in left if place < end]
        if mine:
            found.append(select_samples(inputs, torch.tensor(mine)))
        begin, left = end, left[len(mine) :]
    return found


@dataclass(frozen=True)
class Differences:
    """Samples that are wrong now and samples that are newly right: how many, and a few of each as both see them."""

    total: int
    lost: int
    gained: int
    shown: Sequence[tuple[str, Sequence[Sample], Sequence[Passage]]]
    matrix: Table | None
    pairs: Table
    most: int = _PAIRS


def differences(original: nn.Module, small: nn.Module, found: Answers, classes: Names, page: Page) -> Differences:
    """What the smaller network answers differently."""
    shown = []
    for title, places, most in (("Wrong now", found.lost, _LOST), ("Newly right", found.gained, _GAINED)):
        chosen = sorted(places[i] for i in of_every_class([found.targets[place] for place in places], most))
        if chosen and found.pick is not None:
            samples, passages, begin = list[Sample](), list[Passage](), 0
            for inputs in found.pick(chosen):
                mine = chosen[begin : begin + size_of(inputs)]
                viewer = Viewer(original, (inputs, torch.tensor([found.targets[i] for i in mine])), page.composite)
                more = pairs(viewer, viewer.look(small), classes, page)
                samples, passages, begin = samples + more[0], passages + more[1], begin + len(mine)
            few = f", {len(chosen)} of {len(places)}" if len(chosen) < len(places) else ""
            shown.append((title + few, samples, passages))
    total, lost, gained = len(found.targets), len(found.lost), len(found.gained)
    return Differences(total, lost, gained, shown, _matrix(found, classes), _pairs(found, classes))


def _matrix(found: Answers, classes: Names) -> Table | None:
    """Classes by answers, if they fit on a page: how often now, and how often before where that differs."""
    before, after = found.confused()
    numbers = sorted({*found.targets, *found.before, *found.after})
    if len(numbers) > _MATRIX:
        return None
    lines = []
    for wanted in numbers:
        cells = []
        for said in numbers:
            was, now = before[wanted, said], after[wanted, said]
            state = "" if was == now else "good" if (now > was) == (wanted == said) else "bad"
            hint = f"{name_of(wanted, classes)} answered as {name_of(said, classes)}: {was} → {now}"
            cells.append(Cell(str(now) if now or was else "·", f"was {was}" if was != now else "", state, hint))
        lines.append(((name_of(wanted, classes),), cells))
    note = "Rows are the classes, columns the answers of the smaller network."
    return Table("Answers by class", ("class",), [name_of(n, classes) for n in numbers], lines, note)


def _pairs(found: Answers, classes: Names) -> Table:
    """Every answer that was given to a class, the largest change first."""
    before, after = found.confused()
    order = sorted({*before, *after}, key=lambda pair: (-abs(after[pair] - before[pair]), pair))
    lines = []
    for pair in order:
        was, now = before[pair], after[pair]
        lines.append((*(name_of(number, classes) for number in pair), str(was), str(now), f"{now - was:+d}"))
    return Table.of("Every class and answer", ("class", "answer"), ("before", "after", "change"), lines)
