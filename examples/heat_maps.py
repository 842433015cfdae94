"""Where a network looks: a heat map for the predicted class of each picture.

    python examples/heat_maps.py                                        # generated pictures, a small network, seconds
    python examples/heat_maps.py --weights resnet50.safetensors --out maps cat.png coffee.png

The weights are the state dict of a ResNet-50 in safetensors. Give `--caffe` if the network was trained with
strides in the first convolution of each block, as the original ResNet was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import secateur as sc
import shapes
from secateur.data.images import read

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def picture(path: Path) -> torch.Tensor:
    """The middle square of a picture, normalised."""
    image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = np.array(image.crop((left, top, left + side, top + side)).resize((224, 224)))
    return ((torch.from_numpy(square) / 255 - MEAN) / STD).permute(2, 0, 1)[None]


def resnet50(weights: Path, caffe: bool) -> nn.Module:
    """ResNet-50 with weights from a file."""
    net = torchvision.models.resnet50()
    if caffe:
        for layer in (net.layer2, net.layer3, net.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in load_file(weights).items()})
    return net.eval()


def small_network(folder: Path) -> nn.Module:
    """A network that tells crosses, discs and squares apart, trained in seconds."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    return shapes.train(net, *read(shapes.write(folder, 60, seed=1), size=32).tensors(), epochs=25)


def main() -> None:
    """Explain each picture and write it beside its heat map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--caffe", action="store_true")
    parser.add_argument("--composite", default="alpha1beta0")
    parser.add_argument("--out", type=Path, default=Path("maps"))
    options = parser.parse_args()
    if options.weights is None:
        net, names = small_network(options.out / "train"), list(shapes.KINDS)
        photos = read(shapes.write(options.out / "test", 2, seed=2), size=32)
        titles = [f"{path.parent.name}-{path.stem}" for path in photos.paths]
        inputs = list(zip(titles, photos.tensors()[0].split(1), strict=True))
    else:
        net = resnet50(options.weights, options.caffe)
        names = torchvision.models.ResNet50_Weights.DEFAULT.meta["categories"]
        inputs = [(path.stem, picture(path)) for path in options.pictures]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, x in inputs:
        relevance = sc.explain(net, x, composite=options.composite)
        relevance.plot(options.out / f"{name}.png")
        print(f"{name}: {names[int(relevance.output.argmax())]}; "
              f"{relevance.conservation.input / relevance.conservation.start:.4f} of the relevance arrives at the "
              f"picture")  # fmt: skip


if __name__ == "__main__":
    main()
