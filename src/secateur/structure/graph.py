"""What `analyze` learnt about a model: its groups of coupled units, what may leave, and what each layer costs."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import nn

from secateur.ops.layers import Labels
from secateur.running.copies import named_tensors
from secateur.running.sandbox import Example
from secateur.structure.axes import AxisTable
from secateur.structure.cost import Cost, CostModel, human
from secateur.structure.coupling import Coupling
from secateur.structure.findings import Findings, NormSite, Producer


@dataclass(frozen=True)
class Member:
    """Slices of one parameter (or buffer) that leave with a group."""

    parameter: str
    dim: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Coupled units: all slices of parameters that must leave together."""

    id: int
    layer: str
    kind: str
    units: int
    prunable: bool
    reason: str | None
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Layer:
    """Groups that live in the same parameters: what a person calls a layer, or a residual stream of several."""

    name: str
    kind: str
    paths: tuple[str, ...]
    groups: Labels
    prunable: bool
    reason: str | None

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether any module of the layer, or one that it is part of, fits any wildcard."""
        return any(
            fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")
            for path in self.paths
            for pattern in patterns
        )


@dataclass(frozen=True)
class Heads:
    """An attention product inside a module, one group per head."""

    path: str
    groups: Labels


@dataclass(frozen=True)
class RepeatedSize:
    """An attribute of the user's own module that repeats the size of an axis and must shrink with it."""

    path: str
    name: str
    axis: int


