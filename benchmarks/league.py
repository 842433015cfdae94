"""The league of CIFAR-10's ResNet-56: MACs divided by 2.1, 2.55 and 4, then trained for 0, 1, 5, 20 or 100 epochs.

    python -m benchmarks.league --data DATA --weights resnet56_cifar10.safetensors --out runs --minutes 8
    python -m benchmarks.league --out runs --table     # the tables, from what was measured so far

DATA holds the pieces that `python -m benchmarks.cifar` made, or the official binary files. Runs are taken in the order
of `plan` until the minutes are over; runs of one seed are trained together in one process, and several processes share
one GPU. The same command goes on: finished runs are lines of `runs/results.jsonl`, and the others have checkpoints.
Accuracy is that of the last epoch on all 10,000 test images; nothing is chosen by it. `--prepare` makes the smaller
models of Torch-Pruning beforehand, where that is installed. `--probe` prints the seconds of a step.
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
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import safetensors.torch
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.cifar import read
from benchmarks.league_models import (
    FAIR,
    LENGTHS,
    MAGNITUDE,
    MULTIPLE,
    OTHERS,
    OURS,
    PARTS,
    RATES,
    RECIPE,
    SEEDS,
    SPEEDS,
    TAYLOR,
    TEACHER,
    Job,
    chosen,
    folded,
    macs,
    padded,
    shaped,
    unpadded,
)  # fmt: skip
from benchmarks.league_together import WARM_UP, Student, Together
from benchmarks.resnet56 import resnet56
from secateur.recover.checkpoint import random_state, set_random_state
from secateur.recover.samples import Samples
from secateur.running.accuracy import accuracy
from secateur.running.sandbox import seeded
from secateur.running.tensor_files import decode, encode, read_checkpoint, write_checkpoint

FORMAT, SAVED = "league-together-1", 15.0  # seconds between two checkpoints
NEAR = 12  # runs further down in the plan do not slow down those that matter more


def plan() -> list[Job]:
    """What is run, the most important first: each line of the table needs those before it."""
    rows, short = [OURS, MAGNITUDE, TAYLOR, *PARTS, *OTHERS, *FAIR], (0, 5, 1)
    jobs = [Job(OURS, speed, 100, seed) for seed in SEEDS for speed in (2.1, 2.55, 4.0)]
    jobs += [Job(row, 2.55, 20, 0) for row in rows]
    jobs += [Job(row, 2.55, epochs, 0) for epochs in short for row in rows]
    for seed in SEEDS:
        jobs += [Job(row, 2.55, 100, seed) for row in (MAGNITUDE, PARTS[0], TAYLOR, FAIR[0], *OTHERS, *PARTS[1:])]
    jobs += [Job(MAGNITUDE, 2.1, 100, seed) for seed in SEEDS]
    jobs += [Job(row, 2.55, epochs, seed) for seed in SEEDS for epochs in (20, *short) for row in rows]
    for speed in (2.1, 4.0):
        jobs += [Job(row, speed, epochs, seed) for seed in SEEDS for epochs in (20, *short) for row in rows]
    jobs += [Job(row, speed, 100, seed) for speed in (2.1, 4.0) for row in rows for seed in SEEDS]
    # Before training, the teacher makes no difference.
    return list(dict.fromkeys(j if j.epochs else replace(j, row=replace(j.row, teacher=False)) for j in jobs))


# -- runs -------------------------------------------------------------------------------------------------------------
class Worker:
    """Runs jobs, one after another, with the data in the memory of the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        self.device, self.out = options.device, Path(options.out)
        self.train, self.test = read(Path(options.data), self.device)
        if options.samples:
            self.train, self.test = ((x[: options.samples], y[: options.samples]) for x, y in (self.train, self.test))
        self.net = resnet56(Path(options.weights)).to(self.device)
        self.teacher = folded(self.net)

    def prepared(self, job: Job) -> nn.Module:
        path = self.out / "models" / job.prepared
        if not path.exists():
            model = chosen(self.net, self.train, job)
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(f".{os.getpid()}")
            safetensors.torch.save_file({k: v.contiguous() for k, v in model.state_dict().items()}, half)
            half.unlink() if path.exists() else half.rename(path)  # another process may have been faster
        return shaped(safetensors.torch.load_file(path)).to(self.device).eval()


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
            student = Student(padded(small, MULTIPLE).to(worker.device), 0.0, 0.0)
            (losses,) = restore(worker.out, [job], [student])
            found = accuracy(unpadded(student.net, small).eval(), worker.test, 1000).overall
            print(f"{job.name}: {100 * found:.2f} % after {len(losses)} epochs", flush=True)


