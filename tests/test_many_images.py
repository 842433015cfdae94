"""Memory does not grow with the number of images: what a batch took is free when the next one comes."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.memory import Stages
from secateur.running.accuracy import accuracy

_SIDE, _SIZE = 24, 8


class Gated(nn.Module):
    """A block with a gate (squeeze-and-excitation), whose sum overwrites its first part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x)).relu()
        y = y * self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        y += x
        return y


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Gated() for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()


def bytes_alive() -> int:
    """What all tensors hold that Python can see, those in cycles that nothing uses any more included."""
    found = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@dataclass
class Made:
    """Batches that are made when they are asked for. Notes what is alive then, if asked to."""

    samples: int
    notes: bool = False
    alive: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, self.samples, _SIZE):
            if self.notes:
                self.alive.append(bytes_alive())
            draw = torch.Generator().manual_seed(begin)
            yield torch.rand(_SIZE, 3, _SIDE, _SIDE, generator=draw), torch.arange(_SIZE) % 10


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No search for cycles: it comes when it likes, and by the number of objects, however large they are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.parametrize(
    "criterion", ["lrp", "lrp:epsilon_plus", "lrp:attnlrp", "lrp:flat", "taylor", "gradient", "activation"]
)
@pytest.mark.usefixtures("uncollected")
def test_a_scored_batch_leaves_nothing(criterion: str) -> None:
    data = Made(8 * _SIZE, notes=True)
    sc.score(network(), data, criterion)
    # The example, the first batch, and the second, from which on layers are fused, may differ.
    assert max(data.alive[4:]) <= data.alive[3] + 4 * _SIZE * 3 * _SIDE**2, [a / 2**20 for a in data.alive]


@pytest.mark.usefixtures("uncollected")
def test_a_measured_batch_leaves_nothing() -> None:
    data = Made(8 * _SIZE, notes=True)
    accuracy(network(), data)
    assert max(data.alive[2:]) <= data.alive[1]


_RUN = """
import gc, sys, torch
import secateur as sc
from secateur.running.accuracy import accuracy
from secateur.running.memory import peak, resident, trim
from test_many_images import Made, network

torch.set_num_threads(1)
gc.disable()  # what cycles hold stays
count = int(sys.argv[1])
net = network()
sc.prune(net, list(Made(16)), remove=0.3, progress=False)  # everything is loaded
gc.collect()
trim()
before = resident()
data = Made(count)
sc.prune(
    net, data, keep={"macs": 0.5}, evaluate=lambda model: accuracy(model, data).overall, memory="32 MiB",
    repair="ridge", progress=False,
)
print(peak() - before)
"""


def _peak(samples: int) -> int:
    here = Path(__file__).parent
    made: Any = subprocess.run(
        [sys.executable, "-c", _RUN, str(samples)], capture_output=True, text=True, timeout=300, check=False,
        env={"PYTHONPATH": ":".join([str(here), str(here.parent / "src"), *sys.path]), "OMP_NUM_THREADS": "1",
             "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    return int(made.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells the peak")
def test_four_times_as_many_images_take_no_more_memory() -> None:
    """A whole run: score, remove, repair, accuracy before and after."""
    few, many = _peak(80), _peak(320)
    print(f"{few / 2**20:.0f} and {many / 2**20:.0f} MiB")
    assert many < few + 24 * 2**20  # once, all repairs with 160 and 640: 83 and 243 MiB


def test_the_benchmark_tells_what_takes_the_time() -> None:
    begin = time.process_time()
    stages = Stages()
    sc.prune(network(), list(Made(16)), remove=0.3, repair="mean", progress=stages)
    stages.enter("end")
    assert {"analysis", "scoring", "repairing"} <= set(stages.seconds)
    assert "end" not in stages.seconds
    assert 0 < sum(stages.seconds.values()) <= time.process_time() - begin + 0.01 * len(stages.seconds)
    assert stages.highest in stages.seconds or not sys.platform.startswith("linux")
