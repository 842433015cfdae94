"""Criteria against their formulas, written out slowly on nets small enough to follow by hand."""

from __future__ import annotations

import copy
import math
import re
from collections import namedtuple
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from secateur.analysis.analyze import analyze
from secateur.criteria import LRP, Activation, Captum, Custom, Gradient, Random, Taylor, Weight, register_criterion
from secateur.criteria.registry import _KNOWN, criterion_named
from secateur.criteria.scoring import score
from secateur.errors import CriterionError, DataError, ForwardError, NotFiniteError, PlanError, SecateurWarning
from secateur.loop.prune import prune
from secateur.plans.ranking import plan
from secateur.recover import Recover
from secateur.surgery.apply import apply


def by_path(scores) -> dict[str, np.ndarray]:
    return {site.path: values for site, values in scores.units.items()}


def hand_net() -> nn.Sequential:
    """Two inputs, three hidden neurons, two outputs, all numbers whole."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
        net[0].bias.zero_()
        net[2].weight.copy_(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 3.0]]))
        net[2].bias.zero_()
    return net


# x = (1, 1): z = (1, 2, 0), a = z, logits = (3, 2). True class 0: p = e/(1+e) for class 0.
HAND = (torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
Q = 1 / (1 + math.e)  # probability of the wrong class; dL/dlogits = (-Q, Q)


def test_weight_by_hand() -> None:
    graph = analyze(hand_net(), HAND[0])
    found = by_path(score(hand_net(), None, Weight(norm=None), graph=graph))
    np.testing.assert_allclose(found["0"], [1, 2, 2])
    found = by_path(score(hand_net(), None, "weight", graph=graph))
    np.testing.assert_allclose(found["0"], np.array([1, 2, 2]) / 3)
    found = by_path(score(hand_net(), None, Weight(norm=1), graph=graph))
    np.testing.assert_allclose(found["0"], np.array([1, 2, 2]) / 5)


def test_gradient_and_taylor_by_hand() -> None:
    # dL/da = W2^T (-Q, Q) = (-Q, 0, 3Q); the third neuron is at 0, where ReLU has gradient 0.
    found = score(hand_net(), HAND, [Gradient(norm=None), Taylor(norm=None)])
    np.testing.assert_allclose(by_path(found["gradient"])["0"], [Q, 0, 0], atol=1e-7)
    np.testing.assert_allclose(by_path(found["taylor"])["0"], [Q, 0, 0], atol=1e-7)
    np.testing.assert_allclose(by_path(found["taylor"])["2"], [3 * Q, 2 * Q], atol=1e-7)
    np.testing.assert_allclose(by_path(score(hand_net(), HAND, "gradient"))["0"], [1, 0, 0], atol=1e-6)


def test_lrp_by_hand() -> None:
    # Output 0 = 1·a0 + 1·a1 = 1 + 2: the shares of R = 1 are 1/3 and 2/3.
    found = by_path(score(hand_net(), HAND, "lrp"))
    np.testing.assert_allclose(found["0"], [1 / 3, 2 / 3, 0], atol=1e-6)
    np.testing.assert_allclose(found["2"], [1, 0], atol=1e-6)


def test_activation_by_hand() -> None:
    found = by_path(score(hand_net(), (torch.tensor([[1.0, 1.0], [-2.0, 0.0]]), None), Activation(norm=None)))
    np.testing.assert_allclose(found["0"], [1.5, 1, 1])  # |z| = (1, 2, 0) and (2, 0, 2)


class Small(nn.Module):
    """Convs with batch norm, an in-place activation that is no ReLU, a reused layer, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.act = nn.SiLU(inplace=True)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.a(x)))
        x = x + self.act(self.b(x))
        x = x + self.act(self.b(x))
        return self.fc(x.mean((2, 3)))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    net = Small()
    net.bn.running_mean.uniform_(-0.2, 0.2)
    net.bn.running_var.uniform_(0.5, 1.5)
    return net.eval()