def run(worker: Worker, jobs: Sequence[Job], deadline: float) -> Iterable[dict[str, Any]]:
    """Train the runs of one seed and length. If the time is over, nothing comes back, and their files know the rest."""
    out, begin, epochs, seed = worker.out, time.time(), jobs[0].epochs, jobs[0].seed
    small = [worker.prepared(job) for job in jobs]
    shares = [TEACHER if job.row.teacher else 0.0 for job in jobs]
    wide = [padded(net, MULTIPLE).to(worker.device) for net in small]
    order = torch.channels_last if worker.device == "cuda" else torch.preserve_format
    students = [
        Student(net.to(memory_format=order), share, RECIPE["weight_decay"])
        for net, share in zip(wide, shares, strict=True)
    ]
    group = Together(students, worker.teacher.to(memory_format=order) if any(shares) else None)
    samples = Samples(worker.train, RECIPE["batch_size"], RECIPE["augment"], None, torch.device(worker.device))
    with seeded(seed, 0):
        first = done(out, jobs[0])
        losses = restore(out, jobs, students) if first else [[] for _ in jobs]
        saved = told = time.time()
        for number in range(first, epochs):
            for known, loss in zip(losses, group.epoch(samples, number, epochs, RATES[epochs]), strict=True):
                known.append(loss)
            now = time.time()
            print(f"seed {seed}, {len(jobs)} students, epoch {number + 1}/{epochs}: {now - told:.2f} s, losses "
                  f"{', '.join(f'{known[-1]:.3f}' for known in losses)}", flush=True)  # fmt: skip
            told, over = now, now > deadline
            if number + 1 < epochs and (over or now - saved > SAVED):
                save(out, jobs, students, losses)
                saved = time.time()
            if over and number + 1 < epochs:
                return
    for job, net, student, known in zip(jobs, small, students, losses, strict=True):
        model = unpadded(student.net.to(memory_format=torch.contiguous_format), net).eval()
        yield {
            **asdict(job), "row": str(job.row), "accuracy": accuracy(model, worker.test, 1000).overall,
            "loss": known[-1] if known else None, "macs": macs(net), "params": sum(p.numel() for p in net.parameters()),
            "seconds": round(time.time() - begin, 1), "together": len(jobs),
        }  # fmt: skip


