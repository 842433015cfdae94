"""The verbs in which operations say how relevance passes.

The user's own forward runs, and each operation calls one of these verbs: it is a layer (`dense`, `convolves`,
`batch_norm`, `enters_here`), or it `moves` data, `passes` relevance on, `stops` it, `averages`, `adds`, `gates`,
`multiplies` or `attends`. Each verb computes the output as a step of the autograd graph. The backward of that step
(`backward.py`) is the rule of the composite (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.table import Call
from secateur.relevance._fusion import Fusion
from secateur.relevance.activations import Activations
from secateur.relevance.backward import (
    Adding,
    Attending,
    Backward,
    Gating,
    Halving,
    Multiplying,
    Padding,
    Passing,
    Sharing,
    Weighing,
    Weighted,
    apply,
)
from secateur.relevance.layers import Layers
from secateur.relevance.linear_maps import AveragingMap, FunctionMap, LinearMap, MatmulMap
from secateur.running.tensor_facts import writes


class Propagation:
    """The propagation of one batch. Implements the verbs that operations may use."""

    def __init__(
        self, again: Callable[[], AbstractContextManager[Any]], layers: Layers, activations: Activations,
        backward: Backward, fusion: Fusion | None,
    ) -> None:  # fmt: skip
        self.activations, self.backward, self.fusion = activations, backward, fusion
        self.again = again
        self.dense, self.convolves, self.batch_norm = layers.dense, layers.convolves, layers.batch_norm
        self.enters_here = layers.enters_here

    def moves(self, call: Call) -> Any:
        """Data movement: autograd moves relevance back the same way. Facts about the numbers move along."""
        known = self.activations
        source = next((t for t in call.tensors() if t.requires_grad), None)
        output = known.run(call)
        moved = [t for t in call.tensors() if t.is_floating_point()]
        if moved and all(t in known.nonneg for t in moved):
            known.note_nonneg(output)
        if source is None:
            return output
        if source in known.gate:
            for tensor in tensors_in(output):
                known.gate[tensor] = True
        offset = known.offset.get(source)
        if offset is not None and isinstance(output, Tensor):
            offset = offset.expand(source.shape)
            args = tuple(offset if arg is source else arg for arg in call.args)
            known.offset[output] = call.function(*args, **call.kwargs)
        return output

    def passes(
        self, call: Call, x: Tensor, *, nonneg: bool = False, gate: bool = False, gates: Sequence[Tensor] = ()
    ) -> Any:
        """Relevance passes unchanged to `x`: activations, dropout, norms, scaling, products with `gates`."""
        if not x.requires_grad:
            return self.stops(call)
        if not gates and writes(call) and self.activations.may_overwrite(call, x):
            if self.fusion is not None:
                self.fusion.overwritten(call, x)
            self.activations.overwritten(x)
            with torch.no_grad():  # nobody needs the old numbers, and relevance takes the same way
                output = call.run()
        elif gates:
            self.backward.gated = True
            output = self._step(call, lambda run: Gating(self.backward, run, gates), x)
        else:
            output = self._step(call, lambda run: Passing(self.backward, run), x)
        if nonneg:
            self.activations.note_nonneg(output)
        if gate:
            self.activations.gate[output] = True
        return output

    def stops(self, call: Call) -> Any:
        """Relevance ends here: comparisons, indices, statistics."""
        with torch.no_grad():
            return self.activations.run(call)

    def copies(self, call: Call, x: Tensor, scales: bool = False) -> Any:
        """The same numbers again, or fewer digits of them: what is known about them holds. Dropout `scales` them."""
        output = self.passes(call, x) if scales else self.moves(call)
        self.activations.copied(x, output)
        return output

    def softmaxes(self, call: Call, x: Tensor) -> Tensor:
        """Relevance passes. Where the result multiplies, it is a gate and remembers its logits."""
        output: Tensor = self.passes(call, x, nonneg=True, gate=True)
        self.activations.logits[output] = x
        return output

    def averages(self, call: Call, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A linear function of x with weights ≥ 0: pools, means, sums, interpolation."""
        if not x.requires_grad:
            return self.stops(call)  # type: ignore[no-any-return]
        nonneg, place = x in self.activations.nonneg, self.backward.place("pool", call.site.path)
        step = Sharing(self.backward, call.run, lambda a: AveragingMap(function, a), place, call.site, nonneg=nonneg)
        output: Tensor = apply(step, x)
        if nonneg:
            self.activations.note_nonneg(output)
        return output

    def pads(self, call: Call, x: Tensor, pad: Sequence[int], constant: bool) -> Tensor:
        """Padding: repeated values send relevance home, a constant border absorbs what falls on it."""
        if not constant or not x.requires_grad or min(pad) < 0:
            return self.moves(call)  # type: ignore[no-any-return]
        output: Tensor = apply(Padding(self.backward, call.run, list(pad), f"border of {call.site}"), x)
        if x in self.activations.nonneg and not (call.get("value") or 0) < 0:
            self.activations.note_nonneg(output)
        return output

    def adds(self, call: Call, a: Any, b: Any, sign: float = 1.0) -> Tensor:
        """a + sign * b. Constants take no relevance, and neither do biases."""
        known = self.activations
        if not (_carries(a) and _carries(b)):
            x, constant = (a, b) if _carries(a) else (b, a)
            output: Tensor = self.passes(call, x)
            if isinstance(constant, Tensor) and sign == 1:
                before = known.offset.get(x)
                known.offset[output] = constant if before is None else before + constant
            return output
        sum_ = None if self.fusion is None else self.fusion.adds(call.site, a, b, sign)
        ahead = sum_ is not None
        if sum_ is None and a.dtype == b.dtype and writes(call):
            sum_ = lambda: torch.add(a, b, alpha=sign)  # noqa: E731 (a copy would be another pass over memory)
        place = self.backward.place("add", call.site.path)
        output = self._step(call, lambda run: Adding(self.backward, sum_ or run, sign, place), a, b)
        if self.fusion is not None:
            self.fusion.added(call.site, output, ahead)
        if sign > 0 and a in known.nonneg and b in known.nonneg:
            known.note_nonneg(output)
        known.note_fresh(output)
        return output

    def gates(self, call: Call, factors: Sequence[Any]) -> Tensor:
        """A product: relevance goes to the signal. A factor is a gate if it carries no relevance, if it comes out of a
        sigmoid, softmax or the like, or if it is broadcast. Several signals share evenly."""
        known = self.activations
        signals = [t for t in factors if _carries(t)]
        if len(signals) > 1:
            signals = [t for t in signals if t not in known.gate] or signals
            size = max(t.numel() for t in signals)
            signals = [t for t in signals if t.numel() == size]
        if all(t is signals[0] for t in signals):
            gates = [t for t in factors if _carries(t) and t is not signals[0]]
            nonneg = all(t in known.nonneg if isinstance(t, Tensor) else t >= 0 for t in factors)
            return self.passes(call, signals[0], nonneg=nonneg, gates=gates)  # type: ignore[no-any-return]
        output: Tensor = self._step(call, lambda run: Halving(self.backward, run), *signals)
        return output

    def multiplies(self, call: Call, a: Tensor, b: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A bilinear function such as a matmul. A constant factor acts as a weight, attention weights as a gate."""
        known, backward, name = self.activations, self.backward, call.site
        place, attention = (backward.place(kind, name.path) for kind in ("matmul", "attention"))
        output: Tensor
        if not a.requires_grad or not b.requires_grad:
            x, weight = (a, b) if a.requires_grad else (b, a)
            bound = function if x is a else _flipped(function)
            nonneg = x in known.nonneg
            output = apply(
                Sharing(backward, call.run, lambda _: FunctionMap(bound, weight), place, name, nonneg=nonneg), x
            )
            return output
        logits = known.logits.get(a)
        if logits is not None and backward.attention(attention).queries:
            output = apply(
                Weighing(backward, call.run, a.detach(), known.offset.get(logits), attention, name), logits, b
            )
            return output
        for gate, x, bound in ((a, b, _flipped(function)), (b, a, function)):
            if gate in known.gate and x not in known.gate:
                matmul = function is torch.matmul and min(a.dim(), b.dim()) > 1
                build = _gated(gate, bound, matmul, gate is a, gate in known.nonneg)
                backward.gated = True
                output = apply(
                    Weighted(
                        backward, call.run, build, attention, name, nonneg=x in known.nonneg, gate=gate,
                        function=_flipped(bound),
                    ),
                    x,
                )  # fmt: skip
                return output
        output = apply(Multiplying(backward, call.run, function, place, name), a, b)
        return output

    def attends(self, call: Call, scale: float, mask: Callable[[], Tensor | None]) -> Tensor:
        """Scaled dot-product attention."""
        backward, place = self.backward, self.backward.place("attention", call.site.path)
        q, k, v = call["query"], call["key"], call["value"]
        gates = () if backward.attention(place).queries else (q, k)
        backward.gated = backward.gated or any(t.requires_grad for t in gates)
        output: Tensor = apply(Attending(backward, call.run, mask, scale, place, call.site, gates), q, k, v)
        return output

    def constant(self, tensor: Tensor, call: Call) -> Tensor:
        """A constant beside the signal (class tokens, padding). The relevance that falls on it is absorbed."""
        if tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        leaf = self.backward.leaves.add_constant(f"constant in {call.site}", tensor)
        if tensor in self.activations.nonneg:
            self.activations.note_nonneg(leaf)
        return leaf

    def _step(self, call: Call, make: Callable[[Callable[[], Any]], Any], *inputs: Tensor) -> Any:
        """Run a call, which may be in place, as a step."""
        if not writes(call):
            return apply(make(call.run), *inputs)
        output = apply(make(lambda: self.activations.run_on_copy(call)), *inputs)
        self.activations.replace(call, output)
        return output


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _gated(
    gate: Tensor, function: Callable[[Tensor, Tensor], Tensor], matmul: bool, left: bool, nonneg: bool
) -> Callable[[Tensor], LinearMap]:
    """function(x, gate) as a linear map of x, which may be a matmul with the gate on one side."""
    weight = gate.detach()
    return lambda _: MatmulMap(weight, left, nonneg) if matmul else FunctionMap(function, weight, nonneg)


def _flipped(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(b, a)
