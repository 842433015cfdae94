"""Cutting: a new module of the same class with smaller tensors and attributes that fit them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import PlanError
from secateur.plans.plan import AttributeCut, NormCut, Plan
from secateur.running.copies import copy_with, named_modules, named_tensors, unwrap
from secateur.running.heads import fit_heads
from secateur.structure.blocks import within
from secateur.surgery.attention import narrow_attention
from secateur.surgery.bypass import Bypass, bypass
from secateur.surgery.windows import fit_windows
from secateur.surgery.written_sizes import Place, place_of, resize


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Raise unless every parameter that the plan cuts exists with the shape that the plan was made for."""
    have = {n: tuple(t.shape) for n, t in named_tensors(model)}
    for name, shape in plan.shapes.items():
        if name not in have:
            raise PlanError(
                f"the plan was made for {plan.model} and cuts `{name}`, which {type(model).__name__} does not have.",
                fix="build the same model that was analysed",
            )
        if have[name] != tuple(shape):
            raise PlanError(
                f"the plan was made for `{name}` of shape {tuple(shape)}, but this model has {have[name]}.",
                fix="apply the plan to the unpruned model it was made for",
            )
    known: dict[int, tuple[int, int]] = {}  # the largest index and how many there are, by identity (`Known`)
    for name, dims in plan.cuts.items():
        shape = plan.shapes.get(name, ())
        for dim, indices in dims.items():
            if id(indices) not in known:
                known[id(indices)] = max(indices, default=-1), len(set(indices))
            last, count = known[id(indices)]
            if dim >= len(shape) or last >= shape[dim] or count >= shape[dim]:
                raise PlanError(
                    f"the plan cuts indices of `{name}` along dimension {dim} that its shape {shape} cannot lose"
                )


