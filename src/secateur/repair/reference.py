"""The original's side of a repair: what each layer should return at sampled positions, and what the model answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.nest import lists_samples, tensors_in, tensors_of_output
from secateur.relevance.engine import RelevancePass
from secateur.relevance.starts import seed
from secateur.relevance.weights import LayerUse
from secateur.repair.layers import LayerObserver, RepairableLayer, survey
from secateur.repair.lockstep import stack
from secateur.repair.rows import Places, Positions, Rows, wide
from secateur.repair.samples import Samples
from secateur.running.batches import counted
from secateur.running.copies import named_tensors, shared_copy
from secateur.running.devices import device_of
from secateur.running.layout import order_for
from secateur.running.logits import logits_of
from secateur.running.memory import CACHE, allowed
from secateur.running.progress import Pace, Recording
from secateur.running.sandbox import evaluating, quiet, run
from secateur.running.targets import Reader

#: For each parameter and dimension the indices that the smaller model kept.
Kept = Mapping[str, Mapping[int, np.ndarray[Any, Any]]]
#: What a model answers to a batch: one or several tensors.
Answers = list[Tensor]
# Of the memory: what models in lockstep may hold, what the rows of all layers may take together, and what looking at
# some of them may.
_IN_FLIGHT, _KEPT, _LOOKED_AT = 0.4, 0.4, 0.2
# A part of the memory, weights and all: what the equations of a layer may take.
_SOLVING = 3
# What the modules of a pass take, and what watches them.
_MODULES = 4 * 2**20
# So many samples run together on a CPU even if their largest activation does not fit into its cache.
_LEAST_TOGETHER = 8
# Each regression has rows for its features and at least some, on a CPU, where they take long, or if memory is short.
_LEAST_ROWS, _ROWS_PER_FEATURE, _ROWS_IF_ALONE, _ON_CPU = 4096, 10, 24, 6144
# Answers to long texts: positions of each sample, and samples at once.
_JUDGED, _ANSWERED_AT_ONCE = 32, 8
# Relevance needs what a gradient needs, so fewer samples are in flight than in a forward pass.
_EXPLAINED_AT_ONCE = 32


class Reference:
    """Computed once from the original, and used for every smaller model of it. It needs at most about `memory` bytes.

    Not all samples take part in all layers: the early layers of a network need much memory for each sample, and have
    few weights. Samples that do not fit join in later layers.
    """

    def __init__(
        self, original: nn.Module, samples: Samples, rows: int, at_once: int | None = None, relevance: float = 0.0,
        memory: int | None = None, kept: Kept | None = None,
    ) -> None:  # fmt: skip
        found = survey(original, samples.two)
        #: By weight: the output channels that smaller models may have. Others need no rows. All, if there is no entry.
        self.kept = {
            name: channels
            for name, layer in found.layers.items()
            if (channels := (kept or {}).get(name, {}).get(layer.outputs)) is not None
        }
        device = device_of(original) or torch.device("cpu")
        # The smaller model and two copies of it, which are hardly ever as large as the original.
        taken = 3 * sum(t.numel() * t.element_size() for t in original.parameters())
        room = allowed(device, taken, memory)
        #: So many samples run together.
        self.together = min(samples.total, at_once if at_once is not None else _together(found.largest, device, room))
        #: So many bytes of rows, with all that is made of them, are looked at together.
        self.looked_at = int(_LOOKED_AT * room)
        #: Whether each layer needs a pass of its own, since all samples are too many at once for the user.
        self.by_layer = at_once is not None and samples.total > at_once
        self.original = shared_copy(original).eval()
        tensors = dict(named_tensors(self.original))
        order = sorted(found.layers.values(), key=lambda layer: layer.number)
        every = dict.fromkeys(found.layers, samples.total)
        # A pass holds its inputs to its end.
        given = sum(t.numel() * t.element_size() // max(len(t), 1) for t in tensors_in(samples.two) if t.ndim)
        alive = {name: size + given for name, size in found.alive.items()}

        def joining(share: float) -> dict[str, int]:
            return every if self.by_layer else _joining(order, alive, samples.total, self.together, room * share)

        def drawn(joined: dict[str, int], most: Callable[[RepairableLayer], int]) -> dict[str, int]:
            return {layer.weight: min(most(layer) // joined[layer.weight], layer.places) or 1 for layer in order}

        features = {
            layer.weight: tensors[layer.weight].numel() // tensors[layer.weight].shape[layer.outputs] for layer in order
        }
        models = 1 + bool(samples.held.any())  # the trial runs beside
        #: By weight: so many samples, the first, take part.
        self.joined = joining(_IN_FLIGHT / models)
        widths = {layer.weight: len(self.kept.get(layer.weight, range(layer.channels))) for layer in order}

        most = allowed(device, memory=memory) // _SOLVING

        def enough(layer: RepairableLayer, least: int = _LEAST_ROWS) -> int:
            wanted = min(rows, max(least, _ROWS_PER_FEATURE * features[layer.weight]))
            inputs = 1 - layer.outputs
            left = (kept or {}).get(layer.weight, {}).get(inputs)
            share = 1 if left is None else len(left) / tensors[layer.weight].shape[inputs]
            return min(wanted, _solvable(int(share * features[layer.weight]), most))

        def needed(per_sample: dict[str, int]) -> int:
            return sum(4 * widths[name] * self.joined[name] * per_sample[name] for name in widths)

        least = max(rows if device.type != "cpu" else min(rows, _ON_CPU), _LEAST_ROWS)
        while needed(per_sample := drawn(self.joined, partial(enough, least=least))) > room * _KEPT:
            if least == _LEAST_ROWS:
                break
            least = max(_LEAST_ROWS, least * 7 // 8)
        #: Whether rows are not kept: the original runs again beside each smaller model.
        self.streams = needed(per_sample) > room * _KEPT and not self.by_layer
        if self.streams:
            self.joined = joining(_IN_FLIGHT / (models + 1))

            def one_layer(layer: RepairableLayer) -> int:
                if tensors[layer.weight].ndim == 2:
                    return _alone(layer, features[layer.weight], rows, room)
                return max(enough(layer), min(enough(layer, rows), _alone(layer, 0, rows, room)))

            per_sample = drawn(self.joined, one_layer)
        elif (much := needed(per_sample)) > room * _KEPT:
            per_sample = {name: max(1, int(count * room * _KEPT / much)) for name, count in per_sample.items()}
        #: The order matters only where the first do not hold all samples.
        samples = samples.spread() if min(self.joined.values(), default=samples.count) < samples.count else samples
        with quiet(), evaluating(self.original):
            self.samples = replace(samples, order=order_for(self.original, samples.two))
        self.layers: dict[str, RepairableLayer] = {}
        #: By call: the weights of the rows. Layers without an entry weigh all rows alike.
        self.weights: dict[str, Tensor] = {}
        for name, layer in found.layers.items():
            generator = torch.Generator().manual_seed(samples.seed * 7919 + layer.number)
            count, drawn_at = self.joined[name], list[Positions]()
            if self.streams:
                layer = replace(layer, others=())
            for call in layer.calls:
                counts = counted(self.samples.masks, (samples.total, call.positions))
                counts = None if counts is None else counts[:count]
                share = -(-per_sample[name] * call.positions // layer.places)  # rows of all sizes count alike
                drawn_at.append(Positions.draw(count, call.positions, share, generator, counts))
                if counts is not None:  # padding is no row
                    self.weights[call.key] = drawn_at[-1].take(counts[..., None].float(), slice(None))[..., 0]
            self.layers[name] = layer.prepared(tensors, drawn_at)
        #: By call: the rows (samples, positions, channels) that the layer should return.
        self.targets: dict[str, Tensor] = {}
        #: Whether answers must be looked at apart: all of them are too large, or they have no row for each sample.
        self.apart = self.streams and self._says_much()
        #: Whether it answers with classes for each token, and whether it lists the boxes of each image.
        self._tokens, self._lists_boxes = _kind_of_answer(self.original, self.samples.two)
        self._answers: list[Answers] = []
        #: Layers that keep all outputs, and the dimension of these: they speak for a model that returns lists of boxes.
        self._heads = {name: dim for name, dim in found.dense.items() if dim not in (kept or {}).get(name, {})}
        if not self.streams:
            self._record()
        if self.apart or self.streams:
            self._answers = self._judged(self.original)
        if relevance:
            for name, weights in self._relevance_weights(relevance).items():
                self.weights[name] = weights * self.weights.get(name, 1.0)

    def _says_much(self) -> bool:
        """Whether the original answers for each token."""
        with quiet():
            return any(answer.ndim > 2 for answer in answers_in(run(self.original, self.samples.two), 2))

    def _record(self) -> None:
        """Run the original: note what each layer returns at the sampled positions, and what it answers."""
        pace = Pace(Recording(), self.samples.total)
        for place, x in self.samples.chunks(self.together):
            mine = {name: layer for name, layer in self.layers.items() if self.joined[name] >= place.stop}
            count = place.stop - place.start
            observer = LayerObserver(self.original, mine, self._store, place, x, count, lambda layer: True)
            with quiet(), observer:
                output = run(self.original, x)
            judged = self.judged(output, place)
            self.apart |= judged is None
            self._answers.append(judged or [])
            for name in observer.varying:
                for call in self.layers.pop(name).calls:
                    self.targets.pop(call.key, None)
            pace(count)

    def judged(self, output: Any, places: Places) -> Answers | None:
        """What an output says about the samples that judge; None if it has no row for each sample."""
        index = torch.arange(self.samples.total)[places]
        if lists_samples(output):
            return None
        judges, answers = self.samples.judges[index], answers_in(output, len(index))
        if any(answer.ndim == 0 or len(answer) != len(index) for answer in answers):
            return None
        masks = [mask[index[judges].to(mask.device)] for mask in self.samples.masks]
        chosen = [answer[judges.to(answer.device)] for answer in answers]
        if self._tokens:
            return [self._at_positions(t, counted(masks, t.shape[:2]), t.shape[-2]) for t in chosen]
        return [_without_padding(answer, counted(masks, answer.shape[:2])) for answer in chosen]

    def _judged(self, model: nn.Module) -> list[Answers]:
        """The answers to samples that judge, a few samples at a time; at some positions of each where rows are not
        kept."""
        sparse, judges, found = self.streams and self.apart, self.samples.judges, []
        judges = judges[: self.samples.count if sparse else None].nonzero().ravel()  # no copies of long texts
        step = min(self.together, _ANSWERED_AT_ONCE) if sparse else self.together
        with quiet(), evaluating(model):
            for begin in range(0, len(judges), step):
                index = judges[begin : begin + step]
                with _outputs_of(model, self._heads if self._lists_boxes else ()) as heads:
                    output = run(model, self.samples.at(index))
                answers = None if self.apart else self.judged(output, index)
                if self._lists_boxes:  # which boxes it found: their number varies
                    answers = heads
                if answers is None:
                    answers = answers_in(output, len(index))
                if sparse:
                    masks = [mask[index.to(mask.device)] for mask in self.samples.masks]
                    answers = [self._at_positions(answer, counted(masks, answer.shape[:2])) for answer in answers]
                found.append(answers)
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
        """How far a model's answers to the samples that judge are from the original's."""
        sides = [answers, self._answers]
        if not self.apart:  # they may have come in other parts
            sides = [[[torch.cat(parts) for parts in zip(*side, strict=True)]] for side in sides]
        return divergence_between(sides[0], sides[1], not self.samples.quantities)

    def divergence_of(self, model: nn.Module) -> float:
        """How far a model is from the original. Only samples that judge are run."""
        return self.divergence(self._judged(shared_copy(model)))

    def _store(self, layer: RepairableLayer, rows: Rows) -> Tensor:
        """Store what a layer returns, at once: a later call may overwrite it."""
        self.store(layer, rows)
        assert rows.output is not None
        return rows.output

    def store(self, layer: RepairableLayer, rows: Rows) -> None:
        """Note what a layer of the original returns for some samples."""
        total, kept = rows.total, self.kept.get(layer.weight)
        if kept is not None:
            total = total.index_select(-1, torch.as_tensor(kept, device=total.device))
        if layer.key not in self.targets:
            self.targets[layer.key] = total.new_empty(self.joined[layer.weight], *total.shape[1:])
        self.targets[layer.key][rows.places] = total

    def wanted(self, layer: RepairableLayer, places: Tensor) -> Tensor:
        """What a layer of a smaller model should return for some samples."""
        targets, stored = self.targets[layer.key], self.kept.get(layer.weight)
        rows = targets[places.to(targets.device)]
        if stored is None:
            return layer.left(rows)
        if layer.kept is None or len(layer.kept) == len(stored):
            return rows
        return rows.index_select(-1, torch.as_tensor(np.searchsorted(stored, layer.kept), device=rows.device))

    def covers(self, kept: Kept) -> bool:
        """Whether a smaller model that kept these indices can be repaired."""
        if self._lists_boxes and any(dim in kept.get(name, {}) for name, dim in self._heads.items()):
            return False
        found = (
            (stored, kept.get(name, {}).get(self.layers[name].outputs))
            for name, stored in self.kept.items()
            if name in self.layers
        )
        return all(own is not None and bool(np.isin(own, stored).all()) for stored, own in found)

    def _relevance_weights(self, share: float) -> dict[str, Tensor]:
        """By layer the weights of its sampled positions, (samples, positions), 1 on average.

        `share` of a weight is the relevance for the class that the original predicts; the rest is the same everywhere,
        so that every position counts. Layers that no relevance reaches are left out.
        """
        seen: dict[str, Tensor] = {}  # by weight: (samples, positions)
        count = 0

        def watch(use: LayerUse, relevance: Tensor) -> None:
            """Note how much relevance lies at each position of a layer's output, over all channels, for each sample."""
            if use.name in self.layers:
                layer = self.layers[use.name]
                found = relevance.abs().movedim(use.channel, -1).sum(-1).movedim(layer.batch, 0)
                if found.numel() == layer.positions * count:  # on other sizes, all rows count alike
                    seen[use.name] = found

        engine, reader = RelevancePass(self.original, heat_map=False, watch=watch), Reader(self.original)
        made: dict[str, Tensor] = {}
        for place, x in self.samples.chunks(min(self.together, _EXPLAINED_AT_ONCE)):
            seen.clear()
            count = place.stop - place.start
            engine.run(x, lambda output, x=x, n=count: seed(reader.view(x, None, output), None, samples=n))  # type: ignore[misc]
            for name, found in seen.items():
                if self.joined[name] < place.stop:
                    continue
                rows = self.layers[name].sampled.take(found.reshape(count, -1, 1), place)[..., 0]
                if name not in made:
                    made[name] = torch.zeros(self.joined[name], rows.shape[1], device=rows.device)
                made[name][place] = rows.float()
        means = {name: rows.mean() for name, rows in made.items()}
        return {name: 1 - share + share * rows / means[name] for name, rows in made.items() if bool(means[name] > 0)}


