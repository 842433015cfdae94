"""Plans: which groups leave. Immutable, printable, JSON; enough to cut a freshly built model without analysing it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from secateur.errors import FileFormatError
from secateur.ops.layers import Labels
from secateur.running.sandbox import Example
from secateur.structure.cost import Cost, human
from secateur.structure.graph import Graph, RepeatedSize

FORMAT = "secateur-plan-1"
Record = TypeVar("Record", "NormCut", "HeadCut", "AttributeCut")
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class NormCut:
    """A norm over several channels that loses some: where it is called, what it normalises, flat places that leave."""

    path: str
    function: str
    visit: int
    shape: tuple[int, ...]
    removed: tuple[int, ...]


@dataclass(frozen=True)
class HeadCut:
    """An attention module that loses heads: which of how many."""

    path: str
    heads: int
    removed: tuple[int, ...]


@dataclass(frozen=True)
class AttributeCut:
    """A number that a module of the user's remembers and that must follow a cut."""

    path: str
    name: str
    before: int
    after: int


@dataclass(frozen=True)
class Plan:
    """Which groups leave: for each parameter and dimension the indices that are cut.

    Plans compare by what they cut, print as a table, and round-trip through `to_json` / `from_json`. `example` is the
    input that the model was analysed with, on which `apply` verifies the removal; a plan from a file has none.
    """

    groups: tuple[int, ...]
    cuts: Mapping[str, Mapping[int, tuple[int, ...]]]
    shapes: Mapping[str, tuple[int, ...]]
    heads: tuple[HeadCut, ...]
    norms: tuple[NormCut, ...]
    attributes: tuple[AttributeCut, ...]
    layers: Mapping[str, tuple[int, int]]
    model: str
    before: Cost
    after: Cost
    example: Example = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # it is frozen

    @property
    def units(self) -> tuple[int, int]:
        """Units that may leave: before and after."""
        return sum(b for b, _ in self.layers.values()), sum(a for _, a in self.layers.values())

    def to_json(self) -> str:
        """The plan as text. The example is left out."""
        return json.dumps(
            {
                "format": FORMAT,
                "model": self.model,
                "before": {"params": self.before.params, "macs": self.before.macs},
                "after": {"params": self.after.params, "macs": self.after.macs},
                "layers": {name: list(counts) for name, counts in self.layers.items()},
                "groups": list(self.groups),
                "shapes": {name: list(shape) for name, shape in self.shapes.items()},
                "cuts": {name: {str(d): list(i) for d, i in dims.items()} for name, dims in self.cuts.items()},
                "heads": [vars(h) for h in self.heads],
                "norms": [vars(n) for n in self.norms],
                "attributes": [vars(a) for a in self.attributes],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back; anything that is not one is refused with the reason."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise FileFormatError(f"not a plan: the text is not valid JSON ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise FileFormatError(f"not a plan of this version: expected format {FORMAT!r}, found {found!r}")
        try:
            return cls(
                groups=_indices(data["groups"]),
                cuts={str(n): {int(d): _indices(i) for d, i in dims.items()} for n, dims in data["cuts"].items()},
                shapes={str(n): _indices(s) for n, s in data["shapes"].items()},
                heads=tuple(_read(HeadCut, item) for item in data["heads"]),
                norms=tuple(_read(NormCut, item) for item in data["norms"]),
                attributes=tuple(_read(AttributeCut, item) for item in data["attributes"]),
                layers={str(n): (_count(b), _count(a)) for n, (b, a) in data["layers"].items()},
                model=str(data["model"]),
                before=Cost(_count(data["before"]["params"]), _count(data["before"]["macs"])),
                after=Cost(_count(data["after"]["params"]), _count(data["after"]["macs"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"not a plan: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        had, has = self.units
        lines = [
            f"{self.model}: {had - has} of {had} units leave",
            f"parameters {_change(self.before.params, self.after.params)}, "
            f"MACs {_change(self.before.macs, self.after.macs)}",
            "",
        ]
        width = max([len(name) for name in self.layers] or [5])
        for name, (before, after) in self.layers.items():
            bar = "█" * round(20 * after / max(before, 1))
            lines.append(f"{name.ljust(width)}  {before:6d} → {after:6d}  {bar}")
        return "\n".join(lines)

    def __hash__(self) -> int:
        return hash((self.groups, self.model))


def _change(before: int, after: int) -> str:
    return f"{human(before)} → {human(after)} ({100 * after / max(before, 1):.1f} %)"


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value


def _indices(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of indices, found {value!r}")
    return tuple(_count(item) for item in value)


def _read(kind: type[Record], item: Mapping[str, Any]) -> Record:
    """A record whose fields are texts, counts and lists of indices."""
    readers: dict[str, Callable[[Any], Any]] = {"str": str, "int": _count, "tuple[int, ...]": _indices}
    return kind(**{field.name: readers[str(field.type)](item[field.name]) for field in fields(kind)})


def plan_for(graph: Graph, removed: Mask, repeated: Sequence[RepeatedSize] | None = None) -> Plan:
    """The plan that removes exactly the groups marked in `removed`. `repeated`: other such sizes than the graph's."""
    gone = removed[graph.root]
    gone[0] = False
    cuts: dict[str, dict[int, tuple[int, ...]]] = {}
    for axis in graph.axes.axes:
        if axis.parameter:
            indices = np.flatnonzero(gone[axis.base : axis.base + axis.size])
            if len(indices):
                cuts.setdefault(axis.parameter, {})[axis.dim] = tuple(indices.tolist())
    norms = []
    for norm in graph.norms:
        flat = np.flatnonzero(gone[norm.labels.numpy().ravel()])
        if len(flat):
            site = norm.site
            shape = tuple(norm.labels.shape)
            norms.append(NormCut(site.path, site.function, site.visit, shape, tuple(flat.tolist())))
    return Plan(
        groups=tuple(np.flatnonzero(removed).tolist()),
        cuts=cuts,
        shapes={name: graph.shapes[name] for name in cuts},
        heads=_head_cuts(graph, removed),
        norms=tuple(norms),
        attributes=_attribute_cuts(graph, gone, graph.repeated if repeated is None else repeated),
        layers=_unit_counts(graph, removed),
        model=graph.model_name,
        before=graph.cost,
        after=graph.cost_of(removed),
        example=graph.example,
    )


def _head_cuts(graph: Graph, removed: Mask) -> tuple[HeadCut, ...]:
    made: dict[str, HeadCut] = {}
    for heads in graph.heads:
        gone = np.flatnonzero(removed[heads.groups])
        if len(gone):
            made[heads.path] = HeadCut(heads.path, len(heads.groups), tuple(gone.tolist()))
    return tuple(made.values())


def _attribute_cuts(graph: Graph, gone: Mask, repeated: Sequence[RepeatedSize]) -> tuple[AttributeCut, ...]:
    made = []
    for item in repeated:
        axis = graph.axes.axes[item.axis]
        lost = int(np.count_nonzero(gone[axis.base : axis.base + axis.size]))
        if lost:
            made.append(AttributeCut(item.path, item.name, axis.size, axis.size - lost))
    return tuple(made)


def _unit_counts(graph: Graph, removed: Mask) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for layer in graph.layers:
        if layer.prunable:
            units: Labels = graph.units[layer.groups]
            total, gone = int(units.sum()), int(units[removed[layer.groups]].sum())
            counts[layer.name] = (total, total - gone)
    return counts
