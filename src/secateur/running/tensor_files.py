"""Tensors from files, and into models. Nothing is unpickled.

A *sealed* file holds tensors, a text and a digest over both, so that no changed bit passes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from secateur import atomic
from secateur.errors import CheckpointError, FileFormatError

_KEY = "secateur"
_HEX = 64  # digits of a digest
# Limits, checked before any work, on what a file can make us use.
_LARGEST_HEADER, _MOST_TENSORS = 64 * 2**20, 100_000
_LARGEST_JSON, _MOST_CONTAINERS, _MOST_QUOTES = 64 * 2**20, 2**20, 2**22


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and its metadata."""
    with _opened(path) as (file, _):
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def sizes_in(path: Path) -> list[int]:
    """How many numbers each tensor of a file has. The file is long enough for them."""
    with _opened(path) as (_, header):
        return [math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """A file, whose length was compared with its header, and the header. What goes wrong is said of the file."""
    try:
        header = _check_header(path)
        with safetensors.safe_open(path, framework="pt") as file:
            yield file, header
    except MemoryError:
        raise
    except Exception as error:  # the reader raises many kinds of errors on damaged files
        what = f"{path} is damaged or not a safetensors file: {error}"
        raise FileFormatError(what, where=path) from error


def _check_header(path: Path) -> Any:
    """The header. Raises ValueError if it is too large, or names a tensor twice: safetensors would keep one of them."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(f"its header of {size} bytes is too large")
        header = file.read(size)
    if header.count(b'"dtype"') > _MOST_TENSORS:
        raise ValueError(f"it has more than {_MOST_TENSORS} tensors")
    return parse_json(header, hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def parse_json(raw: bytes, hook: Any = None) -> Any:
    """JSON from a file. Raises ValueError if it is damaged, too deep, or so large that it could exhaust memory."""
    counts = ((len(raw), _LARGEST_JSON), (raw.count(b"[") + raw.count(b"{"), _MOST_CONTAINERS))
    if any(count > most for count, most in (*counts, (raw.count(b'"'), _MOST_QUOTES))):
        raise ValueError("it is too large")
    try:
        return json.loads(raw.decode(), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def sealed(tensors: Mapping[str, Tensor], text: str) -> bytes:
    """A safetensors file with a text and a digest over everything. Equal content gives equal bytes."""
    return safetensors.torch.save(dict(tensors), {_KEY: _seal(tensors, text) + text})


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Replace a sealed file of tensors and JSON; a kill leaves the old or the new."""
    kept = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
    try:
        atomic.write(path, sealed(kept, json.dumps(header)))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({error}); the one before it, if any, is intact.",
            where=path,
            fix="make room and start the same run again: it goes on from there",
        ) from error


def read_checkpoint(path: Path, form: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors that `write_checkpoint` was given. `form` is what its "format" must be."""
    tensors, text, _ = read_sealed(path)
    try:
        header = parse_json(text.encode() or b"null")
    except ValueError as error:
        raise FileFormatError(f"{path} is not a checkpoint, or is damaged: {error}", where=path) from error
    if not isinstance(header, dict) or header.get("format") != form:
        what = f"{path} is not a checkpoint of this version of secateur (expected format {form!r})"
        raise FileFormatError(what, where=path)
    return header, tensors


def other_run(path: Path, other: Mapping[str, tuple[Any, Any]], digests: Collection[str]) -> FileFormatError:
    """The error for the file of another run. `other` has what was and what is; `digests` are too long to be shown."""
    texts = [
        f"other {key}" if key in digests else f"{key} was {was!r}, is now {now!r}"
        for key, (was, now) in list(other.items())[:4]
    ]
    fix = "another checkpoint path, or remove the file"
    return FileFormatError(f"{path} belongs to another run: {'; '.join(texts)}.", where=path, fix=fix)


def read_sealed(path: Path) -> tuple[dict[str, Tensor], str, dict[str, str]]:
    """The tensors and the text of a sealed file, and all metadata. A file that is not as it was written is refused.

    Files of older versions have no digest: their text begins with a brace.
    """
    tensors, metadata = read_safetensors(path)
    text = metadata.get(_KEY, "")
    if text and not text.startswith("{"):
        seal, text = text[:_HEX], text[_HEX:]
        if set(metadata) != {_KEY} or seal != _seal(tensors, text):
            raise FileFormatError(
                f"{path} is damaged: its content is not what was written.", where=path, fix="copy or make it again"
            )
    return tensors, text, metadata


def _seal(tensors: Mapping[str, Tensor], text: str) -> str:
    whole = f"{hashlib.sha256(text.encode()).hexdigest()} {digest_of((n, tensors[n]) for n in sorted(tensors))}"
    return hashlib.sha256(whole.encode()).hexdigest()


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of tensors in their order: names, shapes, dtypes and all bytes."""
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        plain = tensor.detach().resolve_conj().resolve_neg()  # torch only marks conjugate and negative views
        flat = plain.contiguous().cpu().as_strided((plain.numel(),), (1,)).view(torch.uint8)
        found.update(np.ascontiguousarray(flat.numpy()).data)
    return found.hexdigest()


def is_odd(tensor: Tensor) -> bool:
    """Whether a tensor has no ordinary memory: sparse, nested, quantized, without a shape yet, on the meta device."""
    return is_lazy(tensor) or (
        tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized
    )


def fill(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str | os.PathLike[str], model: str, fix: str = ""
) -> None:
    """Copy the tensors of a file into those of a model. Names and shapes must fit; what does not is named.

    Tied tensors need only one of their names. `model` and `fix` are for the message.
    """
    filled = {id(own[name]) for name in tensors if name in own}
    wrong = [
        f"`{name}` has shape {tuple(tensor.shape)}, the model needs {tuple(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and own[name].shape != tensor.shape
    ]
    wrong += [f"it has no `{name}`" for name, tensor in own.items() if id(tensor) not in filled]
    wrong += [f"the model has no `{name}`" for name in tensors if name not in own]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise FileFormatError(f"{where} does not fit {model}: {'; '.join(wrong[:3])}{more}.", where=where, fix=fix)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in tensors:
                tensor.copy_(tensors[name])


# -- nested state of optimizers, schedulers and the like ---------------------------------------------------------------
def encode(value: Any, tensors: dict[str, Tensor], key: str) -> Any:
    """Nested containers as JSON, tensors set aside under names that begin with `key`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k, tensors, key), encode(v, tensors, f"{key}/{k}")] for k, v in value.items()]}
    if isinstance(value, Sequence):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, tensors, f"{key}/{i}") for i, item in enumerate(value)]}
    raise CheckpointError(
        f"cannot put a {type(value).__name__} into a checkpoint ({key}).", fix="carry only what has numbers as state"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {decode(k, tensors): decode(v, tensors) for k, v in content}
    items = [decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
