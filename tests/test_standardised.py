"""Convolutions with standardised weights: what stays, and what may leave once the weights are numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from oracle import random_scores
from secateur.errors import UnsupportedModelError
from secateur.integrations.timm import plain_convolutions

layers = pytest.importorskip("timm.layers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = layers.ScaledStdConv2d(3, 8, 3)
        self.b = layers.ScaledStdConv2dSame(8, 6, 3, stride=2, padding="same")
        self.c = layers.StdConv2d(6, 10, 3, padding=1, groups=2, bias=True)
        self.d, self.head = layers.ScaledStdConv2d(10, 7, 1, bias=False), nn.Linear(7, 4)
        for part in (self.a, self.b, self.d):
            nn.init.uniform_(part.gain, 0.5, 2.0)

    def forward(self, x: Tensor) -> Any:
        for part in (self.a, self.b, self.c, self.d):
            x = part(x).relu()
        return self.head(x.mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    return Net().double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 17, 15, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_what_a_standardised_filter_reads_stays(net: nn.Module, images: Tensor) -> None:
    """Without an input, the mean and the deviation of the others are others: removal would not be masking."""
    graph = sc.analyze(net, images)
    stay = {layer.name: layer.reason for layer in graph.layers if not layer.prunable}
    assert set(stay) == {"a", "b", "head"}  # the groups of `c` are coupled to `b`
    assert all("standardises weights over it" in stay[name] for name in "ab")
    assert "plain_convolutions would free it" in stay["a"]
    small = sc.apply(net, sc.plan(graph, random_scores(graph, 0), remove=0.5))
    assert small.d.out_channels < 7  # filters may leave: each is standardised by itself


def test_plain_ones_answer_alike_and_all_may_leave(net: nn.Module, images: Tensor) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    plain = plain_convolutions(net)
    torch.testing.assert_close(plain(images), net(images), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [type(part) for part in (plain.a, plain.b, plain.c)] == [nn.Conv2d, layers.Conv2dSame, nn.Conv2d]
    graph = sc.analyze(plain, images)
    assert {layer.name for layer in graph.layers if layer.prunable} == {"a", "b", "d"}
    plan = sc.plan(graph, random_scores(graph, 0), remove=0.4)
    small = sc.apply(plain, plan)
    for name, part in net.named_children():  # in the network as it was, channels that left become 0
        members = [m for group in plan.groups for m in graph.members(group)]
        gone = [i for m in members if (m.parameter, m.dim) == (f"{name}.weight", 0) for i in m.indices]
        part.register_forward_hook(
            lambda m, x, out, gone=gone: out.index_fill(1, torch.tensor(gone, dtype=torch.long), 0)
        )
    for x in (images, images[:1, :, :12, :13]):
        torch.testing.assert_close(small(x), net(x), rtol=1e-10, atol=1e-10)


def test_layers_that_do_more_are_refused() -> None:
    class Twice(layers.ScaledStdConv2d):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedModelError, match="Twice is not a convolution") as caught:
        plain_convolutions(nn.Sequential(nn.ReLU(), Twice(3, 4, 3)))
    assert caught.value.where == "1"


def test_plain_layers_and_others_stay_as_they_are() -> None:
    net = nn.Sequential(layers.Conv2dSame(3, 4, 3), nn.Conv2d(4, 4, 1))
    found = plain_convolutions(net)
    assert [type(part) for part in found] == [layers.Conv2dSame, nn.Conv2d]
    assert isinstance(plain_convolutions(layers.StdConv2d(3, 4, 3)), nn.Conv2d)
