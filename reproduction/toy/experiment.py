"""The toy experiment from start to end: run the grid, draw, and write a folder of tables, figures and a page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from reproduction.pool import Job, Pool
from reproduction.toy import campaign, claims, summary, tables
from reproduction.toy.recipe import Reading, Recipe
from reproduction.toy.result import Reproduction, as_json, run_record
from reproduction.toy.tables import Index, Row
from secateur.atomic import write
from secateur.report.environment import available_cores

_CSV = {
    "accuracy": ("unpruned", "accuracy"),
    "similarity_to_lrp": ("with_lrp",),
    "self_similarity": ("self",),
    "lrp_across_sizes": ("across",),
}

# Called with what was just finished, how much is done, and how much there is.
Progress = Callable[[str, int, int], None]


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
