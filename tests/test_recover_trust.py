"""Training never makes a model silently wrong: what is trained, what is kept, and what is refused by name."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

import secateur as sc
from secateur.errors import (
    DataError,
    EvaluationError,
    FileFormatError,
    ForwardError,
    NotFiniteError,
    SecateurError,
    SecateurWarning,
    TrainingError,
)
from secateur.recover import Recover
from secateur.recover import trainer as training
from secateur.recover.samples import Samples, altered
from secateur.running.identity import digest

v2 = pytest.importorskip("torchvision.transforms.v2")


def points(count: int = 65) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def pictures(count: int = 24) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def conv(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *more).eval()


def head() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]


def train(student: nn.Module, original: nn.Module | None, data: Any, **options: Any) -> Any:
    return sc.recover(student, original, data, **{"epochs": 1, "progress": False, **options})


# -- what is trained on ------------------------------------------------------------------------------------------------
# A rest of one sample, which batch norm could not take, is left out.
@pytest.mark.parametrize(
    ("size", "steps", "samples"), [(1, 65, 65), (2, 32, 64), (13, 5, 65), (21, 4, 65), (64, 1, 64), (100, 1, 65)]
)
def test_every_sample_is_trained_on(size: int, steps: int, samples: int) -> None:
    x, y = points()
    seen = list[Tensor]()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets)
        return F.cross_entropy(output, targets)

    train(mlp(), None, (x, y), teacher=0, batch_size=size, loss=loss)
    assert (len(seen), sum(map(len, seen))) == (steps, samples)


class Stream:
    """Batches that can be read once, all in the same memory."""

    def __init__(self, count: int) -> None:
        self.place, self.rest = torch.empty(8, 3, 8, 8), iter(range(count))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        drawn = torch.Generator().manual_seed(next(self.rest))
        return self.place.copy_(torch.rand(8, 3, 8, 8, generator=drawn)), torch.arange(8) % 3


class Read(IterableDataset[Any]):
    """A stream as a data set: whoever reads it takes something from all others."""

    def __init__(self, count: int) -> None:
        self.stream = Stream(count)

    def __iter__(self) -> Any:
        return iter(self.stream)


class Once:
    """No iterator itself, but each time it is asked for one, it is the same."""

    def __init__(self, count: int) -> None:
        self.stream = Stream(count)

    def __iter__(self) -> Any:
        return self.stream


def known_norm() -> nn.Module:
    """A network with a batch norm that has learnt something, which looks at batches before training."""
    model = conv(nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), *head())
    for _ in range(3):
        model.train()(torch.rand(8, 3, 8, 8))
    return model.eval()


def in_place(images: Tensor) -> Tensor:
    return images.mul_(2)


@pytest.mark.parametrize("count", [3, 16, 20])
@pytest.mark.parametrize("kind", [Once, lambda count: DataLoader(Read(count), batch_size=None)])
@pytest.mark.parametrize(("blocks", "augment"), [(0.0, None), (1.0, None), (0.0, in_place)])
def test_batches_that_come_once_are_trained_on(count: int, kind: Any, blocks: float, augment: Any) -> None:
    """Also those that were looked at before, each once, and in their order."""
    model, seen = known_norm(), list[Tensor]()

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and len(x) > 2:  # a look at two samples is no training
                seen.append(x.clone())
            out: Tensor = self.body(x)
            return out

    result = sc.prune(Seeing(), (torch.rand(8, 3, 8, 8), None), remove=0.2, repair=None, progress=False)
    seen.clear()
    train(result, result.original, kind(count), blocks=blocks, augment=augment)
    wanted = [batch[0].clone() * (2 if augment else 1) for batch in Stream(count)]
    assert torch.equal(torch.stack(seen[-count:]), torch.stack(wanted))
    assert len(seen) == count + (blocks > 0)  # the relevance of blocks has gradients, too


def test_held_out_batches_that_come_once_are_measured_on_each_time() -> None:
    data = points(32)
    test = [(data[0][begin : begin + 8], data[1][begin : begin + 8]) for begin in range(0, 32, 8)]
    found = train(mlp(), None, data, teacher=0, epochs=2, test=iter(test)).history
    assert found == train(mlp(), None, data, teacher=0, epochs=2, test=test).history


def test_no_batch_to_look_at() -> None:
    with pytest.raises(DataError, match="no batch"):
        train(mlp(), mlp(), Once(0), blocks=1.0)


class Scales(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.sub_(0.5).div_(0.2))
        return out


def test_models_that_write_to_their_input_see_what_their_teacher_sees() -> None:
    x, y = points(16)
    batches = [(x.clone(), y)]
    test = [(x.clone(), y)]
    done = train(Scales(), Scales(), batches, lr=0.0, teacher=1.0, test=test)
    assert done.history[0].loss == pytest.approx(0, abs=1e-6)
    assert done.history[0].held_out == pytest.approx(0, abs=1e-6)
    assert torch.equal(batches[0][0], x)
    assert torch.equal(test[0][0], x)


def test_label_maps_do_not_stay_behind() -> None:
    x, _ = pictures()
    maps = (x.mean(1) > 0.5).long()
    model = conv(nn.Conv2d(4, 2, 1))
    moving = ["crop-flip", v2.RandomHorizontalFlip(), v2.Compose([v2.ColorJitter(), v2.RandomCrop(8, padding=1)])]
    for augment in moving:
        with pytest.raises(DataError, match="would move images, but not their targets"):
            train(model, None, (x, maps), teacher=0, augment=augment)
        for targets in ((torch.arange(len(x)), maps), [{"boxes": torch.rand(2, 4)} for _ in x]):
            with pytest.raises(DataError, match="would move images, but not their targets"):
                altered(augment, x, targets)
    assert torch.equal(altered("crop-flip", x, (torch.arange(len(x)), torch.rand(len(x))))[1][0], torch.arange(len(x)))
    for augment in (v2.ColorJitter(0.1), v2.Compose([v2.ColorJitter(0.1)]), lambda images: images * 1.1):
        assert train(model, None, (x, maps), teacher=0, augment=augment).history
    # The teacher's answer moves with the images.
    assert train(model, conv(nn.Conv2d(4, 2, 1)), (x, None), augment="crop-flip").history


class Numbered(Sampler[int]):
    """Draws by the number of the epoch, as torch's sampler for several processes."""

    def __init__(self, count: int) -> None:
        self.count, self.epochs = count, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        drawn = torch.Generator().manual_seed(self.epochs[-1] if self.epochs else 0)
        return iter(torch.randperm(self.count, generator=drawn).tolist())

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize("batched", [False, True])
def test_samplers_are_told_the_epoch(batched: bool) -> None:
    own = Numbered(24)
    how: dict[str, Any] = (
        {"batch_sampler": BatchSampler(own, 8, False)} if batched else {"batch_size": 8, "sampler": own}
    )
    train(mlp(), None, DataLoader(TensorDataset(*points(24)), **how), teacher=0, epochs=3)
    assert own.epochs == [0, 1, 2]


