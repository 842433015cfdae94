"""What may be recorded as a CUDA graph: a replay repeats the kernels, but no Python."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from secateur.running.sandbox import RandomState

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
    """What Python has at some time: the state of its random numbers, and plain attributes of modules."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._random = RandomState([])
        self._modules = [module for model in models for module in model.modules()]
        self._known = [_plain(module) for module in self._modules]

    def change(self) -> str:
        """What has changed since, in words; empty if nothing has."""
        if self._random.has_moved():
            return "random numbers are drawn on the processor"
        for module, known in zip(self._modules, self._known, strict=True):
            now = _plain(module)
            for name in known.keys() | now.keys():
                if known.get(name) is not now.get(name) and known.get(name) != now.get(name):
                    return f"{type(module).__name__}.{name} changes from {known.get(name)!r} to {now.get(name)!r}"
        return ""


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
