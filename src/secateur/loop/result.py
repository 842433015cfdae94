"""What a run of `prune` ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.latency.timing import Timing
from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.relevance.composites import Composite
from secateur.relevance.rules import Rule
from secateur.report.page import write_report
from secateur.results.comparison import Comparison
from secateur.results.history import History
from secateur.running.batches import Data
from secateur.structure.cost import Cost
from secateur.structure.graph import Graph


@dataclass(frozen=True)
class Result:
    """What a run ended with. `stopped` says why; `scores` are those that the last removal was based on.

    `original` is the user's own unpruned model, and `settings` what `prune` was asked for.
    """

    model: nn.Module
    plan: Plan | None
    history: History
    graph: Graph
    scores: Scores | None
    cost_before: Cost
    cost_after: Cost
    stopped: str
    original: nn.Module | None = field(default=None, repr=False, compare=False)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.cost_before} → {self.cost_after}; {self.stopped}\n{self.history}"

    def report(
        self,
        path: str | Path,
        *,
        inputs: tuple[Tensor, Tensor | None] | None = None,
        data: Data = None,
        test: Data = None,
        original: nn.Module | None = None,
        title: str | None = None,
        comparison: Comparison | Mapping[str, Result] | None = None,
        classes: Sequence[str] | Mapping[int, str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        composite: str | Composite | Rule | None = None,
        latency: bool | Sequence[Timing] = True,
        about: Mapping[str, str] | None = None,
    ) -> Path:
        """Write a page about this run: one HTML file with charts, tables and heat maps that needs nothing else.

        Heat maps before and after are drawn for `inputs`, a pair (x, y), or for a few samples of `data`; `mean` and
        `std` undo the normalisation of the pictures, `classes` names the outputs, `composite` is that of the run unless
        given. Where samples of `data` cannot be explained (several inputs, say), the page says why and goes without. On
        `test` the accuracy of both models is measured, by class too. `comparison` (of `compare`, or results by name)
        adds the curves of several criteria. `original` is the unpruned model, where it is not known. Both models are
        timed in turn for batches of 1 and 32, unless `latency` is False or says what was measured already. `about` is
        shown among the settings.

        >>> import tempfile, torch, secateur as sc
        >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
        >>> data = (torch.rand(16, 4), torch.arange(16) % 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = sc.prune(net, data, remove=0.5, progress=False).report(folder + "/report.html", test=data)
        ...     page.read_text(encoding="utf-8")[:15]
        '<!doctype html>'
        """
        return write_report(
            path, self, inputs=inputs, data=data, test=test, original=original, title=title, comparison=comparison,
            classes=classes, mean=mean, std=std, composite=composite, latency=latency, about=about,
        )  # fmt: skip
