"""CIFAR-10 in a form that travels: mosaics of a thousand images as lossless WebP, 4.4 bits a value instead of 8.

    python -m benchmarks.cifar FOLDER OUT     # cifar-10-batches-bin/ → OUT/cifar10-0.webps and -1.webps, checked
    python -m benchmarks.cifar OUT FOLDER     # and back again
    python -m benchmarks.cifar FOLDER cifar10-small.npz     # the first 1000 test and the first 1000 training images

Each piece is a tar file. `read(OUT)` gives the images and labels back, bit for bit. The test images come first.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

NAMES = ("test_batch", *(f"data_batch_{i}" for i in range(1, 6)))
PER_MOSAIC, PER_ROW, PIECES = 1000, 40, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what the published weights were trained with


def raw(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """All images (N, 3, 32, 32) and labels of the official binary files, the 10,000 of the test first."""
    rows = np.concatenate([np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in NAMES])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _mosaic(images: np.ndarray) -> np.ndarray:
    grid = images.reshape(-1, PER_ROW, 3, 32, 32).transpose(0, 3, 1, 4, 2)
    return np.ascontiguousarray(grid.reshape(-1, PER_ROW * 32, 3))


def _images(mosaic: np.ndarray) -> np.ndarray:
    grid = mosaic.reshape(-1, 32, PER_ROW, 32, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid.reshape(-1, 3, 32, 32))


def pack(folder: Path, out: Path) -> None:
    """Write the pieces. What is there already is kept."""
    images, labels = raw(folder)
    out.mkdir(parents=True, exist_ok=True)
    each = -(-len(images) // PER_MOSAIC // PIECES)
    for piece in range(PIECES):
        path = out / f"cifar10-{piece}.webps"
        if path.exists():
            continue
        half = path.with_suffix(".part")
        with tarfile.open(half, "w") as archive:
            for number in range(piece * each, min((piece + 1) * each, len(images) // PER_MOSAIC)):
                chosen = slice(number * PER_MOSAIC, (number + 1) * PER_MOSAIC)
                made = io.BytesIO()
                Image.fromarray(_mosaic(images[chosen])).save(made, "WEBP", lossless=True, quality=100, method=4)
                for name, content in ((f"{number}.webp", made.getvalue()), (f"{number}.labels", labels[chosen])):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(bytes(content)))
        half.rename(path)
    again, known = read_bytes(out)
    assert np.array_equal(again, images), "the images are not what they were"
    assert np.array_equal(known, labels), "the labels are not what they were"


def unpack(folder: Path, out: Path) -> None:
    """Write the official binary files again."""
    images, labels = read_bytes(folder)
    rows = np.concatenate([labels[:, None], images.reshape(len(images), -1)], 1)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in zip(NAMES, np.split(rows, len(NAMES)), strict=True):
        part.tofile(out / f"{name}.bin")


def small(folder: Path, out: Path, count: int = 1000) -> None:
    """Write the first test images of the official binary files, and as many training images behind them."""
    images, labels = raw(folder)
    chosen = np.r_[:count, 10_000 : 10_000 + count]
    np.savez_compressed(out, images=images[chosen], labels=labels[chosen])


def read_bytes(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """All images and labels of the pieces, the test first."""
    images, labels = {}, {}
    for path in sorted(folder.glob("cifar10-*.webps")):
        with tarfile.open(path) as archive:
            for entry in archive:
                number, kind = entry.name.split(".")
                content = archive.extractfile(entry).read()
                if kind == "labels":
                    labels[int(number)] = np.frombuffer(content, np.uint8)
                else:
                    images[int(number)] = _images(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    if sorted(images) != list(range(60)):
        raise SystemExit(f"{folder} holds {len(images)} of 60 mosaics: bring every piece.")
    return np.concatenate([images[i] for i in range(60)]), np.concatenate([labels[i] for i in range(60)])


def read(folder: Path, device: str = "cpu") -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images as inputs, normalised, and their labels. A decoded copy is kept beside the pieces."""
    cache = folder / "cifar10.npz"
    if not cache.exists():
        images, labels = raw(folder) if (folder / "test_batch.bin").exists() else read_bytes(folder)
        half = folder / f"cifar10.{id(images)}.part"
        with half.open("wb") as file:
            np.savez(file, images=images, labels=labels)
        half.rename(cache)
    with np.load(cache) as kept:
        images, labels = torch.from_numpy(kept["images"]), torch.from_numpy(kept["labels"]).long()
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (MEAN, STD))
    x, y = (images.to(device).float() / 255 - mean) / std, labels.to(device)
    return (x[10_000:], y[10_000:]), (x[:10_000], y[:10_000])


if __name__ == "__main__":
    source, goal = map(Path, sys.argv[1:3])
    if goal.suffix == ".npz":
        small(source, goal)
    else:
        (pack if (source / "test_batch.bin").exists() else unpack)(source, goal)
