"""The table of operations: every function a network may call, and what secateur knows about it.

An entry answers three questions: which channels go in and out together (`channels`), how many multiply-accumulates the
call costs (part of `channels`, which sees the shapes), and how relevance passes back (`relevance`).
What a function without an entry does is never guessed: what reaches it stays as it is, and carries no relevance.
"""

from __future__ import annotations

import inspect
import math
import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from secateur.errors import UnsupportedModelError
from secateur.nest import tensors_in
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs

Function = Callable[..., Any]
#: Names from NumPy that torch takes as well, and what methods call their tensor.
_OTHER_NAMES = {"dim": ("axis",), "keepdim": ("keepdims",), "input": ("self", "x", "a", "x1", "A"), "other": ("x2",)}


@dataclass(frozen=True)
class Signature:
    """The parameters of a function as text, e.g. `"input weight bias=None stride=1"`; `*dims` takes the rest.

    `other|mat2|vec` is the parameter `other`, which some of the functions call otherwise.
    """

    names: tuple[str, ...]
    defaults: dict[str, Any]
    rest: str | None
    spellings: dict[str, str]  # other names of parameters, and what they are called here

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read such a text."""
        words = [word.partition("=") for word in text.split()]
        spelt = [(name.lstrip("*").split("|"), default) for name, _, default in words]
        names = tuple(own[0] for own, _ in spelt)
        rest = names[-1] if words[-1][0][0] == "*" else None
        spellings = {new: old for old in names for new in _OTHER_NAMES.get(old, ()) if new not in names}
        spellings |= {new: own[0] for own, _ in spelt for new in own[1:]}
        defaults = {own[0]: literal_eval(default) for own, default in spelt if default}
        return cls(names if rest is None else names[:-1], defaults, rest, spellings)

    def spelt(self, name: str) -> str:
        """What a keyword is called here."""
        return self.spellings.get(name, name)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Names for the arguments of one call. `*rest` accepts both `f(x, 1, 2)` and `f(x, (1, 2))`."""
        if kwargs:
            kwargs = {self.spelt(name): value for name, value in kwargs.items()}
        bound = self.defaults | dict(zip(self.names, args, strict=False)) | kwargs
        if self.rest is not None:
            extra = args[len(self.names) :] or (kwargs.get(self.rest, ()),)
            bound[self.rest] = tuple(extra[0]) if len(extra) == 1 and isinstance(extra[0], tuple | list) else extra
        return bound


@dataclass(frozen=True)
class Site:
    """Where a call happens: the path of the innermost module, the function, and the index of this call there."""

    path: str
    function: str
    visit: int

    def __str__(self) -> str:
        place = f"`{self.path}`" if self.path else "the model's own forward"
        return f"{self.function} in {place}" + (f" (call {self.visit + 1})" if self.visit else "")


@dataclass(slots=True)
class Call:
    """One observed call of a function that the table knows."""

    operation: Operation
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: Site
    _bound: dict[str, Any] | None = field(default=None, repr=False)
    _tensors: list[Tensor] | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> Any:
        if self._bound is None:
            self._bound = _SIGNATURES[self.function].bind(self.args, self.kwargs)
        return self._bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument called `name`, or `default` where the call has none of that name."""
        try:
            return self[name]
        except KeyError:
            return default

    @property
    def writes(self) -> bool:
        """Whether the call overwrites its first tensor."""
        return overwrites(self.function, self.args, self.kwargs)

    @property
    def rectifies(self) -> bool:
        """Whether the call is a ReLU."""
        return self.operation.rectifies

    @property
    def limits(self) -> tuple[float, float] | None:
        """Between which numbers the call changes nothing, if it does nothing else than to limit them."""
        if not self.operation.limits or len(self.tensors()) > 1:
            return None
        low, high = self.on(self.tensors()[0])(torch.tensor([-math.inf, math.inf])).tolist()
        return low, high

    def run(self) -> Any:
        """The call as the user wrote it."""
        return self.function(*self.args, **self.kwargs)

    def given(self, *args: Any, **kwargs: Any) -> Call:
        """The same call with other arguments."""
        return Call(self.operation, self.function, args, kwargs, self.site)

    def on(self, x: Tensor) -> Callable[[Tensor], Any]:
        """The call as a function of its argument `x`, everything else as it is. It does not keep `x` alive."""
        function, names, values = self.function, tuple(self.kwargs), (*self.args, *self.kwargs.values())
        place = next(i for i, value in enumerate(values) if value is x)
        before, after, positional, dtype = values[:place], values[place + 1 :], len(self.args), x.dtype

        def run(value: Tensor) -> Any:
            given = (*before, value, *after)
            if value.dtype != dtype:  # a rule left half precision for a while
                given = tuple(v.to(value.dtype) if isinstance(v, Tensor) and v.dtype == dtype else v for v in given)
            return function(*given[:positional], **dict(zip(names, given[positional:], strict=True)))

        return run

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, also inside lists and tuples."""
        if self._tensors is None:
            self._tensors = tensors_in(self.args)
            if self.kwargs:
                self._tensors += tensors_in(self.kwargs)
        return self._tensors


