"""The report of a run: what was asked, what came out, and how it looks now, in one file that needs nothing else."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from secateur import atomic
from secateur.analysis.reasons import some_of, warn_of_other_reasons
from secateur.arguments import check_path
from secateur.errors import (
    DataError,
    RelevanceError,
    SecateurError,
    SecateurWarning,
    UnknownOperationError,
    UnsupportedModelError,
)
from secateur.latency.timing import RUNTIMES, Timing, batch_of, time_batches
from secateur.nest import describe
from secateur.relevance.composites import PRESETS
from secateur.relevance.conservation import Conservation
from secateur.report.answers import Answers, differences, in_order
from secateur.report.changes import Changes, Names, changes, check_scale, name_of, unit_dim
from secateur.report.curves import Metric, contest, run_charts
from secateur.report.document import Page, Table, fill, number, percent
from secateur.report.environment import environment
from secateur.report.film import film
from secateur.report.tradeoff import tradeoff
from secateur.results.comparison import Comparison
from secateur.results.history import Record
from secateur.running.accuracy import PERPLEXITY, accuracy, between, perplexity
from secateur.running.batches import Data, repeatable
from secateur.running.copies import unwrap
from secateur.running.memory import trim
from secateur.running.targets import Reader
from secateur.structure.cost import human

_SAMPLES = 4  # shown as heat maps when they are taken from the data
_MOST = 10  # classes that are not folded away
#: Why a model may have no heat maps.
UNEXPLAINED = (DataError, RelevanceError, UnknownOperationError, UnsupportedModelError)
_REPEATS = 20  # forward passes that the latency is the median of


@dataclass(frozen=True)
class Tile:
    """A headline number: after, before, and what is left of it as a share."""

    name: str
    after: str
    before: str
    change: str
    share: float | None = None
    #: Of an accuracy: its 95 % intervals, before and after.
    intervals: tuple[str, str] | None = None


@dataclass(frozen=True)
class LayerRow:
    """What a layer keeps. `modules` are all that share its units."""

    name: str
    kind: str
    before: int
    after: int
    modules: Sequence[str]
    removed: str

    @property
    def share(self) -> float:
        """What is left."""
        return self.after / max(self.before, 1)


@dataclass(frozen=True)
class Measured:
    """The metric before and after: "overall", and each class by its name. `title` says what it was measured on."""

    title: str
    metric: Metric
    before: Mapping[str, float]
    after: Mapping[str, float]
    #: How many samples each was measured on, where that is known.
    counts: Mapping[str, int] = field(default_factory=dict)

    def intervals(self, name: str) -> tuple[str, str] | None:
        """The 95 % intervals before and after."""
        count = self.counts.get(name, 0) if self.metric.percent else 0
        return (between(self.before[name], count), between(self.after[name], count)) if count else None


def write_report(
    path: str | Path,
    result: Record,
    *,
    data: Data = None,
    test: Data = None,
    inputs: tuple[Any, Tensor | None] | None = None,
    original: nn.Module | None = None,
    comparison: Comparison | Mapping[str, Record] | None = None,
    classes: Names = None,
    page: Page | None = None,
) -> Path:
    """Write the page of `Result.report`."""
    check_path("path", path, "a file name, such as 'report.html'")
    for name, given, kinds, fix in (
        ("page", page, Page, 'page=Page(title="…")'),
        ("comparison", comparison, Comparison | Mapping, "what `compare` returns, or results by name: {'lrp': result}"),
        ("inputs", inputs, tuple | list, "a pair inputs=(x, y); y may be None"),
        ("classes", classes, Sequence | Mapping, "a list of names, or {class: name}"),
    ):
        if given is not None and not isinstance(given, kinds):
            raise SecateurError(f"{name} is a {type(given).__name__}.", fix=fix)
    page = page if page is not None else Page()
    trim()  # of what the run took
    data, test = repeatable(data), repeatable(test)  # both models run on them
    source = original if original is not None else result.original
    if source is not None:
        source = unwrap(source)
    elif inputs is not None or data is not None or test is not None:
        raise SecateurError("heat maps and accuracies before pruning need the unpruned model: give original=model.")
    metric = Metric.of(row.overall for row in result.history if row.overall is not None)
    measured, answers = _measured(result, source, test, classes, metric)
    answers = page.answers if answers is None else answers
    if measured is not None and answers is not None:
        numbers = Counter(name_of(number, classes) for number in answers.targets)
        measured = replace(measured, counts={"overall": len(answers.targets), **numbers})
    criterion = str(result.settings.get("criterion") or (result.scores.criterion if result.scores else "no criterion"))
    preset = criterion.partition("lrp:")[2]
    if page.composite is None and preset in PRESETS:
        page = replace(page, composite=preset)
    seen, unseen = None, ""
    if source is not None and inputs is not None:
        seen = changes(source, result, inputs, classes, page)
    elif source is not None and data is not None:
        seen, unseen = _seen(source, result, data, classes, page)
    different = None
    if source is not None and answers is not None:
        try:
            different = differences(source, result.model, answers, classes, page)
        except UNEXPLAINED:  # the heat maps of other samples, or a note, say why
            different = differences(source, result.model, replace(answers, pick=None), classes, page)
    if seen is not None and result.reasons is None:  # else the run has warned
        warn_of_other_reasons(seen.reasons, lambda number: name_of(number, classes))
    trim()  # of what heat maps took: large batches follow
    speeds, latency_note = _speeds(result, source, page.latency)
    layers = _layers(result)
    html = fill(
        "report/page.html",
        title=page.title or f"{result.graph.model_name} pruned by {criterion}",
        lead=_lead(result, criterion),
        tiles=_tiles(result, measured),
        speeds=speeds,
        latency_note=latency_note,
        most=_MOST,
        charts=run_charts(result.history, metric),
        tradeoff=tradeoff(result),
        film=film(result, metric, classes, page),
        different=different,
        metric=metric,
        measured=measured,
        classes=_class_table(measured),
        contest=contest(comparison) if comparison is not None else None,
        layers=layers,
        layer_table=_layer_table(layers),
        seen=seen,
        unseen=unseen,
        reasons=_reasons(seen, classes) if seen is not None else None,
        unit_tables=_unit_tables(seen) if seen is not None else [],
        steps=_step_table(result, metric),
        parameters=_parameter_table(result),
        conservation=_conservation(result.scores.conservation if result.scores is not None else None),
        settings={**_settings(result), **(page.about or {})},
        environment=environment(result.model),
    )
    with atomic.naming_failures(path):
        return atomic.write(path, html)


def _seen(source: nn.Module, result: Record, data: Data, classes: Names, page: Page) -> tuple[Changes | None, str]:
    """What changed on some of the data, or why that cannot be shown: the rest of the page does not depend on it."""
    try:
        shown = some_of(data, _SAMPLES)
    except DataError as error:
        return None, _unseen(error)
    check_scale(shown[0], page)
    try:
        return changes(source, result, shown, classes, page), ""
    except UNEXPLAINED as error:
        return None, _unseen(error)


def _unseen(error: SecateurError) -> str:
    warnings.warn(f"the report has no heat maps: {error}", SecateurWarning, stacklevel=5)
    return str(error)


# -- headline ----------------------------------------------------------------------------------------------------------
def _lead(result: Record, criterion: str) -> str:
    had, has = (result.graph.total_units,) * 2 if result.plan is None else result.plan.units
    steps = sum(row.held for row in result.history) - 1
    words = {"repair": "repair", "finetune": "fine-tuning", "recover": "training"}
    ways = [word for used, word in words.items() if result.settings.get(used)]
    after = f", with {' and '.join(ways)} after {'each' if steps > 1 else 'it'}" if ways else ", without fine-tuning"
    count = f"{steps} {'step' if steps == 1 else 'steps'}"
    done = f"{had - has} of {had} units were removed in {count} by {criterion}{after}."
    if result.plan is not None and result.plan.blocks:
        names = ", ".join(block.name for block in result.plan.blocks)
        done += f" {len(result.plan.blocks)} blocks left as a whole: {names}."
    if result.plan is None:
        done = f"None of {had} units was removed by {criterion}."
    return f"{done} The run ended because {result.stopped or 'it was stopped'}."


def _measured(
    result: Record, source: nn.Module | None, test: Data, classes: Names, metric: Metric
) -> tuple[Measured | None, Answers | None]:
    """On the test data, with what was answered, or else by the `evaluate` of the run."""
    if source is not None and test is not None and Reader(source).causal:
        first, last = (perplexity(model, test) for model in (source, result.model))
        title = f"Next-token accuracy on {first.tokens} held-out tokens"
        return Measured(title, Metric(percent=True), first.named(), last.named()), None
    if source is not None and test is not None:
        old, new = (in_order(accuracy, model, test) for model in (source, result.model))
        title = f"Accuracy on {old.samples} held-out samples"
        before, after = (found.named(lambda c: name_of(c, classes)) for found in (old, new))
        return Measured(title, Metric(percent=True), before, after), Answers.of(old, new, test)
    if result.settings.get("trained_afterwards"):
        return None, None
    rows = [row.metrics for row in result.history if row.held]
    title = "Next-token accuracy" if PERPLEXITY in rows[0] else metric.word.capitalize()
    return (Measured(title, metric, rows[0], rows[-1]) if "overall" in rows[0] else None), None


def _tiles(result: Record, measured: Measured | None) -> list[Tile]:
    tiles = []
    if measured is not None:
        values, metric = (measured.before["overall"], measured.after["overall"]), measured.metric
        before, after = map(metric.text, values)
        tiles.append(
            Tile(measured.title, after, before, metric.change(*values), intervals=measured.intervals("overall"))
        )
        if PERPLEXITY in measured.before and PERPLEXITY in measured.after:
            was, now = measured.before[PERPLEXITY], measured.after[PERPLEXITY]
            change = f"{number(100 * (now / was - 1), '+.1f')} %"
            tiles.insert(0, Tile("Perplexity", f"{now:.2f}", f"{was:.2f}", change))
    old, new = result.cost_before, result.cost_after
    for name, had, has in (("Parameters", old.params, new.params), ("MACs", old.macs, new.macs)):
        share = has / max(had, 1)
        tiles.append(Tile(name, human(has), human(had), f"{100 * share:.1f} % left", share))
    return tiles


def _speeds(result: Record, source: nn.Module | None, latency: bool | Sequence[Timing]) -> tuple[list[Tile], str]:
    """How fast both models are, and how that was measured."""
    example, old, new = result.graph.example, result.cost_before.latency, result.cost_after.latency
    timings: Sequence[Timing] = []
    when = "after the run"
    if not isinstance(latency, bool):
        timings = latency
    elif old is not None and new is not None:
        asked = result.settings.get("latency", {})
        runtime, batch = asked.get("runtime", "torch"), asked.get("batch", batch_of(example))
        threads = asked.get("threads", 0) if asked.get("device") == "cpu" else 0
        timings = [Timing(batch, old, new, RUNTIMES.get(runtime, runtime), threads=threads)]
        when = "during the run"
    elif latency and source is not None:
        timings, when = time_batches(source, result.model, example), "while the page was written"
    if not timings:
        return [], ""
    tiles = []
    for t in timings:
        name, change = f"{t.where}, batch of {t.batch}", f"{t.gain:.2f} times as fast"
        if t.tokens:
            was, now = (f"{rate:,.0f} tokens/s" for rate in t.rates)
            tiles.append(Tile(f"{name}, {t.tokens} tokens each", now, was, change))
        else:
            tiles.append(Tile(name, _milliseconds(t.after), _milliseconds(t.before), change, 1 / t.gain))
    sample = describe(example) if len(timings) == 1 else "samples like the example"
    what = "Speed is that of reading a text, by" if timings[0].tokens else "Latency is"
    return (
        tiles,
        f"{what} the median of up to {_REPEATS} forward passes on {sample}, both models in turn, measured {when}.",
    )


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


# -- tables ------------------------------------------------------------------------------------------------------------
def _class_table(measured: Measured | None) -> Table | None:
    """The largest loss first."""
    if measured is None:
        return None
    metric, before, after = measured.metric, measured.before, measured.after
    names = [name for name in before if name in after and name not in ("overall", PERPLEXITY)]
    names.sort(key=lambda name: after[name] - before[name])
    known = any(measured.intervals(name) for name in names)
    lines = []
    for n in names:
        values = metric.bare(before[n]), metric.bare(after[n])
        sides = (measured.intervals(n) or ("", "")) if known else ()
        lines.append((n, *values, metric.change(before[n], after[n]), *sides))
    heads = ("before", "after", "change", *(("95 % interval before", "after") if known else ()))
    return Table.of(f"{metric.name} by class", ("class",), heads, lines) if lines else None


def _layers(result: Record) -> list[LayerRow]:
    plan = result.plan
    made = []
    for layer in result.graph.layers:
        if not layer.prunable:
            continue
        units = int(result.graph.units[layer.groups].sum())
        before, after = plan.layers[layer.name] if plan is not None else (units, units)
        weight = f"{layer.paths[0]}.weight"
        gone: Sequence[int] = ()
        if plan is not None and weight in plan.cuts:
            gone = plan.cuts[weight].get(unit_dim(result.model, weight), ())
        elif plan is not None:  # heads, whose weights lie together in one tensor, and recurrent layers
            gone = np.flatnonzero(np.isin(layer.groups, plan.groups)).tolist()
        made.append(LayerRow(layer.name, layer.kind, before, after, layer.paths, ranges(gone)))
    return made


def ranges(indices: Sequence[int]) -> str:
    """Whole numbers in order, runs shortened.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def _layer_table(layers: Sequence[LayerRow]) -> Table:
    lines = [(r.name, r.kind, str(r.before), str(r.after), percent(r.share), ", ".join(r.modules)) for r in layers]
    heads = ("kind", "units before", "units after", "left, %", "modules that share these units")
    return Table.of("Units per layer", ("layer",), heads, lines)


