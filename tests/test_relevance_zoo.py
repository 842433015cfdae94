"""Relevance is conserved on the smallest member of every torchvision family: random weights, biases and statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from constructs import randomise
from secateur.relevance import explain, unit_relevance

pytestmark = pytest.mark.usefixtures("one_rule")

models = pytest.importorskip("torchvision.models")

CONVOLUTIONAL = {
    "alexnet": 64, "vgg11": 32, "vgg11_bn": 32, "resnet18": 64, "resnext50_32x4d": 64, "wide_resnet50_2": 32,
    "squeezenet1_1": 64, "densenet121": 64, "googlenet": 64, "inception_v3": 80, "mnasnet0_5": 64, "mobilenet_v2": 64,
    "mobilenet_v3_small": 64, "shufflenet_v2_x0_5": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64,
    "regnet_x_400mf": 64, "regnet_y_400mf": 64, "convnext_tiny": 64,
}  # fmt: skip
ATTENDING = {"vit_b_16": 64, "swin_t": 64, "swin_v2_t": 64, "maxvit": 56, "convnext_tiny": 64}


def build(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    options = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}.get(name, {})
    if name.startswith("vit"):
        options = {"image_size": size}
    if name == "maxvit":  # maxvit_t takes 224² only, which is slow; the same blocks, fewer and narrower
        net = models.MaxVit((size, size), 32, 7, [32, 64], [2, 2], 16, 0.0)
    else:
        net = getattr(models, name)(weights=None, **options)
    randomise(net)
    if name.startswith("vit"):  # starts at zero
        nn.init.normal_(net.heads.head.weight, 0, 0.05)
    return net


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_networks_conserve(name):
    net = build(name, CONVOLUTIONAL[name])
    x = torch.randn(2, 3, CONVOLUTIONAL[name], CONVOLUTIONAL[name])
    seen = explain(net, x, target=[3, 5])
    books = seen.conservation
    assert books.start == 2
    assert books.worst <= 0.01, str(books)
    assert books.absorbed == 0
    assert float(seen.input.sum()) == pytest.approx(2, rel=0.01)
    assert float(seen.input.min()) >= 0  # α1β0 never turns relevance around
    convs = {path for path, module in net.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    assert {path for path in convs if "aux" not in path and "AuxLogits" not in path} == set(seen.units)


@pytest.mark.parametrize("preset", ["alpha1beta0", "attnlrp", "attnlrp_gamma"])
@pytest.mark.parametrize("name", ATTENDING)
def test_transformers_conserve(name, preset):
    size = ATTENDING[name]
    seen = explain(build(name, size), torch.randn(1, 3, size, size), target=3, composite=preset)
    books = seen.conservation
    assert books.worst <= 0.01, str(books)
    assert books.input + books.absorbed == pytest.approx(books.start, rel=0.01)


@pytest.mark.parametrize("preset", ["epsilon_plus", "epsilon_gamma_box", "script-resnet"])
def test_presets_run_on_a_residual_network(preset):
    net = build("resnet18", 64)
    seen = explain(net, torch.randn(1, 3, 64, 64), target=3, composite=preset)
    assert seen.conservation.worst <= 0.01, str(seen.conservation)


def test_scoring_alone_gives_the_same_units():
    net = build("resnet18", 64)
    x, y = torch.randn(4, 3, 64, 64), torch.tensor([1, 2, 3, 4])
    together = explain(net, x, y).weights
    units, books = unit_relevance(net, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert units.keys() == together.keys()
    for name, scores in units.items():
        torch.testing.assert_close(scores.float(), together[name], rtol=1e-4, atol=1e-6)
    assert books.start == 4
    assert books.input == pytest.approx(4, rel=1e-3)
    totals = {name: float(u.sum()) for name, u in units.items()}
    assert totals["conv1.weight"] == pytest.approx(4, rel=1e-3)
    assert totals["fc.weight"] == pytest.approx(4, rel=1e-3)
