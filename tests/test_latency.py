"""Timing models: who is called when, for which batch, and what the median is of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.cli.outcome import time_elsewhere
from secateur.files.session import time_onnx
from secateur.latency import timing
from secateur.latency.timing import Timing, medians, time_batches, time_in_turn, turns
from secateur.runtimes import Setup
from secateur.runtimes.clock import Clock

CLOCK = [0.0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the models move, so that a busy machine cannot disturb it."""
    monkeypatch.setattr(timing.time, "perf_counter", lambda: CLOCK[0])


class Sleeper(nn.Module):
    """Takes so many seconds, and notes that it was called and with how many samples."""

    def __init__(self, name: str, seconds: float, calls: list[tuple[str, int]]) -> None:
        super().__init__()
        self.name, self.seconds = name, seconds
        # A closure: copies of the module must write into the same list.
        self.note = lambda x: calls.append((name, len(x)))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.note(x)
        CLOCK[0] += self.seconds
        return x


class OneByOne(nn.Module):
    """Takes one sample at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(1, 4)


@pytest.mark.usefixtures("clock")
def test_models_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    slow, fast = time_in_turn([Sleeper("a", 0.004, calls), Sleeper("b", 0.001, calls)], torch.zeros(2, 3), repeats=5)
    assert [name for name, _ in calls[-10:]] == ["a", "b"] * 5
    assert (slow, fast) == pytest.approx((0.004, 0.001))


def test_the_median_is_of_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each call is seen twice by the clock. One call is a warm-up, then five count.
    taken = [9.0, 1.0, 5.0, 2.0, 4.0, 3.0]
    ticks = iter([tick for i, seconds in enumerate(taken) for tick in (100.0 * i, 100.0 * i + seconds / 1000)])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    assert medians([lambda: None], repeats=5) == [pytest.approx(0.003)]


@pytest.mark.parametrize(
    ("taken", "found"),
    [([2.0, 2.2, 99.0], 2.1), ([5.0, 2.0, 2.2, 99.0], 2.1), ([5.0, 0.4] + [0.6] * 5 + [99.0], 0.6)],
    ids=["slow calls are made twice", "a slow first one does not count", "nor if the others are fast"],
)
def test_slow_calls_are_made_less_often(monkeypatch: pytest.MonkeyPatch, taken: list[float], found: float) -> None:
    ticks = iter([tick for i, seconds in enumerate(taken) for tick in (100.0 * i, 100.0 * i + seconds)])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    assert medians([lambda: None]) == [pytest.approx(found)]
    assert next(ticks) == 100.0 * (len(taken) - 1)


@pytest.mark.usefixtures("clock")
def test_batches_of_one_and_of_32() -> None:
    calls: list[tuple[str, int]] = []
    found = time_batches(Sleeper("a", 0.002, calls), Sleeper("b", 0.001, calls), torch.zeros(3, 5))
    assert [timing.batch for timing in found] == [1, 32]
    assert {size for _, size in calls} == {1, 32}
    assert all((timing.before, timing.after) == pytest.approx((0.002, 0.001)) for timing in found)
    assert found[0].gain == pytest.approx(2)


def test_what_cannot_be_repeated_is_timed_as_it_is() -> None:
    calls: list[tuple[str, int]] = []
    pair = torch.zeros(3, 5), torch.zeros(7)
    found = time_batches(Sleeper("a", 0, calls), Sleeper("b", 0, calls), pair)
    assert [timing.batch for timing in found] == [3]
    assert {size for _, size in calls} == {3}
    assert [t.batch for t in time_batches(OneByOne(), OneByOne(), torch.zeros(1, 4))] == [1]
    assert [t.batch for t in time_batches(OneByOne(), OneByOne(), torch.zeros(1, 4), batches=(2,))] == [1]


def test_onnx_files_are_timed_for_the_batches_they_take(tmp_path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(2, 4)
    free = sc.export(net, tmp_path / "free.onnx", x)
    fixed = sc.export(net, tmp_path / "fixed.onnx", x[:1], dynamic_batch=False)
    found = time_onnx(free, free, x)
    assert [(timing.batch, timing.runtime) for timing in found] == [(1, "ONNX Runtime"), (32, "ONNX Runtime")]
    assert all(timing.before > 0 and timing.after > 0 for timing in found)
    assert [timing.batch for timing in time_onnx(free, fixed, x)] == [1]
    assert Timing(1, 0.3, 0.1).gain == pytest.approx(3)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("seconds", "calls", "kept"), [(0.01, 1 + 40, 40), (0.3, 1 + 4, 4), (3.0, 2, 2)])
def test_slow_models_are_timed_less_often(seconds: float, calls: int, kept: int) -> None:
    """The first pass is a warm-up, unless it takes so long that every pass counts."""
    notes: list[tuple[str, int]] = []
    models = [Sleeper(name, seconds, notes) for name in "ab"]
    found = turns([lambda model=model: model(torch.zeros(1, 4)) for model in models], 40, 1.0)
    assert [name for name, _ in notes] == ["a", "b"] * calls
    assert [len(own) for own in found] == [kept, kept]


def test_other_forms_of_pytorch_are_timed_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Conv2d(3, 2, 1), torch.rand(1, 3, 4, 4)
    took = {1: [4.0, 3.0], 32: [9.0, 5.0]}

    def in_turn(self: Clock, models: list[tuple[nn.Conv2d, None]]) -> list[float]:
        if self.setup.runtime == "compile":
            return [4.0, 3.5]
        inside = [self.runner.prepare(model).args[0].weight for model, _ in models]
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (self.runner.inputs, *inside))
        return took[len(self.runner.inputs)]

    monkeypatch.setattr(Clock, "in_turn", in_turn)
    plain = [Timing(1, 4.0, 2.0), Timing(32, 9.0, 6.0)]
    found = time_elsewhere(net, net, x, plain, "channels-last", Setup())
    assert found == [Timing(32, 9.0, 5.0, "PyTorch, channels last")]  # slower for one sample: left out
    assert time_elsewhere(net, net, x, plain[:1], "compile", Setup("compile")) == [Timing(1, 4.0, 3.5, "torch.compile")]
