"""`score`: one number per unit, from data, by any criterion."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np
import torch
from torch import nn

from secateur.analysis.analyze import analyze
from secateur.criteria.attribution import Custom
from secateur.criteria.criterion import Absolute, Accumulator, Criterion, Loss, Norm, Subject, Sums, check_scores
from secateur.criteria.registry import Choice, criterion_named
from secateur.criteria.relevance import LRP
from secateur.criteria.sensitivity import Sensitivity, SensitivityPass
from secateur.errors import CriterionError, DataError
from secateur.ops.table import Site
from secateur.plans.plan import Plan
from secateur.plans.scores import Aggregation, Scores, Values
from secateur.running.batches import Data, batches, check_inputs, example_of
from secateur.running.devices import device_of
from secateur.running.processes import share, sum_over_processes
from secateur.running.sandbox import check_weights
from secateur.structure.graph import Graph


@overload
def score(
    model: nn.Module, data: Data, criterion: Choice = ..., *, graph: Graph | None = ..., norm: Norm | str = ...,
    absolute: Absolute | str = ..., aggregate: Aggregation = ..., loss: Loss | None = ..., batch_size: int = ...,
    start: Plan | None = ...,
) -> Scores: ...  # fmt: skip
@overload
def score(
    model: nn.Module, data: Data, criterion: Sequence[Choice], *, graph: Graph | None = ..., norm: Norm | str = ...,
    absolute: Absolute | str = ..., aggregate: Aggregation = ..., loss: Loss | None = ..., batch_size: int = ...,
    start: Plan | None = ...,
) -> dict[str, Scores]: ...  # fmt: skip
def score(
    model: nn.Module,
    data: Data,
    criterion: Choice | Sequence[Choice] = "lrp",
    *,
    graph: Graph | None = None,
    norm: Norm | str = "default",
    absolute: Absolute | str = "default",
    aggregate: Aggregation = "mean",
    loss: Loss | None = None,
    batch_size: int = 32,
    start: Plan | None = None,
) -> Scores | dict[str, Scores]:
    """How much the model needs each of its units, according to a criterion; with a list of criteria, a dict of scores.

    `data` is an iterable of (inputs, targets), a pair (X, y) of tensors or NumPy arrays, or None where no criterion
    needs any. Several inputs are a tuple or a dict: ((X1, X2), y).
    `criterion` is "lrp" (or "lrp:<composite>"), "taylor", "gradient", "weight", "activation", "random",
    "captum:<Method>", a `Criterion`, or a function. `norm` divides each layer's scores by their norm (None, 1 or 2);
    `absolute` is taken "after" the sum over samples or per "sample"; the defaults are those of the paper. `aggregate`
    makes the score of a group from those of its coupled units: "mean", "sum" or "max". `loss(output, targets)`, a mean
    over samples, replaces cross-entropy (for a model with one output, and targets 0 and 1, binary cross-entropy).
    For a model that was already pruned, give the graph of the unpruned one and the plan as `start`.

    The model is not changed; it runs in evaluation mode. In several processes each scores its share.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> scores = score(net, (torch.rand(8, 4), torch.arange(8) % 3), "taylor")
    >>> scores.criterion, [len(values) for values in scores.units.values()]
    ('taylor', [6, 3])
    """
    several = isinstance(criterion, Sequence) and not isinstance(criterion, str)
    choices: Sequence[Any] = criterion if several else [criterion]  # type: ignore[assignment]
    wanted = [criterion_named(choice, norm, absolute) for choice in choices]
    if not wanted:
        raise CriterionError("there is no criterion in the list.")
    if graph is None:
        graph = analyze(model, example_of(model, data))
    check_weights(model)
    subject = Subject.of(model, graph, start)
    sums = collect(subject, wanted, data, loss, batch_size)
    made = {
        c.name: Scores(c.name, _units(subject, c, s), aggregate, s.books) for c, s in zip(wanted, sums, strict=True)
    }
    return made if several else made[wanted[0].name]


def collect(
    subject: Subject, criteria: Sequence[Criterion], data: Data, loss: Loss | None, batch_size: int
) -> list[Sums]:
    """Go through the data once, for all criteria, and add up over processes."""
    shared = [c for c in criteria if isinstance(c, Sensitivity)]
    together = SensitivityPass(subject, shared, loss) if shared else None
    alone: dict[int, Accumulator] = {
        i: c.accumulate(subject, loss) for i, c in enumerate(criteria) if not isinstance(c, Sensitivity)
    }
    fed = [a for i, a in alone.items() if criteria[i].data]
    if together is not None:
        fed.append(together)
    if fed and not (data is None and all(isinstance(c, Custom) for c in criteria)):
        seen = 0
        with _forked(subject.model):
            for inputs, targets in batches(data, batch_size, device_of(subject.model), share()):
                check_inputs(inputs)
                for accumulator in fed:
                    accumulator.update(inputs, targets)
                seen += 1
        if not seen and share()[1] == 1:
            raise DataError("the data are empty: there is no batch in them.")
    found: list[Sums] = []
    for i, criterion in enumerate(criteria):
        if isinstance(criterion, Sensitivity):
            assert together is not None
            sums = together.all_sums[shared.index(criterion)]
        else:
            sums = alone[i].close()
        if criterion.data:
            sizes = [int(kept.sum()) for kept in subject.kept]
            units, samples = sum_over_processes(sums.units, sizes, sums.samples, device_of(subject.model))
            sums = Sums(units, samples, sums.books)
            if not sums.samples:
                raise DataError("the data are empty in every process.")
        found.append(sums)
    return found


def _forked(model: nn.Module) -> AbstractContextManager[None]:
    """Random numbers that a forward draws are given back."""
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.is_cuda})
    return torch.random.fork_rng(devices)


def _units(subject: Subject, criterion: Criterion, sums: Sums) -> dict[Site, Values]:
    values: list[Values | None] = []
    for producer, total, kept in zip(subject.producers, sums.units, subject.kept, strict=True):
        if total is None:
            # What evaluation never runs (auxiliary heads) adds nothing to the output. Embeddings share a stream with
            # layers that have a score.
            unseen = isinstance(criterion, Sensitivity | LRP) and "embedding" not in producer.sites[0].function
            values.append(np.zeros(int(kept.sum())) if unseen else None)
            continue
        made = criterion.normalised(total.cpu().double().numpy(), sums.samples)
        check_scores(criterion.name, made, producer)
        values.append(made)
    _check_some(criterion, values)
    return subject.lifted(values)


def _check_some(criterion: Criterion, values: Sequence[Values | None]) -> None:
    """Refuse scores that tell no unit from another: units would leave in the order in which they are numbered."""
    if values and not any(part is not None and part.any() for part in values):
        what = "every unit the score 0" if any(part is not None for part in values) else "no unit a score"
        raise CriterionError(
            f"the criterion {criterion.name!r} gave {what}, so nothing says which matter.",
            fix=(
                "check that data and targets belong to this model and that its output depends on its input; for "
                "criteria by gradients give loss=f(output, targets); or use another criterion"
            ),
        )
