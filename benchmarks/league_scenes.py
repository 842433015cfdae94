"""The league of ResNet-50 on Scene 15, smaller: MACs divided by 2 and 4, then trained for 0, 5 or 20 epochs.

    python -m benchmarks.league_scenes --weights resnet50.safetensors --images scene15 --out runs --train
    python -m benchmarks.league_scenes --weights resnet50.safetensors --images scene15 --out runs --part 0/4 --minutes 8
    python -m benchmarks.league_scenes --out runs --table

On a CPU, `--side 112` and `--speeds 4 --epochs 5` take two hours of one core.

The network is trained on a fifth of the images, as in the paper (`--train`). All other images measure, after the last
epoch. `--part 0/4` takes every fourth cell, so that several processes share the work. Results are lines of
`runs/scenes-*.jsonl`, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.latency_accuracy import network
from benchmarks.league import table
from benchmarks.league_models import EVEN, FAIR, MAGNITUDE, OTHERS, OURS, PARTS, TAYLOR, Row, by_torch_pruning
from reproduction.networks import with_classes
from reproduction.published import published
from secateur.data.views import View
from secateur.loop import Schedule
from secateur.recover import Recover
from secateur.running.accuracy import accuracy

SPEEDS, LENGTHS, SEEDS, SCORED = (2.0, 4.0), (0, 5, 20), (0, 1, 2), 10  # images of each class that score and repair
PREPARED = 50  # epochs of the unpruned network
RATES = {5: 0.005, 20: 0.01}


@dataclass(frozen=True)
class Cell:
    """A smaller model, trained with and without a teacher."""

    choice: str
    repair: bool
    speed: float
    seed: int


def cells() -> Iterator[tuple[Cell, list[Row]]]:
    rows = [OURS, *PARTS, *OTHERS, *EVEN, *(replace(row, teacher=True) for row in EVEN), MAGNITUDE, TAYLOR, *FAIR]
    for speed in reversed(SPEEDS):  # what tells the rows apart comes first
        for seed in SEEDS:
            for choice, repair in dict.fromkeys((row.choice, row.repair) for row in rows):
                mine = [row for row in rows if (row.choice, row.repair) == (choice, repair)]
                yield Cell(choice, repair, speed, seed), mine


class Scenes:
    """The images on the device, and the network that is trained on some of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        found = published("scene15", given.images)
        few = slice(None, None, given.every)
        self.view = View(given.side, "squash")
        train, test = found.train.take(range(len(found.train))[few]), found.test.take(range(len(found.test))[few])
        self.device, self.file = given.device, given.out / "scenes.safetensors"
        self.train = train.pixels(self.view, True, given.device), torch.tensor(train.labels, device=given.device)
        self.test = test.pixels(self.view, False, given.device), torch.tensor(test.labels, device=given.device)
        torch.manual_seed(0)
        self.net = with_classes(network("resnet50", given.weights), len(found.classes)).to(given.device)
        if self.file.exists():
            self.net.load_state_dict(safetensors.torch.load_file(self.file))
        self.net.eval()

    def trained(self, model: nn.Module, teacher: nn.Module | None, settings: Recover) -> nn.Module:
        share = 0.9 if teacher is not None else 0.0
        given = replace(settings, batch_size=64, augment=self.view.training, teacher=share)
        return sc.recover(model, teacher, self.train, given, progress=False).model.eval()

    def accuracy(self, model: nn.Module) -> float:
        batches = zip(*(tensor.split(250) for tensor in self.test), strict=True)
        return accuracy(model, [(self.view.evaluation(x), y) for x, y in batches]).overall

    def scored(self, seed: int) -> tuple[Tensor, Tensor]:
        """Some images of each class."""
        order = torch.randperm(len(self.train[1]), generator=torch.Generator().manual_seed(seed)).to(self.device)
        labels = self.train[1][order]
        index = torch.cat([order[labels == label][:SCORED] for label in labels.unique()])
        return self.view.evaluation(self.train[0][index]), self.train[1][index]

    def chosen(self, cell: Cell) -> nn.Module:
        """The smaller model of a cell, before training."""
        samples = self.scored(cell.seed)
        if cell.choice.startswith("Torch-Pruning"):
            return by_torch_pruning(
                self.net, samples, cell, lambda model: macs(model, samples[0]), lambda path: path == "fc"
            )
        criterion: Any = sc.criteria.Random(seed=cell.seed) if cell.choice == "random" else cell.choice
        schedule = Schedule(one_shot=True, rescore=False, seed=cell.seed, batch_size=50)
        more = {} if cell.repair else {"repair": None}
        return sc.prune(
            self.net, samples, criterion, keep={"macs": 1 / cell.speed}, schedule=schedule, progress=False, **more
        ).model


