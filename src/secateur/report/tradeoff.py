"""What the run would have kept if less or more had left: plans around the chosen one, by the same scores.

A run of one step has no history to draw a curve from. Its scores still say which units would leave at any target, so
that the curve needs no forward pass: for each plan, the MACs that are left and the share of the scores that stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from secateur.errors import NothingToPruneError, TargetError
from secateur.ops.layers import Mask
from secateur.plans.plan import Plan
from secateur.plans.ranking import plan as make_plan
from secateur.plans.scores import Scores, Values
from secateur.plans.targets import Limits
from secateur.report.charts import Chart, Point, Series
from secateur.report.document import Table, percent
from secateur.results.history import Record
from secateur.structure.graph import Graph, Layer

_THIS = "the model of this page"
#: Of what leaves by the chosen plan, how much leaves by those before it.
_LESS = (1 / 3, 2 / 3)
_MORE = 2  # plans behind the chosen one


@dataclass(frozen=True)
class Candidate:
    """A plan of the curve: what is left of the units, MACs and parameters, and which share of the scores stays."""

    units: float
    macs: float
    params: float
    kept: float
    seconds: float | None
    chosen: bool


@dataclass(frozen=True)
class Tradeoff:
    """Charts of the plans around the chosen one; or none, and why."""

    charts: Sequence[Chart]
    note: str = ""


def tradeoff(result: Record) -> Tradeoff | None:
    """The curve of a run of one step; None for other runs, which have a curve of what was measured."""
    scores, plan, asked = result.scores, result.plan, result.settings
    if not asked.get("one_shot") or scores is None or plan is None:
        return None
    limits, by_layer = _limits(asked), asked.get("scope") == "layer"
    layers = [x for x in result.graph.layers if x.prunable and x.within(limits.only) and not x.matches(limits.ignore)]
    worth = _worth(result.graph, scores)
    mine = worth[np.concatenate([np.zeros(0, np.int64), *(layer.groups for layer in layers)])]
    if not np.isfinite(mine).all() or (mine < 0).any() or not mine.sum() > 0:
        return Tradeoff([], "Some scores are negative or missing, so that no share of them can be told.")

    def candidate(found: Plan, chosen: bool) -> Candidate:
        removed: Mask = np.zeros(len(result.graph.root), np.bool_)
        removed[list(found.groups)] = True
        had, has = found.units
        seconds = None if result.table is None else result.table(removed)
        macs, params = found.after.macs / max(found.before.macs, 1), found.after.params / max(found.before.params, 1)
        return Candidate(has / max(had, 1), macs, params, _kept(worth, layers, removed, by_layer), seconds, chosen)

    nothing: Mask = np.zeros(len(result.graph.root), np.bool_)
    found = [Candidate(1.0, 1.0, 1.0, 1.0, None if result.table is None else result.table(nothing), False)]
    seen, goals = {plan.groups}, _goals(result, plan)
    for share in (*_LESS, None):
        if share is None:
            found.append(candidate(plan, True))
        elif (other := _planned(result, limits, goals.less(share))) is not None and other.groups not in seen:
            seen.add(other.groups)
            found.append(candidate(other, False))
    for goal in goals.more():
        other = _planned(result, limits, goal)
        if other is None or other.groups in seen:
            break
        seen.add(other.groups)
        found.append(candidate(other, False))
    if len(found) < 3:
        return None
    return Tradeoff(_charts(found, "relevance" if scores.conservation is not None else "score", by_layer))


@dataclass(frozen=True)
class _Goals:
    """Targets beside the chosen one: `left` has the shares that it leaves, by what `plan` calls them."""

    left: Mapping[str, float]

    def less(self, share: float) -> dict[str, float]:
        """Only so much of what leaves."""
        return {name: 1 - share * (1 - left) for name, left in self.left.items()}

    def more(self) -> Iterator[dict[str, float]]:
        """Half as much again leaves, or a third of what is left, whichever is less."""
        left = dict(self.left)
        for _ in range(_MORE):
            left = {name: max(1 - 1.5 * (1 - value), value * 2 / 3) for name, value in left.items()}
            yield left


def _goals(result: Record, plan: Plan) -> _Goals:
    asked = result.settings
    if asked.get("remove") is not None:
        return _Goals({"units": 1 - asked["remove"]})
    if result.table is not None and {"latency", "seconds"} & set(asked.get("keep", {})):
        nothing, removed = np.zeros((2, len(result.graph.root)), np.bool_)
        removed[list(plan.groups)] = True
        return _Goals({"seconds": result.table(removed) / result.table(nothing)})  # as it was planned in the end
    sizes = {name: value for name, value in asked.get("keep", {}).items() if name in ("macs", "params")}
    return _Goals({n: v if v <= 1 else v / max(getattr(plan.before, n), 1) for n, v in sizes.items()})


def _planned(result: Record, limits: Limits, left: Mapping[str, float]) -> Plan | None:
    """What the run would have planned for such a target; None if that cannot be reached."""
    if result.scores is None or not left or not all(0 < share < 1 for share in left.values()):
        return None
    try:
        if "units" in left:
            return make_plan(result.graph, result.scores, remove=1 - left["units"], limits=limits)
        if "seconds" in left and result.table is not None:
            whole = result.table(np.zeros(len(result.graph.root), np.bool_))
            keep = {"seconds": left["seconds"] * whole}
            return make_plan(result.graph, result.scores, keep=keep, limits=limits, latency=result.table)
        return make_plan(result.graph, result.scores, keep=left, limits=limits)
    except (TargetError, NothingToPruneError):
        return None


def _limits(asked: Mapping[str, Any]) -> Limits:
    """The limits of the run, by what it noted of them."""
    names = ("scope", "ignore", "min_units", "round_to", "uniform", "blocks")
    limits = Limits(**{name: asked[name] for name in names if name in asked})
    only = asked.get("parts", {}).get("")
    return replace(limits, only=only) if only else limits


def _worth(graph: Graph, scores: Scores) -> Values:
    """What the units of each group score in all."""
    total = np.zeros(len(graph.root))
    for producer in graph.producers:
        for site in producer.sites:
            if site in scores.units:
                np.add.at(total, graph.root[producer.labels], scores.units[site])
    return total


def _kept(worth: Values, layers: Sequence[Layer], removed: Mask, by_layer: bool) -> float:
    """The share of the scores that stays; if scores have no scale in common, the mean of the layers' shares."""
    sums = np.array([(worth[x.groups].sum(), worth[x.groups][~removed[x.groups]].sum()) for x in layers])
    sums = sums[sums[:, 0] > 0]
    return float((sums[:, 1] / sums[:, 0]).mean() if by_layer else sums[:, 1].sum() / sums[:, 0].sum())


