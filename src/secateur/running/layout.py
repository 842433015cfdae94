"""The order of numbers in memory: convolutions of a CPU are faster if the channels of a pixel lie side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nest import map_tensors
from secateur.running.copies import shared_copy
from secateur.running.devices import device_of
from secateur.running.logits import logits_of
from secateur.running.sandbox import run

log = logging.getLogger("secateur")

#: Puts inputs into the order that a model likes.
Order = Callable[[Any], Any]
_ROUNDING = 1e-4  # of the largest logit: sums in another order


def channels_last(inputs: Any) -> Any:
    """Images with the channels of a pixel side by side; everything else as it is."""
    return map_tensors(_last, inputs)


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def in_best_order(model: nn.Module, sample: Any) -> tuple[nn.Module, Order]:
    """The model, or a faster copy for images on a CPU, and what brings its inputs into the same order.

    The order changes nothing but rounding, unless code looks at the memory itself: the sample must show it.
    """
    place = device_of(model)
    if (place is not None and place.type != "cpu") or not any(isinstance(m, nn.Conv2d) for m in model.modules()):
        return model, unordered
    other = shared_copy(model).to(memory_format=torch.channels_last)
    other.train(model.training)
    try:
        expected, found = logits_of(run(model, sample)), logits_of(run(other, channels_last(sample)))
    except Exception as error:  # a `view` may ask for the usual order
        log.debug("channels last are not taken: %s", error)
        return model, unordered
    near = found.shape == expected.shape and bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())
    return (other, channels_last) if near else (model, unordered)


def unordered(inputs: Any) -> Any:
    """Inputs as they are."""
    return inputs
