"""Comparing criteria, and lending one to Torch-Pruning."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from secateur.criteria.scoring import score
from secateur.errors import SecateurError
from secateur.integrations.torch_pruning import SecateurImportance
from secateur.loop.compare import compare
from secateur.results.comparison import Curve, overlap, ranks, spearman


def slow_rank(values: list[float]) -> list[float]:
    return [sum(v < w for v in values) + (sum(v == w for v in values) - 1) / 2 for w in values]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=12))
def test_ranks_and_spearman_by_definition(pairs: list[tuple[int, int]]) -> None:
    a, b = ([float(p[i]) for p in pairs] for i in (0, 1))
    assert ranks(np.array(a)).tolist() == slow_rank(a)
    x, y = np.array(slow_rank(a)), np.array(slow_rank(b))
    found = spearman(np.array(a), np.array(b))
    if x.std() == 0 or y.std() == 0:
        assert found == 0
    else:
        assert found == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)


def test_overlap() -> None:
    a, b = np.array([1.0, 2, 3, 4]), np.array([4.0, 3, 2, 1])
    assert [overlap(a, b, k) for k in (1, 2, 3, 4)] == [0, 0, 2 / 3, 1]
    assert overlap(a, a, 2) == 1


def test_areas_are_means_of_the_curve() -> None:
    curve = Curve("x", np.array([0, 0.5, 1.0]), np.array([1, 0.8, 0.2]), np.array([1.0, 1.0, 0.0]))
    assert curve.area_over_units() == pytest.approx(0.75)  # 1 for half the way, then a triangle
    assert curve.area_over_units(0.75) == pytest.approx((0.5 + 0.25 * 0.75) / 0.75)
    assert curve.area_over_macs() == pytest.approx((0.2 * 1 + 0.6 * 0.5) / 0.8)
    assert curve.area_over_macs(0.8) == pytest.approx(1.0)


def task() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.rand(60, 6)
    y = x[:, :3].argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net, (x, y)


def test_compare_in_one_call(tmp_path: Path) -> None:
    net, (x, y) = task()

    def accuracy(model: nn.Module) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    names = ["lrp", "taylor", "weight", "random"]
    table = compare(net, (x, y), names, evaluate=accuracy, remove=0.75, schedule=0.25)
    assert list(table.curves) == names
    assert all(c.overall[0] == accuracy(net) for c in table.curves.values())
    assert table.best != "random"
    for a, b in itertools.permutations(names, 2):
        assert table.spearman[a, b] == pytest.approx(table.spearman[b, a])
        assert 0 <= table.first[0.25][a, b] <= 1
    assert all(name in str(table) for name in names)
    saved = json.loads(table.to_json(tmp_path / "table.json"))
    assert saved["best"] == table.best
    assert saved["criteria"]["lrp"]["removed"] == table.curves["lrp"].removed.tolist()
    short = {"evaluate": accuracy, "remove": 0.5, "schedule": 0.25, "checkpoint": tmp_path / "run.safetensors"}
    once, again = (compare(net, (x, y), ["lrp", "weight"], **short) for _ in range(2))
    assert once.curves["lrp"].overall.tolist() == again.curves["lrp"].overall.tolist()
    assert {p.name for p in tmp_path.glob("run*")} == {"run-lrp.safetensors", "run-weight.safetensors"}
    with pytest.raises(SecateurError, match="different names"):
        compare(net, (x, y), ["lrp", "lrp"], evaluate=accuracy)


def test_torch_pruning_takes_our_importance() -> None:
    tp = pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 4),
    ).eval()  # fmt: skip
    data = (torch.rand(8, 3, 9, 9), torch.arange(8) % 4)
    values = next(v for s, v in score(net, data, "lrp").units.items() if s.path == "0")
    before = copy.deepcopy(net.state_dict())
    importance = SecateurImportance(net, data, "lrp")
    group = tp.DependencyGraph().build_dependency(net, data[0][:1]).get_pruning_group(
        net[0], tp.prune_conv_out_channels, idxs=list(range(8))
    )  # fmt: skip
    np.testing.assert_allclose(importance(group).numpy(), values, rtol=1e-5)
    some = tp.DependencyGraph().build_dependency(net, data[0][:1]).get_pruning_group(
        net[0], tp.prune_conv_out_channels, idxs=[6, 1]
    )  # fmt: skip
    np.testing.assert_allclose(importance(some).numpy(), values[[6, 1]], rtol=1e-5)
    pruner = tp.pruner.BasePruner(
        net, data[0][:1], importance, pruning_ratio=0.5, iterative_steps=2, ignored_layers=[net[7]]
    )  # fmt: skip
    pruner.step()
    assert net[0].out_channels == 6
    left = np.sort(np.argsort(values)[2:])
    np.testing.assert_array_equal(net[0].weight.detach().numpy(), before["0.weight"][left].numpy())
    pruner.step()  # the model has changed: scores are made anew
    assert net[0].out_channels == 4
    assert net(data[0]).shape == (8, 4)
