"""Weights from files: safetensors, or a state dict that torch reads without running anything."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from secateur.errors import FileFormatError

# Training scripts put the state dict under one of these.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema", "net")


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors in a file, by name."""
    file = Path(path)
    if not file.is_file():
        raise FileFormatError(f"there is no weights file {file}.")
    if file.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(file)
        except (safetensors.SafetensorError, ValueError, RuntimeError) as error:
            raise FileFormatError(f"{file} is damaged or not a safetensors file: {error}") from error
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileFormatError(
            f"{file} is damaged or holds more than tensors, and secateur runs no code from files.",
            fix="torch.save(model.state_dict(), path), or safetensors",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # torch's reader raises many kinds of errors on damaged files
        raise FileFormatError(f"{file} is not a file of weights, or damaged: {error}") from error
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise FileFormatError(f"{file} holds no state dict, but a {type(content).__name__}.")
    return tensors


def fill(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put a file's numbers into a model. Every name and shape must fit; what does not is named."""
    state = read_weights(path)
    if all(name.startswith("module.") for name in state):  # saved from DataParallel
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    own = model.state_dict()
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    extra = [name for name in state if name not in own and not name.endswith("num_batches_tracked")]
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    kind = type(model).__name__
    if wrong:
        name = wrong[0]
        has, needs = tuple(state[name].shape), tuple(own[name].shape)
        outputs = bool(has) and has[1:] == needs[1:] and len(wrong) <= 2
        raise FileFormatError(
            f"{path} does not fit {kind}: `{name}` has shape {has}, the model needs {needs}{_more(wrong)}.",
            where=path, fix=f"for the outputs, ?num_classes={has[0]} after the model's name" if outputs else "",
        )  # fmt: skip
    if missing or extra:
        what = [f"it has no `{missing[0]}`{_more(missing)}"] if missing else []
        what += [f"the model has no `{extra[0]}`{_more(extra)}"] if extra else []
        raise FileFormatError(f"{path} does not fit {kind}: {'; '.join(what)}. Is it for another model?", where=path)
    model.load_state_dict(state, strict=False)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
