"""The original's side of a repair: what each layer should return at sampled positions, and what the model answers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.nest import select_samples, tensors_of_output
from secateur.relevance.engine import RelevancePass
from secateur.relevance.starts import seed
from secateur.relevance.weights import LayerUse
from secateur.repair.layers import LayerObserver, Layers, RepairableLayer, survey
from secateur.repair.lockstep import Lockstep
from secateur.repair.rows import Positions, Rows, wide
from secateur.repair.samples import Samples
from secateur.running.batches import counted
from secateur.running.copies import copy_with, named_tensors, shared_copy
from secateur.running.devices import device_of
from secateur.running.logits import logits_of
from secateur.running.sandbox import evaluating, quiet, run
from secateur.running.targets import Reader

#: What a model answers to a batch: one or several tensors.
Answers = list[Tensor]
# The memory that the rows of all layers may take together.
_MOST_BYTES = 4 * 2**30
# What each regression needs of rows if they are not kept for all layers.
_ROWS_PER_FEATURE = 24
# Answers to long texts: positions of each sample, and samples at once.
_JUDGED, _ANSWERED_AT_ONCE = 32, 8
# Relevance needs what a gradient needs, so fewer samples are in flight than in a forward pass.
_EXPLAINED_AT_ONCE = 32


class Reference:
    """Computed once from the original, and used for every smaller model of it."""

    def __init__(
        self, original: nn.Module, samples: Samples, rows: int, at_once: int | None = None, relevance: float = 0.0
    ) -> None:
        self.samples = samples
        found = survey(original, samples.two)
        device = device_of(original) or torch.device("cpu")
        self.at_once = at_once if at_once is not None else max(16, memory_of(device) // 32 // max(found.largest, 1))
        copy = shared_copy(original).eval()
        tensors = dict(named_tensors(copy))
        self.layers: dict[str, RepairableLayer] = {}
        #: By weight: the weights of the rows. Layers without an entry weigh all rows alike.
        self.weights: dict[str, Tensor] = {}
        kept = _per_sample(found.layers.values(), samples.total, rows)
        #: Whether rows are not kept: the original runs again beside each smaller model.
        self.streams = kept < max(1, rows // samples.total) and samples.total <= self.at_once
        for name, layer in found.layers.items():
            most = _alone(layer, tensors[layer.weight], samples.total, rows) if self.streams else kept
            generator = torch.Generator().manual_seed(samples.seed * 7919 + layer.number)
            counts = counted(samples.masks, (samples.total, layer.positions))
            positions = Positions.draw(samples.total, layer.positions, most, generator, counts)
            self.layers[name] = layer.prepared(tensors, positions)
            if counts is not None:  # padding is no row
                self.weights[name] = positions.take(counts[..., None].float(), slice(None))[..., 0]
        #: By weight: the rows (samples, positions, channels) that the layer should return.
        self.targets: dict[str, Tensor] = {}
        self._original = copy
        self._places: list[slice] = []
        self._answers: list[Answers] = []
        #: Whether answers are kept for some positions of samples that judge only: all of them are too large.
        self.sparse = self.streams
        #: Whether it answers with classes for each token.
        self._tokens = _classifies_tokens(copy, samples.two)
        if self.sparse:
            self._answers = self._judged(copy)
        else:
            for place, x in samples.chunks(self.at_once):
                self._places.append(place)
                with quiet(), LayerObserver(copy, self.layers, self._store, place, x) as observer:
                    self._answers.append(answers_in(run(copy, x), place.stop - place.start))
                for name in observer.varying:
                    del self.layers[name]
                    self.targets.pop(name, None)
        if relevance:
            for name, weights in _relevance_weights(copy, self.layers, samples, self.at_once, relevance).items():
                self.weights[name] = weights * self.weights.get(name, 1.0)

    def beside(self, place: slice, x: Any) -> AbstractContextManager[Callable[[str], Tensor]]:
        """What each layer of the original should return on all samples, by weight, while a smaller model runs."""
        return _stepping(self._original, self.layers, place, x) if self.streams else nullcontext(self.wanted)

    def wanted(self, weight: str) -> Tensor:
        """What a layer should return, of all samples."""
        return self.targets[weight]

    def _judged(self, model: nn.Module) -> list[Answers]:
        """The answers to samples that judge, at some positions of each, a few samples at a time."""
        judges, found = self.samples.judges[: self.samples.count].nonzero().ravel(), []  # no copies
        with quiet(), evaluating(model):
            for begin in range(0, len(judges), _ANSWERED_AT_ONCE):
                index = judges[begin : begin + _ANSWERED_AT_ONCE]
                x = self.samples.of(index)
                answers = answers_in(run(model, x), len(index))
                masks = [mask[index.to(mask.device)] for mask in self.samples.masks]
                found.append([self._at_positions(answer, counted(masks, answer.shape[:2])) for answer in answers])
        return found

    def _at_positions(self, answer: Tensor, counts: Tensor | None, most: int = _JUDGED) -> Tensor:
        """Answers for tokens, at `most` positions of each sample, evenly, as rows; padding is none. Others stay.

        Rows of classes have two dimensions, other rows three.
        """
        if answer.ndim != 3:
            return answer
        index = torch.linspace(0, answer.shape[1] - 1, min(most, answer.shape[1])).long().to(answer.device)
        rows = answer[:, index].flatten(0, 1)
        rows = rows if counts is None else rows[counts.to(answer.device)[:, index].flatten()]
        return rows if self._tokens else rows.unsqueeze(1)

    def divergence(self, answers: list[Answers]) -> float:
        """How far a model's answers, to all samples or to those that judge, are from the original's."""
        if self.sparse:
            return divergence_between(answers, self._answers)

        def judging(place: slice, batch: Answers) -> Answers:
            rows = self.samples.judges[place]
            judged = [select_samples(t, rows) if len(t) == len(rows) else t for t in batch]
            masks = [select_samples(mask[place], rows) for mask in self.samples.masks]
            if self._tokens:
                return [self._at_positions(t, counted(masks, t.shape[:2]), t.shape[-2]) for t in judged]
            return [_without_padding(t, counted(masks, t.shape[:2])) for t in judged]

        mine, theirs = (list(map(judging, self._places, side)) for side in (answers, self._answers))
        return divergence_between(mine, theirs)

    def divergence_of(self, model: nn.Module) -> float:
        """How far a model is from the original. Only samples that judge are run where that is possible."""
        answers: list[Answers] = []
        copy = copy_with(model, lambda name, old: old.detach().clone())
        if self.sparse:
            return self.divergence(self._judged(copy))
        with quiet(), evaluating(copy):
            for (place, x), wanted in zip(self.samples.chunks(self.at_once), self._answers, strict=True):
                rows = self.samples.judges[place]
                if any(len(answer) != len(rows) for answer in wanted):
                    answers.append(answers_in(run(copy, x), len(rows)))
                elif bool(rows.any()):
                    answers.append(answers_in(run(copy, select_samples(x, rows)), int(rows.sum())))
                else:
                    answers.append([answer[:0] for answer in wanted])
        return self.divergence(answers)

    def _store(self, layer: RepairableLayer, rows: Rows, output: Tensor) -> Tensor:
        """Store what a layer returns, at once: a later call may overwrite it."""
        total = rows.total
        if layer.weight not in self.targets:
            self.targets[layer.weight] = total.new_empty(self.samples.total, *total.shape[1:])
        self.targets[layer.weight][rows.place] = total
        return output


def _relevance_weights(
    model: nn.Module, layers: Layers, samples: Samples, at_once: int, share: float
) -> dict[str, Tensor]:
    """By layer the weights of its sampled positions, (samples, positions), 1 on average.

    `share` of a weight is the relevance for the class that the original predicts; the rest is the same everywhere, so
    that every position counts. Layers that no relevance reaches are left out.
    """
    seen: dict[str, Tensor] = {}  # by weight: (samples, positions)

    def watch(use: LayerUse, relevance: Tensor) -> None:
        """Note how much relevance lies at each position of a layer's output, over all channels, for each sample."""
        if use.name in layers:
            seen[use.name] = relevance.abs().movedim(use.channel, -1).sum(-1).movedim(layers[use.name].batch, 0)

    engine, reader = RelevancePass(model, heat_map=False, watch=watch), Reader(model)
    made: dict[str, Tensor] = {}
    for place, x in samples.chunks(min(at_once, _EXPLAINED_AT_ONCE)):
        seen.clear()
        count = place.stop - place.start
        engine.run(x, lambda output, x=x, n=count: seed(reader.view(x, None, output), None, samples=n))  # type: ignore[misc]
        for name, found in seen.items():
            rows = layers[name].sampled.take(found.reshape(count, -1, 1), place)[..., 0]
            if name not in made:
                made[name] = torch.zeros(samples.total, rows.shape[1], device=rows.device)
            made[name][place] = rows.float()
    means = {name: rows.mean() for name, rows in made.items()}
    return {name: 1 - share + share * rows / means[name] for name, rows in made.items() if bool(means[name] > 0)}


