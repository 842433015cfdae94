"""Kill a pruning run at random moments, start it again, and compare its ending with that of a run that was left alone:
same plan, same weights, bit for bit.

    python benchmarks/kills.py --kills 25
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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.loop.checkpoint import digest
from secateur.loop.finetune import FineTune
from secateur.loop.prune import prune
from secateur.loop.settings import Schedule


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


def work(checkpoint: Path) -> None:
    """The run: LRP, ten steps, fine-tuning with dropout and a carried Adam in between."""
    torch.manual_seed(0)
    net = Net()
    generator = torch.Generator().manual_seed(1)
    data = torch.rand(40, 3, 12, 12, generator=generator), torch.arange(40) % 4
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    sgd = FineTune(data, epochs=2, lr=0.02)

    def tune(model: nn.Module, step: int) -> None:
        sgd(model, step)
        model.train()
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
        model.eval()

    schedule = Schedule(step=0.07, finetune=tune, carry=[optimizer])
    result = prune(net, data, remove=0.7, schedule=schedule, checkpoint=checkpoint)
    assert result.plan is not None
    plan = hashlib.sha256(result.plan.to_json().encode()).hexdigest()
    checkpoint.with_suffix(".txt").write_text(f"{plan} {digest(result.model)}")


def start(checkpoint: Path) -> int:
    """A process of its own, forked because importing torch anew would take longer than the run."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(checkpoint)
        status = 0
    finally:
        os._exit(status)


def ending(child: int, checkpoint: Path) -> str | None:
    """What a process left when it ended by itself."""
    _, status = os.waitpid(child, 0)
    note = checkpoint.with_suffix(".txt")
    return note.read_text() if status == 0 and note.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch._dynamo  # noqa: F401  (slow to import; the children inherit it)

    folder = options.folder or Path(tempfile.mkdtemp())
    begin = time.perf_counter()
    path = folder / "whole.safetensors"
    expected = ending(start(path), path)
    length = time.perf_counter() - begin
    print(f"left alone: {length:.1f} s, {expected}")
    chance, identical, struck = random.Random(options.seed), 0, 0
    for number in range(options.kills):
        path = folder / f"killed{number}.safetensors"
        process = start(path)
        moment = chance.uniform(0, length)
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)  # a process that has ended waits for us, so the number is still its own
        killed = ending(process, path) is None
        struck += killed
        final = ending(start(path), path)
        identical += final == expected
        print(f"kill {number + 1} after {moment:.2f} s: {'killed' if killed else 'had ended'}, then "
              f"{'identical' if final == expected else f'DIFFERENT: {final}'}")  # fmt: skip
    print(f"{identical} of {options.kills} identical ({struck} struck a running process)")
    return 0 if identical == options.kills and expected is not None else 1


if __name__ == "__main__":
    sys.exit(main())