class Stepwise(nn.Module):
    """Layers for each token: how often they are called depends on the text, and so which call is the last one."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.inp, v = nn.Linear(3, 5), torch.randn(5, 5) / 2
        w, self.head, self.fused = torch.randn(5, 5), nn.Linear(5, 4), fused
        if fused:
            self.both = nn.Parameter(torch.cat([v, w]))
        else:
            self.v, self.w = nn.Parameter(v), nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x)[-1])

    def hidden(self, x: Tensor) -> list[Tensor]:
        """What the input layer returns at each token, what `v` does, and what `w` does at the end."""
        given, states, h = [], [], x.new_zeros(len(x), 5)
        v, w = (self.both[:5], self.both[5:]) if self.fused else (self.v, self.w)
        for step in x.unbind(1):
            given.append(self.inp(step))
            states.append(F.linear(h, v))
            h = (given[-1] + states[-1]).tanh()
        return [*given, *states, F.linear(h, w)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("length", [2, 4, 7])
def test_calls_beyond_those_on_the_example_count(length: int, fused: bool) -> None:
    torch.manual_seed(0)
    net, x, y = Stepwise(fused), torch.randn(6, length, 3), torch.arange(6) % 4
    graph = analyze(net, torch.randn(2, 4, 3))
    criteria = [Taylor(norm=None), Gradient(norm=None), Activation(norm=None)]
    found = score(net, (x, y), criteria, graph=graph)
    zs = net.hidden(x)
    gs = torch.autograd.grad(F.cross_entropy(net.head(zs[-1]), y), zs)
    parts = [slice(length), slice(length, 2 * length), slice(2 * length, None)]
    for name, measure in (("taylor", torch.mul), ("gradient", lambda z, g: g), ("activation", lambda z, g: z.abs())):
        values = list(found[name].units.values())
        for part, units in zip(parts, values, strict=False):
            total = sum(measure(z, g).sum(0) for z, g in zip(zs[part], gs[part], strict=True))
            np.testing.assert_allclose(units, total.abs().detach().numpy() / len(x), rtol=1e-4, atol=1e-7)
    for composite in ("epsilon_plus", "attnlrp"):  # relevance is known by its parameters, whatever calls are numbered
        one = score(net, (x, y), LRP(composite=composite), graph=graph)
        same = score(net, (x, y), LRP(composite=composite), graph=analyze(net, x))
        for left, right in zip(one.units.values(), same.units.values(), strict=True):
            assert left.any()
            np.testing.assert_allclose(left, right, rtol=1e-5)


def samples(count: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 5, 5, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def slow(net: Small, data: tuple[Tensor, Tensor], taylor: bool, per_sample: bool) -> dict[str, np.ndarray]:
    """z and g at every conv and linear output by plain autograd, one sample at a time."""
    totals = {"a": np.zeros(6), "b": np.zeros(6), "fc": np.zeros(4)}
    count = len(data[0])
    for x, y in zip(*data, strict=True):
        seen: list[tuple[str, Tensor]] = []

        def keep(name: str, z: Tensor, seen: list[tuple[str, Tensor]] = seen) -> Tensor:
            z.retain_grad()
            seen.append((name, z))
            return z

        h = F.silu(net.bn(keep("a", net.a(x[None]))))
        h = h + F.silu(keep("b", net.b(h)))
        h = h + F.silu(keep("b", net.b(h)))
        out = keep("fc", net.fc(h.mean((2, 3))))
        (F.cross_entropy(out, y[None]) / count).backward()
        one = {name: np.zeros_like(total) for name, total in totals.items()}
        for name, z in seen:
            value = (z * z.grad if taylor else z.grad).detach().double()
            positions = value[0, 0].numel()
            one[name] += value.reshape(value.shape[1], -1).sum(1).numpy() / (count * positions)
            if per_sample:
                totals[name] += np.abs(value.reshape(value.shape[1], -1).sum(1).numpy()) / (count * positions)
        if not per_sample:
            for name in totals:
                totals[name] += one[name]
    return {name: np.abs(total) for name, total in totals.items()}


@pytest.mark.parametrize("taylor", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
def test_formulas_on_a_net_with_everything(taylor: bool, per_sample: bool) -> None:
    net, data = small(), samples()
    expected = slow(small(), data, taylor, per_sample)
    kind = Taylor if taylor else Gradient
    found = by_path(score(net, data, kind(norm=None, absolute="sample" if per_sample else "after")))
    for path, values in expected.items():
        np.testing.assert_allclose(found[path], values, rtol=2e-4, atol=1e-9)
        norm = np.linalg.norm(values)
        normed = by_path(score(net, data, kind(absolute="sample" if per_sample else "after")))
        np.testing.assert_allclose(normed[path], values / norm, rtol=2e-4, atol=1e-7)


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 10), max_size=4), seed=st.integers(0, 5))
def test_batches_and_order_do_not_matter(cuts: list[int], seed: int) -> None:
    net, (x, y) = small(), samples(11)
    names = ["lrp", "taylor", "gradient", "activation"]
    whole = score(net, (x, y), names)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    bounds = sorted({0, 11, *cuts})
    parts = [(x[order[a:b]], y[order[a:b]]) for a, b in pairwise(bounds)]
    split = score(net, iter(parts), names, graph=analyze(net, x[:1]))
    for name in names:
        for site, values in whole[name].units.items():
            np.testing.assert_allclose(split[name].units[site], values, rtol=1e-4, atol=1e-4 * np.abs(values).max())


def test_several_criteria_at_once_equal_each_alone() -> None:
    net, data = small(), samples()
    names = ["lrp", "taylor", "gradient", "weight", "activation", "random"]
    together = score(net, data, names)
    assert list(together) == names
    for name in names:
        alone = score(net, data, name)
        for site, values in alone.units.items():
            np.testing.assert_array_equal(together[name].units[site], values)


def test_one_forward_per_batch_for_all_gradient_criteria() -> None:
    calls = []

    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    net = Counting(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    data = (torch.rand(8, 3), torch.arange(8) % 2)
    graph = analyze(net, data[0][:1])
    calls.clear()
    score(net, data, ["taylor", "gradient", "activation", "weight"], graph=graph, batch_size=4)
    assert len(calls) == 2


def state_of(net: nn.Module) -> dict[str, object]:
    return {
        "tensors": {n: t.clone() for n, t in net.state_dict().items()},
        "grads": [p.grad for p in net.parameters()],
        "flags": [p.requires_grad for p in net.parameters()],
        "modes": [m.training for m in net.modules()],
        "hooks": [len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("name", ["lrp", "taylor", "weight", "activation", "random", "captum:GradientXActivation"])
def test_no_trace_on_the_model(name: str) -> None:
    if name.startswith("captum"):
        pytest.importorskip("captum")
    net = small().train()
    net.a.weight.requires_grad_(False)
    before = state_of(net)
    score(net, samples(), name)
    after = state_of(net)
    for key in ("grads", "flags", "modes", "hooks"):
        assert before[key] == after[key]
    assert torch.equal(before["rng"], after["rng"])
    for n, tensor in before["tensors"].items():
        assert torch.equal(tensor, after["tensors"][n])
    assert net.act.inplace


def test_frozen_and_bfloat16_models() -> None:
    net, (x, y) = small().requires_grad_(False), samples()
    plain = by_path(score(small(), (x, y), "taylor"))
    frozen = by_path(score(net, (x, y), "taylor"))
    half = by_path(score(net.bfloat16(), (x.bfloat16(), y), "taylor"))
    for path in plain:
        np.testing.assert_array_equal(plain[path], frozen[path])
    assert np.argmax(half["a"]) == np.argmax(plain["a"])


def test_a_loss_of_ones_own() -> None:
    net, (x, y) = small(), samples()
    mine = score(net, (x, y), Taylor(loss=lambda out, t: F.cross_entropy(out, t)), batch_size=3)
    default = score(net, (x, y), "taylor")
    for site, values in default.units.items():
        np.testing.assert_allclose(mine.units[site], values, rtol=1e-4, atol=1e-6)


def test_planted_units_leave_first() -> None:
    """Units that never fire, that nobody reads, and copies that share one unit's work leave before all others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    dead, unread, copies = [3, 7], [11, 15], [2, 5, 8, 13, 17, 19, 21, 23]
    with torch.no_grad():
        for weight in (net[0].weight, net[2].weight):
            weight.uniform_(0.2, 0.8)  # every other unit speaks for every class
        net[0].weight[dead] *= -1  # inputs are ≥ 0, so these never fire
        net[0].bias.zero_()
        net[2].weight[:, unread] = 0
        net[0].weight[copies] = net[0].weight[copies[0]].clone()
        net[2].weight[:, copies] = net[2].weight[:, copies[:1]] / len(copies)
    x = torch.rand(30, 6, generator=torch.Generator().manual_seed(2))
    y = torch.arange(30) % 3
    graph = analyze(net, x[:1])
    scores = score(net, (x, y), "lrp", graph=graph)
    values = by_path(scores)["0"]
    assert values[dead + unread].max() == 0
    assert set(np.argsort(values, kind="stable")[:12].tolist()) == {*dead, *unread, *copies}
    chosen = plan(graph, scores, remove=4 / 24)
    assert set(chosen.cuts["0.weight"][0]) == {*dead, *unread}
    with torch.no_grad():
        torch.testing.assert_close(apply(net, chosen)(x), net(x))


