"""Where a smaller model comes from: the plans that led to it, and what its inputs look like."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor, nn

from secateur.nest import entries
from secateur.plans.plan import Plan
from secateur.running.copies import unwrap
from secateur.running.sandbox import Example

_ATTRIBUTE = "_secateur_provenance"


@dataclass(frozen=True)
class Provenance:
    """The plans that led from the user's model to this one, in order, and the form of its inputs as JSON, if known."""

    plans: tuple[Plan, ...] = ()
    inputs: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it is frozen, and every copy of the model carries it


def provenance_of(model: nn.Module) -> Provenance:
    """Where a model comes from. That of a model that secateur did not make is empty."""
    found: Provenance = vars(unwrap(model)).get(_ATTRIBUTE, Provenance())
    return found


def plans_of(model: nn.Module) -> tuple[Plan, ...]:
    """The plans that led from the user's model to this one, in order."""
    return provenance_of(model).plans


def remember(small: nn.Module, original: nn.Module, plan: Plan) -> None:
    """Note on a smaller model that `plan` made it of `original`, so that it can be saved."""
    before = provenance_of(original)
    form = before.inputs if plan.example is None else inputs_like(plan.example)
    vars(small)[_ATTRIBUTE] = Provenance((*before.plans, replace(plan, example=None, graph=None)), form)


def remember_inputs(model: nn.Module, form: str) -> None:
    """Note on a smaller model what its inputs look like."""
    vars(model)[_ATTRIBUTE] = replace(provenance_of(model), inputs=form)


def inputs_like(example: Example) -> str:
    """What inputs look like, as JSON: shapes, types and ranges, no content. Empty if that cannot be told."""
    try:
        return json.dumps(_form(example))
    except (TypeError, ValueError, RuntimeError):
        return ""


def _form(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        if value.is_complex() or value.is_meta or not value.numel():
            raise TypeError("no range")
        low, high = (float(part) for part in (value.detach().min(), value.detach().max()))
        if not math.isfinite(high - low):
            raise ValueError("not finite")
        kind = "real" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "kind": kind, "low": low, "high": high}
    inside = entries(value)
    if inside is not None and not isinstance(value, tuple | list):
        return {"named": {str(key): _form(item) for key, item in inside}}
    if inside is not None:
        return {"items": [_form(item) for _, item in inside]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError("no plain value")
