"""Networks whose removal is not what masking is, unless the analysis sees why: it keeps the units, with the reason.

Every net is either pruned exactly, at several shares and on inputs of our own, or it keeps the units in question. The
reference is zero-masking as `oracle` writes it, in double precision.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import secateur as sc
from constructs import randomise
from oracle import outputs, random_scores, relative_gap, zeroed
from secateur.analysis.trial import Trial
from secateur.errors import NothingToPruneError, TargetError

Body = Callable[[Any, Tensor], Tensor]


def exact(model: nn.Module, example: Tensor, *others: Tensor) -> sc.Graph:
    """Assert that removal is masking on these and on random inputs, for every plan that is possible."""
    model = randomise(model).double().eval()
    graph = sc.analyze(model, example)
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(example.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    for share in (0.2, 0.5, 0.8):
        if not graph.total_units:
            break
        try:
            plan = sc.plan(graph, random_scores(graph, int(10 * share)), remove=share)
        except (NothingToPruneError, TargetError):
            continue
        small, masked = sc.apply(model, plan), zeroed(model, graph, plan)
        for x in (example, *drawn, *others):
            assert relative_gap(outputs(small, x), outputs(masked, x)) < 1e-9
    return graph


def reasons(graph: sc.Graph) -> dict[str, str]:
    """Why layers stay."""
    return {layer.name: layer.reason for layer in graph.layers if layer.reason and layer.reason != "model output"}


class Image(nn.Module):
    """A convolution, something made of its output, and a reader that is a convolution again."""

    def __init__(self, body: Body, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.next, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(width, 6, 1), nn.Linear(6, 5)
        self.width, self.limit, self.body = 16, 16, body

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.next(self.body(self, self.stem(x))).relu().mean((2, 3)))


class Tokens(nn.Module):
    """Queries, keys and values of tokens, and something that is made of them."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor, Tensor], Tensor], **attributes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 5)
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self, self.q(x), self.k(x), self.v(x)))


def picture() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def words() -> Tensor:
    return torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# -- sizes as numbers -------------------------------------------------------------------------------------------------
def helper(x: Tensor) -> float:
    channels = x.shape[1]
    return 1.0 / channels


