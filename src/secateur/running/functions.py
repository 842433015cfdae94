"""What a function without a name of its own does, as a short text: by it a run recognises a lambda when it goes on."""

from __future__ import annotations

import copy
import dis
import hashlib
import re
import sys
from argparse import Namespace
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import PurePath
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.running.attributes import (
    functions_of,
    has_weights,
    is_record,
    own_attributes,
    own_text,
    plain_attributes,
    static,
)
from secateur.running.tensor_files import digest_of, is_odd

_DIGITS = 16
# Values that nobody can change in place.
_PLAIN = (
    Number, str, bytes, type(None), type(...), range, slice, PurePath, date, time, timedelta, re.Pattern, np.generic,
    np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme,
)  # fmt: skip
# Values that can be changed, and the names of the methods that do.
_ALTERABLE = (list, set, dict, MappingProxyType, deque, UserList, bytearray, SimpleNamespace, Namespace)
_ALTERING = frozenset({
    "append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "discard", "clear",
    "add", "update", "setdefault", "sort", "reverse", "rotate", "move_to_end", "setattr", "delattr", "__dict__", "vars",
})  # fmt: skip
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

    Equal functions have the same in every process with the same version of Python. Lines and files do not count.
    Variables that the function writes to do not count, since they change while it runs: a counter is no setting. Of
    lists, dicts and the like only the type counts if the function alters any of them itself, as by `append`. Of other
    objects and modules, attributes count that the function reads and that are plain values. `described` is for
    functions and callable objects.
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


