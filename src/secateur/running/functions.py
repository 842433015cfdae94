"""What a function without a name of its own does, as a short text: by it a run recognises a lambda when it goes on."""

from __future__ import annotations

import dis
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.running.attributes import has_weights, own_attributes, own_text
from secateur.running.tensor_files import digest_of, is_odd

_DIGITS = 16
# Values that nobody can change in place.
_PLAIN = (
    Number, str, bytes, type(None), type(...), range, slice, PurePath, date, time, timedelta, re.Pattern, np.generic,
    np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme,
)  # fmt: skip
_DEEPEST, _MOST_DECORATORS = 2, 100  # sets within sets; decorators of one function


class _Reading:
    """What a description has reached so far, each with how to read it, and its number in the order of reaching."""

    def __init__(self) -> None:
        self.things: list[tuple[Any, Callable[[], Iterable[str]]]] = []  # kept, so that no id is given twice
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, thing: Any, parts: Callable[[], Iterable[str]], use: str) -> int:
        key = id(thing), use
        if key not in self._numbers:
            self._numbers[key] = len(self.things)
            self.things.append((thing, parts))
        return self._numbers[key]


_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)
_depth: ContextVar[int] = ContextVar("depth", default=0)


def is_nameless(function: Any) -> bool:
    """Whether it is a lambda, or a function within a function: there may be others of the same name.

    A function that a decorator made has the name of another one, and counts by it, if that name leads to it or if it
    has no variables around it.
    """
    if type(function) is not FunctionType:
        return False
    if "<" in function.__qualname__:  # <lambda>, or f.<locals>.g
        return True
    return "<" in function.__code__.co_qualname and bool(_variables(function)) and not _is_found(function)


def _variables(function: FunctionType) -> list[str]:
    """The variables around a function and the defaults of its arguments, without the function that it decorates."""
    inner = vars(function).get("__wrapped__")
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    defaults = [str(i) for i, _ in enumerate(function.__defaults__ or ())]
    found = [*defaults, *(function.__kwdefaults__ or ())]
    for name, cell in cells:
        with suppress(ValueError):  # a variable that has no value yet
            if cell.cell_contents is not inner:
                found.append(name)
    return found


def _is_found(function: FunctionType) -> bool:
    """Whether the name of a function leads to it."""
    innermost = function
    for _ in range(_MOST_DECORATORS):
        inner = vars(innermost).get("__wrapped__")
        if type(inner) is not FunctionType:
            break
        innermost = inner
    for names in (innermost.__globals__, own_attributes(sys.modules.get(function.__module__))):
        found: Any = names
        for name in function.__qualname__.split("."):
            found = (found if isinstance(found, dict) else own_attributes(found)).get(name)
        if found is function or (isinstance(found, staticmethod | classmethod) and found.__func__ is function):
            return True
    return False


def content(function: FunctionType, described: Callable[[Any], str]) -> str:
    """A digest of the code of a function, its defaults, and the values that it reads from around it.

    Equal functions have the same in every process with the same version of Python. Lines and files do not count. Of
    lists, dicts and other objects only the type counts, and variables that the function writes to do not count, since
    they may change while it runs: a counter is no setting. `described` is for all other values.
    """
    return once(function, partial(_parts, function, described))


def once(thing: Any, parts: Callable[[], Iterable[str]], use: str = "") -> str:
    """A digest of the parts of a thing; while another one is read, the number of the thing in the order of reaching.

    So each thing is read once, or once for each use of it, however many paths lead to it, and things may refer to each
    other.
    """
    if (reading := _reading.get()) is not None:
        return f"number {reading.number(thing, parts, use)}"
    reading = _Reading()
    reading.number(thing, parts, use)
    token = _reading.set(reading)
    digest = hashlib.sha256()
    try:
        for number, (_, read) in enumerate(reading.things):  # the list grows meanwhile
            digest.update("\n".join([f"number {number}", *read(), ""]).encode("utf-8", "surrogatepass"))
    finally:
        _reading.reset(token)
    return digest.hexdigest()[:_DIGITS]


def unordered(items: Iterable[Any], described: Callable[[Any], str]) -> list[str]:
    """Descriptions of the items of a set, in the same order in every process.

    Each item is described by itself: numbers would depend on the order in which the set is read.
    """
    depth = _depth.get()
    tokens = _reading.set(None), _depth.set(depth + 1)
    try:
        return sorted(_kind(item) if depth > _DEEPEST else described(item) for item in items)
    finally:
        _reading.reset(tokens[0])
        _depth.reset(tokens[1])


def member(value: Enum, described: Callable[[Any], str]) -> str:
    """A member of an enum by class, name and value: its `repr` may be any, and an object's has an address."""
    return f"{_kind(value)}.{value._name_} {described(value._value_)}"


