"""What the original answers: the rows that every layer of the smaller model should give, at sampled positions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError
from secateur.nest import map_tensors, tensors_in
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.linear import Linear
from secateur.ops.table import Call, Site
from secateur.repair.augment import Alter
from secateur.repair.rows import Positions, channel_last
from secateur.repair.survey import INPUT, LayerSite, survey
from secateur.repair.weighing import weights_by_relevance
from secateur.running.batches import Data, batches, check_inputs, is_pair, size_of
from secateur.running.copies import shared_copy
from secateur.running.devices import device_of
from secateur.running.logits import logits_of
from secateur.running.observer import Observer
from secateur.running.sandbox import quiet, run

# Copies are drawn for this many samples together, whatever the batches are that they are used in.
_PART = 32
# What the rows of all layers may take together.
_MOST_BYTES = 4 * 2**30


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
        """At most `most` samples; a share of them, for each class if there are targets, is held out.

        Of a pair (X, y) samples are taken evenly, since classes may lie together there; of batches, the first.
        """
        inputs, targets, count = [], [], 0
        if is_pair(data) and size_of(data[0]) > most:
            index = torch.linspace(0, size_of(data[0]) - 1, most, dtype=torch.float64).round().long()
            data = map_tensors(lambda t: t[index.to(t.device)], tuple(data))
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
    def two(self) -> Any:
        """The first two samples, or the only one."""
        return map_tensors(lambda t: t[:2], self.inputs)

    @property
    def total(self) -> int:
        """Samples with their copies."""
        return self.count * (1 + self.copies)

    @property
    def held_all(self) -> Tensor:
        """For each sample and copy whether it is held out. Copies go with what they are copies of."""
        return self.held.repeat(1 + self.copies)

    @property
    def judges(self) -> Tensor:
        """For each sample and copy whether the model's answer to it counts: if held out, or if nothing is."""
        return self.held_all if bool(self.held.any()) else torch.ones(self.total, dtype=torch.bool)

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

    def __init__(
        self, original: nn.Module, samples: Samples, rows: int, at_once: int | None = None, relevance: float = 0.0
    ) -> None:
        self.samples = samples
        found = survey(original, samples.two)
        self.sites = found.sites
        device = device_of(original) or torch.device("cpu")
        self.at_once = at_once if at_once is not None else max(16, memory_of(device) // 32 // max(found.largest, 1))
        self.per_sample = _per_sample(found.sites.values(), samples.total, rows)
        self.positions: dict[str, Positions] = {}
        self.targets: dict[str, Tensor] = {}
        copy = shared_copy(original).eval()
        tensors = dict([*copy.named_parameters(), *copy.named_buffers()])
        self.inverse = {site.weight: _inverse(site, tensors) for site in found.sites.values()}
        self.levels = {site.weight: _level(site, tensors) for site in found.sites.values()}
        #: What it answers, batch by batch, and which samples these are.
        self.answers: list[list[Tensor]] = []
        self.places: list[slice] = []
        for place, x in samples.chunks(self.at_once):
            self.places.append(place)
            with quiet(), _Capture(copy, self, place, x):
                self.answers.append(answers_in(run(copy, x), place.stop - place.start))
        #: What the rows count, by weight; all the same where it is not told.
        self.weights = weights_by_relevance(copy, self, relevance) if relevance else {}

    def place(self, site: LayerSite, positions: int) -> Positions:
        """The positions of a layer's output that take part."""
        if site.weight not in self.positions:
            generator = torch.Generator().manual_seed(self.samples.seed * 7919 + site.number)
            self.positions[site.weight] = Positions.draw(self.samples.total, positions, self.per_sample, generator)
        return self.positions[site.weight]

    def store(self, site: LayerSite, samples: slice, rows: Tensor) -> None:
        """Keep what a layer gave."""
        if site.weight not in self.targets:
            shape = (self.samples.total, *rows.shape[1:])
            self.targets[site.weight] = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        self.targets[site.weight][samples] = rows


class Holding(Observer):
    """Sees the layers of a model run, and keeps the tensors that will be added to a layer's output until it runs.

    `inverse` has, by weight, what turns such a tensor into units of the layer's own output.
    """

    def __init__(
        self, model: nn.Module, sites: Mapping[str, LayerSite], inverse: Mapping[str, Tensor | None], inputs: Any
    ) -> None:
        super().__init__(model)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._layers = {id(tensors[name]): site for name, site in sites.items() if name in tensors}
        self._inverse = inverse
        self._wanted = Counter(site.partner for site in self._layers.values() if site.partner is not None)
        self._held: dict[Site, Tensor] = {INPUT: inputs} if isinstance(inputs, Tensor) else {}

    def observe(self, call: Call) -> Any:
        """Layers go to `layer`, what is wanted later is kept."""
        known = isinstance(call.operation, Convolution | TransposedConvolution | Linear)
        site = self._layers.get(id(call["weight"])) if known else None
        output = call.run() if site is None else self.layer(site, call)
        if call.site in self._wanted and isinstance(output, Tensor):
            self._held[call.site] = output
        return output

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs as it is: what was analysed before is not refused."""
        return func(*args, **kwargs)

    def layer(self, site: LayerSite, call: Call) -> Any:
        """What a repairable layer returns."""
        raise NotImplementedError

    def partner(self, site: LayerSite, call: Call, output: Tensor) -> Tensor | None:
        """What will be added to a layer's output, in units of that output: (samples, positions, channels)."""
        if site.partner is None:
            return None
        other = self._held.get(site.partner)
        self._wanted[site.partner] -= 1
        if not self._wanted[site.partner]:
            self._held.pop(site.partner, None)  # a stream's activations are large
        if other is None or other.shape != output.shape:
            return None
        return channel_last(call, other, site.batch, site.positions)

    def scaled(self, site: LayerSite, rows: Tensor) -> Tensor:
        """A partner's rows in units of the layer's output."""
        inverse = self._inverse[site.weight]
        return wide(rows) if inverse is None else wide(rows) * inverse.to(rows.device, wide(rows).dtype)


class _Capture(Holding):
    def __init__(self, model: nn.Module, reference: Reference, samples: slice, inputs: Any) -> None:
        super().__init__(model, reference.sites, reference.inverse, inputs)
        self._reference, self._samples = reference, samples

    def layer(self, site: LayerSite, call: Call) -> Any:
        """Store output, plus what is added to it, at the sampled positions."""
        output: Tensor = call.run()
        values = channel_last(call, output, site.batch, site.positions)
        positions = self._reference.place(site, values.shape[1])
        rows = wide(positions.take(values, self._samples))
        partner = self.partner(site, call, output)
        if partner is not None:
            rows = rows + self.scaled(site, positions.take(partner, self._samples))
        self._reference.store(site, self._samples, rows)
        return output


def wide(rows: Tensor) -> Tensor:
    """At least single precision."""
    return rows if rows.dtype == torch.float64 else rows.float()


def answers_in(output: Any, samples: int) -> list[Tensor]:
    """What a model answers: its logits, or every tensor of real numbers that has a row for each sample."""
    first = logits_of(output, warn=False)
    if isinstance(output, Tensor) or first is getattr(output, "logits", None):
        return [wide(first).clone()]
    nest = output if isinstance(output, dict | tuple | list) else vars(output)
    rows = [t for t in tensors_in(nest) if t.is_floating_point() and t.ndim and len(t) == samples]
    return [wide(t).clone() for t in rows or [first]]


def memory_of(device: torch.device) -> int:
    """The bytes of a machine's or a GPU's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return 8 * 2**30


def _per_sample(sites: Iterable[LayerSite], samples: int, rows: int) -> int:
    """How many positions of each sample take part, such that all layers' rows fit into memory."""
    sites = list(sites)
    most = max(1, rows // samples)
    while most > 1 and 4 * samples * sum(s.channels * min(s.positions, most) for s in sites) > _MOST_BYTES:
        most -= max(1, most // 8)
    return most


def _inverse(site: LayerSite, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """What turns a tensor that is added behind the norm into units of the layer's output."""
    if site.norm is None:
        return None
    scale = site.norm.scale(tensors)
    # A channel that the norm all but silences cannot make up for anything.
    return torch.where(scale.abs() > 1e-3 * scale.abs().max(), 1 / scale, 0.0)


def _level(site: LayerSite, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """For each channel the output at which the ReLU behind begins to pass, and 1 if it passes more, -1 if less."""
    if not site.rectified:
        return None
    if site.norm is None:
        return torch.stack([torch.zeros(site.channels), torch.ones(site.channels)]).to(tensors[site.weight].device)
    scale = site.norm.scale(tensors)
    # A channel that the norm all but silences has no such level: everything counts as passed.
    silent = scale.abs() <= 1e-3 * scale.abs().max()
    level = torch.where(silent, -torch.inf, site.norm.zero(tensors))
    return torch.stack([level, torch.where(silent | (scale > 0), 1.0, -1.0)])


def _held(count: int, targets: Tensor | None, share: float, generator: torch.Generator) -> Tensor:
    """Which samples are held out: the same share of every class where that is known."""
    held = torch.zeros(count, dtype=torch.bool)
    order = torch.randperm(count, generator=generator)
    if targets is not None and len(targets) == count:
        order = order[torch.sort(targets[order], stable=True).indices]
    # Spread evenly along the order, in which classes lie together. Of two samples or more, at least one on either side.
    marks = torch.floor(torch.arange(count + 1) * share + 0.5).diff() > 0
    if share and count > 1 and not bool(marks.any()):
        marks[count // 2] = True
    if bool(marks.all()):
        marks[0] = False
    held[order[marks]] = True
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
