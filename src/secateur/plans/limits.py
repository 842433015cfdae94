"""Limits: which layers may lose units, how many they keep, and which units compete with each other."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from secateur.errors import Argument, TargetError
from secateur.structure.graph import Graph

#: Which groups a group is ranked against: "global": all. "layer": those of its layer, so that every layer loses the
#: same share. "cost": all, by score per MAC saved. "time": all, by score per estimated time saved.
Scope = Literal["global", "layer", "cost", "time"]


def brief(settings: Any) -> str:
    """A settings object as text, with only those fields that are not at their default."""
    given = ((field, getattr(settings, field.name)) for field in fields(settings))
    shown = [
        f"{field.name}={value!r}" for field, value in given if value is not field.default and value != field.default
    ]
    return f"{type(settings).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Limits:
    """What a plan must respect: `prune(..., limits=Limits(round_to=8, ignore="layer4.*"))`.

    `scope` says which units compete: all ("global"), those of a layer ("layer"), or all by score per MAC ("cost") or
    per estimated time ("time"). None is "global" for `plan`; `prune` chooses by criterion. `ignore` and `only` are
    wildcards on module paths; a module's name stands for everything in it. Every layer keeps at least `min_units`, and
    a multiple of `round_to` channels.

    >>> Limits(round_to=8, ignore="head")
    Limits(ignore=('head',), round_to=8)
    """

    scope: Scope | None = None
    ignore: Sequence[str] = ()
    only: Sequence[str] = ("*",)
    min_units: int = 1
    round_to: int = 1

    __repr__ = brief

    def __post_init__(self) -> None:
        for name in ("ignore", "only"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if self.scope is not None and self.scope not in get_args(Scope):
            raise TargetError(
                "{scope} is not known.",
                fix=f"one of {', '.join(get_args(Scope))}",
                scope=Argument("scope", self.scope),
            )
        for name in ("min_units", "round_to"):
            if not getattr(self, name) >= 1:
                raise TargetError(
                    "{given} must be at least 1: layers are never emptied.", given=Argument(name, getattr(self, name))
                )

    def check(self, graph: Graph) -> None:
        """Refuse a pattern that matches no layer: ignoring it could prune layers that you meant to protect."""
        for name, patterns in (("ignore", self.ignore), ("only", self.only)):
            for pattern in patterns:
                if pattern == "*" or any(layer.matches([pattern]) for layer in graph.layers):
                    continue
                paths = list(dict.fromkeys(path for layer in graph.layers for path in layer.paths))
                close = difflib.get_close_matches(pattern, paths, 3) or paths[:5]
                raise TargetError(
                    "{pattern} fits no layer of {model} that has units.",
                    fix="a name such as {close}, or a wildcard such as 'layer4.*'; {graph} shows them all",
                    pattern=Argument(name, pattern),
                    model=graph.model_name,
                    close=", ".join(close),
                    graph=Argument("print(graph)"),
                )
