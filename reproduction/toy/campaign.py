"""The whole grid on all cores: train missing networks, compute missing blocks, collect. It can be stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.criteria import CRITERIA
from reproduction.pool import Pool
from reproduction.toy.blocks import Task, block
from reproduction.toy.nets import trained
from reproduction.toy.recipe import SETS, Reading, Recipe
from reproduction.toy.store import Arrays, source_digest
from secateur.report.environment import available_cores

# Seeds in a block. The seeds share the work on the training set; with few of them, a stop loses little.
_SEEDS = 5

# Called with the part that was just finished, and the number of finished parts of all `size`.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Outcome:
    """All measurements of one set and one reading. Arrays as in `blocks.block`, with all seeds."""

    name: str
    reading: Reading
    trained_accuracy: float
    training_seconds: float
    arrays: Arrays

    def accuracy(self, criterion: str, view: int) -> np.ndarray[Any, Any]:
        """Percent, sizes by seeds."""
        return self.arrays["accuracy"][:, :, CRITERIA.index(criterion), view].astype(np.float64)

    def ranks(self, criterion: str) -> np.ndarray[Any, Any]:
        """Doubled ranks, sizes by seeds by units."""
        return self.arrays["ranks"][:, :, CRITERIA.index(criterion)]


@dataclass(frozen=True)
class _Job:
    """A network to train, or a block."""

    name: str
    reading: Reading
    task: Task | None = None

    @property
    def text(self) -> str:
        what = f"{self.name}, {self.reading.name} net"
        return f"{what}, seeds {self.task.seeds[0]}–{self.task.seeds[-1]}" if self.task else f"{what}, training"


def run(
    recipe: Recipe, chosen: list[Reading], cache: Path, workers: int | None = None, progress: Progress | None = None
) -> list[Outcome]:
    """The data of all tables and figures. Parts in the cache are not computed again."""
    with Pool(workers or available_cores()) as pool:
        return gathered(pool, recipe, chosen, cache, progress)


def gathered(
    pool: Pool, recipe: Recipe, chosen: list[Reading], cache: Path, progress: Progress | None = None
) -> list[Outcome]:
    """The same, in a pool that the caller goes on using."""
    jobs = [(name, reading) for name in reversed(SETS) for reading in chosen]  # spirals take longest: first
    blocks = _blocks(recipe)
    tasks = {job: [Task(*job, recipe, seeds, cache, source_digest()) for seeds in blocks] for job in jobs}
    networks: dict[tuple[str, str], tuple[float, float]] = {}
    found: dict[tuple[str, str], dict[int, Arrays]] = {(name, reading.name): {} for name, reading in jobs}
    for name, reading in jobs:
        pool.submit(_Job(name, reading), (_train, (name, reading, recipe, cache)))
    for done, (job, result) in enumerate(pool.finished(), 1):
        key = job.name, job.reading.name
        if job.task is None:
            networks[key] = result
            for task in tasks[job.name, job.reading]:
                pool.submit(_Job(job.name, job.reading, task), (_block, (task,)))
        else:
            found[key][job.task.seeds[0]] = result
        if progress:
            progress(job.text, done)
    outcomes = []
    for reading in chosen:
        for name in SETS:
            parts = [found[name, reading.name][seeds[0]] for seeds in blocks]
            outcomes.append(Outcome(name, reading, *networks[name, reading.name], _joined(parts)))
    return outcomes


def size(recipe: Recipe, chosen: list[Reading]) -> int:
    """How many parts there are: networks to train, and blocks."""
    return len(chosen) * len(SETS) * (1 + len(_blocks(recipe)))


def _blocks(recipe: Recipe) -> list[tuple[int, ...]]:
    seeds = range(recipe.seeds)
    return [tuple(seeds[start : start + _SEEDS]) for start in seeds[::_SEEDS]]


def _joined(parts: list[Arrays]) -> Arrays:
    seeds_at = {"accuracy": 1, "unpruned": 0, "ranks": 1, "removed": 1, "variants": 1, "gap": 0}
    return {key: np.concatenate([part[key] for part in parts], axis) for key, axis in seeds_at.items()}


def _train(name: str, reading: Reading, recipe: Recipe, cache: Path) -> tuple[float, float]:
    network = trained(name, reading, recipe, cache)
    return network.accuracy, network.seconds


def _block(task: Task) -> Arrays:
    return block(task)[0]
