"""Numbers of heads: where attention modules of the common libraries keep them, and which of them their code reads.

Trial removals find any number that a forward reads, whatever its name. With these names they succeed at once (one trial
of Whisper instead of twenty), and numbers that no forward reads stay true as well. Trials prove what is set here.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

#: Names of the number of heads.
COUNTS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads")
#: Names of the number of key and value heads, and of how many heads of the queries share one of them.
SHARED_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_heads_kv")
SHARING = ("num_key_value_groups", "num_kv_groups", "n_rep", "num_queries_per_kv")
#: Names of widths that are a number of heads times the width of a head.
WIDTHS = ("attn_dim", "all_head_size", "inner_dim", "embed_dim_inner", "attention_dim", "dim_attn")

#: Attention modules of torchvision that take the width of the stream for that of their heads, and their kind. What
#: takes the place of their forward makes other calls (`surgery.windows`).
WINDOWED = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": "swin",
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": "swin",
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": "swin",
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": "maxvit",
}

_CAUGHT = dis.opmap["POP_EXCEPT"]  # ends an `except` clause, and a `with` that may swallow an error


def is_windowed(module: nn.Module) -> bool:
    """Whether a smaller version of a module has another forward."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in WINDOWED


def reads_heads(module: nn.Module) -> bool:
    """Whether a module's forward computes places from a number of heads in its configuration."""
    return "config" in vars(module) and not names_read(type(module).forward).isdisjoint({*COUNTS, *SHARED_COUNTS})


@cache
def names_read(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of attributes that a function reads."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset(code.co_names if isinstance(code, CodeType) else ())


@cache
def code_reached(kind: type[nn.Module], begin: Callable[..., Any] | None = None) -> tuple[CodeType, ...]:
    """The code of a module's forward, or of another function, of the methods that it calls, and of functions beside."""
    codes, found, waiting = list[CodeType](), set[str](), [inspect.unwrap(begin or kind.forward)]
    for function in waiting:
        own = [code] if isinstance(code := getattr(function, "__code__", None), CodeType) else []
        for part in own:
            own += [item for item in part.co_consts if isinstance(item, CodeType)]
            new = set(part.co_names) - found
            found |= new
            reached = [getattr(kind, name, None) or function.__globals__.get(name) for name in new]
            waiting += [inspect.unwrap(item) for item in reached if isinstance(item, FunctionType)]
        codes += own
    return tuple(codes)


def names_reached(kind: Any) -> frozenset[str]:
    """The names that this code reads."""
    return frozenset(name for code in code_reached(kind) for name in code.co_names)


def catches(module: nn.Module) -> bool:
    """Whether a module's own code goes on after an error: then it may do something else for inputs of another size."""
    kind: Any = type(module)
    if kind.__module__.startswith("torch.nn."):
        return False
    held = [value for value in vars(module).values() if isinstance(value, FunctionType)]
    return any(_CAUGHT in code.co_code[::2] for begin in (None, *held) for code in code_reached(kind, begin))


def fit_heads(module: Any, old: nn.Module, had: int, has: int) -> bool:
    """Adjust the numbers by which a module remembers its heads. Whether it remembers any."""
    known = vars(old)
    for name in WIDTHS:
        if type(value := known.get(name)) is int and value % had == 0:
            setattr(module, name, value // had * has)
    counts = [name for name in COUNTS if known.get(name) == had]
    sharing = [name for name in SHARING if type(known.get(name)) is int]
    changed = dict.fromkeys(counts, has)
    # Either all heads of the queries share one key, or whole groups of them leave.
    changed |= {name: has for name in sharing if known[name] == had > 1}
    changed |= _shrunk(known, had, has)
    for name, value in changed.items():
        setattr(module, name, value)
    if reads_heads(old):
        _fit_config(module, names_read(type(old).forward), had, has)
    return bool(counts or sharing)


def _shrunk(known: dict[str, Any], had: int, has: int) -> dict[str, int]:
    """Numbers of keys that shrink with the heads."""
    values = {name: known[name] for name in SHARED_COUNTS if type(known.get(name)) is int and known[name] > 1}
    return {name: value * has // had for name, value in values.items() if value * has % had == 0}


def _fit_config(module: Any, read: frozenset[str], had: int, has: int) -> None:
    """Give a module its own configuration if its forward reads numbers there that other layers keep."""
    known = vars(module.config)
    changed = {name: has for name in COUNTS if name in read and known.get(name) == had and name not in vars(module)}
    changed |= {k: v for k, v in _shrunk(known, had, has).items() if k in read and k not in vars(module)}
    if changed:
        module.config = copy.copy(module.config)
        for name, value in changed.items():
            setattr(module.config, name, value)
