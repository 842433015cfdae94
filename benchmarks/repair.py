"""Repair without training: what the criterion, the allocation, the repair and re-scoring are worth, at equal MACs.

ResNet-50, some ImageNet classes, a few reference images of each, physical removal, accuracy on other images. Every
combination that is not in the results yet is measured; results are kept line by line, so that a run can be stopped.

    python -m benchmarks.repair --weights resnet50.safetensors --images imagenette --out results
    python -m benchmarks.repair --out results --table docs/results/repair.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur import apply, plan, score
from secateur.experiments.few_shot.campaign import Scene, Settings, scene
from secateur.pruning.loop import seeded
from secateur.pruning.plan import Plan
from secateur.pruning.repair.augment import crop_and_flip
from secateur.pruning.repair.repair import Repair

CRITERIA = ("lrp", "taylor", "gradient", "weight", "activation", "random")
ALLOCATIONS = ("global", "layer", "cost")
REPAIRS = ("mean", "norm", "ridge")
RESCORINGS = ("once", "each step")
_STEPS = 6


@dataclass(frozen=True)
class Cell:
    """One combination. `copies` is how many altered copies of each image the scoring sees."""

    classes: int
    draw: int
    criterion: str
    allocation: str
    rescoring: str
    macs: float
    copies: int = 0


def measured(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        hits = sum(
            (model.eval()(x).argmax(1) == y).sum() for x, y in zip(test[0].split(100), test[1].split(100), strict=True)
        )
    return float(hits) / len(test[1])


def reference(stage: Scene, copies: int) -> tuple[Tensor, Tensor]:
    """The reference samples, and altered copies of them for scoring."""
    x, y = stage.reference
    more = [crop_and_flip(x, torch.Generator().manual_seed(i)) for i in range(copies)]
    return torch.cat([x, *more]), y.repeat(1 + copies)


def once(stage: Scene, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Score the whole network, go to each target at once, repair."""
    repairs = {name: Repair(name, at_once=1024) for name in REPAIRS}
    scores: dict[tuple[str, int], Any] = {}
    for cell in cells:
        key = cell.criterion, cell.copies
        if key not in scores:
            with seeded(cell.draw, 1):
                samples = reference(stage, cell.copies)
                scores = {key: score(stage.model, samples, cell.criterion, graph=stage.graph, batch_size=50)}
        chosen = plan(stage.graph, scores[key], keep={"macs": cell.macs}, scope=cell.allocation)
        small = apply(stage.model, chosen)
        row: dict[str, Any] = {
            "units": chosen.units[1] / chosen.units[0],
            "macs": chosen.after.macs / chosen.before.macs,
        }
        row["none"] = {"accuracy": measured(small, stage.test)}
        for name, repair in repairs.items():
            begin = time.perf_counter()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            outcome = repair.examine(small, stage.model, stage.reference)
            seconds = time.perf_counter() - begin
            row["none"]["divergence"] = outcome.divergence["none"]
            row[name] = {"accuracy": measured(outcome.model, stage.test), "divergence": outcome.divergence[name],
                         "taken": outcome.method, "seconds": seconds}  # fmt: skip
            if torch.cuda.is_available():
                row[name]["peak"] = torch.cuda.max_memory_allocated()
        yield cell, row


