"""ResNet-50, 3 of 10 Imagenette classes, 10 reference images each, no fine-tuning: accuracy over units and over MACs.

Each draw picks 3 classes and 10 images of each, cuts the output layer to the 3 classes, and prunes 5 % per step with
re-scoring, by each criterion on the same samples. `coupled` removes physically; `uncoupled` masks every filter on its
own, as the paper does with ResNets. Finished runs are kept in the output folder and not repeated.

    python benchmarks/few_shot_curve.py --weights resnet50.safetensors --images imagenette --out out/few_shot
    python benchmarks/few_shot_curve.py --out out/few_shot --table table.md
    python benchmarks/few_shot_curve.py --out out/few_shot --figure docs/results/few-shot-curve.png
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from secateur.graph.analysis import analyze
from secateur.pruning.compare import Curve, curve
from secateur.pruning.history import History
from secateur.pruning.loop import prune
from secateur.pruning.specialize import specialize
from secateur.pruning.uncoupled import prune_uncoupled

# ImageNet indices of the ten classes, in order of WordNet id.
INDICES = [0, 217, 482, 491, 497, 566, 569, 571, 574, 701]
CRITERIA = ["lrp", "taylor", "gradient", "weight"]
MODES = ["coupled", "uncoupled"]
RATES = [0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9]
SHARES = [0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3]


def resnet50(weights: Path) -> nn.Module:
    """The original ResNet-50, whose bottlenecks stride in their first convolution, with its published weights."""
    import torchvision
    from safetensors.torch import load_file

    net = torchvision.models.resnet50()
    for layer in (net.layer2, net.layer3, net.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    net.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in load_file(weights).items()})
    return net.eval()


def images(files: list[Path]) -> Tensor:
    """Normalised 224² images."""
    from PIL import Image

    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    stacked = [torch.from_numpy(np.array(Image.open(f).convert("RGB").resize((224, 224)))) for f in files]
    return ((torch.stack(stacked) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


def draw(
    folder: Path, number: int, classes: int, per_class: int
) -> tuple[list[int], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The classes, reference samples and test samples of one repetition."""
    generator = np.random.default_rng(number)
    names = sorted(p.name for p in (folder / "reference").iterdir())
    chosen = sorted(generator.choice(len(names), classes, replace=False).tolist())
    reference, test, labels, truth = [], [], [], []
    for label, index in enumerate(chosen):
        files = sorted((folder / "reference" / names[index]).iterdir())
        picked = generator.choice(len(files), per_class, replace=False)
        reference += [files[i] for i in sorted(picked.tolist())]
        held_out = sorted((folder / "test" / names[index]).iterdir())
        test += held_out
        labels += [label] * per_class
        truth += [label] * len(held_out)
    return (
        [INDICES[i] for i in chosen],
        (images(reference), torch.tensor(labels)),
        (images(test), torch.tensor(truth)),
    )


def measure(options: argparse.Namespace) -> None:
    net = resnet50(options.weights).to(options.device)
    for number in range(options.draws):
        pairs = [(mode, criterion) for mode in options.modes for criterion in options.criteria]
        todo = [pair for pair in pairs if not place(options.out, number, *pair).exists()]
        if not todo:
            continue
        outputs, reference, test = draw(options.images, number, options.classes, options.per_class)
        reference = reference[0].to(options.device), reference[1].to(options.device)
        test = test[0].to(options.device), test[1].to(options.device)
        narrow = specialize(net, outputs, reference[0][:1])
        graph = analyze(narrow, reference[0][:1])

        def accuracy(model: nn.Module, x: Tensor = test[0], y: Tensor = test[1]) -> float:
            parts = zip(x.split(options.batch), y.split(options.batch), strict=True)
            return float(sum((model(a).argmax(1) == b).sum() for a, b in parts)) / len(y)

        for mode, criterion in todo:
            begin = time.perf_counter()
            run = prune if mode == "coupled" else prune_uncoupled
            common = {"graph": graph, "evaluate": accuracy, "batch_size": options.batch}
            result = run(narrow, reference, criterion, remove=options.remove, step=options.step, **common)
            row = result.history[-1]
            print(f"draw {number} {outputs} {mode} {criterion}: {time.perf_counter() - begin:.0f} s, "
                  f"{100 * row.removed:.0f} % gone, {100 * (row.overall or 0):.1f} %", flush=True)  # fmt: skip
            write(place(options.out, number, mode, criterion), result.history.to_json())