def _parts(function: FunctionType, described: Callable[[Any], str]) -> Iterator[str]:
    yield from _instructions(function.__code__, described)
    yield from (f"default {held(value, described)}" for value in function.__defaults__ or ())
    names = {name for code in within(function.__code__) for name in code.co_names}
    own = {f"attribute {name}": value for name, value in sorted(vars(function).items()) if name in names}
    own = {name: value for name, value in own.items() if name.partition(" ")[2] not in stored(function)}
    for named in (function.__kwdefaults__ or {}, _read(function), own):
        yield from (f"{name} {held(value, described)}" for name, value in named.items())


def _instructions(code: CodeType, described: Callable[[Any], str]) -> Iterator[str]:
    """The bytecode with its constants and names, and that of all functions within. No lines: comments may move them."""
    for part in within(code):
        counts = part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount
        arguments = counts, part.co_varnames[: part.co_argcount + part.co_kwonlyargcount], part.co_flags
        yield f"{part.co_code.hex()} {part.co_exceptiontable.hex()} {arguments}"
        yield f"{part.co_names} {part.co_freevars} {part.co_cellvars}"
        yield str([described(value) for value in part.co_consts if not isinstance(value, CodeType)])


def stored(function: FunctionType) -> set[str]:
    """The names of all attributes that a function writes or deletes, of whatever object."""
    steps = (step for code in within(function.__code__) for step in dis.get_instructions(code))
    return {step.argval for step in steps if step.opname in ("STORE_ATTR", "DELETE_ATTR")}


def within(code: CodeType) -> Iterator[CodeType]:
    """Code, and the code of all functions and classes within it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from within(value)


def _read(function: FunctionType) -> dict[str, Any]:
    """The variables of a function's surroundings that it reads and does not write."""
    code = function.__code__
    read, written = {("around", name) for name in code.co_freevars}, set[tuple[str, str]]()
    for scope, name, writes in _uses(code, frozenset(code.co_freevars)):
        (written if writes else read).add((scope, name))
    found = {("global", name): function.__globals__[name] for _, name in read if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            found["around", name] = cell.cell_contents
    return {" ".join(key): found[key] for key in sorted((read & found.keys()) - written)}


def _uses(code: CodeType, around: frozenset[str]) -> Iterator[tuple[str, str, bool]]:
    """What code, and the code within it, reads and writes: the scope, the name, and whether it writes.

    `around`: the names that mean variables around the outermost function. Functions within it may have variables of
    their own with the same names.
    """
    own = set[str]()  # what the body of a class has surely set itself
    surely = not code.co_exceptiontable
    for step in dis.get_instructions(code):
        name, writes = str(step.argval), step.opname.startswith(("STORE_", "DELETE_"))
        surely = surely and step.opcode not in (*dis.hasjrel, *dis.hasjabs)
        if step.opcode in dis.hasfree and name in around:
            yield "around", name, writes
        elif step.opname.endswith(("_GLOBAL", "_FROM_DICT_OR_GLOBALS")):
            yield "global", name, writes
        elif step.opname == "LOAD_NAME" and name not in own:
            yield "global", name, False
        elif step.opname == "STORE_NAME" and surely:
            own.add(name)
        elif step.opname == "DELETE_NAME":
            own.discard(name)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _uses(value, around & set(value.co_freevars) - set(code.co_cellvars))


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def held(value: Any, described: Callable[[Any], str]) -> str:
    """A value that a function or an object refers to: in full, unless it may change while a run uses it."""
    kind = _kind(value)
    if issubclass(type(value), Enum):
        return member(value, described)
    if issubclass(type(value), tuple):
        return f"{kind}({', '.join(held(item, described) for item in value)})"
    if issubclass(type(value), frozenset):  # whose order is another one in each process
        return f"{kind}({unordered(value, lambda item: held(item, described))})"
    if issubclass(type(value), Tensor):
        return kind if is_odd(value) else f"{kind} {digest_of([('', value)])}"
    if issubclass(type(value), np.ndarray):
        if value.dtype.hasobject:
            return f"{kind} {value.shape} {[held(item, described) for item in value.ravel().tolist()]}"
        numbers = value.tobytes()
        return f"{kind} {value.shape} {value.dtype} {hashlib.sha256(numbers).hexdigest()}"
    if issubclass(type(value), ModuleType):
        return str(vars(value).get("__name__"))
    if issubclass(type(value), _PLAIN):
        return f"{kind} {own_text(value)}"
    if issubclass(type(value), nn.Module) and has_weights(value):  # they may be trained meanwhile
        return kind
    return described(value) if callable(value) else kind
