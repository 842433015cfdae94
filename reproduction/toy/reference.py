"""The paper's numbers, those of the authors' logs, and their known errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from reproduction.toy.ranking import Spread

# Cells of Supplementary Table 1 that differ from the logs they were made from.
_MISPRINTED = {("moon", 5, "taylor"), ("moon", 5, "gradient"), ("circle", 5, "lrp")}


@dataclass(frozen=True)
class Target:
    """The reference for a number. `printed` is in the paper, `logged` in the logs; `erratum` describes an error."""

    printed: float | None = None
    logged: Spread | None = None
    erratum: str | None = None

    @property
    def value(self) -> float | None:
        """The number to compare with: the printed one, unless it is known to be wrong."""
        if self.printed is not None and not (self.erratum and self.logged):
            return self.printed
        return self.logged.mean if self.logged else None


@cache
def numbers() -> dict[str, Any]:
    """The whole file."""
    text = resources.files("reproduction.toy").joinpath("reference.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def unpruned(name: str, view: str) -> Target:
    """Accuracy before pruning."""
    printed = numbers()["paper"]["unpruned"][name] if view == "train" else None
    return Target(printed, _spread("unpruned", view, name))


def accuracy(name: str, view: str, n: int, criterion: str) -> Target:
    """Supplementary Table 1, Figures 3 and 4."""
    cells = numbers()["paper"]["accuracy"][name][criterion]
    printed = cells.get("*", cells.get(str(n))) if view == "train" else None
    logged = _spread("accuracy", view, name, criterion, str(n))
    erratum = None
    if view == "train" and (name, n, criterion) in _MISPRINTED:
        erratum = "the print differs from the logs"
    elif name == "multi" and n == 1 and criterion != "weight":
        erratum = "all reference points are the origin"
    return Target(printed, logged, erratum)


def with_lrp(name: str, n: int, measure: str, criterion: str) -> Target:
    """Table 1: the share of units that a criterion and LRP both choose."""
    printed = numbers()["paper"]["with_lrp"][name].get(measure, {}).get(criterion) if n == 10 else None
    wrong = printed is not None and measure.endswith("-1000") and name in ("moon", "multi") and criterion != "lrp"
    erratum = "prints the values of n=1" if wrong else None
    return Target(printed, _spread("with_lrp", name, str(n), measure, criterion), erratum)


def self_similarity(name: str, n: int, measure: str, criterion: str) -> Target:
    """Table 2: the share of units that a criterion chooses again with other reference points."""
    printed = numbers()["paper"]["self"][name].get(measure, {}).get(criterion) if n == 10 else None
    return Target(printed, _spread("self", name, str(n), measure, criterion))


def across(name: str, n: int, m: int, measure: str) -> Target:
    """Supplementary Table 2: LRP with n against LRP with m reference points per class."""
    printed = numbers()["paper"]["across"][name].get(measure, {}).get(str(m)) if n == 10 else None
    return Target(printed, _spread("across", name, measure, str(n), str(m)))


def misprinted_correlation(name: str, criterion: str) -> float:
    """Table 2's "Spearman", which is a correlation of lists of ids. It is shown, but nothing is compared with it."""
    value: float = numbers()["paper"]["self"][name]["id-spearman"][criterion]
    return value


def _spread(*path: str) -> Spread | None:
    found: Any = numbers()["logs"]
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return Spread(*found) if found else None
