"""Data movement: reshaping, permuting, cutting, joining. Labels move the way the numbers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import narrow, spread, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, Query, Readout, Ruled, averages, named, register


class Move(Ruled):
    """Every number keeps its meaning and only changes its place."""

    name = "move"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Do the same to the labels."""
        labels.move(call, output)


class Reshape(Move):
    """View, reshape, flatten, unflatten. A split dimension may only lose whole slices of one of its factors."""

    name = "reshape"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Move the labels; where units come to vary over several dimensions, say so."""
        labels.set(output, [layer.reshape(output.shape) for layer in labels.layers(call["input"])])
        for layer in labels.layers(output):
            if len(varying(layer)) > 1:
                labels.grid(layer, f"{call.site} lays units out over several dimensions")


class Slice(Move):
    """Indexing. Positions written into the code do not move when a unit before them leaves, so those are frozen."""

    name = "slice"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze what the index pins, then index the labels."""
        x, index = call["input"], call["index"]
        if not isinstance(output, Tensor):
            return
        for dim, item in _by_dimension(index, x.ndim):
            for layer in labels.layers(x):
                if dim in varying(layer):
                    _pin(labels, layer, dim, item, call)
        labels.move(call, output)


class Narrow(Move):
    """`narrow`, `select`, `index_select`: slices by another name."""

    name = "narrow"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze what the positions pin, then cut the labels."""
        x, dim = call["input"], int(call["dim"]) % call["input"].ndim
        if call.get("length") is not None:
            start = int(call["start"])
            item: Any = slice(start, start + int(call["length"]))
        else:
            item = call["index"]
        for layer in labels.layers(x):
            if dim in varying(layer):
                _pin(labels, layer, dim, item, call)
        labels.move(call, output)


class Split(Move):
    """Chunk, split, unbind: equal parts lose the same places; unequal ones are pinned."""

    name = "split"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Tie the k-th unit of every part, then cut the labels."""
        x = call["input"]
        dim = int(call.get("dim", 0) or 0) % x.ndim
        parts = tensors_in(output)
        sizes = {part.shape[dim] if part.ndim == x.ndim else 1 for part in parts}
        for layer in labels.layers(x):
            if dim not in varying(layer) or len(parts) == 1:
                continue
            if len(varying(layer)) > 1:
                labels.grid(layer, f"{call.site} cuts it at fixed places", rigid=[dim])
            elif len(sizes) == 1:
                labels.tie_rows(narrow(layer).reshape(len(parts), -1).numpy().T)
            else:
                labels.freeze(layer, f"{call.site} cuts it at fixed places")
        labels.move(call, output)


class _Joined(Operation):
    """Several tensors become one."""

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Each part gets what falls on it, constants (class tokens) included."""
        tensors = [relevance.constant(t, call) for t in tensors_in(call["tensors"])]
        return relevance.moves(call.given(tensors, int(call.get("dim", 0) or 0)))


class Concat(_Joined):
    """Along a dimension of units, units queue up; along another, those in the same place leave together."""

    name = "concat"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Queue layers along the dimension; tie them across it."""
        tensors = [t for t in tensors_in(call["tensors"]) if t.numel()]
        dim = int(call.get("dim", 0) or 0) % output.ndim
        if all(not labels.layers(t) for t in tensors):
            return
        queue = []
        across: list[Tensor] = []
        for tensor in tensors:
            along = [layer for layer in labels.layers(tensor) if dim in varying(layer)]
            for extra in along[1:]:
                labels.freeze(extra, f"{call.site} joins tensors in which two kinds of units cross")
            blank = torch.zeros((1,) * tensor.ndim, dtype=torch.int64).expand(tensor.shape)
            queue.append(along[0] if along else blank)
        layers = (
            [torch.cat([_thin(layer, dim) for layer in queue], dim).expand(output.shape)] if _flat(queue, dim) else []
        )
        if not layers:
            layers = [torch.cat(queue, dim)]
        for i, tensor in enumerate(tensors):
            for layer in labels.others(tensor, [dim]):
                for j, rival in enumerate(tensors):
                    if i != j:
                        labels.match(layer, rival, dim, call.site)
                across.append(layer[tuple(slice(0, 1) if d == dim else slice(None) for d in range(layer.ndim))])
        seen: list[list[int]] = []
        for layer in across:
            if varying(layer) not in seen:
                seen.append(varying(layer))
                layers.append(layer.expand(output.shape))
        labels.set(output, [layer for layer in layers if bool((narrow(layer) != 0).any())])

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic: torch decomposes a concatenation without numbers, which takes milliseconds."""
        tensors, dim = call["tensors"], call.get("dim", 0)
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

    name = "stack"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Tie across the stacked tensors."""
        tensors = tensors_in(call["tensors"])
        dim = int(call.get("dim", 0) or 0) % output.ndim
        operands = [
            ([layer.unsqueeze(dim) for layer in labels.layers(t)], list(t.unsqueeze(dim).shape)) for t in tensors
        ]
        labels.merge(output, operands, call.site)


