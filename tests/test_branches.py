"""Forwards that branch on numbers in tensors or on sizes. Removal must be masking whichever way another input goes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import UnknownOperationError
from secateur.structure.label_pass import LabelPass
from test_by_construction import exact, picture, reasons

Condition = Callable[[Any, Tensor, Tensor], Any]


class Branch(nn.Module):
    """A second convolution that runs only under a condition; what it makes meets the residual stream."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(i, 16, 3, padding=1) for i in (3, 16, 16))
        self.head, self.condition = nn.Linear(16, 5), condition

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.a(x)
        if self.condition(self, x, y):
            y = self.b(y)
        return self.head((y + x).mean((2, 3)))


class Ways(Branch):
    """Two ways without layers of their own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.a(x)
        return self.head((self.b(x).tanh() if self.condition(self, x, y) else self.b(x).relu()).mean((2, 3)))


def inputs() -> list[Tensor]:
    """Either sign, tiny and huge, other batch sizes, other images."""
    x = picture()
    larger = torch.randn(3, 3, 13, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [-x, x.abs(), -x.abs(), x * 1e-6, x * 1e4, x[:1], torch.cat([x, -x, x]), larger, larger[:1, :, :4, :4]]


NUMBERS: dict[str, Condition] = {
    "one number": lambda m, x, y: x[0, 0, 0, 0] > 0,
    "one number, negated": lambda m, x, y: not x[0, 0, 0, 0] > 0,
    "sum": lambda m, x, y: y.sum() > 0,
    "mean of many": lambda m, x, y: x.mean((2, 3)).sum() > 0.01,
    "truth of a number": lambda m, x, y: x[0, 0, 0, 0].relu(),
    "bool": lambda m, x, y: bool((y.sum() > 0) | (x.sum() > 3)),
    "item": lambda m, x, y: y.sum().item() > 0,
    "item of a truth": lambda m, x, y: (y.sum() < 0).item(),
    "computed with": lambda m, x, y: 2 * x.sum().item() - 1 > -1,
    "compared from the right": lambda m, x, y: y.sum().item() < 0 < 1,
    "float": lambda m, x, y: float(y.sum()) > 0.5,
    "float, the other side": lambda m, x, y: float(y.sum()) < 1e7,
    "int": lambda m, x, y: int(y.sum()) > 0,
    "tolist": lambda m, x, y: y.sum((1, 2, 3)).tolist()[0] > 0,
    "equal": lambda m, x, y: torch.equal(y.sum((1, 2, 3)), y.sum((1, 2, 3)).abs()),
    "allclose": lambda m, x, y: torch.allclose(x.sum(), y.sum(), rtol=2),
    "largest": lambda m, x, y: max(x.sum(), y.sum()) > 0,
    "any of the input": lambda m, x, y: (x.sum(1) > 0).any(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_branches_on_numbers(name: str) -> None:
    graph = exact(Branch(NUMBERS[name]), picture(), *inputs())
    assert not graph.unused  # the other way was seen
    assert graph.total_units >= 45  # all but the unit that is read alone


def test_branches_inside_branches_and_in_a_row() -> None:
    """The ways of two branches meet in four ways; a branch that only another one reaches is found too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)
            self.parts = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(6))
            self.inner = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y, x = self.stem(x), x.sum((0, 2, 3))
            for i, part in enumerate(self.parts):
                if x[i % 3] > 0.1 * i:
                    y = part(y)
                    if x[2 - i % 3] > 0:
                        y = y + self.inner(y)
            return self.head(y.mean((2, 3)))

    graph = exact(Net(), picture(), *inputs())
    assert (graph.total_units, len(graph.candidates)) == (64, 8)


def test_loops_end() -> None:
    def halved(m: Any, x: Tensor, y: Tensor) -> bool:
        total = y.sum().abs()
        while total > 1:
            total = total / 2
        for _ in range(int(y.sum().clamp(0, 3))):
            total = total + 1
        return bool(total > 1.5)

    assert exact(Branch(halved), picture(), *inputs()).total_units == 48


def test_what_a_check_refuses_asks_nothing() -> None:
    def checked(m: Any, x: Tensor, y: Tensor) -> bool:
        assert x.sum().isfinite()
        if y.sum().item() != y.sum().item():
            raise ValueError("NaN")
        return True

    assert exact(Branch(checked), picture()).total_units == 48


def test_more_branches_than_can_be_tried_keep_their_units() -> None:
    text = "def many(m, x, y):\n" + "".join(f"    if y.sum() > {i}:\n        y = y + {i}\n" for i in range(20))
    space: dict[str, Any] = {}
    exec(text + "    return y.sum() > 0\n", space)
    graph = exact(Branch(space["many"]), picture(), *inputs())
    assert not graph.total_units
    assert "in more ways than can be tried" in str(reasons(graph))


