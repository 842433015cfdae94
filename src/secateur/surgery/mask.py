"""Masking: same shapes, zeros where a plan cuts. The reference that removal is checked against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.ops.activation import Softmax
from secateur.ops.norm import GroupNorm, LayerNorm, RMSNorm
from secateur.ops.reduce import Best, TopK
from secateur.ops.table import Call, Site
from secateur.plans.plan import BlockCut, NormCut, Plan
from secateur.running.copies import copy_with, named_parameters, unwrap, with_same_memory
from secateur.running.observer import Observer
from secateur.surgery.cut import check_fits, kept_places, places


def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model in which everything that the plan cuts is zero.

    Norms that mix channels are computed over the kept channels only, as in the smaller model. Residual branches that
    leave are 0 where they are added.
    """
    model = unwrap(model)
    check_fits(model, plan)
    return _masked(model, plan, frozenset())


def reference(model: nn.Module, plan: Plan, unmasked: Set[str] = frozenset()) -> nn.Module:
    """`mask` for one look: parameters that the plan leaves alone share the model's memory. Not to be handed out.

    `unmasked` ones do so too: they are masked where they are read.
    """
    model = unwrap(model)
    own = {name for name, _ in named_parameters(model)}
    return _masked(model, plan, own - plan.cuts.keys() | unmasked)


def _masked(model: nn.Module, plan: Plan, shared: Set[str]) -> nn.Module:
    known: dict[tuple[int, torch.device], Tensor] = {}  # what layers lose, mostly together

    def made(name: str, old: Tensor) -> Tensor:
        if name in shared:
            return with_same_memory(old)
        new = old.detach().clone()
        for dim, indices in plan.cuts.get(name, {}).items():
            key = id(indices), new.device
            if key not in known:
                known[key] = places(indices).to(new.device)
            new.index_fill_(dim, known[key], 0)
        return new

    masked = copy_with(model, made)
    if plan.norms or plan.blocks:
        gone = {name: cuts[0] for name, cuts in plan.cuts.items() if cuts.keys() == {0}}
        masked.forward = partial(_masked_forward, masked, plan.norms, plan.blocks, gone)
    return masked


def _masked_forward(
    module: nn.Module, norms: Sequence[NormCut], blocks: Sequence[BlockCut], gone: Mapping[str, Sequence[int]], /,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """The forward of a masked model: the class's own, with norms over the kept channels, without branches that left."""
    with _Masks(module, norms, blocks, gone):
        return type(module).forward(module, *args, **kwargs)


class _Masks(Observer):
    """Computes each listed norm over its kept channels, and makes each listed branch 0 where it is added.

    A norm with a scale is known by that, and only others by how often their function was called before: on a text of
    another length that is another number. `gone`: what parameters lose.
    """

    def __init__(
        self, model: nn.Module, norms: Sequence[NormCut], blocks: Sequence[BlockCut], gone: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(model)
        self._kinds = {(norm.path, norm.function) for norm in norms}
        self._scales: dict[int, Tensor | None] = {}  # by identity: what is kept; None for a norm that loses nothing
        for name, scale in named_parameters(model):
            if scale.ndim == 1 and norms:
                kept = torch.ones(len(scale), dtype=torch.bool)
                kept[list(gone.get(name, ()))] = False
                self._scales[id(scale)] = kept if name in gone else None
        self._branches = {Site(block.path, block.function, block.visit): block.operand for block in blocks}
        self._kept: dict[Site, Tensor] = {}
        for norm in norms:  # several, where kinds of units cross in a tensor
            site, kept = Site(norm.path, norm.function, norm.visit), _narrowed(torch.from_numpy(kept_places(norm)))
            self._kept[site] = kept & self._kept[site] if site in self._kept else kept

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def observe(self, call: Call) -> Any:
        if call.site in self._branches:
            return _without_branch(call, self._branches[call.site])
        kept = self._kept_at(call)
        if kept is None:
            return call.run()
        if isinstance(call.operation, Softmax | TopK | Best):  # a router without the experts that left
            x: Tensor = call["input"]
            return call.on(x)(x.masked_fill(~kept.to(x.device), -math.inf))
        return _masked_norm(call, kept) if isinstance(call.operation, LayerNorm | GroupNorm) else _reduced(call, kept)

    def _kept_at(self, call: Call) -> Tensor | None:
        """The places that count in a norm or a statistic; None if all do."""
        if (call.site.path, call.site.function) not in self._kinds:
            return None
        scale = call.get("weight") if isinstance(call.operation, LayerNorm | GroupNorm) else None
        if id(scale) not in self._scales or (isinstance(call.operation, GroupNorm) and int(call["num_groups"]) > 1):
            return self._kept.get(call.site)
        kept = self._scales[id(scale)]
        if kept is not None and isinstance(call.operation, GroupNorm):
            kept = kept.view(1, -1, *[1] * (call["input"].ndim - 2))
        return kept


def _without_branch(call: Call, operand: int) -> Any:
    """An addition in which one of the terms is 0."""
    term = call.tensors()[operand]
    if call.writes and operand == 0:
        term.zero_()
        return call.run()
    return call.on(term)(torch.zeros_like(term))


def _reduced(call: Call, kept: Tensor) -> Any:
    """A sum, a mean or another statistic of the kept places, which are whole slices."""
    x: Tensor = call["input"]
    small = x
    for dim, size in enumerate(kept.shape):
        if size > 1:
            inside = kept.movedim(dim, 0).reshape(size, -1).any(1)
            if size != x.shape[dim]:  # an image of another size: as many places for each channel
                inside = inside[torch.arange(x.shape[dim]) * size // x.shape[dim]]
            small = small.index_select(dim, inside.nonzero().squeeze(1).to(x.device))
    return call.on(x)(small)


def _narrowed(kept: Tensor) -> Tensor:
    """The places without dimensions along which they are all alike, so that inputs of other sizes fit."""
    for dim in range(kept.ndim):
        first = kept.narrow(dim, 0, 1)
        kept = first if bool((kept == first).all()) else kept
    return kept


def _masked_norm(call: Call, kept: Tensor) -> Tensor:
    """A norm in which only the kept places count; the others come out as 0."""
    x: Tensor = call["input"]
    weight, bias, eps = call.get("weight"), call.get("bias"), call.get("eps")
    if isinstance(call.operation, GroupNorm):
        dims = list(range(1, x.ndim))
        kept = kept[:, :, *[slice(1)] * (x.ndim - 2)]  # whole channels leave, so that the mask fits images of any size
        shape = [1, -1] + [1] * (x.ndim - 2)
        weight, bias = (None if factor is None else factor.view(shape) for factor in (weight, bias))
    else:
        dims = list(range(x.ndim - len(call["normalized_shape"]), x.ndim))
        if tuple(x.shape[dims[0] :]) != tuple(call["normalized_shape"]):
            return call.run()  # type: ignore[no-any-return]  # which refuses it
    inside = kept.to(x.device).expand_as(x).to(x.dtype)
    count = inside.sum(dims, keepdim=True)
    centred = x * inside
    if not isinstance(call.operation, RMSNorm):
        centred = (x - centred.sum(dims, keepdim=True) / count) * inside
    variance = centred.square().sum(dims, keepdim=True) / count
    y = centred * torch.rsqrt(variance + (torch.finfo(x.dtype).eps if eps is None else eps))
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return (y * inside).to(x.dtype)  # weights may be wider than activations
