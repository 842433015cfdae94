"""Every rule against its definition, written out slowly on the dense matrix of the layer.

The oracle knows nothing of the implementation: it asks the layer for its matrix, one basis vector at a time, and then
follows the formula output by output.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur.errors import ConservationWarning, CriterionError
from secateur.relevance import AlphaBeta, Box, Composite, Epsilon, Flat, Gamma, Norm, On, Pass, WSquare, ZPlus, explain

pytestmark = pytest.mark.usefixtures("one_rule")

LAYERS = {
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear on tokens": (lambda: nn.Linear(4, 5), (3, 4)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1), (2, 4, 5)),
    "conv2d, stride and dilation": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=2, dilation=2), (2, 5, 6)),
    "conv2d, grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 3, 3)),
    "conv2d, depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3), (3, 4, 4)),
    "conv2d, same, odd": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2, output_padding=1), (3, 4)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 3, 3)),
    "transposed 2d, grouped": (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2), (4, 3, 3)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 2, 2), (2, 2, 2, 2)),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}


def matrix(layer: nn.Module, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The layer as z = M a + b, in float64, from its answers to zero and to the basis vectors."""
    layer = _double(layer)
    with torch.no_grad():
        bias = layer(torch.zeros(1, *shape, dtype=torch.float64))
        basis = torch.eye(int(np.prod(shape)), dtype=torch.float64).reshape(-1, *shape)
        rows = layer(basis) - bias
    return rows.flatten(1).T.numpy(), bias.flatten().numpy()


