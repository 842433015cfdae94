"""The league of CIFAR-10's ResNet-56: MACs divided by 2.1, 2.55 and 4, then trained for 0, 1, 5, 20 or 100 epochs.

    python -m benchmarks.league --data DATA --weights resnet56_cifar10.safetensors --out runs --minutes 8
    python -m benchmarks.league --out runs --table     # the tables, from what was measured so far

DATA holds the pieces that `python -m benchmarks.cifar` made, or the official binary files. Runs are taken in the order
of `plan`, several at a time on one GPU, until the minutes are over. The same command goes on: finished runs are lines
of `runs/results.jsonl`, and the others have checkpoints. Accuracy is that of the last epoch on all 10,000 test images;
nothing is chosen by it. `--tune` tries recipes on 5,000 training images that are held out. `--prepare` makes the
smaller models of Torch-Pruning beforehand, where that is installed. `--probe` prints how fast training steps are.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import safetensors.torch
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import secateur as sc
from benchmarks.cifar import read
from benchmarks.resnet56 import ResNet, resnet56
from secateur.loop import Schedule
from secateur.recover import Recover, recording
from secateur.recover.samples import shifted
from secateur.repair import Repair
from secateur.running.accuracy import accuracy

SPEEDS, LENGTHS, SEEDS = (2.1, 2.55, 4.0), (0, 1, 5, 20, 100), (0, 1, 2)
RATES = {1: 0.01, 5: 0.03, 20: 0.05, 100: 0.1}
TEACHER, ERASED, MULTIPLE = 0.5, 8, 8  # the teacher's share, the side of an erased square, what widths are padded to
TUNED: list[dict[str, Any]] = [
    {}, {"teacher": 0.9}, {"temperature": 2.0}, {"augment": "crop-flip"}, {"lr": 0.05}, {"lr": 0.2}, {"ema": 0.998},
    {"weight_decay": 1e-3}, {"blocks": 0.5},
]  # fmt: skip
SCORED = 500  # images that units are scored on, and that repair uses


def augment(images: Tensor) -> Tensor:
    """Shifted, mirrored, and a square of each image erased. The teacher sees the same."""
    images = shifted(images, 4)
    size, half = images.shape[-1], ERASED // 2
    middle = torch.randint(size, (2, len(images), 1), device=images.device)
    rows, columns = (torch.arange(size, device=images.device) - middle + half).unbind()
    inside = [(along >= 0) & (along < ERASED) for along in (rows, columns)]
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0.0)


RECIPE: dict[str, Any] = {"batch_size": 256, "weight_decay": 5e-4, "augment": augment, "temperature": 4.0}


@dataclass(frozen=True)
class Row:
    """A line of the table: how units are chosen, whether they are repaired, and whether there is a teacher."""

    choice: str
    repair: bool = False
    teacher: bool = False

    def __str__(self) -> str:
        more = [word for word, is_there in (("repair", self.repair), ("teacher", self.teacher)) if is_there]
        return " + ".join([self.choice, *more])


@dataclass(frozen=True)
class Job:
    row: Row
    speed: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.row} /{self.speed:g} {self.epochs} epochs seed {self.seed}".replace(" ", "-").replace("/", "by")

    @property
    def prepared(self) -> str:
        repair = "-repair" if self.row.repair else ""
        seed = "" if self.row.choice == MAGNITUDE.choice else f"-{self.seed}"  # which looks at no data
        return f"{self.row.choice.replace(' ', '-')}{repair}-{self.speed:g}{seed}.safetensors"


OURS = Row("lrp", True, True)
MAGNITUDE, TAYLOR = Row("Torch-Pruning magnitude"), Row("Torch-Pruning taylor")
PARTS = [Row("lrp", True), Row("lrp", False, True), Row("lrp")]
OTHERS = [Row(name, True, True) for name in ("taylor", "weight", "random")]
FAIR = [replace(MAGNITUDE, teacher=True), replace(TAYLOR, teacher=True)]


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


# -- smaller models ----------------------------------------------------------------------------------------------------
def shaped(state: dict[str, Tensor]) -> nn.Module:
    """A ResNet-56 with the widths of these tensors."""
    net = ResNet()
    for path, module in net.named_modules():
        weight = state.get(f"{path}.weight")
        if isinstance(module, nn.Conv2d) and weight is not None:
            module.out_channels, module.in_channels = weight.shape[:2]
            module.weight = nn.Parameter(torch.empty_like(weight))
        elif isinstance(module, nn.BatchNorm2d) and weight is not None:
            module.__init__(len(weight))  # type: ignore[misc]
    net.linear = nn.Linear(state["linear.weight"].shape[1], 10)
    net.load_state_dict(state)
    return net


def padded(model: nn.Module, multiple: int) -> nn.Module:
    """The same function with blocks as wide as a multiple, which is what the GPU's matrix units like.

    The further channels are 0, and so are all their gradients: the zeros before and behind them keep each other.
    """
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith(".bn1.weight") and name.startswith("layer")]:
        block, more = name.removesuffix("bn1.weight"), -len(state[name]) % multiple
        for part in ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"):
            old = state[block + part]
            state[block + part] = torch.cat([old, old.new_zeros(more, *old.shape[1:])])
        old = state[block + "conv2.weight"]
        state[block + "conv2.weight"] = torch.cat([old, old.new_zeros(len(old), more, *old.shape[2:])], 1)
    return shaped(state)


def unpadded(model: nn.Module, like: nn.Module) -> nn.Module:
    """The first channels of a padded model, after a look at the others."""
    sizes, state = {name: t.shape for name, t in like.state_dict().items()}, {}
    for name, tensor in model.state_dict().items():
        first = tuple(slice(size) for size in sizes[name])
        state[name], rest = tensor[first].clone(), tensor.clone()
        rest[first] = 0
        assert not rest.any(), f"{name}: channels that were 0 are not any more"
    return shaped(state).to(tensor.device)


def macs(model: nn.Module) -> int:
    """Multiplications of convolutions and the linear layer, from the sizes of their weights."""
    positions = {"layer1": 32**2, "layer2": 16**2, "layer3": 8**2, "conv1": 32**2, "linear": 1}
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(m.weight.numel() * positions[path.split(".")[0]] for path, m in layers)


def chosen(net: nn.Module, data: tuple[Tensor, Tensor], job: Job) -> nn.Module:
    """The smaller model of a job, before training."""
    x, y = data
    index = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + job.seed))[:SCORED].to(x.device)
    samples = x[index], y[index]
    if job.row.choice.startswith("Torch-Pruning"):
        # It cannot follow shortcuts that pad channels, so the layers that meet there are left alone.
        return by_torch_pruning(net, samples, job, macs, lambda p: p in ("conv1", "linear") or p.endswith("conv2"))
    criterion: Any = sc.criteria.Random(seed=job.seed) if job.row.choice == "random" else job.row.choice
    repair = Repair("ridge", copies=2, samples=SCORED) if job.row.repair else None
    schedule = Schedule(one_shot=True, rescore=False, seed=job.seed, batch_size=100)
    result = sc.prune(net, samples, criterion, keep={"macs": 1 / job.speed}, schedule=schedule, repair=repair,
                      progress=False)  # fmt: skip
    return result.model


def by_torch_pruning(
    net: nn.Module, samples: tuple[Tensor, Tensor], job: Any, count: Callable[[nn.Module], int],
    stays: Callable[[str], bool],
) -> nn.Module:  # fmt: skip
    """The same MACs (`count`) by a rival: all layers compete, as in its own experiments, but those that must stay."""
    import copy

    import torch_pruning as tp

    whole, choice, known = count(net), getattr(job, "row", job).choice, copy.deepcopy(net)
    kinds = {"magnitude": tp.importance.GroupMagnitudeImportance, "taylor": tp.importance.GroupTaylorImportance}
    if choice == TAYLOR.choice:
        nn.functional.cross_entropy(known(samples[0]), samples[1]).backward()

    def pruned(share: float) -> nn.Module:
        model = copy.deepcopy(known)
        pruner = tp.pruner.BasePruner(
            model, samples[0][:1], kinds[choice.split()[-1]](), global_pruning=True, pruning_ratio=share,
            max_pruning_ratio=1.0, ignored_layers=[m for path, m in model.named_modules() if stays(path)],
        )  # fmt: skip
        for mine, theirs in zip(model.parameters(), known.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        pruner.step()
        model.zero_grad(set_to_none=True)
        return model

    low, high = 0.0, 0.99
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if count(pruned(middle)) > whole / job.speed else (low, middle)
    return pruned(high)


def folded(net: nn.Module) -> nn.Module:
    """The teacher with its batch norms inside its convolutions: the same answers, in half of the time."""
    import copy

    made = copy.deepcopy(net).eval()
    for owner in [m for m in made.modules() if hasattr(m, "bn1")]:
        for conv, bn in (("conv1", "bn1"), ("conv2", "bn2")):
            if hasattr(owner, conv):
                setattr(owner, conv, nn.utils.fuse_conv_bn_eval(getattr(owner, conv), getattr(owner, bn)))
                setattr(owner, bn, nn.Identity())
    return made


# -- runs --------------------------------------------------------------------------------------------------------------
class Worker:
    """Runs jobs, one after another, with the data in the memory of the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        self.options, self.device, self.out = options, options.device, Path(options.out)
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

    def run(self, job: Job, stop: Any, changes: dict[str, Any] | None = None, told: Any = None) -> dict[str, Any]:
        begin, times = time.perf_counter(), list[float]()
        small = self.prepared(job)
        ready = time.perf_counter()
        train, test, loss, model = self.train, self.test, None, small
        if changes is not None:  # the recipe is chosen on training images that are held out
            order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0)).to(train[0].device)
            cut = len(order) // 10
            train, test = ((train[0][i], train[1][i]) for i in (order[cut:], order[:cut]))
        if job.epochs:
            asked = {"epochs": job.epochs, "lr": RATES[job.epochs], "teacher": TEACHER if job.row.teacher else 0.0}
            asked |= {"seed": job.seed, **json.loads(self.options.layout), **(changes or {})}
            multiple = asked.pop("pad", 0)
            settings = Recover(**(RECIPE | asked))

            def tell(event: Any) -> None:
                times.append(time.perf_counter())
                if told is not None and len(times) > 2 and job.epochs > 5:
                    told.put({"epoch": times[-1] - times[-2]})
                if stop.is_set():
                    raise KeyboardInterrupt

            blocks = bool(changes and changes.get("blocks"))
            teacher = (self.net if blocks else self.teacher) if job.row.teacher else None
            if blocks:  # which units were kept is known of a model that was just cut
                small = chosen(self.net, self.train, job)
            path = self.out / "unfinished" / f"{job.name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint = path if job.epochs >= 20 and changes is None else None
            given = padded(small, multiple).to(self.device) if multiple and not blocks else small
            done = sc.recover(given, teacher, train, settings, checkpoint=checkpoint, progress=tell)
            model, loss = done.model, done.history[-1].loss
            if given is not small:
                model = unpadded(model, small).eval()
            path.unlink(missing_ok=True)
        found = accuracy(model, test, 1000).overall
        return {
            **asdict(job), "row": str(job.row), "accuracy": found, "loss": loss, "changes": changes,
            "macs": macs(small), "params": sum(p.numel() for p in small.parameters()),
            "prepared": round(ready - begin, 1), "seconds": round(time.perf_counter() - ready, 1),
        }  # fmt: skip


