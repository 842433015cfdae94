"""Plans: which groups leave. Immutable, printable, JSON; enough to cut a freshly built model without analysing it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_args

import numpy as np

from secateur.errors import FileFormatError, PlanError
from secateur.ops.layers import Labels, Mask
from secateur.running.sandbox import Example
from secateur.structure.blocks import Returns, StandIn, within
from secateur.structure.cost import Cost, human
from secateur.structure.graph import Graph, RepeatedSize

FORMAT = "secateur-plan-1"
Record = TypeVar("Record", "NormCut", "HeadCut", "AttributeCut", "BlockCut", StandIn)


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
class BlockCut:
    """A residual branch that leaves: the addition at its end, and which of the two terms it is."""

    name: str
    path: str
    function: str
    visit: int
    operand: int


@dataclass(frozen=True, repr=False)
class Plan:
    """Which groups leave: for each parameter and dimension the indices that are cut.

    Plans compare by what they cut, print as a table, and round-trip through `to_json` / `from_json`. `example` is the
    input that the model was analysed with, on which `apply` verifies the removal; a plan from a file has none, and no
    `graph` either. `output` names what of the model's output counts; if nothing, all does. `blocks` are the residual
    branches that leave as a whole, and `stand_ins` what takes the place of their modules.
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
    output: tuple[str, ...] = ()
    blocks: tuple[BlockCut, ...] = ()
    stand_ins: tuple[StandIn, ...] = ()
    example: Example = field(default=None, compare=False, repr=False)
    graph: Graph | None = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # it is frozen

    @property
    def units(self) -> tuple[int, int]:
        """Units that may leave: before and after."""
        return sum(b for b, _ in self.layers.values()), sum(a for _, a in self.layers.values())

    def to_json(self) -> str:
        """The plan as text. The example and the graph are left out."""
        content = {name: value for name, value in vars(self).items() if name not in ("example", "graph")}
        return json.dumps({"format": FORMAT, **content}, default=_known_fields)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back; anything that is not one is refused with the reason."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise FileFormatError(f"not a plan: the text is not valid JSON ({error})") from error
        return cls.from_data(data)

    @classmethod
    def from_data(cls, data: Any) -> Plan:
        """A plan from what JSON holds."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise FileFormatError(f"not a plan of this version: expected format {FORMAT!r}, found {found!r}")
        try:
            return cls(
                groups=_indices(data["groups"]),
                cuts={str(n): _cuts(dims) for n, dims in data["cuts"].items()},
                shapes={str(n): _indices(s) for n, s in data["shapes"].items()},
                heads=tuple(_read(HeadCut, item) for item in data["heads"]),
                norms=tuple(_read(NormCut, item) for item in data["norms"]),
                attributes=tuple(_read(AttributeCut, item) for item in data["attributes"]),
                layers={str(n): (_count(b), _count(a)) for n, (b, a) in data["layers"].items()},
                model=str(data["model"]),
                before=Cost(_count(data["before"]["params"]), _count(data["before"]["macs"])),
                after=Cost(_count(data["after"]["params"]), _count(data["after"]["macs"])),
                output=tuple(str(name) for name in data.get("output", ())),
                blocks=tuple(_read(BlockCut, item) for item in data.get("blocks", ())),
                stand_ins=tuple(_read(StandIn, item) for item in data.get("stand_ins", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FileFormatError(f"not a plan: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        return f"<Plan for {self.model}: {self._leaving}, {self.before} → {self.after}>"

    @property
    def _leaving(self) -> str:
        had, has = self.units
        count = len(self.blocks)
        whole = f", among them {count} whole block{'s' if count > 1 else ''}" if count else ""
        return f"{had - has} of {had} units leave{whole}"

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self._leaving}",
            f"parameters {_change(self.before.params, self.after.params)}, "
            f"MACs {_change(self.before.macs, self.after.macs)}",
            "",
        ]
        width = max([len(name) for name in self.layers] or [5])
        for name, (before, after) in self.layers.items():
            bar = "█" * round(20 * after / max(before, 1))
            lines.append(f"{name.ljust(width)}  {before:6d} → {after:6d}  {bar}".rstrip())
        if self.blocks:
            lines += ["", f"whole blocks that leave: {', '.join(block.name for block in self.blocks)}"]
        return "\n".join(lines)

    def __hash__(self) -> int:
        return hash((self.groups, self.model))


def _change(before: int, after: int) -> str:
    return f"{human(before)} → {human(after)} ({100 * after / max(before, 1):.1f} %)"


def _known_fields(item: object) -> dict[str, Any]:
    """A cost or a cut as JSON: the cost of a plan has no latency."""
    return {name: value for name, value in vars(item).items() if value is not None}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value


def _indices(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of indices, found {value!r}")
    return tuple(_count(item) for item in value)


def _cuts(dims: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    return {_count(int(dim)): _indices(indices) for dim, indices in dims.items()}


def _returns(value: Any) -> str:
    if value not in get_args(Returns):
        raise ValueError(f"expected what a module returns, found {value!r}")
    return str(value)


def _read(kind: type[Record], item: Mapping[str, Any]) -> Record:
    """A record whose fields are texts, counts and lists of indices."""
    readers: dict[str, Callable[[Any], Any]] = {
        "str": str, "int": _count, "tuple[int, ...]": _indices, "Returns": _returns,
    }  # fmt: skip
    return kind(**{field.name: readers[str(field.type)](item[field.name]) for field in fields(kind)})


def plan_for(graph: Graph, removed: Mask, repeated: Sequence[RepeatedSize] | None = None) -> Plan:
    """The plan that removes exactly the groups marked in `removed`, and what lies in blocks among them.

    `repeated`: other such sizes than the graph's.
    """
    removed = graph.branches.closed(removed)
    blocks = graph.branches.gone(removed)
    stand_ins = graph.blocks.stand_ins(blocks) if blocks else []
    without = frozenset[str]().union(*(block.parameters for block in blocks))

    def stays(path: str) -> bool:
        return not any(within(path, item.path) for item in stand_ins)

    gone = removed[graph.root]
    gone[0] = False
    cuts: dict[str, dict[int, tuple[int, ...]]] = {}
    known: dict[bytes, tuple[int, ...]] = {}  # what a convolution, its batch norm and its readers lose is one tuple
    for axis in graph.axes.axes:
        own = gone[axis.span]
        if axis.parameter and axis.parameter not in without and own.any():
            key = own.tobytes()
            cuts.setdefault(axis.parameter, {})[axis.dim] = known.get(key) or known.setdefault(key, _places(own))
    heads = {}
    for head in graph.heads:
        if (indices := _places(removed[head.groups])) and stays(head.path):
            heads[head.path] = HeadCut(head.path, len(head.groups), indices)
    norms = []
    for norm in graph.norms:
        if (indices := _places(gone[norm.labels.numpy().ravel()])) and stays(norm.site.path):
            site = norm.site
            norms.append(NormCut(site.path, site.function, site.visit, tuple(norm.labels.shape), indices))
    attributes = []
    for item in graph.repeated if repeated is None else repeated:
        own = gone[item.labels]
        if (own.any() or own.ndim > 1) and stays(item.path):
            left = len(own) - int(np.count_nonzero(own.reshape(len(own), -1).all(1)))
            attributes.append(AttributeCut(item.path, item.name, len(own), left))
    layers = {}
    for layer in graph.layers:
        if layer.prunable:
            units: Labels = graph.units[layer.groups]
            layers[layer.name] = int(units.sum()), int(units[~removed[layer.groups]].sum())
    return Plan(
        groups=_places(removed),
        cuts=cuts,
        shapes={name: graph.shapes[name] for name in cuts},
        heads=tuple(heads.values()),
        norms=tuple(norms),
        attributes=tuple(attributes),
        layers=layers,
        model=graph.model_name,
        before=graph.cost,
        after=graph.cost_of(removed),
        output=graph.output,
        blocks=tuple(BlockCut(b.name, b.site.path, b.site.function, b.site.visit, b.operand) for b in blocks),
        stand_ins=tuple(stand_ins),
        example=graph.example,
        graph=graph,
    )


def _places(mask: Mask) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def difference(new: Plan, old: Plan | None) -> Plan:
    """The plan to apply to the model that `old` left, so that it becomes the one that `new` leaves."""
    if old is None:
        return new
    if not set(old.groups) <= set(new.groups):
        raise PlanError("the later plan keeps groups that the earlier one removed; plans of a loop only grow")
    cuts, shapes = {}, {}
    for name, dims in new.cuts.items():
        shape, before = new.shapes[name], old.cuts.get(name, {})
        left = {dim: renumbered(indices, before.get(dim, ()), shape[dim]) for dim, indices in dims.items()}
        if any(left.values()):
            cuts[name] = {dim: indices for dim, indices in left.items() if indices}
            shapes[name] = tuple(size - len(before.get(dim, ())) for dim, size in enumerate(shape))
    heads, lost_heads = [], {head.path: head.removed for head in old.heads}
    for head in new.heads:
        gone = lost_heads.get(head.path, ())
        heads.append(HeadCut(head.path, head.heads - len(gone), renumbered(head.removed, gone, head.heads)))
    # Where kinds of units cross in a tensor, a call has several, which differ in shape.
    norms, lost_places = [], {replace(norm, removed=()): norm.removed for norm in old.norms}
    for norm in new.norms:
        gone = lost_places.get(replace(norm, removed=()), ())
        there = np.ones(norm.shape, np.bool_)
        there.ravel()[list(gone)] = False
        # What is left of a rectangle of slices is a rectangle: its sides are what any line still has.
        shape = tuple(len(np.unique(places)) for places in np.nonzero(there))
        norms.append(replace(norm, shape=shape, removed=renumbered(norm.removed, gone, there.size)))
    sizes = {(item.path, item.name): item.after for item in old.attributes}
    attributes = [replace(item, before=sizes.get((item.path, item.name), item.before)) for item in new.attributes]
    gone_groups = set(old.groups)
    blocks = tuple(block for block in new.blocks if block not in old.blocks)
    return replace(
        new,
        groups=tuple(group for group in new.groups if group not in gone_groups),
        cuts=cuts,
        shapes=shapes,
        heads=tuple(head for head in heads if head.removed),
        norms=tuple(norm for norm in norms if norm.removed),
        attributes=tuple(item for item in attributes if item.before != item.after),
        layers={name: (old.layers[name][1], after) for name, (_, after) in new.layers.items()},
        before=old.after,
        blocks=blocks,
        stand_ins=tuple(item for item in new.stand_ins if item not in old.stand_ins),
        graph=None,  # its numbers are those of the model before the old plan
    )


def renumbered(indices: Sequence[int], gone: Sequence[int], size: int) -> tuple[int, ...]:
    """Those of `indices` that are still there once `gone` have left, by their new numbers.

    >>> renumbered([0, 2, 3, 5], [0, 3], size=6)
    (1, 3)
    """
    there = np.ones(size, np.bool_)
    there[list(gone)] = False
    place = np.cumsum(there) - 1
    wanted = np.asarray(indices, np.int64)
    return tuple(place[wanted[there[wanted]]].tolist())