def test_a_run_goes_on_with_the_order_of_a_batch_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_WRITING", math.inf)

    def loader() -> Any:
        own = RandomSampler(range(24), generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(*points(24)), batch_sampler=BatchSampler(own, 8, False))

    assert digest(stopped(loader, tmp_path, mlp)) == digest(train(mlp(), None, loader(), teacher=0, epochs=4).model)


def stopped(data: Any, folder: Path, model: Any, ema: float = 0.0) -> nn.Module:
    """A run of four epochs that was stopped after two."""

    def kill(event: Any) -> None:
        if event.epoch == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"teacher": 0, "epochs": 4, "ema": ema, "checkpoint": folder / "run.safetensors"}
    with pytest.raises(KeyboardInterrupt):
        train(model(), None, data(), progress=kill, **options)
    resumed: nn.Module = train(model(), None, data(), **options).model
    return resumed


# -- what is kept ------------------------------------------------------------------------------------------------------
class Counts(nn.Module):
    """Puts another tensor in the place of its buffers, one of which grows."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.seen = torch.cat([self.seen, x.mean().reshape(1)])
        out: Tensor = self.linear(x - self.mean)
        return out


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_buffers_that_a_forward_replaces_are_kept(ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of weights have the buffer that grows as it is."""
    monkeypatch.setattr(training, "_WRITING", math.inf)
    whole = train(Counts(), None, points(24), teacher=0, epochs=4, batch_size=8, ema=ema).model
    assert len(whole.seen) == 12
    again = stopped(lambda: points(24), tmp_path, Counts, ema)
    assert len(again.seen) == 4  # batches of 64: one an epoch
    assert digest(again) == digest(train(Counts(), None, points(24), teacher=0, epochs=4, ema=ema).model)


