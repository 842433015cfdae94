"""What a model costs: parameters, multiply-accumulates, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import ForwardError
from secateur.graph.axes import AxisTable
from secateur.graph.labels import CostTerm, LabelPass, NeedsNumbers
from secateur.graph.shadow import Example, ghost, quiet, run, run_or_explain, to_meta, twin, unwrap
from secateur.ops.table import Labels, tensors_in

#: What reading and writing one number is worth, in MACs: from 100 (two cores) to 300 (large GPUs). The larger figure
#: made the faster models on two cores as well.
MACS_PER_NUMBER = 300

#: What may be spared.
Price = Literal["macs", "params", "time"]
Savings = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Cost:
    """Parameters, multiply-accumulates for the example as it is, and the median latency in seconds if measured."""

    params: int
    macs: int
    latency: float | None = None

    def __str__(self) -> str:
        time_part = "" if self.latency is None else f", {1000 * self.latency:.2f} ms"
        return f"{human(self.params)} parameters, {human(self.macs)} MACs{time_part}"


def human(number: float) -> str:
    """A number with at most four digits and a unit.

    >>> human(25557032), human(512)
    ('25.56 M', '512')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def measure(model: nn.Module, example: Example, latency: bool = True, repeats: int = 20) -> Cost:
    """Parameters, multiply-accumulates (convolutions, linear layers, matrix products) and median latency of a model.

    >>> measure(nn.Linear(8, 4), torch.zeros(1, 8), latency=False)
    Cost(params=36, macs=32, latency=None)
    """
    model = unwrap(model)
    macs = round(
        sum(term.coefficient * float(np.prod([len(a) for a in term.axes])) for term in count_macs(model, example))
    )
    return Cost(size_of(model), macs, time_forward(model, example, repeats) if latency else None)


def size_of(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, example: Example) -> list[CostTerm]:
    """The cost of every call in one forward pass in evaluation mode."""
    for shadow, inputs in ((ghost, to_meta(example)), (twin, example)):
        watched = shadow(model).eval()
        labels = LabelPass(watched, AxisTable())
        try:
            with quiet(), labels:
                run(watched, inputs)
            return labels.macs
        except (RuntimeError, NotImplementedError, TypeError, ValueError, NeedsNumbers):
            if shadow is twin:
                with quiet():
                    run_or_explain(watched, inputs)
                raise
    raise AssertionError("unreachable")


def time_forward(model: nn.Module, example: Example, repeats: int = 20) -> float:
    """Median seconds of a forward pass in evaluation mode, after a warm-up. The model is left as it was."""
    return time_in_turn([model], example, repeats)[0]


def time_in_turn(models: Sequence[nn.Module], example: Example, repeats: int = 20) -> list[float]:
    """Median seconds of a forward pass of each model. They take turns, so that a busy moment hits all of them."""
    watched = [twin(unwrap(model)).eval() for model in models]
    cuda = any(t.device.type == "cuda" for t in tensors_in(example))

    def forward(model: nn.Module) -> None:
        run(model, example)
        if cuda:
            torch.cuda.synchronize()

    with quiet():
        for model in watched:
            run_or_explain(model, example)
        return medians([partial(forward, model) for model in watched], repeats)


def medians(calls: Sequence[Callable[[], object]], repeats: int = 20) -> list[float]:
    """Median seconds of each call, after a warm-up; the calls take turns."""

    def timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    each = max(sum(timed(call) for call in calls for _ in range(3)) / 3, 1e-6)
    # Slow calls get fewer repeats: at most about ten seconds for each, never fewer than three.
    turns = max(3, min(repeats, int(10 * len(calls) / each)))
    seconds = [[timed(call) for call in calls] for _ in range(turns)]
    return [statistics.median(times) for times in zip(*seconds, strict=True)]


@dataclass(frozen=True)
class Timing:
    """Median seconds for one batch before and after pruning, measured in turn. `runtime` is what ran the models."""

    batch: int
    before: float
    after: float
    runtime: str = "PyTorch"

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.before / self.after


def time_batches(
    before: nn.Module, after: nn.Module, example: Example, batches: Sequence[int] = (1, 32)
) -> list[Timing]:
    """Time two models in turn for each batch size.

    An example that is more than one tensor, or a forward that takes no other batch size, is timed as it is.

    >>> [timing.batch for timing in time_batches(nn.Linear(4, 9), nn.Linear(4, 2), torch.rand(1, 4))]
    [1, 32]
    """
    found = []
    if isinstance(example, Tensor) and example.ndim:
        for batch in batches:
            with suppress(ForwardError):
                first, second = time_in_turn([before, after], repeated(example, batch))
                found.append(Timing(batch, first, second))
    if found:
        return found
    first, second = time_in_turn([before, after], example)
    return [Timing(batch_of(example), first, second)]


def batch_of(example: Example) -> int:
    """How many samples an example has, by its first tensor."""
    return next((len(tensor) for tensor in tensors_in(example) if tensor.ndim), 1)


def repeated(example: Tensor, batch: int) -> Tensor:
    """The first sample of an example, so many times."""
    return example[:1].expand(batch, *example.shape[1:]).contiguous()


class CostModel:
    """Cost as a function of which classes are removed; evaluated many times while a plan is sought."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        parameters: set[str],
        axes: AxisTable,
        root: Labels,
        terms: list[CostTerm],
        written: Sequence[CostTerm] = (),
    ) -> None:
        self._terms = [(term.coefficient, [root[a] for a in term.axes]) for term in terms]
        self._written = [(MACS_PER_NUMBER * term.coefficient, [root[a] for a in term.axes]) for term in written]
        dims: dict[str, list[tuple[int, Labels]]] = {name: [] for name in parameters}
        for axis in axes.axes:
            if axis.parameter in dims:
                dims[axis.parameter].append((axis.dim, root[axis.base : axis.base + axis.size]))
        self._params: list[tuple[float, list[Labels]]] = []
        for name, vectors in dims.items():
            rest = float(np.prod(shapes[name]))
            for dim, _ in vectors:
                rest /= shapes[name][dim]
            self._params.append((rest, [v for _, v in vectors]))

    def __call__(self, removed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Cost:
        """`removed[root]` says whether a class leaves."""
        keep = ~removed
        return Cost(round(_total(self._params, keep)), round(_total(self._terms, keep)))

    def savings(self, removed: np.ndarray[tuple[int], np.dtype[np.bool_]], what: Price = "macs") -> Savings:
        """What each class costs as things stand, to first order: what leaves with it when it leaves alone.

        "time" is in MACs, too: those that are computed, and those that could be while numbers are read and written.
        """
        keep = ~removed
        saved = np.zeros(len(keep))
        priced = {"macs": self._terms, "params": self._params, "time": [*self._terms, *self._written]}
        for coefficient, vectors in priced[what]:
            counts = [int(np.count_nonzero(keep[vector])) for vector in vectors]
            for i, vector in enumerate(vectors):
                others = float(np.prod(counts[:i] + counts[i + 1 :]))
                np.add.at(saved, vector[keep[vector]], coefficient * others)
        return saved


def _total(terms: list[tuple[float, list[Labels]]], keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    total = 0.0
    for coefficient, vectors in terms:
        for vector in vectors:
            coefficient *= int(np.count_nonzero(keep[vector]))
        total += coefficient
    return total
