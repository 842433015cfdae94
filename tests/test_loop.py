"""Algorithm 1: steps, targets, parts, going back, fine-tuning, checkpoints, bad input."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from secateur.analysis.analyze import analyze
from secateur.criteria import Taylor
from secateur.criteria.scoring import score
from secateur.errors import (
    CheckpointError,
    CriterionError,
    DataError,
    EvaluationError,
    FileFormatError,
    ForwardError,
    NotFiniteError,
    SecateurError,
    TargetError,
)
from secateur.loop import Schedule
from secateur.loop import checkpoint as checkpoints
from secateur.loop.progress import Progress, StepDone
from secateur.loop.prune import Result, prune
from secateur.plans import Limits
from secateur.plans.plan import difference, plan_for, renumbered
from secateur.plans.ranking import plan
from secateur.recover import Recover, recover
from secateur.results.history import History
from secateur.running.identity import data_identity, described
from secateur.running.progress import Event, Scoring
from secateur.runtimes import Latency, Setup
from secateur.runtimes.clock import Clock
from secateur.runtimes.segments import segments_of
from secateur.surgery.apply import apply
from secateur.surgery.optimizer import carry, going_back


class Net(nn.Module):
    """A little residual net with batch norm and a hidden layer before the output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(12)
        self.conv1 = nn.Conv2d(12, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 12, 3, padding=1)
        self.hidden = nn.Linear(12, 20)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(x + self.conv2(F.relu(self.conv1(x))))
        return self.fc(self.drop(F.relu(self.hidden(x.mean((2, 3))))))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def data(count: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 6, 6, generator=generator), torch.arange(count) % 4


