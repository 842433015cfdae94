"""Calls that were once followed wrongly in silence, or that raised an error of torch."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import secateur as sc
from secateur.criteria import Taylor
from secateur.errors import CriterionError, DataError, ForwardError, RelevanceError, UnsupportedModelError
from secateur.loop import Schedule
from secateur.ops.table import _SIGNATURES, function_name, known_functions
from secateur.relevance import Attention, Composite, On
from secateur.relevance.backward import Backward
from secateur.relevance.engine import RelevancePass
from secateur.relevance.rules import Epsilon
from secateur.relevance.starts import starter
from secateur.running.sandbox import isolated
from secateur.structure.cost import count_macs
from secateur.surgery.mask import mask

Body = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two convolutions of the input, a body that makes something of them, and a reader."""

    def __init__(self, body: Body, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.c, self.head = nn.Conv2d(width, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.body(self, self.a(x), self.b(x))).mean((2, 3)))


def pictures(count: int = 3) -> Tensor:
    return torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def removed_half(net: nn.Module, x: Tensor) -> nn.Module:
    """The net without half of its units; `apply` verifies that this equals masking."""
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, sc.score(net, (x, torch.arange(len(x)) % 5), "weight", graph=graph), remove=0.5)
    return sc.apply(net, plan)


# -- keywords ---------------------------------------------------------------------------------------------------------
def _forms(function: Any) -> list[list[str]]:
    """The names of the parameters in every form of a function, in order, as far as torch tells."""
    if re.search(_WITHOUT_KEYWORDS, function_name(function)):
        return []
    try:
        names = list(inspect.signature(function).parameters)
        return [] if "args" in names or "kwargs" in names else [names]
    except (TypeError, ValueError):
        packet = getattr(torch.ops.aten, getattr(function, "__name__", "").strip("_"), None)
    forms = []
    for overload in packet.overloads() if packet is not None else ():
        arguments = [a for a in getattr(packet, overload)._schema.arguments if not a.kwarg_only]
        names = ["input" if a.name == "self" else a.name for a in arguments if a.name != "out_dtype"]
        if names not in _OTHER_FORMS and arguments and "Tensor" in str(arguments[0].type):
            forms.append(names)
    return forms


#: Operators and getters; methods whose tensor is not the first parameter; calls that only modules of torch make.
_WITHOUT_KEYWORDS = r"__|\.where$|normal_|\.lstm|\.gru|\.rnn_|_assert"
#: Of TorchScript alone, or (variances) with another second parameter, which is a Boolean and so told apart.
_OTHER_FORMS = (["a", "b"], ["repeats"], ["input", "reverse"], ["input", "unbiased"])


def test_every_keyword_of_torch_binds_like_its_position() -> None:
    """Goes over the table: an argument given by torch's own name is the one given by position."""
    checked, wrong = 0, []
    for function in known_functions():
        signature = _SIGNATURES[function]
        for names in _forms(function):
            by_position = signature.bind(tuple(names), {})
            by_name = signature.bind((), {name: name for name in names})
            for own, name in zip(signature.names, names, strict=False):
                checked += 1
                if by_position[own] != by_name.get(own):
                    wrong.append((function_name(function), names, own, name))
    assert not wrong
    assert checked > 300


