"""Tensors and a JSON header in one safetensors file: prepared networks and unfinished runs. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from secateur.atomic import write
from secateur.errors import FileFormatError


def save(file: Path, kind: str, settings: Mapping[str, Any], notes: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of some kind. `settings` identify it, `notes` are anything else that JSON can hold."""
    header = {"format": f"secateur-{kind}-1", "settings": settings, "notes": notes}
    content = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
    write(file, safetensors.torch.save(content, {"secateur": json.dumps(header)}))


def load(file: Path, kind: str, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]] | None:
    """The notes and tensors of a file, or None if there is no file. A file of other settings is refused."""
    if not file.exists():
        return None
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get("secateur", "null"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, RuntimeError, OSError) as error:
        raise FileFormatError(f"{file} is damaged: {error}") from error
    if not isinstance(header, dict) or header.get("format") != f"secateur-{kind}-1":
        raise FileFormatError(f"{file} was not written by this version.", fix="remove the file")
    refuse_others(file, header["settings"], settings)
    return header["notes"], tensors


def refuse_others(place: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise an error if the settings in a file or folder are not those wanted."""
    wanted = json.loads(json.dumps(wanted))
    other = [key for key in wanted if found.get(key) != wanted[key]]
    if other:
        how = "; ".join(f"{key} was {found.get(key)!r}, is now {wanted[key]!r}" for key in other[:4])
        raise FileFormatError(f"{place} has other settings: {how}.", fix=f"use another --out, or remove {place}")
