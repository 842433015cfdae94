"""Data as the criteria see them: checked batches on the model's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.arguments import check_count
from secateur.errors import DataError
from secateur.nest import (
    Images,
    are_images,
    counts_of_samples,
    leaves,
    lists_samples,
    map_leaves,
    select_samples,
    tensors_in,
)
from secateur.running.copies import unwrap
from secateur.running.devices import device_of, to_device

#: An iterable of (inputs, targets), a pair (X, y), or None for criteria that need no data. Inputs are tensors or NumPy
#: arrays, several of them in a tuple or dict; targets may be a list of numbers as well, or several arrays in a tuple or
#: dict for a goal that reads them. A dict alone, such as a tokenizer or a data collator returns, holds its targets as
#: `labels`. Detectors take a list of images; their targets are a list of dicts.
Data = Any
Batch = tuple[Any, Any]

_ARRAYS = (Tensor, np.ndarray)
_READ = "secateur.data.images.read({}).tensors(), for a folder with one folder of images per class"
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def is_pair(data: Data) -> bool:
    """Whether the data are all samples at once, (X, y), rather than batches."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    inputs, targets = data
    # A batch is itself a tuple, list or dict, so that two batches have no array and no numbers in the second place.
    if targets is None or isinstance(targets, _ARRAYS) or _are_numbers(targets):
        return _are_arrays(inputs)
    # Several targets, for a goal that reads them. (An array alone is no batch, so that these are not two batches.)
    several = isinstance(targets, tuple | Mapping) and not lists_samples(targets)  # not dicts of boxes
    return isinstance(inputs, _ARRAYS) and several and {isinstance(leaf, _ARRAYS) for leaf in leaves(targets)} == {True}


def as_data(data: Data) -> Data:
    """The data as they are given; a pair (X, y), or a dict of all samples, with arrays and lists as tensors."""
    if is_pair(data):
        return as_batch(data)
    if isinstance(data, Mapping):
        batch = as_batch(data)
        return batch if is_pair(batch) else [batch]
    if isinstance(data, tuple | list) and len(data) == 2:
        inputs, targets = data
        if _are_numbers(inputs):
            raise DataError("inputs are a list of numbers.", fix="torch.tensor(inputs), with the model's dtype")
        if isinstance(inputs, _ARRAYS):
            raise DataError(
                f"inputs have the shape {tuple(inputs.shape)}, but targets are a {type(targets).__name__} "
                "that is no list of numbers.",
                fix="class numbers as a tensor, or None for targets that are not known; for a goal that reads several "
                "targets a dict or a tuple of tensors",
            )
    return data


def as_batch(batch: Any) -> Batch:
    """Inputs and targets with arrays and lists of numbers as tensors. The targets of a dict are its `labels`."""
    inputs, targets = (batch, None) if isinstance(batch, Mapping) else batch
    if isinstance(inputs, Mapping):
        labels = inputs.get("labels")
        if "labels" in inputs:
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if labels is not None and targets is not None:
            raise DataError("there are labels among the inputs, and targets beside them.", fix="give one of the two")
        targets = labels if targets is None else targets
    known = _from_numbers(targets) if _are_numbers(targets) else map_leaves(_signed, targets)
    return _as_images(as_tensors(inputs), lists_samples(known)), known


def _as_images(inputs: Any, told: bool) -> Any:
    """Inputs, with a list of images marked as one argument that has an item per sample. `told`: targets are dicts."""
    if told and isinstance(inputs, tuple | list) and are_images(inputs):
        return (Images(inputs),)
    if isinstance(inputs, tuple) and len(inputs) == 1 and isinstance(inputs[0], list) and are_images(inputs[0]):
        return (Images(inputs[0]),)
    return inputs


