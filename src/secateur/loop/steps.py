"""The steps of Algorithm 1: score, remove the least important units, repair or fine-tune, evaluate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from torch import nn

from secateur.criteria.scoring import scores_of
from secateur.errors import Argument, TargetError
from secateur.latency.timing import time_forward
from secateur.loop.callbacks import evaluated, named, seeded, within
from secateur.loop.planner import Planner
from secateur.loop.settings import Settings
from secateur.plans.difference import difference
from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.results.history import History, Row
from secateur.running.batches import Data
from secateur.running.processes import same_everywhere
from secateur.running.progress import Evaluating, Listener, Scoring
from secateur.running.sandbox import check_weights
from secateur.structure.graph import Graph
from secateur.surgery.apply import apply
from secateur.surgery.optimizer import carry as carry_over
from secateur.surgery.provenance import remember


@dataclass
class RunState:
    """How far a run is: the smaller model, the plan that made it, the scores that the plan is based on, the rows."""

    model: nn.Module
    plan: Plan | None = None
    scores: Scores | None = None
    history: History = field(default_factory=History)
    step: int = 0
    done: str = ""


@dataclass
class Steps:
    """Takes the steps of one run. `tell` receives events."""

    original: nn.Module
    data: Data
    graph: Graph
    settings: Settings
    planner: Planner
    tell: Listener
    _first: Scores | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._repair = self.settings.repairer(self.original, self.data, self.tell)

    def unpruned(self, state: RunState) -> None:
        """Row 0: the model before any removal."""
        begin = time.perf_counter()
        metrics, latency = self._evaluated(state.model, 0), self._latency(state.model)
        cost, seconds = self.graph.cost, time.perf_counter() - begin
        row = Row(0, self.graph.total_units, 0.0, cost.params, cost.macs, metrics, latency=latency, seconds=seconds)
        state.history.rows.append(row)

    def next(self, state: RunState) -> None:
        """One step of Algorithm 1."""
        begin, number = time.perf_counter(), state.step + 1
        if self.planner.idle(state.plan, number):
            state.step = number
            return
        scores = self._scored(state, number)
        scoring = time.perf_counter() - begin
        proposal = self.planner.propose(scores, state.plan, number)
        limit = self.planner.seconds(state.history[0].latency)
        if proposal.plan is None and proposal.reason:
            if self.settings.target.timed:
                raise self._too_slow(limit, proposal.reason)
            state.done = proposal.reason
            return
        if proposal.plan is None or (state.plan is not None and proposal.plan.groups == state.plan.groups):
            state.step = number  # a step too small for the next group: it leaves with a later one
            if proposal.last:
                blocked = "no smaller group is left to come closer to the target"
                state.done = blocked if state.plan is None else self.planner.reached(state.plan, blocked)
            return
        model, plan, latency = self._removed(state, proposal.plan), proposal.plan, None
        if self.settings.target.timed:
            model, plan, latency = self._to_latency(state, scores, model, plan, number, limit)
        for item in self.settings.schedule.carry:
            carry_over(item, state.model, model, difference(plan, state.plan))
        model = self._improved(model, number)
        remember(model, self.original, plan)
        metrics = self._evaluated(model, number)
        drop = self.settings.target.max_drop
        held = drop is None or within(drop, state.history[0].metrics, metrics)
        had, has = plan.units
        low = sum(after <= self.settings.limits.min_units for before, after in plan.layers.values() if after < before)
        row = Row(
            number, has, (had - has) / had, plan.after.params, plan.after.macs, metrics, proposal.part, latency, low,
            held, scoring, time.perf_counter() - begin,
        )  # fmt: skip
        state.history.rows.append(row)
        state.step = number
        if not held:
            state.done = f"step {number} would have lost more accuracy than allowed; this is the step before it"
            return
        state.model, state.plan, state.scores = model, plan, scores
        met = latency <= limit if latency is not None else proposal.last
        state.done = self.planner.reached(plan) if met else ""

    def _scored(self, state: RunState, number: int) -> Scores:
        if self.settings.schedule.rescore:
            if number > 1 and (self.settings.repair is not None or self.settings.schedule.finetune is not None):
                check_weights(state.model)  # training may have diverged
            return self._score(state.model, state.plan, number)
        if self._first is None:
            self._first = self._score(self.original, None, 1)
        return self._first

    def _score(self, model: nn.Module, plan: Plan | None, number: int) -> Scores:
        criterion, schedule = self.settings.criterion, self.settings.schedule
        self.tell(Scoring(criterion.name))
        with seeded(schedule.seed, number):
            return scores_of(model, self.data, [criterion], self.graph, plan, schedule.batch_size)[0]

    def _removed(self, state: RunState, plan: Plan) -> nn.Module:
        schedule = self.settings.schedule
        if self.settings.repair is not None and schedule.finetune is None and not schedule.carry:
            # A repair starts from the original's own weights: repairs of repairs drift away from them.
            return apply(self.original, replace(plan, example=self.graph.example))
        return apply(state.model, difference(plan, state.plan))

    def _improved(self, model: nn.Module, number: int) -> nn.Module:
        """The model after repair and fine-tuning."""
        finetune = self.settings.schedule.finetune
        with seeded(self.settings.schedule.seed, number, salt=1):
            if self._repair is not None:
                with named("repair", number):
                    model = self._repair(model)
                    if not isinstance(model, nn.Module):
                        raise TypeError(f"repair returned {type(model).__name__}, not a module")
            if finetune is not None:
                with named("finetune", number):
                    finetune(model, number)
        return model

    def _evaluated(self, model: nn.Module, number: int) -> dict[str, float]:
        if self.settings.evaluate is None:
            return {}
        self.tell(Evaluating())
        return evaluated(self.settings.evaluate, model, number, self.settings.schedule.seed)

    # -- latency ---------------------------------------------------------------------------------------------------
    def _latency(self, model: nn.Module) -> float | None:
        if not self.settings.target.timed:
            return None
        return float(same_everywhere(time_forward(model, self.graph.example)))

    def _too_slow(self, limit: float, reason: str) -> TargetError:
        return TargetError(
            "{seconds:.3g} s per forward pass cannot be reached: {reason}.",
            fix="a larger {keep}, or a smaller {round_to}",
            seconds=limit,
            reason=reason,
            keep=Argument("keep", key=next(iter(self.settings.target.times))),
            round_to=Argument("round_to"),
        )

    def _to_latency(
        self, state: RunState, scores: Scores, model: nn.Module, plan: Plan, number: int, limit: float
    ) -> tuple[nn.Module, Plan, float]:
        """If the step is fast enough, look for the smallest removal within it that is."""
        latency = self._latency(model)
        assert latency is not None
        if latency > limit:
            return model, plan, latency
        low, high = self.planner.bounds(number)
        for _ in range(4):
            middle = (low + high) / 2
            tried = self.planner.exactly(scores, state.plan, middle, number)
            if tried is None or tried.groups == plan.groups:
                break
            candidate = self._removed(state, tried)
            found = self._latency(candidate)
            assert found is not None
            if found <= limit:
                model, plan, latency, high = candidate, tried, found, middle
            else:
                low = middle
        return model, plan, latency
