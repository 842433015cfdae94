"""How faithful are heat maps? Our presets and others, judged alike on real networks.

    python -m benchmarks.faithfulness --weights DIR --images imagenette --coco coco128 --out results.jsonl --device cuda
    python -m benchmarks.faithfulness --out results.jsonl --table
    PYTHONPATH=peers python -m benchmarks.faithfulness … --referee 8      # SRG by quantus, and how far both agree

What is in the results already is not measured again; what failed is tried again by the next start. DIR holds
resnet50.safetensors, vgg16_features.safetensors and efficientnet_lite0.safetensors; `imagenette` has the folders
reference/ and test/; `coco128` is lightly-ai/coco128_yolo. Classifiers that the weights lack are fitted on the
reference pictures, as is the transformer: the first half of ResNet-50, then four blocks of attention on 14 × 14 tokens.
`benchmarks.faithfulness_text` is about text.

SRG: the mean probability of the predicted class while the least relevant of 14 × 14 regions are covered first, minus
that while the most relevant are (chance 0, larger is better). Covered regions have the mean colour, or are blurred.
Completeness: how far the map is from adding up to what the method promises. Randomisation: the correlation with the
map of a network whose last layers are random (mean over the last layer, a quarter, half, and all), and with that of
another class; smaller is better. In masks: positive relevance within the object, over its share of the picture.
Sparseness: Gini's coefficient. Sensitivity: how far the map moves at most if the pixels get 2 % of noise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.explainers import PICTURES, Explainer, shuffled
from secateur.analysis.reasons import correlation, regional
from secateur.data.images import read
from secateur.data.views import View

LEVELS = 10
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the layers that are random; 0 is the last one alone
TARGETS = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)
MODELS = ("resnet50", "vgg16", "efficientnet_lite0", "vit")
MEASURES = ("srg", "srg blur", "srg random", "completeness", "weights random", "class random", "in masks", "sparseness",
            "sensitivity", "seconds")  # fmt: skip
#: What COCO calls things, by number, and the outputs of ImageNet that mean the same.
COCO = {
    2: (444, 671), 3: (436, 511, 817, 751), 4: (665, 670), 5: (404, 895), 6: (654, 779, 874), 7: (466, 547, 820),
    8: (555, 569, 867), 9: (472, 554, 625, 814), 10: (920,), 13: (919,), 14: (704,), 15: (703,),
    17: tuple(range(281, 286)), 18: tuple(range(151, 269)), 19: (339,), 20: (348, 349), 21: (345, 346),
    22: (101, 385, 386), 23: tuple(range(294, 298)), 24: (340,), 27: (414,), 28: (879,), 32: (457, 906),
    35: (795,), 37: (430, 522, 574, 722, 805, 852), 39: (429,), 43: (752,), 44: (440, 720, 737, 898, 907),
    47: (504, 968), 50: (910,), 51: (659, 809), 52: (954,), 55: (950,), 56: (937,), 58: (934,), 59: (963,),
    62: (423, 559, 765), 63: (831,), 64: (738,), 65: (564, 516), 67: (532,), 70: (861,), 72: (851,), 73: (620, 681),
    74: (673,), 75: (761,), 76: (508,), 77: (487,), 78: (651,), 79: (766,), 80: (859,), 82: (760,), 85: (409, 892),
    86: (883,), 88: (850,), 89: (589,),
}  # fmt: skip


# -- networks ----------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """Attention and two layers, each beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2, self.first = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.second(F.gelu(self.first(self.norm2(x))))


class Body(nn.Module):
    """Four blocks on 14 × 14 tokens, and a classifier of their mean."""

    def __init__(self, width: int = 192, classes: int = 10) -> None:
        super().__init__()
        self.cut = nn.Conv2d(512, width, 2, 2)
        self.place = nn.Parameter(0.02 * torch.randn(1, 196, width))
        self.blocks = nn.ModuleList(Block(width, 6) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def resnet50(weights: Path) -> nn.Module:
    from torchvision import models

    net = models.resnet50()
    net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in _file(weights, "resnet50").items()})
    for stage in (net.layer2, net.layer3, net.layer4):  # Caffe's strides
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return net.eval()


