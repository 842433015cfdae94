"""A command's output folder: what is in it, whether a run in it is unfinished, and whose it is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secateur.cli.output import Talk
from secateur.data.images import Photographs
from secateur.errors import SecateurError
from secateur.pruning.files import PLANS

CHECKPOINT, RUN = "checkpoint.safetensors", "run.json"


def need(extra: str, without: str, *modules: str) -> None:
    """Say before hours of work, not after, that a package is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SecateurError(f"{', '.join(missing)} is missing. Way out: pip install 'secateur[{extra}]', or {without}.")


def check_folder(out: Path) -> None:
    """Refuse to replace what secateur did not write."""
    if out.exists() and not out.is_dir():
        raise SecateurError(f"{out} is a file; --out is a folder.")
    inside = out / "model"
    if inside.exists() and not (inside / PLANS).is_file():
        raise SecateurError(
            f"{inside} exists and was not written by secateur; it would be replaced. Way out: another --out."
        )


def digest(photos: Photographs | None) -> str | None:
    """Which images, in which order, as far as names and sizes tell."""
    if photos is None:
        return None
    found = hashlib.sha256()
    for path, label in zip(photos.paths, photos.labels, strict=True):
        found.update(f"{path.name} {path.stat().st_size} {label}\n".encode())
    return f"{len(photos)} images, {found.hexdigest()[:16]}"


def begin_run(out: Path, asked: dict[str, Any], fresh: bool, talk: Talk) -> None:
    """Go on with an unfinished run of the same command; never mix two."""
    note = out / RUN
    if fresh:
        _forget(out)
    if _checkpoints(out):
        try:
            before = json.loads(note.read_text(encoding="utf-8"))["asked"]
        except (OSError, ValueError, KeyError, TypeError):
            before = {}
        wanted = json.loads(json.dumps(asked))
        other = [key for key in wanted if before.get(key) != wanted[key]]
        if other:
            what = "; ".join(f"{key} was {before.get(key)}, is now {wanted[key]}" for key in other[:3])
            raise SecateurError(
                f"{out} holds an unfinished run that differs: {what}. Way out: --fresh, or another --out."
            )
        talk.note(f"going on with the unfinished run in {out}")
    out.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"asked": asked, "finished": False}, indent=1), encoding="utf-8")


def end_run(out: Path, asked: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Note that a run is finished, and drop what it needed to go on."""
    text = json.dumps({"asked": asked, "finished": True, **summary}, indent=1)
    (out / RUN).write_text(text, encoding="utf-8")
    _forget(out)


def _checkpoints(out: Path) -> list[Path]:
    """`compare` has one per criterion."""
    return sorted(out.glob("checkpoint*.safetensors"))


def _forget(out: Path) -> None:
    for path in _checkpoints(out):
        path.unlink()
