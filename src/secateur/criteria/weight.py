"""Criteria that look at no data: the size of the weights, and random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from secateur.criteria.criterion import Accumulator, Criterion, Norm, Subject, Sums
from secateur.running.devices import precise


@dataclass(frozen=True)
class Weight(Criterion):
    """Σ|W| of a filter or neuron (Li 2016), per layer divided by its norm: 2 as in the paper, 1 as in its script."""

    data: ClassVar[bool | None] = False
    name: str = "weight"
    norm: Norm = 2

    def accumulate(self, subject: Subject) -> Accumulator:
        """All sums are known without data."""
        known = Accumulator(subject)
        sizes: dict[int, Tensor] = {}
        known.sums = Sums([unit_weights(subject, i, sizes) for i in range(len(subject.producers))], 1)
        return known


def unit_weights(subject: Subject, index: int, known: dict[int, Tensor]) -> Tensor | None:
    """Σ|W| of the units that a producer still has; None if no dimension of a parameter stands for its units.

    `known` caches the sums along each axis, since query, key and value rows share one.
    """
    graph, producer, kept = subject.graph, subject.producers[index], subject.kept[index]
    number = int(graph.axis_of[producer.labels[0]])
    axis = graph.axes.axes[number]
    if not axis.parameter:
        return None
    weight = subject.parameters.get(axis.parameter)
    if weight is None or weight.ndim < 2:
        return None
    if number not in known:
        others = [d for d in range(weight.ndim) if d != axis.dim]
        wide = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
        known[number] = torch.linalg.vector_norm(weight.detach(), 1, others, dtype=wide).to(precise(weight.device))
    sizes = known[number]
    # A parameter may hold the units of several calls (query, key and value rows). Find ours among those that are left.
    here = np.zeros(axis.size, np.bool_)
    here[producer.labels - axis.base] = kept
    gone = np.zeros(axis.size, np.bool_)
    for other, left in zip(subject.producers, subject.kept, strict=True):
        if graph.axis_of[other.labels[0]] == number:
            gone[other.labels - axis.base] |= ~left
    ours: Tensor = sizes[torch.from_numpy(np.flatnonzero(here[~gone])).to(sizes.device)]
    return ours


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform random numbers. The same seed gives every unit the same number at every step."""

    data: ClassVar[bool | None] = False
    name: str = "random"
    seed: int = 0

    def accumulate(self, subject: Subject) -> Accumulator:
        """Drawn for the unpruned layers, so that a removal does not change the numbers of what is left."""
        generator = np.random.default_rng(self.seed)
        drawn: list[Tensor | None] = []
        for kept in subject.kept:
            drawn.append(torch.from_numpy(generator.random(len(kept))[kept]))
        known = Accumulator(subject)
        known.sums = Sums(drawn, 1)
        return known
