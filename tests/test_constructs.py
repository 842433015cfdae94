"""Every construct: analysis, removal equals zero-masking, nothing of the user's model changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc
from constructs import CONSTRUCTS, build, randomise
from oracle import fingerprint, norm_by_formula, outputs, random_scores, relative_gap, same, zeroed
from secateur.errors import NothingToPruneError, UnsupportedModelError
from secateur.nest import tensors_of_output
from secateur.plans import Limits


@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_removal_equals_masking(name: str, share: float) -> None:
    model, example = build(name)
    before = fingerprint(model)
    graph = sc.analyze(model, example)
    assert graph.total_units > 0
    for seed in range(3):
        plan = sc.plan(graph, random_scores(graph, seed), remove=share)
        small = sc.apply(model, plan)
        assert type(small) is type(model)
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
        for reference in (zeroed(model, graph, plan), sc.apply(model, plan, how="mask")):
            assert relative_gap(outputs(small, example), outputs(reference, example)) < 1e-4
        assert sc.measure(small, example, latency=False) == plan.after
    assert same(before, fingerprint(model))


@pytest.mark.parametrize(
    ("name", "prunable"),
    [
        ("conv chain", 12 + 9),
        ("depthwise", 2 * 12 + 6),
        ("residual", 16 * 2 + 16),
        ("residual on the input", 8),
        ("grouped queries", 16 * 2 + 2),  # stream, and two groups of heads
        ("handwritten attention", 16 * 2 + 4),
        ("transformer", 16 * 3 + 4 + 32),
        ("tied", 12 * 2),
        ("mixer", 12 * 2 + 9 + 20),
        ("lstm", 10 + 8),
        ("reused", 12 + 12),
        ("slices", 8 + 16 * 2),  # the first eight channels are pinned by the code
        ("channel maximum", 16 * 2),  # those among which the maximum is taken stay
        ("constant", 16),
        ("rows written", 16 * 4),
        ("solved", 16 * 3),  # a system and its right side are one unit
    ],
)
def test_units_that_may_leave(name: str, prunable: int) -> None:
    model, example = build(name)
    assert sc.analyze(model, example).total_units == prunable


NORMS = {
    "layer norm": lambda affine: (nn.Linear(5, 12), nn.LayerNorm(12, elementwise_affine=affine)),
    "RMS norm": lambda affine: (nn.Linear(5, 12), nn.RMSNorm(12, elementwise_affine=affine)),
    "RMS norm, large ε": lambda affine: (nn.Linear(5, 12), nn.RMSNorm(12, eps=0.3, elementwise_affine=affine)),
    "group norm": lambda affine: (nn.Linear(5, 12), nn.GroupNorm(1, 12, affine=affine)),
    "group norm of images": lambda affine: (nn.Conv2d(5, 12, 3), nn.GroupNorm(1, 12, affine=affine)),
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norms_that_mix_channels_equal_their_formula(name: str, affine: bool) -> None:
    """Removal and masking against the norm's formula over the kept channels, for one layer and by hand."""
    torch.manual_seed(0)
    first, norm = NORMS[name](affine)
    image = isinstance(first, nn.Conv2d)
    last = nn.Conv2d(12, 3, 1) if image else nn.Linear(12, 3)
    model = randomise(nn.Sequential(first, norm, last)).double().eval()
    example = torch.randn(4, 5, 6, 6) if image else torch.randn(4, 5)
    example = example.double()
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.4)
    kept = sorted(set(range(12)) - set(plan.cuts["0.weight"][0]))
    assert 0 < len(kept) < 12
    with torch.no_grad():
        hidden = first(example).movedim(1, -1)[..., kept]
        expected = norm_by_formula(norm, hidden, kept) @ last.weight.flatten(1)[:, kept].T + last.bias
        for how in ("remove", "mask"):
            found = sc.apply(model, plan, how=how)(example).movedim(1, -1)
            assert relative_gap([found], [expected]) < 1e-12