def _file(weights: Path, name: str) -> dict[str, Tensor]:
    return load_file(weights / f"{name}.safetensors")


def built(name: str, args: argparse.Namespace) -> nn.Module:
    """A trained network on its device."""
    torch.manual_seed(0)
    weights, place = args.weights, args.device
    if name == "resnet50":
        return resnet50(weights).to(place)
    if name == "efficientnet_lite0":
        import timm

        net = timm.create_model("tf_efficientnet_lite0")
        net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in _file(weights, name).items()})
        return net.eval().to(place)
    x, y = pictures(args, "reference", args.reference, "resnet50")
    if name == "vgg16":
        from torchvision import models

        features = models.vgg16().features
        features.load_state_dict({k[9:]: v.float() for k, v in _file(weights, "vgg16_features").items()})
        body = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval().to(place)
        return nn.Sequential(*body, _fitted(_through(body, x), y)).eval()
    full = resnet50(weights).to(place)
    stem = nn.Sequential(full.conv1, full.bn1, full.relu, full.maxpool, full.layer1, full.layer2).eval()
    body = Body().to(place)
    _train(body, torch.cat([_through(stem, x), _through(stem, x.flip(3))]), torch.cat([y, y]), args.epochs)
    return nn.Sequential(stem, body).eval()


@torch.no_grad()
def _through(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(part) for part in x.split(32)])


def _fitted(x: Tensor, y: Tensor) -> nn.Linear:
    """A linear classifier by logistic regression."""
    layer, scale = nn.Linear(x.shape[1], 10).to(x), x.std()
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(x / scale), y) + 1e-3 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.weight /= scale
    return layer


def _train(net: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), 5e-4, weight_decay=0.05)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, steps)
    for _ in range(epochs):
        for index in torch.randperm(len(x), device=x.device).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[index]), y[index], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()


# -- pictures ----------------------------------------------------------------------------------------------------------
def view_of(name: str) -> View:
    return View(224, "squash", *([(0.5,) * 3] * 2 if name == "efficientnet_lite0" else []))


def pictures(args: argparse.Namespace, part: str, per_class: int, name: str) -> tuple[Tensor, Tensor]:
    x, y = read(args.images / part, view=view_of(name)).draw(per_class, at_most=True).tensors(args.device)
    return x[: args.limit], y[: args.limit]


def objects(folder: Path, name: str, device: str) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
    """COCO's pictures whose largest object ImageNet knows: pixels, its mask, and the outputs that mean it."""
    from PIL import Image, ImageDraw

    view, found, masks, meant = view_of(name), [], [], []
    for file in sorted((folder / "instance_segmentation" / "labels").glob("*/*.txt")):
        image = folder / "images" / file.parent.name / f"{file.stem}.jpg"
        shapes: dict[int, list[np.ndarray[Any, Any]]] = {}
        for line in file.read_text().splitlines():
            number, *corners = line.split()
            shapes.setdefault(int(number), []).append(np.array(corners, float).reshape(-1, 2) * 224)
        areas = {}
        for number, polygons in shapes.items():
            picture = Image.new("L", (224, 224))
            for polygon in polygons:
                ImageDraw.Draw(picture).polygon([tuple(point) for point in polygon.tolist()], fill=1)
            areas[number] = np.asarray(picture, bool)
        best = max(areas, key=lambda number: areas[number].sum(), default=None)
        if best not in COCO or not 0.03 < areas[best].mean() < 0.6 or not image.exists():
            continue
        pixels = np.asarray(Image.open(image).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))
        found.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        masks.append(torch.from_numpy(areas[best]))
        meant.append(COCO[best])
    if not found:
        raise FileNotFoundError(f"{folder} has no instance_segmentation/labels of pictures in images")
    return view.evaluation(torch.stack(found).to(device)), torch.stack(masks), meant


# -- measures ----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def probabilities(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([model(part).double().softmax(1) for part in x.split(256)]).gather(1, y[:, None])[:, 0].cpu()