def groups(out: Path, jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Runs of one seed and length that stand at the same epoch, in the order of their first one."""
    known = {(r["row"], r["speed"], r["epochs"], r["seed"]) for r in lines(out / "results.jsonl")}
    found: list[tuple[tuple[int, int, int], int, list[Job]]] = []
    for number, job in enumerate(jobs):
        if (str(job.row), job.speed, job.epochs, job.seed) not in known:
            key = job.seed, job.epochs, done(out, job)
            fitting = (g for other, first, g in found if other == key and len(g) < most and number - first < NEAR)
            members = next(fitting, None)
            if members is None:
                found.append((key, number, [job]))
            else:
                members.append(job)
    found.sort(key=lambda entry: -entry[0][2])  # what is nearly done first
    return [members for *_, members in found]


def work(options: argparse.Namespace, given: Any, deadline: float) -> None:
    worker = Worker(options)
    while time.time() < deadline:
        try:
            jobs = given.get(timeout=1)
        except queue.Empty:
            return
        line = None
        try:
            for line in run(worker, jobs, deadline):
                with (worker.out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
            if line is not None:
                for job in jobs:
                    place(worker.out, job).unlink(missing_ok=True)
        except Exception:
            print(f"failed: {[job.name for job in jobs]}\n{traceback.format_exc()}", flush=True)


def cuda_works() -> bool:
    """Whether CUDA works with the environment as it is now."""
    code = "import torch; torch.ones(8, device='cuda').sum().item()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def share_gpu() -> None:
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


def main(options: argparse.Namespace) -> None:
    deadline = time.time() + 60 * options.minutes
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    wanted = [job for job in plan() if options.only in job.name and job.epochs <= options.epochs]
    todo = groups(out, wanted, options.most)
    print(f"{sum(map(len, todo))} runs in {len(todo)} groups", flush=True)
    if options.device == "cuda" and options.processes > 1 and not options.no_mps:
        share_gpu()
    mp.set_start_method("spawn")
    given = mp.Queue()
    for jobs in todo:
        given.put(jobs)
    workers = [mp.Process(target=work, args=(options, given, deadline), daemon=True) for _ in range(options.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, deadline + 30 - time.time()))
    given.cancel_join_thread()
    for worker in workers:
        if worker.is_alive():
            worker.terminate()


# -- how fast ---------------------------------------------------------------------------------------------------------
def probe(options: argparse.Namespace) -> None:
    """Seconds of a step, for each way the median of some, taken in turn so that what else runs disturbs all alike."""
    worker = Worker(options)
    teacher = worker.teacher.to(memory_format=torch.channels_last)
    x, y = (t[:256] for t in worker.train)
    rows = [OURS, *OTHERS, PARTS[0], FAIR[0]]
    ways: dict[str, Together] = {}
    kinds = [
        ("1, not recorded", 1, False, MULTIPLE, False), ("1, not padded", 1, True, 1, False),
        *((str(count), count, True, MULTIPLE, False) for count in (1, 3, 6)), ("1, compiled", 1, True, MULTIPLE, True),
    ]  # fmt: skip
    for name, count, recorded, multiple, compiled in kinds:
        begin = time.time()
        nets = [padded(worker.prepared(Job(row, 2.55, 1, 0)), multiple) for row in rows[:count]]
        made = [net.to(worker.device, memory_format=torch.channels_last) for net in nets]
        students = [Student(net, TEACHER, RECIPE["weight_decay"], compiled=compiled) for net in made]
        group = Together(students, teacher, recorded)
        try:
            for _ in range(WARM_UP + 1):
                group.step(x, y, 1e-4)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        synchronize(worker.device)
        print(f"{name}: ready after {time.time() - begin:.1f} s", flush=True)
        ways[name] = group
        times = {name: list[float]() for name in ways}
        for student in (student for each in ways.values() for student in each.students):
            student.sums.zero_()
        for _ in range(5):
            for kind, each in ways.items():
                synchronize(worker.device)
                begin = time.perf_counter()
                for _ in range(options.steps):
                    each.step(x, y, 1e-4)
                synchronize(worker.device)
                times[kind].append((time.perf_counter() - begin) / options.steps)
        for kind, found in times.items():
            steps = len(found) * options.steps
            loss = [round(float(student.sums[0]) / steps, 4) for student in ways[kind].students]
            print(f"  {kind} students: {1000 * statistics.median(found):.2f} ms a step, losses {loss}", flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- tables -----------------------------------------------------------------------------------------------------------
def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def table(measured: list[dict[str, Any]], speeds: Sequence[float] = SPEEDS, lengths: Sequence[int] = LENGTHS) -> str:
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
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--epochs", type=int, default=100, help="only runs of at most so many")
    parser.add_argument("--samples", type=int, default=0, help="only so many images, to try it out")
    parser.add_argument("--steps", type=int, default=20, help="of the probe")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--probe", action="store_true", help="see whether it runs, and how fast")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--unfinished", action="store_true", help="how accurate interrupted runs are where they stand")
    given = parser.parse_args()
    if given.probe:
        probe(given)
    elif given.prepare:
        worker = Worker(given)
        for job in sorted((j for j in plan() if j.row in (MAGNITUDE, TAYLOR)), key=lambda j: (j.seed, j.speed)):
            worker.prepared(job)
    elif given.unfinished:
        unfinished(given)
    elif given.table:
        print(table(lines(Path(given.out) / "results.jsonl")))
    else:
        main(given)
