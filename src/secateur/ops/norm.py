"""Normalisations: those that treat each channel alone, and those that mix channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.ops.layers import Layers, spread
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, Ruled, passes, register


def _merge_per_channel(labels: LabelVerbs, call: Call, output: Any, *names: str) -> None:
    """The input meets vectors with one number per channel, which leave with their channels."""
    x = call["input"]
    own = [size if dim == 1 else 1 for dim, size in enumerate(x.shape)]
    operands: list[tuple[Layers, list[int]]] = [(labels.layers(x), list(x.shape))]
    for name in names:
        if call[name] is not None:
            held = labels.along(call[name], 0)
            operands.append(([] if held is None else [spread(held, 1, own)], own))
    labels.merge(output, operands, call.site)


class BatchNorm(Operation):
    """Per channel: mean and variance from buffers, scale and shift from parameters."""

    name = "batch norm"
    differentiates = False
    settles = False

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Everything that has one number per channel leaves with it."""
        if call["training"]:
            for layer in labels.others(call["input"], [1]):
                labels.freeze(layer, f"{call.site} takes statistics over it")
        _merge_per_channel(labels, call, output, "running_mean", "running_var", "weight", "bias")

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Folded into the layer before it, or passes."""
        return relevance.batch_norm(call, call["input"])

    def rehearse(self, call: Call) -> Any:
        """Torch takes milliseconds over a batch norm without numbers, by decomposing it; the shape is all we need."""
        x: Tensor = call["input"]
        if not x.is_meta or call["training"]:
            return call.run()
        for name in ("running_mean", "running_var", "weight", "bias"):
            vector = call[name]
            if vector is not None and len(vector) != x.shape[1]:
                raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {len(vector)}")
        return torch.empty_like(x)


class InstanceNorm(Ruled):
    """Per channel and sample."""

    name = "instance norm"
    differentiates = False

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """As batch norm."""
        _merge_per_channel(labels, call, output, "running_mean", "running_var", "weight", "bias")


class LayerNorm(Ruled):
    """Over the last dimensions, all channels together. Removal leaves the norm over the kept channels."""

    name = "layer norm"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass one to one; which of them were mixed is noted for the masked reference."""
        x, shape = call["input"], call["normalized_shape"]
        count = len(shape) if isinstance(shape, tuple | list | torch.Size) else 1
        operands = [(labels.layers(x), list(x.shape))]
        for name in ("weight", "bias"):
            vector = call.get(name)
            if vector is not None:
                operands.append((labels.layers(vector), list(vector.shape)))
        labels.mixes(x, range(x.ndim - count, x.ndim), call.site)
        labels.merge(output, operands, call.site)

    def rehearse(self, call: Call) -> Any:
        """The shape is the input's: torch decomposes the norm, which takes milliseconds."""
        x, shape = call["input"], call["normalized_shape"]
        wanted = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        vectors = [call.get(name) for name in ("weight", "bias")]
        fits = tuple(x.shape[x.ndim - len(wanted) :]) == wanted and all(
            v is None or (tuple(v.shape) == wanted and v.dtype == x.dtype) for v in vectors
        )
        return torch.empty_like(x) if x.is_meta and fits else call.run()


class RMSNorm(LayerNorm):
    """Layer norm without the mean."""

    name = "RMS norm"


class GroupNorm(Ruled):
    """Over groups of neighbouring channels: a group of channels leaves at once. One group is a layer norm."""

    name = "group norm"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Tie the channels of each group, unless there is only one group."""
        x, groups = call["input"], int(call["num_groups"])
        read = labels.along(x, 1)
        if read is not None and groups > 1 and groups < len(read):
            labels.tie_rows(read.reshape(groups, -1))
        if groups == 1:
            labels.mixes(x, range(1, x.ndim), call.site)
        else:
            for layer in labels.others(x, [0, 1]):
                labels.freeze(layer, f"{call.site} takes statistics over it")
        _merge_per_channel(labels, call, output, "weight", "bias")


class Normalize(Ruled):
    """Division by a norm along one dimension: zeros do not change a p-norm, so removal equals masking."""

    name = "normalize"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass."""
        labels.keep(call["input"], output)


class LocalResponseNorm(Ruled):
    """Over a window of neighbouring channels: neighbours would move, so nothing may leave."""

    name = "local response norm"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze the channels."""
        labels.freeze_tensor(call["input"], f"{call.site} depends on neighbouring channels")
        labels.keep(call["input"], output)


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
register(
    "input normalized_shape weight=None bias=None eps=1e-5", F.layer_norm, torch.layer_norm, operation=LayerNorm(passes)
)
register(
    "input normalized_shape weight=None eps=None",
    getattr(F, "rms_norm", None),
    getattr(torch, "rms_norm", None),
    operation=RMSNorm(passes),
)
register("input num_groups weight=None bias=None eps=1e-5", F.group_norm, torch.group_norm, operation=GroupNorm(passes))
register("input p=2 dim=1 eps=1e-12 out=None", F.normalize, operation=Normalize(passes))
register("input size alpha=1e-4 beta=0.75 k=1", F.local_response_norm, operation=LocalResponseNorm(passes))