def _charts(found: Sequence[Candidate], word: str, by_layer: bool) -> list[Chart]:
    whole, place = found[0].seconds, next(i for i, item in enumerate(found) if item.chosen)

    def caption(places: Sequence[float], of: str) -> str:
        def at(i: int) -> str:
            return f"{100 * found[i].kept:.1f} % at {100 * places[i]:.1f} % of the {of}"

        before = f" The plan before it: {at(place - 1)}." if place > 1 else ""
        behind = f" The plan behind it: {at(place + 1)}." if place + 1 < len(found) else " No more may leave."
        meant = "the mean share of a layer's scores" if by_layer else "the share of all scores"
        return (
            f"The ring is {_THIS}: {at(place)}.{before}{behind} {word.capitalize()} kept is {meant} that belongs to "
            "units that stay, before any repair. It is exact, and it is no accuracy: only the plan with the ring was "
            "carried out."
        )

    lines = []
    for item in found:
        note = _THIS if item.chosen else "unpruned" if item is found[0] else "planned only"
        soon = () if item.seconds is None else (f"{1000 * item.seconds:.4g}",)
        lines.append((note, *map(percent, (item.units, item.macs, item.params, item.kept)), *soon))
    heads = ["units left, %", "MACs left, %", "parameters left, %", f"{word} kept, %"]
    heads += [] if whole is None else ["predicted latency, ms"]
    table = Table.of(f"{word} kept at other targets", ("plan",), heads, lines)
    axes = [("tradeoff-macs", "MACs", [item.macs for item in found])]
    if whole is not None:
        times = [(item.seconds or 0.0) / whole for item in found]
        axes.append(("tradeoff-latency", "predicted latency", times))
    charts = []
    for id, what, places in axes:
        axis = f"{what} left"
        points = [
            Point(
                100 * x, 100 * item.kept,
                f"{100 * x:.1f} % of {axis}: {100 * item.kept:.1f} %{f', {_THIS}' if item.chosen else ''}",
                chosen=item.chosen,
            )
            for x, item in zip(places, found, strict=True)
        ]  # fmt: skip
        charts.append(
            Chart(id, f"{word.capitalize()} kept over {axis}", caption(places, what), f"{axis}, %", f"{word} kept, %",
                  [Series(f"{word} kept", points)], table, True, (0.0, 100.0), 100.0)
        )  # fmt: skip
    return charts
