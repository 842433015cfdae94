"""Experts as units: one that left is never chosen, whichever way the code finds the weights of those that are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.tiny_transformers import build, inputs, parts
from oracle import random_scores
from secateur.errors import TargetError
from secateur.plans import Limits
from secateur.plans.plan import plan_for
from secateur.structure.graph import Graph

#: Torch 2.6 has none; transformers has a function of its own there, which is refused by name.
GROUPED = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped products"
)


class Mixture(nn.Module):
    """Five experts, of which each token gets the best two. `router` says how they are chosen, `way` how they are run.

    `removed`: numbers of experts that may not be chosen. This is the oracle.
    """

    def __init__(self, router: str, way: str) -> None:
        super().__init__()
        self.stem, self.gate, self.last = nn.Linear(6, 8), nn.Linear(8, 5, bias=False), nn.Linear(8, 3)
        self.up, self.down = nn.Parameter(torch.randn(5, 8, 16) / 3), nn.Parameter(torch.randn(5, 16, 8) / 4)
        self.bias = nn.Parameter(torch.randn(5) * 0.1 - 0.5)
        self.router, self.way, self.num_experts = router, way, 5
        self.removed: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu().flatten(0, -2)
        weights, chosen = self.choose(self.gate(x))
        return self.last(x + self.run(x, weights, chosen))  # type: ignore[no-any-return]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.removed:
            logits = logits.index_fill(-1, torch.tensor(self.removed), -torch.inf)
        if self.router == "softmax first":
            weights, chosen = logits.float().softmax(-1).topk(2)
            return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen
        if self.router == "softmax last":
            best, chosen = torch.topk(logits, 2, dim=-1)
            return best.softmax(-1), chosen
        scores, shift = logits.sigmoid(), self.bias
        if self.removed:
            shift = shift.index_fill(0, torch.tensor(self.removed), -torch.inf)
        chosen = (scores + shift).topk(2).indices
        return scores.gather(1, chosen), chosen

    def run(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        if self.way == "loop":
            for number in chosen.unique():
                tokens, place = torch.where(chosen == number)
                made = (x[tokens] @ self.up[number]).relu() @ self.down[number]
                result = result.index_add(0, tokens, made * weights[tokens, place, None])
            return result
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        ends = counts.cumsum(0).to(torch.int32)
        made = torch.nn.functional.grouped_mm(x[order // 2], self.up, offs=ends).relu()
        made = torch.nn.functional.grouped_mm(made, self.down, offs=ends) * weights.flatten()[order, None]
        return result.index_add(0, order // 2, made)


def remove(graph: Graph, layer: str, places: list[int]) -> Any:
    removed = np.zeros(len(graph.root), np.bool_)
    removed[next(one for one in graph.layers if one.name == layer).groups[places]] = True
    return plan_for(graph, removed)


@pytest.mark.parametrize("way", ["loop", pytest.param("grouped", marks=GROUPED)])
@pytest.mark.parametrize("router", ["softmax first", "softmax last", "sigmoid"])
def test_an_expert_that_left_is_never_chosen(router: str, way: str) -> None:
    torch.manual_seed(0)
    net = Mixture(router, way)
    x = torch.randn(4, 7, 6)
    graph = sc.analyze(net, x)
    layer = next(layer for layer in graph.layers if layer.kind == "expert")
    assert (layer.name, len(layer.groups), layer.prunable) == ("gate", 5, True)
    small: Any = sc.apply(net, remove(graph, "gate", [1, 4]))
    assert (small.num_experts, tuple(small.up.shape), small.gate.out_features) == (3, (3, 8, 16), 3)
    before = net(x)
    net.removed = [1, 4]
    assert (net(x) - before).abs().max() > 0.01
    torch.testing.assert_close(small(x), net(x))
    net.removed = []
    torch.testing.assert_close(sc.apply(net, remove(graph, "gate", [1, 4]), how="mask")(x), small(x))


def test_as_many_experts_stay_as_are_chosen() -> None:
    torch.manual_seed(0)
    net = Mixture("softmax first", "loop")
    graph = sc.analyze(net, torch.randn(4, 7, 6))
    limits = Limits(only="gate")
    plan = sc.plan(graph, random_scores(graph), remove=3 / graph.total_units, limits=limits)
    with pytest.raises(TargetError, match="at most"):
        sc.plan(graph, random_scores(graph), remove=4 / graph.total_units, limits=limits)
    assert plan.layers["gate"] == (5, 2)
    small: Any = sc.apply(net, plan)
    assert small.gate.out_features == 2


@GROUPED
def test_grouped_products_keep_widths_that_they_can_take() -> None:
    """Rows must have whole 16 bytes, in half precision too."""
    torch.manual_seed(0)
    net = Mixture("softmax first", "grouped").bfloat16()
    graph = sc.analyze(net, torch.randn(4, 7, 6).bfloat16())
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small: Any = sc.apply(net, plan)
    assert plan.units[1] < plan.units[0]
    assert small.up.shape[2] == 8
    assert small.up.shape[1] % 8 == 0


def test_probabilities_that_are_more_than_a_choice_must_stay() -> None:
    class Shares(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            shares = self.gate(self.stem(x)).softmax(-1)
            return self.last(self.stem(x)) * shares.topk(2).values.sum(-1, keepdim=True)  # type: ignore[no-any-return]

    class Uses(Mixture):
        def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
            shares = logits.softmax(-1)
            weights, chosen = shares.topk(2)
            return weights * shares.amax(), chosen

    for kind in (Shares, Uses):
        graph = sc.analyze(kind("", "loop"), torch.randn(4, 7, 6))
        gate = next(layer for layer in graph.layers if layer.name == "gate")
        assert not gate.prunable
        assert "softmax in the model's own forward normalises over it" in str(gate.reason) or kind is Uses


def check_routed(small: Any, model: Any, gate: Any, without: Any, example: Any) -> None:
    """The smaller model is the whole one with another router, which does not choose what left."""
    with torch.no_grad():
        found, whole = small(**example).logits, model(**example).logits
        gate.forward = without
        wanted = model(**example).logits
    assert (whole - wanted).abs().max() > 0.01
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("way", ["eager", pytest.param("grouped_mm", marks=GROUPED)])
def test_experts_of_mixtral(way: str) -> None:
    model: Any = build("mixtral", "CAUSAL_LM").float()
    model.set_experts_implementation(way)
    example = inputs(model, 3, 9)
    graph = sc.analyze(model, example)
    assert {layer.kind: layer.prunable for layer in graph.layers if layer.kind == "expert"} == {"expert": True}
    small: Any = sc.apply(model, remove(graph, "model.layers.1.mlp.gate", [0, 2]))
    gate = model.model.layers[1].mlp.gate
    plain = gate.forward

    def without(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = plain(x)[0].index_fill(-1, torch.tensor([0, 2]), -torch.inf)
        best, chosen = logits.softmax(-1).topk(2)
        return logits, best / best.sum(-1, keepdim=True), chosen

    check_routed(small, model, gate, without, example)
    assert small.model.layers[1].mlp.experts.num_experts == 2
    small.generate(example["input_ids"], max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("groups", [1, 2])
def test_experts_of_deepseek(groups: int) -> None:
    """Experts come in groups, and only those of the best group may be chosen. Of each group the same number stays."""
    given = {"n_routed_experts": 8, "n_group": groups, "topk_group": 1}
    model: Any = build("deepseek_v3", "CAUSAL_LM", **given).float()
    gate, example = model.model.layers[1].mlp.gate, inputs(model, 3, 9)
    gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    graph = sc.analyze(model, example)
    layer = next(layer for layer in graph.layers if layer.kind == "expert")
    assert (layer.prunable, len(layer.groups)) == (True, 8 // groups)
    small: Any = sc.apply(model, remove(graph, "model.layers.1.mlp.gate", [0, 2]))
    gone = torch.tensor([0, 2] if groups == 1 else [0, 2, 4, 6])

    def without(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.flatten(0, -2) @ gate.weight.T
        choice = (logits.sigmoid() + gate.e_score_correction_bias).index_fill(-1, gone, -torch.inf)
        best = choice.unflatten(-1, (groups, -1)).sort(-1).values[..., -2:].sum(-1).argmax(-1, keepdim=True)
        choice = choice.masked_fill(torch.arange(8) // (8 // groups) != best, -torch.inf)
        chosen = choice.topk(2).indices
        weights = logits.sigmoid().gather(1, chosen)
        return logits, gate.routed_scaling_factor * weights / weights.sum(-1, keepdim=True), chosen

    check_routed(small, model, gate, without, example)
    assert small.model.layers[1].mlp.gate.num_experts == 8 - len(gone)


def test_experts_of_phimoe() -> None:
    """Its router takes the largest, forbids it, and takes the largest of the rest. Experts that are much smaller than
    the one that is taken do not count in its share."""
    model: Any = build("phimoe", "CAUSAL_LM", num_local_experts=6).float()
    example = inputs(model, 3, 9)
    graph = sc.analyze(model, example)
    layer = next(one for one in graph.layers if one.name == "model.layers.1.mlp.router")
    assert (layer.kind, layer.prunable, len(layer.groups)) == ("expert", True, 6)
    small: Any = sc.apply(model, remove(graph, layer.name, [0, 2, 3]))
    gate = model.model.layers[1].mlp.router
    kept, jitter = torch.tensor([1, 4, 5]), gate.router_jitter_noise

    def without(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ gate.weight.T
        shares, chosen = torch.zeros(len(x), 2), torch.zeros(len(x), 2, dtype=torch.long)
        for token, row in enumerate(logits[:, kept]):
            open_places = [0, 1, 2]
            for turn in (0, 1):
                best = max(open_places, key=lambda place: float(row[place]))
                near = [p for p in open_places if (row[best] - row[p]) / max(row[p].abs(), row[best]) <= 2 * jitter]
                shares[token, turn] = row[best].exp() / row[near].exp().sum()
                chosen[token, turn] = kept[best]
                open_places.remove(best)
        return logits, shares, chosen

    check_routed(small, model, gate, without, example)
    limits = Limits(only=layer.name)
    with pytest.raises(TargetError, match="at most"):  # two are chosen
        sc.plan(graph, random_scores(graph), remove=5 / graph.total_units, limits=limits)
    assert sc.plan(graph, random_scores(graph), remove=4 / graph.total_units, limits=limits).layers[layer.name] == (
        6,
        2,
    )


@pytest.mark.parametrize(("family", "operation"), [("llama4_text", "scatter_"), ("jetmoe", "topk")])
def test_experts_that_stay_have_a_reason(family: str, operation: str) -> None:
    model = build(family, "CAUSAL_LM").float()
    free, units, why = parts(sc.analyze(model, inputs(model)))["experts"]
    assert free == 0 < units
    assert operation in why


class Apart(nn.Module):
    """The experts of Mixtral as linear layers of their own, all of which run for every token."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.up = nn.ModuleList(_linear(weight) for weight in experts.gate_up_proj)
        self.down = nn.ModuleList(_linear(weight) for weight in experts.down_proj)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = []
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = torch.where(chosen == number, weights, 0).sum(-1, keepdim=True)
            gate, value = up(x).chunk(2, -1)
            made.append(down(torch.nn.functional.silu(gate) * value) * share)
        return made[0] + made[1] + made[2] + made[3]


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.detach().clone()
    return layer


