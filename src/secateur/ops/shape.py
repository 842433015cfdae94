"""Data movement: reshaping, permuting, cutting, joining. Labels move the way the numbers do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.elementwise import free, operands_of
from secateur.ops.layers import column, head, is_zero, lost, narrow, spread, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs, never
from secateur.ops.table import (
    Call,
    Operation,
    Query,
    Readout,
    Rule,
    Ruled,
    SizeQuery,
    averages,
    moves,
    register,
    register_named,
    transforms,
    writes,
)


class Move(Ruled):
    """Every number keeps its meaning and only changes its place. The same is done to the labels."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        labels.move(call, output)


class Repeat(Move):
    """Expand, repeat, tile: copies of a unit are the unit."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        self.place(labels, call, output)
        for layer in labels.layers(output):
            if len(varying(layer)) > 1:
                labels.grid(layer, f"{call.site} lays units out over several dimensions")

    def place(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Put the labels where the numbers are. Copies of one slice may become fewer, as those of a state that heads
        share; what is only expanded fits anyway (see `free`), and positions follow what they point at."""
        labels.move(call, output)
        if not output.is_floating_point():
            return
        before = (1,) * output.ndim + tuple(call["input"].shape)
        made = [d for d, n in enumerate(output.shape) if n > 1 == before[d - output.ndim] and output.stride(d)]
        copies = [lost(spread(labels.virtual(output.shape[d]), d, output.shape)) for d in made]
        if copies:
            labels.set(output, [*labels.layers(output), *copies])


