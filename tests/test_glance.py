"""The quick way to verify: it accepts what is right, and nothing else."""

from __future__ import annotations

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.errors import VerificationError
from secateur.plans.plan import Plan
from secateur.surgery import glance
from secateur.surgery import verify as rule
from secateur.surgery.cut import cut
from secateur.surgery.mask import mask
from secateur.surgery.probes import corners

SIZE = 128  # parts are cut out of images of this size and more


class Plain(nn.Module):
    """Convolutions with and without biases, one per channel, in groups; batch norms; a linear layer."""

    def __init__(self, head: float = 1.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2), nn.BatchNorm2d(12), nn.Hardswish())
        self.wide = nn.Sequential(nn.Conv2d(12, 24, 1, bias=False), nn.BatchNorm2d(24), nn.GELU())
        self.alone = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24))
        self.grouped = nn.Conv2d(24, 16, 3, groups=4)
        self.back = nn.Conv2d(16, 12, 3, padding=1)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Linear(12, 20), nn.SiLU(), nn.Linear(20, 5))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        with torch.no_grad():
            self.head[2].weight *= head
            self.head[2].bias *= head

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.alone(self.wide(self.stem(x))))
        return self.head(self.pool(F.gelu(self.back(x))).flatten(1))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A convolution that is called twice, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.other = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.other.weight, self.last = self.twice.weight, nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        return self.last(x + F.pad(self.other(self.twice(self.twice(x))), (3, 3, 3, 3)))  # type: ignore[no-any-return]


