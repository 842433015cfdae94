"""Analyse + plan + apply against Torch-Pruning's `BasePruner(...).step()`, in one process, interleaved.

    python -m benchmarks.structure [--models densenet201 ...] [--repeat 3]
    python -m benchmarks.structure --every     # every torchvision classifier, secateur alone, once
    python -m benchmarks.structure --rival     # every torchvision classifier that Torch-Pruning gets right, both tools
    python -m benchmarks.structure --rival --log F --part 0 4     # goes on where F ends; the first of four parts
    python -m benchmarks.structure --table F G    # the table of such files
    python -m benchmarks.structure --growth    # time and memory over depth, width and images

Both remove half of the channels by a magnitude criterion, with random weights. secateur's time includes the
verification that removal equals masking (four forward passes, two of them on smaller images; six if code of its own
asks for the training mode); Torch-Pruning verifies nothing, and the copy that its step changes is not counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.relevance import resident

MODELS = ["resnet18", "resnet50", "densenet121", "densenet201"]


def ours(model: torch.nn.Module, example: torch.Tensor) -> tuple[float, float, float]:
    begin = time.perf_counter()
    graph = sc.analyze(model, example)
    analysed = time.perf_counter()
    plan = sc.plan(graph, sc.score(model, None, "weight", graph=graph), remove=0.5)
    planned = time.perf_counter()
    sc.apply(model, plan)
    return analysed - begin, planned - analysed, time.perf_counter() - planned


def theirs(model: torch.nn.Module, example: torch.Tensor, check: bool = False) -> float:
    """The time. With `check`, a smaller model that does not run, or returns another shape, is an error."""
    import torch_pruning as tp

    model = copy.deepcopy(model)
    begin = time.perf_counter()
    importance = tp.importance.GroupMagnitudeImportance()
    ignored = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1000]
    tp.pruner.BasePruner(model, example, importance, pruning_ratio=0.5, ignored_layers=ignored).step()
    seconds = time.perf_counter() - begin
    if check:
        with torch.no_grad():
            output = model(example)
        if output.shape != (len(example), 1000):
            raise ValueError(f"returns {tuple(output.shape)}")
    return seconds


def against(options: argparse.Namespace) -> None:
    """Both tools on every classifier, in turn; the worst ratio first. Models of more than 100 M parameters once."""
    import torchvision

    names = options.models if options.models != MODELS else torchvision.models.list_models(module=torchvision.models)
    part, parts = options.part
    done = {row[1] for row in _rows([options.log])} if options.log and Path(options.log).exists() else set()
    names = [name for name in names[part::parts] if name not in done]
    ours(torchvision.models.get_model("resnet18").eval(), torch.randn(1, 3, 64, 64))
    for name in names:
        model = torchvision.models.get_model(name).eval()
        example = torch.randn(1, 3, 299, 299) if name == "inception_v3" else torch.randn(1, 3, 224, 224)
        large = sum(p.numel() for p in model.parameters()) > 1e8
        mine, rival = [], []
        try:
            theirs(model, example, check=True)
            for _ in range(1 if large else options.repeat):
                mine.append(sum(ours(model, example)))
                rival.append(theirs(model, example))
        except Exception as error:
            print(f"{name}: Torch-Pruning: {type(error).__name__}: {str(error)[:60]}", file=sys.stderr, flush=True)
            continue
        own, other = statistics.median(mine), statistics.median(rival)
        row = json.dumps([other / own, name, own, other])
        print(row, flush=True)
        if options.log:
            with Path(options.log).open("a") as file:
                file.write(f"{row}\n")


def _rows(logs: Sequence[str]) -> list[tuple[float, str, float, float]]:
    return [tuple(json.loads(line)) for log in logs for line in Path(log).read_text().splitlines()]


def table(logs: Sequence[str]) -> None:
    """The ratios of some logs, the worst first."""
    rows = sorted(_rows(logs))
    print(f"{sum(ratio >= 1 for ratio, *_ in rows)} of {len(rows)} at least as fast as Torch-Pruning\n")
    print("| model | secateur s | Torch-Pruning s | ratio |\n|---|---|---|---|")
    for ratio, name, own, other in rows:
        print(f"| {name} | {own:.2f} | {other:.2f} | {ratio:.2f}x |")


# -- growth ------------------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        nn.init.constant_(self.norm.weight, 0.1)  # or the numbers of a thousand layers overflow

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


def by_depth(layers: int) -> None:
    """A residual network of so many layers, width 16, images of 16²."""
    blocks = [Residual(16) for _ in range(layers - 2)]
    net = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    ours(net.eval(), torch.randn(1, 3, 16, 16))


def by_width(channels: int) -> None:
    """Two layers with so many units between them."""
    ours(nn.Sequential(nn.Linear(16, channels), nn.ReLU(), nn.Linear(channels, 16)).eval(), torch.randn(1, 16))


def by_images(images: int) -> None:
    """Scoring by relevance on so many images of 32², from a loader that makes them when they are needed."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    batches = [min(50, images - first) for first in range(0, images, 50)]
    sc.score(net.eval(), ((torch.rand(n, 3, 32, 32), torch.zeros(n).long()) for n in batches), "lrp")


