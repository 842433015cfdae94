"""Where tensors live, and how precise numbers can be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nest import map_tensors


def device_of(model: nn.Module) -> torch.device | None:
    """Where a model lives; None if it has no tensors."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), None)


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The number format of a model's weights; None if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same nest with its tensors on `device`."""
    return map_tensors(lambda t: t if device is None or t.device == device else t.to(device), value)


def full(tensor: Tensor) -> Tensor:
    """Numbers of half precision in full precision; others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def precise(device: torch.device) -> torch.dtype:
    """The widest float of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute without TF32, by which float32 on a GPU has errors of 1e-3: for what is compared with another machine."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    own = torch.backends.cudnn
    try:
        with own.flags(own.enabled, own.benchmark, own.benchmark_limit, own.deterministic, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
