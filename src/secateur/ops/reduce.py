"""Reductions over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, named, register


class Reduction(Operation):
    """Folds dimensions away. Zeros change the result unless it is a sum, so units along them are frozen."""

    name = "reduction"
    #: Whether a zero contributes nothing.
    zero_is_neutral = False

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Units across the reduced dimensions pass, units along them are consumed by a sum and frozen otherwise."""
        x = call["input"]
        dims = self.dims(call, x)
        if dims is None:  # two tensors: torch.max(a, b)
            operands = [(labels.layers(t), list(t.shape)) for t in call.tensors()]
            labels.merge(output, operands, call.site)
            return
        kept = []
        for layer in labels.layers(x):
            over = varying(layer)
            if not set(over) & set(dims):
                kept.append(layer)
            elif not set(over) <= set(dims):  # e.g. units numbered (branch, channel), branches reduced
                kept.append(labels.tied(layer, [d for d in over if d in dims]))
            elif not self.zero_is_neutral:
                labels.freeze(layer, f"{call.site} runs over it")
        keep = bool(call.get("keepdim", False))
        for tensor in tensors_in(output):
            shrunk = []
            for layer in kept:
                small = layer[tuple(slice(0, 1) if d in dims else slice(None) for d in range(layer.ndim))]
                shrunk.append(small if keep else small.reshape(tensor.shape))
            labels.set(tensor, shrunk)

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


class Total(Reduction):
    """A sum: what is zero does not count."""

    name = "total"
    zero_is_neutral = True

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared among the summands."""
        return relevance.averages(call, call["input"], call.on(call["input"]))


class Magnitude(Reduction):
    """A p-norm: what is zero does not count."""

    name = "magnitude"
    zero_is_neutral = True

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """A statistic carries none."""
        return relevance.stops(call)


class Mean(Reduction):
    """A mean: its divisor counts channels."""

    name = "mean"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared among the numbers averaged."""
        return relevance.averages(call, call["input"], call.on(call["input"]))


class Extremum(Reduction):
    """Maximum or minimum, hard or soft (`logsumexp`): a zero may win."""

    name = "extremum"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To the winner; a soft maximum shares by its weights."""
        return relevance.moves(call)


class Spread(Reduction):
    """Variance, deviation, product: depends on the count or on zeros."""

    name = "spread"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """A statistic carries none."""
        return relevance.stops(call)


class Cumulative(Operation):
    """Running products and sums, sorts: order and count along the dimension matter."""

    name = "cumulative"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze what varies along the dimension."""
        x = call["input"]
        dim = int(call.get("dim") if call.get("dim") is not None else -1) % x.ndim
        for layer in labels.layers(x):
            if dim in varying(layer):
                labels.freeze(layer, f"{call.site} runs along it")
        for tensor in tensors_in(output):
            if tensor.shape == x.shape:
                labels.keep(x, tensor)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """A running product carries none."""
        return relevance.stops(call)


class RunningSum(Cumulative):
    """Sums of everything so far."""

    name = "running sum"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared among the summands."""
        return relevance.averages(call, call["input"], call.on(call["input"]))


class Sort(Cumulative):
    """Puts numbers in order."""

    name = "sort"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Moves the way the data did."""
        return relevance.moves(call)


register("input dim=None keepdim=False dtype=None", *named("sum nansum"), operation=Total())
register("input p=2 dim=None keepdim=False", *named("norm"), operation=Magnitude())
register("x ord=None dim=None keepdim=False", torch.linalg.vector_norm, operation=Magnitude())
register("input dim=None keepdim=False dtype=None", *named("mean nanmean"), operation=Mean())
register(
    "input dim=None keepdim=False",
    *named("max min amax amin argmax argmin median mode any all logsumexp"),
    operation=Extremum(),
)
register("input dim=None correction=1 keepdim=False", *named("var std var_mean std_mean"), operation=Spread())
register("input dim=None keepdim=False dtype=None", *named("prod"), operation=Spread())
register("input dim=-1", *named("cumprod"), operation=Cumulative())
register("input dim=-1", *named("cumsum"), operation=RunningSum())
register("input dim=-1", *named("sort argsort"), operation=Sort())
register("input k dim=-1", *named("topk"), operation=Sort())
