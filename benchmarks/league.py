"""The league of CIFAR-10's ResNet-56: MACs divided by 2.1, 2.55 and 4, then trained for 0, 1, 5, 20 or 100 epochs.

    python -m benchmarks.league --data DATA --weights resnet56_cifar10.safetensors --out runs --minutes 8
    python -m benchmarks.league --out runs --table     # the tables, from what was measured so far

DATA holds the pieces that `python -m benchmarks.cifar` made, or the official binary files. Runs are taken in the order
of `plan` until the minutes are over; runs of one seed are trained together in one process, and several processes share
one GPU. The same command goes on: finished runs are lines of `runs/results.jsonl`, and the others have checkpoints.
Accuracy is that of the last epoch on all 10,000 test images; nothing is chosen by it. `--prepare` makes the smaller
models beforehand; those of Torch-Pruning need it installed. `--probe` prints the seconds of a step. `--fastest` times
some steps first, with and without the compiler, and takes the faster way. `--unpruned` measures the whole network.

The rows "nothing removed" train the whole network as the others are trained, and keep it in `runs/whole`. A second
league can begin there, with the better network as the original and as the teacher:

    python -m benchmarks.league --data DATA --weights runs/whole/NAME.safetensors --out further
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import queue
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.league_models import (
    FAIR,
    FIELD,
    FIRST,
    LENGTHS,
    MAGNITUDE,
    OTHERS,
    OURS,
    PARTS,
    PATIENT,
    RATE,
    RIVAL,
    SECOND,
    SEEDS,
    SPEEDS,
    SWEEP,
    TAYLOR,
    THIRD,
    WHOLE,
    Job,
    macs,
    padded,
    unpadded,
)  # fmt: skip
from benchmarks.league_probe import fastest, probe
from benchmarks.league_together import Student
from benchmarks.league_together import begin as begin_together
from benchmarks.league_worker import Worker, keep
from secateur.recover.checkpoint import random_state, set_random_state
from secateur.recover.samples import Samples
from secateur.running.accuracy import accuracy
from secateur.running.sandbox import seeded
from secateur.running.tensor_files import decode, encode, read_checkpoint, write_checkpoint

ON_THE_WAY = (1, 5, 20)  # epochs after which the runs of 100 are measured too
FORMAT, SAVED = "league-together-2", 120.0  # seconds between two checkpoints
BROKEN, RESTARTS = 3, 3  # the exit status of a process whose GPU fails, and how many are started again
NEAR = 11  # runs further down in the plan do not slow down those that matter more


def plan() -> list[Job]:
    """What is run, the most important first. Runs of one seed that stand near each other are trained together."""
    rows, short = [MAGNITUDE, TAYLOR, *PARTS, *OTHERS], (20, 5, 1, 0)
    first = [(OURS, speed) for speed in SPEEDS] + [(row, 2.55) for row in rows]
    jobs = [Job(row, speed, 100, seed) for seed in SEEDS for row, speed in first]
    jobs += [
        Job(row, speed, 100, seed)
        for seed in SEEDS
        for row, speed in (*((PATIENT, speed) for speed in SPEEDS), (RIVAL, 2.55))
    ]
    jobs += [Job(row, 1.0, 100, seed) for seed in SEEDS for row in (WHOLE, replace(WHOLE, teacher=True))]
    jobs += [Job(FIRST, 1.0, 100, seed) for seed in SEEDS]
    later = [(row, speed) for *ours, rival in (SECOND, THIRD) for row, speed in [*product(ours, SPEEDS), (rival, 2.55)]]
    jobs += [Job(row, speed, 100, seed) for seed in SEEDS for row, speed in later]
    ours, *others, whole = FIELD
    field = [(ours, speed) for speed in SPEEDS] + [(row, 2.55) for row in others] + [(whole, 1.0)]
    jobs += [Job(row, speed, 100, seed) for seed in SEEDS for row, speed in field]
    jobs += [Job(row, 2.55, 100, seed) for seed in SEEDS for row in FAIR]
    jobs += [Job(row, 2.55, epochs, seed) for epochs in short for seed in SEEDS for row in (OURS, *rows, *FAIR)]
    jobs += [Job(row, 2.55, epochs, seed) for epochs in (5, 1) for seed in SEEDS for row in SWEEP]
    for speed in (2.1, 4.0):
        jobs += [Job(row, speed, epochs, seed) for epochs in short for seed in SEEDS for row in (OURS, *rows, *FAIR)]
    jobs += [Job(row, speed, 100, seed) for speed in (2.1, 4.0) for row in (*rows, *FAIR) for seed in SEEDS]
    # Before training, the teacher makes no difference.
    return list(dict.fromkeys(j if j.epochs else replace(j, row=replace(j.row, teacher=False)) for j in jobs))


# -- runs -------------------------------------------------------------------------------------------------------------
def place(out: Path, job: Job) -> Path:
    return out / "together" / f"{job.name}.safetensors"


def done(out: Path, job: Job) -> int:
    """How many epochs of a run are done."""
    path = place(out, job)
    return len(read_checkpoint(path, FORMAT)[0]["losses"]) if path.exists() else 0


def save(out: Path, jobs: Sequence[Job], students: Sequence[Student], losses: Sequence[list[float]]) -> None:
    place(out, jobs[0]).parent.mkdir(parents=True, exist_ok=True)
    drawn = random_state([], students[0].device)
    for job, student, known in zip(jobs, students, losses, strict=True):
        tensors: dict[str, Tensor] = {}
        state = encode({"moving": [t.detach().cpu() for t in student.moving], "random": drawn}, tensors, "state")
        write_checkpoint(place(out, job), tensors, {"format": FORMAT, "losses": known, "state": state})


def restore(out: Path, jobs: Sequence[Job], students: Sequence[Student]) -> list[list[float]]:
    """Go on where these runs were stopped, all after the same epoch. Returns their losses."""
    losses = []
    for job, student in zip(jobs, students, strict=True):
        header, tensors = read_checkpoint(place(out, job), FORMAT)
        state = decode(header["state"], tensors)
        with torch.no_grad():
            for own, kept in zip(student.moving, state["moving"], strict=True):
                own.copy_(kept)
        losses.append(list(header["losses"]))
    set_random_state(state["random"], [], students[0].device)
    return losses


def unfinished(options: argparse.Namespace) -> None:
    """How accurate interrupted runs are where they stand. Their rate has not come down yet."""
    worker = Worker(options)
    for job in plan():
        if place(worker.out, job).exists():
            small = worker.prepared(job)
            student = Student(padded(small).to(worker.device), 0.0, 0.0)
            (losses,) = restore(worker.out, [job], [student])
            found = measured(worker, student, small)
            print(f"{job.name}: {100 * found:.2f} % after {len(losses)} epochs", flush=True)


def measured(worker: Worker, student: Student, like: nn.Module) -> float:
    """The accuracy of a student on all test images, without half precision and the channels that were added."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):  # a search costs more than these few batches
        # All at once: beside other programs, a GPU lets each small operation wait for its turn.
        return accuracy(unpadded(student.net, like).eval(), worker.test, len(worker.test[1])).overall


