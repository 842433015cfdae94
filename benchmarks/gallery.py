"""Networks before and after pruning, as pictures for docs/results/gallery.md.

    python -m benchmarks.gallery --data DIR --pictures skimage/data --out docs/images

`skimage/data` comes with scikit-image; chelsea.png, coffee.png and rocket.jpg are used. DIR is that of
`benchmarks.criteria`. The photographs are all the data: crops of them score the units and repair, at half of the MACs.
The digits are scikit-learn's, the sentences our own. A network whose picture is there already is left out.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import secateur as sc
from benchmarks import cifar
from benchmarks.criteria import Networks
from benchmarks.faithfulness import _fitted, _through, resnet50, view_of
from benchmarks.resnet56 import resnet56
from secateur.analysis.reasons import Viewer, compared
from secateur.demo import Digits, train
from secateur.relevance.explain import bound, visible
from secateur.repair import Repair
from secateur.report.changes import Passage, pairs
from secateur.report.document import Page

PHOTOGRAPHS = {"chelsea.png": "cat", "coffee.png": "coffee", "rocket.jpg": "rocket"}
#: Outputs of ImageNet: cats; espresso and cup; missile, projectile and space shuttle.
IMAGENET = {"cat": [281, 282, 283, 284, 285], "coffee": [967, 968], "rocket": [657, 744, 812]}
CROPS, HALF = 6, {"macs": 0.5}
GOOD = (
    "a warm and funny story that you will love", "a brilliant film with a wonderful cast", "moving , honest and clever",
    "the best picture of the year",
)  # fmt: skip
BAD = (
    "a dull and lifeless story that nobody needs", "a terrible film with a wooden cast",
    "boring , false and far too long", "the worst picture of the year",
)  # fmt: skip


@dataclass(frozen=True)
class Exhibit:
    """A network, samples to score and repair it on, samples to show, and what these are."""

    title: str
    model: nn.Module
    data: Any
    shown: tuple[Any, Tensor]
    names: tuple[str, ...]


def photograph(path: Path, side: int, crops: int, mean: Any, std: Any) -> Tensor:
    """The middle square of a photograph, then crops of it, normalised."""
    image = Image.open(path).convert("RGB")
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    choose, boxes = np.random.default_rng(0), [(left, top, left + short, top + short)]
    for _ in range(crops):
        size = int(short * choose.uniform(0.7, 1))
        x, y = (int(choose.integers(0, short - size + 1)) for _ in range(2))
        boxes.append((left + x, top + y, left + x + size, top + y + size))
    small = [np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box=box)) for box in boxes]
    pixels = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2) / 255
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


class Rooms:
    """One method per network."""

    def __init__(self, data: Path, pictures: Path) -> None:
        self.data, self.pictures = data, pictures

    def _photographs(self, side: int, mean: Any, std: Any, files: Any = tuple(PHOTOGRAPHS)) -> tuple[Any, Any]:
        made = [photograph(self.pictures / name, side, CROPS, mean, std) for name in files]
        x, y = torch.cat([part[1:] for part in made]), torch.arange(len(made)).repeat_interleave(CROPS)
        return (x, y), (torch.stack([part[0] for part in made]), torch.arange(len(made)))

    def _imagenet(self, title: str, model: nn.Module, name: str) -> Exhibit:
        view = view_of(name)
        data, shown = self._photographs(224, view.mean, view.std)
        narrow = sc.specialize(model, IMAGENET, data[0][:2], merge="mean").eval()
        return Exhibit(title, narrow, data, shown, tuple(PHOTOGRAPHS.values()))

    def resnet50(self) -> Exhibit:
        return self._imagenet("ResNet-50", resnet50(self.data), "resnet50")

    def efficientnet_lite0(self) -> Exhibit:
        import timm

        net = timm.create_model("tf_efficientnet_lite0").eval()
        state = Networks(self.data, "cpu", 1, 1)._state("efficientnet_lite0")
        net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
        return self._imagenet("EfficientNet-Lite0", net, "efficientnet_lite0")

    def alexnet(self) -> Exhibit:
        from torchvision import models

        features, view = models.alexnet().features, view_of("alexnet")
        state = Networks(self.data, "cpu", 1, 1)._state("alexnet_features")
        features.load_state_dict({k[9:]: v.float() for k, v in state.items()})
        data, shown = self._photographs(224, view.mean, view.std)
        body = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        net = nn.Sequential(*body, _fitted(_through(body, data[0]), data[1])).eval()
        narrow = sc.specialize(net, [0, 1, 2], data[0][:2]).eval()
        return Exhibit("AlexNet", narrow, data, shown, tuple(PHOTOGRAPHS.values()))

    def resnet56(self) -> Exhibit:
        net = resnet56(self.data / "resnet56_cifar10.safetensors")
        data, shown = self._photographs(32, cifar.MEAN, cifar.STD, ("rocket.jpg", "chelsea.png"))
        narrow = sc.specialize(net, [0, 3], data[0][:2]).eval()
        return Exhibit("ResNet-56 of CIFAR-10", narrow, data, shown, ("airplane", "cat"))

    def digits(self) -> Exhibit:
        digits, classes = Digits.load(), [0, 1, 4, 7]
        net = sc.specialize(train(digits), classes, digits.of(classes)[0][:2]).eval()
        x, y = digits.of(classes)
        first = torch.tensor([int(torch.nonzero(y == c)[0]) for c in (0, 2, 3)])
        shown, names = (x[first], y[first]), ("0", "1", "4", "7")
        return Exhibit("A residual network of digits", net, digits.of(classes, 10), shown, names)

    def minilm(self) -> Exhibit:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.data / "minilm")
        net = Networks(self.data, "cpu", 1, 1)._minilm()[0]
        found = self.tokenizer([*GOOD, *BAD], padding=True, return_tensors="pt")
        inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
        y = torch.tensor([1] * len(GOOD) + [0] * len(BAD))
        few = torch.tensor([0, len(GOOD)])
        shown = {name: values[few] for name, values in inputs.items()}, y[few]
        return Exhibit("MiniLM, sentiment", net, [(inputs, y)], shown, ("bad", "good"))


def hang(exhibit: Exhibit, path: Path, tokenizer: Any) -> str:
    """Prune, explain the samples before and after, draw. Returns a line about it."""
    result = sc.prune(exhibit.model, exhibit.data, keep=HALF, repair=Repair(copies=2), progress=False)
    viewer = Viewer(exhibit.model, exhibit.shown)
    after = viewer.look(result.model)
    found = compared(viewer, exhibit.model, result.model, after, faithful=False)
    right = [seen.output.argmax(1).tolist() == viewer.y.tolist() for seen in (viewer.before, after)]
    if isinstance(viewer.x, Tensor):
        figure = _pictures(viewer.x, viewer.before.heat, after.heat)
    else:
        figure = _words(pairs(viewer, after, exhibit.names, Page(tokenizer=tokenizer))[1])
    figure.savefig(path, dpi=110, facecolor="white", pil_kwargs={"quality": 85} if path.suffix == ".jpg" else {})
    cost = f"{result.cost_before.macs / 1e6:.4g} → {result.cost_after.macs / 1e6:.4g} M MACs"
    return f"{exhibit.title}: {cost}; drift {float(found):.2f} ({found.by_class}); all right before, after: {right}"


def _pictures(x: Tensor, before: Tensor, after: Tensor) -> Figure:
    figure = Figure(figsize=(8.1, 1.0), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0, hspace=0)
    axes = figure.subplots(1, 9)
    for axis in axes:
        axis.set_axis_off()
    for i, (picture, *maps) in enumerate(zip(x, before.detach(), after.detach(), strict=True)):
        axes[3 * i].imshow(visible(picture))
        for axis, heat in zip(axes[3 * i + 1 : 3 * i + 3], maps, strict=True):
            limit = bound(heat.cpu())
            axis.imshow(heat.cpu().numpy(), cmap="seismic", vmin=-limit, vmax=limit)
    return figure


def _words(passages: list[Passage]) -> Figure:
    figure = Figure(figsize=(8.1, 0.4 * 2 * len(passages)))
    lines = [(words, when) for p in passages for words, when in ((p.before, "before"), (p.after, "after"))]
    for row, (words, when) in enumerate(lines):
        height, place = 1 - (row + 0.5) / (2 * len(passages)), 0.09
        figure.text(0.01, height, when, fontsize=9, va="center", color="#555555")
        for word in words:
            colour = [int(value) / 255 for value in word.colour.removeprefix("rgb(").removesuffix(")").split(",")]
            figure.text(place, height, word.text, fontsize=10, va="center", family="monospace",
                        bbox={"facecolor": colour, "edgecolor": "none", "pad": 2})  # fmt: skip
            place += 0.0108 * (len(word.text) + 1)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="jpg")
    parser.add_argument("--networks", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rooms = Rooms(args.data, args.pictures)
    known: dict[str, Callable[[], Exhibit]] = {
        "digits": rooms.digits, "resnet56": rooms.resnet56, "alexnet": rooms.alexnet, "minilm": rooms.minilm,
        "efficientnet_lite0": rooms.efficientnet_lite0, "resnet50": rooms.resnet50,
    }  # fmt: skip
    for name in args.networks or known:
        path = args.out / f"gallery-{name}.{args.kind}"
        if not path.exists():
            print(hang(known[name](), path, getattr(rooms, "tokenizer", None)), flush=True)


if __name__ == "__main__":
    main()
