"""What the original answers: the rows that every layer of the smaller model should give, at sampled positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.criteria.batches import Data, batches, check_inputs, device_of, size_of
from secateur.errors import DataError
from secateur.graph.shadow import quiet, run, twin
from secateur.ops.table import Call
from secateur.pruning.repair.augment import Alter
from secateur.pruning.repair.rows import Positions, channel_last
from secateur.pruning.repair.survey import INPUT, LayerSite, Numbered, survey
from secateur.relevance.isolation import logits_of, map_tensors

# Copies are drawn for this many samples together, whatever the batches are that they are used in.
_PART = 32


@dataclass(frozen=True)
class Samples:
    """Reference inputs and altered copies of them. Copies are made when they are asked for, always the same."""

    inputs: Any
    count: int
    copies: int
    alter: Alter | None
    held: Tensor
    seed: int

    @classmethod
    def collect(
        cls, data: Data, most: int, copies: int, alter: Alter | None, held_out: float, seed: int,
        device: torch.device | None,
    ) -> Samples:  # fmt: skip
        """The first `most` samples; a share of them, for each class if there are targets, is held out."""
        inputs, targets, count = [], [], 0
        for x, y in batches(data, 64, device):
            check_inputs(x)
            take = min(size_of(x), most - count)
            inputs.append(map_tensors(lambda t, n=take: t[:n], x))  # type: ignore[misc]
            targets.append(y[:take] if isinstance(y, Tensor) and y.ndim == 1 else None)
            count += take
            if count >= most:
                break
        if not count:
            raise DataError("repair needs data: there is no sample in what was given.")
        numbers = [t for t in targets if t is not None]
        known = torch.cat(numbers).cpu() if len(numbers) == len(targets) else None
        held = _held(count, known, held_out, torch.Generator().manual_seed(seed))
        return cls(_joined(inputs), count, copies if alter is not None else 0, alter, held, seed)

    @property
    def total(self) -> int:
        """Samples with their copies."""
        return self.count * (1 + self.copies)

    @property
    def held_all(self) -> Tensor:
        """For each sample and copy whether it is held out. Copies go with what they are copies of."""
        return self.held.repeat(1 + self.copies)

    def chunks(self, size: int) -> Iterator[tuple[slice, Any]]:
        """Inputs in batches of about `size`, with their places among all. They do not depend on `size`."""
        waiting: list[Any] = []
        begin = end = 0
        for place, x in self._parts():
            if waiting and place.stop - begin > size:
                yield slice(begin, end), _joined(waiting)
                waiting, begin = [], place.start
            waiting.append(x)
            end = place.stop
        yield slice(begin, end), _joined(waiting)

    def _parts(self) -> Iterator[tuple[slice, Any]]:
        for copy in range(1 + self.copies):
            for begin in range(0, self.count, _PART):
                end = min(begin + _PART, self.count)
                x = map_tensors(lambda t, a=begin, b=end: t[a:b], self.inputs)  # type: ignore[misc]
                if copy:
                    assert self.alter is not None
                    key = (self.seed * 1_000_003 + copy) * 1_000_003 + begin
                    x = self.alter(x, torch.Generator().manual_seed(key % 2**63))
                yield slice(copy * self.count + begin, copy * self.count + end), x


class Reference:
    """The original's side of a repair, made once and used for every smaller model of it."""

    def __init__(self, original: nn.Module, samples: Samples, rows: int, batch_size: int) -> None:
        self.samples = samples
        first = map_tensors(lambda t: t[:1], samples.inputs)
        self.sites = {site.call: site for site in survey(original, first)}
        self.shapes = {name: tuple(t.shape) for name, t in original.named_parameters()}
        self.device = device_of(original) or torch.device("cpu")
        self.per_sample = max(1, rows // samples.total)
        self.positions: dict[int, Positions] = {}
        self.targets: dict[int, Tensor] = {}
        copy = twin(original).eval()
        outputs = []
        for place, x in samples.chunks(batch_size):
            with quiet(), _Capture(copy, self, place, x):
                outputs.append(logits_of(run(copy, x)).float())
        self.outputs = torch.cat(outputs)

    def place(self, number: int, positions: int) -> Positions:
        """The positions of a layer's output that take part."""
        if number not in self.positions:
            generator = torch.Generator().manual_seed(self.samples.seed * 7919 + number)
            self.positions[number] = Positions.draw(self.samples.total, positions, self.per_sample, generator)
        return self.positions[number]

    def store(self, number: int, samples: slice, rows: Tensor) -> None:
        """Keep what a layer gave."""
        if number not in self.targets:
            shape = (self.samples.total, *rows.shape[1:])
            self.targets[number] = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        self.targets[number][samples] = rows


class Holding(Numbered):
    """Keeps the tensors that will be added to a layer's output until the layer runs."""

    def __init__(self, model: nn.Module, sites: dict[int, LayerSite], inputs: Any) -> None:
        super().__init__(model)
        self.tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self.sites = sites
        self._wanted = {site.partner for site in sites.values() if site.partner is not None}
        self._held: dict[int, Tensor] = {INPUT: inputs} if isinstance(inputs, Tensor) else {}

    def at(self, number: int, call: Call) -> Any:
        """Layers go to `layer`, what is wanted later is kept."""
        site = self.sites.get(number)
        output = call.run() if site is None else self.layer(site, call)
        if number in self._wanted and isinstance(output, Tensor):
            self._held[number] = output
        return output

    def layer(self, site: LayerSite, call: Call) -> Any:
        """What a repairable layer returns."""
        raise NotImplementedError

    def partner(self, site: LayerSite, call: Call, output: Tensor) -> Tensor | None:
        """What will be added to a layer's output, in units of that output: (samples, positions, channels)."""
        other = self._held.get(site.partner) if site.partner is not None else None
        if other is None or other.shape != output.shape:
            return None
        values = channel_last(call, other)
        if site.norm is None:
            return values
        scale = site.norm.scale(self.tensors)
        # A channel that the norm all but silences cannot make up for anything.
        alive = scale.abs() > 1e-3 * scale.abs().max()
        return values * torch.where(alive, 1 / scale, 0.0).to(values.dtype)


class _Capture(Holding):
    def __init__(self, model: nn.Module, reference: Reference, samples: slice, inputs: Any) -> None:
        super().__init__(model, reference.sites, inputs)
        self._reference, self._samples = reference, samples

    def layer(self, site: LayerSite, call: Call) -> Any:
        """Store output, plus what is added to it, at the sampled positions."""
        output: Tensor = call.run()
        values = channel_last(call, output)
        positions = self._reference.place(site.call, values.shape[1])
        rows = positions.take(values, self._samples).float()
        partner = self.partner(site, call, output)
        rows = rows.clone() if partner is None else rows + positions.take(partner, self._samples).float()
        self._reference.store(site.call, self._samples, rows)
        return output


def _held(count: int, targets: Tensor | None, share: float, generator: torch.Generator) -> Tensor:
    """Which samples are held out: the same share of every class where that is known."""
    held = torch.zeros(count, dtype=torch.bool)
    order = torch.randperm(count, generator=generator)
    if targets is not None and len(targets) == count:
        order = order[torch.sort(targets[order], stable=True).indices]
    # Spread evenly along the order, in which classes lie together.
    marks = torch.floor((torch.arange(count) + 0.5) * share)
    marks[1:] = marks[1:] - marks[:-1].clone()
    held[order[marks > 0]] = True
    return held


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined([part[i] for part in parts]) for i in range(len(first)))
    return first