KEYWORDS: dict[str, tuple[Body, Body, int]] = {
    "cat(axis)": (lambda m, h, k: torch.cat([h, k], axis=1), lambda m, h, k: torch.cat([h, k], 1), 16),
    "cat(tensors)": (lambda m, h, k: torch.cat(dim=1, tensors=[h, k]), lambda m, h, k: torch.cat([h, k], 1), 16),
    "stack(axis)": (
        lambda m, h, k: torch.stack([h, k], axis=1).sum(1), lambda m, h, k: torch.stack([h, k], 1).sum(1), 8,
    ),
    "mean(axis)": (lambda m, h, k: h - h.mean(axis=(2, 3), keepdims=True), lambda m, h, k: h - h.mean((2, 3), True), 8),
    "sum(axis)": (lambda m, h, k: h + k.sum(axis=-1, keepdims=True), lambda m, h, k: h + k.sum(-1, True), 8),
    "max(other)": (lambda m, h, k: torch.max(h, other=k), lambda m, h, k: torch.max(h, k), 8),
    "chunk(input)": (lambda m, h, k: torch.chunk(input=h, chunks=2, dim=1)[0], lambda m, h, k: h.chunk(2, 1)[0], 4),
    "split(tensor)": (
        lambda m, h, k: torch.cat(torch.split(tensor=h, split_size_or_sections=4, dim=1), 1),
        lambda m, h, k: torch.cat(h.split(4, 1), 1), 8,
    ),
    "add(other, input)": (lambda m, h, k: torch.sub(other=k, input=h), lambda m, h, k: torch.sub(h, k), 8),
    "add(x1, x2)": (lambda m, h, k: torch.add(x1=h, x2=k), lambda m, h, k: torch.add(h, k), 8),
    "flatten(input)": (
        lambda m, h, k: torch.flatten(input=h, start_dim=2).unflatten(dim=2, sizes=(6, 6)),
        lambda m, h, k: h.flatten(2).unflatten(2, (6, 6)), 8,
    ),
    "clamp(input)": (lambda m, h, k: torch.clamp(min=0.1, input=h), lambda m, h, k: torch.clamp(h, 0.1), 8),
    "softmax(axis)": (lambda m, h, k: h * k.softmax(axis=2), lambda m, h, k: h * k.softmax(2), 8),
    "bmm(mat2)": (
        lambda m, h, k: torch.bmm(h.flatten(0, 1), mat2=k.flatten(0, 1)).unflatten(0, (-1, h.shape[1])),
        lambda m, h, k: torch.bmm(h.flatten(0, 1), k.flatten(0, 1)).unflatten(0, (-1, h.shape[1])), 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_are_the_arguments_they_name(name: str) -> None:
    body, positional, width = KEYWORDS[name]
    x = pictures()
    net, same = Net(body, width).eval(), Net(positional, width).eval()
    a, b = sc.analyze(net, x), sc.analyze(same, x)
    assert a.total_units == b.total_units > 4
    assert torch.equal(sc.explain(net, x).input, sc.explain(same, x).input)
    removed_half(net, x)


def test_products_with_keywords() -> None:
    class Products(nn.Module):
        def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.weight, self.bias = (
                nn.Linear(4, 6),
                nn.Parameter(torch.randn(6, 3)),
                nn.Parameter(torch.randn(3)),
            )
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            return self.how(self.first(x).relu(), self.weight, self.bias)

    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    forms: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda h, w, b: torch.mm(h, w) + b,
        lambda h, w, b: torch.mm(input=h, mat2=w) + b,
        lambda h, w, b: torch.addmm(b, mat1=h, mat2=w),
        lambda h, w, b: torch.addmm(input=b, mat2=w, mat1=h),
    ]
    for how in forms:
        net, plain = Products(how), Products(forms[0])
        assert sc.analyze(net, x).total_units == sc.analyze(plain, x).total_units == 6
        assert torch.allclose(sc.explain(net, x).input, sc.explain(plain, x).input)


VECTORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "parameter": (lambda m, y: F.linear(y, m.w), lambda m, y: y @ m.w),
    "row": (lambda m, y: F.linear(y, m.b.weight[0]), lambda m, y: y @ m.b.weight[0]),
    "activation": (lambda m, y: F.linear(y, y[0]), lambda m, y: y @ y[0]),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_linear_call_with_a_vector_is_the_product_with_it(name: str) -> None:
    class Gated(nn.Module):
        def __init__(self, product: Callable[..., Tensor]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.w, self.product = nn.Parameter(torch.randn(8)), product

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x).relu())
            return self.c(y * self.product(self, y)[:, None])

    x = torch.randn(20, 6)
    found = []
    for product in VECTORS[name]:
        net = Gated(product).eval()
        graph = sc.analyze(net, x[:2])
        scores = sc.score(net, (x, torch.arange(20) % 4), ["lrp", "lrp:attnlrp", "taylor"], graph=graph)
        plan = sc.plan(graph, scores["taylor"], remove=0.4)
        small = sc.repair(sc.apply(net, plan), net, (x, None), "ridge", copies=0, progress=False)
        found.append(([list(s.units.values()) for s in scores.values()], plan.cuts, graph.cost, small(x)))
    (one, cuts, cost, out), (two, *rest, same) = found
    assert [cuts, cost] == rest
    for left, right in zip(one, two, strict=True):
        np.testing.assert_allclose(np.concatenate(left), np.concatenate(right), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out, same)


