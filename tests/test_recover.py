"""Training with the original as teacher: losses against formulas, resumed runs against whole ones, errors by name."""

from __future__ import annotations

import copy
import functools
import math
import os
import random
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc
from secateur.errors import DataError, FileFormatError, SecateurError, SecateurWarning, TrainingError
from secateur.loop import Schedule
from secateur.plans import Limits
from secateur.recover import Recover, distillation_loss, write_text
from secateur.recover import schedule as schedules
from secateur.recover import trainer as training
from secateur.recover.blocks import Blocks
from secateur.recover.checkpoint import Checkpoint as TrainingFile
from secateur.recover.recording import Recording
from secateur.recover.samples import Samples, altered, shifted
from secateur.recover.schedule import CURVES, Budget
from secateur.report import Page
from secateur.running.identity import digest


class Net(nn.Module):
    def __init__(self, width: int = 12, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.hidden, self.drop, self.fc = nn.Linear(width, width), nn.Dropout(dropout), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(F.relu(self.hidden(F.relu(self.bn(self.conv(x))).mean((2, 3))))))


def net(seed: int = 0, **options: float) -> Net:
    torch.manual_seed(seed)
    return Net(**options).eval()


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 4


@pytest.fixture(scope="module")
def result() -> sc.Result:
    return sc.prune(net(), data(), remove=0.5, progress=False)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


# -- the loss ----------------------------------------------------------------------------------------------------------
def test_the_loss_is_the_formula() -> None:
    g = torch.Generator().manual_seed(0)
    s, t = torch.randn(5, 7, generator=g).double(), torch.randn(5, 7, generator=g).double()
    y, temperature = torch.tensor([0, 3, 6, 2, 2]), 3.0
    p, q = softmax(t.numpy() / temperature), softmax(s.numpy() / temperature)
    divergence = (p * (np.log(p) - np.log(q))).sum(1).mean() * temperature**2
    entropy = -np.log(softmax(s.numpy())[np.arange(5), y.numpy()]).mean()
    for share, targets, expected in (
        (0.7, y, 0.7 * divergence + 0.3 * entropy), (0.0, y, entropy), (0.7, None, divergence), (1.0, y, divergence),
    ):  # fmt: skip
        found = distillation_loss(s, t, targets, teacher=share, temperature=temperature)
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_one_output_is_that_of_two_classes() -> None:
    s, t = torch.tensor([[0.3], [-2.0]]), torch.tensor([[1.5], [0.2]])
    two = [torch.cat([torch.zeros(2, 1), z], 1) for z in (s, t)]
    assert torch.allclose(distillation_loss(s, t), distillation_loss(*two))


def test_padding_does_not_count() -> None:
    g = torch.Generator().manual_seed(0)
    s, t = torch.randn(2, 5, 3, generator=g), torch.randn(2, 5, 3, generator=g)
    counts = torch.tensor([[True, True, False], [True, False, False]])
    each = [
        np.mean([float(distillation_loss(s[i, None, :, j], t[i, None, :, j])) for j in range(3) if counts[i, j]])
        for i in range(2)
    ]
    assert float(distillation_loss(s, t, counts=counts)) == pytest.approx(np.mean(each), rel=1e-5)


def test_other_outputs_are_refused() -> None:
    with pytest.raises(DataError, match=r"answers \(2, 3\), the teacher \(2, 4\)"):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(SecateurError, match=r"teacher=1\.5 is no share"):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3), teacher=1.5)


# -- schedules and budgets ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["cosine", "onecycle"])
def test_rates_are_torchs(kind: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    steps = 1000
    made = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, steps + 1, cycle_momentum=False),
    }[kind]()
    theirs = []
    for _ in range(steps + 1):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step() if len(theirs) <= steps else None
    mine = [0.5 * CURVES[kind](i / steps) for i in range(steps + 1)]
    # torch's rise ends a step earlier
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-9 if kind == "cosine" else 3e-3)
    assert CURVES["constant"](0.3) == 1


