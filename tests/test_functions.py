"""A run that goes on recognises lambdas and functions within functions by what they do, not by their name alone."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import math
import operator
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FileFormatError
from secateur.recover import Recover, Recovered
from secateur.running.identity import described, named

GAIN: Any = 2.0
Function = Callable[..., Any]


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Quiet(enum.Enum):
    """Its members look the same, and one is an object with an address."""

    OBJECT = object()
    ONE = 1
    TWO = 2

    def __repr__(self) -> str:
        return "quiet"


class Doing(enum.Enum):
    """Members that are callable."""

    ADD = 1
    TAKE = -1

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.value


class Several(tuple[int, ...], enum.Enum):
    FEW = (1, 2)
    MANY = (1, 2, 3)


class Options(enum.Flag):
    A = 1
    B = 2


def renumbered(value: Any) -> enum.Enum:
    return enum.Enum("Renumbered", {"ONE": value}, module=__name__).ONE  # type: ignore[attr-defined,no-any-return]


def add(by: Any) -> Function:
    def change(x: Tensor) -> Tensor:
        return x + by

    return change


def default(by: Any) -> Function:
    return lambda x, by=by: x + by


def keyword(by: Any) -> Function:
    def change(x: Tensor, *, by: Any = by) -> Tensor:
        return x + by

    return change


def inner(by: Any) -> Function:
    return lambda x: (lambda: x + by)()


def calling(function: Function) -> Function:
    return lambda x: function(x)


def choosing(flag: bool) -> Function:
    return (lambda x: x in {"a", "b", "c", "d"}) if flag else (lambda x: x in {"a", "b", "c", "e"})


def recursive(step: int) -> Function:
    def down(n: int) -> int:
        return 0 if n < 1 else down(n - step)

    return down


def through_a_partial(step: int) -> Function:
    def down(n: int) -> int:
        return 0 if n < 1 else later()

    later = functools.partial(lambda m: down(m - step), 1)
    return down


def calling_each_other(count: int, last: int) -> Function:
    """Every function refers to all of them."""
    everyone: dict[str, Function] = {}
    for i in range(count):
        step = last if i == count - 1 else 0
        body = ", ".join(f"f{j}" for j in range(count))
        exec(f"f{i} = lambda x: ({body}, {step})", everyone)
    return everyone["f0"]


def on_top_of_each_other(count: int, last: int) -> Function:
    """Every function refers to all that were made before it."""
    made: tuple[Function, ...] = ((lambda last: lambda x: x + last)(last),)
    for _ in range(count):
        made = (*made, (lambda below: lambda x: [f(x) for f in below])(made))
    return made[-1]


def one_below_the_other(count: int, last: int) -> Function:
    function: Function = (lambda last: lambda x: x + last)(last)
    for _ in range(count):
        function = calling(function)
    return function


def in_sets(step: int) -> Function:
    """A set of functions that refer to the set."""
    found: frozenset[Function]
    first = lambda x: [f(x) for f in found]  # noqa: E731
    others = [(lambda by: lambda x: (x + by, found))(i) for i in range(8)]
    found = frozenset([first, *others, (lambda x: x + step)])
    return first


#: Functions that read `gain`, and have other variables of that name within.
SHADOWS = {
    "a variable of a function within": """
def f(x):
    def within():
        gain = 1
        def deepest():
            nonlocal gain
            gain += 1
        deepest()
    return x * gain, within()
""",
    "an argument of a function within": """
def f(x):
    def within(gain):
        def deepest():
            nonlocal gain
            del gain
        deepest()
    return x * gain, within(1)
""",
    "a variable of a comprehension": "f = lambda x: [[(lambda: gain)() for gain in x], gain]",
    "read in the body of a class": """
def f(x):
    class Within:
        by = gain
    return x * Within.by
""",
    "read and set in the body of a class": """
def f(x):
    class Within:
        gain = gain
    return x * Within.gain
""",
    "perhaps set in the body of a class": """
def f(x):
    class Within:
        if x:
            gain = 1
        by = gain
    return x * Within.by
""",
    "read in a method": """
def f(x):
    class Within:
        gain = 1
        def method(self):
            return gain
    return x * Within().method()
""",
    "read by a default": "f = lambda x: (lambda y=gain: x * y)()",
}
#: Functions that have a variable `gain` of their own, and no other.
OWN = {
    "set in the body of a class": """
