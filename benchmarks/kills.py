"""Kill pruning runs, of the API and of the command line, and start them again. Each must end like a run that was left
alone (same plan, same weights, bit for bit) or be refused in one line, and leave no other files behind.

    python benchmarks/kills.py --kills 100               # both ways: random moments, then every file operation
    python benchmarks/kills.py --kills 3 --only API --operations 0
    python benchmarks/kills.py --only API --operations 0 --seed 1 --minutes 8    # a piece of it

A kill at a file operation strikes before the file is opened for writing, renamed or deleted: the next one strikes after
that. The network and the data are small, so that most of a run's time is spent between its files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import secateur as sc
from secateur.cli import app
from secateur.loop.settings import Schedule
from secateur.recover import Recover

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.conv2, self.conv3 = nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv1(x)))
        x = F.relu(x + self.conv3(F.relu(self.conv2(x))))
        return self.fc(self.drop(x.mean((2, 3))))


def by_api(place: Path, shared: Path) -> None:
    """LRP, ten steps, fine-tuning with dropout and a carried Adam in between. Then the model is saved."""
    torch.manual_seed(0)
    net = Net()
    generator = torch.Generator().manual_seed(1)
    data = torch.rand(40, 3, 12, 12, generator=generator), torch.arange(40) % 4
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def tune(model: nn.Module, step: int) -> None:
        model.train()
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
        model.eval()

    schedule = Schedule(step=0.07, finetune=tune, carry=[optimizer])
    trained = Recover(epochs=2, lr=0.02, batch_size=20, ema=0.9)
    file = place / "run.safetensors"
    result = sc.prune(net, data, remove=0.7, schedule=schedule, recover=trained, checkpoint=file)
    sc.save(result, place / "model")


def by_command(place: Path, shared: Path) -> None:
    """The command `prune` on photographs: twelve steps, accuracy on those held out, a report."""
    given = [f"{__file__}:Net", "--weights", shared / "net.safetensors", "--images", shared / "photos",
             "--input-size", "12", "--remove", "0.6", "--step", "0.05", "--no-latency",
             "--out", place]  # fmt: skip
    app(["prune", *map(str, given)], standalone_mode=True)


def furnish(shared: Path) -> None:
    """Weights and photographs for the command line."""
    torch.manual_seed(0)
    safetensors.torch.save_file(Net().state_dict(), shared / "net.safetensors")
    draw = np.random.default_rng(0)
    for number in range(16):
        path = shared / "photos" / "abcd"[number % 4] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (14, 14, 3), np.uint8)).save(path)


@dataclass(frozen=True)
class Left:
    """What a process left: how it ended, its files, the model in them, and what it said."""

    ended: bool
    files: frozenset[str]
    model: str
    said: str

    @property
    def refused(self) -> bool:
        return not self.ended and self.said.count("secateur: error:") == 1 and "Traceback" not in self.said


@dataclass(frozen=True)
class Way:
    """One way to run."""

    name: str
    work: Callable[[Path, Path], None]
    shared: Path

    def start(self, place: Path, at: int | None = None) -> int:
        """A process of its own, forked because importing torch anew would take longer than the run."""
        said = os.open(place.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # there, however early it dies
        child = os.fork()
        if child:
            os.close(said)
            return child
        status = 1
        try:
            os.dup2(said, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            operations = watch(place, at)
            self.work(place, self.shared)
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        finally:
            place.with_suffix(".count").write_text(str(operations[0]))
            os._exit(status)

    def left(self, child: int, place: Path) -> Left:
        """What is there when a process has ended."""
        _, status = os.waitpid(child, 0)
        files = [path for path in place.rglob("*") if path.is_file()]
        model = hashlib.sha256()
        for path in sorted((place / "model").glob("[!.]*")):
            model.update(path.read_bytes())
        names = frozenset(str(path.relative_to(place)) for path in files)
        return Left(status == 0, names, model.hexdigest(), place.with_suffix(".err").read_text())


def watch(place: Path, at: int | None) -> list[int]:
    """Count the file operations below `place`, and die before number `at`."""
    seen = [0]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event not in FILE_EVENTS or not isinstance(args[0], str | os.PathLike) or f"{place}/" not in f"{args[0]}/":
            return
        if event == "open" and not isinstance(args[2], int):
            return
        if event == "open" and not int(str(args[2])) & (os.O_WRONLY | os.O_RDWR):
            return
        if seen[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    sys.addaudithook(hook)
    return seen


def strike(
    way: Way, folder: Path, expected: Left, moments: Iterable[float | int], most: int, until: float
) -> Counter[str]:
    """Kill a run at each of the moments (seconds, or the number of a file operation), and start it again.

    A run that had ended by then does not count. Up to `most` runs do, as long as there is time.
    """
    counts: Counter[str] = Counter()
    for number, moment in enumerate(moments):
        if counts["kills"] == most or time.monotonic() > until:
            break
        kind = "operation" if isinstance(moment, int) else "moment"
        place = folder / f"{way.name}-{kind}-{number}"
        child = way.start(place, moment if isinstance(moment, int) else None)
        if not isinstance(moment, int):
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)  # a process that has ended waits for us, so the number is still its own
        if way.left(child, place).ended:
            continue
        counts["kills"] += 1
        final = way.left(way.start(place), place)
        identical = final.ended and final.model == expected.model
        litter = sorted(final.files - expected.files)
        ending = "identical" if identical else "refused" if final.refused else "WRONG"
        counts[ending] += 1
        counts["litter"] += bool(litter)
        if ending == "WRONG" or litter:
            print(f"{place.name}: {ending}, left over: {litter}\n{final.said[-2000:]}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="at random moments, for each way")
    parser.add_argument("--operations", type=int, help="kills at file operations, spread over a run (default: all)")
    parser.add_argument("--first", type=int, default=0, help="the first of these file operations")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop, and count what was done")
    parser.add_argument("--only", choices=["API", "command"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    import matplotlib.pyplot  # noqa: F401  (slow to import; the children inherit it)
    import torch._dynamo

    torch.set_num_threads(1)
    folder = (options.folder or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    furnish(folder)
    ways = [Way("API", by_api, folder), Way("command", by_command, folder)]
    bad = 0
    print("| runs | kills | identical | refused in one line | other | with litter |")
    print("|---|---|---|---|---|---|")
    for way in ways:
        if options.only not in (None, way.name):
            continue
        length = float("inf")
        for place in (folder / f"{way.name}-whole-{i}" for i in range(2)):  # the first one fills caches
            begin = time.perf_counter()
            expected = way.left(way.start(place), place)
            length = min(length, time.perf_counter() - begin)
            assert expected.ended, expected.said
        total = int(place.with_suffix(".count").read_text())
        chance = random.Random(options.seed)
        count = total if options.operations is None else min(total, options.operations)
        some = [number * total // count for number in range(count)][options.first :]
        at_random = (chance.uniform(0, length) for _ in range(10 * options.kills))
        for kind, moments, most in (("random moments", at_random, options.kills), ("file operations", some, total)):
            found = strike(way, folder, expected, moments, most, begun + 60 * options.minutes)
            numbers = [found[key] for key in ("kills", "identical", "refused", "WRONG", "litter")]
            print(f"| {way.name}, {kind} | " + " | ".join(map(str, numbers)) + " |", flush=True)
            bad += found["WRONG"] + found["litter"]
        print(f"{way.name}: {length:.1f} s when left alone, {total} file operations", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
