"""The planner of a run: which plan comes next, and whether it is the last."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from secateur.errors import Argument, NothingToPruneError, TargetError
from secateur.loop.settings import Settings
from secateur.ops.layers import Labels
from secateur.plans.plan import Plan
from secateur.plans.ranking import allowed, chosen, nothing_may_leave
from secateur.plans.ranking import plan as make_plan
from secateur.plans.scores import Scores
from secateur.runtimes import Latency
from secateur.structure.graph import Graph

# A step may be smaller than a unit, which then leaves in a later one; but not so small that a run never ends.
_LEAST_UNITS = 0.01
_WORDS = {"params": "parameters", "macs": "MACs"}


@dataclass(frozen=True)
class Proposal:
    """The next plan, the part of the model it works on, and whether it is the last; or None and why there is none."""

    plan: Plan | None
    part: str = ""
    last: bool = False
    reason: str = ""


class Planner:
    """Proposes what should be gone after each step. It has no state: steps are numbered from 1."""

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.target, self.limits = graph, settings.target, settings.limits
        self.step, self.one_shot, self.parts = settings.step, settings.schedule.one_shot, settings.parts
        self.latency = settings.latency if isinstance(settings.latency, Latency) else None
        self.limits.check(graph)
        if not allowed(graph, self.limits) and (self.limits.blocks == "only" or not len(graph.candidates)):
            raise nothing_may_leave(graph, self.limits)
        if not self.one_shot and self.step * graph.total_units < _LEAST_UNITS:
            raise TargetError(
                "{step} of {total} units is far less than one unit, so that the run would take {steps:.3g} steps.",
                fix="a step of at least one unit: {one}",
                step=Argument("step", self.step),
                total=graph.total_units,
                steps=1 / self.step,
                one=Argument("step", math.ceil(1000 / graph.total_units) / 1000),
            )
        self._check_reachable()

    @property
    def steps(self) -> int | None:
        """How many steps the run takes, where that is known."""
        if self.one_shot:
            return 1
        remove = self.target.remove
        return None if remove is None else math.ceil(remove / self.step - 1e-9) * len(self.parts)

    def reached(self, plan: Plan, otherwise: str = "the target is met") -> str:
        """In words: how close a plan came to the target, if rounding kept it away."""
        remove, round_to = self.target.remove, self.limits.round_to
        if round_to in (None, 1):
            return otherwise
        because = f"since widths are multiples of {round_to}"
        gone = 1 - plan.units[1] / plan.units[0]
        if remove is not None and gone < remove - 0.01:
            return f"{100 * gone:.0f} % of the units are gone instead of {100 * remove:g} %, {because}"
        for name, limit in self.target.bounds(plan.before).items():
            share = getattr(plan.after, name) / limit
            if share < 0.95:
                return f"the target is met with {100 * (1 - share):.0f} % fewer {_WORDS[name]} than allowed, {because}"
        return otherwise

    def propose(self, scores: Scores, start: Plan | None, number: int) -> Proposal:
        """What should be gone after step `number`. A step that is smaller than any group waits for the next."""
        part, turn = self._turn(number)
        if self.target.keep:
            final = self.final(scores, start)
            if self.one_shot or self._removed(final, part) <= self._units(part, turn * self.step):
                return Proposal(final, part, last=True)
        share, last = self._share(turn)
        last = last and number % len(self.parts) == 0
        try:
            found = self.exactly(scores, start, share, number)
        except (TargetError, NothingToPruneError):
            if self.target.remove is not None or self.target.keep:
                raise
            return Proposal(None, reason="nothing more may leave: every layer is ignored or as narrow as it may be")
        if found is None and start is None and last:
            free = [layer for layer in chosen(self.graph, self.limits) if layer.prunable]
            if not free and not allowed(self.graph, self.limits):
                raise nothing_may_leave(self.graph, self.limits)
            raise NothingToPruneError(
                f"{{remove}} of {self.graph.total_units} units is less than the smallest group, or than what "
                "{round_to} leaves room for: nothing leaves.",
                fix="a larger share",
                remove=Argument("remove", share),
                round_to=Argument("round_to", self.limits.round_to or 1),
            )
        return Proposal(found or start, part, last)

    def final(self, scores: Scores, start: Plan | None, seconds: float | None = None) -> Plan:
        """The plan that meets a target in costs. `seconds` replaces what the table should predict for it."""
        keep = self.target.keep if seconds is None else {"seconds": seconds}
        return make_plan(self.graph, scores, keep=keep, start=start, limits=self.limits, latency=self.latency)

    def idle(self, start: Plan | None, number: int) -> bool:
        """Whether step `number` asks for no more than is gone, so that there is no need to score."""
        if self.target.keep:
            return False
        part, turn = self._turn(number)
        share, last = self._share(turn)
        return not last and self._units(part, share) <= self._removed(start, part)

    def exactly(self, scores: Scores, start: Plan | None, share: float, number: int) -> Plan | None:
        """The plan in which `share` of the part's units are gone; None if that is no more than is gone already."""
        part, _ = self._turn(number)
        more = self._units(part, share) - self._removed(start, part)
        if more <= 0:
            return None
        wanted = (self._removed(start, "") + more) / self.graph.total_units
        limits = replace(self.limits, only=self.parts[part])
        try:
            return make_plan(self.graph, scores, remove=wanted, start=start, limits=limits)
        except NothingToPruneError:
            if self._may_leave(part, start):
                return None  # the smallest group is larger than this step
            raise

    def _turn(self, number: int) -> tuple[str, int]:
        """The part that step `number` works on, and how often it was its turn by then."""
        return list(self.parts)[(number - 1) % len(self.parts)], (number - 1) // len(self.parts) + 1

    def _share(self, turn: int) -> tuple[float, bool]:
        remove = self.target.remove
        if remove is None:
            return min(turn * self.step, 1 - 1e-12), False
        if self.one_shot or turn * self.step >= remove - 1e-9:
            return remove, True
        return turn * self.step, False

    def _units(self, part: str, share: float) -> int:
        total = self.graph.total_units if not part else int(self.graph.units[self._candidates(part)].sum())
        return math.floor(share * total + 1e-9)

    def _candidates(self, part: str) -> Labels:
        layers = [layer for layer in self.graph.layers if layer.matches(self.parts[part])]
        if not layers:
            what = f"parts[{part!r}]={list(self.parts[part])} matches no layer."
            raise TargetError(what, fix="`print(graph)` shows their names")
        groups = np.concatenate([layer.groups for layer in layers])
        return np.asarray(groups[self.graph.prunable[groups]])

    def _removed(self, plan: Plan | None, part: str) -> int:
        if plan is None:
            return 0
        if not part:
            return plan.units[0] - plan.units[1]
        mine = self._candidates(part)
        return int(self.graph.units[mine[np.isin(mine, plan.groups)]].sum())

    def _may_leave(self, part: str, start: Plan | None) -> bool:
        gone = np.array(start.groups if start is not None else (), np.int64)
        ignored = [layer.groups for layer in self.graph.layers if layer.matches(self.limits.ignore)]
        if not {block.group for block in allowed(self.graph, self.limits)} <= set(gone.tolist()):
            return True
        return not np.isin(self._candidates(part), np.concatenate([gone, *ignored])).all()

    def _check_reachable(self) -> None:
        """Fail before any work is done if the target cannot be met whatever the scores are."""
        units = {p.sites[0]: np.ones(len(p.labels)) for p in self.graph.producers}
        flat = Scores("any", units, blocks={block.name: 1.0 for block in self.graph.branches})
        if self.target.keep:
            self.final(flat, None)
        elif self.target.remove is not None:
            for number, part in enumerate(self.parts, 1):
                self._candidates(part)
                self.exactly(flat, None, self.target.remove, number)
        elif not self._may_leave(next(iter(self.parts)), None):
            make_plan(self.graph, flat, remove=0.5, limits=self.limits)
