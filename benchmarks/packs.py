"""Data sets and weights in tar files of some MiB each, for a machine that takes so much at a time.

    python -m benchmarks.packs --data DATA --out PACKS --most 53
    python -m benchmarks.packs --data DATA --unpack PACKS/00-cifar-0of2.tar

DATA is the folder that `benchmarks.portions` reads, and the packs are in the order in which it needs them. They may be
unpacked in any order. When a folder is complete, an empty file `NAME.ready` is written beside it.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import cifar

#: What travels together, the most important first.
SETS = {
    "cifar": ("cifar", "resnet56_cifar10.safetensors"),
    "features": ("vgg16_features.safetensors", "alexnet_features.safetensors", "efficientnet_lite0.safetensors"),
    "resnet50": ("resnet50.safetensors",),
    "flowers": ("flowers",),
    "scene15": ("scene15",),
    "cats_dogs": ("cats_dogs",),
    "birds": ("birds",),
    "cars": ("cars",),
    "imagenet": ("imagenet",),
}
#: A file in a tar file has a header, with two blocks more for a long name, and fills whole blocks.
_BLOCK, _HEADER, _END = 512, 3 * 512, 20 * 512
_BINARY = "cifar-10-batches-bin"


def pack(data: Path, out: Path, most: float) -> Iterator[Path]:
    """Write the packs, none above `most` MiB, and yield their paths. Sets that are not there are left out."""
    out.mkdir(parents=True, exist_ok=True)
    there = {name: files for name, parts in SETS.items() if (files := list(_files(data, parts)))}
    number = 0
    for name, files in there.items():
        groups = list(_shared(files, most * 2**20))
        for index, group in enumerate(groups):
            path = out / f"{number:02}-{name}-{index}of{len(groups)}.tar"
            with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
                for file in group:
                    archive.add(file, file.relative_to(data))
            yield path
            number += 1


def _files(data: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """All files of a set, or none if a part is missing. Decoded copies beside CIFAR's pieces stay."""
    places = [data / part for part in parts]
    for place in places if all(place.exists() for place in places) else ():
        files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
        yield from (path for path in files if path.suffix not in (".npz", ".part"))


def _shared(files: list[Path], most: float) -> Iterator[list[Path]]:
    """The files in groups, in order, each of which fits."""
    room = most - _END
    group, left = list[Path](), room
    for file in files:
        size = _HEADER + -(-file.stat().st_size // _BLOCK) * _BLOCK
        if size > room:
            raise SystemExit(f"{file} alone is larger than {most / 2**20:g} MiB: raise --most.")
        if size > left:
            yield group
            group, left = [], room
        group.append(file)
        left -= size
    yield group


def unpack(path: Path, data: Path) -> None:
    """Put the files of a pack in their places. Each appears whole; a set is ready when its last pack has come."""
    _, name, which = path.stem.split("-")
    index, count = map(int, which.split("of"))
    come = data / ".come" / name
    half = come / f"{index}.part"
    half.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path) as archive:
        archive.extractall(half, filter="data")
    for file in [file for file in half.rglob("*") if file.is_file()]:
        place = data / file.relative_to(half)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)
    shutil.rmtree(half)
    (come / str(index)).touch()
    if all((come / str(i)).exists() for i in range(count)):
        if name == "cifar":
            cifar.unpack(data / name, data / _BINARY)
            (data / f"{_BINARY}.ready").touch()
        for part in SETS[name]:
            (data / f"{part}.ready").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("packs"))
    parser.add_argument("--most", type=float, default=53.0, help="the largest pack, in MiB")
    parser.add_argument("--unpack", type=Path, nargs="*", help="packs that have come, instead of writing them")
    given = parser.parse_args()
    if given.unpack is None:
        for made in pack(given.data, given.out, given.most):
            print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB", flush=True)
    else:
        for one in given.unpack:
            unpack(one, given.data)
