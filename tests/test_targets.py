"""What is asked for: shares with rounding, layers by name, scores that belong to the graph, and plain mistakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from secateur.errors import NothingToPruneError, PlanError, SecateurError, TargetError, UnsupportedModelError
from secateur.loop import Schedule
from secateur.plans import Limits, Target
from secateur.plans.plan import plan_for
from secateur.plans.ranking import _Chooser
from secateur.plans.scores import Scores


def chain(*widths: int) -> nn.Sequential:
    """Convolutions in a row: nothing is coupled, so that a unit is a group."""
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 4)).eval()


def graph_of(net: nn.Module) -> sc.Graph:
    return sc.analyze(net, torch.zeros(1, 3, 8, 8))


def scores_of(graph: sc.Graph, seed: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    return Scores("drawn", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})


X, Y = torch.rand(8, 3, 8, 8), torch.arange(8) % 4


@settings(deadline=None, max_examples=40)
@given(
    widths=st.lists(st.integers(2, 6).map(lambda n: 8 * n), min_size=1, max_size=4),
    remove=st.floats(0.05, 0.95),
    scope=st.sampled_from(["global", "layer", "cost"]),
    seed=st.integers(0, 99),
)
def test_rounding_never_takes_more_and_comes_as_close_as_one_block(
    widths: list[int], remove: float, scope: Any, seed: int
) -> None:
    graph = graph_of(chain(*widths))
    total = sum(widths)
    try:
        found = sc.plan(graph, scores_of(graph, seed), remove=remove, limits=Limits(scope=scope, round_to=8))
    except NothingToPruneError:
        assert remove * total < 8 * len(widths) + len(widths)  # less than a block of each layer
        return
    except TargetError:
        assert remove * total > total - len(widths)  # one unit of each layer stays
        return
    gone = total - found.units[1]
    assert 0 < gone <= remove * total + 1e-9
    assert all(has % 8 == 0 for _, has in found.layers.values())
    # Were there room for a block of every layer, at least one more would have gone, unless all are down to one block.
    assert remove * total - gone < 8 * len(widths) + len(widths) or all(has == 8 for _, has in found.layers.values())


def test_what_rounding_brings_back_makes_room_for_others() -> None:
    graph = graph_of(chain(16, 32, 32))
    found = sc.plan(graph, scores_of(graph), remove=0.3, limits=Limits(round_to=8))
    assert found.units == (80, 56)  # 24 of 80, in blocks of 8


def test_a_share_that_rounding_undoes_is_refused() -> None:
    net = chain(16, 32, 32)
    graph = graph_of(net)
    with pytest.raises(NothingToPruneError, match="round_to=64"):
        sc.plan(graph, scores_of(graph), remove=0.3, limits=Limits(round_to=64))
    with pytest.raises(NothingToPruneError, match="round_to=64"):
        sc.prune(net, (X, Y), remove=0.3, limits=Limits(round_to=64), progress=False)


def test_a_run_says_how_far_rounding_let_it_go() -> None:
    coarse = sc.prune(
        chain(16, 32, 32), (X, Y), "weight", remove=0.5, limits=Limits(round_to=16), progress=False, repair=None
    )
    share = 100 * (1 - coarse.plan.units[1] / 80) if coarse.plan is not None else 0.0
    assert share < 50
    assert coarse.stopped == f"{share:.0f} % of the units are gone instead of 50 %, since widths are multiples of 16"
    exact = sc.prune(chain(16, 32, 32), (X, Y), "weight", remove=0.5, progress=False, repair=None)
    assert exact.stopped == "the target is met"


@pytest.mark.parametrize("ignore", ["0", ["0"], ("0", "2")])
def test_ignored_layers_keep_their_units(ignore: Any) -> None:
    result = sc.prune(chain(16, 32, 32), (X, Y), "weight", remove=0.3, limits=Limits(ignore=ignore), progress=False)
    assert result.plan is not None
    names = [ignore] if isinstance(ignore, str) else list(ignore)
    assert all(result.plan.layers[name][0] == result.plan.layers[name][1] for name in names)
    assert result.plan.units[1] < 80


def test_the_name_of_a_module_stands_for_what_is_in_it() -> None:
    graph = graph_of(nn.Sequential(chain(16, 8)[:4], nn.Sequential(nn.Conv2d(8, 8, 3), *chain(8)[1:])).eval())
    kept = sc.plan(graph, scores_of(graph), remove=0.2, limits=Limits(ignore="0"))
    assert {name for name, (had, has) in kept.layers.items() if has < had} == {"1.0"}
    only = sc.plan(graph, scores_of(graph), remove=0.2, limits=Limits(only="0"))
    assert all(name.startswith("0.") for name, (had, has) in only.layers.items() if has < had)


class Stream(nn.Module):
    """Two modules write the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = (
            nn.Linear(4, 8),
            nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)),
            nn.Linear(8, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x + self.block(x))


