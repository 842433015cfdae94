"""`apply`: carry out a plan, and return nothing that was not verified."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.arguments import check_choice, check_kind
from secateur.errors import Argument, PlanError, VerificationError
from secateur.nest import map_tensors, tensors_of_output
from secateur.plans.plan import Plan
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import dtype_of
from secateur.running.sandbox import Example, evaluating, leaves_no_trace, quiet, run
from secateur.surgery.cut import cut
from secateur.surgery.mask import mask, reference
from secateur.surgery.provenance import remember

# Rule zero compares relative to the largest output. Half precision formats round coarsely.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_NARROW = frozenset(_TOLERANCE) - {torch.float64}


@leaves_no_trace
def apply(
    model: nn.Module, plan: Plan, how: Literal["remove", "mask"] = "remove", example: Example = None
) -> nn.Module:
    """A new model without the units that the plan removes; `how="mask"` keeps the shapes and zeroes them instead.

    **Rule zero**: on the example, removal and masking must agree, or `VerificationError` is raised. The example is the
    one given to `analyze`; a plan read from a file has none, so give it one here if you want the check.

    >>> import secateur as sc
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> graph = sc.analyze(net, torch.zeros(1, 4))
    >>> sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5))[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    model = unwrap(model)
    check_kind("plan", plan, Plan, "apply(model, plan), with the plan of `plan(…)` or result.plan", error=PlanError)
    check_choice("how", how, ("remove", "mask"))
    if how == "mask":
        return mask(model, plan)
    small = cut(model, plan)
    example = plan.example if example is None else example
    if example is not None and plan.groups:
        verify(model, small, plan, example)
    remember(small, model, replace(plan, example=example))
    return small


def verify(model: nn.Module, small: nn.Module, plan: Plan, example: Example) -> None:
    """Raise unless the small model and the masked one agree on the example."""
    dtype = dtype_of(model) or torch.float32
    gap, where = _gap(small, model, plan, example)
    limit = _TOLERANCE.get(dtype, 1e-4)
    if gap <= limit:
        return
    if dtype != torch.float64:
        # Deep nets amplify rounding. In double precision only a real difference survives.
        with suppress(VerificationError):  # a forward that needs its own precision is judged by that
            gap, where = _gap(small, model, plan, example, double=True)
            if gap <= 1e-7:
                return
    raise VerificationError(
        f"removal and zero-masking disagree on the example: relative difference {gap:.2g} (allowed {limit:g}) {where}. "
        "The smaller model is withheld. The forward probably addresses channels by fixed positions.",
        fix="name the layer in {ignore}, and please report the model",
        ignore=Argument("ignore"),
    )


def _gap(small: nn.Module, model: nn.Module, plan: Plan, example: Example, double: bool = False) -> tuple[float, str]:
    """The largest difference between small and masked outputs relative to the largest output, and where it is."""
    if double:
        example = map_tensors(lambda t: t.double() if t.is_floating_point() else t, example)
    copy = shared_copy(small)  # so that what the forward writes is not handed out
    outputs = [_outputs("smaller", copy, example, double)]
    masked = reference(model, plan)  # made only now, so that not all three models and a pass need memory at once
    outputs.append(_outputs("masked", masked, example, double))
    if len(outputs[0]) != len(outputs[1]):
        raise VerificationError("the smaller model returns another number of tensors than the masked one")
    worst, where = 0.0, ""
    for i, (a, b) in enumerate(zip(*outputs, strict=True)):
        if a.shape != b.shape:
            return float("inf"), f"in the shape of output {i}: {tuple(a.shape)} instead of {tuple(b.shape)}"
        if not a.numel() or not a.is_floating_point():
            continue
        a, b = a.double(), b.double()
        gap = float((a - b).abs().max()) / (float(b.abs().max()) or 1.0)
        if not gap <= worst:
            worst, where = (gap if gap == gap else float("inf")), f"in output {i} of shape {tuple(a.shape)}"
    return worst, where


class _Double(TorchFunctionMode):
    """Casts to narrower floats, which a forward may contain, keep double precision."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        wide = [torch.float64 if type(item) is torch.dtype and item in _NARROW else item for item in args]
        named = {n: torch.float64 if type(i) is torch.dtype and i in _NARROW else i for n, i in (kwargs or {}).items()}
        return func(*wide, **named)


def _outputs(what: str, net: nn.Module, example: Example, double: bool) -> list[Tensor]:
    """What a model returns on the example in evaluation mode."""
    net = net.double() if double else net
    with quiet(), evaluating(net), _Double() if double else nullcontext():
        try:
            return tensors_of_output(run(net, example))
        except Exception as error:
            raise VerificationError(
                "the {model} model does not run on the example: {error}. A size is probably written into the forward.",
                fix="name the layer in {ignore}",
                model=what,
                error=f"{type(error).__name__}: {error}",
                ignore=Argument("ignore"),
            ) from error