def test_scores_of_a_pruned_model_keep_their_places() -> None:
    net, data = small(), samples()
    graph = analyze(net, data[0][:1])
    first = plan(graph, score(net, data, "lrp", graph=graph), remove=0.3)
    smaller = apply(net, first)
    for name in ["lrp", "taylor", "gradient", "weight", "activation", "random"]:
        plain = replace(criterion_named(name), norm=None)
        on_small = score(smaller, data, plain, graph=graph, start=first).of(graph)
        on_mask = score(apply(net, first, how="mask"), data, plain, graph=graph).of(graph)
        left = np.setdiff1d(graph.candidates, first.groups)
        np.testing.assert_allclose(on_small[left], on_mask[left], rtol=1e-3, atol=1e-7)
    with pytest.raises(PlanError, match="start"):
        score(smaller, data, "taylor", graph=graph)


def test_query_key_and_value_rows_are_told_apart() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 3, 4)).eval()
    data = (torch.rand(5, 3, 8), torch.tensor([0, 1, 2, 3, 0]))
    graph = analyze(net, data[0][:1])
    found = score(net, data, ["lrp", "taylor", "weight"], graph=graph)
    rows = layer.self_attn.in_proj_weight.abs().sum(1).detach().double().numpy()
    wide = [v for s, v in score(net, None, Weight(norm=None), graph=graph).units.items() if "attn" in s.path]
    np.testing.assert_allclose(np.concatenate(wide)[:24], rows, rtol=1e-6)
    for scores in found.values():
        assert np.isfinite(scores.of(graph)[graph.candidates]).all()
    first = plan(graph, found["lrp"], remove=0.3)
    smaller = apply(net, first)
    for name in ("lrp", "taylor", "weight"):
        again = score(smaller, data, name, graph=graph, start=first)
        assert set(again.units) == set(found[name].units)


