"""Operators of torchvision, by name: it need not be installed."""

from __future__ import annotations

from typing import Any

from secateur.ops.layers import spread
from secateur.ops.linear import produce_with_bias, read_by_weight
from secateur.ops.places import Sampling, Selected
from secateur.ops.protocols import LabelVerbs
from secateur.ops.table import Call, Ruled, averages, moves, refused, register_op


class DeformableConvolution(Ruled):
    """A convolution whose places are computed. These, and the factors of a mask, stay as they are."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, weight = call["input"], call["weight"]
        for tensor in (call["offset"], call["mask"]):
            labels.freeze_tensor(tensor, f"{call.site} computes places from it")
        read, made, taken = labels.along(x, 1), labels.along(weight, 0), labels.along(weight, 1)
        for layer in labels.others(x, [1]):
            labels.freeze(layer, f"{call.site} mixes positions that carry units")
        if weight.shape[1] == x.shape[1] and call["offset_groups"] == 1:
            read_by_weight(labels, call, read, taken)
        else:
            labels.freeze(read, f"{call.site} reads it in groups")
            labels.freeze(taken, f"width of a group of {call.site}")
            labels.freeze(made, f"grouped by {call.site}")
        labels.cost(call.site, output.numel() * (weight.numel() // max(len(weight), 1)), made, taken)
        if made is not None:
            produce_with_bias(labels, made, call, "filter")
            labels.set(output, [spread(made, 1, output.shape)])


_DEFORMED = (
    "input weight offset mask bias stride_h stride_w pad_h pad_w dilation_h dilation_w groups offset_groups use_mask"
)
register_op(_DEFORMED, "torchvision::deform_conv2d", operation=DeformableConvolution(refused))
register_op("input rois *rest", "torchvision::roi_align", operation=Sampling(averages, rows=True))
register_op("input rois *rest", "torchvision::roi_pool", operation=Sampling(moves, rows=True))
register_op("input *rest", "torchvision::nms", operation=Selected("looks up the best of it"))