def region_perturbation(model: nn.Module, x: Tensor, y: Tensor, heat: Tensor, cover: Tensor) -> Tensor:
    """The SRG of each picture; regions are replaced by those of `cover`."""
    ranks = regional(heat).argsort(1).argsort(1).view(len(x), 1, 14, 14).to(x.device)
    total = torch.zeros(len(x), dtype=torch.float64)
    for level in range(1, LEVELS + 1):
        count = round(196 * level / (LEVELS + 1))
        for sign, hidden in ((1, ranks < count), (-1, ranks >= 196 - count)):
            mask = F.interpolate(hidden.to(x), x.shape[2:]) > 0
            total += sign * probabilities(model, torch.where(mask, cover, x), y)
    return total / (LEVELS + 1)


def gini(heat: Tensor) -> Tensor:
    size = heat.abs().flatten(1).double().sort(1).values
    n = size.shape[1]
    return ((2 * torch.arange(1, n + 1) - n - 1) * size).sum(1) / (n * size.sum(1)).clamp_min(1e-30)


def in_parts(explain: Explainer, model: nn.Module, x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    parts = [explain(model, a, b) for a, b in zip(x.split(size), y.split(size), strict=True)]
    begun = [part for _, part in parts if part is not None]
    return torch.cat([heat for heat, _ in parts]), torch.cat(begun) if begun else None


def judge(name: str, model: nn.Module, explain: Explainer, args: argparse.Namespace) -> dict[str, float]:
    """All measures of one method on one network."""
    from torchvision.transforms.functional import gaussian_blur

    x, _ = pictures(args, "test", args.samples, name)
    few = slice(0, None, max(1, len(x) // args.few))
    with torch.no_grad():
        y = torch.cat([model(part).argmax(1) for part in x.split(64)])
        classes = model(x[:1]).shape[1]
    if args.coco is not None and classes == 1000:  # before the work: a folder without masks fails here
        seen, masks, meant = (part[: args.limit] for part in objects(args.coco, name, args.device))
    begin = time.perf_counter()
    heat, begun = in_parts(explain, model, x, y, args.batch)
    found = {"seconds": (time.perf_counter() - begin) / len(x), "sparseness": float(gini(heat).mean())}
    for key, cover in (("srg", torch.zeros_like(x)), ("srg blur", gaussian_blur(x, [61, 61], [20.0, 20.0]))):
        found[key] = float(region_perturbation(model, x, y, heat, cover).mean())
    if begun is not None:
        found["completeness"] = float(((heat.flatten(1).sum(1) - begun).abs() / begun.abs()).median())
    a, b, maps = x[few], y[few], heat[few]
    other = (b + 1 + torch.arange(len(b), device=b.device) % (classes - 1)) % classes

    def alike(net: nn.Module, classes: Tensor) -> float:
        return float(correlation(regional(maps), regional(in_parts(explain, net, a, classes, args.batch)[0])).mean())

    found["class random"] = alike(model, other)
    found["weights random"] = float(np.mean([alike(shuffled(model, share), b) for share in SHARES]))
    moved = []
    for seed in range(3):
        noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed)).to(a)
        near = in_parts(explain, model, a + 0.02 * float(a.std()) * noise, b, args.batch)[0]
        moved.append((near - maps).flatten(1).norm(dim=1) / maps.flatten(1).norm(dim=1).clamp_min(1e-30))
    found["sensitivity"] = float(torch.stack(moved).amax(0).mean())
    if args.coco is not None and classes == 1000:
        with torch.no_grad():
            logits = torch.cat([model(part) for part in seen.split(64)])
        y = torch.stack([torch.tensor(m)[logits[i, list(m)].argmax().cpu()] for i, m in enumerate(meant)]).to(x.device)
        heat = in_parts(explain, model, seen, y, args.batch)[0].clamp_min(0).double()
        masks = masks.to(heat.device)
        inside = (heat * masks).sum((1, 2)) / heat.sum((1, 2)).clamp_min(1e-30) / masks.double().mean((1, 2))
        found["in masks"] = float(inside.mean())
    return found


# -- the referee -------------------------------------------------------------------------------------------------------
def refereed(name: str, model: nn.Module, explain: Explainer, args: argparse.Namespace) -> dict[str, float]:
    """SRG by quantus, which chooses its regions itself and tells how much is lost, and ours on the same pictures."""
    import quantus

    x, _ = pictures(args, "test", max(1, args.referee // 10), name)
    x = x[: args.referee]
    with torch.no_grad():
        y = model(x).argmax(1)
    heat = in_parts(explain, model, x, y, args.batch)[0]
    areas = []
    for ranked in (heat.amax() - heat, heat - heat.amin()):  # the least relevant first, the most relevant first
        measure = quantus.RegionPerturbation(
            patch_size=16, regions_evaluation=48, perturb_baseline=0.0, normalise=False, disable_warnings=True
        )
        curves = measure(
            model=model, x_batch=x.cpu().numpy(), y_batch=y.cpu().numpy(), a_batch=ranked[:, None].numpy(),
            device=args.device, softmax=True, batch_size=len(x),
        )  # fmt: skip
        areas.append(np.array([np.mean(curve) for curve in curves]))
    sparse = quantus.Sparseness(normalise=False, disable_warnings=True)(
        model=model, x_batch=x.cpu().numpy(), y_batch=y.cpu().numpy(), a_batch=heat.abs()[:, None].numpy(),
        device=args.device,
    )  # fmt: skip
    return {
        "srg of quantus": float((areas[1] - areas[0]).mean()), "sparseness of quantus": float(np.mean(sparse)),
        "srg here": float(region_perturbation(model, x, y, heat, torch.zeros_like(x)).mean()),
        "sparseness here": float(gini(heat).mean()),
    }  # fmt: skip


# -- results -----------------------------------------------------------------------------------------------------------
def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def table(path: Path) -> None:
    """Results as Markdown, the largest SRG first."""
    rows = list(lines_of(path))
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = {row["method"]: row for row in rows if row["model"] == name}
        keys = [key for key in (*MEASURES, "srg of quantus") if any(key in row for row in mine.values())]
        print(f"\n### {name}\n\n| method | {' | '.join(keys)} |\n|---|{'---:|' * len(keys)}")
        order = sorted(
            mine.values(), key=lambda row: -row.get("srg", -math.inf) - row.get("srg blur", row.get("srg random", 0.0))
        )
        for row in order:
            cells = [f"{row[key]:.3f}" if key in row else "" for key in keys]
            print(f"| {row['method']} | {' | '.join(cells)} |" if "error" not in row else
                  f"| {row['method']} | {row['error'][:60]} |")  # fmt: skip


def keep(path: Path, row: dict[str, Any], measure: Callable[[], dict[str, float]]) -> None:
    """Measure a row, print it and add it to the results."""
    begin = time.perf_counter()
    try:
        row |= measure()
    except Exception as error:  # a peer that cannot do this network is a result too
        row["error"] = f"{type(error).__name__}: {error}"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    print(f"{time.perf_counter() - begin:6.1f} s  {shown}", flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def accuracy(name: str, model: nn.Module, args: argparse.Namespace) -> float:
    """Among the ten classes."""
    x, y = pictures(args, "test", args.samples, name)
    logits = _through(model, x)
    return float(((logits[:, TARGETS] if logits.shape[1] > 10 else logits).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--coco", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--methods", nargs="+", default=list(PICTURES))
    parser.add_argument("--samples", type=int, default=10, help="test pictures of each class")
    parser.add_argument("--reference", type=int, default=30, help="pictures of each class to fit classifiers on")
    parser.add_argument("--few", type=int, default=30, help="pictures for what explains again and again")
    parser.add_argument("--limit", type=int, help="pictures at most, to try things out")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--referee", type=int, default=0, help="pictures that quantus judges")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table(args.out)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    done = {(row["model"], row["method"]) for row in lines_of(args.out) if "error" not in row}
    for name in args.models:
        left = [method for method in args.methods if (name, method) not in done]
        left = [method for method in left if (method == "attention rollout") <= (name == "vit")]
        if not left:
            continue
        model = built(name, args).requires_grad_(False)
        print(f"{name}: {100 * accuracy(name, model, args):.1f} % among ten classes", flush=True)
        judged = refereed if args.referee else judge
        for method in left:
            row = {"model": name, "method": method}
            keep(args.out, row, partial(judged, name, model, PICTURES[method], args))
    table(args.out)


if __name__ == "__main__":
    main()
