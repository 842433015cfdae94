"""The training mode: whose code asks for it, and whether a forward does.

Code that asks may do something else in training, which then has to be watched and verified too. What the source of a
class names is asked for only if that line runs: DenseNet names the mode for a dropout that it mostly does not have.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from secateur.running.copies import named_modules

#: Torch's own modules, and torchvision's building blocks, which only drop.
_ONLY_DROP = ("torch.nn.", "torchvision.ops.")


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
        if not parent.__module__.startswith(_ONLY_DROP):
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


#: Names by which code finds out that an instance has another class, or what it holds without asking it.
_BLIND = frozenset({"type", "__class__", "__dict__", "vars"})
#: Methods that no forward calls.
_APART = frozenset({"__init__", "__repr__", "extra_repr"})
_KNOWN = frozenset({"torch", "torchvision", "numpy", *sys.stdlib_module_names})
_MOST = 500  # functions that are looked into


@cache
def _tells(kind: Any) -> bool:
    """Whether an instance could have a class of its own without any code noticing, and all that this code asks for is
    the mode of its own instance: `self.training`. Then that class would see it."""
    if type(kind) is not type or hasattr(kind.__init_subclass__, "__func__"):
        return False
    if hasattr(kind, "__deepcopy__"):  # a copy may have parts of the user's model
        return False
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in ("train", "eval")):  # may keep it elsewhere
        return False
    waiting = list(_functions(kind))
    methods, seen = len(waiting), set[int]()
    for place, function in enumerate(waiting):
        if len(waiting) > _MOST:
            return False
        for code in _parts(function.__code__) if id(function) not in seen else ():
            if not _BLIND.isdisjoint(code.co_names) or "training" in code.co_consts:
                return False
            if "training" in code.co_names and (place >= methods or not _asks_itself(code)):
                return False
            waiting += _beside(function, code)
        seen.add(id(function))
    return True


def _functions(kind: type) -> Iterator[FunctionType]:
    """The functions of a class and of its parents, and what is around them: properties, decorators."""
    for parent in kind.__mro__:
        if parent is not object and not parent.__module__.startswith(("torch.", "torchvision.ops.")):
            for name, item in vars(parent).items():
                if name not in _APART:
                    parts = [getattr(item, part, None) for part in ("fget", "func", "__func__")]
                    yield from _unwrapped([item, *parts])


def _unwrapped(items: Iterable[Any]) -> Iterator[FunctionType]:
    waiting = list(items)
    for item in waiting:
        if isinstance(item, FunctionType):
            yield item
            held = [cell.cell_contents for cell in item.__closure__ or () if cell != CellType()]
            waiting += [part for part in held if isinstance(part, FunctionType) and part not in waiting]


def _beside(function: FunctionType, code: CodeType) -> Iterator[FunctionType]:
    """The functions, and those of the classes, that code names and that are not of a library without modes."""
    found = [function.__globals__.get(name) for name in code.co_names]
    found += [vars(item).get(name) for item in found if isinstance(item, ModuleType) for name in code.co_names]
    for item in found:
        if isinstance(item, FunctionType | type) and str(item.__module__).partition(".")[0] not in _KNOWN:
            yield from _unwrapped([item]) if isinstance(item, FunctionType) else _functions(item)


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _parts(part)


def _asks_itself(code: CodeType) -> bool:
    before = None
    for step in dis.get_instructions(code):
        own = before is not None and before.opname.startswith("LOAD_FAST") and before.argval == "self"
        if step.argval == "training" and not (own and step.opname == "LOAD_ATTR"):
            return False
        before = step
    return True


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing but the code of its class runs with a module."""
    held = vars(module)
    if module._forward_hooks or module._forward_pre_hooks or not held.keys().isdisjoint({"train", "eval", "forward"}):
        return False
    code = (value for value in held.values() if isinstance(value, FunctionType | MethodType | partial))
    return "training" in held and all(str(getattr(value, "__module__", "")).startswith("torch.") for value in code)


@contextmanager
def told(modules: Iterable[nn.Module], ask: Callable[[], None]) -> Iterator[None]:
    """`ask` is called when code asks modules of a copy for their mode; at once where nobody could tell.

    Until then, if any class names the mode, modules are of classes of their own in which that is a property.
    """
    modules = list(modules)
    own = [(module, kind) for module in modules if not (kind := _kind(module)).__module__.startswith(_ONLY_DROP)]
    kinds = {kind for _, kind in own}
    if not any(map(_names_it, kinds)):
        yield
        return
    if not all(map(_tells, kinds)) or not all(map(_is_plain, modules)):
        ask()
        yield
        return
    changed: list[tuple[nn.Module, type]] = []
    try:
        telling = {kind: _telling(kind, ask) for kind in kinds}
        for module, kind in own:
            object.__setattr__(module, "__class__", telling[kind])
            changed.append((module, kind))
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
