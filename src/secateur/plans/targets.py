"""Targets and limits: how small a model must become, how much accuracy it may lose, which layers may lose units.

They are checked here and nowhere else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

from secateur import arguments
from secateur.errors import Argument, TargetError
from secateur.structure.cost import Cost
from secateur.structure.graph import Graph

_SIZES, _TIMES = ("params", "macs"), ("latency", "seconds")

#: Which groups a group is ranked against: "global": all. "layer": those of its layer, so that every layer loses the
#: same share. "cost": all, by score for what is saved: MACs, or parameters or time if the target is in these alone.
Scope = Literal["global", "layer", "cost"]


def brief(settings: Any) -> str:
    """A settings object as text, with only those fields that are not at their default."""
    given = ((field, getattr(settings, field.name)) for field in fields(settings))
    shown = [f"{field.name}={value!r}" for field, value in given if value != field.default]
    return f"{type(settings).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Target:
    """Where pruning ends: `remove` a share of the units, or `keep` so much of a cost, or as far as `max_drop` allows.

    `max_drift` bounds how far heat maps may move from those of the unpruned model: 1 minus their correlation.
    `keep` names "params" or "macs", a share up to 1 or else a number; or alone "latency", a share of what is measured,
    or "seconds" per forward pass.

    >>> Target(keep={"macs": 0.5})
    Target(keep={'macs': 0.5})
    """

    remove: float | None = None
    keep: Mapping[str, float] | None = None
    max_drop: float | Mapping[str, float] | None = None
    max_drift: float | Mapping[str, float] | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        keep: Any = {} if self.keep is None else self.keep
        if not isinstance(keep, Mapping):
            given = Argument("keep", keep)
            raise TargetError("{keep} does not say of what.", fix="keep={{'macs': 0.5}}, or 'params'", keep=given)
        for name, bounds in (("keep", self.keep), ("max_drop", self.max_drop), ("max_drift", self.max_drift)):
            if isinstance(bounds, Mapping) and not bounds:
                example = Argument(name, {"macs": 0.5} if name == "keep" else 0.01)
                raise TargetError(
                    "{given} names no bound.", fix="for example {example}", given=Argument(name, {}), example=example
                )
        check = partial(arguments.check_number, error=TargetError)
        if self.remove is not None:
            check("remove", self.remove)
        for name, value in keep.items():
            check("keep", value, key=str(name))
        for bound, limit in (("max_drop", self.max_drop), ("max_drift", self.max_drift)):
            for name, value in (limit if isinstance(limit, Mapping) else {"": limit}).items():
                if limit is not None:
                    check(bound, value, key=str(name), least=0)
        if self.remove is None and not keep and not self.bounded:
            fix = "remove=0.3, a share of the units; keep={'macs': 0.5}, or 'params' or 'latency'; or max_drop=0.01"
            raise TargetError("there is no target: give exactly one target.", fix=fix)
        if self.remove is not None:
            check_share("remove", self.remove)
        for name, value in keep.items():
            _check_cost(name, value)
        if self.remove is not None and self.keep is not None:
            raise _conflict(*keep, "remove", what="are different targets.")
        if self.timed and len(keep) > 1:
            raise _conflict(*keep, what="cannot be combined: a latency is approached alone.")

    @property
    def bounded(self) -> bool:
        """Whether a step may be taken back because of what it costs in accuracy or in reasons."""
        return self.max_drop is not None or self.max_drift is not None

    @property
    def sizes(self) -> dict[str, float]:
        """The bounds on parameters and MACs as they were given."""
        return {name: value for name, value in (self.keep or {}).items() if name in _SIZES}

    def bounds(self, whole: Cost) -> dict[str, float]:
        """The bounds on parameters and MACs as numbers, given the cost of the whole model."""
        return {name: value * getattr(whole, name) if value <= 1 else value for name, value in self.sizes.items()}

    @property
    def times(self) -> dict[str, float]:
        """The bound on the latency."""
        return {name: value for name, value in (self.keep or {}).items() if name in _TIMES}

    @property
    def timed(self) -> bool:
        """Whether the target is a latency."""
        return bool(self.times)

    def seconds(self, unpruned: float | None) -> float:
        """The latency to reach, given that of the unpruned model; infinite if none is asked for."""
        if "latency" in self.times and unpruned is not None:
            return self.times["latency"] * unpruned
        return self.times.get("seconds", math.inf)


@dataclass(frozen=True, repr=False)
class Limits:
    """What a plan must respect: `prune(..., limits=Limits(round_to=8, ignore="layer4.*"))`.

    `scope` says which units compete: all ("global"), those of a layer ("layer"), or all by score for what they save
    ("cost"): MACs, or parameters or time if the target is in these. None is "global" for `plan`, "cost" if that is for
    a latency; `prune` chooses by criterion. `ignore` and `only` are
    wildcards on module paths; a module's name stands for everything in it. A stream that several modules write is
    ignored if one of them is, and taken by `only` if all are. Every layer keeps at least `min_units`, and a multiple of
    `round_to` channels. None: in models with attention, layers of 512 channels and more keep a multiple of 8, since
    GPUs are slow with other widths; for a latency, layers keep the next multiple that takes no longer by the table; all
    others keep any number. With `uniform`, layers that differ only by the number
    of their block keep the same width, as the config of a Hugging Face model needs it. With `blocks`, residual branches
    may leave as a whole too; with "only", nothing else does. Together with `uniform`, whole layers of a transformer do.

    >>> Limits(round_to=8, ignore="head")
    Limits(ignore=('head',), round_to=8)
    """

    scope: Scope | None = None
    ignore: Sequence[str] = ()
    only: Sequence[str] = ("*",)
    min_units: int = 1
    round_to: int | None = None
    uniform: bool = False
    blocks: bool | Literal["only"] = False

    __repr__ = brief

    def __post_init__(self) -> None:
        for name in ("ignore", "only"):
            object.__setattr__(self, name, arguments.patterns(name, getattr(self, name), error=TargetError))
        scope: str | None = self.scope
        if scope == "time":  # what older versions had
            fix = "a target in time, keep={{'latency': 0.5}}; then 'cost' is the time, as measured"
            raise TargetError("{scope} was an estimate, and is gone.", fix=fix, scope=Argument("scope", scope))
        if self.scope is not None:
            arguments.check_choice("scope", self.scope, get_args(Scope), error=TargetError)
        arguments.check_flag("uniform", self.uniform)
        if self.blocks != "only":
            arguments.check_flag("blocks", self.blocks, error=TargetError)
        why = "layers are never emptied"
        arguments.check_count("min_units", self.min_units, why=why, error=TargetError)
        if self.round_to is not None:
            arguments.check_count("round_to", self.round_to, why=why, error=TargetError)

    @classmethod
    def of(cls, given: Limits | None) -> Limits:
        """The limits that a user gives; none if that is None."""
        if given is None:
            return cls()
        named = ", ".join(f"{k}={v!r}" for k, v in given.items()) if isinstance(given, Mapping) else "round_to=8"
        arguments.check_kind("limits", given, cls, f"limits=Limits({named}), from secateur.plans", error=TargetError)
        return given

    def check(self, graph: Graph) -> None:
        """Refuse a pattern that matches no layer: ignoring it could prune layers that you meant to protect."""
        for name, patterns in (("ignore", self.ignore), ("only", self.only)):
            for pattern in patterns:
                if pattern == "*" or any(item.matches([pattern]) for item in (*graph.layers, *graph.branches)):
                    continue
                paths = list(dict.fromkeys(path for layer in graph.layers for path in layer.paths))
                close = difflib.get_close_matches(pattern, paths, 3) or paths[:5]
                raise TargetError(
                    f"{{pattern}} fits no layer of {graph.model_name} that has units.",
                    fix="a name such as {close}, or a wildcard such as 'layer4.*'; {graph} shows them all",
                    pattern=Argument(name, pattern),
                    close=", ".join(close),
                    graph=Argument("print(graph)"),
                )


def check_share(name: str, value: float) -> None:
    """Refuse what is no share of the units."""
    arguments.check_number(name, value, error=TargetError)
    if not 0 < value < 1:
        raise TargetError(
            "{given} must lie strictly between 0 and 1: a share of the units.",
            fix="{share} for {percent:g} per cent" if 1 < value < 100 else "for example {half}",
            given=Argument(name, value),
            share=Argument(name, value / 100),
            percent=value,
            half=Argument(name, 0.5),
        )


def _check_cost(name: str, value: float) -> None:
    keep = Argument("keep", value, key=name)
    if name not in (*_SIZES, *_TIMES):
        raise TargetError("{keep} is not known.", fix=f"one of {', '.join((*_SIZES, *_TIMES))}", keep=keep)
    if not value > 0:
        raise TargetError("{keep} must be above 0.", fix="for example {half}", keep=keep, half=replace(keep, value=0.5))
    if name == "latency" and value > 1:
        raise TargetError("{keep} must be a share of what is measured, up to 1.", keep=keep)


def _conflict(*names: str, what: str) -> TargetError:
    named = {name: Argument(name) if name == "remove" else Argument("keep", key=name) for name in names}
    return TargetError(f"{' and '.join(f'{{{name}}}' for name in named)} {what}", fix="give one of them", **named)
