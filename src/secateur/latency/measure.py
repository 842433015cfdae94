"""`measure`: what a model costs, time included."""

from __future__ import annotations

from torch import nn

from secateur.arguments import check_count, check_flag
from secateur.latency.timing import time_forward
from secateur.running.copies import unwrap
from secateur.running.sandbox import Example, leaves_no_trace
from secateur.structure.cost import Cost, count_macs, size_of


@leaves_no_trace
def measure(model: nn.Module, example: Example, latency: bool = True, repeats: int = 20) -> Cost:
    """Parameters, multiply-accumulates (convolutions, linear layers, matrix products) and median latency of a model.

    The last two are for the whole example: of two images, twice the multiply-accumulates of one.

    >>> import torch
    >>> measure(nn.Linear(8, 4), torch.zeros(1, 8), latency=False)
    Cost(params=36, macs=32, latency=None)
    """
    model = unwrap(model)
    check_flag("latency", latency)
    check_count("repeats", repeats)
    macs = count_macs(model, example)
    return Cost(size_of(model), macs, time_forward(model, example, repeats) if latency else None)
