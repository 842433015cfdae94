"""Scores: one number per group; the lowest leave first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from secateur.errors import PlanError
from secateur.ops.table import Site
from secateur.relevance.conservation import Conservation
from secateur.structure.graph import Graph

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
Aggregation = Literal["mean", "sum", "max"]


@dataclass(frozen=True, repr=False)
class Scores:
    """One number per unit, by the call that makes it, and how a group's number follows from those of its units.

    For scores by relevance, `conservation` says where any relevance was lost. `blocks` has one number for each residual
    branch, by name: what the layers at its end score in all, not divided by the norm of a layer.
    """

    criterion: str
    units: Mapping[Site, Values]
    aggregate: Aggregation = "mean"
    conservation: Conservation | None = field(default=None, compare=False, repr=False)
    blocks: Mapping[str, float] = field(default_factory=dict)

    @property
    def composite(self) -> str:
        """For scores by relevance, the composite that was used; empty for others."""
        return "" if self.conservation is None else self.conservation.composite

    @property
    def _by(self) -> str:
        known = not self.composite or self.criterion == f"lrp:{self.composite}"
        return self.criterion if known else f"{self.criterion} ({self.composite})"

    def __repr__(self) -> str:
        count = sum(map(len, self.units.values()))
        return f"<Scores by {self._by}: {count} units of {len(self.units)} layers>"

    def __str__(self) -> str:
        width = max([len(site.path) for site in self.units] + [5])
        lines = [
            f"scores by {self._by}",
            "",
            f"{'layer'.ljust(width)}   units      lowest      median     highest",
        ]
        for site, values in self.units.items():
            low, middle, high = (float(f(values)) for f in (np.min, np.median, np.max))
            lines.append(
                f"{(site.path or '-').ljust(width)}  {len(values):6d}  {low:10.4g}  {middle:10.4g}  {high:10.4g}"
            )
        if self.blocks:
            width = max(map(len, self.blocks))
            lines += ["", "blocks"]
            lines += [f"{name.ljust(width)}  {value:10.4g}" for name, value in self.blocks.items()]
        return "\n".join(lines)

    def of(self, graph: Graph) -> Values:
        """The score of every group of a graph; NaN where the criterion has nothing to say."""
        sizes = {site: len(producer.labels) for producer in graph.producers for site in producer.sites}
        for site, values in self.units.items():
            if len(values) != sizes.get(site, -1):
                raise PlanError(
                    f"these scores are of another model: they are for {len(values)} units of {site}, and "
                    f"{graph.model_name} has {sizes.get(site, 'none')}.",
                    fix="score(model, data, graph=graph)",
                )
        labels, scored = [np.zeros(0, np.int64)], [np.zeros(0)]
        for producer in graph.producers:
            found = [self.units[site] for site in producer.sites if site in self.units]
            if found:
                labels.append(producer.labels)
                scored.append(np.sum(np.asarray(found, np.float64), 0))  # a reused layer counts all its uses
        groups, values = graph.root[np.concatenate(labels)], np.concatenate(scored)
        count = np.bincount(groups, minlength=len(graph.root))
        if self.aggregate == "max":
            result = np.full(len(graph.root), -np.inf)
            np.maximum.at(result, groups, values)
        else:
            result = np.bincount(groups, values, len(graph.root))
            result = result / np.maximum(count, 1) if self.aggregate == "mean" else result
        result = np.where(count > 0, result, np.nan)
        for block in graph.branches:
            result[block.group] = self.blocks.get(block.name, np.nan)
        return result
