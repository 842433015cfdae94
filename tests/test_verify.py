"""Rule zero is checked on inputs of our own, for every output by itself; who is at fault is found, named and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import secateur as sc
from oracle import random_scores
from secateur.errors import FileFormatError, NothingToPruneError, SecateurWarning, VerificationError
from secateur.nest import tensors_of_output
from secateur.ops import table
from secateur.ops.activation import Activation
from secateur.plans import Limits
from secateur.plans.plan import Plan, plan_for
from secateur.surgery import verify as rule

IMAGE = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
DATA = (torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3)


class Still(Activation):
    """An entry that says that every number stays in its place, and 0 stays 0."""

    def zero(self, call: table.Call) -> bool:
        return True


@pytest.fixture(autouse=True)
def wrong_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of `roll` says that it moves nothing, so that what it is applied to is cut wrongly for certain."""
    monkeypatch.setitem(table._TABLE, Tensor.roll, Still())
    monkeypatch.setitem(table._SIGNATURES, Tensor.roll, table.Signature.parse("input *rest"))


def applied(net: nn.Module, example: Any, remove: float = 0.4) -> nn.Module:
    torch.manual_seed(0)
    graph = sc.analyze(net, example)
    return sc.apply(net, sc.plan(graph, random_scores(graph), remove=remove, limits=Limits(scope="layer")))


class Net(nn.Module):
    """Three convolutions. `twist` is done to what the second returns; `end` makes the output."""

    def __init__(
        self,
        twist: Callable[[Any, Tensor], Tensor] | None = None,
        end: Callable[[Any, Tensor], Any] | None = None,
        branch: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch = nn.Conv2d(12, 12, 1) if branch else None
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 12, 3, 1, 1), nn.Conv2d(12, 6, 1)
        self.last = nn.Linear(6, 3)
        self.twist, self.end = twist, end

    def forward(self, x: Tensor) -> Any:
        h = self.second(self.first(x).relu()).relu()
        h = self.twist(self, h) if self.twist is not None else h
        out = self.last(self.third(h).mean((2, 3)))
        return self.end(self, out) if self.end is not None else out


def roll(net: Any, h: Tensor) -> Tensor:
    return h.roll(1, 1)


def width(layer: Any) -> int:
    """How many outputs a layer has, told in a way that no analysis can see."""
    return int(layer.bias.untyped_storage().nbytes() // layer.bias.element_size())


CHOICES = (torch.zeros(()), torch.ones(()))


def rolled_if(h: Tensor, wrong: bool) -> Tensor:
    """Rolled or not, by the same calls."""
    choice = CHOICES[wrong]
    return h.roll(1, 1) * choice + h * (1 - choice)


@dataclass(slots=True)
class Found:
    logits: Tensor
    boxes: Tensor


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("inner", "missing")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


# -- outputs inside objects --------------------------------------------------------------------------------------------
def test_tensors_of_any_object_at_any_depth() -> None:
    a, b, c = torch.rand(1), torch.rand(2), torch.rand(3)
    assert [id(t) for t in tensors_of_output([Found(a, b)])] == [id(a), id(b)]
    assert [id(t) for t in tensors_of_output({"dist": Held([Slotted({"x": c})]), "y": Found(a, b)})] == [
        id(c), id(a), id(b),
    ]  # fmt: skip
    normal = torch.distributions.Normal(a, a + 1)
    assert any(t.data_ptr() == normal.loc.data_ptr() for t in tensors_of_output((3, Held(normal))))
    circle = Held(a)
    circle.other = [circle, nn.Linear(1, 1), "word", np.zeros(3), len, Held]  # type: ignore[attr-defined]
    assert [id(t) for t in tensors_of_output(circle)] == [id(a)]


def test_a_cache_is_no_output() -> None:
    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    class DynamicCache(Cache):
        pass

    assert tensors_of_output({"logits": IMAGE, "cache": DynamicCache(IMAGE)}) == [IMAGE]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda out, h: [Found(out, h)],
        lambda out, h: {"dist": Held(h), "out": out},
        lambda out, h: Slotted([out, Held((h,))]),
    ],
)
def test_outputs_inside_objects_keep_their_channels(wrapped: Callable[[Tensor, Tensor], Any]) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Any:
            h = self.inner(self.body(x).relu())
            return wrapped(self.last(h), h)

    graph = sc.analyze(Encoder(), torch.rand(3, 4))
    assert {layer.name: layer.prunable for layer in graph.layers} == {"body": True, "inner": False, "last": False}


