"""An independent reference for removal: hooks that zero channels, written without secateur's masking."""

from __future__ import annotations

import copy
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
    """A copy with every slice that the removed groups list set to zero, straight from `graph.groups`."""
    masked = copy.deepcopy(model)
    tensors = dict([*masked.named_parameters(), *masked.named_buffers()])
    slices: dict[tuple[str, int], list[int]] = {}
    for group in plan.groups:
        for member in graph.members(group):
            slices.setdefault((member.parameter, member.dim), []).extend(member.indices)
    with torch.no_grad():
        for (parameter, dim), indices in slices.items():
            tensors[parameter].index_fill_(dim, torch.tensor(indices), 0)
    return masked


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
