"""What a model costs: parameters, multiply-accumulates, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import nn

from secateur.ops.layers import Labels
from secateur.running.copies import meta_copy, shared_copy
from secateur.running.sandbox import Example, quiet, run, run_or_explain, to_meta
from secateur.structure.axes import AxisTable
from secateur.structure.findings import CostTerm
from secateur.structure.labels import LabelPass, NeedsNumbers

#: What reading and writing one number is worth, in MACs: from 100 (two cores) to 300 (large GPUs). The larger figure
#: made the faster models on two cores as well.
MACS_PER_NUMBER = 300

#: What may be spared.
Price = Literal["macs", "params", "time"]
Savings = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Cost:
    """Parameters, multiply-accumulates for the example as it is, and the median latency in seconds if measured."""

    params: int
    macs: int
    latency: float | None = None

    def __str__(self) -> str:
        time_part = "" if self.latency is None else f", {1000 * self.latency:.2f} ms"
        return f"{human(self.params)} parameters, {human(self.macs)} MACs{time_part}"


def human(number: float) -> str:
    """A number with at most four digits and a unit.

    >>> human(25557032), human(512)
    ('25.56 M', '512')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def size_of(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, example: Example) -> list[CostTerm]:
    """The cost of every call in one forward pass in evaluation mode."""
    for copied, inputs in ((meta_copy, to_meta(example)), (shared_copy, example)):
        watched = copied(model).eval()
        labels = LabelPass(watched, AxisTable())
        try:
            with quiet(), labels:
                run(watched, inputs)
            return labels.found.macs
        except (RuntimeError, NotImplementedError, TypeError, ValueError, NeedsNumbers):
            if copied is shared_copy:
                with quiet():
                    run_or_explain(watched, inputs)
                raise
    raise AssertionError("unreachable")


class CostModel:
    """Cost as a function of which groups are removed; evaluated many times while a plan is sought."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        parameters: Set[str],
        axes: AxisTable,
        root: Labels,
        terms: list[CostTerm],
        written: Sequence[CostTerm] = (),
    ) -> None:
        self._terms = [(term.coefficient, [root[a] for a in term.axes]) for term in terms]
        self._written = [(MACS_PER_NUMBER * term.coefficient, [root[a] for a in term.axes]) for term in written]
        dims: dict[str, list[tuple[int, Labels]]] = {name: [] for name in parameters}
        for axis in axes.axes:
            if axis.parameter in dims:
                dims[axis.parameter].append((axis.dim, root[axis.base : axis.base + axis.size]))
        self._params: list[tuple[float, list[Labels]]] = []
        for name, vectors in dims.items():
            rest = float(np.prod(shapes[name]))
            for dim, _ in vectors:
                rest /= shapes[name][dim]
            self._params.append((rest, [v for _, v in vectors]))

    def __call__(self, removed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Cost:
        """`removed[root]` says whether a group leaves."""
        keep = ~removed
        return Cost(round(_total(self._params, keep)), round(_total(self._terms, keep)))

    def savings(self, removed: np.ndarray[tuple[int], np.dtype[np.bool_]], what: Price = "macs") -> Savings:
        """What each group costs as things stand, to first order: what leaves with it when it leaves alone.

        "time" is in MACs, too: those that are computed, and those that could be while numbers are read and written.
        """
        keep = ~removed
        saved = np.zeros(len(keep))
        priced = {"macs": self._terms, "params": self._params, "time": [*self._terms, *self._written]}
        for coefficient, vectors in priced[what]:
            counts = [int(np.count_nonzero(keep[vector])) for vector in vectors]
            for i, vector in enumerate(vectors):
                others = float(np.prod(counts[:i] + counts[i + 1 :]))
                np.add.at(saved, vector[keep[vector]], coefficient * others)
        return saved


def _total(terms: list[tuple[float, list[Labels]]], keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    total = 0.0
    for coefficient, vectors in terms:
        for vector in vectors:
            coefficient *= int(np.count_nonzero(keep[vector]))
        total += coefficient
    return total
