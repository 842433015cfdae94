"""Residual branches as units: found without knowing a class, removed physically, equal to a branch that is zeroed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import secateur as sc
from oracle import silenced
from secateur.criteria import LRP
from secateur.errors import NothingToPruneError, PlanError
from secateur.plans import Limits
from secateur.plans.plan import Plan, plan_for
from secateur.relevance import Epsilon
from secateur.repair import Repair
from secateur.structure.cost import count_macs
from secateur.structure.graph import Graph
from secateur.surgery.optimizer import carry
from secateur.surgery.provenance import plans_of


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


class Branching(nn.Module):
    """What a layer returns goes through a function before it is added."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.function(self.layer(x), x))


def written(y: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[:, :2] = y[:, :2]
    out[x > 9] = 7
    return out


def written_by_view(y: Tensor, x: Tensor) -> Tensor:
    line = y.view(-1)
    line[:2].add_((x > 9).float().flatten()[:2])
    return line.view_as(x)


# On the example, whose numbers are small, each of them returns 0 if the layer does.
ZERO_ON_THE_EXAMPLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where": lambda y, x: torch.where(x < 9, y, x),
    "where, turned round": lambda y, x: torch.where(x > 9, x, y),
    "minimum": lambda y, x: torch.minimum(y, 9 - x),
    "maximum": lambda y, x: torch.maximum(y, x - 9),
    "a bound": lambda y, x: y.clamp(max=9 - x),
    "written": written,
    "written by a view": written_by_view,
    "interpolated": lambda y, x: torch.lerp(x, y, (x < 9).float()),
    "minimum of whole numbers": lambda y, x: torch.minimum(y, (9 - x).long()),
}


@pytest.mark.parametrize("name", ZERO_ON_THE_EXAMPLE)
def test_a_branch_that_is_zero_for_some_numbers_only_stays(name: str) -> None:
    net = seeded(lambda: Branching(ZERO_ON_THE_EXAMPLE[name]))
    (block,) = sc.analyze(net, torch.rand(2, 4)).blocks
    assert "not 0" in (block.reason or "")


def parts(y: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[:, 1:] = y[:, :-1]
    return out.mul_(x)


ZERO_ALWAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "parts": parts,
    "mask": lambda y, x: torch.where(x > 0, y, torch.zeros_like(y)),
    "masked": lambda y, x: y.masked_fill(x > 0, 0.0),
    "in place": lambda y, x: y.mul_(x.sigmoid()).tanh_(),
    "chosen": lambda y, x: y * (y < x),
    "shared among a count": lambda y, x: y / ((x > 0).sum(1, keepdim=True) + 1),
    "in another order": lambda y, x: y.gather(1, x.argsort(1)),
}


@pytest.mark.parametrize("name", ZERO_ALWAYS)
def test_a_branch_that_is_zero_for_all_numbers_leaves(name: str) -> None:
    net, x = seeded(lambda: Branching(ZERO_ALWAYS[name])), 20 * torch.randn(9, 4)
    graph = sc.analyze(net, torch.rand(2, 4))
    small = sc.apply(net, plan_for(graph, marked(graph, [block.name for block in graph.blocks])))
    with torch.no_grad():
        assert torch.allclose(small(x), net.head(net.stem(x)), atol=1e-5)


# -- scores ------------------------------------------------------------------------------------------------------------
def sums(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What the last convolution of each block returns, and the gradient of the summed losses there."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: (seen.__setitem__(name, output), output.retain_grad())[1]

    net = copy.deepcopy(net)
    for i, end in enumerate(("conv2", "conv2", "body.2")):
        net.get_submodule(f"blocks.{i}.{end}").register_forward_hook(keep(f"blocks.{i}"))
    F.cross_entropy(net(x), y).backward()
    return {name: (output.detach(), output.grad) for name, output in seen.items()}  # type: ignore[misc]


def test_the_score_of_a_block_is_what_its_last_layer_scores() -> None:
    net = seeded(lambda: Chain(["basic", "bare", "scaled"]))
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6) % 3
    graph = sc.analyze(net, x[:1])
    found = sc.score(net, (x, y), ["taylor", "activation", "weight", "lrp", "random"], graph=graph)
    for name, (z, g) in sums(net, x, y).items():
        layer = net.get_submodule(f"{name}.{'body.2' if name == 'blocks.2' else 'conv2'}")
        expected = {
            "taylor": (z * g).sum(0).mean((1, 2)).abs().sum() / len(x),
            "activation": z.abs().mean((0, 2, 3)).sum(),
            "weight": layer.weight.abs().sum(),
        }
        for criterion, value in expected.items():
            assert found[criterion].blocks[name] == pytest.approx(float(value.detach()), rel=1e-4), criterion
    assert all(set(scores.blocks) == {"blocks.0", "blocks.1", "blocks.2"} for scores in found.values())


