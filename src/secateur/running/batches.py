"""Data as the criteria see them: checked batches on the model's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import DataError
from secateur.nest import leaves, map_leaves, select_samples, tensors_in
from secateur.running.copies import unwrap
from secateur.running.devices import device_of, to_device
from secateur.running.logits import one_output

#: An iterable of (inputs, targets), a pair (X, y), or None for criteria that need no data. Inputs are tensors or NumPy
#: arrays, several of them in a tuple or dict; targets may be a list of numbers as well.
Data = Any
Batch = tuple[Any, Any]

_ARRAYS = (Tensor, np.ndarray)


def is_pair(data: Data) -> bool:
    """Whether the data are all samples at once, (X, y), rather than batches."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    inputs, targets = data
    # A batch is itself a tuple or list, so that two batches have no array and no numbers in the second place.
    return _are_arrays(inputs) and (targets is None or isinstance(targets, _ARRAYS) or _are_numbers(targets))


def as_data(data: Data) -> Data:
    """The data as they are given; a pair (X, y) with arrays and lists of numbers as tensors."""
    if is_pair(data):
        return as_batch(data)
    if isinstance(data, tuple | list) and len(data) == 2:
        inputs, targets = data
        if _are_numbers(inputs):
            raise DataError("inputs are a list of numbers.", fix="torch.tensor(inputs), with the model's dtype")
        if isinstance(inputs, _ARRAYS):
            raise DataError(
                f"inputs have the shape {tuple(inputs.shape)}, but targets are a {type(targets).__name__} "
                "that is no list of numbers.",
                fix="class numbers as a tensor, or None for targets that are not known",
            )
    return data


def as_batch(batch: Any) -> Batch:
    """Inputs and targets with arrays and lists of numbers as tensors."""
    inputs, targets = batch
    known = torch.tensor(targets) if _are_numbers(targets) else map_leaves(_tensor, targets)
    return as_tensors(inputs), known


def as_tensors(inputs: Any) -> Any:
    """Inputs with arrays as tensors."""
    return map_leaves(_tensor, inputs)


def _are_arrays(value: Any) -> bool:
    """Whether a value is what a model is called on: an array, or a nest of them."""
    kinds = (isinstance(leaf, _ARRAYS) for leaf in leaves(value))
    return next(kinds, False) and all(kinds)


def _are_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    if not isinstance(value, tuple | list) or not value:
        return False
    return all(isinstance(item, int | float | np.number | np.bool_) or _are_numbers(item) for item in value)


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    try:
        # torch neither reads backwards nor takes what it must not write to.
        return torch.as_tensor(value if value.flags.writeable and value.flags.c_contiguous else value.copy())
    except (TypeError, ValueError) as error:
        raise DataError(f"an array of {value.dtype} cannot become a tensor: {error}") from error


def batches(
    data: Data, batch_size: int = 32, device: torch.device | None = None, share: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """The batches of `data`. Of a pair (X, y), which every process holds whole, only this process's share is used."""
    for inputs, targets in _plain(data, batch_size, share):
        yield to_device(inputs, device), to_device(targets, device)


def _plain(data: Data, batch_size: int, share: tuple[int, int]) -> Iterator[Batch]:
    if data is None:
        raise DataError(
            "this needs data, but data is None.", fix="an iterable of (inputs, targets), or a pair (X, y) of tensors"
        )
    data = as_data(data)
    if is_pair(data):
        inputs, targets = data
        count = size_of(inputs)
        lengths = sorted({len(tensor) if tensor.ndim else 0 for tensor in tensors_in(inputs)})
        if len(lengths) > 1:
            raise DataError(f"inputs have different lengths: {', '.join(map(str, lengths))}; each needs every sample.")
        if isinstance(targets, Tensor) and len(targets) != count:
            raise DataError(f"{count} inputs but {len(targets)} targets.")
        rank, world = share
        order = torch.arange(count)[rank::world]
        for begin in range(0, len(order), batch_size):
            chunk = order[begin : begin + batch_size]
            yield select_samples(inputs, chunk), select_samples(targets, chunk)
        return
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise DataError(
            f"data is a {type(data).__name__}; give an iterable of (inputs, targets), or a pair (X, y) of tensors."
        )
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"a batch is a {type(batch).__name__}"
                + (f" of {len(batch)} items" if isinstance(batch, tuple | list) else "")
                + "; each must be a pair (inputs, targets), with None for targets that are not known."
            )
        yield as_batch(batch)


def repeatable(data: Data) -> Data:
    """Data that can be gone through again: iterators, which cannot, are read into a list."""
    data = as_data(data)
    return list(data) if isinstance(data, Iterator) else data