GROWTH: dict[str, tuple[Callable[[int], None], Sequence[int], str]] = {
    "depth": (by_depth, (10, 30, 100, 300, 1000), "layers"),
    "width": (by_width, (100, 1000, 10_000, 100_000), "channels"),
    "images": (by_images, (10, 100, 1000, 10_000), "images"),
}


def grow(kind: str, size: int) -> None:
    """One measurement, in a process of its own: CPU seconds and MiB at the peak, above those of the smallest size."""
    run, sizes, _ = GROWTH[kind]
    run(sizes[0])  # what is imported and compiled at first use
    before, begin = resident("VmHWM"), time.process_time()
    run(size)
    print(time.process_time() - begin, resident("VmHWM") - before)


def growth() -> None:
    """Tables of time and memory, with exponents fitted over the sizes above the smallest."""
    for kind, (_, sizes, unit) in GROWTH.items():
        rows = []
        for size in sizes:
            command = [sys.executable, "-m", "benchmarks.structure", "--grow", kind, str(size), "--threads", "1"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append((size, *map(float, done.stdout.split()[-2:])))
        print(f"| {unit} | CPU s | MiB at the peak |\n|---|---|---|")
        for size, seconds, peak in rows:
            print(f"| {size:,} | {seconds:.2f} | {peak:.0f} |")
        fitted = np.polyfit(*(np.log([row[i] for row in rows[-3:]]) for i in (0, 1)), 1)[0]
        memory = np.polyfit(*(np.log([max(row[i], 1) for row in rows[-3:]]) for i in (0, 2)), 1)[0]
        print(f"\nOver the last three, time grows with the power {fitted:.2f}, memory with {memory:.2f}.\n", flush=True)


def sweep(threads: int, models: list[str]) -> None:
    """The time for every classifier at its own input size, the slowest first."""
    import torchvision

    chosen = models if models != MODELS else torchvision.models.list_models(module=torchvision.models)
    warm_up = torchvision.models.get_model("resnet18").eval()
    ours(warm_up, torch.randn(1, 3, 64, 64))  # first use of torch's meta kernels imports them
    rows = []
    for name in chosen:
        model = torchvision.models.get_model(name).eval()
        size = 299 if name == "inception_v3" else 224
        parts = ours(model, torch.randn(1, 3, size, size))
        rows.append((sum(parts), name, parts))
        print(f"{name} {sum(parts):.2f} s", file=sys.stderr, flush=True)
        del model
    rows.sort(reverse=True)
    print(f"batch 1, {threads} threads, once: {sum(t < 10 for t, *_ in rows)} of {len(rows)} below 10 s\n")
    print("| model | analyse s | score + plan s | apply, verified s | all s |")
    print("|---|---|---|---|---|")
    for total, name, parts in rows[:12]:
        print(f"| {name} | " + " | ".join(f"{p:.2f}" for p in parts) + f" | {total:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--every", action="store_true", help="time every torchvision classifier, without the rival")
    parser.add_argument("--rival", action="store_true", help="time both tools on every torchvision classifier")
    parser.add_argument("--log", help="with --rival: note each model here, and go on where the file ends")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), help="with --rival: which of how many parts")
    parser.add_argument("--table", nargs="+", metavar="LOG", help="the table of such logs")
    parser.add_argument("--growth", action="store_true", help="time and memory over depth, width and images")
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if options.grow:
        return grow(options.grow[0], int(options.grow[1]))
    if options.growth:
        return growth()
    if options.table:
        return table(options.table)
    if options.rival:
        return against(options)
    import torchvision

    if options.every:
        return sweep(options.threads, options.models)
    print(f"batch 1, {options.size}², {options.threads} threads, medians of {options.repeat}, interleaved\n")
    print("| model | analyse s | score + plan s | apply, verified s | secateur s | Torch-Pruning s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        model = torchvision.models.get_model(name).eval()
        example = torch.randn(1, 3, options.size, options.size)
        ours(model, example)  # first use of torch's meta kernels imports them
        mine, rival = [], []
        for _ in range(options.repeat):
            mine.append(ours(model, example))
            rival.append(theirs(model, example))
        parts = [statistics.median(part) for part in zip(*mine, strict=True)]
        total, other = statistics.median(sum(m) for m in mine), statistics.median(rival)
        cells = " | ".join(f"{p:.2f}" for p in parts)
        print(f"| {name} | {cells} | {total:.2f} | {other:.2f} | **{other / total:.0f}x** |", flush=True)


if __name__ == "__main__":
    main()
