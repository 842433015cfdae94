"""Convolutions: 1d, 2d, 3d; plain, grouped, depthwise, transposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from secateur.ops.layers import spread
from secateur.ops.linear import produce_with_bias
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, register


class Convolution(Operation):
    """`weight` is (out, in / groups, *kernel)."""

    name = "convolution"
    differentiates = False

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Output channels are fresh; input channels are read. With groups, a whole group leaves at once."""
        x, weight, groups = call["input"], call["weight"], int(call["groups"])
        axis = x.ndim - self.spatial - 1
        read, made, taken = labels.along(x, axis), labels.along(weight, 0), labels.along(weight, 1)
        for layer in labels.others(x, [axis]):
            labels.freeze(layer, f"{call.site} mixes positions that carry units")
        macs = output.numel() * weight[0].numel()
        if groups == 1:
            if read is not None and taken is not None:
                labels.join(taken, read)
            else:
                labels.freeze(taken, "reads the model's input or another tensor of fixed size")
                labels.freeze(read, f"read by {call.site} through a weight of fixed size")
            labels.cost(call.site, macs, made, taken)
        else:
            labels.freeze(taken, f"width of a group of {call.site}")
            if made is not None and read is not None:
                both = np.concatenate([read.reshape(groups, -1), made.reshape(groups, -1)], 1)
                labels.tie_rows(both)
            else:
                labels.freeze(made, f"grouped convolution over an input of fixed size in {call.site}")
            labels.cost(call.site, macs, made)
        if made is None:
            return
        produce_with_bias(labels, made, call, "filter")
        labels.set(output, [spread(made, axis, output.shape)])

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic: torch takes a millisecond over it. What does not fit is left to torch to refuse."""
        x, weight, bias, padding = call["input"], call["weight"], call["bias"], call["padding"]
        groups = int(call["groups"])
        plain = x.is_meta and x.ndim == self.spatial + 2 and not isinstance(padding, str)
        fits = x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0 and x.dtype == weight.dtype
        if not plain or not fits or (bias is not None and len(bias) != len(weight)):
            return call.run()
        sizes = list(x.shape[2:])
        for i, (kernel, stride, pad, dilation) in enumerate(
            zip(
                weight.shape[2:],
                *(each(call[k], self.spatial) for k in ("stride", "padding", "dilation")),
                strict=True,
            )
        ):
            sizes[i] = (sizes[i] + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        return x.new_empty((x.shape[0], weight.shape[0], *sizes)) if min(sizes) > 0 else call.run()

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """By the rule of the composite."""
        return relevance.convolves(call, self.spatial)


class TransposedConvolution(Operation):
    """`weight` is (in, out / groups, *kernel)."""

    name = "transposed convolution"
    differentiates = False

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """As for a convolution, with the two sides of the weight swapped."""
        x, weight, groups = call["input"], call["weight"], int(call["groups"])
        axis = x.ndim - self.spatial - 1
        read, taken, made = labels.along(x, axis), labels.along(weight, 0), labels.along(weight, 1)
        for layer in labels.others(x, [axis]):
            labels.freeze(layer, f"{call.site} mixes positions that carry units")
        if read is not None and taken is not None:
            labels.join(taken, read)
        else:
            labels.freeze(taken, "reads the model's input or another tensor of fixed size")
        macs = x.numel() * weight[0].numel()
        if groups > 1:
            labels.freeze(made, f"width of a group of {call.site}")
            made = labels.virtual(output.shape[axis])
            if taken is None:
                labels.freeze(made, f"grouped convolution over an input of fixed size in {call.site}")
            else:
                labels.tie_rows(np.concatenate([taken.reshape(groups, -1), made.reshape(groups, -1)], 1))
            labels.cost(call.site, macs, made)
        else:
            labels.cost(call.site, macs, made, taken)
        if made is None:
            return
        produce_with_bias(labels, made, call, "filter")
        labels.set(output, [spread(made, axis, output.shape)])

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """By the rule of the composite."""
        return relevance.convolves(call, self.spatial, transposed=True)


def each(value: Any, count: int) -> tuple[int, ...]:
    """A setting of a convolution, for each of its dimensions."""
    if isinstance(value, int):
        return (value,) * count
    values = tuple(value)
    return values * count if len(values) == 1 else values


for _spatial in (1, 2, 3):
    register(
        "input weight bias=None stride=1 padding=0 dilation=1 groups=1",
        getattr(torch, f"conv{_spatial}d"),
        getattr(torch.nn.functional, f"conv{_spatial}d"),
        operation=Convolution(_spatial),
    )
    register(
        "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
        getattr(torch, f"conv_transpose{_spatial}d"),
        getattr(torch.nn.functional, f"conv_transpose{_spatial}d"),
        operation=TransposedConvolution(_spatial),
    )
