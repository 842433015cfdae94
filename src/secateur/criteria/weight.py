"""Criteria that look at no data: the size of the weights, and random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.arguments import check_count
from secateur.criteria.criterion import Accumulator, Criterion, Norm, Subject, Sums, check_units
from secateur.errors import CriterionError
from secateur.running.copies import named_tensors

_CACHED = 2**19  # numbers


@dataclass(frozen=True)
class Weight(Criterion):
    """Σ|W| of a filter or neuron (Li 2016), of a hidden unit over all gates, per layer divided by its norm: 2 as in the
    paper, 1 as in its script."""

    data: ClassVar[bool | None] = False
    name: str = "weight"
    norm: Norm = 2

    def accumulate(self, subject: Subject) -> Accumulator:
        """Units without a dimension of a parameter get no score."""
        graph, sizes = subject.graph, np.full(len(subject.graph.root), np.nan)
        parameters = dict(named_tensors(subject.original))  # frozen weights may be buffers
        if not parameters.keys() >= {axis.parameter for axis in graph.axes.axes if axis.parameter}:
            parameters = _all_names(subject.original)
        left = np.ones(len(sizes), np.bool_)
        for producer, kept in zip(subject.producers, subject.kept, strict=True):
            left[producer.rows] &= kept
        # A parameter may hold the units of several calls (query, key and value rows), a call those of several.
        labels = np.concatenate([np.zeros(0, np.int64), *(producer.rows.ravel() for producer in subject.producers)])
        for number in np.unique(graph.axis_of[labels]).tolist():
            axis = graph.axes.axes[number]
            weight = parameters.get(axis.parameter)
            if weight is not None and weight.ndim > 1:
                check_units(f"`{axis.parameter}`", weight.shape[axis.dim], int(left[axis.span].sum()))
                sizes[axis.span][left[axis.span]] = _row_sums(weight.detach(), axis.dim).cpu().double().numpy()
        found = [sizes[p.rows[:, kept]].sum(0) for p, kept in zip(subject.producers, subject.kept, strict=True)]
        return Accumulator(subject, Sums([None if np.isnan(v).any() else torch.from_numpy(v) for v in found], 1))


def _all_names(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names: what was tied when the model was analysed has the first of these."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _row_sums(weight: Tensor, dim: int) -> Tensor:
    """Σ|W| along all other dimensions, a part that fits the cache at a time: five times as fast as a norm."""
    wide, rows = torch.promote_types(weight.dtype, torch.float32), weight.movedim(dim, 0).flatten(1)
    if rows.numel() <= _CACHED:
        return rows.abs().sum(1, dtype=wide)
    parts = rows.split(max(1, _CACHED // max(rows.shape[1], 1)))  # type: ignore[no-untyped-call]
    return torch.cat([part.abs().sum(1, dtype=wide) for part in parts])


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform random numbers. The same seed gives every unit the same number at every step."""

    data: ClassVar[bool | None] = False
    name: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, 0, error=CriterionError)

    def accumulate(self, subject: Subject) -> Accumulator:
        """Drawn for the unpruned layers, so that a removal does not change the numbers of what is left."""
        generator = np.random.default_rng(self.seed)
        drawn = [torch.from_numpy(generator.random(len(kept))[kept]) for kept in subject.kept]
        return Accumulator(subject, Sums([*drawn], 1))
