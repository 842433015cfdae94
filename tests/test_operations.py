"""What the table of operations says of a call: whether it overwrites its input, whether it is a ReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from benchmarks.operations import functions
from secateur.nest import tensors_in
from secateur.ops import Call, Site, lookup
from secateur.ops.table import known_functions
from secateur.plans.plan import plan_for
from secateur.relevance import RelevancePass
from secateur.running.observer import Observer


def call_of(function: Any, *args: Any, **kwargs: Any) -> Call:
    operation = lookup(function)
    assert operation is not None
    return Call(operation, function, args, kwargs, Site("", "", 0))


@pytest.mark.parametrize(
    ("function", "args", "options"),
    [
        (F.relu, (), {}), (F.relu, (True,), {}), (F.relu, (), {"inplace": True}), (F.relu, (False,), {}),
        (F.relu_, (), {}), (Tensor.relu_, (), {}), (torch.relu, (), {}),
        (F.hardtanh, (-1.0, 1.0, True), {}), (F.hardtanh, (-1.0, 1.0), {}), (F.leaky_relu, (0.1,), {"inplace": True}),
        (F.dropout, (0.5, False, True), {}), (F.dropout, (0.5, True, True), {}), (F.dropout, (0.5, True, False), {}),
        (Tensor.add, (1,), {}), (Tensor.add_, (1,), {}), (Tensor.__iadd__, (1,), {}), (Tensor.__isub__, (1,), {}),
        (Tensor.__imul__, (2,), {}), (Tensor.__itruediv__, (2,), {}), (Tensor.__truediv__, (2,), {}),
        (Tensor.__setitem__, (0, 1.0), {}), (Tensor.__getitem__, (0,), {}), (Tensor.clamp_, (0,), {}),
        (Tensor.copy_, (torch.ones(4),), {}), (Tensor.zero_, (), {}), (Tensor.sub, (1,), {}),
    ],
)  # fmt: skip
def test_whether_a_call_overwrites_is_what_torch_does(
    function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    x = torch.tensor([-3.0, -2.0, 2.0, 3.0])
    call = call_of(function, x, *args, **options)
    before, version = x.clone(), x._version
    function(x, *args, **options)
    # Dropout in evaluation mode writes nothing, even where it may.
    assert call.writes is (x._version > version or (function is F.dropout and args[2]))
    assert call.writes or torch.equal(x, before)


def test_marks_agree_with_the_naming_of_torch() -> None:
    for function in known_functions():
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            assert call_of(function, torch.ones(2)).writes, function


def test_only_a_relu_rectifies() -> None:
    rectifiers = {function for function in known_functions() if call_of(function, torch.ones(1)).rectifies}
    assert {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_} == rectifiers


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.scale = nn.Linear(4, 6), nn.Linear(6, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(self.first(x))
        return self.last(hidden + hidden.relu())


def test_division_in_place_is_division() -> None:
    def divided(x: Tensor) -> Tensor:
        x /= 2
        return x

    x, y = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3
    plain = sc.explain(Scaled(lambda t: t / 2), x, y).input
    assert torch.equal(sc.explain(Scaled(divided), x, y).input, plain)


def test_a_vector_norm_is_a_scale() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(hidden / torch.linalg.vector_norm(hidden, dim=1, keepdim=True))

    net, x = Unit(), torch.rand(5, 4)
    graph = sc.analyze(net, x)
    assert graph.total_units == 6
    plan = sc.plan(graph, sc.score(net, (x, torch.arange(5) % 3), "lrp", graph=graph), remove=0.5)
    assert sc.apply(net, plan).first.out_features == 3


@pytest.mark.parametrize("convolves", [F.conv1d, F.conv_transpose1d])
def test_a_weight_of_fixed_size_fixes_what_it_reads(convolves: Callable[..., Tensor]) -> None:
    class Blurred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(3, 6, 3), nn.Conv1d(6, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(convolves(self.first(x), torch.ones(6, 6, 1)))

    assert sc.analyze(Blurred(), torch.rand(1, 3, 9)).total_units == 0


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self, does: Callable[[Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        self.does, self.first, self.last = does, nn.Conv1d(3, 6, 1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.does(self.first(x)))


def test_running_exponentials_make_no_zeros() -> None:
    # A unit that is masked would still add the logarithm of how many positions there are.
    net, x = Between(lambda y: y.logcumsumexp(2).sum(1), nn.Linear(9, 2)), torch.rand(2, 3, 9)
    assert sc.analyze(net, x).total_units == 0
    assert sc.analyze(Between(lambda y: y.cumsum(2).sum(1), nn.Linear(9, 2)), x).total_units > 0


#: A layer of 6 inputs and 8 units.
LAYERS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "matmul": ((6, 8), torch.matmul),
    "linear": ((8, 6), F.linear),
    "einsum": ((6, 8), lambda h, w: torch.einsum("nla,ab->nlb", h, w)),
    "transposed einsum": ((8, 6), lambda h, w: torch.einsum("ba,nla->nlb", w, h)),
    "tensordot": ((6, 8), lambda h, w: torch.tensordot(h, w, 1)),
    "inner": ((8, 6), torch.inner),
    "bmm": ((6, 8), lambda h, w: torch.bmm(h, w.expand(len(h), 6, 8))),
    "baddbmm": ((6, 8), lambda h, w: torch.baddbmm(h.new_zeros(1), h, w.expand(len(h), 6, 8))),
    "computed": ((6, 8), lambda h, w: h @ (w * 0.5) * 2),
    "after another": ((6, 8), lambda h, w: F.linear(F.linear(h, torch.eye(6)), w.T * 1.0)),
}


@pytest.mark.parametrize("criterion", ["lrp", "lrp:epsilon_plus", "lrp:attnlrp"])
@pytest.mark.parametrize("way", LAYERS)
def test_units_have_their_score_however_a_layer_is_written(way: str, criterion: str) -> None:
    def scores(way: str) -> np.ndarray:
        torch.manual_seed(0)
        weight = torch.randn(6, 8)
        shape, product = LAYERS[way]
        net = Written(product, weight.clone() if shape == (6, 8) else weight.T.clone())
        x = torch.rand(9, 5, 4)
        found = sc.score(net, (x, torch.arange(45).view(9, 5) % 3), criterion).units
        (units,) = (values for site, values in found.items() if not site.path and len(values) == 8)
        return units

    assert scores(way).any()
    np.testing.assert_allclose(scores(way), scores("linear"), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
@pytest.mark.parametrize("way", LAYERS)
def test_a_batch_that_makes_the_same_calls_runs_once(way: str, composite: str) -> None:
    shape, product = LAYERS[way]
    net, ran = Written(product, torch.randn(shape)), list[int]()
    net.register_forward_pre_hook(lambda *_: ran.append(1))
    engine = RelevancePass(net, composite)
    for _ in range(3):
        engine.run(torch.rand(9, 5, 4), torch.ones_like)
    assert len(ran) == 3


class Written(nn.Module):
    """Three layers, the second of which is written in some way."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.product, self.weight = product, nn.Parameter(weight)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.product(torch.relu(self.first(x)), self.weight)))


