"""What takes hours on a GPU, in portions of minutes: several commands side by side, and small results in one file.

    python -m benchmarks.portions --data DATA --out OUT --minutes 25 --only league,scenes --most 12
    python -m benchmarks.portions --list

DATA holds what the commands read, and `benchmarks.packs` brings it in parts: `cifar` (pieces of `benchmarks.cifar`),
`cifar-10-batches-bin`, `scene15`, `cats_dogs`, `flowers`, `birds`, `cars`, `imagenet` (tar files of
`benchmarks.imagenet`) and the weights as files. A command begins as soon as its data are there, so that they may still
be on their way, and in the order of the list. A folder is there when an empty file `NAME.ready` lies beside it. What is
not ready when the minutes are over is ended, and goes on from its files when the same call is given again. `OUT.tar`
always holds the results so far without weights and checkpoints; unpack it beside OUT to go on elsewhere. Runs that the
folders `league` and `paper` of `docs/results` have are not repeated: copy what came home there.

Where CUDA MPS works, the processes share the GPU. One that is killed there while it computes takes all others with it,
and so does one that finds no memory, so each has a limit, what fails is begun again, and nothing is ended before the
minutes are over. Do not kill any by hand. While data still come, nothing begins before what is further up in the list.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.league import cuda_works, lines, plan, share_gpu
from benchmarks.league_models import (
    FAIR,
    FIRST,
    MAGNITUDE,
    OTHERS,
    OURS,
    PARTS,
    SEEDS,
    SMALL,
    SPEEDS,
    TAYLOR,
    THIRD,
    WHOLE,
    Job,
    Row,
)  # fmt: skip

#: Results are kept every so many seconds. Larger files are weights or checkpoints.
EVERY, LARGEST = 10.0, 4 << 20
#: Commands are told to begin nothing new so many seconds before the end.
EARLY = 5.0
#: How long a command may take to end when it is asked to.
POLITE = 20.0
#: The share of the GPU's memory that commands may fill.
FREE = 0.95
#: Results that are not measured again: lines of the leagues, and the runs of the paper's cells in folders as in OUT.
RESULTS = Path(__file__).parents[1] / "docs/results"
KEPT, PAPER = RESULTS / "league", RESULTS / "paper"
#: What the leagues compare with.
RIVALS = "torch_pruning"
#: How often a command that failed is begun again, and for how many seconds after the last data more may come.
AGAIN, PATIENCE = 3, 40.0
#: What lets a process wait where others share the GPU. The league's many short operations would otherwise do so.
GENTLE = {"CUDA_MPS_CLIENT_PRIORITY": "1"}


@dataclass(frozen=True)
class Command:
    """`{data}`, `{out}` and `{minutes}` in the text are filled in when it begins. It computes in `width` processes,
    each with so much `memory` of the GPU (GiB, not more). Those of others wait for what is `urgent`."""

    name: str
    text: str
    needs: tuple[str, ...] = ()
    width: int = 1
    memory: int = 12
    urgent: bool = False


def _league(
    name: str, jobs: Sequence[Job], weights: str = "{data}/resnet56_cifar10.safetensors", more: str = ""
) -> Command:
    text = f"-m benchmarks.league --data {{data}}/cifar --weights {weights} --compiled --processes 1 --most 11"
    needs = ("cifar/cifar10-0.webps", "cifar/cifar10-1.webps", weights.removeprefix("{data}/"))
    only = ",".join(job.name for job in jobs)
    text += f"{more} --minutes {{minutes}} --out {{out}}/{name} --only {only}"
    return Command(name, text, needs, memory=6 + 5 * len(jobs) // 2, urgent=True)


def _scenes(part: int, parts: int, speed: int = 0) -> Command:
    """A part of the league of scenes with MACs divided by `speed`. Without parts, the network that it begins with."""
    given = "--weights {data}/resnet50.safetensors --images {data}/scene15 --out {out}/scenes"
    more = f"--part {part}/{parts} --speeds {speed} --minutes {{minutes}}" if parts else "--train"
    needs = ("scene15.ready", "resnet50.safetensors", *(("{out}/scenes/scenes.safetensors",) if parts else ()))
    name = f"scenes-by{speed}-{part}of{parts}" if parts else "scenes-train"
    return Command(name, f"-m benchmarks.league_scenes {given} {more}", needs)


def _paper(model: str, data: str, draw: int) -> Command:
    """A draw of a cell of the paper's table, some criteria at a time. ResNets are masked, as in the paper."""
    weights = {"resnet50": "resnet50.safetensors"}.get(model, f"{model}_features.safetensors")
    folder = {"cifar10": "cifar-10-batches-bin", "flowers102": "flowers", "catsdogs": "cats_dogs"}.get(data, data)
    less = "--prepare-epochs 50 --epochs 5"
    more = {
        "scene15": "--steps 11",
        "catsdogs": f"--steps 12 {less}",
        "flowers102": f"--steps 8 {less}",
        "cifar10": "--steps 6 --prepare-epochs 12 --epochs 1 --score-images 5000",  # 2,500 batches are an epoch
    }[data]
    more += " --mode paper --early-strides" if model == "resnet50" else " --mode physical"
    # One VGG-16 nearly fills a GPU. Of two after two, some criteria are done when the time is over.
    usual = 4, 9 if data == "cifar10" else 12  # ResNets see 32² there
    width, memory = {"vgg16": (2, 20), "alexnet": (4, 8)}.get(model, usual)
    text = f"-m reproduction fine-tune --model {model} --data {data} --images {{data}}/{folder} --device cuda"
    text += f" --weights {{data}}/{weights} --draws {draw}:{draw + 1} --jobs {width} --out {{out}}/paper-{model}-{data}"
    return Command(f"paper-{model}-{data}-{draw}", f"{text} {more}", (f"{folder}.ready", weights), width, memory)


