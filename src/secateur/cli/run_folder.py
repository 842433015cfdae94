"""A command's output folder: what it holds, whether a run in it is unfinished, and what that run was asked for."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch import nn

from secateur import atomic
from secateur.cli.image_task import Task
from secateur.cli.output import Printer
from secateur.cli.text_task import TextTask
from secateur.errors import FileFormatError, NothingToPruneError, SecateurError, TargetError
from secateur.files.onnx import export
from secateur.files.pretrained import check_free
from secateur.files.saved import check_replaceable
from secateur.loop.checkpoint import is_checkpoint
from secateur.running.identity import digest as numbers_digest
from secateur.running.tensor_files import parse_json

CHECKPOINT, RUN, WEIGHTS = "checkpoint.safetensors", "run.json", "weights_digest"
_LARGEST_NOTE = 2**24
_LONGEST = 160  # letters of what two requests differ in
# Options that do not change the results.
_ASIDE = {"out", "fresh", "as_json", "memory"}
# What may change between an interrupted run and the one that continues it: names of files that are compared by
# content, the device, and what is written at the end.
_FREE = {
    "weights", "images", "test", "original", "per_class", "test_per_class", "strict", "device", "onnx", "int8",
    "report", "latency", "size", "fit", "resize", "interpolation", "mean", "std", "text", "test_text", "labels",
    "columns", "tokens", "sequences", "test_sequences",
    "runtime", "batch", "threads",  # (these count where a latency is asked for: the checkpoint knows)
}  # fmt: skip
# Entries of a request that are not options.
_FOUND = {"command", "model", "outputs", "merge", "view", "reference", "held_out", "criteria"}
# Files that a run without --onnx or --int8, or with --no-report, does not replace.
_REPLACED = frozenset(("model.onnx", "model.int8.onnx", "report.html"))


def need_packages(extra: str, without: str, *modules: str) -> None:
    """Refuse a missing package before the work, not after it."""
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


def check_model(out: Path, pretrained: bool = False) -> None:
    """Refuse to replace what secateur did not write, or wrote in another form: `pretrained` is that of transformers."""
    try:
        (check_free if pretrained else check_replaceable)(out / "model")
    except SecateurError as error:
        raise SecateurError(error.what, where=error.where, fix="another --out") from error


def write_model(
    model: nn.Module,
    save: Callable[[Path], object],
    out: Path,
    example: Any,
    printer: Printer,
    write: Callable[[nn.Module, Path, Any], Path] = export,
) -> dict[str, Path]:
    """Save a smaller model, also as ONNX if there is an example, and return what was written where."""
    files = {"model": out / "model"}
    save(files["model"])
    if example is not None:
        with printer.stage("writing ONNX and checking it with ONNX Runtime"):
            files["onnx"] = write(model, out / "model.onnx", example)
    return files


def keep_apart(out: Path, folder: Path, option: str, *, above: bool = True) -> None:
    """Refuse an --out that is, or lies in, a folder of images. With `above`, refuse one that holds it as well."""
    place, images = out.resolve(), folder.resolve()
    how = "is" if place == images else "lies inside" if images in place.parents else "holds"
    if how != "holds" or (above and place in images.parents):
        raise SecateurError(
            f"--out {out} {how} the folder of {option}, {folder}: what is written would be mixed with your images.",
            fix="another --out, beside that folder",
        )


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Make the folder, and refuse other runs in it until this one ends: each would replace some files of the other.

    Where the system cannot tell, nothing is refused. The lock of a killed process is gone with it.
    """
    handle = None
    with suppress(ImportError, OSError):
        import fcntl

        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise SecateurError(
                f"another run is writing to {out}.", where=out, fix="wait for it, or another --out"
            ) from None
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # processes that this one started may still hold the folder
            os.close(handle)


def request(ctx: typer.Context, task: Task | TextTask, **chosen: Any) -> dict[str, Any]:
    """Everything that this command was asked for, and what was found for it, in JSON's types."""
    given = {name: value for name, value in ctx.params.items() if name not in _ASIDE}
    found = {**task.found(), WEIGHTS: numbers_digest(task.model)[:16]}
    asked: dict[str, Any] = json.loads(json.dumps({"command": ctx.info_name, **given, **found, **chosen}, default=str))
    return asked


