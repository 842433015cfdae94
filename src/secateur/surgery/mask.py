"""Masking: same shapes, zeros where a plan cuts. The reference that removal is checked against."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.ops.norm import GroupNorm, LayerNorm, RMSNorm
from secateur.ops.table import Call, Site
from secateur.plans.plan import NormCut, Plan
from secateur.running.copies import copy_with, unwrap
from secateur.running.observer import Observer
from secateur.surgery.cut import check_fits, kept_places


def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model in which everything that the plan cuts is zero.

    Norms that mix channels are computed over the kept channels only, as in the smaller model.
    """
    model = unwrap(model)
    check_fits(model, plan)
    return _masked(model, plan, frozenset())


def reference(model: nn.Module, plan: Plan) -> nn.Module:
    """`mask` for one look: parameters that the plan leaves alone share the model's memory. Not to be handed out."""
    model = unwrap(model)
    return _masked(model, plan, {name for name, _ in model.named_parameters()} - set(plan.cuts))


def _masked(model: nn.Module, plan: Plan, shared: Set[str]) -> nn.Module:
    def made(name: str, old: Tensor) -> Tensor:
        return old.detach() if name in shared else _zeroed(old.detach().clone(), plan.cuts.get(name))

    masked = copy_with(model, made)
    if plan.norms:
        forward = MaskedForward(masked, plan.norms)
        masked.forward = forward
    return masked


def _zeroed(tensor: Tensor, dims: Any) -> Tensor:
    for dim, indices in (dims or {}).items():
        tensor.index_fill_(dim, torch.from_numpy(np.fromiter(indices, np.int64, len(indices))).to(tensor.device), 0)
    return tensor


class MaskedForward:
    """The forward of a masked model: the class's own, with norms over the kept channels."""

    def __init__(self, module: nn.Module, norms: Sequence[NormCut]) -> None:
        self.module = module
        self.norms = tuple(norms)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module under a mode that replaces the norms."""
        with _NormMask(self.module, self.norms):
            return type(self.module).forward(self.module, *args, **kwargs)


class _NormMask(Observer):
    """Computes each listed norm over its kept channels."""

    def __init__(self, model: nn.Module, norms: Sequence[NormCut]) -> None:
        super().__init__(model)
        self._kept = {Site(n.path, n.function, n.visit): torch.from_numpy(kept_places(n)) for n in norms}

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def observe(self, call: Call) -> Any:
        if not isinstance(call.operation, LayerNorm | GroupNorm):
            return call.run()
        kept = self._kept.get(call.site)
        if kept is None:
            return call.run()
        x: Tensor = call["input"]
        weight, bias = call.get("weight"), call.get("bias")
        if isinstance(call.operation, GroupNorm):
            dims = list(range(1, x.ndim))
            shape = [1, -1] + [1] * (x.ndim - 2)
            weight = None if weight is None else weight.view(shape)
            bias = None if bias is None else bias.view(shape)
        else:
            dims = list(range(x.ndim - len(call["normalized_shape"]), x.ndim))
        kept = kept.to(x.device).reshape((1,) * (x.ndim - kept.ndim) + tuple(kept.shape))
        centre = not isinstance(call.operation, RMSNorm)
        return _masked_norm(x, kept, dims, weight, bias, call.get("eps"), centre)


def _masked_norm(
    x: Tensor,
    kept: Tensor,
    dims: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centre: bool,
) -> Tensor:
    """A norm over `dims` in which only the kept places count; the others come out as 0."""
    inside = kept.expand_as(x).to(x.dtype)
    count = inside.sum(dims, keepdim=True)
    centred = x * inside
    if centre:
        centred = (x - centred.sum(dims, keepdim=True) / count) * inside
    variance = centred.square().sum(dims, keepdim=True) / count
    y = centred * torch.rsqrt(variance + (torch.finfo(x.dtype).eps if eps is None else eps))
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y * inside
