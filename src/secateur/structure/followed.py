"""Plain numbers that code takes from tensors, followed until it compares them: comparisons steer a forward.

A size (`x.shape[1]`, `x.numel()`) that is compared may answer otherwise once units are removed. A number that was read
from a tensor (`x.max().item()`) may answer otherwise for another input.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

import torch

Comparison = Callable[[Any, Any], bool]


class Origin(Protocol):
    """Where a number comes from. It is told of every comparison and gives the answer that the code gets."""

    def after(self, operation: str) -> Origin:
        """Where the result of arithmetic comes from."""

    def answer(self, compare: Comparison, value: Any, other: Any) -> bool:
        """The result of `compare(value, other)`, or another one."""


@dataclass(frozen=True)
class Size:
    """Comes from a size that may shrink. `fixed()` says that it must not, `unsure()` that trial removals must tell.

    If other sizes take part, which the input decides, `asked` gets the answer and may turn it.
    """

    fixed: Callable[[], None]
    unsure: Callable[[], None]
    asked: Callable[[bool], bool]
    #: "size", "product" of one and of other sizes, "difference" of one and a number, "rest" of a division, or "other".
    form: str = "size"

    def after(self, operation: str) -> Size:
        if operation == "mod" or self.form == "rest":
            return replace(self, form="rest")
        if operation == "sub" and self.form == "size":
            return replace(self, form="difference")
        return replace(self, form="product" if operation == "mul" and self.form != "other" else "other")

    def answer(self, compare: Comparison, value: Any, other: Any) -> bool:
        equality = compare in (operator.eq, operator.ne)
        if equality and value == other:  # a trial makes it differ
            if self.form == "rest":
                self.unsure()
        elif self.form == "size":
            # The answer is the same for all sizes, or not.
            if 1 <= other <= value if equality else compare(1, other) != compare(value, other):
                self.fixed()
        elif self.form == "difference" and not equality and other == 0:  # is it larger than another part?
            self.unsure()
        elif self.form != "product":
            self.fixed()
        elif other > 0:
            self.fixed()
            return self.asked(compare(value, other))
        return compare(value, other)


@dataclass(frozen=True)
class Reading:
    """Comes from the numbers in a tensor. `asked` gets the answer and may turn it."""

    asked: Callable[[bool], bool]

    def after(self, operation: str) -> Self:
        return self

    def answer(self, compare: Comparison, value: Any, other: Any) -> bool:
        return self.asked(compare(value, other))


class Followed:
    """A number that is followed: what whole and broken ones have in common."""

    origins: tuple[Origin, ...] = ()

    def __bool__(self) -> bool:
        return _compared(self, operator.ne, 0)

    def __hash__(self) -> int:
        return hash(plain(self))


class FollowedInt(Followed, int):
    """A whole number that is followed."""


class FollowedFloat(Followed, float):
    """A broken number that is followed."""


_KINDS: dict[type, type] = {int: FollowedInt, float: FollowedFloat}


def follow(value: Any, *origins: Origin) -> Any:
    """The same number, followed; also inside lists."""
    if isinstance(value, list):
        return [follow(item, *origins) for item in value]
    kind = _KINDS.get(type(value))
    if kind is None or not origins:
        return value
    made = kind(value)
    made.origins = origins
    return made


def plain(value: Any) -> Any:
    """The same value without followed numbers."""
    change = _PLAIN.get(type(value))  # every argument of every call comes through here
    return value if change is None else change(value)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    FollowedInt: int.__int__,
    FollowedFloat: float.__float__,
    slice: lambda cut: slice(plain(cut.start), plain(cut.stop), plain(cut.step)),
    tuple: lambda items: tuple([plain(item) for item in items]),
    list: lambda items: [plain(item) for item in items],
    dict: lambda items: {name: plain(item) for name, item in items.items()},
}


def _compared(one: Followed, compare: Comparison, other: Any) -> bool:
    value, rival = plain(one), plain(other)
    answer = compare(value, rival)
    for origin in one.origins:
        answer = origin.answer(compare, value, rival)
    for origin in getattr(other, "origins", ()):
        answer = origin.answer(_MIRRORED[compare], rival, value)
    return answer


_MIRRORED: dict[Comparison, Comparison] = {
    operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le,
    operator.eq: operator.eq, operator.ne: operator.ne,
}  # fmt: skip


def _comparing(compare: Comparison) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return _compared(self, compare, other) if isinstance(other, int | float) else NotImplemented

    return method


def _computing(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        terms = (plain(other), plain(self)) if reflected else (plain(self), plain(other))
        known = getattr(other, "origins", ())
        form = "other" if known and name == "sub" else name  # the difference of two sizes
        return follow(compute(*terms), *(o.after(form) for o in (*self.origins, *known)))

    return method


for _compare in _MIRRORED:
    setattr(Followed, f"__{_compare.__name__}__", _comparing(_compare))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Followed, f"__{_name}__", _computing(_name, reflected=False))
    setattr(Followed, f"__r{_name}__", _computing(_name, reflected=True))


class Shape(tuple[Any, ...]):
    """A `torch.Size` with followed numbers."""

    __slots__ = ()

    def numel(self) -> Any:
        """The product of the sizes."""
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        made = super().__getitem__(index)
        return Shape(made) if isinstance(index, slice) else made

    def __add__(self, other: Any) -> Shape:
        return Shape((*self, *other))

    def __radd__(self, other: Any) -> Shape:
        return Shape((*other, *self))


_PLAIN[Shape] = lambda sizes: torch.Size([plain(size) for size in sizes])


@dataclass(frozen=True)
class Question:
    """Where code asks a tensor for a number: the module that runs, the line of code, and which time it is."""

    path: str
    line: str
    visit: int


class Questions:
    """What a forward asks tensors for, in order, and the answers: the true ones, or others for those in `turned`."""

    def __init__(self, turned: Collection[Question] = (), limit: int = 100_000) -> None:
        self.asked: dict[Question, None] = {}
        self._turned, self._limit, self._visits = turned, limit, Counter[tuple[str, str]]()

    def answer(self, path: str, natural: bool) -> bool:
        """The answer to a question."""
        return natural is not self._turns(path)

    def number(self, path: str, natural: float) -> Any:
        """A number that cannot be followed: much smaller or much larger if it is turned."""
        whole = isinstance(natural, int)
        if self._turns(path, "low"):
            return -1e30 if not whole else 0 if natural > 0 else -1
        if self._turns(path, "high"):
            return abs(natural) + 1 if whole else 1e30  # no more: it may be how often something is done
        return natural

    def _turns(self, path: str, form: str = "answer") -> bool:
        line = f"{_line_of_code()} {form}"
        question = Question(path, line, self._visits[path, line])
        self._visits[path, line] += 1
        self.asked[question] = None
        if len(self.asked) > self._limit:
            raise RecursionError("other answers than the true ones make the forward endless")
        return question in self._turned


_INSIDE = tuple(str(Path(file).parent) for file in (torch.__file__, str(Path(__file__).parent)))


def _line_of_code() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
