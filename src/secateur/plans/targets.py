"""Targets: how small a model must become, or how much accuracy it may lose. They are checked here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from secateur.errors import Argument, TargetError
from secateur.plans.limits import brief

_SIZES, _TIMES = ("params", "macs"), ("latency", "seconds")


@dataclass(frozen=True, repr=False)
class Target:
    """Where pruning ends: `remove` a share of the units, or `keep` so much of a cost, or as far as `max_drop` allows.

    `keep` names "params" or "macs", a share up to 1 or else a number; or alone "latency", a share of what is measured,
    or "seconds" per forward pass.

    >>> Target(keep={"macs": 0.5})
    Target(keep={'macs': 0.5})
    """

    remove: float | None = None
    keep: Mapping[str, float] | None = None
    max_drop: float | Mapping[str, float] | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        keep: object = self.keep
        if keep is not None and not isinstance(keep, Mapping):
            given = Argument("keep", keep)
            raise TargetError("{keep} does not say of what.", fix="keep={{'macs': 0.5}}, or 'params'", keep=given)
        drops = self.max_drop if isinstance(self.max_drop, Mapping) else {"": self.max_drop}
        numbers = [Argument("remove", self.remove), *(Argument("keep", v, key=k) for k, v in (self.keep or {}).items())]
        for item in [*numbers, *(Argument("max_drop", value, key=name) for name, value in drops.items())]:
            kind = type(item.value)
            if item.value is not None and (issubclass(kind, bool) or not issubclass(kind, int | float | np.number)):
                raise TargetError("{given} must be a number, not {kind}.", given=item, kind=kind.__name__)
        if self.remove is None and not self.keep and self.max_drop is None:
            raise TargetError(
                "there is no target: give exactly one target.",
                fix="remove=0.3, a share of the units; keep={'macs': 0.5}, or 'params' or 'latency'; or max_drop=0.01",
            )
        if self.remove is not None:
            check_share("remove", self.remove)
        for name, value in (self.keep or {}).items():
            _check_cost(name, value)
        if self.remove is not None and self.keep is not None:
            raise _conflict(*self.keep, "remove", what="are different targets.")
        if self.timed and len(self.keep or {}) > 1:
            raise _conflict(*(self.keep or {}), what="cannot be combined: a latency is approached alone.")

    @property
    def sizes(self) -> dict[str, float]:
        """The bounds on parameters and MACs."""
        return {name: value for name, value in (self.keep or {}).items() if name in _SIZES}

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


def check_share(name: str, value: float) -> None:
    """Refuse what is no share of the units."""
    if not 0 < value < 1:
        raise TargetError(
            "{given} must lie strictly between 0 and 1: a share of the units.",
            fix="{share} for {percent:g} per cent" if 1 <= value < 100 else "",
            given=Argument(name, value),
            share=Argument(name, value / 100),
            percent=value,
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
