"""Atomic writes: all or nothing, ordinary permissions, no litter."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from secateur.atomic import replacing, replacing_folder, write


def umasked(mode: int) -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def test_files_are_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    assert write(path, "größer") == path
    assert path.read_text(encoding="utf-8") == "größer"
    write(str(path), b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["a.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == umasked(0o666)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, "new")
    monkeypatch.undo()

    def interrupted() -> None:
        with replacing(path) as staged:
            staged.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_links_stay_links_and_devices_devices(tmp_path: Path) -> None:
    path, link = write(tmp_path / "a.txt", "old"), tmp_path / "link.txt"
    link.symlink_to(path)
    write(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    write(os.devnull, "gone")
    assert not Path(os.devnull).is_file()


def test_the_staged_path_keeps_the_suffix(tmp_path: Path) -> None:
    with replacing(tmp_path / "model.onnx") as staged:
        assert staged.suffix == ".onnx"
        staged.write_bytes(b"")
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_folders_are_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in ("one", "two"):
        with replacing_folder(target) as folder:
            (folder / content).write_text(content)
        assert os.listdir(target) == [content]
    assert stat.S_IMODE(target.stat().st_mode) == umasked(0o777)

    def interrupted() -> None:
        with replacing_folder(target) as folder:
            (folder / "three").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(target) == ["two"]
    assert os.listdir(tmp_path) == ["model"]
