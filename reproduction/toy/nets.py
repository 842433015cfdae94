"""The networks of the toy experiment: three hidden layers, trained once and kept in the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.toy.points import CLASSES
from reproduction.toy.recipe import Reading, Recipe
from reproduction.toy.store import digest, get, put
from secateur.running.accuracy import accuracy

# Names of the hidden layers inside the network, in order.
HIDDEN = ("first", "second", "third")


class ToyNet(nn.Sequential):
    """Dense-ReLU-dropout-dense-ReLU-dense(-ReLU)-dense. The published script lacks the last ReLU."""

    def __init__(self, width: int, classes: int, third_relu: bool, dropout: float) -> None:
        super().__init__()
        self.add_module("first", nn.Linear(2, width))
        self.add_module("first_relu", nn.ReLU())
        self.add_module("dropout", nn.Dropout(dropout))
        self.add_module("second", nn.Linear(width, width))
        self.add_module("second_relu", nn.ReLU())
        self.add_module("third", nn.Linear(width, width))
        if third_relu:
            self.add_module("third_relu", nn.ReLU())
        self.add_module("output", nn.Linear(width, classes))


@dataclass(frozen=True)
class Trained:
    """A trained network in evaluation mode, its accuracy on the training set, and a name for its weights."""

    net: ToyNet
    accuracy: float
    seconds: float
    name: str


def trained(name: str, reading: Reading, recipe: Recipe, cache: Path) -> Trained:
    """The network for a set. It is read from the cache if it was trained before by the same recipe on the same data."""
    data = recipe.training(name)
    steps = recipe.steps_for(name)
    settings = [recipe.width, reading.third_relu, recipe.batches, recipe.rate, recipe.momentum, recipe.dropout, steps]
    path = cache / "toy" / f"net-{digest('net 2', name, settings, recipe.root, data.x, data.y)}.safetensors"
    found = get(path)
    if found is None:
        began = time.perf_counter()
        net = _train(name, reading, recipe).eval()
        arrays = {key: value.numpy() for key, value in net.state_dict().items()}
        about: dict[str, Any] = {
            "set": name,
            "reading": reading.name,
            "seconds": time.perf_counter() - began,
            "accuracy": percent_right(net, *data.tensors()),
            "weights": digest(*arrays.values()),
        }
        put(path, arrays, about)
    else:
        arrays, about = found
        net = ToyNet(recipe.width, CLASSES[name], reading.third_relu, recipe.dropout).eval()
        net.load_state_dict({key: torch.from_numpy(value) for key, value in arrays.items()})
    return Trained(net, about["accuracy"], about["seconds"], about["weights"])


def _train(name: str, reading: Reading, recipe: Recipe) -> ToyNet:
    """Train with mini-batches. Rate times steps is that of 10 000 full-batch steps at 0.001, at 1/400 of the cost."""
    x, y = recipe.training(name).tensors()
    size = len(x) // recipe.batches
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.root)
        net = ToyNet(recipe.width, CLASSES[name], reading.third_relu, recipe.dropout).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=recipe.rate, momentum=recipe.momentum)
        order = torch.randperm(len(x))
        for step in range(recipe.steps_for(name)):
            place = step % recipe.batches
            if place == 0:
                order = torch.randperm(len(x))
            batch = order[place * size : (place + 1) * size]
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(net(x[batch]), y[batch]))
            optimizer.step()
    return net


def percent_right(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent of points that the network puts into their class."""
    return 100 * accuracy(net, (x, y), len(x)).overall