class Operation:
    """One entry of the table. Subclasses answer the questions; instances are stateless."""

    #: Whether relevance ends here although no argument carries any: discrete inputs.
    enters: bool = False
    #: Whether a relevance pass lets torch differentiate the call, so that parameters must not look like activations.
    differentiates: bool = True
    #: Whether a layer whose output is read here needs no longer wait for a batch norm.
    settles: bool = True
    #: Whether it is a ReLU, which a layer can be computed together with.
    rectifies: bool = False
    #: Whether it sets numbers beyond one or two limits to these limits, and leaves the others as they are.
    limits: bool = False
    #: Whether plain numbers among the arguments are computed with. In other operations they are sizes and places.
    scalars: bool = False

    @property
    def name(self) -> str:
        """Shown to people: the words of the class's name."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Which channels go in and out together, and the cost: tell `labels`."""
        raise NotImplementedError

    def counts(self, call: Call) -> bool:
        """Whether numbers decide the shape of what is made."""
        return False

    def rehearse(self, call: Call) -> Any:
        """The call on tensors without numbers: the right shape, or the right error. Overridden where torch is slow."""
        return call.run()

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Run the call so that its backward pass is the relevance rule. An operation without a rule is refused."""
        raise NotImplementedError


#: How relevance passes back through a call, where a single verb says it.
Rule = Callable[[RelevanceVerbs, Call], Any]


def moves(relevance: RelevanceVerbs, call: Call) -> Any:
    """The way the data did."""
    return relevance.moves(call)


def overwrites(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a function that the table knows overwrites its first tensor."""
    if function in _WRITERS:
        return True
    position = _inplace_position(function)
    return position is not None and bool(kwargs.get("inplace", args[position] if len(args) > position else False))


def writes(relevance: RelevanceVerbs, call: Call) -> Any:
    """To whatever is there in the end, constants included."""
    return relevance.writes(call)


def passes(relevance: RelevanceVerbs, call: Call) -> Any:
    """Unchanged to the signal: the call is a function, or a scale that is given."""
    return relevance.passes(call, signal(call))


def signal(call: Call) -> Tensor:
    """The first tensor that carries relevance. The base of a power may be a constant, and the exponent the signal."""
    return next(tensor for tensor in call.tensors() if tensor.requires_grad)


def stops(relevance: RelevanceVerbs, call: Call) -> Any:
    """Not at all: the result is a fact or a statistic."""
    return relevance.stops(call)


def refused(relevance: RelevanceVerbs, call: Call) -> Any:
    """Nobody knows."""
    refusal = UnsupportedModelError(
        f"no relevance rule is known for {call.site}.", fix="another criterion, such as 'taylor'"
    )
    return relevance.refuses(call, refusal)


def transforms(relevance: RelevanceVerbs, call: Call) -> Any:
    """As a gradient: a linear function of real numbers by way of complex ones."""
    return relevance.transforms(call)