def test_only_takes_a_stream_if_all_modules_that_write_it_lie_within() -> None:
    graph = sc.analyze(Stream(), torch.zeros(1, 4))
    scores = sc.score(Stream(), None, "weight", graph=graph)
    for only, expected in (("block", {"block.0"}), (["block", "stem"], {"block.0", "stem"})):
        plan = sc.plan(graph, scores, remove=0.3, limits=Limits(only=only, scope="layer"))
        assert {name for name, (had, has) in plan.layers.items() if has < had} == expected


@pytest.mark.parametrize("option", ["ignore", "only"])
def test_a_name_that_no_layer_has_is_refused(option: str) -> None:
    graph = graph_of(chain(16, 32))
    with pytest.raises(TargetError, match=rf"{option}='feature.4' fits no layer of Sequential"):
        sc.plan(graph, scores_of(graph), remove=0.3, limits=Limits(**{option: ["feature.4"]}))
    with pytest.raises(TargetError, match="fits no layer"):
        sc.prune(chain(16, 32), (X, Y), remove=0.3, limits=Limits(ignore=["0", "layer4.*"]), progress=False)


def test_scores_of_another_model_are_refused() -> None:
    one, other = graph_of(chain(16)), graph_of(chain(16, 32))
    with pytest.raises(PlanError, match="another model"):
        sc.plan(one, scores_of(other), remove=0.3)
    with pytest.raises(PlanError, match="another model"):
        sc.plan(graph_of(chain(8)), scores_of(one), remove=0.3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"keep": 0.5}, r"keep=0.5 does not say of what"),
        ({"keep": {"macs": "half"}}, r"must be a number, not str"),
        ({"remove": "0.3"}, r"remove='0.3' must be a number"),
        ({"remove": 0.3, "limits": Limits(min_units=100)}, r"min_units=100"),
    ],
)
def test_plain_mistakes_are_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SecateurError, match=said):
        sc.prune(chain(16, 32), (X, Y), progress=False, **asked)


def test_what_is_no_model_is_refused() -> None:
    net = chain(16)
    for wrong, said in (
        (lambda: net, "call it first"),
        (net.state_dict(), "build the network"),
        (torch.jit.trace(net, X[:1]), "TorchScript"),
        (nn.Sequential(nn.Linear(4, 8, device="meta"), nn.Linear(8, 2, device="meta")), "meta device"),
    ):
        with pytest.raises(UnsupportedModelError, match=said):
            sc.prune(wrong, (X, Y), remove=0.3, progress=False)  # type: ignore[arg-type]


