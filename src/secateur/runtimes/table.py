"""`latency`: a table of how long each layer takes at any width, measured where the model will run."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from secateur.analysis.analyze import analyze
from secateur.errors import NothingToPruneError, PlanError
from secateur.ops.layers import Labels, Mask
from secateur.plans.plan import Plan, plan_for
from secateur.running.copies import unwrap
from secateur.running.devices import dtype_of
from secateur.running.processes import is_first, same_everywhere
from secateur.running.sandbox import Example, leaves_no_trace
from secateur.runtimes.cache import Cache
from secateur.runtimes.clock import Clock
from secateur.runtimes.fit import nonnegative
from secateur.runtimes.sampling import sample_masks
from secateur.runtimes.segments import STEPS, Numbers, Segment, segments_of, share
from secateur.runtimes.setup import Runtime, Setup
from secateur.structure.cost import Savings, first_order
from secateur.structure.graph import Graph
from secateur.surgery.cut import cut

# Seconds that the passes through all sample models may take, how many these are at most, and seconds for one model.
_BUDGET, _ROUNDS, _EACH = 12.0, 10, 0.6
_SLOW = 0.3  # seconds of a pass


@dataclass(frozen=True, eq=False, repr=False)
class Latency:
    """How long a model takes at any widths, as measured where it will run. `print(table)` shows the layers.

    `whole` is what the whole model took, in seconds; `error` the median deviation of predictions for the sample models
    from what they took, as a share. It is a `Price`: called with a mask of the groups that leave, it predicts seconds.
    """

    setup: Setup
    whole: float
    error: float
    bend: float
    step: int
    kinds: Mapping[str, Sequence[float]]
    graph: Graph = field(repr=False)
    segments: tuple[Segment, ...] = field(repr=False)
    _clocks: list[Clock] = field(default_factory=list, repr=False)
    _terms: list[tuple[float, tuple[Labels, ...]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        merged: dict[tuple[bytes, ...], tuple[float, tuple[Labels, ...]]] = {}
        for segment in self.segments:
            for seconds, axes in zip(self.kinds[segment.kind], segment.parts, strict=True):
                key = tuple(sorted(axis.tobytes() for axis in axes))
                merged[key] = merged.get(key, (0.0, axes))[0] + seconds, axes
        self._terms.extend(term for term in merged.values() if term[0] > 0)

    def __call__(self, removed: Mask) -> float:
        """The predicted seconds of a forward pass without these groups."""
        seconds = self._segments(removed)
        # Small models take more than the sum of their segments says, or less.
        return seconds * (1 + self.bend * (1 - seconds / self.whole))

    def _segments(self, removed: Mask) -> float:
        known: dict[int, float] = {}
        total = 0.0
        for seconds, axes in self._terms:
            for axis in axes:
                if id(axis) not in known:
                    known[id(axis)] = share(axis, removed, self.step)
                seconds *= known[id(axis)]
            total += seconds
        return total

    def savings(self, removed: Mask) -> Savings:
        """The seconds that each group takes as things stand, to first order."""
        terms = [(seconds / math.prod(len(axis) for axis in axes), axes) for seconds, axes in self._terms]
        slope = 1 + self.bend * (1 - 2 * self._segments(removed) / self.whole)
        return slope * first_order(terms, ~removed)

    def predict(self, plan: Plan) -> float:
        """The predicted seconds of a forward pass of what a plan leaves."""
        if any(self.graph.shapes.get(name) != tuple(shape) for name, shape in plan.shapes.items()):
            raise PlanError(
                f"the plan was made for {plan.model}, and this table for another model, {self.graph.model_name}.",
                fix="latency(model, example) of the model that the plan was made for",
            )
        removed: Mask = np.zeros(len(self.graph.root), np.bool_)
        removed[list(plan.groups)] = True
        return self(removed)

    def clock(self, model: nn.Module) -> Clock:
        """Measures the model that the table is of, and what plans leave of it."""
        model = unwrap(model)
        if not self._clocks or self._clocks[0].model is not model:
            self._clocks[:] = [Clock(self.setup, self.graph.example, model)]
        return self._clocks[0]

    def __repr__(self) -> str:
        return f"<Latency of {self.graph.model_name}: {1000 * self.whole:.2f} ms, {self.setup}>"

    def __str__(self) -> str:
        nothing: Mask = np.zeros(len(self.graph.root), np.bool_)
        lines = [
            f"{self.graph.model_name}: {1000 * self.whole:.2f} ms in {self.setup}; predictions of sample models are "
            f"off by {100 * self.error:.1f} % (median)",
            "",
        ]
        width = max([len(segment.path) for segment in self.segments] + [5])
        lines.append(f"{'from module'.ljust(width)}        ms  share")
        for segment in self.segments:
            seconds = float(np.dot(self.kinds[segment.kind], segment.shares(nothing, self.step)))
            share_ = 100 * seconds / max(self.whole, 1e-12)
            lines.append(f"{(segment.path or '-').ljust(width)}  {1000 * seconds:8.3f}  {share_:4.1f} %")
        return "\n".join(lines)


@leaves_no_trace
def latency(
    model: nn.Module,
    example: Example,
    runtime: Runtime = "torch",
    *,
    batch: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    cache: str | Path | bool = True,
) -> Latency:
    """Measure how long each layer takes at several widths, so that the time of any plan can be predicted.

    The model and seven smaller versions of it run in the runtime: "torch", "channels-last" (PyTorch with another layout
    of images), "compile" (`torch.compile`) or "onnxruntime". `batch` repeats the example's first sample. The table is
    kept in `cache`, a folder, by default `$XDG_CACHE_HOME/secateur`, and read from there for the same layers on the
    same machine with the same versions; with False it is not.

    >>> import torch, secateur as sc
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> table = sc.latency(net, torch.zeros(1, 8), batch=4, cache=False)
    >>> print(table.setup.batch, table.whole > 0)
    4 True
    """
    model = unwrap(model)
    setup = Setup.of(example, runtime, batch, threads, device)
    return table_of(model, analyze(model, example), setup, cache)


def table_of(model: nn.Module, graph: Graph, setup: Setup, cache: str | Path | bool = True) -> Latency:
    """The table of an analysed model, from the cache or measured. All processes get that of the first one."""
    segments = tuple(segments_of(graph))
    if not segments:
        raise NothingToPruneError(
            f"{graph.model_name} has no layer whose time could be predicted.",
            fix="measure(model, example) says how long the whole model takes",
        )
    kept = Cache.at(cache, setup, str(dtype_of(model)), [segment.kind for segment in segments])
    found: dict[str, Any] | None = None
    clocks: list[Clock] = []
    if is_first():
        found = kept.read() if kept is not None else None
        if found is None:
            clocks = [Clock(setup, graph.example, model)]
            found = _measured(clocks[0], graph, segments)
            if kept is not None:
                kept.write(found)
    found = same_everywhere(found)
    return Latency(
        setup, found["whole"], found["error"], found["bend"], found["step"], found["kinds"], graph, segments, clocks
    )


def _measured(clock: Clock, graph: Graph, segments: Sequence[Segment]) -> dict[str, Any]:
    """Time the sample models by segment and whole, and fit what the segments take."""
    masks, setup = sample_masks(graph), clock.setup
    plans = [plan_for(graph, mask) for mask in masks]
    models = [cut(clock.model, plan).eval() for plan in plans]  # their weights mean nothing; their shapes do
    paths = [segment.path for segment in segments]
    with setup.threaded():
        passes = [clock.runner.profile(small, plan, paths) for small, plan in zip(models, plans, strict=True)]
        seen = _rounds(passes, clock.runner.least)
    parts = [{path: min(one.get(path, 0.0) for one in own) for path in paths} for own in seen]
    timed = range(2 if setup.runtime == "compile" else len(models))  # compiling takes long
    # Each in turn with the whole model alone, as they will be measured: among many models, caches are cold. For slow
    # models that makes no difference, and the whole one is timed less often.
    together = 4 if sum(parts[0].values()) > _SLOW else 1
    pairs: list[tuple[float, float]] = []
    for start in range(1, len(timed), together):
        chosen = [0, *timed[start : start + together]]
        first, *others = map(statistics.median, clock.passes([(models[i], plans[i]) for i in chosen], _EACH))
        pairs += [(first, other) for other in others]
    return fitted(segments, masks, parts, pairs)


def fitted(
    segments: Sequence[Segment],
    masks: Sequence[Mask],
    parts: Sequence[Mapping[str, float]],
    pairs: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """The table by what was measured: seconds of each segment in each sample model, and seconds of the whole model with
    those of a sample model beside it."""
    kinds, step = min((_kinds(segments, masks, parts, step) for step in STEPS), key=lambda fit: fit[2])[:2]
    sums = np.array([sum(float(kinds[s.kind] @ s.shares(mask, step)) for s in segments) for mask in masks])
    wholes = statistics.median(first for first, _ in pairs) * np.array([1, *(other / first for first, other in pairs)])
    sums = sums[: len(wholes)]
    ratio, less = wholes * sums[0] / (wholes[0] * sums), 1 - sums / sums[0]
    # Only what most sample models agree on: without, predictions are better than with that of a few.
    bends = (ratio[1:] - 1)[less[1:] > 0.02] / less[1:][less[1:] > 0.02]
    low, high = np.percentile(bends, (25, 75)) if len(bends) else (0.0, 0.0)
    bend = float(np.clip(max(low, 0.0) + min(high, 0.0), -0.5, 0.5))
    whole = float(wholes[0])
    return {
        "whole": whole, "error": float(np.median(np.abs((1 + bend * less) / ratio - 1))), "bend": bend, "step": step,
        "kinds": {kind: [float(whole / sums[0] * each) for each in values] for kind, values in kinds.items()},
    }  # fmt: skip


def _rounds(passes: Sequence[Callable[[], dict[str, float]]], least: int) -> list[list[dict[str, float]]]:
    """What the passes say, which take turns: at least so often, and more often while there is time."""
    found: list[list[dict[str, float]]] = [[] for _ in passes]
    begin = time.perf_counter()
    for number in range(1, 1 + _ROUNDS):
        for own, forward in zip(found, passes, strict=True):
            own.append(forward())
        if number >= least and (time.perf_counter() - begin) * (number + 1) / number > _BUDGET:
            break
    return found


def _kinds(
    segments: Sequence[Segment], masks: Sequence[Mask], parts: Sequence[Mapping[str, float]], step: int
) -> tuple[dict[str, Numbers], int, float]:
    """For each kind of segment, what its parts take: the best fit with no negative time; the step; the error."""
    rows: dict[str, list[tuple[Numbers, float]]] = defaultdict(list)
    for segment in segments:
        rows[segment.kind] += [
            (segment.shares(mask, step), own[segment.path]) for mask, own in zip(masks, parts, strict=True)
        ]
    found, error = {}, 0.0
    for kind, own in rows.items():
        shares, seconds = np.stack([row for row, _ in own]), np.array([t for _, t in own])
        # Between absolute and relative errors: narrow layers count too, but the sum is what matters.
        weight = 1 / np.sqrt(np.maximum(seconds, 0.02 * seconds.max() + 1e-9))
        found[kind] = nonnegative(shares * weight[:, None], seconds * weight)
        error += float(np.square((shares @ found[kind] - seconds) * weight).sum())
    return found, step, error