def f(x):
    class Within:
        gain = 1
        by = gain
    return x * Within.by
""",
    "a variable of a function within": "f = lambda x: (lambda gain: lambda: x * gain)(1)()",
    "written before it is read": """
def f(x):
    global gain
    gain = 1
    return (lambda: x * gain)()
""",
}


def of_the_module(code: str, gain: int) -> Function:
    names: dict[str, Any] = {"gain": gain, "__name__": __name__}
    exec(code, names)
    names["f"].__qualname__ = "<lambda>"
    return names["f"]


def around_it(code: str, gain: int) -> Function:
    names: dict[str, Any] = {"__name__": __name__}
    inside = "".join(f"    {line}\n" for line in code.strip().splitlines())
    exec(f"def make(gain):\n{inside}    return f", names)
    return names["make"](gain)


def writing(begin: int) -> Function:
    """It counts its calls: the number is no setting."""
    calls, seen = begin, []

    def change(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return x

    return change


def catching(both: bool) -> Function:
    """The same instructions. An error of the second call is caught, or is not."""
    if both:

        def change(x: Tensor) -> None:
            try:
                mean(x)
                total(x)
            except ValueError:
                mean(x)
    else:

        def change(x: Tensor) -> None:
            try:
                mean(x)
            except ValueError:
                mean(x)
            else:
                total(x)

    return change


def mean(x: Tensor) -> Tensor:
    return x.mean()


def total(x: Tensor) -> Tensor:
    return x.sum()


def pairs() -> list[tuple[Function, Function]]:
    """Functions of the same name that do different things."""
    dropped, other = nn.Dropout(0.1), nn.Dropout(0.2)
    weights = torch.tensor([0.2, 0.8])
    found = [
        (make(one), make(two))
        for make in (add, default, keyword, inner)
        for one, two in [
            (1, 2), (1, 1.0), (0.0, -0.0), (1, True), ("a", "b"), (None, 1), ((1, (2,)), (1, (3,))), (mean, total),
            (frozenset("abcd"), frozenset("abce")), (torch.float32, torch.float64), (weights, weights.flip(0)),
            (weights, weights.double()), (np.arange(3), np.arange(3) + 1), (np.array(["a"]), np.array(["b"])),
            (np.array([mean], dtype=object), np.array([total], dtype=object)), (np.float32(1), np.float32(2)),
            (add(1), add(2)), (functools.partial(add, 1), functools.partial(add, 2)), (dropped, other), (F, math),
            (range(3), range(4)), (slice(3), slice(4)), (Kind.ONE, Kind.TWO), (Tensor.sin, Tensor.cos),
            (torch.channels_last, torch.preserve_format), (Path("a"), Path("b")), (re.compile("a"), re.compile("b")),
            (10**5000, 10**5000 + 1), (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)), (math, operator),
        ]
    ]  # fmt: skip
    return [
        *found,
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: x.sin(), lambda x: x.cos()),
        (lambda x: F.relu(x), lambda x: F.gelu(x)),
        (lambda x, y: x - y, lambda y, x: x - y),
        (lambda x: [x + i for i in range(3)], lambda x: [x + i for i in range(4)]),
        (lambda x: (lambda y: y + 1)(x), lambda x: (lambda y: y + 2)(x)),
        (choosing(True), choosing(False)),
        (catching(True), catching(False)),
        (calling(mean), calling(total)),
        (calling(lambda x: x), calling(lambda x: -x)),
        (recursive(1), recursive(2)),
        (through_a_partial(1), through_a_partial(2)),
        (calling_each_other(40, 1), calling_each_other(40, 2)),
        (on_top_of_each_other(40, 1), on_top_of_each_other(40, 2)),
        (one_below_the_other(2000, 1), one_below_the_other(2000, 2)),
        (in_sets(1), in_sets(2)),
        (functools.partial(lambda x, by: x + by, by=1), functools.partial(lambda x, by: x - by, by=1)),
        (functools.partial(lambda x, a: x - a, a=1), functools.partial(lambda a, x: a - x, a=1)),
        (functools.partial(F.nll_loss, weight=weights, a=1), functools.partial(F.nll_loss, weight=weights, a=2)),
        (functools.partial(F.nll_loss, weights, 1), functools.partial(F.nll_loss, weights, 2)),
    ]


def test_functions_of_the_same_name_are_told_apart() -> None:
    for (one, other), (again, _) in zip(pairs(), pairs(), strict=True):
        assert described(one) != described(other), described(one)
        assert described(one) == described(again)
        assert " at 0x" not in described(one)


def members() -> list[tuple[Any, Any]]:
    shift = lambda by: lambda x: x + by  # noqa: E731
    return [
        (Quiet.ONE, Quiet.TWO), (Quiet.OBJECT, Quiet.ONE), (Doing.ADD, Doing.TAKE), (Several.FEW, Several.MANY),
        (Options.A, Options.A | Options.B), (Kind.ONE, Quiet.ONE), (renumbered(1), renumbered(2)),
        (renumbered(object()), renumbered(object)), (renumbered(shift(1)), renumbered(shift(2))),
    ]  # fmt: skip


def test_members_of_enums_count_by_class_name_and_value() -> None:
    for (one, other), (again, _) in zip(members(), members(), strict=True):
        for around in (lambda x: x, add, lambda x: functools.partial(mean, x), lambda x: {"of": [x]}):
            assert described(around(one)) != described(around(other)), one
            assert described(around(one)) == described(around(again))
            assert "0x" not in described(around(one))


class Scaled:
    """An object that does not tell its settings, and counts its calls."""

    def __init__(self, by: Any) -> None:
        self.set(by)
        self.calls = 0

    def set(self, by: Any) -> None:
        self.by = by

    def apply(self, x: Tensor) -> Tensor:
        self.note()
        return x * self.by

    def note(self) -> None:
        self.calls += 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x)

    def __iter__(self) -> Any:
        raise AssertionError("it is no loader")

    @classmethod
    def of_the_class(cls, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def of_nobody(x: Tensor) -> Tensor:
        return x


class Shortened(Scaled):
    __slots__ = ("to",)

    def __init__(self, by: Any) -> None:
        super().__init__(1)
        self.to = by

    def __repr__(self) -> str:
        return f"Shortened at {object.__repr__(self)}"


class Silent(nn.Module):
    """It has no `extra_repr`."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by, self.inner, self.calls = by, nn.Dropout(0.1), 0
        self.register_buffer("share", torch.ones(2) if isinstance(by, Tensor) else torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x * self.by)