def test_relevance_of_a_block_is_what_passes_through_its_branch() -> None:
    """Without biases, epsilon-LRP shares the relevance of x + b in proportion to x and b: by gradient times input."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.body(x))

    net, x, y = Net().double(), torch.rand(5, 4).double(), torch.arange(5) % 3
    branch = net.body(x)
    relevance = (branch * net.head.weight[y]).sum(1) / net(x).gather(1, y[:, None])[:, 0]
    scores = sc.score(net, (x, y), LRP(composite=Epsilon(), start="one"))
    assert scores.blocks["body"] == pytest.approx(float(relevance.detach().sum()), rel=1e-4)


def test_a_block_is_worth_its_score_for_what_it_costs() -> None:
    net = seeded(lambda: Chain(["basic", "bare", "scaled"]))
    graph = sc.analyze(net, IMAGE)
    scores = sc.score(net, None, "weight", graph=graph)
    saved = {
        block.name: graph.cost_of.prices["macs"].savings(np.zeros(len(graph.root), np.bool_))[block.group]
        for block in graph.blocks
    }
    macs = {block.name: 2 * 8 * 8 * sum(p.numel() for n, p in net.get_submodule(block.name).named_parameters()
                                        if n.endswith("weight") and p.ndim == 4) for block in graph.blocks}  # fmt: skip
    assert saved == macs
    wanted = sorted(saved, key=lambda name: scores.blocks[name] / saved[name])
    for count in (1, 2, 3):
        left = graph.cost.macs - sum(saved[name] for name in wanted[:count])
        chosen = sc.plan(graph, scores, keep={"macs": left}, limits=Limits("cost", blocks="only"))
        assert {block.name for block in chosen.blocks} == set(wanted[:count])


# -- the loop ----------------------------------------------------------------------------------------------------------
X, Y = torch.rand(24, 3, 8, 8), torch.arange(24) % 3


@pytest.mark.parametrize("criterion", ["lrp", "taylor", "weight", "activation", "random"])
@pytest.mark.parametrize("scope", ["cost", "global", "layer"])
def test_every_criterion_and_scope_can_take_blocks(criterion: str, scope: Any) -> None:
    net = seeded(lambda: Chain(["basic", "scaled", "bare"]))
    limits = Limits(scope, blocks="only")
    result = sc.prune(net, (X, Y), criterion, keep={"macs": 0.5}, limits=limits, repair=None, progress=False)
    assert result.plan is not None
    assert result.plan.blocks
    assert result.cost_after.macs <= 0.5 * result.cost_before.macs
    assert result.settings["blocks"] == "only"
    assert sum(p.numel() for p in result.model.parameters()) == result.cost_after.params


def test_ignored_layers_keep_their_block_and_only_names_blocks() -> None:
    net = seeded(lambda: Chain(["basic", "scaled", "bare"]))
    graph = sc.analyze(net, IMAGE)
    scores = sc.score(net, None, "weight", graph=graph)

    def chosen(**limits: Any) -> set[str]:
        plan = sc.plan(graph, scores, remove=0.25, limits=Limits("cost", blocks="only", **limits))
        return {block.name for block in plan.blocks}

    assert "blocks.0" not in chosen(ignore="blocks.0.conv2")
    assert chosen(only="blocks.1") == {"blocks.1"}


def test_steps_resume_with_blocks(tmp_path: Any) -> None:
    net = seeded(lambda: Chain(["basic", "scaled", "bare"]))

    def run(path: Any, stop: int | None = None) -> Any:
        calls = 0

        def evaluate(model: nn.Module) -> float:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise KeyboardInterrupt
            return 1.0

        limits = Limits("global", blocks=True)
        return sc.prune(net, (X, Y), "lrp", remove=0.7, schedule=0.1, limits=limits, evaluate=evaluate,
                        checkpoint=path, progress=False)  # fmt: skip

    whole = run(tmp_path / "whole")
    assert whole.plan.blocks
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop=len(whole.history) - 1)
    again = run(tmp_path / "cut")
    assert again.plan == whole.plan
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_repair_makes_up_for_a_block() -> None:
    """The layer after the gap is fitted to what it returned before."""
    net = seeded(lambda: Chain(["basic", "bare", "bare"], width=8))
    graph = sc.analyze(net, X[:1])
    plan = plan_for(graph, marked(graph, ["blocks.1"]))
    small = sc.apply(net, plan)
    fixed = Repair("ridge")(small, net, (X, Y))
    with torch.no_grad():
        wanted, before, after = net(X), small(X), fixed(X)
    assert (after - wanted).square().mean() < 0.5 * (before - wanted).square().mean()


class Straight(nn.Module):
    """Branches without nonlinearity: the second can do the work of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Bend(), Bend(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Bend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def test_the_next_block_does_the_work_of_the_one_that_left() -> None:
    """x + Bx + b can be (1 + B)(1 + A)x: the layer is fitted to what the stream lacks, not to the stream itself."""
    net, x = seeded(Straight), torch.randn(200, 6)
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, plan_for(graph, marked(graph, ["first"])))
    outcome = Repair("ridge").examine(small, net, (x, torch.arange(200) % 3))
    with torch.no_grad():
        wanted = net.second(net.first(x))
        before, after = ((model.second(x) - wanted).square().mean() for model in (small, outcome.model))
    assert after < 1e-3 * before


