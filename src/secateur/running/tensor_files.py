"""Tensors from files, and into models. Nothing is unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from secateur.errors import FileFormatError


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and its metadata."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, RuntimeError, OSError) as error:
        raise FileFormatError(f"{path} is damaged or not a safetensors file: {error}", where=path) from error


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
