"""The backward pass: every operation is a step of the autograd graph whose backward is a rule.

What flows back is relevance instead of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from secateur.relevance.attention import Attention
from secateur.relevance.composites import Composite, Place
from secateur.relevance.conservation import slack
from secateur.relevance.ledger import Journal, Page, Sum, total
from secateur.relevance.linear_maps import LinearMap
from secateur.relevance.rules import Rule

#: From the relevance of an operation's output, and its saved inputs: the relevance of each input.
Back = Callable[..., tuple[Tensor | None, ...]]
#: Scores an operation as part of a gate, although it has relevance of its own.
Gate = Callable[[Tensor], object]


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

    def __init__(
        self, composite: Composite, rules: dict[tuple[Place, int], Rule], journal: Journal, attentive: set[str]
    ) -> None:
        self.journal, self.attentive = journal, attentive
        self.leaves = Leaves()
        self.layers = 0  # conv and linear layers in this forward pass
        self.gated = False  # whether a gate takes part
        self.gating = False  # whether gates are being scored
        self._composite, self._rules = composite, rules
        self._gates: list[tuple[GradientEdge, Tensor]] = []

    def place(self, kind: str, path: str, index: int | None = None, first: bool = False) -> Place:
        """Where a rule is asked for. The depth is an index until the number of layers is known."""
        return Place(kind, path, float(self.layers if index is None else index), first)

    def rule(self, place: Place) -> Rule:
        """The composite's rule, remembered from batch to batch. Only now is the number of layers known."""
        key = (place, self.layers)
        if key not in self._rules:
            depth = min(place.depth / max(self.layers - 1, 1), 1.0)
            self._rules[key] = self._composite.rule(Place(place.kind, place.path, depth, place.first))
        return self._rules[key]

    def attention(self, place: Place) -> Attention:
        """How the composite passes relevance through attention."""
        return self._composite.attention(place)

    def step(
        self, run: Callable[[], Any], back: Back, *inputs: Tensor, saves: bool = True, gate: Gate | None = None
    ) -> Any:
        """The output of an operation, as part of the graph. Without `saves`, `back` does not get the inputs."""
        return _Function.apply(_Step(self, run, back, saves, gate), *inputs)

    def share(
        self, r: Tensor, a: Tensor, layer: LinearMap, place: Place, name: object, nonneg: bool,
        arrived: Tensor | None = None, channel: int | None = None,
    ) -> tuple[Tensor]:  # fmt: skip
        """The relevance of the input `a` of a linear map, by the composite's rule. Records both sides.

        `arrived` are sums that add up to all of `r`. `channel` is the dimension of the units of a layer.
        """
        rule = self.rule(place)
        arrived = total(r) if arrived is None else arrived
        narrow = a.dtype if rule.cancels and a.dtype in (torch.float16, torch.bfloat16) else None
        if narrow:
            layer = layer.widened()
            a, r = a.float(), r.float()
        layer.nonneg = nonneg
        shared = rule(layer, a, r)
        passed = self.journal.sums(shared, channel)
        if not rule.absorbs and self._is_stuck(place.kind, name, arrived, passed):
            extra = rule.rescue(layer, a, r)
            if extra is not None:
                shared = shared + extra
                passed = self.journal.sums(shared, channel)
        self.flow(name, place.kind, arrived, passed, rule.absorbs)
        return (shared if narrow is None else shared.to(narrow),)

    def _is_stuck(self, kind: str, name: object, arrived: Tensor, passed: Tensor) -> bool:
        """Whether relevance was lost. On a GPU, where this waits for the device, only attentive layers check."""
        if arrived.is_cuda and str(name) not in self.attentive:
            return False
        before, after = float(arrived.sum()), float(passed.sum())
        return abs(after - before) > slack(kind, arrived) * abs(before)

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


class _Step:
    """One operation of the forward pass. `run` gives its output, `back` the relevance of its inputs."""

    __slots__ = ("back", "backward", "gate", "inputs", "reached", "run", "saves")

    def __init__(self, backward: Backward, run: Callable[[], Any], back: Back, saves: bool, gate: Gate | None) -> None:
        self.backward, self.back, self.saves, self.gate = backward, back, saves, gate
        self.run: Callable[[], Any] | None = run
        self.inputs = 0
        self.reached = False


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, *inputs: Tensor) -> Any:
        ctx.step = step
        ctx.set_materialize_grads(False)
        run, step.run, step.inputs = step.run, None, len(inputs)  # so that only the saved inputs stay in memory
        assert run is not None
        value = run()
        if step.saves:
            ctx.save_for_backward(*inputs)
        return value

    @staticmethod
    def backward(ctx: Any, *relevances: Any) -> Any:
        step, r = ctx.step, relevances[0]
        if r is not None and not (step.reached and step.backward.gating):
            step.reached = True
            return (None, *step.back(r, *ctx.saved_tensors))
        if r is not None and step.gate is not None:
            step.gate(r)
        return (None,) * (1 + step.inputs)


def fitted(r: Tensor, shape: torch.Size) -> Tensor:
    """Relevance of a tensor that was broadcast, summed to its own shape."""
    return r if r.shape == shape else r.sum_to_size(shape)
