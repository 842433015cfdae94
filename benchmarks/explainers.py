"""Heat maps by our presets and by others, for `python -m benchmarks.faithfulness`.

Each explainer takes a model, pictures and classes. It returns a map per picture, and what the map should add up to
where the method promises a sum (None if it promises nothing).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.relevance import AlphaBeta, Composite, Epsilon, Flat, Gamma, On
from secateur.relevance.composites import composite_named

Heat = tuple[Tensor, Tensor | None]
Explainer = Callable[[nn.Module, Tensor, Tensor], Heat]

#: Composites that are no presets: candidates for the default of `explain`.
CANDIDATES = {
    "epsilon": Composite(On(Epsilon(1e-6)), name="epsilon"),
    "gamma": Composite(On(Gamma(0.25)), name="gamma"),
    "epsilon_gamma": Composite(On(Epsilon(1e-6), kind="linear"), On(Gamma(0.25)), name="epsilon_gamma"),
    "epsilon_gamma_flat": Composite(
        On(Flat(), first=True, kind="conv"), On(Epsilon(1e-6), kind="linear"), On(Gamma(0.25)),
        name="epsilon_gamma_flat",
    ),
    "epsilon_plus_flat": Composite(
        On(Flat(), first=True, kind="conv"), On(Epsilon(1e-6), kind="linear"), On(AlphaBeta(1, 0)),
        name="epsilon_plus_flat",
    ),
    "epsilon_alpha2beta1": Composite(
        On(Epsilon(1e-6), kind="linear"), On(AlphaBeta(2, 1), kind="conv"), On(AlphaBeta(1, 0)),
        name="epsilon_alpha2beta1",
    ),
}  # fmt: skip


def ours(name: str) -> Explainer:
    composite = CANDIDATES.get(name) or composite_named(name)

    def run(model: nn.Module, x: Tensor, y: Tensor) -> Heat:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = sc.explain(model, x, y, composite=composite)
        begun = seen.output.gather(1, y[:, None])[:, 0] if composite.start == "logit" else torch.ones(len(x))
        return seen.heat.detach().cpu(), begun.detach().cpu()

    return run


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = model(x).gather(1, y[:, None])[:, 0]
        return torch.autograd.grad(logits.sum(), x)[0], logits.detach()


def gradient_times_input(model: nn.Module, x: Tensor, y: Tensor) -> Heat:
    gradient, logits = _gradient(model, x, y)
    return (x * gradient).sum(1).cpu(), logits.cpu()


def integrated_gradients(model: nn.Module, x: Tensor, y: Tensor, steps: int = 32) -> Heat:
    """From the mean colour, by the midpoint rule."""
    total = torch.zeros_like(x)
    for step in range(steps):
        total += _gradient(model, x * (step + 0.5) / steps, y)[0]
    with torch.no_grad():
        ends = [model(part).gather(1, y[:, None])[:, 0] for part in (x, torch.zeros_like(x))]
    return (x * total / steps).sum(1).cpu(), (ends[0] - ends[1]).cpu()


def grad_cam(model: nn.Module, x: Tensor, y: Tensor) -> Heat:
    """At the last convolution with more than one position."""
    seen: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _, __, out: seen.append(out) if out.shape[-1] > 1 else None)
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    ]
    try:
        with torch.enable_grad():
            logits = model(x.detach().requires_grad_(True)).gather(1, y[:, None])[:, 0]
            (gradient,) = torch.autograd.grad(logits.sum(), seen[-1])
    finally:
        for handle in handles:
            handle.remove()
    cam = (gradient.mean((2, 3), keepdim=True) * seen[-1]).sum(1, keepdim=True).relu().detach()
    return F.interpolate(cam, x.shape[2:], mode="bilinear")[:, 0].cpu(), None


def random_map(model: nn.Module, x: Tensor, y: Tensor) -> Heat:
    return torch.rand(len(x), *x.shape[2:], generator=torch.Generator().manual_seed(0)), None


def rollout(model: nn.Module, x: Tensor, y: Tensor) -> Heat:
    """Attention rollout: products of attention weights, half of each step being the residual connection."""
    grids: list[Tensor] = []

    def see(module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        with torch.no_grad():
            weights = module.mix(*[module.norm1(inputs[0])] * 3, need_weights=True)[1]
        weights = weights + torch.eye(weights.shape[-1], device=weights.device)
        grids.append(weights / weights.sum(-1, keepdim=True))

    blocks = [module for module in model.modules() if hasattr(module, "mix")]
    handles = [block.register_forward_hook(see) for block in blocks]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    whole = grids[0]
    for grid in grids[1:]:
        whole = grid @ whole
    side = int(whole.shape[-1] ** 0.5)
    heat = whole.mean(1).view(len(x), 1, side, side)
    return F.interpolate(heat, x.shape[2:], mode="bilinear")[:, 0].cpu(), None


# -- zennit ------------------------------------------------------------------------------------------------------------
def zennit(name: str) -> Explainer:
    """A composite of zennit. Batch norms are merged before: its own merging breaks some versions of torch."""

    def run(model: nn.Module, x: Tensor, y: Tensor) -> Heat:
        from zennit import composites
        from zennit.attribution import Gradient
        from zennit.torchvision import ResNetBottleneckCanonizer

        net = merged(model)
        canonizers = [ResNetBottleneckCanonizer()] if any("layer1" in n for n, _ in net.named_children()) else []
        if name == "EpsilonGammaBox":
            # black and white after normalisation, as far as the channels differ; [-1, 1] for EfficientNet-Lite0
            ends = (-1.0, 1.0) if float(x.abs().amax()) <= 1 else (-2.2, 2.7)
            low, high = (torch.full_like(x[:1], value) for value in ends)
            composite = composites.EpsilonGammaBox(low=low, high=high, canonizers=canonizers)
        else:
            composite = getattr(composites, name)(canonizers=canonizers)
        seed = torch.zeros(len(x), model(x[:1]).shape[1], device=x.device).scatter_(1, y[:, None], 1)
        with warnings.catch_warnings(), Gradient(net, composite) as attributor:
            warnings.simplefilter("ignore")
            _, heat = attributor(x.detach().clone(), seed)
        return heat.sum(1).detach().cpu(), torch.ones(len(x))

    return run


def merged(model: nn.Module) -> nn.Module:
    """A copy whose batch norms are part of the convolutions before them."""
    net, last = copy.deepcopy(model).eval(), None
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.ReLU):
            module.inplace = False
        if isinstance(module, nn.Conv2d):
            last = (name, module)
        elif isinstance(module, nn.BatchNorm2d) and last is not None:
            fused = torch.nn.utils.fusion.fuse_conv_bn_eval(last[1], _plain(module))
            # timm's batch norms hold their activation
            after = getattr(module, "act", None) or nn.Identity()
            for place, new in ((last[0], fused), (name, after)):
                parent, _, own = place.rpartition(".")
                setattr(net.get_submodule(parent), own, new)
            last = None
    return net


def _plain(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    plain = nn.BatchNorm2d(norm.num_features, norm.eps).to(norm.weight)
    plain.load_state_dict({k: v for k, v in norm.state_dict().items() if k in plain.state_dict()})
    return plain.eval()


def shuffled(model: nn.Module, share: float) -> nn.Module:
    """A copy whose last layers, by share, have new random weights."""
    net = copy.deepcopy(model)
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.MultiheadAttention)]
    torch.manual_seed(0)
    for layer in layers[len(layers) - max(1, round(share * len(layers))) :]:
        reset: Any = getattr(layer, "reset_parameters", None) or layer._reset_parameters
        reset()
    return net.eval()


PICTURES: dict[str, Explainer] = {
    **{name: ours(name) for name in ("alpha1beta0", "epsilon_plus", "epsilon_gamma_box", "attnlrp", "attnlrp_gamma")},
    **{name: ours(name) for name in CANDIDATES},
    "gradient × input": gradient_times_input,
    "integrated gradients": integrated_gradients,
    "Grad-CAM": grad_cam,
    "zennit EpsilonPlus": zennit("EpsilonPlus"),
    "zennit EpsilonGammaBox": zennit("EpsilonGammaBox"),
    "attention rollout": rollout,
    "random": random_map,
}
