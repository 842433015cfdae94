"""Made photographs for tests: class folders of small images that differ in colour."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {
    "red": (200, 40, 30),
    "green": (40, 190, 60),
    "blue": (30, 60, 210),
    "cat": (200, 60, 60),
    "dog": (60, 60, 200),
}


def write_photos(
    root: Path, classes: Sequence[str] = ("red", "green", "blue"), per_class: int = 4, size: tuple[int, int] = (40, 32)
) -> Path:
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        folder = root / name
        folder.mkdir(parents=True)
        colour = COLOURS.get(name, (60 * label + 20, 128, 255 - 60 * label))
        for i in range(per_class):
            noise = rng.integers(-25, 25, (size[1], size[0], 3))
            pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    return root


def camera_notes(orientation: int) -> bytes:
    """EXIF as some cameras write it: with the version of GPS as text, which pillow reads but cannot write."""
    place = 8 + 2 + 2 * 12 + 4  # of the second directory, after a header and a directory with two entries
    first = struct.pack("<HHHII", 2, 0x0112, 3, 1, orientation) + struct.pack("<HHIII", 0x8825, 4, 1, place, 0)
    second = struct.pack("<HHHI4sI", 1, 0, 2, 4, b"\2\3\0\0", 0)
    return b"Exif\0\0" + struct.pack("<2sHI", b"II", 42, 8) + first + second