class Reshape(Repeat):
    """View, reshape, flatten, unflatten. A split dimension may only lose whole slices of one of its factors."""

    def place(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        layers = labels.layers(x) or self._copies(labels, x, output)
        labels.set(output, [layer.reshape(output.shape) for layer in layers])

    @staticmethod
    def _copies(labels: LabelVerbs, x: Tensor, output: Tensor) -> list[Tensor]:
        """Numbers that were expanded to fit something, and are copied now that dimensions are merged. They may become
        fewer, as a mask of groups of experts that is repeated for the members of a group."""
        expanded = [d for d, size in enumerate(x.shape) if size > 1 and not x.stride(d)]
        if len(expanded) != 1 or output.untyped_storage()._cdata == x.untyped_storage()._cdata:
            return []
        return [spread(labels.virtual(x.shape[expanded[0]]), expanded[0], x.shape)]


class Slice(Move):
    """Indexing by `[]`, `narrow`, `select`, `index_select`. Positions written into the code do not move when a unit
    before them leaves, so those are frozen."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        chosen = []
        for dim, item in _by_dimension(call, x.ndim):
            for layer in labels.layers(x):
                if varying(layer) == [dim] and labels.looks_up(column(layer), item, labels.is_weight(x)):
                    chosen.append(dim)
                elif dim in varying(layer):
                    _pin(labels, layer, dim, item, call)
        labels.move(call, output, chosen)
        if chosen and labels.is_weight(x) and output.ndim < x.ndim:  # the weight of one expert
            labels.add_weight(output)

    def counts(self, call: Call) -> bool:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in call.tensors()[1:])


class Split(Move):
    """Chunk, split, unbind: equal parts lose the same places; unequal ones are pinned."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, parts = call["input"], tensors_in(output)
        dim = call["dim"] % x.ndim
        sizes = {part.shape[dim] if part.ndim == x.ndim else 1 for part in parts}
        for layer in labels.layers(x):
            if dim not in varying(layer) or len(parts) == 1:
                continue
            if len(varying(layer)) > 1:
                labels.grid(layer, f"{call.site} cuts it at fixed places", rigid=[dim])
            elif len(sizes) == 1:
                labels.tie_rows(narrow(layer).reshape(len(parts), -1).numpy().T)
            elif labels.follows(sizes if isinstance(call.get("split_size_or_sections"), list | tuple) else ()):
                # Rotary embeddings read pairs of a part as complex numbers, for which its stride must be even.
                labels.require(column(layer), multiple=2 - x.shape[dim] % 2)
            else:
                labels.freeze(layer, f"{call.site} cuts it at fixed places")
        labels.move(call, output)


class _Joined(Operation):
    """Several tensors become one. Each gets the relevance that falls on it, constants (class tokens) included."""

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        tensors = [relevance.constant(t, call) for t in tensors_in(call["tensors"])]
        return relevance.moves(call.given(tensors, call["dim"]))


class Concat(_Joined):
    """Along a dimension of units, units queue up; along another, those in the same place leave together."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        tensors, dim = [t for t in tensors_in(call["tensors"]) if t.numel()], call["dim"] % output.ndim
        carried = [labels.layers(t) for t in tensors]
        if not any(carried):
            return
        if all(len(layers) == 1 and varying(layers[0]) == [dim] for layers in carried):  # lines of units, as always
            line = np.concatenate([column(layer) for (layer,) in carried])
            labels.set(output, [spread(line, dim, output.shape)], compacted=bool(line[0] != line[-1]))
            return
        owned = [{tuple(varying(la)): la for la in layers if dim in varying(la)} for layers in carried]
        pairs = list(zip(tensors, owned, strict=True))
        for kind, layer in [item for own in owned for item in own.items()]:
            for tensor, own in pairs:
                # One vector for all units, expanded: each copy belongs to the unit beside it.
                if kind not in own and len(kind) > 1 and {*kind} - {dim} <= free(labels, tensor):
                    own[kind] = head(layer, [dim]).expand(tensor.shape)
        common = [kind for kind in owned[0] if all(kind in own for own in owned)]
        for own in owned:
            for kind in list(own) if common else list(own)[1:]:
                if kind not in common:
                    labels.freeze(own[kind], f"{call.site} joins tensors in which two kinds of units cross")
        blank = torch.zeros((1,) * output.ndim, dtype=torch.int64)
        layers = []
        for kind in common or [()]:
            queue = [own.get(kind, next(iter(own.values()), blank.expand(t.shape))) for t, own in pairs]
            if all(varying(layer) in ([], [dim]) for layer in queue):
                elsewhere = [d for d in range(output.ndim) if d != dim]
                queue = [head(layer, elsewhere) for layer in queue]
            layers.append(torch.cat(queue, dim).expand(output.shape))
        across: dict[tuple[int, ...], Tensor] = {}
        for tensor in tensors:
            for layer in labels.others(tensor, [dim]):
                for rival in tensors:
                    if rival is not tensor:
                        labels.match(layer, rival, dim, call.site)
                joined, over = head(layer, [dim]).expand(output.shape), tuple(varying(layer))
                before = across.setdefault(over, joined)
                if not is_zero(joined):  # 0 only where each of them is
                    across[over] = lost(before)
        layers += across.values()
        labels.set(output, [layer for layer in layers if bool((narrow(layer) != 0).any())])

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic: torch decomposes a concatenation without numbers, which takes milliseconds."""
        tensors, dim = call["tensors"], call["dim"]
        if not isinstance(tensors, tuple | list) or not isinstance(dim, int) or not tensors or not tensors[0].ndim:
            return call.run()
        first = tensors[0]
        if not all(t.is_meta and t.ndim == first.ndim and t.dtype == first.dtype for t in tensors):
            return call.run()
        shape = list(first.shape)
        shape[dim] = sum(t.shape[dim] for t in tensors)
        dim %= first.ndim
        if any(t.shape[:dim] != first.shape[:dim] or t.shape[dim + 1 :] != first.shape[dim + 1 :] for t in tensors):
            return call.run()
        return first.new_empty(shape)


class Stack(_Joined):
    """A new dimension: units in the same place of each tensor leave together."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        dim = call["dim"] % output.ndim
        operands = [
            ([layer.unsqueeze(dim) for layer in labels.layers(t)], list(t.unsqueeze(dim).shape))
            for t in tensors_in(call["tensors"])
        ]
        labels.merge(output, operands, call.site, all)


class Pad(Operation):
    """Padding with a constant adds places that carry no unit; other kinds repeat what is there."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, layers = call["input"], []
        for layer in labels.layers(x):
            over = varying(layer)
            pad = [amount if x.ndim - 1 - i // 2 in over else 0 for i, amount in enumerate(call["pad"])]
            if any(pad) and not self._constant(call):
                labels.freeze(layer, f"{call.site} repeats units at fixed places")
                continue
            if any(amount < 0 for amount in pad):
                labels.freeze(layer, f"{call.site} cuts units at fixed places")
            padded = F.pad(narrow(layer), pad).expand(output.shape)
            layers.append(lost(padded) if self._constant(call) and call["value"] else padded)
        labels.set(output, layers)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.pads(call, call["input"], list(call["pad"]), self._constant(call))

    @staticmethod
    def _constant(call: Call) -> bool:
        return (call["mode"] or "constant") == "constant"


class Blocks(Ruled):
    """A channel becomes a block of channels, or a block one channel, which then leaves as a whole.

    `before` and `after`: the dimension of the channels in the input and in the output.
    """

    def __init__(self, rule: Rule = moves, before: int = -3, after: int = -3) -> None:
        super().__init__(rule)
        self.before, self.after = before, after

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        made, size = labels.along(call["input"], self.before), output.shape[self.after]
        if made is None:
            return
        if size > len(made):
            made = np.repeat(made, size // len(made))
        else:
            rows = made.reshape(size, -1)
            labels.tie_rows(rows)
            made = np.where((rows < 0).any(1), -abs(rows[:, 0]), rows[:, 0])
        labels.set(output, [spread(made, self.after, output.shape)])


class Fixed(Ruled):
    """Numbers are written to, or looked up at, positions that are fixed or computed: nothing that takes part can leave.
    What is overwritten gets no relevance."""

    def __init__(self, deed: str, rule: Rule = moves) -> None:
        super().__init__(rule)
        self.deed = deed

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        for tensor in call.tensors():
            labels.freeze_tensor(tensor, f"{call.site} {self.deed}")


class Assigned(Fixed):
    """`base[:, rows] = values`: units across the rows go on, as in a sum. Others are written into fixed places."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        base, value = call["input"], call["value"]
        addressed = _by_dimension(call, base.ndim)
        if (
            base._base is not None
            or any(item is None for item in _items(call["index"]))
            or not isinstance(value, Tensor)
        ):
            return super().channels(labels, call, output)
        for tensor in (item for _, item in addressed if isinstance(item, Tensor)):
            labels.freeze_tensor(tensor, f"{call.site} {self.deed}")
        if all(isinstance(item, int | slice) for _, item in addressed):
            rows = [dim for dim, item in addressed if item != slice(None)]
            gone = [dim for dim, item in addressed if isinstance(item, int)]
        else:  # places that are computed may have any number of dimensions
            rows = gone = list(range(1 + max(dim for dim, _ in addressed)))
        more = value.ndim + len(gone) - base.ndim
        shape = [1] * -more + list(value.shape[max(more, 0) :])
        for dim in gone:
            shape.insert(dim, 1)
        # A tensor without labels was made to fit what is written into it. Trial removals tell.
        tensors = [tensor for tensor in (base, value) if tensor is value or labels.layers(tensor)]
        operands = []
        for tensor, own in ((base, list(base.shape)), (value, shape))[-len(tensors) :]:
            kept = []
            for layer in labels.layers(tensor):
                placed = layer if tensor is base else head(layer, range(more)).reshape(shape)
                if set(varying(placed)) & set(rows) or (tensor is value and min(varying(layer)) < more):
                    labels.freeze(layer, f"{call.site} {self.deed}")
                else:
                    kept.append(head(placed, rows))
            operands.append((kept, [1 if dim in rows else size for dim, size in enumerate(own)]))
        # What is 0 before and after stays 0.
        labels.merge(base, operands, call.site, all if len(tensors) == 2 or labels.is_void(base) else never)
        return None


class Pairs(Ruled):
    """Two neighbouring numbers as one complex number, as rotary embeddings take them: both leave, or none."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        if output.is_complex():
            last = [x.ndim - 1]
            layers = [labels.tied(la, last) if last[0] in varying(la) else la for la in labels.layers(x)]
            labels.set(output, [layer[..., 0] for layer in layers])
        else:
            labels.set(output, [layer.unsqueeze(-1).expand(output.shape) for layer in labels.layers(x)])


class Part(Ruled):
    """The real or the imaginary part of numbers, which belongs to whom they belong."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        labels.keep(call["input"], output)


class Patch(Fixed):
    """`base[..., :n].copy_(a)`: once all of an empty tensor is written so, it is what a concatenation would have made.
    A whole tensor that is overwritten, as the state in a cache, is what is written. Anything else that is written into
    fixed places must stay."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        part, source = call["input"], call.tensors()[-1]
        base = part._base
        if base is None and source.shape == part.shape:
            if labels.layers(part):
                labels.merge(part, operands_of(labels, part, source), call.site)
            else:
                labels.set(part, labels.layers(source))
            return None
        sides = [] if base is None or base.ndim != part.ndim else _differing(base, part)
        fresh = base is not None and len(labels.fits(base)) == base.ndim and not labels.layers(base)
        if len(sides) != 1 or not fresh or source.shape != part.shape:
            return super().channels(labels, call, output)
        parts = labels.patch(base, sides[0], part, source)
        if parts is not None:
            Concat().channels(labels, Call(Concat(), torch.cat, (parts, sides[0]), {}, call.site), base)
        return None


def _differing(base: Tensor, part: Tensor) -> list[int]:
    return [d for d, (a, b) in enumerate(zip(base.shape, part.shape, strict=True)) if a != b]


class Roll(Move):
    """Rolling space is harmless; rolling units is not."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, dims = call["input"], call["dims"]
        named = () if dims is None else (dims,) if isinstance(dims, int) else dims
        rolled = {d % x.ndim for d in named} or set(range(x.ndim))
        for layer in labels.layers(x):
            if rolled.intersection(varying(layer)):
                labels.freeze(layer, f"{call.site} moves units by a fixed amount")
        labels.move(call, output)


class Windows(Move):
    """`Tensor.unfold`: overlapping windows of space pass; windows of units are at fixed places."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x = call["input"]
        for layer in labels.layers(x):
            if call["dimension"] % x.ndim in varying(layer):
                labels.freeze(layer, f"{call.site} cuts it at fixed places")
        labels.move(call, output)


def _by_dimension(call: Call, ndim: int) -> list[tuple[int, Any]]:
    """Which dimension each part of an index addresses."""
    if call.get("dim") is not None:
        start, length = call.get("start"), call.get("length")
        item = call["index"] if length is None else slice(int(start), int(start) + int(length))
        return [(int(call["dim"]) % ndim, item)]
    items = _items(call["index"])
    used = sum(_consumes(item) for item in items)
    pairs: list[tuple[int, Any]] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += ndim - used
        else:
            pairs += [(dim + i, item) for i in range(_consumes(item))]
            dim += _consumes(item)
    return pairs


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _consumes(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _pin(labels: LabelVerbs, layer: Tensor, dim: int, item: Any, call: Call) -> None:
    """Freeze the units whose place along `dim` the index relies on."""
    size = layer.shape[dim]
    reason = f"{call.site} cuts it at fixed places"
    straight = isinstance(item, slice) and item.step in (None, 1)
    if _in_turn(item, size) and varying(layer) == [dim]:  # units in turn, such as gates and what they gate: as rounds
        labels.tie_rows(column(layer).reshape(-1, item.step))
        return
    if straight:
        start, stop = item.start or 0, size if item.stop is None else item.stop
        if start in (0, -size) and stop >= size:
            return
        edges = [start, stop if stop < size else 0]
    elif isinstance(item, int) or (isinstance(item, list) and item and all(type(i) is int for i in item)):
        edges = [i + 1 if i >= 0 else i for i in ([item] if isinstance(item, int) else item)]
    else:  # every second unit: each relies on all those before it
        edges = [size]
        reason = reason if isinstance(item, slice) else f"{call.site} picks it by computed positions"
    pinned = np.zeros(size, bool)
    for edge in edges:  # what lies between an edge and the end it is counted from
        pinned[slice(edge) if edge >= 0 else slice(edge, None)] = True
    if len(varying(layer)) > 1:
        labels.grid(layer, reason, [dim] if pinned.all() else [], pinned=[(dim, pinned)])
    elif not (straight and labels.follows()):
        labels.freeze(column(layer)[pinned], reason)


def _in_turn(item: Any, size: int) -> bool:
    """Whether a slice takes every second unit, or every third, from whole rounds of so many."""
    if not isinstance(item, slice) or type(item.step) is not int or item.step < 2 or size % item.step:
        return False
    return 0 <= (item.start or 0) < item.step and (item.stop is None or item.stop >= size)


_WRITTEN = "writes it into fixed places"
register_named("input *shape", "view reshape", Reshape())
register_named("input other", "view_as reshape_as", Reshape())
register_named("input *rest", "flatten unflatten ravel", Reshape())
register_named("input *rest", "permute swapaxes swapdims movedim moveaxis t adjoint rot90 fliplr flipud", Move())
register_named("input *rest", "transpose unsqueeze squeeze", Move(), in_place="transpose_ unsqueeze_ squeeze_")
register_named("input *rest", "diagonal tril triu", Move())
register_named("input index", "__getitem__", Slice())
register_named("input dim start length", "narrow", Slice())
register_named("input dim index", "select index_select", Slice())
register("input index value", Tensor.__setitem__, operation=Assigned(_WRITTEN, writes), writes=True)
register("input source|src *rest", Tensor.copy_, operation=Patch(_WRITTEN, writes), writes=True)
register_named("input", "view_as_complex view_as_real", Pairs(transforms))
register("input *rest", torch._weight_norm, F.one_hot, operation=Fixed("computes with it"))
register_named(
    "input chunks|indices|sections|tensor_indices_or_sections dim=0", "chunk tensor_split unsafe_chunk", Split()
)
register_named(
    "input|tensor split_size_or_sections|split_size|split_sizes dim=0",
    "split split_with_sizes unsafe_split unsafe_split_with_sizes",
    Split(),
)
register_named("input dim=0", "unbind", Split())
register_named("tensors dim=0 out=None", "cat concat concatenate", Concat())
register_named("tensors dim=0 out=None", "stack", Stack())
register("input dimension size step", Tensor.unfold, operation=Windows())
register_named("input pad mode=None value=None", "pad", Pad())
register_named("input pad value=0 mode=None", "constant_pad_nd", Pad())
register_named("input *sizes", "expand repeat tile broadcast_to expand_as", Repeat())
register_named("input repeats dim=None output_size=None", "repeat_interleave", Repeat())
register_named("input factor|upscale_factor|downscale_factor", "pixel_shuffle pixel_unshuffle", Blocks())
register_named("input shifts dims=None", "roll", Roll())
register_named("input *dims", "flip", Roll())
register_named("input *rest", "dim ndimension stride element_size storage_offset data_ptr", Query())
register_named("input *rest", "size numel nelement __len__", SizeQuery())
register_named("input *rest", "is_floating_point is_complex is_contiguous is_same_size is_signed is_inference", Query())
register_named("input *rest", "is_conj is_neg is_pinned has_names get_device untyped_storage __hash__", Query())
register_named("input *rest", "new_tensor is_shared is_set_to is_coalesced dim_order is_distributed _is_view", Query())
register_named("input *rest", "register_hook retain_grad backward", Query())
register_named("input *rest", "item tolist numpy is_nonzero __bool__ __int__ __float__ __index__", Readout())
register_named("input *rest", "__repr__ __format__ __array__ equal allclose __contains__ __complex__", Readout())
register_named("input *rest", "__nonzero__ __long__", Readout())
register("input kernel_size dilation=1 padding=0 stride=1", F.unfold, operation=Blocks(after=-2))
register("input output_size kernel_size dilation=1 padding=0 stride=1", F.fold, operation=Blocks(averages, before=-2))


def _getters(names: str) -> list[Any]:
    """How torch names the properties of a tensor."""
    return [getattr(Tensor, name).__get__ for name in names.split()]


register("input *rest", *_getters("T mT H mH"), operation=Move())
register("input *rest", *_getters("real imag"), torch.real, torch.imag, operation=Part(transforms))
register("input *rest", torch._has_compatible_shallow_copy_type, operation=Query())  # asked by `nn.Module.to`
register("input *rest", *_getters("shape"), operation=SizeQuery())
register("input *rest", *_getters("device dtype ndim layout requires_grad grad_fn grad"), operation=Query())
register("input *rest", *_getters("is_cuda is_leaf is_nested is_sparse is_quantized is_cpu is_meta"), operation=Query())
register("input *rest", *_getters("is_mps is_xpu is_xla is_mkldnn is_sparse_csr is_vulkan itemsize"), operation=Query())
register("input *rest", *_getters("name output_nr retains_grad _version _base"), operation=Query())
register("input *rest", *_getters("nbytes"), operation=SizeQuery())
register("input *rest", torch._assert, torch.get_default_dtype, operation=Query())
