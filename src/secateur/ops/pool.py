"""Pooling and resampling: operations over space that leave channels alone."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from secateur.nest import tensors_in
from secateur.ops.elementwise import operands_of
from secateur.ops.layers import like
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs, first
from secateur.ops.table import Call, Rule, Ruled, averages, moves, refused, register_named


class Spatial(Ruled):
    """Changes sizes along the last `spatial` dimensions; `None` means all but batch and channel. Channels pass."""

    def __init__(self, rule: Rule, spatial: int | None = None) -> None:
        super().__init__(rule)
        self.spatial = spatial

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        count = self.spatial if self.spatial is not None else x.ndim - 2
        for tensor in tensors_in(output):
            labels.carry(x, tensor, range(x.ndim - count, x.ndim), f"{call.site} mixes positions that carry units")


class AdaptiveMean(Spatial):
    """The mean of each of so many parts."""

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic: torch takes a millisecond over it."""
        x, size, count = call["input"], call["output_size"], self.spatial or 0
        sizes = (size,) * count if isinstance(size, int) or size is None else tuple(size)
        if not x.is_meta or x.ndim != count + 2 or len(sizes) != count or not all(x.shape[1:]):
            return call.run()
        wanted = [old if new is None else new for new, old in zip(sizes, x.shape[2:], strict=True)]
        return like(x, (*x.shape[:2], *wanted)) if min(wanted) > 0 else call.run()


class Unpooling(Ruled):
    """Numbers go back to the places that a pooling noted, which belong to the same channels."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        labels.merge(x, operands_of(labels, x, call["indices"]), call.site, first)
        labels.carry(x, output, range(2, x.ndim), f"{call.site} mixes positions that carry units")


def _resamples(relevance: RelevanceVerbs, call: Call) -> Any:
    """Shared among the pixels that each new one is made of (bicubic: as bilinear, whose weights are positive)."""
    x, mode = call["input"], call["mode"] or "nearest"
    if mode.startswith("nearest"):
        return relevance.moves(call)
    if mode == "bicubic":
        size = call.run().shape[2:]
        return relevance.averages(call, x, lambda a: F.interpolate(a, size, mode="bilinear"))
    return relevance.averages(call, x, call.on(x))


_POOLS = (
    (
        "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False",
        "max_pool{n}d max_pool{n}d_with_indices _max_pool{n}d",
        moves,
    ),
    (
        "input output_size return_indices=False",
        "adaptive_max_pool{n}d adaptive_max_pool{n}d_with_indices",
        moves,
    ),
    (
        "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None",
        "avg_pool{n}d",
        averages,
    ),
)
for _n in (1, 2, 3):
    for _signature, _names, _rule in _POOLS:
        register_named(_signature, _names.format(n=_n), Spatial(_rule, _n))
    register_named("input output_size", f"adaptive_avg_pool{_n}d", AdaptiveMean(averages, _n))
    register_named("input indices *rest", f"max_unpool{_n}d", Unpooling(moves))
    register_named("input norm_type kernel_size stride=None ceil_mode=False", f"lp_pool{_n}d", Spatial(refused, _n))
register_named(
    "input size=None scale_factor=None mode=None align_corners=None recompute_scale_factor=None antialias=False",
    "interpolate upsample",
    Spatial(_resamples),
)