def test_neurons_of_experts_of_gpt_oss() -> None:
    """Gates and what they gate lie in turn in one layer, and every expert has a matrix of its own for them."""
    model: Any = build("gpt_oss", "CAUSAL_LM").float()
    example = inputs(model, 3, 9)
    graph = sc.analyze(model, example)
    assert parts(graph)["neurons"][:2] == (192, 192)  # gates and gated, of two layers
    small: Any = sc.apply(model, remove(graph, "model.layers.1.mlp.experts", [3, 20, 47]))
    assert small.model.layers[1].mlp.experts.gate_up_proj.shape[2] == 90
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        whole = model(**example).logits
        experts.down_proj[:, [3, 20, 47]] = 0
        wanted = model(**example).logits
        assert (whole - wanted).abs().max() > 0.01
        torch.testing.assert_close(small(**example).logits, wanted)


@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
def test_experts_that_are_modules_stay_with_a_reason(family: str) -> None:
    """Their router takes the largest and names the module of that number. It casts itself in its forward, which changes
    nothing here and must not freeze the width."""
    model: Any = build(family, "SEQ_TO_SEQ_CAUSAL_LM").float()
    assert sum("experts.expert_3" in name for name, _ in model.named_parameters()) >= 4  # there are sparse layers
    found = parts(sc.analyze(model, inputs(model)))
    free, units, why = found["experts"]
    assert (free, units) == (0, 8)
    assert "argmax" in why
    if family == "nllb-moe":  # whatever the router says, its code runs the first two experts only
        assert "expert_2.fc1` never ran" in found["width"][2]
    else:
        assert found["width"][0] == found["width"][1] > 0


