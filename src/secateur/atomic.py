"""Atomic writes: whoever reads, even after a crash, finds the old file or the new one. A failure leaves no litter.

A file is written under a staged name beside its place, which holds the numbers of the process and of the thread. A
killed process leaves such a file behind; the next write to the same place removes it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from secateur.errors import SecateurError


@contextmanager
def naming_failures(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says about a full disk or an unwritable folder into an error of ours."""
    try:
        yield
    except OSError as error:
        what = f"{os.fspath(path)} could not be written: {error.strerror or error}."
        raise SecateurError(what, where=path, fix="make room or allow writing there, or give another path") from error


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Replace a file, or make it and its folder. Returns its path."""
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():  # a terminal or a pipe cannot be replaced
        target.write_bytes(data)
        return target
    with replacing(target) as staged:
        staged.write_bytes(data)
    return target


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path`, with the same suffix, to write to. If all goes well, what is there takes its place."""
    target = Path(os.path.realpath(path))  # a link stays a link
    made = _make(target.parent)
    staged = _staged(target)
    try:
        yield staged
        sync(staged)
        os.replace(staged, target)
        _clean(target)
        sync(target.parent)
    finally:
        staged.unlink(missing_ok=True)
        _remove(made)


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace several files of a folder in the order given. The first one decides: see `candidates`.

    All are written under staged names before the first is replaced. If the process is killed after that, the others
    are still there under their staged names, where `candidates` finds them. Of several writers the last one wins.
    """
    made = _make(folder)
    with _alone(folder):
        _write_together(folder, files, made)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Until the others that write to this folder are done, where the system can tell. No file is needed for that."""
    handle = None
    with suppress(ImportError, OSError):
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _write_together(folder: Path, files: Mapping[str, bytes], made: list[Path]) -> None:
    decided = False
    try:
        for name, data in files.items():
            staged = _staged(folder / name)
            staged.write_bytes(data)
            sync(staged)
        sync(folder)
        for name in files:
            os.replace(_staged(folder / name), folder / name)
            decided = True
            sync(folder)
        for name in files:
            _clean(folder / name)
    finally:
        if not decided:
            for name in files:
                _staged(folder / name).unlink(missing_ok=True)
            _remove(made)


def candidates(path: Path) -> list[Path]:
    """A file and what writes that did not end left for it: its content is in one of them."""
    return [file for file in (path, *leftovers(path)) if file.is_file()]


def leftovers(path: Path) -> list[Path]:
    """The staged files for a path, of any process."""
    form = re.compile(re.escape(f".{path.stem}.") + r"\d+(-\d+)?" + re.escape(path.suffix))
    with suppress(OSError):
        return sorted(file for file in path.parent.iterdir() if form.fullmatch(file.name))
    return []


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder. Some systems cannot open folders."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _staged(target: Path) -> Path:
    return target.with_name(f".{target.stem}.{os.getpid()}-{threading.get_native_id()}{target.suffix}")


def _clean(target: Path) -> None:
    """Remove what killed processes left for this file."""
    for file in leftovers(target):
        if not _alive(int(file.name.removesuffix(target.suffix).rpartition(".")[2].partition("-")[0])):
            with suppress(OSError):
                file.unlink()


def _alive(process: int) -> bool:
    if os.name != "posix" or process == os.getpid():  # elsewhere signal 0 ends a process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it. Returns the new ones, the innermost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        _remove(missing)
        raise
    return missing


def _remove(folders: list[Path]) -> None:
    """Remove folders that were made for a write that failed. A folder that holds something stays."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
