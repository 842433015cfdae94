"""An accelerator: on a GPU, a formula that works entry by entry becomes one kernel.

Torch makes several passes over memory for such a formula. A decorator gives it one line of CUDA, which torch compiles
when it is first needed. The kernel is used only if it gives the same numbers as the formula.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: By the name of the formula: the formula in torch, its line of CUDA, and how many tensors it returns.
_FORMULAS: dict[str, tuple[Callable[..., Any], str, int]] = {}
_lock = threading.Lock()
_objections = 0


def one_kernel(cuda: str, outputs: int = 1) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """A decorator for a formula of tensors, which the CUDA template of the same name computes as well."""

    def decorate(formula: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        name = formula.__name__
        _FORMULAS[name] = (formula, cuda, outputs)

        @wraps(formula)
        def either(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            first: Any = args[0]
            if first.is_cuda and not _objections and all(t.dtype == first.dtype for t in args):  # type: ignore[attr-defined]
                kernel = compiled(name, first.dtype, first.device)
                if kernel is not None:
                    return kernel(*args)  # type: ignore[no-any-return]
            return formula(*args, **kwargs)

        return either

    return decorate


@contextmanager
def allowed(yes: bool) -> Iterator[None]:
    """Whether kernels may be used here. Torch's own threads run the backward pass, so a "no" holds for all threads."""
    global _objections
    with _lock:
        _objections += not yes
    try:
        yield
    finally:
        with _lock:
            _objections -= not yes


def permitted() -> bool:
    """Whether kernels may be used now."""
    return not _objections


def available(device: torch.device) -> list[str]:
    """The formulas that are one kernel on a device."""
    return [name for name in _FORMULAS if compiled(name, torch.float32, device) is not None]


@cache
def compiled(name: str, dtype: torch.dtype, device: torch.device) -> Callable[..., Any] | None:
    """The kernel, or None: in half precision, without a compiler, or if its numbers differ from torch's."""
    if dtype not in (torch.float32, torch.float64):
        return None
    try:
        from torch.cuda.jiterator import _create_jit_fn, _create_multi_output_jit_fn

        formula, code, outputs = _FORMULAS[name]
        kernel = _create_jit_fn(code) if outputs == 1 else _create_multi_output_jit_fn(code, outputs)
        probes = _probes(len(signature(formula).parameters), dtype, device)
        found, wanted = kernel(*probes), formula(*(p.clone() for p in probes))
        pairs = zip(found, wanted, strict=True) if outputs > 1 else [(found, wanted)]
        return kernel if all(torch.allclose(f, w, rtol=1e-4) for f, w in pairs) else None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None


def _probes(count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Positive, negative and zero entries. The last tensor has no negative ones."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, 64, generator=generator, dtype=torch.float64)
    numbers[:, ::8] = 0
    numbers[-1] = numbers[-1].abs()
    return list(numbers.to(device, dtype).unbind())