AS_NUMBERS: dict[str, Body] = {
    "10 / size": lambda m, y: y * (10 / y.size(1)),
    "float before size": lambda m, y: y * (2.5 / y.size(1)),
    "size ** -0.5": lambda m, y: y * y.shape[1] ** -0.5,
    "sqrt of a size": lambda m, y: y / math.sqrt(y.size(1)),
    "logarithm of a size": lambda m, y: y * math.log(y.shape[1]),
    "sum / size": lambda m, y: y - y.sum(1, keepdim=True) / y.shape[1],
    "sum / unpacked size": lambda m, y: (lambda b, c, h, w: y + y.sum(1, keepdim=True) / c)(*y.shape),
    "len": lambda m, y: y / len(y.transpose(0, 1)),
    "numel": lambda m, y: y * (y.numel() / 2048),
    "size().numel()": lambda m, y: y * (y.size().numel() / 2048),
    "flattened": lambda m, y: y / y.flatten(1).shape[1],
    "int of a size": lambda m, y: y * int(y.shape[1]),
    "size added": lambda m, y: y + y.shape[1],
    "size in a comparison": lambda m, y: y * (y > y.shape[1] / 30),
    "size as a tensor": lambda m, y: y / torch.tensor(float(y.shape[1])),
    "size fills": lambda m, y: y / torch.full((1,), y.shape[1], dtype=y.dtype),
    "size fills a tensor like it": lambda m, y: y * y.new_full((1,), y.shape[1]),
    "size as a new tensor": lambda m, y: y * y.new_tensor([y.shape[1]]),
    "size in an epsilon": lambda m, y: F.layer_norm(y, tuple(y.shape[2:]), eps=0.1 * y.shape[1]),
    "size in a slope": lambda m, y: F.leaky_relu(y, 1 / y.shape[1]),
    "size written in place": lambda m, y: y * torch.ones(()).fill_(y.shape[1]),
    "size of a clamp": lambda m, y: y.clamp(max=y.shape[1] / 30),
    "size of a parameter": lambda m, y: y / m.stem.weight.shape[0],
    "in a function": lambda m, y: y * helper(y),
    "out_channels": lambda m, y: y / m.stem.out_channels,
    "branch on a size": lambda m, y: y * 2 if y.shape[1] > 15 else y,
    "loop over a size": lambda m, y: sum(y for _ in range(y.shape[1] // 4)),
    "another way for a size": lambda m, y: y.tanh() if y.shape[1] > 15 else y.relu(),
}


@pytest.mark.parametrize("name", AS_NUMBERS)
def test_sizes_that_are_computed_with_stay(name: str) -> None:
    graph = exact(Image(AS_NUMBERS[name]), picture())
    assert graph.total_units == 6
    assert "size" in reasons(graph)["stem"]
    if not name.startswith(("branch", "another", "loop")):
        assert "its size is used as a number in torch" in reasons(graph)["stem"]


class Checked(Image):
    """Returns the mean of a distribution, which looks at its arguments: this forward runs only with numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(super().forward(x), 1.0, validate_args=True).mean


@pytest.mark.parametrize("name", [name for name in AS_NUMBERS if "size" not in name or "/" in name])
def test_they_stay_where_numbers_steer_the_forward_afterwards(name: str) -> None:
    graph = exact(Checked(AS_NUMBERS[name]), picture())
    assert "its size is used as a number in torch" in reasons(graph)["stem"]


SIZES: dict[str, Body] = {
    "view": lambda m, y: y.view(y.shape[0], y.shape[1], -1).view(y.shape),
    "half": lambda m, y: y.view(y.shape[0], 2, y.shape[1] // 2, *y.shape[2:]).flip(0).reshape(y.shape),
    "spatial size": lambda m, y: y / (y.shape[2] * y.shape[3]),
    "batch size": lambda m, y: y / len(y),
    "asserted": lambda m, y: y if y.shape[1] == m.stem.out_channels else y / 0,
    "zeros of its size": lambda m, y: y + torch.zeros_like(y),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_sizes_are_free(name: str) -> None:
    graph = exact(Image(SIZES[name]), picture())
    assert graph.total_units == 22


def _heads(t: Tensor, count: int) -> Tensor:
    return t.view(*t.shape[:2], count, -1).transpose(1, 2)


def _attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (_heads(t, m.num_heads) for t in (q, k, v))
    return ((q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_the_width_of_heads_may_scale() -> None:
    """Heads leave as wholes, so that their width stays."""
    assert exact(Tokens(_attention, num_heads=4), words()).total_units == 4


def test_the_width_of_a_single_head_stays() -> None:
    graph = exact(Tokens(lambda m, q, k, v: (q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v), words())
    assert graph.total_units == 16
    assert reasons(graph) == {"q": "its size is used as a number in torch.Tensor.div in the model's own forward"}


def test_the_number_of_heads_may_not_scale() -> None:
    def averaged(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_heads(t, m.num_heads) for t in (q, k, v))
        seen = (q @ k.mT).softmax(-1)
        return (seen @ v).transpose(1, 2).flatten(2) + seen.sum(1).mean(-1, keepdim=True) / m.num_heads

    graph = exact(Tokens(averaged, num_heads=4), words())
    assert graph.total_units == 0


# -- what is not 0 when it is masked ----------------------------------------------------------------------------------
def linear_attention(feature: Callable[[Tensor], Tensor]) -> nn.Module:
    def body(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = feature(q), feature(k)
        return q @ (k.mT @ v) / (q @ k.sum(1, keepdim=True).mT + 10)

    return Tokens(body)


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "elu + 1": lambda t: F.elu(t) + 1,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softmax over tokens": lambda t: t.softmax(1),
    "cos": torch.cos,
    "reversed difference": lambda t: 1 - t,
    "clamp above 0": lambda t: t.clamp(min=0.1),
    "power of 0": lambda t: t**0,
    "plus a number": lambda t: t + 0.3,
    "mean of units added": lambda t: t + t.sum(-1, keepdim=True),
    "comparison": lambda t: (t <= 0).to(t.dtype),
    "masked fill": lambda t: t.masked_fill(t > 0, 1.0).masked_fill(t <= 0, 2.0),
    "where": lambda t: torch.where(t > 0, t, 1.0),
    "ones like it": torch.ones_like,
    "log(1 + exp)": lambda t: torch.log(1 + torch.exp(t)),
}
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "square": torch.square,
    "power": lambda t: t**2,
    "gated by a sigmoid": lambda t: t * t.sigmoid(),
    "divided by an exp": lambda t: t / t.exp(),
    "clamp at 0": lambda t: t.clamp(min=0),
    "masked fill with 0": lambda t: t.masked_fill(t > 0, 0.0),
    "where, 0": lambda t: torch.where(t > 0, t, 0.0),
    "elu": F.elu,
    "difference": lambda t: t - t.relu(),
    "exp(t) - exp(0) is not seen through": lambda t: t.expm1(),
    "dropout": lambda t: F.dropout(t, 0.5, training=False),
}


@pytest.mark.parametrize("name", LOST)
def test_sums_over_units_that_are_not_zero_when_masked(name: str) -> None:
    graph = exact(linear_attention(LOST[name]), words())
    assert graph.total_units == 16  # the values
    assert "although it is not 0 when it is masked" in reasons(graph)["q"]


@pytest.mark.parametrize("name", KEPT)
def test_sums_over_units_that_are_zero_when_masked(name: str) -> None:
    assert exact(linear_attention(KEPT[name]), words()).total_units == 48


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(1, keepdim=True),
    "norm": lambda y: torch.linalg.vector_norm(y, dim=1, keepdim=True),
    "normalize": lambda y: F.normalize(y, dim=1),
    "einsum": lambda y: torch.einsum("bchw,bchw->bhw", y, y)[:, None],
    "matmul": lambda y: (y.flatten(2).mT @ y.flatten(2)).mean(2).view(len(y), 1, *y.shape[2:]),
    "linear of two activations": lambda y: F.linear(y.movedim(1, -1), y.mean((2, 3))).movedim(-1, 1)[:, :1],
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("zero", [True, False])
def test_every_sum_over_units(name: str, zero: bool) -> None:
    graph = exact(Image(lambda m, y: y + SUMS[name](y if zero else y.exp() / 9)), picture())
    assert graph.total_units == (22 if zero else 6)


POLES: dict[str, Body] = {
    "divided": lambda m, h: h / h.abs().amax((2, 3), keepdim=True),
    "divided by its own": lambda m, h: h.square().mean((2, 3), keepdim=True) / h,
    "reciprocal": lambda m, h: h * h.square().mean((2, 3), keepdim=True).reciprocal(),
    "root": lambda m, h: h * h.square().mean((2, 3), keepdim=True).rsqrt(),
    "power": lambda m, h: h * h.square().mean((2, 3), keepdim=True) ** -0.5,
    "logarithm": lambda m, h: h.abs().log(),
}


@pytest.mark.parametrize("name", POLES)
def test_what_is_not_finite_when_it_is_masked_stays(name: str) -> None:
    graph = exact(Image(POLES[name]), torch.randn(2, 3, 8, 8).double())
    assert "0 when it is masked" in reasons(graph)["stem"]


def test_what_is_kept_from_zero_may_be_divided_by() -> None:
    graph = exact(Image(lambda m, h: h / (h.std((2, 3), keepdim=True) + 1e-5)), torch.randn(2, 3, 8, 8).double())
    assert "stem" not in reasons(graph)


def test_means_over_flattened_images_of_other_sizes() -> None:
    net = randomise(Image(lambda m, h: torch.ones_like(h) * h.flatten(1).mean(1)[:, None, None, None])).double()
    graph = sc.analyze(net, torch.randn(2, 3, 8, 8).double())
    plan = sc.plan(graph, random_scores(graph), remove=0.4)
    small, masked = sc.apply(net, plan), zeroed(net, graph, plan)
    share = plan.layers["stem"][1] / 16  # the mean is over the kept channels
    assert 0 < share < 1
    masked.body = lambda m, h: torch.ones_like(h) * h.flatten(1).mean(1)[:, None, None, None] / share
    for x in (torch.randn(2, 3, 8, 8).double(), torch.randn(3, 3, 8, 12).double()):
        assert relative_gap(outputs(small, x), outputs(masked, x)) < 1e-9


@pytest.mark.parametrize("form", ["item", "repeated", "select"])
def test_units_that_computed_positions_pick_stay(form: str) -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 5)
            self.register_buffer("order", torch.tensor([5, 4, 7, 6, 1, 0, 3, 2]))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            picked = {"item": lambda: y[:, self.order], "repeated": lambda: y[:, self.order[:4].repeat(2)],
                      "select": lambda: y.index_select(1, self.order)}  # fmt: skip
            return self.b(picked[form]())

    assert "computed positions" in reasons(exact(Picked(), torch.randn(2, 4).double()))["a"]


def as_large_as(x: Tensor, sizes: Any) -> Tensor:
    """A reshape that is not in the source of the forward, where its sizes could follow."""
    return x.reshape(sizes)


class Streams(nn.Module):
    """The stream must be as wide as the heads, or twice as wide as another layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.out = nn.Linear(4, width), nn.Linear(width, 3)
        self.qkv = nn.Linear(width, 3 * width if heads else width // 2)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, t, c = x.shape
        if not self.heads:
            return self.out(as_large_as(self.qkv(x).unsqueeze(3).expand(-1, -1, -1, 2), x.shape))
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(as_large_as(F.scaled_dot_product_attention(q, k, v).transpose(1, 2), (n, t, c)))


@pytest.mark.parametrize(("width", "heads"), [(16, 4), (12, 0), (16, 0)])
def test_sizes_that_must_equal_each_other_do_not_do_so_by_chance(width: int, heads: int) -> None:
    graph = exact(Streams(width, heads), torch.randn(2, 5, 4).double())
    assert {"stem", "qkv"} <= {layer.paths[0] for layer in graph.layers if layer.reason}


@pytest.mark.parametrize("heads", [4, 6])
def test_the_width_of_a_head_is_computed_from_their_number(heads: int) -> None:
    """`8 // heads` is 2 for four heads and for three."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v, self.o = (nn.Linear(2 * heads, 2 * heads) for _ in range(4))
            self.heads = heads

        def forward(self, x: Tensor) -> Tensor:
            shape = len(x), -1, self.heads, 2 * heads // self.heads
            q, k, v = (layer(x).reshape(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    graph = exact(Heads(), torch.randn(2, 6, 2 * heads).double())
    assert all(layer.reason for layer in graph.layers)


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(4, 16, affine=False), nn.GroupNorm(1, 16, affine=False), nn.InstanceNorm2d(16),
     nn.BatchNorm2d(16, affine=False, track_running_stats=False)],
)  # fmt: skip
def test_norms_without_parameters_know_their_width(norm: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Conv2d(16, 4, 3))
    x = torch.randn(2, 3, 8, 8)
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small = sc.apply(net, plan)
    count = getattr(small[1], "num_channels", None) or small[1].num_features
    assert count == small[0].out_channels == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(x)
    # The kept channels, whole groups of them, are those of the original.
    kept = [i for i in range(16) if i not in plan.cuts["0.weight"][0]]
    per = 16 // norm.num_groups if isinstance(norm, nn.GroupNorm) and norm.num_groups > 1 else 1
    expected = net[0](x)[:, kept]
    if isinstance(norm, nn.GroupNorm):
        expected = F.group_norm(expected, 8 // per if per > 1 else 1)
    else:
        expected = norm(net[0](x))[:, kept]
    torch.testing.assert_close(small[:2](x), expected)
    again = sc.apply(net, sc.Plan.from_json(plan.to_json()))
    assert vars(again[1]) | {"training": 0, "_modules": 0} == vars(small[1]) | {"training": 0, "_modules": 0}


def test_a_number_of_groups_in_the_code_stays() -> None:
    graph = exact(Image(lambda m, h: F.group_norm(h, 4)), torch.randn(2, 3, 8, 8).double())
    assert "number of groups" in reasons(graph)["stem"]


def test_a_reader_needs_no_zero() -> None:
    """What a masked unit turns into is multiplied by weights that are masked too."""
    assert exact(Image(lambda m, y: (y.exp() / 9 + 1).sigmoid()), picture()).total_units == 22


def test_batch_norm_and_its_shift_make_zero_again() -> None:
    class Net(nn.Module):
        def __init__(self, affine: bool) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=affine), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.a(x).sigmoid())
            return self.b(y * y.sum(1, keepdim=True)).mean((2, 3))

    assert exact(Net(True), picture()).total_units == 8
    assert exact(Net(False), picture()).total_units == 0


# -- attributes -------------------------------------------------------------------------------------------------------
class Remembered(nn.Module):
    """A width and a limit that are the same number."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], length: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim = self.max_len = 16
        self.a, self.b, self.body = nn.Linear(6, 16), nn.Linear(16, 5), body

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.body(self, self.a(x)))


def sentence() -> Tensor:
    return torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_only_the_attribute_that_is_the_size_shrinks() -> None:
    net = Remembered(lambda m, y: y.reshape(-1, m.dim).view(2, -1, m.dim)[:, : m.max_len])
    graph = exact(net, sentence())
    assert graph.total_units == 16
    small: Any = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.5))
    assert (small.dim, small.max_len) == (8, 16)


