"""The original beside a smaller model: each runs once, and a layer's rows are there only while they are needed.

Rows of all layers together may need more memory than there is. Here the original runs in a thread of its own, and waits
at each layer until the smaller model has come to it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.repair.layers import LayerObserver, Layers, RepairableLayer
from secateur.repair.rows import Rows
from secateur.running.sandbox import run


class _Stopped(Exception):
    """Nobody waits for further layers."""


class Lockstep:
    """Runs the original on all samples. `take(weight)` waits for that layer, and lets go of those before it."""

    def __init__(self, model: nn.Module, layers: Layers, place: slice, inputs: Any) -> None:
        self._model, self._layers, self._place, self._inputs = model, layers, place, inputs
        self._rows: Queue[tuple[str, Any]] = Queue(maxsize=1)
        self._current: tuple[str, Any] = "", None
        self._stop, self._left = threading.Event(), len(layers)
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            with suppress(Empty):
                self._rows.get(timeout=0.05)
        self._thread.join()

    def take(self, weight: str) -> Tensor:
        """The rows of a layer. Layers come in the order in which the model runs them."""
        while self._current[0] != weight:
            self._current = "", None
            self._current = self._rows.get()
            name, rows = self._current
            if not name:
                raise RepairError(
                    f"the original did not run `{weight}` where the smaller model does.",
                    fix="a smaller `samples`, so that the rows of all layers fit into memory",
                ) from rows
        found: Tensor = self._current[1]
        return found

    def _work(self) -> None:
        failure: Exception | None = None
        try:
            with torch.no_grad(), LayerObserver(self._model, self._layers, self._hand_over, self._place, self._inputs):
                run(self._model, self._inputs)
        except _Stopped:
            return
        except Exception as error:  # raised again where it is waited for
            failure = error
        self._put("", failure)

    def _hand_over(self, layer: RepairableLayer, rows: Rows, output: Tensor) -> Tensor:
        self._put(layer.weight, rows.total)
        self._left -= 1
        if not self._left:
            raise _Stopped  # nothing after the last layer is needed
        return output

    def _put(self, name: str, rows: Any) -> None:
        while not self._stop.is_set():
            with suppress(Full):
                self._rows.put((name, rows), timeout=0.05)
                return
        raise _Stopped
