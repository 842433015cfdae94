"""The verbs in which operations say how relevance passes.

The user's own forward runs, and each operation calls one verb of `ops.protocols.RelevanceVerbs`. It computes the output
as a step of the autograd graph, whose `back` gives the relevance of the inputs, by the rule of the composite
(`rules.py`) where there is a choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.nest import map_tensors, tensors_in
from secateur.ops.protocols import Axes
from secateur.ops.table import Call, Site
from secateur.relevance.attention import attend, gate_scores, product, regroup
from secateur.relevance.backward import Back, Backward, edge_of, fitted
from secateur.relevance.composites import Place
from secateur.relevance.layers import Layers, refuse_complex
from secateur.relevance.ledger import HALF, total
from secateur.relevance.linear_maps import AveragingMap, Bilinear, FunctionMap, MatmulMap


class Propagation:
    """The propagation of one batch. Implements the verbs that operations may use."""

    #: Whether torch differentiates layers, too, so that their weights must not look like activations.
    native = False

    def __init__(self, again: Callable[[], AbstractContextManager[Any]], layers: Layers) -> None:
        self.again = again
        self.activations, self.backward, self.fusion = layers.activations, layers.backward, layers.fusion
        self.dense, self.convolves, self.batch_norm = layers.dense, layers.convolves, layers.batch_norm
        self.enters_here, self.tallies, self.layers = layers.enters_here, layers.tallies, layers

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
        gate = known.gate.get(source)
        if gate is not None:
            for tensor in tensors_in(output):
                known.gate[tensor] = gate
        if isinstance(output, Tensor) and any(t in known.offset for t in call.tensors()):
            with torch.no_grad():
                args, kwargs = map_tensors(self._offset, (call.args, call.kwargs))
                known.offset[output] = call.function(*args, **kwargs)
        return output

    def transforms(self, call: Call) -> Any:
        self.layers.meets_attention(anyway=True)  # without a composite, the one that has a rule is taken
        refuse_complex(call.site, self.backward.composite.name)

    def _offset(self, tensor: Tensor) -> Tensor:
        """The constant part of a tensor that carries relevance; what carries none stays."""
        if not tensor.requires_grad:
            return tensor
        offset = self.activations.offset.get(tensor)
        return torch.zeros_like(tensor) if offset is None else offset.expand(tensor.shape).clone()

    def passes(
        self, call: Call, x: Tensor, *, nonneg: bool = False, gate: bool = False, gates: Sequence[Tensor] = ()
    ) -> Any:
        """Activations, dropout, norms, scaling, products with `gates`."""
        if not x.requires_grad:
            return self.stops(call)
        if not gates and call.writes and self.activations.may_overwrite(call, x):
            self.fusion.overwritten(call, x)
            self.activations.overwritten(x)
            with torch.no_grad():  # nobody needs the old numbers, and relevance takes the same way
                output = call.run()
        else:
            backward, shape = self.backward, x.shape
            edges = [(edge_of(gate), gate.shape) for gate in gates]
            backward.gated = backward.gated or bool(gates)

            def back(r: Tensor) -> tuple[Tensor]:
                for edge, size in edges:
                    backward.gates.append((edge, fitted(r, size)))
                return (fitted(r, shape),)

            output = self._step(call, back, x, saves=False)
        if nonneg:
            self.activations.note_nonneg(output)
        if gate:
            self.activations.gate[output] = False
        return output

    def scales(self, call: Call, x: Tensor) -> Any:
        return self.passes(call, x)

    def normalises(self, call: Call, x: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self.passes(call, x)  # type: ignore[no-any-return]

    def stops(self, call: Call) -> Any:
        with torch.no_grad():
            return self.activations.run(call)

    def refuses(self, call: Call, refusal: Exception) -> Any:
        sources = [tensor for tensor in call.tensors() if tensor.requires_grad]
        versions = [tensor._version for tensor in sources]

        def back(*_: Tensor) -> tuple[Tensor | None, ...]:
            raise refusal

        def fenced(made: Tensor) -> Tensor:
            differentiable = made.is_floating_point() or made.is_complex()
            if not differentiable or any(made is source for source in sources):
                return made
            return self.backward.step(lambda: made.clone(), back, *sources, saves=False)

        with torch.no_grad():
            output = call.run()
        if versions != [tensor._version for tensor in sources]:
            raise refusal
        return map_tensors(fenced, output)

    def copies(self, call: Call, x: Tensor, scales: bool = False) -> Any:
        output = self.passes(call, x) if scales else self.moves(call)
        self.activations.copied(x, output)
        return output

    def softmaxes(self, call: Call, x: Tensor, dim: int) -> Tensor:
        output = self.passes(call, x, nonneg=True, gate=True)
        self.activations.logits[output] = x, dim
        if output in self.activations.gate:
            self.activations.gate[output] = True
        return output  # type: ignore[no-any-return]

    def averages(self, call: Call, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if not x.requires_grad:
            return self.stops(call)  # type: ignore[no-any-return]
        backward, name, nonneg = self.backward, call.site, x in self.activations.nonneg
        place = backward.place("pool", name.path)
        back: Back = lambda r, a: backward.share(r, a, AveragingMap(function, a), place, name, nonneg)  # noqa: E731
        output = self._step(call, back, x)
        if nonneg:
            self.activations.note_nonneg(output)
        return output

    def pads(self, call: Call, x: Tensor, pad: Sequence[int], constant: bool) -> Tensor:
        if not constant or not x.requires_grad or min(pad) < 0:
            return self.moves(call)  # type: ignore[no-any-return]
        backward, name = self.backward, f"border of {call.site}"

        def back(r: Tensor) -> tuple[Tensor]:
            inner = F.pad(r, [-side for side in pad])
            backward.flow(name, "constant", total(r) - total(inner), None, absorbs=True)
            return (inner,)

        output = backward.step(call.run, back, x, saves=False)
        if (gate := self.activations.gate.get(x)) is not None:
            self.activations.gate[output] = gate
        if x in self.activations.nonneg and not (call.get("value") or 0) < 0:
            self.activations.note_nonneg(output)
        return output

    def adds(self, call: Call, a: Any, b: Any, sign: float = 1.0) -> Tensor:
        known = self.activations
        if not (_carries(a) and _carries(b)):
            x, constant = (a, b) if _carries(a) else (b, a)
            output: Tensor = self.passes(call, x)
            if isinstance(constant, Tensor):  # a + sign · b
                before, signs = known.offset.get(x), (1, sign) if x is a else (sign, 1)
                own = constant if signs[1] == 1 else constant * signs[1]
                known.offset[output] = own if before is None else before * signs[0] + own
            return output
        sum_ = self.fusion.adds(call.site, a, b, sign)
        ahead = sum_ is not None
        if sum_ is None and a.dtype == b.dtype and call.writes:
            sum_ = lambda: torch.add(a, b, alpha=sign)  # noqa: E731 (a copy would be another pass over memory)
        backward, place = self.backward, self.backward.place("add", call.site.path)

        def back(r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            x, y = (t if t.shape == r.shape else t.expand(r.shape) for t in (a, b if sign == 1 else b * sign))
            if r.dtype not in HALF:
                first, second = backward.rule(place).add(x, y, r)
            else:  # float16 has no numbers small enough to tell two zeros from what must not be divided by
                shares = backward.rule(place).add(x.float(), y.float(), r.float())
                first, second = (share.to(r.dtype) for share in shares)
            return fitted(first, a.shape), fitted(second, b.shape)

        output = self._step(call, back, a, b, run=sum_)
        self.fusion.made(call.site, output, ahead=ahead)
        if sign > 0 and a in known.nonneg and b in known.nonneg:
            known.note_nonneg(output)
        known.note_fresh(output)
        return output

    def gates(self, call: Call, factors: Sequence[Any]) -> Tensor:
        """A product: relevance goes to the signal. A factor is a gate if it carries no relevance, if it comes out of a
        sigmoid, softmax or the like, or if it is broadcast. Several signals share evenly."""
        known, signals = self.activations, self._signals(factors)
        if all(t is signals[0] for t in signals):
            gates = [t for t in factors if _carries(t) and t is not signals[0]]
            nonneg = all(t in known.nonneg if isinstance(t, Tensor) else t >= 0 for t in factors)
            return self.passes(call, signals[0], nonneg=nonneg, gates=gates)  # type: ignore[no-any-return]
        backward, shapes = self.backward, [t.shape for t in signals]

        def back(r: Tensor) -> tuple[Tensor, ...]:  # as parts of a gate, each is scored by the whole
            share = r if backward.gating else r / len(shapes)
            return tuple(share.sum_to_size(shape) for shape in shapes)

        return self._step(call, back, *signals, saves=False)

    def _signals(self, factors: Sequence[Any]) -> list[Tensor]:
        """The factors of a product that are no gates."""
        signals = [t for t in factors if _carries(t)]
        if len(signals) > 1:
            signals = [t for t in signals if t not in self.activations.gate] or signals
            size = max(t.numel() for t in signals)
            signals = [t for t in signals if t.numel() == size]
        return signals

    def multiplies(self, call: Call, a: Tensor, b: Tensor, function: Bilinear, axes: Axes = (None, None)) -> Tensor:
        """A bilinear function such as a matmul. A constant factor acts as a weight, attention weights as a gate."""
        known, backward, name = self.activations, self.backward, call.site
        layer = self._layer(call, a, b, function, axes)
        if layer is not None:
            return layer
        if a.is_complex() or b.is_complex():
            refuse_complex(name, backward.composite.name)
        place, attention = (backward.place(kind, name.path) for kind in ("matmul", "attention"))
        inputs: tuple[Tensor, ...] = (a, b)
        weights, values = (a, b) if a in known.logits else (b, a)
        softmax = known.logits.get(weights)
        gated = next(((g, x) for g, x in ((a, b), (b, a)) if g in known.gate and x not in known.gate), None)
        if not a.requires_grad or not b.requires_grad:
            x, weight = (a, b) if a.requires_grad else (b, a)
            inputs, nonneg, bound = (x,), x in known.nonneg, function if x is a else _flipped(function)
            back: Back = lambda r, x: backward.share(r, x, FunctionMap(bound, weight), place, name, nonneg)  # noqa: E731
        elif softmax is not None and self.layers.meets_attention() and backward.attention(attention).queries:
            (logits, dim), mixes = softmax, function if weights is a else _flipped(function)
            inputs, offset = (logits, values), known.offset.get(logits)
            back = _logits_and_values(backward, weights.detach(), offset, mixes, dim, attention, name)
        elif gated is not None and self.layers.meets_attention():
            gate, x = gated
            inputs, backward.gated = (x,), True
            matmul = function is torch.matmul and min(a.dim(), b.dim()) > 1
            back = _signal(
                backward, gate, function, gate is a, matmul, gate in known.nonneg, x in known.nonneg, attention, name
            )
        else:
            back = _both(backward, function, place, name)
        return backward.step(call.run, back, *inputs)

    def _layer(self, call: Call, a: Tensor, b: Tensor, function: Bilinear, axes: Axes) -> Tensor | None:
        """The product, if a constant makes its units: a layer, however it is written. None if it is no layer."""
        left = b.requires_grad
        weight, x, axis = (a, b, axes[0]) if left else (b, a, axes[1])
        if axis is None or (a.requires_grad and b.requires_grad) or weight.is_complex() or x.is_complex():
            return None
        if function is torch.matmul and not left and weight.dim() == 2 and x.dim() > 1:
            return self.dense(call, x, weight, None, columns=True)
        return self.layers.product(call, x, weight, _flipped(function) if left else function, axis)

    def attends(self, call: Call, scale: float, mask: Callable[[], Tensor | None]) -> Tensor:
        """The attention weights are recomputed in the backward pass."""
        self.layers.meets_attention()
        backward, place, name = self.backward, self.backward.place("attention", call.site.path), call.site
        q, k, v = call["query"], call["key"], call["value"]
        how = backward.attention(place)
        gates = () if how.queries else (q, k)
        backward.gated = backward.gated or any(t.requires_grad for t in gates)
        edges = [(edge_of(t), t.shape) if t.requires_grad else None for t in gates]

        def back(r: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
            groups = max(q.shape[-3] // k.shape[-3], 1) if q.dim() > 2 else 1
            if groups > 1:  # grouped queries: each key serves several
                k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
            logits, added = scale * (q @ k.mT), mask()
            # A row in which everything is masked has no weights at all.
            weights = logits.softmax(-1) if added is None else (logits + added).softmax(-1).nan_to_num_(nan=0.0)
            if how.queries:
                pulled, for_v = attend(how, logits, weights, v, r)
                pulled = pulled * (scale / 2)
                for_q, for_k = q * (pulled @ k), k * (pulled.mT @ q)
                passed = total(for_q) + total(for_k) + total(for_v)
                backward.flow(name, "attention", total(r), passed, how.absorbs)
                return for_q, regroup(for_k, groups), regroup(for_v, groups)
            rule, layer = backward.rule(place), MatmulMap(weights, left=True, monotone=True)
            for_v, extra = rule(layer, v, r), rule.rescue(layer, v, r)
            for_v = for_v if extra is None else for_v + extra
            score_q, score_k = gate_scores(rule, q, k, v, weights, r)
            for edge, score in zip(edges, (score_q, regroup(score_k, groups)), strict=True):
                if edge is not None:
                    backward.gates.append((edge[0], fitted(score, edge[1])))
            backward.flow(name, "attention", total(r), total(for_v))
            return None, None, regroup(for_v, groups)

        return backward.step(call.run, back, q, k, v)

    def writes(self, call: Call) -> Any:
        args, kwargs = map_tensors(lambda t: self.constant(t, call), (call.args, call.kwargs))
        value = self.constant(call.get("value"), call)
        if isinstance(value, Tensor) and not isinstance(call["value"], Tensor):
            value = value.expand(call["index"].shape) if call.get("dim") is not None else value  # `scatter`
            args, kwargs = (args, {**kwargs, "value": value}) if "value" in kwargs else ((*args[:-1], value), kwargs)
        base = call.tensors()[0]._base if call.writes else None
        if base is not None and self.activations.newer.get(base) is None:  # what is not written absorbs too
            whole = self.constant(base, call)
            if whole is not base:
                self.activations.newer[base] = whole
        output = self.moves(call.given(*args, **kwargs))
        if call.writes:
            self.activations.replace(call, output)
        return output

    def constant(self, value: Any, call: Call) -> Any:
        if type(value) in (int, float) and math.isfinite(value):
            like = next(t for t in call.tensors() if t.requires_grad)
            tensor = torch.full((), value, dtype=like.dtype, device=like.device)
        elif isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
            tensor = value
        else:
            return value
        leaf = self.backward.add_leaf(tensor.detach(), constant=f"constant in {call.site}")
        if tensor in self.activations.nonneg:
            self.activations.note_nonneg(leaf)
        return leaf

    def _step(
        self, call: Call, back: Back, *inputs: Tensor, saves: bool = True, run: Callable[[], Any] | None = None
    ) -> Tensor:
        """A call, which may be in place, as a step. `run` computes its output if the call itself shall not."""
        if not call.writes:
            return self.backward.step(run or call.run, back, *inputs, saves=saves)
        output = self.backward.step(run or (lambda: self.activations.run_on_copy(call)), back, *inputs, saves=saves)
        self.activations.replace(call, output)
        return output


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _logits_and_values(
    backward: Backward, weights: Tensor, offset: Tensor | None, function: Bilinear, dim: int, place: Place, name: Site
) -> Back:
    """softmax(logits + offset) @ values, where the softmax was its own operation. The offset takes no relevance."""

    def back(r: Tensor, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.where(weights > 0, logits if offset is None else logits - offset, 0)
        how = backward.attention(place)
        pulled, for_values = attend(how, logits, weights, values, r, function, dim)
        for_logits = logits * pulled
        backward.flow(name, "attention", total(r), total(for_logits) + total(for_values), how.absorbs)
        return for_logits, for_values

    return back


def _signal(
    backward: Backward, gate: Tensor, function: Bilinear, left: bool, matmul: bool, nonneg_gate: bool, nonneg: bool,
    place: Place, name: Site,
) -> Back:  # fmt: skip
    """A product of a gate (attention weights) with a signal, which gets all relevance. The gate is scored."""
    weight, edge = gate.detach(), edge_of(gate)
    of_signal, of_gate = (_flipped(function), function) if left else (function, _flipped(function))

    def back(r: Tensor, x: Tensor) -> tuple[Tensor]:
        layer = MatmulMap(weight, left, nonneg_gate) if matmul else FunctionMap(of_signal, weight, nonneg_gate)
        half, _ = product(backward.rule(place), of_gate, weight, x, r)
        backward.gates.append((edge, 2 * half))
        return backward.share(r, x, layer, place, name, nonneg)

    return back


def _both(backward: Backward, function: Bilinear, place: Place, name: Site) -> Back:
    """A product of two signals: half of each contribution to each. As parts of a gate, each is scored by the whole."""

    def back(r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        shares = product(backward.rule(place), function, a, b, 2 * r if backward.gating else r)
        backward.flow(name, "matmul", total(r), total(shares[0]) + total(shares[1]))
        return shares

    return back


def _flipped(function: Bilinear) -> Bilinear:
    return lambda a, b: function(b, a)