ATTRIBUTES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "also a scale": lambda m, y: y.reshape(-1, m.dim).view(2, -1, m.dim) / m.dim,
    "also a root": lambda m, y: y.reshape(-1, m.dim).view(2, -1, m.dim) * m.dim**-0.5,
    "also a length": lambda m, y: y.reshape(-1, m.dim).view(2, -1, m.dim)[:, : m.dim],
    "also the size of a view": lambda m, y: y[:, :16].reshape(2, m.dim, m.dim),
    "a limit of a branch": lambda m, y: (y if m.max_len > 15 else y * 2).reshape(-1, m.dim).view(2, -1, m.dim),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_means_two_things_stays(name: str) -> None:
    graph = exact(Remembered(ATTRIBUTES[name]), sentence())
    assert graph.total_units == (16 if name == "a limit of a branch" else 0)


def test_a_whole_tensor_that_is_overwritten_is_what_is_written() -> None:
    def cached(m: Any, y: Tensor) -> Tensor:
        return torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y.relu())

    assert exact(Remembered(cached), sentence()).total_units == 16
    fixed = Remembered(lambda m, y: torch.zeros(2, 20, 16, dtype=y.dtype, device=y.device).copy_(y.relu()))
    assert exact(fixed, sentence()).total_units == 0


