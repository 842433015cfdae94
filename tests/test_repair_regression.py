"""The regressions of a repair against the normal equations, numpy's least squares, and the layers themselves."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.ops.table import Call, Site, lookup
from secateur.repair.corrections import NOTHING, STRENGTHS, Change, Correction, Mean, Norm, Ridge, best_change
from secateur.repair.moments import FewRows, Moments, Regression
from secateur.repair.rows import Positions, channel_last, read_rows
from secateur.repair.samples import _held, crop_and_flip
from secateur.running.layout import channels_last

CPU = torch.device("cpu")


def call_of(function: Any, *args: Any, **kwargs: Any) -> Call:
    operation = lookup(function)
    assert operation is not None
    return Call(operation, function, args, kwargs, Site("layer", function.__name__, 0))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Call, Tensor, Tensor]:
    """A convolution of any kind as it is called, its input and its weight; float64, no bias."""
    spatial, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(spatial))

    kernel, dilation = each(1, 3), each(1, 2)
    kind = draw(st.sampled_from(["number", "tuple", "same", "valid"]))
    padding = {"number": draw(st.integers(0, 2)), "tuple": each(0, 2)}.get(kind, kind)
    stride = (1,) * spatial if kind == "same" else draw(st.one_of(st.just(each(1, 3)), st.integers(1, 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    size = [5 + n for n in each(0, 2)]
    x = torch.randn(3, inner * groups, *size, generator=generator, dtype=torch.float64)
    weight = torch.randn(outer * groups, inner, *kernel, generator=generator, dtype=torch.float64)
    function = getattr(F, f"conv{spatial}d")
    return call_of(function, x, weight, None, stride, padding, dilation, groups), x, weight


@settings(deadline=None, max_examples=150)
@given(convolutions(), st.booleans(), st.booleans())
def test_rows_times_weight_are_what_a_convolution_gives(
    made: tuple[Call, Tensor, Tensor], some: bool, last: bool
) -> None:
    call, x, weight = made
    wanted = channel_last(call, call.run())
    x = channels_last(x) if last else x  # channels of a pixel lie side by side
    positions = Positions.draw(3, wanted.shape[1], 2 if some else 10**6, torch.Generator().manual_seed(0))
    rows = read_rows(call, x, positions.of(slice(0, 3), CPU))
    groups = int(call["groups"])
    assert rows.shape[2:] == (groups, weight[0].numel())
    per_group = weight.reshape(groups, -1, weight[0].numel())
    found = torch.einsum("spgf,gof->spgo", rows, per_group).flatten(2)
    torch.testing.assert_close(found, positions.take(wanted, slice(0, 3)))
    if some and wanted.shape[1] > 2:
        assert found.shape[1] == 2


@given(st.lists(st.integers(1, 4), max_size=2), st.integers(0, 1))
def test_rows_times_weight_are_what_a_linear_layer_gives(between: list[int], batch: int) -> None:
    batch = min(batch, len(between))
    shape = [*between]
    shape.insert(batch, 5)
    x, weight = torch.randn(*shape, 6).double(), torch.randn(4, 6).double()
    call = call_of(F.linear, x, weight)
    rows = read_rows(call, channel_last(call, x, batch), None)
    wanted = channel_last(call, call.run(), batch)
    assert len(rows) == len(wanted) == 5
    torch.testing.assert_close(rows[:, :, 0] @ weight.T, wanted)


def test_positions_are_drawn_without_repetition() -> None:
    chosen = Positions.draw(50, 30, 20, torch.Generator().manual_seed(0)).chosen
    assert chosen is not None
    assert all(len(set(row)) == 20 for row in chosen.tolist())
    assert len({tuple(row) for row in chosen.tolist()}) > 40  # each sample has its own


def rows(n: int, features: int, groups: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x with unequal scales and means, e that depends on it with noise, y."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(n, groups, features) * (1 + torch.arange(features)) + 3
    e = torch.einsum("ngf,gfo->ngo", x, normal(groups, features, outputs)) + normal(n, groups, outputs) + 1
    return x, e, normal(n, groups, outputs) * 2 - 1


def gathered(
    kind: type[Regression], x: Tensor, e: Tensor, y: Tensor, blocks: int = 1, weights: Tensor | None = None
) -> Regression:
    moments = kind(e.shape[1], e.shape[2], x.shape[2], CPU)
    each = [None] * blocks if weights is None else weights.chunk(blocks)
    for a, b, c, w in zip(x.chunk(blocks), e.chunk(blocks), y.chunk(blocks), each, strict=True):
        moments.add(b, c, a, w)
    return moments


def least_squares(x: Tensor, e: Tensor, strength: float, constant: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ridge of one group by numpy on stacked rows [X; sqrt(λ)I]: weights and constant."""
    a, b = x.numpy(), e.numpy()
    mean_a, mean_b = (a.mean(0), b.mean(0)) if constant else (np.zeros(a.shape[1]), np.zeros(b.shape[1]))
    a, b = a - mean_a, b - mean_b
    ridge = strength * (a**2).mean() * len(a)
    stacked = np.concatenate([a, np.sqrt(ridge) * np.eye(a.shape[1])])
    d = np.linalg.lstsq(stacked, np.concatenate([b, np.zeros((a.shape[1], b.shape[1]))]), rcond=None)[0]
    return d, mean_b - mean_a @ d


