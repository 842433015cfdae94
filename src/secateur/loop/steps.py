"""The steps of Algorithm 1: score, remove the least important units, repair or train, evaluate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from secateur.analysis.reasons import Viewer
from secateur.criteria.scoring import scores_of
from secateur.errors import (
    Argument,
    EvaluationError,
    SecateurError,
    SecateurWarning,
    TargetError,
    TrainingError,
    VerificationError,
)
from secateur.files.architecture import describable, is_pretrained
from secateur.latency.timing import time_forward
from secateur.loop.planner import Planner
from secateur.loop.settings import Settings
from secateur.plans.plan import Plan, difference, plan_for
from secateur.plans.scores import Scores
from secateur.recover.checkpoint import Checkpoint
from secateur.recover.recovery import trained
from secateur.recover.settings import Recover, Recovered
from secateur.results.history import History, Row
from secateur.running.batches import Data
from secateur.running.copies import copy_with
from secateur.running.identity import digest_of_text
from secateur.running.processes import same_everywhere
from secateur.running.progress import Evaluating, Listener, Scoring
from secateur.running.sandbox import check_weights, evaluating, seeded
from secateur.runtimes import Latency
from secateur.structure.graph import Graph, families
from secateur.surgery.apply import apply
from secateur.surgery.cut import cut
from secateur.surgery.optimizer import carry as carry_over
from secateur.surgery.optimizer import going_back
from secateur.surgery.provenance import remember

# How often a plan for a latency is measured at most, and which share of the limit is close enough.
_TRIES, _CLOSE = 6, 0.96
_REPEATS = 5  # forward passes that tell about how long one takes
# A limit up to this is meant for a share, even where a percentage is measured. And what rises to so many times what it
# was, without training, is no accuracy.
_OF_A_SHARE, _RISE = 0.1, 1.25


@dataclass
class RunState:
    """How far a run is: the smaller model, the plan that made it, the scores that the plan is based on, the rows."""

    original: nn.Module
    plan: Plan | None = None
    scores: Scores | None = None
    history: History = field(default_factory=History)
    step: int = 0
    done: str = ""
    #: Layers whose removal was wrong, with the reason: they stay.
    frozen: dict[str, str] = field(default_factory=dict)
    #: Heat maps of the watched samples, by step.
    seen: dict[int, Tensor] = field(default_factory=dict)
    _model: nn.Module | None = field(default=None, init=False)

    @property
    def model(self) -> nn.Module:
        """The model of the last step that held: at first a copy of the original, which is made when it is asked for."""
        if self._model is None:
            self._model = copy_with(self.original, lambda name, old: old.detach().clone())
        return self._model

    @model.setter
    def model(self, made: nn.Module) -> None:
        self._model = made

    def set_copy_aside(self) -> None:
        """Free the copy of the original, of a run that has removed nothing yet."""
        if self.plan is None:
            self._model = None


@dataclass
class Steps:
    """Takes the steps of one run. `tell` receives events."""

    original: nn.Module
    data: Data
    graph: Graph
    settings: Settings
    planner: Planner
    tell: Listener
    #: The file of the training within a step.
    training: Checkpoint | None = None
    #: Explains the watched samples.
    viewer: Viewer | None = None
    _scores: Scores | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        open_session = getattr(self.settings.repair, "session", None)
        # What the original answers is computed once for all steps.
        self._session = open_session(self.original, self.data) if open_session is not None else None

    def freeze(self, frozen: Mapping[str, str]) -> None:
        """From now on these layers stay. Refused if the target cannot be met without them."""
        self.graph = self.graph.frozen(frozen)
        self.planner = Planner(self.graph, self.settings)

    def next(self, state: RunState) -> None:
        """One step. Step 0 looks at the unpruned model; a step that asks for no more than is gone does nothing."""
        if not len(state.history):
            self._unpruned(state)
        elif self.planner.idle(state.plan, state.step + 1):
            state.step += 1
        else:
            self._step(state)

    def _unpruned(self, state: RunState) -> None:
        begin, cost = time.perf_counter(), self.graph.cost
        metrics = self._evaluated(state.model, 0)
        latency = self._timed(None)[0] if self.settings.target.timed else self._taken(state.model)
        drifts = self._looked(state, state.model, 0)
        self._judged(metrics, metrics, drifts)  # refuses limits for what is not measured
        _check_unit(self.settings.target.max_drop, metrics)
        drift = drifts.get("overall")
        row = Row(0, self.graph.total_units, 0.0, cost.params, cost.macs, metrics, latency=latency, drift=drift)
        state.history.rows.append(replace(row, seconds=time.perf_counter() - begin))

    def _step(self, state: RunState) -> None:
        """Score, remove, repair or train, evaluate."""
        begin, number, target = time.perf_counter(), state.step + 1, self.settings.target
        if self._from_original:
            state.set_copy_aside()  # it would take as much as all weights while scoring and repair need memory
        scores = self._scored(state, number)
        scoring = time.perf_counter() - begin
        proposal = self.planner.propose(scores, state.plan, number)
        if proposal.reason:
            state.done = proposal.reason
            return
        plan = proposal.plan
        if plan is None or (state.plan is not None and plan.groups == state.plan.groups):
            state.step = number  # a step too small for the next group: it leaves with a later one
            if proposal.last:
                blocked = "no smaller group is left to come closer to the target"
                state.done = blocked if state.plan is None else self.planner.reached(state.plan, blocked)
            return
        latency = None
        if target.timed:
            plan, latency = self._to_latency(state, scores, plan, proposal.last)
        if proposal.last and self.settings.limits.uniform and is_pretrained(self.original):
            self._check_config(plan)
        try:
            model = self._removed(state, plan)
        except VerificationError as error:
            self._learn(state, plan, error)
            return self.next(state)
        with ExitStack() as undo:  # what is carried goes back to the model before, unless this step is kept
            for item in self.settings.schedule.carry:
                undo.callback(going_back(item))
                carry_over(item, state.model, model, difference(plan, state.plan))
            model, failure = self._improved(model, plan, number)
            remember(model, self.original, plan)
            metrics = self._evaluated(model, number)
            latency = self._taken(model) if latency is None else latency
            drifts = self._looked(state, model, number)
            accurate, held = self._judged(state.history[0].metrics, metrics, drifts)
            had, has = plan.units
            least = self.settings.limits.min_units
            low = sum(after <= least for before, after in plan.layers.values() if after < before)
            row = Row(
                number, has, (had - has) / had, plan.after.params, plan.after.macs, metrics, proposal.part, latency,
                low, held, scoring, time.perf_counter() - begin, drifts.get("overall"),
            )  # fmt: skip
            state.history.rows.append(row)
            if not self._trains:
                _check_rise(target.max_drop, state.history)
            state.step = number
            if held:
                undo.pop_all()
                state.model, state.plan, state.scores = model, plan, scores
                state.done = self.planner.reached(plan) if proposal.last else ""
            else:
                lost = "changed the reasons more" if accurate else "lost more accuracy"
                state.done = f"step {number} would have {lost} than allowed; this is the step before it"
        if failure is not None:  # if the step is kept, it is with the last weights that were good
            raise failure

    def _judged(
        self, before: Mapping[str, float], metrics: Mapping[str, float], drifts: Mapping[str, float]
    ) -> tuple[bool, bool]:
        """Whether a model is as accurate as it must be, and whether it also keeps its reasons."""
        target, drops = self.settings.target, {name: was - metrics.get(name, -np.inf) for name, was in before.items()}
        accurate = target.max_drop is None or within("max_drop", target.max_drop, drops, "evaluate returns")
        near = target.max_drift is None or within("max_drift", target.max_drift, drifts, "the watched samples have")
        return accurate, accurate and near

    def _scored(self, state: RunState, number: int) -> Scores:
        """The scores of the model as it is, or, without re-scoring, of the original once for all steps."""
        criterion, schedule = self.settings.criterion, self.settings.schedule
        if schedule.rescore:
            model, plan = state.model, state.plan
            if number > 1 and (self.settings.repair is not None or self._trains):
                check_weights(model)  # training may have diverged
        elif self._scores is not None:
            return self._scores
        else:
            model, plan, number = self.original, None, 1
        self.tell(Scoring(criterion.name))
        with seeded(schedule.seed, number):
            (self._scores,) = scores_of(model, self.data, [criterion], self.graph, plan, schedule.batch_size)
        return self._scores

    def _removed(self, state: RunState, plan: Plan) -> nn.Module:
        if self._from_original:
            return apply(self.original, replace(plan, example=self.graph.example))
        return apply(state.model, difference(plan, state.plan))

    def _check_config(self, plan: Plan) -> None:
        """Warn of widths that are the same in all blocks, but that no config describes: before the long work begins."""
        if describable(self.original, plan):
            return
        faults, gone = [], np.isin(np.arange(len(self.graph.root)), plan.groups)
        for family in families(layer for layer in self.graph.layers if layer.prunable):
            own = np.zeros_like(gone)
            for layer in family:
                own[layer.groups] = gone[layer.groups]
            if own.any() and not describable(self.original, plan_for(self.graph, own)):
                had, has = plan.layers[family[0].name]
                faults.append(f"{family[0].name} ({had} → {has} units)")
        warnings.warn(
            SecateurWarning(
                f"no config of transformers describes the widths of this plan{': ' if faults else ''}"
                f"{', '.join(faults)}. Only secateur.load will open the saved folder.",
                fix="protect these layers by Limits(ignore=…), or give round_to a multiple of the number of heads",
            ),
            stacklevel=2,
        )

    def _learn(self, state: RunState, plan: Plan, error: VerificationError) -> None:
        """Keep the layers that a removal was wrong for, so that the step is taken again without them."""
        if not error.layers:  # a later step: the whole plan on the original shows who is at fault
            try:
                apply(self.original, plan)
            except VerificationError as whole:
                error = whole
        if not error.layers:
            raise error
        named = dict.fromkeys(error.layers, "removal and masking disagree")
        warnings.warn(
            SecateurWarning(f"removal and masking disagree for {', '.join(named)}: these layers stay as they are."),
            stacklevel=2,
        )
        state.frozen |= named
        self.freeze(named)
        if state.plan is None:
            state.history.rows[0] = replace(state.history.rows[0], units=self.graph.total_units)

    @property
    def _from_original(self) -> bool:
        """Whether each step starts from the original's own weights: repairs of repairs drift away from them."""
        return self.settings.repair is not None and not self._trains and not self.settings.schedule.carry

    @property
    def _trains(self) -> bool:
        return self.settings.recover is not None or self.settings.schedule.finetune is not None

    def _improved(self, model: nn.Module, plan: Plan, number: int) -> tuple[nn.Module, TrainingError | None]:
        """The model after repair and training, and what stopped the training, if anything did."""
        repair, finetune, removed = self.settings.repair, self.settings.schedule.finetune, model
        assert not isinstance(repair, str)
        with seeded(self.settings.schedule.seed, number, salt=1):
            if repair is not None:
                with named("repair", number):
                    if self._session is not None:
                        model = self._session.examine(model, self.tell).model
                    else:
                        model = repair(model, self.original, self.data)
                    if not isinstance(model, nn.Module):
                        raise TypeError(f"repair returned {type(model).__name__}, not a module")
                self._follow(removed, model)
            if finetune is not None:
                with named("finetune", number):
                    finetune(model, number)
            if self.settings.recover is not None:
                return self._recovered(model, self.settings.recover, plan, number)
        return model, None

    def _recovered(
        self, model: nn.Module, asked: Recover, plan: Plan, number: int
    ) -> tuple[nn.Module, TrainingError | None]:
        file = self.training
        if file is not None:  # a latency that is measured again may lead to another plan
            known = {**file.identity, "step": number, "plan": digest_of_text(str(plan.groups))}
            file = replace(file, identity=known)
        remember(model, self.original, plan)  # so that its units are known
        failure = None
        try:
            with named("recover", number):
                made = trained(model, self.original, self.data, asked, tell=self.tell, file=file).model
        except TrainingError as error:
            made, failure = cast(Recovered, error.result).model, error
        self._follow(model, made)
        return made, failure

    def _follow(self, before: nn.Module, after: nn.Module) -> None:
        """Let what is carried serve a copy of the model."""
        for item in self.settings.schedule.carry:
            carry_over(item, before, after, None)

    def _evaluated(self, model: nn.Module, number: int) -> dict[str, float]:
        """What `evaluate` says about the model in evaluation mode."""
        evaluate, seed = self.settings.evaluate, self.settings.schedule.seed
        if evaluate is None:
            return {}
        self.tell(Evaluating())
        with seeded(seed, number, salt=2), named("evaluate", number), evaluating(model), torch.no_grad():
            found = evaluate(model)
            items = found.items() if isinstance(found, Mapping) else [("overall", found)]
            metrics = {str(key): float(value) for key, value in items}
            if "overall" not in metrics or not np.isfinite(list(metrics.values())).all():
                raise ValueError(f"it returned {found!r}: a finite number, or a dict with 'overall', is needed")
        return dict(same_everywhere(metrics))

    def _looked(self, state: RunState, model: nn.Module, number: int) -> dict[str, float]:
        """Keep the heat maps of the watched samples. Returns how far they are from those of the unpruned model."""
        if self.viewer is None:
            return {}
        heat = (self.viewer.look(model) if number else self.viewer.before).heat
        state.seen[number] = heat.detach().float().cpu()
        return dict(same_everywhere(self.viewer.drift(heat)))

    def _taken(self, model: nn.Module) -> float | None:
        """About how many seconds a forward pass takes: of a run that is watched, a page tells that for each step."""
        if self.settings.watch is None:
            return None
        return float(same_everywhere(time_forward(model, self.graph.example, _REPEATS)))

    def _to_latency(self, state: RunState, scores: Scores, plan: Plan, last: bool) -> tuple[Plan, float]:
        """Measure what the plan leaves. If that should meet the target, plan again until it just does."""
        target, table = self.settings.target, self.settings.latency
        assert isinstance(table, Latency)
        best: tuple[Plan, float, float] | None = None
        for _ in range(_TRIES):
            before, after = self._timed(plan)
            limit = target.seconds(before)
            if not last:
                best = plan, before, after
                break
            if after <= limit and (best is None or table.predict(plan) > table.predict(best[0])):
                best = plan, before, after
            if _CLOSE * limit <= after <= limit:
                break
            # A little below the limit, since measurements vary.
            aim = table.predict(plan) * (1 + _CLOSE) / 2 * limit / after
            try:
                other = self.planner.final(scores, state.plan, aim)
            except TargetError:  # nothing more may leave
                break
            if other.groups == plan.groups:
                break
            plan = other
        if best is None:
            raise TargetError(
                f"{limit:.3g} s per forward pass cannot be reached: {table.setup} takes {after:.3g} s.",
                fix="a larger {keep}, a smaller {round_to}, or a quieter machine",
                keep=Argument("keep", key=next(iter(target.times))),
                round_to=Argument("round_to"),
            )
        plan, before, after = best
        # Both models as they were measured in turn: a machine that changes its pace hits both.
        state.history.rows[0] = replace(state.history.rows[0], latency=before)
        return plan, after

    def _timed(self, plan: Plan | None) -> list[float]:
        """Seconds of the original, and of what a plan leaves, in every process as the first one measured them."""
        table = self.settings.latency
        assert isinstance(table, Latency)
        models: list[tuple[nn.Module, Plan | None]] = [(self.original, None)]
        if plan is not None:
            models.append((cut(self.original, plan).eval(), plan))
        return list(same_everywhere(table.clock(self.original).in_turn(models)))


