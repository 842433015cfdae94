"""Attention in windows as torchvision has it (Swin, MaxViT), on a stream that is wider or narrower than its heads.

Its own forwards take the width of the stream divided by the number of heads for the width of a head, which stops being
true once heads, or channels of the stream, are gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.running.heads import WINDOWED


def fit_windows(module: nn.Module, old: nn.Module) -> None:
    """Give an attention module whose weights were cut a forward that fits them."""
    forward = _FORWARDS.get(WINDOWED.get(f"{type(old).__module__}.{type(old).__qualname__}", ""))
    if forward is not None and [p.shape for p in old.parameters()] != [p.shape for p in module.parameters()]:
        vars(module)["forward"] = partial(forward, module)


def _swin(self: Any, x: Tensor) -> Tensor:
    """As torchvision's `shifted_window_attention`, and `shifted_window_attention_3d`: windows of videos are no larger
    than these."""
    batch, *whole, _ = x.shape
    dims, window = range(1, len(whole) + 1), list(self.window_size)
    if len(whole) == 3:
        window = [min(size, own) for size, own in zip(whole, window, strict=True)]
    counts = [-(-size // own) for size, own in zip(whole, window, strict=True)]
    padded, area = [count * own for count, own in zip(counts, window, strict=True)], math.prod(window)
    missing = [count - size for count, size in zip(padded, whole, strict=True)]
    y = F.pad(x, [0, 0, *(side for more in reversed(missing) for side in (0, more))])
    shift = [by * (count > 1) for by, count in zip(self.shift_size, counts, strict=True)]  # a single one is not shifted
    if any(shift):
        y = torch.roll(y, shifts=[-by for by in shift], dims=list(dims))
    y = _parted(y.view(batch, *_pairs(counts, window), -1)).reshape(batch * math.prod(counts), area, -1)
    scale, bias = getattr(self, "logit_scale", None), self.qkv.bias
    if scale is not None and bias is not None:
        bias = torch.cat([part * (i != 1) for i, part in enumerate(bias.chunk(3))])
    made = F.linear(y, self.qkv.weight, bias).reshape(y.shape[0], area, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = made[0], made[1], made[2]
    if scale is not None:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (q @ k.mT) * torch.clamp(scale, max=math.log(100.0)).exp()
    else:
        weights = (q * q.shape[-1] ** -0.5).matmul(k.mT)
    weights = weights + self.get_relative_position_bias(*[window] if len(whole) == 3 else [])
    if any(shift):
        mask = _other_regions(y, counts, window, shift)
        weights = weights.view(batch, len(mask), self.num_heads, area, area) + mask.unsqueeze(1).unsqueeze(0)
        weights = weights.view(-1, self.num_heads, area, area)
    weights = F.dropout(F.softmax(weights, dim=-1), p=self.attention_dropout, training=self.training)
    y = F.linear(weights.matmul(v).transpose(1, 2).flatten(2), self.proj.weight, self.proj.bias)
    y = F.dropout(y, p=self.dropout, training=self.training)
    order = [0, *_pairs(dims, [d + len(dims) for d in dims]), 2 * len(dims) + 1]
    y = y.view(batch, *counts, *window, -1).permute(order).reshape(batch, *padded, -1)
    if any(shift):
        y = torch.roll(y, shifts=shift, dims=list(dims))
    for dim, size in zip(dims, whole, strict=True):
        y = y.narrow(dim, 0, size)
    return y.contiguous()


def _pairs(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return [item for pair in zip(first, second, strict=True) for item in pair]


def _parted(x: Tensor) -> Tensor:
    """(…, windows, places, windows, places, …) with all dimensions of windows before those of places."""
    return x.permute(0, *range(1, x.ndim - 1, 2), *range(2, x.ndim - 1, 2), x.ndim - 1)


def _other_regions(x: Tensor, counts: list[int], window: list[int], shift: list[int]) -> Tensor:
    """-100 where two places of a window were no neighbours before the shift: one matrix for each window."""
    regions = torch.zeros((), dtype=torch.long, device=x.device)
    for count, size, by in zip(counts, window, shift, strict=True):
        places = torch.arange(count * size, device=x.device)
        regions = (
            3 * regions.unsqueeze(-1) + (places >= count * size - size).long() + (places >= count * size - by).long()
        )
    parted = _parted(regions.view(1, *_pairs(counts, window), 1)).reshape(math.prod(counts), -1)
    differ = parted.unsqueeze(1) != parted.unsqueeze(2)
    return x.new_zeros(differ.shape).masked_fill(differ, -100.0)


def _maxvit(self: Any, x: Tensor) -> Tensor:
    """As `torchvision.models.maxvit.RelativePositionalMultiHeadAttention.forward`."""
    heads = [part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(2, 3) for part in self.to_qkv(x).chunk(3, -1)]
    q, k, v = heads
    scores = torch.einsum("bghid,bghjd->bghij", q, k * self.scale_factor) + self.get_relative_positional_bias()
    mixed = torch.einsum("bghij,bghjd->bghid", F.softmax(scores, dim=-1), v)
    merged: Tensor = self.merge(mixed.transpose(2, 3).flatten(3))
    return merged


_FORWARDS = {"swin": _swin, "maxvit": _maxvit}
