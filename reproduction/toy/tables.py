"""The tables: ours beside the paper's and the authors' logs, the difference, and whether the seeds explain it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reproduction.criteria import CRITERIA
from reproduction.toy import reference
from reproduction.toy.campaign import Outcome
from reproduction.toy.ranking import End, Spread, centred, chosen, over_pairs, overlap
from reproduction.toy.recipe import DEPTHS, Recipe
from reproduction.toy.reference import Target

ENDS: tuple[End, ...] = ("first", "last")

# Half of the last digit that the paper prints.
_ROUNDING = {"accuracy": 0.005, "similarity": 0.0005}


@dataclass(frozen=True)
class Row:
    """One number of one table. `within`: the reference lies within two standard deviations over the seeds."""

    table: str
    net: str
    set: str
    view: str
    n: int | None
    m: int | None
    measure: str
    criterion: str
    mean: float
    std: float
    paper: float | None
    logs: float | None
    logs_std: float | None
    difference: float | None
    within: bool | None
    erratum: str | None


def rows(outcomes: list[Outcome], recipe: Recipe) -> list[Row]:
    """Every number of every table."""
    made: list[Row] = []
    for outcome in outcomes:
        made += _accuracies(outcome, recipe)
        made += _similarities(outcome, recipe)
    return made


def _row(table: str, outcome: Outcome, ours: Spread, target: Target, **where: Any) -> Row:
    place = {"view": "", "n": None, "m": None, "measure": "", "criterion": ""} | where
    logged = target.logged
    difference = within = None
    if target.value is not None and not math.isnan(ours.mean):
        difference = ours.mean - target.value
        slack = _ROUNDING["accuracy" if table in ("accuracy", "unpruned") else "similarity"]
        within = abs(difference) <= 2 * max(ours.std, logged.std if logged else 0.0) + slack
    return Row(
        table=table,
        net=outcome.reading.name,
        set=outcome.name,
        mean=ours.mean,
        std=ours.std,
        paper=target.printed,
        logs=logged.mean if logged else None,
        logs_std=logged.std if logged else None,
        difference=difference,
        within=within,
        erratum=target.erratum,
        **place,
    )


def _accuracies(outcome: Outcome, recipe: Recipe) -> Iterator[Row]:
    for v, view in enumerate(recipe.views):
        before = Spread.of(outcome.arrays["unpruned"][:, v].astype(np.float64))
        yield _row("unpruned", outcome, before, reference.unpruned(outcome.name, view), view=view)
        for criterion in CRITERIA:
            values = outcome.accuracy(criterion, v)
            for i, n in enumerate(recipe.sizes):
                target = reference.accuracy(outcome.name, view, n, criterion)
                yield _row("accuracy", outcome, Spread.of(values[i]), target, view=view, n=n, criterion=criterion)


def _similarities(outcome: Outcome, recipe: Recipe) -> Iterator[Row]:
    name = outcome.name
    for k in DEPTHS:
        depth = recipe.depth(k)
        for end in ENDS:
            measure = f"{end}-{k}"
            sets = {criterion: chosen(outcome.ranks(criterion), depth, end) for criterion in CRITERIA}
            for i, n in enumerate(recipe.sizes):
                for criterion in CRITERIA:
                    mine, lrp = sets[criterion][i], sets["lrp"][i]
                    alike = Spread.of(np.sum(mine * lrp, 1) / depth)
                    target = reference.with_lrp(name, n, measure, criterion)
                    yield _row("with_lrp", outcome, alike, target, n=n, measure=measure, criterion=criterion)
                    again = over_pairs(overlap(mine, mine, depth))
                    target = reference.self_similarity(name, n, measure, criterion)
                    yield _row("self", outcome, again, target, n=n, measure=measure, criterion=criterion)
                for j, m in enumerate(recipe.sizes):
                    shared = overlap(sets["lrp"][i], sets["lrp"][j], depth)
                    value = over_pairs(shared) if i == j else Spread.of(shared)
                    target = reference.across(name, n, m, measure)
                    yield _row("across", outcome, value, target, n=n, m=m, measure=measure, criterion="lrp")
    directions = {criterion: centred(outcome.ranks(criterion)) for criterion in CRITERIA}
    for i, n in enumerate(recipe.sizes):
        for criterion in CRITERIA:
            mine, lrp = directions[criterion][i], directions["lrp"][i]
            place = {"n": n, "measure": "rank correlation", "criterion": criterion}
            yield _row("self", outcome, over_pairs(mine @ mine.T), Target(), **place)
            yield _row("with_lrp", outcome, Spread.of(np.sum(mine * lrp, 1)), Target(), **place)


class Index:
    """Finds rows for tables and figures."""

    def __init__(self, made: list[Row]) -> None:
        self._rows = {(r.table, r.net, r.set, r.view, r.n, r.m, r.measure, r.criterion): r for r in made}

    def unpruned(self, net: str, name: str, view: str) -> Row:
        """Accuracy before pruning."""
        return self._rows["unpruned", net, name, view, None, None, "", ""]

    def accuracy(self, net: str, name: str, view: str, n: int, criterion: str) -> Row:
        """Accuracy after pruning."""
        return self._rows["accuracy", net, name, view, n, None, "", criterion]

    def similarity(self, table: str, net: str, name: str, n: int, measure: str, criterion: str) -> Row:
        """Tables 1 and 2."""
        return self._rows[table, net, name, "", n, None, measure, criterion]

    def across(self, net: str, name: str, n: int, m: int, measure: str) -> Row:
        """Supplementary Table 2."""
        return self._rows["across", net, name, "", n, m, measure, "lrp"]


def as_csv(made: list[Row]) -> str:
    """The rows as comma-separated values."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for row in made:
        writer.writerow({key: short(value) for key, value in asdict(row).items()})
    return text.getvalue()


def short(value: Any) -> Any:
    """Round to five digits. NaN becomes None."""
    if isinstance(value, float):
        return round(value, 5) if value == value else None  # JSON knows no NaN
    return value
