"""Steps: operations as autograd functions whose backward pass is a rule. What flows back is relevance, not gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from secateur.relevance.attention import attend, product
from secateur.relevance.composites import Place
from secateur.relevance.conservation import slack
from secateur.relevance.maps import LinearMap, MatmulMap

if TYPE_CHECKING:
    from secateur.relevance.books import Books
    from secateur.relevance.rules import Rule
    from secateur.relevance.weights import LinearCall


class Step:
    """One operation of one forward pass: `run` gives its output, `back` shares relevance among its inputs."""

    #: Whether the inputs are kept for the backward pass.
    saves = True

    def __init__(self, books: Books, run: Callable[[], Any]) -> None:
        self.books = books
        self.run: Callable[[], Any] | None = run
        self.shapes: list[torch.Size] = []
        self.reached = False

    def value(self, *inputs: Tensor) -> Any:
        """The output. What `run` holds is let go, so that only the saved inputs stay in memory."""
        run, self.run = self.run, None
        assert run is not None
        self.shapes = [tensor.shape for tensor in inputs]
        return run()

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The relevance of each input."""
        raise NotImplementedError

    def gate(self, r: Tensor) -> None:
        """What gates are scored by ends at steps that have had relevance of their own."""


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *inputs: Tensor) -> Any:
        ctx.step = step
        ctx.set_materialize_grads(False)
        value = step.value(*inputs)
        if step.saves:
            ctx.save_for_backward(*inputs)
        return value

    @staticmethod
    def backward(ctx: Any, *relevances: Any) -> Any:
        step, r = ctx.step, relevances[0]
        if r is not None and not (step.reached and step.books.gating):
            step.reached = True
            return (None, *step.back(r, *ctx.saved_tensors))
        if r is not None:
            step.gate(r)
        return (None,) * (1 + len(step.shapes))


def take(step: Step, *inputs: Tensor) -> Any:
    """Run a step as part of the graph."""
    return _Function.apply(step, *inputs)


class Passing(Step):
    """Relevance passes unchanged to the first input."""

    saves = False

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """All of it."""
        return (_fitted(r, self.shapes[0]),)


class Gating(Passing):
    """A product with gates: relevance passes to the signal, and the gates are scored by it."""

    def __init__(self, books: Books, run: Callable[[], Any], gates: Sequence[Tensor]) -> None:
        super().__init__(books, run)
        self.gates = [(get_gradient_edge(gate), gate.shape) for gate in gates]

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """All of it to the signal."""
        for edge, shape in self.gates:
            self.books.gate(edge, _fitted(r, shape))
        return super().back(r)