def same(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def accuracy(model: nn.Module) -> float:
    x, y = data(40, seed=5)
    return float((model(x).argmax(1) == y).float().mean())


# -- the algorithm -----------------------------------------------------------------------------------------------------
def test_it_is_algorithm_1() -> None:
    """Scores on what is left, the least important 10 % of the original units leave, again: written out by hand."""
    model, samples = net(), data()
    result = prune(model, samples, "taylor", remove=0.5, schedule=0.1)
    graph = analyze(model, samples[0][:1])
    current, so_far = model, None
    for number in range(1, 6):
        scores = score(current, samples, "taylor", graph=graph, start=so_far)
        so_far = plan(graph, scores, remove=number / 10, start=so_far)
        current = apply(model, so_far)
    assert result.plan == so_far
    assert same(result.model, current)
    assert [row.step for row in result.history] == [0, 1, 2, 3, 4, 5]
    assert result.cost_after.params == sum(p.numel() for p in result.model.parameters())
    assert result.stopped == "the target is met"


def test_the_users_model_is_not_changed() -> None:
    model = net().train()
    before, rng = copy.deepcopy(model), torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    result = prune(model, data(), remove=0.3, schedule=0.1, recover=Recover.scenario1(epochs=1), evaluate=accuracy)
    assert same(model, before)
    assert all([model.training, result.model.training, result.model.drop.training])
    assert torch.equal(rng, torch.get_rng_state())
    assert (python, numpy) == (random.getstate(), np.random.get_state()[1].tolist())
    assert all(p.grad is None for p in [*model.parameters(), *result.model.parameters()])


@pytest.mark.parametrize("name", ["lrp", "weight", "random"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_criteria_and_scopes(name: str, scope: str) -> None:
    result = prune(net(), data(), name, remove=0.6, schedule=0.2, limits=Limits(scope=scope, min_units=2))
    assert abs(result.history[-1].removed - 0.6) < 0.05
    assert all(after >= 2 for _, after in result.plan.layers.values())
    assert result.model(data()[0]).shape == (12, 4)


def test_layers_are_never_emptied() -> None:
    model = net()

    def conv1_last(m: nn.Module, batches: object) -> dict[str, np.ndarray]:
        paths = {"stem": 1, "conv1": 0, "conv2": 1, "hidden": 1}
        return {path: np.full(len(m.get_submodule(path).weight), value) for path, value in paths.items()}

    result = prune(model, data(), conv1_last, remove=0.4, schedule=0.05)
    assert result.plan.layers["conv1"] == (16, 1)
    assert result.history[-1].at_minimum == 1


def test_keep_macs_and_params() -> None:
    for name in ("macs", "params"):
        result = prune(net(), data(), keep={name: 0.5}, schedule=0.1)
        graph = result.graph
        got = getattr(result.cost_after, name)
        assert got <= 0.5 * getattr(graph.cost, name)
        assert len(result.history) > 2
        # no step was longer than asked for
        units = [row.removed for row in result.history]
        assert max(b - a for a, b in pairwise(units)) < 0.1 + 1e-6
    one = prune(net(), data(), keep={"macs": 0.5}, schedule=Schedule(one_shot=True))
    assert len(one.history) == 2


def half_a_millisecond_each(model: nn.Module, example: Tensor) -> Latency:
    """A table by which every unit of the first layer takes half a millisecond, in steps of eight units."""
    graph = analyze(model, example)
    segments = tuple(segments_of(graph))
    units = len(model[0].weight)
    kinds = {s.kind: [0.0005 * units * (s.path == "0" and len(axes) == 1) for axes in s.parts] for s in segments}
    return Latency(Setup(), 0.0005 * units, 0.0, 0.0, 8, kinds, graph, segments)


def test_keep_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stopwatch that cannot be disturbed. Planned by the table, measured, and planned again where it is off."""
    model = nn.Sequential(nn.Linear(4, 80), nn.ReLU(), nn.Linear(80, 3))
    samples = (torch.rand(8, 4), torch.arange(8) % 3)
    table = half_a_millisecond_each(model, samples[0][:1])
    asked: list[list[int]] = []

    def stopwatch(each: float) -> None:
        def in_turn(_: Clock, models: list[tuple[nn.Module, object]]) -> list[float]:
            asked.append([m[0].out_features for m, _ in models])
            return [each * m[0].out_features for m, _ in models]

        asked.clear()
        monkeypatch.setattr(Clock, "in_turn", in_turn)

    stopwatch(0.0005)
    result = prune(model, samples, "weight", keep={"latency": 0.5}, latency=table, repair="mean")
    assert result.plan.layers["0"] == (80, 40)
    assert (result.cost_before.latency, result.cost_after.latency) == (0.04, 0.02)
    assert [row.latency for row in result.history] == [0.04, 0.02]  # at once: one repair
    assert asked == [[80], [80, 40]]  # the prediction is right, so that one measurement is enough
    assert result.settings["latency"]["runtime"] == "torch"
    # Seconds are what a stopwatch shows that is slower than the table: the plan follows the stopwatch.
    stopwatch(0.001)
    result = prune(model, samples, "weight", keep={"seconds": 0.02}, latency=table, repair="mean")
    assert result.plan.layers["0"] == (80, 16)
    assert result.cost_after.latency == 0.016
    # In steps, with the last one measured until it fits.
    stopwatch(0.0005)
    result = prune(model, samples, "weight", keep={"latency": 0.5}, schedule=0.2, latency=table)
    assert [row.latency for row in result.history] == [0.04, 0.032, 0.024, 0.02]
    with pytest.raises(TargetError, match="cannot reach 1e-05 seconds"):
        prune(model, samples, "weight", keep={"seconds": 1e-5}, latency=table)
    stopwatch(0.03)  # what the table says can be reached, and the stopwatch denies
    with pytest.raises(TargetError, match=r"0\.02 s per forward pass cannot be reached: PyTorch, batch 1") as caught:
        prune(model, samples, "weight", keep={"seconds": 0.02}, latency=table)
    assert caught.value.result.plan is None
    with pytest.raises(SecateurError, match="table is of another Sequential"):
        prune(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)), samples, keep={"latency": 0.5}, latency=table)
    with pytest.raises(SecateurError, match="latency is a float"):
        prune(model, samples, keep={"latency": 0.5}, latency=0.5)
    for wrong in ({"latency": 2.0}, {"latency": 0.5, "macs": 0.5}, {"seconds": 0}, {"latency": 0.5, "seconds": 1}):
        with pytest.raises(TargetError):
            prune(model, samples, keep=wrong)


def test_latency_is_measured() -> None:
    result = prune(net(), data(), "weight", keep={"seconds": 10.0}, schedule=0.1)
    assert result.cost_before.latency > 0
    assert result.cost_after.latency > 0


def test_parts_take_turns() -> None:
    parts = {"conv": ["stem", "conv*"], "fc": ["hidden"]}
    result = prune(net(), data(), remove=0.5, schedule=Schedule(step=0.25, parts=parts))
    assert [row.part for row in result.history] == ["", "conv", "fc", "conv", "fc"]
    assert result.plan.layers["hidden"] == (20, 10)
    units = [row.units for row in result.history]
    assert units[0] - units[1] <= 10
    assert units[1] - units[2] == 5  # a quarter of 40 conv units, then of 20 neurons
    with pytest.raises(TargetError, match="matches no layer"):
        prune(net(), data(), remove=0.5, schedule=Schedule(parts={"conv": ["nothing*"]}))


def told_of(words: str, limit: Any, measured: Iterable[float], **options: Any) -> list[str]:
    """The warnings with these words of a run in which these numbers are measured."""
    numbers, options = iter(measured), {"schedule": 0.1, **options}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        prune(net(), data(), remove=0.5, max_drop=limit, evaluate=lambda model: next(numbers), **options)
    return [str(one.message) for one in seen if words in str(one.message)]


def test_a_limit_in_another_unit_than_the_measure_is_named() -> None:
    """0.01 of a percentage is meant as a share. Half a point, or a fifth of one, is not."""
    for measured, limit, warned in ((97.5, 0.01, True), (97.5, {"overall": 0.01}, True), (97.5, 0.1, True),
                                    (97.5, 0.5, False), (97.5, 0.2, False), (97.5, 1.0, False), (97.5, 0, False),
                                    (0.975, 0.01, False), (1.0, 0.01, False)):  # fmt: skip
        told = told_of("no share", limit, repeat(measured))
        assert bool(told) == warned
        named = f"evaluate returns 97.5, which is no share, and max_drop={0.1 if limit == 0.1 else 0.01} is taken in"
        assert all(named in text for text in told)


def test_a_loss_is_named_that_cannot_drop() -> None:
    """It rises while the model gets worse, so that every step holds. An accuracy seldom rises, and never by much."""
    for losses, limit in (
        ((20, 20.5, 24, 30, 60, 90), 0.5),
        ((20, 21, 26, 20, 30, 40), 2.0),
        ((0.2, 0.6, 1.1) + (1.4,) * 3, 0.01),
    ):
        (told,) = told_of("as units left", {"overall": limit}, losses)  # once
        assert (
            f"rose from {losses[0]} to {next(x for x in losses if x > 1.25 * losses[0] and x > 1)} as units left"
            in told
        )
        assert f"max_drop={limit} cannot limit what rises. Fix: an evaluate of which larger is better" in told
    for accuracies, limit in (
        ((70.0, 74.0, 71.0, 72.0, 73.0, 75.0), 0.5),
        ((0.3, 0.5) + (0.65,) * 4, 0.01),
        (range(6), 9),
    ):
        assert not told_of("as units left", limit, accuracies)
    trained = Schedule(step=0.1, finetune=lambda model, step: None)  # which may well make it better
    assert not told_of("as units left", 0.5, (40, 50, 60, 70, 80, 90), schedule=trained)


def test_max_drop_goes_back_to_the_last_step_that_held() -> None:
    def by_size(model: nn.Module) -> dict[str, float]:
        left = model.hidden.out_features / 20
        return {"overall": 0.5 + left / 2, "cat": 1.0, "dog": left}

    options = {"criterion": "random", "evaluate": by_size}
    options["schedule"] = Schedule(parts={"fc": ["hidden"]}, step=0.1)
    result = prune(net(), data(), remove=0.9, max_drop=0.16, **options)
    assert result.model.hidden.out_features == 14  # 0.35 lost would be too much at 12
    assert [row.held for row in result.history] == [True] * 4 + [False]
    assert "lost more accuracy than allowed" in result.stopped
    result = prune(net(), data(), max_drop={"overall": 0.9, "worst": 0.25}, **options)
    assert result.model.hidden.out_features == 16
    result = prune(net(), data(), max_drop={"dog": 0.45}, **options)
    assert result.model.hidden.out_features == 12
    result = prune(net(), data(), max_drop=1.0, **options)  # never too much: as far as it goes
    assert "nothing more may leave" in result.stopped
    assert result.model.hidden.out_features <= 2
    with pytest.raises(EvaluationError, match="fish"):
        prune(net(), data(), max_drop={"fish": 0.45}, **options)


def test_a_limit_for_the_worst_class_needs_classes() -> None:
    """It is refused before anything is removed: without numbers by class it would limit nothing."""
    with pytest.raises(EvaluationError, match="max_drop names 'worst', but evaluate returns overall") as caught:
        prune(net(), data(), remove=0.5, schedule=0.25, max_drop={"worst": 0.01}, evaluate=lambda model: 0.5)
    assert caught.value.result.plan is None


def test_round_to_and_ignore() -> None:
    result = prune(net(), data(), remove=0.5, schedule=0.1, limits=Limits(ignore=["hidden"], round_to=4))
    assert all(after % 4 == 0 for _, after in result.plan.layers.values())
    assert result.plan.layers["hidden"] == (20, 20)


def test_one_pass_data_is_read_once_and_kept() -> None:
    x, y = data()
    batches = ((x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4))
    a = prune(net(), batches, remove=0.4, schedule=0.2)
    b = prune(net(), [(x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4)], remove=0.4, schedule=0.2)
    assert a.plan == b.plan


def test_steps_smaller_than_any_group_wait() -> None:
    result = prune(net(), data(), remove=0.3, schedule=0.001)
    assert abs(result.history[-1].removed - 0.3) < 0.05


def test_repair_hook_and_carried_plan() -> None:
    seen = []

    def repair(small: nn.Module, original: nn.Module, samples: object) -> nn.Module:
        seen.append((small.hidden.out_features, original.hidden.out_features))
        with torch.no_grad():
            small.fc.bias.zero_()
        return small

    result = prune(net(), data(), remove=0.4, schedule=0.2, repair=repair)
    assert [o for _, o in seen] == [20, 20]
    assert not result.model.fc.bias.any()


# -- plans that follow each other --------------------------------------------------------------------------------------
def test_renumbered() -> None:
    assert renumbered([1, 4, 6], [0, 4, 5], 8) == (0, 3)
    assert renumbered([], [1], 3) == ()


@pytest.mark.parametrize("kind", ["conv", "transformer"])
def test_two_removals_equal_one(kind: str) -> None:
    if kind == "conv":
        model, x = net(), data()[0]
    else:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, dropout=0.0)
        model, x = nn.Sequential(layer, nn.Linear(16, 3)).eval(), torch.rand(4, 5, 16)
    graph = analyze(model, x[:1])
    scores = score(model, None, "random", graph=graph)
    first = plan(graph, scores, remove=0.3)
    second = plan(graph, scores, remove=0.6, start=first)
    twice = apply(apply(model, first), difference(second, first))
    assert same(twice, apply(model, second))
    torch.testing.assert_close(twice(x), apply(model, second)(x))


def test_two_removals_equal_one_where_kinds_of_units_cross_in_a_norm() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widen, self.tokens, self.mix, self.head = (
                nn.Linear(*sizes) for sizes in ((5, 8), (4, 6), (6, 3), (8, 2))
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.tokens(self.widen(x).transpose(1, 2))
            return self.head(self.mix(F.layer_norm(y, y.shape[1:])).relu().transpose(1, 2))

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 4, 5)
    graph = analyze(model, x)
    channels, tokens = (layer.groups for layer in graph.layers if layer.prunable)
    removed = np.zeros(len(graph.root), np.bool_)
    removed[[channels[5], channels[6], tokens[0]]] = True
    first = plan_for(graph, removed)
    removed[[channels[1], tokens[1], tokens[4]]] = True
    second = plan_for(graph, removed)
    twice = apply(apply(model, first), difference(second, first))
    torch.testing.assert_close(twice(x), apply(model, second)(x))


# -- fine-tuning -------------------------------------------------------------------------------------------------------
def test_finetune_is_sgd_with_momentum() -> None:
    """Two epochs on one full batch, against the update written out."""
    x, y = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    w, b = model.weight.detach().clone(), model.bias.detach().clone()
    model = recover(model, None, (x, y), Recover.scenario1(epochs=2, lr=0.5, momentum=0.9, batch_size=6)).model
    vw, vb = torch.zeros_like(w), torch.zeros_like(b)
    for _ in range(2):
        p = (x @ w.T + b).softmax(1)
        error = (p - F.one_hot(y)) / 6
        vw, vb = 0.9 * vw + error.T @ x, 0.9 * vb + error.sum(0)
        w, b = w - 0.5 * vw, b - 0.5 * vb
    torch.testing.assert_close(model.weight.detach(), w)
    torch.testing.assert_close(model.bias.detach(), b)


@pytest.mark.parametrize("kind", [torch.int32, torch.float32])
def test_finetune_of_one_output_is_logistic_regression(kind: torch.dtype) -> None:
    x, y = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    w, b = model.weight.detach().clone(), model.bias.detach().clone()
    settings = Recover.scenario1(epochs=2, lr=0.5, momentum=0, batch_size=6)
    model = recover(model, None, (x, y.to(kind)), settings).model
    for _ in range(2):
        error = ((x @ w.T + b).sigmoid() - y[:, None]) / 6
        w, b = w - 0.5 * error.T @ x, b - 0.5 * error.sum(0)
    torch.testing.assert_close(model.weight.detach(), w)
    torch.testing.assert_close(model.bias.detach(), b)


def test_finetune_improves_and_repeats() -> None:
    samples = data(24)

    def loss(model: nn.Module) -> float:
        return -float(F.cross_entropy(model(samples[0]), samples[1]))

    tuned = prune(
        net(),
        samples,
        remove=0.4,
        schedule=0.2,
        recover=Recover.scenario1(epochs=8, lr=0.05),
        evaluate=loss,
    )
    plain = prune(net(), samples, remove=0.4, schedule=0.2, evaluate=loss)
    assert tuned.history[-1].overall > plain.history[-1].overall
    again = prune(net(), samples, remove=0.4, schedule=0.2, recover=Recover.scenario1(samples, epochs=8, lr=0.05))
    assert same(tuned.model, again.model)


def test_frozen_parameters_stay_frozen() -> None:
    model = net()
    model.stem.requires_grad_(False)
    result = prune(model, data(), remove=0.3, schedule=0.3, recover=Recover.scenario1(epochs=2))
    kept = np.setdiff1d(np.arange(12), result.plan.cuts.get("stem.weight", {}).get(0, ()))
    assert torch.equal(result.model.stem.weight, model.stem.weight[kept])
    assert not result.model.stem.weight.requires_grad
    with pytest.raises(DataError, match="frozen"):
        recover(net().requires_grad_(False), None, data(), Recover.scenario1())


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw-groups", "rmsprop"])
def test_optimizer_state_is_sliced_like_its_parameters(kind: str) -> None:
    """Train, remove, train on: as if the removed units' state had never been there."""
    model, (x, y) = net(), data()
    made = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
        "adamw-groups": lambda m: torch.optim.AdamW(
            [
                {"params": m.stem.parameters(), "lr": 0.001},
                {"params": [p for n, p in m.named_parameters() if "stem" not in n]},
            ],
            lr=0.01,
        ),
        "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.001, momentum=0.5, centered=True),
    }[kind]
    optimizer = made(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train(m: nn.Module, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
        scheduler.step()

    train(model, 3)
    states = {n: dict(optimizer.state[p]) for n, p in model.named_parameters()}
    graph = analyze(model, x[:1])
    chosen = plan(graph, score(model, None, "weight", graph=graph), remove=0.4)
    small = apply(model, chosen)
    carry(optimizer, model, small, chosen)
    for name, parameter in small.named_parameters():
        for key, value in optimizer.state[parameter].items():
            expected = states[name][key]
            if isinstance(expected, Tensor) and expected.ndim:
                for dim, gone in chosen.cuts.get(name, {}).items():
                    expected = torch.stack([s for i, s in enumerate(expected.unbind(dim)) if i not in gone], dim)
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), (name, key)
    rates = [group["lr"] for group in optimizer.param_groups]
    before = {n: p.detach().clone() for n, p in small.named_parameters()}
    train(small, 2)
    assert all(not torch.equal(before[n], p) for n, p in small.named_parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [r * 0.9 for r in rates]
    assert len(optimizer.state) == len(list(small.parameters()))


def test_optimizer_scheduler_and_average_through_the_loop() -> None:
    model, (x, y) = net(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new)

    def tune(small: nn.Module, step: int) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(small(x), y).backward()
            optimizer.step()
            average.update_parameters(small)
        scheduler.step()

    result = prune(
        model, (x, y), remove=0.4, schedule=Schedule(step=0.2, finetune=tune, carry=[optimizer, average, scheduler])
    )
    mine = {id(p) for p in result.model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == mine
    assert optimizer.param_groups[0]["lr"] == 0.0025
    assert average.module.hidden.weight.shape == result.model.hidden.weight.shape
    assert average.module(x).shape == (12, 4)
    with pytest.raises(SecateurError, match="carry"):
        prune(model, (x, y), remove=0.4, schedule=Schedule(carry=[object()]))
    stranger = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(SecateurError, match="SGD optimizer trains no parameter of this"):
        prune(model, (x, y), remove=0.4, schedule=Schedule(carry=[stranger]))


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_carried_goes_back_with_a_step_that_is_not_kept(fails: bool) -> None:
    """The optimizer trains the model of the result, with the moments, rates and averages that belong to it."""
    model, (x, y) = net(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model)
    noted: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def tune(small: nn.Module, step: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(small(x), y).backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(small)
        moments = [optimizer.state[p]["exp_avg"].clone() for p in small.parameters()]
        noted[step] = moments, [p.detach().clone() for p in average.module.parameters()]

    def evaluate(small: nn.Module) -> float:
        if fails and len(noted) == 2:
            raise OSError("no disk")
        return 0.0 if len(noted) == 2 else 1.0

    schedule = Schedule(step=0.2, finetune=tune, carry=[optimizer, average, scheduler])
    if fails:
        with pytest.raises(EvaluationError) as caught:
            prune(model, (x, y), remove=0.9, evaluate=evaluate, schedule=schedule)
        result = caught.value.result
    else:
        result = prune(model, (x, y), max_drop=0.5, evaluate=evaluate, schedule=schedule)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(trained, result.model.parameters(), strict=True))
    moments, averages = noted[1]
    assert all(torch.equal(optimizer.state[p]["exp_avg"], m) for p, m in zip(trained, moments, strict=True))
    assert all(torch.equal(p, m) for p, m in zip(average.module.parameters(), averages, strict=True))
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch, int(average.n_averaged)) == (0.005, 1, 1)


def test_going_back_copies_no_moments_and_yet_gives_them_back() -> None:
    """The moments afterwards are the very tensors of before, with their values; so are those of a further parameter."""
    model, (x, y) = net(), data()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=0.01)
    average = AveragedModel(model)

    def train(m: nn.Module) -> None:
        optimizer.zero_grad()
        F.cross_entropy(m(x) / temperature, y).backward()
        optimizer.step()
        average.update_parameters(m)

    train(model)
    own = [*model.parameters(), temperature]
    before = {p: (dict(optimizer.state[p]), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in own}
    averaged = [(t, t.clone()) for t in average.module.parameters()]
    back = [going_back(optimizer), going_back(average)]
    graph = analyze(model, x[:1])
    chosen = plan(graph, score(model, None, "weight", graph=graph), remove=0.4)
    small = apply(model, chosen)
    for item in (optimizer, average):
        carry(item, model, small, chosen)
    for _ in range(3):
        train(small)
    for undo in back:
        undo()
    assert len(optimizer.state) == len(own)
    for p, (held, values) in before.items():
        assert all(optimizer.state[p][key] is held[key] for key in held)
        assert all(torch.equal(optimizer.state[p][key], values[key]) for key in held)
    for now, (tensor, value) in zip(average.module.parameters(), averaged, strict=True):
        assert now is tensor
        assert torch.equal(now, value)
    assert int(average.n_averaged) == 1


# -- checkpoints -------------------------------------------------------------------------------------------------------
class Killed(BaseException):
    """Stands for a kill: nothing in the library may catch it."""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_resume_ends_the_same(tmp_path: Path, after: int) -> None:
    path, samples = tmp_path / "run.safetensors", data(20)
    options = {"remove": 0.5, "evaluate": accuracy}

    def run(tuner: object, checkpoint: Path | None = None):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def both(small: nn.Module, step: int) -> None:
            small.train()
            for _ in range(2):  # dropout draws random numbers, momentum goes on from step to step
                optimizer.zero_grad()
                F.cross_entropy(small(samples[0]), samples[1]).backward()
                optimizer.step()
            small.eval()
            if callable(tuner):
                tuner(step)

        schedule = Schedule(step=0.1, finetune=both, carry=[optimizer])
        trained = Recover.scenario1(epochs=2, lr=0.05)
        return prune(model, samples, schedule=schedule, recover=trained, checkpoint=checkpoint, **options)

    whole = run(None)

    def kill(step: int) -> None:
        if step == after + 1:
            raise Killed

    with pytest.raises(Killed):
        run(kill, path)
    resumed = run(None, path)
    assert resumed.plan == whole.plan
    assert same(resumed.model, whole.model)
    assert [r.metrics for r in resumed.history] == [r.metrics for r in whole.history]
    for site, values in whole.scores.units.items():
        np.testing.assert_array_equal(resumed.scores.units[site], values)
    finished = run(lambda step: pytest.fail("a finished run has nothing left to do"), path)
    assert same(finished.model, whole.model)
    assert not list(tmp_path.glob(".*"))


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    prune(net(), data(), remove=0.2, schedule=0.1, checkpoint=path)
    with pytest.raises(FileFormatError, match=r"remove was 0\.2, is now 0\.3"):
        prune(net(), data(), remove=0.3, schedule=0.1, checkpoint=path)
    with pytest.raises(FileFormatError, match="weights"):
        prune(net(1), data(), remove=0.2, schedule=0.1, checkpoint=path)
    content = path.read_bytes()
    for wrong in (b"", b"nonsense" * 10, content[: len(content) // 2]):
        path.write_bytes(wrong)
        with pytest.raises(FileFormatError):
            prune(net(), data(), remove=0.2, schedule=0.1, checkpoint=path)
    state = {"a": torch.zeros(1)}
    safetensors.torch.save_file(state, path)
    with pytest.raises(FileFormatError, match="not a checkpoint of this version"):
        prune(net(), data(), remove=0.2, schedule=0.1, checkpoint=path)


def other_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, label_smoothing=0.1)


def other_measure(model: nn.Module) -> float:
    return 0.25


def test_a_resumed_run_has_the_same_data_loss_batches_training_and_measure(tmp_path: Path) -> None:
    path, (x, y) = tmp_path / "run.safetensors", data()
    tune = Recover.scenario1((x, y), epochs=1, lr=0.01)
    settings = {"criterion": Taylor(), "remove": 0.2, "schedule": Schedule(step=0.1, batch_size=5), "recover": tune}

    def run(samples: object = (x, y), **changes: object) -> Result:
        return prune(net(), samples, checkpoint=path, **{**settings, **changes})

    once = run()
    assert same(once.model, run((x.clone(), y.tolist())).model)
    changed = x.clone()
    changed[3, 0, 0, 0] += 1
    for what, made in {
        "other data": lambda: run((changed, y)),
        "other data$": lambda: run((x, y.flip(0))),
        "loss was 'None', is now 'test_loop.other_loss'": lambda: run(criterion=Taylor(loss=other_loss)),
        "batch_size was 5, is now 6": lambda: run(schedule=Schedule(step=0.1, batch_size=6)),
        "evaluate was 'None', is now 'test_loop.other_measure'": lambda: run(evaluate=other_measure),
        "other recover": lambda: run(recover=Recover.scenario1((x, y), epochs=2, lr=0.01)),
    }.items():
        with pytest.raises(FileFormatError, match=what.removesuffix("$")):
            made()
    with pytest.raises(FileFormatError, match="other recover"):
        run(recover=Recover.scenario1((changed, y), epochs=1, lr=0.01))


def test_labels_in_dicts_and_arrays_tell_data_apart() -> None:
    """NumPy shows the ends of a long array only, and targets may be among the inputs."""
    long = np.zeros(3000)
    middle = long.copy()
    middle[1500] = 1
    ids = torch.zeros(2, 3).long()
    for one, other in (
        ([({"x": long[None]}, None)], [({"x": middle[None]}, None)]),
        ([{"input_ids": ids, "labels": [0, 1]}], [{"input_ids": ids, "labels": [1, 1]}]),
        ([{"input_ids": ids, "labels": np.array([0, 1])}], [{"input_ids": ids, "labels": np.array([1, 1])}]),
        (long, middle),
    ):
        for identity in (described, data_identity):
            assert identity(one) == identity(copy.deepcopy(one)) != identity(other)


def test_checkpoints_of_older_versions_know_less_and_go_on(tmp_path: Path) -> None:
    """Those have no digests of data, loss, batch size and training, but two columns more in every row."""
    path = tmp_path / "run.safetensors"
    whole = prune(net(), data(), remove=0.3, schedule=0.1, checkpoint=path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["secateur"][64:])  # after the digest
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key in ("data", "loss", "batch_size", "finetune"):
        del header["settings"][key]
    for row in header["history"]:
        row |= {"macs_alone": None, "params_alone": None}
    safetensors.torch.save_file(tensors, path, {"secateur": json.dumps(header)})
    again = prune(net(), data(), remove=0.3, schedule=0.1, checkpoint=path)
    assert same(whole.model, again.model)
    assert list(again.history) == list(whole.history)


class Noisy(torch.utils.data.Dataset):
    """Samples that are altered at random whenever they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = data()
        return x[index] + 0.01 * torch.randn(3, 6, 6), int(y[index])


def test_loaders_are_known_by_their_first_sample_and_are_not_disturbed() -> None:
    x, y = data()
    plain, longer = (torch.utils.data.TensorDataset(x[:n], y[:n]) for n in (8, 12))
    other = torch.utils.data.TensorDataset(x + 1, y)
    made = {
        name: data_identity(torch.utils.data.DataLoader(dataset, batch_size=size, shuffle=True))
        for name, (dataset, size) in {
            "a": (longer, 4), "b": (plain, 4), "c": (other, 4), "d": (longer, 3), "e": (Noisy(), 4)
        }.items()
    }  # fmt: skip
    assert len(set(made.values())) == 5
    before, python = torch.get_rng_state(), random.getstate()
    assert data_identity(torch.utils.data.DataLoader(longer, batch_size=4, shuffle=True)) == made["a"]
    assert data_identity(torch.utils.data.DataLoader(Noisy(), batch_size=4)) == made["e"]
    assert torch.equal(before, torch.get_rng_state())
    assert python == random.getstate()
    assert data_identity(Stream()) == "Stream None None"


class Stream:
    """Batches without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise AssertionError("looking at the data must not run them")


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, writes = tmp_path / "run.safetensors", []
    real = os.fsync

    def full(handle: int) -> None:
        writes.append(handle)
        if len(writes) > 5:  # two per checkpoint: the file and its folder
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        prune(net(), data(), remove=0.5, schedule=0.1, checkpoint=path)
    monkeypatch.undo()
    assert caught.value.result.model(data()[0]).shape == (12, 4)
    assert not list(tmp_path.glob(".*"))
    resumed = prune(net(), data(), remove=0.5, schedule=0.1, checkpoint=path)
    assert same(resumed.model, prune(net(), data(), remove=0.5, schedule=0.1).model)


def test_nested_state_round_trips() -> None:
    tensors: dict[str, Tensor] = {}
    value = {"state": {0: {"step": torch.tensor(3.0), "beta": (0.9, 0.99)}}, "list": [1, None, True, "x"]}
    text = json.dumps(checkpoints.encode(value, tensors, "k"))
    assert checkpoints.decode(json.loads(text), tensors) == value
    with pytest.raises(CheckpointError):
        checkpoints.encode({"f": lambda: 0}, {}, "k")


KILL_ME = Path(__file__).parent.parent / "benchmarks" / "kills.py"


def test_killed_processes_end_the_same(tmp_path: Path) -> None:
    """A few kills of the API and of the command line; `benchmarks/kills.py` does hundreds."""
    command = [sys.executable, str(KILL_ME), "--kills", "2", "--operations", "2", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("API, random", "API, file operations", "command, random", "command, file operations"):
        assert re.search(rf"{row}.* \| 2 \| 2 \| 0 \| 0 \| 0 \|", done.stdout)


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_bad_input_is_named() -> None:
    model, samples = net(), data()
    with pytest.raises(DataError, match="empty"):
        prune(model, [], remove=0.5)
    with pytest.raises(DataError, match="labels run from"):
        prune(model, (samples[0], samples[1] + 2), remove=0.5)
    with pytest.raises(ForwardError):
        prune(model, (torch.rand(4, 1, 6, 6), torch.arange(4)), remove=0.5)
    broken = net()
    with torch.no_grad():
        broken.conv1.bias[0] = math.inf
    with pytest.raises(NotFiniteError, match=r"conv1\.bias"):
        prune(broken, samples, remove=0.5)
    with pytest.raises(CriterionError, match="NaN"):
        prune(model, samples, lambda m, b: {"conv1": np.full(16, np.nan)}, remove=0.5)
    for target in ({}, {"remove": 0.5, "keep": {"macs": 0.5}}, {"remove": 1.5}, {"remove": 0.5, "keep": {}}):
        with pytest.raises(TargetError):
            prune(model, samples, **target)
    for step in (0, 1, -0.1):
        with pytest.raises(TargetError, match="step"):
            prune(model, samples, remove=0.5, schedule=step)
    with pytest.raises(TargetError, match="schedule"):
        prune(model, samples, remove=0.5, schedule="fast")
    with pytest.raises(TargetError, match="cannot reach"):
        prune(model, samples, keep={"macs": 1e-9})
    with pytest.raises(TargetError, match="at most"):
        prune(model, samples, remove=0.99)
    with pytest.raises(SecateurError, match="evaluate"):
        prune(model, samples, remove=0.5, max_drop=0.1)


@pytest.mark.parametrize("what", ["evaluate", "finetune", "repair"])
def test_what_the_users_functions_raise_is_named_and_nothing_is_lost(what: str) -> None:
    calls = []

    def fails(model: nn.Module, *rest: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the cat sat on the keyboard")
        return model if what == "repair" else 0.5

    options = {"schedule": Schedule(step=0.1, finetune=fails)} if what == "finetune" else {"schedule": 0.1, what: fails}
    with pytest.raises(EvaluationError, match=f"{what} raised RuntimeError.*keyboard") as caught:
        prune(net(), data(), remove=0.5, **options)
    result = caught.value.result
    assert len(result.history) == (2 if what == "evaluate" else 3)
    assert result.plan is not None
    assert result.model(data()[0]).shape == (12, 4)
    with pytest.raises(EvaluationError, match="overall"):
        prune(net(), data(), remove=0.5, evaluate=lambda m: {"cat": 1.0})
    with pytest.raises(EvaluationError, match="nan"):
        prune(net(), data(), remove=0.5, evaluate=lambda m: math.nan)


def test_evaluate_sees_evaluation_mode() -> None:
    modes = []

    def watch(model: nn.Module) -> float:
        modes.append((model.training, model.drop.training))
        model(data()[0])
        return 1.0

    model = net().train()
    result = prune(model, data(), "weight", remove=0.2, schedule=0.1, evaluate=watch)
    assert modes == [(False, False)] * 3
    assert result.model.training
    kept = np.setdiff1d(np.arange(12), result.plan.cuts.get("bn.running_mean", {}).get(0, ()))
    assert torch.equal(result.model.bn.running_mean, model.bn.running_mean[kept])


def test_without_data() -> None:
    example = data()[0][:1]
    result = prune(net(), [(example, None)], "weight", remove=0.4, schedule=0.2)
    assert result.history[-1].removed > 0.35
    at_once = prune(net(), [(example, None)], "weight", remove=0.4)  # one input is nothing to repair with
    assert "repair" not in at_once.settings
    with pytest.raises(DataError, match="example"):
        prune(net(), None, "weight", remove=0.4)


# -- history and progress ----------------------------------------------------------------------------------------------
def test_history_as_rows(tmp_path: Path) -> None:
    result = prune(net(), data(), remove=0.2, schedule=0.1, evaluate=lambda m: {"overall": 0.5, "cat": 0.25})
    text = result.history.to_csv(tmp_path / "rows.csv")
    lines = text.splitlines()
    assert lines[0].endswith("overall,cat")
    assert len(lines) == 4
    assert lines[-1].endswith("0.5,0.25")
    again = History.from_json(result.history.to_json(tmp_path / "rows.json"))
    assert list(again) == list(result.history)
    assert (tmp_path / "rows.csv").read_text() == text
    row = '{"step": 0, "units": 1, "removed": 0.0, "params": 1, "macs": 1, "metrics": [1]}'
    for wrong in ("[1]", "{", '[{"step": 1}]', f"[{row}]"):
        with pytest.raises(FileFormatError):
            History.from_json(wrong)
    assert "taken back" not in str(result.history)
    assert str(result).count("\n") >= 3


def test_a_run_in_steps_says_that_nothing_was_repaired() -> None:
    tuned = Schedule(step=0.1, finetune=lambda model, step: None)
    told = {
        "default": prune(net(), data(), remove=0.2),
        "steps": prune(net(), data(), remove=0.2, schedule=0.1),
        "steps, trained": prune(net(), data(), remove=0.2, schedule=0.1, recover=1),
        "steps, repaired": prune(net(), data(), remove=0.2, schedule=0.1, repair="best"),
        "own training": prune(net(), data(), remove=0.2, schedule=tuned),
        "at once, as asked": prune(net(), data(), remove=0.2, repair=None, schedule=Schedule(one_shot=True)),
        "no samples": prune(net(), [(data()[0][:1], None)], "weight", remove=0.2),
    }
    warned = {name for name, result in told.items() if "nothing was repaired" in str(result)}
    assert warned == {"steps", "steps, trained", "no samples"}
    assert "steps ask" not in str(told["no samples"])  # nobody asked for steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rich", [True, False])
def test_progress_only_on_a_terminal(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    row = prune(net(), data(), "weight", remove=0.2, schedule=0.2).history[-1]
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        with Progress(True, 2, stream) as progress:
            progress(StepDone(row))
        assert ("units left" in stream.getvalue()) == shown or (rich and shown)
    silent = Terminal()
    with Progress(False, 2, silent) as progress:
        progress(StepDone(row))
    assert silent.getvalue() == ""


@pytest.mark.parametrize("rich", [True, False])
def test_names_reach_the_terminal_without_control_characters(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    with Progress(True, 2, stream) as progress:
        progress(Scoring("a\x1b]0;owned\x07[red]b"))
    assert "\x1b]0" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()
    assert r"a\x1b]0;owned\x07[red]b" in stream.getvalue() or rich


def test_progress_in_words() -> None:
    events: list[Event] = []
    result = prune(net(), data(), "weight", remove=0.2, schedule=0.1, evaluate=lambda _: 0.5, progress=events.append)
    rows = [StepDone(row) for row in result.history]
    assert [event for event in events if isinstance(event, StepDone)] == rows
    said = [str(event) for event in events]
    assert said[:3] == ["measuring accuracy", str(rows[0]), "scoring units by weight"]


def test_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    prune(net(), data(), "weight", remove=0.2, schedule=0.2)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    """Scores as on the CPU, data moved there, mixed precision training, checkpoints."""
    samples = data(24)
    on_cpu, on_gpu = (score(net().to(d), samples, ["lrp", "taylor", "weight"]) for d in ("cpu", "cuda"))
    for name, scores in on_cpu.items():
        for site, values in scores.units.items():
            np.testing.assert_allclose(on_gpu[name].units[site], values, rtol=2e-2, atol=2e-2 * np.abs(values).max())
    options = {"remove": 0.4, "schedule": 0.2, "recover": Recover.scenario1(epochs=2)}
    result = prune(net().cuda(), samples, checkpoint=tmp_path / "run.safetensors", **options)
    assert all(p.is_cuda for p in result.model.parameters())
    again = prune(net().cuda(), samples, checkpoint=tmp_path / "run.safetensors", **options)
    assert same(result.model, again.model)