class Parts(nn.Module):
    """One layer whose output is cut into unequal parts, as latents and rotary keys are."""

    def __init__(self, sizes: Callable[[Any], list[int]], **attributes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.sizes = nn.Linear(6, 24), nn.Linear(14, 5), nn.Linear(10, 5), sizes
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).split(self.sizes(self), dim=-1)
        return self.b(first.relu()) + self.c(second.tanh())


def test_attributes_that_say_where_to_cut_shrink() -> None:
    net = Parts(lambda m: [m.rank, m.rest], rank=14, rest=10)
    graph = exact(net, sentence())
    assert graph.total_units == 24
    small: Any = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.5))
    assert (small.rank, small.rest) == (small.b.in_features, small.c.in_features)
    assert small.rank + small.rest == 12


@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [
        (lambda m: [14, 10], {}),
        (lambda m: [14, 10], {"rank": 14, "rest": 10}),
        (lambda m: [m.rank, m.rest], {"rank": 14, "rest": 10, "also": 14, "and": 10}),
        (lambda m: [m.rank, 24 - m.rank], {"rank": 14}),
    ],
)
def test_parts_are_cut_where_the_code_says(sizes: Callable[[Any], list[int]], attributes: dict[str, int]) -> None:
    graph = sc.analyze(Parts(sizes, **attributes).double(), sentence())
    assert graph.total_units == (24 if len(attributes) > 2 else 0)