@pytest.mark.parametrize("method", ["IntegratedGradients", "DeepLift", "GradientXActivation"])
def test_captum(method: str) -> None:
    pytest.importorskip("captum")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)
    )
    x, y = samples()
    found = by_path(score(net, (x, y), f"captum:{method}"))
    assert found["0"].shape == (5,)
    if method == "GradientXActivation":  # z · d(logit of the true class)/dz, summed
        z = net[0](x)
        z = z.detach().requires_grad_()
        net[4](F.relu(z).mean((2, 3))).gather(1, y[:, None]).sum().backward()
        expected = (z * z.grad).sum((0, 2, 3)).abs().detach().double().numpy()
        np.testing.assert_allclose(found["0"], expected, rtol=1e-4)
        squares = (z * z.grad).detach().square().sum((0, 2, 3)).double().numpy()
        np.testing.assert_allclose(by_path(score(net, (x, y), Captum(absolute="square")))["0"], squares, rtol=1e-4)


def test_captum_options_and_errors() -> None:
    pytest.importorskip("captum")
    net, data = hand_net(), HAND
    score(net, data, Captum(name="ig", method="IntegratedGradients", options={"n_steps": 4}))
    with pytest.raises(CriterionError, match="IntegratedGradients"):
        score(net, data, "captum:NoSuchThing")
    twice = nn.Linear(3, 3)
    found = score(nn.Sequential(nn.Linear(2, 3), twice, nn.ReLU(), twice), data, "captum:DeepLift")
    assert [site.path for site in found.units] == ["0"]  # captum sees the last run of the other


def test_a_users_function() -> None:
    net, data = small(), samples()

    def largest(model: nn.Module, batches: list) -> dict[str, Tensor]:
        assert not model.training
        assert sum(len(x) for x, _ in batches) == 7
        return {"a": model.a.weight.abs().amax((1, 2, 3)), "b": model.b.weight.abs().amax((1, 2, 3))}

    found = by_path(score(net, data, largest))
    np.testing.assert_allclose(found["a"], net.a.weight.abs().amax((1, 2, 3)).detach().double().numpy())
    with pytest.raises(CriterionError, match="no units are made there"):
        score(net, data, lambda model, batches: {"nowhere": torch.ones(3)})
    with pytest.raises(CriterionError, match="5 numbers for the 6 units"):
        score(net, data, lambda model, batches: {"a": torch.ones(5)})
    with pytest.raises(CriterionError, match="NaN"):
        score(net, data, lambda model, batches: {"a": torch.full((6,), math.nan)})
    with pytest.raises(CriterionError, match="ZeroDivisionError"):
        score(net, data, lambda model, batches: 1 / 0)


def test_names_options_and_registry() -> None:
    assert criterion_named("lrp").norm is None
    assert criterion_named("weight").norm == criterion_named("taylor").norm == 2
    assert criterion_named("lrp:epsilon_plus") == LRP(name="lrp:epsilon_plus", composite="epsilon_plus")
    register_criterion("molchanov", lambda: Taylor(name="molchanov", absolute="sample"))
    assert criterion_named("molchanov").absolute == "sample"
    assert criterion_named(Gradient(norm=None)).norm is None
    for wrong in ("lpr", "lrp:nothing", 3):
        with pytest.raises(CriterionError):
            criterion_named(wrong)
    for setting in ({"norm": 3}, {"absolute": "never"}, {"aggregate": "median"}, {"composite": "nothing"}):
        with pytest.raises(CriterionError):
            LRP(**setting)


def test_random_is_fixed_by_its_seed() -> None:
    net = small()
    graph = analyze(net, samples()[0][:1])
    one, same, other = (score(net, None, Random(seed=s), graph=graph) for s in (1, 1, 2))
    for site, values in one.units.items():
        np.testing.assert_array_equal(values, same.units[site])
        assert not np.array_equal(values, other.units[site])