@dataclasses.dataclass
class Field:
    by: Any

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


def of_a_local_class(by: Any) -> Function:
    class Local:
        def __call__(self, x: Tensor) -> Tensor:
            return x * by

    return Local()


def decorated(by: Any) -> Function:
    @functools.lru_cache
    def change(x: Tensor) -> Tensor:
        return x * by

    return change


def objects() -> list[tuple[Any, Any]]:
    """Callables that differ in what their objects hold."""
    values = [(1, 2), (1, True), ("a", "b"), (mean, total), (add(1), add(2)), (torch.ones(2), torch.zeros(2))]
    kinds: tuple[Any, ...] = (Scaled, Shortened, Silent, Field, of_a_local_class, decorated)
    kinds = (*kinds, lambda by: functools.cache(add(by)), lambda by: staticmethod(add(by)))
    return [
        *((kind(one), kind(two)) for kind in kinds for one, two in values),
        *((kind(one).__call__, kind(two).__call__) for kind in (Scaled, Silent, Field) for one, two in values),
        *((Scaled(one).apply, Scaled(two).apply) for one, two in values),
        (Scaled(Scaled(1).apply), Scaled(Scaled(2).apply)), (Scaled(Scaled(1)), Scaled(Scaled(2))),
        (Scaled.of_the_class, Shortened.of_the_class), (Scaled(1).apply, Scaled(1)), (Scaled(1), Shortened(1)),
        ({1: 2}.get, {1: 3}.get), ("a".join, "b".join), (torch.ones(2).mul, torch.zeros(2).mul), (np.sin, np.cos),
        (np.add.reduce, np.multiply.reduce), (operator.itemgetter(1), operator.itemgetter(2)),
        (np.vectorize(add(1)), np.vectorize(add(2))), (weakref.ref(mean), weakref.ref(total)),
        (functools.partial(mean, object()), functools.partial(mean, object)),
    ]  # fmt: skip


def test_objects_are_told_apart_by_what_they_hold() -> None:
    for (one, other), (again, _) in zip(objects(), objects(), strict=True):
        for around in (lambda x: x, add, calling, functools.partial, lambda x: [x]):
            assert described(around(one)) != described(around(other)), described(around(one))
            assert described(around(one)) == described(around(again))
            assert " at 0x" not in described(around(one))


