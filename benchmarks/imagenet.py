"""ImageNet proper: one network for some of its thousand classes, or for all, made smaller without training.

    python -m benchmarks.imagenet --make ILSVRC2012_img_val_subset --images DIR
    python -m benchmarks.imagenet --model resnet50 --weights resnet50.safetensors --images DIR --out runs
    python -m benchmarks.imagenet --out runs --table

`--make` takes a folder `<class>/` of five validation photographs for each of the classes 0 to 999, such as that of
github.com/ndb796/Small-ImageNet-Validation-Dataset-1000-Classes. DIR then holds tar files of `<class>/<number>.webp`,
224 x 224 from the middle of each. No network was trained on them.

For each draw, classes are chosen at random. One half of their photographs scores and repairs, the other measures. Of
all thousand classes, the second draw swaps the halves. Results are lines of `runs/imagenet-*.jsonl`, and the same
command goes on where it was stopped; `--part 0/3` takes every third cell.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import secateur as sc
from benchmarks.latency_accuracy import accuracy, network
from secateur.repair import Repair

SHARES = (0.8, 0.6, 0.5)
CLASSES, EACH, _PER_TAR = 1000, 5, 100
DRAWS = {3: 10, 10: 5, 100: 3, 1000: 2}
#: What each network expects of its pixels: mean and standard deviation.
PIXELS = {"resnet50": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "efficientnet_lite0": ((0.5,) * 3, (0.5,) * 3)}


def make(source: Path, folder: Path, classes: int = CLASSES) -> None:
    """Write the photographs as the networks see them: the shorter side 256 pixels, of which the middle 224 are left."""
    folder.mkdir(parents=True, exist_ok=True)
    for begin in range(0, classes, _PER_TAR):
        path = folder / f"{begin:03d}.tar"
        half = path.with_suffix(".part")
        with tarfile.open(half, "w") as archive:
            for label in range(begin, min(begin + _PER_TAR, classes)):
                files = sorted(path for path in (source / str(label)).glob("*") if path.is_file())
                if len(files) != EACH:
                    raise SystemExit(f"{source / str(label)} holds {len(files)} files, not {EACH} photographs.")
                for number, file in enumerate(files):
                    written = io.BytesIO()
                    _middle(Image.open(file).convert("RGB")).save(written, "WEBP", lossless=True)
                    entry = tarfile.TarInfo(f"{label}/{number}.webp")
                    entry.size = len(written.getvalue())
                    archive.addfile(entry, io.BytesIO(written.getvalue()))
        half.rename(path)


def _middle(image: Image.Image) -> Image.Image:
    scale = 256 / min(image.size)
    width, height = (round(scale * side) for side in image.size)
    left, top = (width - 224) // 2, (height - 224) // 2
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 224, top + 224))


def photographs(folder: Path, classes: int = CLASSES) -> Tensor:
    """(class, number, channel, row, column), as bytes."""
    found: dict[tuple[int, int], Tensor] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                image = np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))
                label, number = member.name.removesuffix(".webp").split("/")
                found[int(label), int(number)] = torch.from_numpy(image.copy()).permute(2, 0, 1)
    if len(found) != EACH * classes:
        raise SystemExit(f"{folder} holds {len(found)} of {EACH * classes} photographs: make them by --make.")
    return torch.stack([found[key] for key in sorted(found)]).unflatten(0, (classes, EACH))


def cells(model: str) -> Iterator[dict[str, Any]]:
    for classes, draws in DRAWS.items():
        for draw in range(draws):
            yield {"model": model, "classes": classes, "draw": draw}


def halves(photos: Tensor, classes: int, draw: int, model: str, device: str) -> tuple[list[int], list[Any]]:
    """The classes of a draw, what scores and repairs, and what measures."""
    chance = np.random.default_rng(0 if classes == 1000 else (classes, draw))
    chosen = sorted(chance.choice(1000, classes, replace=False).tolist())
    # Two and three of five, in turn, so that the halves are equal.
    first = np.zeros((classes, 5), dtype=bool)
    for row in range(classes):
        first[row, chance.permutation(5)[: 2 + row % 2]] = True
    if classes == 1000 and draw:
        first = ~first
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in PIXELS[model])
    labels = torch.arange(classes).repeat_interleave(5).to(device)
    pixels = ((photos[chosen].flatten(0, 1).to(device).float() / 255) - mean) / std
    mask = torch.from_numpy(first).flatten().to(device)
    return chosen, [(pixels[where], labels[where]) for where in (mask, ~mask)]


def measured(
    net: nn.Module, chosen: list[int], few: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor],
    shares: Sequence[float] = SHARES, memory: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Accuracy before, and after for each share of the MACs, repaired and not."""
    model = net if len(chosen) == 1000 else sc.specialize(net, chosen, few[0][:1])
    graph = sc.analyze(model, few[0][:1])
    scores = sc.score(model, few, graph=graph)
    row: dict[str, Any] = {"test": len(test[1]), "unpruned": accuracy(model, test)}
    for share in shares:
        small = sc.apply(model, sc.plan(graph, scores, keep={"macs": share}))
        row[f"cut {share:g}"] = accuracy(small, test)
        begin = time.perf_counter()
        asked: Any = {} if memory is None else {"repair": Repair(memory=memory)}
        repaired = sc.prune(model, few, keep={"macs": share}, progress=False, **asked).model
        row[f"seconds {share:g}"] = round(time.perf_counter() - begin, 1)
        row[f"repaired {share:g}"] = accuracy(repaired, test)
    return row


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("imagenet-*.jsonl")) for line in path.open()]


def table(folder: Path) -> str:
    """Mean over draws in per cent."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines(folder):
        groups[line["model"], line["classes"]].append(line)
    names = ["unpruned", *(f"{kind} {share:g}" for share in SHARES for kind in ("cut", "repaired"))]
    parts = [
        f"| network | classes | draws | photographs measured | {' | '.join(names)} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for (model, classes), found in sorted(groups.items()):
        known = [[line[name] for line in found if name in line] for name in names]
        means = [f"{100 * statistics.mean(values):.1f}" if values else "" for values in known]
        parts.append(
            f"| {model} | {classes} | {len(found)} | {sum(line['test'] for line in found)} | {' | '.join(means)} |"
        )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(PIXELS), default="resnet50")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write the tar files of --images from photographs")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", type=int, nargs="*", default=list(DRAWS))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--shares", type=float, nargs="*", default=list(SHARES), help="of the MACs that are left")
    parser.add_argument("--memory", help="what a repair may take, such as '8 GiB'; give another --out")
    parser.add_argument("--draws", type=int, default=10, help="at most so many")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    if options.make is not None:
        make(options.make, options.images)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.part.split("/"))
    known = [{key: line[key] for key in ("model", "classes", "draw")} for line in lines(options.out)]
    todo = [cell for cell in list(cells(options.model))[part::parts] if cell["classes"] in options.classes]
    todo = [cell for cell in todo if cell["draw"] < options.draws]
    photos, net = photographs(options.images), network(options.model, options.weights).to(options.device)
    for cell in todo:
        if cell in known:
            continue
        chosen, (few, test) = halves(photos, cell["classes"], cell["draw"], options.model, options.device)
        line = cell | measured(net, chosen, few, test, options.shares, options.memory)
        with (options.out / f"imagenet-{options.model}-{part}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
