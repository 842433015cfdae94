"""Convolutions that run on feature maps of several sizes are repaired as one regression over the rows of all.

The oracle knows nothing of secateur: it reads every row by slicing a padded image, and solves the ridge with numpy.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sc
from secateur.errors import SecateurWarning
from secateur.plans.plan import plan_for
from secateur.repair import Repair
from secateur.repair.layers import survey

OUT = 6


@dataclass(frozen=True)
class Kind:
    """A convolution, what follows it, and the sizes it runs on."""

    sizes: tuple[tuple[int, ...], ...] = ((6, 6), (3, 4), (1, 1))
    kernel: tuple[int, ...] = (3, 3)
    stride: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    mode: str = "zeros"
    padding: str = "half"
    bias: bool = True
    #: No norm, one for all sizes, or one for each.
    norm: str = "none"

    @property
    def pads(self) -> list[tuple[int, int]]:
        """Before and after each dimension."""
        spans = [d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True)]
        if self.padding == "half":
            return [(span // 2 + span % 2,) * 2 for span in spans]
        return [(span // 2, span - span // 2) for span in spans]  # "same"


class Shared(nn.Module):
    """A body of nine channels at several sizes, a convolution that all of them share, and heads of their own."""

    a: nn.Conv2d | nn.ConvTranspose2d

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, spatial = kind, len(kind.kernel)
        self.stem, self.body = conv(spatial)(2, 8, 1), conv(spatial)(8, 9, 1)
        padding: Any = tuple(before for before, _ in kind.pads) if kind.padding == "half" else "same"
        self.a = conv(spatial)(
            9, 9 if kind.groups == 9 else OUT, kind.kernel, kind.stride, padding, kind.dilation, kind.groups,
            kind.bias, kind.mode,
        )  # fmt: skip
        norms = {"none": 0, "one": 1, "each": len(kind.sizes)}[kind.norm]
        self.norms = nn.ModuleList(norm(spatial)(self.a.out_channels) for _ in range(norms))
        for own in self.norms:
            nn.init.uniform_(own.running_var, 0.5, 2)  # type: ignore[arg-type]
            nn.init.normal_(own.running_mean, 0, 0.3)  # type: ignore[arg-type]
            nn.init.uniform_(own.weight, 0.5, 1.5)  # type: ignore[arg-type]
        self.heads = nn.ModuleList(nn.Linear(self.a.out_channels, 3) for _ in kind.sizes)

    def maps(self, x: Tensor) -> list[Tensor]:
        whole = self.body(self.stem(x).relu()).relu()
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[len(self.kind.kernel) - 1]
        return [(number + 1) * pool(whole, size) for number, size in enumerate(self.kind.sizes)]  # type: ignore[operator]

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for number, m in enumerate(self.maps(x)):
            y = self.a(m)
            if len(self.norms):
                y = self.norms[number % len(self.norms)](y)
            out.append(self.heads[number](y.flatten(2).mean(2)))
        return out


def conv(spatial: int) -> type[nn.Conv1d] | type[nn.Conv2d]:
    return nn.Conv1d if spatial == 1 else nn.Conv2d


def norm(spatial: int) -> type[nn.BatchNorm1d] | type[nn.BatchNorm2d]:
    return nn.BatchNorm1d if spatial == 1 else nn.BatchNorm2d


def without(model: Shared, x: Tensor) -> Shared:
    """The model without some channels of its stem."""
    graph = sc.analyze(model, x[:1])
    stem = next(p for p in graph.producers if p.sites[0].path == "stem")
    removed = np.zeros(len(graph.root), np.bool_)
    removed[graph.root[stem.labels[[1, 4, 6]]]] = True
    return sc.apply(model, plan_for(graph, removed))


def patches(m: Tensor, kind: Kind) -> Tensor:
    """What the convolution reads for each row: (samples, positions, channels, places of the kernel), by slicing."""
    sides = [side for pair in reversed(kind.pads) for side in pair]
    m = F.pad(m, sides, "constant" if kind.mode == "zeros" else kind.mode)
    corners = [
        range(0, size - d * (k - 1), s)
        for size, k, d, s in zip(m.shape[2:], kind.kernel, kind.dilation, kind.stride, strict=True)
    ]
    rows = []
    for corner in itertools.product(*corners):
        cut = tuple(
            slice(at, at + d * (k - 1) + 1, d) for at, k, d in zip(corner, kind.kernel, kind.dilation, strict=True)
        )
        rows.append(m[(slice(None), slice(None), *cut)].flatten(2))
    return torch.stack(rows, 1)


def ridge(x: np.ndarray, e: np.ndarray, strength: float, constant: bool) -> tuple[np.ndarray, np.ndarray]:
    """The change of weights and the constant, by least squares on stacked rows."""
    mean_x, mean_e = (x.mean(0), e.mean(0)) if constant else (np.zeros(x.shape[1]), np.zeros(e.shape[1]))
    x, e = x - mean_x, e - mean_e
    root = np.sqrt(strength * (x**2).mean() * len(x)) * np.eye(x.shape[1])
    d = np.linalg.lstsq(np.concatenate([x, root]), np.concatenate([e, np.zeros((len(root), e.shape[1]))]), rcond=None)[
        0
    ]
    return d, mean_e - mean_x @ d


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    spatial = draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["half", "half", "same"]))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(spatial))

    stride = (1,) * spatial if padding == "same" else each(1, 2)
    # A reflection needs an image that is larger than its border.
    mode = draw(st.sampled_from(["zeros", "zeros", "replicate", "circular", "reflect"]))
    least = 1 if mode in ("zeros", "replicate") else 4
    sizes = draw(st.lists(st.tuples(*[st.integers(least, 6)] * spatial), min_size=2, max_size=3))
    return Kind(
        tuple(sizes), each(1, 3), stride, each(1, 2), draw(st.sampled_from([1, 1, 3, 9])), mode, padding,
        draw(st.booleans()), draw(st.sampled_from(["none", "one", "each"])),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(kinds(), st.sampled_from([None, 7]), st.integers(0, 99))
def test_a_shared_convolution_is_one_regression_over_all_sizes(kind: Kind, at_once: int | None, seed: int) -> None:
    check(kind, at_once, seed)


@pytest.mark.parametrize("norm", ["one", "each"])
def test_norms_behind_a_shared_convolution_carry_its_constant(norm: str) -> None:
    check(Kind(bias=False, norm=norm), None, 0)


def check(kind: Kind, at_once: int | None, seed: int) -> None:
    """Compare weights and constants with the oracle's."""
    torch.manual_seed(seed)
    model = Shared(kind).double().eval()
    x = torch.randn(20, 2, *[6] * len(kind.kernel), dtype=torch.float64)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    small = without(model, x)
    places = [model.a(m)[0, 0].numel() for m in model.maps(x)]
    known = survey(model, x[:2]).layers
    if len(set(places)) < len(places):  # twice on one size: it stays as it is
        assert "a.weight" not in known
        return
    assert [call.positions for call in known["a.weight"].calls] == places
    settings = Repair("ridge", copies=0, held_out=0.0, rounds=0, at_once=at_once)
    found = settings.examine(small, model, (x, None), progress=False)
    made = found.model
    assert isinstance(made, Shared)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    strength = found.layers["a.weight"].strength  # type: ignore[attr-defined]
    with torch.no_grad():  # the body was corrected before: the convolution is fitted to what it will read
        reads = torch.cat([patches(m, kind).flatten(0, 1) for m in made.maps(x)])
        pairs = zip(model.maps(x), made.maps(x), strict=True)
        lacks = torch.cat([(model.a(w) - small.a(m)).flatten(2).mT.flatten(0, 1) for w, m in pairs])
    assert len(reads) == len(lacks) == 20 * sum(places)
    change = (made.a.weight - small.a.weight).detach()
    inner, outer = reads.shape[1] // kind.groups, lacks.shape[1] // kind.groups
    for g in range(kind.groups):
        own = slice(g * outer, (g + 1) * outer)
        mine = reads[:, g * inner : (g + 1) * inner].flatten(1).numpy()
        d, constant = ridge(mine, lacks[:, own].numpy(), strength, kind.bias or kind.norm != "none")
        np.testing.assert_allclose(change[own].flatten(1).T.numpy(), d, rtol=1e-5, atol=1e-8)
        if made.a.bias is not None and small.a.bias is not None:
            moved = [(made.a.bias - small.a.bias).detach()]
        else:
            moved = [one.running_mean - other.running_mean for one, other in zip(small.norms, made.norms, strict=True)]  # type: ignore[operator]
        for shift in moved:
            np.testing.assert_allclose(shift[own].numpy(), constant, rtol=1e-5, atol=1e-7)


