"""What makes analysis and verification faster must not change what they find."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import secateur as sc
from oracle import fingerprint, outputs, random_scores, relative_gap, same, zeroed
from secateur.plans import Limits
from secateur.running.copies import named_modules, named_parameters, named_tensors, set_mode, unchanged
from secateur.running.observer import Observer
from secateur.surgery import forwards
from secateur.surgery.precision import Precise, depthwise

IMAGE = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two convolutions; `rate` of dropout between them, and `way`: whose mode the code asks for."""

    def __init__(self, rate: float = 0.0, way: str = "own") -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.rate, self.way = rate, way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.rate > 0:
            x = F.dropout(x, self.rate, self.training if self.way == "own" else self.second.training)
        return self.last(self.second(x).relu().mean((2, 3)))


class OfAnother(Net):
    """Asks another module, which nobody could tell."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0 if not self.first.training else x)


class Quiet(nn.Module):
    """Names its own mode for a dropout that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.rate = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.rate > 0:
            x = F.dropout(x, self.rate, self.training)
        return self.last(x)


def modes_verified(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """In which modes a removal is verified."""
    modes: set[bool] = set()
    plain = forwards.Net.run

    def run(self: Any, probe: Any, *args: Any, **kwargs: Any) -> Any:
        modes.add(probe.training)
        return plain(self, probe, *args, **kwargs)

    monkeypatch.setattr(forwards.Net, "run", run)
    graph = sc.analyze(net.eval(), torch.rand(1, 3, 64, 64))
    sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.5))
    return modes


def test_code_that_names_the_mode_is_verified_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it asks this time."""
    assert modes_verified(Quiet(), monkeypatch) == {False, True}


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_densenet_does_the_same_in_training(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("torchvision.models")
    net = models.DenseNet(4, (2, 2), 8, drop_rate=rate, num_classes=5)
    assert modes_verified(net, monkeypatch) == {False}
    calls = []
    for mode in (False, True):
        with Calls(net.train(mode)) as seen, torch.no_grad():
            net(torch.rand(2, 3, 64, 64))
        calls.append([name for name in seen.names if name != "add_"])  # batch norms count batches
    assert "batch_norm" in calls[0]
    assert calls[0] == calls[1]


class Calls(Observer):
    """Which functions a forward calls, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Twice(nn.Module):
    """In training it also returns what two layers make together. `Quiet` inside names its own mode, and never asks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.quiet, self.left, self.right = (
            nn.Conv2d(3, 6, 3),
            Quiet(),
            nn.Conv2d(4, 8, 1),
            nn.Conv2d(4, 8, 1),
        )
        self.quiet.first, self.last, self.flag = nn.Conv2d(6, 8, 3), nn.Conv2d(16, 4, 1), False

    def learns(self) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        x = self.quiet(self.first(x).relu())
        left, right = self.left(x), self.right(x)
        made = self.last(torch.cat([left, right], 1).relu())
        return (made, left + right) if self.learns() else made


class BySwitch(Twice):
    def train(self, mode: bool = True) -> BySwitch:
        self.flag = mode
        return super().train(mode)

    def learns(self) -> bool:
        return self.flag


def _mode(module: nn.Module) -> bool:
    return module.training


class ByFunction(Twice):
    def learns(self) -> bool:
        return _mode(self)


class ByFunctionOfPart(Twice):
    def learns(self) -> bool:
        return _mode(self.last)


class ByWord(Twice):
    def learns(self) -> bool:
        return bool(getattr(self.last, "training"))  # noqa: B009


class ByTable(Twice):
    def learns(self) -> bool:
        return bool(vars(self)["training"])


class ByProperty(Twice):
    @property
    def mode(self) -> bool:
        return self.training

    def learns(self) -> bool:
        return self.mode


class ByCount(Twice):
    """Asks from the second time on."""

    def learns(self) -> bool:
        self.flag, before = True, self.flag
        return before and self.training


def _learns(module: nn.Module, args: Any, output: Any) -> None:
    module.flag = module.training


class ByHook(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_hook(_learns)

    def learns(self) -> bool:
        return bool(self.last.flag)


@pytest.mark.parametrize("kind", [BySwitch, ByFunction, ByFunctionOfPart, ByWord, ByTable, ByProperty, ByCount, ByHook])
def test_what_training_adds_is_seen_however_the_mode_is_asked_for(kind: type[Twice]) -> None:
    """Else two layers that are added up only in training would lose different units."""
    net = kind().eval()
    graph = sc.analyze(net, IMAGE)
    plan = sc.plan(graph, random_scores(graph), remove=0.4)
    small, masked = sc.apply(net, plan).train(), zeroed(net, graph, plan).train()
    for _ in range(2):
        made, wanted = outputs(small, IMAGE), outputs(masked, IMAGE)
    assert len(made) == 1 + isinstance(masked(IMAGE), tuple)
    assert relative_gap(made, wanted) < 1e-4


class OfItsType(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if type(self) is OfItsType else x[:, :, 1:])


def _of_type(module: nn.Module) -> bool:
    return module.__class__ is OfItsTypeElsewhere


class OfItsTypeElsewhere(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if _of_type(self) else x[:, :, 1:])


@pytest.mark.parametrize("kind", [OfItsType, OfItsTypeElsewhere])
def test_code_that_looks_at_types_sees_its_own(kind: type[Quiet]) -> None:
    found = sc.analyze(kind().eval(), IMAGE)
    assert [layer.name for layer in found.layers if layer.prunable] == ["first"]
    assert found.cost == sc.analyze(Quiet().eval(), IMAGE).cost


class Shared(Quiet):
    """Copies have it too, not a copy of it."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self

    def forward(self, x: Tensor) -> Tensor:
        kinds.append(kind_of(self))
        return super().forward(x)


