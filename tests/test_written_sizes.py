"""Sizes that only the code of a forward holds: literals, and widths divided by a number of heads."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from oracle import random_scores
from test_by_construction import exact, reasons


class Flat(nn.Module):
    """A classifier as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.c, self.last = nn.Linear(192, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.b(self.a(x).relu()).relu(), 4)
        return self.last(self.c(x.view(-1, 192)).relu())


class Listed(Flat):
    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.b(self.a(x).relu()).relu(), 4)
        return self.last(self.c(torch.reshape(x, (len(x), 192))).relu())


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Inherited(Base):
    """`super()` needs the class of the forward; the default of an argument, its value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 0.5, *, shift: float = 1.0) -> Tensor:
        return self.last(super().forward(self.a(x)).mean((2, 3)).reshape([-1, 8]) * scale + shift)


class Attention(nn.Module):
    """The width of a head is that of the stream divided by their number."""

    def __init__(self, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class Former(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Attention() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.mean(1))


class Streams(nn.Module):
    """Each reshape takes the size of another layer, which may lose other units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.less, self.out = nn.Linear(5, 12), nn.Linear(12, 6), nn.Linear(12, 3)
        self.a, self.b, self.c, self.d = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, left, right = self.stem(x), self.a(x), self.b(x)
        twice = self.less(y).unsqueeze(3).expand(-1, -1, -1, 2).reshape(y.shape)
        return self.out(twice) + self.c(left.view(-1, right.shape[-1]).view(left.shape)) + self.d(right)


class Pooled(nn.Module):
    """The size is that of channels times places, computed from the input's: nobody else may set it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, high, wide = x.shape
        y = self.a(x).view(batch, 8 * high * wide).relu()
        return self.last(y.view(batch, -1, high, wide)).mean((2, 3))


class Scaled(Attention):
    """Here the divided width is a number that counts."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (C // self.heads) ** -0.5).softmax(-1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


IMAGE, TOKENS = (2, 3, 16, 16), (2, 6, 5)


def given(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "shape", "other", "units"),
    [
        (Flat, IMAGE, (3, 3, 24, 16), 8 + 12 + 10),
        (Listed, IMAGE, (3, 3, 24, 16), 8 + 12 + 10),
        (Inherited, IMAGE, (3, 3, 24, 16), 8),
        (Former, TOKENS, (1, 9, 5), 16 * 3 + 4 * 2),
        (Streams, TOKENS, (1, 9, 5), 12 + 6 + 8 + 8),
    ],
)
def test_sizes_in_the_code_follow(kind: type[nn.Module], shape: Any, other: Any, units: int) -> None:
    graph = exact(kind(), given(shape), given(other))
    assert graph.total_units == units, str(graph)


def test_sizes_that_grow_with_the_image_stay() -> None:
    assert "a size is written into the forward" in reasons(exact(Pooled(), given(IMAGE)))["a"]


def test_a_width_that_is_a_factor_stays() -> None:
    net = nn.Sequential(nn.Linear(5, 16), Scaled(), nn.Linear(16, 3))
    assert not exact(net, given(TOKENS)).layers[0].prunable


def pruned(remove: float = 0.5) -> tuple[nn.Module, nn.Module]:
    net = Former().double().eval()
    graph = sc.analyze(net, given(TOKENS))
    return net, sc.apply(net, sc.plan(graph, random_scores(graph, 0), remove=remove))


