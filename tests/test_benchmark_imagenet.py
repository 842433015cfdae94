"""The photographs that `benchmarks.imagenet` reads are those that it made: the middle of each, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.imagenet import make, photographs


def test_photographs_are_made_and_read(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "tars"
    for label in range(3):
        (source / str(label)).mkdir(parents=True)
        for number in range(5):
            pixels = np.full((256, 400, 3), 255, np.uint8)  # white, and a middle of one colour
            pixels[:, 80:320] = (10 * label, 10 * number, 7)
            Image.fromarray(pixels).save(source / str(label) / f"ILSVRC2012_val_0000{number}.png")
    make(source, folder, 3)
    found = photographs(folder, 3)
    assert found.shape == (3, 5, 3, 224, 224)
    for label in range(3):
        for number in range(5):
            wanted = torch.tensor([10 * label, 10 * number, 7], dtype=torch.uint8).view(3, 1, 1).expand(3, 224, 224)
            assert torch.equal(found[label, number], wanted)
    # A photograph half as large is scaled up before its middle is taken.
    Image.fromarray(np.full((128, 200, 3), 50, np.uint8)).save(source / "1" / "ILSVRC2012_val_00002.png")
    make(source, folder, 3)
    assert bool((photographs(folder, 3)[1, 2] == 50).all())
    (source / "2" / "ILSVRC2012_val_00000.png").unlink()
    with pytest.raises(SystemExit, match="holds 4 files, not 5"):
        make(source, folder, 3)
    with pytest.raises(SystemExit, match="15 of 20 photographs: make them by --make"):
        photographs(folder, 4)
