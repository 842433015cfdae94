"""The backward pass: every operation is a step of the autograd graph whose backward is a rule.

What flows back is relevance instead of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from secateur.relevance.attention import Attention
from secateur.relevance.composites import Composite, Place
from secateur.relevance.conservation import slack
from secateur.relevance.ledger import HALF, Journal, Page, Sum, total, wide
from secateur.relevance.linear_maps import LinearMap
from secateur.relevance.rules import Rule
from secateur.running.memory import resident, trim_beyond

#: Numbers of a tensor beyond which it pays to ask how much memory the process holds.
_LARGE = 2**18
#: A part of the memory that holes in it may take.
_HOLES = 16
#: From the relevance of an operation's output, and its saved inputs: the relevance of each input.
Back = Callable[..., tuple[Tensor | None, ...]]
#: Scores an operation as part of a gate, although it has relevance of its own.
Gate = Callable[[Tensor], object]


class Backward:
    """The backward pass of one batch: rules, sums, gates, and the leaves at which it ends.

    Leaves are the model's inputs, the outputs of embeddings, and constants beside the signal. `attentive` are the
    layers which once could not pass on all relevance. They check this in every batch. `depth` is how many layers there
    will be, if that is known.
    """

    def __init__(
        self, composite: Composite, rules: dict[tuple[Place, int], Rule], journal: Journal, attentive: set[str],
        depth: int,
    ) -> None:  # fmt: skip
        self.composite, self.journal, self.attentive = composite, journal, attentive
        #: By identity: the tensor, the weight of its embedding if it has one, and what to call it if it is a constant.
        self.leaves: dict[int, tuple[Tensor, str, str]] = {}
        self.layers = 0  # conv and linear layers in this forward pass
        self.gated = False  # whether a gate takes part
        self.gating = False  # whether gates are being scored
        self.leaving = False  # whether no step is visited again, so that what its rule has kept can go
        #: Gates take no relevance. The layers that make them are scored later, by the relevance that they let pass.
        self.gates: list[tuple[GradientEdge, Tensor]] = []
        self._rules, self._depth = rules, depth
        self._held = 0  # the bytes that the process held when some were last given back; 0 if it need not be done

    def watch_memory(self) -> None:
        """There is one sample, and a CPU: if it is large, it fills the memory alone."""
        self._held = resident()

    def add_leaf(self, tensor: Tensor, embedding: str = "", constant: str = "") -> Tensor:
        """Relevance ends at a tensor. A constant absorbs it."""
        self.leaves[id(tensor)] = (tensor.requires_grad_(True), embedding, constant)
        return tensor

    def place(self, kind: str, path: str, index: int | None = None, first: bool = False) -> Place:
        """Where a rule is asked for. The depth is an index until the number of layers is known."""
        return Place(kind, path, float(self.layers if index is None else index), first)

    def rule(self, place: Place) -> Rule:
        """The composite's rule, remembered from batch to batch. Only now is the number of layers known."""
        key = (place, self.layers)
        if key not in self._rules:
            self._rules[key] = self.composite.rule(_relative(place, self.layers))
        return self._rules[key]

    def attention(self, place: Place) -> Attention:
        """How attention passes relevance, which must be known before the number of layers is."""
        return self.composite.attention(_relative(place, self._depth))

    def step(
        self, run: Callable[[], Any], back: Back, *inputs: Tensor, saves: bool = True, gate: Gate | None = None
    ) -> Tensor:
        """The output of an operation, as part of the graph. Without `saves`, `back` does not get the inputs.

        If there are several outputs, relevance comes back from the first.
        """
        return _step(self, run, back, gate, saves, *inputs)  # type: ignore[no-any-return]

    def share(
        self, r: Tensor, a: Tensor, layer: LinearMap, place: Place, name: object, nonneg: bool,
        arrived: Tensor | None = None, channel: int | None = None,
    ) -> tuple[Tensor]:  # fmt: skip
        """The relevance of the input `a` of a linear map, by the composite's rule. Records both sides.

        `arrived` are sums that add up to all of `r`. `channel` is the dimension of the units of a layer.
        """
        rule = self.rule(place)
        received = total(r) if arrived is None else arrived

        def share(widen: bool) -> tuple[Tensor, Tensor]:
            """What the rule gives to `a`, and the sums of it. With `widen`, half precision is left for the while."""
            coarse = widen and a.dtype in HALF
            given = (layer.widened(), a.float(), r.float()) if coarse else (layer, a, r)
            given[0].nonneg = nonneg
            shared = rule(*given)
            passed = self.journal.sums(shared, channel)
            if not rule.absorbs and self._is_stuck(place.kind, name, received, passed):
                extra = rule.rescue(*given)
                if extra is not None:
                    shared = shared + extra
                    passed = self.journal.sums(shared, channel)
            return shared, passed

        shared, passed = share(bool(rule.cancels))
        # float16 ends at 65504: relevance divided by a small sum overflows. (On a GPU, asking would wait.)
        if a.dtype == torch.float16 and not a.is_cuda and not bool(torch.isfinite(passed).all()):
            shared, passed = share(widen=True)
        self.flow(name, place.kind, received, passed, rule.absorbs)
        return (shared.to(a.dtype) if a.dtype in HALF else shared,)

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

    def passed(self, made: Any) -> None:
        """A step is done. What it has freed must not stay as holes, if one sample fills the memory."""
        if self._held and isinstance(made, Tensor) and made.numel() > _LARGE:
            self._held = trim_beyond(self._held, _HOLES)

    def run(self, output: Tensor, seed: Tensor) -> tuple[list[Tensor | None], Page]:
        """The relevance of each input if that of the output is `seed`, and the sums recorded on the way."""
        leaves = [leaf for leaf, _, _ in self.leaves.values()]
        begin = self.begin(output.detach(), seed)
        self.leaving = not self.gated  # only now: a forward may take gradients of its own
        found = torch.autograd.grad(output, leaves, begin, allow_unused=True, retain_graph=self.gated)
        self._score_gates(leaves)
        heat: list[Tensor | None] = []
        for arrived, (leaf, embedding, constant) in zip(found, self.leaves.values(), strict=True):
            relevance = None if arrived is None else self.end(leaf.detach(), arrived)
            if not constant:
                heat.append(relevance)
            if relevance is not None and constant:
                self.flow(constant, "constant", total(relevance), None, absorbs=True)
            elif relevance is not None and embedding:
                self.journal.columns(embedding, relevance)
        begun, size = total(seed), torch.linalg.vector_norm(seed, 1, dtype=wide(seed))
        odd = ~torch.isfinite(total(output.detach()) + size)  # NaN and infinity survive in a sum, which is cheap
        sums = [total(relevance) for relevance in heat if relevance is not None]
        return heat, self.journal.gather(odd, begun, size, *sums)

    def begin(self, output: Tensor, seed: Tensor) -> Tensor:
        """What flows back from the output, if its relevance is `seed`."""
        return seed

    def end(self, leaf: Tensor, arrived: Tensor) -> Tensor:
        """The relevance of a leaf, from what flowed back to it."""
        return arrived

    def _score_gates(self, leaves: Sequence[Tensor]) -> None:
        """Score the layers that only make gates (squeeze-and-excitation, queries and keys).

        They have no relevance of their own, but this does not make them useless. They are scored by what the gate lets
        pass, back to the first layers that have relevance of their own.
        """
        self.gating = True
        while self.gates:
            gates, self.gates = self.gates, []
            edges, relevances = zip(*gates, strict=True)
            torch.autograd.grad(edges, leaves, relevances, allow_unused=True, retain_graph=True)
        self.gating = False


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: Backward, run: Callable[[], Any], back: Back, gate: Gate | None, saves: bool, *inputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.back, ctx.gate, ctx.reached = way, back, gate, False
        value = run()  # only the saved inputs stay in memory
        way.passed(value)
        if saves:
            ctx.save_for_backward(*inputs)
        return value

    @staticmethod
    def backward(ctx: Any, *relevances: Any) -> Any:
        r = relevances[0]
        if r is not None and not (ctx.reached and ctx.way.gating):
            ctx.reached = True
            shared = ctx.back(r, *ctx.saved_tensors)
            if ctx.way.leaving:
                ctx.back = ctx.gate = None
                ctx.way.passed(r)
            return (None, None, None, None, None, *shared)
        if r is not None and ctx.gate is not None:
            ctx.gate(r)
        return (None,) * len(ctx.needs_input_grad)


_step = _Step.apply  # as it is now: an observer may see that of other functions


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the relevance of a tensor enters the graph, which lives as long as this."""
    if "ownership_token" in GradientEdge._fields:
        return get_gradient_edge(tensor)
    with torch.enable_grad():  # torch 2.6: an edge does not own the node of a Python function, but that of a view does
        return get_gradient_edge(tensor.view_as(tensor))


def _relative(place: Place, layers: int) -> Place:
    """The place with its depth as a share of the layers."""
    return Place(place.kind, place.path, min(place.depth / max(layers - 1, 1), 1.0), place.first)


def fitted(r: Tensor, shape: torch.Size) -> Tensor:
    """Relevance of a tensor that was broadcast, summed to its own shape."""
    return r if r.shape == shape else r.sum_to_size(shape)
