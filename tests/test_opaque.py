"""Functions without an entry: what reaches them stays, everything else is pruned, and relevance that starts before them
is not in the way."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import UnknownOperationError, UnsupportedModelError
from test_by_construction import exact, picture, reasons

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def halved(x: Tensor) -> Tensor:
        return x * (x.size(-1) / 2)

    _CODE = "def without_source(x: Tensor) -> Tensor:\n    return x.cumsum(1) + 1\n"
    scripted_function: Any = torch.jit.CompilationUnit(_CODE).without_source

    class ScriptedModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.middle = torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.middle(x)


class Mixed(torch.autograd.Function):
    """Its forward leaves torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.cumsum(x.detach().numpy(), 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Same(torch.autograd.Function):
    """Returns its input, of which torch makes another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def exponential(x: Tensor) -> Tensor:
    return torch.einsum("bcd,bdhw->bchw", torch.matrix_exp(0.01 * x.flatten(2) @ x.flatten(2).mT), x)


def unique_rows(x: Tensor) -> Tensor:
    return x + torch.unique(x.flatten(), sorted=True)[0]


def kernel(x: Tensor) -> Tensor:
    """Sums over channels, by the addresses of what is read and written."""
    x, made = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    numbers = [(ctypes.c_double * x.numel()).from_address(t.data_ptr()) for t in (x, made)]
    source, target = (np.frombuffer(n).reshape(x.shape) for n in numbers)
    target[:] = np.cumsum(source, 1)
    return made


def written(x: Tensor) -> Tensor:
    base = torch.zeros_like(x)
    base.index_reduce_(1, torch.arange(8), x, "amax")
    return base


def written_into_blank(x: Tensor) -> Tensor:
    base = torch.zeros(x.shape, dtype=x.dtype)
    base.index_reduce_(1, torch.arange(x.shape[1]).flip(0), x, "amax")
    return base + x.cos()


OPAQUE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "pointwise": (torch.special.bessel_j0, "bessel_j0"),
    "mixing": (exponential, "matrix_exp"),
    "of the data": (unique_rows, "unique"),
    "in place": (written, "index_reduce_"),
    "in place, into a blank tensor": (written_into_blank, "index_reduce_"),
    "a kernel": (kernel, "its memory is handed to other code in the forward"),
    "vmap": (lambda x: torch.vmap(lambda row: row.flip(0) * row.sum())(x), "vmap"),
    "a function that leaves torch": (Mixed.apply, "read one by one"),
    "TorchScript function": (lambda x: scripted_function(x), "torchscript in the model's own forward"),
    "TorchScript module": (ScriptedModule(), "torchscript in `body.middle`"),
}  # fmt: skip


class Net(nn.Module):
    """An unknown function amid convolutions, of which the first and the last have nothing to do with it."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 1)
        self.body, self.third, self.last = body, nn.Conv2d(8, 10, 1), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.body(self.second(self.first(x).relu()))).relu().mean((2, 3)))


@pytest.mark.parametrize("name", OPAQUE)
def test_units_that_reach_an_unknown_function_stay_and_all_others_leave(name: str) -> None:
    body, word = OPAQUE[name]
    graph = exact(Net(body), picture())
    assert {layer.name for layer in graph.layers if layer.prunable} == {"first", "third"}
    assert word in reasons(graph)["second"]


@pytest.mark.parametrize("name", OPAQUE)
def test_strict_refuses(name: str) -> None:
    body, _ = OPAQUE[name]
    net = Net(body).double()
    if "leaves torch" in name or body is kernel:  # numbers that are read are no function without an entry
        assert sc.analyze(net, picture(), strict=True).total_units
        return
    with pytest.raises((UnknownOperationError, UnsupportedModelError), match=r"no entry|vmap|TorchScript"):
        sc.analyze(net, picture(), strict=True)


def test_a_torchscript_function_is_followed_if_its_source_is_known() -> None:
    graph = exact(Net(lambda x: halved(x)), picture())
    assert {layer.name for layer in graph.layers if layer.prunable} == {"first", "second", "third"}


def test_a_scripted_function_may_be_an_attribute() -> None:
    net = Net(scripted_function).double()
    graph = sc.analyze(net, picture())
    small: Any = sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.3))
    assert small.body is scripted_function


def test_a_function_that_returns_its_input_passes_units_on() -> None:
    graph = exact(Net(Same.apply), picture())
    assert {layer.name for layer in graph.layers if layer.prunable} == {"first", "second", "third"}


def test_weights_that_reach_an_unknown_function_stay() -> None:
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, torch.matrix_exp(0.1 * self.weight)[..., None, None])

    graph = exact(Net(Exponential()), picture())
    assert {layer.name for layer in graph.layers if layer.prunable} == {"first", "third"}


def test_whether_a_number_is_in_a_tensor_is_a_question() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if 7e9 in x.mean((2, 3)) else self.b(x)

    graph = exact(Net(Asks()), picture())
    assert "read one by one" in reasons(graph)["second"]