@pytest.mark.parametrize("way", ["eager", pytest.param("grouped_mm", marks=GROUPED), "batched_mm"])
def test_relevance_of_experts_is_that_of_linear_layers(way: str) -> None:
    """Also of each neuron, summed over the experts, which share one tensor of weights."""
    model: Any = build("mixtral", "CAUSAL_LM").float()
    example = inputs(model, 3, 9)
    reference: Any = build("mixtral", "CAUSAL_LM").float()
    for layer in reference.model.layers:
        layer.mlp.experts = Apart(layer.mlp.experts)
    model.set_experts_implementation(way)
    seen, wanted = (sc.explain(net, example, 5, composite="attnlrp") for net in (model, reference))
    torch.testing.assert_close(seen.heat, wanted.heat, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        seen.weights["model.layers.0.mlp.gate.weight"], wanted.weights["model.layers.0.mlp.gate.weight"],
        rtol=1e-3, atol=1e-6,
    )  # fmt: skip
    if way == "batched_mm":  # copies of the weights of each token's experts: no neurons
        return
    for name, part in (("gate_up_proj", "up"), ("down_proj", "down")):
        path = "model.layers.0.mlp.experts"
        sums = sum(wanted.weights[f"{path}.{part}.{i}.weight"] for i in range(4))
        torch.testing.assert_close(seen.weights[f"{path}.{name}"], sums, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("composite", ["alpha1beta0", "epsilon_plus"])
def test_rows_that_are_added_to_others_share_relevance(composite: str) -> None:
    class Added(nn.Module):
        def __init__(self, written: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.last, self.written = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3), written

        def forward(self, x: Tensor) -> Tensor:
            one, two, rows = self.a(x).relu(), self.b(x).relu(), torch.tensor([2, 0, 2])
            if self.written == "in place":
                total = torch.zeros_like(one)
                total.index_add_(0, torch.arange(3), one)
                total.index_add_(0, rows, two)
            elif self.written == "out of place":
                total = one.index_add(0, rows, two)
            else:
                total = one + torch.eye(3)[:, rows] @ two
            return self.last(total)  # type: ignore[no-any-return]

    x = torch.rand(3, 4)
    wanted = sc.explain(Added("as a product"), x, 1, composite=composite)
    for written in ("in place", "out of place"):
        seen = sc.explain(Added(written), x, 1, composite=composite)
        torch.testing.assert_close(seen.input, wanted.input)