@pytest.mark.parametrize("attribute", ["h", "H", "heads", "num_heads", "n"])
def test_heads_are_found_under_any_name(attribute: str) -> None:
    def body(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_heads(t, getattr(m, attribute)) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    net = Tokens(body, **{attribute: 4})
    graph = exact(net, words())
    assert graph.total_units == 4
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.5))
    assert getattr(small, attribute) == 2


def test_a_number_of_heads_in_the_code_stays() -> None:
    def body(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(_heads(t, 4) for t in (q, k, v))).transpose(1, 2).flatten(2)

    graph = exact(Tokens(body), words())
    assert graph.total_units == 0
    assert "a size is written into the forward" in reasons(graph)["q"]


# -- sizes that must equal each other ---------------------------------------------------------------------------------
def test_sizes_that_must_equal_each_other() -> None:
    """Each may lose as many units as the other, which no plan promises."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.a(x), self.b(x)
            return self.c(as_large_as(left, (-1, right.shape[-1])).view(left.shape)) + self.d(right)

    graph = exact(Pair(), words())
    assert graph.total_units < 16 + 4
    assert any("written into the forward" in reason for reason in reasons(graph).values())


# -- what the example does not show -----------------------------------------------------------------------------------
class Optional(nn.Module):
    """A layer that runs only with a second input, inside a part that always runs."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor | None], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 5)
        self.aux = nn.ModuleDict(layers)
        self.body = body

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return self.last(self.middle(self.body(self, self.first(x), extra)).relu())


