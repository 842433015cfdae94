"""What `analyze` learnt about a model: its groups of coupled units, what may leave, and what each layer costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from torch import nn

from secateur.nest import counts_of_samples
from secateur.ops.layers import Labels, Mask
from secateur.ops.table import Site
from secateur.running.copies import named_parameters, named_tensors
from secateur.running.sandbox import Example
from secateur.structure.blocks import Block, Blocks, fits, pattern
from secateur.structure.cost import Cost, CostModel, human
from secateur.structure.coupling import Coupling
from secateur.structure.findings import Axis, AxisTable, Findings, NormSite, Producer, Requirement


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
    """Groups that live in the same parameters: what a person calls a layer, or a residual stream of several.

    Its groups are all prunable, or none is, for one `reason`.
    """

    name: str
    kind: str
    paths: tuple[str, ...]
    groups: Labels
    prunable: bool
    reason: str | None

    @property
    def family(self) -> str:
        """The same for layers whose paths differ in numbers only. Of a long stream, its first two modules count."""
        return pattern("|".join((self.name, *self.paths[:2])))

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether any module of the layer, or one that it is part of, fits any wildcard."""
        return any(fits(path, patterns) for path in self.paths)

    def within(self, patterns: Sequence[str]) -> bool:
        """Whether every module of the layer, or one that it is part of, fits a wildcard."""
        return all(fits(path, patterns) for path in self.paths)


Part = TypeVar("Part", Layer, Block)


def families(layers: Iterable[Part], also: Callable[[Part], Any] = lambda layer: None) -> list[list[Part]]:
    """Layers, or blocks, of one family together: they share their code. `also`: what else must be equal."""
    found: dict[Any, list[Part]] = {}
    for layer in layers:
        found.setdefault((layer.family, also(layer)), []).append(layer)
    return list(found.values())


@dataclass(frozen=True)
class Heads:
    """An attention product inside a module, one group per head."""

    path: str
    groups: Labels


