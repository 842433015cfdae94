"""Residual branches as units: found without knowing a class, removed physically, equal to a branch that is zeroed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import secateur as sc
from secateur.errors import NothingToPruneError
from secateur.plans import Limits
from secateur.plans.plan import Plan, plan_for
from secateur.structure.cost import count_macs
from secateur.structure.graph import Graph


class Basic(nn.Module):
    """A block of a ResNet, which ends in a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Bare(Basic):
    """The same without a ReLU at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


class Scaled(nn.Module):
    """A branch in a module of its own, with a learnt scale, as ConvNeXt has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
        self.gamma = nn.Parameter(torch.rand(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * self.body(x) + x


class Down(nn.Module):
    """A block whose shortcut has a layer: it stays."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(width, width, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


KINDS: dict[str, Callable[[int], nn.Module]] = {"basic": Basic, "bare": Bare, "scaled": Scaled, "down": Down}


class Chain(nn.Module):
    def __init__(self, kinds: list[str], width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(KINDS[kind](width) for kind in kinds))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Layer(nn.Module):
    """A layer of a transformer with two branches."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        mixed, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + self.dropout(mixed)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    net = make().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return net


def marked(graph: Graph, names: list[str] | None = None) -> Any:
    removed = np.zeros(len(graph.root), np.bool_)
    for block in graph.blocks.prunable:
        removed[block.group] |= names is None or block.name in names
    return removed


def silenced(net: nn.Module, paths: list[str], x: Any) -> Any:
    """The original, in which hooks make the last module of each branch return 0: the oracle."""
    net = copy.deepcopy(net)

    def zero(module: nn.Module, args: Any, output: Any) -> Any:
        return torch.zeros_like(output) if isinstance(output, Tensor) else (torch.zeros_like(output[0]), *output[1:])

    for path in paths:
        net.get_submodule(path).register_forward_hook(zero)
    with torch.no_grad():
        return net(x)


IMAGE, TOKENS = torch.rand(2, 3, 8, 8), torch.rand(2, 6, 5)
ENDS = {"basic": "bn2", "bare": "bn2", "scaled": "body"}


def test_branches_are_found_by_where_numbers_go() -> None:
    graph = sc.analyze(seeded(lambda: Chain(["basic", "down", "bare", "scaled"])), IMAGE)
    assert [block.name for block in graph.blocks] == ["blocks.0", "blocks.2", "blocks.3"]
    assert all(block.prunable for block in graph.blocks)
    text = str(graph)
    assert "3 of 3 blocks" in text
    assert "blocks.2" in text


def test_a_layer_with_two_branches_has_two_blocks_and_can_become_nothing() -> None:
    net = seeded(Transformer)
    graph = sc.analyze(net, TOKENS)
    assert [block.name for block in graph.blocks][:2] == ["layers.0.attention", "layers.0.mlp"]
    small = sc.apply(net, plan_for(graph, marked(graph, ["layers.1.attention", "layers.1.mlp", "layers.2.mlp"])))
    assert not list(small.layers[1].parameters())
    assert not list(small.layers[1].modules())[1:]
    assert list(small.layers[2].attention.parameters())
    paths = ["layers.1.attention", "layers.1.mlp", "layers.2.mlp"]
    assert torch.allclose(small(TOKENS), silenced(net, paths, TOKENS), atol=1e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_removal_is_the_zeroed_branch(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4))
    net = seeded(lambda: Chain(kinds))
    graph = sc.analyze(net, IMAGE)
    names = data.draw(st.lists(st.sampled_from([b.name for b in graph.blocks] or [""]), unique=True))
    if not graph.blocks.prunable or not names or names == [""]:
        return
    removed = marked(graph, names)
    inner = data.draw(st.lists(st.sampled_from(sorted(graph.candidates.tolist())), max_size=4, unique=True))
    plan = plan_for(graph, removed)
    small = sc.apply(net, plan)
    ends = [f"{name}.{ENDS[kinds[int(name.split('.')[1])]]}" for name in names]
    assert torch.allclose(small(IMAGE), silenced(net, ends, IMAGE), atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    assert count_macs(small, IMAGE) == plan.after.macs
    assert Plan.from_json(plan.to_json()) == plan
    # Filters beside blocks: rule zero holds for both together.
    kept = graph.blocks.closed(removed)
    for axis in graph.axes.axes:
        groups = set(graph.root[axis.span].tolist())
        if groups <= {*inner, *np.flatnonzero(kept)}:
            return
    removed[inner] = True
    both = plan_for(graph, removed)
    small = sc.apply(net, both)
    assert sum(p.numel() for p in small.parameters()) == both.after.params
    with torch.no_grad():
        assert torch.allclose(small(IMAGE), sc.apply(net, both, how="mask")(IMAGE), atol=1e-5)


class Odd(nn.Module):
    """Branches that cannot be taken out: without its layer the first is not 0, the second has no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Parameter(torch.rand(4, 4)), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sigmoid(self.first(x))
        x = x + F.linear(self.norm(x), self.second)
        return self.head(x)


def test_what_cannot_be_taken_out_stays_with_the_reason() -> None:
    graph = sc.analyze(Odd(), torch.rand(2, 4))
    reasons = [block.reason or "" for block in graph.blocks]
    assert "not 0" in reasons[0]
    assert "of no module" in reasons[1]
    with pytest.raises(NothingToPruneError):
        sc.plan(graph, sc.score(Odd(), None, "weight", graph=graph), remove=0.5, limits=Limits(blocks="only"))