class Waves(nn.Module):
    """Its weights are complex; of its real ones there may be none."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat, generator=drawn))
        self.shift = nn.Parameter(torch.zeros(3)) if real else None
        self.register_buffer("turn", torch.tensor([1j, torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.turn, Tensor)
        out = (x.to(torch.cfloat) @ self.first * self.turn[0]).abs()
        return out if self.shift is None else out + self.shift


@pytest.mark.parametrize("real", [False, True])
def test_complex_weights_have_averages(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = points(16)
    options: dict[str, Any] = {
        "teacher": 0.0, "ema": 0.9, "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "schedule": "constant"
    }  # fmt: skip
    by_hand, mean = Waves(real), Waves(real).first.detach().clone()
    for step in range(1, 4):
        own = list(by_hand.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(by_hand(x), y), own)
        with torch.no_grad():
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.sub_(0.5 * gradient)
        keep = min(0.9, (1 + step) / (10 + step))
        mean = keep * mean + (1 - keep) * by_hand.first.detach()
    found = train(Waves(real), None, (x, y), epochs=3, **options).model
    torch.testing.assert_close(found.first.detach(), mean)
    assert torch.equal(found.turn, Waves(real).turn)

    after_epoch = training.Trainer._after_epoch

    def killed(self: training.Trainer) -> None:
        after_epoch(self)
        if len(self.history) == 2:
            self._save()
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "_after_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        train(Waves(real), None, (x, y), epochs=3, checkpoint=tmp_path / "run", **options)
    monkeypatch.undo()
    again = train(Waves(real), None, (x, y), epochs=3, checkpoint=tmp_path / "run", **options).model
    assert torch.equal(again.first, found.first)


def test_the_best_epoch_has_its_own_buffers() -> None:
    x, y = points(24)
    done = train(Counts(), None, (x, y), teacher=0, epochs=30, lr=0.5, clip=0, patience=2, test=(x, (y + 1) % 3))
    best = int(done.stopped.rpartition("epoch ")[2]) if "this is epoch" in done.stopped else 0
    assert len(done.model.seen) == best < len(done.history)


def test_a_model_that_no_epoch_makes_better_stays_as_it_was() -> None:
    x, y = points(30)
    fitted = train(mlp(), None, (x, y), teacher=0, epochs=60, lr=0.3, clip=0).model.eval()
    wrong = (x, (y + 1) % 3)  # what is trained on says otherwise
    before = digest(fitted)
    done = train(fitted, None, wrong, teacher=0, epochs=20, lr=0.3, patience=3, test=(x, y))
    assert len(done.history) == 3
    assert done.stopped.endswith("did not fall for 3 epochs; this is the model before training")
    assert digest(done.model) == before
    with pytest.warns(SecateurWarning, match=r"raised the loss on held-out samples from .* to .*Fix: a smaller lr=0.3"):
        worse = train(fitted, None, wrong, teacher=0, epochs=3, lr=0.3, test=(x, y))
    assert digest(worse.model) != before


def test_the_usual_settings_do_not_ruin_what_is_there() -> None:
    """Two classes, inputs up to 16: the teacher's part of the loss is steep. Without a limit one epoch ruins all."""
    torch.manual_seed(0)
    x = 16 * torch.rand(1000, 64)
    original = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)).eval()
    with torch.no_grad():
        original[4].bias -= original(x).mean(0)
        original[4].weight *= 20
        original[4].bias *= 20
        y = original(x).argmax(1)
        student = copy.deepcopy(original)
        for parameter in student.parameters():
            parameter += 0.02 * parameter.std() * torch.randn_like(parameter)

    def right(model: nn.Module) -> float:
        return float((model.eval()(x).argmax(1) == y).float().mean())

    assert min(y.bincount()) > 200
    usual = [right(train(student, original, (x, y), seed=seed).model) for seed in range(3)]
    without = [right(train(student, original, (x, y), seed=seed, clip=0).model) for seed in range(3)]
    assert min(usual) >= right(student) - 0.02
    assert min(without) < right(student) - 0.1  # so this is a case in point


def test_weights_that_the_last_step_spoils_are_not_returned() -> None:
    x, y = points(8)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) + (output.sum() * 0).abs().sqrt()  # finite, but its gradient is not

    with pytest.raises(TrainingError, match="as it was before training") as caught:
        train(mlp(), None, (x, y), teacher=0, loss=loss, clip=0)
    assert digest(caught.value.result.model) == digest(mlp())