kinds: list[type] = []
kind_of = attrgetter("__class__")  # what nobody looks into


def test_parts_of_the_model_itself_never_get_another_class() -> None:
    kinds.clear()
    sc.analyze(nn.Sequential(nn.Conv2d(3, 3, 1), Shared()).eval(), IMAGE)
    assert {kind is Shared for kind in kinds} == {True}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last((x + self.inner(x.relu())).mean((2, 3)))


def test_blocks_are_tried_out_when_they_are_asked_for() -> None:
    net = Residual().eval()
    graph = sc.analyze(net, IMAGE)
    sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    assert graph.trial is not None
    assert "blocks" not in vars(graph)
    (block,) = graph.blocks
    assert block.prunable
    assert "blocks" in vars(graph)
    frozen = graph.frozen({block.name: "I say so"})
    assert frozen.trial is None
    assert [b.reason for b in frozen.blocks] == ["I say so"]
    early = sc.analyze(net, IMAGE).frozen({block.name: "I say so"})
    assert [b.reason for b in early.blocks] == ["I say so"]
    scores = sc.score(net, None, "weight", graph=graph)
    small = sc.apply(net, sc.plan(graph, scores, remove=0.5, limits=Limits(blocks=True)))
    assert small(IMAGE).shape == (2, 4)


class Once(Residual):
    """Computes something at the first forward, and keeps it."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.ones_like(x)
        return super().forward(x * self.kept)


def test_a_copy_that_kept_something_is_not_tried_again() -> None:
    graph = sc.analyze(Once().eval(), IMAGE)
    assert graph.trial is not None
    assert vars(graph.trial.keywords["copy"]).get("kept") is None
    assert all(block.prunable for block in graph.blocks)


class Remembering(nn.Module):
    """Keeps what it made: in a list, or on an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.held = nn.Conv2d(8, 8, 3, padding=1), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.held:
            self.held.append(self.inner(x))
        return self.held[0]


class RememberingElsewhere(Remembering):
    def __init__(self) -> None:
        super().__init__()
        self.notes = SimpleNamespace(made=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.notes.made is None:
            self.notes.made = self.inner(x)
        return self.notes.made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Remembering, RememberingElsewhere])