def test_letters_of_an_einsum_are_those_of_its_author() -> None:
    class Product(nn.Module):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text, self.first, self.last = text, nn.Linear(3, 6), nn.Parameter(torch.rand(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(self.text, self.first(x), self.last)

    for text in ("...A,AB->...B", "...a,ab->...b"):
        graph = sc.analyze(Product(text), torch.rand(2, 5, 3))
        assert (graph.total_units, sum(graph.module_macs.values())) == (6, 2 * 5 * (3 * 6 + 6 * 4))


@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_a_softmax_without_a_dimension_is_over_the_one_that_torch_takes() -> None:
    x = torch.rand(2, 3, 9)
    net = Between(lambda y: F.softmax(y), nn.Conv1d(6, 2, 1))
    torch.testing.assert_close(net.does(x), x.softmax(0))
    wanted = sc.analyze(Between(lambda y: y.softmax(0), nn.Conv1d(6, 2, 1)), x).total_units
    assert sc.analyze(net, x).total_units == wanted > 0


SPELT_OUT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "vstack": lambda a, b: torch.vstack([a, b]),
    "vstack of vectors": lambda a, b: torch.vstack((a[0], b[1], a[0, 0].expand(5))),
    "hstack": lambda a, b: torch.hstack([a, b]),
    "hstack of vectors": lambda a, b: torch.hstack([a[0], b[0], a[0, 0]]),
    "column_stack": lambda a, b: torch.column_stack([a, b[:, 0], b]),
    "column_stack of numbers": lambda a, b: torch.column_stack([a[0, 0], b[0, 0]]),
    "broadcast_tensors": lambda a, b: torch.broadcast_tensors(a, b[:, :1], b[None, 0]),
    "diff": lambda a, b: torch.diff(a),
    "second diff": lambda a, b: a.diff(2, 0, prepend=b, append=b[:1]),
    "hypot": lambda a, b: torch.hypot(a, b[:1]),
    "exp2 and trunc": lambda a, b: (a.exp2() + 3 * b).trunc(),
    "tensordot": lambda a, b: torch.tensordot(a, b),
    "tensordot of one dimension": lambda a, b: torch.tensordot(a, b.T, 1),
    "tensordot of named dimensions": lambda a, b: torch.tensordot(a[None], b, dims=([-1, 1], [1, -2])),
    "outer tensordot": lambda a, b: torch.tensordot(a, b, dims=0),
    "inner": lambda a, b: torch.inner(a, b[:2]),
    "inner of vectors": lambda a, b: torch.inner(a[0], b[0]) + torch.inner(a, b[0, 0]).sum(),
    "cdist": lambda a, b: torch.cdist(a, b[:3]),
    "cdist of batches": lambda a, b: torch.cdist(a[None], b[None], p=1.0),
    "dstack": lambda a, b: torch.dstack([a, b]),
    "dstack of vectors": lambda a, b: torch.dstack((a[0], b[0])),
    "hsplit": lambda a, b: torch.hsplit(a, [2, 3]) + a[0].hsplit(1),
    "vsplit": lambda a, b: (a + b).vsplit(2),
    "dsplit": lambda a, b: torch.dsplit(a[None], 5),
    "atleast_1d": lambda a, b: (torch.atleast_1d(a[0, 0]), torch.atleast_1d(a, b)),
    "atleast_2d": lambda a, b: (torch.atleast_2d(a[0]), torch.atleast_2d([a[0, 0], b])),
    "atleast_3d": lambda a, b: (torch.atleast_3d(a[0, 0]), torch.atleast_3d(a[0]), torch.atleast_3d(a)),
    "meshgrid": lambda a, b: torch.meshgrid(a[0], b[:, 0], a[0, :2], indexing="ij"),
    "meshgrid of pixels": lambda a, b: torch.meshgrid([a[0], b[:, 0]], indexing="xy"),
    "channel_shuffle": lambda a, b: torch.channel_shuffle((a.T @ b)[None, :4, :, None], 2),
    "as_tensor": lambda a, b: (
        torch.as_tensor(a, dtype=torch.float32).double() + torch.as_tensor([[1.0], [2.0], [3.0], [4.0]])
    ),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b) + F.cosine_similarity(a, b, dim=1, eps=1e-4),
    "pairwise_distance": lambda a, b: F.pairwise_distance(a, b, p=1, keepdim=True),
    "outer": lambda a, b: torch.outer(a[0], b[:, 0]) + torch.ger(a[0], b[:, 0]),
    "vecdot": lambda a, b: torch.linalg.vecdot(a, b, dim=0),
    "multi_dot": lambda a, b: (torch.linalg.multi_dot([a, b.T, a]), torch.chain_matmul(a, b.T, a)),
    "windows": lambda a, b: a.unfold(1, 2, 2) + b.unfold(-1, 2, 2),
}