def cut(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model without what the plan removes. Not verified; `apply` does that."""
    model = unwrap(model)
    check_fits(model, plan)
    return cut_copy(model, plan)


def cut_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """`cut` for a plan that is known to fit."""

    known: Known = {}

    def made(name: str, old: Tensor) -> Tensor:
        if plan.stand_ins and any(within(name, item.path) for item in plan.stand_ins):
            return old.detach()  # gone in a moment
        return sliced(old.detach(), plan.cuts.get(name, {}), known)

    small = copy_with(model, made)
    bypass(small, plan.stand_ins)
    before = dict(named_modules(model))
    for path, module in named_modules(small):
        if type(module) in _SIZELESS and not module._parameters:
            continue
        if path in before and not isinstance(module, Bypass):
            _fit(module, before[path], path, plan)
            fit_windows(module, before[path])
    for path, old in before.items():
        if isinstance(old, nn.MultiheadAttention) and not any(within(path, item.path) for item in plan.stand_ins):
            narrow_attention(small, path, old, plan)
    sizes: dict[str, dict[Place, int]] = {}
    for item in plan.attributes:
        if (place := place_of(item.name)) is not None:
            sizes.setdefault(item.path, {})[place] = item.after
        else:
            _fit_attribute(small, item)
    for path, own in sizes.items():
        if path not in before or not resize(small.get_submodule(path), own):
            raise PlanError(
                f"the plan changes sizes in the code of `{path}`, whose forward cannot be changed here.",
                fix="build the same model that was analysed, from its source",
            )
    for head in plan.heads:
        _fit_heads(small, before, head.path, head.heads, head.heads - len(head.removed))
    return small


#: Modules that remember no number of channels.
_SIZELESS = frozenset(
    (nn.Sequential, nn.ModuleList, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.GELU, nn.Sigmoid,
     nn.Dropout, nn.Identity, nn.Flatten, nn.AdaptiveAvgPool2d, nn.MaxPool2d, nn.AvgPool2d)
)  # fmt: skip
#: What is left of a dimension, by which indices it loses, its size and the device. Tuples are known by identity: what a
#: convolution, its batch norm and its readers lose is one tuple.
Known = dict[tuple[int, int, torch.device], Tensor]


def sliced(tensor: Tensor, dims: Mapping[int, tuple[int, ...]], known: Known | None = None) -> Tensor:
    """A copy of a tensor without the given indices of each dimension. `known`: while these live, of other tensors."""
    if tensor.is_meta and dims:  # (torch takes ten times as long)
        shape = [size - len(set(dims.get(dim, ()))) for dim, size in enumerate(tensor.shape)]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    for dim, indices in dims.items():
        key = id(indices), tensor.shape[dim], tensor.device
        left = None if known is None else known.get(key)
        if left is None:
            inside = np.ones(tensor.shape[dim], np.bool_)
            inside[np.fromiter(indices, np.int64, len(indices))] = False
            left = torch.from_numpy(np.flatnonzero(inside)).to(tensor.device)
            if known is not None:
                known[key] = left
        tensor = tensor.index_select(dim, left)
    return tensor if dims else tensor.clone()


def places(indices: Sequence[int]) -> Tensor:
    """Indices as a tensor."""
    return torch.from_numpy(np.fromiter(indices, np.int64, len(indices)))


def kept_places(norm: NormCut) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which of the places that a norm mixes are left."""
    kept = np.ones(math.prod(norm.shape), bool)
    kept[list(norm.removed)] = False
    return kept.reshape(norm.shape)


def _fit(module: Any, old: Any, path: str, plan: Plan) -> None:
    """Bring the sizes that a module remembers in line with its tensors."""
    if isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[:2]
        if old.groups > 1:
            module.groups = first // (old.weight.shape[0] // old.groups)
            module.in_channels = module.groups * (old.in_channels // old.groups)
            module.out_channels = module.groups * (old.out_channels // old.groups)
        elif isinstance(module, nn.modules.conv._ConvTransposeNd):
            module.in_channels, module.out_channels = first, second
        else:
            module.out_channels, module.in_channels = first, second
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        vector = module.weight if module.weight is not None else module.running_mean
        module.num_features = _counted(path, plan, old.num_features) if vector is None else len(vector)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) or isinstance(vars(module).get("normalized_shape"), tuple):
        scale: Tensor | None = getattr(module, "weight", None)  # absent without elementwise_affine
        module.normalized_shape = _norm_shape(old.normalized_shape, path, plan) if scale is None else tuple(scale.shape)
    elif isinstance(module, nn.GroupNorm):
        kept = len(module.weight) if module.weight is not None else _counted(path, plan, old.num_channels)
        module.num_channels = kept
        if old.num_groups > 1:
            module.num_groups = kept // (old.num_channels // old.num_groups)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif isinstance(module, nn.Bilinear):
        module.out_features, module.in1_features, module.in2_features = module.weight.shape
    elif isinstance(module, nn.RNNCellBase):
        module.input_size, module.hidden_size = module.weight_ih.shape[1], module.weight_hh.shape[1]
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif is_conv1d(module):
        module.nx, module.nf = module.weight.shape
    elif experts := _experts(old):
        for name, own in experts:
            setattr(module, name, len(getattr(module, own)))
    elif isinstance(module, nn.RNNBase):
        weights: Any = [getattr(module, name) for name in module._flat_weights_names]
        rows, module.input_size = weights[0].shape
        module.hidden_size = rows * old.hidden_size // len(old.weight_ih_l0)
        module.proj_size = weights[1].shape[1] if old.proj_size else 0
        module._flat_weights = weights


def _experts(old: nn.Module) -> list[tuple[str, str]]:
    """Where a module keeps its number of experts, and the parameter that has as many."""
    counts = [(name, vars(old).get(name)) for name in ("num_experts", "n_routed_experts", "num_local_experts")]
    held = [(own, len(t)) for own, t in old._parameters.items() if t is not None and t.ndim > 1]
    return [(name, own) for name, count in counts for own, size in held[:1] if type(count) is int and count == size]


def _counted(path: str, plan: Plan, before: int) -> int:
    """How many channels a norm without parameters has after the cut."""
    return next((item.after for item in plan.attributes if item.path == path), before)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the linear layer of GPT-2, which remembers its sizes as `nx` and `nf`."""
    return type(module).__name__ == "Conv1D" and {"nx", "nf"} <= vars(module).keys()


def _fit_attribute(small: nn.Module, item: AttributeCut) -> None:
    """Set a remembered size, unless it is set already. Only a number with the expected value is replaced."""
    try:
        module = small.get_submodule(item.path)
    except AttributeError:
        module = None
    if module is None or vars(module).get(item.name) not in (item.before, item.after):
        raise PlanError(
            f"the plan sets `{item.path}`.{item.name} from {item.before} to {item.after}, but this model has "
            "no such number.",
            fix="build the same model that was analysed",
        )
    setattr(module, item.name, item.after)


def _norm_shape(shape: tuple[int, ...], path: str, plan: Plan) -> tuple[int, ...]:
    """The shape that a norm without parameters normalises after the cut."""
    for norm in plan.norms:
        if norm.path == path:
            places = np.nonzero(kept_places(norm))[-len(shape) :]
            sizes = zip(shape, norm.shape[-len(shape) :], places, strict=True)
            return tuple(size if had == 1 else len(np.unique(at)) for size, had, at in sizes)
    return shape


def _fit_heads(small: nn.Module, before: dict[str, nn.Module], path: str, had: int, has: int) -> None:
    """Attention modules remember their number of heads under various names; adjust those that hold it."""
    parts = path.split(".") if path else []
    for end in range(len(parts), max(len(parts) - 2, -1), -1):
        where = ".".join(parts[:end])
        old = before.get(where)
        if old is None or isinstance(old, nn.MultiheadAttention):
            continue
        if fit_heads(small.get_submodule(where), old, had, has):
            return