def _step_table(result: Record, metric: Metric) -> Table:
    lines = []
    for row in result.history:
        overall = "" if row.overall is None else metric.bare(row.overall)
        note = row.part if row.held else f"{row.part} taken back".strip()
        lines.append(
            (str(row.step), str(row.units), percent(row.removed), str(row.params), str(row.macs), overall,
             f"{row.seconds:.2f}", note)
        )  # fmt: skip
    heads = ("units", "removed, %", "parameters", "MACs", metric.name, "seconds", "")
    return Table.of("All steps", ("step",), heads, lines)


def _parameter_table(result: Record) -> Table | None:
    if result.plan is None:
        return None
    lines = []
    for name, dims in result.plan.cuts.items():
        shape = result.plan.shapes[name]
        after = [size - len(dims.get(dim, ())) for dim, size in enumerate(shape)]
        lines.append((name, " × ".join(map(str, shape)), " × ".join(map(str, after))))
    return Table.of("Every tensor that was cut", ("parameter or buffer",), ("shape before", "shape after"), lines)


def _unit_tables(seen: Changes) -> list[Table]:
    removed = [(unit.layer, str(unit.index), percent(unit.before)) for unit in seen.removed]
    gained = [(unit.layer, str(unit.index), percent(unit.before), percent(unit.after)) for unit in seen.gained]
    return [
        Table.of("Units that left with the most relevance", ("layer", "unit"), ("relevance before, %",), removed),
        Table.of("Units that gained the most", ("layer", "unit"), ("before, %", "after, %"), gained),
    ]


