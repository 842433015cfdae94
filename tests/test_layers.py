"""Layers and groups against a slow loop over every group, straight from their definition."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

import constructs
import secateur as sc
from secateur.analysis import analyze as analysis
from secateur.structure.coupling import Coupling
from secateur.structure.findings import AxisTable, Findings
from secateur.structure.graph import Graph

BUILD = analysis.build
MODELS = ["resnet18", "mobilenet_v2", "shufflenet_v2_x1_0", "googlenet", "regnet_y_400mf", "swin_t"]


def expected(passes: Any, blocked: dict[str, str]) -> tuple[list[Any], dict[int, int], set[int], list[Any]]:
    """Layers as tuples, units of each group, the groups that may leave, and the producers."""
    axes = passes[0].axes
    classes = Coupling(axes.total, passes)
    root = classes.root.tolist()
    reasons: dict[int, str] = {}
    for labels, reason in classes._frozen:
        for label in np.ravel(labels).tolist():
            reasons.setdefault(root[label], reason)
    units: dict[int, int] = defaultdict(int)
    paths: dict[int, list[str]] = defaultdict(list)
    kinds: dict[int, str] = {}
    order: list[int] = []
    producers: dict[int, Any] = {}
    for watched in passes:
        for first, producer in watched.producers.items():
            if first in producers:
                continue
            producers[first] = producer
            made = Counter(root[label] for label in producer.labels.tolist())
            for group in sorted(made):
                units[group] += made[group]
                paths[group] += [site.path for site in producer.sites]
                if group not in kinds:
                    kinds[group] = producer.kind
                    order.append(group)
    places: dict[int, set[str]] = defaultdict(set)
    for site, labels in passes[0].heads:
        for label in labels.tolist():
            places[root[label]].add(site.path)
    for group in set(places) & set(kinds):
        kinds[group], units[group] = "head", len(places[group])
    touched: dict[int, set[int]] = defaultdict(set)
    for i, axis in enumerate(axes.axes):
        here = root[axis.base : axis.base + axis.size]
        if len(set(here)) == 1:
            reasons.setdefault(here[0], "the only unit of its layer, or all its units are coupled")
        for group in here:
            touched[group].add(i)
    families: dict[Any, list[int]] = defaultdict(list)
    for group in order:
        families[frozenset(touched[group]), reasons.get(group)].append(group)
    layers, leave = [], set()
    names: dict[str, int] = defaultdict(int)
    for (_, reason), members in families.items():
        own = tuple(dict.fromkeys(paths[members[0]]))
        name = own[0] or "(forward)"
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        if reason is None:
            reason = blocked.get(name)
        if reason is None:
            leave |= set(members)
        layers.append((name, kinds[members[0]], own, sorted(members), reason is None, reason))
    return layers, units, leave, list(producers.values())


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Every graph that `analyze` builds on its way, each compared with the slow loop."""
    found: list[Graph] = []

    def build(model: Any, example: Any, passes: Any, blocked: Any, *more: Any) -> Graph:
        graph = BUILD(model, example, passes, blocked, *more)
        layers, units, leave, producers = expected(passes, blocked)
        have = [(x.name, x.kind, x.paths, x.groups.tolist(), x.prunable, x.reason) for x in graph.layers]
        assert have == layers
        assert {g: int(graph.units[g]) for g in np.flatnonzero(graph.units)} == units
        assert set(np.flatnonzero(graph.prunable).tolist()) == leave
        assert len(graph.producers) == len(producers)
        assert all(mine is other for mine, other in zip(graph.producers, producers, strict=True))
        found.append(graph)
        return graph

    monkeypatch.setattr(analysis, "build", build)
    return found


@pytest.mark.parametrize("name", constructs.CONSTRUCTS)
def test_layers_of_constructs(name: str, checked: list[Graph]) -> None:
    model, example = constructs.build(name)
    graph = sc.analyze(model, example)
    assert checked[-1] is graph


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_torchvision_models(name: str, checked: list[Graph]) -> None:
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, **options).eval()
    graph = sc.analyze(model, torch.randn(1, 3, 224, 224))
    assert checked[-1] is graph


def test_layers_where_a_size_is_written_into_the_forward(checked: list[Graph]) -> None:
    class Written(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x).relu()
            assert x.shape[1] == 8
            result: torch.Tensor = self.c(self.b(x).relu())
            return result

    graph = sc.analyze(Written(), torch.randn(2, 4))
    assert len(checked) == 2  # the second without the layer that broke
    assert [layer.name for layer in graph.layers if layer.prunable] == ["b"]


def test_units_of_an_empty_tensor_stay() -> None:
    """As of the boxes of a detector that finds none: whatever would keep them keeps them."""
    found = Findings(AxisTable(), lambda: "here")
    layer = torch.arange(1, 7).view(1, 6).expand(0, 6)
    found.freeze(layer, "read as a number")
    found.grid(layer, "cut at fixed places")
    assert [labels.tolist() for labels, _ in found.frozen] == [[1, 2, 3, 4, 5, 6]] * 2
    assert found.frozen[1][1] == "cut at fixed places, and the example makes none of it"
    assert not found.grids


def test_a_cut_that_takes_no_unit_keeps_none() -> None:
    """As of rotary embeddings that turn a whole head: what is left to pass by is empty, and belongs to nobody."""
    found = Findings(AxisTable(), lambda: "here")
    layer = torch.arange(1, 7).view(1, 6).expand(3, 6)[:, 6:]
    found.freeze(layer, "read as a number")
    found.grid(layer, "cut at fixed places")
    assert not found.frozen
    assert not found.grids