class Pad(Operation):
    """Padding with a constant adds places that carry no unit; other kinds repeat what is there."""

    name = "pad"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Pad the labels with 0 along padded dimensions of units; elsewhere they just grow."""
        x, pad = call["input"], list(call["pad"])
        padded = [x.ndim - 1 - i // 2 for i, amount in enumerate(pad) if amount]
        layers = []
        for layer in labels.layers(x):
            over = set(varying(layer)) & set(padded)
            if over and call.get("mode", "constant") != "constant":
                labels.freeze(layer, f"{call.site} repeats units at fixed places")
                continue
            small = layer
            for i in range(0, len(pad), 2):
                dim = x.ndim - 1 - i // 2
                if dim in over:
                    if min(pad[i], pad[i + 1]) < 0:
                        labels.freeze(layer, f"{call.site} cuts units at fixed places")
                    small = F.pad(narrow(small), [0, 0] * (i // 2) + [pad[i], pad[i + 1]])
            index = tuple(slice(0, 1) if d in padded and d not in over else slice(None) for d in range(x.ndim))
            layers.append(narrow(small)[index].expand(output.shape) if not over else small.expand(output.shape))
        labels.set(output, layers)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Moves the way the data did."""
        return relevance.pads(call, call["input"], list(call["pad"]), (call.get("mode") or "constant") == "constant")


