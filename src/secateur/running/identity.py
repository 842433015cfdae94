"""By what a run recognises its model, data and settings when it goes on: short texts and digests."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import UserList, deque
from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import fields
from enum import Enum
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from secateur.nest import tensors_in
from secateur.running.attributes import has_weights, is_record, own_attributes, own_text, qualified_name
from secateur.running.batches import Data, as_batch, as_tensors, is_pair
from secateur.running.functions import Use, content, held, is_nameless, member, unordered
from secateur.running.objects import WHOLE, class_name, state
from secateur.running.sandbox import seeded
from secateur.running.tensor_files import digest_of, is_odd

_CONTAINERS = (list, tuple, set, frozenset, Mapping, deque, UserList)
#: Iterable, but no loaders.
_TEXTS = (str, bytes, bytearray, range, array)
_CACHED = type(cache(len))
# Objects of these packages have their settings, and nothing else, in their public attributes.
_OPEN = ("torch", "torchvision")


# The containers around the value that is described: it may refer to them.
_above: ContextVar[tuple[int, ...]] = ContextVar("above", default=())


def described(value: Any, without: Collection[str] = ()) -> str:
    """Settings as text that is the same in every process: functions by name, data by digest, dataclasses by field.

    Lambdas and functions within functions share their names with others, and are told apart by what they do.
    Transforms and losses of torch are told apart by all their arguments, other callable objects by their `repr`.

    >>> described(len), described({"epochs": 3})
    ('builtins.len', "{'epochs': 3}")
    """
    if issubclass(type(value), Enum):
        return member(value, described)
    above = _above.get()
    if id(value) in above:
        return f"what it is in, {len(above) - above.index(id(value))} above"
    kind = type(value)
    if not issubclass(kind, (*_CONTAINERS, partial)) and not is_record(kind):
        return _described(value)
    token = _above.set((*above, id(value)))
    try:
        return _composed(value, without)
    finally:
        _above.reset(token)


def _composed(value: Any, without: Collection[str]) -> str:
    """A container, a dataclass or a partial."""
    kind = type(value)
    if is_record(kind):
        names = [field.name for field in fields(value) if field.repr and field.name not in without]
        shown = ", ".join(f"{name}={described(item)}" for name, item in _fields(value, names).items())
        name = class_name(kind, described) if "<" in kind.__qualname__ else kind.__qualname__
        return f"{name}({shown})"
    if issubclass(kind, partial):
        return _partial(value, described(value.func))
    if issubclass(kind, Mapping):
        items = "{" + ", ".join(f"{described(key)}: {described(item)}" for key, item in value.items()) + "}"
    elif issubclass(kind, set | frozenset):  # whose order is another one in each process
        return f"{kind.__name__}({unordered(value, described)})"
    else:
        items = ", ".join(map(described, value))
        items = f"({items}{',' if len(value) == 1 else ''})" if issubclass(kind, tuple) else f"[{items}]"
    if kind in (dict, list, tuple):
        return items
    return " ".join(part for part in (class_name(kind, described), items, state(value, described)) if part)


def _described(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, nn.Module):
        return _object(value)
    if issubclass(kind, ModuleType) or (issubclass(kind, np.ndarray) and value.dtype.kind not in "biufc"):
        return held(value, described, Use())  # the repr of a module has a path; such arrays cannot become tensors
    if issubclass(kind, Tensor | np.ndarray):
        return data_identity(value)
    if callable(value):
        return _callable(value)
    if issubclass(kind, Iterable) and not issubclass(kind, _TEXTS):
        return data_identity(value)
    return _shown(value)


def _fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    held = own_attributes(value)
    return {name: held[name] if name in held else _asked(value, name, "without a value") for name in names}


def _asked(value: Any, name: str, otherwise: Any) -> Any:
    """An attribute that a value is supposed to have, if its code does not fail."""
    try:
        return getattr(value, name, otherwise)
    except Exception:
        return otherwise


def _callable(value: Any) -> str:
    """A function by its name, a callable object by its class and settings."""
    kind = type(value)
    if kind is FunctionType:
        # What a compiler makes of a function counts as that function.
        plain = vars(value).get("_torchdynamo_orig_callable")
        if plain is not None:
            return described(plain)
        return f"{_name(value)} {content(value, described)}" if is_nameless(value) else _name(value)
    if kind is staticmethod:
        return described(value.__func__)
    if kind is _CACHED:
        return described(own_attributes(value).get("__wrapped__"))
    if kind is torch.jit.ScriptFunction:
        return f"torch.jit.ScriptFunction {_scripted(value)}"
    if kind is MethodType:
        return _method(described(value.__func__), value.__self__, value.__func__)
    if issubclass(kind, type):
        return class_name(value, described)
    if qualified_name(value) is not None:
        owner = getattr(value, "__self__", None)  # of C, like the name
        return _name(value) if owner is None or type(owner) is ModuleType else _method(_name(value), owner, value)
    return _object(value)


def _scripted(value: Any) -> str:
    """A digest of what torch has compiled: its instructions and its constants, without lines and files."""
    graph = value.inlined_graph
    nodes = [node for node in graph.findAllNodes("prim::Constant") if node.hasAttribute("value")]
    numbers = [node.t("value") for node in nodes if node.kindOf("value") == "t"]
    text = re.sub(r"___torch_mangle_\d+\.", "", graph.str(False))  # which tells classes of one process apart
    return digest_of_text(f"{text} {value.code} {_digest(*numbers)}")


def _attributes(compiled: Any) -> list[str]:
    """The attributes of all modules in a compiled one; buffers, if there are no weights that may be trained."""
    numbers = not has_weights(compiled)
    found = [f"{name} {_digest(tensor)}" for name, tensor in compiled.named_buffers()] if numbers else []
    for path, module in compiled.named_modules():
        kinds = module._concrete_type.get_attributes() if issubclass(type(module), torch.jit.ScriptModule) else {}
        names = sorted(name for name, (kind, _) in kinds.items() if name != "training" and str(kind) != "Tensor")
        found += [f"{path}.{name} {described(module._c.getattr(name))}" for name in names]
    return found


def _method(name: str, owner: Any, function: Any) -> str:
    """A method, and what it reads of the object to which it belongs.

    The rest does not count: such an object may be a whole program, with a model, folders and the time of its start.
    """
    kind = type(owner)
    if issubclass(kind, type):
        return f"{name} of {class_name(owner, described)}"
    plain = (*_CONTAINERS, *_TEXTS, Tensor, np.ndarray, Enum, partial)
    if issubclass(kind, plain) or kind.__module__.partition(".")[0] in _OPEN:
        return f"{name} of {described(owner)}"
    method = (qualified_name(function) or "__call__").rpartition(".")[2]
    if method in WHOLE or type(function) is not FunctionType:  # of what is written in C, nobody sees what it reads
        return f"{name} of {_object(owner, method)}"
    read = state(owner, described, method)
    return " ".join(part for part in (f"{name} of {class_name(kind, described)}", read) if part)


def _object(value: Any, method: str = "__call__") -> str:
    """An object by its class, its `repr` and its attributes."""
    kind = type(value)
    name = class_name(kind, described)
    if issubclass(kind, torch.jit.ScriptModule):
        return f"{name} {_scripted(value)} {digest_of_text(str(_attributes(value)))}"
    if (kind.__module__, kind.__name__) == ("torch._dynamo.eval_frame", "OptimizedModule"):  # slow to import
        return described(value._orig_mod)
    if kind.__module__.partition(".")[0] in _OPEN and kind.__module__ != "torch._ops":
        # Their `repr` leaves arguments out, such as the probability of RandomApply.
        held = own_attributes(value)
        own = {key: item for key, item in held.items() if key[:1] != "_" and key != "training"}
        if issubclass(kind, nn.Module):
            parts = {**(held.get("_buffers") or {}), **(held.get("_modules") or {})}
            own |= {key: item for key, item in parts.items() if item is not None}
        return f"{name}({', '.join(f'{key}={described(item)}' for key, item in own.items())})"
    shown = _without_addresses(own_text(value))
    return " ".join(part for part in (name, shown, state(value, described, method)) if part)


def _shown(value: Any) -> str:
    """A value by its `repr`; by its class and attributes as well, if that has addresses only."""
    text = own_text(value)
    return text if text == _without_addresses(text) != "" else f"<{_object(value)}>"


def named(function: Any) -> str:
    """A function by its name alone, anything else as described."""
    if issubclass(type(function), partial):
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
    dataset = _asked(data, "dataset", None)
    facts = [type(data).__qualname__, _length(data), _asked(data, "batch_size", None)]
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
    parts = [(str(i), part) for i, tensor in enumerate(tensors) for part in _ordinary(tensor)]
    plain += [f"{tensor.dtype} {tensor.layout} {_form(tensor)}" for tensor in tensors if is_odd(tensor)]
    return digest_of(parts) + (f" {plain}" if plain else "")


def _ordinary(tensor: Tensor) -> list[Tensor]:
    """The tensors with ordinary memory that hold the numbers of a tensor; none if it has no numbers."""
    if not is_odd(tensor):
        return [tensor]
    if is_lazy(tensor) or tensor.is_meta:
        return []
    if tensor.is_nested:
        return [part for item in tensor.unbind() for part in _ordinary(item)]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _form(tensor: Tensor) -> tuple[int, ...]:
    return () if is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape)


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
