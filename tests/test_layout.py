"""Images are evaluated in the order in memory that convolutions like, where that changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from oracle import random_scores
from secateur.plans import Limits
from secateur.repair import Repair, reference
from secateur.running import accuracy as evaluation
from secateur.running.layout import (
    bears_channels_last,
    channels_last,
    in_best_order,
    learns_channels_last,
    order_for,
    unordered,
)


class Net(nn.Module):
    """A small classifier, some of whose kinds look at the memory."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        if self.kind == "view":
            y = y.view(len(x), 8 * y.shape[-1] ** 2).unflatten(1, (8, -1)).unsqueeze(-1)
        if self.kind == "memory":  # reads what lies there, whatever it means
            y = torch.as_strided(y, y.shape, (y[0].numel(), y[0, 0].numel(), y.shape[-1], 1))
        logits = self.head(y.relu().mean((2, 3)))
        if self.kind == "marks":
            return logits > 0
        if self.kind == "numbers":
            return logits.argmax(1)
        return logits[logits.isnan()] if self.kind == "nothing" else logits


ORDERS = [("", channels_last), ("view", unordered), ("memory", unordered)]
ORDERS += [("marks", channels_last), ("numbers", channels_last), ("nothing", unordered)]  # no answer shows nothing


@pytest.mark.parametrize(("kind", "chosen"), ORDERS)
def test_the_order_is_kept_where_code_depends_on_it(kind: str, chosen: Any) -> None:
    torch.manual_seed(0)
    model, sample = Net(kind).eval(), torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        expected = model(sample)
        other, order = in_best_order(model, sample)
        found = other(order(sample))
        assert order_for(model, sample) is chosen
    assert order is chosen
    torch.testing.assert_close(found, expected)
    assert model.conv.weight.is_contiguous()


def test_large_images_are_evaluated_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "together", lambda model, inputs: 4)
    seen: list[bool] = []

    class Watched(Net):
        def forward(self, x: Tensor) -> Any:
            seen.append(x.is_contiguous())
            return super().forward(x)

    torch.manual_seed(0)
    model, images = Watched().eval(), torch.randn(12, 3, 9, 9)
    with torch.no_grad():
        targets = model(images).argmax(1)
    targets[:3] = (targets[:3] + 1) % 4  # three wrong ones
    seen.clear()
    assert evaluation.accuracy(model, (images, targets)).overall == 0.75
    assert seen == [True, False, False, False, False]  # the sample in both orders, then three parts


def test_other_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    assert in_best_order(model, torch.randn(1, 3, 2, 2)) == (model, unordered)
    assert order_for(model, torch.randn(1, 3, 2, 2)) is unordered


