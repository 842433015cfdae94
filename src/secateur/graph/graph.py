"""What `analyze` learnt about a model: its groups of coupled units, what may leave, and what each layer costs."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import nn

from secateur.graph.axes import AxisTable
from secateur.graph.classes import Classes
from secateur.graph.cost import Cost, CostModel, human
from secateur.graph.labels import LabelPass, NormSite, Producer
from secateur.graph.shadow import Example, named_tensors
from secateur.ops.table import Labels


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
        """Whether any module of the layer fits any wildcard."""
        return any(fnmatch.fnmatchcase(path, pattern) for path in self.paths for pattern in patterns)


@dataclass(frozen=True)
class Heads:
    """An attention product inside a module, one class per head."""

    path: str
    classes: Labels


@dataclass(frozen=True)
class Remembered:
    """An attribute of the user's own module that repeats the size of an axis and must shrink with it."""

    path: str
    name: str
    axis: int


@dataclass(eq=False)
class Graph:
    """The groups of a model. `print(graph)` shows them as a table; `graph.groups` lists them."""

    axes: AxisTable
    root: Labels
    layers: list[Layer]
    units: Labels
    prunable: np.ndarray[tuple[int], np.dtype[np.bool_]]
    heads: list[Heads]
    norms: list[NormSite]
    shapes: dict[str, tuple[int, ...]]
    parameters: set[str]
    producers: list[Producer]
    module_macs: dict[str, int]
    unused: list[str]
    remembered: tuple[Remembered, ...]
    example: Example
    model_name: str
    cost_of: CostModel = field(repr=False)

    # `root` maps each label to its class, a label itself; `units` and `prunable` are indexed by class.

    @cached_property
    def cost(self) -> Cost:
        """Cost of the whole model for the example."""
        return self.cost_of(np.zeros(len(self.root), np.bool_))

    @cached_property
    def candidates(self) -> Labels:
        """The classes that may leave, in order of the layers that make them."""
        ids = [layer.groups[self.prunable[layer.groups]] for layer in self.layers]
        return np.concatenate(ids) if ids else np.zeros(0, np.int64)

    @cached_property
    def total_units(self) -> int:
        """How many units may leave: the basis of `remove=`."""
        return int(self.units[self.candidates].sum())

    @cached_property
    def _by_class(self) -> tuple[Labels, Labels]:
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
        """The labels in a class."""
        order, roots = self._by_class
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
    passes: Sequence[LabelPass],
    blocked: dict[str, str],
    remembered: Sequence[Remembered] = (),
) -> Graph:
    """Put together what the label passes found. `blocked` names layers that trial removals showed to be rigid."""
    classes = Classes(axes.total, passes)
    root = classes.root
    main = passes[0]
    shapes = {n: tuple(t.shape) for n, t in named_tensors(model)}
    units = np.zeros(len(root), np.int64)
    paths: dict[int, list[str]] = defaultdict(list)
    kinds: dict[int, str] = {}
    order: dict[int, int] = {}
    producers: list[Producer] = []
    seen: set[int] = set()
    for watched in passes:
        for first, producer in watched.producers.items():
            if first in seen:
                continue
            seen.add(first)
            producers.append(producer)
            ids, counts = np.unique(root[producer.labels], return_counts=True)
            np.add.at(units, ids, counts)
            for group in ids.tolist():
                paths[group] += [site.path for site in producer.sites]
                kinds.setdefault(group, producer.kind)
                order.setdefault(group, len(order))
    heads = [Heads(site.site.path, root[site.labels]) for site in main.heads]
    for group, places in _head_groups(heads).items():
        if group in kinds:
            kinds[group], units[group] = "head", len(places)
    prunable = np.zeros(len(root), np.bool_)
    prunable[list(kinds)] = True
    prunable[[g for g in classes.reasons if g < len(root)]] = False
    filling = _filling(axes, root)
    reasons = dict(classes.reasons)
    for group in filling:
        if prunable[group]:
            prunable[group] = False
            reasons[group] = "the only unit of its layer, or all its units are coupled"
    layers = _layers(axes, root, paths, kinds, order, prunable, reasons, blocked)
    terms = main.macs
    module_macs: dict[str, float] = defaultdict(float)
    for term in terms:
        module_macs[term.site.path] += term.coefficient * float(np.prod([len(a) for a in term.axes]))
    parameters = {name for name, _ in model.named_parameters()}
    reached = set().union(*(p.seen for p in passes))
    return Graph(
        axes=axes,
        root=root,
        layers=layers,
        units=units,
        prunable=prunable,
        heads=heads,
        norms=[norm for p in passes for norm in p.norms],
        shapes=shapes,
        parameters=parameters,
        producers=producers,
        module_macs={path: round(m) for path, m in module_macs.items()},
        unused=sorted(parameters - reached),
        remembered=tuple(remembered),
        example=example,
        model_name=type(model).__name__,
        cost_of=CostModel(shapes, parameters, axes, root, terms),
    )


def _head_groups(heads: Sequence[Heads]) -> dict[int, set[str]]:
    places: dict[int, set[str]] = defaultdict(set)
    for site in heads:
        for group in site.classes.tolist():
            places[group].add(site.path)
    return places


def _filling(axes: AxisTable, root: Labels) -> list[int]:
    """Classes that occupy every index of some axis: removing one would leave nothing there."""
    found = []
    for axis in axes.axes:
        ids = root[axis.base : axis.base + axis.size]
        if (ids == ids[0]).all():
            found.append(int(ids[0]))
    return found


def _layers(
    axes: AxisTable,
    root: Labels,
    paths: dict[int, list[str]],
    kinds: dict[int, str],
    order: dict[int, int],
    prunable: np.ndarray[tuple[int], np.dtype[np.bool_]],
    reasons: dict[int, str],
    blocked: dict[str, str],
) -> list[Layer]:
    """Groups that touch the same axes, in order of execution; frozen and free ones apart."""
    owner = np.zeros(len(root), np.int64)
    for i, axis in enumerate(axes.axes):
        owner[axis.base : axis.base + axis.size] = i
    # Pairs as single numbers sort many times faster than rows.
    keys = np.sort(root[1:] * len(axes.axes) + owner[1:])
    keys = keys[np.flatnonzero(np.diff(keys, prepend=-1))]
    pairs = np.stack(np.divmod(keys, len(axes.axes)), 1)
    touched: dict[int, tuple[int, ...]] = {}
    for part in np.split(pairs, np.flatnonzero(np.diff(pairs[:, 0])) + 1):
        touched[int(part[0, 0])] = tuple(part[:, 1].tolist())
    families: dict[tuple[tuple[int, ...], bool, str | None], list[int]] = defaultdict(list)
    for group in sorted(kinds, key=lambda g: (order[g], g)):
        free = bool(prunable[group])
        families[touched[group], free, None if free else reasons.get(group)].append(group)
    layers = []
    names: dict[str, int] = defaultdict(int)
    for (_, free, reason), members in families.items():
        own = tuple(dict.fromkeys(path for path in paths[members[0]]))
        name = own[0] or "(forward)"
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        if free and name in blocked:
            prunable[members] = False
            free, reason = False, blocked[name]
        layers.append(Layer(name, kinds[members[0]], own, np.array(sorted(members)), free, reason))
    return layers
