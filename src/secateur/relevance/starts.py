"""Where relevance starts: at a class, at one class against another, at one position of a text or at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from secateur.errors import Argument, DataError, SecateurWarning
from secateur.nest import map_tensors, tensors_in
from secateur.running.goals import Aim, Goal, seen_by, started
from secateur.running.logits import one_output
from secateur.running.targets import IGNORED, Reader, Reading, check_targets

Target = int | Sequence[int] | Tensor | Goal | Callable[[Any], Any] | None
Position = int | Sequence[int] | Tensor | None
How = Literal["one", "logit"]
#: The same, or a function that says it once the model has run.
Choice = How | Callable[[], How]


def seed(reading: Reading, classes: Tensor | None, how: Choice = "one", samples: int | None = None) -> Tensor:
    """The relevance that an output starts with: 1 or the logit at the class of each position that counts.

    `classes` is IGNORED where no relevance starts, None for the predicted class everywhere. A model with one output
    starts there whatever the class is. `samples` tells an output of one number per sample from that of a single sample
    without a batch dimension. A model without a head has states: each number of a state starts with its square.
    """
    logits, counts = reading.logits, reading.counts
    if reading.states and classes is None:
        return _of_states(reading, (how() if callable(how) else how) == "one")
    values = torch.ones_like(logits) if (how() if callable(how) else how) == "one" else logits
    axis = 1 if logits.ndim > 1 else 0
    if one_output(logits, samples):
        if classes is not None and logits.ndim > 2 and classes.numel() == logits.numel():
            counts = classes.view_as(logits).squeeze(1) != IGNORED
        return reading.back(values if counts is None else torch.where(counts.unsqueeze(axis), values, 0))
    if classes is None:
        classes = predicted(reading)
    index = classes.clamp_min(0).unsqueeze(axis)
    chosen = torch.where((classes != IGNORED).unsqueeze(axis), values.gather(axis, index), 0)
    return reading.back(torch.zeros_like(logits).scatter(axis, index, chosen))


def _of_states(reading: Reading, one: bool) -> Tensor:
    """The squared length of each state is shared among its numbers. With `one`, it counts as 1."""
    warnings.warn(
        f"the model has no head: {reading.states} has states and no classes, so that relevance starts at all numbers "
        "of each state, with their squares. Fix, if you mean something else: a model with a head, target=f(output) in "
        "`explain`, or real targets shaped like the output in data.",
        SecateurWarning,
        stacklevel=3,
    )
    squares, axis = reading.logits.square(), 1 if reading.logits.ndim > 1 else 0
    squares = squares / squares.sum(axis, keepdim=True).clamp_min(1e-30) if one else squares
    return reading.back(squares if reading.counts is None else torch.where(reading.counts.unsqueeze(axis), squares, 0))


def begun(
    reader: Reader, inputs: Any, targets: Any, output: Tensor, how: Choice = "one", samples: int | None = None,
    entry: str = "",
) -> Tensor:  # fmt: skip
    """The relevance that an output starts with at the targets of the data, or at the predicted classes without any.

    Real numbers are that relevance themselves. `entry` is what to call the output.
    """
    if isinstance(targets, Tensor) and targets.is_floating_point() and not one_output(output, samples):
        return _checked(check_targets(targets, output, entry), output)
    reading = reader.read(inputs, targets, output)
    # If the only output started with its targets, samples of class 0 would add nothing.
    return seed(reading, None if reading.targets is None else reading.known(entry), how, samples)


def predicted(reading: Reading) -> Tensor:
    """The class that wins at each position that counts."""
    best = reading.logits.argmax(1 if reading.logits.ndim > 1 else 0)
    return best if reading.counts is None else best.masked_fill(~reading.counts, IGNORED)


@dataclass
class Starter:
    """The relevance that an output starts with, as a function of the output.

    `reader` and the `inputs` tell where classes lie and which positions count. Without them classes are along
    dimension 1. Afterwards `classes` has what was explained: one class for each sample and position, else IGNORED.
    `others` has the same for `against`.
    """

    target: Target = None
    how: Choice = "one"
    samples: int | None = None
    reader: Reader | None = None
    inputs: Any = None
    against: Target = None
    position: Position = None
    classes: Tensor | None = field(default=None, init=False)
    others: Tensor | None = field(default=None, init=False)

    def __call__(self, output: Tensor) -> Tensor:
        self.classes, self.others, target = None, None, self.target
        if callable(target) and not isinstance(target, Tensor):
            by_value = (self.how() if callable(self.how) else self.how) == "logit"
            return _checked(started(lambda own, _: target(own), output, None, by_value), output)
        if isinstance(target, Tensor) and target.is_floating_point():
            return _checked(target, output)
        known = target if isinstance(target, Tensor) and target.ndim > 1 else None
        reader = self.reader
        reading = Reading(output) if reader is None else reader.view(self.inputs, known, output)
        starts = self._places(reading)
        if reading.states and target is None and self.against is None:
            return seed(replace(reading, counts=starts), None, self.how)
        if one_output(reading.logits, self.samples):
            check_single(target, reading.logits)
            if self.against is not None:
                what = "{against}, but the model has one output, which is for one class and against the other."
                raise DataError(what, fix="leave it out", against=Argument("against", self.against))
            return seed(Reading(reading.logits, None, starts, reading.axis), None, self.how, self.samples)
        self.classes = classes = self._classes(reading, target, starts)
        relevance = seed(reading, classes, self.how)
        if self.against is None:
            return relevance
        self.others = self._classes(reading, self.against, starts)
        return relevance - seed(reading, self.others, self.how)

    def _classes(self, reading: Reading, target: Any, starts: Tensor | None) -> Tensor:
        """The class of each sample and position, IGNORED where no relevance starts."""
        logits = reading.logits
        axis = 1 if logits.ndim > 1 else 0
        count, shape = logits.shape[axis], [d for i, d in enumerate(logits.shape) if i != axis]
        if target is None:
            index = logits.argmax(axis)
        else:
            index = torch.as_tensor(target, device=logits.device)
            if index.dim() == 1 and len(shape) > 1:  # one class per sample, many positions
                index = index.view(-1, *[1] * (len(shape) - 1))
            outside = (index >= count) | (index < -count)
            if bool(outside.any()):
                raise DataError(f"target {int(index[outside].reshape(-1)[0])} is not among the {count} outputs.")
            try:
                index = index.remainder(count).expand(shape)
            except RuntimeError:
                raise DataError(
                    f"targets of shape {tuple(index.shape)} for an output of shape {tuple(logits.shape)}."
                ) from None
        return index if starts is None else torch.where(starts, index, IGNORED)

    def _places(self, reading: Reading) -> Tensor | None:
        """The positions at which relevance starts; None for all."""
        logits, counts = reading.logits, reading.counts
        position: Any = self.position
        if position is None:
            if self.reader is None or not self.reader.generates or logits.ndim != 3:
                return counts
            position = -1
        if logits.ndim != 3:
            raise DataError(
                "{position}, but the output, of shape {shape}, has no row of positions.",
                fix="leave it out, or target=f(output), which returns the relevance to start with",
                position=Argument("position", self.position),
                shape=tuple(logits.shape),
            )
        if counts is None:
            counts = torch.ones(len(logits), logits.shape[2], dtype=torch.bool, device=logits.device)
        wanted, lengths = torch.as_tensor(position, device=logits.device), counts.sum(1)
        if wanted.is_floating_point() or wanted.ndim > 1 or (wanted.ndim and len(wanted) != len(lengths)):
            fix = "a whole number, or one per sample; -1 is the last position"
            raise DataError("{position} is not known.", fix=fix, position=Argument("position", self.position))
        place = torch.where(wanted < 0, wanted + lengths, wanted)
        if bool(((place < 0) | (place >= lengths)).any()):
            raise DataError(
                "{position} lies outside: the samples have {lengths} positions, padding not counted.",
                fix="positions from 0, or from the end: -1 is the last",
                position=Argument("position", self.position),
                lengths=", ".join(map(str, sorted(set(lengths.tolist()))[:5])),
            )
        return counts & (counts.cumsum(1) - 1 == place[:, None])


def starter(target: Target, start: How = "one", samples: int | None = None) -> Starter:
    """The relevance that an output starts with if its classes lie along dimension 1."""
    return Starter(target, start, samples)


def check_target(target: Any, name: str = "target") -> None:
    """Refuse what is no class, no list of classes and no function."""
    if (
        target is None
        or isinstance(target, Tensor)
        or ((callable(target) or isinstance(target, Goal)) and name == "target")
    ):
        return
    try:
        index = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        index = None
    if index is None or index.is_floating_point() or index.dtype == torch.bool:
        what = f"{name} is {target!r}, which is neither a class nor a list of classes."
        raise DataError(what, fix="a whole number, one per sample, or a function f(output)")


def check_single(target: Any, output: Tensor) -> None:
    """Class numbers of a model with one output: 0 or 1, one for all, one per sample or one per number."""
    if target is None:
        return
    index = torch.as_tensor(target)
    if index.dim() and index.shape[0] != (output.shape[0] if output.dim() else 1):
        raise DataError(f"targets of shape {tuple(index.shape)} for an output of shape {tuple(output.shape)}.")
    if int(index.max()) > 1 or int(index.min()) < -1:
        raise DataError(f"target {int(index.max())} for a model with one output, whose classes are 0 and 1.")


def _checked(relevance: Tensor, output: Tensor) -> Tensor:
    if relevance.shape != output.shape:
        raise DataError(
            f"the starting relevance has shape {tuple(relevance.shape)}, the output has {tuple(output.shape)}: give "
            f"one number per output."
        )
    return relevance.to(output)


@dataclass
class AtGoal:
    """The relevance that an output starts with at a goal, or at a user's `f(output, targets)`.

    All real numbers of the output that the goal sees are one tensor while relevance passes.
    """

    aim: Aim
    targets: Any = None
    how: Choice = "one"
    #: What the goal sees of the output.
    seen: Any = field(default=None, init=False)

    def pick(self, output: Any) -> Tensor:
        """The numbers of the output that relevance may start from, as one tensor."""
        chosen = seen_by(self.aim, output)
        self.seen = map_tensors(Tensor.detach, chosen)
        if isinstance(chosen, Tensor):
            return chosen
        parts = [t.reshape(-1) for t in tensors_in(chosen) if t.is_floating_point()]
        if not parts:
            raise DataError(f"the model returns {type(output).__name__}, in which there is no tensor to explain.")
        return torch.cat(parts)

    def __call__(self, value: Tensor) -> Tensor:
        by_value = (self.how() if callable(self.how) else self.how) == "logit"
        relevance = started(self.aim, self.seen, self.targets, by_value)
        if isinstance(self.seen, Tensor):
            return _checked(relevance, value)
        real = (r for r, t in zip(tensors_in(relevance), tensors_in(self.seen), strict=True) if t.is_floating_point())
        return torch.cat([r.reshape(-1) for r in real]).to(value)
