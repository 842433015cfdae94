"""Convolutions with standardised weights, as timm's NFNets and ResNetV2 have them, become plain ones.

import timm
from secateur.integrations.timm import plain_convolutions

net = plain_convolutions(timm.create_model("nf_regnet_b0", pretrained=True))
result = secateur.prune(net, data, keep={"macs": 0.7})

Such a layer subtracts from each filter its mean, and divides it by its deviation, whenever it runs. Both run over the
filter's inputs: without one of them, all other weights would change, and removal would not be masking. So the inputs of
these layers stay. As numbers, the weights do not change, and every channel may leave. The answers are the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.errors import UnsupportedModelError


def plain_convolutions(model: nn.Module) -> nn.Module:
    """A copy in which convolutions that compute their weights from parameters alone have the result as their weight.

    Training goes on with plain weights. To load a pruned one, make the network in the same way:
    `sc.load("small", plain_convolutions(timm.create_model(…)))`.
    """
    made = copy.deepcopy(model)
    for path, module in list(made.named_modules()):
        if not isinstance(module, nn.Conv2d) or type(module).forward is nn.Conv2d.forward:
            continue
        with torch.no_grad():
            plain = _plain(module)
            if plain is not None:
                _check(module, plain, path)
        if plain is not None and not path:
            return plain
        if plain is not None:
            above, _, name = path.rpartition(".")
            setattr(made.get_submodule(above), name, plain)
    return made


class _Weight(TorchFunctionMode):
    """Notes the weight that a convolution is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, torch.conv2d):
            self.found.append(kwargs["weight"] if "weight" in kwargs else args[1])
        return func(*args, **kwargs)


def _plain(module: nn.Conv2d) -> nn.Conv2d | None:
    """A plain layer with the weight that this one computes; None if it computes none."""
    with _Weight() as noted:
        module(_example(module, 0))
    if len(noted.found) != 1 or noted.found[0] is module.weight or noted.found[0].shape != module.weight.shape:
        return None
    kind: Any = nn.Conv2d
    if getattr(module, "same_pad", False):  # the border depends on the size of the image
        from timm.layers.conv2d_same import Conv2dSame

        kind = Conv2dSame
    plain: nn.Conv2d = kind(
        module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding, module.dilation,
        module.groups, module.bias is not None,
    ).to(module.weight)  # fmt: skip
    plain.weight.copy_(noted.found[0]).requires_grad_(module.weight.requires_grad)
    if module.bias is not None:
        plain.bias = module.bias
    return plain.train(module.training)


def _check(module: nn.Conv2d, plain: nn.Conv2d, path: str) -> None:
    """Refuse a layer that does something else as well."""
    for size in (0, 1, 4):
        x = _example(module, size)
        wanted, found = module(x), plain(x)
        if wanted.shape != found.shape or not torch.allclose(wanted, found, rtol=1e-5, atol=1e-6):
            raise UnsupportedModelError(
                f"{type(module).__name__} is not a convolution with the weights that it computes.",
                where=path,
                fix="replace it by a plain convolution yourself",
            )


def _example(module: nn.Conv2d, more: int) -> Tensor:
    sizes = [d * (k - 1) + 1 + more for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    drawn = torch.rand(2, module.in_channels, *sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(module.weight)
