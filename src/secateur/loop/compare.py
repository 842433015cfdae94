"""`compare`: which criterion for my model? The same samples, the same steps, one curve for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from secateur.analysis.analyze import analyze
from secateur.arguments import check_kind, check_number, check_path
from secateur.criteria.registry import Choice, criterion_named
from secateur.criteria.scoring import scores_of
from secateur.errors import SecateurError, TargetError
from secateur.loop.prune import run_loop
from secateur.loop.settings import Evaluate, Repairer, Schedule, Settings, repair_of
from secateur.plans.targets import Limits, Target
from secateur.results.comparison import Comparison, curve, overlap, spearman
from secateur.running.batches import Data, example_of, repeatable
from secateur.running.copies import unwrap
from secateur.running.memory import Memory, limited
from secateur.running.processes import together
from secateur.running.progress import Listener
from secateur.running.sandbox import check_weights, leaves_no_trace


@leaves_no_trace
@together()
def compare(
    model: nn.Module,
    data: Data,
    criteria: Choice | Sequence[Choice] = ("lrp", "taylor", "gradient", "weight"),
    *,
    evaluate: Evaluate,
    remove: float | None = None,
    keep: Mapping[str, float] | None = None,
    schedule: Schedule | float = 0.05,
    fractions: Sequence[float] = (0.125, 0.25, 0.5),
    limits: Limits | None = None,
    repair: Repairer | str | bool | None = None,
    max_drop: float | Mapping[str, float] | None = None,
    output: str | Sequence[str] = (),
    checkpoint: str | Path | None = None,
    memory: Memory = None,
    progress: bool | Listener = True,
) -> Comparison:
    """Prune with several criteria on the same samples and seed, and say how they compare.

    Criteria are compared by Algorithm 1 without repair, unless you name one. They remove 0.5 of the units, unless you
    give `remove` or `keep`. `fractions` are the shares of all groups for which the overlap of the criteria's lowest and
    highest scores is given. What else can be given is as in `prune`.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    >>> x, y = torch.rand(30, 4), torch.arange(30) % 3
    >>> def accuracy(model): return float((model(x).argmax(1) == y).float().mean())
    >>> table = compare(net, (x, y), ["lrp", "weight"], evaluate=accuracy, remove=0.5, schedule=0.25)
    >>> sorted(table.curves), table.curves["lrp"].removed.tolist()
    (['lrp', 'weight'], [0.0, 0.25, 0.5])
    """
    several = isinstance(criteria, Sequence) and not isinstance(criteria, str)
    choices: Sequence[Any] = criteria if several else [criteria]  # type: ignore[assignment]
    chosen = [criterion_named(choice) for choice in choices]
    names = [c.name for c in chosen]
    if len(set(names)) < len(names) or not names:
        raise SecateurError(f"criteria must have different names, and there must be one at least; got {names}.")
    original, steps = unwrap(model), Schedule.of(schedule)
    target = Target(0.5 if remove is None and keep is None else remove, keep, max_drop)
    runs = [Settings(c, target, steps, Limits.of(limits), repair_of(repair), evaluate, output) for c in chosen]
    if evaluate is None:
        raise SecateurError("evaluate is None, but curves need a metric.", fix="a function f(model)")
    check_kind("fractions", fractions, (tuple, list), "a list of shares, such as [0.25, 0.5]", error=TargetError)
    for fraction in fractions:
        check_number("fractions", fraction, error=TargetError)
        if not 0 < fraction <= 1:
            raise TargetError(f"fractions holds {fraction}.", fix="shares above 0, up to 1")
    if checkpoint is not None:
        check_path("checkpoint", checkpoint, "a file name, such as 'run.pt'")
    with limited(memory):
        data = repeatable(data)
        check_weights(original)
        graph = analyze(original, example_of(original, data), output)
        scores = dict(zip(names, scores_of(original, data, chosen, graph, None, steps.batch_size), strict=True))
        histories = {}
        for settings in runs:
            path = None if checkpoint is None else Path(checkpoint)
            name = settings.criterion.name
            if path is not None:  # a run each
                path = path.with_name(f"{path.stem}-{name.replace(':', '-')}{path.suffix}")
            histories[name] = run_loop(original, data, settings, path, progress, graph).history
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
