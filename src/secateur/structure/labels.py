"""The labels of the tensors of a forward pass, and what becomes of them in every operation.

Each tensor carries *layers*. A layer is a tensor of labels of the same shape; the label at a position says which unit
the number there belongs to, 0 that it belongs to none. Where a layer does not depend on a dimension it has stride 0
there, so layers are cheap. Data movement is applied to the layers themselves, and is therefore right by construction. A
tensor has more than one layer where two kinds of units cross in it, as channels and tokens do in a mixer.

A negative label says that the number may differ from 0 although its unit is masked: after `exp`, `sigmoid`, `x + 1`. A
sum over such units would count them in the masked model, and not in the smaller one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.nest import map_leaves, tensors_in
from secateur.ops.activation import Unary
from secateur.ops.elementwise import free
from secateur.ops.layers import Labels, Layers, column, compact, head, is_zero, lost, narrow, spread, varying
from secateur.ops.protocols import Zero, never
from secateur.ops.shape import Move, Repeat
from secateur.ops.table import Call, Site
from secateur.running.heads import reads_heads
from secateur.running.tensor_facts import TensorFacts
from secateur.structure.choices import Choices
from secateur.structure.findings import Findings, NormSite


class NeedsNumbers(Exception):
    """Labels are moved by computed positions, which a copy without numbers does not have."""


class TensorLabels:
    """The labels of each tensor of a forward pass, and the words in which operations say what becomes of them."""

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], tensors: Sequence[tuple[str, Tensor]], found: Findings
    ) -> None:
        """`modules` and `tensors` are those of the model, by name."""
        self.found = found
        self._layers = TensorFacts[Layers]()
        self._names = {id(tensor): name for name, tensor in tensors}
        self._weights, self._blank, self._void = TensorFacts[bool](), TensorFacts[frozenset[int]](), TensorFacts[bool]()
        self._own = [tensor for _, tensor in tensors]  # as long as these live, nothing else has their identity
        self._positive: set[int] = set()  # labels of axes, which live as long as what is found
        self._patches: dict[int, tuple[Tensor, dict[tuple[int, int], Tensor]]] = {}
        self._modules = {path or "the forward": module for path, module in modules}
        self._following = {path for path, module in modules if reads_heads(module)}
        # What needs no tensors, operations tell the findings at once.
        self.join, self.tie_rows, self.freeze, self.grid = found.join, found.tie_rows, found.freeze, found.grid
        self.cost, self.produce, self.attend, self.require = found.cost, found.produce, found.attend, found.require
        self.choices = Choices(found)
        self.share, self.choose, self.looks_up = self.choices.share, self.choices.choose, self.choices.looks_up

    def layers(self, tensor: Any) -> Layers:
        """The layers of a tensor; those of a parameter have one label per index of each dimension."""
        if not isinstance(tensor, Tensor):
            return []
        known = self._layers.get(tensor)
        if known is not None:
            return known
        name = self._names.get(id(tensor))
        if name is None:
            return []
        self.found.seen.add(name)
        sizes = [(dim, size) for dim, size in enumerate(tensor.shape) if size > 1]
        made = [spread(self.found.axes.of(name, dim, size).labels, dim, tensor.shape) for dim, size in sizes]
        self._layers[tensor] = made
        return made

    def set(self, tensor: Tensor, layers: Layers, compacted: bool = False) -> None:
        """Say what a tensor carries. `compacted`: layers have stride 0 wherever they do not vary."""
        kept = []
        for layer in layers:
            assert layer.shape == tensor.shape, (layer.shape, tensor.shape)
            layer = layer if compacted else compact(layer)
            if varying(layer):
                kept.append(layer)
            else:
                self.freeze(layer, f"a single unit is taken out by position in {self.found.where()}")
        self._layers[tensor] = kept

    def parameter(self, tensor: Any) -> str | None:
        """The name of a tensor if it is a parameter or buffer of the model."""
        return self._names.get(id(tensor))

    def is_weight(self, tensor: Any) -> bool:
        """Whether a tensor is a parameter or buffer, or computed from nothing else."""
        return id(tensor) in self._names or tensor in self._weights

    def add_weight(self, tensor: Tensor) -> None:
        """A tensor is a part of a weight, though data say which: the matrix of the expert that a router chose."""
        self._weights[tensor] = True

    def blank(self, tensor: Tensor, zero: bool = False) -> None:
        """A tensor has the same number everywhere."""
        self._blank[tensor] = frozenset(range(tensor.ndim))
        if zero:
            self._void[tensor] = True

    def is_void(self, tensor: Tensor) -> bool:
        """Whether a tensor was made of zeros, and nothing was written into it since."""
        return tensor in self._void and tensor in self._blank

    def overwritten(self, tensors: Sequence[Tensor]) -> None:
        """Tensors, and what they are views of, no longer have the same number everywhere."""
        for tensor in tensors:
            for old in (tensor, tensor._base):
                if old is not None:
                    self._blank.forget(old)

    def fits(self, tensor: Any) -> frozenset[int]:
        """The dimensions along which a tensor repeats one number, and was made to fit whatever it meets."""
        return self._blank.get(tensor) or frozenset()

    def bind(self, tensors: Sequence[Tensor], output: Tensor) -> None:
        """Tensors met: those that fitted anything are as large as what they met from now on. What they became fits."""
        blanks = [
            (tensor, dims, output.ndim - tensor.ndim)
            for tensor in tensors
            if (dims := self._blank.get(tensor)) is not None
        ]
        if not blanks:
            return
        met = {over[0]: column(layer) for layer in self.layers(output) if len(over := varying(layer)) == 1}
        for tensor, dims, offset in blanks:
            bound = {d for d in dims if d + offset in met and tensor.shape[d] > 1}
            self._layers[tensor] = [*self.layers(tensor), *(spread(met[d + offset], d, tensor.shape) for d in bound)]
            self._blank[tensor] = dims - bound
        apart = [
            {d + output.ndim - t.ndim for d, n in enumerate(t.shape) if n > 1 and d not in free(self, t)}
            for t in tensors
        ]
        taken = set().union(*apart, *(varying(layer) for layer in self.layers(output)))
        self._blank[output] = frozenset(range(output.ndim)) - taken

    def trace(self, call: Call, output: Any) -> None:
        """What is computed from parameters alone is a weight too. What is moved from a blank is blank. What is computed
        number by number from a tensor that was expanded fits as that does."""
        sources = call.tensors()
        if call.writes and sources:
            self._blank.forget(sources[0])
        if sources and all(id(source) in self._names or source in self._weights for source in sources):
            for tensor in tensors_in(output):
                self._weights[tensor] = True
        if sources and isinstance(call.operation, Unary) and (dims := free(self, sources[0])):
            for tensor in tensors_in(output):
                self._blank[tensor] = dims
        elif sources and isinstance(call.operation, Move) and (known := self._blank.get(sources[0])) is not None:
            whole = len(known) == sources[0].ndim and not self.layers(sources[0])
            for tensor in tensors_in(output) if whole else ():
                self.blank(tensor, self.is_void(sources[0]))
        elif sources and type(call.operation) is Repeat and not sources[0].is_floating_point():
            before = (1,) * output.ndim + tuple(sources[0].shape)  # positions, once for each unit that they point at
            self._blank[output] = frozenset(d for d, n in enumerate(output.shape) if n > 1 == before[d - output.ndim])

    def follows(self, sizes: Collection[int] = ()) -> bool:
        """Whether the module that runs computes places from its number of heads, which shrinks with them, or has some
        of these sizes as attributes, or modules in it do. Then trial removals tell whether those can shrink."""
        here = self.found.where()
        if here in self._following or not sizes:
            return here in self._following
        inner = (m for m in self._modules[here].children() if not type(m).__module__.startswith("torch.nn."))
        held = (value for module in (self._modules[here], *inner) for value in vars(module).values())
        return any(type(value) is int and value in sizes for value in held if value)

    def along(self, tensor: Tensor, dim: int) -> Labels | None:
        """The labels along one dimension; None if there are none. Layers that also vary elsewhere are tied first."""
        dim %= tensor.ndim
        name = self._names.get(id(tensor))
        if name is not None and tensor.shape[dim] > 1 and tensor not in self._layers:  # a parameter, as it is
            if name not in self.found.seen:  # labels are numbered as `layers` would
                self.found.seen.add(name)
                for place, size in enumerate(tensor.shape):
                    if size > 1:
                        self.found.axes.of(name, place, size)
            line = self.found.axes.of(name, dim, tensor.shape[dim]).numbers
            self._positive.add(id(line))
            return line
        found: Labels | None = None
        for layer in self.layers(tensor):
            if dim not in varying(layer):
                continue
            layer = self.tied(layer, [d for d in varying(layer) if d != dim])
            line = column(layer)
            if found is not None:
                self.join(found, line)
            found = line
        return found

    def others(self, tensor: Tensor, dims: Sequence[int]) -> Layers:
        """The layers that do not vary along any of `dims`."""
        wanted = {d % tensor.ndim for d in dims}
        return [layer for layer in self.layers(tensor) if not wanted & set(varying(layer))]

    def virtual(self, size: int) -> Labels:
        """Labels for channels that no parameter axis numbers one by one."""
        return self.found.axes.add(size).labels.numpy()

    def tied(self, layer: Tensor, dims: Sequence[int]) -> Tensor:
        """The layer after tying its labels along `dims`, which it then no longer varies over."""
        if not dims:
            return layer
        small = narrow(layer)
        rest = [d for d in range(small.ndim) if d not in dims]
        rows = small.permute(*rest, *dims).reshape(int(np.prod([small.shape[d] for d in rest])), -1)
        self.tie_rows(rows.numpy())
        heads = head(small, dims)
        if not is_zero(small):
            heads = torch.where(small.amin(tuple(dims), keepdim=True) < 0, -heads.abs(), heads)
        return heads.expand(layer.shape)

    def freeze_tensor(self, tensor: Any, reason: str) -> None:
        """Everything a tensor carries can never leave."""
        for layer in self.layers(tensor):
            self.freeze(layer, reason)

    def mixes(self, tensor: Tensor, dims: Sequence[int], site: Site) -> None:
        """A norm over `dims` in which units take part: the masked reference must leave out what was removed."""
        for layer in self.layers(tensor):
            over = varying(layer)
            if set(over) <= set(dims):
                self.found.norms.append(NormSite(site, narrow(layer).abs()))
            elif set(over) & set(dims):
                self.grid(layer, f"{site} mixes a part of it", rigid=[d for d in over if d in dims])

    def sums(self, tensor: Tensor, dims: Sequence[int], site: Site) -> None:
        """A sum over `dims`, in which zeros do not count: units that are not 0 when they are masked cannot leave."""
        for layer in self.layers(tensor):
            summed = [d for d in varying(layer) if d in dims]
            if summed and not is_zero(layer):
                self.grid(layer, f"summed by {site} although it is not 0 when it is masked", rigid=summed)

    def move(self, call: Call, output: Any, dropped: Sequence[int] = ()) -> None:
        """Data movement: do to the labels what the call does to the numbers. The first tensor is what moves.

        Labels along dimensions in `dropped` end here.
        """
        source = call.tensors()[0]
        if any(t.is_meta and not t.is_floating_point() for t in call.tensors()[1:]):
            raise NeedsNumbers(str(call.site))

        def moved(layer: Tensor) -> Any:
            layer = layer.clone() if call.writes else layer

            def beside(leaf: Any) -> Any:  # indices lie where the model is, labels do not
                if isinstance(leaf, Tensor) and leaf.device != layer.device and not leaf.is_meta:
                    return leaf.to(layer.device)
                return leaf

            args, kwargs = map_leaves(lambda leaf: layer if leaf is source else beside(leaf), (call.args, call.kwargs))
            return call.function(*args, **kwargs)

        results = [moved(layer) for layer in self.layers(source) if not {*varying(layer)} & {*dropped}]
        for i, tensor in enumerate(tensors_in(output)):
            self.set(tensor, [tensors_in(result)[i] for result in results])

    def patch(self, base: Tensor, dim: int, part: Tensor, source: Tensor) -> list[Tensor] | None:
        """A part of an empty tensor is written. The parts in their order along `dim`, once all are known."""
        known = self._patches.setdefault(id(base), (base, {}))[1]
        known[dim, int(part.storage_offset() - base.storage_offset()) // base.stride(dim)] = source
        at = 0
        for (along, begin), piece in sorted(known.items(), key=lambda item: item[0]):
            if (along, begin) != (dim, at):
                return None
            at += piece.shape[dim]
        if at < base.shape[dim]:
            return None
        self._patches.pop(id(base))
        self._blank.forget(base)
        return [known[key] for key in sorted(known)]

    def close(self) -> None:
        """The forward is over: what was written into a part of a tensor, of which the rest stayed empty, must stay."""
        for _, known in self._patches.values():
            for source in known.values():
                self.freeze_tensor(source, "it is written into a part of an empty tensor")
        self._patches.clear()

    def keep(self, source: Tensor, output: Tensor, zero: bool = True) -> None:
        """The output has the source's shape and its labels. `zero`: it is 0 where the source is."""
        layers = self.layers(source)
        self.set(output, layers if zero else [lost(layer) for layer in layers], compacted=True)

    def carry(self, source: Tensor, output: Tensor, mixed: Sequence[int], reason: str) -> None:
        """Same number of dimensions, other sizes along `mixed`: labels that vary there are frozen, the rest go on."""
        mixed = [d % source.ndim for d in mixed]
        kept = []
        for layer in self.layers(source):
            if set(varying(layer)) & set(mixed):
                self.freeze(layer, reason)
            else:
                kept.append(head(layer, mixed).expand(output.shape))
        self.set(output, kept)

    def merge(
        self, output: Tensor, operands: Sequence[tuple[Layers, Sequence[int]]], site: Site, zero: Zero = never
    ) -> None:
        """Pointwise arithmetic: labels that meet leave together.

        Each operand is its layers and its shape. A dimension along which an operand is broadcast asks nothing of it;
        one along which it is present but carries no label cannot shrink. `zero`: whether the output is 0 at a masked
        unit, given which operands are.
        """
        shape = tuple(output.shape)
        if self._merge_lines(output, operands, zero):
            return
        aligned = [[layer.expand(shape) for layer in layers] for layers, _ in operands]
        present = [_present(own, shape) for _, own in operands]
        for i, j in itertools.permutations(range(len(operands)), 2):
            # What stays for good across other units, as the weight of a norm inside each head, must not couple them.
            stay = [la for la in aligned[i] if _meet(self.found, la, aligned[j], present[j], site, first=i < j)]
            if stay and aligned[j]:
                aligned[i] = [layer for layer in aligned[i] if not any(layer is each for each in stay)]
        kept: dict[tuple[int, ...], Tensor] = {}
        zeros: dict[tuple[int, ...], list[bool]] = {}
        for i, layer in ((i, layer) for i, layers in enumerate(aligned) for layer in layers):
            over = tuple(varying(layer))
            kept.setdefault(over, layer)
            zeros.setdefault(over, [False] * len(operands))[i] = is_zero(layer)
        for over, layer in kept.items():
            if not zero(zeros[over]):
                kept[over] = lost(layer)
            elif not zeros[over][0]:
                kept[over] = narrow(layer).abs().expand(shape)
        self.set(output, list(kept.values()))

    def _merge_lines(self, output: Tensor, operands: Sequence[tuple[Layers, Sequence[int]]], zero: Zero) -> bool:
        """`merge`, if each operand carries one line of labels, all along one dimension: sums, batch norms."""
        single = [layers[0] for layers, _ in operands if len(layers) == 1]
        overs = [[d - layer.ndim for d in varying(layer)] for layer in single]
        if len(single) < len(operands) or any(over != overs[0] for over in overs) or not overs or len(overs[0]) != 1:
            return False
        if any(own[overs[0][0]] != output.shape[overs[0][0]] for _, own in operands):
            return False
        self._met(output, single[0], [column(layer) for layer in single], zero)
        return True

    def _met(self, output: Tensor, layer: Tensor, lines: Sequence[Labels], zero: Zero) -> None:
        for line in lines[1:]:
            self.join(lines[0], line)
        zeros = [id(line) in self._positive or bool(line.min() >= 0) for line in lines]
        if not zero(zeros):
            layer = lost(layer)
        elif not zeros[0]:
            layer = narrow(layer).abs()
        self.set(output, [layer if layer.shape == output.shape else layer.expand(output.shape)], compacted=True)

    def meets_lines(self, source: Tensor, dim: int, lines: Sequence[Labels | None], output: Tensor, zero: Zero) -> bool:
        """`merge` of a tensor with lines of labels along `dim`; False if it carries anything but one line there."""
        layers, stride = self.layers(source), source.stride(dim)
        if len(layers) != 1 or varying(layers[0]) != [dim] or not stride or self.fits(source):
            return False
        own = column(layers[0])
        if any(line is None or len(line) != len(own) for line in lines):
            return False
        self._met(output, layers[0], [own, *(line for line in lines if line is not None)], zero)
        return True

    def match(self, layer: Tensor, rival: Tensor, dim: int, site: Site) -> None:
        """A layer of one tensor against another tensor joined to it along `dim`, which the layer does not vary over."""
        over, reason = varying(layer), f"joined by {site} to a tensor whose size is fixed"
        partners = [r for r in self.layers(rival) if set(varying(r)) & set(over)]
        for partner in partners:
            if dim not in varying(partner):
                _pair(self.found, head(layer, [dim]), head(partner, [dim]))
            elif len(over) == 1:
                self.found.grid(partner, reason, joins=[(over[0], column(layer))])
            else:
                self.freeze(layer, reason)
        if not partners:
            self.grid(layer, reason, rigid=over)