def test_what_a_layer_that_never_ran_reads_stays() -> None:
    net = Optional(lambda m, y, e: y if e is None else y + m.aux["fc"](y) * e, fc=nn.Linear(12, 12))
    graph = exact(net, words())
    assert graph.total_units == 10
    assert reasons(graph) == {"first": "`aux.fc` never ran with this example and may read it"}
    assert graph.unused == ("aux.fc.bias", "aux.fc.weight")
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.5))
    assert small(words(), torch.ones(1, dtype=torch.float64)).shape == (2, 7, 5)


@pytest.mark.parametrize(
    ("layer", "units"),
    [(nn.Linear(33, 12), 10), (nn.Linear(12, 33), 10), (nn.Linear(33, 34), 22), (nn.LayerNorm(12), 10),
     (nn.LayerNorm(33), 22), (nn.Conv1d(3, 12, 1), 10), (nn.Embedding(33, 12), 10)],
)  # fmt: skip
def test_sizes_decide_what_a_layer_that_never_ran_may_read(layer: nn.Module, units: int) -> None:
    net = Optional(lambda m, y, e: y if e is None else m.aux["fc"](y), fc=layer)
    assert exact(net, words()).total_units == units


def test_a_layer_that_never_ran_concerns_its_own_part_of_the_model() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.spare = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    net = nn.Sequential(Part(), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    graph = exact(net, words())
    assert set(reasons(graph)) == {"0.a"}


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 5)


class Sided(ThreeLayers):
    """Training returns the hidden layer as well, which no parameter tells."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        out = self.last(self.middle(hidden).relu())
        return (out, hidden) if self.training else out


def test_distributions_are_outputs() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.mean, self.spread = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            h = self.body(x).relu()
            return torch.distributions.Normal(self.mean(h), self.spread(h).exp())

    net, x = Policy(), torch.randn(5, 4)
    graph = sc.analyze(net, x)
    assert {layer.name: layer.prunable for layer in graph.layers} == {"body": True, "mean": False, "spread": False}
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small, masked = sc.apply(net, plan)(x), zeroed(net, graph, plan)(x)
    torch.testing.assert_close(small.mean, masked.mean)
    torch.testing.assert_close(small.stddev, masked.stddev)


class Wrapped(ThreeLayers):
    """The same, decorated, as forwards of transformers are."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        out = self.last(self.middle(hidden).relu())
        return (out, hidden) if self.training else out


