"""Timing models: who is called when, for which batch, and what the median is of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.files.onnx import time_onnx
from secateur.latency.timing import Timing, medians, time_batches, time_in_turn
from secateur.plans import Limits
from secateur.plans.scores import Scores

CLOCK = [0.0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the models move, so that a busy machine cannot disturb it."""
    monkeypatch.setattr("secateur.latency.timing.time.perf_counter", lambda: CLOCK[0])


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
    # Each call is seen twice by the clock. Three calls to find out how long it takes, then five that count.
    taken = [9.0, 9.0, 9.0, 1.0, 5.0, 2.0, 4.0, 3.0]
    ticks = iter([tick for i, seconds in enumerate(taken) for tick in (100.0 * i, 100.0 * i + seconds / 1000)])
    monkeypatch.setattr("secateur.latency.timing.time.perf_counter", lambda: next(ticks))
    assert medians([lambda: None], repeats=5) == [pytest.approx(0.003)]


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


class Residual(nn.Module):
    """A stem of four channels that two branches of three are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 3, 3, padding=1)
        self.outer = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu_()
        x = x + self.outer(torch.relu(self.inner(x)))
        return self.head(x.mean((2, 3)))


def test_time_counts_numbers_that_are_written() -> None:
    """By hand, for one image of 5²: MACs, and 300 for each number that a call writes."""
    graph = sc.analyze(Residual().eval(), torch.zeros(1, 3, 5, 5))
    nothing = np.zeros(len(graph.root), np.bool_)
    macs, time_ = (graph.cost_of.savings(nothing, what) for what in ("macs", "time"))
    layers = {layer.name: layer.groups for layer in graph.layers}
    stream, inner = layers["stem"], layers["inner"]
    # A channel of the stream: its filter in stem, its column in inner, its filter in outer, its column in head.
    assert macs[stream] == pytest.approx([25 * 3 + 25 * 9 * 3 + 25 * 3 + 2] * 4)
    # Written for it: stem, norm, ReLU in place, outer, sum, mean.
    assert time_[stream] - macs[stream] == pytest.approx([300 * (5 * 25 + 1)] * 4)
    assert macs[inner] == pytest.approx([25 * 9 * 4 + 25 * 4] * 3)
    assert time_[inner] - macs[inner] == pytest.approx([300 * 2 * 25] * 3)  # inner, ReLU


def test_views_write_nothing() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).unsqueeze(0).squeeze(0).reshape(-1, 6))

    graph = sc.analyze(Viewed(), torch.zeros(1, 4))
    nothing = np.zeros(len(graph.root), np.bool_)
    extra = graph.cost_of.savings(nothing, "time") - graph.cost_of.savings(nothing, "macs")
    assert extra[graph.layers[0].groups] == pytest.approx([300] * 6)


def test_scope_time_takes_what_takes_time() -> None:
    """Equal scores: by MACs an inner channel is dearer, by time one of the stream is."""
    graph = sc.analyze(Residual().eval(), torch.zeros(1, 3, 5, 5))
    scores = Scores("even", {p.sites[0]: np.ones(len(p.labels)) for p in graph.producers})
    first = {
        scope: sc.plan(graph, scores, keep={"macs": 0.95}, limits=Limits(scope=scope)) for scope in ("cost", "time")
    }
    assert {name for name, (had, has) in first["cost"].layers.items() if has < had} == {"inner"}
    assert {name for name, (had, has) in first["time"].layers.items() if has < had} == {"stem"}
    by_params = [sc.plan(graph, scores, keep={"params": 0.8}, limits=Limits(scope=scope)) for scope in ("cost", "time")]
    assert by_params[0].groups == by_params[1].groups


def test_onnx_files_are_timed_for_the_batches_they_take(tmp_path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(2, 4)
    free = sc.export(net, tmp_path / "free.onnx", x)
    fixed = sc.export(net, tmp_path / "fixed.onnx", x[:1], dynamic_batch=False)
    found = time_onnx(free, free, x)
    assert [(timing.batch, timing.runtime) for timing in found] == [(1, "ONNX Runtime"), (32, "ONNX Runtime")]
    assert all(timing.before > 0 and timing.after > 0 for timing in found)
    assert [timing.batch for timing in time_onnx(free, fixed, x)] == [1]
    assert Timing(1, 0.3, 0.1).gain == pytest.approx(3)