def work(options: argparse.Namespace, jobs: Any, results: Any, stop: Any) -> None:
    worker = Worker(options)
    results.put({"ready": os.getpid()})
    while not stop.is_set():
        try:
            job, changes = jobs.get(timeout=1)
        except queue.Empty:
            continue
        try:
            results.put(worker.run(job, stop, changes, results))
        except KeyboardInterrupt:
            results.put({"interrupted": job.name})
        except Exception as error:
            results.put({"failed": job.name, "error": f"{type(error).__name__}: {error}", "at": traceback.format_exc()})
            torch.cuda.empty_cache() if options.device == "cuda" else None


def layout(options: argparse.Namespace) -> str:
    """The fastest way to compute on this GPU that ends where plain steps end. Seconds for 60 steps of 256."""
    if options.device != "cuda":
        return "{}"
    worker, best = Worker(options), (float("inf"), "{}")
    small, plain = worker.prepared(Job(OURS, 2.55, 1, 0)), 0.0
    few = worker.train[0][: 60 * 256], worker.train[1][: 60 * 256]
    for given in ({"recorded": False}, {}, {"pad": MULTIPLE}, *options.ways):
        recording._WARM_UP = 3 if given.get("recorded", True) else 10**9
        times: list[float] = []

        def note(event: object, times: list[float] = times) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

        asked = {name: value for name, value in given.items() if name not in ("recorded", "pad")}
        settings = Recover(**{**RECIPE, "epochs": 3, "lr": 0.01, "augment": None, **asked})
        begin = time.perf_counter()
        try:
            net = padded(small, given["pad"]).to(worker.device) if "pad" in given else small
            done = sc.recover(net, worker.teacher, few, settings, progress=note)
        except Exception as error:
            print(f"{given}: {type(error).__name__}: {error}", flush=True)
            continue
        seconds, loss = times[-1] - times[-2], done.history[-1].loss
        plain = plain or loss
        good = abs(loss / plain - 1) < 0.05
        print(f"{given or 'recorded'}: {seconds:.2f} s for 60 steps of 256, first epoch {times[0] - begin:.1f} s, loss "
              f"{loss:.4f}{'' if good else ': NOT what plain steps give'}", flush=True)  # fmt: skip
        if good and given.get("recorded", True):
            best = min(best, (seconds, json.dumps(given)))
    return best[1]