@dataclass(frozen=True, eq=False)
class RepeatedSize:
    """An attribute of the user's own module that is the number of these labels and must shrink with them.

    Or a size in the code of its forward (`surgery.written_sizes`). Then a row of `labels` has all labels at an index.
    """

    path: str
    name: str
    labels: Labels


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """The groups of a model. `print(graph)` shows them as a table; `graph.groups` lists them."""

    axes: AxisTable
    root: Labels
    layers: tuple[Layer, ...]
    units: Labels
    prunable: Mask
    heads: tuple[Heads, ...]
    norms: tuple[NormSite, ...]
    shapes: dict[str, tuple[int, ...]]
    parameters: frozenset[str]
    producers: tuple[Producer, ...]
    module_macs: dict[str, int]
    unused: tuple[str, ...]
    repeated: tuple[RepeatedSize, ...]
    requirements: tuple[Requirement, ...]
    example: Example
    output: tuple[str, ...]
    model_name: str
    cost_of: CostModel = field(repr=False)
    #: The residual branches as they were found. Which of them may leave, and together, `blocks` tells.
    branches: Blocks = field(default_factory=Blocks)
    #: Tries them out, if that is still to be done: it takes longer than many a plan, which seldom asks for blocks.
    trial: Callable[[Graph], Blocks] | None = field(default=None, repr=False)
    #: Whether the forward asks for neither sizes nor numbers, so that it makes the same calls for images of any size.
    steady: bool = False
    #: The kinds of modules if nothing in their code depends on how many units a layer has; else empty.
    plain: frozenset[type] = frozenset()

    # `root` maps each label to its group, a label itself; `units` and `prunable` are indexed by group.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"plain": frozenset()}  # what reads a file need not know the model's classes

    def frozen(self, reasons: Mapping[str, str]) -> Graph:
        """The same graph in which the layers and blocks that `reasons` names must stay, each with its reason."""
        layers, prunable = [], self.prunable.copy()
        for layer in self.layers:
            if layer.prunable and layer.name in reasons:
                layer = replace(layer, prunable=False, reason=reasons[layer.name])
                prunable[layer.groups] = False
            layers.append(layer)
        prunable.flags.writeable = False
        tried = "blocks" in vars(self)
        branches = (self.blocks if tried else self.branches).frozen(reasons)
        trial = None if tried else self.trial
        return replace(self, layers=tuple(layers), prunable=prunable, branches=branches, trial=trial)

    @cached_property
    def blocks(self) -> Blocks:
        """The residual branches, tried out."""
        return self.branches if self.trial is None else self.trial(self)

    @cached_property
    def cost(self) -> Cost:
        """Cost of the whole model for the example."""
        return self.cost_of(np.zeros(len(self.root), np.bool_))

    @cached_property
    def candidates(self) -> Labels:
        """The groups that may leave, in order of the layers that make them."""
        return np.concatenate([np.zeros(0, np.int64), *(layer.groups for layer in self.layers if layer.prunable)])

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
        return self.axes.owners

    def labels_of(self, group: int) -> Labels:
        """The labels in a group."""
        order, roots = self._by_group
        return order[np.searchsorted(roots, group) : np.searchsorted(roots, group, "right")]

    def members(self, group: int) -> tuple[Member, ...]:
        """The parameter slices that leave with a group."""
        found: dict[Axis, list[int]] = defaultdict(list)
        for label in self.labels_of(group).tolist():
            axis = self.axes.axes[self.axis_of[label]]
            found[axis].append(label - axis.base)
        return tuple(Member(axis.parameter, axis.dim, tuple(at)) for axis, at in found.items() if axis.parameter)

    @cached_property
    def groups(self) -> list[Group]:
        """Every group, prunable or not, in order of the layers."""
        return list(self)

    def __iter__(self) -> Iterator[Group]:
        for layer in self.layers:
            for group in layer.groups.tolist():
                units, members = int(self.units[group]), self.members(group)
                yield Group(group, layer.name, layer.kind, units, layer.prunable, layer.reason, members)

    def __len__(self) -> int:
        return sum(len(layer.groups) for layer in self.layers)

    @property
    def without_layers(self) -> str:
        """Why there is nothing in the table of a model without layers."""
        names = sorted(self.parameters)
        others = f"; other operations use {', '.join(names[:4])}{' …' if len(names) > 4 else ''}" if names else ""
        makers = "convolutions, linear layers, recurrent layers and embeddings"
        return f"units are made by {makers}, and the forward calls none{others}"

    @property
    def whole(self) -> list[str]:
        """Parameters that took part but hold nothing of any unit, so that they stay as they are."""
        made = np.zeros(len(self.root), np.bool_)
        for producer in self.producers:
            made[self.root[producer.labels]] = True
        held = {axis.parameter for axis in self.axes.axes if made[self.root[axis.span]].any()}
        numbered = {axis.parameter for axis in self.axes.axes}
        return sorted((numbered & self.parameters) - held)

    def __repr__(self) -> str:
        return f"<Graph of {self.model_name}: {len(self.layers)} layers, {self.total_units} units may leave>"

    def __str__(self) -> str:
        samples = set(counts_of_samples(self.example))
        batch = f" for the {max(samples)} samples of the example" if len(samples) == 1 and max(samples) > 1 else ""
        lines = [
            f"{self.model_name}: {self.cost}{batch}; {self.total_units} of {int(self.units.sum())} units in "
            f"{len(self.candidates)} of {len(self)} groups may leave",
            "",
        ]
        rows = [("layer", "kind", "groups", "units", "MACs", "prunable")]
        for layer in self.layers:
            macs = sum(self.module_macs.get(path, 0) for path in layer.paths)
            name = f"{layer.name} (+{len(layer.paths) - 1})" if len(layer.paths) > 1 else layer.name
            units = str(int(self.units[layer.groups].sum()))
            rows.append((name, layer.kind, str(len(layer.groups)), units, human(macs), layer.reason or "yes"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, kind, *counts, verdict in rows:
            numbers = [count.rjust(width) for count, width in zip(counts, widths[2:5], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), kind.ljust(widths[1]), *numbers, verdict]).rstrip())
        if not self.layers:
            lines = [lines[0], "", self.without_layers]
        if len(self.blocks):
            free = len(self.blocks.prunable)
            lines += ["", f"{free} of {len(self.blocks)} blocks (residual branches) may leave as a whole"]
            width = max(len(block.name) for block in self.blocks)
            lines += [f"{b.name.ljust(width)}  {human(b.macs):>8} MACs  {b.reason or 'yes'}" for b in self.blocks]
        if self.layers and self.whole:
            more = " …" if len(self.whole) > 8 else ""
            lines += ["", f"stay whole, since no layer makes units of them: {', '.join(self.whole[:8])}{more}"]
        if self.unused:
            more = " …" if len(self.unused) > 8 else ""
            lines += ["", f"not reached by the example: {', '.join(self.unused[:8])}{more}"]
        return "\n".join(lines)


