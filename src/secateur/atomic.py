"""Atomic writes: whoever reads, even after a crash, finds the old file or the new one. A failure leaves no litter."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield staged
        sync(staged)
        os.replace(staged, target)
        sync(target.parent)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside `path` to fill with files. If all goes well, it takes the place of an older one, if any."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged, old = (target.with_name(f".{target.name}.{kind}{os.getpid()}") for kind in ("", "old."))
    shutil.rmtree(staged, ignore_errors=True)  # of a killed process with the same number
    staged.mkdir()
    try:
        yield staged
        for file in (*staged.iterdir(), staged):
            sync(file)
        if target.exists():
            os.rename(target, old)
        os.rename(staged, target)
        shutil.rmtree(old, ignore_errors=True)
        sync(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder. Some systems cannot open folders."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