def test_an_optimizer_forgets_what_left() -> None:
    net = seeded(lambda: Chain(["basic", "bare"]))
    optimizer = torch.optim.Adam(net.parameters())
    F.cross_entropy(net(X), Y).backward()
    optimizer.step()
    graph = sc.analyze(net, X[:1])
    plan = plan_for(graph, marked(graph, ["blocks.1"]))
    small = sc.apply(net, plan)
    carry(optimizer, net, small, plan)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in small.parameters()}
    assert len(optimizer.state) == len(list(small.parameters()))
    F.cross_entropy(small(X), Y).backward()
    optimizer.step()


# -- afterwards --------------------------------------------------------------------------------------------------------
def smaller() -> list[tuple[nn.Module, nn.Module, Tensor]]:
    found = []
    for net, x, names in (
        (seeded(lambda: Chain(["basic", "bare", "basic"])), IMAGE, ["blocks.0", "blocks.2"]),
        (seeded(Transformer), TOKENS, ["layers.0.attention", "layers.1.mlp", "layers.2.mlp", "layers.2.attention"]),
    ):
        graph = sc.analyze(net, x)
        assert set(names) <= {block.name for block in graph.blocks}
        found.append((net, sc.apply(net, plan_for(graph, marked(graph, names))), x))
    return found


def test_what_is_left_is_copied_exported_compiled_and_analysed_again() -> None:
    for _, small, x in smaller():
        with torch.no_grad():
            wanted = small(x)
            assert torch.equal(copy.deepcopy(small)(x), wanted)
            exported = torch.export.export(small, (x,), strict=False)
            assert torch.allclose(exported.module()(x), wanted, atol=1e-6)
            compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
            assert torch.allclose(compiled(x), wanted, atol=1e-6)
        graph = sc.analyze(small, x)
        scores = sc.score(small, (x, torch.tensor([0, 1])), "lrp", graph=graph)
        again = sc.apply(small, sc.plan(graph, scores, remove=0.3))
        assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in small.parameters())
        small.train()
        small(x).sum().backward()


def test_saved_models_are_loaded_with_their_gaps(tmp_path: Any) -> None:
    for i, (net, small, x) in enumerate(smaller()):
        sc.save(small, tmp_path / str(i))
        fresh = copy.deepcopy(net)
        for parameter in fresh.parameters():
            nn.init.constant_(parameter, 0.1)
        assert torch.equal(sc.load(tmp_path / str(i), fresh).eval()(x), small(x))


def test_a_plan_that_replaces_what_is_not_there_is_refused() -> None:
    small = smaller()[0][1]
    with pytest.raises(PlanError, match="does not have"):
        sc.apply(nn.Sequential(nn.Linear(3, 3)), replace(plans_of(small)[0], cuts={}, shapes={}))


class Nested(nn.Module):
    """A residual branch with residual branches inside, and one whose layer serves another as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 1), nn.Sequential(Bare(4), Scaled(4), nn.Conv2d(4, 4, 1))
        self.shared, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x)
        x = x + self.shared(x)
        x = x + self.shared(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("names", [["body.0"], ["body"], ["body", "body.1"]])
def test_blocks_in_blocks_and_layers_that_serve_twice(names: list[str]) -> None:
    net = seeded(Nested)
    graph = sc.analyze(net, IMAGE)
    assert [block.name for block in graph.blocks.prunable] == ["body.0", "body.1", "body"]
    assert sum("of no module" in (block.reason or "") for block in graph.blocks) == 2
    plan = plan_for(graph, marked(graph, names))
    small = sc.apply(net, plan)
    assert [block.name for block in plan.blocks] == names[:1]
    assert sum(p.numel() for p in small.parameters()) == plan.after.params
    assert count_macs(small, IMAGE) == plan.after.macs
    assert torch.allclose(
        small(IMAGE), silenced(net, ["body.0.bn2" if names == ["body.0"] else "body"], IMAGE), atol=1e-6
    )


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("tie", ["weight", "layer"])
def test_a_block_whose_weights_others_use_by_its_name_stays(tie: str) -> None:
    """The smaller model would share memory with the user's, and later plans would not find the weight."""
    net = nn.Sequential(nn.Linear(4, 6), Step(), Step(), Step(), nn.Linear(6, 3))
    if tie == "weight":
        net[2].up.weight = net[1].up.weight
    else:
        net[2].up = net[1].up
    x = torch.randn(5, 4)
    graph = sc.analyze(net, x)
    assert {block.name: block.reason for block in graph.blocks} == {
        "1": f"a module outside it shares `1.up.{'weight' if tie == 'weight' else 'bias'}`",
        "2": None,
        "3": None,
    }
    removed = np.zeros(len(graph.root), np.bool_)
    removed[[block.group for block in graph.blocks.prunable]] = True
    plan = plan_for(graph, removed)
    small, own = sc.apply(net, plan), {p.data_ptr() for p in net.parameters()}
    assert not any(p.data_ptr() in own for p in small.parameters())
    assert plan.after.params == sum(p.numel() for p in small.parameters())
    assert torch.equal(small(x), net[4](net[1](net[0](x))))