def build(
    model: nn.Module,
    example: Example,
    passes: list[Findings],
    blocked: dict[str, str],
    repeated: Sequence[RepeatedSize],
    output: tuple[str, ...] = (),
    blocks: Blocks = Blocks(),  # noqa: B008 (frozen)
    trial: Callable[[Graph], Blocks] | None = None,
    steady: bool = False,
    plain: frozenset[type] = frozenset(),
) -> Graph:
    """Put together what the label passes found. `blocked` names layers that trial removals showed to be rigid."""
    main, axes = passes[0], passes[0].axes
    coupling = Coupling(axes.total, passes)
    root = coupling.root
    shapes = {n: tuple(t.shape) for n, t in named_tensors(model)}
    heads = tuple(Heads(site.path, root[labels]) for site, labels in main.heads)
    makers = Makers(passes, heads, root)
    prunable = (makers.first >= 0) & (coupling.why < 0)
    # Groups that occupy every index of some axis: removing one would leave nothing there.
    filling = _single(root, axes)
    filling = filling[prunable[filling]]
    prunable[filling] = False
    coupling.why[filling] = coupling.reason("the only unit of its layer, or all its units are coupled")
    layers = _layers(axes, coupling, makers, prunable, blocked)
    module_macs: dict[str, float] = defaultdict(float)
    for term in main.macs:
        module_macs[term.site.path] += term.total
    parameters = frozenset(name for name, _ in named_parameters(model))
    blocks = blocks.filled(axes.axes, root, makers.units, prunable)
    for array in (root, makers.units, prunable):
        array.flags.writeable = False
    return Graph(
        axes=axes,
        root=root,
        layers=tuple(layers),
        units=makers.units,
        prunable=prunable,
        heads=heads,
        norms=_norms(passes),
        shapes=shapes,
        parameters=parameters,
        producers=makers.producers,
        module_macs={path: round(m) for path, m in module_macs.items()},
        unused=tuple(sorted(parameters.difference(*(p.seen for p in passes)))),
        repeated=tuple(repeated),
        requirements=tuple(item for p in passes for item in p.requirements),
        example=example,
        output=output,
        model_name=type(model).__name__,
        cost_of=CostModel({name: shapes[name] for name in parameters}, root, main, blocks),
        branches=blocks,
        trial=trial,
        steady=steady,
        plain=plain,
    )


def _single(root: Labels, axes: AxisTable) -> Labels:
    """The groups of axes that have one only. The labels of axes follow each other, from 1."""
    begins = [axis.base for axis in axes.axes]
    if not begins:
        return np.zeros(0, np.int64)
    least, most = np.minimum.reduceat(root, begins), np.maximum.reduceat(root, begins)
    return np.asarray(least[least == most])


def _norms(passes: Sequence[Findings]) -> tuple[NormSite, ...]:
    """The norms of all passes, each once per site and as the first pass that met it saw it: shapes may differ."""
    known: dict[Site, int] = {}
    return tuple(n for i, p in enumerate(passes) for n in p.norms if known.setdefault(n.site, i) == i)


