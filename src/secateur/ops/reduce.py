"""Reductions over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import varying
from secateur.ops.protocols import LabelVerbs
from secateur.ops.table import Call, Rule, Ruled, averages, moves, named, register, stops


class Reduction(Ruled):
    """Folds dimensions away. Units along them are frozen, unless `zero_is_neutral`: zeros do not count, as in a sum."""

    name = "reduction"

    def __init__(self, rule: Rule, zero_is_neutral: bool = False) -> None:
        super().__init__(rule)
        self.zero_is_neutral = zero_is_neutral

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


class Cumulative(Ruled):
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


register(
    "input dim=None keepdim=False dtype=None", *named("sum nansum"), operation=Reduction(averages, zero_is_neutral=True)
)
register("input p=2 dim=None keepdim=False", *named("norm"), operation=Reduction(stops, zero_is_neutral=True))
register(
    "input ord=None dim=None keepdim=False", torch.linalg.vector_norm, operation=Reduction(stops, zero_is_neutral=True)
)
register("input dim=None keepdim=False dtype=None", *named("mean nanmean"), operation=Reduction(averages))
# Maximum and minimum, hard or soft: relevance goes to the winner, a zero may win.
register(
    "input dim=None keepdim=False",
    *named("max min amax amin argmax argmin median mode any all logsumexp"),
    operation=Reduction(moves),
)
register("input dim=None correction=1 keepdim=False", *named("var std var_mean std_mean"), operation=Reduction(stops))
register("input dim=None keepdim=False dtype=None", *named("prod"), operation=Reduction(stops))
register("input dim=-1", *named("cumprod"), operation=Cumulative(stops))
register("input dim=-1", *named("cumsum"), operation=Cumulative(averages))
register("input dim=-1", *named("sort argsort"), operation=Cumulative(moves))
register("input k dim=-1", *named("topk"), operation=Cumulative(moves))
