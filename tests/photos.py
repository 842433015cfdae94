"""Made photographs for tests: class folders of small images that differ in colour."""

from __future__ import annotations

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