def test_addmv() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.vector = nn.Linear(4, 6), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmv(torch.zeros(len(x)), self.first(x).relu(), self.vector)

    net, x = Vector(), torch.rand(5, 4)
    assert sc.analyze(net, x).total_units == 6
    seen = sc.explain(net, x)
    assert seen.conservation.input == pytest.approx(seen.conservation.start, rel=1e-4)


# -- data movement ----------------------------------------------------------------------------------------------------
MOVED: dict[str, tuple[Body, int, int]] = {
    # body, width of what it makes, units that may leave
    # Pairs leave, so that every second one stays what it is.
    "every second channel": (lambda m, h, k: h[:, ::2], 4, 20),
    "every second from the second": (lambda m, h, k: h[:, 1::2], 4, 20),
    "every second from the third": (lambda m, h, k: h[:, 2::2], 3, 12),
    "every third channel": (lambda m, h, k: h[:, ::3], 3, 12),
    "flip the batch": (lambda m, h, k: h.flip(0), 8, 20),
    "roll the batch": (lambda m, h, k: h.roll(1, 0), 8, 20),
    "flip batch and height": (lambda m, h, k: h.flip(0, 2), 8, 20),
    "roll channels": (lambda m, h, k: h.roll(1, 1), 8, 12),
    "clamp by a tensor": (lambda m, h, k: h.clamp(min=k), 8, 20),
    "clamp from above by a tensor": (lambda m, h, k: torch.clamp(h, max=k), 8, 20),
    "clamp between tensors": (lambda m, h, k: torch.clamp(h, k, k + 1), 8, 20),
    "take along space": (lambda m, h, k: torch.take_along_dim(h, indices=h.argsort(2), dim=2), 8, 12),
    "take along channels": (lambda m, h, k: h.take_along_dim(h.argsort(1), 1), 8, 12),
    "where of one argument": (lambda m, h, k: k + torch.where(h > 0)[0].numel(), 8, 12),
    "vmap of constants": (lambda m, h, k: h + torch.vmap(lambda t: t * 2)(torch.ones(len(h), 1, 1, 1)), 8, 20),
}


@pytest.mark.parametrize("name", MOVED)
def test_units_are_followed_or_kept(name: str) -> None:
    body, width, units = MOVED[name]
    net, x = Net(lambda m, h, k: body(m, h, k) + 0 * k[:, :width], width).eval(), pictures()
    free = Net(body, width).eval()
    for model in (net, free):
        removed_half(model, x)
        seen = sc.explain(model, x)
        assert seen.conservation.input == pytest.approx(seen.conservation.start, rel=1e-4)
    assert sc.analyze(free, x).total_units == units


def test_strided_slices_say_why_units_stay() -> None:
    graph = sc.analyze(Net(lambda m, h, k: h[:, ::3], 3), pictures())
    assert all("fixed places" in str(layer.reason) for layer in graph.layers if layer.name == "a")


def test_vmap_is_frozen_and_not_explained() -> None:
    net, x = Net(lambda m, h, k: torch.vmap(lambda t: t * 2)(h)), pictures()
    assert "torch.vmap" in str(next(layer.reason for layer in sc.analyze(net, x).layers if layer.name == "a"))
    for act in (partial(sc.analyze, strict=True), sc.explain):
        with pytest.raises(UnsupportedModelError, match=r"torch\.vmap"):
            act(net, x)


class Mapped(nn.Module):
    """A product inside a transform of `torch.func`, and another one by the same function after it."""

    def __init__(self, transform: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transform = transform
        self.v, self.w = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(9, 8))
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.transform(self, x), self.w).relu())


