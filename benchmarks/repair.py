"""Repair without training: what the criterion, the allocation, the repair and re-scoring are worth, at equal MACs.

ResNet-50, some ImageNet classes, a few reference images of each, physical removal, accuracy on other images. Every
combination that is not in the results yet is measured; results are kept line by line, so that a run can be stopped.

    python -m benchmarks.repair --weights resnet50.safetensors --images imagenette --out results
    python -m benchmarks.repair --out results --table TABLES
    python -m benchmarks.repair --out results --figure docs/results/repair.png

`--variants` compares other settings of the ridge with the usual ones, `--remove` removes a share of the units instead
of going to a share of the MACs, `--latency` times the smaller models and repairs nothing. The time and the memory of a
repair are in the last line of what is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.repair_cells import ALLOCATIONS, CRITERIA, REPAIRS, RESCORINGS, Cell, results
from benchmarks.repair_tables import figure, table
from reproduction.few_shot.campaign import Scene, Settings, scene
from secateur import apply, plan, score
from secateur.latency.timing import time_batches
from secateur.plans import Limits
from secateur.repair import Repair, Session, crop_and_flip
from secateur.running.memory import peak
from secateur.running.sandbox import seeded


def coloured(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crops and flips with another contrast and another brightness."""
    made = crop_and_flip(images, generator)
    contrast = 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, generator=generator)
    brightness = 0.4 * torch.randn(len(images), 1, 1, 1, generator=generator)
    return made * contrast.to(made) + brightness.to(made)


#: Other settings of a ridge, by name.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "like a CPU": {"at_once": None, "memory": "1.625 GiB"},
    "3 copies": {"copies": 3},
    "one fit": {"rounds": 0},
    "one fit, relevance 0.5": {"rounds": 0, "relevance": 0.5},
    "one fit, relevance 0.9": {"rounds": 0, "relevance": 0.9},
    "one fit, 24 copies": {"rounds": 0, "copies": 24, "rows": 40_000},
    "one fit, 10 % held out": {"rounds": 0, "held_out": 0.1},
    "one fit, closer crops": {"rounds": 0, "alter": partial(crop_and_flip, least=0.25)},
    "one fit, colours": {"rounds": 0, "alter": coloured},
    "3 rounds": {"rounds": 3},
    "3 rounds, relevance 0.5": {"rounds": 3, "relevance": 0.5},
    "3 rounds, closer crops": {"rounds": 3, "alter": partial(crop_and_flip, least=0.25)},
}


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