def test_residual_branches_with_an_unknown_function_are_not_mistaken() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.a(x)
            side = torch.special.bessel_j0(inner)
            y = x + self.b(inner)
            return y + self.c(side)

    net = Net(Branch()).double().eval()
    graph = sc.analyze(net, picture())
    for block in graph.blocks.prunable:
        plan = sc.plan(graph, sc.score(net, None, "weight", graph=graph), blocks=[block.name])
        sc.apply(net, plan)  # which compares it with a branch that is 0


def quantised(net: nn.Module, kinds: set[Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(net, kinds, dtype=torch.qint8)
    return made


def test_quantised_layers_say_so() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(UnsupportedModelError, match=r"`0` is quantised.*floating point"):
        sc.analyze(quantised(net, {nn.Linear}), torch.rand(2, 6))
    half = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3))
    graph = sc.analyze(quantised(half, {"1"}), torch.rand(2, 6))
    assert "quantized" in str(graph.layers[0].reason)


def test_parameters_that_hold_no_units_are_named() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
            self.places, self.gain = nn.Parameter(torch.rand(5, 5)), nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.places.softmax(-1) @ self.a(x) * self.gain)

    graph = sc.analyze(Mixed(), torch.rand(2, 5, 6))
    assert graph.whole == ["places"]
    assert "stay whole, since no layer makes units of them: places" in str(graph)


# -- relevance ---------------------------------------------------------------------------------------------------------
class Detector(nn.Module):
    """Scores, and a list of what is found by functions without an entry."""

    def __init__(self, way: str = "aside") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.way = nn.Conv2d(3, 8, 3), nn.Linear(8, 5), way

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.body(x).relu().mean((2, 3)))
        best = torch.unique(logits) if self.way != "plain" else logits
        if self.way == "on the way":
            return torch.special.bessel_j0(logits)
        if self.way == "a part of the way":
            return logits + torch.special.bessel_j0(logits)
        if self.way == "in place":
            return logits.index_reduce_(1, torch.arange(5), logits.detach() + 1, "amax")
        return {"logits": logits, "found": best}


def test_relevance_that_starts_before_an_unknown_function_is_not_in_its_way() -> None:
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found, wanted = (sc.explain(Detector(way), x, 1).input for way in ("aside", "plain"))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("way", ["on the way", "a part of the way", "in place"])
def test_relevance_through_an_unknown_function_is_refused_by_name(way: str) -> None:
    with pytest.raises(UnknownOperationError, match=r"no entry for \S*(bessel_j0|index_reduce_) in .*\(2, 5\)"):
        sc.explain(Detector(way), torch.rand(2, 3, 8, 8), 1)


def test_a_model_with_an_unknown_function_is_pruned_by_relevance() -> None:
    x = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    result = sc.prune(Detector(), (x, torch.arange(12) % 5), "lrp", remove=0.5, progress=False)
    assert result.model.body.out_channels == 4


def test_scores_are_of_what_layers_returned_although_an_unknown_function_writes_over_it() -> None:
    """|Σ z·g|, with z and g = dL/dz from autograd."""
    x, y = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5

    class Net(Detector):
        def forward(self, x: Tensor) -> Any:
            return self.head(self.body(x).i0_().mean((2, 3)))

    net = Net()
    scores = sc.score(net, (x, y), "taylor", graph=sc.analyze(net, x))
    z = net.body(x)
    loss = nn.functional.cross_entropy(net.head(torch.special.i0(z).mean((2, 3))), y)
    wanted = (z * torch.autograd.grad(loss, z)[0]).sum((0, 2, 3)).abs()
    found = torch.as_tensor(next(v for site, v in scores.units.items() if site.path == "body"))
    torch.testing.assert_close((found / found.norm()).float(), wanted / wanted.norm())


# -- shapes that numbers decide ---------------------------------------------------------------------------------------
COUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda s: s[s > 0],
    "masked_select": lambda s: torch.masked_select(s, s > 0),
    "nonzero": lambda s: s[(s > 0).nonzero().squeeze(1)],
    "where": lambda s: s[torch.where(s > 0)[0]],
    "unknown": lambda s: torch.unique(s.round()),
}


@pytest.mark.parametrize("name", COUNTED)
def test_how_many_numbers_there_are_is_no_size_of_a_layer(name: str) -> None:
    """What is counted depends on numbers, which removal changes: that freezes nothing after it."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.score = nn.Linear(6, 12), nn.Linear(12, 1)
            self.next, self.last, self.side = nn.Linear(1, 10), nn.Linear(10, 3), nn.Linear(6, 8)

        def mean(self, x: Tensor) -> Tensor:
            """Divides by the width of a layer, which must stay."""
            side = self.side(x)
            return side.sum() / side.shape[1]

        def forward(self, x: Tensor) -> Tensor:
            chosen = COUNTED[name](self.score(self.first(x).relu()).squeeze(1) + 0.1) + self.mean(x)
            return self.last(self.next(chosen[:, None]).relu()).sum(0)

    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    graph = exact(Counted(), x)
    assert {layer.name for layer in graph.layers if layer.prunable} == {"first", "next"}
