"""The backward pass: every operation as an autograd function whose backward is a rule.

What flows back is relevance instead of the gradient. A `Step` is one operation. `Backward` is what the steps of one
batch share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from secateur.relevance.attention import Attention, attend, product
from secateur.relevance.composites import Place, Rules
from secateur.relevance.conservation import slack
from secateur.relevance.ledger import Journal, Page, Sum, total
from secateur.relevance.linear_maps import LinearMap, MatmulMap
from secateur.relevance.rules import Rule
from secateur.relevance.weights import LayerUse


class Leaves:
    """Where relevance ends: the model's inputs, the outputs of embeddings, and constants beside the signal."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.embeddings: dict[int, str] = {}  # names of weights, by the index among the inputs
        self.constants: list[tuple[str, Tensor]] = []
        self._ids: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids

    def add_input(self, tensor: Tensor, embedding: str | None = None) -> Tensor:
        """An input, or the output of an embedding with this weight."""
        if embedding is not None:
            self.embeddings[len(self.inputs)] = embedding
        self.inputs.append(tensor.requires_grad_(True))
        self._ids.add(id(tensor))
        return tensor

    def add_constant(self, name: str, tensor: Tensor) -> Tensor:
        """A constant that absorbs the relevance which falls on it."""
        leaf = tensor.detach().requires_grad_(True)
        self.constants.append((name, leaf))
        self._ids.add(id(leaf))
        return leaf


class Backward:
    """The backward pass of one batch: rules, sums, gates, and the leaves at which it ends.

    `attentive` are the layers which once could not pass on all relevance. They check this in every batch.
    """

    def __init__(self, rules: Rules, journal: Journal, attentive: set[str]) -> None:
        self.journal, self.attentive = journal, attentive
        self.leaves = Leaves()
        self.layers = 0  # conv and linear layers in this forward pass
        self.gated = False  # whether a gate takes part
        self.gating = False  # whether gates are being scored
        self._rules = rules
        self._gates: list[tuple[GradientEdge, Tensor]] = []

    def place(self, kind: str, path: str, index: int | None = None, first: bool = False) -> Place:
        """Where a rule is asked for. The depth is an index until the number of layers is known."""
        return Place(kind, path, float(self.layers if index is None else index), first)

    def rule(self, place: Place) -> Rule:
        """The composite's rule."""
        return self._rules.rule(place, self.layers)

    def attention(self, place: Place) -> Attention:
        """How the composite passes relevance through attention."""
        return self._rules.composite.attention(place)

    def flow(self, name: object, kind: str, arrived: Sum, passed: Sum, absorbs: bool = False) -> None:
        """Record what an operation received and passed on. The scores of gates come in addition and are left out."""
        if not self.gating:
            self.journal.flow(name, kind, arrived, passed, absorbs)

    def gate(self, edge: GradientEdge, r: Tensor) -> None:
        """A gate takes no relevance. The layers that make it are scored later, by what the gate lets pass."""
        self._gates.append((edge, r))

    def run(self, output: Tensor, seed: Tensor) -> tuple[list[Tensor | None], Page]:
        """The relevance of each input if that of the output is `seed`, and the sums recorded on the way."""
        inputs, constants = self.leaves.inputs, self.leaves.constants
        leaves = [*inputs, *(leaf for _, leaf in constants)]
        found = torch.autograd.grad(output, leaves, seed, allow_unused=True, retain_graph=self.gated)
        self._score_gates(leaves)
        for (name, _), absorbed in zip(constants, found[len(inputs) :], strict=True):
            if absorbed is not None:
                self.flow(name, "constant", total(absorbed), 0.0, absorbs=True)
        heat: list[Tensor | None] = list(found[: len(inputs)])
        for number, name in self.leaves.embeddings.items():
            relevance = heat[number]
            if relevance is not None:
                self.journal.columns(name, relevance)
        odd = (~torch.isfinite(output.detach())).sum() + (~torch.isfinite(seed)).sum()
        arrived = [total(relevance) for relevance in heat if relevance is not None]
        return heat, self.journal.gather(odd, total(seed), *arrived)

    def _score_gates(self, leaves: Sequence[Tensor]) -> None:
        """Score the layers that only make gates (squeeze-and-excitation, queries and keys).

        They have no relevance of their own, but this does not make them useless. They are scored by what the gate lets
        pass, back to the first layers that have relevance of their own.
        """
        self.gating = True
        while self._gates:
            gates, self._gates = self._gates, []
            edges, relevances = zip(*gates, strict=True)
            torch.autograd.grad(edges, leaves, relevances, allow_unused=True, retain_graph=True)
        self.gating = False


