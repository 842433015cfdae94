"""Your own criterion against four known ones on the same images: which keeps the most accuracy?

    python examples/own_criterion.py

The criterion here scores a unit by how much its mean activation differs between classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import secateur as sc
import shapes
from secateur.data.images import read


def telling(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """How much a unit's mean activation differs between classes. If it is the same for all, the unit says nothing."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    handles = [
        layer.register_forward_hook(lambda _, __, output, name=name: seen[name].append(_means(output)))
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)
    for handle in handles:
        handle.remove()
    labels = torch.cat([targets for _, targets in batches])
    found = {}
    for name, parts in seen.items():
        values = torch.cat(parts)
        classes = torch.stack([values[labels == label].mean(0) for label in labels.unique()])
        found[name] = classes.std(0) / values.std().clamp_min(1e-12)
    return found


def _means(output: Tensor) -> Tensor:
    return output.flatten(2).mean(2) if output.ndim > 2 else output


def main() -> None:
    """Train, compare, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("own-criterion"))
    options = parser.parse_args()
    torch.manual_seed(0)
    training = read(shapes.write(options.out / "train", 60, seed=1), size=32)
    x, y = read(shapes.write(options.out / "test", 30, seed=2), size=32).tensors()
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    shapes.train(net, *training.tensors(), epochs=20)

    def accuracy(model: nn.Module) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    table = sc.compare(
        net, training.draw(10).tensors(), [telling, "lrp", "taylor", "weight", "random"], evaluate=accuracy,
        remove=0.6, schedule=0.1, progress=False,
    )  # fmt: skip
    print(f"unpruned: {accuracy(net):.3f}\n{table}")
    table.to_json(options.out / "comparison.json")


if __name__ == "__main__":
    main()
