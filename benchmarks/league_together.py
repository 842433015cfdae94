"""The runs of the league, several at once: what one seed trains sees the same batches, so one process takes them all.

    python -m benchmarks.league_together --data DATA --weights resnet56_cifar10.safetensors --out runs --minutes 8
    python -m benchmarks.league_together --data DATA --weights resnet56_cifar10.safetensors --out runs --probe

Batches, loss, schedule and seeds are those of `sc.recover` (a test compares them). The teacher answers each batch once
for all students. On a GPU, a step of all of them is one CUDA graph, in which each student is a branch of its own, with
its optimizer. Results are lines of `runs/results.jsonl`, as `python -m benchmarks.league` writes them; the same command
goes on. `--probe` prints the seconds of a step of one, three and six students, also with torch.compile.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import statistics
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.league import (
    FAIR,
    MULTIPLE,
    OTHERS,
    OURS,
    PARTS,
    RATES,
    RECIPE,
    TEACHER,
    Job,
    Worker,
    lines,
    macs,
    padded,
    plan,
    share_gpu,
    unpadded,
)  # fmt: skip
from secateur.recover.checkpoint import random_state, set_random_state
from secateur.recover.loss import Objective
from secateur.recover.samples import Samples
from secateur.recover.schedule import CURVES
from secateur.running.accuracy import accuracy
from secateur.running.sandbox import seeded
from secateur.running.targets import Reader
from secateur.running.tensor_files import decode, encode, read_checkpoint, write_checkpoint

FORMAT, WARM_UP, MOMENTUM, SAVED = "league-together-1", 3, 0.9, 15.0  # seconds between two checkpoints
NEAR = 12  # runs further down in the plan do not slow down those that matter more


class Student:
    """A network in training, with its momentum. A step computes gradients and moves the weights; nothing waits."""

    def __init__(self, net: nn.Module, teacher: float, decay: float, compiled: bool = False) -> None:
        self.net, self.decay = net.train(), decay
        self.parameters = list(net.parameters())
        self.objective = Objective(Reader(net), teacher, RECIPE["temperature"])
        self.momenta = [torch.zeros_like(p) for p in self.parameters]
        self.device = self.parameters[0].device
        self.sums = torch.zeros(3, device=self.device)
        self.call: Any = torch.compile(net, dynamic=False) if compiled else net
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def moving(self) -> list[Tensor]:
        return [*self.parameters, *self.net.buffers(), *self.momenta]

    def step(self, x: Tensor, y: Tensor, answer: Tensor | None, rate: Tensor) -> None:
        with half_precision(self.device):
            answer = answer if self.objective.teacher else None
            loss, right = self.objective(x, y, self.call(x), answer, check=False)
        found = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            pairs = zip(found, self.parameters, strict=True)
            gradients = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in pairs]
            torch._foreach_add_(gradients, self.parameters, alpha=self.decay)
            torch._foreach_mul_(self.momenta, MOMENTUM)
            torch._foreach_add_(self.momenta, gradients)
            torch._foreach_sub_(self.parameters, torch._foreach_mul(self.momenta, rate))
            self.sums += torch.cat([loss.detach().float().reshape(1), right])


def half_precision(device: torch.device) -> Any:
    # Without autocast's cache, because a recorded step must contain its conversions.
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if device.type == "cuda" else nullcontext()


class Together:
    """Students that are trained on the same batches. `teacher`, in evaluation mode, may be None."""

    def __init__(self, students: Sequence[Student], teacher: nn.Module | None) -> None:
        self.students, self.teacher, self.device = students, teacher, students[0].device
        self.rate = torch.zeros((), device=self.device)
        self._graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}
        self._seen: dict[int, int] = {}

    def step(self, x: Tensor, y: Tensor, rate: float) -> None:
        self.rate.fill_(rate)
        size, cuda = len(x), self.device.type == "cuda"
        if size in self._graphs:
            graph, images, labels = self._graphs[size]
            images.copy_(x)
            labels.copy_(y)
            graph.replay()
            return
        self._compute(x, y, in_turn=cuda)  # libraries choose their algorithms in the first steps
        self._seen[size] = self._seen.get(size, 0) + 1
        if cuda and self._seen[size] >= WARM_UP:
            images, labels, graph = x.clone(), y.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._compute(images, labels)
            self._graphs[size] = graph, images, labels

    def _compute(self, x: Tensor, y: Tensor, in_turn: bool = False) -> None:
        answer = None
        if self.teacher is not None and any(s.objective.teacher for s in self.students):
            with torch.no_grad(), half_precision(self.device):
                answer = self.teacher(x)
        streams = [student.stream for student in self.students if student.stream is not None]
        here = torch.cuda.current_stream() if streams else None
        for student in self.students:
            with self._aside(student, here):
                student.step(x, y, answer, self.rate)
            if in_turn:
                torch.cuda.synchronize()
        for stream in streams:
            here.wait_stream(stream)

    @contextmanager
    def _aside(self, student: Student, here: Any) -> Iterator[None]:
        if student.stream is None:
            yield
            return
        student.stream.wait_stream(here)
        with torch.cuda.stream(student.stream):
            yield

    def epoch(self, samples: Samples, number: int, epochs: int, lr: float) -> list[float]:
        """The mean loss of each student."""
        for student in self.students:
            student.sums.zero_()
        steps, length = 0, samples.length or 1
        for x, y in samples.epoch():
            self.step(x, y, lr * CURVES["cosine"]((number + steps / length) / epochs))
            steps += 1
        losses = [float(student.sums[0]) / steps for student in self.students]
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss became {losses} in epoch {number + 1}")
        return losses


# -- runs --------------------------------------------------------------------------------------------------------------
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
            "loss": known[-1], "changes": None, "macs": macs(net), "params": sum(p.numel() for p in net.parameters()),
            "seconds": round(time.time() - begin, 1), "together": len(jobs),
        }  # fmt: skip


def groups(out: Path, jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Runs of one seed and length that stand at the same epoch, in the order of their first one."""
    known = {(r["row"], r["speed"], r["epochs"], r["seed"]) for r in lines(out / "results.jsonl")}
    found: list[tuple[tuple[int, int, int], int, list[Job]]] = []
    for number, job in enumerate(jobs):
        if job.epochs and (str(job.row), job.speed, job.epochs, job.seed) not in known:
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


# -- how fast ----------------------------------------------------------------------------------------------------------
def probe(options: argparse.Namespace) -> None:
    """Seconds of a step, for each way the median of some, taken in turn so that what else runs disturbs all alike."""
    worker, ways = Worker(options), dict[str, Together]()
    teacher = worker.teacher.to(memory_format=torch.channels_last)
    x, y = (t[:256] for t in worker.train)
    rows = [OURS, *OTHERS, PARTS[0], FAIR[0]]
    for name, count, compiled in (("1", 1, False), ("3", 3, False), ("6", 6, False), ("1 compiled", 1, True)):
        begin = time.time()
        nets = [padded(worker.prepared(Job(row, 2.55, 1, 0)), MULTIPLE) for row in rows[:count]]
        made = [net.to(worker.device, memory_format=torch.channels_last) for net in nets]
        group = Together([Student(net, TEACHER, RECIPE["weight_decay"], compiled) for net in made], teacher)
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
    parser.add_argument("--probe", action="store_true")
    given = parser.parse_args()
    probe(given) if given.probe else main(given)