def run(worker: Worker, jobs: Sequence[Job], deadline: float, backend: str = "") -> Iterable[dict[str, Any]]:
    """Train the runs of one seed and length. If the time is over, nothing comes back, and their files know the rest."""
    out, begin, epochs, seed = worker.out, time.time(), jobs[0].epochs, jobs[0].seed
    small = [worker.prepared(job) for job in jobs]
    group = worker.group(jobs, backend if epochs else "")
    students = group.students
    course: list[dict[int, float]] = [{} for _ in jobs]  # accuracies on the way; those before a stop are in the output
    recipe = jobs[0].row.recipe
    samples = Samples(worker.train, recipe.batch_size, recipe.augment, None, torch.device(worker.device))
    with seeded(seed, 0):
        first = done(out, jobs[0])
        losses = restore(out, jobs, students) if first else [[] for _ in jobs]
        if epochs and not first and not worker.as_they_are:
            begin_together(students, samples, seed)
        saved = told = time.time()
        for number in range(first, epochs):
            for known, loss in zip(losses, group.epoch(samples, number, epochs, RATE, recipe.curve), strict=True):
                known.append(loss)
            now = time.time()
            print(f"seed {seed}, {len(jobs)} students ({group.way}), epoch {number + 1}/{epochs}: {now - told:.2f} s, "
                  f"losses {', '.join(f'{known[-1]:.3f}' for known in losses)}", flush=True)  # fmt: skip
            told, over = now, now > deadline
            if number + 1 in ON_THE_WAY and epochs == max(LENGTHS):
                for known, net, student in zip(course, small, students, strict=True):
                    known[number + 1] = measured(worker, student, net)
                print(
                    f"seed {seed}, accuracies after {number + 1}: {[known[number + 1] for known in course]}", flush=True
                )
            if over or now - saved > SAVED or number + 1 == epochs:
                save(out, jobs, students, losses)
                saved = time.time()
            if over and number + 1 < epochs:
                return
    for job, net, student, known, way in zip(jobs, small, students, losses, course, strict=True):
        if job.row.choice == WHOLE.choice:
            keep(out / "whole" / f"{job.name}.safetensors", unpadded(student.net, net))
        yield {
            **asdict(job), "row": str(job.row), "accuracy": measured(worker, student, net), "course": way,
            "loss": known[-1] if known else None, "macs": macs(net), "params": sum(p.numel() for p in net.parameters()),
            "seconds": round(time.time() - begin, 1), "together": len(jobs), "way": group.way,
            "from": Path(worker.weights).stem, "norms": "as they are" if worker.as_they_are else "learnt before",
        }  # fmt: skip