def test_a_smaller_model_is_saved_copied_pickled_and_trained(tmp_path: Path) -> None:
    _, small = pruned()
    x = given((3, 7, 5))
    sc.save(small, tmp_path / "small")
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    others = [sc.load(tmp_path / "small", Former().double()).eval(), copy.deepcopy(small)]
    others.append(torch.load(file, weights_only=False))
    for other in others:
        assert torch.equal(other(x), small(x))
        owner = other.blocks[0].forward.module  # type: ignore[union-attr]
        assert owner is other.blocks[0]  # not that of the model it was copied from
    small.train()(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_a_smaller_model_is_exported_and_compiled(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    _, small = pruned()
    small = small.float()
    sc.export(small, tmp_path / "small.onnx", torch.rand(2, 6, 5))  # compares, on another number of samples too
    x = torch.rand(2, 6, 5)
    made = torch.compile(small, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(made, small(x))


def test_a_smaller_model_is_pruned_again(tmp_path: Path) -> None:
    net, small = pruned(0.25)
    graph = sc.analyze(small, given(TOKENS))
    smaller = sc.apply(small, sc.plan(graph, random_scores(graph, 1), remove=0.3))
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in small.parameters())
    sc.save(smaller, tmp_path / "small")
    again = sc.load(tmp_path / "small", Former().double()).eval()
    assert torch.equal(again(given((3, 7, 5))), smaller(given((3, 7, 5))))
    data = (given((8, 6, 5)).float(), torch.arange(8) % 3)
    result = sc.prune(net.float(), data, remove=0.5, progress=False)
    assert result.model(data[0]).isfinite().all()


def test_plans_name_a_forward_that_is_not_there() -> None:
    net = Former().double().eval()
    graph = sc.analyze(net, given(TOKENS))
    plan = sc.plan(graph, random_scores(graph, 0), remove=0.5)
    net.blocks[0].forward = lambda x: x  # type: ignore[method-assign, assignment]
    with pytest.raises(sc.errors.PlanError, match=r"sizes in the code of `blocks\.0`"):
        sc.apply(net, plan)


# -- parts of a width --------------------------------------------------------------------------------------------------
class Places(nn.Module):
    """Attention over the places of an image, as YOLO has it: the stream's width is used for that of all heads."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        q, k, v = self.qkv(x).view(B, self.num_heads, 3 * self.head_dim, H * W).split([self.head_dim] * 3, dim=2)
        return self.proj((v @ (q.transpose(-2, -1) @ k).softmax(-1).transpose(-2, -1)).view(B, C, H, W))


class Halves(nn.Module):
    """One half of the channels passes by, the other meets attention: the size of a half is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.attention = 8, Places()
        self.a, self.b, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).split((self.c, self.c), dim=1)
        return self.last(self.b(torch.cat((a, b + self.attention(b)), 1)).relu().mean((2, 3)))


def test_halves_of_a_width_shrink_together() -> None:
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    graph = exact(Halves(), x, torch.randn(3, 3, 4, 7, dtype=torch.float64))
    assert reasons(graph) == {}


class Recurrent(nn.Module):
    """A part of a context that is kept and updated, as in RAFT."""

    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.gate = nn.Conv2d(hidden + context, hidden, 1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self.gate(torch.cat([h, x], 1)).tanh()


class Context(nn.Module):
    """The rest of a width is what another module does not take."""

    def __init__(self, hidden: int, context: int, least: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.update, self.least = nn.Conv2d(3, hidden + context, 1), Recurrent(hidden, context), least
        self.last = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        hidden = self.update.hidden_size
        rest = y.shape[1] - hidden
        if rest <= self.least:
            raise ValueError("too few")
        h, c = torch.split(y, [hidden, rest], dim=1)
        for _ in range(2):
            h = self.update(h.tanh(), c.relu())
        return self.last(h.mean((2, 3)))


@pytest.mark.parametrize("parts", [(6, 10), (8, 8), (10, 6)])
def test_parts_whose_size_another_module_keeps_may_shrink(parts: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    assert reasons(exact(Context(*parts), x)) == {}


def test_a_rest_that_must_have_some_channels_stays() -> None:
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    assert "size" in reasons(exact(Context(6, 10, least=4), x))["a"]


class Limit(nn.Module):
    """Does something else once less than so many channels are left."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.last, self.taken = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 4, 1), taken

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.last(y.relu() if y.shape[1] - self.taken > 0 else y.tanh())


@pytest.mark.parametrize("taken", [1, 5, 11])
def test_a_difference_that_steers_the_forward_stays(taken: int) -> None:
    graph = exact(Limit(taken), torch.randn(2, 3, 5, 5, dtype=torch.float64))
    assert "a" in reasons(graph)
