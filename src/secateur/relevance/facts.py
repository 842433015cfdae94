"""What is known about tensors while a model runs. Nothing here keeps a tensor alive."""

from __future__ import annotations

import inspect
import weakref
from functools import cache
from typing import Any, Generic, TypeVar

from torch import Tensor

from secateur.ops.table import Call, Function
from secateur.relevance.weights import LayerSite, LinearCall, SumSite

Fact = TypeVar("Fact")


class About(Generic[Fact]):
    """Facts about tensors, by identity. An entry goes when its tensor goes. (torch's own weak dictionaries cost as much
    as the smaller layers.)"""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Fact]] = {}

    def get(self, tensor: Tensor) -> Fact | None:
        """The fact, or None."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def __setitem__(self, tensor: Tensor, fact: Fact) -> None:
        key, entries = id(tensor), self._entries

        def gone(reference: weakref.ref[Tensor]) -> None:
            if key in entries and entries[key][0] is reference:
                del entries[key]

        entries[key] = (weakref.ref(tensor, gone), fact)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def forget(self, tensor: Tensor) -> None:
        """No longer true."""
        self._entries.pop(id(tensor), None)


class Facts:
    """Facts about the activations of one forward pass."""

    def __init__(self) -> None:
        #: The tensor that took the place of one that was overwritten.
        self.newer: About[Tensor] = About()
        #: Tensors that are ≥ 0 everywhere.
        self.nonneg: About[bool] = About()
        #: Tensors that act as a gate when they multiply.
        self.gate: About[bool] = About()
        #: Unchanged outputs of conv and linear layers, which may meet a batch norm.
        self.linear: About[LinearCall] = About()
        #: The layer (batch norm included) or sum that has made this.
        self.made: About[LayerSite | SumSite] = About()
        #: Outputs that already are what a ReLU will make of them.
        self.ahead: About[bool] = About()
        #: The logits behind the output of a softmax.
        self.logits: About[Tensor] = About()
        #: The constant part of a sum.
        self.offset: About[Tensor] = About()

    def overwritten(self, tensor: Tensor) -> None:
        """Its numbers are no longer those that anything was known about."""
        known: tuple[About[Any], ...] = (self.nonneg, self.gate, self.linear, self.made, self.logits, self.offset)
        for facts in known:
            facts.forget(tensor)

    def copy(self, source: Tensor, output: Any) -> None:
        """What was known of `source` holds for `output`, which has the same numbers."""
        if not isinstance(output, Tensor) or output is source:
            return
        known: tuple[About[Any], ...] = (self.nonneg, self.gate, self.logits, self.offset)
        for facts in known:
            fact = facts.get(source)
            if fact is not None:
                facts[output] = fact


_WRITERS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__ior__", "__iand__"}


def writes(call: Call) -> bool:
    """Whether a call overwrites its first tensor."""
    name = getattr(call.function, "__name__", "")
    if name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
        return True
    position = _inplace_position(call.function)
    if position is None:
        return False
    return bool(call.kwargs.get("inplace", call.args[position] if len(call.args) > position else False))


@cache
def _inplace_position(function: Function) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None