def named(only: str) -> list[Job]:
    """The runs whose names have one of these parts in them, in the order of the parts: "A,B"."""
    return list(dict.fromkeys(job for part in only.split(",") for job in plan() if part in job.name))


def groups(out: Path, jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Runs of one seed, length and recipe that stand at the same epoch, in the order of their first one."""
    known = {(r["row"], r["speed"], r["epochs"], r["seed"]) for r in lines(out / "results.jsonl")}
    found: list[tuple[tuple[int, int, int, str], int, list[Job]]] = []
    for number, job in enumerate(jobs):
        if (str(job.row), job.speed, job.epochs, job.seed) not in known:
            key = job.seed, job.epochs, done(out, job), job.row.recipe.name
            fitting = (g for other, first, g in found if other == key and len(g) < most and number - first < NEAR)
            members = next(fitting, None)
            if members is None:
                found.append((key, number, [job]))
            else:
                members.append(job)
    found.sort(key=lambda entry: -entry[0][2])  # what is nearly done first
    return [members for *_, members in found]


def work(options: argparse.Namespace, given: Any, deadline: float, backend: str) -> None:
    worker = Worker(options)
    while time.time() < deadline:
        try:
            jobs = given.get(timeout=1)
        except queue.Empty:
            return
        try:
            finish(worker, jobs, deadline, backend)
        except Exception:
            print(f"failed: {[job.name for job in jobs]}\n{traceback.format_exc()}", flush=True)
            backend = ""  # what comes next is computed the plain way
            if not usable(worker.device):  # nothing can be computed in this process any more; another one goes on
                given.put(jobs)
                given.close()
                given.join_thread()
                os._exit(BROKEN)
            for job in jobs:  # from their files, each alone, so that one cannot stop the others
                try:
                    finish(worker, [job], deadline, backend)
                except Exception:
                    print(f"failed again: {job.name}\n{traceback.format_exc()}", flush=True)


def usable(device: str) -> bool:
    """Whether this process can still compute there. A recording that failed can leave its random numbers unusable."""
    try:
        torch.rand(8, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def finish(worker: Worker, jobs: Sequence[Job], deadline: float, backend: str) -> None:
    """Run jobs, and write down each result as soon as it is there."""
    for job, line in zip(jobs, run(worker, jobs, deadline, backend), strict=False):
        with (worker.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        place(worker.out, job).unlink(missing_ok=True)


def cuda_works(**more: str) -> bool:
    """Whether CUDA works with the environment as it is now, and with more of it."""
    code = "import torch; torch.ones(8, device='cuda').sum().item()"
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | more, capture_output=True, timeout=60)
    return run.returncode == 0


def share_gpu() -> bool:
    """Let several processes compute on the GPU at the same time (CUDA MPS), where that works."""
    place = {name: mkdtemp(prefix="mps-") for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    os.environ |= place
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, capture_output=True, timeout=20)
        good = cuda_works()
    except (OSError, subprocess.SubprocessError):
        good = False
    if not good:
        for name in place:
            del os.environ[name]
    else:
        atexit.register(subprocess.run, ["nvidia-cuda-mps-control"], input=b"quit", capture_output=True, timeout=20)
    print("processes share the GPU" if good else "processes take turns on the GPU: CUDA MPS does not work", flush=True)
    return good


def main(options: argparse.Namespace) -> None:
    deadline = time.time() + 60 * options.minutes
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    wanted = [job for job in named(options.only) if job.epochs <= options.epochs]
    todo = groups(out, wanted, options.most)
    print(f"{sum(map(len, todo))} runs in {len(todo)} groups", flush=True)
    if options.device == "cuda" and options.processes > 1 and not options.no_mps:
        share_gpu()
    spawn = mp.get_context("spawn")
    backend = "inductor" if options.compiled else ""
    if options.fastest and todo:
        backend = fastest(options, todo[0], spawn)
    given = spawn.Queue()
    for jobs in todo:
        given.put(jobs)
    # Not daemons: those may not have children, and a compiler has some.
    count = min(options.processes, len(todo))
    workers = [spawn.Process(target=work, args=(options, given, deadline, backend)) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        left = RESTARTS
        while any(worker.is_alive() for worker in workers) and time.time() < deadline + 30:
            time.sleep(0.5)
            for number, worker in enumerate(workers):
                if worker.exitcode not in (None, 0) and left:
                    # The first time, another program on the same GPU may have been the cause.
                    how = backend if left == RESTARTS else ""
                    way = "" if how == backend else ", the plain way"
                    print(f"a process ended with {worker.exitcode}; another one goes on{way}", flush=True)
                    workers[number] = spawn.Process(target=work, args=(options, given, deadline, how))
                    workers[number].start()
                    left -= 1
    finally:
        given.cancel_join_thread()
        for worker in workers:
            if worker.is_alive():
                worker.kill()


def prepare(worker: Worker, jobs: Iterable[Job]) -> None:
    """Make the smaller models that are not there, those of the rivals first."""
    for job in sorted(jobs, key=lambda job: job.row.choice not in (MAGNITUDE.choice, TAYLOR.choice)):
        try:
            worker.prepared(job)
        except Exception as error:
            print(f"failed: {job.prepared}: {type(error).__name__}: {error}", flush=True)


# -- tables -----------------------------------------------------------------------------------------------------------
def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def table(
    measured: list[dict[str, Any]], speeds: Sequence[float] = (1.0, *SPEEDS), lengths: Sequence[int] = LENGTHS
) -> str:
    """Mean of the seeds ± half of what they span, in per cent; how many seeds, where they are not three."""
    parts = []
    for speed in speeds:
        here = [line for line in measured if line["speed"] == speed]
        if not here:
            continue
        rows = dict.fromkeys(str(job.row) for job in plan() if any(line["row"] == str(job.row) for line in here))
        parts.append(
            f"MACs ÷ {speed:g}\n\n| | {' | '.join(f'{n} epochs' for n in lengths)} |\n|---|{'---|' * len(lengths)}"
        )
        for row in rows:
            cells = []
            for epochs in lengths:
                alike = (row,) if epochs else (row.removesuffix(" + teacher"), row)
                values = [100 * r["accuracy"] for r in here if r["epochs"] == epochs and r["row"] in alike]
                spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
                seeds = f" ({len(values)})" if 0 < len(values) < len(SEEDS) else ""
                cells.append(f"{statistics.mean(values):.2f}{spread}{seeds}" if values else "")
            parts.append(f"| {row} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--weights", default="resnet56_cifar10.safetensors")
    parser.add_argument("--out", default="league")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--most", type=int, default=3, help="students of a process")
    parser.add_argument("--only", default="", help="runs whose names have one of these in them: A,B")
    parser.add_argument("--epochs", type=int, default=100, help="only runs of at most so many")
    parser.add_argument("--samples", type=int, default=0, help="only so many images, to try it out")
    parser.add_argument("--steps", type=int, default=10, help="of the probe")
    parser.add_argument("--compiled", action="store_true", help="compile the steps")
    parser.add_argument("--fastest", action="store_true", help="measure first whether compiled steps are faster")
    parser.add_argument("--norms-as-they-are", action="store_true", help="batch norms learn nothing before training")
    parser.add_argument("--unpruned", action="store_true", help="how accurate the whole network is")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--probe", action="store_true", help="see whether it runs, and how fast")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--unfinished", action="store_true", help="how accurate interrupted runs are where they stand")
    given = parser.parse_args()
    if given.probe:
        probe(given)
    elif given.prepare:
        prepare(Worker(given), named(given.only))
    elif given.unpruned:
        worker = Worker(given)
        print(f"unpruned: {100 * accuracy(worker.net, worker.test, 1000).overall:.2f} %")
    elif given.unfinished:
        unfinished(given)
    elif given.table:
        print(table(lines(Path(given.out) / "results.jsonl")))
    else:
        main(given)
