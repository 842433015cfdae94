"""Checks of what a user gives to a public function: each argument once, by name, before any work."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from secateur.errors import Argument, SecateurError


def check_number(
    name: str, value: Any, *, key: str = "", least: float | None = None, error: type[SecateurError] = SecateurError
) -> None:
    """Refuse what is no finite number, or is below `least`. True and False are no numbers."""
    given = Argument(name, value, key)
    fix = "a finite number" if least is None else f"a finite number of at least {least:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error("{given} must be a number, not {kind}.", fix=fix, given=given, kind=type(value).__name__)
    if not math.isfinite(value):
        raise error("{given} must be a finite number.", fix=fix, given=given)
    if least is not None and value < least:
        raise error("{given} must be at least {least:g}.", fix=fix, given=given, least=least)


def check_count(
    name: str, value: Any, least: int | None = 1, *, why: str = "", error: type[SecateurError] = SecateurError
) -> None:
    """Refuse what is no whole number of at least `least`."""
    given = Argument(name, value)
    fix = "a whole number" if least is None else f"a whole number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error("{given} must be a whole number, not {kind}.", fix=fix, given=given, kind=type(value).__name__)
    if least is not None and int(value) < least:
        raise error(f"{{given}} must be at least {least}{why and f': {why}'}.", fix=fix, given=given)


def check_kind(name: str, value: Any, kinds: Any, fix: str, *, error: type[SecateurError] = SecateurError) -> None:
    """Refuse a value of another type than `kinds`, as for `isinstance`. `fix` says what to give."""
    if not isinstance(value, kinds):
        raise error(f"{name} is a {type(value).__name__}.", where=name, value=value, fix=fix)


def check_flag(name: str, value: Any, *, error: type[SecateurError] = SecateurError) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise error("{given} is no flag.", fix="True or False", given=Argument(name, value))


def check_choice(name: str, value: Any, known: Sequence[Any], *, error: type[SecateurError] = SecateurError) -> None:
    """Refuse what is not among the `known` values."""
    if not any(value is item or (type(value) is type(item) and value == item) for item in known):
        fix = f"one of {', '.join(map(repr, known))}"
        raise error("{given} is not known.", fix=fix, given=Argument(name, value))


def check_callable(name: str, value: Any, fix: str, *, error: type[SecateurError] = SecateurError) -> None:
    """Refuse what cannot be called. None is for "not given"."""
    if value is not None and not callable(value):
        raise error(f"{name} is a {type(value).__name__}, which cannot be called.", where=name, value=value, fix=fix)


def check_path(name: str, value: Any, fix: str) -> None:
    """Refuse what is no path."""
    check_kind(name, value, (str, os.PathLike), fix)
    if not os.fspath(value):
        raise SecateurError(f"{name} is empty.", where=name, fix=fix)


def patterns(name: str, given: Any, *, error: type[SecateurError] = SecateurError) -> tuple[str, ...]:
    """Wildcards on module paths as a tuple; a single one may be given as it is."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Mapping) or not hasattr(given, "__iter__"):
        fix = "a name or a list of names, such as 'layer4.*'"
        raise error(f"{name} is a {type(given).__name__}.", where=name, value=given, fix=fix)
    found = tuple(given)
    for item in found:
        if not isinstance(item, str):
            fix = f"names as text: {str(item)!r}" if isinstance(item, int) else "names as text"
            raise error(f"{name} holds {item!r}, which is no text.", where=name, value=item, fix=fix)
    return found
