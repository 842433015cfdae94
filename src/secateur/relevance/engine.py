"""The relevance pass: the user's own forward, run so that its backward pass is Layer-wise Relevance Propagation.

Every operation of the table says in its `relevance` method which of the verbs in `verbs.py` it is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, RelevanceError, UnknownOperationError, UnsupportedModelError
from secateur.graph.shadow import unwrap
from secateur.ops.table import Call, Function, Operation
from secateur.relevance.composites import Composite, composite_named
from secateur.relevance.conservation import Conservation, Flow
from secateur.relevance.facts import Facts
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
        self.attentive: set[str] = set()  # layers that got stuck with relevance before
        self.reset()

    def reset(self) -> None:
        """Forget all sums, keep the prepared weights."""
        self.units: dict[str, Tensor] = {}
        self.samples = 0
        self._flows: dict[tuple[str, str], list[Any]] = {}
        self._start = 0.0
        self._input = 0.0
        self._forget()

    def _forget(self) -> None:
        """Forget everything about one forward pass."""
        self._visits.clear()
        self._pending: list[tuple[str, str, Any, Any, bool]] = []  # the books of this batch
        self._gathered: list[tuple[str, slice, Tensor]] = []  # the unit sums of this batch
        self._entries: list[Tensor] = []
        self._sinks: list[tuple[str, Tensor]] = []
        self._leaves: set[int] = set()
        self.facts = Facts()
        self._swapped: dict[int, tuple[Tensor, Tensor]] = {}
        self._fresh: weakref.ref[Tensor] | None = None  # the output of the last call, if nobody but the user has it
        self._writable: weakref.ref[Tensor] | None = None  # the same for the call before
        self._count = 0
        self._doubtful = ""

    # -- running ---------------------------------------------------------------------------------------------------
    def run(self, inputs: Any, start: Start) -> tuple[Tensor, list[Tensor | None]]:
        """One batch: returns the model's output and the relevance of each input tensor (None for those without)."""
        output, heat, seed = self._propagate(inputs, start)
        if self._stuck_layers(seed):  # on a GPU only now is it known; from the next time on these layers look for it
            output, heat, seed = self._propagate(inputs, start)
        self._book(heat, seed)
        self.samples += output.shape[0] if output.dim() > 1 else 1
        return output, heat

    def _propagate(self, inputs: Any, start: Start) -> tuple[Tensor, list[Tensor | None], Tensor]:
        self._forget()
        self._weights.index()
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
            seed = start(output.detach())
            if not bool(torch.isfinite(output).all() & torch.isfinite(seed).all()):
                raise RelevanceError(
                    f"the output, where relevance starts, is not finite{self._blame()}. Way out: check the weights."
                )
            leaves = [*self._entries, *(leaf for _, leaf in self._sinks)]
            found = torch.autograd.grad(output, leaves, seed, allow_unused=True)
        for (name, _), absorbed in zip(self._sinks, found[len(self._entries) :], strict=True):
            if absorbed is not None:
                self.flow(name, "constant", total(absorbed), 0.0, absorbs=True)
        heat: list[Tensor | None] = list(found[: len(self._entries)])
        value, gathered, pending = output.detach(), self._gathered, self._pending
        self._forget()
        self._gathered, self._pending = gathered, _as_numbers(pending)
        return value, heat, seed

    def _stuck_layers(self, seed: Tensor) -> bool:
        """Note the layers that could not pass everything on, and whether any of them is new."""
        stuck = {
            name for name, kind, arrived, passed, absorbs in self._pending
            if not absorbs and kind in ("conv", "linear", "pool") and abs(arrived - passed) > 1e-5 * abs(arrived)
        }  # fmt: skip
        new = stuck - self.attentive
        self.attentive |= stuck
        return bool(new) and seed.is_cuda

    def _book(self, heat: Sequence[Tensor | None], seed: Tensor) -> None:
        """Enter a batch into the books; refuse it if it is not finite, naming the layer nearest to the output."""
        reached = sum(float(total(relevance)) for relevance in heat if relevance is not None)
        wrong = [name for name, _, arrived, passed, _ in self._pending if not math.isfinite(arrived + passed)]
        if wrong or not math.isfinite(reached):
            raise RelevanceError(
                f"relevance became NaN or infinite at `{wrong[0] if wrong else 'the input'}`{self._blame()}. Way out: "
                f"check weights and inputs, use float32, or a composite that does not divide by small numbers, such as "
                f"'alpha1beta0'."
            )
        self._start += float(total(seed))
        for name, kind, arrived, passed, absorbs in self._pending:
            entry = self._flows.setdefault((name, kind), [0.0, 0.0, absorbs])
            entry[0], entry[1] = entry[0] + arrived, entry[1] + passed
            reached += arrived if kind == "stop" else 0.0
        self._input += reached
        for name, rows, summed in self._gathered:
            self.units[name][rows] += summed
        self._gathered, self._pending = [], []

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
    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = self._swap(args), self._swap(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def observe(self, call: Call) -> Any:
        """Let the operation decide, if relevance can come this way at all."""
        operation = call.operation
        carrying = any(t.requires_grad for t in call.tensors())
        if not carrying and not getattr(operation, "enters", False):
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

    def _swap(self, value: Any) -> Any:
        """Parameters without their gradient flag; tensors that were overwritten, in their present state."""
        if isinstance(value, Tensor):
            newer = self.facts.newer.get(value)
            while newer is not None:
                value, newer = newer, self.facts.newer.get(newer)
            if value.requires_grad and value.grad_fn is None and id(value) not in self._leaves:
                if id(value) not in self._swapped:
                    self._swapped[id(value)] = (value, value.detach())
                return self._swapped[id(value)][1]
            return value
        if isinstance(value, dict):
            return {key: self._swap(item) for key, item in value.items()}
        if type(value) is tuple:
            return tuple(self._swap(item) for item in value)
        if type(value) is list:
            return [self._swap(item) for item in value]
        return value


def _as_numbers(pending: Sequence[tuple[str, str, Any, Any, bool]]) -> list[tuple[str, str, Any, Any, bool]]:
    """The same entries with numbers instead of tensors, fetched from the device in one go."""
    tensors = [v for _, _, *both, _ in pending for v in both if isinstance(v, Tensor)]
    numbers = iter(torch.stack([t.to(tensors[0].dtype) for t in tensors]).tolist() if tensors else [])

    def number(value: Any) -> float:
        return next(numbers) if isinstance(value, Tensor) else float(value)

    return [(name, kind, number(arrived), number(passed), absorbs) for name, kind, arrived, passed, absorbs in pending]
