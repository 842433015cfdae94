"""From nothing to a folder of tables, figures and a page."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import secateur
from reproduction.toy import campaign, claims, summary, tables
from reproduction.toy.campaign import Outcome
from reproduction.toy.claims import Claim
from reproduction.toy.pool import Job, Pool
from reproduction.toy.ranking import Spread
from reproduction.toy.recipe import CRITERIA, Reading, Recipe
from reproduction.toy.store import source_digest
from reproduction.toy.tables import Index, Row
from secateur.report.document import write
from secateur.report.environment import available_cores

FORMAT = "secateur-toy-1"

_CSV = {
    "accuracy": ("unpruned", "accuracy"),
    "similarity_to_lrp": ("with_lrp",),
    "self_similarity": ("self",),
    "lrp_across_sizes": ("across",),
}

# Called with what was just finished, how much is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Reproduction:
    """What came out, and where it lies."""

    recipe: Recipe
    readings: list[Reading]
    outcomes: list[Outcome]
    rows: list[Row]
    claims: list[Claim]
    seconds: float
    workers: int
    folder: Path

    @property
    def page(self) -> Path:
        """The page to look at."""
        return self.folder / "report.html"


def reproduce(
    folder: Path,
    recipe: Recipe,
    chosen: list[Reading],
    cache: Path,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Run what the cache does not hold, and write every table and figure into `folder`."""
    from reproduction.toy import figures, page  # drawing is an extra

    began = time.perf_counter()
    done, total = 0, campaign.size(recipe, chosen) + 3 * len(chosen)

    def report(text: str, finished: int) -> None:
        nonlocal done
        done = finished
        if progress:
            progress(text, done, total)

    def keep(made: figures.Picture | list[Row]) -> None:
        if isinstance(made, figures.Picture):
            for theme, png in made.png.items():
                write(folder / "figures" / f"{made.name}{'' if theme == 'light' else '-dark'}.png", png)
            report(made.name, done + 1)

    workers = workers or available_cores()
    with Pool(workers) as pool:
        outcomes = campaign.gathered(pool, recipe, chosen, cache, report)
        jobs: list[Job] = [(figures.boundaries, (reading, recipe, cache)) for reading in chosen]
        jobs += [(tables.rows, ([outcome], recipe)) for outcome in outcomes]
        maps_and_rows = pool.results(jobs, keep)
        made = [row for part in maps_and_rows[len(chosen) :] for row in part]
        index = Index(made)
        drawings = (figures.influence, figures.bars)
        charts = pool.results([(draw, (index, reading, recipe)) for reading in chosen for draw in drawings], keep)
    pictures = {r.name: [maps_and_rows[i], charts[2 * i], charts[2 * i + 1]] for i, r in enumerate(chosen)}
    found = [claim for reading in chosen for claim in claims.check(index, reading.name, recipe)]
    result = Reproduction(recipe, chosen, outcomes, made, found, time.perf_counter() - began, workers, folder)
    for name, which in _CSV.items():
        write(folder / f"{name}.csv", tables.as_csv([row for row in made if row.table in which]).encode())
    write(folder / "results.json", json.dumps(as_json(result)).encode())
    write(folder / "run.json", json.dumps(run_record(result), indent=1).encode())
    write(folder / "summary.md", summary.markdown(result).encode())
    write(result.page, page.render(result, pictures).encode())
    return result


def as_json(result: Reproduction) -> dict[str, Any]:
    """All numbers. Nothing here depends on when or how fast they were computed."""
    return {
        "format": FORMAT,
        "recipe": result.recipe.as_dict(),
        "nets": [
            {
                "net": outcome.reading.name,
                "set": outcome.name,
                "accuracy": round(outcome.trained_accuracy, 5),
                "removed": {key: _removed(outcome, i) for i, key in enumerate(map(str, result.recipe.sizes))},
            }
            for outcome in result.outcomes
        ],
        "lrp_variants": variants(result),
        "claims": [asdict(claim) | {"holds": claim.holds} for claim in result.claims],
        "columns": list(Row.__dataclass_fields__),
        "rows": [[tables.short(value) for value in vars(row).values()] for row in result.rows],
    }


def variants(result: Reproduction) -> list[dict[str, Any]]:
    """Accuracy on the training set by every way to compute LRP."""
    made = []
    for outcome in result.outcomes:
        for i, n in enumerate(result.recipe.variant_sizes):
            for v, variant in enumerate(outcome.reading.variants):
                spread = Spread.of(outcome.arrays["variants"][i, :, v].astype(np.float64))
                made.append(
                    {
                        "net": outcome.reading.name,
                        "set": outcome.name,
                        "n": n,
                        "variant": variant.text,
                        "main": variant == outcome.reading.variant,
                        "mean": round(spread.mean, 4),
                        "std": round(spread.std, 4),
                    }
                )
    return made


def _removed(outcome: Outcome, size: int) -> dict[str, list[float]]:
    """Mean number of units that each hidden layer lost, by criterion."""
    means = outcome.arrays["removed"][size].mean(0)
    return {name: [round(float(v), 1) for v in means[c]] for c, name in enumerate(CRITERIA)}


def run_record(result: Reproduction) -> dict[str, Any]:
    """When and where: what may differ between two runs with the same numbers."""
    return {
        "secateur": secateur.__version__,
        "code": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processes": result.workers,
        "seconds_since_this_start": round(result.seconds, 1),
        "largest_gap_to_pruned_networks": max(float(outcome.arrays["gap"].max()) for outcome in result.outcomes),
        "training_seconds": {
            f"{outcome.name}, {outcome.reading.name}": round(outcome.training_seconds, 1) for outcome in result.outcomes
        },
    }
