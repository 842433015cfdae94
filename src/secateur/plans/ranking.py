"""`plan`: from scores and a target to the groups that leave."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from secateur.errors import NothingToPruneError, TargetError
from secateur.ops.layers import Labels
from secateur.plans.plan import Mask, Plan, plan_for
from secateur.plans.scores import Aggregation, Scores, Values
from secateur.structure.cost import Cost, Price, human
from secateur.structure.graph import Graph

#: Whom groups are ranked against: all others, those of their layer (so that every layer gives the same share), or all
#: others by score per multiply-accumulate saved, or per time, which numbers that are read and written take as well.
Scope = Literal["global", "layer", "cost", "time"]


def plan(
    graph: Graph,
    scores: Scores,
    remove: float | None = None,
    keep: Mapping[str, float] | None = None,
    *,
    scope: Scope = "global",
    round_to: int = 1,
    min_units: int = 1,
    ignore: str | Sequence[str] = (),
    only: str | Sequence[str] = ("*",),
    start: Plan | None = None,
) -> Plan:
    """Choose which groups leave: those with the lowest scores, until the target is met.

    `remove` is a fraction of the units that may leave. `keep` names what should remain instead: `{"params": 0.5}` or
    `{"macs": 1.2e9}`, a fraction if at most 1, else an absolute number. `scope="layer"` takes the same share of every
    layer; `scope="cost"` ranks by score lost per MAC saved, `scope="time"` by score lost per time saved, as estimated
    from MACs and numbers read and written; both rank per parameter if only parameters are asked for.
    `round_to` keeps a multiple of that many channels in each layer, so that less may leave than `remove` allows.
    `ignore` and `only` are wildcards on module paths; a module's name stands for everything in it. With `start`, what
    that plan removes is gone already and counts towards the target.

    >>> import torch, secateur as sc
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    >>> graph = sc.analyze(net, torch.zeros(1, 4))
    >>> print(sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5).layers)
    {'0': (6, 3)}
    """
    if (remove is None) == (keep is None):
        raise TargetError("give exactly one target: remove=fraction, or keep={'params' or 'macs': fraction or number}")
    check_target(remove, keep)
    ignore, only = named_layers(graph, "ignore", ignore), named_layers(graph, "only", only)
    if min_units < 1 or round_to < 1:
        raise TargetError(f"min_units={min_units} and round_to={round_to} must be at least 1: layers are never emptied")
    if scope not in get_args(Scope):
        raise TargetError(f"scope={scope!r} is not known; there are {', '.join(get_args(Scope))}.")
    spared: Price = "time" if scope == "time" else "macs"
    if keep is not None and set(keep) == {"params"}:
        spared = "params"
    chooser = _Chooser(graph, scores, scope, round_to, min_units, ignore, only, start, spared)
    if remove is not None:
        return plan_for(graph, chooser.by_units(remove))
    assert keep is not None
    return plan_for(graph, chooser.by_cost(keep))


def check_target(remove: object, keep: object) -> None:
    """Refuse what is no target at all."""
    if keep is not None and not isinstance(keep, Mapping):
        raise TargetError(f"keep={keep!r} does not say of what.", fix="keep={'macs': 0.5}, or 'params'")
    numbers = {"remove": remove} if keep is None else {f"keep[{name!r}]": value for name, value in keep.items()}
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool | str) or not isinstance(value, int | float | np.number)):
            raise TargetError(f"{name}={value!r} must be a number, not {type(value).__name__}.")


def named_layers(graph: Graph, what: str, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Wildcards on module paths. One that no layer fits is refused: what it was to keep, or to choose, would not be."""
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in listed:
        if pattern != "*" and not any(layer.matches([pattern]) for layer in graph.layers):
            paths = list(dict.fromkeys(path for layer in graph.layers for path in layer.paths))
            close = difflib.get_close_matches(pattern, paths, 3) or paths[:5]
            raise TargetError(
                f"{what}={pattern!r} fits no layer of {graph.model_name} that has units.",
                fix=(
                    f"a name such as {', '.join(close)}, or a wildcard such as 'layer4.*'; `print(graph)` shows "
                    "them all"
                ),
            )
    return listed


