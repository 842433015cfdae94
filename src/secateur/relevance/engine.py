"""The relevance pass: the user's own forward, run so that its backward pass is Layer-wise Relevance Propagation.

Every operation of the table says in its `relevance` method which of the verbs in `verbs.py` it is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, RelevanceError, UnknownOperationError, UnsupportedModelError
from secateur.nest import SCALARS, map_tensors
from secateur.ops.table import Call, Function, Operation, Query, Site
from secateur.relevance.books import Absolute, Deviation
from secateur.relevance.composites import Composite, composite_named
from secateur.relevance.conservation import Conservation, Flow, Journal, Page, slack
from secateur.relevance.facts import Facts
from secateur.relevance.layers import Layers
from secateur.relevance.recording import Recorder
from secateur.relevance.rules import Rule
from secateur.relevance.steps import total
from secateur.relevance.weights import Weights
from secateur.running.copies import unwrap
from secateur.running.devices import precise
from secateur.running.logits import answer_of, logits_of
from secateur.running.sandbox import isolated, run
from secateur.running.tensor_facts import TensorFacts

Start = Callable[[Tensor], Tensor]
_HALF = (torch.float16, torch.bfloat16)
_SAFE = "alpha1beta0"


class RelevancePass(Layers):
    """Propagates relevance through a model, batch after batch; unit sums and the books add up until `reset`.

    `units` maps the name of each weight to one number per output channel or neuron. `absolute` takes absolute values
    per "sample" (after summing over space) or per "element" before they are summed. Folded and positive weights are
    kept between batches. Without `heat_map`, relevance stops at the layers that read the input, which is faster.
    """

    shortcuts = True

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
        #: Which entry of the model's output is explained, as it would be written; empty if that is a tensor.
        self.entry = ""
        self._weights = Weights(self.model)
        self._rules = {}
        self._fusing = False
        self._script: list[tuple[Function, Site]] = []  # the calls of the forward pass, in order
        self._following = False  # whether this pass is expected to make the same calls
        self._trusted: bool | None = None  # whether computing layers in one go gives the model's own output
        self.attentive: set[str] = set()  # layers that got stuck with relevance before
        self.reset()

    def reset(self) -> None:
        """Forget all sums, keep the prepared weights."""
        self.samples = 0
        self.places = {}  # which call made which rows of which weight's units
        self._layers = {}
        self._sums = {}
        self._heights = {}
        self._ledger: dict[tuple[tuple[str, int, int], ...], Tensor] = {}  # the unit sums, in a row
        self._flows: dict[tuple[str, str], list[Any]] = {}
        self._start = 0.0
        self._input = 0.0
        self._recorder = Recorder(type(self) is RelevancePass)
        self.forget()

    def forget(self) -> None:
        """Forget everything about one forward pass."""
        self._visits.clear()
        self._weights.begin()
        self._journal = Journal()
        self._summed = TensorFacts()
        self._entries: list[Tensor] = []
        self._embedded = {}  # the weights of embeddings, by the number of the entry
        self._gates = []
        self.gated = False  # whether a gate took part
        self.gating = False  # whether gates are being scored
        self._sinks: list[tuple[str, Tensor]] = []
        self._leaves: set[int] = set()
        self.facts = Facts()
        self._fresh: weakref.ref[Tensor] | None = None  # the output of the last call, if nobody but the user has it
        self._writable: weakref.ref[Tensor] | None = None  # the same for the call before
        self._count = 0
        self._calls = 0
        self._fused = 0  # layers computed together with what follows them
        self._differentiates = True
        self._early: Tensor | None = None  # an argument of this call that is ahead of it
        self._carrying = False  # whether a tensor among the arguments of this call carries relevance
        self._deviated = False
        self._doubtful = ""

    @property
    def units(self) -> dict[str, Tensor]:
        """One number per unit, by the name of the weight."""
        sums = {
            name: torch.zeros(height, dtype=precise(device), device=device)
            for name, (height, device) in self._heights.items()
        }
        for layout, row in self._ledger.items():
            parts = torch.split_with_sizes(row, [stop - start for _, start, stop in layout])
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
        if self._following and not self.attentive:
            self._recorder.consider(self, inputs, start, batch)
        self.samples += batch.output.shape[0] if batch.output.dim() > 1 else 1
        return batch.output, batch.heat

    def _propagate(self, inputs: Any, start: Start) -> Batch:
        """A batch that makes the same calls as the one before has less work to do; if it does not, it starts again."""
        if self.attentive:
            self._recorder.refuse("layers that got stuck with relevance wait for the device")
        played = self._recorder.play(self, inputs, start)
        if played is not None:
            return played
        if self._script:
            self._following, self._fusing = True, self._trusted is not False
            try:
                return self._attempt(inputs, start)
            except Deviation:
                pass
        self._following, self._fusing = False, False
        self._script.clear()
        self._layers.clear()
        self._sums.clear()
        return self._attempt(inputs, start)

    def _attempt(self, inputs: Any, start: Start) -> Batch:
        entries = self.enter_inputs(inputs)
        with isolated(self.model, self._entries):
            output = self.forward(entries)
            self._verify(inputs, output)
            value = output.detach()
            heat, page = self.backward(output, start(value))
        fused = self._fused
        self.forget()
        batch = self.batch(value, heat, page)
        if fused and self._trusted is None:
            self._trust(inputs, value)
        return batch

    def enter_inputs(self, inputs: Any) -> Any:
        """Begin a batch: its inputs, as tensors that carry relevance."""
        self.forget()
        with torch.inference_mode(False):
            return map_tensors(self._enter, inputs)

    def forward(self, entries: Any) -> Tensor:
        """The model's output, with the way back for relevance."""
        with self:
            made = run(self.model, entries)
            self.entry = answer_of(made).entry
            output: Tensor = self._present(logits_of(made), [], True)
        if self._deviated or self._early is not None:
            raise Deviation
        if not output.requires_grad:
            raise RelevanceError(
                "the output does not depend on the input through operations that carry relevance.",
                fix=(
                    "check that the forward does not detach, and that the input is a floating-point tensor or token ids"
                ),
            )
        return output

    def backward(self, output: Tensor, seed: Tensor) -> tuple[list[Tensor | None], Page]:
        """The relevance of each input, and what was written down on the way."""
        leaves = [*self._entries, *(leaf for _, leaf in self._sinks)]
        found = torch.autograd.grad(output, leaves, seed, allow_unused=True, retain_graph=self.gated)
        self._score_gates(leaves)
        for (name, _), absorbed in zip(self._sinks, found[len(self._entries) :], strict=True):
            if absorbed is not None:
                self.flow(name, "constant", total(absorbed), 0.0, absorbs=True)
        heat: list[Tensor | None] = list(found[: len(self._entries)])
        for number, name in self._embedded.items():
            relevance = heat[number]
            if relevance is not None:
                self._journal.units(name, slice(0, relevance.shape[-1]), self._by_channel(relevance, -1))
        odd = (~torch.isfinite(output.detach())).sum() + (~torch.isfinite(seed)).sum()
        arrived = [total(relevance) for relevance in heat if relevance is not None]
        return heat, self._journal.gather(odd, total(seed), *arrived)

    def batch(self, value: Tensor, heat: list[Tensor | None], page: Page) -> Batch:
        """What came of a batch, once the device is done."""
        flows, (wrong, begun, *reached) = page.read()
        if wrong:
            raise RelevanceError(
                f"the output, where relevance starts, is not finite{self._blame()}.",
                fix=f"{'check the weights' if value.dtype not in _HALF else self._way_out(value)}",
            )
        return Batch(value, heat, page.layout, page.units, flows, begun, sum(reached))

    def _score_gates(self, leaves: Sequence[Tensor]) -> None:
        """Gates (squeeze-and-excitation, queries and keys) take no relevance. So that this does not make them look
        useless, the layers behind them, up to those that have relevance of their own, are scored by what they let pass.
        """
        self.gating = True
        while self._gates:
            gates, self._gates = self._gates, []
            edges, relevances = zip(*gates, strict=True)
            torch.autograd.grad(edges, leaves, relevances, allow_unused=True, retain_graph=True)
        self.gating = False

    def _stuck_layers(self, batch: Batch) -> bool:
        """Note the layers that could not pass everything on, and whether any of them is new."""
        stuck = {
            flow.name
            for flow in batch.flows
            if flow.kind in ("conv", "linear", "pool")
            and not flow.absorbs
            and abs(flow.lost) > slack(flow.kind, batch.output) * abs(flow.arrived)
        }
        new = stuck - self.attentive
        self.attentive |= stuck
        return bool(new) and batch.output.is_cuda

    def _book(self, batch: Batch) -> None:
        """Enter a batch into the books; refuse it if it is not finite, naming the layer nearest to the output."""
        wrong = [flow.name for flow in batch.flows if not math.isfinite(flow.arrived + flow.passed)]
        if wrong or not math.isfinite(batch.reached):
            where = wrong[0] if wrong else "the input"
            raise RelevanceError(
                f"relevance became NaN or infinite at {where if '`' in where else f'`{where}`'}{self._blame()}.",
                fix=f"{self._way_out(batch.output)}",
            )
        self._start += batch.begun
        self._input += batch.reached
        for flow in batch.flows:
            entry = self._flows.setdefault((flow.name, flow.kind), [0.0, 0.0, flow.absorbs])
            entry[0], entry[1] = entry[0] + flow.arrived, entry[1] + flow.passed
            self._input += flow.arrived if flow.kind == "stop" else 0.0
        if batch.row is not None:
            known = self._ledger.get(batch.layout)
            self._ledger[batch.layout] = batch.row.clone() if known is None else known + batch.row

    def conservation(self) -> Conservation:
        """The books of all batches so far."""
        order = reversed(list(self._flows.items()))
        return Conservation(
            self._start, self._input,
            tuple(Flow(name, kind, a, p, absorbs) for (name, kind), (a, p, absorbs) in order if kind != "stop"),
        )  # fmt: skip

    def _way_out(self, output: Tensor) -> str:
        """What can be done about relevance that is not finite, and was not done already."""
        if output.dtype in _HALF and not self._blame():
            return f"model.float() and float32 inputs; {str(output.dtype).removeprefix('torch.')} is too coarse here"
        other = (
            "" if self.composite.name == _SAFE else f", or a composite that does not divide by small numbers: {_SAFE!r}"
        )
        return f"check weights and inputs{other}"

    def _blame(self) -> str:
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f" (`{name}` has values that are not finite)"
        return ""

    def _enter(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        self.check_input(tensor)
        entry = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
        self._entries.append(entry.requires_grad_(True))
        self._leaves.add(id(entry))
        return entry

    def check_input(self, tensor: Tensor) -> None:
        """Refuse inputs that are not finite."""
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"the input of shape {tuple(tensor.shape)} has NaN or infinite values.")

    def _verify(self, inputs: Any, output: Tensor) -> None:
        """In-place writes through views cannot be followed; where there were any, the output must be right anyway."""
        if not self._doubtful:
            return
        self._recorder.refuse("a write through a view must be checked")
        with torch.no_grad():
            plain = logits_of(run(self.model, inputs), warn=False)
        if not torch.allclose(plain, output.detach(), rtol=1e-3, atol=1e-4):
            raise UnsupportedModelError(
                f"{self._doubtful} writes in place through a view, and the result is used under another name.",
                fix="write that operation out of place",
            )

    def _trust(self, inputs: Any, output: Tensor) -> None:
        """Some functions torch shows to nobody; these may have read what was computed ahead. So the first time that
        layers were computed in one go, the output must be that of the model as it is. If not, it is not done again."""
        with isolated(self.model, []), torch.no_grad():
            plain = logits_of(run(self.model, inputs), warn=False)
        self._trusted = bool((plain - output).norm() <= 1e-2 * plain.norm())
        if not self._trusted:
            raise Deviation

    def forget_weights(self) -> None:
        """Forget the prepared weights."""
        self._weights = Weights(self.model)

    # -- seeing calls ----------------------------------------------------------------------------------------------
    def observe(self, call: Call) -> Any:
        """Let the operation decide, if relevance can come this way at all."""
        operation = call.operation
        if self._early is not None:
            return self._overtaken(call, self._early)
        if not self._carrying and not operation.enters:
            with torch.no_grad():  # parameters may have come as they are
                return call.run()
        if type(operation).relevance is Operation.relevance:
            raise UnknownOperationError(
                f"the entry for {call.site} ({operation.name}) does not say how relevance passes.",
                fix="give the operation a `relevance` method, or replace the call in the model",
            )
        self._fresh, self._writable = None, self._fresh
        return operation.relevance(self, call)

    def _overtaken(self, call: Call, x: Tensor) -> Tensor:
        """The ReLU that has already been computed. Anything else must not see its result."""
        if not (call.rectifies and call.writes) or call.tensors()[0] is not x:
            self.deviates()
        self.facts.ahead.forget(x)
        self.facts.overwritten(x)
        self.nonneg(x)
        return x

    def enter(self, module: nn.Module) -> None:
        """The script knows where we are."""
        if not self._following:
            super().enter(module)

    def site(self, function: Function) -> Site:
        """The place of the next call: as in the batch before, as long as the same functions are called."""
        index, self._calls = self._calls, self._calls + 1
        if not self._following:
            site = super().site(function)
            self._script.append((function, site))
            return site
        if index >= len(self._script) or self._script[index][0] is not function:
            self.deviates()
        return self._script[index][1]

    def deviates(self) -> None:
        """This is not the forward pass of the batch before: begin again, without expecting it."""
        if self._following:
            self._deviated = True
            raise Deviation

    def concerns(self, value: Any) -> bool:
        """Tensors with a graph behind them carry relevance."""
        return isinstance(value, Tensor) and value.requires_grad

    def present(
        self, operation: Operation | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor] | None]:
        """Parameters without their gradient flag; tensors that were overwritten, in their present state."""
        tensors: list[Tensor] = []
        self._expect(operation)
        settles = operation is None or operation.settles
        args = tuple([v if v is None or type(v) in SCALARS else self._present(v, tensors, settles) for v in args])
        if kwargs:
            kwargs = {key: self._present(value, tensors, settles) for key, value in kwargs.items()}
        if self._early is not None and isinstance(operation, Query):
            self.deviates()
        return args, kwargs, tensors

    def _expect(self, operation: Operation | None) -> None:
        self._carrying, self._differentiates = False, operation is None or operation.differentiates
        self._early = None

    def _present(self, value: Any, tensors: list[Tensor], settles: bool) -> Any:
        kind = type(value)
        if kind is tuple or kind is list:
            if all([type(v) in SCALARS for v in value]):  # noqa: C419 (half the time: this runs at every call)
                return value
            return kind([self._present(v, tensors, settles) for v in value])
        if isinstance(value, Tensor):
            facts = self.facts
            if facts.newer:
                newer = facts.newer.get(value)
                while newer is not None:
                    value, newer = newer, facts.newer.get(newer)
            if value.requires_grad:
                if value.grad_fn is not None or id(value) in self._leaves:
                    self._carrying = True
                    if facts.ahead and settles and value in facts.ahead:
                        self._early = value
                elif kind is not nn.Parameter and (record := facts.linear.get(value)) is not None:
                    self._carrying = True
                    value = value if not settles or not record.waiting else self._awaken(value, record)
                elif self._differentiates:
                    value = self._weights.plain(value)
            tensors.append(value)
            return value
        if kind is dict:
            return {key: self._present(item, tensors, settles) for key, item in value.items()}
        return value


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
