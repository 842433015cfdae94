"""Made images and small networks for the tests of the image experiments."""

from pathlib import Path

import numpy as np

TEMPLATE = '''
import torch
from torch import nn


class Split(nn.Module):
    """Features and classifier, as VGG and AlexNet have them."""

    def __init__(self, outputs=5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()
        )
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(48, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, outputs))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Residual(nn.Module):
    """Two convolutions whose outputs are added, and one before them."""

    def __init__(self, outputs=5):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv3, self.bn3 = nn.Conv2d(10, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, outputs)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(torch.relu(x + self.bn3(self.conv3(y))).mean((2, 3)))
'''


def nets(folder: Path) -> Path:
    """A file of two small networks."""
    file = folder / "nets.py"
    file.write_text(TEMPLATE)
    return file


def picture(path: Path, rng: np.random.Generator, colour: int, size=(20, 24)) -> None:
    """Noise with one strong colour."""
    from PIL import Image

    pixels = rng.integers(0, 60, (*size, 3)).astype(np.uint8)
    pixels[..., colour % 3] += np.uint8(120)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def classes(root: Path, names, per_class: int, seed: int = 0) -> Path:
    """A folder of class folders, the classes of different colours."""
    rng = np.random.default_rng(seed)
    for colour, name in enumerate(names):
        for i in range(per_class):
            picture(root / name / f"{i:03d}.png", rng, colour)
    return root
