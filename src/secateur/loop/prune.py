"""`prune`: Algorithm 1. Score, remove the least important units, repair or fine-tune, again until the target."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.analysis.analyze import analyze
from secateur.analysis.reasons import Drift, Viewer, some_of, warn_of_other_reasons
from secateur.analysis.reasons import drift as drift_of
from secateur.arguments import check_callable, check_path
from secateur.criteria.registry import Choice, criterion_named
from secateur.errors import (
    RelevanceError,
    SecateurError,
    SecateurWarning,
    UnknownOperationError,
    UnsupportedModelError,
)
from secateur.files.pretrained import save_pretrained
from secateur.files.saved import measured_with
from secateur.loop.checkpoint import Checkpoint
from secateur.loop.planner import Planner
from secateur.loop.progress import Progress, StepDone
from secateur.loop.reasons import with_reasons
from secateur.loop.settings import Evaluate, Repairer, Schedule, Settings, repair_of
from secateur.loop.steps import RunState, Steps
from secateur.plans.targets import Limits, Target
from secateur.recover import Recover
from secateur.report.document import Page
from secateur.report.page import write_report
from secateur.results.comparison import Comparison
from secateur.results.history import Record
from secateur.running.accuracy import PERPLEXITY
from secateur.running.batches import Data, example_of, repeatable
from secateur.running.copies import unwrap
from secateur.running.memory import Memory, limited
from secateur.running.processes import check_same, together
from secateur.running.progress import Listener, telling
from secateur.running.sandbox import check_weights, leaves_no_trace
from secateur.runtimes import Latency, Setup
from secateur.runtimes.table import table_of
from secateur.structure.graph import Graph
from secateur.surgery.optimizer import carry as carry_over

_WATCHED = 16  # samples, if the user does not say which


class Result(Record):
    """What a run ended with. It can write a report about itself."""

    @leaves_no_trace
    def report(
        self,
        path: str | Path,
        *,
        data: Data = None,
        test: Data = None,
        inputs: tuple[Any, Tensor | None] | None = None,
        original: nn.Module | None = None,
        comparison: Comparison | Mapping[str, Result] | None = None,
        classes: Sequence[str] | Mapping[int, str] | None = None,
        page: Page | None = None,
        memory: Memory = None,
    ) -> Path:
        """Write a page about this run: one HTML file with charts, tables and heat maps that needs nothing else.

        Heat maps before and after are drawn for `inputs`, a pair (x, y), or for a few samples of `data`. Texts are
        shown in words, if the page has a tokenizer. If samples of `data` cannot be explained (for example because the
        model has several inputs), the page says why and has no heat maps. On `test` the accuracy of both models is
        measured, also by class. `classes` names the outputs. `comparison` (of `compare`, or results by name) adds the
        curves of several criteria. `original` is the unpruned model, if the result does not know it. `page`, a
        `secateur.report.Page`, holds the title and other details. `memory` (bytes, or a text such as "2 GiB"; default:
        what is free) limits what heat maps, accuracies and timed batches take.

        >>> import tempfile, torch, secateur as sc
        >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
        >>> data = (torch.rand(16, 4), torch.arange(16) % 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = sc.prune(net, data, remove=0.5, progress=False).report(folder + "/report.html", test=data)
        ...     page.read_text(encoding="utf-8")[:15]
        '<!doctype html>'
        """
        with limited(memory):
            return write_report(
                path, self, data=data, test=test, inputs=inputs, original=original, comparison=comparison,
                classes=classes, page=page,
            )  # fmt: skip

    @leaves_no_trace
    def drift(self, data: Data, *, samples: int = 32) -> Drift:
        """Whether the smaller model keeps its reasons: heat maps before and after on some of the data, by class.

        Warns of classes that are right for other reasons: as accurate as before, but the model looks elsewhere.

        >>> import torch, secateur as sc
        >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
        >>> data = (torch.rand(16, 4), torch.arange(16) % 3)
        >>> sc.prune(net, data, remove=0.1, progress=False).drift(data).agreement.shape
        torch.Size([16])
        """
        if self.original is None:
            raise SecateurError("the unpruned model is not known.", fix="secateur.analysis.reasons.drift(original, …)")
        found = drift_of(self.original, self.model, data, samples=samples)
        warn_of_other_reasons(found)
        return found

    @leaves_no_trace
    def save_pretrained(self, path: str | Path, *, tokenizer: Any = None) -> Path:
        """Write a pruned Hugging Face model as a folder with config, weights, tokenizer and a model card.

        With the same widths in all blocks (`Limits(uniform=True)`), stock `from_pretrained` loads it. Otherwise
        `secateur.load(path)` does, and stock `from_pretrained` refuses it. Without `tokenizer`, its files are copied
        from the folder that the model was loaded from.
        """
        about = measured_with(self)
        return save_pretrained(self.model, path, tokenizer=tokenizer, facts=self._facts(), about=about)

    def _facts(self) -> dict[str, str]:
        """Lines for a model card."""
        known = ("criterion", "composite", "remove", "keep", "max_drop", "max_drift", "scope", "round_to", "repair",
                 "recover")  # fmt: skip
        asked = {name: str(self.settings[name]) for name in known if self.settings.get(name)}
        if (where := self.settings.get("latency")) and self.cost_after.latency and self.cost_before.latency:
            times = f"{1000 * self.cost_before.latency:.4g} → {1000 * self.cost_after.latency:.4g} ms"
            asked["latency"] = f"{times} ({Setup(**where)})"
        measured = not self.settings.get("trained_afterwards")
        metrics = [row.metrics for row in self.history if row.held and row.metrics and measured]
        gained = {name: f"{metrics[0][name]:.4g} → {last:.4g}" for row in metrics[-1:] for name, last in row.items()}
        if "overall" in gained:  # the name that `max_drop` knows
            title = "next-token accuracy" if PERPLEXITY in gained else "accuracy"
            gained = {title if name == "overall" else name: text for name, text in gained.items()}
        return {**gained, **asked, "ended": self.stopped}


@leaves_no_trace
@together()
def prune(
    model: nn.Module,
    data: Data,
    criterion: Choice = "lrp",
    remove: float | None = None,
    keep: Mapping[str, float] | None = None,
    schedule: Schedule | float | None = None,
    *,
    limits: Limits | None = None,
    repair: Repairer | str | bool | None = "auto",
    recover: Recover | int | bool | None = None,
    evaluate: Evaluate | None = None,
    max_drop: float | Mapping[str, float] | None = None,
    max_drift: float | Mapping[str, float] | None = None,
    watch: tuple[Any, Any] | None = None,
    output: str | Sequence[str] = (),
    latency: Latency | Setup | None = None,
    checkpoint: str | Path | None = None,
    memory: Memory = None,
    progress: bool | Listener = True,
) -> Result:
    """Remove the units that matter least until the target is met, and repair what remains. The model is not changed.

    The target is `remove` (a share of the units that may leave), or `keep` (`{"params": 0.5}`, `{"macs": 1e9}`,
    `{"latency": 0.5}` as a share of the measured latency, `{"seconds": 0.01}`), or neither with `max_drop` or
    `max_drift`.

    `data` is a pair (inputs, targets), tensors or NumPy arrays, or an iterable of such batches, e.g. a DataLoader.
    Criteria that look at no data need one input to analyse the model with: `data=[(example, None)]`. `criterion` is a
    name, a function, or an object of `secateur.criteria`, which carries its own settings.

    With nothing else given, units are scored once and removed at once, then each layer is regressed back to the
    original's outputs (`repair="best"`). This keeps the most accuracy without training. LRP ranks all units by score
    per MAC, or per second if a latency is asked for. Scores of other criteria are not comparable across layers, so that
    every layer loses the same share. `limits`, a `secateur.plans.Limits`, protects layers, rounds widths, or
    chooses another ranking. `repair` is "mean", "norm", "ridge", "best", None or False, a `secateur.repair.Repair`, or
    your own `f(small, original, data)`.

    `recover`, a `secateur.recover.Recover` or a number of epochs, trains what remains after each removal, with the
    original as teacher. It is trained on `data`, unless the settings have their own.

    A target in time is planned by a table of what was measured, and then measured: where the smaller model is too slow,
    more leaves. `latency` says where it will run: the table of `secateur.latency`, or a `secateur.runtimes.Setup` such
    as `Setup("onnxruntime", batch=32, threads=2)`; by default PyTorch on the data's first sample.

    `schedule` is the share of the original units that leaves per step, or a `secateur.loop.Schedule`, which also has
    your own training, re-scoring, parts, batch size and seed. Steps, parts, own training, re-scoring and `repair=None`
    each ask for the paper's Algorithm 1: every step takes its share (0.05) by a global ranking, units are scored anew,
    and there is no repair unless you give one.

    `evaluate(model)`, called after each step in evaluation mode, returns an accuracy, or a dict with "overall" and
    numbers per class. `max_drop` is how much "overall" may fall, or a dict such as `{"overall": 0.01, "worst": 0.05}`,
    where "worst" holds for every class and any other key for that class alone. The result is then the last step that
    held.

    `max_drift` is how far the heat maps of `watch`, a pair (inputs, targets), may move from those of the unpruned
    model: 1 minus their correlation, 0.2 for instance, or a dict as for `max_drop`. The heat maps of `watch` are kept
    after each step, for the report. Without it, 16 samples of `data` are watched. At the end of every run, `reasons` of
    the result says how far the heat maps of a few samples moved, by class, for about 5 % of the work; a warning tells
    if the accuracy stays but the reasons do not.

    `output` names what counts of several things that the model returns, as in `analyze`.

    With `checkpoint`, a file is replaced atomically after each step. The same call made again goes on from there and
    ends the same; a call with another model, data or settings is refused (`watch` may come or go). In several processes
    (`torchrun`) each scores its share and all end with the same model. `memory` (bytes, or a text such as "2 GiB";
    default: what is free) limits what scoring, repair and `accuracy` take. `progress` draws a bar on a terminal; a
    function receives events, of which `str(event)` is text.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    >>> data = (torch.rand(16, 4), torch.arange(16) % 3)
    >>> result = prune(net, data, remove=0.5, schedule=0.25)
    >>> result.model[0], [row.units for row in result.history]
    (Linear(in_features=4, out_features=10, bias=True), [20, 15, 10])
    """
    settings = Settings(
        criterion_named(criterion), Target(remove, keep, max_drop, max_drift), Schedule.of(schedule),
        Limits.of(limits), repair_of(repair), evaluate, output, latency, Recover.of(recover), watch,
    )  # fmt: skip
    with limited(memory):
        data = repeatable(data)
        return with_reasons(run_loop(model, data, settings, checkpoint, progress), data, settings.decided(data))


def run_loop(
    model: nn.Module,
    data: Data,
    settings: Settings,
    checkpoint: str | Path | None = None,
    progress: bool | Listener = True,
    graph: Graph | None = None,
) -> Result:
    """`prune`; `graph` is for a model that was checked and analysed already."""
    original = unwrap(model)
    if checkpoint is not None:
        check_path("checkpoint", checkpoint, "a file name, such as 'run.pt'")
    check_callable("progress", None if isinstance(progress, bool) else progress, "True, False, or a function f(event)")
    data = repeatable(data)
    settings = settings.decided(data)
    if graph is None:
        check_weights(original)
        graph = analyze(original, example_of(original, data), settings.output)
    check_same(original)
    if settings.target.timed:
        settings = replace(settings, latency=_table(original, graph, settings.latency))
    planner = Planner(graph, settings)
    saved = Checkpoint(Path(checkpoint), original, graph, settings, data) if checkpoint is not None else None
    state = RunState(original)
    with Progress(progress, planner.steps) as shown:
        training = saved.training if saved is not None else None
        viewer = _viewer(original, data, settings)
        steps = Steps(original, data, graph, settings, planner, shown, training, viewer)
        try:
            for item in settings.schedule.carry:
                carry_over(item, original, state.model, None)
            if saved is not None and saved.restore(state):
                if state.frozen:
                    steps.freeze(state.frozen)
                shown(StepDone(state.history[-1]))
            while not state.done:
                with telling(shown):
                    steps.next(state)
                if saved is not None:
                    saved.save(state)
                shown(StepDone(state.history[-1]))
            if saved is not None:
                saved.forget_training()  # here, too, if the run was killed after its last step was saved
        except SecateurError as error:
            error.result = _result(state, original, steps.graph, settings, viewer)
            raise
    return _result(state, original, steps.graph, settings, viewer)


def _viewer(original: nn.Module, data: Data, settings: Settings) -> Viewer | None:
    """Explains some samples after each step, if that is asked for. A single step is explained by the report alone."""
    watch, bound = settings.watch, settings.target.max_drift
    if bound is None and (watch is None or settings.schedule.one_shot):
        return None
    try:
        return Viewer(original, (watch[0], watch[1]) if watch is not None else some_of(data, _WATCHED))
    except (RelevanceError, UnknownOperationError, UnsupportedModelError) as error:
        if bound is not None:
            raise
        warnings.warn(f"no heat maps are kept: {error}", SecateurWarning, stacklevel=2)
        return None


def _table(model: nn.Module, graph: Graph, given: Latency | Setup | None) -> Latency:
    """What the model takes where it will run: as given, or measured, or from the cache."""
    if not isinstance(given, Latency):
        return table_of(model, graph, given or Setup.of(graph.example, "torch", None, None))
    if given.graph.shapes != graph.shapes or len(given.graph.root) != len(graph.root):
        what = f"the table is of another {given.graph.model_name}: its layers have other sizes."
        raise SecateurError(what, where="latency", fix="latency(model, example) of the model that is pruned")
    return given


def _result(
    state: RunState, original: nn.Module, graph: Graph, settings: Settings, viewer: Viewer | None = None
) -> Result:
    """The last step that is complete."""
    before = graph.cost
    after = state.plan.after if state.plan is not None else before
    latencies = [row.latency for row in state.history if row.held and row.latency is not None]
    if latencies and settings.target.timed:
        before, after = replace(before, latency=latencies[0]), replace(after, latency=latencies[-1])
    composite = state.scores.composite if state.scores is not None else ""
    return Result(
        state.model, state.plan, state.history, graph, state.scores, before, after, state.done, original,
        settings.shown() | ({"composite": composite} if composite else {}),
        None if viewer is None else (viewer.x, viewer.y), state.seen,
        table=settings.latency if isinstance(settings.latency, Latency) else None,
    )  # fmt: skip
