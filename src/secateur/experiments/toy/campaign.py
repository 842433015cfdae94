"""The whole grid over all cores: train what is missing, compute what is missing, gather. May be stopped at any time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secateur.experiments.toy.blocks import Task, block
from secateur.experiments.toy.nets import trained
from secateur.experiments.toy.recipe import CRITERIA, SETS, Reading, Recipe
from secateur.experiments.toy.store import Arrays, source_digest
from secateur.report.environment import available_cores

# Seeds in a block: enough to share the work on the training set, few enough that a stop loses little.
_SEEDS = 5

# Called with what was just finished, and how many of `size` parts are done.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Outcome:
    """All that was measured for one set under one reading. Arrays as in `blocks.block`, with all seeds."""

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
    """Everything the tables and figures are made from. What the cache holds is not computed again."""
    jobs = [(name, reading) for name in reversed(SETS) for reading in chosen]  # the spirals take longest: first
    blocks = _blocks(recipe)
    tasks = {job: [Task(*job, recipe, seeds, cache, source_digest()) for seeds in blocks] for job in jobs}
    networks: dict[tuple[str, str], tuple[float, float]] = {}
    found: dict[tuple[str, str], dict[int, Arrays]] = {(name, reading.name): {} for name, reading in jobs}
    done = 0
    with _Pool(workers or available_cores()) as pool:
        for name, reading in jobs:
            pool.submit(_Job(name, reading), _train, (name, reading, recipe, cache))
        for job, result in pool.finished():
            key = job.name, job.reading.name
            if job.task is None:
                networks[key] = result
                for task in tasks[job.name, job.reading]:
                    pool.submit(_Job(job.name, job.reading, task), _block, (task,))
            else:
                found[key][job.task.seeds[0]] = result
            done += 1
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


class _Pool:
    """Jobs on several processes of one thread each, so that results do not depend on the number of cores.

    With one worker they run here. Leaving the pool early ends the processes; files are written whole or not at all.
    """

    def __init__(self, workers: int) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if workers > 1:
            # A forked child would inherit the state of torch's thread pool, and hang in it.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, context, initializer=_one_thread)
        self._waiting: dict[Future[Any], _Job] = {}
        self._queue: list[tuple[_Job, Callable[..., Any], tuple[Any, ...]]] = []
        self._threads = torch.get_num_threads()

    def __enter__(self) -> _Pool:
        if self._executor is None:
            torch.set_num_threads(1)
        return self

    def submit(self, job: _Job, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._executor is None:
            self._queue.append((job, work, arguments))
        else:
            self._waiting[self._executor.submit(work, *arguments)] = job

    def finished(self) -> Iterator[tuple[_Job, Any]]:
        """Jobs as they finish; more may be submitted meanwhile."""
        while self._queue:
            job, work, arguments = self._queue.pop(0)
            yield job, work(*arguments)
        while self._waiting:
            ready, _ = wait(self._waiting, return_when=FIRST_COMPLETED)
            for future in ready:
                yield self._waiting.pop(future), future.result()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._executor is None:
            torch.set_num_threads(self._threads)
            return
        if kind is not None:
            for process in list((self._executor._processes or {}).values()):
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children; they need not complain
