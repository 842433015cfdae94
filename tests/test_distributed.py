"""Two gloo processes score their share, make the same plan, and end with the same model as one process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.criteria.scoring import score
from secateur.loop import Schedule
from secateur.loop.checkpoint import digest
from secateur.loop.finetune import FineTune
from secateur.loop.prune import prune

NAMES = ["lrp", "taylor", "gradient", "activation"]
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch cannot run many processes")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.hidden, self.fc = nn.Linear(10, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.hidden(F.relu(self.bn(self.conv(x))).mean((2, 3)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()  # so that sums taken in another order agree to many digits


def data() -> tuple[Tensor, Tensor]:
    x = torch.rand(11, 2, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(11) % 3


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    x, y = data()
    pair = score(net(), (x, y), NAMES)  # every process holds all samples, and scores its share
    mine = [(x[:3], y[:3]), (x[3:8], y[3:8])] if rank == 0 else [(x[8:], y[8:])]
    own = score(net(), mine, NAMES)  # or brings its own, here of unequal size
    empty = score(net(), [(x, y)] if rank == 0 else [], "taylor", graph=None if rank == 0 else _graph())
    tuned = prune(
        net(), (x, y), remove=0.5, schedule=Schedule(step=0.25, finetune=FineTune((x, y), epochs=2, lr=0.05)),
        evaluate=lambda m: float(rank), checkpoint=f"{folder}/run.safetensors", max_drop=2.0,
    )  # fmt: skip
    again = prune(
        net(), (x, y), remove=0.5, schedule=Schedule(step=0.25, finetune=FineTune((x, y), epochs=2, lr=0.05)),
        evaluate=lambda m: float(rank), checkpoint=f"{folder}/run.safetensors", max_drop=2.0,
    )  # fmt: skip
    plain = prune(net(), (x, y), "taylor", remove=0.5, schedule=0.25)
    mended = prune(net(), (x, y), remove=0.5)  # repaired, from the same samples
    apart = prune(net(), mine, remove=0.5)  # or from each process's own
    torch.save(
        {
            "pair": {n: [torch.from_numpy(v) for v in s.units.values()] for n, s in pair.items()},
            "own": {n: [torch.from_numpy(v) for v in s.units.values()] for n, s in own.items()},
            "empty": [torch.from_numpy(v) for v in empty.units.values()],
            "tuned": digest(tuned.model), "again": digest(again.model), "moved": digest(tuned.model) != digest(net()),
            "plan": tuned.plan.to_json(), "plain": digest(plain.model),
            "mended": digest(mended.model), "apart": digest(apart.model),
            "metrics": [row.overall for row in tuned.history],
        },
        f"{folder}/{rank}.pt",
    )  # fmt: skip
    dist.destroy_process_group()


def _graph():
    from secateur.analysis.analyze import analyze

    return analyze(net(), data()[0][:1])


@pytest.fixture(scope="module")
def found() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        mp.start_processes(work, (folder,), nprocs=2, start_method="spawn")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("way", ["pair", "own"])
def test_scores_are_those_of_one_process(found: list[dict], way: str) -> None:
    alone = score(net(), data(), NAMES)
    for name in NAMES:
        for a, b, expected in zip(found[0][way][name], found[1][way][name], alone[name].units.values(), strict=True):
            assert torch.equal(a, b)
            np.testing.assert_allclose(a.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_a_process_without_data_takes_part(found: list[dict]) -> None:
    alone = score(net(), data(), "taylor")
    for a, b, expected in zip(found[0]["empty"], found[1]["empty"], alone.units.values(), strict=True):
        assert torch.equal(a, b)
        np.testing.assert_allclose(a.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_every_process_ends_with_the_same_model(found: list[dict]) -> None:
    for key in ("tuned", "plain", "plan", "again", "mended", "apart"):
        assert found[0][key] == found[1][key]
    assert found[0]["tuned"] == found[0]["again"]  # resumed from the checkpoint of the first process
    assert found[0]["moved"]
    assert found[0]["metrics"] == found[1]["metrics"] == [0.0, 0.0, 0.0]  # the first process's evaluation counts
    alone = prune(net(), data(), "taylor", remove=0.5, schedule=0.25)
    assert found[0]["plain"] == digest(alone.model)
    assert found[0]["mended"] == digest(prune(net(), data(), remove=0.5).model)
