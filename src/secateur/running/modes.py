"""The training mode: whose code asks for it, and whether a forward does.

Code that asks may do something else in training, which then has to be watched and verified too. What the source of a
class names is asked for only if that line runs: DenseNet names the mode for a dropout that it mostly does not have.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from secateur.running.copies import named_modules


def reads_training(model: nn.Module) -> bool:
    """Whether code names the mode outside torch's own modules and torchvision's building blocks, which only drop."""
    kinds: set[Any] = {type(module) for _, module in named_modules(model)}
    return any(map(_names_it, kinds))


@cache
def _names_it(kind: Any) -> bool:
    return any(True for _ in _codes(kind))


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of a class and of its parents that names the mode."""
    for parent in kind.__mro__:
        if not parent.__module__.startswith(("torch.nn.", "torchvision.ops.")):
            functions = [inspect.unwrap(item) for item in vars(parent).values() if callable(item)]
            for function in functions:
                yield from _naming(getattr(function, "__code__", None))


def _naming(code: CodeType | None) -> Iterator[CodeType]:
    if code is None:
        return
    if "training" in code.co_names:
        yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _naming(part)


@cache
def _asks_itself(kind: Any) -> bool:
    """Whether all that a class asks for is the mode of its own instance: `self.training`."""
    for code in _codes(kind):
        before = None
        for step in dis.get_instructions(code):
            own = before is not None and before.opname.startswith("LOAD_FAST") and before.argval == "self"
            if step.argval == "training" and not (own and step.opname == "LOAD_ATTR"):
                return False
            before = step
    return True


@contextmanager
def told(modules: Iterable[nn.Module], ask: Callable[[], None]) -> Iterator[None]:
    """`ask` is called when code asks modules of a copy for their mode; at once where nobody could tell.

    Until then, a module whose class names the mode is of a class of its own in which that is a property.
    """
    named = [(module, kind) for module in modules if _names_it(kind := _kind(module))]
    changed: list[tuple[nn.Module, type]] = []
    try:
        for module, kind in named:
            plain = type(kind) is type and not hasattr(kind.__init_subclass__, "__func__")
            if not plain or not _asks_itself(kind) or "training" not in vars(module):
                ask()
                return (yield)
        kinds = {kind: _telling(kind, ask) for kind in {kind for _, kind in named}}
        for module, kind in named:
            changed.append((module, kind))
            object.__setattr__(module, "__class__", kinds[kind])
        yield
    finally:
        for module, kind in changed:
            object.__setattr__(module, "__class__", kind)


def _kind(module: nn.Module) -> Any:
    return type(module)


def _telling(kind: Any, ask: Callable[[], None]) -> Any:
    def read(module: Any) -> Any:
        ask()
        return vars(module)["training"]

    def write(module: Any, mode: bool) -> None:
        vars(module)["training"] = mode

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "training": property(read, write)}
    return type(kind.__name__, (kind,), names)