@pytest.mark.parametrize("kind", [Regression, FewRows])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [40, 5])
@pytest.mark.parametrize("strength", [10.0, 1e-3])
def test_ridge_is_least_squares_on_stacked_rows(
    kind: type[Regression], constant: bool, groups: int, n: int, strength: float
) -> None:
    x, e, y = rows(n, 7, groups, 4)
    found = Ridge(strength).fit(gathered(kind, x, e, y, blocks=3), constant)
    assert found.weight is not None
    for g in range(groups):
        d, c = least_squares(x[:, g], e[:, g], strength, constant)
        np.testing.assert_allclose(found.weight[g].numpy(), d, rtol=1e-6, atol=1e-9)
        if constant:
            assert found.shift is not None
            np.testing.assert_allclose(found.shift[g].numpy(), c, rtol=1e-6, atol=1e-9)
    assert (found.shift is not None) == constant


@pytest.mark.parametrize("kind", [Regression, FewRows])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("n", [40, 5])
def test_weighted_ridge_solves_the_weighted_normal_equations(kind: type[Regression], constant: bool, n: int) -> None:
    x, e, y = rows(n, 7, 2, 4)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 0.01
    found = Ridge(0.1).fit(gathered(kind, x, e, y, blocks=3, weights=weights), constant)
    assert found.weight is not None
    w = np.diag(weights.numpy())
    for g in range(2):
        a, b = x[:, g].numpy(), e[:, g].numpy()
        if constant:  # a column of ones, which the ridge leaves alone
            centre = np.average(a, axis=0, weights=weights.numpy())
            a = np.concatenate([a, np.ones((n, 1))], 1)
        else:
            centre = np.zeros(7)
        ridge = (
            0.1 * np.average((a[:, :7] - centre) ** 2, axis=0, weights=weights.numpy()).mean() * weights.sum().item()
        )
        penalty = np.diag([ridge] * 7 + [0] * constant)
        wanted = np.linalg.solve(a.T @ w @ a + penalty, a.T @ w @ b)
        np.testing.assert_allclose(found.weight[g].numpy(), wanted[:7], rtol=1e-7, atol=1e-10)
        if constant:
            assert found.shift is not None
            np.testing.assert_allclose(found.shift[g].numpy(), wanted[7], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("kind", [Regression, FewRows])
@pytest.mark.parametrize("correction", [NOTHING, Mean(), Norm(), Ridge(0.1)], ids=str)
def test_a_weight_of_two_is_the_same_row_twice(kind: type[Regression], correction: Correction) -> None:
    fit, held = rows(12, 6, 2, 3), rows(20, 6, 2, 3, seed=1)
    often = torch.arange(12) % 3  # some rows count nothing
    twice = [t.repeat_interleave(often, 0) for t in fit]
    for constant in (True, False):
        if correction == Mean() and not constant:
            continue
        weighted = gathered(kind, *fit, weights=often.double())
        repeated = gathered(kind, *twice)
        a, b = correction.fit(weighted, constant), correction.fit(repeated, constant)
        for one, other in ((a.weight, b.weight), (a.shift, b.shift), (a.scale, b.scale)):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other)
        for way in (fit, held):
            torch.testing.assert_close(a.error(gathered(kind, *way)), b.error(gathered(kind, *way)))
        torch.testing.assert_close(a.error(weighted), a.error(repeated))
        torch.testing.assert_close(weighted.size, repeated.size)


