"""What is known about tensors while a model runs. Nothing here keeps a tensor alive."""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.ops.table import Call, Function
from secateur.relevance.weights import LinearCall


class Facts:
    """Facts about the activations of one forward pass."""

    def __init__(self) -> None:
        #: The tensor that took the place of one that was overwritten.
        self.newer: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        #: Tensors that are ≥ 0 everywhere.
        self.nonneg: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        #: Tensors that act as a gate when they multiply.
        self.gate: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        #: Unchanged outputs of conv and linear layers, which may meet a batch norm.
        self.linear: MutableMapping[Tensor, LinearCall] = WeakTensorKeyDictionary()
        #: The logits behind the output of a softmax.
        self.logits: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        #: The constant part of a sum.
        self.offset: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def copy(self, source: Tensor, output: Any) -> None:
        """What was known of `source` holds for `output`, which has the same numbers."""
        if not isinstance(output, Tensor) or output is source:
            return
        known: tuple[MutableMapping[Tensor, Any], ...] = (self.nonneg, self.gate, self.logits, self.offset)
        for facts in known:
            if source in facts:
                facts[output] = facts[source]


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
