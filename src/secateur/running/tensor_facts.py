"""What is known about tensors while a model runs, by identity. Nothing here keeps a tensor alive."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Fact = TypeVar("Fact")


class TensorFacts(Generic[Fact]):
    """Facts about tensors, by identity. An entry goes when its tensor goes. (torch's own weak dictionaries cost as much
    as the smaller layers.)"""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Fact]] = {}
        # What waits for a tensor to go must not hold the entries: a fact may be a tensor with its whole graph, in which
        # that tensor is saved. Then both would stay until the next search for cycles, and such tensors are large.
        self._mine = weakref.ref(self)

    def get(self, tensor: Tensor) -> Fact | None:
        """The fact, or None."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def __setitem__(self, tensor: Tensor, fact: Fact) -> None:
        key, mine = id(tensor), self._mine

        def gone(reference: weakref.ref[Tensor]) -> None:
            if (facts := mine()) is not None and key in facts._entries and facts._entries[key][0] is reference:
                del facts._entries[key]

        self._entries[key] = (weakref.ref(tensor, gone), fact)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def forget(self, tensor: Tensor) -> None:
        """No longer true."""
        self._entries.pop(id(tensor), None)
