"""The relevance pass: the user's own forward, run so that its backward pass is Layer-wise Relevance Propagation.

Every operation of the table says in its `relevance` method which of the verbs in `verbs.py` it is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, RelevanceError, UnknownOperationError, UnsupportedModelError
from secateur.graph.shadow import unwrap
from secateur.ops.table import SCALARS, Call, Operation
from secateur.relevance.composites import Composite, composite_named
from secateur.relevance.conservation import Conservation, Flow, Journal, precise
from secateur.relevance.facts import About, Facts
from secateur.relevance.isolation import call_model, isolated, logits_of, map_tensors
from secateur.relevance.rules import Rule
from secateur.relevance.steps import total
from secateur.relevance.verbs import Absolute, Verbs
from secateur.relevance.weights import Weights

Start = Callable[[Tensor], Tensor]


class RelevancePass(Verbs):
    """Propagates relevance through a model, batch after batch; unit sums and the books add up until `reset`.

    `units` maps the name of each weight to one number per output channel or neuron. `absolute` takes absolute values
    per "sample" (after summing over space) or per "element" before they are summed. Folded and positive weights are
    kept between batches. Without `heat_map`, relevance stops at the layers that read the input, which is faster.
    """

    def __init__(
        self,
        model: nn.Module,
        composite: str | Composite | Rule = "alpha1beta0",
        *,
        absolute: Absolute = False,
        heat_map: bool = True,
    ) -> None:
        self.model = unwrap(model)
        super().__init__(self.model)
        self.composite = composite_named(composite)
        self.absolute = absolute
        self.heat_map = heat_map
        self._weights = Weights(self.model)
        self._rules = {}
        self.attentive: set[str] = set()  # layers that got stuck with relevance before
        self.reset()

    def reset(self) -> None:
        """Forget all sums, keep the prepared weights."""
        self.samples = 0
        self.places = {}  # which call made which rows of which weight's units
        self._heights = {}
        self._ledger: dict[tuple[tuple[str, int, int], ...], Tensor] = {}  # the unit sums, in a row
        self._flows: dict[tuple[str, str], list[Any]] = {}
        self._start = 0.0
        self._input = 0.0
        self._forget()

    def _forget(self) -> None:
        """Forget everything about one forward pass."""
        self._visits.clear()
        self._weights.begin()
        self._journal = Journal()
        self._summed = About()
        self._entries: list[Tensor] = []
        self._sinks: list[tuple[str, Tensor]] = []
        self._leaves: set[int] = set()
        self.facts = Facts()
        self._fresh: weakref.ref[Tensor] | None = None  # the output of the last call, if nobody but the user has it
        self._writable: weakref.ref[Tensor] | None = None  # the same for the call before
        self._count = 0
        self._doubtful = ""

    @property
    def units(self) -> dict[str, Tensor]:
        """One number per unit, by the name of the weight."""
        sums = {
            name: torch.zeros(height, dtype=precise(device), device=device)
            for name, (height, device) in self._heights.items()
        }
        for layout, row in self._ledger.items():
            parts = row.split([stop - start for _, start, stop in layout])
            for (name, start, stop), part in zip(layout, parts, strict=True):
                sums[name][start:stop] += part.to(sums[name].device)
        return sums

    # -- running ---------------------------------------------------------------------------------------------------
    def run(self, inputs: Any, start: Start) -> tuple[Tensor, list[Tensor | None]]:
        """One batch: returns the model's output and the relevance of each input tensor (None for those without)."""
        batch = self._propagate(inputs, start)
        if self._stuck_layers(batch):  # on a GPU only now is it known; from the next time on these layers look for it
            batch = self._propagate(inputs, start)
        self._book(batch)
        self.samples += batch.output.shape[0] if batch.output.dim() > 1 else 1
        return batch.output, batch.heat

    def _propagate(self, inputs: Any, start: Start) -> Batch:
        self._forget()
        with torch.inference_mode(False):
            entries = map_tensors(self._enter, inputs)
        with isolated(self.model, self._entries):
            with self:
                output = logits_of(call_model(self.model, entries))
            self._verify(inputs, output)
            if not output.requires_grad:
                raise RelevanceError(
                    "the output does not depend on the input through operations that carry relevance. Way out: check "
                    "that the forward does not detach, and that the input is a floating-point tensor or token ids."
                )
            value = output.detach()
            seed = start(value)
            leaves = [*self._entries, *(leaf for _, leaf in self._sinks)]
            found = torch.autograd.grad(output, leaves, seed, allow_unused=True)
        for (name, _), absorbed in zip(self._sinks, found[len(self._entries) :], strict=True):
            if absorbed is not None:
                self.flow(name, "constant", total(absorbed), 0.0, absorbs=True)
        heat: list[Tensor | None] = list(found[: len(self._entries)])
        layout, odd = tuple(self._journal.layout), (~torch.isfinite(value)).sum() + (~torch.isfinite(seed)).sum()
        row, flows, (wrong, begun, *reached) = self._journal.read(
            odd, total(seed), *(total(relevance) for relevance in heat if relevance is not None)
        )
        self._forget()
        if wrong:
            raise RelevanceError(
                f"the output, where relevance starts, is not finite{self._blame()}. Way out: check the weights."
            )
        return Batch(value, heat, layout, row, flows, begun, sum(reached))

    def _stuck_layers(self, batch: Batch) -> bool:
        """Note the layers that could not pass everything on, and whether any of them is new."""
        stuck = {
            flow.name
            for flow in batch.flows
            if flow.kind in ("conv", "linear", "pool")
            and not flow.absorbs
            and abs(flow.lost) > 1e-5 * abs(flow.arrived)
        }
        new = stuck - self.attentive
        self.attentive |= stuck
        return bool(new) and batch.output.is_cuda

    def _book(self, batch: Batch) -> None:
        """Enter a batch into the books; refuse it if it is not finite, naming the layer nearest to the output."""
        wrong = [flow.name for flow in batch.flows if not math.isfinite(flow.arrived + flow.passed)]
        if wrong or not math.isfinite(batch.reached):
            raise RelevanceError(
                f"relevance became NaN or infinite at `{wrong[0] if wrong else 'the input'}`{self._blame()}. Way out: "
                f"check weights and inputs, use float32, or a composite that does not divide by small numbers, such as "
                f"'alpha1beta0'."
            )
        self._start += batch.begun
        self._input += batch.reached
        for flow in batch.flows:
            entry = self._flows.setdefault((flow.name, flow.kind), [0.0, 0.0, flow.absorbs])
            entry[0], entry[1] = entry[0] + flow.arrived, entry[1] + flow.passed
            self._input += flow.arrived if flow.kind == "stop" else 0.0
        if batch.row is not None:
            known = self._ledger.get(batch.layout)
            self._ledger[batch.layout] = batch.row if known is None else known + batch.row

    def conservation(self) -> Conservation:
        """The books of all batches so far."""
        order = reversed(list(self._flows.items()))
        return Conservation(
            self._start, self._input,
            tuple(Flow(name, kind, a, p, absorbs) for (name, kind), (a, p, absorbs) in order if kind != "stop"),
        )  # fmt: skip

    def _blame(self) -> str:
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f" (`{name}` has values that are not finite)"
        return ""

    def _enter(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"the input of shape {tuple(tensor.shape)} has NaN or infinite values.")
        entry = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
        self._entries.append(entry.requires_grad_(True))
        self._leaves.add(id(entry))
        return entry

    def _verify(self, inputs: Any, output: Tensor) -> None:
        """In-place writes through views cannot be followed; where there were any, the output must be right anyway."""
        if not self._doubtful:
            return
        with torch.no_grad():
            plain = logits_of(call_model(self.model, inputs))
        if not torch.allclose(plain, output.detach(), rtol=1e-3, atol=1e-4):
            raise UnsupportedModelError(
                f"{self._doubtful} writes in place through a view, and the result is used under another name. Way out: "
                f"write that operation out of place."
            )

    # -- seeing calls ----------------------------------------------------------------------------------------------
    def observe(self, call: Call) -> Any:
        """Let the operation decide, if relevance can come this way at all."""
        operation = call.operation
        if not any(t.requires_grad for t in call.tensors()) and not getattr(operation, "enters", False):
            return call.run()
        if type(operation).relevance is Operation.relevance:
            raise UnknownOperationError(
                f"the entry for {call.site} ({operation.name}) does not say how relevance passes. Way out: give the "
                f"operation a `relevance` method, or replace the call in the model."
            )
        self._fresh, self._writable = None, self._fresh
        return operation.relevance(self, call)

    def concerns(self, value: Any) -> bool:
        """Tensors with a graph behind them carry relevance."""
        return isinstance(value, Tensor) and value.requires_grad

    def present(self, values: Any) -> Any:
        """Parameters without their gradient flag; tensors that were overwritten, in their present state."""
        if isinstance(values, Tensor):
            if self.facts.newer:
                newer = self.facts.newer.get(values)
                while newer is not None:
                    values, newer = newer, self.facts.newer.get(newer)
            if values.requires_grad and values.grad_fn is None and id(values) not in self._leaves:
                return self._weights.plain(values)
            return values
        kind = type(values)
        if kind is tuple or kind is list:
            return kind([v if v is None or type(v) in SCALARS else self.present(v) for v in values])
        if kind is dict:
            return {key: self.present(item) for key, item in values.items()}
        return values


@dataclass(frozen=True)
class Batch:
    """What came of one batch. `row` are all unit sums as `layout` lists them."""

    output: Tensor
    heat: list[Tensor | None]
    layout: tuple[tuple[str, int, int], ...]
    row: Tensor | None
    flows: list[Flow]
    begun: float
    reached: float
