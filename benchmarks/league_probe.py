"""How fast a step of the league is, with and without the compiler, and which of the two a run should take."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.league_models import MAGNITUDE, OTHERS, OURS, PARTS, SPEEDS, TAYLOR, USUAL, Job
from benchmarks.league_together import WARM_UP, Together
from benchmarks.league_worker import Worker

LONGEST = 150  # seconds that the choice of the fastest way may take
_ROUNDS = 3


def timed(group: Together, worker: Worker, steps: int) -> float:
    """Seconds of a step, the median of some rounds."""
    x, y = (t[: USUAL.batch_size] for t in worker.train)
    for _ in range(WARM_UP + 2):
        group.step(x, y, 1e-4)
    found = []
    for student in group.students:
        student.sums.zero_()
    for _ in range(_ROUNDS):
        synchronize(worker.device)
        begin = time.perf_counter()
        for _ in range(steps):
            group.step(x, y, 1e-4)
        synchronize(worker.device)
        found.append((time.perf_counter() - begin) / steps)
    return statistics.median(found)


def probe(options: argparse.Namespace) -> None:
    """Print the seconds of a step for 1, 4 and 11 students, plain and compiled. What is new is tried last."""
    worker, begin = Worker(options), time.time()
    rows = [(row, 2.55) for row in (OURS, MAGNITUDE, TAYLOR, *PARTS, *OTHERS)] + [
        (OURS, n) for n in SPEEDS if n != 2.55
    ]
    deadline, counts = begin + 60 * options.minutes, (1, 4, len(rows))
    ways = [(1, "", False), *((count, "", True) for count in counts), *((count, "inductor", True) for count in counts)]
    for count, backend, recorded in ways:
        if time.time() > deadline:
            print("the minutes are over", flush=True)
            return
        made = time.time()
        try:
            group = worker.group([Job(row, speed, 1, 0) for row, speed in rows[:count]], backend, recorded)
            seconds = timed(group, worker, options.steps)
        except Exception:
            print(f"{count} students {backend}:\n{traceback.format_exc()}", flush=True)
            continue
        losses = [round(float(student.sums[0]) / _ROUNDS / options.steps, 4) for student in group.students]
        print(f"{count} students, {group.way}: {1000 * seconds:.2f} ms a step, {1000 * seconds / count:.2f} for each; "
              f"losses {losses}; measured in {time.time() - made:.1f} s", flush=True)  # fmt: skip


def _compare(options: argparse.Namespace, jobs: Sequence[Job], file: Path) -> None:
    worker = Worker(options)
    for backend in ("", "inductor"):
        group = worker.group(jobs, backend)
        seconds = timed(group, worker, options.steps)
        print(f"{len(jobs)} students, {group.way}: {1000 * seconds:.2f} ms a step", flush=True)
        with file.open("a") as lines:
            lines.write(json.dumps({"backend": backend, "seconds": seconds, "way": group.way}) + "\n")


def fastest(options: argparse.Namespace, jobs: Sequence[Job], spawn: Any) -> str:
    """The compiler to use: "" for none. It is tried in a process of its own, which may fail or take too long."""
    file = Path(options.out) / f"fastest-{options.device}-{torch.__version__}.jsonl"
    if not file.exists():
        trial = spawn.Process(target=_compare, args=(options, jobs, file))
        trial.start()
        trial.join(LONGEST)
        if trial.is_alive():
            print(f"the compiler is not ready after {LONGEST} s", flush=True)
            trial.kill()
            trial.join()
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    backend = min(found, key=lambda line: line["seconds"])["backend"] if found else ""
    print(f"steps are {'compiled' if backend else 'not compiled'}: {found}", flush=True)
    return str(backend)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
