"""Copies of models: the same in every respect, sharing nothing that can change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from constructs import CONSTRUCTS, build
from secateur.running.copies import copy_with, named_modules, named_tensors
from secateur.surgery.mask import mask, reference


def copied(model: nn.Module) -> nn.Module:
    return copy_with(model, lambda name, old: old.detach().clone())


def alike(a: Any, b: Any, seen: set[tuple[int, int]], path: str = "") -> None:
    """Raise unless two objects have the same types, keys and values all the way down."""
    if (id(a), id(b)) in seen:
        return
    seen.add((id(a), id(b)))
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert torch.equal(a, b), path
        assert a.requires_grad == b.requires_grad, path
        assert a.data_ptr() != b.data_ptr() or not a.numel(), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            alike(a[key], b[key], seen, f"{path}.{key}")
    elif isinstance(a, tuple | list):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            alike(x, y, seen, f"{path}[{i}]")
    elif isinstance(a, nn.Module):
        assert a is not b, path
        alike(vars(a), vars(b), seen, path)
    elif isinstance(a, int | float | str | bool | type(None)):
        assert a == b, path


@pytest.mark.parametrize("name", sorted(CONSTRUCTS))
def test_as_deepcopy(name: str) -> None:
    model = build(name)[0]
    made, wanted = copied(model), copy.deepcopy(model)
    alike(wanted, made, set())
    alike(model, made, set())
    assert not {id(m) for m in made.modules()} & {id(m) for m in model.modules()}


class Odd(nn.Module):
    """Attributes of many kinds, a cycle, a method of another module, a shared list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.same = self.inner
        vars(self.inner)["parent"] = self
        self.call = self.inner.forward
        self.sizes = [1, 2]
        self.more = {"sizes": self.sizes, "none": None}
        self.fixed = (4, (5, [6]))
        self.dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.call(x)
        return out


def test_odd_attributes() -> None:
    net = Odd()
    made = copied(net)
    assert isinstance(made, Odd)
    assert made.inner is made.same
    assert vars(made.inner)["parent"] is made
    assert made.call.__self__ is made.inner
    assert made.sizes == [1, 2]
    assert made.sizes is not net.sizes
    assert made.more["sizes"] is made.sizes
    assert made.fixed == (4, (5, [6]))
    assert made.fixed[1][1] is not net.fixed[1][1]
    with torch.no_grad():
        made.inner.weight.zero_()
    assert not torch.equal(made(torch.ones(1, 3)), net(torch.ones(1, 3)))


class Own(nn.Linear):
    """A class that says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        made = Own(self.in_features, self.out_features)
        made.note = "made by itself"
        return made


def test_classes_with_their_own_way() -> None:
    made = copied(nn.Sequential(Own(2, 2), nn.ReLU()))
    assert made[0].note == "made by itself"


def test_recurrent_layers_keep_their_flat_weights() -> None:
    net = nn.LSTM(3, 4)
    made = copied(net)
    assert isinstance(made, nn.LSTM)
    assert all(flat is named for flat, named in zip(made._flat_weights, made.parameters(), strict=True))
    assert torch.equal(made(torch.ones(2, 1, 3))[0], net(torch.ones(2, 1, 3))[0])


def test_hooks_are_copied_like_torch_does() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, args, output: output * 0)
    assert not copied(net)(torch.ones(1, 2)).any()


@pytest.mark.parametrize("name", sorted(CONSTRUCTS))
def test_names_as_torch_gives_them(name: str) -> None:
    model = build(name)[0]
    assert [(n, id(m)) for n, m in named_modules(model)] == [(n, id(m)) for n, m in model.named_modules()]
    wanted = [(n, id(t)) for n, t in [*model.named_parameters(), *model.named_buffers()]]
    assert [(n, id(t)) for n, t in named_tensors(model)] == wanted


def test_the_reference_of_a_verification_is_the_mask_and_shares_only_what_stays() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 2, 1)).eval()
    graph = sc.analyze(net, torch.randn(1, 3, 8, 8))
    plan = sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5)
    have, want, own = reference(net, plan).state_dict(), mask(net, plan).state_dict(), net.state_dict()
    parameters = dict(net.named_parameters())
    assert have.keys() == want.keys()
    for name in want:
        assert torch.equal(have[name], want[name])
        assert want[name].data_ptr() != own[name].data_ptr()
        shared = have[name].data_ptr() == own[name].data_ptr()
        assert shared == (name in parameters and name not in plan.cuts)
    assert any(name not in plan.cuts for name in parameters)
