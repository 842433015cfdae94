"""Measuring whole models in a runtime."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torch import nn

from secateur.latency.timing import turns
from secateur.plans.plan import Plan
from secateur.running.sandbox import Example, quiet
from secateur.runtimes.eager import Eager
from secateur.runtimes.onnx import Onnx
from secateur.runtimes.setup import Setup

_BUDGET, _MOST = 2.0, 40  # seconds for each model, and how many passes that may be at most


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
            return turns([self.runner.prepare(model, plan) for model, plan in models], _MOST, seconds or _BUDGET)