class Makers:
    """Which producers make each group, with how many units, without a Python loop over groups.

    `units` and `first` are indexed by group: how many units it has, and its first producer's number, or -1 for a group
    that nothing makes. What two passes saw counts once. A head is one unit at each place where it is used.
    """

    def __init__(self, passes: Sequence[Findings], heads: Sequence[Heads], root: Labels) -> None:
        known: dict[bytes, Producer] = {}
        for watched in passes:
            known |= {labels: made for labels, made in watched.producers.items() if labels not in known}
        self.producers = tuple(known.values())
        found = [np.unique(root[producer.labels], return_counts=True) for producer in self.producers]
        empty = np.zeros(0, np.int64)
        groups = np.concatenate([empty, *(ids for ids, _ in found)])
        self.units = np.zeros(len(root), np.int64)
        np.add.at(self.units, groups, np.concatenate([empty, *(counts for _, counts in found)]))
        order = np.argsort(groups, kind="stable")
        self._sorted = groups[order]
        self._numbers = np.repeat(np.arange(len(found)), [len(ids) for ids, _ in found])[order]
        begins = np.flatnonzero(np.diff(self._sorted, prepend=-1))
        self.first = np.full(len(root), -1, np.int64)
        self.first[self._sorted[begins]] = self._numbers[begins]
        self._places: dict[int, set[str]] = defaultdict(set)
        for site in heads:
            for group in site.groups[self.first[site.groups] >= 0].tolist():
                self._places[group].add(site.path)
                self.units[group] = len(self._places[group])

    def of(self, group: int) -> tuple[str, tuple[str, ...]]:
        """The kind of a group, and the modules that make it, in order of execution."""
        begin, end = np.searchsorted(self._sorted, group), np.searchsorted(self._sorted, group, "right")
        made = [self.producers[i] for i in self._numbers[begin:end].tolist()]
        kind = "head" if group in self._places else made[0].kind
        return kind, tuple(dict.fromkeys(site.path for producer in made for site in producer.sites))


def _layers(
    axes: AxisTable, coupling: Coupling, makers: Makers, prunable: Mask, blocked: Mapping[str, str]
) -> list[Layer]:
    """Groups that touch the same axes, in order of execution; frozen and free ones apart."""
    groups = np.flatnonzero(makers.first >= 0)
    groups = groups[np.argsort(makers.first[groups], kind="stable")]
    # A group is frozen for one reason, so this number tells free from frozen too.
    families = _touched(axes, coupling.root)[groups] * (len(coupling.reasons) + 1) + coupling.why[groups] + 1
    _, begins, family = np.unique(families, return_index=True, return_inverse=True)
    members = np.split(groups[np.argsort(family, kind="stable")], np.cumsum(np.bincount(family))[:-1])
    layers = []
    names: Counter[str] = Counter()
    for i in np.argsort(begins).tolist():
        first = int(members[i][0])
        kind, own = makers.of(first)
        name = own[0] or "(forward)"
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        reason = blocked.get(name) if prunable[first] else coupling.reasons[coupling.why[first]]
        if reason is not None:
            prunable[members[i]] = False
        layers.append(Layer(name, kind, own, np.sort(members[i]), reason is None, reason))
    return layers


def _touched(axes: AxisTable, root: Labels) -> Labels:
    """A number for each group: the same for two of them if and only if they touch the same axes."""
    count = len(axes.axes)
    # Pairs as single numbers sort many times faster than rows.
    keys = np.sort(root[1:] * count + axes.owners[1:], kind="stable")  # long runs are in order already
    ids, touched = np.divmod(keys[np.flatnonzero(np.diff(keys, prepend=-1))], max(count, 1))
    begins = np.flatnonzero(np.diff(ids, prepend=-1))
    lengths = np.diff(begins, append=len(ids))
    numbers = np.zeros(len(root), np.int64)
    # Neighbours mostly touch the same axes. Of a run of equal sets, Python looks at one.
    same = np.zeros(len(begins), np.bool_)
    same[1:] = lengths[1:] == lengths[:-1]
    before = np.repeat(begins - np.concatenate([[0], lengths[:-1]]), lengths) + _places_in(lengths)
    same &= np.logical_and.reduceat(touched == touched[np.clip(before, 0, None)], begins) if len(begins) else same
    heads, bounds, known = np.flatnonzero(~same), [*begins.tolist(), len(ids)], dict[bytes, int]()
    named = [known.setdefault(touched[bounds[i] : bounds[i + 1]].tobytes(), len(known)) for i in heads.tolist()]
    numbers[ids[begins]] = np.repeat(np.array(named, np.int64), np.diff(heads, append=len(begins)))
    return numbers


def _places_in(lengths: Labels) -> Labels:
    """0, 1, 2 … for each of these lengths."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
