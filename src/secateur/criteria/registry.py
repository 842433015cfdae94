"""Criteria by name."""

from __future__ import annotations

from collections.abc import Callable

from secateur.arguments import check_kind
from secateur.criteria.attribution import Captum, Custom, Scorer
from secateur.criteria.criterion import Criterion
from secateur.criteria.relevance import LRP
from secateur.criteria.sensitivity import Activation, Gradient, Taylor
from secateur.criteria.weight import Random, Weight
from secateur.errors import CriterionError

_KNOWN: dict[str, Callable[[], Criterion]] = {
    "lrp": LRP,
    "taylor": Taylor,
    "gradient": Gradient,
    "weight": Weight,
    "activation": Activation,
    "random": Random,
}

#: What follows a colon in the name, e.g. "lrp:epsilon".
_FAMILIES: dict[str, Callable[[str, str], Criterion]] = {
    "lrp": lambda name, composite: LRP(name=name, composite=composite),
    "captum": lambda name, method: Captum(name=name, method=method),
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


def criterion_named(choice: Choice) -> Criterion:
    """A criterion from its name, itself, or a user's function.

    >>> criterion_named("lrp:epsilon_plus").name, criterion_named("weight").norm
    ('lrp:epsilon_plus', 2)
    """
    if isinstance(choice, Criterion):
        return choice
    if isinstance(choice, str):
        family, _, rest = choice.partition(":")
        if choice in _KNOWN:
            made = _KNOWN[choice]()
            fix = "register a function that returns a Criterion"
            check_kind(f"criterion {choice!r}", made, Criterion, fix, error=CriterionError)
            return made
        if rest and family in _FAMILIES:
            return _FAMILIES[family](choice, rest)
        raise CriterionError(
            f"criterion {choice!r} is not known.",
            fix=f"{', '.join(_KNOWN)}, 'lrp:<composite>', 'captum:<Method>', a Criterion, or a function "
            "f(model, batches) -> {module path: one number per unit}",
        )
    if Criterion in getattr(choice, "__mro__", ()):
        name = getattr(choice, "__name__", "")
        raise CriterionError(f"criterion {name} is a class.", fix=f"an object of it: {name}()")
    if callable(choice):
        return Custom(name=getattr(choice, "__name__", type(choice).__name__), function=choice)
    raise CriterionError(
        f"criterion must be a name, a Criterion or a function, not {type(choice).__name__}.",
        fix=f"a name such as {', '.join(_KNOWN)}",
    )
