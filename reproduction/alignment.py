"""Layers of VGG and AlexNet widened with zeros while they are trained, so that a GPU's matrix units can be used.

After filters were removed, a layer has 61 channels or 347. In half precision, matrix units want multiples of 8. The
channels that are added are 0 and get no gradient: what they read is 0 and so is what reads them. The function and its
training stay the same; a test compares them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.networks import is_split
from secateur.errors import SecateurError

#: What the channels of a layer are a multiple of.
MULTIPLE = 8


def aligned(model: nn.Module, multiple: int = MULTIPLE) -> nn.Module:
    """A copy of VGG or AlexNet whose convolutions have a multiple of so many filters, or the model itself.

    The model itself comes back if it has other layers, or none to widen. `take_back` undoes it.
    """
    if not is_split(model) or not _is_plain(model):
        return model
    if all(layer.out_channels % multiple == 0 for layer in _convolutions(model)):
        return model
    wide = copy.deepcopy(model)
    before, added = 0, 0
    with torch.no_grad():
        for layer in _convolutions(wide):
            before, now = added, -layer.out_channels % multiple
            weight, bias = layer.weight, layer.bias
            layer.weight = _parameter(F.pad(weight, (0, 0, 0, 0, 0, before, 0, now)), weight)
            if bias is not None:
                layer.bias = _parameter(F.pad(bias, (0, now)), bias)
            layer.in_channels, layer.out_channels, added = layer.in_channels + before, layer.out_channels + now, now
            filters = layer.out_channels
        head = _first_linear(wide)
        pixels = head.in_features // (filters - added)
        head.weight = _parameter(F.pad(head.weight, (0, added * pixels)), head.weight)
        head.in_features = filters * pixels
    return wide


def take_back(wide: nn.Module, model: nn.Module) -> None:
    """Write the numbers of the widened copy into the model. What was added must still be 0."""
    with torch.no_grad():
        for (name, own), found in zip(model.named_parameters(), wide.parameters(), strict=True):
            inside = tuple(slice(size) for size in own.shape)
            own.copy_(found[inside])
            if found.shape != own.shape:
                rest = found.clone()
                rest[inside] = 0
                if rest.any():
                    raise SecateurError(f"`{name}` has numbers in the channels that were added.")


def _parameter(padded: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter that is trained if the other one is, in the memory format that convolutions like on its device."""
    order = torch.channels_last if padded.is_cuda and padded.ndim == 4 else torch.contiguous_format
    return nn.Parameter(padded.contiguous(memory_format=order), like.requires_grad)


def _is_plain(model: nn.Module) -> bool:
    """Whether the features are only convolutions without groups, ReLUs and poolings, one after another."""
    known = (nn.Sequential, nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d)
    features = model.features
    assert isinstance(features, nn.Module)
    return (
        isinstance(features, nn.Sequential)
        and all(type(module) in known for module in features.modules())
        and all(layer.groups == 1 for layer in _convolutions(model))
        and any(True for _ in _convolutions(model))
    )


def _convolutions(model: nn.Module) -> Iterator[nn.Conv2d]:
    assert isinstance(model.features, nn.Module)
    yield from (module for module in model.features.modules() if isinstance(module, nn.Conv2d))


def _first_linear(model: nn.Module) -> nn.Linear:
    assert isinstance(model.classifier, nn.Module)
    return next(module for module in model.classifier.modules() if isinstance(module, nn.Linear))