class Functional(nn.Module):
    """Three layers in one forward, whose weights are parameters or computed from them."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(6, 5), torch.randn(6, 6), torch.randn(3, 6)])
        self.computed = computed

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = (2 * w / 2 if self.computed else w for w in self.weights)
        return F.linear(F.relu(F.linear(F.relu(F.linear(x, first)), second)), last)


@pytest.mark.parametrize("criterion", ["lrp", "lrp:attnlrp", "taylor", "weight"])
def test_computed_weights_in_one_module_are_told_apart(criterion: str) -> None:
    data = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    plain, computed = (score(Functional(kind), data, criterion).units for kind in (False, True))
    assert len(plain) == len(computed) == 3
    for site, values in plain.items():
        np.testing.assert_allclose(computed[site], values, rtol=1e-5)


def test_every_second_row_of_a_weight_is_no_range_of_rows() -> None:
    class Interleaved(nn.Module):
        def __init__(self, copied: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.both, self.left, self.right = nn.Parameter(torch.randn(12, 5)), nn.Linear(6, 3), nn.Linear(6, 3)
            self.copied = copied

        def forward(self, x: Tensor) -> Tensor:
            even, odd = (part.clone() if self.copied else part for part in (self.both[::2], self.both[1::2]))
            return self.left(F.linear(x, even).relu()) + self.right(F.linear(x, odd).relu())

    data = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    views, copies = (score(Interleaved(copied), data, "lrp").units for copied in (False, True))
    for site, values in copies.items():
        np.testing.assert_allclose(views[site], values, rtol=1e-5)


def test_weights_joined_from_parameters_are_scored_by_their_rows() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(4, 5))
            self.last = nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.linear(x, torch.cat([self.second, self.first])).relu())

    net, x = Joined(), torch.randn(4, 5)
    graph = analyze(net, x)
    assert graph.total_units == 10
    rows = torch.cat([net.second, net.first]).abs().sum(1).detach().double().numpy()
    found = score(net, None, Weight(norm=None), graph=graph)
    np.testing.assert_allclose(found.units[graph.producers[0].sites[0]], rows, rtol=1e-6)
    first = plan(graph, found, remove=0.5)
    again = score(apply(net, first), None, Weight(norm=None), graph=graph, start=first)
    left = np.sort(rows)[5:]
    np.testing.assert_allclose(np.sort(again.units[graph.producers[0].sites[0]])[5:], left, rtol=1e-6)


def test_criteria_that_cannot_be_told_apart_or_used_are_refused() -> None:
    with pytest.raises(CriterionError, match=r"two criteria are called 'taylor'.*Taylor\(name="):
        score(hand_net(), HAND, ["weight", Taylor(), Taylor(norm=None)])
    assert list(score(hand_net(), HAND, [Taylor(), Taylor(name="raw", norm=None)])) == ["taylor", "raw"]
    with pytest.raises(CriterionError, match=r"Taylor is a class.*Taylor\(\)"):
        score(hand_net(), HAND, Taylor)  # type: ignore[arg-type]
    with pytest.raises(CriterionError, match="gives no numbers for the units of '0'"):
        score(hand_net(), HAND, lambda model, batches: {"0": [1, 2, "three"]})
    register_criterion("no criterion", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(CriterionError, match="criterion 'no criterion' is a"):
        score(hand_net(), HAND, "no criterion")
    _KNOWN.pop("no criterion")
    with pytest.raises(CriterionError, match="loss does not depend on the output"):
        score(hand_net(), HAND, Taylor(loss=lambda output, targets: output.detach().sum()))


def test_bad_input_is_named() -> None:
    net, (x, y) = small(), samples()
    graph = analyze(net, x[:1])
    with pytest.raises(DataError, match="empty"):
        score(net, [], "lrp", graph=graph)
    with pytest.raises(DataError, match="empty"):
        score(net, [])
    with pytest.raises(DataError, match="graph"):
        score(net, None, "weight")
    with pytest.raises(DataError, match="needs data"):
        score(net, None, "lrp", graph=graph)
    for name in ("lrp", "taylor"):
        with pytest.raises(DataError, match="labels run from 0 to 9"):
            score(net, (x, torch.tensor([0, 1, 2, 3, 9, 0, 1])), name, graph=graph)
        with pytest.raises(ForwardError, match=r"\(2, 3, 5, 5\)"):
            score(net, (torch.rand(2, 3, 5, 5), torch.tensor([0, 1])), name, graph=graph)
        with pytest.raises(DataError, match="NaN"):
            score(net, (x * math.nan, y), name, graph=graph)
    with pytest.raises(DataError, match="7 inputs but 6 targets"):
        score(net, (x, y[:6]), "lrp", graph=graph)
    with pytest.raises(DataError, match="targets"):
        score(net, [(x, None)], "taylor", graph=graph)
    with pytest.raises(DataError, match="pair"):
        score(net, [x], "lrp", graph=graph)
    broken = copy.deepcopy(net)
    with torch.no_grad():
        broken.b.weight[0, 0, 0, 0] = math.nan
    with pytest.raises(NotFiniteError, match=r"b\.weight"):
        score(broken, (x, y), "weight", graph=graph)


@pytest.mark.parametrize("criterion", ["lrp", "taylor"])
def test_inputs_of_another_number_format_have_a_way_out(criterion: str) -> None:
    x, y = samples(4)
    graph = analyze(Small(), x[:1])
    ways = {torch.float64: r"x\.float\(\), or model\.double\(\)", torch.float16: r"x\.float\(\), or model\.half\(\)"}
    for dtype in (torch.float64, torch.float16, torch.uint8):
        with pytest.raises(ForwardError, match=f"{str(dtype)[6:]}.*weights are float32.*{ways.get(dtype, 'x.float')}"):
            score(Small(), (x.to(dtype), y), criterion, graph=graph)
    with pytest.raises(ForwardError, match=r"weights are float64, so give x\.double\(\), or model\.float\(\)"):
        score(Small().double(), (x, y), criterion, graph=graph)
    with pytest.raises(
        ForwardError, match=r"does not run on the example.*uint8.*x\.float\(\) / 255, normalised as in its training\.$"
    ):
        score(Small(), (x.byte(), y), criterion)
    words = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ForwardError, match=r"x\.long\(\)"):
        score(words, (torch.ones(4, 2), y), criterion)
    with pytest.raises(ForwardError, match="does not run") as caught:  # another fault: nothing is said about formats
        score(Small(), (x.repeat(1, 2, 1, 1), y), criterion, graph=graph)
    assert "Fix" not in str(caught.value)


# -- one output --------------------------------------------------------------------------------------------------------
class OneLogit(nn.Module):
    """The hidden layer of `hand_net` and one output: for x = (1, 1), z = (1, 2, 0) and the logit is 3."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        hand, self.shape = hand_net(), shape
        self.hidden, self.out = hand[0], nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.tensor([[1.0, 1.0, 0.0]]))

    def forward(self, x: Tensor) -> Tensor:
        logit = self.out(self.hidden(x).relu())
        return logit if self.shape == "column" else logit.squeeze(1) if self.shape == "row" else logit[:, :, None]