def test_a_shared_transposed_convolution_gets_the_means_of_all_sizes() -> None:
    torch.manual_seed(0)
    model = Shared(Kind())
    model.a = nn.ConvTranspose2d(9, OUT, 3, 2)
    model, x = model.double().eval(), torch.randn(20, 2, 6, 6, dtype=torch.float64)
    made = Repair("mean", copies=0, held_out=0.0).examine(without(model, x), model, (x, None), progress=False).model
    assert isinstance(made, Shared)
    with torch.no_grad():
        wanted = torch.cat([model.a(m).flatten(2).mT.flatten(0, 1) for m in model.maps(x)])
        mine = torch.cat([made.a(m).flatten(2).mT.flatten(0, 1) for m in made.maps(x)])
    torch.testing.assert_close(mine.mean(0), wanted.mean(0))


class Limited(nn.Module):
    """A convolution on two sizes; a ReLU hides what is negative on some of them."""

    def __init__(self, *hides: bool) -> None:
        super().__init__()
        self.a, self.hides = nn.Conv2d(2, 4, 1), hides

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [self.a(m) for m in (x, x[..., ::2, ::2])]
        return [y.relu() if hide else y for y, hide in zip(made, self.hides, strict=True)]


@pytest.mark.parametrize("hides", [(True, True), (True, False), (False, True)])
def test_what_a_relu_hides_on_one_size_still_counts_on_another(hides: tuple[bool, bool]) -> None:
    layer = survey(Limited(*hides).eval(), torch.randn(2, 2, 4, 4)).layers["a.weight"]
    assert len(layer.calls) == 2
    assert layer.limits == ((0.0, float("inf")) if all(hides) else None)


