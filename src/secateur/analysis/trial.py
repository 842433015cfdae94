"""Trial removals: units are removed from a copy without numbers, and its forward is compared with the whole model's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
from torch import nn

from secateur.analysis.reshapes import sized_calls
from secateur.ops.layers import Labels, Mask
from secateur.ops.table import Site
from secateur.plans.plan import plan_for
from secateur.running.copies import named_modules
from secateur.running.sandbox import Example, quiet, run
from secateur.structure.blocks import pattern
from secateur.structure.graph import Graph, Layer, RepeatedSize, families
from secateur.structure.trace import Comparison, Step, remade
from secateur.surgery.cut import cut_copy, is_conv1d
from secateur.surgery.written_sizes import name_of, resized_forward

Attributes = dict[tuple[str, str], RepeatedSize]
#: So many choices of attributes are tried at most, to find those that repeat the sizes of a layer.
_TRIES = 96


class OtherCalls(Exception):
    """The whole model does not make the calls again that it made: a cache that all copies share was filled by them."""


class Trial:
    """Removes units from a copy and runs it, to find sizes that are written into the forward.

    `blocked` has the layers that break it, with the reason; `repeated` the attributes that repeat a layer's size.
    """

    def __init__(
        self, copy: nn.Module, inputs: Example, steps: dict[Site, Step], thorough: bool = False, loose: bool = False
    ) -> None:
        """`steps`: what the forward of the whole copy did, until numbers steer it. `thorough`: sizes steer it.
        `loose`: numbers decide shapes."""
        self.copy, self.inputs, self.steps, self.thorough, self.loose = copy, inputs, steps, thorough, loose
        self.blocked: dict[str, str] = {}
        self.repeated: Attributes = {}
        self._sized: Attributes | None = None
        self._remade = remade(copy)

    @property
    def _known(self) -> int:
        return len(self.blocked) + len(self.repeated)

    def finds_more(self, graph: Graph, doubt: bool = False) -> bool:
        """Try some units of every layer at once. If layers break the forward, the rest must be tried again.

        `doubt`: before layers are blamed, see whether the whole model makes its own calls again.
        """
        before, layers = self._known, [layer for layer in graph.layers if layer.prunable]
        reason = self._breaks(graph, layers)
        if doubt and reason is not None and self._differs(graph, np.zeros_like(graph.prunable)) is not None:
            raise OtherCalls
        self._search(graph, layers, reason)
        return self._known > before

    def _breaks(self, graph: Graph, layers: list[Layer]) -> str | None:
        """Why these layers cannot shrink, or None."""
        found = (self._differs(graph, removed) for removed in _removals(graph, layers, self.thorough))
        return next((reason for reason in found if reason is not None), None)

    def _differs(self, graph: Graph, removed: Mask, changed: set[tuple[str, str]] | None = None) -> str | None:
        """Why a removal breaks the forward. `changed` gets the sizes in its code that would be wrong."""
        small = cut_copy(self.copy, plan_for(graph, removed, tuple(self.repeated.values())))
        resized = [(p, f) for p, m in named_modules(small) if (f := resized_forward(m))] if changed is not None else []
        for _, forward in resized:
            forward.changed = set()
        gone = removed[graph.root]
        gone[0] = False
        with quiet():
            try:
                with Comparison(small, self.steps, gone, self._remade, self.loose) as compared:
                    run(small, self.inputs)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                return f"a size is written into the forward ({text})"
            finally:
                if changed is not None:
                    changed.update((p, name_of(place)) for p, forward in resized for place in forward.changed or ())
        return compared.finish() if self.steps else None

    def _search(self, graph: Graph, layers: list[Layer], reason: str | None) -> None:
        """Find the layers that break the forward. Blocks of one kind share their code, so one speaks for all."""
        if reason is None:
            return
        kinds = families(layers)
        if len(kinds) == 1:
            if self._repeats(graph, layers) or self._resizes(graph, layers):
                return
            alone = reason if len(layers) == 1 else self._breaks(graph, layers[:1])
            if alone is not None:
                return self._block(layers, alone)
            kinds = [layers[: len(layers) // 2], layers[len(layers) // 2 :]]
        before = self._known
        for kind in kinds:
            self._search(graph, kind, self._breaks(graph, kind))
        if self._known == before:
            # Each is fine alone, together they are not: only the first kind may shrink.
            for kind in kinds[1:]:
                self._block(kind, reason)

    def _block(self, layers: list[Layer], reason: str) -> None:
        self.blocked.update({layer.name: reason for layer in layers})

    def _repeats(self, graph: Graph, layers: list[Layer]) -> bool:
        """Whether the forward runs once attributes that repeat the layers' sizes shrink too: those that it needs, no
        others. Blocks of one kind have the same attributes."""
        before = self.repeated
        kinds: dict[tuple[str, str], Attributes] = {}
        for item in _attributes(graph, self.copy, layers):
            if (item.path, item.name) not in before:
                kinds.setdefault((pattern(item.path), item.name), {})[item.path, item.name] = item
        sizes: dict[int, list[Attributes]] = {}
        for kind in kinds.values():
            sizes.setdefault(len(next(iter(kind.values())).labels), [{}]).append(kind)
        options = [[*known, _joined(known)] if len(known) > 2 else known for known in sizes.values()]
        runs: list[Attributes] = []
        if math.prod(map(len, options)) <= _TRIES:  # as few as possible: of each size none, one, or all
            choices = sorted(map(_joined, itertools.product(*options)), key=len)[1:]
            for _, equal in itertools.groupby(choices, key=len):
                runs = [chosen for chosen in equal if self._runs_with(graph, layers, before, [chosen])]
                if runs:
                    break
        if not runs and len(kinds) > 1:
            needed = dict(kinds)
            if self._runs_with(graph, layers, before, needed.values()):
                for key in kinds:
                    rest = {k: v for k, v in needed.items() if k != key}
                    if self._runs_with(graph, layers, before, rest.values()):
                        needed = rest
                runs = [_joined(needed.values())]
        # Two attributes of which either would do: nobody knows which one is the size.
        self.repeated = before | runs[0] if len(runs) == 1 else before
        return len(runs) == 1

    def _resizes(self, graph: Graph, layers: list[Layer]) -> bool:
        """Whether the forward runs once reshapes take the sizes that are left, those whose own would be wrong; if need
        be, with attributes that repeat sizes."""
        if self._sized is None:
            self._sized = sized_calls(self.copy, self.inputs, self.steps) if self.steps else {}
        before, changed = self.repeated, set[tuple[str, str]]()
        self.repeated = {**self._sized, **before}
        if self._sized and (self._breaks(graph, layers) is None or self._repeats(graph, layers)):
            for removed in _removals(graph, layers, self.thorough):
                self._differs(graph, removed, changed)
            needed = before.keys() | changed
            self.repeated = {k: v for k, v in self.repeated.items() if k in needed or k not in self._sized}
            if len(self.repeated) > len(before) and self._breaks(graph, layers) is None:
                return True
        self.repeated = before
        return False

    def _runs_with(self, graph: Graph, layers: list[Layer], before: Attributes, kinds: Iterable[Attributes]) -> bool:
        self.repeated = before | _joined(kinds)
        return self._breaks(graph, layers) is None


def _joined(kinds: Iterable[Attributes]) -> Attributes:
    return {key: item for kind in kinds for key, item in kind.items()}


def _attributes(graph: Graph, model: nn.Module, layers: list[Layer]) -> Iterator[RepeatedSize]:
    """Numbers kept by the user's own modules, around the layers, that equal a size that shrinks."""
    for layer in layers:
        for position in np.unique(graph.axis_of[graph.labels_of(int(layer.groups[0]))]).tolist():
            axis = graph.axes.axes[position]
            if axis.parameter:
                path, labels = axis.parameter.rpartition(".")[0], axis.labels.numpy()
                yield from _equal(model, path, labels)
                tied = np.unique(graph.root[labels])  # of parts that a split ties to each other, the size of one
                if 1 < len(tied) < len(labels):
                    yield from _equal(model, path, tied)
        for head in graph.heads:
            if np.isin(layer.groups, head.groups).any():
                yield from _equal(model, head.path, head.groups)


