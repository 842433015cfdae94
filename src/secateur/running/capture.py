"""What may be recorded as a CUDA graph: a replay repeats the kernels, but no Python."""

from __future__ import annotations

import reprlib
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from secateur.running.sandbox import RandomState, parts_of

#: One recording at a time: what is set for it holds for all threads, and each would give back what another has set.
turn = threading.RLock()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@contextmanager
def never_waiting() -> Iterator[None]:
    """An error where something waits for the device. Torch does not recover well if that happens in a recording."""
    before = torch.cuda.get_sync_debug_mode()
    with turn, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls it a prototype, which no user can do anything about
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def as_if_recording() -> Iterator[None]:
    """A model that asks is told that it is recorded. Those of transformers then do not look into their masks, for which
    they would wait for the device."""
    with turn:
        asked = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = asked


class Host:
    """What Python has at some time: the state of its random numbers, and plain attributes of modules and objects."""

    def __init__(self, models: Iterable[object]) -> None:
        self._random = RandomState([])
        self._parts = [part for model in models for part in parts_of(model)]
        self._known = [_plain(vars(part)) for part in self._parts]

    def change(self) -> str:
        """What has changed since, in words; empty if nothing has."""
        if self._random.has_moved():
            return "random numbers are drawn on the processor"
        for part, known in zip(self._parts, self._known, strict=True):
            now = _plain(vars(part))
            for name in known.keys() | now.keys():
                was, is_now = known.get(name), now.get(name)
                if was is not is_now and was != is_now:
                    shown = f"from {reprlib.repr(was)} to {reprlib.repr(is_now)}"
                    return f"{type(part).__name__}.{name} changes {shown}"
        return ""


def _plain(value: Any) -> Any:
    """Plain values as they are now, also those in containers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    return value if isinstance(value, _PLAIN) else None
