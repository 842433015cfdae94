"""`score`: one number per unit, from data, by any criterion."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, overload

import numpy as np
from torch import nn

from secateur.analysis.analyze import analyze
from secateur.arguments import check_count, check_kind
from secateur.criteria.criterion import Accumulator, Criterion, Subject, Sums, check_units
from secateur.criteria.registry import Choice, criterion_named
from secateur.errors import CriterionError, DataError
from secateur.ops.table import Site
from secateur.plans.plan import Plan
from secateur.plans.scores import Scores, Values
from secateur.running.batches import Data, batches, check_inputs, example_of, parts_of, repeatable, size_of, total_of
from secateur.running.copies import unchanged, unwrap
from secateur.running.devices import device_of
from secateur.running.memory import Memory, in_smaller_parts, limited
from secateur.running.memory import together as fitting
from secateur.running.processes import check_same, share, sum_over_processes, together
from secateur.running.progress import Pace, Scoring
from secateur.running.sandbox import check_weights, forked, leaves_no_trace
from secateur.structure.graph import Graph


@overload
def score(
    model: nn.Module, data: Data, criterion: Choice = ..., *, graph: Graph | None = ..., start: Plan | None = ...,
    batch_size: int = ..., memory: Memory = ...,
) -> Scores: ...  # fmt: skip
@overload
def score(
    model: nn.Module, data: Data, criterion: Sequence[Choice], *, graph: Graph | None = ..., start: Plan | None = ...,
    batch_size: int = ..., memory: Memory = ...,
) -> dict[str, Scores]: ...  # fmt: skip
@leaves_no_trace
def score(
    model: nn.Module,
    data: Data,
    criterion: Choice | Sequence[Choice] = "lrp",
    *,
    graph: Graph | None = None,
    start: Plan | None = None,
    batch_size: int = 32,
    memory: Memory = None,
) -> Scores | dict[str, Scores]:
    """How much the model needs each of its units, according to a criterion; with a list of criteria, a dict of scores.

    `data` is an iterable of (inputs, targets), a pair (X, y) of tensors or NumPy arrays, or None where no criterion
    needs any. Several inputs are a tuple or a dict: ((X1, X2), y). A dict alone, as tokenizers and collators of
    transformers return it, holds its targets as `labels`; -100 is no target. Those of a language model that generates
    text are the tokens of its input, which it should have said one position before; they need not be given. What an
    `attention_mask` calls padding does not count.
    `criterion` is "lrp" (or "lrp:<composite>"), "taylor", "gradient", "weight", "activation", "random",
    "captum:<Method>", a function, or an object of `secateur.criteria` with settings of its own, such as
    `Taylor(norm=None, loss=f)`. The default settings are those of the paper.
    For a model that was already pruned, give the graph of the unpruned one and the plan as `start`.

    The model is not changed. It runs in evaluation mode. In several processes each scores its share. Large batches are
    taken in parts that need no more than `memory` (bytes, or a text such as "2 GiB"; default: what is free).

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> scores = score(net, (torch.rand(8, 4), torch.arange(8) % 3), "taylor")
    >>> scores.criterion, [len(values) for values in scores.units.values()]
    ('taylor', [6, 3])
    """
    several = isinstance(criterion, Sequence) and not isinstance(criterion, str)
    choices: Sequence[Any] = criterion if several else [criterion]  # type: ignore[assignment]
    wanted = [criterion_named(choice) for choice in choices]
    if not wanted:
        raise CriterionError("there is no criterion in the list.", fix="for example ['lrp', 'taylor']")
    names = [each.name for each in wanted]
    twice = next((each for each in wanted if names.count(each.name) > 1), None)
    if twice is not None:
        what = f"two criteria are called {twice.name!r}, and scores are returned by name."
        raise CriterionError(what, fix=f"names of their own, as in {type(twice).__name__}(name='other', …)")
    original = unwrap(model)
    if graph is not None:
        check_kind("graph", graph, Graph, "graph=analyze(model, example)")
    if start is not None:
        check_kind("start", start, Plan, "the plan that made this model, such as result.plan")
    check_count("batch_size", batch_size)
    with limited(memory), together(any(each.data is not False for each in wanted)):
        data = repeatable(data)
        if graph is None:
            graph = analyze(model, example_of(model, data))
        running = any(each.data is not False for each in wanted)
        with nullcontext() if running else unchanged(original):
            check_weights(original)
            if running:
                check_same(original)
            found = scores_of(model, data, wanted, graph, start, batch_size)
    return {scores.criterion: scores for scores in found} if several else found[0]


def scores_of(
    model: nn.Module, data: Data, criteria: Sequence[Criterion], graph: Graph, start: Plan | None, batch_size: int
) -> list[Scores]:
    """`score` for a model whose weights were checked already."""
    subject = Subject.of(model, graph, start)

    def collected(most: int) -> list[Sums]:
        return _collected(subject, criteria, data, batch_size, most)

    return [
        Scores(c.name, _units(subject, c, sums), c.aggregate, sums.books, _blocks(subject, c, sums))
        for c, sums in zip(criteria, in_smaller_parts(collected, 2**20), strict=True)
    ]


def _collected(subject: Subject, criteria: Sequence[Criterion], data: Data, batch_size: int, most: int) -> list[Sums]:
    """Go through the data once, for all criteria, and add up over processes. A pass sees at most so many samples."""
    passes: list[Accumulator] = []
    fed: list[Accumulator] = []
    for criterion in criteria:
        joined = next(filter(None, (known.join(criterion) for known in passes)), None)
        passes.append(joined or criterion.accumulate(subject))
        if joined is None and criterion.data is not False:
            fed.append(passes[-1])
    if fed and not (data is None and all(criterion.data is not True for criterion in criteria)):
        seen, size, where = 0, 0, device_of(subject.model)
        total, processes = total_of(data), share()[1]
        pace = Pace(Scoring(", ".join(each.name for each in criteria)), total and total // processes)
        with forked(subject.model.parameters()):
            for whole in batches(data, batch_size, where, share()):
                check_inputs(whole[0])
                size = size or min(most, fitting(subject.model, whole[0], backward=True))
                for inputs, targets in parts_of(*whole, size):
                    for accumulator in fed:
                        accumulator.update(inputs, targets)
                    pace(size_of(inputs))
                seen += 1
        if not seen and processes == 1:
            raise DataError("the data are empty: there is no batch in them.")
    return [_everywhere(subject, c, made.close()) for c, made in zip(criteria, passes, strict=True)]


def _everywhere(subject: Subject, criterion: Criterion, sums: Sums) -> Sums:
    """The sums of all processes."""
    if criterion.data is False:
        return sums
    sizes = [int(kept.sum()) for kept in subject.kept]
    units, samples = sum_over_processes(sums.units, sizes, sums.samples, device_of(subject.model))
    if not samples:
        raise DataError("the data are empty in every process.")
    return Sums(units, samples, sums.books)


def _units(subject: Subject, criterion: Criterion, sums: Sums) -> dict[Site, Values]:
    """Scores from sums, at the indices that units have in the unpruned model."""
    units: dict[Site, Values] = {}
    for producer, total, kept in zip(subject.producers, sums.units, subject.kept, strict=True):
        site, values = producer.sites[0], np.zeros(len(kept))
        if total is not None:
            made = criterion.normalised(total.cpu().double().numpy(), sums.samples)
            _check(criterion, site, made, int(kept.sum()))
            values[kept] = made
        elif not criterion.unseen_is_zero or "embedding" in site.function:
            continue  # embeddings are coupled with layers that have a score
        units[site] = values
    if subject.producers and not any(values.any() for values in units.values()):
        what = "every unit the score 0" if units else "no unit a score"
        raise CriterionError(  # else units would leave in the order of their indices
            f"the criterion {criterion.name!r} gave {what}, so they cannot be ranked.",
            fix="check that data and targets belong to this model and that its output depends on its input; of a "
            "detector, that its boxes match targets, or leave these out: (images, None); for criteria by gradients "
            "give loss=f(output, targets), as in Taylor(loss=f); or use another criterion",
        )
    return units


def _blocks(subject: Subject, criterion: Criterion, sums: Sums) -> dict[str, float]:
    """What passes through each residual branch: the sum over the units of the layers at its end."""
    found: dict[str, float] = {}
    for block in subject.graph.branches:
        places = {subject.place[site] for site in block.last}
        totals = [total for i in places if (total := sums.units[i]) is not None]
        if len(totals) == len(places) or criterion.unseen_is_zero:
            values = [criterion.unscaled(total.cpu().double().numpy(), sums.samples).sum() for total in totals]
            found[block.name] = float(sum(values))
    return found


def _check(criterion: Criterion, site: Site, values: Values, count: int) -> None:
    """Refuse NaN and infinity, and another number of units than the graph says, with the name of the layer."""
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        raise CriterionError(
            f"the criterion {criterion.name!r} gave {bad} scores that are NaN or infinite for the {len(values)} units "
            f"of {site}.",
            fix="check the data and the weights there, or use float32",
        )
    check_units(site, len(values), count)
