"""Which layers of a model can be repaired: where they are called, which norm follows, and what is added to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.nest import map_tensors, tensors_in
from secateur.ops.activation import Identity
from secateur.ops.conv import TransposedConvolution
from secateur.ops.elementwise import Sum
from secateur.ops.linear import Linear
from secateur.ops.norm import BatchNorm, InstanceNorm
from secateur.ops.table import Call, Site
from secateur.repair.layers import INPUT, LAYERS, FollowingNorm, RepairableLayer
from secateur.running.copies import shared_copy
from secateur.running.observer import Observer
from secateur.running.sandbox import Example, quiet, run_or_explain
from secateur.running.tensor_facts import TensorFacts

_RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


@dataclass(frozen=True)
class Surveyed:
    """The layers that can be repaired, by weight and in order of execution, and the largest activation of a sample."""

    layers: dict[str, RepairableLayer]
    largest: int


def survey(model: nn.Module, samples: Example) -> Surveyed:
    """Find the layers that can be repaired. `samples` are one or two.

    Weights that are used more than once or elsewhere are left out, and layers that mix samples.
    """
    one = map_tensors(lambda t: t[:1], samples)
    two = map_tensors(lambda t: t if len(t) == 2 else torch.cat([t, t.flip(-1) if t.ndim > 1 else t]), samples)
    found: _Survey | None = None
    for inputs in (one, two):
        copy = shared_copy(model).eval()
        watched = _Survey(copy, inputs, found)
        with quiet(), watched:
            run_or_explain(copy, inputs)
        found = watched
    assert found is not None
    layers = {}
    for number, layer in found.layers.items():
        if found.uses[layer.weight] > 1 or (layer.bias is not None and found.uses[layer.bias] > 1):
            continue
        norm = layer.norm
        if norm is not None:
            norm = replace(norm, alone=found.uses[norm.mean] == 1 == found.readers[number])
        rectified = layer.rectified and found.reads[number] == found.stages[number]
        layers[layer.weight] = replace(layer, norm=norm, rectified=rectified)
    return Surveyed(layers, found.largest // 2)


class _Survey(Observer):
    """Notes every layer with a weight of its own, and what happens to its output. Layers are known by their call's
    number here."""

    def __init__(self, model: nn.Module, inputs: Example, alone: _Survey | None = None) -> None:
        super().__init__(model)
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self._number = -1
        self.layers: dict[int, RepairableLayer] = {}
        #: How many calls read each parameter and buffer, and each layer's output.
        self.uses: Counter[str] = Counter()
        self.readers: Counter[int] = Counter()
        #: How many tensors hold a layer's output (as it is, after the norm, after an addition), and how many calls read
        #: these.
        self.stages: Counter[int] = Counter()
        self.reads: Counter[int] = Counter()
        #: By weight, the shape of the output and some of its numbers, to compare with those of another pass.
        self.probes: dict[str, tuple[torch.Size, Tensor]] = {}
        #: The pass with one sample alone, if this one has two.
        self._alone = alone
        #: The largest activation, in elements.
        self.largest = 0
        # Facts hold for a version of the tensor: a write to it, through any view, makes them void.
        self._made: TensorFacts[tuple[int, Site, int]] = TensorFacts()
        self._source: TensorFacts[tuple[int, int]] = TensorFacts()
        self._raw: TensorFacts[int] = TensorFacts()
        if isinstance(inputs, Tensor):
            self._made[inputs] = -1, INPUT, version(inputs)

    def observe(self, call: Call) -> Any:
        """Run the call and note whose output it is."""
        self._number += 1
        operation = call.operation
        self._count(call.tensors())
        read = call.get("input")
        source = self._source_of(read) if isinstance(read, Tensor) else None
        joined = self._add(call) if isinstance(operation, Sum) else None
        if source is not None and call.function in _RELUS:
            self.layers[source] = replace(self.layers[source], rectified=True)
        output = call.run()
        if not isinstance(output, Tensor):
            return output
        self.largest = max(self.largest, output.numel())
        if call.writes:
            self._source.forget(output)
            self._raw.forget(output)
        if isinstance(operation, LAYERS):
            self._layer(call, output)
        elif source is not None and isinstance(operation, BatchNorm) and not isinstance(operation, InstanceNorm):
            if self._norm(source, call):
                self._follow(source, output)
        elif source is not None and isinstance(operation, Identity) and output.dtype == read.dtype:
            self._follow(source, output)
        elif joined is not None:
            self._follow(joined, output)
        self._made[output] = self._number, call.site, version(output)
        return output

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it: the model was analysed before."""
        self._count(tensors_in((args, kwargs)))
        return func(*args, **kwargs)

    def _count(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            name = self._names.get(id(tensor))
            if name is not None:
                self.uses[name] += 1
            raw, source = self._raw.get(tensor), self._source_of(tensor)
            if raw is not None:
                self.readers[raw] += 1
            if source is not None:
                self.reads[source] += 1

    def _layer(self, call: Call, output: Tensor) -> None:
        weight, bias = self._name(call["weight"]), self._name(call["bias"])
        transposed, linear = (isinstance(call.operation, kind) for kind in (TransposedConvolution, Linear))
        if transposed and int(call["groups"]) > 1:
            return
        if weight is None or (bias is None and call["bias"] is not None):
            return
        number = self._number
        layer = RepairableLayer(number, weight, bias, transposed)
        if self._alone is None:
            self.probes[weight] = output.shape, _probe(output)
        else:
            batch = self._batch(weight, output)
            if batch is None:
                return
            if batch == output.ndim - 1 if linear else len(output) != 2:
                return  # samples along the features, or several images for each
            channels = output.shape[-1 if linear else 1]
            layer = replace(layer, batch=batch, channels=channels, positions=output.numel() // 2 // channels)
        self.layers[number] = layer
        self._follow(number, output)
        self._raw[output] = number

    def _batch(self, weight: str, output: Tensor) -> int | None:
        """The dimension along which samples lie one after the other: there, two samples begin like the first alone."""
        assert self._alone is not None
        shape, probe = self._alone.probes.get(weight, (torch.Size(), None))
        if probe is None or len(shape) != output.ndim:
            return None
        grown = [d for d, (one, two) in enumerate(zip(shape, output.shape, strict=True)) if one != two]
        if len(grown) != 1 or output.shape[grown[0]] != 2 * shape[grown[0]]:
            return None
        found = _probe(output.narrow(grown[0], 0, shape[grown[0]]))
        # Other batch sizes may be summed in another order; half precision has three digits.
        same = (found - probe).abs().max() <= 0.02 * probe.abs().max().clamp_min(1e-30)
        return grown[0] if bool(same) else None

    def _norm(self, source: int, call: Call) -> bool:
        """Note the batch norm that follows a layer; False if it cannot be followed."""
        if self.layers[source].norm is not None or call["training"]:
            return False
        keys = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = names = [self._name(call[key]) for key in keys]
        own = all(name is not None or call[key] is None for key, name in zip(keys, names, strict=True))
        if mean is None or variance is None or not own:
            return False
        norm = FollowingNorm(mean, variance, weight, bias, float(call["eps"]))
        self.layers[source] = replace(self.layers[source], norm=norm)
        return True

    def _follow(self, source: int, output: Tensor) -> None:
        """This tensor is a layer's output, as it is or further on."""
        self.stages[source] += 1
        self._source[output] = source, version(output)

    def _add(self, call: Call) -> int | None:
        """The layer to whose output this call adds the residual stream: a tensor made before the layer ran."""
        a, b = call["input"], call.get("other")
        if call.function not in _ADDITIONS or float(call.get("alpha", 1)) != 1:
            return None
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a is b or a.shape != b.shape:
            return None
        for mine, other in ((a, b), (b, a)):
            source, made = self._source_of(mine), self._made.get(other)
            if source is None or made is None or self.layers[source].partner is not None:
                continue
            number, site, written = made
            if number < source and written == version(other):
                self.layers[source] = replace(self.layers[source], partner=site)
                return source
        return None

    def _source_of(self, tensor: Tensor) -> int | None:
        entry = self._source.get(tensor)
        return entry[0] if entry is not None and entry[1] == version(tensor) else None

    def _name(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self._names.get(id(tensor))


def version(tensor: Tensor) -> int:
    """Counts writes to a tensor's memory."""
    return -1 if tensor.is_inference() else tensor._version


def _probe(tensor: Tensor) -> Tensor:
    """About a thousand numbers of a tensor."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // 1024)].double()
