"""Measuring whole models in a runtime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from torch import nn

from secateur.plans.plan import Plan
from secateur.running.sandbox import Example, quiet
from secateur.runtimes.eager import Eager
from secateur.runtimes.onnx import Onnx
from secateur.runtimes.setup import Setup

# Seconds for each model, and how many passes that may be at most and must be at least.
_BUDGET, _MOST, _LEAST = 2.0, 40, 3


class Clock:
    """Times one model and what plans leave of it, in turn, in the runtime of a setup."""

    def __init__(self, setup: Setup, example: Example, model: nn.Module) -> None:
        self.setup, self.model = setup, model
        self.runner = Onnx(setup, example, model) if setup.runtime == "onnxruntime" else Eager(setup, example)

    def in_turn(self, models: Sequence[tuple[nn.Module, Plan | None]]) -> list[float]:
        """Median seconds of a forward pass of each model, which is what its plan leaves. They take turns."""
        return [statistics.median(own) for own in self.passes(models)]

    def passes(
        self, models: Sequence[tuple[nn.Module, Plan | None]], seconds: float | None = None
    ) -> list[list[float]]:
        """Seconds of several forward passes of each model. They take turns, for so many seconds each."""
        with self.setup.threaded(), quiet():
            return turns([self.runner.prepare(model, plan) for model, plan in models], seconds or _BUDGET)


def turns(calls: Sequence[Callable[[], object]], budget: float = _BUDGET) -> list[list[float]]:
    """Seconds of each call, several times after a warm-up; the calls take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    begin, least = time.perf_counter(), _LEAST
    for turn in range(1 + _MOST):
        for call, own in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
        spent = time.perf_counter() - begin
        if not turn and spent > len(calls):  # slow models vary less, and they ran once when they were prepared
            least = 2
        elif not turn:
            seconds, begin = [[] for _ in calls], time.perf_counter()
        elif len(seconds[0]) >= least and spent > budget * len(calls):
            break
    return seconds
