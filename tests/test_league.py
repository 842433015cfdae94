"""Several students trained at once end where `recover` takes each of them alone."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.league import done, groups, named, plan, restore, save
from benchmarks.league_models import (
    ALIGNED,
    FIELD,
    MAGNITUDE,
    OURS,
    PATIENT,
    RIVAL,
    SMALL,
    WHOLE,
    Job,
    augment,
    chosen,
    crops,
    folded,
    mixed,
    padded,
    shaped,
    unpadded,
)
from benchmarks.league_steps import PLAIN, prepared
from benchmarks.league_together import Student, Together, begin, nothing_collected
from benchmarks.resnet56 import ResNet
from secateur.recover.samples import Samples
from secateur.running.sandbox import seeded

JOBS = [Job(OURS, 2.55, 5, 3), Job(MAGNITUDE, 2.55, 5, 3)]
SHARES = (0.5, 0.0)
ROOT = Path(__file__).parents[1]


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(50, 3, 8, 8, generator=drawn), torch.randint(10, (50,), generator=drawn)


def nets() -> tuple[nn.Module, list[nn.Module]]:
    torch.manual_seed(1)
    return ResNet(1).eval(), [ResNet(1) for _ in SHARES]


def taught(students: list[Student], teacher: nn.Module, data: tuple[Tensor, Tensor], epochs: range) -> list[float]:
    group, samples = Together(students, teacher), Samples(data, 16, augment, None, torch.device("cpu"))
    return [group.epoch(samples, number, 5, 0.05) for number in epochs][-1]


def copies(models: list[nn.Module]) -> list[Student]:
    made = [ResNet(1) for _ in models]
    for own, given in zip(made, models, strict=True):
        own.load_state_dict(given.state_dict())
    return [Student(net, share, 5e-4) for net, share in zip(made, SHARES, strict=True)]


def close(first: nn.Module, second: nn.Module) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


def test_together_is_what_recover_does_alone(data: tuple[Tensor, Tensor]) -> None:
    teacher, models = nets()
    for model in models:
        with torch.no_grad():
            model.train()(3 * data[0] + 1)  # batch norms have learnt from other data
    students = copies(models)
    with seeded(3, 0):
        begin(students, Samples(data, 16, augment, None, torch.device("cpu")), 3)
        losses = taught(students, teacher, data, range(5))
    for student, model, share, loss in zip(students, models, SHARES, losses, strict=True):
        alone = sc.recover(
            model, teacher if share else None, data, epochs=5, lr=0.05, batch_size=16, weight_decay=5e-4, seed=3,
            temperature=4.0, teacher=share, clip=0, augment=augment, channels_last=False, progress=False,
        )  # fmt: skip
        assert alone.history[-1].loss == pytest.approx(loss, rel=1e-4)
        close(student.net, alone.model)


class Mirrored(nn.Module):
    """What a network says of images and of their mirror images: the mean."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(x), self.net(x.flip(-1))]).mean(0)


def test_mixtures_are_learnt_as_recover_does_alone(data: tuple[Tensor, Tensor]) -> None:
    teacher, (model, _) = nets()
    own = ResNet(1)
    own.load_state_dict(model.state_dict())
    student = Student(own, PATIENT.share, 5e-4, faster=2.5)
    group, samples = Together([student], teacher, both=True), Samples(data, 16, mixed, None, torch.device("cpu"))
    with seeded(3, 0):
        (loss,) = [group.epoch(samples, number, 3, 0.02) for number in range(3)][-1]
    alone = sc.recover(
        model, Mirrored(teacher), data, epochs=3, lr=0.05, batch_size=16, weight_decay=5e-4, seed=3,
        temperature=4.0, teacher=1.0, clip=0, augment=mixed, channels_last=False, progress=False,
    )  # fmt: skip
    assert alone.history[-1].loss == pytest.approx(loss, rel=1e-4)
    close(student.net, alone.model)


def test_small_batches_are_trained_as_torch_does_it(data: tuple[Tensor, Tensor]) -> None:
    """Torch-Pruning's own experiments: SGD, and a rate that is divided by 10 after 60 and after 80 of 100 epochs."""
    _, (model, _) = nets()
    own, epochs = ResNet(1), 10
    own.load_state_dict(model.state_dict())
    student = Student(own, 0.0, 5e-4)
    assert {row.recipe for row in FIELD} == {SMALL}
    assert {row.rate for row in FIELD} == {0.01}
    device = torch.device("cpu")
    with seeded(3, 0):
        group, samples = Together([student], None), Samples(data, 16, crops, None, device)
        for number in range(epochs):
            group.epoch(samples, number, epochs, 0.01, SMALL.curve)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 8], 0.1)
    model.train()
    with seeded(3, 0):
        samples = Samples(data, 16, crops, None, device)
        for _ in range(epochs):
            for x, y in samples.epoch():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step()
    close(student.net, model)


