"""The record of a run, as reports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.results.history import History
from secateur.structure.cost import Cost
from secateur.structure.graph import Graph


@dataclass(frozen=True)
class Record:
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
