"""What one epoch of `sc.recover` does to small repaired networks, with and without a limit of the gradient.

    python -m benchmarks.limits --out limits.jsonl
    python -m benchmarks.limits --out limits.jsonl --table

scikit-learn's digits: 1,000 images train, 797 measure. Each network is trained, pruned with the usual repair, and
trained for an epoch with the unpruned one as teacher, three times with another seed. Lines of the file that are there
already are kept, so that the same command goes on where it was stopped. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc

SEEDS, SHARES = (0, 1, 2), (0.5, 0.12)  # shares of the MACs
WAYS: dict[str, dict[str, float]] = {
    "no limit": {"clip": 0}, "limit 1": {"clip": 1}, "limit 5": {"clip": 5},
    "no limit, rate 0.003": {"clip": 0, "lr": 0.003}, "limit 1, rate 0.05": {"clip": 1, "lr": 0.05},
    "limit 5, rate 0.05": {"clip": 5, "lr": 0.05},
}  # fmt: skip
Pair = tuple[Tensor, Tensor]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.branch = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.branch(x))


def _stages(*widths: int) -> list[nn.Module]:
    """Two convolutions and a pooling for each width."""
    found: list[nn.Module] = []
    before = 1
    for width in widths:
        for inputs in (before, width):
            found += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        found.append(nn.MaxPool2d(2))
        before = width
    return found


def _two_classes() -> nn.Module:
    return nn.Sequential(*_stages(32, 64), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _plain() -> nn.Module:
    return nn.Sequential(*_stages(32, 64), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def _residual() -> nn.Module:
    stem = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [Residual(32), nn.MaxPool2d(2), Residual(32), Residual(32)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions, two classes": _two_classes, "perceptron, pixels up to 16": _perceptron,
    "convolutions, ten classes": _plain, "residual, batch norms": _residual,
}  # fmt: skip


def digits(name: str) -> tuple[Pair, Pair]:
    """Images to train on, and images to measure. Two classes are digits below 5 and others."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    x, y = x if "16" in name else x / 16, (y >= 5).long() if "two" in name else y
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


def trained(name: str, seed: int, train: Pair) -> nn.Module:
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    options: dict[str, Any] = {"epochs": 30, "optimizer": "adamw", "lr": 2e-3, "schedule": "onecycle", "seed": seed}
    return sc.recover(model, None, train, teacher=0, progress=False, **options).model.eval()


def right(model: nn.Module, test: Pair) -> float:
    with torch.no_grad():
        return float((model.eval()(test[0]).argmax(1) == test[1]).float().mean())


def cells(name: str, seed: int) -> Iterator[dict[str, Any]]:
    train, test = digits(name)
    whole = trained(name, seed, train)
    for share in SHARES:
        small = sc.prune(whole, train, keep={"macs": share}, progress=False).model
        row = {
            "network": name,
            "seed": seed,
            "left": share,
            "unpruned": right(whole, test),
            "repaired": right(small, test),
        }
        for way, options in WAYS.items():
            runs = (sc.recover(small, whole, train, epochs=1, seed=run, progress=False, **options) for run in SEEDS)
            row[way] = [right(done.model, test) for done in runs]
        yield row


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy in per cent: the mean, and in brackets the worst run."""
    found = [f"| network | MACs left | repaired | {' | '.join(WAYS)} |", "|---" * (3 + len(WAYS)) + "|"]
    for name in NETWORKS:
        for share in SHARES:
            here = [row for row in rows if (row["network"], row["left"]) == (name, share)]
            if here:
                runs = [[value for row in here for value in row[way]] for way in WAYS]
                values = [[row["repaired"] for row in here], *runs]
                shown = (f"{100 * statistics.mean(v):.1f} ({100 * min(v):.1f})" for v in values)
                found.append(f"| {name} | {100 * share:g} % | {' | '.join(shown)} |")
    return "\n".join(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("limits.jsonl"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        torch.set_num_threads(1)
        known = {(row["network"], row["seed"]) for row in lines(given.out)}
        for name in NETWORKS:
            for seed in SEEDS:
                if (name, seed) not in known:
                    made = list(cells(name, seed))
                    with given.out.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in made)
                    print(f"{name}, seed {seed}", flush=True)
    print(table(lines(given.out)))