class Step:
    """One operation of one forward pass: `run` gives its output, `back` shares relevance among its inputs."""

    #: Whether the inputs are kept for the backward pass.
    saves = True

    def __init__(self, backward: Backward, run: Callable[[], Any]) -> None:
        self.backward = backward
        self.run: Callable[[], Any] | None = run
        self.shapes: list[torch.Size] = []
        self.reached = False

    def value(self, *inputs: Tensor) -> Any:
        """The output. `run` is dropped, so that only the saved inputs stay in memory."""
        run, self.run = self.run, None
        assert run is not None
        self.shapes = [tensor.shape for tensor in inputs]
        return run()

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The relevance of each input."""
        raise NotImplementedError

    def gate(self, r: Tensor) -> None:
        """Score the step as part of a gate, although it has relevance of its own. Most steps ignore this."""


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
        if r is not None and not (step.reached and step.backward.gating):
            step.reached = True
            return (None, *step.back(r, *ctx.saved_tensors))
        if r is not None:
            step.gate(r)
        return (None,) * (1 + len(step.shapes))


def apply(step: Step, *inputs: Tensor) -> Any:
    """Run a step, as part of the autograd graph."""
    return _Function.apply(step, *inputs)


class Passing(Step):
    """Relevance passes unchanged to the first input."""

    saves = False

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """All of it."""
        return (_fitted(r, self.shapes[0]),)


class Gating(Passing):
    """A product with gates: relevance passes to the signal, and the gates are scored by it."""

    def __init__(self, backward: Backward, run: Callable[[], Any], gates: Sequence[Tensor]) -> None:
        super().__init__(backward, run)
        self.gates = [(get_gradient_edge(gate), gate.shape) for gate in gates]

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """All of it to the signal."""
        for edge, shape in self.gates:
            self.backward.gate(edge, _fitted(r, shape))
        return super().back(r)


class Sharing(Step):
    """A linear map: the rule of the composite shares relevance among its inputs."""

    #: The dimension of the units among the inputs and outputs, None where there are none.
    channel: int | None = None

    def __init__(
        self, backward: Backward, run: Callable[[], Tensor], layer: Callable[[Tensor], LinearMap], place: Place,
        name: object, nonneg: bool = False, stop: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(backward, run)
        self.layer, self.place = layer, place
        self.name, self.nonneg, self.stop = name, nonneg, stop

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Share it by the rule, and record both sides."""
        return self.share(r, inputs[0], total(r))

    def share(self, r: Tensor, a: Tensor, arrived: Tensor) -> tuple[Tensor | None, ...]:
        """The rule's shares of `r`. What the rule cannot pass on is rescued, if it knows how."""
        kind = self.place.kind
        if self.stop:
            self.backward.flow(self.name, "stop", arrived, 0.0)
            self.backward.flow(self.name, kind, arrived, arrived)
            return (None,)
        rule = self.backward.rule(self.place)
        layer = self.layer(a)
        narrow = a.dtype if rule.cancels and a.dtype in (torch.float16, torch.bfloat16) else None
        if narrow:
            layer = layer.widened()
            a, r = a.float(), r.float()
        layer.nonneg = self.nonneg
        shared = rule(layer, a, r)
        passed = self.backward.journal.sums(shared, self.channel)
        if not rule.absorbs and self._is_stuck(arrived, passed):
            extra = rule.rescue(layer, a, r)
            if extra is not None:
                shared = shared + extra
                passed = self.backward.journal.sums(shared, self.channel)
        self.backward.flow(self.name, kind, arrived, passed, rule.absorbs)
        return (shared if narrow is None else shared.to(narrow),)

    def _is_stuck(self, arrived: Tensor, passed: Tensor) -> bool:
        """Whether relevance was lost. On a GPU, where this waits for the device, only attentive layers check."""
        if arrived.is_cuda and str(self.name) not in self.backward.attentive:
            return False
        before, after = float(arrived.sum()), float(passed.sum())
        return abs(after - before) > slack(self.place.kind, arrived) * abs(before)


class Layer(Sharing):
    """A conv or linear layer, with its batch norm if it has one: a linear map whose outputs are units."""

    def __init__(
        self, backward: Backward, run: Callable[[], Tensor], layer: Callable[[Tensor], LinearMap], place: Place,
        use: LayerUse, nonneg: bool, stop: bool,
    ) -> None:  # fmt: skip
        super().__init__(backward, run, layer, place, place.path, nonneg, stop)
        self.use, self.channel = use, use.channel
        self.units: Tensor | None = None

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Share it, and record the sum of each unit."""
        self.units, arrived = self.backward.journal.unit_sums(self.use, r)
        return self.share(r, inputs[0], arrived)

    def gate(self, r: Tensor) -> None:
        """Score the units that got nothing: those of queries and keys, where the same layer makes the values."""
        self.backward.journal.unit_sums(self.use, r, besides=self.units)


class Weighted(Sharing):
    """A product of a gate (attention weights) with a signal: a linear map of the signal, and the gate is scored."""

    def __init__(self, *args: Any, gate: Tensor, function: Callable[[Tensor, Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.edge, self.function = get_gradient_edge(gate), function

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """All of it to the signal, by the rule."""
        a = inputs[0]
        half, _ = product(self.backward.rule(self.place), self.function, self.layer(a).weight, a, r)
        self.backward.gate(self.edge, 2 * half)
        return super().back(r, a)


class Adding(Step):
    """a + b: the rule decides their shares."""

    def __init__(self, backward: Backward, run: Callable[[], Tensor], sign: float, place: Place) -> None:
        super().__init__(backward, run)
        self.sign, self.place = sign, place

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The rule's two shares."""
        a, b = inputs
        second = b if self.sign == 1 else b * self.sign
        shape = r.shape
        first, second = (t if t.shape == shape else t.expand(shape) for t in (a, second))
        first_share, second_share = self.backward.rule(self.place).add(first, second, r)
        return _fitted(first_share, a.shape), _fitted(second_share, b.shape)