def test_settings_print_what_was_given() -> None:
    assert repr(Limits()) == "Limits()"
    assert repr(Limits("layer", ignore="head", round_to=8)) == "Limits(scope='layer', ignore=('head',), round_to=8)"
    assert repr(Schedule(0.1, rescore=False)) == "Schedule(step=0.1, rescore=False)"
    assert repr(Target(keep={"macs": 0.5})) == "Target(keep={'macs': 0.5})"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Limits("everywhere"), "scope='everywhere' is not known"),
        (lambda: Limits(round_to=0), "round_to=0 must be at least 1"),
        (lambda: Schedule(30), "step=30 must lie strictly between 0 and 1.*Fix: step=0.3 for 30 per cent"),
        (lambda: Schedule(one_shot=True, parts={"a": ["0"], "b": ["2"]}), "parts take turns"),
        (lambda: Target(keep={"flops": 0.5}), "'flops': 0.5.* is not known"),
        (lambda: Target(keep={"latency": 2}), "share of what is measured"),
        (lambda: Target(keep={"latency": 0.5, "macs": 0.5}), "approached alone"),
        (lambda: Target(max_drop="a little"), "must be a number"),
        (lambda: sc.plan(graph_of(chain(16)), scores_of(graph_of(chain(16))), keep={"latency": 0.5}), "needs a table"),
        (lambda: Limits(scope="time"), "was an estimate, and is gone"),
    ],
)
def test_settings_check_themselves(make: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        make()


def _in_pairs(x: Any) -> Any:
    return x.view(-1, 2, 5)


class Rigid(nn.Module):
    """A branch whose inner layer must stay, since a function that its forward calls has the size of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(_in_pairs(torch.relu(self.up(x))).flatten(1))


def test_units_that_only_leave_with_their_block_do_not_count() -> None:
    net = nn.Sequential(nn.Linear(4, 6), Rigid(), Rigid(), nn.Linear(6, 3))
    graph = sc.analyze(net, torch.randn(5, 4))
    assert [layer.name for layer in graph.layers if layer.prunable] == ["0"]
    removed = np.zeros(len(graph.root), np.bool_)
    removed[next(iter(graph.blocks)).group] = True
    start = plan_for(graph, removed)
    assert start.units == (18, 18)
    scores = sc.score(net, None, "weight", graph=graph)
    found = sc.plan(graph, scores, remove=0.5, start=start)
    assert found.units == (18, 9)


def test_rounding_goes_on_until_nothing_changes() -> None:
    """Each width shares a group with the next: what one brings back, the one before it must make up for."""
    widths = [(np.array([i, i + 1]), 2) for i in reversed(range(20))]
    removed = np.ones(21, np.bool_)
    removed[0] = False
    _Chooser._round(SimpleNamespace(widths=widths, gone=np.zeros(21, np.bool_), value=np.ones(21)), removed)  # type: ignore[arg-type]
    assert not removed.any()


class TwoBranches(nn.Module):
    """Two equal convolutions beside each other, and attention with two heads behind them."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1)
        self.from_a, self.from_b, self.qkv = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(4, 12, 1)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.qkv(self.from_a(self.a(x).relu()) + self.from_b(self.b(x).relu()))
        q, k, v = x.flatten(2).unflatten(1, (3, 2, 2)).mT.unbind(1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v) if self.attends else q + k + v
        return self.last(mixed.mT.flatten(1, 2).mean(2))


@pytest.mark.parametrize("attends", [False, True])
def test_filters_become_dearer_as_they_leave_whether_a_model_attends_or_not(attends: bool) -> None:
    """One filter of each layer stays. Of 15 others each, those of `a` have half the score, so that half as many stay:
    r · log a + log b is largest at a = r · b. The scores alone would empty `a`."""
    graph = sc.analyze(TwoBranches(attends).eval(), torch.rand(1, 3, 2, 2))
    assert bool(graph.heads) == attends
    units = {p.sites[0]: np.full(len(p.labels), 0.5 if p.sites[0].path == "a" else 1.0) for p in graph.producers}
    saved = 4 * (3 + 4)  # at four positions: what a filter reads, and what reads it
    goal, limits = graph.cost.macs - 9 * saved, Limits(scope="cost", only=("a", "b"))
    plan = sc.plan(graph, Scores("given", units), keep={"macs": goal}, limits=limits)
    assert {name: plan.layers[name] for name in ("a", "b")} == {"a": (16, 8), "b": (16, 15)}


@pytest.mark.parametrize("target", [{"remove": 0.3}, {"keep": {"params": 0.7}}])
@pytest.mark.parametrize("attention", [True, False])
def test_wide_layers_of_models_with_attention_keep_multiples_of_eight(attention: bool, target: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 515, batch_first=True)
    mlp = nn.Sequential(nn.Linear(16, 515), nn.ReLU(), nn.Linear(515, 16))
    model = nn.Sequential(layer if attention else mlp, nn.Flatten(), nn.Linear(64, 3)).eval()
    graph = sc.analyze(model, torch.randn(2, 4, 16))
    rng = np.random.default_rng(0)
    scores = sc.Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})
    plan = sc.plan(graph, scores, **target)
    small = sc.apply(model, plan)
    left = small[0].linear1.out_features if attention else small[0][0].out_features
    assert left < 515
    assert (left % 8 == 0) == attention
    if "keep" in target:
        assert 0.68 < plan.after.params / plan.before.params <= 0.7
    # Rounding can be switched off: one unit more or less than a multiple of eight is then as good as any.
    widths = {
        sc.apply(model, sc.plan(graph, scores, remove=remove, limits=Limits(round_to=1)))
        .get_parameter("0.linear1.weight" if attention else "0.0.weight")
        .shape[0]
        for remove in (0.3, 0.31)
    }
    assert any(width % 8 for width in widths)


def test_only_one_of_two_coupled_layers_is_told_of_the_other() -> None:
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.c(x + self.b(x).relu())

    data = (torch.rand(6, 4), torch.arange(6) % 3)
    for asked in ({"remove": 0.3}, {"keep": {"macs": 0.5}}):
        with pytest.raises(NothingToPruneError, match="units of a leave together with those of b, which no pattern"):
            sc.prune(Coupled(), data, "weight", **asked, limits=Limits(only="a"), repair=None, progress=False)
