"""Nested inputs and outputs: tensors inside tuples, lists, mappings and objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors inside nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if item is not None and type(item) not in SCALARS:
                _collect(item, found)


#: Types of arguments in which no tensor can be.
SCALARS = frozenset({int, float, bool, str})


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest of tuples, lists and dicts with `function` of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, item) for item in value)
    return value
