"""Atomic writes: all or nothing, ordinary permissions, no litter."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from secateur.atomic import naming_failures, replacing, write, write_together
from secateur.errors import SecateurError


def umasked(mode: int) -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


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


def test_several_files_are_replaced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "model"
    for content in (b"one", b"two"):
        write_together(target, {"a.json": content, "b.bin": content})
        assert {file.name: file.read_bytes() for file in target.iterdir()} == {"a.json": content, "b.bin": content}
    assert stat.S_IMODE(target.stat().st_mode) == umasked(0o777)
    assert {stat.S_IMODE(file.stat().st_mode) for file in target.iterdir()} == {umasked(0o666)}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_together(target, {"a.json": b"three", "b.bin": b"three"})
    with pytest.raises(OSError, match="No space left"):
        write_together(tmp_path / "other" / "model", {"a.json": b"three"})
    assert sorted(os.listdir(target)) == ["a.json", "b.bin"]
    assert (target / "a.json").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["deep"]


def test_of_two_writers_the_last_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins when the first has replaced one of its files."""
    replace = os.replace
    second = threading.Thread(target=write_together, args=(tmp_path, {"a.json": b"two", "b.bin": b"two"}))

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        if threading.current_thread() is not second and target.name == "a.json":
            second.start()
            second.join(0.3)  # without a lock, this is enough to do everything in between

    monkeypatch.setattr(os, "replace", replaced)
    write_together(tmp_path, {"a.json": b"one", "b.bin": b"one"})
    second.join()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.json": b"two", "b.bin": b"two"}


def test_leftovers_of_killed_processes_are_removed_by_the_next_write(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left, other = tmp_path / f".a.{int(dead.stdout)}.txt", tmp_path / f".a.{os.getppid()}.txt"
    for file in (left, other, tmp_path / ".a.mine.txt"):
        file.write_text("half")
    write(tmp_path / "a.txt", "new")
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, ".a.mine.txt", "a.txt"])


def test_what_the_system_says_becomes_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SecateurError, match=r"b could not be written: .* Fix") as found,
        naming_failures("b"),
    ):
        write(tmp_path / "file" / "b", "new")
    assert found.value.where == "b"


def test_threads_do_not_mix_what_they_write(tmp_path: Path) -> None:
    """Each one's file is whole whenever it is looked at, and no write fails."""
    texts, wrong = [str(i).encode() * 200_000 for i in range(4)], []

    def work(text: bytes) -> None:
        try:
            for _ in range(10):
                if write(tmp_path / "a.txt", text).read_bytes() not in texts:
                    wrong.append("mixed")
        except OSError as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert os.listdir(tmp_path) == ["a.txt"]
