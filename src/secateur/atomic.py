"""Files that appear whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, to be written in the block. It takes the place of `path` if nothing is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield staged
        sync(staged)
        os.replace(staged, path)
        sync(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def write(path: Path, content: bytes) -> Path:
    """Write or replace a file."""
    with replacing(path) as staged:
        staged.write_bytes(content)
    return path


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
