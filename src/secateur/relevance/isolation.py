"""Running a user's model without leaving a trace: mode, random numbers and compiled parts stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def isolated(model: nn.Module, entries: Sequence[Tensor]) -> Iterator[None]:
    """Evaluation mode, gradients on, nothing compiled, random numbers given back."""
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), _eager(), _forked(entries):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, each module's own flag restored."""
    learning = [module for module in model.modules() if module.training]
    try:
        for module in learning:
            module.training = False
        yield
    finally:
        for module in learning:
            module.training = True


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled parts run as written."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None:
        yield
    else:
        with stance("force_eager"):
            yield


@contextmanager
def _forked(entries: Sequence[Tensor]) -> Iterator[None]:
    """Random numbers that the forward draws are given back."""
    devices = sorted({t.device.index for t in entries if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        yield


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Inputs are a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest of tuples, lists and dicts with `function` of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, item) for item in value)
    return value