def _together(largest: int, device: torch.device, room: int) -> int:
    """How many samples run together: as many as the memory holds, and on a CPU no more than its cache does."""
    fitting = max(1, room // 12 // max(largest, 1))
    return fitting if device.type != "cpu" else min(fitting, max(_LEAST_TOGETHER, CACHE // max(largest, 1)))


def _joining(
    order: Sequence[RepairableLayer], alive: Mapping[str, int], samples: int, together: int, room: float
) -> dict[str, int]:
    """By weight how many samples take part: as many as fit into memory from that layer on, in whole parts."""
    worst, joined = 1, {}
    for layer in reversed(order):
        worst = max(worst, alive[layer.weight])
        fitting = int(room / (worst + (stack() + _MODULES) / together)) // together * together
        joined[layer.weight] = min(samples, max(together, fitting))
    return joined


def _solvable(features: int, room: int) -> int:
    """How many rows a regression may have: any number, unless equations with an unknown for each feature would be too
    large. Then it has few rows, and equations with an unknown for each of them."""
    if 16 * features**2 <= room:  # two sums in single precision, and a factor
        return 2**40
    rows = (math.sqrt((8 * features) ** 2 + 96 * room) - 8 * features) / 48  # 24 rows² + 8 rows · features
    return max(1, int(rows))


def _alone(layer: RepairableLayer, features: int, rows: int, room: int) -> int:
    """How many rows a linear layer uses where they are held for one layer at a time: at least so many as a regression
    needs, and no more than a share of the memory."""
    return max(1, min(max(rows, _ROWS_IF_ALONE * features), room // 8 // 4 // max(layer.channels, 1)))


@contextmanager
def _outputs_of(model: nn.Module, weights: Iterable[str]) -> Iterator[Answers]:
    """What the layers with these weights return."""
    found: Answers = []
    modules = dict(model.named_modules())
    paths = [name.rpartition(".")[0] for name in weights]
    hooks = [
        modules[path].register_forward_hook(lambda m, i, o: found.append(wide(o)) if isinstance(o, Tensor) else None)
        for path in paths
        if path in modules
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _kind_of_answer(model: nn.Module, inputs: Any) -> tuple[bool, bool]:
    """Whether a model of transformers answers with logits at each position, and whether it lists the boxes of each
    image. Other answers may be anything."""
    with quiet(), evaluating(model):
        output = run(model, inputs)
    logits = getattr(output, "logits", None)
    return isinstance(logits, Tensor) and logits.ndim == 3, lists_samples(output)


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


def divergence_between(mine: list[Answers], theirs: list[Answers], classes: bool = True) -> float:
    """Mean Jensen-Shannon divergence of classes, or relative squared distance of other answers, batch by batch.

    Several answers are added up. Rows of numbers are `classes`, unless said otherwise. (Kullback-Leibler is not
    bounded: one sure mistake would outweigh everything else.)
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
        if classes and first.ndim == 2 and ours.shape[1] > 1:
            sides = [F.log_softmax(side, 1) for side in (ours, known)]
            between = torch.logaddexp(*sides) - math.log(2)
            total += float(sum(0.5 * (side.exp() * (side - between)).sum(1).mean() for side in sides))
        else:
            total += float((ours - known).square().mean() / known.square().mean().clamp_min(1e-30))
    return total