def test_minutes_end_a_run(result: sc.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0  # every look at the clock takes a second
        return clock[0]

    monkeypatch.setattr(schedules, "time", SimpleNamespace(perf_counter=tick))
    done = sc.recover(result, None, data(), minutes=0.5, batch_size=10, progress=False)
    assert done.stopped == "the minutes are over"
    assert 5 <= len(done.history) <= 8  # four steps an epoch, about thirty in all
    assert done.history[-1].lr < done.history[0].lr
    both = sc.recover(result, None, data(), minutes=100.0, epochs=1, progress=False)
    assert both.stopped == "all epochs are done"
    assert Budget(None, 1.0, used=120.0).done(0) == 1.0


# -- steps against the update written out ------------------------------------------------------------------------------
def test_a_step_is_that_of_sgd_on_the_divergence() -> None:
    """A linear student and teacher, one full batch: dKL/dz = T · (q − p) / n for the loss with its T²."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=g)
    torch.manual_seed(0)
    student, teacher = nn.Linear(3, 4), nn.Linear(3, 4)
    w = student.weight.detach().clone()
    p, q = ((x @ m.weight.T + m.bias).detach() for m in (teacher, student))
    slope = 2.0 * ((q / 2).softmax(1) - (p / 2).softmax(1)) / 6
    settings = Recover(epochs=1, lr=0.5, temperature=2.0, batch_size=6, weight_decay=0.1, schedule="constant")
    done = sc.recover(student, teacher, (x, None), settings, progress=False)
    torch.testing.assert_close(done.model.weight.detach(), w - 0.5 * (slope.T @ x + 0.1 * w))
    assert torch.equal(student.weight, w)


def test_averaged_weights_and_clipping() -> None:
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    w, b = model.weight.detach().clone(), model.bias.detach().clone()
    settings = Recover.scenario1(epochs=3, lr=0.5, momentum=0.0, batch_size=8, clip=0.05, ema=0.5)
    done = sc.recover(model, None, (x, y), settings, progress=False)
    mean = w.clone()
    for step in range(1, 4):
        error = ((x @ w.T + b).softmax(1) - F.one_hot(y)) / 8
        gw, gb = error.T @ x, error.sum(0)
        norm = math.sqrt(float(gw.square().sum() + gb.square().sum()))
        scale = min(1.0, 0.05 / (norm + 1e-6))
        w, b = w - 0.5 * scale * gw, b - 0.5 * scale * gb
        decay = min(0.5, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * w
    torch.testing.assert_close(done.model.weight.detach(), mean)


def test_without_labels_a_student_becomes_its_teacher(result: sc.Result) -> None:
    student, teacher, (x, _) = plain(), copy.deepcopy(plain()), points()
    with torch.no_grad():
        teacher[0].weight += torch.randn(10, 4, generator=torch.Generator().manual_seed(2)).double()

    def distance(model: nn.Module) -> float:
        return float(distillation_loss(model(x), teacher(x), temperature=1.0).detach())

    done = sc.recover(student, teacher, (x, None), epochs=60, lr=0.05, progress=False)
    assert distance(done.model) < 0.2 * distance(student)
    assert done.history[-1].accuracy is None
    of_result = sc.recover(result, None, data(), 1, progress=False)
    assert of_result.result.model is of_result.model
    assert of_result.result.plan == result.plan


# -- augmentation ------------------------------------------------------------------------------------------------------
def test_shifted_images() -> None:
    """Each is one of the shifts, mirrored or not, that are written out here; and not all are alike."""
    images = torch.rand(24, 2, 5, 5, generator=torch.Generator().manual_seed(0)) + 1
    torch.manual_seed(0)
    made = shifted(images, 1)
    padded = F.pad(images, [1] * 4)
    kinds = set()
    for i in range(24):
        for top in range(3):
            for left in range(3):
                for flip in (False, True):
                    candidate = padded[i, :, top : top + 5, left : left + 5]
                    if torch.equal(made[i], candidate.flip(-1) if flip else candidate):
                        kinds.add((i, top, left, flip))
    assert {kind[0] for kind in kinds} == set(range(24))
    assert len({kind[1:] for kind in kinds}) > 8


def test_transforms_of_torchvision(result: sc.Result) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    x, y = data(16)
    torch.manual_seed(0)
    flipped, _ = altered(v2.RandomHorizontalFlip(0.5), x, y)
    ways = [bool(torch.equal(a, b)) for a, b in zip(flipped, x, strict=True)]
    assert 0 < sum(ways) < 16  # each image on its own
    mixed, targets = altered(v2.MixUp(num_classes=4), x, y)
    assert mixed.shape == x.shape
    assert targets.shape == (16, 4)
    transform = v2.Compose([v2.RandomCrop(6, padding=1), v2.RandomHorizontalFlip()])
    for augment in (transform, v2.CutMix(num_classes=4), "crop-flip", lambda images: images + 0.1):
        assert sc.recover(result, None, (x, y), epochs=1, augment=augment, progress=False).history
    with pytest.raises(DataError, match="augment made"):
        sc.recover(result, None, (x, y), epochs=1, augment=lambda images: images[:3], progress=False)


def test_usual_transforms_are_computed_at_once_and_each_image_draws_for_itself() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    calls = []

    class Counted(v2.Normalize):
        def forward(self, *inputs: Tensor) -> Tensor:
            calls.append(inputs[0].shape)
            return super().forward(*inputs)

    Counted.__module__, Counted.__name__ = v2.Normalize.__module__, "Normalize"
    images, targets = torch.rand(64, 3, 6, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(64)
    plain = v2.Compose([Counted([0.1] * 3, [0.2] * 3), v2.Resize(12), v2.CenterCrop(10), v2.ToDtype(torch.float64)])
    made, _ = altered(plain, images, targets)
    assert calls == [images.shape]
    torch.testing.assert_close(made, torch.stack([plain(image) for image in images]))
    for transform, dimension in ((v2.RandomHorizontalFlip(0.3), -1), (v2.RandomVerticalFlip(0.3), -2)):
        made, _ = altered(transform, images, targets)
        turned = (made == images.flip(dimension)).flatten(1).all(1)
        assert torch.equal(made[~turned], images[~turned])
        assert 5 < turned.sum() < 35
    made, _ = altered(v2.RandomCrop((5, 7), padding=2, fill=9.0), images, targets)
    padded = F.pad(images, [2] * 4, value=9.0)
    windows = padded.unfold(2, 5, 1).unfold(3, 7, 1)  # (N, C, tops, lefts, 5, 7)
    found = (windows == made[:, :, None, None]).all(-1).all(-1).all(1).nonzero()
    assert set(found[:, 0].tolist()) == set(range(64))
    assert set(found[:, 1].tolist()) == set(found[:, 2].tolist()) == set(range(6))
    brighter, _ = altered(v2.Compose([v2.ColorJitter(0.5), lambda image: image[:, :4]]), images, targets)
    assert brighter.shape == (64, 3, 4, 8)
    assert len((brighter / images[:, :, :4]).flatten(1).mean(1).unique()) > 32


# -- held-out samples --------------------------------------------------------------------------------------------------
def test_early_stop_returns_the_best_epoch(result: sc.Result) -> None:
    x, y = data(40)
    events = []
    wrong = (x, y.roll(1))  # the more it learns, the worse
    done = sc.recover(
        result, None, (x, y), epochs=40, lr=0.1, teacher=0.0, test=wrong, patience=2, progress=events.append
    )
    losses = [row.held_out for row in done.history]
    best = int(np.argmin(losses))
    assert len(done.history) == best + 3 < 40
    assert done.stopped.endswith(f"this is epoch {best + 1}")
    model = copy.deepcopy(done.model).eval()
    assert float(F.cross_entropy(model(x), wrong[1])) == pytest.approx(losses[best], rel=1e-5)
    assert [str(event) for event in events] == [str(row) for row in done.history]
    assert "held out: loss" in str(events[0])
    part = sc.recover(result, None, (x, y), epochs=2, held_out=0.25, progress=False)
    assert part.history[-1].held_out_accuracy is not None
    samples = Samples.of((x, y), Recover(held_out=0.25, batch_size=8), None, None)
    assert len(samples.data[0]) == 30
    together = torch.cat([samples.data[0], samples.held[0]]).flatten(1)
    assert torch.equal(together.sort(0).values, x.flatten(1).sort(0).values)


# -- resumed runs ------------------------------------------------------------------------------------------------------
class Killed(BaseException):
    """Stands for a kill: nothing in the library may catch it."""


def loader() -> DataLoader:
    return DataLoader(TensorDataset(*data()), 8, shuffle=True, generator=torch.Generator().manual_seed(3))


CASES = {
    "pair": (data, {"ema": 0.9, "augment": "crop-flip"}),
    "loader": (loader, {"optimizer": "adamw", "patience": 5, "held_out": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("after", [1, 3])
def test_resume_ends_the_same(
    tmp_path: Path, result: sc.Result, case: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_WRITING", math.inf)  # after each epoch
    path, (samples, options) = tmp_path / "run.safetensors", CASES[case]

    def run(checkpoint: Path | None = None, progress: object = False):
        return sc.recover(
            result, None, samples(), epochs=5, lr=0.05, batch_size=8, test=data(8), checkpoint=checkpoint,
            progress=progress, **options,
        )  # fmt: skip

    whole, seen = run(), []

    def kill(event: object) -> None:
        seen.append(event)
        if len(seen) == after + 1:
            raise Killed

    with pytest.raises(Killed):
        run(path, kill)
    events: list[object] = []
    resumed = run(path, events.append)
    assert len(events) == 5 - after
    assert digest(resumed.model) == digest(whole.model)
    assert resumed.history == whole.history
    assert digest(run(path, lambda event: pytest.fail("nothing is left to do")).model) == digest(whole.model)
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_files_of_other_runs_and_damaged_ones_are_refused(tmp_path: Path, result: sc.Result) -> None:
    path, (x, y) = tmp_path / "run.safetensors", data()

    def run(samples: object = (x, y), small: object = result, **options: object) -> None:
        sc.recover(small, net(), samples, **{"epochs": 1, "checkpoint": path, "progress": False, **options})

    run()
    for what, wrong in {
        "settings was": lambda: run(lr=0.5),
        "other data": lambda: run((x + 1, y)),
        "other test": lambda: run(test=(x, y)),
        "other weights": lambda: run(small=sc.recover(result, None, (x, y), epochs=1, progress=False).model),
    }.items():
        with pytest.raises(FileFormatError, match=what):
            wrong()
    content = path.read_bytes()
    for broken in (b"", content[:100], content.replace(b"secateur-recover-2", b"secateur-recover-9")):
        path.write_bytes(broken)
        with pytest.raises(FileFormatError):
            run()


# -- what can go wrong -------------------------------------------------------------------------------------------------
def test_refusals(result: sc.Result) -> None:
    x, y = data()
    small = result.model
    for what, match in {
        lambda: sc.recover(small, net(), None, progress=False): "no data to train on",
        lambda: sc.recover(small, net(), (x[:0], y[:0]), progress=False): "data are empty",
        lambda: sc.recover(small, net(), iter([(x, y)]), progress=False): "repeats the data",
        lambda: sc.recover(small, net(), [], progress=False): "no batch to train on",
        lambda: sc.recover(small, net(), (x, y + 2), progress=False): "labels run from 2 to 5, but the model has 4",
        lambda: sc.recover(small, net(), [(x, y + 2)], progress=False): "labels run from 2 to 5, but the model has 4",
        lambda: sc.recover(small, None, (x, y), progress=False): "no original to learn from",
        lambda: sc.recover(small, net(), (x, None), teacher=0.0, progress=False): "no labels, and no teacher",
        lambda: sc.recover(small, net(), (x, y), patience=2, progress=False): "patience needs samples",
        lambda: sc.recover(
            small, sc.specialize(net(), [0, 1], x[:1]), (x, y), progress=False
        ): "they have other outputs",
        lambda: sc.recover(copy.deepcopy(small).requires_grad_(False), net(), (x, y), progress=False): "frozen",
        lambda: sc.recover(result, None, (x, y), "fast", progress=False): "recover is a str",
        lambda: sc.recover(result, None, (x, y), held_out=0.001, progress=False): "held_out=0.001 of 40 samples are 0",
    }.items():
        with pytest.raises(SecateurError, match=match):
            what()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epochs": 0}, "epochs=0"), ({"lr": "fast"}, "lr='fast'"), ({"schedule": "linear"}, "schedule='linear'"),
        ({"optimizer": "lion"}, "optimizer='lion'"), ({"ema": 1.0}, "ema=1"), ({"held_out": 1.5}, "held_out=1.5"),
        ({"augment": "blur"}, "augment='blur'"), ({"minutes": 0.0}, "minutes=0"), ({"mixed": 1}, "mixed=1"),
        ({"temperature": 0.0}, "temperature=0"), ({"patience": 0}, "patience=0"), ({"loss": 3}, "loss is a int"),
    ],
)  # fmt: skip
def test_settings_are_checked(options: dict, match: str) -> None:
    with pytest.raises(SecateurError, match=match):
        Recover(**options)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(result: sc.Result) -> None:
    x, y = data()
    calls = [0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(output, targets) * (math.nan if calls[0] == 8 else 1.0)

    settings = Recover(epochs=5, lr=0.05, batch_size=10, teacher=0.0, loss=loss, schedule="constant")
    with pytest.raises(TrainingError, match=r"NaN in epoch 2.*as it was after epoch 1.*lr=0\.05") as caught:
        sc.recover(result, None, (x, y), settings, progress=False)
    kept = caught.value.result
    assert len(kept.history) == 1
    calls[0] = 100
    once = sc.recover(result, None, (x, y), settings, epochs=1, progress=False)
    assert digest(kept.model) == digest(once.model)


def test_prune_keeps_what_training_left() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) * math.nan

    with pytest.raises(TrainingError, match="as it was before training") as caught:
        sc.prune(net(), data(), remove=0.5, recover=Recover(epochs=1, teacher=0.0, loss=loss), progress=False)
    assert caught.value.result.plan is not None
    assert all(bool(torch.isfinite(p).all()) for p in caught.value.result.model.parameters())


def test_a_batch_that_is_too_large_names_one_that_fits() -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 12:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().forward(x)

    torch.manual_seed(0)
    with pytest.raises(TrainingError, match=r"a batch of 40 does not fit .*; 10 samples fit\. Fix: batch_size=10"):
        sc.recover(Large(), None, data(), teacher=0.0, batch_size=40, progress=False)
    # Where the user makes the batches, batch_size changes nothing.
    x, y = data()
    whole = [(x[:40], y[:40])]
    with pytest.raises(TrainingError, match=r"; 10 samples fit\. Fix: batches of 10 samples\.") as caught:
        sc.recover(Large(), None, whole, teacher=0.0, progress=False)
    assert caught.value.fits == 10
    loader = DataLoader(TensorDataset(x, y), batch_size=40)
    with pytest.raises(TrainingError, match=r"; 10 samples fit\. Fix: a DataLoader with batch_size=10"):
        sc.recover(Large(), None, loader, teacher=0.0, progress=False)


@pytest.mark.parametrize("kind", ["pair", "list"])
def test_held_out_samples_that_do_not_fit(kind: str) -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and len(x) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().forward(x)

    torch.manual_seed(0)
    net, (x, y) = Large(), data()
    test = (x[:16], y[:16]) if kind == "pair" else [(x[:16], y[:16])]
    fix = "batch_size=4" if kind == "pair" else "batches of 4 samples"
    what = rf"a batch of 16 held-out samples does not fit .*; 4 samples fit\. Fix: {fix}"
    with pytest.raises(TrainingError, match=what) as caught:
        sc.recover(net, None, (x, y), teacher=0.0, epochs=2, batch_size=16, test=test, progress=False)
    for own, kept in zip(caught.value.result.model.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(own, kept)  # no epoch was complete


# -- blocks ------------------------------------------------------------------------------------------------------------
def test_blocks_are_matched_by_relevance() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    small = sc.prune(whole, (x, y), "weight", remove=0.5, repair=None, schedule=0.5, progress=False)
    blocks = Blocks.of(small.model, whole, (small.model, whole), x)
    assert set(blocks.kept) == {"0", "2"}
    with blocks:
        small.model(x), whole(x)
        found = float(blocks.loss())
    gone = {0: small.plan.cuts["0.weight"][0], 2: small.plan.cuts["2.weight"][0]}
    z0 = whole[0](x)
    z2 = whole[2](z0.relu())
    slope = whole[4].weight[whole[4](z2.relu()).argmax(1)] * (z2 > 0)
    relevance = {0: (z0 * ((slope @ whole[2].weight) * (z0 > 0))).abs().sum(0), 2: (z2 * slope).abs().sum(0)}
    parts, mine, theirs = [], x, {0: z0, 2: z2}
    for i in (0, 2):
        mine = small.model[i](mine)
        kept = [j for j in range(theirs[i].shape[1]) if j not in set(map(int, gone[i]))]
        w, t = (relevance[i] / relevance[i].mean())[kept], theirs[i][:, kept]
        parts.append(float((w * (mine - t).square()).sum() / (w * t.square()).sum()))
        mine = mine.relu()
    assert found == pytest.approx(np.mean(parts), rel=1e-4)
    far = [sc.recover(small, None, (x, None), epochs=20, lr=0.02, blocks=b, progress=False).model for b in (0.0, 5.0)]
    distances = []
    for model in far:
        with Blocks.of(model, whole, (model, whole), x) as seen:
            model(x), whole(x)
            distances.append(float(seen.loss()))
    assert distances[1] < distances[0]


# -- prune -------------------------------------------------------------------------------------------------------------
def test_prune_repairs_then_trains() -> None:
    samples = data()
    plain = sc.prune(net(), samples, remove=0.5, progress=False)
    told: list[str] = []
    trained = sc.prune(
        net(), samples, remove=0.5, recover=Recover(epochs=2, lr=0.01), progress=lambda e: told.append(str(e))
    )
    assert trained.plan == plain.plan
    assert digest(trained.model) != digest(plain.model)
    assert any(line.startswith("recovering: epoch 2/2") for line in told)
    assert "Recover(epochs=2" in trained.settings["recover"]
    many = sc.prune(net(), samples, remove=0.4, schedule=0.2, recover=2, progress=False)
    assert [row.step for row in many.history] == [0, 1, 2]
    assert many.settings.get("repair") is None


def test_a_killed_prune_goes_on_within_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_WRITING", math.inf)
    path = tmp_path / "run.safetensors"

    def run(checkpoint: Path | None = None, progress: object = False, **options: object) -> sc.Result:
        schedule = Schedule(step=0.2)
        return sc.prune(net(), data(), remove=0.4, schedule=schedule, recover=Recover(epochs=3, lr=0.05),
                        checkpoint=checkpoint, progress=progress, **options)  # fmt: skip

    whole, seen = run(), []

    def kill(event: object) -> None:
        seen.append(str(event))
        if sum("recovering" in text for text in seen) == 5:
            raise Killed

    with pytest.raises(Killed):
        run(path, kill)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run-training.safetensors", "run.safetensors"]
    again: list[str] = []
    resumed = run(path, lambda event: again.append(str(event)))
    assert sum("recovering" in text for text in again) == 2  # epochs 2 and 3 of the second step
    assert digest(resumed.model) == digest(whole.model)
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]
    with pytest.raises(FileFormatError, match="other recover"):
        sc.prune(net(), data(), remove=0.4, schedule=0.2, recover=4, checkpoint=path, progress=False)


def test_the_training_file_of_another_run_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left over where the checkpoint of a killed run was removed, so that a run with other settings can begin."""
    monkeypatch.setattr(training, "_WRITING", math.inf)
    path = tmp_path / "run.safetensors"

    def kill(event: object) -> None:
        if "epoch 2/3" in str(event):
            raise Killed

    def run(lr: float, checkpoint: Path | None, progress: object = False) -> sc.Result:
        asked = Recover(epochs=3, lr=lr)
        return sc.prune(net(), data(), remove=0.4, recover=asked, checkpoint=checkpoint, progress=progress)

    with pytest.raises(Killed):
        run(0.05, path, kill)
    path.unlink()
    assert digest(run(0.001, path).model) == digest(run(0.001, None).model)


def test_a_prune_that_is_killed_after_its_last_save_leaves_no_training_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> sc.Result:
        return sc.prune(net(), data(), remove=0.2, recover=Recover(epochs=2), checkpoint=path, progress=False)

    def kill(self: TrainingFile) -> None:
        if self.path.exists():
            raise Killed

    path = tmp_path / "run.safetensors"
    monkeypatch.setattr(training, "_WRITING", math.inf)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingFile, "remove", kill)
        with pytest.raises(Killed):
            run()
    assert (tmp_path / "run-training.safetensors").exists()
    run()
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


