"""What a criterion is: a way to score units. Its sums add up over batches and over processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from torch import Tensor, nn

from secateur.arguments import check_callable, check_kind
from secateur.errors import Argument, CriterionError, PlanError
from secateur.ops.layers import Mask
from secateur.ops.table import Site
from secateur.plans.plan import Plan
from secateur.plans.scores import Aggregation, Values
from secateur.relevance.conservation import Conservation
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import precise
from secateur.running.goals import Aim, Goal
from secateur.structure.findings import Producer
from secateur.structure.graph import Graph

Norm = Literal[1, 2] | None
Absolute = Literal["after", "sample", "square"] | None
_SETTINGS = {"norm": (None, 1, 2), "absolute": (None, "after", "sample", "square"), "aggregate": get_args(Aggregation)}


@dataclass(frozen=True)
class Subject:
    """What is scored: the user's model, for criteria that only read its weights, and the graph of the unpruned model.

    `kept[i]` says which output channels of `graph.producers[i]` the model still has. `place` gives the index of a
    producer by any of the calls that make its units.
    """

    original: nn.Module
    graph: Graph
    kept: Sequence[Mask]
    place: dict[Site, int]
    #: The groups that left.
    gone: Mask

    @classmethod
    def of(cls, model: nn.Module, graph: Graph, start: Plan | None = None) -> Subject:
        """`model` is what the plan `start` left of the analysed model."""
        gone = np.zeros(len(graph.root), np.bool_)
        if start is not None:
            gone[list(start.groups)] = True
        kept = [~gone[graph.root[producer.labels]] for producer in graph.producers]
        place = {site: i for i, producer in enumerate(graph.producers) for site in producer.sites}
        return cls(unwrap(model), graph, kept, place, gone)

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the model in evaluation mode, to run. It shares the weights' memory."""
        return shared_copy(self.original).eval().requires_grad_(False)

    @property
    def producers(self) -> Sequence[Producer]:
        """Where units are made, in the order of the graph."""
        return self.graph.producers

    @cached_property
    def _held(self) -> Sequence[dict[str, tuple[int, set[int]]]]:
        """The parameters that hold the units of each producer: along which dimension, and at which places.

        They tell which call is which: how often a function is called may depend on the length of a text, and then the
        calls of a batch are numbered otherwise than those of the example.
        """
        axes, of, gone = self.graph.axes.axes, self.graph.axis_of, self.gone
        found = []
        for producer in self.producers:
            own = dict[str, tuple[int, set[int]]]()
            for axis in (axes[number] for number in np.unique(of[producer.rows])):
                left = axis.numbers[~gone[self.graph.root[axis.numbers]]]
                own[axis.parameter] = axis.dim, set(np.flatnonzero(np.isin(left, producer.rows)).tolist())
            found.append(own)
        return found

    @cached_property
    def _fused(self) -> set[str]:
        """Parameters that hold the units of several producers."""
        times = Counter(name for own in self._held for name in own)
        return {name for name, count in times.items() if count > 1}

    def holds(self, index: int, name: str, place: Callable[[int], int]) -> bool:
        """Whether a parameter holds units of a producer, at what `place` makes of the dimension where they lie."""
        known = self._held[index].get(name)
        return known is not None and (name not in self._fused or place(known[0]) in known[1])


@dataclass
class Sums:
    """Running sums over samples, one vector per producer (None where nothing was seen), and the number of samples.

    A relevance pass adds its record of conservation as `books`.
    """

    units: list[Tensor | None]
    samples: int = 0
    books: Conservation | None = None

    def add(self, index: int, values: Tensor) -> None:
        """Add the sums of one batch."""
        known = self.units[index]
        wide = values.to(precise(values.device))
        self.units[index] = wide if known is None else known + wide


@dataclass(frozen=True)
class Criterion:
    """A way to score units.

    `norm` divides each layer's scores by their l1 or l2 norm. `absolute` is taken of the sum over all samples
    ("after"), of each sample's sum ("sample"), or not at all (None); "square" adds up squares at each position, for
    criteria that are shares of the output (LRP, Taylor, captum's). `aggregate` makes the score of a group from those
    of its coupled units: "mean", "sum" or "max". `loss`, a function `f(output, targets)` that returns a mean over
    samples, or a goal such as `Segmentation()`, replaces the default loss of criteria that use gradients.
    """

    #: True: the criterion needs data. False: it looks at none. None: it takes data if there are any.
    data: ClassVar[bool | None] = True
    #: Whether scores of different layers have a common scale.
    comparable: ClassVar[bool] = False
    #: Whether a layer that evaluation never runs scores 0 (an auxiliary head adds nothing to the output).
    unseen_is_zero: ClassVar[bool] = False

    name: str = "criterion"
    norm: Norm = None
    absolute: Absolute = None
    aggregate: Aggregation = "mean"
    loss: Aim | None = None

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "a text", error=CriterionError)
        if not isinstance(self.loss, Goal):
            check_callable("loss", self.loss, "a function f(output, targets), or a goal", error=CriterionError)
        for name, known in _SETTINGS.items():
            given = getattr(self, name)
            if given not in known:
                fix = f"one of {', '.join(map(repr, known))}"
                raise CriterionError("{given} is not known.", fix=fix, given=Argument(name, given))

    def accumulate(self, subject: Subject) -> Accumulator:
        """An object that takes in batches."""
        raise NotImplementedError

    def finish(self, total: Values, samples: int) -> Values:
        """From the sum over all samples to the score of a layer's units, before the norm."""
        return total

    def unscaled(self, total: Values, samples: int) -> Values:
        """`finish`, absolute value."""
        values = self.finish(total, samples)
        return np.abs(values) if self.absolute == "after" else values

    def normalised(self, total: Values, samples: int) -> Values:
        """`finish`, absolute value, norm."""
        values = self.unscaled(total, samples)
        if self.norm is not None:
            size = float(np.linalg.norm(values, self.norm))
            values = values / size if size > 0 else values
        return values


class Accumulator:
    """Takes in batches and holds sums that may be added to those of other processes. `sums`: those known before."""

    def __init__(self, subject: Subject, sums: Sums | None = None) -> None:
        self.subject = subject
        self.sums = Sums([None] * len(subject.producers)) if sums is None else sums

    def update(self, inputs: Any, targets: Any) -> None:
        """Take in one batch."""
        raise NotImplementedError

    def join(self, criterion: Criterion) -> Accumulator | None:
        """An accumulator for another criterion that is fed by this one's pass; None if it needs a pass of its own."""
        return None

    def close(self) -> Sums:
        """The sums of all batches."""
        return self.sums


def check_units(where: object, found: int, wanted: int) -> None:
    """Refuse a model that has another number of units than the graph says."""
    if found != wanted:
        raise PlanError(
            f"{where} has {found} units, but the graph says {wanted}.",
            fix="give the plan that made this model as start=…, or analyse this model itself",
        )
