"""`plan`: from scores and a target to the groups that leave."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from secateur.arguments import check_kind
from secateur.errors import Argument, NothingToPruneError, TargetError
from secateur.ops.layers import Labels, Mask
from secateur.plans.allocation import order_by_price
from secateur.plans.plan import Plan, plan_for
from secateur.plans.scores import Aggregation, Scores, Values
from secateur.plans.targets import Limits, Target
from secateur.structure.blocks import Block, fits
from secateur.structure.cost import Price, human
from secateur.structure.graph import Graph, Layer, families

#: In models with attention, layers of so many channels keep a multiple of so many: 16 bytes in half precision.
_WIDE, _ALIGNED = 512, 8


def plan(
    graph: Graph,
    scores: Scores,
    remove: float | None = None,
    keep: Mapping[str, float] | None = None,
    *,
    limits: Limits | None = None,
    start: Plan | None = None,
    latency: Price | None = None,
) -> Plan:
    """Choose which groups leave: those with the lowest scores, until the target is met.

    `remove` is a fraction of the units that may leave. `keep` names what should remain instead: `{"params": 0.5}` or
    `{"macs": 1.2e9}`, a fraction if at most 1, else an absolute number; `{"latency": 0.5}` or `{"seconds": 0.01}` as
    predicted by `latency`, the table of `secateur.latency`. `limits` protects layers, rounds widths, and says which
    units compete (`secateur.plans.Limits`): with `Limits(scope="layer")` every layer loses the same share, with "cost"
    groups are ranked by score lost for what they save: MACs, or parameters or time if only these are asked for; both
    are weighed again as the model shrinks towards `keep`, and the fewer attention heads a layer has left, the dearer
    they are. With `round_to`, less may leave than `remove` allows. `Limits(blocks=True)` lets residual branches leave
    as a whole. With `start`, what that plan removes is gone already and counts towards the target.

    >>> import torch, secateur as sc
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    >>> graph = sc.analyze(net, torch.zeros(1, 4))
    >>> print(sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5).layers)
    {'0': (6, 3)}
    """
    order = "plan(graph, scores, …), with graph=analyze(…) and scores=score(…)"
    check_kind("graph", graph, Graph, order)
    check_kind("scores", scores, Scores, order)
    if start is not None:
        check_kind("start", start, Plan, "the plan that this one goes on from, such as result.plan")
    target, limits = Target(remove, keep), Limits.of(limits)
    if target.timed and limits.scope is None:
        limits = replace(limits, scope="cost")
    if target.timed and latency is None:
        raise TargetError(
            "a plan for a latency needs a table of what was measured.", fix="latency=secateur.latency(model, example)"
        )
    limits.check(graph)
    bounds = target.bounds(graph.cost)
    prices: dict[str, Price] = dict(graph.cost_of.prices)
    if target.timed and latency is not None:
        prices["seconds"] = latency
        bounds["seconds"] = target.seconds(latency(np.zeros(len(graph.root), np.bool_)))
    spared = next(iter(bounds)) if len(bounds) == 1 else "macs"
    chooser = _Chooser(graph, scores, limits, start, prices, spared, bounds.get(spared))
    return plan_for(graph, chooser.by_units(remove) if remove is not None else chooser.by_cost(bounds))


class _Chooser:
    """The order in which groups leave, and how far down the order a target lies."""

    def __init__(
        self,
        graph: Graph,
        scores: Scores,
        limits: Limits,
        start: Plan | None,
        prices: Mapping[str, Price],
        spared: str,
        bound: float | None = None,
    ) -> None:
        self.graph, self.limits, self.prices = graph, limits, prices
        #: By group, those units that count in `remove`: a block may take others with it.
        self.units: Labels = np.where(graph.prunable, graph.units, 0)
        self.gone: Mask = np.zeros(len(graph.root), np.bool_)
        if start is not None:
            self.gone[list(start.groups)] = True
        layers = chosen(graph, limits)
        free = [g[graph.prunable[g] & ~self.gone[g]] for g in (layer.groups for layer in layers)]
        candidates: Labels = np.concatenate([np.zeros(0, np.int64), *free])
        self.blocks = {block.group: block for block in allowed(graph, limits) if not self.gone[block.group]}
        whole = np.array([*self.blocks], np.int64)
        if not len(candidates) and not len(whole):
            raise nothing_may_leave(graph, limits)
        #: Sets of channels of which a multiple stays.
        multiple = limits.round_to or 1
        self.widths = [(graph.root[p.labels], multiple) for p in graph.producers if multiple > 1]
        if limits.round_to is None and graph.heads:  # on a GPU, products of other widths are slow
            self.widths += [(graph.root[p.labels], _ALIGNED) for p in graph.producers if len(p.labels) >= _WIDE]
        self.widths += [(graph.root[item.labels], item.multiple) for item in graph.requirements if item.multiple > 1]
        self.value = scores.of(graph)
        if np.isnan(self.value[np.concatenate([candidates, whole])]).any():
            bad = [layer.name for layer, own in zip(layers, free, strict=True) if np.isnan(self.value[own]).any()]
            bad += [block.name for block in self.blocks.values() if np.isnan(self.value[block.group])]
            what = f"the criterion {scores.criterion!r} gave no score (NaN) for units of {', '.join(bad[:5])}"
            raise TargetError(what)
        protected = self._protected(candidates, limits.min_units)
        candidates = candidates[~protected[candidates]]
        if not len(candidates) and not len(whole):
            raise TargetError(
                f"every layer of {graph.model_name} is down to min_units={limits.min_units}: nothing may leave.",
                fix="a smaller min_units",
            )
        candidates = np.concatenate([candidates, whole])
        key = self.value[candidates]
        if limits.scope == "layer":
            key = self._shares(candidates)
        elif limits.scope == "cost":
            worth = self._worth(candidates, scores.aggregate)
            by_heads = bool(graph.heads) and spared != "seconds"
            if bound is None and not by_heads:
                saved = prices[spared].savings(self.gone)[candidates]
                # What saves nothing is not worth its score, however low: it leaves last, not first.
                key = worth / np.maximum(saved, 1e-6 * max(float(saved.max()), 1.0))
            else:
                until = 0.9 * (bound or 0.0)
                order = order_by_price(graph, candidates, worth, self.gone, prices[spared], until, by_heads)
                place = np.empty(len(graph.root))
                place[order] = np.arange(len(order))
                key = place[candidates]
        elif len(whole):  # what is lost per unit that leaves
            key[-len(whole) :] /= [max(block.units, 1) for block in self.blocks.values()]
        self.order: Labels = candidates[np.argsort(key, kind="stable")]
        self.ends: Labels = np.arange(len(candidates) + 1)  # after how many groups of the order a plan may end
        if limits.uniform:
            self._in_tiers(candidates, key)

    def _shares(self, candidates: Labels) -> Values:
        """Each group's rank as a fraction of its layer, which is the first one that makes its units.

        All blocks together are such a layer.
        """
        home = np.full(len(self.graph.root), -1, np.int64)
        for i, producer in reversed(list(enumerate(self.graph.producers))):
            home[self.graph.root[producer.labels]] = i
        home = home[candidates]
        order = np.lexsort((self.value[candidates], home))
        share = np.empty(len(candidates))
        for part in np.split(order, np.flatnonzero(np.diff(home[order])) + 1):
            share[part] = (np.arange(len(part)) + 1) / len(part)
        return share

    def _in_tiers(self, candidates: Labels, key: Values) -> None:
        """Blocks of the same kind lose their lowest group together, then their second lowest, and so on."""
        keys = np.full(len(self.graph.root), np.nan)
        keys[candidates] = key
        tiers: list[tuple[float, Labels]] = []
        free = (layer for layer in self.graph.layers if layer.prunable)
        for family in families(free, lambda layer: (len(layer.groups), int(self.graph.units[layer.groups].sum()))):
            own = [layer.groups[np.isfinite(keys[layer.groups])] for layer in family]
            if not min(map(len, own)):
                continue
            ranked = np.stack(
                [groups[np.argsort(keys[groups], kind="stable")][-min(map(len, own)) :] for groups in own]
            )
            # A tier never leaves before one of lower scores.
            worth = np.maximum.accumulate(keys[ranked].mean(0))
            tiers += zip(worth.tolist(), ranked.T, strict=True)
        for passage in self.graph.blocks.passages:  # a layer with all its branches
            if passage.blocks <= self.blocks.keys():
                groups = np.array(sorted(passage.blocks), np.int64)
                tiers.append((float(keys[groups].mean()), groups))
        tiers.sort(key=lambda tier: tier[0])
        self.order = np.concatenate([np.zeros(0, np.int64), *(groups for _, groups in tiers)])
        self.ends = np.cumsum([0, *(len(groups) for _, groups in tiers)])

    def _worth(self, candidates: Labels, aggregate: Aggregation) -> Values:
        """What the channels of each group score in all."""
        channels = np.zeros(len(self.graph.root), np.int64)  # a head is one unit, but has as many as it is wide
        for producer in self.graph.producers:
            np.add.at(channels, self.graph.root[producer.labels], 1)
        channels[[*self.blocks]] = 1
        return np.asarray(self.value[candidates] * (1 if aggregate == "sum" else channels[candidates]))

    def _protected(self, candidates: Labels, min_units: int) -> Mask:
        """The best `min_units` groups of every layer never leave; nor does the last one that a weight reads."""
        value = np.full(len(self.graph.root), np.inf)
        value[candidates] = self.value[candidates]
        shield: Mask = np.zeros(len(self.graph.root), np.bool_)
        for producer in self.graph.producers:
            self._shield(shield, value, self.graph.root[producer.labels], min_units)
        # Most axes have one that stays anyway: seen without a loop. The labels of axes follow each other, from 1.
        axes = [axis for axis in self.graph.axes.axes if axis.size and axis.base < len(self.graph.root)]
        safe = (np.isinf(value) & ~self.gone)[self.graph.root]
        found = np.logical_or.reduceat(safe, [axis.base for axis in axes]) if axes else ()
        for axis, known in zip(axes, found, strict=True):
            if not known:
                self._shield(shield, value, self.graph.root[axis.span], 1)
        for item in self.graph.requirements:
            if item.least > 1:
                self._shield(shield, value, self.graph.root[item.labels], item.least)
        return shield

    def _shield(self, shield: Mask, value: Values, groups: Labels, count: int) -> None:
        groups = groups[~self.gone[groups]]
        safe = groups[np.isinf(value[groups]) | shield[groups]]
        if count == 1:  # as usual: seen without a sort
            if not len(safe) and len(groups):
                own = value[groups]
                shield[groups[own == own.max()].min()] = True
        elif len(np.unique(safe)) < count:
            groups = np.unique(groups)
            shield[groups[np.argsort(-value[groups], kind="stable")[:count]]] = True

    def mask(self, count: int) -> Mask:
        """What is gone when the first `count` groups of the order leave, after rounding."""
        removed = self.gone.copy()
        removed[self.order[: self._end(count)]] = True
        if self.blocks:
            removed = self.graph.branches.closed(removed)
        if self.widths:
            self._round(removed)
        return removed

    def _end(self, count: int) -> int:
        return int(self.ends[np.searchsorted(self.ends, count, "right") - 1])

    def _round(self, removed: Mask) -> None:
        """Bring back the best removed groups of each layer until it keeps a multiple of `round_to` channels."""
        changed = True
        while changed:
            changed = False
            for channels, multiple in self.widths:
                kept = int(np.count_nonzero(~removed[channels]))
                missing = -kept % multiple
                if not missing or kept == len(channels):
                    continue
                groups, rows = np.unique(channels[removed[channels] & ~self.gone[channels]], return_counts=True)
                best = np.argsort(-self.value[groups], kind="stable")
                upto = int(np.searchsorted(np.cumsum(rows[best]), missing)) + 1
                removed[groups[best[:upto]]] = False
                changed |= bool(len(groups))

    def _in_blocks(self, removed: Mask) -> Mask:
        """What leaves because it lies in a block that does."""
        whole: Mask = np.zeros(len(removed), np.bool_)
        whole[[block.group for block in self.graph.branches if removed[block.group]]] = True
        return self.graph.branches.closed(whole)

    def by_units(self, remove: float) -> Mask:
        """The longest start of the order that stays within a fraction of all units."""
        total, given = self.graph.total_units, Argument("remove", remove)
        already = int(self.units[self.gone].sum())
        sums = np.cumsum(self._leaving()) + already
        # Tolerate binary fractions: 18 steps of 0.05 must reach 90 %.
        goal = int(np.floor(remove * total + 1e-9))
        if goal > sums[-1]:
            raise TargetError(
                f"{{remove}} asks for {goal} of {total} units, but at most {100 * (int(sums[-1]) / total):.1f} % can "
                f"leave: every layer keeps at least {self.limits.min_units}, and ignored layers keep all.",
                fix="a smaller share, or fewer ignored layers",
                remove=given,
            )
        count = self._end(int(np.searchsorted(sums, goal, "right")))
        if count == 0 and not already:
            raise NothingToPruneError(
                f"{{remove}} of {total} units is less than the smallest group ({int(self._leaving().min())} units): "
                "nothing leaves.",
                fix="a larger share",
                remove=given,
            )
        found = self.mask(count)
        if self.widths:
            found = self._further(count, goal, found)
            if not already and not found.any():
                raise NothingToPruneError(
                    f"{{remove}} of {total} units changes no layer, because {{round_to}} keeps multiples of that many "
                    "channels.",
                    fix="a smaller multiple, or a larger share",
                    remove=given,
                    round_to=Argument("round_to", self.limits.round_to or _ALIGNED),
                )
        return found

    def _leaving(self) -> Labels:
        """How many units leave at each place of the order. Those in a block leave with it, if not before."""
        if not self.blocks:
            return np.asarray(self.units[self.order])
        place = np.full(len(self.graph.root), len(self.order), np.int64)
        place[self.order] = np.arange(len(self.order))
        for block in self.blocks.values():
            np.minimum.at(place, block.groups, place[block.group])
        units = np.where(self.gone, 0, self.units)
        return np.bincount(place, units, len(self.order) + 1)[:-1].astype(np.int64)

    def _further(self, count: int, goal: int, found: Mask) -> Mask:
        """What rounding brought back makes room for groups further down the order."""
        low, high = count, len(self.order)
        while low < high:
            middle = (low + high + 1) // 2
            wider = self.mask(middle)
            if int(self.units[wider].sum()) <= goal:
                low, found = middle, wider
            else:
                high = middle - 1
        return found

    def by_cost(self, bounds: Mapping[str, float]) -> Mask:
        """The shortest start of the order that meets every bound."""

        def fits(removed: Mask) -> bool:
            costs = {name: self.prices[name](removed) for name in bounds}
            return all((costs[n] if n == "seconds" else round(costs[n])) <= limit for n, limit in bounds.items())

        everything = self.mask(len(self.order))
        if not fits(everything):
            whole, least = self.graph.cost, self.graph.cost_of(everything)
            wanted = ", ".join(f"{amount(limit, name)} {_SPELT.get(name, name)}" for name, limit in bounds.items())
            soon = f", {amount(self.prices['seconds'](everything), 'seconds')} s" if "seconds" in bounds else ""
            most = (
                "with everything removed that may leave" if everything.any() else "no unit can leave under these limits"
            )
            raise TargetError(
                f"cannot reach {wanted}: {most}, {least} remain "
                f"({100 * least.params / whole.params:.1f} % of the parameters, "
                f"{100 * least.macs / max(whole.macs, 1):.1f} % of the MACs{soon}).",
                fix="a larger target, "
                + ("a smaller {min_units}, " if self.limits.min_units > 1 else "")
                + "a smaller {round_to}, or fewer ignored layers",
                min_units=Argument("min_units"),
                round_to=Argument("round_to"),
            )
        counts = range(len(self.order))
        found = self.mask(bisect_left(counts, True, key=lambda count: fits(self.mask(count))))
        # A table of latencies knows which widths the machine likes, unless the user has chosen.
        chosen = self.limits.round_to is not None or self.limits.uniform
        step = 1 if chosen or "seconds" not in bounds else getattr(self.prices["seconds"], "step", 1)
        return self._filled(found, step, fits) if step > 1 else found

    def _filled(self, removed: Mask, step: int, fits: Callable[[Mask], bool]) -> Mask:
        """Bring back the best removed groups of each layer, up to a multiple of `step` channels, where that is free.

        By the table, a layer takes as long as one with the next multiple.
        """
        lost = self.gone | self._in_blocks(removed)
        for producer in self.graph.producers:
            channels = self.graph.root[producer.labels]
            groups, rows = np.unique(channels[removed[channels] & ~lost[channels]], return_counts=True)
            kept = int(np.count_nonzero(~removed[channels]))
            best = np.argsort(-self.value[groups], kind="stable")
            upto = int(np.searchsorted(np.cumsum(rows[best]), -kept % step, "right"))
            if kept and upto:
                trial = removed.copy()
                trial[groups[best[:upto]]] = False
                if self.widths:
                    self._round(trial)
                free = self.prices["seconds"](trial) <= (1 + 1e-9) * self.prices["seconds"](removed)
                removed = trial if free and fits(trial) else removed
        return removed


_SPELT = {"macs": "MACs", "params": "parameters"}


def amount(value: float, name: str) -> str:
    """A cost as text."""
    return f"{value:.3g}" if name == "seconds" else human(value)


def allowed(graph: Graph, limits: Limits) -> list[Block]:
    """The blocks that may leave as a whole."""
    if not limits.blocks:
        return []
    found = [b for b in graph.blocks.prunable if b.within(limits.only) and not b.matches(limits.ignore)]
    if limits.uniform:  # widths stay the same only where whole layers leave
        layers = frozenset[int]().union(*(passage.blocks for passage in graph.blocks.passages))
        found = [block for block in found if block.group in layers]
    return found


def chosen(graph: Graph, limits: Limits) -> list[Layer]:
    """The layers whose units the limits let go, prunable or not."""
    if limits.blocks == "only":
        return []
    return [layer for layer in graph.layers if layer.within(limits.only) and not layer.matches(limits.ignore)]


def nothing_may_leave(graph: Graph, limits: Limits) -> NothingToPruneError:
    """The error for a model of which every unit must stay, with the reasons."""
    coupled = [layer for layer in graph.layers if layer.prunable and layer.matches(limits.only)]
    reasons = [
        f"units of {layer.name} leave together with those of {other}, which no pattern names"
        for layer in coupled
        for other in [path for path in layer.paths if not fits(path, limits.only)][:1]
    ]
    reasons = reasons or sorted({layer.reason for layer in graph.layers if layer.reason}) or [graph.without_layers]
    named = {"ignore": limits.ignore} if limits.ignore else {}
    named |= {"only": limits.only} if limits.only != ("*",) else {}
    return NothingToPruneError(
        "{model} has no unit that may leave"
        + (f" with {' and '.join(f'{{{name}}}' for name in named)}." if named else ".")
        + ("{because}" if reasons else ""),
        fix="see {graph}, which shows every layer",
        model=graph.model_name,
        because=f" Reasons: {'; '.join(reasons[:4])}.",
        graph=Argument("print(graph)"),
        **{name: Argument(name, list(paths)) for name, paths in named.items()},
    )