def test_the_share_of_a_fading_teacher_goes_down_as_the_rate_does(data: tuple[Tensor, Tensor]) -> None:
    teacher, (model, _) = nets()
    own, epochs, highest, steps = ResNet(1), 3, 0.05, math.ceil(len(data[1]) / 16)
    own.load_state_dict(model.state_dict())
    student, device = Student(own, 0.8, 5e-4, fading=True), torch.device("cpu")
    with seeded(3, 0):
        group, samples = Together([student], teacher), Samples(data, 16, crops, None, device)
        for number in range(epochs):
            group.epoch(samples, number, epochs, highest)
    optimizer = torch.optim.SGD(model.parameters(), lr=highest, momentum=0.9, weight_decay=5e-4)
    model.train()
    with seeded(3, 0):
        samples, step = Samples(data, 16, crops, None, device), 0
        for _ in range(epochs):
            for x, y in samples.epoch():
                left = 0.5 + 0.5 * math.cos(math.pi * step / (steps * epochs))
                optimizer.param_groups[0]["lr"] = highest * left
                with torch.no_grad():
                    known = (teacher.eval()(x) / 4).softmax(1)
                out = model(x)
                soft = -(known * (out / 4).log_softmax(1)).sum(1).mean()  # differs from the divergence by a constant
                optimizer.zero_grad()
                (0.8 * left * 16 * soft + (1 - 0.8 * left) * nn.functional.cross_entropy(out, y)).backward()
                optimizer.step()
                step += 1
    close(student.net, model)


