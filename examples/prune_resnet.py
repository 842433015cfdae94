"""From a folder of class folders to a smaller ResNet-18, saved and with a report.

    python examples/prune_resnet.py                                     # generated pictures, seconds
    python examples/prune_resnet.py --images photos --weights resnet18.safetensors --outputs 281 207 --size 224

With your own images, `--outputs` gives the ImageNet class of each folder, in the order of the folders' names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

import secateur as sc
import shapes
from secateur.data.images import Photographs, read
from secateur.report import Page


def prepared(options: argparse.Namespace) -> tuple[nn.Module, Photographs, Photographs]:
    """A trained network with one output per folder, images to score on, images to test on."""
    if options.images is None:
        training = read(shapes.write(options.out / "train", 60, seed=1), size=options.size)
        test = read(shapes.write(options.out / "test", 20, seed=2), size=options.size)
        net = torchvision.models.resnet18()
        net.layer3, net.layer4, net.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 3)  # seconds, not minutes
        return shapes.train(net, *training.tensors(), epochs=5), training.draw(10), test
    photos = read(options.images, size=options.size)
    net = torchvision.models.resnet18()
    net.load_state_dict(load_file(options.weights))
    reference = photos.draw(10, at_most=True)
    narrow = sc.specialize(net.eval(), options.outputs, example=reference.tensors()[0][:2])
    return narrow.eval(), reference, photos.without(reference)


def main() -> None:
    """Prune, compare, save, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--outputs", type=int, nargs="*")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--keep", type=float, default=0.5, help="share of the MACs")
    parser.add_argument("--out", type=Path, default=Path("prune-resnet"))
    options = parser.parse_args()
    torch.manual_seed(0)
    net, reference, test = prepared(options)
    x, y = test.tensors()

    def accuracy(model: nn.Module) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    result = sc.prune(net, reference.tensors(), keep={"macs": options.keep}, evaluate=accuracy, progress=False)
    print(result)
    sc.save(result, options.out / "model")
    page = result.report(
        options.out / "report.html", data=(x[:6], y[:6]), classes=reference.classes, page=Page(latency=False)
    )
    print(f"saved: {options.out / 'model'}; report: {page}")


if __name__ == "__main__":
    main()
