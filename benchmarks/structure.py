"""Analyse + plan + apply against Torch-Pruning's `BasePruner(...).step()`, in one process, interleaved.

    python -m benchmarks.structure [--models densenet201 ...] [--repeat 3]
    python -m benchmarks.structure --every     # every torchvision classifier, secateur alone, once
    python -m benchmarks.structure --rival     # every torchvision classifier that Torch-Pruning gets right, both tools
    python -m benchmarks.structure --rival --log FOLDER    # goes on where the folder ends; several may run at once
    python -m benchmarks.structure --table FOLDER/*.json
    python -m benchmarks.structure --growth    # time and memory over depth, width and images

Both remove half of the channels by a magnitude criterion, with random weights. secateur's time includes the
verification that removal equals masking (two forward passes on small images; on whole ones too if code asks for sizes;
two more if it asks for the training mode). Torch-Pruning verifies nothing, and the copy that its step changes is not
counted. One thread is timed in CPU seconds, several by the clock on the wall. Garbage is collected before each tool
begins.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import resource
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.relevance import resident

MODELS = ["resnet18", "resnet50", "densenet121", "densenet201"]


def now() -> float:
    """Seconds: of CPU time with one thread, which other programs do not change, and on the wall with more."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def ours(model: torch.nn.Module, example: torch.Tensor) -> tuple[float, float, float]:
    gc.collect()
    begin = now()
    graph = sc.analyze(model, example)
    analysed = now()
    plan = sc.plan(graph, sc.score(model, None, "weight", graph=graph), remove=0.5)
    planned = now()
    sc.apply(model, plan)
    return analysed - begin, planned - analysed, now() - planned


def theirs(model: torch.nn.Module, example: torch.Tensor, check: bool = False) -> float:
    """The time. With `check`, a smaller model that does not run, or returns another shape, is an error."""
    import torch_pruning as tp

    model = copy.deepcopy(model)
    gc.collect()
    begin = now()
    importance = tp.importance.GroupMagnitudeImportance()
    ignored = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1000]
    tp.pruner.BasePruner(model, example, importance, pruning_ratio=0.5, ignored_layers=ignored).step()
    seconds = now() - begin
    if check:
        with torch.no_grad():
            output = model(example)
        if output.shape != (len(example), 1000):
            raise ValueError(f"returns {tuple(output.shape)}")
    return seconds


def against(options: argparse.Namespace) -> None:
    """Both tools on every classifier, in turn. Models of more than 100 M parameters twice. With `--log`, several
    processes share the work: who makes a model's file in the folder measures it. Delete empty files to try again."""
    import torchvision

    names = options.models if options.models != MODELS else torchvision.models.list_models(module=torchvision.models)
    ours(torchvision.models.get_model("resnet18").eval(), torch.randn(1, 3, 64, 64))
    for name in sorted(names, key=_LATE.__contains__):
        if options.log and not _claimed(Path(options.log) / f"{name}.json"):
            continue
        row = json.dumps(_row(name, options.repeat))
        print(row, flush=True)
        if options.log:
            (Path(options.log) / f"{name}.json").write_text(f"{row}\n")


_LATE = {"vit_h_14", "regnet_y_128gf", "vit_l_16", "vit_l_32", "regnet_x_32gf"}  # take minutes


def _claimed(file: Path) -> bool:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def bounded(seconds: int, gigabytes: int) -> Iterator[None]:
    """An error in a block that takes longer or allocates more: on some transformers Torch-Pruning never ends."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before, was = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes << 30, was[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, was)


def _row(name: str, repeat: int) -> list[Any]:
    """The ratio, the name, our seconds and theirs; or None, the name and why Torch-Pruning cannot do it."""
    import torchvision

    model = torchvision.models.get_model(name).eval()
    example = torch.randn(1, 3, 299, 299) if name == "inception_v3" else torch.randn(1, 3, 224, 224)
    large = sum(p.numel() for p in model.parameters()) > 1e8
    mine, rival = [], []
    try:
        with bounded(seconds=90, gigabytes=24 if large else 6):
            theirs(model, example, check=True)
    except Exception as error:
        return [None, name, f"{type(error).__name__}: {str(error)[:60]}"]
    ours(model, example)  # neither tool meets a model for the first time when it is timed
    for _ in range(2 if large else repeat):
        mine.append(sum(ours(model, example)))
        rival.append(theirs(model, example))
    own, other = statistics.median(mine), statistics.median(rival)
    return [other / own, name, own, other]


def table(logs: Sequence[str]) -> None:
    """The ratios of some files, the worst first."""
    rows = [json.loads(line) for log in logs for line in Path(log).read_text().splitlines()]
    known = sorted(row for row in rows if row[0] is not None)
    print(f"{sum(ratio >= 1 for ratio, *_ in known)} of {len(known)} at least as fast as Torch-Pruning\n")
    print("| model | secateur s | Torch-Pruning s | ratio |\n|---|---|---|---|")
    for ratio, name, own, other in known:
        print(f"| {name} | {own:.2f} | {other:.2f} | {ratio:.2f}x |")
    for _, name, reason in [row for row in rows if row[0] is None]:
        print(f"Torch-Pruning: {name}: {reason}")


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
    gc.collect()
    gc.freeze()  # or each collection would look at all that was imported, and be counted
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
    parser.add_argument("--log", help="with --rival: a folder that gets a file for each model")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="the table of such files")
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