def probe() -> bool:
    """Whether CUDA works with the environment as it is now."""
    code = "import torch; torch.ones(8, device='cuda').sum().item()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def share_gpu() -> None:
    """Let several processes compute on the GPU at the same time (CUDA MPS), where that works."""
    place = {name: mkdtemp(prefix="mps-") for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    os.environ |= place
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, capture_output=True, timeout=20)
        good = probe()
    except (OSError, subprocess.SubprocessError):
        good = False
    if not good:
        for name in place:
            del os.environ[name]
    else:
        atexit.register(subprocess.run, ["nvidia-cuda-mps-control"], input=b"quit", capture_output=True, timeout=20)
    print("processes share the GPU" if good else "processes take turns on the GPU: CUDA MPS does not work", flush=True)


def main(options: argparse.Namespace) -> None:
    out, begin = Path(options.out), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    record = out / "results.jsonl"
    if options.device == "cuda" and options.processes > 1 and not options.no_mps:
        share_gpu()
    mp.set_start_method("spawn")
    if options.layout == "auto":
        with mp.get_context("spawn").Pool(1) as pool:  # so that its memory is given back
            options.layout = pool.apply(layout, (argparse.Namespace(**{**vars(options), "layout": "{}"}),))
    print(f"layout {options.layout}, {time.perf_counter() - begin:.0f} s", flush=True)
    known = {(r["row"], r["speed"], r["epochs"], r["seed"], json.dumps(r["changes"])) for r in lines(record)}
    if options.tune:
        todo = [(Job(OURS, 2.55, 20, 0), changes) for changes in TUNED]
    else:
        todo = [(job, None) for job in plan() if not options.only or options.only in job.name]
    todo = [(j, c) for j, c in todo if (str(j.row), j.speed, j.epochs, j.seed, json.dumps(c)) not in known]
    if options.resume:
        todo = [(j, c) for j, c in todo if epochs_left(out, j) < j.epochs]
    if options.epochs:
        todo = [(j, c) for j, c in todo if j.epochs <= options.epochs]
    jobs, results, stop = mp.Queue(), mp.Queue(), mp.Event()
    workers = [mp.Process(target=work, args=(options, jobs, results, stop)) for _ in range(options.processes)]
    for worker in workers:
        worker.start()
    rate, running, seen = options.seconds_per_epoch, 0, False
    deadline = begin + 60 * options.minutes

    def give() -> bool:
        """Start the next run that can be expected to end in time; a long one may be interrupted and go on later."""
        for place, (job, changes) in enumerate(todo):
            if time.perf_counter() + 15 + 1.05 * rate * min(epochs_left(out, job), options.least) < deadline:
                jobs.put((job, changes))
                del todo[place]
                return True
        return False

    running = sum(give() for _ in range(options.processes + 1))
    with record.open("a") as file:
        while running and any(worker.is_alive() for worker in workers):
            try:
                found = results.get(timeout=1)
            except queue.Empty:
                if time.perf_counter() > deadline:
                    stop.set()
                    if time.perf_counter() > deadline + 20:
                        break
                continue
            if "epoch" in found:  # the next runs are as wide as this one, more or less
                rate = 0.8 * rate + 0.2 * found["epoch"] if seen else found["epoch"]
                seen = True
            if "ready" in found or "epoch" in found:
                continue
            running -= 1
            if "row" in found:
                file.write(json.dumps(found) + "\n")
                file.flush()
                print(f"{time.perf_counter() - begin:5.0f} s  {found['row']:32} /{found['speed']:<4g} "
                      f"{found['epochs']:3d} epochs  seed {found['seed']}  {100 * found['accuracy']:.2f} %  "
                      f"{found['seconds']} s ({found['prepared']} s before)  {found['changes'] or ''}",
                      flush=True)  # fmt: skip
            else:
                print(json.dumps(found), flush=True)
            running += give()
    stop.set()
    for worker in workers:
        worker.join(15)
        if worker.is_alive():
            worker.terminate()
    if options.pack:
        pack(out, Path(options.pack))
    print(f"{time.perf_counter() - begin:.0f} s; {len(todo)} runs are left", flush=True)


