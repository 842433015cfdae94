"""Nested inputs and outputs: tensors inside tuples, lists, mappings and dataclasses, as models take and return them."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set, ValuesView
from dataclasses import fields
from io import IOBase
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import UnsupportedModelError

#: Types of arguments in which no tensor can be.
SCALARS = frozenset({int, float, bool, str, torch.dtype, torch.device, slice, EllipsisType})
_PLAIN = frozenset({tuple, list, dict})
#: Objects that are no part of an output, whatever they refer to.
_CLOSED = (
    str, bytes, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, torch.Generator, IOBase,
)  # fmt: skip
_UNORDERED = (Set, ValuesView, deque)
_HIDDEN = frozenset({"__dict__", "__weakref__"})
#: Names of what a model returns from its inside.
_INNER = re.compile(r"hidden_states?$|attentions$|past_key_values|cache_params|mems$|router_logits|^state$")


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors inside nested tuples, lists, mappings and dataclasses, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Every observed call comes through here, so the usual types are told apart first.
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if item is not None and type(item) not in SCALARS:
                _collect(item, found)
    else:
        for _, item in entries(value) or ():
            _collect(item, found)


def tensors_of_output(output: Any, names: Iterable[str] = ()) -> list[Tensor]:
    """The tensors that a model returns, in containers and in the attributes of objects of any type, at any depth.

    What a model keeps for its own next call (an object of a type named `…Cache`) is no output. `names`: the entries
    that count. Without them, what Hugging Face models return from their inside beside `logits` does not count.
    """
    inside = dict(output) if isinstance(output, Mapping) else None
    if names:
        output = [inside.get(name) if inside is not None else getattr(output, name, None) for name in names]
    elif inside is not None and isinstance(inside.get("logits"), Tensor):
        output = [part for name, part in inside.items() if not _INNER.search(str(name))]
    found: list[Tensor] = []
    closed = getattr(output, "__closure__", None)  # of a function that the model returns
    _explore([cell.cell_contents for cell in closed] if closed else output, found, set())
    return found


def _explore(value: Any, found: list[Tensor], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if value is None or isinstance(value, _CLOSED) or type(value) in SCALARS or id(value) in seen or _is_cache(value):
        return
    seen.add(id(value))
    if isinstance(value, Iterator):
        raise UnsupportedModelError(
            f"the model returns a {type(value).__name__}, which can be read only once: its tensors cannot be seen.",
            fix="let the forward return a tuple or a list",
        )
    inside = list(enumerate(value)) if isinstance(value, _UNORDERED) else entries(value)
    for _, item in inside or ():
        _explore(item, found, seen)
    if type(value) not in _PLAIN:
        more: list[Tensor] = []
        for _, item in attributes(value):
            _explore(item, more, seen)
        # The entries of many containers are attributes too.
        found += [t for t in more if inside is None or not any(t is known for known in found)]


def _is_cache(value: Any) -> bool:
    return any(kind.__name__.endswith("Cache") for kind in type(value).__mro__)


def attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object itself holds, by name; also those in `__slots__`."""
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    held = [(name, getattr(value, name)) for name in slots if name not in _HIDDEN and hasattr(value, name)]
    return held + list(getattr(value, "__dict__", {}).items())


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def entries(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and items of a container: a mapping, a sequence or a dataclass. None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if hasattr(type(value), "__dataclass_fields__"):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a nest that is not itself a container, in order."""
    inside = entries(value)
    if inside is None:
        yield value
    for _, item in inside or ():
        yield from leaves(item)


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """The same nest with `function` of each leaf. `others`: nests of the same form, whose leaves it gets as well."""
    inside = None if isinstance(value, Tensor) else entries(value)
    if inside is None:
        return function(value, *others)
    beside = [[item for _, item in entries(other) or ()] for other in others]
    made = [map_leaves(function, item, *rest) for (_, item), *rest in zip(inside, *beside, strict=True)]
    if type(value) not in _PLAIN and all(new is old for new, (_, old) in zip(made, inside, strict=True)):
        return value
    return _rebuilt(value, [key for key, _ in inside], made)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest with `function` of each tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _rebuilt(value: Any, keys: Iterable[Any], items: list[Any]) -> Any:
    """A container like `value` with other items."""
    if isinstance(value, tuple | list):
        make = getattr(value, "_make", type(value))  # a NamedTuple takes its items one by one
        return make(items)
    if type(value) is dict or (isinstance(value, Mapping) and not isinstance(value, MutableMapping)):
        kind: Any = type(value)
        return kind(dict(zip(keys, items, strict=True)))
    made = copy.copy(value)  # keeps what else the object holds
    for key, item in zip(keys, items, strict=True):
        if isinstance(value, Mapping):
            made[key] = item
        else:
            object.__setattr__(made, key, item)  # frozen or not
    return made


class Images(list[Tensor]):
    """Images of several sizes, (channels, height, width) each: one argument of a detector, with an item per sample."""


def are_images(value: Any) -> bool:
    """Whether a value is a list of images, rather than of batches: channels first, and few of them."""
    return isinstance(value, list | tuple) and bool(value) and all(
        isinstance(t, Tensor) and t.ndim == 3 and t.is_floating_point() and len(t) in (1, 3, 4) and min(t.shape) > 0
        for t in value
    )  # fmt: skip


def lists_samples(value: Any) -> bool:
    """Whether a value is a list with an item for each sample: images, or dicts."""
    if isinstance(value, Images):
        return True
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def select_samples(value: Any, index: Tensor | slice) -> Any:
    """Some samples of a nest of tensors. A single number is the same for all of them."""
    if isinstance(value, Tensor):
        if not value.ndim:
            return value
        return value[index.to(value.device) if isinstance(index, Tensor) else index]
    if lists_samples(value):
        return type(value)(value[index] if isinstance(index, slice) else [value[i] for i in index.tolist()])
    inside = entries(value)
    if inside is None:
        return value
    return _rebuilt(value, [key for key, _ in inside], [select_samples(item, index) for _, item in inside])


def counts_of_samples(value: Any) -> list[int]:
    """How many samples each tensor and each list of samples in a nest has; 0 for a single number."""
    if isinstance(value, Tensor):
        return [len(value) if value.ndim else 0]
    if lists_samples(value):
        return [len(value)]
    return [count for _, item in entries(value) or () for count in counts_of_samples(item)]


def describe(value: Any) -> str:
    """Shapes and dtypes of a nest of tensors, for messages.

    >>> describe({"x": torch.zeros(1, 3), "y": (torch.tensor([1]), 2)})
    '{x: (1, 3) float32, y: ((1,) int64, 2)}'
    """
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    inside = entries(value)
    if inside is None:
        return repr(value)
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe(item) for _, item in inside) + ")"
    return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in inside) + "}"
