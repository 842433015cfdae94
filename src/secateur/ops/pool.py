"""Pooling and resampling: operations over space that leave channels alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from secateur.errors import UnsupportedModelError
from secateur.nest import tensors_in
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, register


class _Spatial(Operation):
    """Changes sizes along the last `spatial` dimensions; `None` means all but batch and channel."""

    def __init__(self, spatial: int | None = None) -> None:
        self.spatial = spatial

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass; units along space are frozen."""
        x = call["input"]
        count = self.spatial if self.spatial is not None else x.ndim - 2
        for tensor in tensors_in(output):
            labels.carry(x, tensor, range(x.ndim - count, x.ndim), f"{call.site} mixes positions that carry units")


class MaxPool(_Spatial):
    """Maximum over windows."""

    name = "max pool"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To the winner of each window; where windows overlap it adds up."""
        return relevance.moves(call)


class AvgPool(_Spatial):
    """Mean over windows."""

    name = "average pool"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared within each window."""
        if call.get("norm_type") is not None:
            raise UnsupportedModelError(f"{call.site}: power-average pooling has no rule.", fix="average pooling")
        return relevance.averages(call, call["input"], call.on(call["input"]))


class Interpolate(_Spatial):
    """Resampling of space."""

    name = "interpolate"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared among the pixels that each new one is made of (bicubic: as bilinear, whose weights are positive)."""
        x, mode = call["input"], call["mode"] or "nearest"
        if mode.startswith("nearest"):
            return relevance.moves(call)
        if mode == "bicubic":
            size = call.run().shape[2:]
            return relevance.averages(call, x, lambda a: F.interpolate(a, size, mode="bilinear"))
        return relevance.averages(call, x, call.on(x))


for _n in (1, 2, 3):
    register(
        "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False",
        getattr(F, f"max_pool{_n}d"),
        getattr(F, f"max_pool{_n}d_with_indices"),
        getattr(F, f"_max_pool{_n}d", None),
        getattr(torch, f"max_pool{_n}d"),
        operation=MaxPool(_n),
    )
    register(
        "input output_size return_indices=False",
        getattr(F, f"adaptive_max_pool{_n}d"),
        getattr(F, f"adaptive_max_pool{_n}d_with_indices"),
        getattr(torch, f"adaptive_max_pool{_n}d", None),
        operation=MaxPool(_n),
    )
    register(
        "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None",
        getattr(F, f"avg_pool{_n}d"),
        operation=AvgPool(_n),
    )
    register(
        "input output_size",
        getattr(F, f"adaptive_avg_pool{_n}d"),
        getattr(torch, f"adaptive_avg_pool{_n}d", None),
        operation=AvgPool(_n),
    )
register("input norm_type kernel_size stride=None ceil_mode=False", F.lp_pool1d, operation=AvgPool(1))
register("input norm_type kernel_size stride=None ceil_mode=False", F.lp_pool2d, operation=AvgPool(2))
register(
    "input size=None scale_factor=None mode=None align_corners=None recompute_scale_factor=None antialias=False",
    F.interpolate,
    F.upsample,
    operation=Interpolate(),
)