def test_what_runs_inside_vmap_is_counted_and_what_follows_is_scored() -> None:
    net, x = Mapped(lambda m, x: torch.vmap(lambda row: F.linear(row, m.v))(x)), torch.randn(5, 6)
    graph = sc.analyze(net, x)
    assert graph.cost.macs == 5 * (6 * 8 + 8 * 9 + 9 * 4)
    assert [layer.prunable for layer in graph.layers] == [True, False]
    scores = sc.score(net, (x, torch.arange(5) % 4), "activation", graph=graph)
    (found, _) = scores.units.values()
    with torch.no_grad():
        expected = (x @ net.v.T @ net.w.T).abs().mean(0)
    torch.testing.assert_close(torch.from_numpy(found).float(), expected / expected.norm())
    plan = sc.plan(graph, scores, remove=0.4)
    small = sc.apply(net, plan)
    assert sc.measure(small, x, latency=False) == plan.after
    with torch.no_grad():
        assert torch.allclose(small(x), sc.apply(net, plan, how="mask")(x), atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda m, x: torch.func.jvp(torch.sin, (x @ m.v.T,), (torch.ones(len(x), 8),))[1],
        lambda m, x: torch.func.grad(lambda y: y.square().sum())(x @ m.v.T),
        lambda m, x: torch.func.grad(lambda y: (F.linear(torch.ones(1, 6), m.v[:, :6]) * y).sum())(x @ m.v.T),
        lambda m, x: torch.vmap(torch.func.jacrev(lambda y: y.sin().sum()))(x @ m.v.T),
    ],
    ids=["jvp", "grad", "weight", "jacobian"],
)
def test_transforms_of_functions_keep_what_reaches_them(transform: Any) -> None:
    net, x = Mapped(transform), torch.randn(5, 6)
    graph = sc.analyze(net, x)
    assert {layer.prunable for layer in graph.layers if len(layer.groups) == 8} <= {False}
    for criterion in ("lrp", "lrp:attnlrp"):
        with pytest.raises(UnsupportedModelError, match=r"inside torch\.vmap or another transform"):
            sc.score(net, (x, torch.arange(5) % 4), criterion, graph=graph)
    assert graph.cost.macs >= 5 * (6 * 8 + 8 * 9 + 9 * 4)


def test_dynamic_convolutions_are_frozen_and_not_explained() -> None:
    def dynamic(m: Any, h: Tensor, k: Tensor) -> Tensor:
        n = len(h)
        return F.conv2d(h.reshape(1, -1, 6, 6), k.mean((2, 3)).view(-1, 1, 1, 1), groups=8 * n).view(n, -1, 6, 6)

    net, x = Net(dynamic).eval(), pictures()
    removed_half(net, x)
    with pytest.raises(UnsupportedModelError, match="dynamic convolution"):
        sc.explain(net, x)


def test_a_linear_call_of_two_activations_is_a_product() -> None:
    class Pair(nn.Module):
        def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.how = nn.Linear(4, 6), nn.Linear(4, 6), how

        def forward(self, x: Tensor) -> Tensor:
            return self.how(self.a(x), self.b(x))

    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sc.explain(Pair(F.linear), x).input, sc.explain(Pair(lambda a, b: a @ b.mT), x).input)


# -- one weight, several uses -----------------------------------------------------------------------------------------
USES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "plain and transposed": (lambda w: w, lambda w: w.t()),
    "w and -w": (lambda w: w, lambda w: -w),
    "w and a view of -w": (lambda w: w, torch._neg_view),
    "all rows and half of them": (lambda w: w, lambda w: w[:4]),
    "plain and flipped": (lambda w: w, lambda w: w.flip(1)),
}