def _meet(found: Findings, layer: Tensor, rivals: Layers, present: frozenset[int], site: Site, first: bool) -> bool:
    """One layer of one operand against everything another operand carries. Whether that freezes a line of labels."""
    dims = set(varying(layer))
    shared = dims & present
    if not shared:
        return False
    partners = [(over, rival) for rival in rivals if dims.intersection(over := varying(rival))]
    # A single line of labels meets each line of a grid. If the grid is cut the other way, as heads that meet a rotary
    # factor are, that asks nothing of them.
    lines = [(over[0], column(rival)) for over, rival in partners if len(over) == 1 < len(dims)]
    if first and shared == dims:
        for over, rival in partners:
            if (len(over) > 1) == (len(dims) > 1):
                _pair(found, layer, rival)
    labelled = {d for over, _ in partners for d in over} if shared == dims else {d for d, _ in lines}
    if lines or shared - labelled:
        found.grid(layer, f"combined by {site} with a tensor whose size is fixed", sorted(shared - labelled), lines)
    return len(dims) == 1 and not labelled


def _pair(found: Findings, a: Tensor, b: Tensor) -> None:
    index = tuple(
        slice(0, 1) if (sa == 0 and sb == 0) or size == 1 else slice(None)
        for sa, sb, size in zip(a.stride(), b.stride(), a.shape, strict=True)
    )
    found.join(a[index].reshape(-1).numpy(), b[index].reshape(-1).numpy())


def _present(own: Sequence[int], shape: tuple[int, ...]) -> frozenset[int]:
    offset = len(shape) - len(own)
    return frozenset(d for d in range(len(shape)) if d >= offset and own[d - offset] == shape[d] and shape[d] > 1)