@pytest.mark.parametrize("shape", ["column", "row", "map"])
@pytest.mark.parametrize("real", [False, True])
def test_one_output_has_binary_cross_entropy(shape: str, real: bool) -> None:
    # L = log(1 + e^-3) for class 1, log(1 + e^3) for class 0: dL/dlogit = -1/(1 + e^3) and 1/(1 + e^-3).
    net = OneLogit(shape)
    for target, slope in ((0, 1 / (1 + math.exp(-3))), (1, -1 / (1 + math.exp(3)))):
        y = torch.tensor([target])
        data = (HAND[0], y.float() if real else y)
        graph = analyze(net, HAND[0])
        found = score(net, data, [Taylor(norm=None, absolute=None), Gradient(norm=None, absolute=None)], graph=graph)
        np.testing.assert_allclose(by_path(found["taylor"])["hidden"], slope * np.array([1, 2, 0]), rtol=1e-6)
        np.testing.assert_allclose(by_path(found["gradient"])["hidden"], slope * np.array([1, 1, 0]), rtol=1e-6)
    wide = net(HAND[0]).detach()
    shaped = score(net, (HAND[0], torch.ones_like(wide)), Taylor(norm=None, absolute=None))
    np.testing.assert_allclose(by_path(shaped)["hidden"], slope * np.array([1, 2, 0]), rtol=1e-6)