@pytest.mark.parametrize("rule", ["epsilon", "alpha1beta0"])
@pytest.mark.parametrize("name", USES)
def test_a_weight_used_twice_in_different_ways(name: str, rule: str) -> None:
    """Against the rules written as matrices."""
    first, second = USES[name]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, first(self.w)).relu(), second(self.w))

    net, x = Twice(), torch.rand(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = sc.explain(net, x, target=2, composite=Epsilon(1e-9) if rule == "epsilon" else rule)
    m, n = first(net.w).detach().resolve_neg().numpy(), second(net.w).detach().resolve_neg().numpy()

    def shares(z: np.ndarray) -> np.ndarray:
        z = z if rule == "epsilon" else np.maximum(z, 0)
        whole = z.sum(-1, keepdims=True)
        return z / np.where(whole == 0, 1, whole)

    middle = shares(np.maximum(x.numpy() @ m.T, 0) * n[2])
    oracle = (shares(x.numpy()[:, None, :] * m) * middle[:, :, None]).sum(1)
    np.testing.assert_allclose(seen.input.numpy(), oracle, rtol=1e-5, atol=1e-7)


def test_transposed_uses_share_memory_but_no_map() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.w), self.w.t())

    class Untied(nn.Module):
        def __init__(self, w: Tensor) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(w.clone()), nn.Parameter(w.t().contiguous())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.v), self.w)

    tied, x = Tied(), torch.rand(4, 6)
    untied = Untied(tied.w.detach())
    for composite in ("alpha1beta0", "epsilon_plus"):
        a, b = sc.explain(tied, x, 0, composite=composite), sc.explain(untied, x, 0, composite=composite)
        assert torch.allclose(a.input, b.input, rtol=1e-4, atol=1e-6)


# -- attention --------------------------------------------------------------------------------------------------------
class Windows(nn.Module):
    """Attention with an additive mask of -100, as Swin's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 4)
        mask = torch.full((8, 8), -100.0)
        mask[:4, :4], mask[4:, 4:] = 0, 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT / 2 + self.mask).softmax(-1)
        return self.head((weights @ v).mean(1))


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp", "epsilon_plus", "epsilon_gamma_box"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_additive_masks_give_finite_scores(composite: str, dtype: torch.dtype) -> None:
    net = Windows().to(dtype).eval()
    for seed in range(8):
        x = torch.randn(2, 8, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        x[:, 4:] += 5 * x[:, 4:].sign()  # values of one window are often all of one sign in a channel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = sc.explain(net, x, composite=composite)
        assert all(bool(torch.isfinite(units).all()) for units in seen.units.values())
        assert bool(torch.isfinite(seen.input).all())
        books = seen.conservation
        assert books.input + books.absorbed == pytest.approx(books.start, rel=1e-3)
        assert composite == "attnlrp" or books.absorbed == 0


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_swin_is_scored(composite: str) -> None:
    vision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    net = vision.models.swin_transformer.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [7, 7], num_classes=10).eval()
    seen = sc.explain(net, torch.rand(1, 3, 112, 112), composite=composite)
    assert all(bool(torch.isfinite(units).all()) for units in seen.units.values())
    assert seen.conservation.input + seen.conservation.absorbed == pytest.approx(seen.conservation.start, rel=1e-3)


def test_scores_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of gates, which are no part of the total."""
    plain = Backward._score_gates

    def poisoned(self: Backward, leaves: Any) -> None:
        self.gates = [(edge, r * torch.nan) for edge, r in self.gates]
        plain(self, leaves)

    monkeypatch.setattr(Backward, "_score_gates", poisoned)
    with pytest.raises(RelevanceError, match="qkv"):
        sc.explain(Windows().eval(), torch.randn(2, 8, 6), composite="alpha1beta0")