class Stepwise(nn.Module):
    """A norm for each token, and then another one."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.inp, self.loop, self.out = nn.Linear(3, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.one, self.other, self.module = nn.LayerNorm(12), nn.LayerNorm(12), module

    def norm(self, which: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        return which(x) if self.module else F.layer_norm(x, x.shape[-1:], which.weight, which.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x[:, 0])
        for step in x.unbind(1):
            h = self.norm(self.one, self.inp(step) + self.loop(h)).tanh()
        return self.out(self.norm(self.other, h))


@pytest.mark.parametrize("module", [True, False])
def test_norms_that_are_called_for_each_token(module: bool) -> None:
    """Removal and masking against the same few lines on the kept channels, for texts of any length."""
    torch.manual_seed(0)
    net = randomise(Stepwise(module)).double().eval()
    graph = sc.analyze(net, torch.randn(2, 4, 3).double())
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.4)
    kept = sorted(set(range(12)) - set(plan.cuts["inp.weight"][0]))
    assert 0 < len(kept) < 12
    removed, masked = (sc.apply(net, plan, how=how) for how in ("remove", "mask"))
    for length in (1, 4, 7):
        x = torch.randn(5, length, 3).double()
        with torch.no_grad():
            h = net.inp(x[:, 0])[:, kept]
            for step in x.unbind(1):
                h = net.inp(step)[:, kept] + h @ net.loop.weight[kept][:, kept].T + net.loop.bias[kept]
                h = norm_by_formula(net.one, h, kept).tanh()
            expected = norm_by_formula(net.other, h, kept) @ net.out.weight[:, kept].T + net.out.bias
            for model in (removed, masked):
                assert relative_gap([model(x)], [expected]) < 1e-12


STATISTICS = {
    "RMS norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "RMS norm in float": lambda x: (x.double() * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 0.1)).type_as(x),
    "layer norm by hand": lambda x: (
        (x - x.mean(-1, True)) / ((x - x.mean(-1, True)) ** 2).mean(-1, True).add(0.1).sqrt()
    ),
    "variance": lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 0.1),
    "sample deviation": lambda x: x / (x.std(-1, keepdim=True) + 0.1),
    "both": lambda x: x / torch.var_mean(x, -1, keepdim=True)[0],
    "mean": lambda x: x.sigmoid() + x.sigmoid().mean(-1, keepdim=True),
    "global response": lambda x: (g := x.norm(p=2, dim=1, keepdim=True)) / (g.mean(-1, keepdim=True) + 1e-6) * x,
    "vector norm": lambda x: x / torch.linalg.vector_norm(x, ord=2, dim=(1, 2), keepdim=True),
    "vector norm of x": lambda x: x / torch.linalg.vector_norm(x=x, dim=-1, keepdim=True).add(0.3),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_over_channels_are_those_of_the_kept_ones(name: str) -> None:
    """Removal and masking against the same few lines on the kept channels, for one layer and by hand."""
    torch.manual_seed(0)
    model = Wrapped(STATISTICS[name]).double().eval()
    example = torch.randn(2, 4, 5).double()
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.4)
    kept = sorted(set(range(12)) - set(plan.cuts["first.weight"][0]))
    assert 0 < len(kept) < 12
    for x in (example, torch.randn(3, 6, 5).double()):
        with torch.no_grad():
            hidden = STATISTICS[name](x @ model.first.weight[kept].T + model.first.bias[kept])
            expected = hidden @ model.last.weight[:, kept].T + model.last.bias
            for how in ("remove", "mask"):
                assert relative_gap([sc.apply(model, plan, how=how)(x)], [expected]) < 1e-12


class Wrapped(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 12), nn.Linear(12, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


def _by_matmul(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x @ w + b


PRODUCTS = {
    "matmul": (_by_matmul, False),
    "transposed": (lambda x, w, b: torch.matmul(x, w.T) + b, True),
    "transposed view": (lambda x, w, b: x @ w.transpose(0, 1).contiguous() + b, True),
    "cast": (lambda x, w, b: x @ w.float().double() + b, False),
    "addmm": (lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], -1), False),
    "einsum": (lambda x, w, b: torch.einsum("bni,io->bno", x, w) + b, False),
    "einsum of rows": (lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b, True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_parameter_is_a_linear_layer(name: str) -> None:
    """Its columns are neurons: removal and masking against the product with the kept ones."""
    torch.manual_seed(0)
    function, rows = PRODUCTS[name]
    model = Multiplied(function, rows).double().eval()
    example = torch.randn(2, 4, 5).double()
    graph = sc.analyze(model, example)
    assert [(layer.kind, layer.prunable, len(layer.groups)) for layer in graph.layers[:2]] == [("neuron", True, 12)] * 2
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.4)
    kept = [sorted(set(range(12)) - set(plan.cuts[f"b{i}"][0])) for i in (1, 2)]
    w1, w2, w3 = ((w.T if rows else w).detach() for w in (model.w1, model.w2, model.w3))
    b1, b2, b3 = (b.detach() for b in (model.b1, model.b2, model.b3))
    for x in (example, torch.randn(3, 6, 5).double()):
        hidden = torch.tanh(x @ w1[:, kept[0]] + b1[kept[0]])
        hidden = torch.tanh(hidden @ w2[kept[0]][:, kept[1]] + b2[kept[1]])
        for how in ("remove", "mask"):
            small = sc.apply(model, plan, how=how)
            assert relative_gap([small(x).detach()], [hidden @ w3[kept[1]] + b3]) < 1e-12
            assert how == "mask" or sc.measure(small, example, latency=False) == plan.after


class Multiplied(nn.Module):
    """Three products with parameters."""

    def __init__(self, function: Any, rows: bool) -> None:
        super().__init__()
        sizes = ((5, 12), (12, 12), (12, 3))
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(*(size[::-1] if rows else size))) for size in sizes)
        self.b1, self.b2, self.b3 = (nn.Parameter(torch.randn(size[1])) for size in sizes)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.function(x, self.w1, self.b1))
        x = torch.tanh(self.function(x, self.w2, self.b2))
        return self.function(x, self.w3, self.b3)


def test_frozen_parameters_are_pruned_and_stay_frozen() -> None:
    model, example = build("residual")
    model.requires_grad_(False)
    model.stem.weight.requires_grad_(True)
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5))
    assert {n for n, p in small.named_parameters() if p.requires_grad} == {"stem.weight"}


def test_train_mode_is_kept_and_statistics_untouched() -> None:
    model, example = build("conv chain")
    model.train()
    model[1].eval()
    before = fingerprint(model)
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5))
    assert same(before, fingerprint(model))
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, example = build("residual")
    model.to(dtype)
    graph = sc.analyze(model, example.to(dtype))
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5))
    assert {p.dtype for p in small.parameters()} == {dtype}


def test_tied_weights_stay_tied() -> None:
    model, example = build("tied")
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5))
    assert small.out.weight is small.embed.weight
    assert small.embed.embedding_dim == small.out.in_features == 6


def test_attributes_follow() -> None:
    model, example = build("depthwise")
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5, limits=Limits(scope="layer")))
    first, depth, norm = small[0], small[1], small[2]
    assert first.out_channels == depth.in_channels == depth.out_channels == depth.groups == norm.num_features == 6


def test_weight_norm_keeps_its_layer_and_nothing_else() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), normed, nn.ReLU(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    graph = sc.analyze(model, torch.zeros(1, 4))
    assert {layer.name: layer.prunable for layer in graph.layers} == {"0": False, "4": True, "6": False}
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small, x = sc.apply(model, plan), torch.randn(5, 4)
    assert relative_gap([small(x)], [zeroed(model, graph, plan)(x)]) < 1e-5


@pytest.mark.parametrize("kind", ["orthogonal", "spectral_norm", "own"])
def test_parametrized_weights_keep_their_layer_and_nothing_else(kind: str) -> None:
    class Positive(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.exp()

    torch.manual_seed(0)
    layer = nn.Linear(6, 8)
    if kind == "own":
        nn.utils.parametrize.register_parametrization(layer, "weight", Positive())
    else:
        getattr(nn.utils.parametrizations, kind)(layer)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 7), nn.Linear(7, 2)).eval()
    graph = sc.analyze(model, torch.zeros(1, 4))
    assert {layer.name for layer in graph.layers if layer.prunable} == {"4"}
    assert "remove_parametrizations would free it" in str([layer.reason for layer in graph.layers])
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small, x = sc.apply(model, plan), torch.randn(5, 4)
    assert relative_gap([small(x)], [zeroed(model, graph, plan)(x)]) < 1e-5
    with pytest.raises(sc.SecateurError, match="remove_parametrizations"):
        sc.analyze(model, torch.zeros(1, 4), strict=True)


def test_unknown_operation_is_refused_by_name_if_asked() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.special.bessel_j0(self.a(x)))

    with pytest.raises(sc.SecateurError, match=r"bessel_j0.*shape \(1, 4\).*register"):
        sc.analyze(Odd(), torch.zeros(1, 4), strict=True)


def test_a_model_that_cannot_run_says_why() -> None:
    with pytest.raises(sc.SecateurError, match=r"does not run on the example \(\(1, 5\) float32\)"):
        sc.analyze(nn.Linear(4, 2), torch.zeros(1, 5))


def test_nothing_to_prune() -> None:
    graph = sc.analyze(nn.Linear(4, 2), torch.zeros(1, 4))
    with pytest.raises(NothingToPruneError, match="model output"):
        sc.plan(graph, random_scores(graph), remove=0.5)


def test_a_norm_over_all_dimensions_without_parameters_shrinks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
            self.norm = nn.LayerNorm((5, 6), elementwise_affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.b(self.norm(self.a(x)).relu())
            return result

    net = Net().eval()
    graph = sc.analyze(net, torch.randn(5, 4))
    small: Any = sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5))
    assert small.norm.normalized_shape == (5, 3)


class Answers(nn.Module):
    """Returns its features beside an answer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body, self.last, self.name = nn.Linear(5, 12), nn.Linear(12, 3), name

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x).relu()
        return {"features": x, "hidden_states": x, self.name: self.last(x)}


