"""The peak of memory of a whole run, for classifiers of torchvision and timm up to 100 M parameters, and many images.

    python -m benchmarks.memory --workers 16                       all of torchvision, each in a process of one thread
    python -m benchmarks.memory --timm --workers 16                the largest member of each family of timm
    python -m benchmarks.memory --models resnet50 timm:convnext_base --images 1000    any number of images

A run scores, removes half of the MACs (or less, where half cannot leave), repairs, measures accuracy
before and after, explains a few images and writes the report. Weights and images are random; images are made when they
are asked for, as photographs are. Results are appended to `--out`, so that an interrupted benchmark goes on. Each row
has the version that it is of, the CPU time of each stage, and the stage in which the peak was.

To save time, only the ridge is tried as a repair (the others take less memory), and without the rounds that fit a layer
again by the same equations (ResNet-50: 2.18 GiB with them, 2.19 without). Where the report times both models, a batch
passes the trial that decides about its size, each model once, and the original once more, upon what malloc has kept:
of two turns with DenseNet-161 that was the peak. `--best` tries and times everything. Without `--images`, a model gets
as many as make so many multiply-accumulates in one pass, between 4 and 64: a large model fills the memory with 4, with
their 8 altered copies; a small one does not, and has time for more. Where the packages that a report needs are missing,
the row says that there was none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Without a number of images: so many multiply-accumulates in one pass over them, and the least and the most.
_WORK, _FEWEST, _MOST = 8e9, 4, 64
_KEPT = (0.5, 0.75, 0.95)  # of the MACs: the first that can be reached


@dataclass(frozen=True)
class Noise:
    """Random images in batches, always the same."""

    samples: int
    side: int

    def __iter__(self) -> Iterator[Any]:
        import torch

        for begin in range(0, self.samples, 32):
            generator = torch.Generator().manual_seed(begin)
            count = min(32, self.samples - begin)
            x = torch.randn(count, 3, self.side, self.side, generator=generator)
            yield x, torch.randint(10, (count,), generator=generator)


def build(name: str) -> tuple[Any, int]:
    """A classifier of ten classes, and the side of its images."""
    from torchvision import models

    if name.startswith("timm:"):
        import timm

        net = timm.create_model(name.removeprefix("timm:"), num_classes=10)
        side = net.default_cfg["input_size"][-1]
        return net.eval(), side if net.default_cfg.get("fixed_input_size") else min(side, 256)
    extra = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    net = models.get_model(name, weights=None, num_classes=10, **extra)
    return net.eval(), 299 if name == "inception_v3" else 224


class Stages:
    """Listens to a run. Adds up the CPU time of each of its stages, and notes in which the peak of memory was."""

    def __init__(self) -> None:
        self.seconds, self.highest = dict[str, float](), ""
        self._peak, self._name, self._begin = 0, "analysis", time.process_time()

    def __call__(self, event: object) -> None:
        self.enter(type(event).__name__.lower())

    def enter(self, name: str) -> None:
        """Another stage begins, unless it is the same."""
        from secateur.running.memory import peak

        now, last = time.process_time(), self._name
        self.seconds[last] = round(self.seconds.get(last, 0) + now - self._begin, 2)
        if peak() > self._peak:
            self._peak, self.highest = peak(), last
        self._name, self._begin = name, now


def until_the_peak(calls: Sequence[Callable[[], object]], *_: object) -> list[list[float]]:
    """Instead of `turns`: each call once, and the first once more. It comes upon what malloc has kept of the others."""
    for call in (*calls, calls[0]):
        call()
    return [[1.0]] * len(calls)


def version() -> str:
    """What is measured: the commit, and whether something was changed since."""
    made = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return made.stdout.strip() or "unknown"


def one(name: str, images: int | None, memory: str | None, best: bool = False) -> dict[str, Any]:
    """A whole run of one model, in this process."""
    import torch

    import secateur as sc
    from secateur.errors import TargetError
    from secateur.latency import timing
    from secateur.repair import Repair
    from secateur.running.accuracy import accuracy
    from secateur.running.memory import peak

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not best:
        timing.turns = until_the_peak  # type: ignore[assignment]
    net, side = build(name)
    for module in net.modules():  # untrained norms would let nothing but noise pass
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, torch.nn.Linear) and not module.weight.any():  # a head before training
            torch.nn.init.normal_(module.weight, std=0.02)
    asked = images
    if images is None:
        macs = sc.measure(net, torch.zeros(1, 3, side, side), latency=False).macs
        images = int(min(_MOST, max(_FEWEST, _WORK / macs)))
    data, stages = Noise(images, side), Stages()
    begin, parameters = time.perf_counter(), sum(p.numel() for p in net.parameters())
    for kept in _KEPT:
        with suppress(TargetError) if kept != _KEPT[-1] else nullcontext():
            result = sc.prune(
                net, data, keep={"macs": kept}, evaluate=lambda model: accuracy(model, data, memory=memory).overall,
                repair="best" if best else Repair("ridge", rounds=0), memory=memory, progress=stages,
            )  # fmt: skip
            break
    stages.enter("report")
    repaired, ran = peak(), time.perf_counter() - begin
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if not missing:
        with tempfile.TemporaryDirectory() as folder:
            result.report(Path(folder, "report.html"), data=data, memory=memory)
    stages.enter("end")
    return {
        "model": name, "images": images, "asked": asked, "version": version(), "stages": stages.seconds,
        "highest": stages.highest, "parameters": parameters, "gib": peak() / 2**30, "run": repaired / 2**30,
        "seconds": time.perf_counter() - begin, "run_seconds": ran, "cpu": time.process_time(),
        "macs": result.cost_before.macs, "kept": kept,
        **({"without": f"report: no {', '.join(missing)}"} if missing else {}),
    }  # fmt: skip


def apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", name]
    command += ["--images", str(options.images)] if options.images else []
    command += (["--memory", options.memory] if options.memory else []) + ["--best"] * options.best
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=options.timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"model": name, "asked": options.images, "error": f"not ready after {options.timeout} s"}
    if made.returncode:
        return {"model": name, "asked": options.images, "error": (made.stderr.strip().splitlines() or ["killed"])[-1]}
    return dict(json.loads(made.stdout.splitlines()[-1]))


def sizes() -> dict[str, int]:
    """The parameters of every classifier of torchvision, by name, those with most work first."""
    from torchvision import models

    facts = {name: models.get_model_weights(name).DEFAULT.meta for name in models.list_models(module=models)}
    order = sorted(facts, key=lambda name: -facts[name]["_ops"])
    return {name: facts[name]["num_params"] for name in order if not name.startswith("quantized")}


def parameters_of(name: str) -> int | None:
    """How many a model of timm has; None if it cannot be built. It is built without numbers, where that is possible."""
    import timm
    import torch

    for device in ("meta", "cpu"):  # some models read their numbers while they are built
        with suppress(Exception), torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(p.numel() for p in timm.create_model(name).parameters())
    return None


def largest(families: dict[str, str], counts: Iterable[int | None], most: float) -> tuple[list[str], list[str]]:
    """The largest model of each family with at most so many parameters, and those whose parameters are not known."""
    found, unknown = dict[str, tuple[int, str]](), list[str]()
    for (name, family), count in zip(families.items(), counts, strict=True):
        if count is None:
            unknown.append(f"timm:{name}")
        elif count <= most:
            found[family] = max(found.get(family, (0, "")), (count, f"timm:{name}"))
    return [name for _, name in sorted(found.values(), reverse=True)], unknown


def largest_of_timm(most: float, workers: int = 1) -> list[str]:
    """The largest member of each family of timm with at most so many parameters. (Building all takes minutes.)"""
    import timm

    families = {name: family for family in timm.list_modules() for name in timm.list_models(module=family)}
    with ProcessPoolExecutor(workers) as pool:
        named, unknown = largest(families, pool.map(parameters_of, families, chunksize=8), most)
    if unknown:
        print(f"left out, since they cannot be built: {', '.join(unknown)}\n", flush=True)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="default: all of torchvision up to --most parameters")
    parser.add_argument("--timm", action="store_true", help="the largest of each family of timm instead")
    parser.add_argument("--most", type=float, default=100e6)
    parser.add_argument("--images", type=int, help="default: 4 to 64, by the work for each")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--timeout", type=float, default=1200)
    parser.add_argument("--best", action="store_true", help="try every repair, and time as a user's report does")
    parser.add_argument("--memory", help="what a run may take; default: what is free")
    parser.add_argument("--out", type=Path, default=Path("out/memory.jsonl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.images, options.memory, options.best)))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    rows = [row for row in rows if row.get("asked", row.get("images")) == options.images]
    done = {row["model"] for row in rows if "gib" in row}
    named = options.models or (
        largest_of_timm(options.most, options.workers)
        if options.timm
        else [name for name, count in sizes().items() if count <= options.most]
    )
    print("| model | parameters | images | peak GiB | seconds |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(options.workers) as pool, options.out.open("a") as file:
        for made in as_completed([pool.submit(apart, name, options) for name in named if name not in done]):
            rows.append(row := made.result())
            file.write(json.dumps(row) + "\n")
            file.flush()
            cells = (
                f"{row['parameters'] / 1e6:.1f} M | {row['images']} | {row['gib']:.2f} | {row['seconds']:.0f}"
                if "gib" in row
                else f"| {row['asked'] or ''} | {row['error']} |"
            )
            without = f" (without {row['without']})" if "without" in row else ""
            print(f"| {row['model']} | {cells}{without} |", flush=True)
    found = {row["model"]: row for row in rows if row["model"] in named}
    peaks = sorted(row["gib"] for row in found.values() if "gib" in row)
    failed = [name for name, row in found.items() if "gib" not in row]
    if peaks:
        above = sum(peak > 3 for peak in peaks)
        print(
            f"\n{len(peaks)} models: median {peaks[len(peaks) // 2]:.2f} GiB, most {peaks[-1]:.2f} GiB, {above} above 3"
        )
    print(f"not ready: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
