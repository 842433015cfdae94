"""PyTorch as a runtime: plain, with channels last, or compiled."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from secateur.errors import SecateurError
from secateur.plans.plan import Plan
from secateur.running.copies import named_modules, shared_copy, unwrap
from secateur.running.layout import arrange, channels_last
from secateur.running.sandbox import Example, quiet, run, run_or_explain
from secateur.runtimes.setup import Setup

_VERSIONS = 1000  # of one model that may be compiled in a process


class Eager:
    """Runs models in PyTorch."""

    least = 2  # profiled passes, of which the first is cold

    def __init__(self, setup: Setup, example: Example) -> None:
        self.setup, self.inputs = setup, setup.inputs(example)
        if setup.runtime == "channels-last":
            self.inputs = channels_last(self.inputs)
        self.cuda = setup.device == "cuda"

    def prepare(self, model: nn.Module, plan: Plan | None = None) -> Callable[[], object]:
        """A forward pass of the model. It is run once, so that it runs at all."""
        copy = self._placed(model)
        with quiet():
            run_or_explain(copy, self.inputs)
        return partial(self._forward, self._compiled(copy) if self.setup.runtime == "compile" else copy)

    def profile(self, model: nn.Module, plan: Plan | None, paths: Collection[str]) -> Callable[[], dict[str, float]]:
        """A forward pass that says how many seconds passed from the start of each of these modules to the next.

        torch.compile shows no modules: its segments are those of plain PyTorch.
        """
        copy = self._placed(model)
        marks: list[tuple[str, Any]] = []
        for path, module in named_modules(copy):
            if path in paths:
                module.register_forward_pre_hook(partial(self._mark, marks, path))

        def forward() -> dict[str, float]:
            marks.clear()
            self._forward(copy)
            self._mark(marks, "")
            if self.cuda:
                torch.cuda.synchronize()
            seconds: dict[str, float] = defaultdict(float)
            for (path, begin), (_, end) in pairwise(marks):
                seconds[path] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
            return dict(seconds)

        return forward

    def _compiled(self, model: nn.Module) -> Any:
        """The model compiled for these shapes. Smaller versions share its code: without a limit of their own, the ninth
        would run uncompiled, and the second would be compiled for widths of any size."""
        from torch import _dynamo

        compiled: Any = torch.compile(model, dynamic=False)
        try:
            with quiet(), _dynamo.config.patch(cache_size_limit=_VERSIONS, accumulated_cache_size_limit=4 * _VERSIONS):
                run(compiled, self.inputs)
        except _dynamo.exc.TorchDynamoException as error:
            raise SecateurError(
                f"torch.compile fails on {type(model).__name__}: {' '.join(str(error).strip().splitlines()[:2])}",
                where="runtime='compile'",
                fix="another runtime, such as 'torch'; on the processor, torch.compile needs a C++ compiler",
            ) from error
        return compiled

    def _placed(self, model: nn.Module) -> nn.Module:
        copy = shared_copy(unwrap(model)).eval().to(self.setup.device)
        return arrange(copy) if self.setup.runtime == "channels-last" else copy

    def _forward(self, model: Any) -> None:
        with torch.no_grad():
            run(model, self.inputs)
        if self.cuda:
            torch.cuda.synchronize()

    def _mark(self, marks: list[tuple[str, Any]], path: str, *_: Any) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            marks.append((path, event))
        else:
            marks.append((path, time.perf_counter()))
