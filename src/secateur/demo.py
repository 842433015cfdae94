"""The demo on scikit-learn's digits: train a small residual network, specialise and prune it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.analysis.specialize import specialize
from secateur.loop.compare import compare
from secateur.results.comparison import Comparison
from secateur.running.accuracy import accuracy

CRITERIA = ("lrp", "taylor", "gradient", "weight")
REFERENCE = 10  # images per class, as in the paper


class ResidualDigits(nn.Module):
    """A stem, three residual blocks (the second halves the space), a linear head: 8 x 8 grey images to ten classes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            [_Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 2 * width, 1)]
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class _Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.shortcut = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


@dataclass(frozen=True)
class Digits:
    """Training and test images of the ten digits."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, seed: int = 0) -> Digits:
        """1797 real hand-written digits, which scikit-learn ships; a quarter is held out."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held, rest = order[: len(x) // 4], order[len(x) // 4 :]
        return cls((x[rest], y[rest]), (x[held], y[held]))

    def of(self, classes: list[int], per_class: int | None = None) -> tuple[Tensor, Tensor]:
        """Images of some classes, renumbered from 0: of the test set, or the first `per_class` for training of each."""
        x, y = self.test if per_class is None else self.train
        chosen = [torch.nonzero(y == c).ravel()[:per_class] for c in classes]
        labels = torch.cat([torch.full((len(index),), i) for i, index in enumerate(chosen)])
        return x[torch.cat(chosen)], labels


def train(digits: Digits, epochs: int = 6, seed: int = 0) -> nn.Module:
    """Train the network from scratch; seconds on a laptop.

    Momentum is written out, because the optimizers of torch take longer to import than this takes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ResidualDigits()
        x, y = digits.train
        weights = list(net.parameters())
        moving, steps, step = [torch.zeros_like(weight) for weight in weights], epochs * (len(x) // 64), 0
        for _ in range(epochs):
            for index in torch.randperm(len(x))[: len(x) // 64 * 64].view(-1, 64):
                slopes = torch.autograd.grad(F.cross_entropy(net(x[index]), y[index]), weights)
                step += 1
                rate = 0.1 * min(step / (0.3 * steps), (steps - step) / (0.7 * steps))
                with torch.no_grad():
                    for weight, slope, speed in zip(weights, slopes, moving, strict=True):
                        speed.mul_(0.9).add_(slope).add_(weight, alpha=5e-4)
                        weight.sub_(speed, alpha=rate)
    return net.eval()


@dataclass(frozen=True)
class Demonstration:
    """The specialised network before pruning, and how the criteria compare."""

    network: nn.Module
    whole: float
    narrow: float
    comparison: Comparison


def demonstrate(
    digits: Digits, net: nn.Module, classes: list[int], remove: float = 0.8, step: float = 0.05
) -> Demonstration:
    """Keep some of the ten outputs, then prune by each criterion from ten images per class, without fine-tuning."""
    reference, test = digits.of(classes, REFERENCE), digits.of(classes)
    narrow = specialize(net, classes, reference[0][:2])

    def held_out(model: nn.Module) -> float:
        return accuracy(model, test).overall

    comparison = compare(narrow, reference, CRITERIA, evaluate=held_out, remove=remove, schedule=step, progress=False)
    return Demonstration(narrow, accuracy(net, digits.test).overall, held_out(narrow), comparison)
