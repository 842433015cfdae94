"""Conv and linear layers in a relevance pass, with the batch norms and ReLUs that belong to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import UnsupportedModelError
from secateur.ops.table import Call
from secateur.relevance.maps import ConvMap, DenseMap, Geometry, LinearMap
from secateur.relevance.steps import Layer, take
from secateur.relevance.verbs import FULL, Verbs
from secateur.relevance.weights import Build, LayerSite, LinearCall, path_of


class Layers(Verbs):
    """The verbs of layers.

    A convolution that has always met a batch norm waits for it before it becomes part of the graph. From the second
    batch on it is computed together with the batch norm and the ReLU that followed it in the batch before; if anything
    else asks for the numbers in between, the batch begins again.
    """

    def dense(self, call: Call) -> Tensor:
        """A linear layer."""
        x, known = call["input"], self._layers.get(call.site)
        if known is None or known.source is not self._weights.source(call["weight"]):
            known = self._layer_site(call, DenseMap, call["weight"].shape[0], "linear", -1)
        return self._layer_of(call, call.run, x, known)

    def convolves(self, call: Call, spatial: int, transposed: bool = False) -> Tensor:
        """A convolution. Input without a batch dimension gets one."""
        x, weight, known = call["input"], call["weight"], self._layers.get(call.site)
        options = (call["stride"], call["padding"], call["dilation"], call["groups"])
        if known is None or known.source is not self._weights.source(weight) or known.options != options:
            further = call["output_padding"] if transposed else 0
            geometry = Geometry.of(tuple(weight.shape[2:]), *map(_hashable, options), transposed, _hashable(further))
            outputs = weight.shape[1] * geometry.groups if transposed else weight.shape[0]
            known = self._layer_site(call, geometry, outputs, "conv", 1, options)
        if x.dim() > spatial + 1 or not x.requires_grad:
            return self._layer_of(call, call.run, x, known)
        known.waits = False  # batch norms do not read what has no batch
        single, run = x.unsqueeze(0), call.on(x)
        return self._layer_of(call, lambda: run(single), single, known)[0]

    def batch_norm(self, call: Call, x: Tensor) -> Tensor:
        """Folded into the layer whose output it reads, if there is one; else it is a scale that passes relevance."""
        record: LinearCall | None = self.facts.linear.get(x)
        if x in self.facts.ahead:
            self.deviates()
        if record is None:
            return self._normed(call, x)
        if call["training"] or call["running_mean"] is None or (record.site.kind == "linear" and x.dim() > 2):
            return self._normed(call, self._awaken(x, record) if record.waiting else x)
        stats, eps = (call["running_mean"], call["running_var"], call["weight"], call["bias"]), float(call["eps"])
        site, layer = record.site, record.ahead
        if layer is not None:
            if (
                site.norm is None
                or site.norm[1] != eps
                or any(a is not b for a, b in zip(site.norm[0], stats, strict=True))
            ):
                self.deviates()
            output = self._layer(x.detach, record, lambda a: layer)
            if site.rectified:
                self.facts.ahead[output] = True
        else:
            output = self._layer(call.run, record, lambda a: self._weights.prepared(record, stats, eps))
        site.reread = site.reread or record.normed or not record.waiting
        site.norm, record.normed = (stats, eps), True
        self.facts.made[output] = site
        self._fresh = weakref.ref(output)
        return output

    def _layer_site(
        self, call: Call, build: Build, outputs: int, kind: str, channel: int, options: tuple[Any, ...] = ()
    ) -> LayerSite:
        """What there is to know about a layer before it runs; true of the next batch too, if the weight is the same."""
        weight, transposed = call["weight"], isinstance(build, Geometry) and build.transposed
        if call.site in self._layers:
            self.deviates()
        name, rows = self._weights.name(weight, call, outputs)
        self.places[call.site] = (name, rows.start, rows.stop)
        height = rows.stop if transposed else self._weights.height(name, rows.stop)
        self._heights[name] = (max(height, self._heights.get(name, (0, None))[0]), weight.device)
        waits = kind == "conv"
        known = LayerSite(self._weights.source(weight), options, build, name, rows, kind, channel, path_of(name), waits)
        if isinstance(known.source, nn.Parameter):
            self._layers[call.site] = known
        return known

    def _layer_of(self, call: Call, run: Callable[[], Tensor], x: Tensor, site: LayerSite) -> Tensor:
        """A conv or linear layer. Its output remembers how it came about, in case a batch norm follows."""
        index, self._count = self._count, self._count + 1
        if not x.requires_grad:
            return self.stops(call)  # type: ignore[no-any-return]
        record = LinearCall(x, call["weight"], call["bias"], site, index)
        layer = self._in_one_go(record)
        if layer is not None and site.norm is not None:
            with torch.no_grad():
                output = layer.forward(x, site.rectified).requires_grad_(True)
            record.waiting, record.ahead = True, layer
        elif layer is not None:
            output = self._layer(lambda: layer.forward(x, site.rectified), record, lambda a: layer)
            self.facts.made[output] = site
            self.facts.ahead[output] = True
        elif site.waits:  # a batch norm may replace this output at once, so it is not yet made part of the graph
            with torch.no_grad():
                output = run()
            record.waiting = True
            output.requires_grad_(True)
        else:
            output = self._layer(run, record, lambda a: self._weights.prepared(record))
            self.facts.made[output] = site
        self.facts.linear[output] = record
        self._fresh = weakref.ref(output)
        return output

    def _in_one_go(self, record: LinearCall) -> ConvMap | None:
        """A convolution together with the batch norm and the ReLU that followed it in the batch before."""
        site = record.site
        if not self._fusing or site.reread or not (site.norm is not None or site.rectified):
            return None
        if not isinstance(site.build, Geometry) or site.build.border or record.x.dtype not in FULL:
            return None
        self._fused += 1
        with torch.no_grad():
            layer = self._weights.prepared(record, *(site.norm or ()))
        assert isinstance(layer, ConvMap)
        return layer

    def _awaken(self, output: Tensor, record: LinearCall) -> Tensor:
        """The output of a layer that waited for a batch norm in vain, as part of the graph."""
        if record.ahead is not None:
            self.deviates()
        record.site.waits = False
        record.site.reread = record.site.reread or record.normed
        record.waiting = False
        awake = self._layer(output.detach, record, lambda a: self._weights.prepared(record))
        self.facts.newer[output] = awake
        self.facts.linear[awake] = record
        self.facts.made[awake] = record.site
        if self._fresh is not None and self._fresh() is output:
            self._fresh = weakref.ref(awake)
        return awake

    def _layer(self, run: Callable[[], Tensor], record: LinearCall, prepare: Callable[[Tensor], LinearMap]) -> Tensor:
        x, site = record.x, record.site
        first = any(x is entry for entry in self._entries)
        place = self.place(site.kind, site.path, record.index, first or record.index == 0)
        stop = first and not self.heat_map
        output: Tensor = take(Layer(self, run, prepare, place, record, x in self.facts.nonneg, stop), x)
        return output

    def _normed(self, call: Call, x: Tensor) -> Tensor:
        if call["training"] and call.get("running_mean") is not None:
            raise UnsupportedModelError(
                f"{call.site} updates its running statistics although the model is in evaluation mode.",
                fix="call batch_norm with training=False",
            )
        output: Tensor = self.passes(call, x)
        self._fresh = weakref.ref(output)
        return output


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))


def _hashable(option: Any) -> Any:
    return tuple(option) if isinstance(option, list) else option