def test_what_only_the_other_way_does_with_units_counts_too() -> None:
    def unknown(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.svdvals(y).sum() > 0 if x[0, 0, 0, 0] > 1e9 else x.sum() > 0

    graph = exact(Branch(unknown), picture(), *inputs())
    assert not graph.total_units
    assert any("no entry for torch.linalg.svdvals in the model's own forward" in why for why in reasons(graph).values())
    with pytest.raises(UnknownOperationError, match="svdvals"):
        sc.analyze(Branch(unknown), torch.rand(2, 3, 8, 8), strict=True)


def test_numbers_read_one_by_one_stay() -> None:
    graph = sc.analyze(Branch(lambda m, x, y: x.mean((0, 2, 3)).tolist()[3] > 0), torch.rand(2, 3, 8, 8))
    assert "its numbers are read one by one in the forward" in reasons(graph).values()


COMPARED: dict[str, Condition] = {
    "numel": lambda m, x, y: x.numel() > 1500,
    "numel, never so large": lambda m, x, y: x.numel() > 5000,
    "nelement": lambda m, x, y: x.nelement() < 1500,
    "torch.numel": lambda m, x, y: torch.numel(input=x) > 1500,
    "numel of a size": lambda m, x, y: x.size().numel() > 5000,
    "numel of a part": lambda m, x, y: x.shape[1:].numel() > 1020,
    "product": lambda m, x, y: math.prod(x.shape) > 5000,
    "product by hand": lambda m, x, y: x.shape[1] * x.shape[2] > 150,
    "mean of two": lambda m, x, y: (x.shape[1] + x.shape[2]) / 2 > 12.5,
    "larger": lambda m, x, y: x.shape[1] > 3,
    "smaller": lambda m, x, y: x.size(-3) <= 3,
    "equal to less": lambda m, x, y: x.shape[1] == 7,
    "shape equal to less": lambda m, x, y: x.shape[1:2] == (7,),
    "truth of a remainder": lambda m, x, y: x.size(1) % 2,
    "remainder": lambda m, x, y: x.size(dim=1) % 3 == 1,
    "another remainder": lambda m, x, y: x.size(1) % 5 == 0,
    "half": lambda m, x, y: x.shape[1] // 2 > 2,
    "difference": lambda m, x, y: x.shape[1] - 12 > 0,
    "largest": lambda m, x, y: max(x.shape[1], 5) == 5,
    "len": lambda m, x, y: len(x.transpose(0, 1)) > 3,
    "size of a parameter": lambda m, x, y: m.stem.weight.shape[0] > 3,
    "len of a parameter": lambda m, x, y: len(m.stem.bias) > 3,
    "two sizes": lambda m, x, y: x.shape[1] > y[:, :8].shape[1],
}


@pytest.mark.parametrize("name", COMPARED)
def test_sizes_that_are_compared_stay(name: str) -> None:
    graph = exact(Ways(COMPARED[name]), picture(), *inputs())
    assert "size" in reasons(graph)["stem"]


FREE: dict[str, Condition] = {
    "never": lambda m, x, y: x.shape[1] > 64,
    "always": lambda m, x, y: x.shape[1] > 0 and x.numel() > 0,
    "not empty": lambda m, x, y: x.numel() == 0 or not x.numel(),
    "another number": lambda m, x, y: x.shape[1] == 100,
    "dimensions": lambda m, x, y: len(x.shape) == 4 and x.shape[0] < 10,
    "equal shapes": lambda m, x, y: x.shape == x.relu().shape,
    "as expected": lambda m, x, y: x.size() == (len(x), m.stem.out_channels, *x.shape[2:]),
    "divisible": lambda m, x, y: x.shape[1] % 1 == 0,
    "found in a table": lambda m, x, y: {x.shape: True}[x.shape[:1] + x.shape[1:]],
}


@pytest.mark.parametrize("name", FREE)
def test_comparisons_that_removal_does_not_change_ask_nothing(name: str) -> None:
    assert exact(Ways(FREE[name]), picture(), *inputs()).total_units == 48


def test_a_model_that_asks_nothing_runs_once() -> None:
    """Further passes are for forwards that ask."""
    runs = 0

    class Counted(Ways):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return super().forward(x)

    sc.analyze(Counted(lambda m, x, y: True), torch.rand(2, 3, 8, 8))
    assert runs == 2  # the label pass and one trial: nobody knows what the function reads that the model holds


def test_only_the_attribute_that_is_the_size_shrinks() -> None:
    """Of two attributes of the same number, the one that counts tokens is left alone."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width, self.prompt_length = 16, 16
            self.embed, self.mix, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)
            self.prompt = nn.Parameter(torch.randn(16, 6))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
            x = self.mix(self.embed(x).reshape(len(x), x.shape[1], self.width).tanh())
            return self.head(x[:, self.prompt_length :])

    model, x = Prompted(), torch.randn(2, 9, 6, dtype=torch.float64)
    graph = exact(model, x, torch.randn(3, 30, 6, dtype=torch.float64))
    assert [(item.path, item.name) for item in graph.repeated] == [("", "width")]
    assert graph.total_units == 32


def test_numbers_that_code_keeps_are_followed_no_longer() -> None:
    """A cache of the user's code outlives the analysis."""
    kept: list[Any] = []

    def keeps(m: Any, x: Tensor, y: Tensor) -> bool:
        kept.extend([x.shape, x.numel(), x.sum().item()])
        return True

    def passes() -> int:
        gc.collect()
        return sum(isinstance(item, LabelPass) for item in gc.get_objects())

    before = passes()
    sc.analyze(Branch(keeps), torch.rand(2, 3, 8, 8))
    assert passes() <= before
    shape, count = kept[:2]
    assert (shape, count > 1, count * 2, hash(shape)) == ((2, 16, 8, 8), True, 4096, hash((2, 16, 8, 8)))
    assert torch.zeros(shape).shape == torch.ones(count).view(shape).shape == (2, 16, 8, 8)
