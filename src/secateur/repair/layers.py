"""Layers that can be repaired: what is known about each, how they are found, and watching them run."""

from __future__ import annotations

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.nest import Images, map_tensors, select_samples, tensors_in
from secateur.ops.activation import Identity
from secateur.ops.attention import AddMatMul
from secateur.ops.conv import TransposedConvolution
from secateur.ops.elementwise import Sum
from secateur.ops.norm import BatchNorm
from secateur.ops.shape import Reshape
from secateur.ops.table import Call, Site
from secateur.repair.rows import ALL, Places, Positions, Rows, channel_last, is_convolution, operands, shape_of, wide
from secateur.running.copies import named_tensors, shared_copy
from secateur.running.observer import Observer
from secateur.running.sandbox import Example, quiet, run_or_explain, uncollected
from secateur.running.tensor_facts import TensorFacts, version

# Functions that pick positions by numbers or marks, and functions that write such positions back.
_PICKS = re.compile(r"getitem|index_select|gather|take|masked_select")
_WRITES = re.compile(r"index_add|index_put|index_copy|scatter")
#: Stands for the model's own input among the calls.
INPUT = Site("", "input", -1)
Tensors = Mapping[str, Tensor]
Values = TypeVar("Values", Tensor, Tensor | None)


@dataclass(frozen=True)
class FollowingNorm:
    """The batch norm that reads a layer's output: names of its tensors, and eps.

    It is `alone` if it reads nothing else and nothing else reads that output. Then its mean can carry a constant. On
    several sizes this holds for all of them.
    """

    mean: str
    variance: str
    weight: str | None
    bias: str | None
    eps: float
    alone: bool = True

    def scale(self, tensors: Tensors) -> Tensor:
        """The factor of each channel."""
        scale = (tensors[self.variance].detach().double() + self.eps).rsqrt()
        return scale if self.weight is None else scale * tensors[self.weight].detach().double()