def epochs_left(out: Path, job: Job) -> int:
    """How many epochs of a run are not done. Its checkpoint knows, if there is one."""
    path = out / "unfinished" / f"{job.name}.safetensors"
    if not path.exists():
        return job.epochs
    with safetensors.safe_open(path, "pt") as file:
        return job.epochs - "".join(file.metadata().values()).count('["epoch", ')


def pack(out: Path, place: Path) -> None:
    """Results, and unfinished runs with the models that they began with, in a few files of less than 15 MB."""
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "results.jsonl", place)
    jobs = {job.name: job for job in plan()}
    chosen = [
        [path, out / "models" / jobs[path.stem].prepared] for path in sorted((out / "unfinished").glob("*.safe*"))
    ]
    for number in range(0, len(chosen), 2):
        with tarfile.open(place / f"unfinished-{number // 2}.tar", "w") as archive:
            for path in dict.fromkeys(path for pair in chosen[number : number + 2] for path in pair):
                archive.add(path, path.relative_to(out))


# -- tables ------------------------------------------------------------------------------------------------------------
def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def table(measured: list[dict[str, Any]], speeds: Sequence[float] = SPEEDS, lengths: Sequence[int] = LENGTHS) -> str:
    """Mean of the seeds ± half of what they span, in per cent; how many seeds, where they are not three."""
    found = [line for line in measured if line["changes"] is None]
    parts = []
    for speed in speeds:
        here = [line for line in found if line["speed"] == speed]
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
    tuned = [line for line in measured if line["changes"] is not None]
    if tuned:
        parts += ["Recipes, on held-out training images\n", "| changed | accuracy |", "|---|---|"]
        parts += [f"| {line['changes'] or 'nothing'} | {100 * line['accuracy']:.2f} |" for line in tuned]
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--weights", default="resnet56_cifar10.safetensors")
    parser.add_argument("--out", default="league")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--least", type=int, default=20, help="a run is started if so many epochs can be expected")
    parser.add_argument("--seconds-per-epoch", type=float, default=2.5, help="a first guess, corrected by what is seen")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--epochs", type=int, default=0, help="only runs of at most so many")
    parser.add_argument("--samples", type=int, default=0, help="only so many images, to try it out")
    parser.add_argument(
        "--layout", default="auto", help="settings of Recover as JSON; 'auto' measures which is fastest"
    )
    parser.add_argument("--resume", action="store_true", help="only runs that were interrupted")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--probe", action="store_true", help="see whether it runs, and how fast")
    parser.add_argument("--ways", nargs="*", default=[], help="further layouts to try, such as '{\"compile\": true}'")
    parser.add_argument("--pack", default="", help="a folder for results and unfinished runs, in few files")
    given = parser.parse_args()
    given.ways = [json.loads(way) for way in given.ways]
    if given.probe:
        print(layout(given))
    elif given.prepare:
        worker = Worker(given)
        for job in sorted((j for j in plan() if j.row in (MAGNITUDE, TAYLOR)), key=lambda j: (j.seed, j.speed)):
            worker.prepared(job)
    elif given.table:
        print(table(lines(Path(given.out) / "results.jsonl")))
    else:
        main(given)
