"""Weights from files: safetensors, or a state dict that torch reads without running anything."""

from __future__ import annotations

import difflib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import FileFormatError
from secateur.running.tensor_files import fill as fill_tensors
from secateur.running.tensor_files import read_safetensors

# Training scripts put the state dict under one of these.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema", "net")


def similar(missing: Path, kind: Callable[[Path], bool] = Path.is_file) -> str:
    """The file (or what else is asked for) beside a missing one that has nearly its name; empty if there is none."""
    names = [path.name for path in missing.parent.iterdir() if kind(path)] if missing.parent.is_dir() else []
    near = difflib.get_close_matches(missing.name, names, 1)
    return str(missing.parent / near[0]) if near else ""


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors in a file, by name."""
    file = Path(path)
    if not file.is_file():
        raise FileFormatError(
            f"there is no weights file {file}.", fix=similar(file) or "the path of a .safetensors file"
        )
    if file.suffix == ".safetensors":
        return read_safetensors(file)[0]
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
        reason = str(error) or ("it is empty" if not file.stat().st_size else type(error).__name__)
        raise FileFormatError(f"{file} is not a file of weights, or damaged: {reason}") from error
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise FileFormatError(f"{file} holds no state dict, but a {type(content).__name__}.")
    return tensors


def fill(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put a file's numbers into a model. Every name and shape must fit; what does not is named."""
    state, own = read_weights(path), model.state_dict(keep_vars=True)
    for prefix in ("module.", "_orig_mod."):  # saved from DataParallel, from torch.compile
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    for name in own.keys() ^ state.keys():
        if name.endswith("num_batches_tracked"):  # changes no output, and old files lack it
            own.pop(name, None)
            state.pop(name, None)
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    fix = "weights that were saved from this architecture"
    if 1 <= len(wrong) <= 2 and state[wrong[0]].ndim and state[wrong[0]].shape[1:] == own[wrong[0]].shape[1:]:
        fix = f"for the outputs, ?num_classes={len(state[wrong[0]])} after the model's name"
    fill_tensors(own, state, path, type(model).__name__, fix)