def test_the_constant_part_of_logits_that_are_joined() -> None:
    """Logits plus a constant, joined by `cat`: the same as the sum of joined logits and joined constants."""

    class Joined(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.late, self.qkv, self.head = late, nn.Linear(6, 18), nn.Linear(6, 4)
            self.register_buffer("bias", torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            left, right = q @ k[:, :4].mT, q @ k[:, 4:].mT
            if self.late:
                zeros = torch.zeros(8, 4)
                logits = torch.cat([left, right], -1) + torch.cat([self.bias, zeros], -1)
            else:
                logits = torch.cat([left + self.bias, right], -1)
            return self.head((logits.softmax(-1) @ v).mean(1))

    x = torch.rand(2, 8, 6, generator=torch.Generator().manual_seed(1))
    early, late = (sc.explain(Joined(flag).eval(), x, 1, composite="attnlrp") for flag in (False, True))
    assert torch.allclose(early.input, late.input, rtol=1e-4, atol=1e-6)


def test_attention_by_depth_is_a_share_of_the_layers() -> None:
    net, x = Stack().eval(), torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(1))

    def seen(*lines: On) -> Tensor:
        return sc.explain(net, x, 1, composite=Composite(*lines, On(Epsilon(1e-6)))).input

    queries = Attention(queries=True)
    assert torch.equal(seen(On(queries, depth=(0.0, 1.0))), seen(On(queries)))
    assert torch.equal(seen(On(queries, depth=(0.0, 0.5))), seen(On(queries, modules="first*")))
    assert torch.equal(seen(On(queries, depth=(0.6, 1.0))), seen(On(queries, modules="second*")))
    assert not torch.equal(seen(On(queries, depth=(0.0, 0.5))), seen())
    engine = RelevancePass(net, Composite(On(queries, depth=(0.6, 1.0)), On(Epsilon(1e-6))))
    batches = [engine.run(x, starter(1))[1][0] for _ in range(3)]
    assert all(torch.equal(batches[0], other) for other in batches)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean(1))


class OneHead(nn.Module):
    """Attention with a single head: its values may become narrower, its queries and keys may not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.how == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif self.how == "fused, with a dimension of heads":
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]).squeeze(1)
        else:
            mixed = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.out(mixed).mean(1)


@pytest.mark.parametrize("how", ["fused", "fused, with a dimension of heads", "spelt out"])
def test_planned_macs_of_a_single_head_are_those_of_the_smaller_model(how: str) -> None:
    net, x = OneHead(how).eval(), torch.rand(2, 30, 6)
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, sc.score(net, (x, torch.arange(2)), "weight", graph=graph), remove=0.5)
    assert plan.after.macs < plan.before.macs
    assert plan.after.macs == count_macs(sc.apply(net, plan), x)


# -- batch norms of one's own -----------------------------------------------------------------------------------------
class PlainNorm(nn.BatchNorm2d):
    """A batch norm under another name."""


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("norm", [PlainNorm, NormAct])
def test_subclasses_of_batch_norm_shrink(norm: type[nn.BatchNorm2d]) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.width = 8
            self.a, self.norm, self.b, self.head = nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 4, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.a(x))
            return self.head(self.b(h.reshape(len(x), self.width, *h.shape[2:])).mean((2, 3)))

    net, x = Sized().eval(), torch.rand(2, 3, 8, 8)
    small: Any = removed_half(net, x)
    assert type(small.norm) is norm
    assert small.norm.num_features == small.width == small.a.out_channels < 8


# -- arguments --------------------------------------------------------------------------------------------------------
def painter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))


def test_real_targets_are_no_classes() -> None:
    net, x = painter(), pictures()
    with pytest.raises(DataError, match="loss="):
        sc.score(net, (x, torch.rand(3, 3, 6, 6)), "taylor")
    with pytest.raises(DataError, match="loss="):
        sc.score(net, (x, torch.randn(3, 3, 6, 6)), "gradient")
    sc.score(net, (x, torch.rand(3, 3, 6, 6).softmax(1)), "taylor")
    sc.score(net, (x, torch.rand(3, 3, 6, 6)), Taylor(loss=F.mse_loss))


def test_explain_refuses_what_the_model_does_not_take() -> None:
    net, x = Net(lambda m, h, k: h + k).eval(), pictures()
    with pytest.raises(ForwardError, match="float"):
        sc.explain(net, x.double())
    with pytest.raises(ForwardError, match=r"\(3, 2, 6, 6\)"):
        sc.explain(net, x[:, :2])
    assert torch.equal(sc.explain(net, x.numpy()).input, sc.explain(net, x).input)
    with pytest.raises(CriterionError, match="there is no composite='alpha'"):
        sc.explain(net, x, composite="alpha")


# -- parts that cannot be followed ------------------------------------------------------------------------------------
class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.a, self.b = reentrant, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(lambda t: self.a(t).relu(), x, use_reentrant=self.reentrant)
        return self.b(hidden)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


def nested(levels: int) -> nn.Module:
    net: nn.Module = nn.Linear(4, 6)
    for _ in range(levels):
        net = nn.Sequential(net)
    return nn.Sequential(net, nn.Linear(6, 3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_refused_by_name(reentrant: bool) -> None:
    with pytest.raises(UnsupportedModelError, match="checkpointing"):
        sc.explain(Checkpointed(reentrant), torch.rand(6, 4))
    with pytest.raises(UnsupportedModelError, match="checkpointing"):
        sc.score(Checkpointed(reentrant), (torch.rand(6, 4), torch.arange(6) % 3), "taylor")


@pytest.fixture
def usual_stack() -> Iterator[None]:
    """Python's own limit: libraries that a test before this one imported may have raised it."""
    known = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(known)


