"""Analyse + plan + apply against Torch-Pruning's `BasePruner(...).step()`, in one process, interleaved.

    python -m benchmarks.structure [--models densenet201 ...] [--repeat 3]
    python -m benchmarks.structure --every     # every torchvision classifier, secateur alone, once

Both remove half of the channels by a magnitude criterion, with random weights. secateur's time includes the
verification that removal equals masking (four forward passes); Torch-Pruning verifies nothing.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings

import torch

import secateur as sc

MODELS = ["resnet18", "resnet50", "densenet121", "densenet201"]


def ours(model: torch.nn.Module, example: torch.Tensor) -> tuple[float, float, float]:
    begin = time.perf_counter()
    graph = sc.analyze(model, example)
    analysed = time.perf_counter()
    plan = sc.plan(graph, sc.score(model, None, "weight", graph=graph), remove=0.5)
    planned = time.perf_counter()
    sc.apply(model, plan)
    return analysed - begin, planned - analysed, time.perf_counter() - planned


def theirs(model: torch.nn.Module, example: torch.Tensor) -> float:
    import torch_pruning as tp

    model = copy.deepcopy(model)
    begin = time.perf_counter()
    importance = tp.importance.GroupMagnitudeImportance()
    ignored = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1000]
    tp.pruner.BasePruner(model, example, importance, pruning_ratio=0.5, ignored_layers=ignored).step()
    return time.perf_counter() - begin


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
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
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
