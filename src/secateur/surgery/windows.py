"""Attention in windows as torchvision has it (Swin, MaxViT), on a stream that is wider or narrower than its heads.

Its own forwards take the width of the stream divided by the number of heads for the width of a head, which stops being
true once heads, or channels of the stream, are gone.
"""

from __future__ import annotations

import math
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
    """As `torchvision.models.swin_transformer.shifted_window_attention`."""
    batch, height, width, _ = x.shape
    tall, wide = self.window_size
    y = F.pad(x, (0, 0, 0, (wide - width % wide) % wide, 0, (tall - height % tall) % tall))
    rows, columns, area = y.shape[1] // tall, y.shape[2] // wide, tall * wide
    sizes = zip(self.shift_size, (tall, wide), y.shape[1:3], strict=True)
    shift = [0 if size >= whole else by for by, size, whole in sizes]  # a single window is not shifted
    if any(shift):
        y = torch.roll(y, shifts=(-shift[0], -shift[1]), dims=(1, 2))
    y = y.view(batch, rows, tall, columns, wide, -1).permute(0, 1, 3, 2, 4, 5).reshape(batch * rows * columns, area, -1)
    scale, bias = getattr(self, "logit_scale", None), self.qkv.bias
    if scale is not None and bias is not None:
        bias = torch.cat([part * (i != 1) for i, part in enumerate(bias.chunk(3))])
    made = F.linear(y, self.qkv.weight, bias).reshape(len(y), area, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = made[0], made[1], made[2]
    if scale is not None:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (q @ k.mT) * torch.clamp(scale, max=math.log(100.0)).exp()
    else:
        weights = (q * q.shape[-1] ** -0.5).matmul(k.mT)
    weights = weights + self.get_relative_position_bias()
    if any(shift):
        mask = _other_regions(y, (rows, tall, columns, wide), shift)
        weights = weights.view(batch, rows * columns, self.num_heads, area, area) + mask.unsqueeze(1).unsqueeze(0)
        weights = weights.view(-1, self.num_heads, area, area)
    weights = F.dropout(F.softmax(weights, dim=-1), p=self.attention_dropout, training=self.training)
    y = F.linear(weights.matmul(v).transpose(1, 2).flatten(2), self.proj.weight, self.proj.bias)
    y = F.dropout(y, p=self.dropout, training=self.training)
    y = y.view(batch, rows, columns, tall, wide, -1).permute(0, 1, 3, 2, 4, 5)
    y = y.reshape(batch, rows * tall, columns * wide, -1)
    if any(shift):
        y = torch.roll(y, shifts=(shift[0], shift[1]), dims=(1, 2))
    return y[:, :height, :width, :].contiguous()


def _other_regions(x: Tensor, grid: tuple[int, int, int, int], shift: list[int]) -> Tensor:
    """-100 where two pixels of a window were no neighbours before the shift: one matrix for each window."""
    rows, tall, columns, wide = grid
    down, right = (
        torch.arange(count * size, device=x.device).ge(count * size - size).long()
        + torch.arange(count * size, device=x.device).ge(count * size - by).long()
        for count, size, by in ((rows, tall, shift[0]), (columns, wide, shift[1]))
    )
    regions = (
        (3 * down[:, None] + right).view(rows, tall, columns, wide).permute(0, 2, 1, 3).reshape(rows * columns, -1)
    )
    differ = regions.unsqueeze(1) != regions.unsqueeze(2)
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