def test_a_repair_takes_no_answer_for_the_only_one() -> None:
    """All outputs are compared with the original's: nothing is to be said about the others."""
    torch.manual_seed(0)
    model, x = Shared(Kind()).eval(), torch.randn(8, 2, 6, 6)
    small = without(model, x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sc.repair(small, model, (x, None), "mean", copies=0, progress=False)
    assert [str(one.message) for one in told if issubclass(one.category, SecateurWarning)] == []


class Detour(nn.Module):
    """A convolution on two sizes. A stream is added on the first, which the answer does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.body(x).relu()
        self.seen = (self.a(first) + first).relu().detach()
        second: Tensor = self.head(self.a(F.avg_pool2d(first, 2)).relu().mean((2, 3)))
        return second


def test_relevance_of_another_size_weighs_no_rows() -> None:
    torch.manual_seed(0)
    model, x = Detour().eval(), torch.randn(24, 3, 8, 8)
    graph = sc.analyze(model, x[:1])
    body = next(p for p in graph.producers if p.sites[0].path == "body")
    removed = np.zeros(len(graph.root), np.bool_)
    removed[graph.root[body.labels[[1, 4]]]] = True
    small = sc.apply(model, plan_for(graph, removed))
    found = Repair("ridge", copies=0, relevance=0.5).examine(small, model, (x, None), progress=False)
    assert found.divergence["ridge"] < found.divergence["none"]
