"""Formulas, entry by entry, for which torch makes several passes over memory. On a GPU each becomes one kernel.

Every formula stands here twice: as torch runs it anywhere, and as one line of CUDA that torch compiles when it is first
needed. The second is used only after it has given the same numbers as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def over(r: Tensor, z: Tensor) -> Tensor:
    """r / z, and 0 where z is 0. Overwrites z."""
    dead = z == 0
    return torch.div(r, z.masked_fill_(dead, 1), out=z).masked_fill_(dead, 0)


def over_positive(r: Tensor, z: Tensor) -> Tensor:
    """r / z for z ≥ 0, and finite where z is 0: it meets only zero contributions there. May overwrite z."""
    fused = _fused("over_positive", r, z)
    return _over_positive(r, z) if fused is None else fused(r, z)


def _over_positive(r: Tensor, z: Tensor) -> Tensor:
    return torch.div(r, z.add_(floor(z)), out=z)


def floor(z: Tensor) -> float:
    """Sums below this (masked attention has exp(-100) = 4e-44) count as none."""
    return 1e-6 if z.dtype == torch.float16 else 1e-25


def by_positive_parts(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """r shared between two summands by their positive parts.

    Negative parts count 10^-12 times, so that they decide only where neither summand is positive; then the shares are
    by size. Of two zeros the first takes all. What a does not get, b gets.
    """
    fused = _fused("by_positive_parts", a, b, r)
    return _by_positive_parts(a, b, r) if fused is None else fused(a, b, r)


def _by_positive_parts(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    part = F.leaky_relu(a, 1e-12).add_(1e-25)
    whole = F.leaky_relu(b, 1e-12).add_(part)
    part = part.div_(whole).mul_(r)
    return part, r - part


def rectified(z: Tensor, bias: Tensor) -> Tensor:
    """max(z + bias, 0)."""
    fused = _fused("rectified", z, bias)
    return _rectified(z, bias) if fused is None else fused(z, bias)


def _rectified(z: Tensor, bias: Tensor) -> Tensor:
    return torch.add(z, bias).relu_()


_ANYWHERE: dict[str, Callable[..., Any]] = {
    "over_positive": _over_positive,
    "by_positive_parts": _by_positive_parts,
    "rectified": _rectified,
}
_CUDA = {
    "over_positive": "template <typename T> T over_positive(T r, T z) { return r / (z + T(1e-25)); }",
    "by_positive_parts": """
        template <typename T> void by_positive_parts(T a, T b, T r, T& first, T& second) {
            T part = (a > T(0) ? a : a * T(1e-12)) + T(1e-25);
            T whole = (b > T(0) ? b : b * T(1e-12)) + part;
            first = part / whole * r;
            second = r - first;
        }""",
    "rectified": "template <typename T> T rectified(T z, T b) { T s = z + b; return s < T(0) ? T(0) : s; }",
}
_OUTPUTS = {"over_positive": 1, "by_positive_parts": 2, "rectified": 1}


def _fused(name: str, *tensors: Tensor) -> Callable[..., Any] | None:
    """One kernel for a formula, if these tensors are where and what it is made for."""
    first = tensors[0]
    if not first.is_cuda or any(t.dtype != first.dtype for t in tensors):
        return None
    return _compiled(name, first.dtype, first.device)


@cache
def _compiled(name: str, dtype: torch.dtype, device: torch.device) -> Callable[..., Any] | None:
    """The kernel, or None where it cannot be had: half precision, no compiler, another answer than torch's."""
    if dtype not in (torch.float32, torch.float64):
        return None
    try:
        from torch.cuda.jiterator import _create_jit_fn, _create_multi_output_jit_fn

        code, outputs = _CUDA[name], _OUTPUTS[name]
        kernel = _create_jit_fn(code) if outputs == 1 else _create_multi_output_jit_fn(code, outputs)
        probes = _probes(2 if outputs == 1 else 3, dtype, device)
        found, wanted = kernel(*probes), _ANYWHERE[name](*(p.clone() for p in probes))
        pairs = zip(found, wanted, strict=True) if outputs > 1 else [(found, wanted)]
        return kernel if all(torch.allclose(f, w, rtol=1e-4) for f, w in pairs) else None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None


def _probes(count: int, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Numbers of all kinds, the last tensor without negative ones."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, 64, generator=generator, dtype=torch.float64)
    numbers[:, ::8] = 0
    numbers[-1] = numbers[-1].abs()
    return list(numbers.to(device, dtype).unbind())
