"""The same numbers as zennit wherever the rules are defined alike.

Not alike: zennit gives biases a share of α-β relevance unless told otherwise (we never do), and shares residual sums
and average pools by signed contributions (we do by positive parts, and are told here to do as zennit does). Its
stabiliser of 1e-6 is not small beside the sums in a deep network, so it is set to 1e-12.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secateur.relevance import AlphaBeta, Composite, Epsilon, Norm, On, explain

pytest.importorskip("zennit")
models = pytest.importorskip("torchvision.models")

from zennit.attribution import Gradient  # noqa: E402
from zennit.composites import LayerMapComposite  # noqa: E402
from zennit.rules import AlphaBeta as TheirAlphaBeta  # noqa: E402
from zennit.rules import Epsilon as TheirEpsilon  # noqa: E402
from zennit.rules import Norm as TheirNorm  # noqa: E402
from zennit.rules import Pass as TheirPass  # noqa: E402
from zennit.torchvision import ResNetCanonizer  # noqa: E402
from zennit.types import Activation, AvgPool, BatchNorm, Convolution, Linear  # noqa: E402

OURS = Composite(On(Norm(1e-12), kind=("add", "pool")), On(AlphaBeta(1, 0)))


def theirs(net, x, target, layer_rule, canonizers=(), head=None):
    from zennit.layer import Sum

    class Rules(LayerMapComposite):
        pass

    maps = [(Activation, TheirPass()), (Sum, TheirNorm(stabilizer=1e-12)), (AvgPool, TheirNorm(stabilizer=1e-12))]
    maps += [(Convolution, layer_rule), (Linear, head or layer_rule), (BatchNorm, TheirPass())]
    units = {}

    def keep(name):
        def hook(module, args, output):
            output.register_hook(lambda grad: units.__setitem__(name, grad.detach()))

        return hook

    with Gradient(net, Rules(maps, canonizers=list(canonizers))) as attributor:
        handles = [
            module.register_forward_hook(keep(path))
            for path, module in net.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear)
        ]
        _, relevance = attributor(x, torch.eye(1000, dtype=x.dtype)[target])
        for handle in handles:
            handle.remove()
    return relevance, {name: r.sum([d for d in range(r.dim()) if d != 1]) for name, r in units.items()}


def close(ours, wanted):
    assert float((ours - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def out_of_place(net):
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return net.eval()


@pytest.mark.parametrize("rule", ["α1β0", "α2β1", "ε in the head"])
def test_vgg16(rule):
    torch.manual_seed(0)
    net = out_of_place(models.vgg16(weights=None, init_weights=False))
    # 64 instead of 4096 hidden neurons: the same kinds of layers, in seconds.
    net.classifier[0], net.classifier[3], net.classifier[6] = (
        nn.Linear(25088, 64),
        nn.Linear(64, 64),
        nn.Linear(64, 1000),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.bias, 0, 0.05)
    x, target = torch.randn(2, 3, 64, 64), [7, 8]
    alpha, beta = (2, 1) if rule == "α2β1" else (1, 0)
    head, composite = None, Composite(On(Norm(1e-12), kind="pool"), On(AlphaBeta(alpha, beta)))
    if rule == "ε in the head":
        head = TheirEpsilon(1e-6)
        composite = Composite(On(Epsilon(1e-6, bias="absorb"), kind="linear"), *composite.lines)
    relevance, units = theirs(
        net, x, target, TheirAlphaBeta(alpha, beta, zero_params="bias", stabilizer=1e-12), head=head
    )
    seen = explain(net, x, target, composite=composite)
    close(seen.input, relevance)
    for name, wanted in units.items():
        close(seen.units[name], wanted)


def test_resnet18_with_its_canonizer():
    torch.manual_seed(0)
    net = out_of_place(models.resnet18(weights=None))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
            module.eps = (
                1e-9  # after merging, zennit's norm still divides by √(1 + eps): 5e-6, times every cancelling sum
            )
    x, target = torch.randn(2, 3, 64, 64), [7, 8]
    seen = explain(net, x, target, composite=OURS)
    relevance, units = theirs(
        net, x, target, TheirAlphaBeta(1, 0, zero_params="bias", stabilizer=1e-12), canonizers=[ResNetCanonizer()]
    )
    close(seen.input, relevance)
    for name, wanted in units.items():
        close(seen.units[name], wanted)
