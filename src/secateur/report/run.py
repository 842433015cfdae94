"""What a report needs to know of a run. `secateur.loop.result.Result` has all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.results.history import History
from secateur.structure.cost import Cost
from secateur.structure.graph import Graph


@runtime_checkable
class Run(Protocol):
    """A finished run, read only."""

    @property
    def model(self) -> nn.Module:
        """The smaller model."""

    @property
    def plan(self) -> Plan | None:
        """What was removed; None if nothing was."""

    @property
    def history(self) -> History:
        """What each step did."""

    @property
    def graph(self) -> Graph:
        """The unpruned model's structure."""

    @property
    def scores(self) -> Scores | None:
        """The scores of the last removal."""

    @property
    def cost_before(self) -> Cost:
        """Of the unpruned model."""

    @property
    def cost_after(self) -> Cost:
        """Of the smaller model."""

    @property
    def stopped(self) -> str:
        """Why the run ended."""

    @property
    def original(self) -> nn.Module | None:
        """The unpruned model."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What was asked for."""
