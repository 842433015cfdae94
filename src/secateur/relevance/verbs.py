"""The verbs in which operations say how relevance passes: a `layer`, something that `passes` it on, `moves` data,
`averages`, `adds`, `gates`, `multiplies` or `attends`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.errors import UnsupportedModelError
from secateur.ops.table import Call, Site, tensors_in
from secateur.relevance.composites import Composite, Place
from secateur.relevance.conservation import Journal, Sum
from secateur.relevance.facts import About, Facts, writes
from secateur.relevance.maps import AveragingMap, ConvMap, DenseMap, FunctionMap, Geometry, LinearMap, MatmulMap
from secateur.relevance.pointwise import rectified
from secateur.relevance.rules import Rule
from secateur.relevance.steps import (
    Adding,
    Attending,
    Halving,
    Layer,
    Multiplying,
    Padding,
    Passing,
    Sharing,
    Weighing,
    take,
    total,
)  # fmt: skip
from secateur.relevance.weights import Build, LayerSite, LinearCall, SumSite, Weights, path_of
from secateur.tracing import Observer

Absolute = Literal[False, "sample", "element"]

#: Numbers with so many digits that folding a batch norm into the weights of the forward pass does no harm.
_FULL = (torch.float32, torch.float64)


class Verbs(Observer):
    """What an operation may ask for. State and books are those of the relevance pass, which this is part of."""

    composite: Composite
    absolute: Absolute
    heat_map: bool
    attentive: set[str]
    facts: Facts
    places: dict[Site, tuple[str, int, int]]
    deviates: Callable[[], None]
    _weights: Weights
    _layers: dict[Site, LayerSite]
    _sums: dict[Site, SumSite]
    _fusing: bool
    _fused: int
    _journal: Journal
    _summed: About[tuple[int, int, Tensor]]
    _heights: dict[str, tuple[int, torch.device]]
    _rules: dict[tuple[Place, int], Rule]
    _entries: list[Tensor]
    _sinks: list[tuple[str, Tensor]]
    _leaves: set[int]
    _fresh: weakref.ref[Tensor] | None
    _writable: weakref.ref[Tensor] | None
    _count: int
    _doubtful: str

    def moves(self, call: Call) -> Any:
        """Data movement: autograd moves relevance back the same way. Facts about the numbers move along."""
        source = next((t for t in call.tensors() if t.requires_grad), None)
        output = self._run_on_copy(call) if writes(call) else call.run()
        moved = [t for t in call.tensors() if t.is_floating_point()]
        if moved and all(t in self.facts.nonneg for t in moved):
            self.nonneg(output)
        if source is not None and source in self.facts.gate:
            for tensor in tensors_in(output):
                self.facts.gate[tensor] = True
        known = None if source is None else self.facts.offset.get(source)
        if source is not None and known is not None and isinstance(output, Tensor):
            offset = known.expand(source.shape)
            args = tuple(offset if arg is source else arg for arg in call.args)
            self.facts.offset[output] = call.function(*args, **call.kwargs)
        return output

    def passes(self, call: Call, x: Tensor, *, nonneg: bool = False, gate: bool = False) -> Any:
        """Relevance passes unchanged to `x`: activations, dropout, norms, scaling."""
        if not x.requires_grad:
            return self.stops(call)
        written = writes(call)
        if written and self._writable is not None and self._writable() is x and call.tensors()[0] is x:
            if rectifies(call) and (made := self.facts.made.get(x)) is not None:
                made.rectified = True
            self.facts.overwritten(x)
            with torch.no_grad():  # nobody has kept the old numbers, and the way of relevance stays the same
                output = call.run()
        elif written:
            output = take(Passing(lambda: self._run_on_copy(call, alias=False)), x)
            self._alias(call, output)
        else:
            output = take(Passing(call.run), x)
        if nonneg:
            self.nonneg(output)
        if gate:
            self.facts.gate[output] = True
        return output

    def stops(self, call: Call) -> Any:
        """Relevance ends here: comparisons, indices, statistics."""
        with torch.no_grad():
            return self._run_on_copy(call) if writes(call) else call.run()

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

    def averages(self, call: Call, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A linear function of x with weights ≥ 0: pools, means, sums, interpolation."""
        if not x.requires_grad:
            return self.stops(call)  # type: ignore[no-any-return]
        place = self.place("pool", call.site.path)
        step = Sharing(
            self, call.run, lambda a: AveragingMap(function, a), place, call.site, nonneg=x in self.facts.nonneg
        )
        output: Tensor = take(step, x)
        if x in self.facts.nonneg:
            self.nonneg(output)
        return output

    def adds(self, call: Call, a: Any, b: Any, sign: float = 1.0) -> Tensor:
        """a + sign * b. Constants take no relevance, as biases do not."""
        carry_a, carry_b = _carries(a), _carries(b)
        if not (carry_a and carry_b):
            x, constant = (a, b) if carry_a else (b, a)
            output: Tensor = self.passes(call, x)
            if isinstance(constant, Tensor) and sign == 1:
                before = self.facts.offset.get(x)
                self.facts.offset[output] = constant if before is None else before + constant
            return output
        written, same = writes(call), a.dtype == b.dtype
        run = call.run
        if written:
            run = (lambda: torch.add(a, b, alpha=sign)) if same else (lambda: self._run_on_copy(call, alias=False))
        made = self._sums.setdefault(call.site, SumSite())
        early = self._fusing and made.rectified and same and sign == 1 and a.dtype in _FULL and a.shape == b.shape
        if early:
            self._fused += 1
            run = lambda: rectified(a, b)  # noqa: E731
        output = take(Adding(self, run, sign, self.place("add", call.site.path)), a, b)
        if written:
            self._alias(call, output)
        if early:
            self.facts.ahead[output] = True
        if a in self.facts.nonneg and b in self.facts.nonneg and sign > 0:
            self.nonneg(output)
        self.facts.made[output] = made
        self._fresh = weakref.ref(output)
        return output

    def gates(self, call: Call, factors: Sequence[Any]) -> Tensor:
        """A product: relevance goes to the signal. A factor is a gate if it carries no relevance, if it comes out of a
        sigmoid, softmax or the like, or if it is broadcast; signals of equal standing share evenly."""
        signals = [t for t in factors if _carries(t)]
        if len(signals) > 1:
            open_ = [t for t in signals if t not in self.facts.gate]
            signals = open_ or signals
        if len(signals) > 1:
            size = max(t.numel() for t in signals)
            signals = [t for t in signals if t.numel() == size]
        if len(signals) > 1 and all(t is signals[0] for t in signals):
            signals = signals[:1]
        nonneg = all(t in self.facts.nonneg if isinstance(t, Tensor) else t >= 0 for t in factors)
        if len(signals) == 1:
            return self.passes(call, signals[0], nonneg=nonneg)  # type: ignore[no-any-return]
        run = (lambda: self._run_on_copy(call, alias=False)) if writes(call) else call.run
        output: Tensor = take(Halving(run), *signals)
        if writes(call):
            self._alias(call, output)
        return output

    def multiplies(self, call: Call, a: Tensor, b: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A bilinear function such as a matmul. A constant factor acts as a weight, attention weights as a gate."""
        place, name = self.place("matmul", call.site.path), call.site
        if not a.requires_grad or not b.requires_grad:
            x, weight = (a, b) if a.requires_grad else (b, a)
            bound = function if x is a else _flipped(function)
            return self._weighted(call, x, weight, lambda a: FunctionMap(bound, weight), place)
        logits = self.facts.logits.get(a)
        if logits is not None and self.composite.attention(self.place("attention", place.path)).queries:
            step = Weighing(
                self, call.run, a.detach(), self.facts.offset.get(logits), self.place("attention", place.path), name
            )
            output: Tensor = take(step, logits, b)
            return output
        for gate, x, bound in ((a, b, _flipped(function)), (b, a, function)):
            if gate in self.facts.gate and x not in self.facts.gate:
                weight, nonneg = gate.detach(), gate in self.facts.nonneg
                build: Callable[[Tensor], LinearMap] = lambda a, w=weight, f=bound, n=nonneg: FunctionMap(f, w, n)  # type: ignore[misc]  # noqa: E731
                if function is torch.matmul and a.dim() > 1 and b.dim() > 1:
                    build = lambda _, w=weight, left=gate is a, n=nonneg: MatmulMap(w, left, n)  # type: ignore[misc]  # noqa: E731
                return self._weighted(call, x, weight, build, self.place("attention", place.path))
        output = take(Multiplying(self, call.run, function, place, name), a, b)
        return output

    def attends(self, call: Call, scale: float, mask: Callable[[], Tensor | None]) -> Tensor:
        """Scaled dot-product attention."""
        place = self.place("attention", call.site.path)
        q, k, v = call["query"], call["key"], call["value"]
        output: Tensor = take(Attending(self, call.run, mask, scale, place, call.site), q, k, v)
        return output

    def softmaxes(self, call: Call, x: Tensor) -> Tensor:
        """Relevance passes; as a factor the result is a gate, and remembers its logits."""
        output: Tensor = self.passes(call, x, nonneg=True, gate=True)
        self.facts.logits[output] = x
        return output

    def pads(self, call: Call, x: Tensor, pad: Sequence[int], constant: bool) -> Tensor:
        """Padding: repeated values send relevance home, a constant border absorbs what falls on it."""
        if not constant or not x.requires_grad or min(pad) < 0:
            return self.moves(call)  # type: ignore[no-any-return]
        output: Tensor = take(Padding(self, call.run, list(pad), f"border of {call.site}"), x)
        if x in self.facts.nonneg and not (call.get("value") or 0) < 0:
            self.nonneg(output)
        return output

    def enters_here(self, tensor: Tensor) -> Tensor:
        """The first tensor that can carry relevance on the way from a discrete input: an embedding."""
        entry = tensor.detach().requires_grad_(True)
        self._entries.append(entry)
        self._leaves.add(id(entry))
        return entry

    def constant(self, tensor: Tensor, call: Call) -> Tensor:
        """A constant that stands beside the signal (class tokens, padding): what falls on it is booked as absorbed."""
        if tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        leaf = tensor.detach().requires_grad_(True)
        self._sinks.append((f"constant in {call.site}", leaf))
        self._leaves.add(id(leaf))
        if tensor in self.facts.nonneg:
            self.nonneg(leaf)
        return leaf

    def copies(self, call: Call, x: Tensor) -> Any:
        """The same numbers again, or fewer digits of them: relevance passes, and all that is known about them holds."""
        output = self.passes(call, x) if "dropout" in call.function.__name__ else self.moves(call)
        self.facts.copy(x, output)
        return output

    def nonneg(self, output: Any) -> None:
        """Note that a tensor is ≥ 0 everywhere, so that layers reading it need only their positive weights."""
        for tensor in tensors_in(output):
            self.facts.nonneg[tensor] = True

    def is_nonneg(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to be ≥ 0."""
        return tensor in self.facts.nonneg

    # -- books -----------------------------------------------------------------------------------------------------
    def place(self, kind: str, path: str, index: int | None = None, first: bool = False) -> Place:
        """Where a rule is asked for. Depth counts the weight layers of this forward pass."""
        return Place(kind, path, float(self._count if index is None else index), first)

    def rule(self, place: Place) -> Rule:
        """The composite's rule; only now is the number of layers known."""
        key = (place, self._count)
        if key not in self._rules:
            depth = place.depth / max(self._count - 1, 1)
            self._rules[key] = self.composite.rule(Place(place.kind, place.path, min(depth, 1.0), place.first))
        return self._rules[key]

    def flow(self, name: object, kind: str, arrived: Sum, passed: Sum, absorbs: bool = False) -> None:
        """Book what arrived at an operation and what it passed on."""
        self._journal.flow(name, kind, arrived, passed, absorbs)

    def sums(self, r: Tensor, channel: int | None) -> Tensor:
        """Sums of relevance that is about to be passed on: by channel where the receiver will ask for these."""
        if channel is None or self.absolute:
            return total(r)
        summed = self._by_channel(r, channel)
        self._summed[r] = (channel % r.dim(), r._version, summed)
        return summed

    def unit_sums(self, site: LayerSite, r: Tensor) -> Tensor:
        """Book one number per unit of a layer; returns sums that add up to what arrived."""
        name, rows, channel = site.name, site.rows, site.channel
        if self.absolute:
            self._journal.units(name, rows, self._by_channel(r, channel))
            return total(r)
        known = self._summed.get(r)
        if known is not None and known[:2] == (channel % r.dim(), r._version):
            summed = known[2]
        else:
            summed = self._by_channel(r, channel)
        self._journal.units(name, rows, summed)
        return summed

    # -- parts -----------------------------------------------------------------------------------------------------
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
        if not isinstance(site.build, Geometry) or site.build.border or record.x.dtype not in _FULL:
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

    def _by_channel(self, r: Tensor, channel: int) -> Tensor:
        """One number per unit."""
        channel %= r.dim()
        if self.absolute == "element":
            r = r.abs()
        wide = torch.float32 if r.dtype in (torch.float16, torch.bfloat16) else r.dtype
        others = [d for d in range(r.dim()) if d != channel]
        if self.absolute == "sample" and others and others[0] == 0:
            r = r.sum(others[1:], dtype=wide).abs() if others[1:] else r.abs()
            others = [0]
        return r.sum(others, dtype=wide) if others else r

    def _weighted(
        self, call: Call, x: Tensor, weight: Tensor, build: Callable[[Tensor], LinearMap], place: Place
    ) -> Tensor:
        step = Sharing(self, call.run, build, place, call.site, nonneg=x in self.facts.nonneg)
        output: Tensor = take(step, x)
        return output

    def _normed(self, call: Call, x: Tensor) -> Tensor:
        if call["training"] and call.get("running_mean") is not None:
            raise UnsupportedModelError(
                f"{call.site} updates its running statistics although the model is in evaluation mode. Way out: call "
                f"batch_norm with training=False."
            )
        output: Tensor = self.passes(call, x)
        self._fresh = weakref.ref(output)
        return output

    def _run_on_copy(self, call: Call, alias: bool = True) -> Any:
        """An in-place function, run on a copy of what it would overwrite."""
        target = call.tensors()[0]
        copy = target.clone()
        args = tuple(copy if arg is target else arg for arg in call.args)
        kwargs = {key: copy if arg is target else arg for key, arg in call.kwargs.items()}
        output = call.function(*args, **kwargs)
        if output is None:  # __setitem__
            output = copy
        if alias:
            self._alias(call, output)
        return output

    def _alias(self, call: Call, output: Tensor) -> None:
        """From now on, whoever names the overwritten tensor means `output`."""
        target = call.tensors()[0]
        if output is target:
            return
        if target._is_view():
            self._doubtful = self._doubtful or str(call.site)
        self.facts.linear.forget(target)
        self.facts.newer[target] = output


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def rectifies(call: Call) -> bool:
    """Whether a call is a ReLU that overwrites its input."""
    return call.function.__name__ in ("relu", "relu_") and writes(call)


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))


def _hashable(option: Any) -> Any:
    return tuple(option) if isinstance(option, list) else option


def _flipped(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(b, a)