def test_outputs_that_do_not_count_may_become_narrower() -> None:
    model, example = Answers("kind").double(), torch.randn(2, 5).double()
    assert sc.analyze(model, example).total_units == 0
    assert sc.analyze(model, example, output=["kind", "features"]).total_units == 0
    graph = sc.analyze(model, example, output="kind")
    assert graph.total_units == 12
    plan = sc.Plan.from_json(sc.plan(graph, random_scores(graph), remove=0.5).to_json())
    small = sc.apply(model, plan, example=example)
    assert small(example)["features"].shape == (2, 6)
    assert relative_gap([small(example)["kind"]], [zeroed(model, graph, plan)(example)["kind"]]) < 1e-12


def test_runs_take_the_output_that_counts(tmp_path: Path) -> None:
    model, x = Answers("kind"), torch.randn(8, 5)
    asked: dict[str, Any] = {"remove": 0.5, "progress": False}
    with pytest.raises(NothingToPruneError, match="model output"):
        sc.prune(model, [(x, None)], "weight", **asked)
    asked["checkpoint"] = tmp_path / "run"
    assert sc.prune(model, [(x, None)], "weight", output="kind", **asked).model.body.out_features == 6
    assert sc.prune(model, [(x, None)], "weight", output=["kind"], **asked).model.body.out_features == 6
    found = sc.compare(model, [(x, None)], ["weight", "random"], evaluate=lambda net: 1.0, output="kind", remove=0.5)
    assert found.curves["weight"].removed[-1] == 0.5


def test_an_output_that_the_model_does_not_return_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="features, hidden_states, kind, but output names logits"):
        sc.analyze(Answers("kind"), torch.randn(2, 5), output="logits")


def test_beside_logits_states_do_not_count_and_other_entries_do() -> None:
    model, example = Answers("logits"), torch.randn(2, 5)
    reasons = {layer.name: layer.reason for layer in sc.analyze(model, example).layers}
    assert reasons == {"body": "model output", "last": "model output"}  # because of the features
    assert [t.shape[-1] for t in tensors_of_output(model(example))] == [12, 3]
