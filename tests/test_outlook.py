"""What a run says of itself: how far it is, how long it takes, how sure its accuracies are, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc
from command import Place, furnished, invoke
from secateur.cli.outlook import doubt, known_within
from secateur.repair import Repair
from secateur.repair.layers import RepairableLayer
from secateur.repair.rows import Positions
from secateur.running import progress
from secateur.running.accuracy import accuracy, interval
from secateur.running.batches import total_of
from secateur.running.progress import Evaluating, Event, Pace, Rate, Recording, Scoring, telling


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return furnished(tmp_path_factory.mktemp("outlook"))


def test_work_on_samples_says_how_far_it_is() -> None:
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.rand(40, 4), torch.arange(40) % 3)
    told: list[Event] = []
    sc.prune(net, data, remove=0.3, progress=told.append, repair=Repair(copies=0), evaluate=lambda m: accuracy(m, data))
    for kind in (Scoring, Evaluating, Recording):
        ends = [(event.done, event.total) for event in told if isinstance(event, kind)]
        assert (0, None) in ends, "what begins is said at once"
        assert ends[-1] == (40, 40)
    assert [event.done for event in told if isinstance(event, Evaluating)] == [0, 32, 40, 0, 32, 40]


def test_the_rest_is_estimated_from_what_was_done_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten samples took 1, then 3, then 6 seconds: a machine that becomes busy is believed."""
    now, told = [0.0], list[Event]()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with telling(told.append):
        pace = Pace(Scoring("lrp"), 50)
        for now[0] in (1.0, 4.0, 10.0):
            pace(10)
    pace(10)  # nobody listens
    assert [str(event) for event in told] == [
        "scoring units by lrp, 10/50", "scoring units by lrp, 20/50, about 9 s left",
        "scoring units by lrp, 30/50, about 12 s left",
    ]  # fmt: skip


@pytest.mark.parametrize("slower", [1, 4])
def test_a_forecast_follows_the_machine(slower: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for each sample of 120, and `slower` after the first 20."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    rate, found = Rate(), []
    for done in range(1, 121):
        now[0] += 1 if done <= 20 else slower
        found.append(rate.left(done, 120))
    assert found[:2] == [None, None]  # too early to tell
    assert found[19] == pytest.approx(100)
    assert found[44:] == pytest.approx([slower * (120 - done) for done in range(45, 121)])
    assert len(rate._marks) < 120  # what is old is forgotten
    assert Rate().left(1, 9) is None  # no time has passed


def test_the_work_of_a_layer_is_what_it_takes() -> None:
    """Shares of the seconds that the repair of a ResNet-18 took, from 180 images of 224 x 224 on one thread."""
    measured = {  # shape, positions, rows per sample: seconds
        ((32, 64, 3, 3), 3136, 34): 0.41, ((64, 32, 3, 3), 3136, 34): 0.26, ((73, 96, 3, 3), 784, 64): 0.54,
        ((212, 133, 3, 3), 196, 111): 1.39, ((140, 212, 3, 3), 196, 111): 3.72, ((398, 293, 3, 3), 49, 46): 3.7,
        ((303, 398, 3, 3), 49, 46): 7.88, ((398, 303, 3, 3), 49, 46): 5.67,
    }  # fmt: skip
    found = []
    for shape, positions, rows in measured:
        chosen = Positions(torch.zeros(180, rows, dtype=torch.long))
        layer = RepairableLayer(0, "weight", None, positions=positions, sampled=chosen)
        found.append(layer.work({"weight": torch.empty(shape, device="meta")}, 180, True))
    for work, seconds in zip(found, measured.values(), strict=True):
        assert 0.5 < (work / sum(found)) / (seconds / sum(measured.values())) < 2


def test_how_many_samples_there_are() -> None:
    x, y = torch.rand(7, 2), torch.zeros(7)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    for data in ((x, y), [(x, y)], [(x[:3], y[:3]), (x[3:], y[3:])], loader, (x.numpy(), None), [{"input_ids": x}]):
        assert total_of(data) == 7
    for unknown in (iter([(x, y)]), None, [(1, 2)], x):
        assert total_of(unknown) is None


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (9, 10), (20, 20), (780, 800), (1, 1)])
def test_intervals_hold_all_shares_that_the_samples_do_not_rule_out(hits: int, count: int) -> None:
    """A share p is ruled out if what was seen lies 1.96 standard deviations of p or more from it."""
    every = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    possible = every[(hits / count - every).abs() <= 1.959964 * (every * (1 - every) / count).sqrt() + 1e-12]
    low, high = interval(hits / count, count)
    assert (low, high) == pytest.approx((float(possible.min()), float(possible.max())), abs=1e-5)


def test_few_test_samples_are_named() -> None:
    assert doubt({"overall": 0.975}, {"overall": 800}) == ""
    assert doubt({"overall": 0.975}, {}) == ""
    assert doubt({"overall": 0.9}, {"overall": 20}).startswith("20 test samples are few: accuracy is known to within")


def test_how_sure_a_table_is() -> None:
    """By Wilson's formula: at 50 % of n samples, z / (2 √(n + z²)) on either side; at 95 % of 20, from 76.4 to 99.1."""
    told = known_within(20)
    assert told.startswith("On 20 test images, ")
    assert "about 19 points from an accuracy of 95 %, and 20 from" in told
    assert round(100 * 1.96 / (2 * (20 + 1.96**2) ** 0.5)) == 20


def test_a_run_says_what_it_takes_and_what_comes_next(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "s"
    result = invoke("prune", *place.job, "--remove", 0.3, "--out", out, "--onnx", "--memory", "300MiB")
    assert result.exit_code == 0, result.stderr
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("this takes about ")]
    seconds, gibibytes = said.split()[3], said.split()[-4]
    assert 0 < float(seconds) < 60
    assert 0.3 < float(gibibytes) < 4
    assert "15 test samples are few" in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("│ accuracy")]
    assert " % (" in row
    load, serve, train = result.stdout.replace("\n ", " ").splitlines()[-3:]
    small = eval(load.partition(": ")[2], {"secateur": sc})
    assert isinstance(small, nn.Module)
    assert serve == f"serve it: onnxruntime.InferenceSession({str(out / 'model.onnx')!r})"
    command = shlex.split(train.partition(": ")[2])
    trained = invoke(*command[1:], "--epochs", 1, "--input-size", 16)
    assert trained.exit_code == 0, trained.stderr
    assert (tmp_path / "s-recovered" / "model").is_dir()
    images = len(list(Path(place.train).rglob("*.*")))
    (said,) = [line for line in trained.stderr.splitlines() if line.startswith("an epoch of ")]
    assert said.startswith(f"an epoch of {images} samples takes about 1 s, 1 of them 1 s; ")
    row = next(line for line in trained.stdout.splitlines() if line.startswith("overall: "))
    assert row.count(" % (") == 2
    assert "15 test samples are few" in trained.stdout
    load, serve = trained.stdout.replace("\n ", " ").splitlines()[-2:]
    better = eval(load.partition(": ")[2], {"secateur": sc})
    assert [p.shape for p in better.parameters()] == [p.shape for p in small.parameters()]
    served = invoke(*shlex.split(serve.partition(": ")[2])[1:])
    assert served.exit_code == 0, served.stderr
    assert (tmp_path / "s-recovered" / "model.onnx").is_file()
