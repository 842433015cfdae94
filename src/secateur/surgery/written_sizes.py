"""Sizes that a forward writes down or computes from others: `x.view(-1, 512)`, `reshape(B, N, heads, C // heads)`.

Where channels are gone, such a number is wrong, and nothing but the code holds it. The smaller module gets its own
forward again, in which these calls of `view` and `reshape` take the sizes that are left. It is made from the source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

#: Which call of a forward, in the order of the source, and which dimension of what it makes.
Place = tuple[int, int]
Fit = Callable[..., Any]
_PREFIX, _NAMES = "forward:", ("view", "reshape")


def name_of(place: Place) -> str:
    """How a plan names a size that only code holds."""
    return f"{_PREFIX}{place[0]}:{place[1]}"


def place_of(name: str) -> Place | None:
    """The place that such a name stands for; None for an attribute."""
    call, _, dim = name.removeprefix(_PREFIX).partition(":")
    return (int(call), int(dim)) if name.startswith(_PREFIX) and call.isdecimal() and dim.isdecimal() else None


@cache
def _maker(forward: Any) -> Callable[[Fit], FunctionType] | None:
    """Makes the forward of a class in which reshapes ask `fit` for their sizes. None if there are no reshapes, if its
    source is unknown, or if something wraps it."""
    if (
        type(forward) is not FunctionType
        or hasattr(forward, "__wrapped__")
        or forward.__module__.startswith("torch.nn.")
    ):
        return None
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or function.name != "forward":
        return None
    names = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    if set(forward.__code__.co_freevars) - {"__class__"} or any(n[:2] == "__" != n[-2:] for n in names):
        return None  # (private names mean something else outside of their class)
    calls = 0
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
            continue
        tensor = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"  # torch.reshape(x, sizes)
        given = node.args[int(tensor) :]
        if node.func.attr not in _NAMES or not given:
            continue
        fit = ast.Call(ast.Name("__fit", ast.Load()), [ast.Constant(calls), *given], [])
        node.args = [*node.args[: int(tensor)], fit]
        calls += 1
    if not calls:
        return None
    own = function.args
    for argument in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg):
        if argument is not None:
            argument.annotation = None  # they may name what exists for type checkers only
    own.defaults, own.kw_defaults, function.returns = [], [None] * len(own.kwonlyargs), None
    # `super()` without arguments reads `__class__`.
    whole = ast.parse("def __make(__fit, __class__):\n    return forward")
    whole.body[0].body.insert(0, function)  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(whole), inspect.getfile(forward), "exec"), forward.__globals__, found)
    owner = forward.__closure__[0].cell_contents if forward.__closure__ else None

    def make(fit: Fit) -> FunctionType:
        made: FunctionType = found["__make"](fit, owner)
        made.__defaults__, made.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
        return made

    return make


class Resized:
    """The forward of a module in which some reshapes take these sizes, whatever the code computes."""

    def __init__(self, module: Any, sizes: Mapping[Place, int]) -> None:
        make = _maker(type(module).forward)
        assert make is not None
        self.module, self.sizes = module, dict(sizes)
        #: Places whose size was another one than the code computed; kept only if somebody wants to know.
        self.changed: set[Place] | None = None
        #: Is told which call of the source comes next.
        self.note: Callable[[int], None] | None = None
        self._run = make(self._fit)
        self.__signature__ = inspect.signature(type(module).forward.__get__(module))

    def _fit(self, call: int, *given: Any) -> Any:
        if self.note is not None:
            self.note(call)
        if isinstance(given[0], torch.dtype):  # another meaning of `view`
            return given[0]
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
        free = [type(size) is int and size == -1 for size in sizes]
        made = tuple([s if free[d] else self.sizes.get((call, d), s) for d, s in enumerate(sizes)])
        if self.changed is not None:
            self.changed |= {(call, d) for d, size in enumerate(sizes) if made[d] != size}
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Resized, (self.module, self.sizes)


def resize(module: Any, sizes: Mapping[Place, int]) -> bool:
    """Give a module a forward with these sizes, beside those that it has. Whether its forward can be rewritten."""
    known = vars(module).get("forward")
    if (known is not None and not isinstance(known, Resized)) or _maker(type(module).forward) is None:
        return False
    vars(module)["forward"] = Resized(module, {**(known.sizes if known is not None else {}), **sizes})
    return True


def resized_forward(module: nn.Module) -> Resized | None:
    """The forward that `resize` gave a module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Resized) else None
