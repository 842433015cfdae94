"""What a user's class or object is, as a short text: a run recognises transforms and losses by it when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from types import FunctionType
from typing import Any

from torch import nn

from secateur.running.attributes import functions_of, has_weights, own_attributes, static
from secateur.running.functions import Use, content, held, once, within

# Where an object gets its state. All other methods with double underscores may be called while a run uses it.
_FIRST = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__setstate__"})
# What runs when an object is used as a function. The last is what torch calls `__call__`.
WHOLE = ("__call__", "forward", "_wrapped_call_impl")
# What every module has.
_OF_MODULES = frozenset({*vars(nn.Module()), "__dict__", "__weakref__"})


def class_name(kind: type, described: Callable[[Any], str]) -> str:
    """A class by its name. One within a function shares its name with others: what its methods do counts as well."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} {once(kind, partial(_members, kind, described))}" if "<" in kind.__qualname__ else name


def _members(kind: type, described: Callable[[Any], str]) -> Iterator[str]:
    yield from (class_name(base, described) for base in kind.__bases__)
    for name, value in sorted(vars(kind).items()):
        functions = list(functions_of(value))
        yield from (f"{name} {content(function, described)}" for function in functions)
        if not functions and name[:1] != "_":
            yield f"{name} {held(value, described, Use(alters=True))}"


def state(value: Any, described: Callable[[Any], str], method: str = "__call__") -> str:
    """A digest of the attributes of an object of which a method is used; nothing if it has none that count.

    Those count that its methods read. What they write while it is used does not: a counter is no setting. Neither do
    weights, which may be trained meanwhile, and the buffers beside them.
    """
    kind: Any = type(value)
    use = _use(kind, method)
    counted = _counted(value, use)
    return once(value, partial(_attributes, counted, described, use), method) if counted else ""


@lru_cache(256)
def _use(kind: type, method: str) -> Use:
    use = Use(_used(kind, method))
    # An object with many methods may be a whole program, of which those things must not count that are not seen here.
    use.unknown = use.unknown and method in WHOLE
    use.unknown = use.unknown or not [*functions_of(static(kind, method))]  # it is written in C
    return use


def _counted(value: Any, use: Use) -> dict[str, Any]:
    kind, own = type(value), own_attributes(value)
    found = own
    if not use.unknown:  # what is not read may well be the time of the start
        found = {name: item for name, item in found.items() if name in use.reads}
    if issubclass(kind, nn.Module):
        found = {name: item for name, item in found.items() if name not in _OF_MODULES}
        found |= own.get("_modules") or {}
        found |= {} if has_weights(value) else own.get("_buffers") or {}
    # These are computed from others.
    found = {name: item for name, item in found.items() if type(static(kind, name)) is not cached_property}
    # A function is no counter: np.vectorize writes its own again whenever it is called.
    return {name: found[name] for name in sorted(found) if name not in use.writes or type(found[name]) is FunctionType}


def _attributes(counted: dict[str, Any], described: Callable[[Any], str], use: Use) -> Iterator[str]:
    return (f"{name} {held(item, described, use.of(name))}" for name, item in counted.items())


def _used(kind: type, method: str) -> Iterator[FunctionType]:
    """The functions of a class that may run while an object is used, not only when it is made."""
    methods: dict[str, list[FunctionType]] = {}
    for base in (base for base in kind.__mro__ if base is not nn.Module):
        for name, value in vars(base).items():
            methods.setdefault(name, []).extend(functions_of(value))
    called = [method]
    if method in WHOLE:
        called = [n for n in methods if n in WHOLE or (n[:2] == n[-2:] == "__" and n not in _FIRST)]
    seen = set(called)
    for name in called:  # the list grows meanwhile
        yield from methods.get(name, ())
        names = {n for function in methods.get(name, ()) for code in within(function.__code__) for n in code.co_names}
        more = [n for n in methods if n in names and n not in seen and n not in _FIRST]
        called += more
        seen |= set(more)
