"""`compare`: which criterion for my model? The same samples, the same steps, one curve for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from secateur.analysis.analyze import analyze
from secateur.criteria.registry import Choice, criterion_named
from secateur.criteria.scoring import scores_of
from secateur.errors import SecateurError
from secateur.loop.prune import run_loop
from secateur.loop.settings import Evaluate, Schedule, Settings
from secateur.plans.targets import Limits, Target
from secateur.results.comparison import Comparison, curve, overlap, spearman
from secateur.running.batches import Data, example_of, repeatable
from secateur.running.copies import unwrap
from secateur.running.sandbox import check_weights


def compare(
    model: nn.Module,
    data: Data,
    criteria: Sequence[Choice] = ("lrp", "taylor", "gradient", "weight"),
    *,
    evaluate: Evaluate,
    remove: float = 0.5,
    schedule: Schedule | float = 0.05,
    fractions: Sequence[float] = (0.125, 0.25, 0.5),
    **options: Any,
) -> Comparison:
    """Prune with several criteria on the same samples and seed, and say how they compare. `options` go to `prune`.

    Criteria are compared by Algorithm 1 without repair, unless `options` name a repair. `fractions` are the shares of
    all groups for which the overlap of the criteria's lowest and highest scores is given.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    >>> x, y = torch.rand(30, 4), torch.arange(30) % 3
    >>> def accuracy(model): return float((model(x).argmax(1) == y).float().mean())
    >>> table = compare(net, (x, y), ["lrp", "weight"], evaluate=accuracy, remove=0.5, schedule=0.25)
    >>> sorted(table.curves), table.curves["lrp"].removed.tolist()
    (['lrp', 'weight'], [0.0, 0.25, 0.5])
    """
    chosen = [criterion_named(c) for c in criteria]
    names = [c.name for c in chosen]
    if len(set(names)) < len(names) or not names:
        raise SecateurError(f"criteria must have different names, and there must be one at least; got {names}.")
    data, original, steps = repeatable(data), unwrap(model), Schedule.of(schedule)
    check_weights(original)
    graph = analyze(original, example_of(original, data))
    scores = dict(zip(names, scores_of(original, data, chosen, graph, None, steps.batch_size), strict=True))
    target = Target(remove, options.pop("keep", None), options.pop("max_drop", None))
    limits, repair = options.pop("limits", Limits()), options.pop("repair", None)
    checkpoint, histories = options.pop("checkpoint", None), {}
    for criterion in chosen:
        if checkpoint is not None:  # a run each
            path = Path(checkpoint)
            options["checkpoint"] = path.with_name(f"{path.stem}-{criterion.name.replace(':', '-')}{path.suffix}")
        settings = Settings(criterion, target, steps, limits, repair, evaluate)
        histories[criterion.name] = run_loop(original, data, settings, graph=graph, **options).history
    values = {name: scores[name].of(graph)[graph.candidates] for name in names}
    pairs = [(a, b) for a in names for b in names if a != b]
    sizes = {f: max(1, round(f * len(graph.candidates))) for f in fractions}
    return Comparison(
        {name: curve(name, history) for name, history in histories.items()},
        {(a, b): spearman(values[a], values[b]) for a, b in pairs},
        {f: {(a, b): overlap(values[a], values[b], k) for a, b in pairs} for f, k in sizes.items()},
        {f: {(a, b): overlap(-values[a], -values[b], k) for a, b in pairs} for f, k in sizes.items()},
        histories,
        scores,
    )