def test_a_copy_that_filled_a_list_is_not_tried_again(kind: type[Remembering]) -> None:
    net = Residual()
    net.inner = kind()  # type: ignore[assignment]
    graph = sc.analyze(net.eval(), IMAGE)
    assert isinstance(graph.trial, partial)
    kept = vars(graph.trial.keywords["copy"].inner)
    assert not kept["held"]
    assert "notes" not in kept or kept["notes"].made is None


@pytest.mark.parametrize("size", [(7, 9), (3, 1), (12, 4)])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (1, 3)])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 1, 1), ((2, 1), (2, 1), 1), ([2], 4, (2, 2)), (1, 2, 2)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_depthwise_convolutions_tap_by_tap(
    size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, bias: bool
) -> None:
    x, weight = torch.randn(2, 12, *size, dtype=torch.float64), torch.randn(12, 1, *kernel, dtype=torch.float64)
    shift = torch.randn(12, dtype=torch.float64) if bias else None
    try:
        wanted = F.conv2d(x, weight, shift, stride, padding, dilation, 12)
    except RuntimeError:  # the kernel is larger than the image
        assert depthwise(x, weight, shift, stride, padding, dilation, 12) is None
        return
    made = depthwise(x, weight, shift, stride, padding, dilation, 12)
    assert made is not None
    assert made.is_contiguous() == wanted.is_contiguous()
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def _formats(t: Tensor) -> list[Tensor]:
    wide = torch.randn(*t.shape[:2], 2 * t.shape[2], t.shape[3], dtype=t.dtype)
    return [t, t.to(memory_format=torch.channels_last), wide[:, :, ::2], t.mT.contiguous().mT, t[:1].expand(t.shape)]


@pytest.mark.parametrize("size", [(1, 1), (5, 6), (1, 6)])
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (1, 1), (3, 1), (3, 2)])
def test_depthwise_convolutions_have_the_format_of_torch_and_write_nothing(
    size: Any, kernel: int, padding: int
) -> None:
    """A bias of one image of one pixel is as large as the output: adding to it in place changed the user's model."""
    shift, count = torch.randn(8, dtype=torch.float64), 0
    for batch in (1, 2):
        for x in _formats(torch.randn(batch, 8, *size, dtype=torch.float64)):
            for weight in _formats(torch.randn(8, 1, kernel, kernel, dtype=torch.float64)):
                before = [t.clone() for t in (x, weight, shift)]
                made = depthwise(x, weight, shift, 1, padding, 1, 8)
                assert all(map(torch.equal, before, (x, weight, shift)))
                if made is not None:
                    wanted = F.conv2d(x, weight, shift, 1, padding, 1, 8)
                    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
                    lines = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (made, wanted)]
                    assert lines[0] == lines[1]
                    count += 1
    assert count or size == (1, 1)


