"""Normalisations: those that treat each channel alone, and those that mix channels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.ops.activation import Unary
from secateur.ops.elementwise import operands_of
from secateur.ops.layers import like, spread
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs, Zero, first
from secateur.ops.table import Call, Ruled, passes, register, register_named

_VECTORS = ("running_mean", "running_var", "weight", "bias")


class PerChannel(Ruled):
    """The input meets vectors with one number per channel, which leave with their channels."""

    def zero(self, call: Call) -> Zero:
        """Where the input is."""
        return first

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        vectors = [v for name in _VECTORS if (v := call.get(name)) is not None and v.numel() > 1]
        held = [labels.along(vector, 0) for vector in vectors]
        if labels.meets_lines(x, 1, held, output, self.zero(call)):
            return
        own = [size if dim == 1 else 1 for dim, size in enumerate(x.shape)]
        operands = operands_of(labels, x)
        operands += [([] if line is None else [spread(line, 1, own)], own) for line in held]
        labels.merge(output, operands, call.site, self.zero(call))


class ChannelNorm(PerChannel):
    """Normalises channels, then scales and shifts each of them."""

    def zero(self, call: Call) -> Zero:
        """Where all vectors are, if a scale is among them; else the input must be 0 as well."""
        scaled = call.get("weight") is not None
        return lambda zeros: all(zeros[1:]) and (scaled or zeros[0])


class BatchNorm(ChannelNorm):
    """Per channel: mean and variance from buffers, scale and shift from parameters."""

    differentiates = False
    settles = False

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        if call["training"]:
            why = "takes statistics over it"
            if labels.is_weight(call["input"]):  # without a part of a filter, the rest of it would become another one
                why = "standardises weights over it; secateur.integrations.timm.plain_convolutions would free it"
            for layer in labels.others(call["input"], [1]):
                labels.freeze(layer, f"{call.site} {why}")
        super().channels(labels, call, output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.batch_norm(call, call["input"])

    def rehearse(self, call: Call) -> Any:
        """Torch takes milliseconds over a batch norm without numbers, by decomposing it; the shape is all we need."""
        x: Tensor = call["input"]
        if not x.is_meta:  # with one number per channel, torch would refuse to train; the shape is the same
            return call.run()
        for name in _VECTORS:
            vector = call[name]
            if vector is not None and len(vector) != x.shape[1]:
                raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {len(vector)}")
        return like(x)


class InstanceNorm(ChannelNorm):
    """Per channel and sample."""

    differentiates = False

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        x = call["input"]
        if not call["use_input_stats"]:
            return relevance.passes(call, x)
        return relevance.normalises(call, x, x.shape[0] * x.shape[1], *_per_channel(call, x))


class LayerNorm(Ruled):
    """Over the last dimensions, all channels together. Removal leaves the norm over the kept channels."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, shape = call["input"], call["normalized_shape"]
        count = len(shape) if isinstance(shape, tuple | list) else 1
        labels.mixes(x, range(x.ndim - count, x.ndim), call.site)
        # Of what it mixes, the masked reference makes zeros. Units elsewhere get the shift.
        operands = operands_of(labels, x, call["weight"], call.get("bias"))
        labels.merge(output, operands, call.site, lambda zeros: all(zeros[1:]) if len(zeros) > 1 else zeros[0])

    def rehearse(self, call: Call) -> Any:
        """The shape is the input's: torch decomposes the norm, which takes milliseconds."""
        x, shape = call["input"], call["normalized_shape"]
        wanted = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        fits = tuple(x.shape[x.ndim - len(wanted) :]) == wanted and all(
            v is None or (tuple(v.shape) == wanted and v.dtype == x.dtype) for v in (call["weight"], call.get("bias"))
        )
        return like(x) if x.is_meta and fits else call.run()

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        x, shape = call["input"], call["normalized_shape"]
        width = math.prod(shape) if isinstance(shape, tuple | list) else shape
        return relevance.normalises(call, x, x.numel() // width, call["weight"], call["bias"])


class RMSNorm(LayerNorm):
    """Layer norm without the mean: a scale."""

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.passes(call, call["input"])


class GroupNorm(ChannelNorm):
    """Over groups of neighbouring channels: a group of channels leaves at once. One group is a layer norm."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, groups = call["input"], int(call["num_groups"])
        read = labels.along(x, 1)
        if read is not None and 1 < groups < len(read):
            labels.tie_rows(read.reshape(groups, -1))
        if groups == 1:
            labels.mixes(x, range(1, x.ndim), call.site)
        else:
            for layer in labels.others(x, [0, 1]):
                labels.freeze(layer, f"{call.site} takes statistics over it")
        super().channels(labels, call, output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        x = call["input"]
        return relevance.normalises(call, x, x.shape[0] * int(call["num_groups"]), *_per_channel(call, x))


def _per_channel(call: Call, x: Tensor) -> list[Tensor | None]:
    """Weight and bias of a norm, shaped so that they meet the channels of `x`."""
    shape = (-1, *[1] * (x.ndim - 2))
    return [None if call[name] is None else call[name].view(shape) for name in ("weight", "bias")]


class Normalize(Unary):
    """Divides by a p-norm, which zeros do not change, so that removal equals masking."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        dims = call["dim"] if isinstance(call["dim"], tuple | list) else [call["dim"]]
        labels.sums(call["input"], [int(dim) % output.ndim for dim in dims], call.site)
        labels.keep(call["input"], output)


class LocalResponseNorm(Unary):
    """Over a window of neighbouring channels: neighbours would move, so nothing may leave."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        labels.freeze_tensor(call["input"], f"{call.site} depends on neighbouring channels")
        super().channels(labels, call, output)


register(
    "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-5",
    F.batch_norm,
    operation=BatchNorm(),
)
register(
    "input weight bias running_mean running_var training momentum eps cudnn_enabled=False",
    torch.batch_norm,
    operation=BatchNorm(),
)
register(
    "input running_mean=None running_var=None weight=None bias=None use_input_stats=True momentum=0.1 eps=1e-5",
    F.instance_norm,
    operation=InstanceNorm(passes),
)
register_named("input normalized_shape weight=None bias=None eps=1e-5", "layer_norm", LayerNorm(passes))
register_named("input normalized_shape weight=None eps=None", "rms_norm", RMSNorm(passes))
register_named("input num_groups weight=None bias=None eps=1e-5", "group_norm", GroupNorm(passes))
register_named("input weight", "prelu", PerChannel(passes))  # one slope per channel, or one for all
register("input p=2 dim=1 eps=1e-12 out=None", F.normalize, operation=Normalize(passes))
register("input size alpha=1e-4 beta=0.75 k=1", F.local_response_norm, operation=LocalResponseNorm(passes))