# -- examples and outputs that hide a wrong cut ------------------------------------------------------------------------
HIDING: dict[str, tuple[nn.Module, Any]] = {
    "zeros": (Net(roll), torch.zeros(1, 3, 16, 16)),
    "ones": (Net(roll), torch.ones(1, 3, 16, 16)),
    "bfloat16": (Net(roll).bfloat16(), IMAGE.bfloat16()),
    "float16": (Net(roll).half(), IMAGE.half()),
    "argmax": (Net(roll, lambda net, out: out.argmax(1)), IMAGE),
    "threshold": (Net(roll, lambda net, out: (out > 100).float()), IMAGE),
    "nothing": (Net(roll, lambda net, out: None), IMAGE),
    "empty": (Net(roll, lambda net, out: out[out > 1e6]), IMAGE),
    "constant": (Net(roll, lambda net, out: out * 0 + 0.3), IMAGE),
    "large beside small": (Net(roll, lambda net, out: (IMAGE.mean() * 1e9, out * 1e-3)), IMAGE),
    "small in an object": (Net(roll, lambda net, out: [Held({"out": out}), IMAGE[:1].to(out.dtype)]), IMAGE),
    "other batch": (Net(lambda net, h: h.roll(1, 1) if len(h) != 2 else h), IMAGE),
    "other size": (Net(lambda net, h: h.roll(1, 1) if h.shape[-1] != 16 else h), IMAGE),
    "hardly scaled": (Net(lambda net, h: h + 1e-4 * h.roll(1, 1)), IMAGE),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_wrong_cut_is_found_and_its_layer_named(name: str) -> None:
    net, example = HIDING[name]
    with pytest.raises(VerificationError, match=r"second is at fault.*ignore=\['second'\]") as caught:
        applied(net, example)
    assert caught.value.layers == ("second",)
    right = Net(None, net.end).to(next(net.parameters()).dtype)  # type: ignore[arg-type]
    applied(right, example)  # the same without the fault


def _takes(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has so many numbers, found out by an attempt."""
    try:
        x.reshape(shape)
    except RuntimeError:
        return False
    return True


LARGE = torch.rand(1, 3, 160, 128, generator=torch.Generator().manual_seed(2))
#: What is done to a layer's output, and whether it asks for sizes or numbers, in one way or another.
ASKING: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "nothing": (lambda net, h: h.tanh() if h.ndim == 4 and h.dtype == torch.float32 else h, False),
    "shape": (lambda net, h: rolled_if(h, h.shape[2] == 160), True),
    "samples": (lambda net, h: rolled_if(h, len(h) == 1), True),
    "strides": (lambda net, h: rolled_if(h, h.stride(1) == 160 * 128), True),
    "memory": (lambda net, h: rolled_if(h, h.untyped_storage().nbytes() > 500_000), True),
    "parts": (lambda net, h: rolled_if(h, len(h.split(64, 2)) == 3), True),
    "rows": (lambda net, h: rolled_if(h, sum(1 for _ in h[0, 0]) == 160), True),
    "text": (lambda net, h: rolled_if(h, "160" in repr(h)), True),
    "numbers": (lambda net, h: rolled_if(h, float(net.last.bias[0]) < 1e9), True),
    "errors": (lambda net, h: rolled_if(h, _takes(h[:, :1], (-1, 160, 128))), True),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_knows_sizes_or_numbers_is_verified_on_the_whole_example(name: str) -> None:
    twist, asks = ASKING[name]
    net = Net(twist)
    assert sc.analyze(net, LARGE).steady is not asks
    if not asks:
        applied(net, LARGE)
    else:  # the fault shows on the example alone
        with pytest.raises(VerificationError, match="disagree on the example"):
            applied(net, LARGE)


def test_small_parts_of_large_images_show_a_wrong_cut() -> None:
    for net in (Net(roll), Net(lambda net, h: h + 1e-4 * h.roll(1, 1))):
        assert sc.analyze(net, LARGE).steady
        with pytest.raises(VerificationError, match=r"parts of the example.*second is at fault"):
            applied(net, LARGE)
    applied(Net(), LARGE)
    applied(nn.Sequential(nn.Conv2d(3, 8, 61), nn.ReLU(), nn.Conv2d(8, 4, 3)), LARGE)  # 96 x 32 is too small for it


class Reader(nn.Module):
    """Reads texts. What is done to its states depends on the tokens or on the mask."""

    def __init__(self, wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body, self.last = nn.Embedding(50, 6), nn.Linear(6, 12), nn.Linear(12, 3)
        self.wrong = wrong

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        h = self.body(self.table(input_ids)).relu()
        choice = self.wrong(input_ids, attention_mask).unsqueeze(-1).to(h.dtype)
        h = h.roll(1, 2) * choice + h * (1 - choice)
        return self.last(h * attention_mask.unsqueeze(-1))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(lambda ids, mask: ids > 5, True), (lambda ids, mask: (mask.min() == 0).expand_as(ids), True),
     (lambda ids, mask: ids < 0, False)],
)  # fmt: skip
@pytest.mark.parametrize("length", [1, 9])
def test_other_tokens_and_padding(wrong: Callable[..., Tensor], found: bool, length: int) -> None:
    example = {"input_ids": torch.full((1, length), 3), "attention_mask": torch.ones(1, length, dtype=torch.long)}
    if found:
        with pytest.raises(VerificationError) as caught:
            applied(Reader(wrong), example)
        assert caught.value.layers == ("body",)
    else:
        applied(Reader(wrong), example)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("code", ["value", "aux"])
def test_what_only_training_returns(code: str, stepwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if stepwise:
        monkeypatch.setattr(rule, "_LIGHT", 0)  # float32 first
        monkeypatch.setattr(rule, "_STEPWISE", 10)

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 12), nn.Linear(12, 2)
            self.side = nn.Linear(8, 2) if code == "aux" else None
            self.norm = nn.BatchNorm1d(12)

        def forward(self, x: Tensor) -> Any:
            h = self.body(x).tanh()
            out = self.last(F.dropout(self.norm(self.inner(h)), 0.5, self.training))
            if not self.training or code == "right":
                return out
            if self.side is not None:
                return out, self.side(h.roll(1, 1))
            return out, (h.roll(1, 1) * h).sum(1)

    with pytest.raises(VerificationError, match="in training mode") as caught:
        applied(Learner(), torch.rand(3, 4))
    assert caught.value.layers == ("body",)
    code = "right"
    applied(Learner(), torch.rand(3, 4))


def test_rounding_in_training_needs_no_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms of few numbers multiply rounding; each layer goes on with what the masked one returned."""

    class Deep(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(30)]
            self.first, self.layers, self.wrong = nn.Linear(4, 16), nn.ModuleList(layers), wrong
            self.last = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for i, layer in enumerate(self.layers):
                h = layer(h.roll(1, 1) if self.training and self.wrong and i == 15 else h).relu()
            return self.last(h)

    formats: list[tuple[bool, torch.dtype]] = []
    plain = rule.Net.run

    def run(self: Any, probe: Any, wide: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        formats.append((probe.training, wide))
        return plain(self, probe, wide, *args, **kwargs)

    monkeypatch.setattr(rule, "_LIGHT", 0)
    monkeypatch.setattr(rule, "_STEPWISE", 10)
    monkeypatch.setattr(rule.Net, "run", run)
    applied(Deep(False), torch.rand(2, 4))
    assert (True, torch.float32) in formats
    assert (True, torch.float64) not in formats
    with pytest.raises(VerificationError, match="in training mode"):
        applied(Deep(True), torch.rand(2, 4))


# -- right cuts that must not be refused -------------------------------------------------------------------------------
class Answer(nn.Module):
    """Returns whole numbers beside logits, so that every layer is compared."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.back, self.last = (
            nn.Linear(*sizes) for sizes in ((4, 12), (6, 9), (9, 6), (12, 3))
        )
        self.one, self.two, self.kind = nn.Linear(12, 12), nn.Linear(12, 12), kind
        if kind == "tied":
            self.two.weight = self.one.weight
        if kind == "hook":
            self.one.register_forward_hook(lambda m, args, out: torch.cat([out[..., 2:], out[..., :2]], -1))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.kind == "tokens":  # units of two layers cross
            x = x + self.back(self.inner(x.transpose(1, 2)).relu()).transpose(1, 2)
        y = self.one(x)
        x = self.last(self.two((y + torch.randn_like(y) if self.kind == "noise" else y).relu()))
        return x.argmax(-1), x


@pytest.mark.parametrize("kind", ["tokens", "tied", "hook", "noise"])
def test_layers_are_compared_wherever_their_units_are(kind: str) -> None:
    applied(Answer(kind), torch.rand(2, 6, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_in_half_precision(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 12), kind(12, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x))[0])

    net = Recurrent().bfloat16()
    assert applied(net, torch.rand(5, 2, 4).bfloat16()).first.out_features < 12


class Mixed(nn.Module):
    """A norm in full precision, constants made in float32, and tensors that are plain attributes."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.to(kind)
        self.norm.float()
        self.shift, self.tables = torch.rand(4), [torch.rand(4, 4), {"scale": torch.rand(3)}]
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        x = x.float() + self.shift + torch.linspace(0, 1, 4) @ self.tables[0]
        x = x + torch.zeros(len(x), 4, dtype=torch.float32) + torch.tensor(0.5) + torch.ones(4).type(torch.float32)
        h = self.first(x.to(self.first.weight.dtype))
        h = self.norm(h.float()).to(self.kind)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.kind != torch.float64):
            out = self.last(h)
        return out.float() * self.tables[1]["scale"]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heavy", [False, True])
def test_formats_inside_a_forward(kind: torch.dtype, heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if heavy:  # float32 first
        monkeypatch.setattr(rule, "_PARAMETERS", 0)
    net = Mixed(kind)
    before = [t.clone() for t in [*net.state_dict().values(), net.shift]]
    small = applied(net, torch.rand(5, 4).to(kind))
    assert all(torch.equal(a, b) for a, b in zip([*net.state_dict().values(), net.shift], before, strict=True))
    assert (small.first.weight.dtype, small.norm.weight.dtype, small.shift.dtype) == (
        kind,
        torch.float32,
        torch.float32,
    )


@pytest.mark.parametrize(
    "noisy",
    [
        lambda net, h: h + torch.randn_like(h),
        lambda net, h: h * torch.rand(len(h), 1, 1, 1) + 0.1 * torch.empty_like(h).normal_(),
        lambda net, h: F.dropout(h, 0.5, training=True),
        lambda net, h: h + torch.randn(h.shape[-1]),
    ],
)
def test_noise_is_the_same_in_both(noisy: Callable[[Any, Tensor], Tensor]) -> None:
    applied(Net(noisy), IMAGE)
    with pytest.raises(VerificationError):
        applied(Net(lambda net, h: noisy(net, h.roll(1, 1))), IMAGE)


@pytest.mark.parametrize("heavy", [False, True])
def test_float32_never_decides_against_a_removal(heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that amplifies rounding a millionfold."""
    monkeypatch.setattr(rule, "_PARAMETERS", 0 if heavy else 1e9)
    applied(Net(lambda net, h: h + 1e5 * (h - (h * 3 + 7 - 7) / 3)), IMAGE)


class Readings(nn.Module):
    """Reads its weights in several ways. `wrong`: units are mixed up."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.wrong = nn.Embedding(20, 12), wrong
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.conv, self.up, self.down = nn.Conv1d(12, 12, 3, padding=1), nn.Linear(12, 24), nn.Linear(24, 12)
        self.recurrent = nn.GRU(12, 6, batch_first=True)
        self.last = nn.Parameter(torch.randn(5, 6))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + self.attention(h, h, h)[0]
        h = h + self.conv(h.mT).mT
        up = self.up(h).relu()
        h = h + self.down(up.roll(1, -1) if self.wrong else up)
        h = self.recurrent(h)[0]
        return h @ self.last.T


@pytest.mark.parametrize("heavy", [False, True])
def test_large_parameters_are_masked_where_they_are_read(heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy of them."""
    monkeypatch.setattr(rule, "_LARGE", 1)
    monkeypatch.setattr(rule, "_PARAMETERS", 0 if heavy else 1e9)
    ids = torch.randint(20, (2, 7))
    small = applied(Readings(), ids)
    assert sum(p.numel() for p in small.parameters()) < 0.8 * sum(p.numel() for p in Readings().parameters())
    with pytest.raises(VerificationError) as caught:
        applied(Readings(wrong=True), ids)
    assert caught.value.layers == ("up",)
    net = Readings()
    graph = sc.analyze(net, ids)
    masked = rule._masked(net, sc.plan(graph, random_scores(graph), remove=0.4))
    shared = {name for name, t in masked._net.named_parameters() if t.data_ptr() == net.get_parameter(name).data_ptr()}
    assert {"table.weight", "up.weight", "down.weight", "attention.out_proj.weight"} <= shared
    assert ("conv.weight" in shared) == heavy
    assert "recurrent.weight_ih_l0" not in shared


def test_layers_that_run_under_vmap_are_left_out() -> None:
    """Whole numbers beside logits, so that every layer is compared. What `vmap` hides a dimension of is not."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.mapped, self.after = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8))
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.after(torch.vmap(self.mapped)(self.first(x))).relu().mean((2, 3))
            y = self.last(h)
            return y.argmax(1), y

    small = applied(Mapped(), IMAGE)
    assert small.after.weight.shape[0] < 8


def test_numbers_too_large_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_PARAMETERS", 0)  # float32 first, where they are infinite
    applied(Net(lambda net, h: h * 1e30 * 1e30), IMAGE)
    with pytest.raises(VerificationError):
        applied(Net(lambda net, h: h.roll(1, 1) * 1e30 * 1e30), IMAGE)


def test_what_a_branch_does_that_is_scaled_down_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the outputs agree; the layer that reads the branch does not."""
    monkeypatch.setattr(rule, "_PARAMETERS", 0)
    with pytest.raises(VerificationError):
        applied(Net(lambda net, h: h + 1e-7 * net.branch(h.roll(1, 1).relu()), branch=True), IMAGE)
    applied(Net(lambda net, h: h + 1e-7 * net.branch(h.relu()), branch=True), IMAGE)


def test_buffers_that_a_forward_writes_stay_out_of_it() -> None:
    def counted(net: Any, h: Tensor) -> Tensor:
        net.steps += 1
        net.calls = getattr(net, "calls", 0) + 1
        net.seen["calls"] = net.seen.get("calls", 0) + 1
        if net.calls == 1:  # hooks that are made when they are first needed
            net.last.register_forward_hook(lambda module, args, out: out * 2)
        h = h * net.seen["calls"] * len(net.last._forward_hooks)
        return h * (1 + 0.1 * net.steps * net.calls)

    net = Net(counted)
    net.register_buffer("steps", torch.zeros(()))
    net.seen = {}  # type: ignore[assignment]
    small = applied(net, IMAGE)
    assert float(small.steps) == float(net.steps) == 0
    assert not hasattr(small, "calls")
    assert not small.seen
    assert not small.last._forward_hooks


def test_groups_and_norms_at_another_size() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    graph = sc.analyze(net, IMAGE)
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small, masked = sc.apply(net, plan), sc.apply(net, plan, how="mask")
    x = torch.rand(3, 3, 24, 20)
    with torch.no_grad():
        assert torch.allclose(small(x), masked(x), atol=1e-5)


def test_a_model_that_shows_nothing_is_refused() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) * 0

    net = Silent()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    with pytest.raises(VerificationError, match=r"no real numbers that vary.*returns its logits"):
        applied(net, torch.rand(2, 4))


# -- who is at fault ---------------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    """Six blocks of which some are cut wrongly."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 9), "down": nn.Linear(9, 6)}) for _ in range(6))
        self.last, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            h = block["up"](x)
            x = x + block["down"](h.roll(1, 1) if i in self.wrong else h)
        return self.last(x)


@pytest.mark.parametrize("wrong", [{2}, {1, 4}, {0, 1, 2, 3, 4, 5}])
def test_layers_at_fault_are_named(wrong: set[int]) -> None:
    with pytest.raises(VerificationError) as caught:
        applied(Blocks(wrong), torch.rand(4, 6))
    assert set(caught.value.layers) == {f"blocks.{i}.up" for i in wrong}


def test_two_layers_that_are_wrong_together() -> None:
    """Two streams of which the wider one is taken."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c, self.d = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x).relu(), self.b(x).relu()
            both = width(self.a) < 8 and width(self.b) < 8
            return self.c(a) + self.d(rolled_if(b, both))

    with pytest.raises(VerificationError) as caught:
        applied(Two(), torch.rand(4, 4))
    assert caught.value.layers in (("a",), ("b",))


def test_a_plan_without_a_graph_is_withheld_without_a_name() -> None:
    net = Net(roll)
    graph = sc.analyze(net, IMAGE)
    plan = sc.plan(graph, random_scores(graph), remove=0.4)
    assert plan.graph is graph
    read = sc.Plan.from_json(plan.to_json())
    assert read == plan
    assert read.graph is None
    assert "graph" not in plan.to_json()
    with pytest.raises(VerificationError, match=r"not known.*name the layer in ignore") as caught:
        sc.apply(net, read, example=IMAGE)
    assert caught.value.layers == ()
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3, limits=Limits(ignore=["second"])))
    assert all(p.graph is None for p in vars(small)["_secateur_provenance"].plans)


# -- the loop ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{}, {"schedule": 0.2}, {"schedule": 0.2, "repair": "mean"}])
def test_a_run_keeps_the_layers_at_fault_and_goes_on(how: dict[str, Any]) -> None:
    with pytest.warns(SecateurWarning, match="disagree for second: these layers stay") as seen:
        result = sc.prune(Net(roll), DATA, "weight", remove=0.4, progress=False, **how)
    assert len([w for w in seen if isinstance(w.message, SecateurWarning)]) == 1
    layers = {layer.name: layer for layer in result.graph.layers}
    assert layers["second"].reason == "removal and masking disagree"
    assert "removal and masking disagree" in str(result.graph)
    assert result.model.second.out_channels == 12
    assert result.plan is not None
    assert result.plan.units == (14, 9)
    assert result.history[0].units == 14
    alone = sc.prune(Net(), DATA, "weight", remove=0.4, progress=False, limits=Limits(ignore=["second"]), **how)
    assert alone.model.second.out_channels == 12


def test_a_fault_that_shows_only_in_a_later_step() -> None:
    net = Net(lambda net, h: rolled_if(h, width(net.second) <= 9))
    with pytest.warns(SecateurWarning, match="second"):
        result = sc.prune(net, DATA, "weight", remove=0.5, schedule=0.125, progress=False)
    assert result.model.second.out_channels in (10, 11, 12)
    assert result.model.first.out_channels < 8


def test_nothing_is_left_to_remove() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x).relu().roll(1, 1))

    data = (torch.rand(9, 4), torch.arange(9) % 3)
    with pytest.warns(SecateurWarning), pytest.raises(NothingToPruneError, match="removal and masking disagree"):
        sc.prune(Only(), data, "weight", remove=0.5, progress=False)


def test_a_run_that_goes_on_remembers_what_stays(tmp_path: Path) -> None:
    def run(path: Path, stop: int | None) -> Any:
        calls = iter(range(100))

        def evaluate(model: nn.Module) -> float:
            if next(calls) == stop:
                raise KeyboardInterrupt
            return 1.0

        how = {"schedule": 0.1, "evaluate": evaluate, "checkpoint": path, "progress": False}
        return sc.prune(Net(roll), DATA, "weight", remove=0.4, **how)

    with pytest.warns(SecateurWarning):
        whole = run(tmp_path / "a.pt", None)
    with pytest.warns(SecateurWarning), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b.pt", 2)
    again = run(tmp_path / "b.pt", None)  # without a second warning, which would be an error here
    assert again.plan == whole.plan
    same = zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


class Remembering(nn.Module):
    """Unless it is told not to, it keeps a state, whose width is that of its config."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, width=12)
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor, use_cache: bool | None = None) -> dict[str, Tensor]:
        h, kept = self.a(x), {}
        if self.config.use_cache if use_cache is None else use_cache:
            kept = {"state": h.new_zeros(len(h), self.config.width)}
            h = h + kept["state"]
        return {"logits": self.c(self.b(h).relu()), **kept}


def test_what_a_model_keeps_for_a_next_call_is_tried_too() -> None:
    torch.manual_seed(0)
    net, x = Remembering().eval(), torch.rand(5, 6)
    graph = sc.analyze(net, x)
    assert {"a", "b"} <= {layer.name for layer in graph.layers if layer.prunable}
    removed = np.zeros(len(graph.root), np.bool_)
    removed[[layer.groups[0] for layer in graph.layers if layer.name in ("a", "b")]] = True
    with pytest.raises(VerificationError, match="with a cache") as caught:
        sc.apply(net, plan_for(graph, removed))
    assert caught.value.layers == ("a",)
    with pytest.warns(SecateurWarning, match="disagree for a: these layers stay"):
        result = sc.prune(net, (x, torch.arange(5) % 4), "weight", 0.3, repair=None, progress=False)
    assert result.model.a.out_features == 12
    assert result.model.b.out_features < 10
    assert result.model(x)["logits"].shape == (5, 4)


def test_a_plan_is_verified_by_what_it_cuts() -> None:
    """A file may say that no group leaves, and cut all the same: here a layer reads other units than are left."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = sc.analyze(net, torch.zeros(1, 4))
    removed = np.zeros(len(graph.root), np.bool_)
    removed[graph.layers[0].groups[[1, 4]]] = True
    data = json.loads(plan_for(graph, removed).to_json())
    wrong = {**data, "groups": [], "cuts": {**data["cuts"], "2.weight": {"1": [0, 1]}}}
    with pytest.raises(VerificationError, match="disagree"):
        sc.apply(net, Plan.from_data(wrong), example=torch.randn(3, 4))
    with pytest.raises(FileFormatError, match="expected a count, found -1"):
        Plan.from_data({**data, "cuts": {**data["cuts"], "2.weight": {"-1": [1, 4]}}})


# -- choices among equals ---------------------------------------------------------------------------------------------
class Tied(nn.Module):
    """Two sums of the same numbers, in another order, decide which answer counts: that is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(5, 64), nn.Linear(64, 3), nn.Linear(64, 3), nn.Linear(64, 1, False)
        nn.init.ones_(self.d.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        return torch.where(h.sum(-1, keepdim=True) > self.d(h), self.b(h), self.c(h))


def test_choices_among_equals_show_nothing_and_layers_do() -> None:
    net, x = Tied().double().eval(), torch.randn(40, 5).double()
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, random_scores(graph, 0), remove=0.4)
    small, masked = sc.apply(net, plan), sc.apply(net, plan, how="mask")
    for layer in ("b", "c", "d"):
        seen = [torch.relu(model.a(x)) for model in (small, masked)]
        found, wanted = (getattr(m, layer)(h) for m, h in zip((small, masked), seen, strict=True))
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():  # a real difference in a layer is seen although the choice is not steady
        small.c.bias += 0.1
    with pytest.raises(VerificationError, match="`c`"):
        rule.verify(net, small, plan, x)
