"""A layer as a regression: rows of what it reads and returns, at sampled positions of each sample."""

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


def channel_last(call: Call, tensor: Tensor, batch: int = 0, positions: int | None = None) -> Tensor:
    """A layer's input or output as (samples, positions, channels).

    Samples lie along dimension `batch`. There, a linear layer may have several entries for each: `positions` in all.
    """
    if isinstance(call.operation, Convolution | TransposedConvolution):
        return tensor.flatten(2).transpose(1, 2)
    tensor = tensor.movedim(batch, 0)
    shape = (len(tensor), -1) if positions is None else (-1, positions)
    return tensor.reshape(*shape, tensor.shape[-1])


def wide(rows: Tensor) -> Tensor:
    """At least single precision."""
    return rows if rows.dtype == torch.float64 else rows.float()


@dataclass(frozen=True)
class Positions:
    """For each sample the positions of a layer's output that take part; None for all of them."""

    chosen: Tensor | None

    @classmethod
    def draw(cls, samples: int, positions: int, most: int, generator: torch.Generator) -> Positions:
        """At most `most` positions per sample, drawn for each sample."""
        if positions <= most:
            return cls(None)
        return cls(torch.rand(samples, positions, generator=generator).topk(most, dim=1).indices.sort(1).values)

    def of(self, samples: slice, device: torch.device) -> Tensor | None:
        """The positions of some samples."""
        return None if self.chosen is None else self.chosen[samples].to(device)

    def take(self, values: Tensor, samples: slice) -> Tensor:
        """The chosen positions of (samples, positions, channels)."""
        return _at(values, self.of(samples, values.device))


def read_rows(call: Call, x: Tensor, chosen: Tensor | None) -> Tensor:
    """What the layer reads of its input `x` for each chosen output position: (samples, positions, groups, features).

    For a linear layer `x` is `channel_last`, for a convolution it is as it is. Features are ordered as in the weight:
    by channel, then by place in the kernel.
    """
    if not isinstance(call.operation, Convolution):
        return _at(x, chosen)[:, :, None]
    spatial, weight, groups = call.operation.spatial, call["weight"], int(call["groups"])
    kernel, stride = tuple(weight.shape[2:]), _each(call["stride"], spatial)
    dilation = _each(call["dilation"], spatial)
    padding = _padding(call["padding"], kernel, dilation)
    if math.prod(kernel) == 1 and not any(padding):  # nothing to unfold
        for dim, s in enumerate(stride):
            x = x[(slice(None),) * (2 + dim) + (slice(None, None, s),)]
        taken = _at(x.flatten(2).transpose(1, 2), chosen)
        return taken.reshape(*taken.shape[:2], groups, -1)
    x = F.pad(x, padding)
    size = tuple(x.shape[2:])
    count = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)]
    strides = [math.prod(size[i + 1 :]) for i in range(spatial)]
    # Indices into the flattened image: where each window begins, and the offsets of its places.
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


def _at(values: Tensor, chosen: Tensor | None) -> Tensor:
    """The chosen positions of each sample of (samples, positions, channels)."""
    return values if chosen is None else values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[-1]))


def _each(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    values = tuple(int(v) for v in value)
    return values * count if len(values) == 1 else values


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding in the order of `F.pad`: last dimension first, before and after."""
    spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        sides = [(span // 2, span - span // 2) for span in spans]
    elif padding == "valid":
        sides = [(0, 0)] * len(kernel)
    else:
        sides = [(p, p) for p in _each(padding, len(kernel))]
    return [side for pair in reversed(sides) for side in pair]