@pytest.mark.parametrize("kind", [Regression, FewRows])
def test_weights_of_one_change_nothing(kind: type[Regression]) -> None:
    fit = rows(12, 6, 2, 3)
    plain, ones = gathered(kind, *fit), gathered(kind, *fit, weights=torch.ones(12))
    for correction in (Mean(), Norm(), Ridge(0.1)):
        a, b = correction.fit(plain, True), correction.fit(ones, True)
        for one, other in ((a.weight, b.weight), (a.shift, b.shift), (a.scale, b.scale)):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("kind", "n"), [(Regression, 4000), (FewRows, 250), (FewRows, 600)])
def test_ridge_in_single_precision_is_close(kind: type[Regression], n: int) -> None:
    x, e, y = rows(n, 300, 1, 4)
    single = kind(1, 4, 300, CPU, single=True)
    for part in zip(e.float().chunk(2), y.float().chunk(2), x.float().chunk(2), strict=True):
        single.add(*part)
    found = Ridge(1e-3).fit(single, True)
    d, _ = least_squares(x[:, 0], e[:, 0], 1e-3, True)
    assert found.weight is not None
    assert np.abs(found.weight[0].numpy() - d).max() < 1e-4 * np.abs(d).max()


@pytest.mark.parametrize("kind", [Regression, FewRows])
@pytest.mark.parametrize("constant", [True, False])
def test_what_joins_may_be_sums_or_rows(kind: type[Regression], constant: bool) -> None:
    x, e, y = rows(300, 20, 3, 2)
    fit, held = Regression(3, 2, 20, CPU), kind(3, 2, 20, CPU)
    fit.add(e[:200], y[:200], x[:200])
    held.add(e[200:], y[200:], x[200:])
    Ridge(1.0).fit(fit, constant)  # another solution, which must not be taken for that of all rows
    fit.join(held)
    found = Ridge(1e-3).fit(fit, constant)
    assert found.weight is not None
    for group in range(3):
        d, _ = least_squares(x[:, group], e[:, group], 1e-3, constant)
        np.testing.assert_allclose(found.weight[group].numpy(), d, rtol=0, atol=1e-9 * np.abs(d).max())