class Repeat(Move):
    """Expand, repeat, tile: copies of a unit are the unit."""

    name = "repeat"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Copy the labels too."""
        labels.move(call, output)
        for layer in labels.layers(output):
            if len(varying(layer)) > 1:
                labels.grid(layer, f"{call.site} lays units out over several dimensions")


class PixelShuffle(Move):
    """Channels become positions, or positions channels, in blocks of r x r."""

    name = "pixel shuffle"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """The r x r channels of a block leave together."""
        x = call["input"]
        axis = x.ndim - 3
        read = labels.along(x, axis)
        if read is None:
            return
        factor = x.shape[axis] / output.shape[axis]
        if factor >= 1:
            rows = read.reshape(output.shape[axis], -1)
            labels.tie_rows(rows)
            made = rows[:, 0]
        else:
            made = np.repeat(read, round(1 / factor))
        labels.set(output, [spread(made, axis, output.shape)])


class Unfold(Move):
    """Patches as columns (im2col): each channel becomes kernel-size many rows."""

    name = "unfold"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Repeat each label over its patch."""
        x = call["input"]
        read = labels.along(x, x.ndim - 3)
        if read is not None:
            made = np.repeat(read, output.shape[-2] // len(read))
            labels.set(output, [spread(made, output.ndim - 2, output.shape)])


class Fold(Ruled):
    """Patches put back into an image (col2im): kernel-size many rows become one channel."""

    name = "fold"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """The rows of a channel leave together."""
        read = labels.along(call["input"], -2)
        if read is not None:
            axis = output.ndim - 3
            rows = read.reshape(output.shape[axis], -1)
            labels.tie_rows(rows)
            labels.set(output, [spread(rows[:, 0], axis, output.shape)])


class Write(Move):
    """Assignment by index. What is written into a tensor of fixed places cannot leave. What is overwritten gets no
    relevance."""

    name = "write"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze whatever takes part."""
        for tensor in call.tensors():
            labels.freeze_tensor(tensor, f"{call.site} writes it into fixed places")


class Assign(Write):
    """`x[index] = value`, a statement: it returns nothing."""

    name = "assign"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """What was written over gets none, what was written gets its own."""
        relevance.moves(call)


class Roll(Move):
    """Rolling space is harmless; rolling units is not."""

    name = "roll"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze units along rolled dimensions."""
        x, dims = call["input"], call.get("dims") or ()
        dims = [dims] if isinstance(dims, int) else list(dims)
        for layer in labels.layers(x):
            if not dims or set(varying(layer)) & {d % x.ndim for d in dims}:
                labels.freeze(layer, f"{call.site} moves units by a fixed amount")
        labels.move(call, output)


class Gather(Move):
    """Look-ups by computed positions: units along the dimension cannot leave."""

    name = "gather"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze everything that takes part, since positions are data."""
        for tensor in call.tensors():
            labels.freeze_tensor(tensor, f"{call.site} looks it up by computed positions")


def _by_dimension(index: Any, ndim: int) -> list[tuple[int, Any]]:
    """Which dimension each part of an index addresses."""
    items = list(index) if isinstance(index, tuple) else [index]
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


def _consumes(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _pin(labels: LabelVerbs, layer: Tensor, dim: int, item: Any, call: Call) -> None:
    """Freeze the units whose place along `dim` the index relies on."""
    size = layer.shape[dim]
    reason = f"{call.site} cuts it at fixed places"
    if isinstance(item, slice) and item.start is None and item.stop is None and item.step in (None, 1):
        return
    if isinstance(item, slice) and item.step in (None, 1):
        start, stop = item.start or 0, size if item.stop is None else item.stop
        if (start == 0 or start == -size) and stop >= size:
            return
    else:
        start, stop = 0, size
        if isinstance(item, int):
            start, stop = (0, item + 1) if item >= 0 else (item, size)
    if len(varying(layer)) > 1:
        labels.grid(layer, reason, rigid=[dim])
        return
    column = narrow(layer).reshape(-1).numpy()
    pinned = np.zeros(size, bool)
    for edge, is_stop in ((start, False), (stop, True)):
        if edge >= 0:
            pinned[: min(edge, size)] |= not is_stop or edge < size
        else:
            pinned[edge:] = True
    labels.freeze(column[pinned], reason)


def _flat(queue: Sequence[Tensor], dim: int) -> bool:
    return all(varying(layer) in ([], [dim]) for layer in queue)


def _thin(layer: Tensor, dim: int) -> Tensor:
    return layer[tuple(slice(None) if d == dim else slice(0, 1) for d in range(layer.ndim))]


register("input *shape", *named("view reshape"), operation=Reshape())
register("input other", *named("view_as reshape_as"), operation=Reshape())
register("input *rest", *named("flatten unflatten ravel"), operation=Reshape())
register(
    "input *rest",
    *named("permute transpose swapaxes swapdims movedim moveaxis t adjoint unsqueeze squeeze rot90 fliplr flipud"),
    *named("diagonal tril triu"),
    *[getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")],
    operation=Move(),
)
register("input *rest", *named("transpose_ unsqueeze_ squeeze_"), operation=Move(), writes=True)
register("input index", Tensor.__getitem__, operation=Slice())
register("input dim start length", *named("narrow"), operation=Narrow())
register("input dim index", *named("select index_select take_along_dim"), operation=Narrow())
register("input index value", Tensor.__setitem__, operation=Assign(), writes=True)
register(
    "input *rest",
    *named("index_put index_copy scatter scatter_add masked_scatter index_add"),
    operation=Write(),
)
register("input *rest", *named("copy_ index_put_ index_copy_ scatter_"), operation=Write(), writes=True)
register("input chunks dim=0", *named("chunk tensor_split"), operation=Split())
register("input split_size_or_sections dim=0", *named("split split_with_sizes"), operation=Split())
register("input dim=0", *named("unbind"), operation=Split())
register("tensors dim=0 out=None", *named("cat concat concatenate"), operation=Concat())
register("tensors dim=0 out=None", torch.stack, operation=Stack())
register("input pad mode=None value=None", F.pad, operation=Pad())
register("input *sizes", *named("expand repeat tile broadcast_to expand_as"), operation=Repeat())
register("input repeats dim=None output_size=None", *named("repeat_interleave"), operation=Repeat())
register("input factor", F.pixel_shuffle, F.pixel_unshuffle, operation=PixelShuffle())
register("input kernel_size dilation=1 padding=0 stride=1", F.unfold, operation=Unfold())
register("input output_size kernel_size dilation=1 padding=0 stride=1", F.fold, operation=Fold(averages))
register("input shifts dims=None", *named("roll"), operation=Roll())
register("input dims", *named("flip"), operation=Roll())
register("input dim index sparse_grad=False", *named("gather"), operation=Gather())
register("input *rest", F.grid_sample, operation=Gather(averages))  # shares among pixels
register("input *rest", F.affine_grid, *named("masked_select nonzero"), operation=Gather())

_PROPERTIES = (
    "shape device dtype ndim is_cuda layout requires_grad is_leaf is_nested is_sparse is_quantized grad_fn grad"
)
register(
    "input *rest",
    *[getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(getattr(Tensor, name), "__get__")],
    *named("size dim numel stride is_floating_point is_complex is_contiguous element_size storage_offset data_ptr"),
    *named("get_device nelement ndimension is_same_size is_signed __len__ __hash__"),
    *named("new_zeros new_ones new_empty new_full new_tensor"),
    *named("register_hook retain_grad backward untyped_storage is_inference is_conj is_neg is_pinned has_names"),
    torch._assert,
    torch.get_default_dtype,
    operation=Query(),
)
register(
    "input *rest",
    *named("item tolist numpy is_nonzero __bool__ __int__ __float__ __index__ __repr__ __format__ __array__"),
    operation=Readout(),
)
