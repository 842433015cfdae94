"""Linear maps: what a rule needs to know about a layer. A layer is `a -> map(a, weight) + bias`.

A rule never sees strides or groups: it evaluates the map with a weight of its choice (`W⁺`, `W²`, …) and pulls
vectors back through the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.ops.conv import each

#: A function of two tensors that is linear in each.
Bilinear = Callable[[Tensor, Tensor], Tensor]
_convolution_backward = torch.ops.aten.convolution_backward.default


class LinearMap:
    """A linear layer without its bias. `nonneg`: its input is known to be ≥ 0; `monotone`: so is its weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, monotone: bool = False) -> None:
        self.weight, self.monotone, self.nonneg = weight, monotone, False
        self.bias = bias  # already shaped so that it broadcasts against the output
        if monotone:
            self.positive = weight

    def __call__(self, a: Tensor, weight: Tensor) -> Tensor:
        """The layer's output for this weight, without bias."""
        raise NotImplementedError

    def adjoint(self, s: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        """The transposed layer: pulls `s`, shaped like the output, back to the shape of the input `a`."""
        raise NotImplementedError

    def spread(self, r: Tensor, a: Tensor) -> Tensor:
        """Shares each `r_j` equally among the inputs that output j can see."""
        raise NotImplementedError

    def widened(self) -> LinearMap:
        """The same in float32."""
        wide = copy(self)
        vars(wide).update({name: part.float() for name, part in vars(self).items() if isinstance(part, Tensor)})
        return wide

    def spare(self) -> None:
        """Free W⁺ and W⁻, which are made again when they are asked for."""
        for name in () if self.monotone else ("positive", "negative"):
            vars(self).pop(name, None)

    @cached_property
    def positive(self) -> Tensor:
        """W⁺."""
        return self.weight.clamp(min=0)

    @cached_property
    def negative(self) -> Tensor:
        """W⁻ (≤ 0)."""
        return self.weight.clamp(max=0)


class DenseMap(LinearMap):
    """`nn.functional.linear`: inputs and outputs in the last dimension."""

    def __call__(self, a: Tensor, weight: Tensor) -> Tensor:
        return F.linear(a, weight)

    def adjoint(self, s: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return torch.matmul(s, weight)

    def spread(self, r: Tensor, a: Tensor) -> Tensor:
        return (r.sum(-1, keepdim=True) / a.shape[-1]).expand_as(a)


@dataclass(frozen=True)
class Geometry:
    """Everything about a convolution except its weight. Called with a weight, it makes the linear map."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    border: tuple[int, ...] = ()  # further zeros around the input, in the format of `pad`, where sides differ

    def __call__(self, weight: Tensor, bias: Tensor | None) -> LinearMap:
        return ConvMap(weight, bias, self)

    @cached_property
    def options(self) -> Any:
        """The arguments of `torch.convolution` after the bias."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    @staticmethod
    @cache
    def of(
        kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int, transposed: bool, further: Any
    ) -> Geometry:
        """From the arguments of a call: numbers or tuples, and a padding that may be "same" or "valid"."""
        count = len(kernel)
        border: tuple[int, ...] = ()
        if isinstance(padding, str):
            reach = [d * (k - 1) for d, k in zip(each(dilation, count), kernel, strict=True)]
            border = tuple(side for t in reversed(reach) for side in (t // 2, t - t // 2)) if padding == "same" else ()
            padding = 0
        return Geometry(
            each(stride, count), each(padding, count), each(dilation, count), int(groups), transposed,
            each(further, count), border if any(border) else (),
        )  # fmt: skip


class ConvMap(LinearMap):
    """A convolution or transposed convolution of any dimension, grouped or not, on batched input."""

    def __init__(self, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
        super().__init__(weight, None if bias is None else bias.view(-1, *[1] * (weight.dim() - 2)))
        self.geometry = geometry

    def __call__(self, a: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(self._bordered(a), weight, None, *self.geometry.options)

    def adjoint(self, s: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        g, wanted = self.geometry, (True, False, False)
        pulled: Tensor = _convolution_backward(s, self._bordered(a), weight, None, *g.options, wanted)[0]
        return F.pad(pulled, [-side for side in g.border]) if g.border else pulled

    def spread(self, r: Tensor, a: Tensor) -> Tensor:
        # All channels of a group see the same inputs, so one channel per group with a kernel of ones does it.
        groups, kernel, space = self.geometry.groups, self.weight.shape[2:], a.shape[2:]
        width = a.shape[1] // groups
        ones = self.weight.new_ones((1, 1, *kernel))
        single = ConvMap(ones, None, replace(self.geometry, groups=1))
        seen = single(a.new_ones((1, 1, *space)), ones) * width
        per_group = r.reshape(r.shape[0], groups, r.shape[1] // groups, *r.shape[2:]).sum(2)  # -1 fails without samples
        share = per_group / seen.clamp(min=1)
        pulled = self.adjoint(share, ones.expand(groups, 1, *kernel), a[:, :groups])
        return pulled.unsqueeze(2).expand(-1, -1, width, *space).reshape(a.shape)

    def _bordered(self, a: Tensor) -> Tensor:
        return F.pad(a, self.geometry.border) if self.geometry.border else a


class FunctionMap(LinearMap):
    """Any function of an activation and a weight that is linear in the activation; torch differentiates it."""

    def __init__(self, function: Bilinear, weight: Tensor, monotone: bool = False) -> None:
        super().__init__(weight, monotone=monotone)
        self.function = function

    def __call__(self, a: Tensor, weight: Tensor) -> Tensor:
        return self.function(a, weight)

    def adjoint(self, s: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        with torch.enable_grad():
            source = a.detach().requires_grad_(True)
            (pulled,) = torch.autograd.grad(self.function(source, weight), source, s)
        return pulled.clone() if 0 in pulled.stride() else pulled  # rules write to it, which an expanded one forbids

    def spread(self, r: Tensor, a: Tensor) -> Tensor:
        """Evenly, or in proportion to fixed weights of the function."""
        ones, weight = torch.ones_like(a), torch.ones_like(self.weight)
        seen = self(ones, weight)
        return self.adjoint(torch.where(seen > 0, r / seen.clamp(min=1e-12), 0), weight, ones)


class AveragingMap(FunctionMap):
    """A function of one tensor, linear with weights ≥ 0: average pools, means, sums, interpolation.

    Its weight is the number 1 that scales it, so that every rule applies as it does to a layer.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], like: Tensor) -> None:
        super().__init__(lambda a, w: function(a) * w, like.new_ones(()), monotone=True)


class MatmulMap(LinearMap):
    """`weight @ a` (left) or `a @ weight`, the weight being another activation or a constant."""

    def __init__(self, weight: Tensor, left: bool, monotone: bool = False) -> None:
        super().__init__(weight, monotone=monotone)
        self.left = left

    def __call__(self, a: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(weight, a) if self.left else torch.matmul(a, weight)

    def adjoint(self, s: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        back = weight.mT
        return (torch.matmul(back, s) if self.left else torch.matmul(s, back)).sum_to_size(a.shape)

    def spread(self, r: Tensor, a: Tensor) -> Tensor:
        dim = -2 if self.left else -1
        shape = list(r.shape)
        shape[dim] = a.shape[dim]
        return (r.sum(dim, keepdim=True) / a.shape[dim]).expand(shape).sum_to_size(a.shape)
