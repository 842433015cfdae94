"""What the experiment must show, checked against the tables. Every exception is listed."""

from __future__ import annotations

from dataclasses import dataclass

from reproduction.criteria import NAMES
from reproduction.toy.recipe import SETS, Recipe
from reproduction.toy.tables import Index

_UNPRUNED_POINTS = 1.0
_LRP_POINTS = 1.5
_PRINTED = (1, 5, 20, 100)
_ENOUGH = 5  # LRP is said to be reliable from this number of reference points per class


@dataclass(frozen=True)
class Claim:
    """One statement about one network, the number of cases that were checked, and the exceptions."""

    net: str
    text: str
    cases: int
    exceptions: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether no case contradicts."""
        return not self.exceptions


def check(index: Index, net: str, recipe: Recipe) -> list[Claim]:
    """All claims for one network."""
    return [
        _trained(index, net),
        _lrp_near_print(index, net, recipe),
        _others_within_spread(index, net, recipe),
        _lrp_leads(index, net, recipe, ("taylor", "gradient"), ("train",), "the training set"),
        _lrp_leads(index, net, recipe, ("taylor", "gradient"), recipe.views[1:], "noisy test sets"),
        _lrp_leads(index, net, recipe, ("weight",), ("train",), "the training set"),
        _lrp_most_stable(index, net, recipe),
    ]


def _trained(index: Index, net: str) -> Claim:
    bad = []
    for name in SETS:
        row = index.unpruned(net, name, "train")
        if row.difference is None or abs(row.difference) > _UNPRUNED_POINTS:
            bad.append(f"{name}: {row.mean:.2f} %, the paper {row.paper:.2f} %")
    return Claim(net, "networks trained to within 1 point of the paper's accuracy", len(SETS), tuple(bad))


def _lrp_near_print(index: Index, net: str, recipe: Recipe) -> Claim:
    bad, cases = [], 0
    for name in SETS:
        for n in _common(recipe, _ENOUGH):
            row = index.accuracy(net, name, "train", n, "lrp")
            if row.paper is not None:
                cases += 1
                if abs(row.mean - row.paper) > _LRP_POINTS:
                    bad.append(f"{name}, n={n}: {row.mean:.2f} ± {row.std:.2f}, the paper {row.paper:.2f}")
    return Claim(net, "LRP with n ≥ 5 within 1.5 points of Supplementary Table 1", cases, tuple(bad))


def _others_within_spread(index: Index, net: str, recipe: Recipe) -> Claim:
    bad, cases = [], 0
    for name in SETS:
        for n in _common(recipe, 1):
            for criterion in ("taylor", "gradient"):
                row = index.accuracy(net, name, "train", n, criterion)
                if row.paper is not None:
                    cases += 1
                    if not row.within:
                        ours, theirs = f"{row.mean:.2f} ± {row.std:.2f}", f"{row.paper:.2f} ± {row.logs_std or 0:.2f}"
                        bad.append(f"{name}, n={n}, {criterion}: {ours}, the paper {theirs}")
    return Claim(net, "Taylor and gradient within two standard deviations of Supplementary Table 1", cases, tuple(bad))


def _lrp_leads(
    index: Index, net: str, recipe: Recipe, others: tuple[str, ...], views: tuple[str, ...], where: str
) -> Claim:
    bad, cases = [], 0
    for name in SETS:
        for view in views:
            for n in (size for size in recipe.sizes if size >= _ENOUGH):
                lrp = index.accuracy(net, name, view, n, "lrp")
                for criterion in others:
                    other = index.accuracy(net, name, view, n, criterion)
                    cases += 1
                    if lrp.mean <= other.mean:
                        noise = "" if view == "train" else f", σ={view}"
                        bad.append(f"{name}{noise}, n={n}: LRP {lrp.mean:.2f}, {criterion} {other.mean:.2f}")
    named = " and ".join(NAMES[criterion] for criterion in others)
    return Claim(net, f"LRP above {named} for n ≥ 5 on {where}", cases, tuple(bad))


def _lrp_most_stable(index: Index, net: str, recipe: Recipe) -> Claim:
    bad, cases = [], 0
    for name in SETS:
        for n in (size for size in recipe.sizes if size >= _ENOUGH):
            lrp = index.similarity("self", net, name, n, "rank correlation", "lrp")
            for criterion in ("taylor", "gradient"):
                other = index.similarity("self", net, name, n, "rank correlation", criterion)
                cases += 1
                if lrp.mean <= other.mean:
                    bad.append(f"{name}, n={n}: LRP {lrp.mean:.3f}, {criterion} {other.mean:.3f}")
    return Claim(net, "LRP ranks units most alike under other reference points, n ≥ 5", cases, tuple(bad))


def _common(recipe: Recipe, least: int) -> list[int]:
    return [n for n in recipe.sizes if n in _PRINTED and n >= least]