def averages(relevance: RelevanceVerbs, call: Call) -> Any:
    """Shared among the numbers that are summed or averaged."""
    if call.writes:  # what was summed is gone
        return refused(relevance, call)
    return relevance.averages(call, call["input"], call.on(call["input"]))


class Ruled(Operation):
    """An operation for which a single verb says how relevance passes."""

    def __init__(self, rule: Rule = moves) -> None:
        self.rule = rule

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return self.rule(relevance, call)


class Query(Operation):
    """Asks about a tensor (shape, dtype, …) and computes nothing."""

    settles = False

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        pass


class SizeQuery(Query):
    """Brings sizes to Python."""


class Readout(Query):
    """Brings numbers to Python."""

    settles = True


class Opaque(Operation):
    """A function without an entry. It may mix and read whatever it gets, so nothing that reaches it can leave."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        for tensor in call.tensors():
            labels.freeze_tensor(tensor, f"secateur has no entry for {call.site}, which reads it")

    def counts(self, call: Call) -> bool:
        return any(tensor.is_floating_point() for tensor in call.tensors())


class Decomposed(Operation):
    """A function that is understood as the smaller ones it is made of: `body` is run under observation instead."""

    def __init__(self, body: Function) -> None:
        self.body = body


_TABLE: dict[Function, Operation] = {}
_SIGNATURES: dict[Function, Signature] = {}
_WRITERS: set[Function] = set()
#: Entries of operators by name, until one of them is met.
_EXTENSIONS: dict[str, tuple[str, Operation]] = {}


def register(signature: str, *functions: Function | None, operation: Operation, writes: bool = False) -> None:
    """Add an entry for one or more functions that share a signature. Absent functions (`None`) are skipped.

    `writes`: they overwrite their first tensor. An argument called `inplace` needs no such mark.
    """
    parsed = Signature.parse(signature)
    for function in functions:
        if function is not None:
            _TABLE[function] = operation
            _SIGNATURES[function] = parsed
            (_WRITERS.add if writes else _WRITERS.discard)(function)


_OWNERS = (torch.nn.functional, torch, Tensor, torch.special, torch.linalg)


def named(names: str) -> list[Function | None]:
    """The functions of these names in `torch.nn.functional`, `torch`, `torch.Tensor` and the like."""
    return [getattr(owner, name, None) for owner in _OWNERS for name in names.split()]


def register_named(signature: str, names: str, operation: Operation, in_place: str = "") -> None:
    """`register` for functions of torch by name. Those of `in_place`, and `name_`, overwrite their first tensor."""
    register(signature, *named(names), operation=operation)
    twins = [f"{name}_" for name in names.split() if not (name.endswith("_") or isinstance(operation, Decomposed))]
    register(signature, *named(" ".join([*twins, in_place])), operation=operation, writes=True)


def register_op(signature: str, *names: str, operation: Operation) -> None:
    """`register` for operators of an extension of torch, such as "torchvision::nms", which need not be loaded."""
    _EXTENSIONS.update((name, (signature, operation)) for name in names)


def lookup(function: Function) -> Operation | None:
    """The entry for a function, or None."""
    found = _TABLE.get(function)
    if found is None and isinstance(function, torch._ops.OpOverloadPacket):
        signature, found = _EXTENSIONS.get(function._qualified_op_name, ("", None))
        if found is not None:
            register(signature, function, operation=found)
    return found


def in_order(function: Function, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the signature, so that the first tensor is the first parameter's."""
    signature = _SIGNATURES[function]
    places = {name: place for place, name in enumerate(signature.names)}
    return dict(sorted(kwargs.items(), key=lambda item: places.get(signature.spelt(item[0]), len(places))))


def known_functions() -> list[Function]:
    """Every function that has an entry."""
    return list(_TABLE)


@cache
def _inplace_position(function: Function) -> int | None:
    """The position of the argument `inplace`, if there is one."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


@cache
def function_name(function: Function) -> str:
    """A readable name: `torch.Tensor.view`, `torch.nn.functional.relu`."""
    try:
        name = torch.overrides.resolve_name(function)
    except (KeyError, AttributeError, TypeError):
        name = None
    return name or getattr(function, "__qualname__", None) or repr(function)