def test_what_an_object_counts_while_it_is_used_does_not_count() -> None:
    for make in (Scaled, Silent, Shortened):
        for use in (lambda f: f, add, lambda f: f.__call__):
            function = make(1.0)
            before = described(use(function))
            function(torch.zeros(1))
            assert described(use(function)) == before
            assert function.calls
    scaled = Scaled(1)
    before = described(scaled.apply)
    scaled.apply(torch.zeros(1))
    assert described(scaled.apply) == before
    scaled.set(2)
    assert described(scaled.apply) != before


def test_objects_that_refer_to_themselves() -> None:
    def made(by: int) -> Scaled:
        scaled, other = Scaled(by), Scaled(0)
        scaled.by, other.by = other.apply, (scaled.apply, by)
        return scaled

    assert described(made(1)) == described(made(1)) != described(made(2))
    assert described(made(1).apply) == described(made(1).apply) != described(made(2).apply)


def test_a_function_in_a_cache_is_that_function() -> None:
    assert described(functools.cache(mean)) == described(mean)


class Curious:
    """An object whose code must not run."""

    ready = False

    def __init__(self) -> None:
        self.by = 1
        self.ready = True

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def dataset(self) -> Any:
        raise AssertionError

    @property
    def __wrapped__(self) -> Any:
        raise AssertionError

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError

    def __repr__(self) -> str:
        raise ValueError("it cannot be shown")

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        raise AssertionError

    def __bool__(self) -> bool:
        raise AssertionError

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Answering(Curious):
    """It has an attribute of every name."""

    def __getattr__(self, name: str) -> Any:
        return Answering()

    def __repr__(self) -> str:
        return "Answering()"


