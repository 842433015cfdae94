"""Tensors of labels: the same shape as the activation they describe, stride 0 wherever they do not vary."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Label numbers: one per index along an axis of a parameter; 0 means none.
#: In a layer, a negative label is that of a unit whose number there may differ from 0 although the unit is masked.
Labels = npt.NDArray[np.int64]
#: Which labels, or groups, of all.
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
#: What a tensor carries: tensors of labels, each of its shape.
Layers = list[Tensor]


def spread(labels: Tensor | Labels, dim: int, shape: Sequence[int]) -> Tensor:
    """Labels along one dimension, the same everywhere else."""
    line = labels if isinstance(labels, Tensor) else torch.from_numpy(labels)
    dim %= len(shape)
    if line.shape[0] != shape[dim]:
        line = line.expand(shape[dim])
    return line.as_strided(tuple(shape), [line.stride(0) if d == dim else 0 for d in range(len(shape))])


def varying(layer: Tensor) -> list[int]:
    """The dimensions along which a compact layer varies."""
    sizes = layer.shape
    return [d for d, stride in enumerate(layer.stride()) if stride and sizes[d] > 1]


def head(layer: Tensor, dims: Container[int]) -> Tensor:
    """The layer at the first position along `dims`, which are kept at size 1."""
    return layer[tuple(slice(0, 1) if d in dims else slice(None) for d in range(layer.ndim))]


def narrow(layer: Tensor) -> Tensor:
    """The layer without the dimensions along which it does not vary (kept at size 1)."""
    strides = layer.stride()
    return layer.as_strided([n if s or not n else 1 for n, s in zip(layer.shape, strides, strict=True)], strides)


def like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor without numbers of the format of another one without numbers. (`new_empty` takes ten times as long.)"""
    if shape is None and not x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape if shape is None else tuple(shape), dtype=x.dtype, device=x.device)


def column(layer: Tensor) -> Labels:
    """The labels of a layer that varies along a single dimension."""
    over = varying(layer)
    if len(over) != 1:
        return narrow(layer).reshape(-1).numpy()
    return layer.as_strided((layer.shape[over[0]],), (layer.stride(over[0]),)).numpy()


def is_zero(layer: Tensor) -> bool:
    """Whether the numbers are 0 where a unit is masked."""
    return bool(narrow(layer).numpy().min() >= 0)


def lost(layer: Tensor) -> Tensor:
    """The layer of numbers that are not 0 where a unit is masked."""
    return narrow(layer).abs().neg().expand(layer.shape)


def compact(layer: Tensor) -> Tensor:
    """The same labels with stride 0 wherever they do not vary."""
    small = narrow(layer)
    dims = varying(layer)
    for dim in dims:
        head = small.narrow(dim, 0, 1)
        if bool((small == head).all()):
            small = head
    if len(varying(small)) == len(dims):
        return layer
    # A copy, even if these lie side by side: as a part of all labels they would keep the others in memory.
    return small.clone(memory_format=torch.contiguous_format).expand(layer.shape)
