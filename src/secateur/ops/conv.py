"""Convolutions: 1d, 2d, 3d; plain, grouped, depthwise, transposed."""

from __future__ import annotations

from typing import Any

import numpy as np

from secateur.errors import UnsupportedModelError
from secateur.ops.layers import like, spread
from secateur.ops.linear import is_activation, produce_with_bias, read_by_weight
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, register_named


class _Convolving(Operation):
    """Output channels are fresh; input channels are read. With groups, a whole group leaves at once."""

    differentiates = False
    transposed = False

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, weight, groups = call["input"], call["weight"], int(call["groups"])
        axis = x.ndim - self.spatial - 1
        read, made, taken = labels.along(x, axis), labels.along(weight, 0), labels.along(weight, 1)
        macs = (x if self.transposed else output).numel() * (weight.numel() // max(len(weight), 1))
        for layer in labels.others(x, [axis]):
            labels.freeze(layer, f"{call.site} mixes positions that carry units")
        if self.transposed:
            made, taken = taken, made
        if groups == 1 or self.transposed:
            read_by_weight(labels, call, read, taken)
        if groups > 1:
            # One axis of the weight numbers channels within a group; nothing leaves along it.
            within, source = (made, taken) if self.transposed else (taken, read)
            labels.freeze(within, f"width of a group of {call.site}")
            made = labels.virtual(output.shape[axis]) if self.transposed else made
            if made is not None and source is not None:
                labels.tie_rows(np.concatenate([source.reshape(groups, -1), made.reshape(groups, -1)], 1))
            else:
                labels.freeze(made, f"grouped convolution over an input of fixed size in {call.site}")
                labels.freeze(source, f"read by {call.site} through a weight of fixed size")
        labels.cost(call.site, macs, made, taken if groups == 1 else None)
        if made is not None:
            produce_with_bias(labels, made, call, "filter")
            varies = bool(made[0] != made[-1]) and output.numel() > 0  # an expert may see no sample
            labels.set(output, [spread(made, axis, output.shape)], compacted=varies)
        else:
            labels.freeze_tensor(call["bias"], f"added by {call.site} to units of fixed number")

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        if is_activation(call["weight"]):
            raise UnsupportedModelError(
                f"{call.site} computes its weight from activations (a dynamic convolution), which has no rule.",
                fix="a convolution with parameters, or unfold and a matrix product",
            )
        return relevance.convolves(call, self.spatial, self.transposed)


class Convolution(_Convolving):
    """`weight` is (out, in / groups, *kernel)."""

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic: torch takes a millisecond over it. What does not fit is left to torch to refuse."""
        x, weight, bias, padding = call["input"], call["weight"], call["bias"], call["padding"]
        groups = int(call["groups"])
        plain = x.is_meta and x.ndim == self.spatial + 2 and not isinstance(padding, str)
        fits = x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0 and x.dtype == weight.dtype
        if not plain or not fits or (bias is not None and len(bias) != len(weight)):
            return call.run()
        steps = [each(call[name], self.spatial) for name in ("stride", "padding", "dilation")]
        sizes = [
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(x.shape[2:], weight.shape[2:], *steps, strict=True)
        ]
        return like(x, (x.shape[0], weight.shape[0], *sizes)) if min(sizes) > 0 else call.run()


class TransposedConvolution(_Convolving):
    """`weight` is (in, out / groups, *kernel)."""

    transposed = True


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number per dimension, from one number or a sequence."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


for _n in (1, 2, 3):
    register_named("input weight bias=None stride=1 padding=0 dilation=1 groups=1", f"conv{_n}d", Convolution(_n))
    register_named(
        "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
        f"conv_transpose{_n}d",
        TransposedConvolution(_n),
    )
