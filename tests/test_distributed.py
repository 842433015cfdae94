"""Two gloo processes score their share, make the same plan, and end with the same model as one process.

If one of them fails, both do, at once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.criteria.scoring import score
from secateur.errors import SecateurError
from secateur.loop.prune import prune
from secateur.plans.ranking import plan
from secateur.recover import Recover, recover
from secateur.repair import Repair
from secateur.running.identity import digest
from secateur.surgery.apply import apply

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
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(minutes=10)
    )
    x, y = data()
    pair = score(net(), (x, y), NAMES)  # every process holds all samples, and scores its share
    mine = [(x[:3], y[:3]), (x[3:8], y[3:8])] if rank == 0 else [(x[8:], y[8:])]
    own = score(net(), mine, NAMES)  # or brings its own, here of unequal size
    empty = score(net(), [(x, y)] if rank == 0 else [], "taylor", graph=None if rank == 0 else _graph())
    tuned = prune(
        net(), (x, y), remove=0.5, schedule=0.25, recover=Recover.scenario1(epochs=2, lr=0.05),
        evaluate=lambda m: float(rank), checkpoint=f"{folder}/run.safetensors", max_drop=2.0,
    )  # fmt: skip
    again = prune(
        net(), (x, y), remove=0.5, schedule=0.25, recover=Recover.scenario1(epochs=2, lr=0.05),
        evaluate=lambda m: float(rank), checkpoint=f"{folder}/run.safetensors", max_drop=2.0,
    )  # fmt: skip
    plain = prune(net(), (x, y), "taylor", remove=0.5, schedule=0.25)
    mended = prune(net(), (x, y), remove=0.5)  # repaired, from the same samples
    apart = prune(net(), mine, remove=0.5)  # or from each process's own
    small = _small()
    closer = Repair(copies=2).examine(small, net(), mine)
    fewer = Repair(samples=6, copies=2).examine(small, net(), mine)
    lonely = Repair(copies=2).examine(small, net(), [(x, y)] if rank == 1 else [])
    uneven = recover(net(), None, mine, Recover.scenario1(epochs=2)).model
    averaged = recover(net(), None, mine, Recover.scenario1(epochs=2), ema=0.9).model
    counts = [(x, (torch.arange(11) % (2 if rank else 4)).double())]  # process 1 sees 0 and 1 alone
    counted = recover(
        nn.Sequential(nn.Flatten(), nn.Linear(50, 1)).double(), None, counts, epochs=1, teacher=0.0, test=counts,
        loss=lambda output, known: F.poisson_nll_loss(output[:, 0], known),
    )  # fmt: skip
    torch.save(
        {
            "errors": {name: _raised(function) for name, function in failures(rank).items()},
            "after": [torch.from_numpy(v) for v in score(net(), (x, y), "taylor").units.values()],
            "closer": closer.model.state_dict(), "fewer": fewer.model.state_dict(), "lonely": lonely.model.state_dict(),
            "uneven": digest(uneven), "averaged": digest(averaged),
            "counted": [counted.history[0].accuracy, counted.history[0].held_out_accuracy],
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


def _small() -> nn.Module:
    graph = _graph()
    return apply(net(), plan(graph, score(net(), None, "weight", graph=graph), remove=0.4))


def failures(rank: int) -> dict[str, Callable[[], object]]:
    """What goes wrong in process 1, or at the end in process 0."""
    x, y = data()
    spoilt, other, stale = x.clone(), net(), net()
    spoilt[0, 0, 0, 0] = torch.nan
    with torch.no_grad():
        other.fc.weight[0, 0] += rank
    stale.bn.running_mean += rank
    loader = [(x[:4], y[:4]), (x[4:8], y[4:8] + 5 * rank)]

    def evaluate(model: nn.Module) -> float:
        if rank == 1:
            raise ZeroDivisionError("no such number")
        return 0.5

    def listen(event: object) -> None:
        if "7 units left" in str(event):
            raise OSError("the screen is broken")

    def tune(samples: object) -> Callable[[], object]:
        return lambda: prune(net(), (x, y), remove=0.5, schedule=0.25, recover=Recover.scenario1(samples, epochs=1))

    return {
        "score": lambda: score(net(), [(spoilt if rank else x, y)], "taylor"),
        "evaluate": lambda: prune(net(), (x, y), "weight", remove=0.5, schedule=0.25, evaluate=evaluate),
        "recover": tune(loader),
        "loader": tune([*loader[:1], None] if rank else loader[:1] * 2),
        "repair": lambda: Repair().examine(_small(), net(), [(spoilt if rank else x, y)]),
        "end": lambda: prune(net(), (x, y), "weight", remove=0.7, progress=listen, repair=None),
        "weights": lambda: prune(other, (x, y), remove=0.5),
        "buffers": lambda: score(stale, (x, y), "taylor"),
    }


def _raised(function: Callable[[], object]) -> str:
    try:
        function()
    except (SecateurError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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


def test_an_error_in_one_process_is_raised_in_all(found: list[dict]) -> None:
    first, second = (side["errors"] for side in found)
    for name, error in {
        "score": "DataError: an input of shape (11, 2, 5, 5) has NaN",
        "evaluate": "EvaluationError: evaluate raised ZeroDivisionError at step 0: no such number",
        "recover": "DataError: labels run from",
        "loader": "ForwardError: Net does not run on a batch",
        "repair": "DataError: an input of shape (11, 2, 5, 5) has NaN",
    }.items():
        assert second[name].startswith(error), name
        assert first[name].startswith(f"ProcessError: process 1 failed: {error}"), name
    assert first["end"] == "OSError: the screen is broken"
    assert second["end"] == "ProcessError: process 0 failed: OSError: the screen is broken"
    alone = score(net(), data(), "taylor")  # the processes are still in step
    for side in found:
        for a, expected in zip(side["after"], alone.units.values(), strict=True):
            np.testing.assert_allclose(a.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_other_weights_in_one_process_are_refused_by_name(found: list[dict]) -> None:
    for side in found:
        assert "`fc.weight` of Net differs between process 0 and process 1" in side["errors"]["weights"]
        assert "`bn.running_mean` of Net differs" in side["errors"]["buffers"]
        assert "broadcast" in side["errors"]["buffers"]


def test_a_repair_uses_the_samples_of_all_processes(found: list[dict]) -> None:
    x, y = data()
    picked = torch.tensor([0, 1, 2, 8, 9, 10])  # the first three of each process
    for key, samples in {"closer": (x, y), "fewer": (x[picked], y[picked]), "lonely": (x, y)}.items():
        alone = Repair(copies=2).examine(_small(), net(), [samples]).model.state_dict()
        for name, expected in alone.items():
            assert torch.equal(found[0][key][name], found[1][key][name])
            torch.testing.assert_close(found[0][key][name], expected, rtol=1e-9, atol=1e-9)
    assert any(not torch.equal(found[0]["closer"][name], value) for name, value in found[0]["fewer"].items())


def test_no_process_tells_an_accuracy_of_counts(found: list[dict]) -> None:
    assert [each["counted"] for each in found] == [[None, None], [None, None]]


def test_fine_tuning_with_unequal_numbers_of_batches_ends(found: list[dict]) -> None:
    assert found[0]["uneven"] == found[1]["uneven"] != digest(net())
    assert found[0]["averaged"] == found[1]["averaged"] != digest(net())
