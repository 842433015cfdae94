"""Repair without training: what the criterion, the allocation, the repair and re-scoring are worth, at equal MACs.

ResNet-50, some ImageNet classes, a few reference images of each, physical removal, accuracy on other images. Every
combination that is not in the results yet is measured; results are kept line by line, so that a run can be stopped.

    python -m benchmarks.repair --weights resnet50.safetensors --images imagenette --out results
    python -m benchmarks.repair --out results --table docs/results/repair.md

`--variants` compares other settings of the ridge with the usual ones, `--remove` removes a share of the units instead
of going to a share of the MACs, `--latency` times the smaller models and repairs nothing. The time and the memory of a
repair are in the last line of what is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor, nn

from secateur import apply, plan, score
from secateur.experiments.few_shot.campaign import Scene, Settings, scene
from secateur.graph.cost import time_batches
from secateur.pruning.loop import seeded
from secateur.pruning.repair.augment import crop_and_flip
from secateur.pruning.repair.repair import Repair

CRITERIA = ("lrp", "taylor", "gradient", "weight", "activation", "random")
ALLOCATIONS = ("global", "layer", "cost", "time")
REPAIRS = ("mean", "norm", "ridge")
RESCORINGS = ("once", "each step")


def coloured(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crops and flips with another contrast and another brightness."""
    made = crop_and_flip(images, generator)
    contrast = 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, generator=generator)
    brightness = 0.4 * torch.randn(len(images), 1, 1, 1, generator=generator)
    return made * contrast.to(made) + brightness.to(made)


#: Other settings of a ridge, by name.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
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