def missing(seed: int) -> list[Job]:
    """Runs of further seeds that the page of the league lacks."""
    rows = (OURS, *PARTS, *OTHERS, MAGNITUDE, TAYLOR, *FAIR)
    found = [Job(row, 2.55, 100, seed) for row in (*PARTS[1:], *OTHERS)]
    found += [Job(row, 2.55, 20, seed) for row in rows]
    kept = {(line["row"], line["speed"], line["epochs"], line["seed"]) for line in lines(KEPT / "results.jsonl")}
    return [job for job in found if (str(job.row), job.speed, job.epochs, job.seed) not in kept]


def whole(seed: int, row: Row = WHOLE) -> Job:
    """The whole network, trained as the others are."""
    return Job(row, 1.0, 100, seed)


def small() -> list[Job]:
    """Torch-Pruning's own recipe."""
    return [job for job in plan() if job.row.recipe == SMALL]


def further(seed: int) -> list[Job]:
    """A league that begins with the network that was trained further. The fading teacher is tried with one seed."""
    ours, fading, rival = THIRD
    found = [*((ours, speed) for speed in SPEEDS), (rival, 2.55), *((fading, speed) for speed in SPEEDS if not seed)]
    return [Job(row, speed, 100, seed) for row, speed in found]


def commands() -> list[Command]:
    """Everything, the most important first."""
    # Does a network that was trained further end higher? DepGraph's best, too, has 100 epochs before it is cut.
    first = whole(0, FIRST)
    start = f"{{out}}/first/whole/{first.name}.safetensors"
    # VGG-16 takes longest by far, so it begins early.
    found = [_league("first", [first]), _paper("alexnet", "cifar10", 0), _paper("vgg16", "cifar10", 0)]
    found += [_league(f"further-{seed}", further(seed), start) for seed in SEEDS]
    found.append(_paper("resnet50", "cifar10", 0))
    old = [(model, data) for data in ("scene15", "catsdogs") for model in ("resnet50", "vgg16")]
    # What no page has yet, then second draws. Of the old cells, the first draw is on the page.
    found += [_paper(model, "flowers102", 0) for model in ("resnet50", "alexnet", "vgg16")]
    found += [_paper(*cell, 1) for cell in old]
    pair = "-m reproduction few-shot --model resnet50 --early-strides --data birds+cars --images {data} --device cuda"
    pair += " --weights {data}/resnet50.safetensors --draws 3 --mode paper --jobs 2 --out {out}/pairs"
    found.append(Command("pairs", pair, ("birds.ready", "cars.ready", "resnet50.safetensors"), 2))
    found += [_scenes(0, 0), *(_scenes(part, 4, speed) for speed in (4, 2) for part in range(4))]
    found += [_paper(model, "cifar10", 1) for model in ("resnet50", "alexnet")]
    found += [_paper(model, "flowers102", 1) for model in ("alexnet", "resnet50", "vgg16")]
    found.append(_paper("vgg16", "cifar10", 1))
    found.append(Command("compiled", "-m benchmarks.compiled"))
    # The page's other runs are of a time when nothing was done about batch norms.
    as_before = " --norms-as-they-are"
    found += [_league(f"league-{seed}", jobs, more=as_before) for seed in SEEDS[1:] if (jobs := missing(seed))]
    found += [_league(f"whole-{seed}", [whole(seed)], more=as_before) for seed in SEEDS]
    imagenet = "-m benchmarks.imagenet --images {data}/imagenet --out {out}/imagenet --weights {data}"
    found += [
        Command(f"imagenet-{model}", f"{imagenet}/{model}.safetensors --model {model}", (f"{model}.safetensors", ready))
        for model, ready in (("efficientnet_lite0", "imagenet.ready"), ("resnet50", "imagenet.ready"))
    ]
    return [*found, _league("league-small", small())]


def limit(share: float) -> dict[str, str]:
    """What keeps a process to a share of the GPU's memory: it gives back what it only holds, and fails at its limit."""
    return {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share:.3f}"} if share < 1 else {}


