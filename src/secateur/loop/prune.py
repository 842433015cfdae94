"""`prune`: Algorithm 1. Score, remove the least important units, repair or fine-tune, again until the target."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from secateur.analysis.analyze import analyze
from secateur.criteria.criterion import Absolute, Criterion, Loss, Norm
from secateur.criteria.registry import Choice, criterion_named
from secateur.criteria.relevance import LRP
from secateur.criteria.scoring import score
from secateur.errors import EvaluationError, SecateurError, TargetError
from secateur.latency.timing import time_forward
from secateur.loop.checkpoint import State, decode, digest, encode, fill, numbers, read, write
from secateur.loop.finetune import Tuner
from secateur.loop.progress import Progress
from secateur.loop.result import Result
from secateur.loop.schedule import Goal, Parts
from secateur.plans.difference import difference
from secateur.plans.plan import Plan
from secateur.plans.ranking import Scope, check_target
from secateur.plans.scores import Aggregation, Scores
from secateur.repair import Repair
from secateur.results.history import History, Row
from secateur.running.batches import Data, example_of, repeatable
from secateur.running.copies import copy_with, unwrap
from secateur.running.processes import is_first, same_everywhere, wait
from secateur.running.sandbox import Example, check_weights, evaluating
from secateur.structure.graph import Graph
from secateur.surgery.apply import apply
from secateur.surgery.cut import cut
from secateur.surgery.optimizer import carry as carry_over
from secateur.surgery.provenance import remember

#: `f(model)` returns an accuracy, or a dict with "overall" and a number per class.
Evaluate = Callable[[nn.Module], float | Mapping[str, float]]
#: `f(small, original, data)` returns a corrected module of the same shapes.
Repairer = Callable[[nn.Module, nn.Module, Data], nn.Module]


def prune(
    model: nn.Module,
    data: Data,
    criterion: Choice = "lrp",
    remove: float | None = None,
    keep: Mapping[str, float] | None = None,
    step: float | None = None,
    *,
    example: Example = None,
    scope: Scope | None = None,
    rescore: bool | None = None,
    parts: Parts | None = None,
    finetune: Tuner | None = None,
    carry: Sequence[Any] = (),
    evaluate: Evaluate | None = None,
    repair: Repairer | str | None = "auto",
    max_drop: float | Mapping[str, float] | None = None,
    one_shot: bool = False,
    min_units: int = 1,
    round_to: int = 1,
    ignore: str | Sequence[str] = (),
    norm: Norm | str = "default",
    absolute: Absolute | str = "default",
    aggregate: Aggregation = "mean",
    loss: Loss | None = None,
    batch_size: int = 32,
    checkpoint: str | Path | None = None,
    progress: bool | Callable[[str], None] = True,
    seed: int = 0,
    graph: Graph | None = None,
) -> Result:
    """Remove the units that matter least until the target is met, and repair what remains. The model is not changed.

    The target is `remove` (a share of the units that may leave), or `keep` (`{"params": 0.5}`, `{"macs": 1e9}`,
    `{"latency": 0.5}` as a share of the measured latency, `{"seconds": 0.01}`), or neither with `max_drop`.

    `data` is a pair (inputs, targets), tensors or NumPy arrays, or an iterable of such batches, e.g. a DataLoader.
    Options that are not described here are those of `score` and `plan`.

    With nothing else given, units are scored once and removed at once, then each layer is regressed back to the
    original's answers (`repair="best"`): what keeps most accuracy without training. LRP ranks all units by score per
    MAC (`scope="cost"`), or per estimated time if a latency is asked for (`"time"`). Scores of other criteria are not
    comparable across layers, so that every layer gives the same share (`"layer"`).

    `finetune`, `carry`, `step`, `parts`, `rescore=True` or `repair=None` ask for the paper's Algorithm 1: every `step`
    takes a share (0.05) of the original units by a global ranking, scored anew, then `finetune(model, step)` is called.
    Whatever you give yourself holds: `scope` ("global", "layer", "cost", "time"), `rescore`, `repair` ("mean", "norm",
    "ridge", "best", a `Repair`, or your own `f(small, original, data)`). A run that neither scores anew nor watches
    `max_drop` or a latency goes to the target at once, as with `one_shot`, unless `step` is given. `parts` names groups
    of layers by wildcards, e.g. `{"conv": ["features.*"], "fc": ["classifier.*"]}`: steps take turns, and `remove` and
    `step` are shares of each.

    Optimizers, schedulers and averaged models in `carry` follow the model through each removal. `evaluate(model)`,
    called after each step in evaluation mode, returns an accuracy, or a dict with "overall" and numbers per class.
    `max_drop` is how much "overall" may fall, or a dict such as `{"overall": 0.01, "worst": 0.05}`, where "worst" holds
    for every class and any other key for that class alone; the result is then the last step that held.

    With `checkpoint`, a file is replaced atomically after each step, and the same call made again goes on from there
    and ends the same. In several processes (`torchrun`) each scores its share and all end with the same model.
    `progress` draws a bar on a terminal; a function is told in words how the run gets on.

    >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    >>> data = (torch.rand(16, 4), torch.arange(16) % 3)
    >>> result = prune(net, data, remove=0.5, step=0.25)
    >>> result.model[0], [row.units for row in result.history]
    (Linear(in_features=4, out_features=10, bias=True), [20, 15, 10])
    """
    data = repeatable(data)
    chosen = criterion_named(criterion, norm, absolute)
    original = unwrap(model)
    check_weights(original)
    if graph is None:
        graph = analyze(original, example if example is not None else example_of(original, data))
    if max_drop is not None and evaluate is None:
        raise SecateurError("max_drop needs evaluate=f(model), to measure the drop with.")
    stepwise = step is not None or rescore or parts is not None or finetune is not None or bool(carry)
    repairer = _repairer(repair, None if stepwise else data)
    rescore = repairer is None or finetune is not None if rescore is None else rescore
    check_target(remove, keep)
    timed = keep is not None and not {"latency", "seconds"}.isdisjoint(keep)
    if scope is None:
        # Relevance is a share of one sum that is conserved from layer to layer; other scores have no common scale.
        by_price: Scope = "time" if timed else "cost"
        scope = "global" if rescore else by_price if isinstance(chosen, LRP) else "layer"
    if step is None:
        one_shot = one_shot or not (rescore or timed or max_drop is not None or parts)
        step = 0.05
    options = {"scope": scope, "min_units": min_units, "round_to": round_to, "ignore": ignore}
    goal = Goal(graph, remove, keep, step, one_shot, parts, options, open_end=max_drop is not None)
    run = _Run(
        original, data, chosen, graph, goal, aggregate, loss, batch_size, finetune, tuple(carry), evaluate, repairer,
        max_drop, Path(checkpoint) if checkpoint is not None else None, seed, min_units, rescore,
    )  # fmt: skip
    with Progress(progress, goal.steps) as shown:
        return run.to_the_end(shown)


@dataclass
class _Run:
    """The loop's state: the working model, the cumulative plan, the rows so far."""

    original: nn.Module
    data: Data
    criterion: Criterion
    graph: Graph
    goal: Goal
    aggregate: Aggregation
    loss: Loss | None
    batch_size: int
    finetune: Tuner | None
    carry: tuple[Any, ...]
    evaluate: Evaluate | None
    repair: Repairer | None
    max_drop: float | Mapping[str, float] | None
    checkpoint: Path | None
    seed: int
    min_units: int
    rescore: bool

    def __post_init__(self) -> None:
        self._tell: Callable[[str], None] = lambda text: None
        self.model: nn.Module = self.original
        self.plan: Plan | None = None
        self.scores: Scores | None = None
        self.first: Scores | None = None
        self.history = History()
        self.step = 0
        self.done = ""
        self.settings = self._settings() if self.checkpoint is not None else {}
        # One session for all steps: what the original answers is computed once.
        self.repairs = self.repair.session(self.original, self.data) if isinstance(self.repair, Repair) else None

    def to_the_end(self, shown: Progress) -> Result:
        """Run, or go on with, the loop."""
        try:
            self._tell = shown.note
            self._begin()
            shown(self.history[-1])
            while not self.done:
                self._next()
                self._save()
                shown(self.history[-1])
        except SecateurError as error:
            error.result = self.result()
            raise
        return self.result()

    def result(self) -> Result:
        """The last step that is complete."""
        before = self.graph.cost
        after = self.plan.after if self.plan is not None else before
        latencies = [row.latency for row in self.history if row.held and row.latency is not None]
        if latencies:
            before, after = replace(before, latency=latencies[0]), replace(after, latency=latencies[-1])
        return Result(
            self.model, self.plan, self.history, self.graph, self.scores, before, after, self.done, self.original,
            self._asked(),
        )  # fmt: skip

    # -- steps -----------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        copy = copy_with(self.original, lambda name, old: old.detach().clone())
        for state in self.carry:
            carry_over(state, self.original, copy, None)
        self.model = copy
        if self.checkpoint is not None and self._resume(self.checkpoint):
            return
        begin = time.perf_counter()
        metrics = self._evaluated(self.model, 0)
        latency = self._latency(self.model)
        self.goal.start(latency)
        units = self.graph.total_units
        seconds = time.perf_counter() - begin
        cost = self.graph.cost
        row = Row(0, units, 0.0, cost.params, cost.macs, metrics, latency=latency, seconds=seconds)
        self.history.rows.append(row)
        self._save()

    def _next(self) -> None:
        """One step of Algorithm 1."""
        begin, number = time.perf_counter(), self.step + 1
        if self.goal.idle(self.plan, number):
            self.step = number
            return
        scores = self._scored(number)
        scoring = time.perf_counter() - begin
        proposal = self.goal.propose(scores, self.plan, number)
        if proposal.plan is None and proposal.reason:
            if self.goal.timed:
                raise TargetError(f"{self.goal.seconds:.3g} s per forward pass cannot be reached: {proposal.reason}.")
            self.done = proposal.reason
            return
        if proposal.plan is None or (self.plan is not None and proposal.plan.groups == self.plan.groups):
            self.step = number  # a step too small for the next group: it leaves with a later one
            if proposal.last:
                blocked = "no smaller group is left to come closer to the target"
                self.done = blocked if self.plan is None else self.goal.reached(self.plan, blocked)
            return
        model, plan, latency = self._removed(proposal.plan), proposal.plan, None
        if self.goal.timed:
            model, plan, latency = self._to_latency(scores, model, plan, number)
        for state in self.carry:
            carry_over(state, self.model, model, difference(plan, self.plan))
        model = self._improved(model, number)
        remember(model, self.original, plan)
        metrics = self._evaluated(model, number)
        held = self._holds(metrics)
        row = self._row(number, plan, metrics, proposal.part, latency, held, scoring, time.perf_counter() - begin)
        self.history.rows.append(row)
        self.step = number
        if not held:
            self.done = f"step {number} would have lost more than max_drop allows; this is the step before it"
            return
        self.model, self.plan, self.scores = model, plan, scores
        met = latency <= self.goal.seconds if latency is not None else proposal.last
        self.done = self.goal.reached(plan) if met else ""

    def _scored(self, number: int) -> Scores:
        if not self.rescore:
            if self.first is None:
                self.first = self._score(self.original, None, 1)
            return self.first
        return self._score(self.model, self.plan, number)

    def _score(self, model: nn.Module, plan: Plan | None, number: int) -> Scores:
        self._tell(f"scoring units by {self.criterion.name}")
        with seeded(self.seed, number):
            return score(
                model, self.data, self.criterion, graph=self.graph, aggregate=self.aggregate, loss=self.loss,
                batch_size=self.batch_size, start=plan,
            )  # fmt: skip

    def _removed(self, plan: Plan) -> nn.Module:
        if self.repair is not None and self.finetune is None and not self.carry:
            # A repair starts from the original's own weights: repairs of repairs drift away from them.
            return apply(self.original, replace(plan, example=self.graph.example))
        return apply(self.model, difference(plan, self.plan))

    def _improved(self, model: nn.Module, number: int) -> nn.Module:
        with seeded(self.seed, number, salt=1):
            if self.repair is not None:
                with _named("repair", number):
                    if self.repairs is not None:
                        repaired = self.repairs.examine(model, self._tell).model
                    else:
                        repaired = self.repair(model, self.original, self.data)
                    if not isinstance(repaired, nn.Module):
                        raise TypeError(f"repair returned {type(repaired).__name__}, not a module")
                    model = repaired
            if self.finetune is not None:
                with _named("finetune", number):
                    self.finetune(model, number)
        return model

    def _evaluated(self, model: nn.Module, number: int) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        self._tell("measuring accuracy")
        with seeded(self.seed, number, salt=2), _named("evaluate", number), evaluating(model), torch.no_grad():
            found = self.evaluate(model)
            items = found.items() if isinstance(found, Mapping) else [("overall", found)]
            metrics = {str(key): float(value) for key, value in items}
            if "overall" not in metrics or not np.isfinite(list(metrics.values())).all():
                raise ValueError(f"it returned {found!r}: a finite number, or a dict with 'overall', is needed")
        return dict(same_everywhere(metrics))

    def _holds(self, metrics: Mapping[str, float]) -> bool:
        if self.max_drop is None:
            return True
        first = self.history[0].metrics
        limits = self.max_drop if isinstance(self.max_drop, Mapping) else {"overall": self.max_drop}
        for key, limit in limits.items():
            names = [n for n in first if n != "overall"] if key == "worst" else [key]
            for name in names:
                if name not in first:
                    raise EvaluationError(f"max_drop names {name!r}, but evaluate returns {', '.join(first)}.")
                if first[name] - metrics.get(name, -np.inf) > limit + 1e-12:
                    return False
        return True

    def _row(
        self, number: int, plan: Plan, metrics: dict[str, float], part: str, latency: float | None, held: bool,
        scoring: float, seconds: float,
    ) -> Row:  # fmt: skip
        had, has = plan.units
        low = sum(after <= self.min_units for before, after in plan.layers.values() if after < before)
        return Row(
            number, has, (had - has) / had, plan.after.params, plan.after.macs, metrics, part, latency, low, held,
            scoring, seconds,
        )  # fmt: skip

    # -- latency ---------------------------------------------------------------------------------------------------
    def _latency(self, model: nn.Module) -> float | None:
        if not self.goal.timed:
            return None
        return float(same_everywhere(time_forward(model, self.graph.example)))

    def _to_latency(self, scores: Scores, model: nn.Module, plan: Plan, number: int) -> tuple[nn.Module, Plan, float]:
        """If the step is fast enough, look for the smallest removal within it that is."""
        latency = self._latency(model)
        assert latency is not None
        if latency > self.goal.seconds:
            return model, plan, latency
        low, high = self.goal.bounds(self.plan, number)
        for _ in range(4):
            middle = (low + high) / 2
            tried = self.goal.exactly(scores, self.plan, middle, number)
            if tried is None or tried.groups == plan.groups:
                break
            candidate = self._removed(tried)
            found = self._latency(candidate)
            assert found is not None
            if found <= self.goal.seconds:
                model, plan, latency, high = candidate, tried, found, middle
            else:
                low = middle
        return model, plan, latency

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def _settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "model": self.graph.model_name, "weights": digest(self.original), "criterion": repr(self.criterion),
            "aggregate": self.aggregate, "seed": self.seed, "max_drop": _plain(self.max_drop), "rescore": self.rescore,
            "repair": _name_of(self.repair), **self.goal.settings(),
        }  # fmt: skip

    def _asked(self) -> dict[str, Any]:
        """What the user asked for, for the report."""
        calls = {"evaluate": self.evaluate, "repair": self.repair, "finetune": self.finetune, "loss": self.loss}
        return {
            "criterion": self.criterion.name, "scored_by": repr(self.criterion), "aggregate": self.aggregate,
            "seed": self.seed, "max_drop": _plain(self.max_drop), "batch_size": self.batch_size,
            **self.goal.settings(),
            **{name: getattr(call, "__name__", type(call).__name__) for name, call in calls.items() if call},
        }  # fmt: skip

    def _stateful(self) -> list[Any]:
        """Everything whose state must survive a kill."""
        tuner: Any = self.finetune
        return [*self.carry, *([tuner] if hasattr(tuner, "state_dict") and hasattr(tuner, "load_state_dict") else [])]

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        if is_first():
            tensors = {f"model/{name}": tensor for name, tensor in numbers(self.model).items()}
            carried = [encode(item.state_dict(), tensors, f"carry/{i}") for i, item in enumerate(self._stateful())]
            if self.scores is not None:
                for i, producer in enumerate(self.graph.producers):
                    if producer.sites[0] in self.scores.units:
                        tensors[f"score/{i}"] = torch.from_numpy(self.scores.units[producer.sites[0]])
            plan = self.plan.to_json() if self.plan is not None else None
            books = self.scores.conservation if self.scores is not None else None
            write(
                self.checkpoint,
                State(self.settings, self.step, plan, self.history, self.done, carried, tensors, books),
            )
        wait()

    def _resume(self, path: Path) -> bool:
        state = read(path, self.settings)
        if state is None:
            return False
        self.step, self.history, self.done = state.step, state.history, state.done
        self.goal.start(self.history[0].latency)
        if state.plan is not None:
            self.plan = replace(Plan.from_json(state.plan), example=self.graph.example)
            small = cut(self.original, self.plan)
            for item in self.carry:
                carry_over(item, self.model, small, self.plan)
            remember(small, self.original, self.plan)
            self.model = small
        fill(self.model, _under("model/", state.tensors), path)
        for item, saved in zip(self._stateful(), state.carried, strict=True):
            item.load_state_dict(decode(saved, state.tensors))
        units = {
            self.graph.producers[int(index)].sites[0]: values.numpy()
            for index, values in _under("score/", state.tensors).items()
        }
        self.scores = Scores(self.criterion.name, units, self.aggregate, state.books) if units else None
        return True


def _repairer(asked: Repairer | str | None, data: Data) -> Repairer | None:
    """What mends the model after a removal. Left to us, that is done where nothing else makes up for the loss."""
    if asked == "auto":
        asked = None if data is None else "best"
    if asked is None or asked == "none":
        return None
    if isinstance(asked, str):
        return Repair(asked)
    return asked


def _name_of(call: Any) -> str | None:
    if call is None or isinstance(call, Repair):
        return None if call is None else repr(call)
    return str(getattr(call, "__name__", type(call).__name__))


def _under(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


@contextmanager
def _named(what: str, number: int) -> Iterator[None]:
    """The user's function, with its name on whatever it raises."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:
        raise EvaluationError(
            f"{what} raised {type(error).__name__} at step {number}: {error}. What came before is in `error.result`."
        ) from error


@contextmanager
def seeded(seed: int, step: int, salt: int = 0) -> Iterator[None]:
    """Random numbers that depend on seed and step alone, so that a resumed run draws the same; the user's are kept."""
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if ready else []
    python, numpy = random.getstate(), np.random.get_state()
    key = int(np.random.SeedSequence([seed % 2**32, step, salt]).generate_state(1)[0])
    with torch.random.fork_rng(devices):
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
