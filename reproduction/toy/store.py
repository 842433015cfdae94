"""The cache: files whose names depend on the inputs and the code that their content is computed from."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

import secateur
from secateur.atomic import write

Arrays = dict[str, np.ndarray[Any, Any]]

# Scores and prunings depend on these parts of the package. A change in one of them makes stored results invalid. Code
# that builds and trains networks is not among them: the names of stored results already depend on the weights.
_SOURCES = ("running", "ops", "structure", "plans", "surgery", "analysis", "relevance", "criteria")
_OWN = (
    "../criteria.py",
    "points.py",
    "recipe.py",
    "variants.py",
    "cells.py",
    "evaluation.py",
    "ranking.py",
    "blocks.py",
)


def default_cache() -> Path:
    """`$SECATEUR_CACHE`, else the user's cache folder."""
    named = os.environ.get("SECATEUR_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secateur"


def digest(*parts: Any) -> str:
    """A short name for some content: bytes, arrays or anything that JSON can hold."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).tobytes()
        text = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        state.update(len(text).to_bytes(8, "big") + text)
    return state.hexdigest()[:24]


@cache
def source_digest() -> str:
    """A short name for the code that scores and prunes."""
    package = Path(secateur.__file__).parent
    files: list[Path] = []
    for name in _SOURCES:
        path = package / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    files += [Path(__file__).parent / name for name in _OWN]
    return digest(*(file.read_bytes() for file in files))


def put(path: Path, arrays: Arrays, about: dict[str, Any]) -> Path:
    """Store arrays, with a description."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return write(path, save(whole, {"about": json.dumps(about)}))


def get(path: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """Stored arrays and their description, or None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["about"])
        return load(content), about
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