@pytest.mark.parametrize("shape", ["column", "row", "map"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_every_sample_of_one_output_starts_with_relevance_1(shape: str, dtype: torch.dtype) -> None:
    x = HAND[0].repeat(4, 1)
    for y in (torch.tensor([0, 1, 1, 0]), torch.zeros(4), torch.ones(4)):
        found = score(OneLogit(shape), (x, y.to(dtype)), "lrp", batch_size=3)
        np.testing.assert_allclose(by_path(found)["hidden"], 4 * np.array([1, 2, 0]) / 3, rtol=1e-6)
    found = score(OneLogit(shape), (x, None), "lrp")
    np.testing.assert_allclose(by_path(found)["hidden"], 4 * np.array([1, 2, 0]) / 3, rtol=1e-6)


def test_one_output_and_targets_that_do_not_fit() -> None:
    x = HAND[0].repeat(4, 1)
    for criterion in ("lrp", "taylor"):
        with pytest.raises(DataError, match=r"labels run from 0 to 3, but the model has one output.*Fix"):
            score(OneLogit("column"), (x, torch.arange(4)), criterion)
        with pytest.raises(DataError, match=r"targets have shape \(4, 2\)"):
            score(OneLogit("column"), (x, torch.zeros(4, 2)), criterion)
    with pytest.raises(DataError, match=r"not all 0 or 1.*loss=f"):
        score(OneLogit("column"), (x, torch.rand(4)), "taylor")
    quantity = (x, torch.rand(4, 1) + 2)
    assert by_path(score(OneLogit("column"), quantity, Taylor(loss=F.mse_loss)))["hidden"].any()
    assert math.isclose(by_path(score(OneLogit("column"), quantity, "lrp"))["hidden"].sum(), 4, rel_tol=1e-6)


def test_captum_attributes_to_the_only_output() -> None:
    pytest.importorskip("captum")
    x = HAND[0].repeat(2, 1)
    for shape in ("column", "row"):
        found = by_path(score(OneLogit(shape), (x, torch.tensor([0, 1])), "captum:GradientXActivation"))
        np.testing.assert_allclose(found["hidden"], [2, 4, 0], rtol=1e-6)  # activation times weight, twice


def test_scores_that_are_all_zero_are_refused() -> None:
    data = samples(4)
    graph = analyze(Small(), data[0][:1])

    def nothing(model: nn.Module, batches: list) -> dict[str, Tensor]:
        return {site.path: torch.zeros(len(p.labels)) for p in graph.producers for site in p.sites[:1]}

    with pytest.raises(CriterionError, match=r"'nothing' gave every unit the score 0.*Fix"):
        score(Small(), data, nothing, graph=graph)
    with pytest.raises(CriterionError, match="'empty' gave no unit a score"):
        score(Small(), data, Custom(name="empty", function=lambda model, batches: {}), graph=graph)
    for kind in (Taylor, Gradient):
        with pytest.raises(CriterionError, match=f"{kind().name!r} gave every unit the score 0.*loss=f"):
            score(Small(), data, kind(loss=lambda output, targets: 0 * output.sum()), graph=graph)


# -- several outputs ---------------------------------------------------------------------------------------------------
Pair = namedtuple("Pair", ["features", "logits"])

#: What a forward may return of hidden activations h and logits o; and, where it must be guessed, what is taken.
CLEAR = {
    "logits by name": lambda h, o: {"features": h, "logits": o},
    "segmentation": lambda h, o: {"aux": h, "out": o},
    "named tuple": Pair,
    "attribute": lambda h, o: SimpleNamespace(features=h, logits=o),
    "with a loss": lambda h, o: (o.sum(), o),
    "with whole numbers": lambda h, o: {"found": o.argmax(1), "answer": o},
    "with states": lambda h, o: (o, (h, h)),
    "with nothing": lambda h, o: (None, o),
    "the same twice": lambda h, o: [o, o],
    "deep": lambda h, o: {"all": (o,)},
}
GUESSED = {
    "features first": (lambda h, o: {"features": h, "answer": o}, "output['features']", "output['answer']"),
    "tuple": (lambda h, o: (h, None, o), "output[0]", "output[2]"),
    "object": (lambda h, o: SimpleNamespace(hidden=h, answer=o), "output.hidden", "output.answer"),
    "deep": (lambda h, o: [(h, o)], "tensor 0 of the output", "tensor 1 of the output"),
}


class Returning(nn.Module):
    """The net followed by hand, returning what `form` makes of its hidden activations and logits."""

    def __init__(self, form) -> None:
        super().__init__()
        self.body, self.form = hand_net(), form

    def forward(self, x: Tensor):
        hidden = self.body[:2](x)
        return self.form(hidden, self.body[2](hidden))


@pytest.mark.parametrize("name", CLEAR)
def test_the_output_that_counts_is_found(name: str) -> None:
    plain = Returning(lambda h, o: o)
    for criterion in ("lrp", "taylor"):
        expected, found = (by_path(score(net, HAND, criterion)) for net in (plain, Returning(CLEAR[name])))
        np.testing.assert_array_equal(found["body.0"], expected["body.0"])


@pytest.mark.parametrize("criterion", ["lrp", "taylor", "captum:GradientXActivation"])
@pytest.mark.parametrize("name", GUESSED)
def test_a_guess_among_outputs_is_said(name: str, criterion: str) -> None:
    if "captum" in criterion:
        pytest.importorskip("captum")
    form, taken, other = GUESSED[name]
    net, graph = Returning(form), analyze(Returning(form), HAND[0])
    told = pytest.warns(SecateurWarning, match=rf"{re.escape(taken)} is taken.*not {re.escape(other)}\. Fix")
    if "captum" not in criterion:  # captum itself takes tensors only
        with told:
            found = by_path(score(net, HAND, criterion, graph=graph))
        expected = by_path(score(Returning(lambda h, o: h), HAND, criterion, graph=graph))
        np.testing.assert_array_equal(found["body.0"], expected["body.0"])
    with told, pytest.raises(DataError, match=rf"labels run from 9 to 9, .* 3 outputs .*in {re.escape(taken)}"):
        score(net, (HAND[0], torch.tensor([9])), criterion, graph=graph)


# -- data --------------------------------------------------------------------------------------------------------------
class Both(nn.Module):
    """A model with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(12, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(left), self.b(right)], 1).relu())


def equal(found, expected) -> None:
    for path, values in by_path(expected).items():
        np.testing.assert_array_equal(by_path(found)[path], values)


@pytest.mark.parametrize("criterion", ["lrp", "taylor"])
def test_arrays_and_lists_are_data_as_tensors_are(criterion: str) -> None:
    net, (x, y) = Small(), samples(7)
    expected = score(net, (x, y), criterion, batch_size=3)
    backwards = x.flip(0).numpy()[::-1]
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    for inputs in (x, x.numpy(), backwards, frozen):
        for targets in (y, y.numpy(), y.tolist(), tuple(y.tolist()), y.numpy().astype(np.int32), list(y.numpy())):
            equal(score(net, (inputs, targets), criterion, batch_size=3), expected)
            equal(score(net, [inputs, targets], criterion, batch_size=3), expected)
    parts = [(x[:3].numpy(), y[:3].numpy()), (x[3:6], y[3:6].tolist()), [x[6:].numpy(), y[6:]]]
    equal(score(net, parts, criterion), expected)
    equal(score(net, iter(parts), criterion, graph=analyze(net, x[:1])), expected)


@pytest.mark.parametrize("criterion", ["lrp", "taylor"])
def test_a_pair_with_two_inputs_and_two_batches_are_told_apart(criterion: str) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right, y = torch.rand(8, 4, generator=generator), torch.rand(8, 3, generator=generator), torch.arange(8) % 3
    expected = score(Both(), [((left[:4], right[:4]), y[:4]), ((left[4:], right[4:]), y[4:])], criterion)
    named = {"left": left, "right": right.numpy()}
    for inputs in ((left, right), [left, right], (left.numpy(), right), named):
        for targets in (y, y.numpy(), y.tolist()):
            equal(score(Both(), (inputs, targets), criterion, batch_size=4), expected)
    equal(score(Both(), ((left, right), None), "activation"), score(Both(), [((left, right), y)], "activation"))
    # Two batches of two samples, in tuples and lists: every element is of length 2, and so are the batches.
    net, (x, y) = Small(), samples(4)
    whole = score(net, (x, y), criterion, batch_size=2)
    for kind in (tuple, list):
        equal(score(net, kind((kind((x[:2], y[:2])), kind((x[2:], y[2:])))), criterion), whole)
        equal(score(net, kind((kind((x[:2], y[:2].tolist())), kind((x[2:], y[2:].tolist())))), criterion), whole)


def test_data_that_are_no_numbers_are_named() -> None:
    x, y = samples(4)
    graph = analyze(Small(), x[:1])
    with pytest.raises(DataError, match=r"targets are a list that is no list of numbers.*Fix"):
        score(Small(), (x, ["cat", "dog", "cat", "dog"]), graph=graph)
    with pytest.raises(DataError, match=r"inputs are a list of numbers.*torch\.tensor"):
        score(Small(), (x.tolist(), y), graph=graph)
    with pytest.raises(DataError, match=r"an array of <U3 cannot become a tensor"):
        score(Small(), (x, np.array(["cat", "dog", "cat", "dog"])), graph=graph)
    with pytest.raises(DataError, match="different lengths: 6, 8"):
        score(Both(), ((torch.rand(8, 4), torch.rand(6, 3)), torch.zeros(8).long()))
    with pytest.raises(DataError, match="8 inputs but 6 targets"):
        score(Both(), ((torch.rand(8, 4), torch.rand(8, 3)), [0] * 6))


def test_two_inputs_as_arrays_through_the_whole_run() -> None:
    left, right, y = (
        np.random.default_rng(0).random((20, 4)),
        np.random.default_rng(1).random((20, 3)),
        [0, 1, 2, 1] * 5,
    )
    data = ((left.astype(np.float32), right.astype(np.float32)), y)
    tensors = tuple(map(torch.from_numpy, data[0]))
    tune = Recover.scenario1(data, epochs=2)
    for options in ({}, {"schedule": 0.2, "recover": tune}, {"repair": "best"}):
        small = prune(Both(), data, remove=0.4, progress=False, **options).model
        assert small(*tensors).shape == (20, 3)
        assert small.c.in_features < 12


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_class_numbers_may_have_no_sign(kind: type) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(12, 4), torch.arange(12) % 3
    known = score(net, (x, y), "taylor").units
    for targets in (y.numpy().astype(kind), torch.as_tensor(y.numpy().astype(kind))):
        found = score(net, (x, targets), "taylor").units
        assert all(np.array_equal(found[site], known[site]) for site in known)


def test_what_is_masked_is_not_data() -> None:
    net, x, y = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), np.ones((12, 4), np.float32), [0, 1, 2] * 4
    masked = np.ma.masked_array(x, np.arange(48).reshape(12, 4) == 5)
    with pytest.raises(DataError, match=r"1 number of an array is masked.*Fix: array\.filled"):
        score(net, (masked, y), "taylor")
    score(net, (np.ma.masked_array(x), y), "taylor")
