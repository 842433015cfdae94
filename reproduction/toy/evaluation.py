"""Many prunings of one network on one set of points, without building the pruned networks.

Points are evaluated in cells of neighbours, where every layer can be simplified:

- Most units of the first layer are off everywhere in a cell, or on everywhere. The sum of the latter is an affine
  function, so three numbers are enough. Only units that switch within the cell are added one by one.
- The sums of the second layer are kept for some prunings. For another pruning, the nearest of these is corrected by the
  units in which the two differ.
- The third layer reads polynomials instead of the activations of the second. The change in any difference of logits has
  a bound. Points that are nearer to a decision boundary than this bound are computed exactly, so the classes are exact.
  (Without a third ReLU, the layers behind the second are one matrix, and polynomials are not needed.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from reproduction.toy.cells import Cell, cells
from reproduction.toy.nets import HIDDEN, ToyNet
from secateur.plans.plan import Plan

# A generous bound for the effect of rounding on a difference of logits, relative to the largest logit.
_ROUNDING = 1e-4

# The removed units of each hidden layer.
Removed = Sequence[tuple[int, ...]]


def removed_by(plan: Plan) -> list[tuple[int, ...]]:
    """The hidden units that a plan removes, layer by layer."""
    return [tuple(plan.cuts.get(f"{name}.weight", {}).get(0, ())) for name in HIDDEN]


class Layers:
    """The layers of a network: weights with a row for each input, biases as columns."""

    def __init__(self, net: ToyNet) -> None:
        layers = [net.get_submodule(name) for name in (*HIDDEN, "output")]
        self.weight = [_tensor(layer, "weight").T.contiguous() for layer in layers]
        self.bias = [_tensor(layer, "bias")[:, None] for layer in layers]
        self.third_relu = hasattr(net, "third_relu")

    @cached_property
    def reach(self) -> float:
        """A Lipschitz constant: from the activations of the second layer to any difference of two logits.

        It holds for all prunings, because ReLU does not increase distances, and the norm of a part of a matrix is not
        larger than that of the whole.
        """
        apart = torch.cdist(self.weight[3].T, self.weight[3].T).max()
        return float(torch.linalg.matrix_norm(self.weight[2], 2) * apart)


class Evaluator:
    """Classes that prunings of a network give to fixed points. Activations have units as rows."""

    @torch.no_grad()
    def __init__(self, layers: Layers, x: Tensor) -> None:
        self._layers = layers
        self._cells = cells(x)
        self._order = torch.cat([cell.points for cell in self._cells]).argsort()
        self._crossing, affine = zip(*(self._first(x[cell.points], cell) for cell in self._cells), strict=True)
        self._affine = torch.cat(affine, 1)
        bias = layers.bias[1]
        self._known = [(torch.zeros(len(layers.bias[0])), [bias.expand(-1, len(c.points)) for c in self._cells])]
        self.remember(((), (), ()))

    def _first(self, x: Tensor, cell: Cell) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """First-layer units that switch within a cell, their activations, and affine functions of units that are on."""
        weight, bias = self._layers.weight[0], self._layers.bias[0]
        sums = torch.addmm(bias, weight.T, x.T)
        on, off = sums.amin(1) >= 0, sums.amax(1) <= 0
        units = (~(on | off)).nonzero()[:, 0]
        affine = torch.cat([bias + weight.T @ cell.middle[:, None], weight.T * cell.size], 1) * on[:, None]
        return (units, sums.index_select(0, units).relu_()), affine

    @torch.no_grad()
    def remember(self, removed: Removed) -> None:
        """Keep the sums of the second layer for this pruning, as a start for similar ones."""
        present = _present(removed[0], len(self._layers.bias[0]))
        self._known.append((present, list(self._sums(present, torch.arange(len(self._layers.bias[1]))))))

    @torch.no_grad()
    def logits(self, removed: Removed) -> Tensor:
        """Points by classes, without polynomials."""
        end = _End(self._layers, removed)
        return torch.cat([end.logits(hidden) for hidden in self._second(removed)], 1).T[self._order]

    @torch.no_grad()
    def classes(self, removed: Removed) -> Tensor:
        """The class given to each point."""
        if not self._layers.third_relu:
            return self.logits(removed).argmax(1)
        return self.decisions(removed)[0]

    @torch.no_grad()
    def decisions(self, removed: Removed) -> tuple[Tensor, Tensor]:
        """The class of each point, and whether polynomials were enough. For networks with a third ReLU."""
        end = _End(self._layers, removed)
        one = torch.ones(1, len(end.weight))
        hidden, fits, moves = [], [], []
        for cell, values in zip(self._cells, self._second(removed), strict=True):
            fit = cell.fit(values)
            rest = one @ torch.addmm(values, fit.T, cell.terms, alpha=-1).square_()
            hidden.append(values)
            fits.append(fit)
            moves.append(self._layers.reach * rest[0].sqrt_())
        sums = torch.cat(fits) @ end.weight
        sums[:: len(fits[0])] += end.bias.T  # the first term is 1
        winners, sure, unclear = [], [], []
        for cell, values, move, third in zip(self._cells, hidden, moves, torch.split(sums, len(fits[0])), strict=True):
            (best, second), (winner, _) = end.output(third.T @ cell.terms).topk(2, 0)
            clear = best - second > move + _ROUNDING * best.abs().max()
            winners.append(winner)
            sure.append(clear)
            unclear.append(values.index_select(1, (~clear).nonzero()[:, 0]))
        given, clear = torch.cat(winners), torch.cat(sure)
        given[~clear] = end.logits(torch.cat(unclear, 1)).argmax(0)
        return given[self._order], clear[self._order]

    def _second(self, removed: Removed) -> Iterator[Tensor]:
        """Activations of the second layer, by cells."""
        present = _present(removed[0], len(self._layers.bias[0]))
        for sums in self._sums(present, _kept(removed[1], len(self._layers.bias[1]))):
            yield sums.relu_()

    def _sums(self, present: Tensor, units: Tensor) -> Iterator[Tensor]:
        """The sums of some second-layer units, by cells. In `present`, 1 marks the units left in the first layer."""
        start, known = min(self._known, key=lambda known: int((known[0] != present).sum()))
        changed = (start != present).nonzero()[:, 0]
        weight = _part(self._layers.weight[1], changed, units) * (present - start)[changed, None]
        affine = torch.split(weight.T @ self._affine.index_select(0, changed), 3, 1)
        row = torch.full((len(present),), -1).index_put_((changed,), torch.arange(len(changed)))
        for cell, (crossing, first), sums, steady in zip(self._cells, self._crossing, known, affine, strict=True):
            rows = row.index_select(0, crossing)
            which = (rows >= 0).nonzero()[:, 0]
            moved = weight.index_select(0, rows.index_select(0, which)).T, first.index_select(0, which)
            yield sums.index_select(0, units).addmm_(steady, cell.terms[:3]).addmm_(*moved)


class _End:
    """The layers behind the second, for one pruning: the third layer and the output, or one matrix for both."""

    def __init__(self, layers: Layers, removed: Removed) -> None:
        second, third = (_kept(removed[i], len(layers.bias[i])) for i in (1, 2))
        self.weight, self.bias = _part(layers.weight[2], second, third), layers.bias[2].index_select(0, third)
        self._last, self._last_bias = layers.weight[3].index_select(0, third).T, layers.bias[3]
        self._third_relu = layers.third_relu
        if not layers.third_relu:
            self._last_bias = torch.addmm(self._last_bias, self._last, self.bias)
            self._last = self._last @ self.weight.T

    def output(self, sums: Tensor) -> Tensor:
        """Classes by points, from the sums of the third layer, which are overwritten."""
        return torch.addmm(self._last_bias, self._last, sums.relu_())

    def logits(self, hidden: Tensor) -> Tensor:
        """Classes by points, from activations of the second layer."""
        if self._third_relu:
            return self.output(torch.addmm(self.bias, self.weight.T, hidden))
        return torch.addmm(self._last_bias, self._last, hidden)


def _present(removed: tuple[int, ...], width: int) -> Tensor:
    present = torch.ones(width)
    present[list(removed)] = 0
    return present


def _kept(removed: tuple[int, ...], width: int) -> Tensor:
    return _present(removed, width).nonzero()[:, 0]


def _part(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return weight.index_select(0, rows).index_select(1, columns)


def _tensor(layer: nn.Module, name: str) -> Tensor:
    return layer.get_parameter(name).detach()