def seen(layer: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    """Which inputs an output can see, whatever the weights: the matrix of the same layer with weights of one."""
    layer = _double(layer)
    nn.init.ones_(layer.weight)
    return matrix(layer, shape)[0] != 0


def _double(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).double()


# -- the definitions ---------------------------------------------------------------------------------------------------
def alpha_beta(alpha, beta):
    def rule(m, b, a, r, sees):
        shared = np.zeros_like(a)
        for j in range(len(r)):
            z = a * m[j]
            positive, negative = np.maximum(z, 0), np.minimum(z, 0)
            p, n = positive.sum(), negative.sum()
            if p != 0 and n != 0:
                shared += (alpha * positive / p + beta * negative / n) * r[j]
            elif p != 0:
                shared += positive / p * r[j]
            elif n != 0:
                shared += negative / n * r[j]
            elif sees[j].any():
                shared += sees[j] / sees[j].sum() * r[j]
        return shared

    return rule


def epsilon(value, bias):
    def rule(m, b, a, r, sees):
        shared = np.zeros_like(a)
        for j in range(len(r)):
            z = a * m[j]
            offset = 0.0 if bias == "ignore" else b[j]
            total = z.sum() + offset
            if total == 0 and bias != "absorb" and sees[j].any():
                shared += sees[j] / sees[j].sum() * r[j]
            total += value if total >= 0 else -value
            shared += z / total * r[j]
            if bias == "spread" and sees[j].any():
                shared += sees[j] / sees[j].sum() * offset / total * r[j]
        return shared

    return rule


def gamma(value, bias):
    def rule(m, b, a, r, sees):
        shared = np.zeros_like(a)
        for j in range(len(r)):
            parts = np.append(a * m[j], 0.0 if bias == "ignore" else b[j])
            favoured = np.maximum(parts, 0) if parts.sum() >= 0 else np.minimum(parts, 0)
            parts = parts + value * favoured
            if parts.sum() == 0:
                shared += 0 if bias == "absorb" or not sees[j].any() else sees[j] / sees[j].sum() * r[j]
                continue
            share = parts / parts.sum() * r[j]
            shared += share[:-1]
            if bias == "spread" and sees[j].any():
                shared += sees[j] / sees[j].sum() * share[-1]
        return shared

    return rule


def box(low, high):
    def rule(m, b, a, r, sees):
        shared = np.zeros_like(a)
        for j in range(len(r)):
            z = a * m[j] - low * np.maximum(m[j], 0) - high * np.minimum(m[j], 0)
            if z.sum() != 0:
                shared += z / z.sum() * r[j]
        return shared

    return rule


def w_square(m, b, a, r, sees):
    return sum(m[j] ** 2 / (m[j] ** 2).sum() * r[j] for j in range(len(r)) if (m[j] != 0).any())


def flat(m, b, a, r, sees):
    return sum(sees[j] / sees[j].sum() * r[j] for j in range(len(r)) if sees[j].any())


RULES = {
    "α1β0": (AlphaBeta(1, 0), alpha_beta(1, 0)),
    "α2β1, α + β = 1": (AlphaBeta(2, -1), alpha_beta(2, -1)),
    "α2β1, α - β = 1": (AlphaBeta(2, 1), alpha_beta(2, -1)),
    "α½β½": (AlphaBeta(0.5, 0.5), alpha_beta(0.5, 0.5)),
    "z+": (ZPlus(), alpha_beta(1, 0)),
    "ε, bias spread": (Epsilon(0.25), epsilon(0.25, "spread")),
    "ε, bias absorbs": (Epsilon(0.25, bias="absorb"), epsilon(0.25, "absorb")),
    "ε, no bias": (Epsilon(0.25, bias="ignore"), epsilon(0.25, "ignore")),
    "norm": (Norm(0.25), epsilon(0.25, "ignore")),
    "γ, bias spread": (Gamma(0.25), gamma(0.25, "spread")),
    "γ, bias absorbs": (Gamma(0.5, bias="absorb"), gamma(0.5, "absorb")),
    "γ, no bias": (Gamma(2.0, bias="ignore"), gamma(2.0, "ignore")),
    "zB": (Box(-3.0, 3.0), box(-3.0, 3.0)),
    "w²": (WSquare(), w_square),
    "flat": (Flat(), flat),
}


def check(layer, shape, rule, oracle, dtype, nonneg, seed=0):
    torch.manual_seed(seed)
    layer = layer.to(dtype)
    a = torch.randn(1, *shape).clamp(-2.5, 2.5).to(dtype)
    if nonneg:
        a = a.relu()
    model = nn.Sequential(nn.ReLU(), layer) if nonneg else layer
    r = torch.rand_like(layer(a)) + 0.1
    with quiet():
        found = explain(model, a, r, composite=rule).input
    m, b = matrix(layer, shape)
    wanted = oracle(m, b, a.double().flatten().numpy(), r.double().flatten().numpy(), seen(layer, shape))
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found.double().flatten().numpy() / scale, wanted / scale, atol=TOLERANCE[dtype])