class _Chooser:
    """The order in which groups would leave, and how far down it a target lies."""

    def __init__(
        self,
        graph: Graph,
        scores: Scores,
        scope: Scope,
        round_to: int,
        min_units: int,
        ignore: Sequence[str],
        only: Sequence[str],
        start: Plan | None,
        spared: Price,
    ) -> None:
        self.graph, self.round_to = graph, round_to
        self.gone: Mask = np.zeros(len(graph.root), np.bool_)
        if start is not None:
            self.gone[list(start.groups)] = True
        layers = [layer for layer in graph.layers if layer.matches(only) and not layer.matches(ignore)]
        free = [g[graph.prunable[g] & ~self.gone[g]] for g in (layer.groups for layer in layers)]
        candidates: Labels = np.concatenate(free) if free else np.zeros(0, np.int64)
        if not len(candidates):
            raise NothingToPruneError(_why_nothing(graph, ignore, only))
        self.value = scores.of(graph)
        if np.isnan(self.value[candidates]).any():
            bad = [
                layer.name for layer in layers if np.isnan(self.value[layer.groups[graph.prunable[layer.groups]]]).any()
            ]
            raise TargetError(
                f"the criterion {scores.criterion!r} gave no score (NaN) for units of {', '.join(bad[:5])}"
            )
        self.home = self._homes()
        protected = self._protected(candidates, min_units)
        candidates = candidates[~protected[candidates]]
        if not len(candidates):
            raise TargetError(
                f"every layer of {graph.model_name} is down to min_units={min_units}: nothing may leave.",
                fix="a smaller min_units",
            )
        key = self.value[candidates]
        if scope == "layer":
            key = self._shares(candidates)
        elif scope in ("cost", "time"):
            key = self._per_cost(candidates, scores.aggregate, spared)
        self.order: Labels = candidates[np.argsort(key, kind="stable")]

    def _homes(self) -> Labels:
        """The first producer of each class: the layer it is ranked in when every layer gives the same share."""
        home = np.full(len(self.graph.root), -1, np.int64)
        for i, producer in reversed(list(enumerate(self.graph.producers))):
            home[self.graph.root[producer.labels]] = i
        return home

    def _shares(self, candidates: Labels) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Each group's rank within its layer as a fraction of the layer."""
        home = self.home[candidates]
        order = np.lexsort((self.value[candidates], home))
        share = np.empty(len(candidates))
        bounds = np.flatnonzero(np.diff(home[order])) + 1
        for part in np.split(order, bounds):
            share[part] = (np.arange(len(part)) + 1) / len(part)
        return share

    def _per_cost(self, candidates: Labels, aggregate: Aggregation, spared: Price) -> Values:
        """What the group's units score in all, per operation that leaves with them."""
        units = self.graph.units[candidates]
        total = self.value[candidates] * (1 if aggregate == "sum" else units)
        saved = self.graph.cost_of.savings(self.gone, spared)[candidates]
        # What saves nothing is not worth its score, however low: it leaves last, not first.
        made: Values = total / np.maximum(saved, 1e-6 * max(float(saved.max()), 1.0))
        return made

    def _protected(self, candidates: Labels, min_units: int) -> Mask:
        """The best `min_units` groups of every layer never leave; nor does the last one that a weight reads."""
        value = np.full(len(self.graph.root), np.inf)
        value[candidates] = self.value[candidates]
        shield: Mask = np.zeros(len(self.graph.root), np.bool_)
        for producer in self.graph.producers:
            self._shield(shield, value, self.graph.root[producer.labels], min_units)
        for axis in self.graph.axes.axes:
            self._shield(shield, value, self.graph.root[axis.base : axis.base + axis.size], 1)
        return shield

    def _shield(self, shield: Mask, value: Values, classes: Labels, count: int) -> None:
        classes = classes[~self.gone[classes]]
        safe = classes[np.isinf(value[classes]) | shield[classes]]
        if len(safe[:1] if count == 1 else np.unique(safe)) < count:  # most layers have a safe one: seen without a sort
            groups = np.unique(classes)
            shield[groups[np.argsort(-value[groups], kind="stable")[:count]]] = True

    def mask(self, count: int) -> Mask:
        """What is gone when the first `count` groups of the order leave, after rounding."""
        removed = self.gone.copy()
        removed[self.order[:count]] = True
        if self.round_to > 1:
            self._round(removed)
        return removed

    def _round(self, removed: Mask) -> None:
        """Bring back the best removed groups of each layer until it keeps a multiple of `round_to` channels."""
        root = self.graph.root
        for _ in range(8):
            changed = False
            for producer in self.graph.producers:
                classes = root[producer.labels]
                kept = int(np.count_nonzero(~removed[classes]))
                missing = -kept % self.round_to
                if not missing or kept == len(classes):
                    continue
                groups, rows = np.unique(classes[removed[classes] & ~self.gone[classes]], return_counts=True)
                best = np.argsort(-self.value[groups], kind="stable")
                upto = int(np.searchsorted(np.cumsum(rows[best]), missing)) + 1
                removed[groups[best[:upto]]] = False
                changed |= bool(len(groups))
            if not changed:
                return

    def by_units(self, remove: float) -> Mask:
        """The longest start of the order that stays within a fraction of all units."""
        if not 0 < remove < 1:
            raise TargetError(f"remove={remove} must lie strictly between 0 and 1: the share of units that leaves")
        units = self.graph.units
        total = self.graph.total_units
        already = int(units[self.gone].sum())
        sums = np.cumsum(units[self.order]) + already
        # Tolerate binary fractions: 18 steps of 0.05 must reach 90 %.
        goal = int(np.floor(remove * total + 1e-9))
        if goal > (sums[-1] if len(sums) else already):
            most = (int(sums[-1]) if len(sums) else already) / total
            raise TargetError(
                f"remove={remove} asks for {goal} of {total} units, but at most {100 * most:.1f} % can leave: "
                "every layer keeps min_units, and ignored layers keep all.",
                fix="a smaller fraction, or fewer exceptions",
            )
        count = int(np.searchsorted(sums, goal, "right"))
        if count == 0 and not already:
            smallest = int(units[self.order].min())
            raise NothingToPruneError(
                f"remove={remove} of {total} units is less than the smallest group ({smallest} units): nothing leaves"
            )
        found = self.mask(count)
        if self.round_to > 1:
            found = self._further(count, goal, found)
            if not already and not found.any():
                raise NothingToPruneError(
                    f"remove={remove} of {total} units leaves every layer as it is, since it keeps a multiple "
                    f"of round_to={self.round_to} channels.",
                    fix="a smaller round_to, or a larger share",
                )
        return found

    def _further(self, count: int, goal: int, found: Mask) -> Mask:
        """What rounding brought back makes room for groups further down the order."""
        low, high = count, len(self.order)
        while low < high:
            middle = (low + high + 1) // 2
            wider = self.mask(middle)
            if int(self.graph.units[wider].sum()) <= goal:
                low, found = middle, wider
            else:
                high = middle - 1
        return found

    def by_cost(self, keep: Mapping[str, float]) -> Mask:
        """The shortest start of the order that meets every bound."""
        limits = {}
        whole = self.graph.cost
        for name, value in keep.items():
            if name not in ("params", "macs"):
                raise TargetError(
                    f"keep={{{name!r}: …}} is not known here; use 'params' or 'macs' (`prune` also knows 'latency')"
                )
            if not value > 0:
                raise TargetError(f"keep={{{name!r}: {value}}} must be positive")
            limits[name] = value * getattr(whole, name) if value <= 1 else value

        def fits(cost: Cost) -> bool:
            return all(getattr(cost, name) <= limit for name, limit in limits.items())

        low, high = 0, len(self.order)
        least = self.graph.cost_of(self.mask(high))
        if not fits(least):
            wanted = ", ".join(f"{human(limit)} {name}" for name, limit in limits.items())
            raise TargetError(
                f"cannot reach {wanted}: with everything removed that may leave, {least} remain "
                f"({100 * least.params / whole.params:.1f} % of the parameters, "
                f"{100 * least.macs / max(whole.macs, 1):.1f} % of the MACs).",
                fix="a larger target, a smaller min_units or round_to, or fewer ignored layers",
            )
        while low < high:
            middle = (low + high) // 2
            if fits(self.graph.cost_of(self.mask(middle))):
                high = middle
            else:
                low = middle + 1
        return self.mask(low)


def _why_nothing(graph: Graph, ignore: Sequence[str], only: Sequence[str]) -> str:
    reasons = sorted({layer.reason for layer in graph.layers if layer.reason})
    named = f" ignore={list(ignore)}, only={list(only)}." if ignore or list(only) != ["*"] else ""
    because = f" Reasons: {'; '.join(reasons[:4])}." if reasons else ""
    return f"{graph.model_name} has no unit that may leave.{named}{because} `print(graph)` shows every layer."
