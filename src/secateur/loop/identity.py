"""Short texts by which a resumed run recognises its data and functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from secateur.loop.callbacks import seeded
from secateur.loop.checkpoint import digest_tensors
from secateur.nest import tensors_in
from secateur.running.batches import Data, as_batch, is_pair

_PLAIN = (str, bytes, Mapping, list, tuple, set, frozenset, np.ndarray)


def described(value: Any) -> str:
    """Settings as text that is the same in every process: functions by name, data by digest, dataclasses by field.

    >>> from secateur.loop.finetune import FineTune
    >>> described(len), described(FineTune(None, epochs=3))[:25]
    ('builtins.len', 'FineTune(data=None, epoch')
    """
    if is_dataclass(value) and not isinstance(value, type):
        shown = (f"{field.name}={described(getattr(value, field.name))}" for field in fields(value) if field.repr)
        return f"{type(value).__qualname__}({', '.join(shown)})"
    if is_pair(value) or tensors_in(value) or _is_loader(value):
        return data_identity(value)
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)


def data_identity(data: Data) -> str:
    """All numbers of a pair (X, y) or a list of batches, as a digest. A loader is not run; see `_loader_identity`."""
    if data is None:
        return "none"
    if not isinstance(data, list | tuple | Tensor | Mapping):
        return _loader_identity(data)
    batches = [data] if is_pair(data) or isinstance(data, Tensor | Mapping) else data
    return _digest(*batches)


def _is_loader(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, _PLAIN)


def _loader_identity(loader: Any) -> str:
    """Type, lengths and the first sample: iterating would disturb the order in which a loader shuffles."""
    dataset = getattr(loader, "dataset", None)
    facts = [type(loader).__qualname__, _length(loader), getattr(loader, "batch_size", None)]
    if dataset is not None:
        facts += [type(dataset).__qualname__, _length(dataset), _first_sample(dataset)]
    return " ".join(str(fact) for fact in facts)


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def _first_sample(dataset: Any) -> str:
    """A digest of the first sample; empty if it has none, or if it is altered at random whenever it is read."""
    found = []
    for seed in (0, 1):
        try:
            with seeded(seed, 0):
                found.append(_digest(dataset[0]))
        except Exception:  # a dataset without indices, or whatever the user's code raises: then there is no digest
            return ""
    return found[0] if found[0] == found[1] else ""


def _digest(*samples: Any) -> str:
    tensors: list[Tensor] = []
    plain: list[Any] = []
    for sample in samples:
        pair = isinstance(sample, list | tuple) and len(sample) == 2
        sample = as_batch(sample) if pair else sample
        tensors += tensors_in(sample)
        plain += [item for item in sample if isinstance(item, int | float | str)] if pair else []
    return digest_tensors((str(i), tensor) for i, tensor in enumerate(tensors)) + ("" if not plain else f" {plain}")