def place(folder: Path, number: int, mode: str, criterion: str) -> Path:
    return folder / f"{number:02d}-{mode}-{criterion.replace(':', '_')}.json"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(text)
    os.replace(staging, path)


def found(folder: Path) -> Iterator[tuple[str, str, Curve, int]]:
    for path in sorted(folder.glob("*.json")):
        number, mode, criterion = path.stem.split("-", 2)
        yield mode, criterion, curve(criterion, History.from_json(path.read_text())), int(number)


def table(options: argparse.Namespace) -> str:
    """Mean accuracy at fixed shares of units removed and of MACs left, with the areas under both curves."""
    known = list(found(options.out))
    lines = ["# Few-shot curves: ResNet-50, 3 classes, 30 reference images, no fine-tuning", ""]
    for mode in MODES:
        criteria = list(dict.fromkeys([*CRITERIA, *(c for m, c, _, _ in known if m == mode)]))
        runs = {c: [k for m, other, k, _ in known if m == mode and other == c] for c in criteria}
        runs = {c: curves for c, curves in runs.items() if curves}
        if not runs:
            continue
        draws = min(len(curves) for curves in runs.values())
        counted = "filters masked" if mode == "uncoupled" else "units removed"
        for name, places, over in ((counted, RATES, "removed"), ("MACs left", SHARES, "macs")):
            lines += [f"## {mode}: accuracy in % over the share of {name} ({draws} draws)", ""]
            lines += ["| criterion | " + " | ".join(f"{100 * p:.0f} %" for p in places) + " | mean of the curve |"]
            lines += ["|---|" + "---|" * (len(places) + 1)]
            for criterion, curves in runs.items():
                cells = [spread([at(k, p, over) for k in curves]) for p in places]
                areas = [k.area_over_units() if over == "removed" else k.area_over_macs() for k in curves]
                lines.append(f"| {criterion} | " + " | ".join(cells) + f" | {100 * np.mean(areas):.1f} |")
            lines.append("")
    return "\n".join(lines)


def figure(options: argparse.Namespace) -> None:
    """Mean accuracy over units and over MACs, a band of one standard deviation over draws."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = list(found(options.out))
    modes = [mode for mode in MODES if any(m == mode for m, *_ in known)]
    sheet, axes = pyplot.subplots(len(modes), 2, figsize=(10, 3.6 * len(modes)), sharey=True, squeeze=False)
    grid = np.linspace(0, 0.9, 37)
    for row, mode in zip(axes, modes, strict=True):
        what = "units removed (physical)" if mode == "coupled" else "filters masked (as the paper counts)"
        for axis, over, label in ((row[0], "removed", f"% of {what}"), (row[1], "macs", "% of MACs saved")):
            for criterion in dict.fromkeys(c for m, c, *_ in known if m == mode):
                runs = [k for m, c, k, _ in known if m == mode and c == criterion]
                values = [[at(k, p if over == "removed" else 1 - p, over) for p in grid] for k in runs]
                y = 100 * np.array(values, dtype=float)
                whole = ~np.isnan(y).any(0)
                mean, band = y[:, whole].mean(0), y[:, whole].std(0)
                (line,) = axis.plot(100 * grid[whole], mean, label=criterion)
                axis.fill_between(100 * grid[whole], mean - band, mean + band, color=line.get_color(), alpha=0.15, lw=0)
            axis.set(xlabel=label, ylim=(25, 102), title=mode)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("accuracy in %")
    axes[0][0].legend(frameon=False)
    sheet.tight_layout()
    sheet.savefig(options.figure, dpi=110)


def spread(values: list[float | None]) -> str:
    known = [100 * v for v in values if v is not None]
    return f"{np.mean(known):.0f} ± {np.std(known):.0f}" if len(known) == len(values) else ""


def at(k: Curve, p: float, over: str) -> float | None:
    """The accuracy at a place of the curve, between steps by straight lines; None beyond its end."""
    x = k.removed if over == "removed" else 1 - k.macs
    p = p if over == "removed" else 1 - p
    return float(np.interp(p, x, k.overall)) if p <= x[-1] + 5e-3 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="write the table of what is in --out and stop")
    parser.add_argument("--figure", type=Path, help="draw the curves of what is in --out and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--remove", type=float, default=0.9)
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--criteria", nargs="+", default=[*CRITERIA, "random"])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    options = parser.parse_args()
    if options.figure is not None:
        return figure(options)
    if options.table is None:
        measure(options)
    else:
        write(options.table, table(options))
    print(table(options))


if __name__ == "__main__":
    main()