def example_of(model: nn.Module, data: Data) -> Any:
    """One sample of the data on the model's device, to analyse the model with."""
    if data is None:
        raise DataError(
            "without data there is no input to analyse the model with.",
            fix="data=[(example, None)], where the model runs on example; `score` also takes graph=analyze(…)",
        )
    for inputs, _ in batches(data, 1):
        if size_of(inputs) < 1:
            raise DataError("the first batch is empty.")
        return to_device(select_samples(inputs, slice(1)), device_of(unwrap(model)))
    raise DataError("the data are empty: there is no batch in them.")


def size_of(inputs: Any) -> int:
    """How many samples a batch of inputs has."""
    tensors = tensors_in(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise DataError(
            f"inputs of type {type(inputs).__name__} have no tensor with a batch dimension.",
            fix="torch.tensor(…), or a NumPy array",
        )
    return len(tensors[0])


def check_targets(targets: Any, output: Tensor, entry: str = "") -> Tensor:
    """Class numbers that fit the output, or an error that says which does not. `entry` is what to call the output.

    Those of a model with one output come back shaped like it; class numbers must be 0 or 1 there.
    """
    if targets is None:
        raise DataError("this needs targets, but they are None.", fix="the true class of each sample")
    known: Tensor = torch.as_tensor(targets, device=output.device)
    shape = f"{entry} {tuple(output.shape)}".lstrip()
    if one_output(output, known.numel()):
        return _single(known, output, shape)
    if known.is_floating_point():
        if known.shape != output.shape:
            raise DataError(
                f"targets of shape {tuple(known.shape)} are real, and do not fit the output {shape}.",
                fix="whole class numbers, or your own loss=f(output, targets)",
            )
        return known
    if output.ndim < 2:
        raise DataError(f"the output has shape {shape}; classes need (samples, classes).", fix="loss=…")
    expected = (output.shape[0], *output.shape[2:])
    if tuple(known.shape) != expected:
        raise DataError(f"targets have shape {tuple(known.shape)}, but the output {shape} asks for {expected}.")
    low, high, classes = int(known.min()), int(known.max()), output.shape[1]
    if low < 0 or high >= classes:
        where = f" in {entry}" if entry else ""
        raise DataError(
            f"labels run from {low} to {high}, but the model has {classes} outputs (0 to {classes - 1}){where}.",
            fix="number the classes as the outputs are, or `specialize` the model to the outputs you need",
        )
    return known.long()


def _single(known: Tensor, output: Tensor, shape: str) -> Tensor:
    one_each = output.ndim < 2 or known.numel() == output.numel() == len(output)
    if not one_each and known.shape not in (output.shape, output.shape[:1] + output.shape[2:]):
        raise DataError(f"targets have shape {tuple(known.shape)}, but the model has one output, of shape {shape}.")
    if not known.is_floating_point() and bool(((known < 0) | (known > 1)).any()):
        raise DataError(
            f"labels run from {int(known.min())} to {int(known.max())}, but the model has one output, which "
            "tells 1 from 0.",
            fix="real numbers (targets.float()) if it predicts a quantity, or an output for each class",
        )
    return known.reshape(output.shape)


def is_binary(targets: Tensor) -> bool:
    """Whether all are 0 or 1."""
    return bool(((targets == 0) | (targets == 1)).all())


def are_shares(targets: Tensor) -> bool:
    """Whether they are ≥ 0 and add up to 1 over the classes."""
    sums = targets.double().sum(1 if targets.ndim > 1 else 0)
    return bool((targets >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())


def default_loss(output: Tensor, targets: Any, entry: str = "", *, check: bool = True) -> Tensor:
    """The mean loss of logits: cross-entropy, or for a model with one output binary cross-entropy.

    Over a single output, softmax is 1 and cross-entropy 0 whatever the weights are.
    """
    known = check_targets(targets, output, entry) if check else torch.as_tensor(targets, device=output.device)
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if not one_output(output, known.numel()):
        if check and known.is_floating_point() and not are_shares(known):
            raise DataError(
                f"targets of shape {tuple(known.shape)} are real numbers that are no probabilities of classes: "
                "cross-entropy does not fit.",
                fix="your own loss=f(output, targets), e.g. torch.nn.functional.mse_loss",
            )
        return F.cross_entropy(wide, known if known.is_floating_point() else known.long())
    if check and not is_binary(known):
        raise DataError(
            f"the model has one output (of shape {tuple(output.shape)}), and targets are not all 0 or 1: "
            "binary cross-entropy does not fit.",
            fix="your own loss=f(output, targets), e.g. torch.nn.functional.mse_loss",
        )
    return F.binary_cross_entropy_with_logits(wide, known.reshape(output.shape).to(wide.dtype))


def check_inputs(inputs: Any) -> None:
    """Refuse NaN and infinity, which would silently spoil every sum."""
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"an input of shape {tuple(tensor.shape)} has NaN or infinite values.")
