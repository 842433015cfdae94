"""Many prunings of one network on one set of points, without building the pruned networks.

Activations are kept with units as rows, so that leaving units out is a cheap choice of rows. What prunings share, the
first hidden layer and the sums the second makes of it, is computed once; a pruning adds or subtracts what the units of
the first layer contribute in which it differs from the nearest pruning whose sums are known. Without a third ReLU
everything behind the second layer is one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from secateur.experiments.toy.nets import HIDDEN, ToyNet
from secateur.pruning.plan import Plan

# Points that are worked on together: their activations stay in the processor's cache.
_SLICE = 1000

# Per hidden layer, the units that leave.
Removed = Sequence[tuple[int, ...]]


def removed_by(plan: Plan) -> list[tuple[int, ...]]:
    """The hidden units that a plan takes away, layer by layer."""
    return [tuple(plan.cuts.get(f"{name}.weight", {}).get(0, ())) for name in HIDDEN]


class Evaluator:
    """Logits of prunings of a network on fixed points."""

    @torch.no_grad()
    def __init__(self, net: ToyNet, x: Tensor) -> None:
        layers = [net.get_submodule(name) for name in (*HIDDEN, "output")]
        self._weight = [_tensor(layer, "weight") for layer in layers]
        self._bias = [_tensor(layer, "bias") for layer in layers]
        self._third_relu = hasattr(net, "third_relu")
        bias = [self._bias[0][:, None], self._bias[1][:, None]]
        self._first = [torch.addmm(bias[0], self._weight[0], part.T).relu_() for part in torch.split(x, _SLICE)]
        sums = [torch.addmm(bias[1], self._weight[1], first) for first in self._first]
        self._known = [(torch.ones(len(self._bias[0])), sums)]

    @torch.no_grad()
    def remember(self, removed: Removed) -> None:
        """Keep what the second layer sums up when these units are gone from the first: for prunings that are alike."""
        present = _present(removed[0], len(self._bias[0]))
        self._known.append((present, list(self._sums(present, torch.arange(len(self._bias[1]))))))

    @torch.no_grad()
    def logits(self, removed: Removed) -> Tensor:
        """Points by classes."""
        present = [_present(units, len(bias)) for units, bias in zip(removed, self._bias, strict=False)]
        second, third = present[1].nonzero()[:, 0], present[2].nonzero()[:, 0]
        weight, bias = self._weight[2][third][:, second], self._bias[2][third, None]
        last, last_bias = self._weight[3][:, third], self._bias[3][:, None]
        if not self._third_relu:
            last, last_bias = last @ weight, last @ bias + last_bias
        parts = []
        for sums in self._sums(present[0], second):
            hidden = sums.relu_()
            if self._third_relu:
                hidden = torch.addmm(bias, weight, hidden).relu_()
            parts.append(torch.addmm(last_bias, last, hidden))
        return torch.cat(parts, 1).T

    def _sums(self, present: Tensor, units: Tensor) -> Iterator[Tensor]:
        """What some units of the second layer sum up of the first, where 1 marks the units that are present."""
        start, known = min(self._known, key=lambda known: int((known[0] != present).sum()))
        changed = (start != present).nonzero()[:, 0]
        weight = self._weight[1][units][:, changed] * (present - start)[changed]
        for first, sums in zip(self._first, known, strict=True):
            yield torch.addmm(sums[units], weight, first[changed])

    def classes(self, removed: Removed) -> Tensor:
        """The class given to each point."""
        return self.logits(removed).argmax(1)


def _present(removed: tuple[int, ...], width: int) -> Tensor:
    present = torch.ones(width)
    present[list(removed)] = 0
    return present


def _tensor(layer: nn.Module, name: str) -> Tensor:
    return layer.get_parameter(name).detach()