# -- language models ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def language() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_a_language_model_learns_from_text_that_its_teacher_writes(language: nn.Module) -> None:
    text = write_text(language, 10, 16, seed=3)
    assert text["input_ids"].shape == (10, 16)
    assert bool((text["input_ids"][:, 0] == 1).all())
    assert torch.equal(text["input_ids"], write_text(language, 10, 16, seed=3)["input_ids"])
    assert write_text(language, 5, 8, batch_size=2)["input_ids"].shape == (5, 8)
    with pytest.raises(DataError, match="Linear writes no text"):
        write_text(nn.Linear(2, 2))
    short = copy.deepcopy(language)
    short.config.max_position_embeddings = 12
    assert write_text(short, 3)["input_ids"].shape == (3, 12)
    with pytest.raises(DataError, match="tokens=13: this model takes at most 12"):
        write_text(short, 3, 13)
    short.config.bos_token_id = 40  # beyond its words, as the usual settings are for a small model
    assert int(write_text(short, 3)["input_ids"].max()) < 40
    small = sc.prune(language, [(text, None)], "weight", remove=0.3, progress=False, repair=None)
    done = sc.recover(small, language, None, epochs=1, batch_size=64, progress=False)
    assert done.history[0].accuracy is not None  # of the next token
    # One step on one batch: next-token loss and divergence, by hand.
    settings = Recover(epochs=1, lr=0.1, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=0.0, teacher=0.25,
                       schedule="constant", batch_size=10)  # fmt: skip
    done = sc.recover(small, language, text, settings, progress=False)
    twin, ids = copy.deepcopy(small.model), text["input_ids"]
    student, teacher = twin(input_ids=ids).logits, language(input_ids=ids).logits.detach()
    entropy = F.cross_entropy(student[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    p = teacher.softmax(-1)
    divergence = (p * (p.log() - student.log_softmax(-1))).sum(-1).mean()
    (0.75 * entropy + 0.25 * divergence).backward()
    for (name, mine), theirs in zip(done.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), (theirs - 0.1 * theirs.grad).detach(), msg=name)


def test_adapters_are_trained_and_merged(language: nn.Module) -> None:
    pytest.importorskip("peft")
    text = write_text(language, 8, 12)
    small = sc.prune(language, [(text, None)], "weight", remove=0.3, progress=False, repair=None)
    done = sc.recover(small, language, text, epochs=2, lr=0.01, lora=2, progress=False)
    assert [n for n, _ in done.model.named_parameters()] == [n for n, _ in small.model.named_parameters()]
    changed = {
        name for (name, a), b in zip(done.model.named_parameters(), small.model.parameters(), strict=True)
        if not torch.equal(a, b)
    }  # fmt: skip
    assert changed
    assert all("proj" in name for name in changed)  # no norm and no embedding
    for (name, a), b in zip(done.model.named_parameters(), small.model.parameters(), strict=True):
        assert torch.linalg.matrix_rank((a - b).detach().float(), atol=1e-5) <= 2 if name in changed else True
    assert all(p.requires_grad for p in done.model.parameters())
    sc.measure(done.model, {"input_ids": text["input_ids"][:1]}, latency=False)


def test_half_precision_weights_are_trained_in_full(result: sc.Result) -> None:
    x, y = data()
    small = copy.deepcopy(result.model).to(torch.bfloat16)
    done = sc.recover(small, None, (x, y), epochs=1, lr=1e-4, teacher=0.0, progress=False)
    assert {p.dtype for p in done.model.parameters()} == {torch.bfloat16}


# -- processes ---------------------------------------------------------------------------------------------------------
def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)).double()


