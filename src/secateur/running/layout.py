"""The order of numbers in memory: convolutions are faster if the channels of a pixel lie side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nest import map_tensors
from secateur.running.copies import shared_copy
from secateur.running.devices import device_of, full_precision
from secateur.running.logits import logits_of
from secateur.running.sandbox import run, seeded

log = logging.getLogger("secateur")

#: Puts inputs into the order that a model likes.
Order = Callable[[Any], Any]
_ROUNDING, _STEPS = 1e-4, 4  # of the largest logit, and steps of its number format: sums in another order


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
    """Whether it has gradients in training mode, too."""
    other = _with_channels_last(model).train()
    try:
        with seeded(0, 0), torch.enable_grad():
            said = logits_of(run(other, sample), warn=False).square().sum()
            learning = [parameter for parameter in other.parameters() if parameter.requires_grad]
            if learning:
                torch.autograd.grad(said, learning, allow_unused=True)
    except Exception as error:
        log.debug("channels last are not taken: %s", error)
        return False
    return True


def _with_channels_last(model: nn.Module) -> nn.Module:
    return shared_copy(model).to(memory_format=torch.channels_last)


def has_images(model: nn.Module) -> bool:
    """Whether a model has weights of four dimensions, as convolutions of images have."""
    return any(parameter.ndim == 4 for parameter in model.parameters())


def _convolves(model: nn.Module) -> bool:
    place = device_of(model)
    return (place is None or place.type == "cpu") and any(isinstance(m, nn.Conv2d) for m in model.modules())


def _agree(model: nn.Module, other: nn.Module, sample: Any, order: Order = channels_last) -> bool:
    """Whether another model says the same to a sample in another order."""
    try:  # which of several tensors is the answer does not matter here, so nothing is said about it
        outputs = run(model, sample), run(other, order(sample))
        expected, found = (logits_of(output, warn=False) for output in outputs)
    except Exception as error:  # a `view` may ask for the usual order
        log.debug("channels last are not taken: %s", error)
        return False
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point() or not found.numel():
        return torch.equal(found, expected)
    rounding = max(_ROUNDING, _STEPS * torch.finfo(found.dtype).eps)
    return bool((found - expected).abs().max() <= rounding * expected.abs().max())


def unordered(inputs: Any) -> Any:
    """Inputs as they are."""
    return inputs