def memory_of(device: torch.device) -> int:
    """The bytes of a machine's or a GPU's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return 8 * 2**30


def _per_sample(layers: Iterable[RepairableLayer], samples: int, rows: int) -> int:
    """How many positions of each sample take part, such that the rows of all layers fit into memory."""
    sizes = [(layer.channels, layer.positions) for layer in layers]
    most = max(1, rows // samples)
    while most > 1 and 4 * samples * sum(width * min(count, most) for width, count in sizes) > _MOST_BYTES:
        most -= max(1, most // 8)
    return most


def _alone(layer: RepairableLayer, weight: Tensor, samples: int, rows: int) -> int:
    """How many positions of each sample take part where rows are held for one layer at a time: at least so many as a
    regression needs, and no more than a share of the memory."""
    needed = max(rows, _ROWS_PER_FEATURE * (weight[0].numel() if weight.ndim == 2 else 0))
    return max(1, min(needed, _MOST_BYTES // 8 // 4 // max(layer.channels, 1)) // samples)


@contextmanager
def _stepping(model: nn.Module, layers: Layers, place: slice, x: Any) -> Iterator[Callable[[str], Tensor]]:
    with Lockstep(model, layers, place, x) as original:
        yield original.take


def _classifies_tokens(model: nn.Module, inputs: Any) -> bool:
    """Whether a model of transformers answers with logits at each position. Other answers may be anything."""
    with quiet(), evaluating(model):
        logits = getattr(run(model, inputs), "logits", None)
    return isinstance(logits, Tensor) and logits.ndim == 3


def answers_in(output: Any, samples: int) -> Answers:
    """The logits of an output, or every tensor of real numbers in it that has a row for each sample."""
    first = logits_of(output, warn=False)
    if isinstance(output, Tensor) or first is getattr(output, "logits", None):
        return [wide(first).clone()]
    rows = [t for t in tensors_of_output(output) if t.is_floating_point() and t.ndim and len(t) == samples]
    return [wide(t).clone() for t in rows or [first]]


def _without_padding(answer: Tensor, counts: Tensor | None) -> Tensor:
    """An answer that is 0 for padding, in which no two models differ."""
    if counts is None or answer.ndim < 3:
        return answer
    return torch.where(counts.view(*counts.shape, *[1] * (answer.ndim - 2)).to(answer.device), answer, 0)


def divergence_between(mine: list[Answers], theirs: list[Answers]) -> float:
    """Mean Jensen-Shannon divergence of classes, or relative squared distance of other answers, batch by batch.

    Several answers are added up. (Kullback-Leibler is not bounded: one sure mistake would outweigh everything else.)
    """
    for own, wanted in zip(mine, theirs, strict=True):
        if [t.shape for t in own] != [t.shape for t in wanted]:
            shapes = [[tuple(t.shape) for t in side] for side in (own, wanted)]
            raise RepairError(
                f"the smaller model's answers have shapes {shapes[0]}, the original's {shapes[1]}.",
                fix="give the model that was pruned, and the one that came out",
            )
    total = 0.0
    for number, first in enumerate(theirs[0]):
        ours, known = (
            torch.cat([batch[number].double()[..., None].flatten(1) for batch in side]) for side in (mine, theirs)
        )
        if first.ndim == 2 and ours.shape[1] > 1:
            sides = [F.log_softmax(side, 1) for side in (ours, known)]
            between = torch.logaddexp(*sides) - math.log(2)
            total += float(sum(0.5 * (side.exp() * (side - between)).sum(1).mean() for side in sides))
        else:
            total += float((ours - known).square().mean() / known.square().mean().clamp_min(1e-30))
    return total
