"""Infinity in a buffer, as in a mask of attention, is ordinary. In weights and in statistics of a norm it is not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from oracle import fingerprint, outputs, random_scores, relative_gap, same, zeroed
from secateur.errors import NotFiniteError, TrainingError
from secateur.recover import Recover

WIDTH, HEADS, LENGTH = 16, 4, 6


class Attention(nn.Module):
    """Causal attention. The mask is a buffer of -inf, one for all heads or one for each; or positions are compared."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if mask != "none":
            causal = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
            distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
            slopes = 2.0 ** -torch.arange(1, HEADS + 1)
            self.register_buffer("mask", causal if mask == "one" else causal + slopes[:, None, None] * distance)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, -1, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        places = torch.arange(n, device=x.device)
        if hasattr(self, "mask"):
            scores = scores + self.mask[..., :n, :n]
        else:
            scores = scores.masked_fill(places[None] > places[:, None], -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each on a branch."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(mask)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(self.up(self.second(x)).relu())


class Causal(nn.Module):
    """A small language model that tells one of three classes."""

    def __init__(self, mask: str = "one") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.Sequential(Block(mask), Block(mask))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids))[:, -1])


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 11, (40, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, ids[:, 2] % 3


@pytest.mark.parametrize("mask", ["one", "each"])
def test_removal_equals_masking(mask: str) -> None:
    model, (ids, _) = Causal(mask).eval(), texts()
    before = fingerprint(model)
    graph = sc.analyze(model, ids[:2])
    for seed in range(3):
        plan = sc.plan(graph, random_scores(graph, seed), remove=0.4)
        small = sc.apply(model, plan)
        for reference in (zeroed(model, graph, plan), sc.apply(model, plan, how="mask")):
            assert relative_gap(outputs(small, ids), outputs(reference, ids)) < 1e-4
    assert same(before, fingerprint(model))


@pytest.mark.parametrize("criterion", ["lrp", "taylor", "weight"])
def test_scores_are_those_of_a_mask_that_the_forward_makes(criterion: str) -> None:
    """By default, LRP takes the composite for attention here."""
    held, made = Causal("one").eval(), Causal("none").eval()
    found, wanted = sc.score(held, texts(), criterion), sc.score(made, texts(), criterion)
    assert found.units.keys() == wanted.units.keys()
    for site, units in wanted.units.items():
        np.testing.assert_allclose(np.asarray(found.units[site]), np.asarray(units), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mask", ["one", "each"])
def test_the_whole_way(mask: str, tmp_path: Path) -> None:
    model, (ids, classes) = Causal(mask).eval(), texts()
    result = sc.prune(model, (ids, classes), remove=0.4, progress=False)
    small = result.model.eval()
    masks = {name: buffer.clone() for name, buffer in small.named_buffers()}
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())

    repaired = sc.repair(small, model, (ids, None), progress=False)
    trained = sc.recover(repaired, model, (ids, classes), epochs=1, progress=False).model
    for changed in (repaired, trained):
        assert all(torch.equal(buffer, masks[name]) for name, buffer in changed.named_buffers())
        assert bool(changed.eval()(ids).isfinite().all())

    sc.save(trained, tmp_path / "saved")
    again = sc.load(tmp_path / "saved", Causal(mask)).eval()
    assert torch.equal(again(ids), trained.eval()(ids))
    assert all(torch.equal(buffer, masks[name]) for name, buffer in again.named_buffers())
    sc.specialize(model, [0, 2], ids[:2])
    result.report(tmp_path / "report.html")


def test_a_run_with_training_is_resumed(tmp_path: Path) -> None:
    model, data = Causal().eval(), texts()
    settings = {"remove": 0.4, "schedule": 0.2, "recover": Recover(epochs=1), "progress": False}
    first = sc.prune(model, data, **settings, checkpoint=tmp_path / "run")
    again = sc.prune(model, data, **settings, checkpoint=tmp_path / "run")
    assert torch.equal(first.model.eval()(data[0]), again.model.eval()(data[0]))


def test_an_exported_mask_stays(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, (ids, _) = Causal().eval(), texts()
    graph = sc.analyze(model, ids[:2])
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.4))
    assert sc.export(small, tmp_path / "small.onnx", ids[:2]).exists()  # which compares its outputs with torch's


def test_averaged_weights_leave_infinity_as_it_is() -> None:
    """The mean of -inf and -inf, as torch interpolates, is NaN."""
    model, data = Causal().eval(), texts()
    for options in ({}, {"test": data, "patience": 2}):
        found = sc.recover(model, None, data, epochs=2, teacher=0.0, ema=0.9, progress=False, **options).model
        assert all(torch.equal(a, b) for a, b in zip(found.buffers(), model.buffers(), strict=True))
        assert bool(found.eval()(data[0]).isfinite().all())


class Watched(nn.Module):
    """Keeps the smallest and the largest input of all batches, which it does not know before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("bounds", torch.tensor([math.inf, -math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            low, high = self.bounds
            self.bounds = torch.stack([torch.minimum(low, x.min()), torch.maximum(high, x.max())])
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_bound_that_training_finds(ema: float) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(24, 4), torch.arange(24) % 3
    found = sc.recover(Watched(), None, (x, y), epochs=2, teacher=0.0, ema=ema, progress=False).model
    assert found.bounds.tolist() == [float(x.min()), float(x.max())]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_spoilt_parameter_is_refused(value: float) -> None:
    model = Causal()
    with torch.no_grad():
        model.head.bias[0] = value
    with pytest.raises(NotFiniteError, match=r"`head\.bias` of Causal has NaN or infinite values"):
        sc.score(model, texts())


def test_a_buffer_that_is_nan_is_refused() -> None:
    model = Causal()
    model.blocks[1].attention.mask[0, 0] = math.nan
    with pytest.raises(NotFiniteError, match=r"`blocks\.1\.attention\.mask` of Causal has NaN values"):
        sc.score(model, texts())


class Frozen(nn.Module):
    """A batch norm whose numbers are all buffers, as in a detector."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((8,), value))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.running_var.add(1e-5).rsqrt() * self.weight + self.bias


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight"])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(8), Frozen])
def test_what_a_norm_has_measured_must_be_finite(norm: type[nn.Module], name: str) -> None:
    """An infinite variance gives no NaN, but a constant."""
    net = nn.Sequential(nn.Linear(4, 8), norm(), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        getattr(net[1], name)[2] = math.inf
    with pytest.raises(NotFiniteError, match=rf"`1\.{name}` of Sequential has NaN or infinite values"):
        sc.score(net, (torch.rand(12, 4), torch.arange(12) % 3))


class Growing(nn.Module):
    """Measures something that becomes too large, or NaN."""

    def __init__(self, place: str, value: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8))
        self.place, self.value = place, value

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x)).relu())
        if self.training:
            setattr(self if self.place == "seen" else self.norm, self.place, torch.full((8,), self.value))
        return y


@pytest.mark.parametrize(("place", "value"), [("seen", math.nan), ("running_var", math.inf)])
def test_training_that_spoils_a_buffer_ends(place: str, value: float) -> None:
    data = (torch.rand(24, 4), torch.arange(24) % 3)
    with pytest.raises(TrainingError, match="NaN in epoch 1"):
        sc.recover(Growing(place, value), None, data, epochs=1, teacher=0.0, progress=False)