class Passing(nn.Module):
    """It was not initialised, and asks itself for everything."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("kind", [Curious, Answering, Passing])
def test_objects_are_not_asked_for_attributes(kind: Any) -> None:
    for around in (
        lambda x: x,
        add,
        calling,
        functools.partial,
        lambda x: x.__call__,
        lambda x: functools.partial(mean, x),
    ):
        assert described(around(kind())) == described(around(kind()))
        assert named(around(kind()))
        assert " at 0x" not in described(around(kind()))


def test_numbers_of_the_module_count(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [lambda x: x * GAIN, lambda x: (lambda: x * GAIN)()]
    before = [described(f) for f in functions]
    monkeypatch.setattr(sys.modules[__name__], "GAIN", 3.0)
    assert not set(before) & {described(f) for f in functions}
    monkeypatch.setattr(sys.modules[__name__], "GAIN", 2.0)
    assert [described(f) for f in functions] == before


def test_what_changes_while_it_runs_does_not_count() -> None:
    function = writing(0)
    before = described(function)
    function(torch.zeros(1))
    assert described(function) == before == described(writing(5))
    net = nn.Linear(2, 2)
    looking = add(net)
    before = described(looking)
    with torch.no_grad():
        net.weight.zero_()
    assert described(looking) == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_ordinary_memory() -> None:
    """Views that a flag negates or conjugates count as what they show; of nested ones, only that they are some."""
    numbers = torch.tensor([1.0 + 2.0j])
    assert described(add(numbers.conj())) == described(add(torch.tensor([1.0 - 2.0j])))
    assert described(add(numbers.conj().imag)) == described(add(torch.tensor([-2.0])))
    assert " at 0x" not in described(add(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])))
    assert described(add(torch.eye(2).to_sparse())) == described(add(2 * torch.eye(2).to_sparse()))


def decorator(by: Any) -> Function:
    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def changed(x: Tensor) -> Tensor:
            return function(x) * by

        return changed

    return decorate


def with_a_default(by: Any) -> Function:
    @functools.wraps(mean)
    def changed(x: Tensor, by: Any = by) -> Tensor:
        return mean(x) * by

    return changed


def with_an_attribute(by: Any) -> Function:
    def change(x: Tensor) -> Tensor:
        change.calls += 1  # type: ignore[attr-defined]
        return x * change.by  # type: ignore[attr-defined,no-any-return]

    change.by, change.calls = by, 0  # type: ignore[attr-defined]
    return change


@decorator(2)
def doubled(x: Tensor) -> Tensor:
    return x


class Method:
    @staticmethod
    @decorator(3)
    def tripled(x: Tensor) -> Tensor:
        return x


def test_what_decorators_make_counts() -> None:
    for make in (
        lambda by: decorator(by)(mean),
        with_a_default,
        with_an_attribute,
        lambda by: decorator(2)(decorator(by)(mean)),
    ):
        for one, other in ((1, 2), (mean, total), (add(1), add(2))):
            for around in (lambda x: x, add):
                assert described(around(make(one))) != described(around(make(other)))
                assert described(around(make(one))) == described(around(make(one)))
    assert described(doubled) == f"{__name__}.doubled"
    assert described(Method.tripled) == f"{__name__}.Method.tripled"
    counting = with_an_attribute(2)
    before = described(counting)
    counting(torch.zeros(1))
    assert described(counting) == before


class Times(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_what_torch_compiled_counts() -> None:
    x = torch.ones(3)
    makes: list[Function] = [
        lambda by: torch.jit.trace(lambda x: x * by, x), lambda by: torch.jit.trace(lambda x: x.clamp(max=by), x),
        lambda by: torch.jit.trace(Times(by), x), lambda by: torch.jit.trace(nn.Sequential(Times(1.0), Times(by)), x),
        lambda by: torch.jit.script(Times(by)), lambda by: torch.jit.script(nn.Sequential(nn.Dropout(by / 4))),
        lambda by: torch.jit.script(nn.BCEWithLogitsLoss(x * by)),
        lambda by: torch.compile(lambda x: x * by, backend="eager"),
        lambda by: torch.compile(Times(by), backend="eager"), lambda by: torch.fx.symbolic_trace(Times(by)),
        lambda by: torch.vmap(lambda x: x * by), lambda by: torch.no_grad()(lambda x: x * by),
    ]  # fmt: skip
    for i, make in enumerate(makes):
        for around in (lambda x: x, add):
            one = described(around(make(1.0)))
            assert one != described(around(make(2.0))), i
            assert one == described(around(make(1.0))), i
            assert " at 0x" not in one


class Chain(list[Any]):
    def __call__(self, x: Tensor) -> Tensor:
        for function in self:
            x = function(x)
        return x


class Two(NamedTuple):
    one: Any
    two: Any


def itself(by: Any) -> list[Any]:
    found: list[Any] = [by]
    found.append({"again": found, "too": functools.partial(mean, found)})
    return found


def test_everything_in_a_container_counts() -> None:
    weights = torch.ones(2)
    for one, other in ((1, 2), ("a", "b"), (add(1), add(2)), (weights, weights + 1), (np.ones(2), np.zeros(2))):
        makes: list[Function] = [
            lambda x: [weights, x], lambda x: (weights, x), lambda x: {"weights": weights, "x": x}, lambda x: Two(x, 1),
            lambda x: collections.OrderedDict(x=x), lambda x: collections.deque([x]), lambda x: Chain([x]),
            lambda x: collections.UserList([x]), lambda x: collections.defaultdict(int, x=x), itself,
            lambda x: types.MappingProxyType({"x": x}),
        ]  # fmt: skip
        for make in makes:
            assert described(make(one)) != described(make(other)), described(make(one))
            assert described(make(one)) == described(make(one))
            assert described(functools.partial(mean, make(one))) != described(functools.partial(mean, make(other)))
    assert described(range(3)) != described(range(1, 4))
    assert described(bytearray(b"a")) != described(bytearray(b"b"))
    assert described({}.get) == described({}.get) != described({1: 2}.get)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_odd_tensors_as_arguments() -> None:
    """Their numbers count, if they have some."""
    sparse = torch.eye(2).to_sparse()
    kinds: list[Any] = [
        (sparse, 2 * sparse), (sparse.to_sparse_csr(), 2 * sparse.to_sparse_csr()), (sparse, sparse.to_sparse_csr()),
        (sparse.to_sparse_csc(), 2 * sparse.to_sparse_csc()),
        (torch.ones(2, device="meta"), torch.ones(3, device="meta")), (sparse, torch.eye(2)),
        *((torch.nested.nested_tensor([torch.ones(2), by * torch.ones(3)]), sparse) for by in (1, 2)),
        (torch.nested.nested_tensor([torch.ones(2)]), torch.nested.nested_tensor([torch.zeros(2)])),
        (nn.parameter.UninitializedParameter(), torch.ones(2)), (torch.tensor(math.nan), torch.tensor(math.inf)),
        (np.array([1, None]), np.array([2, None])), (np.array("2020", "M8[D]"), np.array("2021", "M8[D]")),
        (np.zeros(2, [("a", "f4")]), np.ones(2, [("a", "f4")])),
    ]  # fmt: skip
    for one, other in kinds:
        for around in (lambda x: x, lambda x: functools.partial(mean, x), lambda x: {"of": [x]}):
            assert described(around(one)) != described(around(other))
            assert described(around(one)) == described(around(one))
        assert described(add(one)) == described(add(one))


def test_transforms_around_it_count() -> None:
    for v in (pytest.importorskip("torchvision.transforms"), pytest.importorskip("torchvision.transforms.v2")):
        one, other = (calling(v.Compose([v.RandomCrop(size)])) for size in (3, 4))
        assert described(one) != described(other)


class Given:
    """Settings of a class, with an object that refers to itself."""

    by: Any = 1

    def __init__(self) -> None:
        self.given = self

    @property
    def computed(self) -> Any:
        raise AssertionError("nobody asked")


def given(by: Any) -> Given:
    found = Given()
    found.by = by
    return found


def of_a_class(by: Any) -> Any:
    class Options:
        pass

    Options.by = by  # type: ignore[attr-defined]
    return Options()


def a_module(by: Any) -> types.ModuleType:
    found = types.ModuleType("settings")
    found.by = by  # type: ignore[attr-defined]
    return found


class Listing:
    def __init__(self, by: Any) -> None:
        self.by = [by]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by[0]


def test_lists_and_options_that_are_only_read_count() -> None:
    frozen = dataclasses.make_dataclass("frozen", ["by"], frozen=True, slots=True)
    makes: list[Function] = [
        lambda by: [by], lambda by: {"by": by}, lambda by: {by}, lambda by: collections.deque([by]), frozen, Field,
        lambda by: types.SimpleNamespace(by=by), lambda by: argparse.Namespace(by=by), itself, Listing,
        lambda by: types.MappingProxyType({"by": [by]}), lambda by: collections.OrderedDict(by=by),
        lambda by: collections.defaultdict(list, by=by), lambda by: dataclasses.make_dataclass("open", ["by"])(by),
    ]  # fmt: skip
    for make in makes:
        for one, other in ((1, 2), ("a", "b"), (mean, total), (add(1), add(2)), ((1,), (2,))):
            for around in (add, default, keyword, inner, calling):
                assert described(around(make(one))) != described(around(make(other))), make(one)
                assert described(around(make(one))) == described(around(make(one)))


def test_plain_settings_that_are_read_from_objects_count() -> None:
    read: list[Function] = [lambda o: lambda x: x * o.by, lambda o: lambda x: (lambda: x * o.by)()]
    for make in (given, of_a_class, a_module, lambda by: type("Options", (), {"by": by})):
        for around in read:
            for one, other in ((1, 2), (1, 1.0), ("a", "b"), (Kind.ONE, Kind.TWO)):
                assert described(around(make(one))) != described(around(make(other)))
                assert described(around(make(one))) == described(around(make(one)))
    assert described((lambda o: lambda x: o.computed)(given(1))) == described(
        (lambda o: lambda x: o.computed)(given(2))
    )


class Reading:
    def __init__(self, options: Any) -> None:
        self.options = options

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.options.by


def test_of_options_what_is_read_counts() -> None:
    """Others may be names of folders with the time of the start."""
    reading, passing = (
        [lambda o: lambda x: x * o.by, Reading],
        [add, keyword, default, lambda o: lambda x: (x * o.by, str(o)), Listing],
    )
    for kind in (argparse.Namespace, types.SimpleNamespace, dataclasses.make_dataclass("Options", ["by", "folder"])):
        for around in (*reading, *passing):
            a, b, c = (described(around(kind(by=by, folder=at))) for by, at in ((1, "a"), (1, "b"), (2, "a")))
            assert a != c
            assert (a == b) == (around in reading)


class Compared(nn.Module):
    """A loss with a network of its own."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.net, self.by = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), by

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.by * (self.net(x) - self.net(y)).square().mean()