def as_tensors(inputs: Any) -> Any:
    """Inputs with arrays as tensors."""
    found = map_leaves(_tensor, inputs)
    if not isinstance(inputs, Mapping):
        return found
    for name, value in inputs.items():
        if isinstance(value, list | tuple | str) and not tensors_in(value):
            what = f"`{name}` among the inputs is a {type(value).__name__}, not a tensor."
            raise DataError(
                what, fix='return_tensors="pt" and padding=True for a tokenizer; a collator for a DataLoader'
            )
    ids = found.get("input_ids")
    if isinstance(ids, Tensor) and ids.ndim != 2:
        what = f"input_ids have shape {tuple(ids.shape)}; a batch has (samples, positions)."
        raise DataError(what, fix="input_ids[None] for one sample; DataLoader(…) for a data set of samples")
    return found


def _are_arrays(value: Any) -> bool:
    """Whether a value is what a model is called on: an array, a nest of them, or a dict in which there are some."""
    if isinstance(value, Mapping):
        return any(isinstance(leaf, _ARRAYS) for leaf in leaves(value))
    kinds = (isinstance(leaf, _ARRAYS) for leaf in leaves(value))
    return next(kinds, False) and all(kinds)


def _are_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    if not isinstance(value, tuple | list) or not value:
        return False
    return all(isinstance(item, int | float | np.number | np.bool_) or _are_numbers(item) for item in value)


def _from_numbers(targets: Any) -> Tensor:
    try:
        return torch.tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"targets are lists that are no tensor: {error}.", fix="as many numbers for each") from error


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.ma.MaskedArray) and (masked := int(np.ma.getmaskarray(value).sum())):
        what = f"{masked} {'number of an array is' if masked == 1 else 'numbers of an array are'} masked."
        raise DataError(what, fix="array.filled(…), with what the model shall see in their place")
    try:
        # torch neither reads backwards nor takes what it must not write to.
        return torch.as_tensor(value if value.flags.writeable and value.flags.c_contiguous else value.copy())
    except (TypeError, ValueError) as error:
        raise DataError(f"an array of {value.dtype} cannot become a tensor: {error}") from error


def _signed(targets: Any) -> Any:
    """Class numbers of a kind that torch can hold but hardly compute with, as others."""
    found = _tensor(targets)
    return found.long() if isinstance(found, Tensor) and found.dtype in _UNSIGNED else found


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
    check_count("batch_size", batch_size, error=DataError)
    data = as_data(data)
    if is_pair(data):
        inputs, targets = data
        count = check_pair(inputs, targets)
        rank, world = share
        order = torch.arange(count)[rank::world]
        for begin in range(0, len(order), batch_size):
            chunk = order[begin : begin + batch_size]
            yield select_samples(inputs, chunk), select_samples(targets, chunk)
        return
    if isinstance(data, str | Path):
        raise DataError(f"data is {str(data)!r}, a name; images are tensors.", fix=_READ.format(repr(str(data))))
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        loader = "DataLoader(dataset, batch_size=32)" if hasattr(data, "__getitem__") else ""
        raise DataError(
            f"data is a {type(data).__name__}; give an iterable of (inputs, targets), or a pair (X, y) of tensors.",
            fix="(X, None) if there are no targets" if isinstance(data, Tensor) else loader,
        )
    yield from map(checked_batch, data)


def check_pair(inputs: Any, targets: Any) -> int:
    """How many samples (X, y) has, if inputs and targets have as many."""
    count = size_of(inputs)
    lengths = sorted(set(counts_of_samples(inputs)))
    if len(lengths) > 1:
        raise DataError(f"inputs have different lengths: {', '.join(map(str, lengths))}; each needs every sample.")
    for known in tensors_in(targets):
        if not known.ndim or len(known) != count:
            shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else ()
            raise DataError(
                f"{count} inputs but {len(known) if known.ndim else 'a single number for'} targets.",
                fix="x[None] for a single image"
                if len(shape) == 3 and count in (1, 3, 4) and known.numel() == 1
                else "",
            )
    return count


def checked_batch(batch: Any) -> Batch:
    """A batch of an iterable, if it is a pair (inputs, targets) or a dict."""
    if not isinstance(batch, Mapping) and (not isinstance(batch, tuple | list) or len(batch) != 2):
        raise DataError(
            f"a batch is a {type(batch).__name__}"
            + (f" of {len(batch)} items" if isinstance(batch, tuple | list) else "")
            + "; each must be a pair (inputs, targets), with None for targets that are not known, or a dict.",
            fix=_way_out(batch),
        )
    return as_batch(batch)