class Use:
    """What functions do with the values that they refer to."""

    def __init__(self, functions: Iterable[FunctionType] = (), *, alters: bool = False) -> None:
        self.reads, self.writes, self.alters, self.whole = set[str](), set[str](), alters, True
        self.unknown = False  # may they read more attributes of their object than can be seen?
        self._wholes = set[str]()  # names of variables and attributes that are not read for an attribute alone
        for function in functions:
            own = function.__code__.co_varnames[:1]
            for code in within(function.__code__):
                steps = [step for step in dis.get_instructions(code) if step.opname != "COPY"]  # that of `a.b += 1`
                for step, after in zip(steps, [*steps[1:], None], strict=True):
                    self._note(step, after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD"))
                    self.unknown = self.unknown or _passes(step, after, own)
        self.alters = self.alters or not self.reads.isdisjoint(_ALTERING)
        self.unknown = self.unknown or not self.reads.isdisjoint(("getattr", "hasattr", "vars", "__dict__"))

    def _note(self, step: dis.Instruction, for_an_attribute: bool) -> None:
        if step.opname.startswith(("STORE_", "DELETE_")) and step.opname.endswith(("_SUBSCR", "_SLICE")):
            self.alters = True
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            self.writes.add(step.argval)
        elif step.opcode in dis.hasname and step.opname.startswith(("LOAD_", "IMPORT_FROM")):
            self.reads.add(step.argval)
        if step.opname.startswith("LOAD_") and step.opname != "LOAD_CLOSURE" and not for_an_attribute:
            self._wholes.add(str(step.argval))

    def of(self, name: str) -> Use:
        """What is done with the value of a variable or attribute: is it read as a whole, or some attributes of it?"""
        if name in self._wholes:
            return self
        found = copy.copy(self)
        found.whole = False
        return found


def _passes(step: dis.Instruction, after: dis.Instruction | None, own: tuple[str, ...]) -> bool:
    """Whether a step loads the object of a method for more than one of its attributes."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if not step.opname.startswith("LOAD_") or step.opname in ("LOAD_CLOSURE", "LOAD_CONST") or not {*own} & {*names}:
        return False
    return after is None or not after.opname.endswith(("_ATTR", "LOAD_METHOD"))


def _parts(function: FunctionType, described: Callable[[Any], str]) -> Iterator[str]:
    use = Use([function])
    yield from _instructions(function.__code__, described)
    yield from (f"default {held(value, described, use)}" for value in function.__defaults__ or ())
    own = {
        f"attribute {name}": vars(function)[name] for name in sorted((use.reads - use.writes) & vars(function).keys())
    }
    yield from (f"{name} {held(value, described, use)}" for name, value in (function.__kwdefaults__ or {}).items())
    for name, value in {**_read(function), **own}.items():
        yield f"{name} {held(value, described, use.of(name.rpartition(' ')[2]))}"


def _instructions(code: CodeType, described: Callable[[Any], str]) -> Iterator[str]:
    """The bytecode with its constants and names, and that of all functions within. No lines: comments may move them."""
    for part in within(code):
        counts = part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount
        arguments = counts, part.co_varnames[: part.co_argcount + part.co_kwonlyargcount], part.co_flags
        yield f"{part.co_code.hex()} {part.co_exceptiontable.hex()} {arguments}"
        yield f"{part.co_names} {part.co_freevars} {part.co_cellvars}"
        yield str([described(value) for value in part.co_consts if not isinstance(value, CodeType)])


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
            # From Python 3.12 on, comprehensions are a part of the function, with variables of their own beside these.
            yield "around", name, writes and name not in code.co_cellvars
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


def _is_frozen(kind: Any) -> bool:
    parameters: Any = vars(kind).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)


def held(value: Any, described: Callable[[Any], str], use: Use) -> str:
    """A value that a function or an object refers to: in full, unless it may change while it is used so."""
    name, kind = _kind(value), type(value)
    if issubclass(kind, Enum):
        return member(value, described)
    if issubclass(kind, tuple):
        return f"{name}({', '.join(held(item, described, use) for item in value)})"
    if issubclass(kind, frozenset):  # whose order is another one in each process
        return f"{name}({unordered(value, lambda item: held(item, described, use))})"
    if issubclass(kind, Tensor):
        return name if is_odd(value) else f"{name} {digest_of([('', value)])}"
    if issubclass(kind, np.ndarray):
        if value.dtype.hasobject:
            return f"{name} {value.shape} {[held(item, described, use) for item in value.ravel().tolist()]}"
        return f"{name} {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if issubclass(kind, _PLAIN):
        return f"{name} {own_text(value)}"
    if issubclass(kind, ModuleType):
        name = str(vars(value).get("__name__"))
    elif issubclass(kind, nn.Module) and has_weights(value) and kind.__module__.startswith("torch"):
        return name  # weights may be trained meanwhile, and buffers beside them
    elif callable(value):
        name = described(value)
    elif issubclass(kind, _ALTERABLE) or is_record(kind):
        # Other options may well be paths with a date.
        if not use.whole and (is_record(kind) or issubclass(kind, SimpleNamespace | Namespace)):
            read = {key: item for key, item in own_attributes(value).items() if key in use.reads - use.writes}
            name = " ".join([name, *(f"{key}={held(read[key], described, use.of(key))}" for key in sorted(read))])
        elif not use.alters or _is_frozen(kind):
            name = f"{name} {once(value, partial(_items, value, described, use))}"
    if not issubclass(kind, type | ModuleType):
        methods = [method for key in sorted(use.reads) for method in functions_of(static(kind, key))]
        name = " ".join([name, *(described(MethodType(method, value)) for method in methods)])
    plain = plain_attributes(value, use.reads - use.writes, (*_PLAIN, Enum))
    return " ".join([name, *(f"{key}={held(item, described, use)}" for key, item in plain.items())])


def _items(value: Any, described: Callable[[Any], str], use: Use) -> Iterable[str]:
    """What is in a container, or in an object that is one."""
    kind = type(value)
    own = [
        f"{name} {held(item, described, use)}" for name, item in own_attributes(value).items() if name not in use.writes
    ]
    if issubclass(kind, Mapping):
        return [*own, *(f"{held(key, described, use)}: {held(item, described, use)}" for key, item in value.items())]
    if issubclass(kind, set):
        return [*own, *unordered(value, lambda item: held(item, described, use))]
    return [*own, *(held(item, described, use) for item in value)] if issubclass(kind, Iterable) else own
