"""Residual branches: parts of a model whose result is only added to what they read, so that they can leave whole.

A branch is found by where its numbers go, not by the class of a module: in `y = x + branch(x)` everything between `x`
and the addition that nothing else reads. Without it, `y` is `x`.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Literal

import numpy as np
from torch import nn

from secateur.ops.activation import Identity
from secateur.ops.elementwise import Sum
from secateur.ops.layers import Labels, Mask
from secateur.ops.pool import Spatial
from secateur.ops.shape import Move
from secateur.ops.table import Site
from secateur.running.copies import named_modules
from secateur.structure.dataflow import DataFlow, Visit
from secateur.structure.findings import Axis, Findings

#: What stands in for a module returns: what it was given, a zero that fits what it is added to, zeros of the shape of
#: what it was given, zeros that may be written to, or None.
Returns = Literal["input", "zero", "zeros", "own zeros", "nothing"]


@dataclass(frozen=True)
class StandIn:
    """What takes the place of a module: what it returns, of which argument (a position or a name).

    `place` is empty for a tensor; for a tuple, the position of the tensor in it and the length.
    """

    path: str
    returns: Returns
    argument: str = ""
    place: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Block:
    """A residual branch as one unit. `group` is its number among the groups of the graph.

    `site` is the addition, `operand` which of its two terms is the branch. `groups` are those that leave with the
    block, blocks inside it included. `last` are the calls whose units make the branch's output: their scores add up to
    the block's. `stand_ins` replace its modules; `parameters` (buffers too) are gone then.
    """

    name: str
    group: int
    site: Site
    operand: int
    paths: tuple[str, ...]
    groups: Labels
    units: int
    last: tuple[Site, ...]
    sites: frozenset[Site]
    parameters: frozenset[str]
    macs: int
    stand_ins: tuple[StandIn, ...]
    reason: str | None = None

    @property
    def prunable(self) -> bool:
        """Whether it may leave."""
        return self.reason is None

    @property
    def family(self) -> str:
        """The same for blocks whose paths differ in numbers only."""
        return f"block {pattern(self.name)}"

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether the block, any layer in it, or a module around one fits any wildcard."""
        return any(fits(path, patterns) for path in (self.name, *self.paths))

    def within(self, patterns: Sequence[str]) -> bool:
        """Whether the block, or all its layers, fit a wildcard."""
        return fits(self.name, patterns) or all(fits(path, patterns) for path in self.paths)


@dataclass(frozen=True)
class Passage:
    """A module that returns its input if all these blocks (by their groups) leave: a layer with several branches."""

    blocks: frozenset[int]
    stand_in: StandIn


@dataclass(frozen=True)
class Blocks:
    """All residual branches of a model, in order of execution: `for block in graph.blocks`."""

    found: tuple[Block, ...] = ()
    passages: tuple[Passage, ...] = ()

    def __iter__(self) -> Iterator[Block]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def prunable(self) -> list[Block]:
        """Those that may leave."""
        return [block for block in self.found if block.prunable]

    def frozen(self, reasons: Mapping[str, str]) -> Blocks:
        """The same, but those that `reasons` names must stay."""
        stay = {block.group for block in self.found if block.name in reasons}
        found = [b if b.group not in stay or b.reason else replace(b, reason=reasons[b.name]) for b in self.found]
        return Blocks(tuple(found), tuple(p for p in self.passages if not p.blocks & stay))

    def gone(self, removed: Mask) -> list[Block]:
        """Those that leave, of the groups that leave. None of them lies in another."""
        marked = [block for block in self.found if removed[block.group]]
        inner = {int(group) for block in marked for group in block.groups}
        return [block for block in marked if block.group not in inner]

    def closed(self, removed: Mask) -> Mask:
        """The groups that leave, with all that leave because they lie in a block that does."""
        removed = removed.copy()
        for block in self.found:
            if removed[block.group]:
                removed[block.groups] = True
        return removed

    def filled(self, axes: Iterable[Axis], root: Labels, units: Labels, prunable: Mask) -> Blocks:
        """With the groups that lie in each block: those all of whose parameters do."""
        owned: dict[str, list[Labels]] = {}
        for axis in axes:
            if axis.parameter:
                owned.setdefault(axis.parameter, []).append(root[axis.span])
        total = np.bincount(np.concatenate([np.zeros(0, np.int64), *chain(*owned.values())]), minlength=len(root))
        found = []
        for block in self.found:
            own = [groups for name in block.parameters for groups in owned.get(name, ())]
            groups, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *own]), return_counts=True)
            groups = groups[(counts == total[groups]) & (units[groups] > 0)]
            inner = [b.group for b in self.found if b.sites < block.sites]
            leave = np.concatenate([groups, np.array(inner, np.int64)])
            found.append(replace(block, groups=leave, units=int(units[groups[prunable[groups]]].sum())))
        return Blocks(tuple(found), self.passages)

    def stand_ins(self, gone: Iterable[Block]) -> list[StandIn]:
        """What replaces which module once these blocks are gone. No two lie in each other."""
        gone = list(gone)
        whole = [p.stand_in for p in self.passages if p.blocks <= {block.group for block in gone}]
        parts = [item for block in gone for item in block.stand_ins]
        outer: list[StandIn] = []
        for item in sorted([*whole, *parts], key=lambda item: item.path.count(".")):
            if not any(within(item.path, known.path) for known in outer):
                outer.append(item)
        return outer