def within(name: str, limits: float | Mapping[str, float], losses: Mapping[str, float], known: str) -> bool:
    """Whether nothing is lost beyond the `limits` that the argument `name` gives. "worst" stands for every class."""
    for key, most in (limits if isinstance(limits, Mapping) else {"overall": limits}).items():
        classes = [item for item in losses if item != "overall"] or ["worst"]
        for item in classes if key == "worst" else [str(key)]:
            if item not in losses:
                raise EvaluationError(f"{name} names {item!r}, but {known} {', '.join(losses)}.")
            if losses[item] > most + 1e-12:
                return False
    return True


def _overall(max_drop: float | Mapping[str, float] | None) -> float | None:
    return max_drop.get("overall") if isinstance(max_drop, Mapping) else max_drop


def _check_unit(max_drop: float | Mapping[str, float] | None, before: Mapping[str, float]) -> None:
    """Warn where a limit for a share meets a percentage. Half a point of it, 0.5, is no share that anybody gives up."""
    most = _overall(max_drop)
    if most is not None and before["overall"] > 1 and 0 < most <= _OF_A_SHARE:
        what = f"evaluate returns {before['overall']:.4g}, which is no share, and {{limit}} is taken in the same unit."
        fix = "a share from 0 to 1, or {limit_of} in the unit of evaluate; larger must be better, as a loss is not"
        limit, limit_of = Argument("max_drop", most), Argument("max_drop")
        warnings.warn(SecateurWarning(what, fix=fix, limit=limit, limit_of=limit_of), stacklevel=2)


def _check_rise(max_drop: float | Mapping[str, float] | None, history: History) -> None:
    """Warn, once, of what gets larger as units leave, as a loss does: it never drops, however bad the model becomes."""
    most, (first, *values) = _overall(max_drop), [row.metrics.get("overall", 0.0) for row in history]
    if most is None:
        return
    *told, now = (value > max(first + most, _RISE * first, 1.0) for value in values)
    if now and not any(told):
        what = f"evaluate rose from {first:.4g} to {values[-1]:.4g} as units left: {{limit}} cannot limit what rises."
        fix = "an evaluate of which larger is better: minus the loss, or one by the perplexity"
        warnings.warn(SecateurWarning(what, fix=fix, limit=Argument("max_drop", most)), stacklevel=2)


@contextmanager
def named(what: str, step: int) -> Iterator[None]:
    """Put the name of the user's function on whatever it raises."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:
        raise EvaluationError(f"{what} raised {type(error).__name__} at step {step}: {error}.") from error