def test_of_a_loss_with_a_network_its_settings_count() -> None:
    for around in (lambda x: x, add, calling, functools.partial, lambda loss: loss.forward):
        loss = Compared(0.5)
        before = described(around(loss))
        assert before == described(around(Compared(0.5))) != described(around(Compared(0.6)))
        with torch.no_grad():
            loss.net[0].weight.zero_()
        loss(torch.rand(3, 2), torch.rand(3, 2))
        assert described(around(loss)) == before


class Sized(nn.Module):
    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by, self.folder = [by], object.__repr__(self)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


class Computing:
    def __init__(self, by: Any) -> None:
        self.by = by

    @functools.cached_property
    def twice(self) -> Any:
        return 2 * self.by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.twice


def test_lists_of_modules_count_and_what_is_computed_does_not() -> None:
    for make in (Sized, Computing):
        assert described(make(1)) == described(make(1)) != described(make(2))
    computing = Computing(1)
    before = described(computing)
    computing(torch.zeros(1))
    assert described(computing) == before


class Decorated:
    def __init__(self, by: Any) -> None:
        self.by, self.calls, self.folder = by, 0, object.__repr__(self)

    @functools.lru_cache  # noqa: B019
    def once(self, x: int) -> Any:
        return x * self.by

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.once(1)