def test_what_only_training_returns_stays() -> None:
    for kind in (Sided, Wrapped):
        graph = exact(kind(), words())
        assert graph.total_units == 10
    small = sc.apply(Sided().double(), sc.plan(graph, random_scores(graph), remove=0.5)).train()
    assert small(words())[1].shape == (2, 7, 12)


class Reordered(nn.Module):
    """Positions and channels change places by a view, so that what belongs together depends on the image's size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 6, 1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        n, c, h, w = y.shape
        return self.head(self.b(y.flatten(2).transpose(1, 2).reshape(n, c, h, w)).mean((2, 3)))


class Branching(nn.Module):
    """Large images take another way, on which two layers are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return self.c(torch.cat([a + b, b] if x.shape[-1] > 20 else [a, b], 1)).mean((2, 3))


@pytest.mark.parametrize("make", [Reordered, Branching])
def test_coupling_that_depends_on_the_size_of_the_input(make: Callable[[], nn.Module]) -> None:
    small = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    large = torch.randn(1, 3, 34, 34, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact(make(), small, large)


def test_norms_keep_the_shape_of_the_example() -> None:
    """A second pass with another size meets the same norms, over other positions."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1))
    assert exact(net, picture()).total_units == 8


def test_what_a_forward_keeps_from_its_first_run_changes_nothing() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.bias = nn.Linear(6, 12), nn.Linear(12, 5), nn.Parameter(torch.ones(12))
            self.kept: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.kept:
                self.kept[len(x)] = self.bias.abs()
            return self.b(self.a(x) + self.kept.pop(len(x)))

    class Keeping(Caching):
        def forward(self, x: Tensor) -> Tensor:
            if not self.kept:
                self.kept[0] = torch.arange(7)[:7].view(7, 1) / 7
            return self.b(self.a(x) + self.bias + 0 * self.kept[0].to(x))

    assert exact(Caching(), words()).total_units == 12
    assert exact(Keeping(), words()).total_units == 12


class Told(nn.Module):
    """Asks its first layer how many units that has, which decides what is done to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.last(h.relu() if self.count() == 10 else h.tanh())

    def count(self) -> int:
        return self.first.out_features


class Looked(Told):
    def count(self) -> int:
        return [len(t) for t in self.first.parameters()][0]  # noqa: RUF015


def counted(net: Any) -> int:
    return net.first.out_features  # type: ignore[no-any-return]


class Helped(Told):
    def count(self) -> int:
        return counted(self)


class Held(Told):
    def __init__(self) -> None:
        super().__init__()
        self.how = counted

    def count(self) -> int:
        return self.how(self)


@pytest.mark.parametrize("kind", [Told, Looked, Helped, Held])
def test_code_that_asks_a_layer_for_its_size_is_tried(kind: type[Told]) -> None:
    graph = sc.analyze(kind(), torch.rand(2, 6))
    assert [layer.prunable for layer in graph.layers] == [False, False]


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "densenet121", "efficientnet_b0", "resnext50_32x4d", "alexnet"])
def test_trials_teach_nothing_about_code_that_knows_no_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        net = torchvision.models.get_model(name)
    net, x = net.to_empty(device="cpu").eval(), torch.rand(1, 3, 64, 64)
    tried: list[bool] = []
    finds_more = Trial.finds_more
    monkeypatch.setattr(Trial, "finds_more", lambda *args: tried.append(True) or finds_more(*args))
    known = sc.analyze(net, x)
    assert not tried
    monkeypatch.setattr("secateur.analysis.analyze.shows_no_sizes", lambda *_: False)
    found = sc.analyze(net, x)
    assert tried == [True]
    assert (known.root == found.root).all()
    assert (known.prunable == found.prunable).all()
    assert [(layer.name, layer.reason) for layer in known.layers] == [(a.name, a.reason) for a in found.layers]