def _reasons(seen: Changes, classes: Names) -> Table:
    """By class: how far the heat maps agree, and how faithful they are."""
    found = seen.reasons
    faithful = ("SRG before", "SRG after") if found.srg is not None else ()
    lines: list[tuple[str, ...]] = []
    for c, drift in sorted({-1: float(found), **found.by_class}.items(), key=lambda item: (item[0] >= 0, -item[1])):
        mine = found.of_class(c)
        measured = [number(float(part[mine].mean()), ".3f") for part in found.srg or ()]
        name = "all" if c < 0 else name_of(c, classes)
        lines.append(
            (name, str(int(mine.sum())), number(1 - drift, ".3f"), number(drift, ".3f"), *measured, found.note(c))
        )
    heads = ("samples", "correlation", "drift", *faithful, "")
    return Table.of("Does the network keep its reasons?", ("class",), heads, lines)


def _conservation(found: Conservation | None) -> tuple[str, Table] | None:
    """The conservation of the last scoring, in a sentence and in full."""
    if found is None:
        return None
    whole = found.start or 1.0
    worst, most = max(found.leaks.items(), key=lambda leak: abs(leak[1]), default=("", 0.0))
    blame = "No operation loses or creates more than 0.01 % of it."
    if abs(most) > 1e-4:
        blame = f"The operation that loses or creates the most is {worst}: {100 * abs(most):.2f} %."
    sentence = (
        f"Of the relevance that started at the outputs, {100 * found.input / whole:.2f} % reached the inputs of the "
        f"first layers, {100 * found.absorbed / whole:.2f} % stayed in biases or constants by definition of the rules, "
        f"and {100 * abs(found.missing):.2f} % went astray. {blame}"
    )
    lines = []
    for flow in found.flows:
        arrived, lost = (number(100 * value / whole, ".3f") for value in (flow.arrived, flow.lost))
        lines.append((flow.name, flow.kind, arrived, lost, "by definition" if flow.absorbs and flow.lost else ""))
    heads = ("kind", "arrives, %", "stays, %", "")
    return sentence, Table.of("Every operation, in the order of the forward pass", ("operation",), heads, lines)


def _settings(result: Record) -> dict[str, str]:
    made = {"model": result.graph.model_name, "example": describe(result.graph.example)}
    for key, value in result.settings.items():
        unset = value is None or value is False or value in ({}, [], "")
        if not unset and (key, value) != ("parts", {"": ["*"]}):
            made[key.replace("_", " ")] = _words(value)
    return made


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)
