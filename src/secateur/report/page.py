"""The report of a run: what was asked, what came out, and how it looks now, in one file that needs nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur import atomic
from secateur.errors import (
    DataError,
    RelevanceError,
    SecateurError,
    SecateurWarning,
    UnknownOperationError,
    UnsupportedModelError,
)
from secateur.latency.timing import Timing, batch_of, time_batches
from secateur.nest import describe
from secateur.plans.targets import brief
from secateur.relevance.composites import PRESETS, Composite
from secateur.relevance.conservation import Conservation
from secateur.relevance.rules import Rule
from secateur.report.changes import Changes, Names, changes, check_scale, name_of, some_of
from secateur.report.curves import Metric, contest, percent, run_charts
from secateur.report.document import fill
from secateur.report.environment import environment
from secateur.report.tables import Table
from secateur.results.comparison import Comparison
from secateur.results.history import Record
from secateur.running.accuracy import Accuracy, accuracy
from secateur.running.batches import Data
from secateur.running.copies import unwrap
from secateur.structure.cost import human

_SAMPLES = 4  # shown as heat maps when they are taken from the data
_MOST = 10  # classes that are not folded away
_REPEATS = 20  # forward passes that the latency is the median of


@dataclass(frozen=True)
class Tile:
    """A headline number: after, before, and what is left of it as a share."""

    name: str
    after: str
    before: str
    change: str
    share: float | None = None


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


@dataclass(frozen=True, repr=False)
class Page:
    """How a report looks: `result.report(path, page=Page(title="…"))`.

    `about` is shown among the settings. Both models are timed in turn for batches of 1 and 32, unless `latency` is
    False or holds what was measured already. Heat maps are made with `composite`, by default that of the run. `mean`
    and `std` are those that the images were normalised with.
    """

    title: str | None = None
    about: Mapping[str, str] | None = None
    latency: bool | Sequence[Timing] = True
    composite: str | Composite | Rule | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    __repr__ = brief


def write_report(
    path: str | Path,
    result: Record,
    *,
    data: Data = None,
    test: Data = None,
    inputs: tuple[Tensor, Tensor | None] | None = None,
    original: nn.Module | None = None,
    comparison: Comparison | Mapping[str, Record] | None = None,
    classes: Names = None,
    page: Page | None = None,
) -> Path:
    """Write the page of `Result.report`."""
    page = page if page is not None else Page()
    source = original if original is not None else result.original
    source = unwrap(source) if source is not None else None
    if source is None and (inputs is not None or data is not None or test is not None):
        raise SecateurError("heat maps and accuracies before pruning need the unpruned model: give original=model.")
    scores: list[Accuracy] | None = None
    if source is not None and test is not None:
        scores = [accuracy(model, test) for model in (source, result.model)]
    first, last = _ends(result)
    metric = Metric.of([row.overall for row in result.history if row.overall is not None])
    criterion = str(result.settings.get("criterion") or (result.scores.criterion if result.scores else "no criterion"))
    if page.composite is None:
        page = replace(page, composite=_composite(criterion))
    seen, unseen = None, ""
    if source is not None and inputs is not None:
        seen = _changes(source, result, inputs, classes, page)
    elif source is not None and data is not None:
        seen, unseen = _seen(source, result, data, classes, page)
    timings, when = _timings(result, source, page.latency)
    layers = _layers(result)
    html = fill(
        "report/page.html",
        title=page.title or f"{result.graph.model_name} pruned by {criterion}",
        lead=_lead(result, criterion),
        tiles=_tiles(result, scores, metric),
        speeds=_speeds(timings),
        latency_note=_latency_note(result, timings, when) if timings else "",
        most=_MOST,
        charts=run_charts(result.history, metric),
        metric=metric,
        measured=scores is not None or "overall" in first,
        classes=_class_table(scores, classes, first, last, metric),
        contest=contest(comparison) if comparison is not None else None,
        layers=layers,
        layer_table=_layer_table(layers),
        seen=seen,
        unseen=unseen,
        unit_tables=_unit_tables(seen) if seen is not None else [],
        steps=_step_table(result, metric),
        plan=result.plan,
        parameters=_parameter_table(result),
        books=_books(result.scores.conservation if result.scores is not None else None),
        settings={**_settings(result), **(page.about or {})},
        environment=environment(result.model),
        percent=percent,
    )
    return atomic.write(path, html.encode())


def _changes(
    source: nn.Module, result: Record, inputs: tuple[Tensor, Tensor | None], classes: Names, page: Page
) -> Changes:
    assert page.composite is not None
    return changes(
        source, result.model, result.plan, inputs, classes=classes, mean=page.mean, std=page.std,
        composite=page.composite,
    )  # fmt: skip


def _seen(source: nn.Module, result: Record, data: Data, classes: Names, page: Page) -> tuple[Changes | None, str]:
    """What changed on some of the data, or why that cannot be shown: the rest of the page does not depend on it."""
    try:
        shown = some_of(data, _SAMPLES)
    except DataError as error:
        return None, _unseen(error)
    if shown[0].dim() == 4:
        check_scale(shown[0], page.mean, page.std)
    try:
        found = _changes(source, result, shown, classes, page)
    except (DataError, RelevanceError, UnknownOperationError, UnsupportedModelError) as error:
        return None, _unseen(error)
    return found, ""


def _unseen(error: SecateurError) -> str:
    warnings.warn(f"the report has no heat maps: {error}", SecateurWarning, stacklevel=5)
    return str(error)


# -- headline ----------------------------------------------------------------------------------------------------------
def _ends(result: Record) -> tuple[Mapping[str, float], Mapping[str, float]]:
    rows = [row for row in result.history if row.held]
    return rows[0].metrics, rows[-1].metrics


def _lead(result: Record, criterion: str) -> str:
    had, has = (result.graph.total_units,) * 2 if result.plan is None else result.plan.units
    steps = sum(row.held for row in result.history) - 1
    ways = [word for word, used in (("repair", "repair"), ("fine-tuning", "finetune")) if result.settings.get(used)]
    after = f", with {' and '.join(ways)} after {'each' if steps > 1 else 'it'}" if ways else ", without fine-tuning"
    count = f"{steps} {'step' if steps == 1 else 'steps'}"
    done = f"{had - has} of {had} units were removed in {count} by {criterion}{after}."
    if result.plan is None:
        done = f"None of {had} units was removed by {criterion}."
    return f"{done} The run ended because {result.stopped or 'it was stopped'}."


def _timings(
    result: Record, source: nn.Module | None, latency: bool | Sequence[Timing]
) -> tuple[Sequence[Timing], str]:
    """What was measured, and when."""
    if not isinstance(latency, bool):
        return latency, "after the run"
    old, new = result.cost_before.latency, result.cost_after.latency
    if old is not None and new is not None:
        return [Timing(batch_of(result.graph.example), old, new)], "during the run"
    if latency and source is not None:
        return time_batches(source, result.model, result.graph.example), "while the page was written"
    return [], ""


def _tiles(result: Record, scores: Sequence[Accuracy] | None, metric: Metric) -> list[Tile]:
    first, last = _ends(result)
    tiles = []
    if scores is not None:
        kind = Metric(percent=True)
        before, after = scores[0].overall, scores[1].overall
        name = f"Accuracy on {scores[0].samples} held-out samples"
        tiles.append(Tile(name, kind.text(after), kind.text(before), kind.change(before, after)))
    elif "overall" in first:
        before, after = first["overall"], last["overall"]
        tiles.append(
            Tile(metric.word.capitalize(), metric.text(after), metric.text(before), metric.change(before, after))
        )
    old, new = result.cost_before, result.cost_after
    for name, before, after in (("Parameters", old.params, new.params), ("MACs", old.macs, new.macs)):
        share = after / max(before, 1)
        tiles.append(Tile(name, human(after), human(before), f"{100 * share:.1f} % left", share))
    return tiles


def _speeds(timings: Sequence[Timing]) -> list[Tile]:
    tiles = []
    for timing in timings:
        text = [_milliseconds(value) for value in (timing.before, timing.after)]
        name = f"{timing.runtime}, batch of {timing.batch}"
        tiles.append(Tile(name, text[1], text[0], f"{timing.gain:.2f} times as fast", 1 / timing.gain))
    return tiles


def _milliseconds(seconds: float) -> str:
    number = 1000 * seconds
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} ms"


def _latency_note(result: Record, timings: Sequence[Timing], when: str) -> str:
    sample = describe(result.graph.example) if len(timings) == 1 else "samples like the example"
    turns = "" if when == "during the run" else ", both models in turn"
    return f"Latency is the median of up to {_REPEATS} forward passes on {sample}{turns}, measured {when}."


# -- tables ------------------------------------------------------------------------------------------------------------
def _class_table(
    scores: Sequence[Accuracy] | None,
    classes: Names,
    first: Mapping[str, float],
    last: Mapping[str, float],
    metric: Metric,
) -> Table | None:
    """The largest loss first."""
    before, after = first, last
    if scores is not None:
        before, after = ({name_of(c, classes): share for c, share in s.classes.items()} for s in scores)
    kind = Metric(percent=True) if scores is not None else metric
    names = [name for name in before if name in after and (scores is not None or name != "overall")]
    if not names:
        return None
    names.sort(key=lambda name: after[name] - before[name])
    lines = [(n, kind.bare(before[n]), kind.bare(after[n]), kind.change(before[n], after[n])) for n in names]
    return Table.of(f"{kind.name} by class", ("class",), ("before", "after", "change"), lines)


def _layers(result: Record) -> list[LayerRow]:
    plan = result.plan
    made = []
    for layer in result.graph.layers:
        if not layer.prunable:
            continue
        units = int(result.graph.units[layer.groups].sum())
        before, after = plan.layers[layer.name] if plan is not None else (units, units)
        cuts = plan.cuts.get(f"{layer.paths[0]}.weight", {}) if plan is not None else {}
        made.append(LayerRow(layer.name, layer.kind, before, after, layer.paths, ranges(cuts.get(0, ()))))
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
    lines = [
        (row.name, row.kind, str(row.before), str(row.after), percent(row.share), ", ".join(row.modules))
        for row in layers
    ]
    heads = ("kind", "units before", "units after", "left, %", "modules that share these units")
    return Table.of("Units per layer", ("layer",), heads, lines)


def _step_table(result: Record, metric: Metric) -> Table:
    lines = []
    for row in result.history:
        overall = "" if row.overall is None else metric.bare(row.overall)
        note = " ".join([row.part, *([] if row.held else ["taken back"])]).strip()
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
    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.2f}".replace("-", "−")

    removed = [(unit.layer, str(unit.index), share(unit.before)) for unit in seen.removed]
    gained = [(u.layer, str(u.index), share(u.before), share(u.after)) for u in seen.gained]
    return [
        Table.of("Units that left with the most relevance", ("layer", "unit"), ("relevance before, %",), removed),
        Table.of("Units that gained the most", ("layer", "unit"), ("before, %", "after, %"), gained),
    ]


@dataclass(frozen=True)
class Books:
    """The conservation of the last scoring, in a sentence and in full."""

    sentence: str
    table: Table


def _books(found: Conservation | None) -> Books | None:
    if found is None:
        return None
    whole = found.start or 1.0
    leaks = found.leaks
    worst = max(leaks, key=lambda name: abs(leaks[name]), default="")
    most = abs(leaks.get(worst, 0.0))
    blame = "No operation loses or creates more than 0.01 % of it."
    if most > 1e-4:
        blame = f"The operation that loses or creates the most is {worst}: {100 * most:.2f} %."
    sentence = (
        f"Of the relevance that started at the outputs, {100 * found.input / whole:.2f} % reached the inputs of the "
        f"first layers, {100 * found.absorbed / whole:.2f} % stayed in biases or constants by definition of the rules, "
        f"and {100 * abs(found.missing):.2f} % went astray. {blame}"
    )

    def share(value: float) -> str:
        return f"{100 * value / whole:.3f}".replace("-", "−")

    lines = [
        (
            flow.name,
            flow.kind,
            share(flow.arrived),
            share(flow.lost),
            "by definition" if flow.absorbs and flow.lost else "",
        )
        for flow in found.flows
    ]
    heads = ("kind", "arrives, %", "stays, %", "")
    return Books(sentence, Table.of("Every operation, in the order of the forward pass", ("operation",), heads, lines))


def _settings(result: Record) -> dict[str, str]:
    made = {"model": result.graph.model_name, "example": describe(result.graph.example)}
    for key, value in result.settings.items():
        if value is None or value is False or value in ({}, [], ""):
            continue
        if key == "parts" and value == {"": ["*"]}:
            continue
        made[key.replace("_", " ")] = _words(value)
    return made


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)


def _composite(criterion: str) -> str:
    """The composite that scored, if a preset did."""
    named = criterion.partition(":")[2]
    return named if criterion.startswith("lrp:") and named in PRESETS else "alpha1beta0"