def test_a_repair_runs_channels_last_to_the_same_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:  # no first look
                seen.append(x.is_contiguous())
            return x

    torch.manual_seed(0)
    net = nn.Sequential(
        Watched(), nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 1, bias=False),
        nn.BatchNorm2d(24), nn.ReLU6(), nn.Conv2d(24, 24, 3, stride=2, groups=24), nn.ReLU(),
        nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ).eval()  # fmt: skip
    x = torch.randn(12, 3, 24, 24)
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    seen.clear()
    found = Repair("ridge", copies=2).examine(small, net, (x, None), progress=False)
    assert seen
    assert not any(seen)
    monkeypatch.setattr(reference, "order_for", lambda *_: unordered)
    seen.clear()
    plain = Repair("ridge", copies=2).examine(small, net, (x, None), progress=False)
    assert seen
    assert all(seen)
    assert found.layers == plain.layers
    assert found.divergence == pytest.approx(plain.divergence, rel=1e-3)
    for (name, a), b in zip(found.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
        assert a.is_contiguous()


class Turned(torch.autograd.Function):
    """A user's own function, whose gradient asks for the usual order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].view(len(gradients[0]), -1).view_as(gradients[0])


class Misread(Turned):
    """One whose gradient takes the numbers as they lie in the memory, as a kernel may."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].as_strided(gradients[0].shape, torch.empty(gradients[0].shape).stride()).contiguous()


class Trained(nn.Module):
    """A classifier that notes in which order its weights are while it is trained."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.conv, self.more, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.head, self.kind, self.noted = nn.Linear(8 * 25, 4), kind, list[bool]()
        if kind == "memory, no answer":  # as of a head that begins with zeros
            self.head.load_state_dict({name: tensor * 0 for name, tensor in self.head.state_dict().items()})

    def forward(self, x: Tensor) -> Any:
        if self.training and len(x) > 2:  # no first look
            self.noted.append(self.conv.weight.is_contiguous())
        y = self.conv(x).relu()
        function = {"gradient": Turned, "silent gradient": Misread}.get(self.kind)
        y = self.norm(self.more(function.apply(y) if function else y)).relu()
        if self.kind == "training" and self.training:
            y = y.view(len(x), -1).view(len(x), 8, 5, 5)
        if self.kind in ("memory", "memory, no answer"):
            y = torch.as_strided(y, y.shape, (y[0].numel(), y[0, 0].numel(), y.shape[-1], 1))
        return self.head(y.view(len(x), -1) if self.kind == "view" else y.flatten(1))


@pytest.mark.parametrize(
    ("kind", "bears", "learns"),
    [
        ("", True, True),
        ("view", False, False),
        ("memory", False, False),
        ("memory, no answer", True, False),
        ("gradient", True, False),
        ("silent gradient", True, False),
        ("training", True, False),
    ],
)
def test_training_is_in_the_usual_order_where_code_asks_for_it(kind: str, bears: bool, learns: bool) -> None:
    torch.manual_seed(0)
    model, x = Trained(kind).eval(), torch.randn(24, 3, 9, 9)
    y = torch.arange(24) % 4
    assert (bears_channels_last(model, x[:2]), learns_channels_last(model, x[:2])) == (bears, learns)
    before = copy.deepcopy(model.state_dict())
    first = Limits(only=["conv"])
    small = sc.prune(model, (x, None), "weight", remove=0.25, limits=first, repair=None, progress=False).model
    run = {"epochs": 2, "batch_size": 8, "lr": 0.01, "progress": False}
    found = sc.recover(small, model, (x, y), **run).model
    usual = sc.recover(small, model, (x, y), channels_last=False, **run).model
    assert set(usual.noted) == {True}
    assert set(found.noted) == {not (bears and learns)}
    for (name, a), b in zip(found.state_dict().items(), usual.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    for net in (found, usual, small, model):
        assert all(tensor.is_contiguous() for tensor in net.state_dict().values())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.noted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_number_formats_have_their_own_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9, dtype=dtype)
    assert bears_channels_last(Trained().to(dtype).eval(), x)
    assert not bears_channels_last(Trained("memory").to(dtype).eval(), x)


class Maps(nn.Module):
    """A map of classes, by weights of all dimensions, some of whose sizes are 1; and what else a model may do."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.conv, self.each = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.frames, self.head, self.kind = nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1)), nn.Conv2d(8, 4, 1), kind
        self.slow = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("places", torch.rand(1, 8, 1, 9, 9))

    def forward(self, x: Tensor) -> Tensor:
        y = self.each(self.conv(x).relu())
        if self.kind == "follows" and self.training:
            with torch.no_grad():
                self.slow.mul_(0.5).add_(self.each.bias + 1)
        y = self.frames(y[:, :, None] + self.places)[:, :, 0].relu() + self.slow.view(-1, 1, 1)
        found: Tensor = self.head(y)
        if self.training or self.kind not in ("boxes", "mask"):
            return found
        return found > 0 if self.kind == "mask" else found.flatten(2).transpose(1, 2)[:, :0]


def viewed(output: Tensor, targets: Tensor) -> Tensor:
    """A user's own loss."""
    return nn.functional.mse_loss(output.sigmoid().view(-1), targets.view(-1))


@pytest.mark.parametrize("kind", ["", "follows", "boxes", "mask", "ordered"])
def test_trained_maps_are_in_the_order_that_was_given(kind: str) -> None:
    torch.manual_seed(0)
    model, x, y = Maps(kind).eval(), torch.randn(12, 3, 9, 9), torch.rand(12, 4, 9, 9)
    if kind == "ordered":
        for conv in (model.conv, model.each, model.head):
            conv.to(memory_format=torch.channels_last)
    assert bears_channels_last(model, x[:2]) is (kind != "boxes")
    assert learns_channels_last(model, x[:2]) is (kind != "mask")
    run = {"epochs": 2, "batch_size": 4, "teacher": 0, "loss": viewed, "progress": False}
    found = sc.recover(model, None, (x, y), **run).model
    usual = sc.recover(model, None, (x, y), channels_last=False, **run).model
    for (name, a), b in zip(found.state_dict().items(), usual.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    for name, tensor in model.state_dict().items():
        assert found.state_dict()[name].stride() == tensor.stride(), name
    assert found.train()(x).stride() == model.train()(x).stride()


def test_a_look_writes_to_no_weight() -> None:
    model = Maps("follows")
    before = copy.deepcopy(model.state_dict())
    versions = [tensor._version for tensor in model.state_dict().values()]
    assert learns_channels_last(model, torch.randn(2, 3, 9, 9))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    others = [name for name, v in zip(before, versions, strict=True) if model.state_dict()[name]._version != v]
    assert others == ["slow"]  # which was written to, and is as it was


def test_a_view_that_fails_later_is_told_what_helps() -> None:
    class Later(Net):
        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)  # where a map is one number, any order is the usual one
            return self.head(y.view(len(x), y[0].numel()).unflatten(1, (8, -1)).mean(2))

    batches = [(torch.randn(4, 3, size, size), torch.arange(4)) for size in (3, 9)]
    run = {"epochs": 1, "teacher": 0, "progress": False}
    with pytest.raises(sc.errors.ForwardError, match="channels_last=False"):
        sc.recover(Later(), None, batches, **run)
    assert sc.recover(Later(), None, batches, channels_last=False, **run).history


def test_a_model_whose_numbers_became_too_large_is_in_the_order_that_was_given() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        model[0].weight.mul_(2000)
    with pytest.raises(sc.errors.TrainingError, match="infinite in float16") as caught:
        sc.recover(model.half(), None, (torch.randn(12, 3, 9, 9), torch.arange(12) % 8), teacher=0, progress=False)
    found = caught.value.result.model[0].weight
    assert found.dtype == torch.float32
    assert found.is_contiguous()


def test_inputs_that_point_into_others_are_looked_at_as_a_whole() -> None:
    """On a GPU, an index beyond the samples would end the process."""
    failed: list[str] = []

    class Chosen(Net):
        def forward(self, x: Tensor, chosen: Tensor) -> Any:
            if chosen.max() >= len(x):
                failed.append("index")
            return super().forward(x)[chosen]

    torch.manual_seed(0)
    batches = [((torch.randn(6, 3, 9, 9), torch.tensor([0, 5, 3])), torch.arange(3))] * 2
    found = sc.recover(Chosen(), Chosen(), batches, epochs=1, progress=False)
    assert found.history
    assert not failed
