"""Which layers of a model can be repaired: where they are called, what norm follows, what is added to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nest import map_tensors, tensors_in
from secateur.ops.activation import Identity
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.elementwise import Sum
from secateur.ops.linear import Linear
from secateur.ops.norm import BatchNorm, InstanceNorm
from secateur.ops.table import Call, Site
from secateur.running.copies import shared_copy
from secateur.running.observer import Observer
from secateur.running.sandbox import Example, quiet, run_or_explain
from secateur.running.tensor_facts import TensorFacts, writes

#: Stands for the model's own input among the calls.
INPUT = Site("", "input", -1)


@dataclass(frozen=True)
class Norm:
    """A batch norm that reads a layer's output: names of its tensors, and eps.

    It is `alone` if it reads nothing else and nothing else reads that output, so that its mean can carry a constant.
    """

    mean: str
    variance: str
    weight: str | None
    bias: str | None
    eps: float
    alone: bool = True

    def scale(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What it multiplies each channel with."""
        scale = (tensors[self.variance].detach().double() + self.eps).rsqrt()
        return scale if self.weight is None else scale * tensors[self.weight].detach().double()

    def zero(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What it turns into zero, for each channel."""
        mean = tensors[self.mean].detach().double()
        return mean if self.bias is None else mean - tensors[self.bias].detach().double() / self.scale(tensors)


@dataclass(frozen=True)
class LayerSite:
    """The one call of a convolution or linear layer. `number` counts the calls of a forward pass.

    Layers are known by their weight: an attention module that was cut makes other calls than the original one did.
    """

    number: int
    weight: str
    bias: str | None
    #: Output channels lie along dimension 1 of a transposed convolution's weight, 0 of others.
    transposed: bool = False
    #: Which dimension of input and output the samples lie along.
    batch: int = 0
    #: Of the output for one sample.
    channels: int = 0
    positions: int = 0
    norm: Norm | None = None
    #: The call whose output, which is there before this layer runs, is added to what this layer gives.
    partner: Site | None = None
    #: Whether a ReLU, and nothing else, reads what becomes of the output: by its norm, by adding its partner.
    rectified: bool = False

    @property
    def shifts(self) -> bool:
        """Whether a constant per output can be added: by a bias, or by the mean of the batch norm behind."""
        return self.bias is not None or (self.norm is not None and self.norm.alone)


class _Survey(Observer):
    """Notes every layer with a weight of its own, and what its output meets."""

    def __init__(self, model: nn.Module, inputs: Example, alone: _Survey | None = None) -> None:
        super().__init__(model)
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self._number = -1
        self.sites: dict[int, LayerSite] = {}
        #: How many calls read each parameter and buffer, and each layer's output.
        self.uses: Counter[str] = Counter()
        self.readers: Counter[int] = Counter()
        #: How many tensors hold a layer's output on its way (as it is, normed, added to), and how often these are read.
        self.stages: Counter[int] = Counter()
        self.reads: Counter[int] = Counter()
        #: By weight, the shape of the output and some of its numbers, to compare with those of another pass.
        self.probes: dict[str, tuple[torch.Size, Tensor]] = {}
        self._alone = alone
        #: The largest activation, in elements.
        self.largest = 0
        # With the tensor's version: whoever writes to it, by whatever view, makes the note void.
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
        if source is not None and call.function.__name__ in ("relu", "relu_"):
            self.sites[source] = replace(self.sites[source], rectified=True)
        output = call.run()
        if not isinstance(output, Tensor):
            return output
        self.largest = max(self.largest, output.numel())
        if writes(call):
            self._source.forget(output)
            self._raw.forget(output)
        if isinstance(operation, Convolution | TransposedConvolution | Linear):
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
        """Runs as it is: what was analysed before is not refused."""
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
        if isinstance(call.operation, TransposedConvolution) and int(call["groups"]) > 1:
            return
        if weight is None or (bias is None and call["bias"] is not None):
            return
        number = self._number
        site = LayerSite(number, weight, bias, isinstance(call.operation, TransposedConvolution))
        if self._alone is None:
            self.probes[weight] = output.shape, _probe(output)
        else:
            batch = self._batch(weight, output)
            if batch is None:
                return
            if batch == output.ndim - 1 if isinstance(call.operation, Linear) else len(output) != 2:
                return  # samples along the features, or several images for each
            channels = output.shape[-1 if isinstance(call.operation, Linear) else 1]
            site = replace(site, batch=batch, channels=channels, positions=output.numel() // 2 // channels)
        self.sites[number] = site
        self._follow(number, output)
        self._raw[output] = number

    def _batch(self, weight: str, output: Tensor) -> int | None:
        """The dimension that samples lie along, one after the other: there, two samples begin as the first alone."""
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
        if self.sites[source].norm is not None or call["training"]:
            return False
        mean, variance = self._name(call["running_mean"]), self._name(call["running_var"])
        weight, bias = self._name(call["weight"]), self._name(call["bias"])
        if (
            mean is None
            or variance is None
            or any(own is None and call[key] is not None for key, own in (("weight", weight), ("bias", bias)))
        ):
            return False
        self.sites[source] = replace(self.sites[source], norm=Norm(mean, variance, weight, bias, float(call["eps"])))
        return True

    def _follow(self, source: int, output: Tensor) -> None:
        """This is a layer's output, as it is or further on its way."""
        self.stages[source] += 1
        self._source[output] = source, version(output)

    def _add(self, call: Call) -> int | None:
        """A layer's output meets a tensor that was there before the layer ran, the residual stream: which layer's."""
        a, b = call["input"], call.get("other")
        name = call.function.__name__.strip("_")
        if name not in ("add", "iadd", "radd") or float(call.get("alpha", 1)) != 1:
            return None
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a is b or a.shape != b.shape:
            return None
        for mine, other in ((a, b), (b, a)):
            source, made = self._source_of(mine), self._made.get(other)
            if source is None or made is None or self.sites[source].partner is not None:
                continue
            number, site, written = made
            if number < source and written == version(other):
                self.sites[source] = replace(self.sites[source], partner=site)
                return source
        return None

    def _source_of(self, tensor: Tensor) -> int | None:
        entry = self._source.get(tensor)
        return entry[0] if entry is not None and entry[1] == version(tensor) else None

    def _name(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self._names.get(id(tensor))


@dataclass(frozen=True)
class Surveyed:
    """The layers that can be repaired, by weight and in order of execution, and the largest activation of a sample."""

    sites: dict[str, LayerSite]
    largest: int


def survey(model: nn.Module, samples: Example) -> Surveyed:
    """Find the layers that can be repaired. `samples` are one or two.

    Left out are weights that are used more than once or elsewhere, and layers in which samples are not kept apart.
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
    once = [site for site in found.sites.values() if found.uses[site.weight] == 1]
    sites = [
        replace(site, norm=replace(site.norm, alone=found.uses[site.norm.mean] == 1 == found.readers[site.number]))
        if site.norm is not None else site
        for site in once
        if site.bias is None or found.uses[site.bias] == 1
    ]  # fmt: skip
    sites = [
        replace(site, rectified=site.rectified and found.reads[site.number] == found.stages[site.number])
        for site in sites
    ]
    return Surveyed({site.weight: site for site in sites}, found.largest // 2)


def version(tensor: Tensor) -> int:
    """Counts writes to a tensor's memory."""
    return -1 if tensor.is_inference() else tensor._version


def _probe(tensor: Tensor) -> Tensor:
    """About a thousand numbers of a tensor."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // 1024)].double()
