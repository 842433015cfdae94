"""Running a user's model without leaving a trace: mode, random numbers and compiled parts stay as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.errors import RelevanceError, SecateurWarning
from secateur.ops.table import tensors_in


@contextmanager
def isolated(model: nn.Module, entries: Sequence[Tensor]) -> Iterator[None]:
    """Evaluation mode, gradients on, nothing compiled, random numbers given back."""
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), _eager(), _forked(entries):
        yield


class Answer(NamedTuple):
    """The tensor of an output that counts, how to write it (`output['logits']`), and others it was chosen before."""

    tensor: Tensor
    entry: str = ""
    rivals: tuple[str, ...] = ()


def answer_of(output: Any) -> Answer:
    """The output itself; what is called `logits` or `out` in it; the only tensor of real numbers; or the first.

    What lies deeper, such as the states of a recurrent layer, is looked at if there is nothing else.
    """
    if isinstance(output, Tensor):
        return Answer(output)
    if isinstance(getattr(output, "logits", None), Tensor):
        return Answer(output.logits, "output.logits")
    parts = dict(_parts(output))
    for entry in ("output['logits']", "output['out']", "output.out"):
        if isinstance(parts.get(entry), Tensor):
            return Answer(parts[entry], entry)
    real = {entry: part for entry, part in parts.items() if isinstance(part, Tensor) and _may_answer(part)}
    if not real:
        deep = tensors_in(output if isinstance(output, dict | tuple | list) else vars(output))
        if not deep:
            raise RelevanceError(f"the model returns {type(output).__name__}, in which there is no tensor to explain.")
        named = {f"tensor {i} of the output": tensor for i, tensor in enumerate(deep)}
        real = {entry: tensor for entry, tensor in named.items() if _may_answer(tensor)} or {"": deep[0]}
    (entry, first), *others = real.items()
    return Answer(first, entry, tuple(name for name, other in others if other is not first))


def logits_of(output: Any, *, warn: bool = True) -> Tensor:
    """The tensor that relevance starts from. If others could be meant as well, a warning says which was taken."""
    answer = answer_of(output)
    if warn and answer.rivals:
        warnings.warn(
            f"the model returns several tensors, and {answer.entry} is taken for its answer, not "
            f"{', '.join(answer.rivals[:5])}. Way out, if another counts: wrap the model so that it returns that.",
            SecateurWarning,
            stacklevel=2,
        )
    return answer.tensor


def _parts(output: Any) -> Iterator[tuple[str, Any]]:
    """The entries of an output, as they would be written."""
    if isinstance(output, dict):
        yield from ((f"output[{key!r}]", part) for key, part in output.items())
    elif isinstance(output, tuple | list):
        names = getattr(output, "_fields", None)
        for i, part in enumerate(output):
            yield f"output.{names[i]}" if names else f"output[{i}]", part
    else:
        yield from ((f"output.{name}", part) for name, part in vars(output).items())


def _may_answer(tensor: Tensor) -> bool:
    """Real numbers, and not a single one such as a loss."""
    return tensor.is_floating_point() and tensor.dim() > 0


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