class Running:
    """A command that has begun, in a group of processes of its own."""

    def __init__(self, command: Command, data: Path, out: Path, deadline: float, gentle: bool, total: float) -> None:
        self.name, self.command, self.begin = command.name, command, time.time()
        given = {"data": str(data), "out": str(out), "minutes": f"{(deadline - EARLY - time.time()) / 60:.2f}"}
        words = [word.format(**given) for word in command.text.split()]
        log = (out / "logs" / f"{command.name}.log").open("a")
        env = (
            os.environ
            | (GENTLE if gentle and not command.urgent else {})
            | limit(command.memory / total if total else 1)
        )
        self.process = subprocess.Popen(
            [sys.executable, *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
        log.close()

    def end(self) -> None:
        """Ask it to end, and then end it."""
        for sent, seconds in ((signal.SIGTERM, POLITE), (signal.SIGKILL, POLITE)):
            try:
                os.killpg(self.process.pid, sent)
                self.process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def ready(command: Command, data: Path, out: Path) -> bool:
    """Whether everything that it reads is there."""
    places = (need.format(out=out) for need in command.needs)
    return all((data / place).exists() for place in places)  # an absolute place stays what it is


def lacks_data(command: Command, data: Path) -> bool:
    """Whether it waits for data, and not only for what another command makes."""
    return not all((data / need).exists() for need in command.needs if "{out}" not in need)


def next_ones(waiting: Sequence[Command], data: Path, out: Path, begun: float) -> list[Command]:
    """What may begin, in order. While data still come, nothing overtakes what waits for them."""
    last = max((path.stat().st_mtime for path in data.glob(".come/*/*")), default=begun)
    more = time.time() - max(last, begun) < PATIENCE
    found: list[Command] = []
    for command in waiting:
        if more and lacks_data(command, data):
            break
        if ready(command, data, out):
            found.append(command)
    return found


def work(
    todo: Sequence[Command],
    data: Path,
    out: Path,
    minutes: float,
    most: int,
    memory: float = float("inf"),
    gentle: bool = False,
    total: float = 0.0,
) -> Iterator[str]:
    """Run commands side by side, in at most so many processes and so many GiB, until all are done or the minutes are
    over. If `gentle`, those that are not urgent let others go first. With the `total` memory, each has a limit.

    Yields a line for each that begins or ends.
    """
    begun = time.time()
    out, deadline = out.resolve(), begun + 60 * minutes
    (out / "logs").mkdir(parents=True, exist_ok=True)
    waiting, running, failures, kept = list(todo), list[Running](), Counter[str](), 0.0
    try:
        while (waiting or running) and time.time() < deadline:
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                status = one.process.returncode
                how = "done" if status == 0 else f"failed with {status}"
                yield f"{one.name}: {how} after {time.time() - one.begin:.0f} s"
                failures[one.name] += status != 0
                if status and failures[one.name] <= AGAIN:  # it goes on from its files
                    waiting.insert(0, one.command)
            for command in next_ones(waiting, data, out, begun):
                together = [command, *(one.command for one in running)]
                taken = sum(one.width * one.memory for one in together)
                if running and (sum(one.width for one in together) > most or taken > memory):
                    break  # what is further down in the list does not overtake it
                waiting.remove(command)
                running.append(Running(command, data, out, deadline, gentle, total))
                yield f"{command.name}: begins"
            if time.time() - kept > EVERY:
                keep(out)
                kept = time.time()
            time.sleep(0.2)
    finally:
        for one in running:
            one.end()
        keep(out)
    for one in running:
        yield f"{one.name}: ended after {time.time() - one.begin:.0f} s, with {one.process.returncode}"
    yield from (f"{command.name}: not begun" for command in waiting)


def keep(out: Path) -> None:
    """Pack the small files of a folder, those of the commands that run included."""
    half = out.with_suffix(".part")
    with tarfile.open(half, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            light = path.suffix != ".safetensors" or path.parent.name == "whole"  # which a further league begins with
            if path.is_file() and light and path.stat().st_size < LARGEST:
                archive.add(path, path.relative_to(out.parent))
    half.replace(out.with_suffix(".tar"))


def main(given: argparse.Namespace) -> None:
    todo = [c for c in commands() if not given.only or any(part in c.name for part in given.only.split(","))]
    if given.list:
        print("\n".join(f"{c.name}: python {c.text}" for c in todo))
        return
    if any("league" in c.text for c in todo) and importlib.util.find_spec(RIVALS) is None:
        raise SystemExit(f"{RIVALS} is missing, with which the leagues compare: pip install torch-pruning")
    scenes = given.out / "scenes"
    scenes.mkdir(parents=True, exist_ok=True)
    for file in KEPT.glob("scenes-*.jsonl"):
        shutil.copy(file, scenes / file.name)
    if PAPER.exists():
        shutil.copytree(PAPER, given.out, dirs_exist_ok=True)
    gentle = torch.cuda.is_available() and share_gpu() and cuda_works(**GENTLE)
    there = torch.cuda.mem_get_info()[1] / 2**30 if torch.cuda.is_available() else 0.0
    total = there if there and cuda_works(**limit(0.5)) else 0.0
    for line in work(
        todo, given.data.resolve(), given.out, given.minutes, given.most, FREE * there or float("inf"), gentle, total
    ):
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("portions"))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--most", type=int, default=16, help="processes at a time")
    parser.add_argument("--only", default="", help="commands whose names have one of these in them: A,B")
    parser.add_argument("--list", action="store_true", help="print the commands and do nothing")
    main(parser.parse_args())