class Spelt(nn.Module):
    """A depthwise convolution of one pixel that is called with names; `view` needs channels side by side."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.first, self.deep, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 4)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = F.conv2d(input=x, weight=self.deep.weight, bias=self.deep.bias, padding=1, groups=len(self.deep.weight))
        return self.last(x.permute(0, 2, 3, 1).view(len(x), -1, x.shape[1]).mean(1) if self.view else x.mean((2, 3)))


@pytest.mark.parametrize("view", [False, True])
def test_a_depthwise_convolution_by_the_names_of_its_arguments(view: bool) -> None:
    net, x = Spelt(view).double().eval(), torch.rand(1, 3, 1, 1, dtype=torch.float64)
    if view:
        net, x = net.to(memory_format=torch.channels_last), torch.rand(2, 3, 9, 9, dtype=torch.float64)
        x = x.to(memory_format=torch.channels_last)
    before = fingerprint(net)
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, random_scores(graph), remove=0.4)
    small = sc.apply(net, plan)
    assert same(before, fingerprint(net))
    assert relative_gap(outputs(small, x), outputs(zeroed(net, graph, plan), x)) < 1e-10


def test_other_convolutions_are_left_to_torch() -> None:
    x = torch.randn(2, 12, 6, 6, dtype=torch.float64)
    assert depthwise(x, torch.randn(12, 12, 3, 3, dtype=torch.float64)) is None
    assert depthwise(x, torch.randn(24, 1, 3, 3, dtype=torch.float64), groups=12) is None
    assert depthwise(x, torch.randn(12, 1, 3, 3, dtype=torch.float64), padding="same", groups=12) is None
    assert depthwise(x[0], torch.randn(12, 1, 3, 3, dtype=torch.float64), groups=12) is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({"a": nn.Sequential(shared, nn.BatchNorm1d(4)), "b": shared})
        self.nothing, self.own = None, nn.Parameter(torch.zeros(2))
        self.register_buffer("held", self.parts["b"].weight)


def test_walks_are_those_of_torch() -> None:
    net = Tied()
    for _ in range(2):
        assert named_modules(net) == list(net.named_modules())
        wanted = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        own = {id(parameter) for parameter in net.parameters()}
        wanted = {name: t for name, t in wanted.items() if name in dict(net.named_parameters()) or id(t) not in own}
        assert [(n, id(t)) for n, t in named_tensors(net)] == [(n, id(t)) for n, t in wanted.items()]
        assert [n for n, _ in named_parameters(net)] == [n for n, _ in net.named_parameters()]
    with unchanged(net):
        before = named_modules(net)
        with unchanged(net):
            assert named_modules(net) is before
        assert named_modules(net) is before
    net.more = nn.ReLU()
    assert named_modules(net)[-1][0] == "more"


class Stubborn(nn.Module):
    """Never trains."""

    def train(self, mode: bool = True) -> Stubborn:
        return super().train(False)


class Hidden(nn.Module):
    """Has a part that never changes its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.frozen = nn.Dropout(), nn.BatchNorm1d(4).eval()

    def children(self) -> Iterator[nn.Module]:
        return iter([self.own])


def _frozen() -> nn.Module:
    """Batch norms as people freeze them: the instances have a method of their own."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)).eval()
    vars(net[1])["train"] = lambda mode=True: net[1]
    vars(net[2])["eval"] = lambda: net[2]
    return net


def test_modes_are_set_as_torch_does() -> None:
    for made in (Tied, lambda: nn.Sequential(nn.Dropout(), Stubborn()), Hidden, _frozen):
        net, other = made(), made()
        for training in (True, False):
            set_mode(net, training)
            other.train(training)
            assert [m.training for m in net.modules()] == [m.training for m in other.modules()]


class HardExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.last = nn.Conv2d(3, 8, 1), nn.Linear(8, 3), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        best, y = self.gate(x.mean((2, 3))).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = torch.where(best == i)[0]
            y[at] = expert(x[at])
        return self.last((y + x).mean((2, 3)))


def test_an_expert_that_sees_no_sample() -> None:
    """One image for three experts: two of them make tensors without numbers."""
    graph = sc.analyze(HardExperts().eval(), IMAGE[:1])
    assert len(graph.layers)


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_masked_product_of_few_inputs_and_of_many(rows: int, dims: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, rows, 12), torch.randn(8, 12), torch.randn(8)
    gone = {dim: torch.tensor([0, 3, 7]) for dim in dims}
    masked = weight.clone()
    for dim, places in gone.items():
        masked.index_fill_(dim, places, 0)
    for shift in (None, bias):
        with Precise(torch.float64, (), {id(weight): gone}):
            made = F.linear(x, weight, shift)
        expected = F.linear(x.double(), masked.double(), None if shift is None else shift.double())
        assert made.dtype == torch.float64
        assert torch.allclose(made, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 4), (2, 7)])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_taps_that_meet_nothing_but_padding(size: tuple[int, int], stride: int, dilation: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 12, *size, dtype=torch.float64), torch.randn(12, 1, 5, 3, dtype=torch.float64)
    padding = (2 * dilation + 1, 2 * dilation)
    expected = F.conv2d(x, weight, None, stride, padding, dilation, 12)
    made = depthwise(x, weight, None, stride, padding, dilation, 12)
    assert made is None or torch.allclose(made, expected, rtol=1e-12, atol=1e-12)
    assert made is not None or size == (1, 1)