@dataclass(frozen=True)
class RepairableLayer:
    """A call of a convolution or linear layer. `number` counts the calls of a forward pass.

    A layer is known by its weight: an attention module makes other calls after it was cut. A convolution that runs on
    feature maps of several sizes, as the head of a pyramid does, has its calls on the other maps in `others`.
    """

    number: int
    weight: str
    bias: str | None
    #: A transposed convolution, or a linear layer as GPT-2 writes it: the output channels lie along dimension 1 of the
    #: weight. Others lie along 0.
    transposed: bool = False
    columns: bool = False
    #: The dimension of input and output along which samples lie.
    batch: int = 0
    #: Of the output for one sample.
    channels: int = 0
    positions: int = 0
    norm: FollowingNorm | None = None
    #: The call whose output is added to this layer's output, if it runs before this layer.
    partner: Site | None = None
    #: If something that limits numbers (a ReLU, a ReLU6) alone reads the output, after the norm and after the partner
    #: was added: its limits.
    limits: tuple[float, float] | None = None
    #: The positions of each sample that take part.
    sampled: Positions = field(default=ALL, compare=False)
    #: The factor that turns what is added after the norm into units of the layer's output.
    inverse: Tensor | None = field(default=None, compare=False)
    #: For each channel the least and the greatest output that these limits let pass.
    span: Tensor | None = field(default=None, compare=False)
    #: In a smaller model: which of the original's output channels are left; None for all.
    kept: np.ndarray[Any, Any] | None = field(default=None, compare=False)
    #: Its later calls, and which call this is.
    others: tuple[RepairableLayer, ...] = ()
    turn: int = 0

    @property
    def key(self) -> str:
        """The name of this call: that of the weight for the first one."""
        return f"{self.weight}#{self.turn}" if self.turn else self.weight

    @property
    def calls(self) -> tuple[RepairableLayer, ...]:
        """This call and the later ones."""
        return (self, *self.others)

    @property
    def means(self) -> set[str]:
        """Of the norms that follow its calls."""
        return {call.norm.mean for call in self.calls if call.norm is not None}

    @property
    def places(self) -> int:
        """Positions of all calls."""
        return sum(call.positions for call in self.calls)

    @property
    def rows(self) -> int:
        """Positions of each sample that take part, of all calls."""
        return sum(c.positions if c.sampled.chosen is None else c.sampled.chosen.shape[1] for c in self.calls)

    @property
    def outputs(self) -> int:
        """The dimension of the weight along which the output channels lie."""
        return int(self.transposed or self.columns)

    @property
    def shifts(self) -> bool:
        """Whether a constant per output can be added: to a bias, or to the mean of the batch norm that follows."""
        return self.bias is not None or (self.norm is not None and self.norm.alone)

    def work(self, tensors: Tensors, samples: int, regressed: bool) -> float:
        """About how long its repair takes, as was measured: what the forward multiplies for so many samples, what takes
        the same time for every layer, and, where inputs are regressed on, what the rows take and what solving does."""
        size = tensors[self.weight].numel()
        features = size / max(tensors[self.weight].shape[self.outputs], 1)
        regression = samples * self.rows * features**2 + 1.5 * features**3
        return 0.3 * samples * size * self.places + 2e9 + regression * regressed

    def left(self, values: Values) -> Values:
        """Numbers for the original's output channels, which are the last dimension, for those that are left."""
        if self.kept is None or values is None:
            return values
        return values.index_select(-1, torch.as_tensor(self.kept, device=values.device))

    def cut(self, kept: np.ndarray[Any, Any] | None, own: RepairableLayer) -> RepairableLayer:
        """The layer in a smaller model, where these output channels are left. `own` is what was found there."""
        small = replace(self, kept=kept, batch=own.batch, partner=own.partner)
        alike = [call.positions for call in self.others] == [call.positions for call in own.others]
        others = tuple(replace(call, kept=kept) for call in self.others) if alike else ()
        return replace(small, inverse=small.left(self.inverse), span=small.left(self.span), others=others)

    def prepared(self, tensors: Tensors, sampled: Sequence[Positions]) -> RepairableLayer:
        """With all that the original's tensors tell. `sampled` are the positions for each call."""
        others = tuple(replace(call, sampled=own) for call, own in zip(self.others, sampled[1:], strict=True))
        return replace(self, sampled=sampled[0], others=others)._scaled(tensors)

    def _scaled(self, tensors: Tensors) -> RepairableLayer:
        span = None
        if self.limits is not None:
            ends = torch.tensor(self.limits, dtype=torch.float64, device=tensors[self.weight].device)
            span = ends[:, None].repeat(1, self.channels)
        if self.norm is None:
            return replace(self, span=span)
        scale = self.norm.scale(tensors)
        # A channel that the norm nearly silences cannot make up for anything, and all of it counts as passed.
        silent = scale.abs() <= 1e-3 * scale.abs().max()
        if span is not None:
            if self.norm.bias is not None:
                span = span - tensors[self.norm.bias].detach().double()
            span = (tensors[self.norm.mean].detach().double() + span / scale).sort(0).values  # a factor may be negative
            span = torch.where(silent, span.new_tensor([[-torch.inf], [torch.inf]]), span)
        return replace(self, inverse=torch.where(silent, 0.0, 1 / scale), span=span)


Layers = Mapping[str, RepairableLayer]


@dataclass(frozen=True)
class Surveyed:
    """The layers that can be repaired, by weight and in order of execution.

    Bytes of one sample: `largest` is the largest activation up to the last of them, `alive` is by weight what is in
    memory when the layer is called.
    """

    layers: dict[str, RepairableLayer]
    largest: int
    alive: dict[str, int]
    #: Of all layers that run on the same positions in every model, by weight: the dimension of their outputs.
    dense: dict[str, int] = field(default_factory=dict)


