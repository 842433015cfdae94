"""The forward pass: the user's model runs, and each operation it calls says how relevance passes.

Relevance comes back along the autograd graph. So a tensor carries relevance if it requires grad, and parameters are
shown to operations without their gradient flag.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, RelevanceError, UnknownOperationError
from secateur.nest import SCALARS, map_tensors, tensors_in
from secateur.ops.table import Call, Function, Opaque, Operation, Query, Site
from secateur.relevance._script import Script
from secateur.relevance.accelerators import Attempt, Attends, Deviation
from secateur.relevance.propagation import Propagation
from secateur.relevance.starts import AtGoal
from secateur.relevance.weights import Weights
from secateur.running.goals import tapping
from secateur.running.logits import answer_of, logits_of
from secateur.running.observer import Observer, refuse_autocast, refuse_checkpoint, refuse_transform, unknown_operation
from secateur.running.sandbox import run

_OPAQUE = Opaque()


class ForwardPass(Observer):
    """Watches the model run, batch after batch. With a `script`, it knows where each call is without looking."""

    shortcuts = True

    _propagation: Propagation  # of the batch that is running
    _attempt: Attempt

    def __init__(self, model: nn.Module, weights: Weights, script: Script | None) -> None:
        super().__init__(model)
        self._model, self._weights, self._script = model, weights, script
        #: Which entry of the model's output is explained, as it would be written; empty if that is a tensor.
        self.entry = ""
        self._following = False  # whether the script gives the places of calls
        self._carrying = False  # whether an argument of this call carries relevance
        self._differentiates = True  # whether torch differentiates this call
        self._ahead: Tensor | None = None  # an argument of this call that is already the output of its ReLU

    def run(self, propagation: Propagation, attempt: Attempt, inputs: Any, goal: AtGoal | None = None) -> Tensor:
        """The model's output, with the way back for relevance: its logits, or what a goal sees."""
        self._visits.clear()
        self._weights.begin()
        self._propagation, self._attempt, self._ahead = propagation, attempt, None
        self._following = self._script is not None and attempt.expected
        if self._script is not None:
            self._script.begin(attempt.expected)
        try:
            with tapping(self._model, None if goal is None else goal.aim) as tapped, self:
                made = run(self._model, inputs)
                if goal is None:
                    self.entry = answer_of(made).entry
                    output: Tensor = self._present(logits_of(made), [], True)
                else:
                    made = map_tensors(lambda t: self._present_tensor(t, True), tapped(made))
            if goal is not None:
                output = goal.pick(made)
        finally:
            del self._propagation
        if attempt.attends:
            raise Attends
        if attempt.failed or self._ahead is not None:
            raise Deviation
        if not output.requires_grad:
            raise RelevanceError(
                "the output does not depend on the input through operations that carry relevance.",
                fix="check that the forward does not detach, and that the inputs are floating-point or token ids",
            )
        return output

    # -- what the observer asks ------------------------------------------------------------------------------------
    def observe(self, call: Call) -> Any:
        operation, propagation = call.operation, self._propagation
        if self._ahead is not None:
            return propagation.fusion.overtaken(call, self._ahead)
        if not self._carrying and not operation.enters:
            with torch.no_grad():  # parameters may still have their gradient flag
                return call.run()
        refuse_checkpoint(call.site)
        refuse_transform(call.site)
        refuse_autocast(call.site)
        if type(operation).relevance is Operation.relevance:
            refusal = UnknownOperationError(
                f"the entry for {call.site} ({operation.name}) does not say how relevance passes.",
                fix="give the operation a `relevance` method, or replace the call in the model",
            )
            return propagation.refuses(call, refusal)
        propagation.activations.next_call()
        output = operation.relevance(propagation, call)
        if call.writes:  # an operation that is made of smaller ones leaves this to us
            propagation.activations.settle(call, output)
        return output

    def enter(self, module: nn.Module) -> None:
        if not self._following:  # the script knows it
            super().enter(module)

    def site(self, function: Function) -> Site:
        if self._script is None:
            return super().site(function)
        if not self._following:
            return self._script.note(function, super().site(function))
        site = self._script.follow(function)
        if site is None:
            self._attempt.deviates()
            raise Deviation
        return site

    def unknown(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function without an entry is in the way only of relevance that comes back to it."""
        tensors = tensors_in((args, kwargs))
        if not any(tensor.requires_grad for tensor in tensors):
            return func(*args, **kwargs)
        site = self.site(func)
        refuse_transform(site)
        refusal = unknown_operation(site, tensors)
        return self._propagation.refuses(Call(_OPAQUE, func, args, kwargs, Site("", "", 0)), refusal)

    def applies(self, function: type[Any], plain: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function with a derivative of its own, which is no rule for relevance: what it calls is followed instead.
        Without it, `forward` needs a context only to write to."""
        aside = () if function.setup_context is not torch.autograd.Function.setup_context else (_Context(),)
        return function.forward(*aside, *args, **kwargs)

    def concerns(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.requires_grad

    def present(
        self, operation: Operation | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor] | None]:
        """Parameters without their gradient flag, and the replacements of tensors that were overwritten."""
        tensors: list[Tensor] = []
        self._begin_call(operation)
        settles = operation is None or operation.settles
        args = tuple([v if v is None or type(v) in SCALARS else self._present(v, tensors, settles) for v in args])
        if kwargs:
            kwargs = {key: self._present(value, tensors, settles) for key, value in kwargs.items()}
        if self._ahead is not None and (operation is None or isinstance(operation, Query)):
            self._attempt.deviates()
        return args, kwargs, tensors

    def _begin_call(self, operation: Operation | None) -> None:
        self._carrying, self._ahead = False, None
        self._differentiates = self._propagation.native or operation is None or operation.differentiates

    def _present(self, value: Any, tensors: list[Tensor], settles: bool) -> Any:
        kind = type(value)
        if kind is tuple or kind is list:
            if all([type(v) in SCALARS for v in value]):  # noqa: C419 (half the time: this runs at every call)
                return value
            return kind([self._present(v, tensors, settles) for v in value])
        if isinstance(value, Tensor):
            value = self._present_tensor(value, settles)
            tensors.append(value)
            return value
        if kind is dict:
            return {key: self._present(item, tensors, settles) for key, item in value.items()}
        return value

    def _present_tensor(self, value: Tensor, settles: bool) -> Tensor:
        propagation = self._propagation
        replaced, fusion = propagation.activations.newer, propagation.fusion
        if replaced:
            newer = replaced.get(value)
            while newer is not None:
                value, newer = newer, replaced.get(newer)
        if not value.requires_grad:
            return value
        if value.grad_fn is not None or id(value) in propagation.backward.leaves:
            self._carrying = True
            if settles and fusion.reads(value):
                self._ahead = value
        elif type(value) is not nn.Parameter and fusion.is_pending(value):
            self._carrying = True
            if settles:
                fusion.reads(value)
        elif self._differentiates:
            return self._weights.plain(value)
        return value


class _Context:
    """What the forward of a `torch.autograd.Function` keeps for its derivative, which nobody asks for."""

    def __getattr__(self, name: str) -> Any:
        if name == "needs_input_grad":
            return (False,) * 64
        return lambda *args, **kwargs: None


def check_input(tensor: Tensor) -> None:
    """Refuse inputs that are not finite."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DataError(f"the input of shape {tuple(tensor.shape)} has NaN or infinite values.")
