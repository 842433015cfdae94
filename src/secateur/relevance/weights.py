"""The weights of layers: whose they are, batch norms folded in, positive parts kept for the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.ops.table import Call
from secateur.relevance.maps import LinearMap


@dataclass(frozen=True)
class LinearCall:
    """A conv or linear call whose output may yet meet a batch norm."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    build: Callable[[Tensor, Tensor | None], LinearMap]
    transposed: bool
    groups: int
    name: str
    rows: slice
    kind: str
    index: int
    channel: int


class Weights:
    """Names, folded weights and positive parts. Nothing is written to the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._cache: dict[tuple[int, ...], tuple[Any, Tensor, Tensor | None, dict[str, Tensor]]] = {}
        self._owners: dict[int, list[tuple[int, int, str, Tensor]]] = {}

    def prepared(self, record: LinearCall, stats: tuple[Tensor | None, ...] = (), eps: float = 0.0) -> LinearMap:
        """The linear map of a layer, with its batch norm folded in; W⁺ and W⁻ are kept for the next batch."""
        sources = [record.weight, record.bias, *stats]
        key = tuple(part for t in sources if t is not None for part in (t.data_ptr(), t._version))
        if key not in self._cache:
            weight, bias = folded(record, stats, eps) if stats else (record.weight, record.bias)
            self._cache[key] = (sources, weight, bias, {})  # holding the sources, so that their addresses stay theirs
        _, weight, bias, parts = self._cache[key]
        layer = record.build(weight, bias)
        layer.parts = parts
        return layer

    def index(self) -> None:
        """Look up where the parameters lie in memory."""
        self._owners.clear()
        for name, parameter in self.model.named_parameters():
            if parameter.dim() > 1:
                begin = parameter.data_ptr()
                end = begin + parameter.numel() * parameter.element_size()
                key = parameter.untyped_storage().data_ptr()
                self._owners.setdefault(key, []).append((begin, end, name, parameter))

    def height(self, name: str, least: int) -> int:
        """Number of units of a parameter of which only some rows may have been seen."""
        known = (p.shape[0] for owners in self._owners.values() for _, _, n, p in owners if n == name)
        return max(least, next(known, 0))

    def name(self, weight: Tensor, call: Call, outputs: int) -> tuple[str, slice]:
        """The parameter a weight is, or is some rows of, and which; computed weights go by their module."""
        for begin, end, name, parameter in self._owners.get(weight.untyped_storage().data_ptr(), []):
            if begin <= weight.data_ptr() < end and weight.shape[1:] == parameter.shape[1:]:
                row = parameter.stride(0) * parameter.element_size()
                first = (weight.data_ptr() - begin) // row if row else 0
                return name, slice(first, first + outputs)
        return f"{call.site.path or call.site.function}.weight", slice(0, outputs)


def folded(record: LinearCall, stats: Sequence[Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer that does what the layer and its batch norm do one after the other."""
    mean, variance, gamma, beta = stats
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance.double() + eps)
    if gamma is not None:
        scale = scale * gamma.double()
    shift = -mean.double() * scale + (0 if beta is None else beta.double())
    if record.bias is not None:
        shift = shift + record.bias.double() * scale
    weight = record.weight
    if record.transposed:  # (in, out / groups, ...)
        rows = weight.shape[0] // record.groups
        per = scale.view(record.groups, 1, -1).expand(-1, rows, -1).reshape(weight.shape[0], -1)
        return (weight * per.to(weight).reshape(*per.shape, *[1] * (weight.dim() - 2))), shift.to(weight)
    return weight * scale.to(weight).view(-1, *[1] * (weight.dim() - 1)), shift.to(weight)


def path_of(name: str) -> str:
    """`layer1.0.conv1.weight -> layer1.0.conv1`."""
    return name.removesuffix(".weight")
