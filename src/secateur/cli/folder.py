"""A command's output folder: what is in it, whether a run in it is unfinished, and whose it is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
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


def check_folder(out: Path, **data: Path | None) -> None:
    """Refuse to write among the user's images (`data`, by option), or where nothing may be written."""
    for option, folder in data.items():
        if folder is not None:
            keep_apart(out, folder, f"--{option}")
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise SecateurError(f"{nearest} is a file; --out is a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SecateurError(f"--out {out} cannot be made: {nearest} may not be written to. Way out: another --out.")


def check_model(out: Path) -> None:
    """Refuse to replace what secateur did not write."""
    inside = out / "model"
    if inside.exists() and not (inside / PLANS).is_file():
        raise SecateurError(
            f"{inside} exists and was not written by secateur; it would be replaced. Way out: another --out."
        )


def keep_apart(out: Path, folder: Path, option: str, *, above: bool = True) -> None:
    """Refuse an --out in which files of ours would pass for images or classes of the user's, or lie all around them.

    `above`: whether the folder that the images' folder lies in is refused as well.
    """
    place, images = out.resolve(), folder.resolve()
    if place == images:
        how = "is"
    elif images in place.parents:
        how = "lies inside"
    elif above and place in images.parents:
        how = "holds"
    else:
        return
    raise SecateurError(
        f"--out {out} {how} the folder of {option}, {folder}: what is written would be mixed with your images. Way "
        f"out: another --out, beside that folder."
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
