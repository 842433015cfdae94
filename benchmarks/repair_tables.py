"""Tables and the figure of the repair study, from what `benchmarks.repair` has measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import t as student

from benchmarks.repair_cells import ALLOCATIONS, CRITERIA, REPAIRS, RESCORINGS, Cell, results


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


#: The lines of the figure's first frame: criterion, allocation, repair, colour.
_LINES = (
    ("lrp", "cost", "ridge", "#cf222e"),
    ("taylor", "layer", "ridge", "#1f6feb"),
    ("random", "layer", "ridge", "#8b949e"),
    ("weight", "global", "ridge", "#1b1f24"),
    ("lrp", "cost", "none", "#cf222e"),
    ("taylor", "layer", "none", "#1f6feb"),
)


def figure(folder: Path, path: Path) -> None:
    """Three classes, scored once: accuracy over MACs left, repaired and not, and over speed by allocation."""
    cells = {
        c: r
        for c, r in results(folder)
        if (c.classes, c.variant, c.rescoring, c.copies) == (3, "default", "once", 0) and c.macs is not None
    }
    sheet = Figure(figsize=(9.4, 3.8), layout="constrained")
    over_macs, over_speed = sheet.subplots(1, 2)

    def mean(criterion: str, allocation: str, name: str) -> dict[float, tuple[float, float]]:
        found: dict[float, list[float]] = defaultdict(list)
        for c, r in cells.items():
            if (c.criterion, c.allocation) == (criterion, allocation) and name in r and c.macs is not None:
                found[c.macs].append(100 * r[name]["accuracy"])
        return {m: (float(np.mean(v)), float(np.std(v))) for m, v in sorted(found.items(), reverse=True)}

    for criterion, allocation, name, colour in _LINES:
        points = mean(criterion, allocation, name)
        middle, spread_ = zip(*points.values(), strict=True)
        style = "o-" if name != "none" else "o:"
        label = f"{criterion}, {allocation}, {'repaired' if name != 'none' else 'not repaired'}"
        over_macs.errorbar([100 * m for m in points], middle, spread_, fmt=style, color=colour, ms=4, lw=1.3,
                           capsize=2, label=label)  # fmt: skip
    for allocation, colour in zip(("cost", "layer", "time"), ("#cf222e", "#8250df", "#1a7f37"), strict=True):
        points = mean("lrp", allocation, "ridge")
        gains = {c.macs: r["gains"]["32"] for c, r in cells.items() if c.allocation == allocation and "gains" in r}
        known = [m for m in points if m in gains]
        middle, spread_ = zip(*(points[m] for m in known), strict=True)
        over_speed.errorbar([gains[m] for m in known], middle, spread_, fmt="o-", color=colour, ms=4, lw=1.3, capsize=2,
                            label=f"lrp, {allocation}")  # fmt: skip
        for m, y in zip(known, middle, strict=True):
            at = (gains[m], y)
            over_speed.annotate(f"{100 * m:.0f} %", at, (4, -9), textcoords="offset points", color=colour, fontsize=7)
    over_macs.set(xlabel="MACs left in %", ylabel="test accuracy in %", title="what repair does")
    over_macs.invert_xaxis()
    over_speed.margins(x=0.09)
    over_speed.set(xlabel="times as fast on 32 images, 2 CPU cores", title="what the allocation does, after repair")
    for axis, place in ((over_macs, "center right"), (over_speed, "lower left")):
        axis.grid(alpha=0.3)
        axis.legend(
            frameon=False, fontsize="x-small", loc=place, title="shares: MACs left" if axis is over_speed else None
        )
    FigureCanvasAgg(sheet).print_png(str(path))