@dataclass(frozen=True)
class Cell:
    """One combination. `copies` is how many altered copies of each image the scoring sees.

    The target is a share of the MACs that stay, or of the units that leave.
    """

    classes: int
    draw: int
    criterion: str
    allocation: str
    rescoring: str
    macs: float | None
    copies: int = 0
    variant: str = "default"
    remove: float | None = None

    @property
    def target(self) -> str:
        """In words."""
        if self.macs is not None:
            return f"At {100 * self.macs:.0f} % of the MACs"
        return f"With {100 * (self.remove or 0):.0f} % of the units removed"


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
    made: dict[tuple[str, str], Repair] = {}
    for cell in cells:
        key = cell.criterion, cell.copies
        if key not in scores:
            with seeded(cell.draw, 1):
                samples = reference(stage, cell.copies)
                scores = {key: score(stage.model, samples, cell.criterion, graph=stage.graph, batch_size=50)}
        goal: dict[str, Any] = {"keep": {"macs": cell.macs}} if cell.macs is not None else {"remove": cell.remove}
        chosen = plan(stage.graph, scores[key], scope=cell.allocation, **goal)
        small = apply(stage.model, chosen)
        row: dict[str, Any] = {
            "units": chosen.units[1] / chosen.units[0],
            "macs": chosen.after.macs / chosen.before.macs,
        }
        row["none"] = {"accuracy": measured(small, stage.test)}
        for name in repairs if cell.variant == "default" else ["ridge"]:
            settings: dict[str, Any] = {"at_once": at_once, **VARIANTS[cell.variant]}
            # Kept for the next target, with what the original answers.
            repair = made.setdefault((name, cell.variant), Repair(name, **settings))  # type: ignore[arg-type]
            begin = time.perf_counter()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            outcome = repair.examine(small, stage.model, stage.reference)
            seconds = time.perf_counter() - begin
            row["none"]["divergence"] = outcome.divergence["none"]
            row[name] = {"accuracy": measured(outcome.model, stage.test), "divergence": outcome.divergence[name],
                         "taken": outcome.method, "seconds": seconds}  # fmt: skip
            if stage.reference[0].is_cuda:
                row[name]["peak"] = torch.cuda.max_memory_allocated()
            else:
                row[name]["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield cell, row


def timed(stage: Scene, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """How many times as fast each smaller model is, for batches of 1 and 32."""
    found = score(stage.model, stage.reference, cells[0].criterion, graph=stage.graph, batch_size=50)
    for cell in cells:
        chosen = plan(stage.graph, found, keep={"macs": cell.macs or 1.0}, scope=cell.allocation)
        timings = time_batches(stage.model, apply(stage.model, chosen), stage.reference[0][:1])
        yield cell, {"gains": {str(timing.batch): timing.gain for timing in timings}}


def stepped(stage: Scene, cell: Cell, goals: list[float], name: str) -> Iterator[tuple[float, float, str]]:
    """Score anew before every step, on what the repair of the step before has left: goal, accuracy, repair taken."""
    repair = None if name == "none" else Repair(name, at_once=1024)  # type: ignore[arg-type]
    samples = reference(stage, cell.copies)
    model, so_far, taken = stage.model, None, "none"
    for number, goal in enumerate(goals, 1):
        with seeded(cell.draw, number):
            found = score(model, samples, cell.criterion, graph=stage.graph, batch_size=50, start=so_far)
        so_far = plan(stage.graph, found, keep={"macs": goal}, scope=cell.allocation, start=so_far)
        model = apply(stage.model, so_far)
        if repair is not None:
            outcome = repair.examine(model, stage.model, stage.reference)
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
    if "best" in row:
        return float(row["best"]["accuracy"])
    known = {name: row[name] for name in ("none", *REPAIRS) if name in row and "divergence" in row[name]}
    if len(known) < 4:
        return None
    return float(min(known.values(), key=lambda r: r["divergence"])["accuracy"])


def spread(values: list[float]) -> str:
    """Mean and the half-width of its 95 % interval over draws, by Student's t."""
    if not values:
        return ""
    mean = f"{100 * np.mean(values):.1f}"
    if len(values) == 1:
        return mean
    half = float(student.ppf(0.975, len(values) - 1)) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{mean} ± {100 * half:.1f}"


def table(folder: Path) -> str:
    found = dict(results(folder))
    lines: list[str] = []
    for classes in sorted({cell.classes for cell in found}):
        mine = {c: r for c, r in found.items() if c.classes == classes}
        lines += [f"## {classes} classes", ""]
        for variant, rescoring in product(["default", *studied(mine)], RESCORINGS):
            some = {c: r for c, r in mine.items() if (c.variant, c.rescoring) == (variant, rescoring)}
            for copies in sorted({c.copies for c in some}):
                how = f", ridge with {variant}" if variant != "default" else ""
                seen = f", scores from {copies} altered copies of each image too" if copies else ""
                lines += [
                    f"### scored {rescoring}{how}{seen}: accuracy in %, with the half-width of its 95 % interval",
                    "",
                ]
                lines += section({c: r for c, r in some.items() if c.copies == copies})
        lines += rescored(mine)
        lines += speeds(mine)
        lines += variants(mine)
    ridges = [row["ridge"] for row in found.values() if "ridge" in row]
    times, peaks, resident = ([r[key] for r in ridges if key in r] for key in ("seconds", "peak", "resident"))
    if times:
        lines.append(
            f"A ridge repair took {np.median(times):.1f} s (median of {len(times)})"
            + (f", at most {max(peaks) / 2**30:.1f} GiB of GPU memory" if peaks else "")
            + (f", the whole process on a CPU at most {max(resident) / 2**30:.1f} GiB" if resident else "")
            + "."
        )
    return "\n".join(lines)


def studied(cells: dict[Cell, dict[str, Any]]) -> list[str]:
    """Variants that were measured with several criteria or allocations."""
    seen: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for cell in cells:
        seen[cell.variant].add((cell.criterion, cell.allocation))
    return [variant for variant, pairs in seen.items() if len(pairs) > 1 and variant != "default"]


def section(cells: dict[Cell, dict[str, Any]]) -> list[str]:
    """A table for each target: criteria and allocations in rows, repairs in columns."""
    lines: list[str] = []
    names = ["none", *REPAIRS, "best"]
    lost: dict[str, list[float]] = {}
    for target in targets(cells):
        lines += [f"{target}:", ""]
        lines += [
            "| criterion | allocation | draws | MACs left | " + " | ".join(names) + " |",
            "|---|---|---|---|" + "---|" * len(names),
        ]
        for criterion, allocation in product(CRITERIA, ALLOCATIONS):
            some = {
                c: r
                for c, r in cells.items()
                if (c.criterion, c.allocation, c.target) == (criterion, allocation, target)
            }
            if not some:
                continue
            columns = []
            for name in names:
                values = [best(r) if name == "best" else r.get(name, {}).get("accuracy") for r in some.values()]
                columns.append(spread([v for v in values if v is not None]))
            left = [r["macs"] for r in some.values() if "macs" in r]
            share = f"{100 * np.mean(left):.0f} %" if left else ""
            lines.append(f"| {criterion} | {allocation} | {len(some)} | {share} | " + " | ".join(columns) + " |")
            if next(iter(some)).remove is not None:
                gains = [(b - r["none"]["accuracy"]) for r in some.values() if (b := best(r)) is not None]
                if gains:
                    lost[f"{criterion}, {allocation}: {target.lower()}"] = gains
        lines.append("")
    if lost:
        worst = min(lost, key=lambda where: float(np.mean(lost[where])))
        lines += [
            f"Where units were removed by number, *best* was at worst {100 * np.mean(lost[worst]):+.1f} points from no "
            f"repair ({worst}; mean over draws), and {100 * min(map(min, lost.values())):+.1f} in a single draw.",
            "",
        ]
    return lines


def rescored(cells: dict[Cell, dict[str, Any]]) -> list[str]:
    """What scoring anew before each step adds after a ridge, on draws for which scoring once was measured too."""
    more: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell, row in cells.items():
        other = cells.get(replace(cell, rescoring="once"), {})
        if cell.rescoring != "once" and "ridge" in row and "ridge" in other:
            gain = row["ridge"]["accuracy"] - other["ridge"]["accuracy"]
            more[cell.criterion, cell.allocation][cell.target].append(gain)
    if not more:
        return []
    goals = targets({cell: row for cell, row in cells.items() if cell.rescoring != "once"})
    lines = [
        "### what scoring at each step adds to scoring once, same draws, after a ridge: points", "",
        "| criterion | allocation | draws | " + " | ".join(goal.lower() for goal in goals) + " |",
        "|---|---|---|" + "---|" * len(goals),
    ]  # fmt: skip
    for (criterion, allocation), gains in more.items():
        draws = max(map(len, gains.values()))
        lines.append(f"| {criterion} | {allocation} | {draws} | " + " | ".join(spread(gains[g]) for g in goals) + " |")
    return [*lines, ""]


def speeds(cells: dict[Cell, dict[str, Any]]) -> list[str]:
    """How fast the smaller models are, and what a ridge leaves of the accuracy."""
    seen: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell, row in cells.items():
        if cell.variant == "default" and cell.rescoring == "once" and not cell.copies:
            seen[cell.target, cell.criterion, cell.allocation].append(row)
    lines: list[str] = []
    for goal, criterion, allocation in [(g, c, a) for g in targets(cells) for c in CRITERIA for a in ALLOCATIONS]:
        rows = seen[goal, criterion, allocation]
        gains = [row["gains"] for row in rows if "gains" in row]
        if gains:
            times = " | ".join(f"{np.mean([g[batch] for g in gains]):.2f}x" for batch in gains[0])
            kept = spread([row["ridge"]["accuracy"] for row in rows if "ridge" in row])
            lines.append(f"| {goal} | {criterion} | {allocation} | {times} | {kept} |")
    if not lines:
        return []
    return [
        "### times as fast as the whole model, and accuracy after a ridge", "",
        "| | criterion | allocation | batch 1 | batch 32 | accuracy |", "|---|---|---|---|---|---|", *lines, "",
    ]  # fmt: skip


def variants(cells: dict[Cell, dict[str, Any]]) -> list[str]:
    """Other settings of the ridge, on draws for which the usual one was measured too."""
    lines: list[str] = []
    groups: dict[tuple[str, str, int, str], dict[str, dict[int, dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for c, r in cells.items():
        if c.rescoring == "once" and "ridge" in r:
            groups[c.criterion, c.allocation, c.copies, c.target][c.variant][c.draw] = r
    for (criterion, allocation, copies, target), by_variant in groups.items():
        if len(by_variant) < 2:
            continue
        lines += [
            f"### variants of the ridge, {criterion}, {allocation}, {copies} copies in scoring: {target.lower()}", "",
            "| variant | draws | accuracy | than the default, same draws | seconds |",
            "|---|---|---|---|---|",
        ]  # fmt: skip
        usual = by_variant.get("default", {})
        for name, rows in by_variant.items():
            more = [rows[d]["ridge"]["accuracy"] - usual[d]["ridge"]["accuracy"] for d in rows if d in usual]
            kept = [r["ridge"] for r in rows.values()]
            lines.append(
                f"| {name} | {len(rows)} | {spread([r['accuracy'] for r in kept])} | {spread(more)} | "
                f"{np.median([r['seconds'] for r in kept]):.1f} |"
            )
        lines.append("")
    return lines


def targets(cells: dict[Cell, dict[str, Any]]) -> list[str]:
    """From the largest model to the smallest."""
    order = sorted(cells, key=lambda c: (c.macs is None, -(c.macs or 0), c.remove or 0))
    return list(dict.fromkeys(c.target for c in order))


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
    parser.add_argument("--macs", nargs="*", type=float, default=(0.8, 0.6, 0.35, 0.16))
    parser.add_argument("--remove", nargs="*", type=float, default=(), help="shares of the units, scored once")
    parser.add_argument("--latency", action="store_true", help="time the smaller models, with --rescoring once")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=("default",), help="of the ridge")
    parser.add_argument("--repairs", nargs="+", choices=REPAIRS, default=REPAIRS)
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
