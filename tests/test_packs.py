"""Data in packs: they come in any order, and nothing is read before it is whole."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path

import pytest

from benchmarks import cifar, packs
from benchmarks.portions import commands

MIB = 2**20


def data_of(folder: Path, sizes: dict[str, int]) -> dict[str, bytes]:
    """Files of random bytes, and what is in them."""
    found = {name: random.Random(name).randbytes(size) for name, size in sizes.items()}
    for name, content in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return found


def test_packs_bring_every_file_in_any_order_and_say_when_a_folder_is_whole(tmp_path: Path) -> None:
    sizes = {f"flowers/class {i % 3}/{i}.jpg": 200_000 + i for i in range(12)}
    known = data_of(tmp_path / "here", sizes | {"resnet50.safetensors": 700_000, "scene15/a/b.jpg": 1})
    paths = list(packs.pack(tmp_path / "here", tmp_path / "packs", most=1.0))
    assert all(path.stat().st_size <= MIB for path in paths)
    kinds = [path.stem.split("-")[1] for path in paths]
    assert kinds == ["resnet50", *["flowers"] * 3, "scene15"]  # as few as possible, and in the order of SETS
    there = tmp_path / "there"
    for path in reversed(paths):
        packs.unpack(path, there)
        come = sum((there / name).exists() for name in sizes)
        assert (there / "flowers.ready").exists() == (come == len(sizes))
    assert {name: (there / name).read_bytes() for name in known} == known
    assert not list(there.rglob("*.part"))


def test_many_small_files_with_long_names_fit_too(tmp_path: Path) -> None:
    known = data_of(tmp_path / "here", {f"flowers/{'a class with a long name ' * 5}/{i}.jpg": 500 for i in range(2000)})
    paths = list(packs.pack(tmp_path / "here", tmp_path / "packs", most=1.0))
    assert all(path.stat().st_size <= MIB for path in paths)
    for path in paths:
        packs.unpack(path, tmp_path / "there")
    assert {name: (tmp_path / "there" / name).read_bytes() for name in known} == known


def test_sets_that_lack_a_part_are_left_out(tmp_path: Path) -> None:
    data_of(tmp_path / "here", {"cifar/cifar10-0.webps": 10, "cats_dogs/train/cat/1.jpg": 10})
    paths = list(packs.pack(tmp_path / "here", tmp_path / "packs", most=1.0))
    assert [path.name for path in paths] == ["00-cats_dogs-0of1.tar"]  # no weights of the league's network


def test_cifar_becomes_the_official_files_when_both_pieces_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_of(tmp_path / "here", {"cifar/cifar10-0.webps": 600_000, "cifar/cifar10-1.webps": 600_000})
    data_of(tmp_path / "here", {"cifar/cifar10.npz": 10, "resnet56_cifar10.safetensors": 10})
    called = list[tuple[Path, Path]]()
    monkeypatch.setattr(cifar, "unpack", lambda folder, out: called.append((folder, out)))
    first, second = packs.pack(tmp_path / "here", tmp_path / "packs", most=1.0)
    with tarfile.open(second) as archive:
        assert archive.getnames() == ["cifar/cifar10-1.webps", "resnet56_cifar10.safetensors"]  # no decoded copy
    there = tmp_path / "there"
    packs.unpack(second, there)
    assert not called
    packs.unpack(first, there)
    assert called == [(there / "cifar", there / "cifar-10-batches-bin")]
    assert (there / "cifar-10-batches-bin.ready").exists()


def test_a_file_that_fits_into_no_pack_is_an_error(tmp_path: Path) -> None:
    data_of(tmp_path / "here", {"resnet50.safetensors": 2 * MIB})
    with pytest.raises(SystemExit, match=r"resnet50.safetensors alone is larger than 1 MiB: raise --most"):
        list(packs.pack(tmp_path / "here", tmp_path / "packs", most=1.0))


def test_everything_that_a_portion_reads_is_in_a_set() -> None:
    brought = {part for parts in packs.SETS.values() for part in parts} | {"cifar-10-batches-bin"}
    needed = {need.removesuffix(".ready").split("/")[0] for command in commands() for need in command.needs}
    assert needed - {"{out}"} <= brought