@dataclass(frozen=True, eq=False)
class Graph:
    """The groups of a model. `print(graph)` shows them as a table; `graph.groups` lists them."""

    axes: AxisTable
    root: Labels
    layers: tuple[Layer, ...]
    units: Labels
    prunable: np.ndarray[tuple[int], np.dtype[np.bool_]]
    heads: tuple[Heads, ...]
    norms: tuple[NormSite, ...]
    shapes: dict[str, tuple[int, ...]]
    parameters: frozenset[str]
    producers: tuple[Producer, ...]
    module_macs: dict[str, int]
    unused: tuple[str, ...]
    repeated: tuple[RepeatedSize, ...]
    example: Example
    model_name: str
    cost_of: CostModel = field(repr=False)

    # `root` maps each label to its group, a label itself; `units` and `prunable` are indexed by group.

    @cached_property
    def cost(self) -> Cost:
        """Cost of the whole model for the example."""
        return self.cost_of(np.zeros(len(self.root), np.bool_))

    @cached_property
    def candidates(self) -> Labels:
        """The groups that may leave, in order of the layers that make them."""
        ids = [layer.groups[self.prunable[layer.groups]] for layer in self.layers]
        return np.concatenate(ids) if ids else np.zeros(0, np.int64)

    @cached_property
    def total_units(self) -> int:
        """How many units may leave: the basis of `remove=`."""
        return int(self.units[self.candidates].sum())

    @cached_property
    def _by_group(self) -> tuple[Labels, Labels]:
        order = np.argsort(self.root, kind="stable")
        return order, self.root[order]

    @cached_property
    def axis_of(self) -> Labels:
        """The axis (position in `axes.axes`) of each label."""
        owner = np.zeros(len(self.root), np.int64)
        for i, axis in enumerate(self.axes.axes):
            owner[axis.base : axis.base + axis.size] = i
        return owner

    def labels_of(self, group: int) -> Labels:
        """The labels in a group."""
        order, roots = self._by_group
        return order[np.searchsorted(roots, group) : np.searchsorted(roots, group, "right")]

    def members(self, group: int) -> tuple[Member, ...]:
        """The parameter slices that leave with a group."""
        found: dict[int, list[int]] = defaultdict(list)
        for label in self.labels_of(group).tolist():
            found[int(self.axis_of[label])].append(label)
        made = []
        for i, labels in found.items():
            axis = self.axes.axes[i]
            if axis.parameter:
                made.append(Member(axis.parameter, axis.dim, tuple(label - axis.base for label in labels)))
        return tuple(made)

    @cached_property
    def groups(self) -> list[Group]:
        """Every group, prunable or not, in order of the layers."""
        return list(self)

    def __iter__(self) -> Iterator[Group]:
        for layer in self.layers:
            for group in layer.groups.tolist():
                free = bool(self.prunable[group])
                reason = None if free else layer.reason
                yield Group(group, layer.name, layer.kind, int(self.units[group]), free, reason, self.members(group))

    def __len__(self) -> int:
        return sum(len(layer.groups) for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"{self.model_name}: {self.cost}; {self.total_units} of {int(self.units.sum())} units in "
            f"{len(self.candidates)} of {len(self)} groups may leave",
            "",
        ]
        rows = [("layer", "kind", "groups", "units", "MACs", "prunable")]
        for layer in self.layers:
            free = int(self.prunable[layer.groups].sum())
            macs = sum(self.module_macs.get(path, 0) for path in layer.paths)
            more = f" (+{len(layer.paths) - 1})" if len(layer.paths) > 1 else ""
            verdict = "yes" if free == len(layer.groups) else layer.reason or "no"
            if 0 < free < len(layer.groups):
                verdict = f"{free} of {len(layer.groups)}: {verdict}"
            units = str(int(self.units[layer.groups].sum()))
            rows.append((layer.name + more, layer.kind, str(len(layer.groups)), units, human(macs), verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        for row in rows:
            cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
            cells += [row[i].rjust(widths[i]) for i in (2, 3, 4)]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        if self.unused:
            lines += [
                "",
                f"not reached by the example: {', '.join(self.unused[:8])}{' …' if len(self.unused) > 8 else ''}",
            ]
        return "\n".join(lines)


def build(
    model: nn.Module,
    example: Example,
    axes: AxisTable,
    passes: Sequence[Findings],
    blocked: dict[str, str],
    repeated: Sequence[RepeatedSize] = (),
) -> Graph:
    """Put together what the label passes found. `blocked` names layers that trial removals showed to be rigid."""
    coupling = Coupling(axes.total, passes)
    root = coupling.root
    main = passes[0]
    shapes = {n: tuple(t.shape) for n, t in named_tensors(model)}
    producers = _distinct(passes)
    makers = Makers(producers, root)
    units = np.zeros(len(root), np.int64)
    np.add.at(units, makers.groups, makers.counts)
    heads = [Heads(site.site.path, root[site.labels]) for site in main.heads]
    places = {group: where for group, where in _head_groups(heads).items() if makers.first[group] >= 0}
    for group, where in places.items():
        units[group] = len(where)
    prunable = (makers.first >= 0) & (coupling.why < 0)
    filling = _filling(axes, root)
    filling = filling[prunable[filling]]
    prunable[filling] = False
    coupling.why[filling] = coupling.reason("the only unit of its layer, or all its units are coupled")
    layers = _layers(axes, coupling, makers, set(places), prunable, blocked)
    terms = main.macs
    module_macs: dict[str, float] = defaultdict(float)
    for term in terms:
        module_macs[term.site.path] += term.coefficient * float(np.prod([len(a) for a in term.axes]))
    parameters = frozenset(name for name, _ in model.named_parameters())
    reached = set().union(*(p.seen for p in passes))
    for array in (root, units, prunable):
        array.flags.writeable = False
    return Graph(
        axes=axes,
        root=root,
        layers=tuple(layers),
        units=units,
        prunable=prunable,
        heads=tuple(heads),
        norms=tuple(norm for p in passes for norm in p.norms),
        shapes=shapes,
        parameters=parameters,
        producers=tuple(producers),
        module_macs={path: round(m) for path, m in module_macs.items()},
        unused=tuple(sorted(parameters - reached)),
        repeated=tuple(repeated),
        example=example,
        model_name=type(model).__name__,
        cost_of=CostModel(shapes, parameters, axes, root, terms, main.written),
    )


def _distinct(passes: Sequence[Findings]) -> list[Producer]:
    """The producers of all passes; what two passes saw counts once."""
    found: dict[int, Producer] = {}
    for watched in passes:
        for first, producer in watched.producers.items():
            found.setdefault(first, producer)
    return list(found.values())


class Makers:
    """Which producers make each group, with how many units, without a Python loop over groups.

    `groups` and `counts` are parallel, producer after producer; `first` is indexed by group: its first producer's
    number, or -1 for a group that nothing makes.
    """

    def __init__(self, producers: Sequence[Producer], root: Labels) -> None:
        self._producers = producers
        found = [np.unique(root[producer.labels], return_counts=True) for producer in producers]
        empty = np.zeros(0, np.int64)
        self.groups = np.concatenate([empty, *(ids for ids, _ in found)])
        self.counts = np.concatenate([empty, *(counts for _, counts in found)])
        numbers = np.repeat(np.arange(len(found)), [len(ids) for ids, _ in found])
        order = np.argsort(self.groups, kind="stable")
        self._sorted, self._numbers = self.groups[order], numbers[order]
        begins = np.flatnonzero(np.diff(self._sorted, prepend=-1))
        self.first = np.full(len(root), -1, np.int64)
        self.first[self._sorted[begins]] = self._numbers[begins]

    def of(self, group: int) -> list[Producer]:
        """The producers of a group, in order of execution."""
        begin, end = np.searchsorted(self._sorted, group), np.searchsorted(self._sorted, group, "right")
        return [self._producers[i] for i in self._numbers[begin:end].tolist()]


def _head_groups(heads: Sequence[Heads]) -> dict[int, set[str]]:
    places: dict[int, set[str]] = defaultdict(set)
    for site in heads:
        for group in site.groups.tolist():
            places[group].add(site.path)
    return places


def _filling(axes: AxisTable, root: Labels) -> Labels:
    """Groups that occupy every index of some axis: removing one would leave nothing there."""
    found = []
    for axis in axes.axes:
        ids = root[axis.base : axis.base + axis.size]
        if (ids == ids[0]).all():
            found.append(int(ids[0]))
    return np.array(found, np.int64)


def _layers(
    axes: AxisTable,
    coupling: Coupling,
    makers: Makers,
    heads: set[int],
    prunable: np.ndarray[tuple[int], np.dtype[np.bool_]],
    blocked: dict[str, str],
) -> list[Layer]:
    """Groups that touch the same axes, in order of execution; frozen and free ones apart."""
    groups = np.flatnonzero(makers.first >= 0)
    groups = groups[np.argsort(makers.first[groups], kind="stable")]
    # A group is frozen for one reason, so this number tells free from frozen too.
    families = _touched(axes, coupling.root)[groups] * (len(coupling.reasons) + 1) + coupling.why[groups] + 1
    _, begins, family = np.unique(families, return_index=True, return_inverse=True)
    members = np.split(groups[np.argsort(family, kind="stable")], np.cumsum(np.bincount(family))[:-1])
    layers = []
    names: dict[str, int] = defaultdict(int)
    for i in np.argsort(begins).tolist():
        first = int(members[i][0])
        own = tuple(dict.fromkeys(site.path for maker in makers.of(first) for site in maker.sites))
        kind = "head" if first in heads else makers.of(first)[0].kind
        free = bool(prunable[first])
        reason = None if free else coupling.reasons[coupling.why[first]]
        name = own[0] or "(forward)"
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        if free and name in blocked:
            prunable[members[i]] = False
            free, reason = False, blocked[name]
        layers.append(Layer(name, kind, own, np.sort(members[i]), free, reason))
    return layers


def _touched(axes: AxisTable, root: Labels) -> Labels:
    """A number for each group: the same for two of them if and only if they touch the same axes."""
    count = len(axes.axes)
    owner = np.repeat(np.arange(count), [axis.size for axis in axes.axes])
    # Pairs as single numbers sort many times faster than rows.
    keys = np.sort(root[1:] * count + owner)
    ids, touched = np.divmod(keys[np.flatnonzero(np.diff(keys, prepend=-1))], max(count, 1))
    begins = np.flatnonzero(np.diff(ids, prepend=-1))
    lengths = np.diff(begins, append=len(ids))
    numbers = np.zeros(len(root), np.int64)
    known = 0
    for length in np.unique(lengths).tolist():
        alike = begins[lengths == length]
        number = np.zeros(len(alike), np.int64)
        for place in range(length):  # sets that agree so far are split by their next axis
            number = np.unique(number * count + touched[alike + place], return_inverse=True)[1]
        numbers[ids[alike]] = known + number
        known += int(number.max()) + 1
    return numbers
