"""Generated pictures in class folders: crosses, discs and squares. The other examples use them if you give no images.

python examples/shapes.py --out shapes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

KINDS = ("cross", "disc", "square")


def draw(kind: str, rng: np.random.Generator, side: int = 40) -> Image.Image:
    """One shape at a random place on a noisy background."""
    image = Image.fromarray(rng.integers(60, 130, (side, side, 3), dtype=np.uint8))
    pen, colour = ImageDraw.Draw(image), tuple(int(c) for c in rng.integers(150, 256, 3))
    r, (x, y) = int(rng.integers(7, 11)), (int(v) for v in rng.integers(13, 27, 2))
    if kind == "disc":
        pen.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=3)
    elif kind == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), outline=colour, width=3)
    else:
        pen.line((x - r, y - r, x + r, y + r), fill=colour, width=3)
        pen.line((x - r, y + r, x + r, y - r), fill=colour, width=3)
    return image


def write(folder: Path, per_class: int, seed: int) -> Path:
    """A folder of class folders."""
    rng = np.random.default_rng(seed)
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            draw(kind, rng).save(folder / kind / f"{i:03d}.png")
    return folder


def train(net: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> nn.Module:
    """Train with Adam for a few seconds. The network is returned in evaluation mode."""
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    net.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return net.eval()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("shapes"))
    parser.add_argument("--per-class", type=int, default=10)
    options = parser.parse_args()
    print(f"{3 * options.per_class} pictures in {write(options.out, options.per_class, seed=0)}")


if __name__ == "__main__":
    main()
