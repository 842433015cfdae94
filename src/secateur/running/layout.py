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
    if not _convolves(model):
        return model, unordered
    other = shared_copy(model).to(memory_format=torch.channels_last)
    other.train(model.training)
    return (other, channels_last) if _agree(model, other, sample) else (model, unordered)


def order_for(model: nn.Module, sample: Any) -> Order:
    """The same for a model whose weights stay as they are: each call puts them into the order of its inputs, which
    takes little time if these are several images."""
    return channels_last if _convolves(model) and _agree(model, model, sample) else unordered


def _convolves(model: nn.Module) -> bool:
    place = device_of(model)
    return (place is None or place.type == "cpu") and any(isinstance(m, nn.Conv2d) for m in model.modules())


def _agree(model: nn.Module, other: nn.Module, sample: Any) -> bool:
    """Whether another model says the same to a sample whose channels are last."""
    try:  # which of several tensors is the answer does not matter here, so nothing is said about it
        outputs = run(model, sample), run(other, channels_last(sample))
        expected, found = (logits_of(output, warn=False) for output in outputs)
    except Exception as error:  # a `view` may ask for the usual order
        log.debug("channels last are not taken: %s", error)
        return False
    return found.shape == expected.shape and bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())


def unordered(inputs: Any) -> Any:
    """Inputs as they are."""
    return inputs
