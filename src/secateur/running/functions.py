"""What a function without a name of its own does, as a short text: by it a run recognises a lambda when it goes on."""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.running.tensor_files import digest_of

_DIGITS = 16
# Values that nobody can change in place.
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), range, slice, Enum, torch.dtype, torch.device, np.generic,
)  # fmt: skip
# The functions around the one that is described: it may refer to them, or to itself.
_above: ContextVar[tuple[FunctionType, ...]] = ContextVar("above", default=())


def is_nameless(function: Any) -> bool:
    """Whether it is a lambda, or a function within a function: there may be others of the same name."""
    return isinstance(function, FunctionType) and "<" in function.__qualname__  # <lambda>, or f.<locals>.g


def content(function: FunctionType, described: Callable[[Any], str]) -> str:
    """A digest of the code of a function, its defaults, and the values that it reads from around it.

    Equal functions have the same in every process with the same version of Python. Lines and files do not count. Of
    lists, dicts and other objects only the type counts, and variables that the function writes to do not count, since
    they may change while it runs: a counter is no setting. `described` is for all other values.
    """
    above = _above.get()
    if function in above:
        return f"itself {len(above) - above.index(function)}"
    token = _above.set((*above, function))
    try:
        parts = [*_instructions(function.__code__, described)]
        parts += [f"default {_held(value, described)}" for value in function.__defaults__ or ()]
        for named in (function.__kwdefaults__ or {}, _read(function)):
            parts += [f"{name} {_held(value, described)}" for name, value in named.items()]
    finally:
        _above.reset(token)
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _instructions(code: CodeType, described: Callable[[Any], str]) -> Iterator[str]:
    """The bytecode with its constants and names, and that of all functions within. No lines: comments may move them."""
    for part in _within(code):
        counts = part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount
        arguments = counts, part.co_varnames[: part.co_argcount + part.co_kwonlyargcount], part.co_flags
        yield f"{part.co_code.hex()} {part.co_exceptiontable.hex()} {arguments}"
        yield f"{part.co_names} {part.co_freevars} {part.co_cellvars}"
        yield str([described(value) for value in part.co_consts if not isinstance(value, CodeType)])


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _within(value)


def _read(function: FunctionType) -> dict[str, Any]:
    """The variables of a function's surroundings that it reads and does not write."""
    read, written = set[str](), set[str]()
    for step in (step for part in _within(function.__code__) for step in dis.get_instructions(part)):
        if step.opname.startswith(("STORE_", "DELETE_")) and step.opname.endswith(("_DEREF", "_GLOBAL")):
            written.add(str(step.argval))
        elif step.opname == "LOAD_GLOBAL":
            read.add(str(step.argval))
    found = {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            found.pop(name, None)
    return {name: value for name, value in found.items() if name not in written}


def _held(value: Any, described: Callable[[Any], str]) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple):
        return f"{kind}({', '.join(_held(item, described) for item in value)})"
    if isinstance(value, frozenset):  # whose order is another one in each process
        return f"{kind}({sorted(_held(item, described) for item in value)})"
    if isinstance(value, Tensor):
        odd = value.layout != torch.strided or value.is_nested or value.is_meta or value.is_quantized
        return kind if odd else f"{kind} {digest_of([('', value)])}"
    if isinstance(value, np.ndarray):
        numbers = value.tobytes() if value.dtype.kind in "biufc" else b""
        return f"{kind} {value.shape} {value.dtype} {hashlib.sha256(numbers).hexdigest()}"
    if isinstance(value, nn.Module):  # weights may be trained meanwhile; transforms and losses have none
        return described(value) if next(value.parameters(), None) is None else kind
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, _PLAIN):
        return f"{kind} {value!r}"
    known = isinstance(value, partial) or hasattr(value, "__qualname__") or kind.startswith("torchvision.transforms.")
    return described(value) if callable(value) and known else kind