@contextmanager
def quiet():
    """Some rules leak by definition, and say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConservationWarning)
        yield


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", LAYERS)
def test_rule_equals_its_definition(layer, rule, dtype):
    torch.manual_seed(1)
    build, shape = LAYERS[layer]
    for nonneg in (False, True):
        check(build(), shape, *RULES[rule], dtype, nonneg)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 2), st.booleans(),
    st.sampled_from(sorted(RULES)), st.integers(0, 10**6),
)  # fmt: skip
def test_any_convolution(width, kernel, stride, groups, padding, bias, rule, seed):
    torch.manual_seed(seed)
    layer = nn.Conv2d(width * groups, 2 * groups, kernel, stride, padding, groups=groups, bias=bias)
    check(layer, (width * groups, 4, 5), *RULES[rule], torch.float64, False, seed)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 4))
def test_alpha_beta_conserves(seed, alpha):
    torch.manual_seed(seed)
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    a, r = torch.randn(2, 3, 5, 5).double(), torch.rand(2, 4, 5, 5).double()
    assert explain(layer, a, r, composite=AlphaBeta(alpha, 1 - alpha)).input.sum() == pytest.approx(float(r.sum()))


def test_alpha_beta_must_add_up():
    with pytest.raises(CriterionError, match="must be 1"):
        AlphaBeta(2, 2)


def test_pass_keeps_relevance_and_refuses_other_shapes():
    a, r = torch.randn(1, 3, 4, 4), torch.rand(1, 3, 4, 4)
    same = nn.Conv2d(3, 3, 3, padding=1)
    assert torch.equal(explain(same, a, r, composite=Pass()).input, r)
    with pytest.raises(CriterionError, match="cannot pass unchanged"):
        explain(nn.Conv2d(3, 5, 3, padding=1), a, torch.rand(1, 5, 4, 4), composite=Pass())


def test_relevance_of_a_dead_output_is_not_lost():
    # Both weights are negative: the output is positive through its bias alone.
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-1.0, -3.0, -1.0]]))
        layer.bias.fill_(5.0)
    found = explain(nn.Sequential(nn.ReLU(), layer), torch.tensor([[1.0, 1.0, 0.0]]), 0).input
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75, 0.0]]))
    found = explain(nn.Sequential(nn.ReLU(), layer), torch.zeros(1, 3), 0).input
    torch.testing.assert_close(found, torch.full((1, 3), 1 / 3))


# -- batch norm --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d, grouped", "conv3d", "transposed 2d, grouped"])
def test_batch_norm_is_folded_into_the_layer_before_it(layer):
    torch.manual_seed(2)
    build, shape = LAYERS[layer]
    first = build().double()
    norms = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}
    width = first(torch.zeros(1, *shape).double()).shape[1]
    norm = norms[len(shape)](width).double().eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    both = nn.Sequential(first, norm)
    a = torch.randn(1, *shape).double()
    r = torch.rand_like(both(a))
    m, b = matrix(both, shape)
    for name in ("α1β0", "ε, bias absorbs", "γ, bias spread"):
        rule, oracle = RULES[name]
        with quiet():
            found = explain(both, a, r, composite=rule).input
        wanted = oracle(m, b, a.flatten().numpy(), r.flatten().numpy(), seen(first, shape))
        np.testing.assert_allclose(found.flatten().numpy(), wanted, rtol=1e-7, atol=1e-9)


def test_batch_norm_without_a_layer_before_it_passes_relevance():
    norm = nn.BatchNorm2d(3).eval()
    nn.init.normal_(norm.weight)
    r = torch.rand(2, 3, 4, 4)
    assert torch.equal(explain(norm, torch.randn(2, 3, 4, 4), r).input, r)


def test_a_layer_read_by_others_than_its_batch_norm():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            return torch.cat([y, self.norm(y)], 1)

    torch.manual_seed(0)
    net, x, r = Fork().double().eval(), torch.randn(1, 2, 3, 3).double(), torch.rand(1, 6, 3, 3).double()
    net.norm.running_mean.normal_()
    nn.init.normal_(net.norm.weight)
    alone = explain(net.conv, x, r[:, :3]).input + explain(nn.Sequential(net.conv, net.norm), x, r[:, 3:]).input
    torch.testing.assert_close(explain(net, x, r).input, alone)


# -- pools, sums, gates ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ],
    ids=repr,
)
def test_average_pools_share_by_the_positive_part(pool, signed):
    torch.manual_seed(0)
    a = torch.randn(1, 2, 5, 7).double()
    a = a if signed else a.relu()
    model = pool if signed else nn.Sequential(nn.ReLU(), pool)
    r = torch.rand_like(pool(a))
    m, b = matrix(pool, (2, 5, 7))
    wanted = alpha_beta(1, 0)(m, b, a.flatten().numpy(), r.flatten().numpy(), m)  # silent windows: by the weights
    np.testing.assert_allclose(explain(model, a, r).input.flatten().numpy(), wanted, atol=1e-9)


def test_overlapping_patches_share_by_the_positive_part():
    torch.manual_seed(0)
    fold = nn.Fold((4, 4), 3, padding=1, stride=2).double()
    a = torch.randn(1, 18, 4).double()
    r = torch.rand_like(fold(a))
    m, b = matrix(fold, (18, 4))
    wanted = RULES["α1β0"][1](m, b, a.flatten().numpy(), r.flatten().numpy(), m != 0)
    np.testing.assert_allclose(explain(fold, a, r).input.flatten().numpy(), wanted, rtol=1e-7, atol=1e-9)


def test_max_pool_adds_up_where_windows_overlap():
    a = torch.tensor([[[0.0, 1.0, 5.0, 2.0, 0.0]]])
    r = torch.tensor([[[1.0, 10.0, 100.0]]])
    found = explain(nn.MaxPool1d(3, stride=1), a, r).input
    assert found.tolist() == [[[0.0, 0.0, 111.0, 0.0, 0.0]]]


class Op(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_sums_share_by_the_positive_parts():
    a = torch.tensor([[3.0, -2.0, 2.0, -1.0, 0.0]])
    b = torch.tensor([[1.0, 4.0, -5.0, -3.0, 0.0]])
    r = torch.tensor([[4.0, 1.0, 1.0, 4.0, 2.0]])
    left, right = explain(Op(lambda a, b: a + b), (a, b), r).input
    torch.testing.assert_close(left, torch.tensor([[3.0, 0.0, 1.0, 1.0, 2.0]]))  # of two zeros, the first
    torch.testing.assert_close(right, torch.tensor([[1.0, 1.0, 0.0, 3.0, 0.0]]))
    left, right = explain(Op(lambda a, b: a - b), (a, -b), r).input
    torch.testing.assert_close(left, torch.tensor([[3.0, 0.0, 1.0, 1.0, 2.0]]))


def test_sums_under_epsilon_share_by_sign():
    a, b, r = torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([[4.0, 4.0]])
    left, right = explain(Op(lambda a, b: a + b), (a, b), r, composite=Composite(On(Norm(1e-9)))).input
    torch.testing.assert_close(left, torch.tensor([[3.0, -2.0]]))
    torch.testing.assert_close(right, torch.tensor([[1.0, 6.0]]))


def test_constants_take_no_relevance_from_sums_and_products():
    x, r = torch.randn(2, 4), torch.rand(2, 4)
    for function in (lambda x: x + 3, lambda x: 2 - x, lambda x: x * 0.3, lambda x: x / 7, lambda x: x + torch.ones(4)):
        assert torch.equal(explain(Op(function), x, r).input, r)


def test_what_parameters_make_of_constants_takes_no_relevance():
    # As the position biases of Swin V2: a network that never sees the input.
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.side = nn.Sequential(nn.Conv1d(1, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5))

        def forward(self, x):
            return x + self.side(torch.ones(1, 1, 2))

    torch.manual_seed(0)
    r = torch.rand(2, 5)
    found = explain(Biased().eval(), torch.rand(2, 5), r)
    torch.testing.assert_close(found.input, r)
    assert not found.units


def test_gates_take_no_relevance():
    x, r = torch.randn(2, 4, 3, 3), torch.rand(2, 4, 3, 3)
    gated = {
        "sigmoid": lambda x: x * torch.sigmoid(x.flip(1)),
        "squeeze": lambda x: x.mean((2, 3), keepdim=True) * x,
        "in place": lambda x: (x * 1.0).mul_(torch.sigmoid(x.flip(1))),
        "softmax": lambda x: x.flip(1).softmax(1) * x,
    }
    for function in gated.values():
        assert torch.equal(explain(Op(function), x, r).input, r)
    halves = explain(Op(lambda x: x * x.flip(1)), x, r).input
    torch.testing.assert_close(halves, (r + r.flip(1)) / 2)


@pytest.mark.parametrize(
    "function", [torch.sum, torch.mean, lambda x: x.mean((1, 2)), lambda x: x.sum(-1), lambda x: x.cumsum(-1)]
)
def test_reductions_share(function):
    x = torch.rand(1, 3, 4)
    r = torch.ones_like(function(x))
    found = explain(Op(lambda x: function(x.relu())), x, lambda output: r).input
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        (function(leaf)).log().sum().backward()  # R_i = x_i d(log y)/dx_i
    torch.testing.assert_close(found, leaf.grad * x)