class Sharing(Step):
    """A linear map: the rule of the composite shares relevance among its inputs."""

    #: The dimension of the units among the inputs and outputs, None where there are none.
    channel: int | None = None

    def __init__(
        self, books: Books, run: Callable[[], Tensor], layer: Callable[[Tensor], LinearMap], place: Place,
        name: object, nonneg: bool = False, stop: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(books, run)
        self.layer, self.place = layer, place
        self.name, self.nonneg, self.stop = name, nonneg, stop

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Share it, give what is stuck a second way, and book both sides."""
        return self.share(r, inputs[0], total(r))

    def share(self, r: Tensor, a: Tensor, arrived: Tensor) -> tuple[Tensor | None, ...]:
        """The rule's shares of `r`."""
        kind = self.place.kind
        if self.stop:
            self.books.flow(self.name, "stop", arrived, 0.0)
            self.books.flow(self.name, kind, arrived, arrived)
            return (None,)
        rule = self.books.rule(self.place)
        layer = self.layer(a)
        narrow = a.dtype if rule.cancels and a.dtype in (torch.float16, torch.bfloat16) else None
        if narrow:
            layer = layer.widened()
            a, r = a.float(), r.float()
        layer.nonneg = self.nonneg
        shared = rule(layer, a, r)
        passed = self.books.sums(shared, self.channel)
        if not rule.absorbs and self._is_stuck(arrived, passed):
            extra = rule.rescue(layer, a, r)
            if extra is not None:
                shared = shared + extra
                passed = self.books.sums(shared, self.channel)
        self.books.flow(self.name, kind, arrived, passed, rule.absorbs)
        return (shared if narrow is None else shared.to(narrow),)

    def _is_stuck(self, arrived: Tensor, passed: Tensor) -> bool:
        """On a GPU asking would wait for the device, so it is asked of layers that were stuck before."""
        if arrived.is_cuda and str(self.name) not in self.books.attentive:
            return False
        before, after = float(arrived.sum()), float(passed.sum())
        return abs(after - before) > slack(self.place.kind, arrived) * abs(before)


class Layer(Sharing):
    """A conv or linear layer, with its batch norm if it has one: a linear map whose outputs are units."""

    def __init__(
        self, books: Books, run: Callable[[], Tensor], layer: Callable[[Tensor], LinearMap], place: Place,
        record: LinearCall, nonneg: bool, stop: bool,
    ) -> None:  # fmt: skip
        super().__init__(books, run, layer, place, place.path, nonneg, stop)
        self.site, self.channel = record.site, record.site.channel
        self.units: Tensor | None = None

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the units on the way."""
        self.units, arrived = self.books.unit_sums(self.site, r)
        return self.share(r, inputs[0], arrived)

    def gate(self, r: Tensor) -> None:
        """Units of this layer that got nothing of their own: queries and keys, where one layer makes the values too."""
        self.books.unit_sums(self.site, r, besides=self.units)


class Weighted(Sharing):
    """A product of a gate (attention weights) with a signal: a linear map of the signal, and the gate is scored."""

    def __init__(self, *args: Any, gate: Tensor, function: Callable[[Tensor, Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.edge, self.function = get_gradient_edge(gate), function

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """All of it to the signal."""
        a = inputs[0]
        half, _ = product(self.books.rule(self.place), self.function, self.layer(a).weight, a, r)
        self.books.gate(self.edge, 2 * half)
        return super().back(r, a)


class Adding(Step):
    """a + b: the rule decides their shares."""

    def __init__(self, books: Books, run: Callable[[], Tensor], sign: float, place: Place) -> None:
        super().__init__(books, run)
        self.sign, self.place = sign, place

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The rule's two shares."""
        a, b = inputs
        second = b if self.sign == 1 else b * self.sign
        shape = r.shape
        first, second = (t if t.shape == shape else t.expand(shape) for t in (a, second))
        first_share, second_share = self.books.rule(self.place).add(first, second, r)
        return _fitted(first_share, a.shape), _fitted(second_share, b.shape)


class Halving(Step):
    """A product of two signals of equal standing, entry by entry: half to each."""

    saves = False

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Even shares; as parts of a gate each is scored by the whole."""
        share = r if self.books.gating else r / len(self.shapes)
        return tuple(share.sum_to_size(shape) for shape in self.shapes)


class Multiplying(Step):
    """A bilinear function of two signals: matrix products and einsums of activations."""

    def __init__(
        self, books: Books, run: Callable[[], Tensor], function: Callable[[Tensor, Tensor], Tensor],
        place: Place, name: object,
    ) -> None:  # fmt: skip
        super().__init__(books, run)
        self.function, self.place, self.name = function, place, name

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Half of each contribution to each factor; as parts of a gate each is scored by the whole."""
        a, b = inputs
        shares = product(self.books.rule(self.place), self.function, a, b, 2 * r if self.books.gating else r)
        self.books.flow(self.name, "matmul", total(r), total(shares[0]) + total(shares[1]))
        return shares


class Weighing(Step):
    """softmax(logits + constant) @ values, where the softmax was its own operation: relevance of logits and values."""

    def __init__(
        self, books: Books, run: Callable[[], Tensor], weights: Tensor, offset: Tensor | None, place: Place,
        name: object,
    ) -> None:  # fmt: skip
        super().__init__(books, run)
        self.weights, self.offset = weights, offset
        self.place, self.name = place, name

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """To logits and values; the constant part of the logits takes none."""
        logits, values = inputs
        logits = torch.where(self.weights > 0, logits if self.offset is None else logits - self.offset, 0)
        how = self.books.composite.attention(self.place)
        pulled, for_values = attend(how, logits, self.weights, values, r)
        for_logits = logits * pulled
        self.books.flow(self.name, "attention", total(r), total(for_logits) + total(for_values), how.absorbs)
        return for_logits, for_values


class Attending(Step):
    """Scaled dot-product attention as one operation; weights are recomputed in the backward pass."""

    def __init__(
        self, books: Books, run: Callable[[], Tensor], mask: Callable[[], Tensor | None], scale: float,
        place: Place, name: object, gates: Sequence[Tensor],
    ) -> None:  # fmt: skip
        super().__init__(books, run)
        self.mask, self.scale = mask, scale
        self.place, self.name = place, name
        self.edges = [get_gradient_edge(t) if t.requires_grad else None for t in gates]

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """To the values, and to queries and keys if the composite says so."""
        q, k, v = inputs
        groups = q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1
        if groups > 1:  # grouped queries: each key serves several
            k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
        logits = self.scale * (q @ k.transpose(-1, -2))
        mask = self.mask()
        weights = (logits if mask is None else logits + mask).softmax(-1)
        how = self.books.composite.attention(self.place)
        for_q: Tensor | None = None
        for_k: Tensor | None = None
        if how.queries:
            pulled, for_v = attend(how, logits, weights, v, r)
            pulled = pulled * (self.scale / 2)
            for_q, for_k = q * (pulled @ k), k * (pulled.transpose(-1, -2) @ q)
            passed = total(for_q) + total(for_k) + total(for_v)
        else:
            rule, layer = self.books.rule(self.place), MatmulMap(weights, left=True, nonneg_weight=True)
            for_v = rule(layer, v, r)
            extra = rule.rescue(layer, v, r)
            for_v = for_v if extra is None else for_v + extra
            passed = total(for_v)
            self._gate(rule, q, k, v, weights, r, groups)
        self.books.flow(self.name, "attention", total(r), passed, how.absorbs)
        if groups > 1:
            for_k, for_v = None if for_k is None else _regroup(for_k, groups), _regroup(for_v, groups)
        return for_q, for_k, for_v

    def _gate(self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, r: Tensor, groups: int) -> None:
        """Queries and keys are scored by what the attention weights let pass."""
        if not self.edges:
            return
        logits, _ = product(rule, torch.matmul, weights, v, r)
        halves = product(rule, lambda a, b: a @ b.transpose(-1, -2), q, k, 2 * logits)
        for edge, half in zip(self.edges, (halves[0], _regroup(halves[1], groups)), strict=True):
            if edge is not None:
                self.books.gate(edge, 2 * half)


class Padding(Step):
    """Padding with a constant: relevance that falls on the border is absorbed by it."""

    saves = False

    def __init__(self, books: Books, run: Callable[[], Tensor], pad: list[int], name: object) -> None:
        super().__init__(books, run)
        self.pad, self.name = pad, name

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The inner part."""
        inner = torch.nn.functional.pad(r, [-side for side in self.pad])
        self.books.flow(self.name, "constant", total(r) - total(inner), 0.0, absorbs=True)
        return (inner,)


def _fitted(r: Tensor, shape: torch.Size) -> Tensor:
    """Relevance of what was broadcast, summed."""
    return r if r.shape == shape else r.sum_to_size(shape)


def _regroup(r: Tensor, groups: int) -> Tensor:
    """Relevance of repeated heads, summed for the head they repeat."""
    if groups == 1:
        return r
    return r.reshape(*r.shape[:-3], r.shape[-3] // groups, groups, *r.shape[-2:]).sum(-3)


def total(r: Tensor) -> Tensor:
    """The sum, precise enough for the books."""
    return r.sum(dtype=torch.float32 if r.dtype in (torch.float16, torch.bfloat16) else r.dtype)
