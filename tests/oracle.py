"""An independent reference for removal, written without secateur's masking and cutting.

Weights of removed groups are zero. Norms that mix channels get a hook that computes them from their formula, over the
channels that are kept. Routers choose among the experts that are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.plans.scores import Scores


def random_scores(graph: sc.Graph, seed: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    return Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})


def zeroed(model: nn.Module, graph: sc.Graph, plan: sc.Plan) -> nn.Module:
    """A copy with every slice that the removed groups list set to zero, straight from `graph.groups`, and with norms
    over the kept channels only."""
    masked = copy.deepcopy(model)
    tensors = dict([*masked.named_parameters(), *masked.named_buffers()])
    slices: dict[tuple[str, int], list[int]] = {}
    for group in plan.groups:
        for member in graph.members(group):
            slices.setdefault((member.parameter, member.dim), []).extend(member.indices)
    with torch.no_grad():
        for (parameter, dim), indices in slices.items():
            tensors[parameter].index_fill_(dim, torch.tensor(indices), 0)
    for path, module in masked.named_modules():
        removed = slices.get((f"{path}.weight" if path else "weight", 0), [])
        if removed and _mixes(module):
            module.register_forward_hook(partial(_over_kept, removed))
        elif removed and "Router" in type(module).__name__:
            module.register_forward_hook(partial(_among_kept, removed))
    return masked


def _mixes(module: nn.Module) -> bool:
    """Whether a module is a norm over all channels: torch's own, or one with a `weight` that is written by hand."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == 1
    batch = isinstance(module, nn.modules.batchnorm._NormBase)
    return "Norm" in type(module).__name__ and not batch and getattr(module, "weight", torch.empty(0, 0)).ndim == 1


def _over_kept(removed: list[int], module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output of a norm over vectors of channels, with only the kept ones in them; 0 for the others."""
    x = args[0]
    first = isinstance(module, nn.GroupNorm) or type(module).__name__ == "LayerNorm2d"
    last = x.movedim(1, -1) if first else x
    kept = sorted(set(range(last.shape[-1])) - set(removed))
    made = torch.zeros_like(last)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        made[..., kept] = norm_by_formula(module, last[..., kept], kept)
    else:  # the module itself, built for fewer channels
        small = copy.copy(module)
        small._forward_hooks = type(module._forward_hooks)()
        small._parameters = {
            name: None if p is None else nn.Parameter(p[kept]) for name, p in module._parameters.items()
        }
        if getattr(module, "group_size", None) == last.shape[-1]:  # one group, as large as all channels together
            small.group_size = len(kept)  # type: ignore[assignment]
        made[..., kept] = small(last[..., kept], *(gate[..., kept] for gate in args[1:]))
    return made.movedim(-1, 1) if first else made


def _among_kept(removed: list[int], module: Any, args: tuple[Tensor], output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What a router of Mixtral's kind chooses if it was built for fewer experts, by their old numbers."""
    kept = torch.tensor(sorted(set(range(len(module.weight))) - set(removed)))
    small = copy.copy(module)
    small._forward_hooks = type(module._forward_hooks)()
    small._parameters, small.num_experts = {"weight": nn.Parameter(module.weight[kept])}, len(kept)
    _, weights, chosen = small(*args)
    return output[0], weights, kept[chosen]


def silenced(net: nn.Module, paths: list[str], x: Any) -> Any:
    """What a copy answers in which hooks make these modules return 0, such as the last one of a residual branch."""
    net = copy.deepcopy(net)

    def zero(module: nn.Module, args: Any, output: Any) -> Any:
        return torch.zeros_like(output) if isinstance(output, Tensor) else (torch.zeros_like(output[0]), *output[1:])

    for path in paths:
        net.get_submodule(path).register_forward_hook(zero)
    with torch.no_grad():
        return net(x)


def norm_by_formula(module: nn.Module, x: Tensor, kept: Sequence[int]) -> Tensor:
    """y = (x - E[x]) / sqrt(E[(x - E[x])²] + ε) · weight + bias, with channels last; RMS norm has no E[x] and no bias.

    The mean is over the channels of one position, for a group norm also over all positions of a sample.
    """
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm)
    dims = list(range(1, x.ndim)) if isinstance(module, nn.GroupNorm) else [-1]
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    if not isinstance(module, nn.RMSNorm):
        x = x - x.mean(dims, keepdim=True)
    y = x / (x * x).mean(dims, keepdim=True).add(eps).sqrt()
    if module.weight is not None:
        y = y * module.weight[list(kept)]
    bias = getattr(module, "bias", None)
    return y if bias is None else y + bias[list(kept)]


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    with torch.no_grad():
        out = (
            model(**example)
            if isinstance(example, dict)
            else model(*example)
            if isinstance(example, tuple)
            else model(example)
        )
    if isinstance(out, Tensor):
        return [out]
    return list(out.values()) if isinstance(out, dict) else list(out)


def relative_gap(a: list[Tensor], b: list[Tensor]) -> float:
    assert [t.shape for t in a] == [t.shape for t in b]
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-12)) for x, y in zip(a, b, strict=True))


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything about a model that a pruner must leave alone."""
    state: list[Any] = [(k, v.clone()) for k, v in model.state_dict().items()]
    state += [(n, p.requires_grad, p.grad, id(p)) for n, p in model.named_parameters()]
    state += [
        (n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)))
        for n, m in model.named_modules()
    ]
    state.append(torch.random.get_rng_state())
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