def pattern(path: str) -> str:
    """A path without its numbers: what blocks of one kind, which share their code, have in common."""
    return re.sub(r"\d+", "*", path)


def fits(path: str, patterns: Sequence[str]) -> bool:
    """Whether a module, or one that it is part of, fits any wildcard."""
    return any(fnmatch.fnmatchcase(path, p) or fnmatch.fnmatchcase(path, f"{p}.*") for p in patterns)


def within(path: str, outer: str) -> bool:
    """Whether a module, or a parameter, lies in another module or is that module."""
    return path == outer or path.startswith(f"{outer}.")


def _around(path: str) -> Iterator[str]:
    """A module and all modules that it lies in."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def find_blocks(flow: DataFlow, found: Findings, model: nn.Module) -> Blocks:
    """The residual branches that have layers. Each gets a label of its own, after all others."""
    macs: dict[Site, float] = {}
    for term in found.macs:
        macs[term.site] = macs.get(term.site, 0) + term.total
    makers = {site for producer in found.producers.values() for site in producer.sites}
    branches = [branch for branch in _branches(flow) if any(flow.nodes[n].site in makers for n in branch.region)]
    search = _Search(flow, macs, makers, _owners(model))
    made = [search.block(branch, found.axes.add(1).base) for branch in branches]
    passages, merged = [], {block.group: block for block in made}
    for passage, parameters in search.passages(branches, made):
        (first, *others) = passage.blocks
        if not others:  # the whole module is the branch
            whole, reason = (passage.stand_in,), search.lends([passage.stand_in.path])
            merged[first] = replace(merged[first], stand_ins=whole, parameters=parameters, reason=reason)
        elif all(merged[group].prunable for group in passage.blocks):
            gone: frozenset[str] = frozenset().union(*(merged[group].parameters for group in passage.blocks))
            passages += [passage] if parameters <= gone else []
    return Blocks(tuple(_named(merged.values())), tuple(passages))


def _named(blocks: Collection[Block]) -> Iterator[Block]:
    """With names: the module around all parts of a block, if it has no other block, or else its largest part."""
    known: set[str] = set()
    counts = Counter(path for block in blocks for path in _around(block.site.path))
    for block in blocks:
        parts = [path.split(".") for path in (block.site.path, *(item.path for item in block.stand_ins))]
        shared = takewhile(lambda words: len(set(words)) == 1, zip(*parts, strict=False))
        around, name = ".".join(words[0] for words in shared), block.name
        if around and counts[around] == 1:
            name = around
        name = f"{name}#{block.group}" if name in known else name
        known.add(name)
        yield replace(block, name=name)


@dataclass(frozen=True)
class _Branch:
    """An addition, its stream and its branch, as numbers of a `DataFlow`; `region` are the calls of the branch."""

    node: int
    operand: int
    stream: int
    value: int
    region: frozenset[int]


def _branches(flow: DataFlow) -> Iterator[_Branch]:
    for number, node in enumerate(flow.nodes):
        if not isinstance(node.operation, Sum) or node.operation.reflected or len(node.inputs) != 2:
            continue
        if len({flow.shapes[value] for value in (*node.inputs, node.outputs[0])}) > 1:
            continue
        for operand in (0, 1):
            stream, value = node.inputs[1 - operand], node.inputs[operand]
            if stream == value or (operand == 0 and node.scale != 1):  # the stream must pass unchanged
                continue
            region = _region(flow, number, stream, value)
            if any(stream in flow.nodes[n].inputs for n in region):
                yield _Branch(number, operand, stream, value, region)


def _region(flow: DataFlow, add: int, stream: int, value: int) -> frozenset[int]:
    """The calls after the stream was made whose results reach the model's output by the branch's end alone."""
    last, region = flow.maker[value], {add}
    if last < 0 or flow.readers[value] != [add]:
        return frozenset()
    for number in range(add - 1, flow.maker[stream], -1):
        made = flow.nodes[number].outputs
        if flow.ends.isdisjoint(made) and all(reader in region for out in made for reader in flow.readers[out]):
            region.add(number)
    return frozenset(region - {add}) if last in region else frozenset()


def _owners(model: nn.Module) -> dict[str, set[str]]:
    """By name of a parameter or buffer, as it is first met: the modules that hold it, by all their names."""
    names: dict[int, str] = {}
    owners: dict[str, set[str]] = {}
    modules = named_modules(model)
    for path, module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                own = names.setdefault(id(tensor), f"{path}.{name}" if path else name)
                owners.setdefault(own, set()).add(path)
    first = {id(module): path for path, module in modules}
    for path, module in modules:
        for name, child in module._modules.items():
            other = f"{path}.{name}" if path else name
            if child is not None and first[id(child)] != other:
                for own in (own for own in owners if within(own, first[id(child)])):
                    owners[own].add(other)
    return owners


class _Search:
    """Finds what must be replaced for a branch to vanish."""

    def __init__(
        self, flow: DataFlow, macs: Mapping[Site, float], makers: Collection[Site], owners: Mapping[str, set[str]]
    ) -> None:
        self.flow, self.macs, self.makers, self.owners = flow, macs, makers, owners
        self._under: dict[str, set[str]] = {}
        for name, holders in owners.items():
            for path in (outer for holder in holders for outer in _around(holder)):
                self._under.setdefault(path, set()).add(name)
        self._tied = [name for name, holders in owners.items() if len(holders) > 1]
        ordered = sorted(flow.visits.items(), key=lambda item: item[0].count("."))
        calls = [(path, [n for visit in visits for n in range(visit.begin, visit.end)]) for path, visits in ordered]
        self._calls = [(path, numbers) for path, numbers in calls if path and numbers]

    def block(self, branch: _Branch, group: int) -> Block:
        """The block of a branch. Its groups are not known yet."""
        flow = self.flow
        hollow = self._hollow(branch.region)
        inside = {n for path in hollow for visit in flow.visits[path] for n in range(visit.begin, visit.end)}
        sites = {flow.nodes[n].site for n in branch.region}
        outside = {flow.nodes[n].site for n in branch.region - inside}
        reason, stand_ins = self.lends(hollow), []
        left = next((site for site in outside if self.macs.get(site)), None)
        if left is not None:
            reason = f"{left} is a part of the branch and of no module that lies in it"
        for path in hollow if reason is None else ():
            item = self._stand_in(branch, path, inside)
            if item is None:
                reason = f"what stands in for `{path}` would not know what to return"
                break
            stand_ins.append(item)
        weights = {path: self._macs_in(path) for path in hollow}
        name = max(weights, key=lambda path: weights[path], default=flow.nodes[branch.node].site.path)
        return Block(
            name=name,
            group=group,
            site=flow.nodes[branch.node].site,
            operand=branch.operand,
            paths=tuple(sorted({site.path for site in sites & set(self.makers)})),
            groups=np.zeros(0, np.int64),
            units=0,
            last=tuple(self._last(branch)),
            sites=frozenset(sites),
            parameters=self.owned(hollow),
            macs=round(sum(self.macs.get(site, 0) for site in sites)),
            stand_ins=tuple(stand_ins),
            reason=reason,
        )

    def owned(self, paths: Sequence[str]) -> frozenset[str]:
        """Parameters and buffers that no other module holds."""
        names = set[str]().union(*(self._under.get(path, ()) for path in paths))
        return frozenset(
            name for name in names if all(not set(_around(holder)).isdisjoint(paths) for holder in self.owners[name])
        )

    def lends(self, paths: Sequence[str]) -> str | None:
        """Why modules must stay: others use a parameter that plans call by its name in them."""
        names = [name for name in self._tied if any(within(name, path) for path in paths)]
        lent = sorted(set(names) - self.owned(paths)) if names else []
        return f"a module outside it shares `{lent[0]}`" if lent else None

    def _macs_in(self, path: str) -> float:
        return sum(
            self.macs.get(self.flow.nodes[n].site, 0)
            for visit in self.flow.visits[path]
            for n in range(visit.begin, visit.end)
        )

    def _hollow(self, region: frozenset[int]) -> list[str]:
        """The outermost modules that run for the branch alone."""
        found: list[str] = []
        for path, calls in self._calls:
            if calls[0] in region and region.issuperset(calls) and not any(within(path, outer) for outer in found):
                found.append(path)
        return found

    def _stand_in(self, branch: _Branch, path: str, inside: Collection[int]) -> StandIn | None:
        """What takes a module's place: it returns its input where only other such modules read that, and zeros else."""
        items = {self._one(branch, visit, path, inside) for visit in self.flow.visits[path] if visit.begin < visit.end}
        return items.pop() if len(items) == 1 else None

    def _one(self, branch: _Branch, visit: Visit, path: str, inside: Collection[int]) -> StandIn | None:
        flow = self.flow
        read = [(i, v) for i, v in enumerate(visit.returned) if v is not None and flow.readers[v]]
        if len(read) > 1:
            return None
        place = (read[0][0] if read else 0, len(visit.returned))
        readers = flow.readers[read[0][1]] if read else []
        outer = [n for n in readers if n not in inside]
        keys = [key for key, value in visit.given if value == branch.stream or flow.maker[value] in branch.region]
        if not keys:
            return None if outer else StandIn(path, "nothing", place=() if visit.plain else place)
        returns: Returns = "input" if not outer else "zero" if set(outer) == {branch.node} else "zeros"
        if any(flow.nodes[n].writes and flow.nodes[n].inputs[0] == read[0][1] for n in outer):
            returns = "own zeros"
        return StandIn(path, returns, str(keys[0]), () if visit.plain else place)

    def _last(self, branch: _Branch) -> Iterator[Site]:
        """The calls that make units from which no other such call lies on the way to the branch's end."""
        waiting, seen = [branch.value], {branch.value}
        while waiting:
            number = self.flow.maker[waiting.pop()]
            if number not in branch.region:
                continue
            node = self.flow.nodes[number]
            if node.site in self.makers:
                yield node.site
                continue
            waiting += [value for value in node.inputs if value not in seen]
            seen.update(node.inputs)

    # -- modules that return their input -----------------------------------------------------------------------------
    def passages(
        self, branches: Sequence[_Branch], blocks: Sequence[Block]
    ) -> Iterator[tuple[Passage, frozenset[str]]]:
        """Modules that add branches to their input and return that, with the parameters and buffers in them."""
        adds = {self.flow.nodes[b.node].outputs[0]: (b, block) for b, block in zip(branches, blocks, strict=True)}
        for path in dict.fromkeys(block.site.path for block in blocks):
            visits = self.flow.visits.get(path, [])
            if path and len(visits) == 1:
                found = self._passage(path, visits[0], adds)
                if found is not None:
                    yield found, self.owned([path])

    def _passage(self, path: str, visit: Visit, adds: Mapping[int, tuple[_Branch, Block]]) -> Passage | None:
        flow = self.flow
        read = [(i, v) for i, v in enumerate(visit.returned) if v is not None and (flow.readers[v] or v in flow.ends)]
        if len(read) != 1:
            return None
        value, blocks, rectified = read[0][1], set[int](), False
        leaving = {v for n in range(visit.begin, visit.end) for v in flow.nodes[n].outputs} - {value}
        if not flow.ends.isdisjoint(leaving) or any(n not in visit for v in leaving for n in flow.readers[v]):
            return None
        given = {v: key for key, v in reversed(visit.given)}
        while value not in given:
            maker = flow.maker[value]
            if maker in visit and value in adds:
                branch, block = adds[value]
                blocks.add(block.group)
                value = branch.stream
            elif maker in visit and flow.nodes[maker].operation.rectifies:
                rectified, value = True, flow.nodes[maker].inputs[0]
            else:
                return None
        if not blocks or (rectified and not self._positive(value)):
            return None
        place = () if visit.plain else (read[0][0], len(visit.returned))
        return Passage(frozenset(blocks), StandIn(path, "input", str(given[value]), place))

    def _positive(self, value: int) -> bool:
        """Whether a value is never below 0, so that a ReLU returns it as it is."""
        while (number := self.flow.maker[value]) >= 0:
            node = self.flow.nodes[number]
            if node.operation.rectifies:
                return True
            if not isinstance(node.operation, Spatial | Move | Identity):
                break
            value = node.inputs[0]
        return False
