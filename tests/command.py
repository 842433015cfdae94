"""The command line for tests: a small trained network in a file, photographs, and calls of the program."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner, Result

from photos import write_photos
from secateur.cli.app import app
from secateur.data.images import read
from secateur.loop.progress import StepDone
from secateur.models import build
from secateur.results.history import Row

NET = """
from torch import nn

def make(width=8, classes=3):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
    )
"""


class Place:
    """A folder with a network, its weights and photographs."""

    def __init__(self, root: Path) -> None:
        (root / "net.py").write_text(NET)
        self.root, self.net, self.weights = root, f"{root / 'net.py'}:make", str(root / "net.safetensors")
        self.train = str(write_photos(root / "train", per_class=6, size=(20, 18)))
        self.test = str(write_photos(root / "test", per_class=5, size=(18, 20)))
        self.model = [self.net, "--weights", self.weights, "--input-size", "16"]
        self.job = [*self.model, "--images", self.train, "--test", self.test, "--round-to", "1", "--no-latency"]
        self.job += ["--no-report"]


def furnished(root: Path) -> Place:
    """A place whose network was trained on its photographs."""
    place = Place(root)
    x, y = read(place.train, size=16).tensors()
    torch.manual_seed(0)
    model = build(place.net).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    safetensors.torch.save_file(model.state_dict(), place.weights)
    return place


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def succeed(*args: object) -> dict:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output + result.stderr
    return json.loads(result.stdout)


def fail(*args: object, code: int = 1) -> str:
    result = invoke(*args)
    assert result.exit_code == code, result.output + result.stderr
    return result.stderr


def step_done(units: int) -> StepDone:
    return StepDone(Row(1, units, 0.0, 100, 1000, {}))