def macs(model: nn.Module, x: Tensor) -> int:
    """Multiplications of convolutions and linear layers for one image, counted while it runs."""
    found: list[int] = []

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        found.append(layer.weight.numel() * output[0, 0].numel())

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        model.eval()(x[:1])
    for hook in hooks:
        hook.remove()
    return sum(found)


def main(given: argparse.Namespace) -> None:
    begin, (part, parts) = time.perf_counter(), map(int, given.part.split("/"))
    given.out.mkdir(parents=True, exist_ok=True)
    scenes = Scenes(given)
    print(f"{len(scenes.train[1])} images to train on, {len(scenes.test[1])} to measure", flush=True)
    if given.train:
        scenes.net = scenes.trained(scenes.net, None, Recover(epochs=given.epochs or PREPARED, lr=0.01))
        safetensors.torch.save_file({k: v.contiguous() for k, v in scenes.net.state_dict().items()}, scenes.file)
        print(f"unpruned: {100 * scenes.accuracy(scenes.net):.2f} %, {time.perf_counter() - begin:.0f} s", flush=True)
        return
    if not scenes.file.exists():
        raise SystemExit(f"{scenes.file} is missing: train the network first (--train).")
    known = {(line["row"], line["speed"], line["epochs"], line["seed"]) for line in lines(given.out)}
    one = scenes.view.evaluation(scenes.test[0][:1])
    for cell, rows in [both for both in cells() if both[0].speed in given.speeds][part::parts]:
        lengths = [n for n in LENGTHS if n <= (given.epochs or n)]
        asked = dict.fromkeys((r if n else replace(r, teacher=False), n) for n in lengths for r in rows)
        todo = [(r, n) for r, n in asked if (str(r), cell.speed, n, cell.seed) not in known]
        todo = [(r, n) for r, n in todo if not given.rows or str(r) in given.rows]
        if not todo or time.perf_counter() - begin > 60 * given.minutes:
            continue
        start = time.perf_counter()
        small = scenes.chosen(cell)
        ready = time.perf_counter() - start
        for row, epochs in todo:
            if time.perf_counter() - begin > 60 * given.minutes:
                break
            start, model = time.perf_counter(), small
            if epochs:
                settings = Recover(epochs=epochs, lr=RATES[epochs], seed=cell.seed)
                model = scenes.trained(small, scenes.net if row.teacher else None, settings)
            line = asdict(cell) | {"row": str(row), "epochs": epochs, "accuracy": scenes.accuracy(model)}
            line |= {"side": given.side, "macs": macs(small, one)}
            line |= {"prepared": round(ready, 1), "seconds": round(time.perf_counter() - start, 1)}
            with (given.out / f"scenes-{part}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("scenes-*.jsonl")) for line in path.open()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing new is begun after these")
    parser.add_argument("--epochs", type=int, default=0, help="only runs of at most so many")
    parser.add_argument("--speeds", type=float, nargs="*", default=list(SPEEDS), help="what the MACs are divided by")
    parser.add_argument("--rows", nargs="*", default=[], help="only these, such as 'lrp + repair'")
    parser.add_argument("--side", type=int, default=224, help="of the images; give another --out")
    parser.add_argument("--every", type=int, default=1, help="every so many-th image, to try it out")
    parser.add_argument("--train", action="store_true", help="train the unpruned network")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(lines(options.out), SPEEDS, LENGTHS))
    else:
        main(options)
