"""Checkpoints of the loop: one safetensors file with JSON in its header, replaced atomically. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from secateur import atomic
from secateur.errors import CheckpointError, FileFormatError
from secateur.running.tensor_files import read_safetensors

FORMAT = "secateur-loop-1"
#: Settings that older files do not have.
_ADDED = frozenset({"data", "loss", "finetune", "batch_size"})
#: Settings that are too long to be shown.
_DIGESTS = frozenset({"weights", "data", "finetune"})


def write(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Replace the checkpoint; a kill leaves the old or the new."""
    text = json.dumps({"format": FORMAT, **header})
    try:
        saved = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
        atomic.write(path, safetensors.torch.save(saved, {"secateur": text}))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({error}); the one before it, if any, is intact.",
            where=path,
            fix="make room and start the same run again: it goes on from there",
        ) from error


def read(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """What a checkpoint holds, or None if there is none yet. One of another run is refused with what differs."""
    if not path.exists():
        return None
    tensors, metadata = read_safetensors(path)
    try:
        header = json.loads(metadata.get("secateur", "null"))
    except ValueError as error:
        raise FileFormatError(f"{path} is not a checkpoint, or is damaged: {error}", where=path) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} is not a checkpoint of this version of secateur (expected format {FORMAT!r})", where=path
        )
    with whole(path):
        found, wanted = header["settings"], json.loads(json.dumps(settings))
        other = [key for key in wanted if found.get(key) != wanted[key] and (key in found or key not in _ADDED)]
        if other:
            what = "; ".join(
                f"other {key}" if key in _DIGESTS else f"{key} was {found.get(key)!r}, is now {wanted[key]!r}"
                for key in other[:4]
            )
            raise FileFormatError(
                f"{path} belongs to another run: {what}.", where=path, fix="another checkpoint path, or remove the file"
            )
    return header, tensors


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Say that a file is damaged if something is missing in it."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{path} is damaged: {type(error).__name__}: {error}", where=path) from error


# -- a model's numbers -------------------------------------------------------------------------------------------------
def numbers(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def digest(model: nn.Module) -> str:
    """A fingerprint of a model's numbers: a checkpoint made from other weights must not be mixed with these."""
    return digest_tensors(numbers(model).items())


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """A fingerprint of tensors and their names."""
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        found.update(np.ascontiguousarray(flat.numpy()).data)
    return found.hexdigest()


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
