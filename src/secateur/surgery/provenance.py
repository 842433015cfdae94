"""Where a smaller model comes from: the plans that led to it, and what its inputs look like."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from secateur.nest import entries
from secateur.plans.plan import Plan
from secateur.running.copies import unwrap
from secateur.running.sandbox import Example

_ATTRIBUTE, _INPUTS = "_secateur_plans", "_secateur_inputs"


def plans_of(model: nn.Module) -> tuple[Plan, ...]:
    """The plans that led from the user's model to this one, in order."""
    found = vars(unwrap(model)).get(_ATTRIBUTE, ())
    return tuple(found)


def remember(small: nn.Module, original: nn.Module, plan: Plan) -> None:
    """Note on a smaller model how it came about, so that it can be saved."""
    form = inputs_like(plan.example) if plan.example is not None else vars(unwrap(original)).get(_INPUTS, "")
    vars(small)[_ATTRIBUTE] = (*plans_of(original), replace(plan, example=None))
    vars(small)[_INPUTS] = form


# -- output ------------------------------------------------------------------------------------------------------------
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
