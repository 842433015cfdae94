"""Criteria by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from secateur.criteria.attribution import Captum, Custom, Scorer
from secateur.criteria.criterion import Absolute, Criterion, Norm
from secateur.criteria.relevance import LRP
from secateur.criteria.sensitivity import Activation, Gradient, Taylor
from secateur.criteria.weight import Random, Weight
from secateur.errors import CriterionError
from secateur.relevance.composites import PRESETS

_KNOWN: dict[str, Callable[[], Criterion]] = {
    "lrp": LRP,
    "taylor": Taylor,
    "gradient": Gradient,
    "weight": Weight,
    "activation": Activation,
    "random": Random,
}

Choice = str | Criterion | Scorer


def register_criterion(name: str, make: Callable[[], Criterion]) -> None:
    """Let `score(..., criterion=name)` find a criterion of yours.

    >>> register_criterion("molchanov", lambda: Taylor(name="molchanov", absolute="sample"))
    >>> criterion_named("molchanov").absolute
    'sample'
    """
    _KNOWN[name] = make


def known_criteria() -> list[str]:
    """Every name that `criterion=` takes, besides `lrp:<composite>` and `captum:<Method>`."""
    return list(_KNOWN)


def criterion_named(choice: Choice, norm: Norm | str = "default", absolute: Absolute | str = "default") -> Criterion:
    """A criterion from its name, itself, or a user's function; `norm` and `absolute` replace its own unless "default".

    >>> criterion_named("lrp:epsilon_plus").name, criterion_named("weight", norm=1).norm
    ('lrp:epsilon_plus', 1)
    """
    made = _made(choice)
    changes: dict[str, Any] = {}
    if norm != "default":
        if norm not in (None, 1, 2):
            raise CriterionError(f"norm={norm!r} is not known; use None, 1 or 2.")
        changes["norm"] = norm
    if absolute != "default":
        if absolute not in (None, "after", "sample"):
            raise CriterionError(f"absolute={absolute!r} is not known; use 'after', 'sample' or None.")
        changes["absolute"] = absolute
    return replace(made, **changes) if changes else made


def _made(choice: Choice) -> Criterion:
    if isinstance(choice, Criterion):
        return choice
    if isinstance(choice, str):
        family, _, rest = choice.partition(":")
        if choice in _KNOWN:
            return _KNOWN[choice]()
        if family == "captum" and rest:
            return Captum(name=choice, method=rest)
        if family == "lrp" and rest:
            if rest not in PRESETS:
                raise CriterionError(f"there is no composite {rest!r}; the presets are {', '.join(PRESETS)}.")
            return LRP(name=choice, composite=rest)
        raise CriterionError(
            f"criterion {choice!r} is not known; use {', '.join(_KNOWN)}, 'lrp:<composite>', 'captum:<Method>', "
            f"a Criterion, or a function f(model, batches) -> {{module path: one number per unit}}."
        )
    if callable(choice):
        return Custom(name=getattr(choice, "__name__", type(choice).__name__), function=choice)
    raise CriterionError(f"criterion must be a name, a Criterion or a function, not {type(choice).__name__}.")
