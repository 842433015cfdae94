"""What is known about tensors while a model runs, by identity. Nothing here keeps a tensor alive."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Fact = TypeVar("Fact")


class _Reference(weakref.ref[Tensor]):
    """A reference that knows whose entry it is."""

    __slots__ = ("key",)
    key: int


class TensorFacts(Generic[Fact]):
    """Facts about tensors, by identity. An entry goes when its tensor goes. (torch's own weak dictionaries cost as much
    as the smaller layers.)"""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_Reference, Fact]] = {}
        # What waits for a tensor to go must not hold the entries: a fact may be a tensor with its whole graph, in which
        # that tensor is saved. Then both would stay until the next search for cycles, and such tensors are large.
        mine = weakref.ref(self)

        def gone(reference: _Reference) -> None:
            facts = mine()
            entry = None if facts is None else facts._entries.get(reference.key)
            if facts is not None and entry is not None and entry[0] is reference:
                del facts._entries[reference.key]

        self._gone = gone

    def get(self, tensor: Tensor) -> Fact | None:
        """The fact, or None."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def __setitem__(self, tensor: Tensor, fact: Fact) -> None:
        reference = _Reference(tensor, self._gone)
        reference.key = id(tensor)
        self._entries[reference.key] = (reference, fact)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def forget(self, tensor: Tensor) -> None:
        """No longer true."""
        self._entries.pop(id(tensor), None)


def version(tensor: Tensor) -> int:
    """Counts writes to a tensor's memory."""
    return -1 if tensor.is_inference() else tensor._version
