"""Models that run in lockstep: each forward pass waits at every layer until the layer is corrected.

Every pass runs on a few samples, in a thread of its own. Only what a model itself holds at that point stays in memory,
and the numbers of a few samples fit into the cache of a CPU. One thread runs at a time. The numbers are computed in the
thread that asks for them: memory that one thread gives back is not at once there for another.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from secateur.repair.layers import LayerObserver, Layers, RepairableLayer
from secateur.repair.rows import Places, Rows
from secateur.running.batches import size_of
from secateur.running.copies import copy_with
from secateur.running.sandbox import run, uncollected

Made = TypeVar("Made")
#: What the model gets to see as the output of a layer at which it waited.
Output = Callable[[Rows], Tensor]


class _Stopped(BaseException):
    """Nobody waits for further layers. (No `except Exception` of a forward may go on after that.)"""


def stack() -> int:
    """The bytes of a thread's stack. It holds the calls of Python alone, as deep as they may be."""
    return 2**21 * max(1, sys.getrecursionlimit() // 1000)


def _ran(rows: Rows) -> Tensor:
    made: Tensor = rows.call.run() if rows.output is None else rows.output
    return made


class Runner:
    """A forward pass that waits at each of some layers, where `layer` and `rows` tell what it is about to do.

    Layers for which `first` holds run before that. At the end `output` is what the model returned.
    """

    def __init__(
        self, model: nn.Module, layers: Layers, places: Places, inputs: Any, first: Callable[[RepairableLayer], bool]
    ) -> None:
        # A forward may keep things in its modules, so that each pass has modules of its own. Tensors are shared.
        with uncollected:
            self._model = copy_with(model, lambda name, old: old.detach())
        self._layers, self._inputs, self._first = layers, inputs, first
        self.places, self.count = places, size_of(inputs)
        self.layer: RepairableLayer | None = None
        self.rows: Rows | None = None
        self.output: Any = None
        self.done = False
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)
        self._made: Output = _ran
        self._task: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._stopped = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def go_on(self, made: Output = _ran) -> Self:
        """Run on to the next layer, or to the end. `made` gives the output of the layer where it waits."""
        if not self.done:
            if not self._thread.ident:
                usual = threading.stack_size(stack())
                try:
                    self._thread.start()
                finally:
                    threading.stack_size(usual)
            self._made = made
            self._go.release()
            self._here.acquire()
            while (task := self._task) is not None:
                self._task = None
                try:
                    self._result = task()
                except BaseException as error:  # raised again where the model made the call
                    self._error = error
                del task
                self._go.release()
                self._here.acquire()
            if self._failure is not None:
                raise self._failure
        return self

    def at(self, layer: RepairableLayer) -> bool:
        """Whether it waits at that layer."""
        return self.layer is not None and self.layer.weight == layer.weight

    def close(self) -> None:
        """Stop where it is."""
        self._stopped = True
        if self._thread.ident:
            self._go.release()
            self._thread.join()
        self.layer = self.rows = None
        self.done = True

    def _work(self) -> None:
        self._go.acquire()
        try:
            if not self._stopped:
                observer = LayerObserver(
                    self._model, self._layers, self._wait, self.places, self._inputs, self.count, self._first, self._ask
                )
                with torch.no_grad(), observer:
                    self.output = run(self._model, self._inputs)
        except _Stopped:
            pass
        except BaseException as error:  # raised again where it is waited for
            self._failure = error
        self.layer = self.rows = self._inputs = None
        self.done = True
        self._here.release()

    def _wait(self, layer: RepairableLayer, rows: Rows) -> Tensor:
        self.layer, self.rows = layer, rows
        self._here.release()
        self._go.acquire()
        if self._stopped:
            raise _Stopped
        self.layer = self.rows = None
        return self._ask(lambda: self._made(rows))

    def _ask(self, task: Callable[[], Made]) -> Made:
        """Have something computed in the other thread."""
        self._task = task
        self._here.release()
        self._go.acquire()
        if self._stopped:
            raise _Stopped
        error, self._error = self._error, None
        if error is not None:
            raise error
        made: Made
        made, self._result = self._result, None
        return made