def test_an_embedding_that_shrinks_what_it_looks_up_leaves_the_original_alone() -> None:
    def words() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 6, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3)).eval()

    original = words()
    train(words(), original, (torch.arange(40).reshape(10, 4) % 20, None))
    assert digest(original) == digest(words())


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (lambda x, y: (x[:30], y), "30 inputs but 65 targets"),
        (lambda x, y: (x, y[:30]), "65 inputs but 30 targets"),
        (lambda x, y: DataLoader(TensorDataset(x), 16), r"a batch is a list of 1 items; each must be a pair"),
        (lambda x, y: DataLoader(TensorDataset(x, y, y), 16), r"a batch is a list of 3 items"),
        (lambda x, y: [["some", "texts", "here"]], r"a batch is a list of 3 items"),
        (lambda x, y: (torch.where(x > 2, torch.nan, x), y), "NaN or infinite"),
        (lambda x, y: (x[:0], y[:0]), "the data are empty"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on(data: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        train(mlp(), mlp(), data(*points()))


def test_two_inputs_of_different_lengths() -> None:
    x, y = points()
    with pytest.raises(DataError, match="inputs have different lengths: 30, 65"):
        train(mlp(), mlp(), ((x, x[:30]), y))


def test_nan_that_comes_late_is_found_in_the_data() -> None:
    x, y = points(640)
    x[500:] = torch.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        train(mlp(), mlp(), (x, y), batch_size=8)


class Spoils(torch.autograd.Function):
    """The same numbers, with a gradient that has a NaN in its imaginary part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + complex(0, math.nan)


class Hidden(Waves):
    """No NaN ever leaves it."""

    spoils = False

    def forward(self, x: Tensor) -> Tensor:
        first = Spoils.apply(self.first) if self.spoils else self.first  # type: ignore[no-untyped-call]
        return (x.to(torch.cfloat) @ first).abs().nan_to_num()


@pytest.mark.parametrize("number", [complex(math.nan, 0), complex(0, math.nan), complex(0, math.inf)])
def test_complex_weights_and_inputs_that_are_not_finite(number: complex) -> None:
    x, y = points(16)
    spoilt = Hidden(real=True)
    spoilt.first.data[1, 1] = number
    with pytest.raises(NotFiniteError, match="first"):
        train(spoilt, None, (x, y), teacher=0)
    waves = x.to(torch.cfloat)
    waves[3, 2] = number
    with pytest.raises(DataError, match="NaN or infinite"):
        train(Hidden(real=True), None, (waves, y), teacher=0)


def test_complex_weights_that_the_last_step_spoils() -> None:
    model, (x, y) = Hidden(real=False), points(16)
    model.spoils = True
    with pytest.raises(TrainingError, match="NaN in epoch 1") as caught:
        train(model, None, (x, y), teacher=0, clip=0.0)
    assert torch.equal(caught.value.result.model.first, model.first)


def test_complex_answers_and_losses() -> None:
    """Refused where only their real parts would count; your own loss may take them."""
    x, y = points(16)

    class Complex(Waves):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.cfloat) @ self.first

    model = Complex(real=False)
    for data, teacher in (((x, y), 0.0), ((x, y), 0.5), ((x, None), 1.0)):
        with pytest.raises(DataError, match="complex numbers"):
            train(model, copy.deepcopy(model), data, teacher=teacher)
    with pytest.raises(EvaluationError, match="complex number"):
        train(model, None, (x, y), teacher=0, loss=lambda output, targets: output.mean())
    done = train(model, None, (x, y), teacher=0, loss=lambda output, targets: F.cross_entropy(output.abs(), targets))
    assert done.history[0].accuracy is None


def test_nan_among_held_out_samples() -> None:
    x, y = points()
    spoilt = x.clone()
    spoilt[3, 1] = torch.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        train(mlp(), None, (x, y), teacher=0, test=(spoilt, y), patience=2)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("blocks", [0.0, 1.0])
def test_models_and_data_in_half_precision(kind: torch.dtype, blocks: float) -> None:
    """The student is trained in full precision. Its teacher, and the data, stay as they are."""
    x, y = points(32)
    result = sc.prune(mlp(), (x, y), remove=0.3, repair=None, progress=False)
    whole = train(result, result.original, (x, y), blocks=blocks).history[0]
    half = copy.deepcopy(result.model).to(kind), copy.deepcopy(mlp()).to(kind)
    done = train(half[0], half[1], (x.to(kind), y), blocks=blocks, test=(x.to(kind), y))
    assert done.history[0].loss == pytest.approx(whole.loss, rel=0.05)
    assert {p.dtype for p in done.model.parameters()} == {kind}


def test_numbers_that_half_precision_cannot_hold() -> None:
    """A variance above 65504 would be infinite, and all that is divided by it 0."""
    x, y = points(32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[0].weight.mul_(2000)
    with pytest.raises(TrainingError, match="running_var` has learnt numbers that are infinite in float16") as caught:
        train(copy.deepcopy(model).half(), None, (x, y), teacher=0)
    found = caught.value.result.model
    assert found[1].running_var.dtype == torch.float32
    assert torch.isfinite(found(x)).all()
    assert train(copy.deepcopy(model).bfloat16(), None, (x, y), teacher=0).model[1].running_var.isfinite().all()


def test_a_teacher_with_nan() -> None:
    original = mlp()
    with torch.no_grad():
        original[0].weight[0, 0] = torch.nan
    with pytest.raises(SecateurError, match=r"0\.weight"):
        train(mlp(), original, points())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"held_out": 0.2, "test": points()}, "one of the two"),
        ({"settings": Recover(data=points())}, "give one of the two"),
        ({"settings": False}, "asks for no training"),
        ({"epoch": 3}, r"`recover` takes no epoch\. Fix: epochs"),
        ({"momentum": 2.0}, "momentum=2.0"),
        ({"momentum": 1.0}, "momentum=1 leaves nothing"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], match: str) -> None:
    with pytest.raises(SecateurError, match=match):
        sc.recover(mlp(), mlp(), points(), progress=False, **options)


def test_no_original_is_told_what_asks_for_it() -> None:
    with pytest.raises(SecateurError, match=r"teacher=0 and blocks=0 for labels alone"):
        train(mlp(), None, points(), teacher=0, blocks=1.0)


def test_a_file_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="is a folder"):
        train(mlp(), mlp(), points(), checkpoint=tmp_path)


def test_batch_norm_and_a_last_batch_of_one() -> None:
    x, y = points()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    loader = DataLoader(TensorDataset(x, y), 16)  # 65 samples
    with pytest.raises(DataError, match=r"batch of one sample.*drop_last=True"):
        train(model, None, loader, teacher=0)
    assert train(model, None, (x, y), teacher=0, batch_size=16).history  # of a pair, a rest of one is left out
    with pytest.raises(DataError, match="batch of one sample"):
        train(model, None, (x[:1], y[:1]), teacher=0)


@pytest.mark.parametrize("x", [torch.randn(20, 5), torch.randn(20, 4).double()])
def test_inputs_that_do_not_fit(x: Tensor) -> None:
    with pytest.raises(ForwardError, match="Sequential does not run on a batch"):
        train(mlp(), None, (x, torch.arange(20) % 3), teacher=0)


def test_what_the_user_brings_fails_by_name() -> None:
    x, y = pictures()
    for loss, match in (
        (lambda output, targets: 1 / 0, "loss raised ZeroDivisionError"),
        (lambda output, targets: None, "loss returned a NoneType"),
        (lambda output, targets: output.sum(1), r"loss returned a tensor of shape \(24,\).*loss.mean"),
    ):
        with pytest.raises(EvaluationError, match=match):
            train(conv(*head()), None, (x, y), teacher=0, loss=loss)
    with pytest.raises(EvaluationError, match="augment raised ZeroDivisionError"):
        train(conv(*head()), None, (x, y), teacher=0, augment=lambda images: 1 / 0)


# -- mixing ------------------------------------------------------------------------------------------------------------
def test_mixing_within_other_transforms() -> None:
    x, y = pictures()
    model = conv(*head())
    either = v2.RandomChoice([v2.MixUp(num_classes=3), v2.CutMix(num_classes=3)])
    for augment in (either, v2.Compose([v2.RandomHorizontalFlip(), v2.MixUp(num_classes=3)]), v2.Compose([either])):
        torch.manual_seed(0)
        images, labels = altered(augment, x, y)
        assert images.shape == x.shape
        assert labels.shape == (24, 3)
        torch.testing.assert_close(labels.sum(1), torch.ones(24))
        assert Samples((x, y), 8, augment, None, None).labels is None
        assert train(model, None, (x, y), teacher=0, augment=augment).history
    for augment, match in (
        (v2.RandomChoice([v2.MixUp(num_classes=3), v2.RandomHorizontalFlip()]), "parts that mix batches"),
        (v2.MixUp(), "num_classes"),
    ):
        with pytest.raises(DataError, match=match):
            train(model, None, (x, y), teacher=0, augment=augment)
    with pytest.raises(DataError, match="mixes labels, and there are none"):
        train(model, conv(*head()), (x, None), augment=v2.MixUp(num_classes=3))


# -- the user's data and the numbers that are told ---------------------------------------------------------------------
class Writes(nn.Module):
    """A model that alters what it is given, and answers a map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x.mul_(0.5))
        return found


def dimmed(images: Tensor) -> Tensor:
    return images.mul_(0.5)


def emptied(output: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(output, targets.clone())
    targets.zero_()
    return loss


@pytest.mark.parametrize("kind", ["list", "loader"])
def test_batches_of_the_user_are_not_written_to(kind: str) -> None:
    x, _ = pictures()
    maps = torch.randint(3, (len(x), 8, 8))
    batches = [(x[:12].clone(), maps[:12].clone()), (x[12:].clone(), maps[12:].clone())]
    data: Any = batches if kind == "list" else DataLoader(batches, batch_size=None)
    train(Writes(), Writes(), data, augment=dimmed, loss=emptied, test=batches, epochs=2, blocks=0)
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), x)
    assert torch.equal(torch.cat([targets for _, targets in batches]), maps)