def _way_out(batch: Any) -> str:
    """What somebody probably meant who gave a batch of this kind."""
    if isinstance(batch, Tensor):
        return "(x, None) for each batch x if there are no targets"
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(first, str | Path) or hasattr(first, "convert"):  # names of images, or images of PIL
        return _READ.format("FOLDER")
    return "[(images, targets)] for lists of images and of dicts" if are_images(batch) else ""


def parts_of(inputs: Any, targets: Any, size: int) -> Iterator[Batch]:
    """A batch in parts of at most `size` samples. It stays whole where targets have no row for each sample."""
    count = size_of(inputs)
    fits = all(own == count for own in counts_of_samples([inputs, targets]))
    if count <= size or not fits or not (targets is None or tensors_in(targets)):
        yield inputs, targets
        return
    for begin in range(0, count, size):
        part = slice(begin, begin + size)
        yield select_samples(inputs, part), select_samples(targets, part)


def total_of(data: Data) -> int | None:
    """How many samples there are, where that is known without going through them."""
    if isinstance(data, list | tuple):
        parts = [data] if is_pair(data) else data
        arrays = [next((leaf for leaf in leaves(part) if isinstance(leaf, _ARRAYS)), None) for part in parts]
        return None if any(array is None or not array.ndim for array in arrays) else sum(map(len, arrays))  # type: ignore[arg-type]
    for known in (getattr(data, "samples", None), getattr(data, "dataset", None)):
        if isinstance(known, int | Sized):
            return known if isinstance(known, int) else len(known)
    return None


def repeatable(data: Data) -> Data:
    """Data that can be gone through again: iterators, which cannot, are read into a list."""
    data = as_data(data)
    return list(data) if isinstance(data, Iterator) else data


def example_of(model: nn.Module, data: Data) -> Any:
    """One sample of the data on the model's device, to analyse the model with; two for statistics of a batch."""
    if data is None:
        raise DataError(
            "without data there is no input to analyse the model with.",
            fix="data=[(example, None)], where the model runs on example; `score` also takes graph=analyze(…)",
        )
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    count = 2 if any(norm.running_mean is None for norm in norms) else 1
    for inputs, _ in batches(data, count):
        if size_of(inputs) < 1:
            raise DataError("the first batch is empty.")
        return to_device(select_samples(inputs, slice(count)), device_of(unwrap(model)))
    raise DataError("the data are empty: there is no batch in them.")


def size_of(inputs: Any) -> int:
    """How many samples a batch of inputs has."""
    tensors = tensors_in(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise DataError(
            f"inputs of type {type(inputs).__name__} have no tensor with a batch dimension.",
            fix="torch.tensor(…), or a NumPy array",
        )
    return counts_of_samples(inputs)[0]


def masks_in(inputs: Any, decoder: bool | None = None) -> list[Tensor]:
    """The attention masks of a batch, (samples, positions): True where there is no padding.

    `decoder` asks for the one of the decoder alone, or for the other alone.
    """
    if not isinstance(inputs, Mapping):
        return []
    names = {"attention_mask": False, "decoder_attention_mask": True}
    masks = [inputs.get(name) for name, second in names.items() if decoder in (None, second)]
    return [mask != 0 for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]


def counted(masks: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Which entries of a tensor of this shape (samples, positions) are no padding; None if no mask tells."""
    fitting = [mask for mask in masks if tuple(mask.shape) == tuple(shape)]
    return torch.stack(fitting).any(0) if fitting else None


def check_inputs(inputs: Any) -> None:
    """Refuse NaN and infinity, which would silently spoil every sum."""
    for tensor in tensors_in(inputs):
        holds = tensor.is_floating_point() or tensor.is_complex()
        if holds and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"an input of shape {tuple(tensor.shape)} has NaN or infinite values.")
