"""A command's output folder: what is in it, whether a run in it is unfinished, and whose it is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from torch import nn

from secateur import atomic
from secateur.cli.output import Talk
from secateur.cli.subject import Task
from secateur.data.images import Photographs
from secateur.errors import NothingToPruneError, SecateurError, TargetError
from secateur.files.folder import PLANS
from secateur.loop.checkpoint import digest as numbers_digest

CHECKPOINT, RUN, WEIGHTS = "checkpoint.safetensors", "run.json", "weights_digest"
# Where results go and how they are printed is no part of what they are.
_ASIDE = {"out", "fresh", "as_json"}
# What may change between an interrupted run and the one that goes on: names of what is compared by its content, where
# it is computed, and what is written at the end.
_FREE = {
    "weights", "images", "test", "original", "per_class", "test_per_class", "strict", "device", "onnx", "report",
    "latency", "size", "fit", "mean", "std",
}  # fmt: skip
# What is in a request beside options, or was made of them.
_FOUND = {"command", "model", "outputs", "merge", "view", "reference", "held_out", "criteria"}
# What a run without --onnx or with --no-report does not replace.
_REPLACED = {"model.onnx", "report.html"}


def need(extra: str, without: str, *modules: str) -> None:
    """Say before hours of work, not after, that a package is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SecateurError(f"{', '.join(missing)} is missing.", fix=f"pip install 'secateur[{extra}]', or {without}")


def check_folder(out: Path, **data: Path | None) -> None:
    """Refuse to write among the user's images (`data`, by option), or where nothing may be written."""
    for option, folder in data.items():
        if folder is not None:
            keep_apart(out, folder, f"--{option}")
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise SecateurError(f"{nearest} is a file; --out is a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SecateurError(f"--out {out} cannot be made: {nearest} may not be written to.", fix="another --out")


def check_model(out: Path) -> None:
    """Refuse to replace what secateur did not write."""
    inside = out / "model"
    if inside.exists() and not (inside / PLANS).is_file():
        raise SecateurError(
            f"{inside} exists and was not written by secateur; it would be replaced.", fix="another --out"
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
        f"--out {out} {how} the folder of {option}, {folder}: what is written would be mixed with your images.",
        fix="another --out, beside that folder",
    )


def digest(photos: Photographs | None) -> str | None:
    """Which images, in which order, as far as names and sizes tell."""
    if photos is None:
        return None
    found = hashlib.sha256()
    for path, label in zip(photos.paths, photos.labels, strict=True):
        found.update(f"{path.name} {path.stat().st_size} {label}\n".encode())
    return f"{len(photos)} images, {found.hexdigest()[:16]}"


def fingerprint(model: nn.Module) -> str:
    """Which weights, without going by the name of a file."""
    return numbers_digest(model)[:16]


def request(ctx: typer.Context, job: Task, **chosen: Any) -> dict[str, Any]:
    """Everything that the command line being run asks for, as given, and what became of it."""
    given = {name: _plain(value) for name, value in ctx.params.items() if name not in _ASIDE}
    found = {
        "outputs": {name: list(members) for name, members in job.outputs.items()}, "merge": job.merge,
        "view": asdict(job.reference.view), "reference": digest(job.reference), "held_out": digest(job.test),
        WEIGHTS: fingerprint(job.model),
    }  # fmt: skip
    return {"command": ctx.info_name, **given, **found, **chosen}


def begin_run(out: Path, asked: dict[str, Any], fresh: bool, talk: Talk) -> str | None:
    """Go on with an unfinished run of the same command; never mix two. Returns the earlier note, if there is one."""
    note, unfinished = out / RUN, bool(_checkpoints(out)) and not fresh
    earlier = note.read_text(encoding="utf-8", errors="replace") if note.is_file() else None
    before, files, finished = _understood(earlier)
    other = _differences(before, json.loads(json.dumps(asked)))
    if unfinished and other:
        what = "; ".join(other[:3]) if before else f"its {RUN} is missing or damaged"
        raise SecateurError(f"{out} holds an unfinished run that differs: {what}.", fix="--fresh, or another --out")
    if unfinished:
        talk.note(f"going on with the unfinished run in {out}")
    elif finished:
        what = "; ".join(other[:3]) or "the same command"
        talk.note(f"this run replaces the earlier result in {out} ({what})")
    if fresh:
        _forget(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        # What lies there until it is replaced stays listed, so that nothing of it is left over in the end.
        text = json.dumps({"asked": asked, "finished": False, "files": files}, indent=1)
        atomic.write(note, text)
    except OSError as error:
        raise SecateurError(f"--out {out} cannot be written: {error.strerror}.", fix="another --out") from error
    return earlier


@contextmanager
def undone_if_impossible(out: Path, earlier: str | None) -> Iterator[None]:
    """Leave what was in the folder if the target turns out to be out of reach before anything was removed."""
    try:
        yield
    except (TargetError, NothingToPruneError) as error:
        if getattr(error.result, "plan", None) is None:
            (out / CHECKPOINT).unlink(missing_ok=True)
        if not _checkpoints(out):  # `compare` may have finished other criteria
            if earlier is None:
                (out / RUN).unlink(missing_ok=True)
            else:
                atomic.write(out / RUN, earlier)
        raise


def end_run(out: Path, asked: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Note that a run is finished, and drop what it needed to go on."""
    text = json.dumps({"asked": asked, "finished": True, **summary}, indent=1)
    atomic.write(out / RUN, text)
    _forget(out)


def drop_stale(out: Path, earlier: str | None, written: Collection[str]) -> None:
    """Take away what an earlier run here wrote and this one did not: a model.onnx of another model misleads."""
    for name in {Path(str(file)).name for file in _understood(earlier)[1].values()} & _REPLACED - set(written):
        (out / name).unlink(missing_ok=True)


def _understood(note: str | None) -> tuple[dict[str, Any], dict[str, str], bool]:
    """What a note says was asked for, which files are there, and whether the run was finished."""
    try:
        found = json.loads(note or "")
        return dict(found["asked"]), dict(found.get("files", {})), found["finished"] is True
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, {}, False


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two requests differ in, in words. Names of files may differ if what is in them does not."""
    other = [key for key in now if key not in _FREE and before.get(key) != now[key]]
    return [_difference(key, before.get(key), now[key]) for key in other]


def _difference(key: str, before: Any, now: Any) -> str:
    if key == WEIGHTS:
        return "other weights"
    if key in ("reference", "held_out"):  # digests mean nothing to people
        before, now = (str(side).partition(",")[0] if side is not None else "no images" for side in (before, now))
        if before == now:
            return f"{key}: other images, or in another order"
    return f"{_called(key)} was {_shown(before)}, is now {_shown(now)}"


def _called(key: str) -> str:
    return key if key in _FOUND else f"--{key.replace('_', '-')}"


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


def _plain(value: Any) -> Any:
    """An option's value as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _checkpoints(out: Path) -> list[Path]:
    """`compare` has one per criterion."""
    return sorted(out.glob("checkpoint*.safetensors"))


def _forget(out: Path) -> None:
    for path in _checkpoints(out):
        path.unlink()
