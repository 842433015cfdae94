"""The smallest member of every torchvision classification family: removal equals masking, files, ONNX, no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from constructs import randomise
from oracle import fingerprint, outputs, random_scores, relative_gap, same, zeroed
from secateur.plans import Limits

torchvision = pytest.importorskip("torchvision")

# Name → input size, further arguments. The size is the smallest that the family takes.
FAMILIES: dict[str, tuple[int, dict[str, object]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (32, {}),
    "densenet121": (32, {}),
    "efficientnet_b0": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "googlenet": (64, {"init_weights": False}),
    "inception_v3": (96, {"init_weights": False}),
    "maxvit_t": (64, {}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_x_400mf": (32, {}),
    "regnet_y_400mf": (32, {}),
    "resnet18": (32, {}),
    "resnext50_32x4d": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (32, {}),
    "swin_t": (32, {}),
    "swin_v2_t": (32, {}),
    "vgg11": (32, {}),
    "vgg11_bn": (32, {}),
    "vit_b_16": (32, {}),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A member of the family. The largest are built narrower or for smaller windows: the same layers, fewer numbers."""
    size, extra = FAMILIES[name]
    torch.manual_seed(seed)
    model: nn.Module
    if name == "maxvit_t":
        model = torchvision.models.MaxVit((size, size), 32, 2, [32, 64, 128, 256], [1, 2, 2, 1], 32, 0, num_classes=10)
    elif name == "vit_b_16":
        model = torchvision.models.VisionTransformer(size, 16, 12, 12, 192, 768, num_classes=10)
    elif name in ("alexnet", "vgg11", "vgg11_bn"):
        with torch.device("meta"):  # three quarters of their numbers are in layers that are replaced
            model = torchvision.models.get_model(name, num_classes=10)
        fewer = {4096: 128}
        for i, layer in enumerate(model.classifier):
            if isinstance(layer, nn.Linear):
                inputs, out = layer.in_features, layer.out_features
                model.classifier[i] = nn.Linear(fewer.get(inputs, inputs), fewer.get(out, out), device="meta")
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        model = torchvision.models.get_model(name, num_classes=10, **extra)
    return randomise(model).eval(), torch.randn(1, 3, size, size)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, tmp_path: Path) -> None:
    model, example = make(name)
    before = fingerprint(model)
    graph = sc.analyze(model, example)
    assert graph.total_units > 0.4 * graph.units.sum()
    for share in (0.3, 0.7):
        plan = sc.plan(
            graph, random_scores(graph), remove=share, limits=Limits(scope="global" if share < 0.5 else "layer")
        )
        small = sc.apply(model, plan)
        reference = zeroed(model, graph, plan)
        assert relative_gap(outputs(small, example), outputs(reference, example)) < 1e-4
        assert sc.measure(small, example, latency=False) == plan.after
    assert same(before, fingerprint(model))
    sc.save(small, tmp_path / "m")
    again = sc.load(tmp_path / "m", make(name, seed=1)[0])
    assert relative_gap(outputs(again, example), outputs(small, example)) == 0


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_still_train(name: str) -> None:
    """Heads that run in training only must have shrunk with what they read."""
    model = torchvision.models.get_model(name, num_classes=10, aux_logits=True, **FAMILIES[name][1])
    example = torch.randn(2, 3, *([224, 224] if name == "googlenet" else [299, 299]))
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5)).train()
    assert [tuple(t.shape) for t in small(example) if t is not None] == [(2, 10)] * (3 if name == "googlenet" else 2)


@pytest.mark.parametrize(
    ("name", "size", "giga"),
    [("resnet18", 224, 1.814), ("resnet50", 224, 4.089), ("vgg16", 224, 15.470), ("vit_b_16", 224, 17.56)],
)
@pytest.mark.parametrize("grad", [True, False])
def test_macs(name: str, size: int, giga: float, grad: bool) -> None:
    model = torchvision.models.get_model(name)
    with torch.set_grad_enabled(grad):
        cost = sc.measure(model, torch.zeros(1, 3, size, size), latency=False)
    assert round(cost.macs / 1e9, 3 if giga < 16 else 2) == giga
    assert cost.params == sum(p.numel() for p in model.parameters())


def test_plans_reach_their_targets() -> None:
    model, example = make("resnet18")
    graph = sc.analyze(model, example)
    scores = random_scores(graph)
    for keep in ({"macs": 0.5}, {"params": 0.3}, {"macs": 2e7}, {"params": 0.6, "macs": 0.6}):
        for round_to in (1, 8):
            plan = sc.plan(graph, scores, keep=keep, limits=Limits(round_to=round_to))
            cost = sc.measure(sc.apply(model, plan), example, latency=False)
            for name, value in keep.items():
                limit = value * getattr(graph.cost, name) if value <= 1 else value
                assert 0.85 * limit < getattr(cost, name) <= limit
    plan = sc.plan(graph, scores, remove=0.5, limits=Limits(round_to=8))
    small = sc.apply(model, plan)
    assert all(m.out_channels % 8 == 0 for m in small.modules() if isinstance(m, nn.Conv2d))


def test_targets_out_of_reach_say_how_far_one_can_go() -> None:
    model, example = make("resnet18")
    graph = sc.analyze(model, example)
    scores = random_scores(graph)
    with pytest.raises(sc.SecateurError, match=r"at most \d+\.\d % can leave"):
        sc.plan(graph, scores, remove=0.9, limits=Limits(min_units=32))
    with pytest.raises(sc.SecateurError, match=r"cannot reach .* remain"):
        sc.plan(graph, scores, keep={"macs": 0.05}, limits=Limits(ignore=["layer[34]*"]))
    with pytest.raises(sc.SecateurError, match="exactly one target"):
        sc.plan(graph, scores)


def test_min_units_and_ignore_hold() -> None:
    model, example = make("resnet18")
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph), remove=0.8, limits=Limits(ignore=["layer1.*"], min_units=20))
    small = sc.apply(model, plan)
    convs = {n: m for n, m in small.named_modules() if isinstance(m, nn.Conv2d)}
    assert min(m.out_channels for m in convs.values()) >= 20
    assert all(m.out_channels == 64 for n, m in convs.items() if n.startswith("layer1"))


def test_scope_layer_takes_the_same_share_everywhere() -> None:
    model, example = make("vgg11")
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph), remove=0.5, limits=Limits(scope="layer"))
    assert np.allclose([after / before for before, after in plan.layers.values()], 0.5, atol=0.02)


def test_start_continues_a_plan() -> None:
    model, example = make("resnet18")
    graph = sc.analyze(model, example)
    scores = random_scores(graph)
    first = sc.plan(graph, scores, remove=0.2)
    second = sc.plan(graph, scores, remove=0.4, start=first)
    assert set(first.groups) < set(second.groups)
    assert second == sc.plan(graph, scores, remove=0.4)


def test_groups_are_listed_with_their_members() -> None:
    model, example = make("resnet18")
    graph = sc.analyze(model, example)
    group = next(g for g in graph.groups if g.layer == "layer1.0.conv1")
    assert group.prunable
    assert {(m.parameter, m.dim) for m in group.members} == {
        ("layer1.0.conv1.weight", 0), ("layer1.0.bn1.weight", 0), ("layer1.0.bn1.bias", 0),
        ("layer1.0.bn1.running_mean", 0), ("layer1.0.bn1.running_var", 0), ("layer1.0.conv2.weight", 1),
    }  # fmt: skip
    assert {m.indices for m in group.members} == {(0,)}
    assert "layer1.0.conv1" in str(graph)
