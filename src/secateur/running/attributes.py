"""What an object holds, without running its code: it may compute attributes, count the questions, or raise."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, cached_property
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from torch import nn

_CACHED = type(cache(len))


def own_attributes(value: Any) -> dict[str, Any]:
    """What an object holds itself, in its `__dict__` and its slots. Properties and `__getattr__` are not asked."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):  # it has none
        found = {}
    for kind in type(value).__mro__:
        slots = vars(kind).items() if "__slots__" in vars(kind) else ()
        for name, slot in slots:
            if type(slot) is MemberDescriptorType:
                try:
                    found.setdefault(name, slot.__get__(value, kind))
                except AttributeError:  # it was never set
                    continue
    return found


def static(kind: type, name: str) -> Any:
    """What a class or a class above it has under a name, as it is: properties are not asked, and nothing is bound."""
    return next((vars(part)[name] for part in kind.__mro__ if name in vars(part)), None)


def is_record(kind: type) -> bool:
    """Whether a class is a dataclass. Its metaclass is not asked."""
    return static(kind, "__dataclass_fields__") is not None


def functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions of which an entry of a class is made, and those that they decorate."""
    if isinstance(value, property):
        found = [value.fget, value.fset, value.fdel]
    elif type(value) is cached_property:
        found = [value.func]
    else:
        found = [value.__func__ if isinstance(value, staticmethod | classmethod) else value]
    for function in found:  # the list grows meanwhile
        if isinstance(function, FunctionType):
            yield function
        inner = own_attributes(function).get("__wrapped__") if type(function) in (FunctionType, _CACHED) else None
        if inner is not None and not any(inner is known for known in found):
            found.append(inner)


def plain_attributes(value: Any, names: Collection[str], kinds: tuple[type, ...]) -> dict[str, Any]:
    """Those attributes of an object, or of its class, that have one of these names and are values of these kinds."""
    found: dict[str, Any] = {}
    classes = value.__mro__ if issubclass(type(value), type) else type(value).__mro__
    for part in (*(vars(kind) for kind in reversed(classes)), own_attributes(value)):
        found |= {name: part[name] for name in names if name in part}
    return {name: found[name] for name in sorted(found) if issubclass(type(found[name]), kinds)}


def qualified_name(value: Any) -> str | None:
    """The name of a function or class, if Python itself keeps it; what objects say of themselves does not count."""
    for kind in type(value).__mro__:
        slot = vars(kind).get("__qualname__")
        if slot is not None:
            name = slot.__get__(value, kind) if type(slot) in (GetSetDescriptorType, MemberDescriptorType) else None
            return name if isinstance(name, str) else None
    return None


def has_weights(module: nn.Module) -> bool:
    """Whether there are parameters in a module, which may not have been initialised."""
    held = own_attributes(module)
    modules = [item for item in (held.get("_modules") or {}).values() if item is not None]
    return any(item is not None for item in (held.get("_parameters") or {}).values()) or any(map(has_weights, modules))


def own_text(value: Any) -> str:
    """The `repr` of a value, if its class has one of its own that works. Python shows integers only up to a length."""
    shows: Any = type(value).__repr__
    if shows is object.__repr__:
        return ""
    try:
        return repr(value)
    except Exception:  # whatever the user's code raises
        return int.__format__(value, "x") if issubclass(type(value), int) else ""
