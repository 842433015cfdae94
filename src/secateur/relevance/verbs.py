"""The verbs in which operations say how relevance passes: a `layer`, something that `passes` it on, `moves` data,
`averages`, `adds`, `gates`, `multiplies` or `attends`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.table import Call
from secateur.relevance.books import Books
from secateur.relevance.composites import Place
from secateur.relevance.maps import AveragingMap, FunctionMap, LinearMap, MatmulMap
from secateur.relevance.pointwise import rectified
from secateur.relevance.steps import (
    Adding,
    Attending,
    Gating,
    Halving,
    Multiplying,
    Padding,
    Passing,
    Sharing,
    Weighing,
    Weighted,
    take,
)
from secateur.relevance.weights import SumSite

#: Numbers with so many digits that folding a batch norm into the weights of the forward pass does no harm.
FULL = (torch.float32, torch.float64)


class Verbs(Books):
    """What an operation may ask for."""

    def moves(self, call: Call) -> Any:
        """Data movement: autograd moves relevance back the same way. Facts about the numbers move along."""
        source = next((t for t in call.tensors() if t.requires_grad), None)
        output = self._run_on_copy(call) if call.writes else call.run()
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

    def passes(
        self, call: Call, x: Tensor, *, nonneg: bool = False, gate: bool = False, gates: Sequence[Tensor] = ()
    ) -> Any:
        """Relevance passes unchanged to `x`: activations, dropout, norms, scaling, products with `gates`."""
        if not x.requires_grad:
            return self.stops(call)
        written = call.writes
        mine = self._writable is not None and self._writable() is x and call.tensors()[0] is x
        if written and mine and not gates:
            if call.rectifies and (made := self.facts.made.get(x)) is not None:
                made.rectified = True
            self.facts.overwritten(x)
            with torch.no_grad():  # nobody has kept the old numbers, and the way of relevance stays the same
                output = call.run()
        else:
            run = (lambda: self._run_on_copy(call, alias=False)) if written else call.run
            self.gated = self.gated or bool(gates)
            output = take(Gating(self, run, gates) if gates else Passing(self, run), x)
            if written:
                self._alias(call, output)
        if nonneg:
            self.nonneg(output)
        if gate:
            self.facts.gate[output] = True
        return output

    def stops(self, call: Call) -> Any:
        """Relevance ends here: comparisons, indices, statistics."""
        with torch.no_grad():
            return self._run_on_copy(call) if call.writes else call.run()

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
        written, same = call.writes, a.dtype == b.dtype
        run = call.run
        if written:
            run = (lambda: torch.add(a, b, alpha=sign)) if same else (lambda: self._run_on_copy(call, alias=False))
        made = self._sums.setdefault(call.site, SumSite())
        early = self._fusing and made.rectified and same and sign == 1 and a.dtype in FULL and a.shape == b.shape
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
            gates = [t for t in factors if _carries(t) and t is not signals[0]]
            return self.passes(call, signals[0], nonneg=nonneg, gates=gates)  # type: ignore[no-any-return]
        run = (lambda: self._run_on_copy(call, alias=False)) if call.writes else call.run
        output: Tensor = take(Halving(self, run), *signals)
        if call.writes:
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
                side = "left" if gate is a else "right"
                matmul = function is torch.matmul and min(a.dim(), b.dim()) > 1
                return self._gated(call, gate, x, bound, side if matmul else None)
        output = take(Multiplying(self, call.run, function, place, name), a, b)
        return output

    def _gated(
        self, call: Call, gate: Tensor, x: Tensor, function: Callable[[Tensor, Tensor], Tensor], side: str | None
    ) -> Tensor:
        """function(x, gate), which may be a matmul with the gate on one side."""
        weight, nonneg = gate.detach(), gate in self.facts.nonneg

        def build(a: Tensor) -> LinearMap:
            return MatmulMap(weight, side == "left", nonneg) if side else FunctionMap(function, weight, nonneg)

        self.gated = True
        step = Weighted(
            self, call.run, build, self.place("attention", call.site.path), call.site,
            nonneg=x in self.facts.nonneg, gate=gate, function=_flipped(function),
        )  # fmt: skip
        output: Tensor = take(step, x)
        return output

    def attends(self, call: Call, scale: float, mask: Callable[[], Tensor | None]) -> Tensor:
        """Scaled dot-product attention."""
        place = self.place("attention", call.site.path)
        q, k, v = call["query"], call["key"], call["value"]
        gates = () if self.composite.attention(place).queries else (q, k)
        self.gated = self.gated or any(t.requires_grad for t in gates)
        output: Tensor = take(Attending(self, call.run, mask, scale, place, call.site, gates), q, k, v)
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

    def enters_here(self, call: Call, weight: Tensor) -> Tensor:
        """An embedding: the first tensor that can carry relevance on the way from a discrete input. Its units are the
        columns of the weight, and what reaches them is their score."""
        entry: Tensor = call.run().detach().requires_grad_(True)
        width = weight.shape[1]
        name, _ = self._weights.name(weight, call, width)
        self._heights[name] = (width, weight.device)
        self.places[call.site] = (name, 0, width)
        self._embedded[len(self._entries)] = name
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

    def copies(self, call: Call, x: Tensor, scales: bool = False) -> Any:
        """The same numbers again, or fewer digits of them: relevance passes, and all that is known about them holds."""
        output = self.passes(call, x) if scales else self.moves(call)
        self.facts.copy(x, output)
        return output

    def nonneg(self, output: Any) -> None:
        """Note that a tensor is ≥ 0 everywhere, so that layers reading it need only their positive weights."""
        for tensor in tensors_in(output):
            self.facts.nonneg[tensor] = True

    def is_nonneg(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to be ≥ 0."""
        return tensor in self.facts.nonneg

    # -- parts -----------------------------------------------------------------------------------------------------
    def _weighted(
        self, call: Call, x: Tensor, weight: Tensor, build: Callable[[Tensor], LinearMap], place: Place
    ) -> Tensor:
        step = Sharing(self, call.run, build, place, call.site, nonneg=x in self.facts.nonneg)
        output: Tensor = take(step, x)
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


def _flipped(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(b, a)