def stepwise(stage: Scene, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Score anew before each of several steps, on what the repair of the step before has left."""
    for (criterion, allocation, copies), name in product(
        dict.fromkeys((c.criterion, c.allocation, c.copies) for c in cells), ("none", "ridge")
    ):
        mine = {c.macs: c for c in cells if (c.criterion, c.allocation, c.copies) == (criterion, allocation, copies)}
        targets = sorted({*mine, *np.geomspace(1, min(mine), _STEPS + 1)[1:].tolist()}, reverse=True)
        repair = Repair(name, at_once=1024) if name != "none" else None
        samples = reference(stage, copies)
        model, so_far = stage.model, None
        for number, target in enumerate(targets, 1):
            with seeded(0, number):
                found = score(model, samples, criterion, graph=stage.graph, batch_size=50, start=so_far)
            chosen: Plan = plan(stage.graph, found, keep={"macs": target}, scope=allocation, start=so_far)
            small = apply(stage.model, chosen)
            model = small if repair is None else repair(small, stage.model, stage.reference)
            so_far = chosen
            if target in mine:
                yield mine[target], {name: {"accuracy": measured(model, stage.test)}}


def measure(options: argparse.Namespace) -> None:
    settings = Settings(
        model="resnet50", data="ilsvrc", images=str(options.images), weights=str(options.weights), early_strides=True,
        classes=options.classes, per_class=options.per_class,
    )  # fmt: skip
    done = {cell for cell, _ in results(options.out)}
    share, shares = options.share
    for number in range(*options.draws):
        cells = [
            Cell(options.classes, number, *rest)
            for rest in product(options.criteria, options.allocations, options.rescoring, options.macs, options.copies)
        ]
        groups: dict[Any, list[Cell]] = defaultdict(list)
        for cell in cells:
            groups[cell.criterion, cell.allocation, cell.rescoring, cell.copies].append(cell)
        todo = [g for i, g in enumerate(groups.values()) if i % shares == share and not done.issuperset(g)]
        if not todo:
            continue
        stage = scene(settings, options.out, number, options.device)
        for group in todo:
            work = once if group[0].rescoring == "once" else stepwise
            with (options.out / f"results-{share}-{shares}.jsonl").open("a") as file:
                for cell, row in work(stage, group):
                    file.write(json.dumps([asdict(cell), row]) + "\n")
                    file.flush()
                    shown = {k: round(100 * v["accuracy"], 1) for k, v in row.items() if isinstance(v, dict)}
                    print(cell, shown, flush=True)


def results(folder: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Everything measured so far."""
    merged: dict[Cell, dict[str, Any]] = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            about, row = json.loads(line)
            merged[Cell(**about)].update(row)
    yield from merged.items()


def best(row: dict[str, Any]) -> float | None:
    """The accuracy of the repair that is closest to the original on held-out samples: what repair='best' takes."""
    known = {name: row[name] for name in ("none", *REPAIRS) if name in row and "divergence" in row[name]}
    if len(known) < 4:
        return None
    return float(min(known.values(), key=lambda r: r["divergence"])["accuracy"])


def spread(values: list[float]) -> str:
    """Mean and the half-width of its 95 % interval over draws (normal approximation)."""
    if not values:
        return ""
    half = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return f"{100 * np.mean(values):.1f}" + (f" ± {100 * half:.1f}" if len(values) > 1 else "")


def table(folder: Path) -> str:
    found = dict(results(folder))
    lines: list[str] = []
    for classes in sorted({cell.classes for cell in found}):
        mine = {c: r for c, r in found.items() if c.classes == classes}
        macs = sorted({c.macs for c in mine}, reverse=True)
        lines += [f"## {classes} classes", ""]
        for rescoring in RESCORINGS:
            for copies in sorted({c.copies for c in mine if c.rescoring == rescoring}):
                some = {c: r for c, r in mine.items() if c.rescoring == rescoring and c.copies == copies}
                seen = f", scores from {copies} altered copies of each image too" if copies else ""
                lines += [
                    f"### scored {rescoring}{seen}: accuracy in % (mean over draws, half-width of its 95 % interval)",
                    "",
                ]
                names = ["none", *REPAIRS, "best"] if rescoring == "once" else ["none", "ridge"]
                for share in macs:
                    lines += [f"At {100 * share:.0f} % of the MACs:", ""]
                    lines += [
                        "| criterion | allocation | draws | " + " | ".join(names) + " |",
                        "|---|---|---|" + "---|" * len(names),
                    ]
                    for criterion, allocation in product(CRITERIA, ALLOCATIONS):
                        rows = [
                            r
                            for c, r in some.items()
                            if (c.criterion, c.allocation, c.macs) == (criterion, allocation, share)
                        ]
                        if not rows:
                            continue
                        cells = []
                        for name in names:
                            values = [best(r) if name == "best" else r.get(name, {}).get("accuracy") for r in rows]
                            cells.append(spread([v for v in values if v is not None]))
                        lines.append(f"| {criterion} | {allocation} | {len(rows)} | " + " | ".join(cells) + " |")
                    lines.append("")
    times = [row["ridge"]["seconds"] for row in found.values() if "seconds" in row.get("ridge", {})]
    peaks = [row["ridge"]["peak"] for row in found.values() if "peak" in row.get("ridge", {})]
    if times:
        lines.append(f"A ridge repair took {np.median(times):.1f} s (median of {len(times)})"
                     + (f", at most {max(peaks) / 2**30:.1f} GiB of GPU memory." if peaks else "."))  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="write the tables of what is in --out and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draws", type=lambda t: tuple(map(int, t.split(":"))), default=(0, 10), help="from:to")
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--criteria", nargs="+", default=CRITERIA)
    parser.add_argument("--allocations", nargs="+", default=ALLOCATIONS)
    parser.add_argument("--rescoring", nargs="+", default=RESCORINGS)
    parser.add_argument("--macs", nargs="+", type=float, default=(0.8, 0.6, 0.35, 0.16))
    parser.add_argument("--copies", nargs="+", type=int, default=(0,), help="altered copies that scoring sees")
    parser.add_argument("--share", type=lambda t: tuple(map(int, t.split("/"))), default=(0, 1), help="0/4: a quarter")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.table is None:
        measure(options)
    else:
        options.table.write_text(table(options.out) + "\n", encoding="utf-8")
    print(table(options.out))


if __name__ == "__main__":
    main()