def survey(model: nn.Module, samples: Example) -> Surveyed:
    """Find the layers that can be repaired. `samples` are one or two.

    Weights that are used more than once or elsewhere are left out, and layers that mix samples. A convolution may run
    on feature maps of several sizes, once on each. If a stream is added to its output, or if samples are mixed on one
    of them, it is repaired on the first. Layers after a choice among positions (the best boxes) are left out, since a
    smaller model may choose others. Layers that run on some samples only, as the experts of a mixture do, are left out
    when that is seen.
    """

    def watched(inputs: Example, alone: _Survey | None = None) -> _Survey:
        with uncollected:
            copy = shared_copy(model).eval()
            with quiet(), _Survey(copy, inputs, alone) as seen:
                run_or_explain(copy, inputs)
        return seen

    found = watched(_two(samples), watched(select_samples(samples, slice(1))))
    layers = {}
    uses = found.uses
    for number, layer in found.layers.items():
        calls = uses[layer.weight] if uses[layer.weight] == len(set(found.sizes[layer.weight])) else 1
        if layer.turn or uses[layer.weight] > calls or (layer.bias is not None and uses[layer.bias] > calls):
            continue
        numbers = [number, *found.others[layer.weight]]
        turns = [found.layers[other] for other in numbers]
        if len(turns) != uses[layer.weight] or any(turn.partner is not None for turn in turns):
            numbers, turns = [number], [layer]
        reads = [[found.reads[call, stage] for stage in range(found.stages[call])] for call in numbers]
        norm, limits = layer.norm, layer.limits
        if norm is not None:  # each size may have a norm of its own: together they carry a constant, or none does
            after = Counter(turn.norm.mean for turn in turns if turn.norm is not None)
            alone = after.total() == len(turns) and all(uses[mean] == n for mean, n in after.items())
            norm = replace(norm, alone=alone and all(own[0] == 1 for own in reads))
        if any(sum(own) != len(own) for own in reads) or any(t.norm != layer.norm or t.limits != limits for t in turns):
            limits = None
        layers[layer.weight] = replace(layer, norm=norm, limits=limits, others=tuple(turns[1:]))
    largest = max((found.largest[layer.number] for layer in layers.values()), default=1) // 2
    return Surveyed(layers, largest, {name: found.alive[own.number] // 2 for name, own in layers.items()}, found.dense)


def _two(samples: Example) -> Example:
    """Two samples, the second made of the first if there is one."""
    if isinstance(samples, tuple) and isinstance(samples[0], Images):
        return (Images([samples[0][0], samples[0][-1].flip(-1)]),)
    return map_tensors(
        lambda t: t if not t.ndim or len(t) == 2 else torch.cat([t, t.flip(-1) if t.ndim > 1 else t]), samples
    )


class _Survey(Observer):
    """Notes every layer with a weight of its own, and what happens to its output. Layers are known by their call's
    number here."""

    def __init__(self, model: nn.Module, inputs: Example, alone: _Survey | None = None) -> None:
        super().__init__(model)
        self._names = {id(t): name for name, t in named_tensors(model)}
        self._number = -1
        self.layers: dict[int, RepairableLayer] = {}
        #: By weight, the numbers of later calls on feature maps of other sizes.
        self.others: defaultdict[str, list[int]] = defaultdict(list)
        #: How many calls read each parameter and buffer.
        self.uses: Counter[str | None] = Counter()
        #: How many stages a layer's output has: as it is, after the norm, after an addition. How many calls read each.
        self.stages: Counter[int] = Counter()
        self.reads: Counter[tuple[int | None, int]] = Counter()
        #: By weight, how many positions each call of a convolution has, and where layers have outputs.
        self.sizes: defaultdict[str, list[int]] = defaultdict(list)
        self.dense: dict[str, int] = {}
        # 1 for what comes from a layer, 2 for what was picked by such numbers.
        self._chosen, self._hidden = TensorFacts[int](), False  # hidden: they went where nobody can follow them
        #: By call, the shape of the output and some of its numbers, to compare with those of another pass.
        self.probes: dict[str, tuple[torch.Size, Tensor]] = {}
        #: The pass with one sample alone, if this one has two.
        self._alone = alone
        #: In bytes: the largest activation up to each layer, and so far; what is in memory when a layer is called.
        self.largest: dict[int, int] = {}
        self.alive: dict[int, int] = {}
        self._largest = 0
        self._outputs: list[weakref.ref[Tensor]] = []
        # Facts hold for a version of the tensor: a write to it, through any view, makes them void.
        self._made: TensorFacts[tuple[int, Site, int]] = TensorFacts()
        self._stage: TensorFacts[tuple[int, int, int]] = TensorFacts()
        if isinstance(inputs, Tensor):
            self._made[inputs] = -1, INPUT, version(inputs)

    def observe(self, call: Call) -> Any:
        self._number += 1
        operation = call.operation
        self._count(call.tensors())
        read = call.get("input")
        source, _ = self._stage_of(read)
        joined = self._add(call, operation.sign) if isinstance(operation, Sum) else None
        if source is not None:
            self.layers[source] = replace(self.layers[source], limits=call.limits or self.layers[source].limits)
        layer = operands(call)
        if layer is not None:
            self.alive[self._number] = self._in_memory()
        output = call.run()
        level = self._follow(call.site.function, call.tensors(), output, layer is not None)
        if not isinstance(output, Tensor):
            return output
        self._outputs.append(weakref.ref(output))
        self._largest = max(self._largest, output.numel() * output.element_size())
        if call.writes:
            self._stage.forget(output)
        if layer is not None and level < 2 and not self._hidden:
            joined = self._layer(call, output, *layer[1:])
        elif source is not None and isinstance(operation, BatchNorm):
            joined = self._norm(source, call)
        elif source is not None and isinstance(operation, Identity) and output.dtype == read.dtype:
            joined = source
        elif source is not None and isinstance(operation, Reshape) and self.layers[source].columns:
            joined = source if output.shape[-1] == read.shape[-1] else None  # rows of tokens become sequences again
        if joined is not None:
            if self._stage_of(output)[0] is None:  # else it is the same tensor
                self._stage[output] = joined, self.stages[joined], version(output)
            self.stages[joined] += 1
        self._made[output] = self._number, call.site, version(output)
        return output

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count(given := tensors_in((args, kwargs)))
        output = func(*args, **kwargs)
        self._follow(getattr(func, "__name__", ""), given, output, False)
        return output

    def transformed(self, func: Any, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        """Inside `torch.vmap` or its like, numbers of layers may make a choice: later layers are left out."""
        self._count(list(tensors))
        self._hidden |= any(tensor in self._chosen for tensor in tensors)
        return run()

    def _follow(self, name: str, given: list[Tensor], output: Any, layer: bool) -> int:
        """Note whether an output comes from a layer (1), and from positions that such numbers picked (2). What is
        written back to its own position is as before."""
        levels = [(self._chosen.get(t) or 0, t.is_floating_point()) for t in given]
        level = max([int(layer), *(level for level, _ in levels)])
        if level and _PICKS.search(name) and any(known and not real for known, real in levels):
            level = 2
        elif _WRITES.search(name):
            level = min(level, 1)
        for made in tensors_in(output) if level else ():
            self._chosen[made] = level if made.is_floating_point() else 1
        return level

    def _in_memory(self) -> int:
        """The bytes of all outputs that somebody still holds."""
        held = [(ref, tensor) for ref in self._outputs if (tensor := ref()) is not None]
        self._outputs = [ref for ref, _ in held]
        return sum({(own := t.untyped_storage()).data_ptr(): own.nbytes() for _, t in held}.values())

    def _count(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.uses[self._names.get(id(tensor))] += 1
            self.reads[self._stage_of(tensor)] += 1

    def _layer(self, call: Call, output: Tensor, own: Tensor, added: Tensor | None) -> int | None:
        """Note a layer; None if it cannot be repaired."""
        weight, bias, linear = self._name(own), self._name(added), not is_convolution(call)
        transposed, columns = (isinstance(call.operation, kind) for kind in (TransposedConvolution, AddMatMul))
        if transposed and int(call["groups"]) > 1:
            return None
        if weight is None or (bias is None and added is not None):
            return None
        sizes = self.sizes[weight]
        layer = RepairableLayer(self._number, weight, bias, transposed, columns, turn=len(sizes))
        sizes.append(0 if linear else output[0, 0].numel())
        if self._alone is None:
            self.probes[layer.key] = output.shape, _probe(output)
        else:
            batch = self._batch(layer.key, output)
            if batch is None or (batch == output.ndim - 1 if linear else len(output) != 2):
                return None  # samples are mixed or along the features, or there are several images for each
            channels = output.shape[-1 if linear else 1]
            layer = replace(layer, batch=batch, channels=channels, positions=output.numel() // 2 // channels)
            if not layer.turn:
                self.dense[weight] = layer.outputs
        if layer.turn:
            self.others[weight].append(self._number)
        self.layers[self._number], self.largest[self._number] = layer, self._largest
        return self._number

    def _batch(self, key: str, output: Tensor) -> int | None:
        """The dimension along which samples lie one after the other: there, two samples begin like the first alone."""
        assert self._alone is not None
        shape, probe = self._alone.probes.get(key, (torch.Size(), None))
        if probe is None or len(shape) != output.ndim:
            return None
        grown = [d for d, (one, two) in enumerate(zip(shape, output.shape, strict=True)) if one != two]
        if len(grown) != 1 or output.shape[grown[0]] != 2 * shape[grown[0]]:
            return None
        found = _probe(output.narrow(grown[0], 0, shape[grown[0]]))
        # Other batch sizes may be summed in another order; half precision has three digits.
        same = (found - probe).abs().max() <= 0.02 * probe.abs().max().clamp_min(1e-30)
        return grown[0] if bool(same) else None

    def _norm(self, source: int, call: Call) -> int | None:
        """Note the batch norm that follows a layer; None if it cannot be followed."""
        if self.layers[source].norm is not None or call["training"]:
            return None
        keys = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = names = [self._name(call[key]) for key in keys]
        own = all(name is not None or call[key] is None for key, name in zip(keys, names, strict=True))
        if mean is None or variance is None or not own:
            return None
        norm = FollowingNorm(mean, variance, weight, bias, float(call["eps"]))
        self.layers[source] = replace(self.layers[source], norm=norm)
        return source

    def _add(self, call: Call, sign: int) -> int | None:
        """The layer to whose output this call adds the residual stream: a tensor made before the layer ran."""
        a, b = call["input"], call.get("other")
        if sign != 1 or float(call.get("alpha", 1)) != 1:
            return None
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a is b or a.shape != b.shape:
            return None
        for mine, other in ((a, b), (b, a)):
            (source, _), made = self._stage_of(mine), self._made.get(other)
            if source is None or made is None or self.layers[source].partner is not None:
                continue
            number, site, written = made
            if number < source and written == version(other):
                self.layers[source] = replace(self.layers[source], partner=site)
                return source
        return None

    def _stage_of(self, tensor: Any) -> tuple[int | None, int]:
        """The layer whose output a tensor is (None: of no layer), and at which stage."""
        source, stage, written = self._stage.get(tensor) or (None, 0, None)
        return (source, stage) if source is not None and written == version(tensor) else (None, 0)

    def _name(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self._names.get(id(tensor))


def _probe(tensor: Tensor) -> Tensor:
    """About a thousand numbers of a tensor."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // 1024)].double()


#: What to do when a model comes to a layer; returns what the model gets to see as its output.
Handle = Callable[[RepairableLayer, Rows], Tensor]


class LayerObserver(Observer):
    """Hands each repairable layer to `handle`, and keeps tensors until the layer runs whose output they join.

    `places` are the samples that `inputs` are, `count` of them. Layers for which `first` holds run before that, so that
    their output is known. `run` computes something.
    """

    def __init__(
        self, model: nn.Module, layers: Layers, handle: Handle, places: Places, inputs: Any, count: int,
        first: Callable[[RepairableLayer], bool], run: Callable[[Callable[[], Any]], Any] = lambda task: task(),
    ) -> None:  # fmt: skip
        super().__init__(model)
        tensors = dict(named_tensors(model))
        self._layers = {id(tensors[name]): layer for name, layer in layers.items() if name in tensors}
        self._handle, self._places, self._count, self._first, self._run = handle, places, count, first, run
        self._wanted = Counter(layer.partner for layer in self._layers.values() if layer.partner is not None)
        #: Layers that run on some samples only: which of them decides the forward.
        self.varying: set[str] = set()
        self._turns: Counter[str] = Counter()
        self._kept: dict[Site, Tensor] = {INPUT: inputs} if isinstance(inputs, Tensor) else {}

    def concerns(self, value: Any) -> bool:
        return False  # the model was analysed before

    def observe(self, call: Call) -> Any:
        own = operands(call)
        layer = self._layers.get(id(own[1])) if own is not None else None
        if layer is not None:
            turn = self._turns[layer.weight]
            self._turns[layer.weight] += 1
            layer = layer.calls[turn] if turn < len(layer.calls) else None  # on another feature map
        rows = None if layer is None else self._run(lambda: self._rows(layer, call))
        if layer is None:
            output = self._run(call.run)
        elif rows is None:
            self.varying.add(layer.weight)
            output = self._run(call.run)
        else:
            output = self._handle(layer, rows)
        if call.site in self._wanted and isinstance(output, Tensor):
            self._kept[call.site] = output
        return output

    def _rows(self, layer: RepairableLayer, call: Call) -> Rows | None:
        """None if the layer does not run on every position of every sample."""
        shape = shape_of(call)
        if shape.numel() != shape[1 if is_convolution(call) else -1] * layer.positions * self._count:
            return None
        partner, added = self._partner(layer), None
        if partner is not None and (partner.shape == shape or (layer.columns and partner.numel() == shape.numel())):
            added = channel_last(call, partner, layer.batch, layer.positions)
            added = wide(layer.sampled.take(added, self._places))
            if layer.inverse is not None:
                added = added * layer.inverse.to(added)
        output = call.run() if self._first(layer) else None
        return Rows(call, self._places, layer.sampled, layer.batch, layer.positions, added, output)

    def _partner(self, layer: RepairableLayer) -> Tensor | None:
        """What will be added to a layer's output. It is let go when the last layer has read it: it is large."""
        if layer.partner is None:
            return None
        self._wanted[layer.partner] -= 1
        return self._kept.get(layer.partner) if self._wanted[layer.partner] else self._kept.pop(layer.partner, None)