@pytest.mark.parametrize("single", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("constant", [True, False])
def test_rows_of_another_precision_may_join(single: tuple[bool, bool], constant: bool) -> None:
    x, e, y = rows(90, 300, 1, 4)
    fit, held = (FewRows(1, 4, 300, CPU, single=one) for one in single)
    fit.add(e[:60].float(), y[:60].float(), x[:60].float())
    held.add(e[60:].float(), y[60:].float(), x[60:].float())
    Ridge(1.0).fit(fit, constant)
    fit.join(held)
    found = Ridge(1e-3).fit(fit, constant)
    d, _ = least_squares(x[:, 0], e[:, 0], 1e-3, constant)
    assert found.weight is not None
    assert np.abs(found.weight[0].numpy() - d).max() < 1e-4 * np.abs(d).max()


@pytest.mark.parametrize("kind", [Regression, FewRows])
@pytest.mark.parametrize("constant", [True, False])
def test_a_second_strength_and_a_second_look_give_the_same(kind: type[Regression], constant: bool) -> None:
    x, e, y = rows(60, 20, 2, 4)
    moments = gathered(kind, x, e, y)
    Ridge(1.0).fit(moments, constant)
    for _ in range(2):  # the second time by the factor
        found = Ridge(1e-2).fit(moments, constant)
        assert found.weight is not None
        for g in range(2):
            d, _ = least_squares(x[:, g], e[:, g], 1e-2, constant)
            np.testing.assert_allclose(found.weight[g].numpy(), d, rtol=1e-6, atol=1e-9)


class Live(TorchDispatchMode):
    """How many bytes of new storages live at a time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}  # of which it may be a view
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._known | given:
                self._known.add(key)
                self.now += (size := tensor.untyped_storage().nbytes())
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize(("kind", "n"), [(Regression, 1500), (FewRows, 1200)])
def test_a_search_holds_one_matrix_of_double_precision(kind: type[Regression], n: int) -> None:
    size = 1200  # unknowns, or rows
    generator = torch.Generator().manual_seed(0)
    x, e, more, rest = (torch.randn(rows, 1, width, generator=generator) for rows, width in ((n, size), (n, 4)) * 2)
    fit, held = kind(1, 4, size, CPU, single=True), FewRows(1, 4, size, CPU, single=True)
    fit.add(e, e, x)
    held.add(rest[:50], rest[:50], more[:50])
    if kind is FewRows:
        fit.solve(1.0, True)  # products of rows are computed once
    with Live() as live:
        best_change(Ridge(), fit, held, True)
    assert 8 * size**2 <= live.most < 14 * size**2  # a second one would be 16; blocks of it are copied


def corrected(change: Change, x: Tensor, e: Tensor, y: Tensor) -> Tensor:
    """What is still missing, row by row."""
    given = y if change.scale is None else y * change.scale
    if change.weight is not None:
        given = given + torch.einsum("ngf,gfo->ngo", x, change.weight)
    if change.shift is not None:
        given = given + change.shift
    return y + e - given


@pytest.mark.parametrize("kind", [Regression, FewRows])
@pytest.mark.parametrize("correction", [NOTHING, Mean(), Norm(), Ridge(0.1), Ridge(100)], ids=str)
@pytest.mark.parametrize("constant", [True, False])
def test_error_is_the_mean_square_over_rows(kind: type[Regression], correction: Correction, constant: bool) -> None:
    if correction == Mean() and not constant:
        return
    fit, held = rows(30, 6, 2, 3), rows(20, 6, 2, 3, seed=1)
    change = correction.fit(gathered(kind, *fit), constant)
    assert change.correction == correction
    expected = corrected(change, *held).square().mean(0)
    torch.testing.assert_close(change.error(gathered(kind, *held)), expected)


def test_mean_and_norm_match_the_statistics_they_name() -> None:
    x, e, y = rows(50, 3, 2, 4)
    y = y * 0.5
    e = (torch.randn_like(y) * 0.7 + 1) - y  # targets whose scale is near that of y
    moments = gathered(Regression, x, e, y)
    left = corrected(Mean().fit(moments, True), x, e, y)
    torch.testing.assert_close(left.mean(0), torch.zeros(2, 4).double(), atol=1e-12, rtol=0)
    norm = Norm().fit(moments, True)
    assert norm.scale is not None
    assert norm.shift is not None
    made, wanted = y * norm.scale + norm.shift, y + e
    torch.testing.assert_close(made.mean(0), wanted.mean(0))
    torch.testing.assert_close(made.var(0), wanted.var(0))
    assert Norm().fit(moments, False).shift is None


def test_a_channel_that_does_not_vary_gives_no_scale() -> None:
    y = torch.randn(40, 1, 3).double()
    y[:, :, 1] = 2.0
    moments = Moments(1, 3, CPU)
    moments.add(torch.randn(40, 1, 3).double(), y)
    norm = Norm().fit(moments, True)
    assert norm.scale is not None
    assert float(norm.scale[0, 1]) == 1.0
    assert bool((norm.scale <= 4).all())


def _strength(change: Change) -> float:
    assert isinstance(change.correction, Ridge)
    return change.correction.strength


def test_noise_asks_for_a_strong_ridge_or_nothing_and_signal_for_a_weak_one() -> None:
    strong = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, e, y = (torch.randn(220, 1, f, generator=generator).double() for f in (20, 5, 5))
        fit, held = (gathered(Regression, *(t[part] for t in (x, e, y))) for part in (slice(20), slice(20, 220)))
        best, least, first = best_change(Ridge(), fit, held, True)
        assert least <= first
        strong += best.weight is None or _strength(best) >= 10
    assert strong == 20
    x, e, y = rows(300, 20, 1, 5)
    e = torch.einsum("ngf,gfo->ngo", x, torch.randn(1, 20, 5).double())  # without noise
    fit, held = (gathered(Regression, *(t[part] for t in (x, e, y))) for part in (slice(200), slice(200, 300)))
    best, least, first = best_change(Ridge(), fit, held, True)
    assert least < 1e-8 * first


def test_the_search_finds_what_trying_everything_finds() -> None:
    for seed in range(10):
        x, e, y = rows(60, 25, 1, 3, seed)
        e = e + 40 * torch.randn(60, 1, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        fit, held = (gathered(Regression, *(t[part] for t in (x, e, y))) for part in (slice(40), slice(40, 60)))
        costs = [float(Ridge(s).fit(fit, True).error(held).sum()) for s in STRENGTHS]
        turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(costs, costs[1:], costs[2:], strict=False))
        if turns > 1:
            continue
        for near in (None, Ridge(1e-5), Ridge(100)):
            _, least, _ = best_change(Ridge(), fit, held, True, near=near)
            mild = [float(c.fit(fit, True).error(held).sum()) for c in (NOTHING, Mean())]
            assert math.isclose(least, min(*costs, *mild), rel_tol=1e-12)


def test_without_held_out_rows_only_strong_ridges_are_tried() -> None:
    x, e, y = rows(10, 20, 1, 5)  # more features than rows: weak ridges would learn them by heart
    fit, empty = gathered(Regression, x, e, y), Regression(1, 5, 20, CPU)
    best, _, _ = best_change(Ridge(), fit, empty, True)
    assert best.weight is None or _strength(best) >= 1


@given(st.integers(1, 60), st.floats(0.05, 0.5), st.booleans(), st.integers(0, 5))
def test_held_out_samples_are_a_share_of_every_class(count: int, share: float, classes: bool, seed: int) -> None:
    targets = torch.arange(count) % 3 if classes else None
    held = _held(count, targets, share, torch.Generator().manual_seed(seed))
    assert len(held) == count
    assert abs(int(held.sum()) - share * count) <= 1
    assert bool(held.any()) == (count > 1)
    assert not bool(held.all())
    if classes and share * (count // 3) >= 1:
        assert targets is not None
        assert len(set(targets[held].tolist())) == 3


def test_copies_show_parts_of_the_image_and_are_repeatable() -> None:
    ramp = torch.linspace(0, 1, 32).expand(6, 1, 32, 32).clone()  # brightness is the place across
    made = crop_and_flip(ramp, torch.Generator().manual_seed(0))
    assert made.shape == ramp.shape
    assert torch.equal(made, crop_and_flip(ramp, torch.Generator().manual_seed(0)))
    spread = made[:, 0, 0].amax(1) - made[:, 0, 0].amin(1)
    assert bool((spread > math.sqrt(0.5) - 0.1).all())
    assert bool((spread <= 1).all())
    rising = (made[:, 0, 0].diff(dim=1) >= -1e-6).all(1)
    falling = (made[:, 0, 0].diff(dim=1) <= 1e-6).all(1)
    assert bool((rising ^ falling).all())
    assert 0 < int(falling.sum()) < 6