def test_methods_that_are_decorated_count() -> None:
    for around in (lambda o: o, lambda o: o.__call__, lambda o: lambda x: o.once(2), add):
        assert described(around(Decorated(1))) != described(around(Decorated(2)))
    decorated = Decorated(1)
    before = described(decorated)
    decorated(torch.zeros(1))
    assert described(decorated) == before


class Refusing(type):
    def __getattr__(cls, name: str) -> Any:
        raise AssertionError(name)


class Refused(metaclass=Refusing):
    def __call__(self, x: Tensor) -> Tensor:
        return x


def test_classes_of_classes_are_not_asked() -> None:
    for value in (Refused, Refused(), Refused().__call__):
        for around in (lambda x: x, add, calling, lambda o: lambda x: o.by(x)):
            assert described(around(value)) == described(around(value))


class Augmenter:
    """No callable: a lambda calls its methods, or reads its property."""

    def __init__(self, by: Any) -> None:
        self.by, self.started, self.calls = by, object(), 0
        self.folder = f"run {id(self)}"

    def apply(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.twice

    @property
    def twice(self) -> Any:
        return 2 * self.by

    def passed(self, x: Tensor) -> Tensor:
        return passed_on(self, x)

    def looked_up(self, x: Tensor) -> Tensor:
        return x * getattr(self, "".join(["b", "y"]))


def passed_on(augmenter: Augmenter, x: Tensor) -> Tensor:
    return x * augmenter.by


def test_methods_that_are_called_count() -> None:
    reads: list[Function] = [
        lambda o: lambda x: o.apply(x), lambda o: lambda x: x * o.twice, lambda o: o.scaled,
        lambda o: lambda x: (lambda: o.apply)()(x), lambda o: calling(o.apply),
    ]  # fmt: skip
    for around in reads:
        for one, other in ((1, 2), (mean, total), (add(1), add(2)), ([1], [2])):
            assert described(around(Augmenter(one))) != described(around(Augmenter(other)))
            assert described(around(Augmenter(one))) == described(around(Augmenter(one)))  # its folder is not read
        augmenter = Augmenter(1)
        before = described(around(augmenter))
        augmenter.apply(torch.zeros(1))
        assert described(around(augmenter)) == before
    for around in (lambda o: lambda x: o.passed(x), lambda o: o.looked_up):
        # What is read of it elsewhere is unknown. Were it to count as a whole, its folder would refuse every run.
        assert described(around(Augmenter(1))) == described(around(Augmenter(1)))


@dataclasses.dataclass
class Program:
    """Everything that a run needs, with a measurement among it."""

    data: list[float]
    folder: str

    def measure(self, model: Any) -> float:
        return sum(self.data)


def test_of_a_large_object_only_what_a_method_reads_counts() -> None:
    here, there, other = Program([1.0], "here"), Program([1.0], "there"), Program([2.0], "here")
    assert described(here.measure) == described(there.measure)
    assert described(here.measure) != described(other.measure)
    assert described(lambda x: here.measure(x)) != described(lambda x: other.measure(x))


def noting(log: list[Any]) -> Function:
    def change(x: Tensor) -> Tensor:
        log.append(x)
        return x

    return change


def caching(known: dict[Any, Any]) -> Function:
    def change(x: Tensor) -> Tensor:
        known[len(known)] = x
        return x

    return change


def stepping(counter: Any) -> Function:
    def change(x: Tensor) -> Tensor:
        counter.by += 1
        return x

    return change


def test_what_a_function_alters_does_not_count() -> None:
    for make, held in ((noting, []), (caching, {}), (stepping, given(0)), (stepping, types.SimpleNamespace(by=1))):
        function = make(held)  # type: ignore[operator]
        before = described(function)
        function(torch.zeros(1))
        assert described(function) == before


def test_a_correction_of_what_changes_no_weight_goes_on() -> None:
    one, other = (lambda x: x + 1), (lambda x: x + 2)
    assert named(one) == named(other) != named(mean)
    assert named(functools.partial(one, by=1)) == named(functools.partial(other, by=1))
    assert named(functools.partial(one, by=1)) != named(functools.partial(one, by=2))


def test_a_name_that_is_the_only_one_is_enough() -> None:
    assert described(mean) == f"{__name__}.mean"

    @functools.wraps(mean)
    def wrapped(x: Tensor) -> Tensor:
        return mean(x)

    assert described(wrapped) == f"{__name__}.mean"


@pytest.mark.parametrize("make", [of_the_module, around_it])
def test_variables_of_the_same_name_are_told_apart(make: Callable[[str, int], Function]) -> None:
    for what, code in SHADOWS.items():
        if not (make is around_it and " set in the body" in what):  # Python reads the module's variable there
            assert described(make(code, 1)) != described(make(code, 2)), what
        assert described(make(code, 1)) == described(make(code, 1)), what
    for what, code in OWN.items():
        if not (make is around_it and "global" in code):
            assert described(make(code, 1)) == described(make(code, 2)), what


def test_variables_without_a_value_yet() -> None:
    def change(x: Tensor) -> Tensor:
        return x + later

    before = described(change)
    later = 3
    assert described(change) != before


def test_functions_are_the_same_in_a_new_process() -> None:
    code = (
        "import test_functions as t; from secateur.running.identity import described\n"
        "print([described(f) for pair in [*t.pairs(), *t.members(), *t.objects()] for f in pair])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {str([described(f) for pair in [*pairs(), *members(), *objects()] for f in pair])}


def trained(file: Path, shift: float = 0.1, weight: float = 1.0) -> Recovered:
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), (torch.rand(12, 3, 2, 2), torch.arange(12) % 2)
    settings = Recover(
        epochs=2, teacher=0.0, augment=lambda x: x + shift, loss=lambda out, known: weight * F.cross_entropy(out, known)
    )
    return sc.recover(net, None, data, settings, checkpoint=file, progress=False)


def test_training_goes_on_with_the_same_lambdas_only(tmp_path: Path) -> None:
    file = tmp_path / "training.safetensors"
    first = trained(file)
    code = (
        "import sys, pathlib, test_functions as t\n"
        "print([p.tolist() for p in t.trained(pathlib.Path(sys.argv[1])).model.parameters()])"
    )
    written = file.stat().st_mtime_ns
    again = subprocess.run(
        [sys.executable, "-c", code, str(file)], cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        env={"OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert again.stdout.strip() == str([p.tolist() for p in first.model.parameters()])
    assert file.stat().st_mtime_ns == written  # nothing was trained again
    for change in ({"shift": 0.2}, {"weight": 2.0}):
        with pytest.raises(FileFormatError, match=r"belongs to another run.*settings"):
            trained(file, **change)


def test_a_pruning_run_with_another_loss_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2)), torch.rand(12, 4)

    def run(weight: float, shown: str = "loss") -> sc.Result:
        def measured(model: nn.Module) -> dict[str, float]:
            return {"overall": float(model(x).mean()), shown: 0.0}

        loss = lambda out, known: weight * F.cross_entropy(out, known)  # noqa: E731
        settings = Recover(epochs=1, teacher=0.0, loss=loss)
        return sc.prune(
            net, (x, torch.arange(12) % 2), remove=0.3, schedule=0.15, recover=settings, evaluate=measured,
            checkpoint=tmp_path / "run.safetensors", progress=False,
        )  # fmt: skip

    run(1.0)
    run(1.0, "other")  # a measure that was corrected changes no weight
    with pytest.raises(FileFormatError, match="other recover"):
        run(2.0)