@pytest.mark.parametrize("name", SPELT_OUT)
def test_what_is_spelt_out_is_what_torch_computes(name: str) -> None:
    function = SPELT_OUT[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Any:
            return function(self.a(x), self.b(x))

    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad(), Observer(model):
        found = model(x)
    with torch.no_grad():
        for a, b in zip(tensors_in(found), tensors_in(model(x)), strict=True):
            torch.testing.assert_close(a, b)
    sc.analyze(model, x)  # no function is unknown


def test_most_functions_of_torch_have_an_entry() -> None:
    known = {name: any(lookup(function) is not None for function in many) for name, many in functions().items()}
    assert sum(known.values()) / len(known) > 0.7
    everyday = (
        "__invert__ hstack vstack cosine_similarity pairwise_distance cdist embedding_bag index_add scatter_add"
        " bilinear scatter_reduce channel_shuffle norm broadcast_tensors max_unpool2d lstm_cell fft stft grid_sample"
    )
    assert [name for name in everyday.split() if not known[name]] == []


def test_real_and_imaginary_parts_belong_to_their_numbers() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 12), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(self.first(x).unflatten(-1, (-1, 2)))
            return self.last(z.real * z.imag + torch.imag(z))  # type: ignore[no-any-return]

    net, x = Turned().double(), torch.rand(5, 4).double()
    graph = sc.analyze(net, x)
    first = next(layer for layer in graph.layers if layer.name == "first")
    assert (first.prunable, len(first.groups)) == (True, 6)  # two neurons each
    removed = np.zeros(len(graph.root), np.bool_)
    removed[first.groups[[1, 4]]] = True
    small = sc.apply(net, plan_for(graph, removed))
    with torch.no_grad():
        net.first.weight[[2, 3, 8, 9]], net.first.bias[[2, 3, 8, 9]] = 0, 0
    torch.testing.assert_close(small(x), net(x))