def _equal(model: nn.Module, path: str, labels: Labels) -> Iterator[RepeatedSize]:
    """Attributes of the module at `path` and of those around it that equal the number of these labels."""
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        path = ".".join(parts[:end])
        module = model.get_submodule(path)
        if type(module).__module__.startswith("torch.nn.") or is_conv1d(module):
            continue
        parents = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.")]
        known = {name for kind in parents for name in getattr(kind, "__constants__", ())}  # `cut` sets those
        for name, value in vars(module).items():
            if type(value) is int and value == len(labels) and name not in known:
                yield RepeatedSize(path, name, labels)


def _removals(graph: Graph, layers: list[Layer], thorough: bool) -> Iterator[Mask]:
    """Units of every layer to remove, never all. Each layer loses another share of them, so that sizes which must equal
    each other, or be multiples, are found. If layers are too small for that, they lose other numbers in a second trial.
    Those that still lose the same share lose it without each other. Thorough trials also remove one more, so that any
    remainder changes, and all but one, so that any limit is crossed.
    """
    ordered = sorted(layers, key=lambda layer: len(layer.groups))
    counts: list[int] = []
    shares: set[float] = set()
    for rank, layer in enumerate(ordered):
        size, heads = len(layer.groups), layer.kind == "head"
        # Code that divides a width by the number of heads may get the right one by chance if few are gone. A single
        # head is often a case of its own.
        most = max(1, size - 2) if heads else size
        count = min(1 + rank + size // (2 if heads else 8), most)
        while count < most and (size - count) / size in shares:
            count += 1
        counts.append(count)
        shares.add((size - count) / size)
    trials = [counts]
    if any(count >= max(2, len(layer.groups)) for count, layer in zip(counts, ordered, strict=True)):
        trials.append([1 + rank % 3 for rank in range(len(ordered))])
    for wanted in trials:
        yield _removal(graph, ordered, wanted)
    for staying in _apart(ordered, trials):
        yield _removal(graph, ordered, [0 if rank in staying else count for rank, count in enumerate(counts)])
    if thorough:
        yield _removal(graph, ordered, [count + 1 for count in counts])
        yield _removal(graph, ordered, [len(layer.groups) for layer in ordered])


def _apart(layers: list[Layer], trials: list[list[int]]) -> Iterator[set[int]]:
    """Which layers keep all units in further trials, by their place.

    Any two kinds of layers that lost the same share in all trials are seen without each other, and neighbours of one
    kind too. Kinds are numbered; each trial is a digit of these numbers in the binary system.
    """
    same: dict[tuple[float, ...], list[int]] = {}
    for rank, layer in enumerate(layers):
        size = len(layer.groups)
        same.setdefault(tuple(_possible(counts[rank], size) / size for counts in trials), []).append(rank)
    codes: dict[int, int] = {}
    for ranks in same.values():
        kinds: dict[str, list[int]] = {}
        for rank in ranks if len(ranks) > 1 else ():
            kinds.setdefault(layers[rank].family, []).append(rank)
        for number, kind in enumerate(kinds.values()):
            codes |= {rank: 2 * number + place % 2 for place, rank in enumerate(kind)}
    for digit in range(max(codes.values(), default=0).bit_length()):
        staying = {rank for rank, code in codes.items() if not code >> digit & 1}
        if len(staying) < len(codes):
            yield staying


def _possible(wanted: int, size: int) -> int:
    """How many units of a layer leave, if so many are wanted: never all."""
    return max(1, min(wanted, size - 1))


def _removal(graph: Graph, layers: list[Layer], counts: list[int]) -> Mask:
    removed = np.zeros(len(graph.root), np.bool_)
    for layer, wanted in zip(layers, counts, strict=True):
        count = _possible(wanted, len(layer.groups)) if wanted else 0
        begin = (len(layer.groups) - count + 1) // 2
        removed[layer.groups[begin : begin + count]] = True
    for axis in graph.axes.axes:  # small layers may be split among several; none may be emptied
        groups = graph.root[axis.span]
        if removed[groups].all():
            removed[groups[0]] = False
    for item in graph.requirements:
        groups = graph.root[item.labels]
        gone = int(np.count_nonzero(removed[groups]))
        missing = -(len(groups) - gone) % item.multiple
        least = max(item.least, len(groups) - gone + missing) if missing < gone else item.least
        while np.count_nonzero(~removed[groups]) < least:
            removed[groups[np.flatnonzero(removed[groups])[0]]] = False
    return removed