class Halving(Step):
    """A product of two signals of equal standing, entry by entry: half to each."""

    saves = False

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Even shares. As parts of a gate, each is scored by the whole."""
        share = r if self.backward.gating else r / len(self.shapes)
        return tuple(share.sum_to_size(shape) for shape in self.shapes)


class Multiplying(Step):
    """A bilinear function of two signals: matrix products and einsums of activations."""

    def __init__(
        self, backward: Backward, run: Callable[[], Tensor], function: Callable[[Tensor, Tensor], Tensor],
        place: Place, name: object,
    ) -> None:  # fmt: skip
        super().__init__(backward, run)
        self.function, self.place, self.name = function, place, name

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """Half of each contribution to each factor. As parts of a gate, each is scored by the whole."""
        a, b = inputs
        shares = product(self.backward.rule(self.place), self.function, a, b, 2 * r if self.backward.gating else r)
        self.backward.flow(self.name, "matmul", total(r), total(shares[0]) + total(shares[1]))
        return shares


class Weighing(Step):
    """softmax(logits + constant) @ values, where the softmax was its own operation: relevance of logits and values."""

    def __init__(
        self, backward: Backward, run: Callable[[], Tensor], weights: Tensor, offset: Tensor | None, place: Place,
        name: object,
    ) -> None:  # fmt: skip
        super().__init__(backward, run)
        self.weights, self.offset = weights, offset
        self.place, self.name = place, name

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """To logits and values. The constant part of the logits takes none."""
        logits, values = inputs
        logits = torch.where(self.weights > 0, logits if self.offset is None else logits - self.offset, 0)
        how = self.backward.attention(self.place)
        pulled, for_values = attend(how, logits, self.weights, values, r)
        for_logits = logits * pulled
        self.backward.flow(self.name, "attention", total(r), total(for_logits) + total(for_values), how.absorbs)
        return for_logits, for_values


class Attending(Step):
    """Scaled dot-product attention as one operation. Weights are recomputed in the backward pass."""

    def __init__(
        self, backward: Backward, run: Callable[[], Tensor], mask: Callable[[], Tensor | None], scale: float,
        place: Place, name: object, gates: Sequence[Tensor],
    ) -> None:  # fmt: skip
        super().__init__(backward, run)
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
        how = self.backward.attention(self.place)
        for_q: Tensor | None = None
        for_k: Tensor | None = None
        if how.queries:
            pulled, for_v = attend(how, logits, weights, v, r)
            pulled = pulled * (self.scale / 2)
            for_q, for_k = q * (pulled @ k), k * (pulled.transpose(-1, -2) @ q)
            passed = total(for_q) + total(for_k) + total(for_v)
        else:
            rule, layer = self.backward.rule(self.place), MatmulMap(weights, left=True, nonneg_weight=True)
            for_v = rule(layer, v, r)
            extra = rule.rescue(layer, v, r)
            for_v = for_v if extra is None else for_v + extra
            passed = total(for_v)
            self._gate(rule, q, k, v, weights, r, groups)
        self.backward.flow(self.name, "attention", total(r), passed, how.absorbs)
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
                self.backward.gate(edge, 2 * half)


class Padding(Step):
    """Padding with a constant: relevance that falls on the border is absorbed by it."""

    saves = False

    def __init__(self, backward: Backward, run: Callable[[], Tensor], pad: list[int], name: object) -> None:
        super().__init__(backward, run)
        self.pad, self.name = pad, name

    def back(self, r: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """The inner part."""
        inner = torch.nn.functional.pad(r, [-side for side in self.pad])
        self.backward.flow(self.name, "constant", total(r) - total(inner), 0.0, absorbs=True)
        return (inner,)


def _fitted(r: Tensor, shape: torch.Size) -> Tensor:
    """Relevance of what was broadcast, summed."""
    return r if r.shape == shape else r.sum_to_size(shape)


def _regroup(r: Tensor, groups: int) -> Tensor:
    """Relevance of repeated heads, summed for the head they repeat."""
    if groups == 1:
        return r
    return r.reshape(*r.shape[:-3], r.shape[-3] // groups, groups, *r.shape[-2:]).sum(-3)
