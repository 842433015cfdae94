"""Reductions over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.elementwise import Elementwise
from secateur.ops.layers import head, lost, varying
from secateur.ops.protocols import LabelVerbs
from secateur.ops.table import Call, Rule, Ruled, averages, moves, refused, register, register_named, stops


class Reduction(Elementwise):
    """Folds dimensions away, or compares two tensors as `torch.max(a, b)` does. Units across the dimensions pass.

    Units along them are frozen, unless it is a `statistic`, as a mean or a variance: the smaller model computes it over
    what is kept, and the masked reference does the same. In a sum (`adds`) zeros do not count, so that units may leave
    if they are 0 when they are masked. `keeps_zero`: 0 stays 0.
    """

    scalars = False

    def __init__(self, rule: Rule, statistic: bool = False, adds: bool = False, keeps_zero: bool = True) -> None:
        super().__init__(rule, all)
        self.statistic, self.adds, self.keeps_zero = statistic, adds, keeps_zero

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        dims = self.dims(call, x)
        if dims is None:
            super().channels(labels, call, output)
            return
        kept = []
        if self.statistic:
            labels.mixes(x, dims, call.site)
        if self.adds:
            labels.sums(x, dims, call.site)
        for layer in labels.layers(x):
            over = varying(layer)
            if not set(over) & set(dims):
                kept.append(layer)
            elif not set(over) <= set(dims):  # e.g. units numbered (branch, channel), branches reduced
                kept.append(labels.tied(layer, [d for d in over if d in dims]))
            elif not (self.statistic or self.adds):
                labels.freeze(layer, f"{call.site} runs over it")
        if not self.keeps_zero:
            kept = [lost(layer) for layer in kept]
        for tensor in tensors_in(output):
            labels.set(tensor, [head(layer, dims).reshape(tensor.shape) for layer in kept])

    @staticmethod
    def dims(call: Call, x: Tensor) -> list[int] | None:
        """The reduced dimensions; None where the call compares two tensors."""
        dim = call.get("dim")
        if isinstance(dim, Tensor):
            return None
        if dim is None or isinstance(dim, bool | torch.dtype):
            return list(range(x.ndim))
        if isinstance(dim, Sequence):
            return [d % x.ndim for d in dim] if len(dim) else list(range(x.ndim))
        return [int(dim) % x.ndim]


class Length(Reduction):
    """A norm, of vectors or matrices. Zeros do not count in it, unless the smallest number does."""

    def __init__(self, by: str = "p") -> None:
        super().__init__(stops, adds=True)
        self.by, self._least = by, Reduction(stops)

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        order = call.get(self.by)
        if isinstance(order, int | float) and order < 0:
            self._least.channels(labels, call, output)
        else:
            super().channels(labels, call, output)


class Cumulative(Ruled):
    """Running products and sums, sorts: order and count along the dimension matter. `keeps_zero`: 0 stays 0."""

    def __init__(self, rule: Rule, keeps_zero: bool = True) -> None:
        super().__init__(rule)
        self.keeps_zero = keeps_zero

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        dim = int(call.get("dim") if call.get("dim") is not None else -1) % x.ndim
        for layer in labels.layers(x):
            if dim in varying(layer):
                labels.freeze(layer, f"{call.site} runs along it")
        for tensor in tensors_in(output):
            if tensor.shape == x.shape:
                labels.keep(x, tensor, self.keeps_zero)


class TopK(Cumulative):
    """The best of the units along a dimension, and their numbers: a router chooses experts."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, dim = call["input"], int(call["dim"]) % call["input"].ndim
        layers = [layer for layer in labels.layers(x) if dim in varying(layer)]
        if len(layers) == 1 and call.get("largest", True):  # of each group, if they come in groups of one size
            best = labels.tied(layers[0], [d for d in varying(layers[0]) if d != dim])
            labels.choose(best, tensors_in(output)[1], int(call["k"]), call)
        else:
            super().channels(labels, call, output)


class Best(Reduction):
    """The largest, and its number. A router may choose one expert so, and then one of the others."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, found = call["input"], tensors_in(output)
        dims = self.dims(call, x)
        layers = labels.layers(x)
        if dims is None or len(dims) != 1 or len(found) != 2 or len(layers) != 1 or varying(layers[0]) != dims:
            super().channels(labels, call, output)
        else:
            labels.choose(layers[0], found[1], 1, call)


register_named("input dim=None keepdim=False dtype=None", "sum nansum", Reduction(averages, adds=True))
register_named("input p|ord=2 dim=None keepdim=False", "norm", Length())
register_named("input dim keepdim=False", "frobenius_norm", Length())
register("input ord='fro' dim=(-2,-1) keepdim=False dtype=None", torch.linalg.matrix_norm, operation=Length("ord"))
register_named("input dim=None", "count_nonzero", Reduction(stops, adds=True))
register_named("input dim=None keepdim=False dtype=None", "mean nanmean", Reduction(averages, statistic=True))
# Maximum and minimum, hard or soft: relevance goes to the winner, a zero may win.
register_named("input dim|other=None keepdim=False", "max", Best(moves))
register_named("input dim|other=None keepdim=False", "min amax amin argmax argmin median", Reduction(moves))
register_named("input dim=None keepdim=False", "mode any all", Reduction(moves))
# How torch.distributions checks its parameters.
register("input", torch._is_all_true, torch._is_any_true, operation=Reduction(stops))
register_named("input dim=None keepdim=False", "logsumexp", Reduction(moves, keeps_zero=False))
register_named(
    "input dim=None correction|unbiased=1 keepdim=False", "var std var_mean std_mean", Reduction(stops, statistic=True)
)
register_named("input dim=None keepdim=False dtype=None", "prod", Reduction(stops))
register_named("input dim=-1", "cumprod", Cumulative(stops))
register_named("input dim=-1", "cumsum", Cumulative(averages))
register_named("input dim=-1", "sort argsort", Cumulative(moves))
register_named("input k dim=-1 largest=True sorted=True", "topk", TopK(moves))
register("input|x ord=2 dim=None keepdim=False dtype=None", torch.linalg.vector_norm, operation=Length("ord"))
register_named("input dim=None keepdim=False", "aminmax nanmedian", Reduction(moves))
register_named("input k dim=-1 keepdim=False", "kthvalue", Reduction(moves))
register_named("input dim", "cummax cummin", Cumulative(moves))
register_named("input dim", "logcumsumexp", Cumulative(refused, keeps_zero=False))
register_named("input dim=0", "msort", Cumulative(moves))
