"""A layer as a regression: rows of what it reads and of what it should give, at some positions of some samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.table import Call


def channel_last(call: Call, tensor: Tensor) -> Tensor:
    """A layer's output as (samples, positions, channels)."""
    if isinstance(call.operation, Convolution | TransposedConvolution):
        if tensor.ndim == call.operation.spatial + 1:  # without a batch dimension
            tensor = tensor[None]
        return tensor.flatten(2).transpose(1, 2)
    if tensor.ndim == 1:
        return tensor[None, None]
    return tensor.reshape(len(tensor), -1, tensor.shape[-1])


@dataclass(frozen=True)
class Positions:
    """For each sample the positions of a layer's output that take part; None for all of them."""

    chosen: Tensor | None

    @classmethod
    def draw(cls, samples: int, positions: int, most: int, generator: torch.Generator) -> Positions:
        """At most `most` positions per sample, each sample its own."""
        if positions <= most:
            return cls(None)
        return cls(torch.rand(samples, positions, generator=generator).topk(most, dim=1).indices.sort(1).values)

    def of(self, samples: slice, device: torch.device) -> Tensor | None:
        """The positions of some samples."""
        return None if self.chosen is None else self.chosen[samples].to(device)

    def take(self, values: Tensor, samples: slice) -> Tensor:
        """Of (samples, positions, channels) the chosen positions."""
        chosen = self.of(samples, values.device)
        return values if chosen is None else values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[-1]))


def read_rows(call: Call, chosen: Tensor | None) -> Tensor:
    """What the layer reads for each chosen output position: (samples, positions, groups, features).

    Features are in the order of the weight: channel by channel, then the kernel.
    """
    x: Tensor = call["input"]
    if not isinstance(call.operation, Convolution):
        rows = channel_last(call, x)
        if chosen is not None:
            rows = rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[-1]))
        return rows[:, :, None]
    spatial, weight, groups = call.operation.spatial, call["weight"], int(call["groups"])
    if x.ndim == spatial + 1:
        x = x[None]
    kernel, stride = tuple(weight.shape[2:]), _each(call["stride"], spatial)
    dilation = _each(call["dilation"], spatial)
    x = F.pad(x, _padding(call["padding"], kernel, dilation))
    size = tuple(x.shape[2:])
    count = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)]
    strides = [math.prod(size[i + 1 :]) for i in range(spatial)]
    # Where each window begins, and how far its places are from there, in the flattened image.
    grids = [torch.arange(n, device=x.device) * s * step for n, s, step in zip(count, stride, strides, strict=True)]
    begins = sum(g.view([-1 if i == j else 1 for j in range(spatial)]) for i, g in enumerate(grids))
    begins = torch.as_tensor(begins, device=x.device).expand(count).reshape(-1)
    offsets = torch.tensor(
        [sum(p * d * s for p, d, s in zip(place, dilation, strides, strict=True))
         for place in product(*map(range, kernel))],
        device=x.device,
    )  # fmt: skip
    flat = x.flatten(2)
    if chosen is None:
        places = (begins[:, None] + offsets).reshape(-1)
        found = flat.index_select(2, places)
        rows = found.view(len(x), x.shape[1], len(begins), len(offsets))
    else:
        at = (begins[chosen][:, :, None] + offsets).flatten(1)
        found = flat.gather(2, at[:, None].expand(-1, x.shape[1], -1))
        rows = found.view(len(x), x.shape[1], chosen.shape[1], len(offsets))
    return rows.permute(0, 2, 1, 3).reshape(len(x), rows.shape[2], groups, -1)


def _each(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    values = tuple(int(v) for v in value)
    return values * count if len(values) == 1 else values


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding as `F.pad` wants it: last dimension first, before and after."""
    spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        sides = [(span // 2, span - span // 2) for span in spans]
    elif padding == "valid":
        sides = [(0, 0)] * len(kernel)
    else:
        sides = [(p, p) for p in _each(padding, len(kernel))]
    return [side for pair in reversed(sides) for side in pair]
