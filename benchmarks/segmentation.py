"""A U-Net and torchvision's DeepLab on real masks: mean overlap (mIoU) before, and at half of the MACs.

    python -m benchmarks.segmentation --coco coco128_yolo --device cuda
    python -m benchmarks.segmentation --coco coco128_yolo --seconds 20 --side 64 --net unet

Trained for some time from scratch on the 100 training images with masks, into the most frequent classes of these and
"everything else"; pixels without a label do not count. Measured on the 100 validation images. Then half of the MACs
leave, scored on 32 training images: without a repair, with one, and after a recovery in a tenth of the time.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn

import secateur as sc
from benchmarks.beyond import UNet
from secateur.criteria import LRP, Segmentation, Taylor, Weight

_NONE = 255


class Deep(nn.Module):
    """torchvision's DeepLab on MobileNetV3, returning its logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        make = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large
        self.net = make(weights=None, weights_backbone=None, num_classes=classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]  # type: ignore[no-any-return]


def read(root: Path, part: str, side: int) -> tuple[Tensor, Tensor]:
    """Squares of the images and of their masks."""
    images, masks = [], []
    for file in sorted((root / "semantic_segmentation/masks" / part).glob("*.png")):
        picture = Image.open(root / "images" / part / f"{file.stem}.jpg").convert("RGB").resize((side, side))
        mask = Image.open(file).resize((side, side), Image.Resampling.NEAREST)
        images.append(torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255)
        masks.append(torch.from_numpy(np.asarray(mask).astype(np.int64)))
    return (torch.stack(images) - 0.45) / 0.25, torch.stack(masks)


def train(net: nn.Module, x: Tensor, y: Tensor, seconds: float, rate: float) -> nn.Module:
    """Cross-entropy on crops, flipped half of the time."""
    net, generator, begin = net.train(), torch.Generator().manual_seed(0), time.time()
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=1e-3)
    while (spent := time.time() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - spent / seconds)
        index = torch.randint(len(x), (16,), generator=generator).to(x.device)
        top, left, size = (int(torch.randint(x.shape[2] // 4 + 1, (), generator=generator)) for _ in range(3))
        high = x.shape[2] - max(top, left, size)
        a, b = (t[index][..., top : top + high // 32 * 32, left : left + high // 32 * 32] for t in (x, y))
        if float(torch.rand((), generator=generator)) < 0.5:
            a, b = a.flip(-1), b.flip(-1)
        loss = F.cross_entropy(net(a), b, ignore_index=_NONE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


@torch.no_grad()
def overlap(net: nn.Module, x: Tensor, y: Tensor, classes: int) -> float:
    """mIoU over the classes."""
    counts = torch.zeros(2, classes, device=x.device)
    for a, b in zip(x.split(16), y.split(16), strict=True):
        found, known = net(a).argmax(1), b != _NONE
        for c in range(classes):
            mine, true = (found == c) & known, b == c
            counts[:, c] += torch.stack([(mine & true).sum(), (mine | true).sum()])
    return float((counts[0] / counts[1].clamp_min(1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coco", type=Path, required=True, help="the folder of lightly-ai/coco128_yolo")
    parser.add_argument("--net", choices=["unet", "deeplab"], nargs="*", default=["unet", "deeplab"])
    parser.add_argument("--seconds", type=float, default=120.0, help="of training")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--classes", type=int, default=5, help="frequent ones, beside everything else")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the MACs")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    (x, y), (tx, ty) = (read(options.coco, part, options.side) for part in ("train2017", "val2017"))
    numbers = Counter(int(c) for c in y.flatten()[::7].tolist() if c not in (0, _NONE))
    table = torch.zeros(256, dtype=torch.int64)
    for place, (c, _) in enumerate(numbers.most_common(options.classes)):
        table[c] = place + 1
    table[0] = table[_NONE] = _NONE
    x, y, tx, ty = (t.to(options.device) for t in (x, table[y], tx, table[ty]))
    classes = options.classes + 1
    for name in options.net:
        torch.manual_seed(0)
        net = (UNet(classes) if name == "unet" else Deep(classes)).to(options.device)
        train(net, x, y, options.seconds, 3e-3 if name == "unet" else 1e-3)
        print(
            f"{name}: mIoU {overlap(net, tx, ty, classes):.4f} (training images {overlap(net, x, y, classes):.4f})",
            flush=True,
        )
        for criterion in (LRP(start=Segmentation()), Taylor(loss=Segmentation()), Weight()):
            for repair in (None, "best"):
                begin = time.time()
                result = sc.prune(
                    net, (x[:32], y[:32]), criterion, keep={"macs": options.keep}, repair=repair, progress=False
                )
                seconds, share = time.time() - begin, result.cost_after.macs / result.cost_before.macs
                small = result.model
                print(
                    f"  {criterion.name}, repair {repair}, {100 * share:.0f} % of the MACs: mIoU "
                    f"{overlap(small, tx, ty, classes):.4f} ({seconds:.0f} s)",
                    flush=True,
                )
            trained = train(copy.deepcopy(small), x, y, options.seconds / 10, 3e-4)
            print(
                f"  {criterion.name}, then a tenth of the training: mIoU {overlap(trained, tx, ty, classes):.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
