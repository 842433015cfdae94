"""Pooling and resampling: operations over space that leave channels alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from secateur.errors import UnsupportedModelError
from secateur.nest import tensors_in
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Rule, Ruled, averages, moves, register


class Spatial(Ruled):
    """Changes sizes along the last `spatial` dimensions; `None` means all but batch and channel."""

    name = "pool"

    def __init__(self, rule: Rule, spatial: int | None = None) -> None:
        super().__init__(rule)
        self.spatial = spatial

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass; units along space are frozen."""
        x = call["input"]
        count = self.spatial if self.spatial is not None else x.ndim - 2
        for tensor in tensors_in(output):
            labels.carry(x, tensor, range(x.ndim - count, x.ndim), f"{call.site} mixes positions that carry units")


def _refuses(relevance: RelevanceVerbs, call: Call) -> Any:
    raise UnsupportedModelError(f"{call.site}: power-average pooling has no rule.", fix="average pooling")


def _resamples(relevance: RelevanceVerbs, call: Call) -> Any:
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
        operation=Spatial(moves, _n),
    )
    register(
        "input output_size return_indices=False",
        getattr(F, f"adaptive_max_pool{_n}d"),
        getattr(F, f"adaptive_max_pool{_n}d_with_indices"),
        getattr(torch, f"adaptive_max_pool{_n}d", None),
        operation=Spatial(moves, _n),
    )
    register(
        "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None",
        getattr(F, f"avg_pool{_n}d"),
        operation=Spatial(averages, _n),
    )
    register(
        "input output_size",
        getattr(F, f"adaptive_avg_pool{_n}d"),
        getattr(torch, f"adaptive_avg_pool{_n}d", None),
        operation=Spatial(averages, _n),
    )
register("input norm_type kernel_size stride=None ceil_mode=False", F.lp_pool1d, operation=Spatial(_refuses, 1))
register("input norm_type kernel_size stride=None ceil_mode=False", F.lp_pool2d, operation=Spatial(_refuses, 2))
register(
    "input size=None scale_factor=None mode=None align_corners=None recompute_scale_factor=None antialias=False",
    F.interpolate,
    F.upsample,
    operation=Spatial(_resamples),
)