def test_mixtures_are_rectangles_of_other_images() -> None:
    torch.manual_seed(0)
    images = torch.arange(1.0, 401).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)  # each image is one number
    found = mixed(images)
    number = images[:, 0, 0, 0]
    shares = []
    for own, other, image in zip(number, number.flip(0), found, strict=True):
        assert torch.equal(image[0], image[1])
        assert torch.equal(image[0], image[2])
        there = image[0] == other
        assert (there | (image[0] == own) | (image[0] == 0)).all()  # 0: beyond the border of a shifted image
        rows, columns = there.any(1).nonzero(), there.any(0).nonzero()
        if len(rows):
            inside = image[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert ((inside == other) | (inside == 0)).all()
        shares.append(there.float().mean().item())
    assert 0.35 < sum(share > 0.02 for share in shares) / len(shares) < 0.55
    assert max(shares) > 0.6


def test_runs_are_taken_in_the_order_of_their_names() -> None:
    found = named("mixtures-rate-0.2-by2.55-100,lrp-by2.55-100-epochs-seed-1")
    assert [str(job.row) for job in found] == [str(PATIENT), str(RIVAL)] * 3 + ["lrp"]
    assert [job.seed for job in found] == [0, 0, 1, 1, 2, 2, 1]
    assert all((job.speed, job.epochs) == (2.55, 100) for job in found)
    assert len({job.name for job in plan()}) == len(plan())


def test_the_whole_network_is_trained_as_the_others_are(data: tuple[Tensor, Tensor]) -> None:
    jobs = [job for job in plan() if job.row.choice == WHOLE.choice]
    assert {(job.speed, job.epochs, job.row.teacher) for job in jobs} == {(1.0, 100, False), (1.0, 100, True)}
    net = nets()[0]
    made = chosen(net, data, jobs[0])
    for own, found in zip(net.parameters(), made.parameters(), strict=True):
        assert own is not found
        assert torch.equal(own, found)


def test_nothing_is_collected_while_a_step_is_recorded() -> None:
    class Node:
        pass

    freed = list[str]()

    def ring(name: str) -> None:
        node: Any = Node()
        node.self = node
        weakref.finalize(node, freed.append, name)

    gc.collect()
    ring("before")
    with nothing_collected():
        assert freed == ["before"]
        ring("during")
        for _ in range(5000):
            ring("more")
        assert freed == ["before"]
    gc.collect()
    assert freed.count("during") == 1
    assert gc.isenabled()


def test_stopped_runs_go_on(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    teacher, models = nets()
    whole, first, second = copies(models), copies(models), copies(models)
    with seeded(3, 0):
        taught(whole, teacher, data, range(5))
    with seeded(3, 0):
        taught(first, teacher, data, range(2))
        save(tmp_path, JOBS, first, [[1.0, 2.0]] * 2)
    assert [done(tmp_path, job) for job in JOBS] == [2, 2]
    with seeded(3, 0):
        assert restore(tmp_path, JOBS, second) == [[1.0, 2.0]] * 2
        taught(second, teacher, data, range(2, 5))
    for a, b in zip(whole, second, strict=True):
        close(a.net, b.net)
    other = Job(OURS, 4.0, 5, 3)
    assert groups(tmp_path, [other, *JOBS], 3) == [JOBS, [other]]


def test_padded_channels_stay_zero(data: tuple[Tensor, Tensor]) -> None:
    (teacher, _), model = nets(), ResNet()
    wide = padded(model, {"layer1": 24, "layer2": 24, "layer3": 24})
    assert wide.layer1[0].conv1.out_channels == 24
    close(unpadded(wide, model), model)
    with seeded(3, 0):
        taught([Student(wide, 0.5, 5e-4)], teacher, data, range(2))
    unpadded(wide, model)  # which looks at the others


def narrow() -> nn.Module:
    """A ResNet that has lost channels everywhere: 13 and 14 of 16 are left before the shortcuts that pad 8 + 8."""
    torch.manual_seed(2)
    state, (first, inner) = ResNet(1).state_dict(), (torch.arange(14), torch.arange(13))
    second = torch.cat([torch.arange(8), 8 + first, 24 + torch.arange(8)])
    third = torch.cat([torch.arange(16), 16 + second, 48 + torch.arange(16)])
    streams = {"": first, "layer1.0.": first, "layer2.0.": second, "layer3.0.": third}
    before = dict(zip(streams, [torch.arange(3), first, first, second], strict=True))
    for path, own in streams.items():
        norms = {"bn1": inner if path else own, "bn2": own}
        for name in [name for name in state if name.startswith(path + "bn") and not name.endswith("tracked")]:
            state[name] = state[name][norms[name.removeprefix(path).partition(".")[0]]]
        if path:
            state[path + "conv1.weight"] = state[path + "conv1.weight"][inner][:, before[path]]
            state[path + "conv2.weight"] = state[path + "conv2.weight"][own][:, inner]
    state["conv1.weight"], state["linear.weight"] = state["conv1.weight"][first], state["linear.weight"][:, third]
    return shaped(state)


def test_padded_streams_train_as_they_would_without(data: tuple[Tensor, Tensor]) -> None:
    (teacher, _), model = nets(), narrow()
    assert [model.layer1[0].bn2.num_features, model.layer3[0].bn2.num_features] == [14, 62]
    wide = padded(model)
    assert [m.num_features % ALIGNED for m in wide.modules() if isinstance(m, nn.BatchNorm2d)] == [0] * 7
    x = data[0]
    torch.testing.assert_close(wide.eval()(prepared(x, False, 8)), model.eval()(x))
    for net in (model, wide):
        with seeded(3, 0):
            taught([Student(net, 0.5, 5e-4)], teacher, data, range(3))
    close(unpadded(wide, model), model)


INTERPRETED = """
import torch
import torch.nn.functional as F
from benchmarks.league_kernels import convolution

drawn = torch.Generator().manual_seed(0)
SIZES = ((2, 8, 16, 8, 8), (3, 16, 8, 6, 10), (1, 24, 32, 5, 7), (1, 24, 40, 5, 7))
for images, inputs, outputs, height, width in SIZES:
    x, weight, slope = (
        torch.randn(*size, generator=drawn).contiguous(memory_format=torch.channels_last).requires_grad_()
        for size in ((images, inputs, height, width), (outputs, inputs, 3, 3), (images, outputs, height, width))
    )
    out, expected = convolution(x, weight), F.conv2d(x, weight, None, 1, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    found, known = (torch.autograd.grad(t, (x, weight), slope) for t in (out, expected))
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)
print("equal")
"""


def test_own_kernels_are_convolutions() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # which must be known before the kernels are defined
    made = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert made.stdout == "equal\n", made.stderr[-2000:]


def test_compiled_steps_are_the_same_and_half_precision_is_near(data: tuple[Tensor, Tensor]) -> None:
    teacher, models = nets()
    plain, traced, half = copies(models), copies(models), []
    for model, share in zip(models, SHARES, strict=True):
        half.append(Student(padded(model, {"layer1": 8, "layer2": 8, "layer3": 8}), share, 5e-4, half=True))
    ends = []
    for students, backend in ((plain, ""), (traced, "aot_eager"), (half, "")):
        group = Together(students, folded(teacher), backend=backend)
        samples = Samples(data, 16, augment, None, torch.device("cpu"))
        with seeded(3, 0):
            ends.append([group.epoch(samples, number, 5, 0.05) for number in range(5)][-1])
        assert group.way == ("compiled, not recorded" if backend else "plain, not recorded")
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)
    assert ends[2] == pytest.approx(ends[0], rel=0.05)
    for a, b in zip(plain, traced, strict=True):
        close(a.net, b.net)


def test_what_cannot_be_compiled_is_computed_without(
    data: tuple[Tensor, Tensor], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*given: object) -> Tensor:
        raise RuntimeError("no compiler here")

    teacher, models = nets()
    plain, broken = copies(models), copies(models)
    group = Together(broken, teacher)
    monkeypatch.setattr(group, "functions", PLAIN._replace(head=refuses))
    group.step(*data, 0.05)
    assert "no compiler here" in capsys.readouterr().out
    assert group.way == "plain, not recorded"
    Together(plain, teacher).step(*data, 0.05)
    for a, b in zip(plain, broken, strict=True):
        torch.testing.assert_close(list(a.net.parameters()), list(b.net.parameters()))