class Twins(nn.Module):
    """Two branches of one width, which are added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.a(x) + self.b(x)))  # type: ignore[no-any-return]


def planned(model: nn.Module, dtype: torch.dtype = torch.float32, remove: float = 0.4) -> tuple[Plan, Tensor]:
    example = torch.randn(1, 3, SIZE, SIZE, dtype=dtype)
    graph = sc.analyze(model, example)
    return sc.plan(graph, sc.score(model, None, "weight", graph=graph), remove=remove), example


def accepted(model: nn.Module, small: nn.Module, plan: Plan, example: Tensor, wide: torch.dtype | None = None) -> bool:
    return glance.accepts(model, small, plan, example, lambda probe: (wide or torch.float64,))


NETS = {"plain": Plain, "twins": Twins}


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_a_removal_is_accepted(name: str, kind: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    model = NETS[name]().eval().to(kind)
    plan, example = planned(model, kind)
    assert plan.cuts
    assert accepted(model, cut(model, plan), plan, example, wide)


@pytest.mark.parametrize("name", NETS)
def test_what_is_masked_is_the_masked_model(name: str) -> None:
    torch.manual_seed(0)
    model: Any = NETS[name]().eval()
    plan, example = planned(model)
    probe = next(iter(corners(example)))
    expected = mask(model, plan).double()(probe.inputs.double())
    with torch.no_grad():
        (made,) = glance._masked(model, plan, torch.float64).run(probe.inputs.double(), plan.output)
    assert torch.allclose(made, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(made, model.double()(probe.inputs.double()), rtol=1e-3)


def test_a_forward_that_writes_to_its_input() -> None:
    class Writes(Twins):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(0.5))

    torch.manual_seed(0)
    model = Writes().eval()
    plan, example = planned(model)
    for wide in (torch.float64, torch.float32):
        assert accepted(model, cut(model, plan), plan, example, wide)


def test_a_weight_that_is_shared() -> None:
    torch.manual_seed(0)
    model = Tied().eval()
    plan, example = planned(model)
    small = cut(model, plan)
    rule.verify(model, small, plan, example)
    with torch.no_grad():
        small.other.bias[0] += 0.01  # type: ignore[union-attr, operator, index]
    assert not accepted(model, small, plan, example)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
@pytest.mark.parametrize("head", [1.0, 0.0])
def test_a_number_that_is_wrong_is_found(head: float, wide: torch.dtype) -> None:
    """Every tensor, one number of each; also where the output is 0 whatever happens before."""
    torch.manual_seed(0)
    model: Any = Plain(head).eval()
    plan, example = planned(model)
    small = cut(model, plan)
    assert accepted(model, small, plan, example, wide)
    for name, tensor in [*small.named_parameters(), *small.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        wrong = copy.deepcopy(small)
        with torch.no_grad():
            dict([*wrong.named_parameters(), *wrong.named_buffers()])[name].reshape(-1)[0] += 0.05
        assert not accepted(model, wrong, plan, example, wide), name
        with pytest.raises(VerificationError):
            rule.verify(model, wrong, plan, example)


def test_units_in_another_order_are_found() -> None:
    torch.manual_seed(0)
    model = Twins().eval()
    plan, example = planned(model)
    small = cut(model, plan)
    with torch.no_grad():
        small.a.weight.copy_(small.a.weight.flip(0))  # type: ignore[union-attr, operator]
    assert not accepted(model, small, plan, example)


def test_only_the_code_that_was_analysed() -> None:
    class Other(Twins):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.silu(self.a(x) + self.b(x) + self.a.weight.mean()))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, other = Twins().eval(), Other().eval()
    plan, example = planned(model)
    assert accepted(model, cut(model, plan), plan, example)
    other.load_state_dict(model.state_dict())
    assert not accepted(other, cut(other, plan), plan, example)
    changed = copy.deepcopy(model)
    changed.last.forward = changed.last.forward  # type: ignore[method-assign]
    assert not accepted(changed, cut(changed, plan), plan, example)
    assert not accepted(model, cut(model, plan), plan, example.clone()), "another example was not analysed"
    hooked = copy.deepcopy(model)
    hooked.a.register_forward_hook(lambda module, args, output: output * module.weight.mean())
    assert not accepted(hooked, cut(hooked, plan), plan, example), "who knows what a hook reads"
    assert not sc.analyze(other, example).plain, "it reads a weight"


def test_a_smaller_model_that_does_not_run() -> None:
    """Not even where a larger part of the example would do."""

    class Picky(Twins):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] < 64:
                raise ValueError("too small")
            return super().forward(x)

    torch.manual_seed(0)
    model = Twins().eval()
    plan, example = planned(model)
    small = cut(model, plan)
    small.__class__ = Picky
    assert min(probe.inputs.shape[-1] for probe in corners(example)) < 64
    assert not accepted(model, small, plan, example)


def test_a_plan_needs_no_classes_of_the_model() -> None:
    """Nobody can pickle a class that is defined in a function."""

    class Local(Twins):
        pass

    torch.manual_seed(0)
    model = Local().eval()
    plan, example = planned(model)
    assert plan.graph is not None
    assert plan.graph.plain
    read = pickle.loads(pickle.dumps(plan))
    assert not read.graph.plain
    assert torch.equal(sc.apply(model, read)(example), sc.apply(model, plan)(example))


@pytest.mark.parametrize("training", [False, True])
def test_noise_is_not_for_a_glance(training: bool) -> None:
    class Noisy(Twins):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(self.a(x) + self.b(x), 0.5, training=bool(training)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Noisy().eval()
    example = torch.randn(1, 3, SIZE, SIZE)
    assert bool(sc.analyze(model, example).plain) is not training


def test_nothing_is_left_on_either_model() -> None:
    torch.manual_seed(0)
    model = Twins().train()
    plan, _ = planned(model)
    before = [dict(vars(module)) for module in model.modules()]
    small = sc.apply(model, plan)
    for module, state in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == state.keys()
        assert all(vars(module)[key] is value for key, value in state.items())
    for module in small.modules():
        assert "forward" not in vars(module)
        assert module.training
        assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in module.parameters())
    drawn = torch.get_rng_state()
    sc.apply(model, plan)
    assert torch.equal(drawn, torch.get_rng_state())


def centred(self: Any, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """A convolution whose filters have the mean 0, which depends on how many channels they read."""
    weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, weight, self.bias, self.stride, self.padding)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_replaces_torchs_own(name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Twins().eval()
    plan, example = planned(model)
    monkeypatch.setattr(nn.Conv2d, name, centred)
    if when == "before":  # of the analysis
        plan, example = planned(model)
        small = sc.apply(model, plan)
        expected = mask(model, plan)(example)
        assert torch.allclose(small(example), expected, rtol=1e-4, atol=1e-5)
    else:
        assert not accepted(model, cut(model, plan), plan, example)
        with pytest.raises(VerificationError):
            sc.apply(model, plan)


def test_a_convolution_with_code_of_its_own() -> None:
    """As people do to make a network tile its images."""
    torch.manual_seed(0)
    model: Any = Twins().eval()
    plan, example = planned(model)
    model.last._conv_forward = MethodType(centred, model.last)
    assert not accepted(model, cut(model, plan), plan, example)
    with pytest.raises(VerificationError):
        sc.apply(model, plan)
    plan, example = planned(model)
    small = sc.apply(model, plan)
    assert torch.allclose(small(example), mask(model, plan)(example), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["stem.0", "stem.1", "head.0"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_that_is_a_buffer(path: str, name: str) -> None:
    torch.manual_seed(0)
    model = Plain().eval()
    layer = model.get_submodule(path)
    value = layer._parameters.pop(name)
    assert value is not None
    layer.register_buffer(name, value.detach() + 1)
    plan, example = planned(model)
    small = sc.apply(model, plan)
    assert torch.allclose(small(example), mask(model, plan)(example), rtol=1e-4, atol=1e-5)
    wrong: Any = copy.deepcopy(small)
    wrong.get_submodule(path)._buffers[name].reshape(-1)[0] += 1
    assert not accepted(model, wrong, plan, example)