def points() -> tuple[Tensor, Tensor]:
    return torch.rand(24, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(24) % 3


def distil(checkpoint: str | None = None, model: nn.Module | None = None, progress: object = False) -> nn.Module:
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    settings = Recover(epochs=3, lr=0.1, batch_size=8, ema=0.5, held_out=1 / 3)
    return sc.recover(model or plain(), teacher, points(), settings, checkpoint=checkpoint, progress=progress).model


class Aside(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.used, self.aside = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    training._WRITING = math.inf
    both = distil()
    seen: list[object] = []

    def kill(event: object) -> None:
        seen.append(event)
        if len(seen) == 2:
            raise RuntimeError("stopped")

    failed = ""
    try:
        distil(f"{folder}/run.safetensors", progress=kill)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    again = distil(f"{folder}/run.safetensors")
    aside = sc.recover(Aside(), None, points(), epochs=1, teacher=0.0, batch_size=2, progress=False)
    unlike = ""
    try:
        x, y = points()
        sc.recover(plain(), None, [(x[:8], y[:8] + 5 * rank)], teacher=0.0, progress=False)
    except Exception as error:
        unlike = f"{type(error).__name__}: {error}"
    torch.save(
        {
            "aside": digest(aside.model),
            "both": both.state_dict(),
            "again": digest(again),
            "same": digest(both),
            "failed": failed,
            "unlike": unlike,
        },
        f"{folder}/{rank}.pt",
    )
    dist.barrier()  # a process that leaves early may take the other's connections with it
    dist.destroy_process_group()
    os._exit(0)  # all is written, and torch's own threads seldom, but at times, abort a process that ends otherwise


@pytest.mark.skipif(not dist.is_available(), reason="this torch cannot run many processes")
def test_two_processes_train_as_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        mp.start_processes(work, (folder,), nprocs=2, start_method="spawn")
        first, second = (torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["same"] == second["same"] == first["again"] == second["again"]
    assert first["aside"] == second["aside"] != digest(Aside())
    assert first["failed"].startswith("RuntimeError: stopped")
    assert second["failed"].startswith("RuntimeError: stopped")
    assert second["unlike"].startswith("DataError: labels run from")
    assert first["unlike"].startswith("ProcessError: process 1 failed: DataError")
    for name, expected in distil().state_dict().items():  # halves of each batch: the same gradients, in another order
        torch.testing.assert_close(first["both"][name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"mixed": False}, {"compile": True}, {"channels_last": False}])
def test_on_a_gpu(options: dict, tmp_path: Path) -> None:
    """Recorded steps give what plain ones on the CPU give, and resume."""
    samples = data(100)
    result = sc.prune(net(dropout=0.0), data(), remove=0.5, progress=False)
    run = {"epochs": 4, "lr": 0.01, "batch_size": 16, "ema": 0.5, **options}
    on_cpu = sc.recover(result, None, samples, progress=False, **run).model
    small, original = copy.deepcopy(result.model).cuda(), copy.deepcopy(result.original).cuda()
    on_gpu = sc.recover(small, original, samples, progress=False, checkpoint=tmp_path / "run.safetensors", **run).model
    for mine, theirs in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0.1, atol=0.02)
    again = sc.recover(small, original, samples, progress=False, checkpoint=tmp_path / "run.safetensors", **run).model
    assert digest(on_gpu) == digest(again)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(20, 8), nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def test_blocks_of_a_transformer_are_matched_by_relevance() -> None:
    """Their channels come last. The relevance of the last block is known: every position has the head's weights / 5."""
    torch.manual_seed(0)
    whole, ids = Words().eval(), torch.randint(20, (12, 5))
    limits = Limits(only=["layers.1.up"])
    small = sc.prune(whole, (ids, None), "weight", remove=0.1, limits=limits, repair=None, progress=False).model
    blocks = Blocks.of(small, whole, (small, whole), ids)
    assert list(blocks.kept) == ["layers.0", "layers.1"]
    z = whole.layers[1](whole.layers[0](whole.words(ids)))
    slope = whole.head.weight[whole(ids).argmax(1)] / 5
    relevance = (z * slope[:, None]).abs().sum((0, 1))
    assert torch.allclose(blocks.weights["layers.1"], relevance / relevance.mean(), rtol=1e-4)
    with blocks, torch.no_grad():
        small(ids), whole(ids)
        w, mine = relevance / relevance.mean(), small.layers[1](whole.layers[0](whole.words(ids)))
        last = (w * (mine - z).square()).sum() / (w * z.square()).sum()
        assert float(blocks.loss()) == pytest.approx(float(last) / 2, rel=1e-4)  # the first block is the same


def test_blocks_take_a_frozen_original_and_a_student_in_training_mode(result: sc.Result) -> None:
    """A teacher is often frozen. Looking at the student must not move the statistics of its batch norm."""
    torch.manual_seed(0)
    parts = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    whole = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    x = torch.rand(12, 1, 8, 8)
    small = sc.prune(whole, (x, torch.arange(12) % 3), "weight", remove=0.3, repair=None, progress=False).model
    expected = Blocks.of(small, whole, (small, whole), x).weights
    whole.requires_grad_(False)
    mean = small.train()[1].running_mean.clone()
    found = Blocks.of(small, whole, (small, whole), x)
    assert all(torch.equal(found.weights[name], expected[name]) for name in expected)
    assert torch.equal(small[1].running_mean, mean)
    assert small.training
    assert not any(parameter.requires_grad for parameter in whole.parameters())
    with pytest.raises(SecateurError, match="has no block"):
        Blocks.of(result.model, result.original, (result.model, result.original), data()[0])


def test_data_that_can_be_read_only_once_are_refused(result: sc.Result) -> None:
    """The second epoch has no batch. (The run went on for ever.)"""

    class Once(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.rest = zip(*data(), strict=True)

        def __iter__(self):
            return self.rest

    with pytest.raises(DataError, match="no batch to train on a second time"):
        sc.recover(result, None, DataLoader(Once(), batch_size=8), epochs=3, progress=False)


def test_crop_flip_is_for_images_with_channels(result: sc.Result) -> None:
    with pytest.raises(DataError, match=r"augment alters images.*\(N, C, H, W\)"):
        altered("crop-flip", torch.rand(4, 8, 8), None)


def test_what_was_measured_before_the_training_is_not_said_of_the_trained_model(tmp_path: Path) -> None:
    found = sc.prune(net(), data(), remove=0.5, evaluate=lambda model: 0.123, progress=False)
    trained = sc.recover(found, data=data(), epochs=1, progress=False).result
    assert "0.123" in str(found._facts())
    assert "0.123" not in str(trained._facts())
    assert "Recover(epochs=1" in trained._facts()["recover"]
    assert found.reasons is not None
    assert ["drift of the heat maps" in str(item) for item in (found, trained)] == [True, False]
    pages = [item.report(tmp_path / "a.html", page=Page(latency=False)).read_text() for item in (found, trained)]
    assert ["12.3 %</" in page.partition("<table")[0] for page in pages] == [True, False]


#: What waiting for a device that is not there would mean, the last one now.
modes: list[Any] = [0]


def recording(compute: Any, weights: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """One that behaves as if there was a GPU."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    steps = Recording(compute, weights, models, wanted=False)
    monkeypatch.setattr(steps, "_wanted", True)
    monkeypatch.setattr(steps, "_aside", nullcontext)
    return steps


class Replayed:
    """A recorded step. A replay repeats what was computed with the random numbers of then, and runs no Python."""

    def replay(self) -> None:
        pass


class Stateful(nn.Module):
    """A linear model with a batch norm, whose forward does things that a replay would not do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.shares = kind, 0, {"of all": [1.0]}
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0
        if self.kind == "torch":
            factor = float(torch.rand(()))
        elif self.kind == "python":
            factor = random.random()
        elif self.kind == "numpy":
            factor = float(np.random.rand())
        elif self.kind == "count":
            self.calls += 1
            factor = 1 / self.calls
        elif self.kind == "list":
            self.shares = {"of all": [self.shares["of all"][0] / 2]}
            factor = self.shares["of all"][0]
        elif self.kind == "waits" and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return factor * self.head(self.norm(x))


class Weakening:
    """A user's own loss, which counts its calls."""

    def __init__(self, counts: bool) -> None:
        self.counts, self.calls = counts, 0

    def __call__(self, output: Tensor) -> Tensor:
        self.calls += self.counts
        return output.square().sum() / (1 + self.calls)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "count", "list", "loss", "waits"])
def test_a_step_that_a_replay_would_not_repeat_is_not_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its rehearsal leaves no trace: random numbers, statistics and counts are as without it."""
    found = []
    said = {
        "count": "Stateful.calls changes from 4 to 5", "loss": "Weakening.calls changes from 4 to 5",
        "list": "Stateful.shares changes from", "waits": "called a synchronizing",
    }  # fmt: skip
    for pretend in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        model, x, judge = Stateful(kind).train(), torch.randn(4, 3), Weakening(kind == "loss")
        weights = list(model.parameters())

        def compute(
            x: Tensor, y: Tensor | None, model: nn.Module = model, weights: Any = weights, judge: Any = judge
        ) -> Tensor:
            loss = judge(model(x))
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = gradient
            return loss.detach().reshape(1)

        numbers = []
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "CUDAGraph", Replayed)
            patch.setattr(torch.cuda, "graph", nullcontext)
            steps: Any = (
                recording(compute, weights, [model, judge.__call__, len, Weakening], patch) if pretend else compute
            )
            for number in range(7):
                told = pytest.warns(SecateurWarning, match=said.get(kind, "random numbers are drawn"))
                with told if pretend and number == 3 else nullcontext():
                    numbers.append(float(steps(x + number, None)))
        found.append(
            (numbers, [w.grad.tolist() for w in weights], model.norm.running_mean.tolist(), model.calls, judge.calls)
        )
    assert found[0] == found[1]


def test_a_step_is_recorded_after_a_rehearsal_without_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Stateful("").train(), torch.randn(4, 3)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    calls: list[int] = []

    def compute(x: Tensor, y: Tensor | None) -> Tensor:
        calls.append(int(model.norm.num_batches_tracked))
        return model(x).detach().sum().reshape(1)

    steps = recording(compute, list(model.parameters()), [model], monkeypatch)
    for _ in range(6):
        steps(x, None)
    assert calls == [0, 1, 2, 3, 4, 4]  # four steps, the rehearsal, and the recording; then replays


def test_a_step_that_cannot_be_recorded_is_taken_plainly_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA does when a model asks for numbers during a recording."""

    def refuse(graph: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    weight = nn.Parameter(torch.zeros(2))

    def compute(x: Tensor, y: Tensor) -> Tensor:
        weight.grad = x.mean(0)
        return x.sum().reshape(1)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    steps = recording(compute, [weight], [], monkeypatch)

    def step(number: float) -> float:
        found = float(steps(torch.full((3, 2), number), torch.zeros(3)))
        assert weight.grad is not None
        assert weight.grad.tolist() == [number, number]
        return found

    assert [step(i) for i in (0.0, 1.0, 2.0)] == [0.0, 6.0, 12.0]
    with pytest.warns(SecateurWarning, match=r"CUDA graph.*: operation not permitted when stream is capturing$"):
        assert step(3.0) == 18.0
    assert [step(i) for i in (4.0, 5.0)] == [24.0, 30.0]


def test_compiled_steps_do_what_plain_ones_do(result: sc.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Student and teacher are compiled once each, although the last batch of an epoch is smaller."""
    graphs: list[list[int]] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append([len(t) for t in example if t.shape[1:] == (3, 6, 6)])
        return graph.forward

    x, y = data()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    found = [
        sc.recover(result.model, net(), (x, y), epochs=2, batch_size=len(x) - 3, compile=wanted, progress=False)
        for wanted in (False, True)
    ]
    assert graphs == [[37], [37]]
    assert found[0].history == found[1].history
    for a, b in zip(*(done.model.parameters() for done in found), strict=True):
        assert torch.equal(a, b)