def test_data_with_gradients_get_none() -> None:
    x, y = points()
    x, wanted = x.requires_grad_(), x[:, :3].detach().clone().requires_grad_()
    for data in ((x, y), [(x, y)]):
        train(mlp(), mlp(1), data)
    train(mlp(), None, (x, wanted), teacher=0, loss=F.mse_loss)
    assert x.grad is None
    assert wanted.grad is None


def test_losses_below_zero_that_fall_are_no_harm(recwarn: pytest.WarningsRecorder) -> None:
    x, _ = points()
    y = x[:, :3]

    def likeness(output: Tensor, targets: Tensor) -> Tensor:
        return -2 - F.cosine_similarity(output, targets).mean()

    run = {"teacher": 0, "loss": likeness, "schedule": "constant", "clip": 0}
    found = train(mlp(), None, (x, y), lr=1e-3, test=(x, y), **run)
    assert found.history[-1].held_out < -1
    assert not recwarn
    with pytest.warns(SecateurWarning, match="raised the loss on held-out samples from -.* to -1"):
        train(mlp(), None, (x, y), lr=0.1, test=(x, -y), epochs=20, **run)


def test_sums_are_exact_whatever_the_default_number_format_is() -> None:
    x, y = points(3000)
    model = mlp()
    with torch.no_grad():
        output = model(x)
    right, loss = float((output.argmax(1) == y).float().mean()), float(F.cross_entropy(output, y))
    torch.set_default_dtype(torch.bfloat16)
    try:
        row = train(model, None, (x, y), teacher=0, lr=0.0, batch_size=100, test=(x, y)).history[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert (row.accuracy, row.held_out_accuracy) == pytest.approx((right, right), rel=1e-6)
    assert (row.loss, row.held_out) == pytest.approx((loss, loss), rel=1e-5)


def test_targets_that_are_nan_are_named() -> None:
    x, _ = points()
    y = torch.zeros(len(x), 3)
    y[3] = math.nan
    with pytest.raises(TrainingError, match=r"some targets are NaN; .*Fix: a loss that leaves them out, or a smaller"):
        train(mlp(), None, (x, y), teacher=0, loss=F.mse_loss)
    masked = train(
        mlp(), None, (x, y), teacher=0, loss=lambda output, known: (output - known).nan_to_num().square().mean()
    )
    assert math.isfinite(masked.history[0].loss)


def test_a_loss_without_a_gradient_is_refused() -> None:
    def cut(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.detach(), targets)

    with pytest.raises(DataError, match=r"depends on no parameter that is trained.*no detach\(\)"):
        train(mlp(), None, points(), teacher=0, loss=cut)


def test_a_teacher_of_quantities_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    x, y = points()
    loss = F.binary_cross_entropy_with_logits
    shares = F.one_hot(y, 3).float()
    for targets, asked in ((x[:, :3], 0.0), (shares, 0.9), (y, 0.9)):
        own = F.cross_entropy if targets is y else loss
        train(mlp(), mlp(1), (x, targets), loss=own, teacher=asked, epochs=2)
    assert not recwarn
    with pytest.warns(SecateurWarning, match="the targets are no classes, .*Fix: teacher=0") as told:
        train(mlp(), mlp(1), [(x[:30], (x[:30, :3] > 0).float())] * 2, loss=loss, epochs=2)
    assert len(told) == 1