@pytest.mark.parametrize(
    ("make", "word"),
    [(lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))), "TorchScript"),
     (lambda: nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3)), "lazy"), (lambda: nested(200), "nested")],
)  # fmt: skip
def test_parts_that_cannot_be_followed_are_refused_by_name(
    make: Callable[[], nn.Module], word: str, usual_stack: None
) -> None:
    net, x, y = make(), torch.rand(6, 4), torch.arange(6) % 3
    acts: list[Callable[[], object]] = [
        lambda: sc.analyze(net, x), lambda: sc.explain(net, x), lambda: sc.score(net, (x, y), "taylor"),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(UnsupportedModelError, match=word):
            act()


def test_compiled_parts_stay_and_are_not_explained() -> None:
    net, x, y = Scripted(), torch.rand(6, 4), torch.arange(6) % 3
    for act in (sc.explain, partial(sc.analyze, strict=True)):
        with pytest.raises(sc.SecateurError, match=r"(?i)torchscript"):
            act(net, x)
    graph = sc.analyze(net, x)
    assert not graph.total_units
    assert "torchscript in `middle`" in str(graph.layers[0].reason)
    sc.score(net, (x, y), "taylor", graph=graph)


def test_deep_nesting_that_fits_is_followed() -> None:
    net, x = nested(100), torch.rand(6, 4)
    assert sc.analyze(net, x).total_units == 6
    sc.explain(net, x)


# -- compiled parts, autocast, outputs in objects, masks ---------------------------------------------------------------
class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


def test_compiled_parts_are_followed_as_they_were_written() -> None:
    x, y = torch.rand(9, 4), torch.arange(9) % 3
    plain, net = Parts(), Parts()
    net.body = torch.compile(net.body, backend="eager")  # type: ignore[assignment]
    names = list(net.state_dict())
    graph = sc.analyze(net, x[:1])
    assert str(graph) == str(sc.analyze(plain, x[:1]))
    for criterion in ("lrp", "taylor", "weight"):
        found, wanted = (sc.prune(each, (x, y), criterion, remove=0.5, progress=False) for each in (net, plain))
        assert found.plan == wanted.plan
        assert list(found.model.state_dict()) == list(wanted.model.state_dict())
        torch.testing.assert_close(found.model(x), wanted.model(x))
    torch.testing.assert_close(sc.explain(net, x).heat, sc.explain(plain, x).heat)
    assert list(net.state_dict()) == names
    assert type(net.body).__name__ == "OptimizedModule"


class Calls(Parts):
    """Calls a function between its layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, x: Tensor) -> Any:
        return self.head(self.function[0](self.body(x)))


def test_compiled_functions_are_followed_as_they_were_written() -> None:
    torch._dynamo.reset()  # it gives up after some compilations of one function, those of other tests included

    def bent(x: Tensor) -> Tensor:
        return x.tanh() + 1

    compiled, x, y = torch.compile(bent, backend="eager"), torch.rand(9, 4), torch.arange(9) % 3
    plain, net = Calls(bent), Calls(compiled)
    for criterion in ("lrp", "taylor", "weight"):
        with warnings.catch_warnings(action="error"):
            found, wanted = (sc.prune(each, (x, y), criterion, remove=0.5, progress=False) for each in (net, plain))
        assert found.plan == wanted.plan
        torch.testing.assert_close(found.model(x), wanted.model(x))
    seen: list[Any] = []
    torch.compile(bent, backend=lambda graph, _: seen.append(graph) or graph.forward)(x)
    assert seen, "functions are compiled again afterwards"


def test_an_optimizer_follows_a_model_with_compiled_parts() -> None:
    x, y = torch.rand(9, 4), torch.arange(9) % 3
    net = Parts()
    net.body = torch.compile(net.body, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    result = sc.prune(net, (x, y), remove=0.5, schedule=Schedule(step=0.25, carry=[optimizer]), progress=False)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in result.model.parameters()}


class Cast(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_autocast_inside_a_forward() -> None:
    x, y, net = torch.rand(9, 4), torch.arange(9) % 3, Cast()
    for criterion in ("taylor", "weight", "activation"):
        small = sc.prune(net, (x, y), criterion, remove=0.5, progress=False).model
        assert small(x).shape == (9, 3)
    for act in (lambda: sc.explain(net, x), lambda: sc.prune(net, (x, y), remove=0.5, progress=False)):
        with pytest.raises(UnsupportedModelError, match=r"linear in `body\.0` runs under torch\.autocast"):
            act()


@dataclass(slots=True)
class Slots:
    logits: Tensor
    features: list[Tensor]


class InSlots(Parts):
    def forward(self, x: Tensor) -> Slots:
        h = self.body(x)
        return Slots(self.head(h), [h])


def test_outputs_in_an_object_with_slots_stay() -> None:
    x, y, net = torch.rand(9, 4), torch.arange(9) % 3, InSlots()
    result = sc.prune(net, (x, y), remove=0.5, progress=False)
    assert set(result.plan.layers) == {"body.0"}
    small = result.model(x)
    assert (small.logits.shape, small.features[0].shape) == ((9, 3), (9, 8))
    assert sc.explain(net, x).output.shape == (9, 3)


def test_a_mask_with_a_norm_over_channels_takes_other_sizes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
    graph = sc.analyze(net, torch.rand(1, 3, 6, 6, dtype=torch.float64))
    plan = sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5)
    assert plan.norms
    small, masked = sc.apply(net, plan), mask(net, plan)
    for height, width in ((6, 6), (9, 11), (4, 20)):
        x = torch.rand(2, 3, height, width, dtype=torch.float64)
        torch.testing.assert_close(masked(x), small(x))


def test_targets_that_are_no_class_are_named() -> None:
    net, x = Parts(), torch.rand(4, 4)
    for wrong in (-7, 3):
        with pytest.raises(DataError, match=f"target {wrong} is not among the 3 outputs"):
            sc.explain(net, x, [0, wrong, 2, 1])


def test_random_numbers_of_the_model_s_device_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids carry no relevance: the device is known from the weights."""

    class OnDevice:
        is_cuda, device = True, torch.device("cuda", 3)

    seen: list[list[int]] = []

    class State:
        def __init__(self, devices: list[int]) -> None:
            seen.append(devices)

        def restore(self) -> None: ...

    net = Parts()
    monkeypatch.setattr(net, "parameters", lambda: iter([OnDevice()]))
    monkeypatch.setattr("secateur.running.sandbox.RandomState", State)
    with isolated(net, []):
        pass
    assert seen == [[3]]


def test_a_function_without_a_derivative_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) // 0.1)

    with pytest.raises(sc.errors.CriterionError, match="floor_divide"):
        sc.score(Net(), [(torch.rand(4, 4), torch.arange(4) % 3)], "gradient")


def test_numbers_that_are_written_over_before_their_derivative_is_taken_are_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = x.exp()
            z = y * 2
            y += 1
            return self.b(y * z)

    data = [(torch.rand(4, 4), torch.arange(4) % 3)]
    with pytest.raises(sc.errors.CriterionError, match=r"Net has no gradient: it writes over .* write to a copy"):
        sc.score(Net(), data, "taylor")
    assert sc.score(Net(), data, "activation").units


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.fft.fft(h).abs(),
        lambda h: torch.logaddexp(h, -h),
    ],
    ids=["fft", "logaddexp"],
)
def test_relevance_through_what_no_rule_is_known_for_is_refused(function: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(function(self.a(x)))

    with pytest.raises(sc.SecateurError, match="no relevance rule is known"):
        sc.explain(Mixed().eval(), torch.rand(3, 6), target=1)
