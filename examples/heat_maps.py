"""Where a network looks: a heat map for the predicted class of each picture.

    python examples/heat_maps.py --weights resnet50.safetensors --out maps cat.png coffee.png

The weights are a ResNet-50 state dict in safetensors; `--caffe` for the original strides, in the first convolution.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

import secateur as sc

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def picture(path: Path) -> torch.Tensor:
    """The middle square of a picture, normalised."""
    image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = np.array(image.crop((left, top, left + side, top + side)).resize((224, 224)))
    return ((torch.from_numpy(square) / 255 - MEAN) / STD).permute(2, 0, 1)[None]


def main() -> None:
    """Explain each picture and write it beside its heat map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="+", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--caffe", action="store_true")
    parser.add_argument("--composite", default="alpha1beta0")
    parser.add_argument("--out", type=Path, default=Path("maps"))
    options = parser.parse_args()
    net = torchvision.models.resnet50()
    if options.caffe:
        for layer in (net.layer2, net.layer3, net.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in load_file(options.weights).items()})
    net.eval()
    options.out.mkdir(parents=True, exist_ok=True)
    names = torchvision.models.ResNet50_Weights.DEFAULT.meta["categories"]
    for path in options.pictures:
        relevance = sc.explain(net, picture(path), composite=options.composite)
        top = int(relevance.output.argmax())
        relevance.plot(options.out / f"{path.stem}.png")
        print(f"{path.name}: {names[top]}; {relevance.conservation.input / relevance.conservation.start:.4f} of the "
              f"relevance arrives at the picture")  # fmt: skip


if __name__ == "__main__":
    main()