@dataclass(frozen=True)
class Run:
    """A run that writes into the folder `out`. `earlier` is the note that an earlier run left there, if any."""

    out: Path
    asked: Mapping[str, Any]
    earlier: str | None

    @classmethod
    def begin(cls, out: Path, asked: Mapping[str, Any], fresh: bool, printer: Printer) -> Run:
        """Start a run, or continue an unfinished one of the same command. Two requests are never mixed."""
        note, unfinished = out / RUN, bool(_checkpoints(out)) and not fresh
        earlier = _read_note(note)
        before, files, finished = _understood(earlier)
        # Names of files may differ if what is in them does not.
        other = [
            _difference(key, before.get(key), asked[key])
            for key in asked
            if key not in _FREE and before.get(key) != asked[key]
        ]
        if unfinished and other:
            what = "; ".join(other[:3]) if before else f"its {RUN} is missing or damaged"
            raise SecateurError(f"{out} holds an unfinished run that differs: {what}.", fix="--fresh, or another --out")
        if unfinished:
            printer.note(f"going on with the unfinished run in {out}")
        elif finished:
            what = "; ".join(other[:3]) or "the same command"
            printer.note(f"this run replaces the earlier result in {out} ({what})")
        if fresh:
            _forget(out)
            for path in _checkpoints(out):
                what = f"{path} is not a checkpoint of secateur, or too damaged to tell; it is left alone."
                raise SecateurError(what, where=path, fix="move it away, or another --out")
        try:
            # Files of the earlier run stay listed until they are replaced, so that none is left over.
            atomic.write(note, json.dumps({"asked": asked, "finished": False, "files": files}, indent=1))
        except OSError as error:
            raise SecateurError(f"--out {out} cannot be written: {error.strerror}.", fix="another --out") from error
        return cls(out, asked, earlier)

    @property
    def checkpoint(self) -> Path:
        """The file from which the run goes on if it is interrupted."""
        return self.out / CHECKPOINT

    @contextmanager
    def working(self) -> Iterator[None]:
        """Restore the folder if the target turns out to be out of reach before anything was removed."""
        try:
            yield
        except (TargetError, NothingToPruneError) as error:
            if getattr(error.result, "plan", None) is None and is_checkpoint(self.checkpoint):
                self.checkpoint.unlink(missing_ok=True)
            if not _checkpoints(self.out):  # `compare` may have finished other criteria
                if self.earlier is None:
                    (self.out / RUN).unlink(missing_ok=True)
                else:
                    atomic.write(self.out / RUN, self.earlier)
            raise
        except FileFormatError as error:
            if Path(error.where) in _checkpoints(self.out):
                raise FileFormatError(error.what, where=error.where, fix="--fresh, or another --out") from error
            raise

    def end(self, summary: Mapping[str, Any], written: Collection[str] = _REPLACED) -> None:
        """Note that the run is finished. Delete its checkpoints, and files of an earlier run that it did not replace.

        A model.onnx of another model would mislead.
        """
        earlier = {Path(str(file)).name for file in _understood(self.earlier)[1].values()}
        for name in earlier & _REPLACED - set(written):
            (self.out / name).unlink(missing_ok=True)
        with atomic.naming_failures(self.out / RUN):
            atomic.write(self.out / RUN, json.dumps({"asked": self.asked, "finished": True, **summary}, indent=1))
        _forget(self.out)


def _read_note(note: Path) -> str | None:
    """What an earlier run noted, if anything. A note that is too large to be one says nothing."""
    if not note.is_file():
        return None
    with note.open("rb") as file:
        return file.read(_LARGEST_NOTE).decode(errors="replace")


def _understood(note: str | None) -> tuple[dict[str, Any], dict[str, str], bool]:
    """What a note says was asked for, which files are there, and whether the run was finished."""
    try:
        found = parse_json((note or "").encode())
        return dict(found["asked"]), dict(found.get("files", {})), found["finished"] is True
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, {}, False


def _difference(key: str, before: Any, now: Any) -> str:
    """What two requests differ in, in words."""
    if key == WEIGHTS:
        return "other weights"
    if key in ("reference", "held_out"):  # digests mean nothing to people
        before, now = (str(side).partition(",")[0] if side is not None else "nothing" for side in (before, now))
        if before == now:
            return f"{key}: other {'images' if 'image' in now else 'texts'}, or in another order"
    option = key if key in _FOUND else f"--{key.replace('_', '-')}"
    was, is_now = ("not given" if value is None else str(value) for value in (before, now))
    if len(was) + len(is_now) > _LONGEST:  # the outputs of many classes
        return f"{option} differs"
    return f"{option} was {was}, is now {is_now}"


def _checkpoints(out: Path) -> list[Path]:
    """`compare` has one per criterion."""
    return sorted(out.glob("checkpoint*.safetensors"))


def _forget(out: Path) -> None:
    """Delete the checkpoints; a file of the user's with such a name stays."""
    for path in _checkpoints(out):
        if is_checkpoint(path):
            path.unlink()
