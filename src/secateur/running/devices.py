"""Where tensors live, and how precise numbers can be there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device | None:
    """Where a model lives; None if it has no tensors."""
    for tensor in [*model.parameters(), *model.buffers()]:
        return tensor.device
    return None


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same nest with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value if device is None or value.device == device else value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(to_device(item, device) for item in value)
    return value


def precise(device: torch.device) -> torch.dtype:
    """The widest float of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
