"""How long a forward pass takes: medians, models timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from secateur.errors import ForwardError
from secateur.nest import map_tensors, select_samples, tensors_in
from secateur.running.copies import shared_copy, unwrap
from secateur.running.memory import at_once, fits, trim
from secateur.running.sandbox import Example, quiet, run_or_explain

#: What runs a model, in words.
RUNTIMES = {
    "torch": "PyTorch", "channels-last": "PyTorch, channels last", "compile": "torch.compile",
    "onnxruntime": "ONNX Runtime",
}  # fmt: skip


_SLOW = 0.5  # seconds


def time_forward(model: nn.Module, example: Example, repeats: int = 20) -> float:
    """Median seconds of a forward pass in evaluation mode, after a warm-up. The model is left as it was."""
    return time_in_turn([model], example, repeats)[0]


def time_in_turn(models: Sequence[nn.Module], example: Example, repeats: int = 20) -> list[float]:
    """Median seconds of a forward pass of each model. They take turns, so that a busy moment hits all of them."""
    watched = [shared_copy(unwrap(model)).eval() for model in models]
    cuda = any(t.device.type == "cuda" for t in tensors_in(example))

    def forward(model: nn.Module) -> None:
        run_or_explain(model, example)
        if cuda:
            torch.cuda.synchronize()

    with quiet():
        return medians([partial(forward, model) for model in watched], repeats)


def medians(calls: Sequence[Callable[[], object]], repeats: int = 20) -> list[float]:
    """Median seconds of each call; the calls take turns."""
    return [statistics.median(own) for own in turns(calls, repeats)]


def turns(calls: Sequence[Callable[[], object]], most: int = 20, budget: float = 3.0) -> list[list[float]]:
    """Seconds of each call, so often at most and for about so many seconds each. The calls take turns.

    The first turn is a warm-up, which counts if calls are slow. Slow calls vary less: two turns are enough, also for
    calls that take half a second on average.
    """

    def timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    seconds = [[timed(call) for call in calls] for _ in range(2)]
    first, second = map(sum, seconds)
    slow = second >= _SLOW * len(calls)
    if not slow or first > 1.2 * second:
        del seconds[0]
    least = 2 if slow else min(3, max(2, most))
    while len(seconds) < least or (len(seconds) < most and sum(map(sum, seconds)) <= budget * len(calls)):
        seconds.append([timed(call) for call in calls])
    return [list(own) for own in zip(*seconds, strict=True)]


@dataclass(frozen=True)
class Timing:
    """Median seconds for one batch before and after pruning, measured in turn. `runtime` is what ran the models.

    `tokens` is the length of each text of the batch; 0 if samples are no texts. `threads` is how many computed; 0 if
    that is not known.
    """

    batch: int
    before: float
    after: float
    runtime: str = "PyTorch"
    tokens: int = 0
    threads: int = 0

    @property
    def where(self) -> str:
        """The runtime and the threads, in words."""
        return self.runtime + (f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else "")

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.before / self.after

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second before and after."""
        return self.batch * self.tokens / self.before, self.batch * self.tokens / self.after


def time_batches(
    before: nn.Module, after: nn.Module, example: Example, batches: Sequence[int] | None = None
) -> list[Timing]:
    """Time two models in turn for each batch size; default: 1 and 32, or as many as fit into memory.

    An example that is more than one tensor, or a forward that takes no other batch size, is timed as it is.

    >>> [timing.batch for timing in time_batches(nn.Linear(4, 9), nn.Linear(4, 2), torch.rand(1, 4))]
    [1, 32]
    """
    found = []
    if isinstance(example, Tensor) and example.ndim:
        for batch in fitting([before, after], example) if batches is None else batches:
            with suppress(ForwardError):
                first, second = time_in_turn([before, after], repeated(example, batch))
                found.append(Timing(batch, first, second))
            trim()  # of what malloc keeps; during a timing it keeps what it always does
    if found:
        return found
    first, second = time_in_turn([before, after], example)
    return [Timing(batch_of(example), first, second)]


def fitting(models: Sequence[nn.Module], example: Example, wanted: int = 32) -> list[int]:
    """The batch sizes that are timed: one sample, and as many as wanted, or as the memory allows.

    The largest model comes first. Where it is not sure that a batch fits, all models pass it once, untimed.
    """
    watched = [shared_copy(unwrap(model)).eval() for model in models]
    batch, sure = at_once(watched[0], example, wanted)
    while not sure and batch > 1 and not fits(watched, repeated(example, batch)):
        batch //= 2
    return sorted({1, batch})


def batch_of(example: Example) -> int:
    """How many samples an example has, by its first tensor."""
    return next((len(tensor) for tensor in tensors_in(example) if tensor.ndim), 1)


def repeated(example: Example, batch: int) -> Example:
    """The first sample of an example, so many times."""
    one = select_samples(example, slice(1))
    return map_tensors(lambda t: t.expand(batch, *t.shape[1:]).contiguous() if t.ndim else t, one)
