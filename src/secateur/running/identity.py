"""By what a run recognises its model, data and settings when it goes on: short texts and digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from secateur.nest import leaves, tensors_in
from secateur.running.batches import Data, as_batch, as_tensors, is_pair
from secateur.running.functions import content, is_nameless, member, unordered
from secateur.running.sandbox import seeded
from secateur.running.tensor_files import digest_of

#: Iterable, but not loaders.
_PLAIN = (str, bytes, Mapping, list, tuple, set, frozenset, np.ndarray)
# Objects of these packages have their settings, and nothing else, in their public attributes.
_OPEN = ("torch", "torchvision")


def described(value: Any, without: Collection[str] = ()) -> str:
    """Settings as text that is the same in every process: functions by name, data by digest, dataclasses by field.

    Lambdas and functions within functions share their names with others, and are told apart by what they do.
    Transforms and losses of torch are told apart by all their arguments, other callable objects by their `repr`.

    >>> described(len), described({"epochs": 3})
    ('builtins.len', "{'epochs': 3}")
    """
    if issubclass(type(value), Enum):
        return member(value, described)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.repr and field.name not in without]
        shown = ", ".join(f"{name}={described(getattr(value, name))}" for name in names)
        return f"{type(value).__qualname__}({shown})"
    if isinstance(value, nn.Module | partial):
        return _callable(value)
    loader = isinstance(value, Iterable) and not isinstance(value, _PLAIN)
    if loader or is_pair(value) or any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves(value)):
        return data_identity(value)
    if callable(value):
        return _callable(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{described(key)}: {described(item)}" for key, item in value.items()) + "}"
    if type(value) in (list, tuple):
        items = ", ".join(map(described, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, set | frozenset):  # whose order is another one in each process
        return f"{type(value).__name__}({unordered(value, described)})"
    return _without_addresses(repr(value))


def _callable(value: Any) -> str:
    """A function by its name, a callable object by its class and settings."""
    if isinstance(value, partial):
        return _partial(value, described(value.func))
    if hasattr(value, "__qualname__"):
        return f"{_name(value)} {content(value, described)}" if is_nameless(value) else _name(value)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] in _OPEN:
        # Their `repr` leaves arguments out, such as the probability of RandomApply.
        own = {key: item for key, item in vars(value).items() if key[:1] != "_" and key != "training"}
        if isinstance(value, nn.Module):
            own |= {key: item for key, item in (*value._buffers.items(), *value._modules.items()) if item is not None}
        return f"{name}({', '.join(f'{key}={described(item)}' for key, item in own.items())})"
    shown = _without_addresses(repr(value))
    return name if shown == _without_addresses(object.__repr__(value)) else f"{name} {shown}"


def named(function: Any) -> str:
    """A function by its name alone, anything else as described."""
    if isinstance(function, partial):
        return _partial(function, named(function.func))
    return _name(function) if is_nameless(function) else described(function)


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}.{function.__qualname__}"  # methods of C have no module


def _partial(value: partial[Any], function: str) -> str:
    given = [*map(described, value.args), *(f"{name}={described(item)}" for name, item in value.keywords.items())]
    return f"partial({', '.join([function, *given])})"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def data_identity(data: Data) -> str:
    """All numbers of a pair (X, y) or a list of batches, as a digest.

    Of a loader, type, lengths and the first sample: iterating would disturb the order in which it shuffles.
    """
    if data is None:
        return "none"
    if isinstance(data, list | tuple | Tensor | np.ndarray | Mapping):
        return _digest(*(data if isinstance(data, list | tuple) and not is_pair(data) else [data]))
    dataset = getattr(data, "dataset", None)
    facts = [type(data).__qualname__, _length(data), getattr(data, "batch_size", None)]
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
        sample = as_batch(sample) if pair or isinstance(sample, Mapping) else as_tensors(sample)
        tensors += tensors_in(sample)
        plain += [item for item in sample if isinstance(item, int | float | str)] if pair else []
    return digest_of((str(i), tensor) for i, tensor in enumerate(tensors)) + (f" {plain}" if plain else "")


# -- a model's numbers -------------------------------------------------------------------------------------------------
def numbers(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def digest_of_text(text: str) -> str:
    """A short text in place of a long one."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest(model: nn.Module) -> str:
    """A fingerprint of a model's numbers: a checkpoint made from other weights must not be mixed with these."""
    return digest_of(numbers(model).items())