def once(stage: Scene, cells: list[Cell], repairs: list[str]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Score the whole network, go to each target at once, repair."""
    # A GPU has room for all samples at once; elsewhere the repair decides.
    at_once = 1024 if stage.reference[0].is_cuda else None
    scores: dict[tuple[str, int], Any] = {}
    made: dict[tuple[str, str], Session] = {}
    for cell in cells:
        key = cell.criterion, cell.copies
        if key not in scores:
            with seeded(cell.draw, 1):
                samples = reference(stage, cell.copies)
                scores = {key: score(stage.model, samples, cell.criterion, graph=stage.graph, batch_size=50)}
        goal: dict[str, Any] = {"keep": {"macs": cell.macs}} if cell.macs is not None else {"remove": cell.remove}
        chosen = plan(stage.graph, scores[key], limits=Limits(cell.allocation), **goal)
        small = apply(stage.model, chosen)
        row: dict[str, Any] = {
            "units": chosen.units[1] / chosen.units[0],
            "macs": chosen.after.macs / chosen.before.macs,
        }
        row["none"] = {"accuracy": measured(small, stage.test)}
        for name in repairs if cell.variant == "default" else ["ridge"]:
            settings: dict[str, Any] = {"at_once": at_once, **VARIANTS[cell.variant]}
            # Kept for the next target, with what the original answers.
            session = made.setdefault(
                (name, cell.variant), Repair(name, **settings).session(stage.model, stage.reference)
            )
            begin = time.perf_counter()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            outcome = session.examine(small)
            seconds = time.perf_counter() - begin
            row["none"]["divergence"] = outcome.divergence["none"]
            row[name] = {"accuracy": measured(outcome.model, stage.test), "divergence": outcome.divergence[name],
                         "taken": outcome.method, "seconds": seconds}  # fmt: skip
            if stage.reference[0].is_cuda:
                row[name]["peak"] = torch.cuda.max_memory_allocated()
            else:
                row[name]["resident"] = peak()
        yield cell, row


def timed(stage: Scene, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """How many times as fast each smaller model is, for batches of 1 and 32."""
    found = score(stage.model, stage.reference, cells[0].criterion, graph=stage.graph, batch_size=50)
    for cell in cells:
        chosen = plan(stage.graph, found, keep={"macs": cell.macs or 1.0}, limits=Limits(cell.allocation))
        timings = time_batches(stage.model, apply(stage.model, chosen), stage.reference[0][:1])
        yield cell, {"gains": {str(timing.batch): timing.gain for timing in timings}}


def stepped(stage: Scene, cell: Cell, goals: list[float], name: str) -> Iterator[tuple[float, float, str]]:
    """Score anew before every step, on what the repair of the step before has left: goal, accuracy, repair taken."""
    session = None if name == "none" else Repair(name, at_once=1024).session(stage.model, stage.reference)
    samples = reference(stage, cell.copies)
    model, so_far, taken = stage.model, None, "none"
    for number, goal in enumerate(goals, 1):
        with seeded(cell.draw, number):
            found = score(model, samples, cell.criterion, graph=stage.graph, batch_size=50, start=so_far)
        so_far = plan(stage.graph, found, keep={"macs": goal}, limits=Limits(cell.allocation), start=so_far)
        model = apply(stage.model, so_far)
        if session is not None:
            outcome = session.examine(model)
            model, taken = outcome.model, outcome.method
        yield goal, measured(model, stage.test), taken


def stepwise(stage: Scene, cells: list[Cell], repairs: list[str]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Go from target to target, with one more step half-way (in factors) before each."""
    mine = {cell.macs: cell for cell in cells if cell.macs is not None}
    ends = sorted(mine, reverse=True)
    between = [(a * b) ** 0.5 for a, b in zip([1.0, *ends], ends, strict=False)]
    goals = [goal for pair in zip(between, ends, strict=True) for goal in pair]
    rows: dict[float, dict[str, Any]] = defaultdict(dict)
    methods: set[str] = set()
    for goal, accuracy, taken in stepped(stage, cells[0], goals, "best") if set(repairs) == set(REPAIRS) else ():
        methods.add(taken)
        rows[goal]["best"] = {"accuracy": accuracy}
        if methods == {taken} and taken in REPAIRS:  # so far this was the way of that repair alone
            rows[goal][taken] = {"accuracy": accuracy}
    for name in ("none", *repairs):
        if any(name not in rows[end] for end in ends):
            for goal, accuracy, _ in stepped(stage, cells[0], goals, name):
                rows[goal][name] = {"accuracy": accuracy}
    for end in ends:
        yield mine[end], rows[end]


def measure(options: argparse.Namespace) -> None:
    settings = Settings(
        model="resnet50", data="ilsvrc", images=str(options.images), weights=str(options.weights), early_strides=True,
        classes=options.classes, per_class=options.per_class,
    )  # fmt: skip
    done = {cell for cell, row in results(options.out) if ("gains" if options.latency else "none") in row}
    share, shares = options.share
    for number in range(*options.draws):
        groups: dict[Any, list[Cell]] = defaultdict(list)
        for criterion, allocation, rescoring, copies, variant in product(
            options.criteria, options.allocations, options.rescoring, options.copies, options.variants
        ):
            for macs, remove in [*((m, None) for m in options.macs), *((None, r) for r in options.remove)]:
                if rescoring != "once" and (variant != "default" or remove is not None):
                    continue
                cell = Cell(options.classes, number, criterion, allocation, rescoring, macs, copies, variant, remove)
                groups[criterion, allocation, rescoring, copies, variant].append(cell)
        # The shares of one draw need not be equal, those of all draws are.
        first = number * len(groups)
        todo = [g for i, g in enumerate(groups.values(), first) if i % shares == share and not done.issuperset(g)]
        if not todo:
            continue
        stage = scene(settings, options.out, number, options.device)
        for group in todo:
            if options.latency:
                rows = timed(stage, group)
            else:
                rows = (once if group[0].rescoring == "once" else stepwise)(stage, group, options.repairs)
            with (options.out / f"results-{share}-{shares}.jsonl").open("a") as file:
                for cell, row in rows:
                    file.write(json.dumps([asdict(cell), row]) + "\n")
                    file.flush()
                    shown = {
                        k: round(100 * v["accuracy"], 1)
                        for k, v in row.items()
                        if isinstance(v, dict) and "accuracy" in v
                    }
                    print(cell, shown or row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="write the tables of what is in --out and stop")
    parser.add_argument("--figure", type=Path, help="draw what is in --out and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draws", type=lambda t: tuple(map(int, t.split(":"))), default=(0, 10), help="from:to")
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--criteria", nargs="+", default=CRITERIA)
    parser.add_argument("--allocations", nargs="+", default=ALLOCATIONS[:3])
    parser.add_argument("--rescoring", nargs="+", default=RESCORINGS)
    parser.add_argument("--macs", nargs="*", type=float, default=(0.8, 0.6, 0.35, 0.16))
    parser.add_argument("--remove", nargs="*", type=float, default=(), help="shares of the units, scored once")
    parser.add_argument("--latency", action="store_true", help="time the smaller models, with --rescoring once")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=("default",), help="of the ridge")
    parser.add_argument("--repairs", nargs="+", choices=REPAIRS, default=REPAIRS)
    parser.add_argument("--copies", nargs="+", type=int, default=(0,), help="altered copies that scoring sees")
    parser.add_argument("--share", type=lambda t: tuple(map(int, t.split("/"))), default=(0, 1), help="0/4: a quarter")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.table is not None:
        options.table.write_text(table(options.out) + "\n", encoding="utf-8")
    elif options.figure is not None:
        figure(options.out, options.figure)
    else:
        measure(options)
    print(table(options.out))


if __name__ == "__main__":
    main()
