"""Data movement that is spelt out in smaller functions: stacking, splitting, broadcasting, grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.ops.table import Decomposed, Function, register, register_named


def _stacked(dim: int, least: int) -> Function:
    """`vstack` and its like: tensors with too few dimensions get one, then they are joined along another."""

    def body(tensors: Any, out: None = None) -> Tensor:
        rows = [t.reshape(1) if t.ndim == 0 else t for t in tensors]
        rows = [t.unsqueeze(dim) if t.ndim < least else t for t in rows]
        return torch.cat(rows, min(dim, rows[0].ndim - 1))

    return body


def _split_along(dim: int) -> Function:
    """`vsplit` and its like: parts along a dimension that the name tells."""

    def body(input: Tensor, indices_or_sections: Any) -> Any:
        return input.tensor_split(indices_or_sections, 0 if input.ndim == 1 else dim)

    return body


def _at_least(ndim: int) -> Function:
    """`atleast_2d` and its like: dimensions of size 1 are added."""

    def grown(tensor: Tensor) -> Tensor:
        for dim in (*range(min(ndim, 2) - tensor.ndim), *[-1] * (ndim - max(tensor.ndim, 2))):
            tensor = tensor.unsqueeze(dim)
        return tensor

    def body(*tensors: Any) -> Any:
        many = tensors[0] if isinstance(tensors[0], tuple | list) else tensors
        made = tuple(grown(tensor) for tensor in many)
        return made if len(tensors) > 1 or many is not tensors else made[0]

    return body


def _dstack(tensors: Any, out: None = None) -> Tensor:
    """Tensors of three dimensions, joined along the third."""
    return torch.cat(_at_least(3)(tuple(tensors)), 2)


def _channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """Channels of several groups, one of each in turn."""
    grouped: Tensor = input.unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
    return grouped.transpose(1, 2).flatten(1, 2)


def _meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Each vector along a dimension of its own, the same along those of the others."""
    vectors = tensors[0] if isinstance(tensors[0], tuple | list) else tensors
    order = [1, 0, *range(2, len(vectors))] if indexing == "xy" and len(vectors) > 1 else list(range(len(vectors)))
    places = {i: dim for dim, i in enumerate(order)}
    sizes = [vectors[i].numel() for i in order]
    return tuple(
        v.reshape([-1 if d == places[i] else 1 for d in range(len(sizes))]).expand(sizes) for i, v in enumerate(vectors)
    )


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """A tensor as it is; numbers as a tensor."""
    if not isinstance(data, Tensor):
        return torch.tensor(data, dtype=dtype, device=device)
    return data.to(dtype=dtype or data.dtype, device=device or data.device)


def _broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors expanded to the shape that they have together."""
    shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return tuple(t.expand(shape) for t in tensors)


def _diff(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbours."""
    parts = [part for part in (prepend, input, append) if part is not None]
    made = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        size = made.shape[dim] - 1
        made = made.narrow(dim, 1, size) - made.narrow(dim, 0, size)
    return made


register_named("tensors out=None", "vstack row_stack", Decomposed(_stacked(0, least=2)))
register_named("tensors out=None", "hstack", Decomposed(_stacked(1, least=1)))
register_named("tensors out=None", "column_stack", Decomposed(_stacked(1, least=2)))
register_named("tensors out=None", "dstack", Decomposed(_dstack))
register_named("*tensors", "broadcast_tensors", Decomposed(_broadcast_tensors))
register_named("*tensors", "meshgrid", Decomposed(_meshgrid))
for _dim, _name in enumerate(("vsplit", "hsplit", "dsplit")):
    register_named("input indices_or_sections|sections|indices", _name, Decomposed(_split_along(_dim)))
for _ndim in (1, 2, 3):
    register_named("*tensors", f"atleast_{_ndim}d", Decomposed(_at_least(_ndim)))
register_named("input groups", "channel_shuffle native_channel_shuffle", Decomposed(_channel_shuffle))
register("data dtype=None device=None", torch.as_tensor, operation=Decomposed(_as_tensor))
register_named("input n=1 dim=-1 prepend=None append=None", "diff", Decomposed(_diff))
