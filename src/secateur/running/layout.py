"""The order of numbers in memory: convolutions are faster if the channels of a pixel lie side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nest import map_tensors
from secateur.running.copies import named_tensors, shared_copy
from secateur.running.devices import device_of, full_precision
from secateur.running.logits import logits_of
from secateur.running.sandbox import run, seeded, unmoved

log = logging.getLogger("secateur")

#: Puts inputs into the order that a model likes.
Order = Callable[[Any], Any]
_ROUNDING, _STEPS = 1e-4, 4  # of the largest logit, and steps of its number format: sums in another order
#: How far gradients may be apart, as a share of their norm, and what is small beside the largest of all.
_APART, _SMALL = 0.02, 1e-4


def channels_last(inputs: Any) -> Any:
    """Images with the channels of a pixel side by side; everything else as it is."""
    return map_tensors(_last, inputs)


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def in_best_order(model: nn.Module, sample: Any) -> tuple[nn.Module, Order]:
    """The model, or a faster copy for images on a CPU, and what brings its inputs into the same order.

    The order changes nothing but rounding, unless code looks at the memory itself: the sample must show it.
    """
    if not _convolves(model):
        return model, unordered
    other = _with_channels_last(model)
    other.train(model.training)
    return (other, channels_last) if _agree(model, other, sample) else (model, unordered)


def order_for(model: nn.Module, sample: Any) -> Order:
    """The same for a model whose weights stay as they are: each call puts them into the order of its inputs, which
    takes little time if these are several images."""
    return channels_last if _convolves(model) and _agree(model, model, sample) else unordered


def bears_channels_last(model: nn.Module, sample: Any) -> bool:
    """Whether a model of images, on a CPU or GPU, says the same to a sample if the channels of its weights are last.

    A `view` after convolutions, the commonest way to flatten, mostly asks for the usual order.
    """
    place = device_of(model)
    if not has_images(model) or place is None or place.type not in ("cpu", "cuda"):
        return False
    with seeded(0, 0), full_precision(), torch.no_grad():
        return _agree(shared_copy(model).eval(), _with_channels_last(model).eval(), sample, unordered)


def learns_channels_last(model: nn.Module, sample: Any) -> bool:
    """Whether it has the same gradients, and some in training mode, too.

    They are compared in evaluation mode: with few samples, those of batch norms may be nothing but rounding, and random
    numbers are drawn in the order of memory.
    """
    with unmoved(model), seeded(0, 0), full_precision(), torch.enable_grad():  # a forward may write to weights
        try:
            other = _with_channels_last(model)
            expected, found = (_slopes(each.eval(), sample) for each in (shared_copy(model), other))
            _slopes(other.train(), sample)
        except Exception as error:
            log.debug("channels last are not taken: %s", error)
            return False
    return _alike(expected, found)


def _slopes(model: nn.Module, sample: Any) -> list[Tensor]:
    """The gradients of a sum of logits, each with a weight of its own, so that they do not cancel out."""
    said = _said(model, sample)
    weights = torch.linspace(0.5, 1, said.numel(), dtype=said.dtype, device=said.device).view(said.shape)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((said * weights).sum(), learning, allow_unused=True) if learning else ()
    return [torch.zeros(1, device=said.device) if slope is None else slope for slope in found]


def _alike(expected: list[Tensor], found: list[Tensor]) -> bool:
    """Whether gradients are the same, up to rounding."""
    largest = max([float(slope.abs().max()) for slope in expected if slope.numel()], default=0.0)
    return all(
        one.shape == other.shape
        and bool((one - other).norm() <= _APART * (one.norm() + _SMALL * largest * one.numel() ** 0.5))
        for one, other in zip(expected, found, strict=True)
    )


def _with_channels_last(model: nn.Module) -> nn.Module:
    return arrange(shared_copy(model))


def arrange(model: nn.Module) -> nn.Module:
    """Put the channels of its weights last, in place. (`model.to(memory_format=…)` fails where there are 3-D ones.)"""
    for _, tensor in named_tensors(model):
        if tensor.ndim == 4:  # a new order also where sizes of 1 leave both open: convolutions look at it
            tensor.data = tensor.data.clone(memory_format=torch.channels_last)
    return model


def has_images(model: nn.Module) -> bool:
    """Whether a model has weights of four dimensions, as convolutions of images have."""
    return any(parameter.ndim == 4 for parameter in model.parameters())


def _convolves(model: nn.Module) -> bool:
    place = device_of(model)
    return (place is None or place.type == "cpu") and any(isinstance(m, nn.Conv2d) for m in model.modules())


def _agree(model: nn.Module, other: nn.Module, sample: Any, order: Order = channels_last) -> bool:
    """Whether another model says the same to a sample in another order."""
    try:  # which of several tensors is the answer does not matter here, so nothing is said about it
        expected, found = _said(model, sample), _said(other, order(sample))
    except Exception as error:  # a `view` may ask for the usual order
        log.debug("channels last are not taken: %s", error)
        return False
    if found.shape != expected.shape or not found.numel():  # no answer shows nothing
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    rounding = max(_ROUNDING, _STEPS * torch.finfo(found.dtype).eps)
    return bool((found - expected).abs().max() <= rounding * expected.abs().max())


def _said(model: nn.Module, sample: Any) -> Tensor:
    """What a model answers to a copy of a sample, since its forward may write to that."""
    return logits_of(run(model, map_tensors(torch.clone, sample)), warn=False)


def unordered(inputs: Any) -> Any:
    """Inputs as they are."""
    return inputs
