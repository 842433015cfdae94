"""Many prunings of one network on one set of points, without building the pruned networks.

Activations are kept with units as rows, so that leaving units out is a cheap choice of rows. What all prunings share,
the first hidden layer and the sums the second makes of it, is computed once; a pruning subtracts what the units removed
from the first layer contributed. Without a third ReLU everything behind the second layer is one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from secateur.experiments.toy.nets import HIDDEN, ToyNet
from secateur.pruning.plan import Plan

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
        self._first = torch.addmm(self._bias[0][:, None], self._weight[0], x.T).relu_()
        self._second = torch.addmm(self._bias[1][:, None], self._weight[1], self._first)

    @torch.no_grad()
    def logits(self, removed: Removed) -> Tensor:
        """Points by classes."""
        width = len(self._bias[0])
        gone = [torch.tensor(sorted(units), dtype=torch.long) for units in removed]
        kept = [torch.from_numpy(np.setdiff1d(np.arange(width), units.numpy())) for units in gone]
        lost = self._weight[1][kept[1]][:, gone[0]]
        hidden = torch.addmm(self._second[kept[1]], lost, self._first[gone[0]], alpha=-1).relu_()
        weight, bias = self._weight[2][kept[2]][:, kept[1]], self._bias[2][kept[2], None]
        last = self._weight[3][:, kept[2]]
        if self._third_relu:
            hidden = torch.addmm(bias, weight, hidden).relu_()
            return torch.addmm(self._bias[3][:, None], last, hidden).T
        return torch.addmm(last @ bias + self._bias[3][:, None], last @ weight, hidden).T

    def classes(self, removed: Removed) -> Tensor:
        """The class given to each point."""
        return self.logits(removed).argmax(1)


def _tensor(layer: nn.Module, name: str) -> Tensor:
    return layer.get_parameter(name).detach()
