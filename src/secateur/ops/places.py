"""Looking numbers up by computed places, and writing or adding them there: gather, scatter, sampling of images.

Also what else keeps all that it computes with as it is, such as losses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import column, head, lost, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.shape import Fixed
from secateur.ops.table import Call, Operation, Ruled, averages, refused, register, register_named, writes

_WRITTEN, _LOOKED_UP = "writes it into computed places", "looks it up by computed positions"


class Selected(Fixed):
    """As many numbers as the data say."""

    def counts(self, call: Call) -> bool:
        return True


def _takes_rows(labels: LabelVerbs, index: Tensor, x: Tensor, dims: Collection[int]) -> bool:
    """Whether places are the same all along some dimensions, so that whole rows of units are taken."""
    for dim in dims:
        if index.shape[dim] != x.shape[dim]:
            return False
        if dim in labels.fits(index):
            continue
        if index.stride(dim) and (index.is_meta or not bool((index == index.narrow(dim, 0, 1)).all())):
            return False
    return True


class Gather(Fixed):
    """Looks numbers up along a dimension. Units across it go on if whole rows are taken.

    What a router chose belongs to the experts that it chose.
    """

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, index, dim = call["input"], call["index"], int(call["dim"]) % output.ndim
        layers, kept = labels.layers(x), []
        if len(layers) == 1 and varying(layers[0]) == [dim] and labels.looks_up(column(layers[0]), index, False):
            return
        labels.freeze_tensor(index, f"{call.site} {self.deed}")
        for layer in layers:
            over = varying(layer)
            if dim not in over and _takes_rows(labels, index, x, over):
                kept.append(head(layer, [dim]).expand(output.shape))
            else:
                labels.freeze(layer, f"{call.site} {self.deed}")
        labels.set(output, kept)


class Scatter(Fixed):
    """Writes numbers into computed places. What a router chose belongs to the experts, such as -inf for those that it
    shall not choose again."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        dim, layers = int(call["dim"]) % output.ndim, labels.layers(call["input"])
        one = not isinstance(call["value"], Tensor) and call["reduce"] is None
        along = one and len(layers) == 1 and varying(layers[0]) == [dim]
        if along and labels.looks_up(column(layers[0]), call["index"], False):
            labels.set(output, [lost(layers[0])])
        else:
            super().channels(labels, call, output)


class AddedRows(Operation):
    """Numbers are added to computed places along one dimension, as messages to the nodes of a graph. Units across it go
    on if whole rows are added."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, source, index, dim = call["input"], call["source"], call["index"], int(call["dim"]) % output.ndim
        reason, operands = f"{call.site} {_WRITTEN}", []
        labels.freeze_tensor(index, reason)
        for tensor in (x, source):
            for layer in labels.layers(tensor):
                over = varying(layer)
                whole = index.ndim < tensor.ndim or _takes_rows(labels, index, tensor, over)
                if dim in over or not whole:
                    labels.freeze(layer, reason)
            own = [1 if d == dim else size for d, size in enumerate(tensor.shape)]
            # Zeros without labels were made to fit what is added to them.
            if tensor is source or labels.layers(tensor):
                operands.append(([head(layer, [dim]) for layer in labels.others(tensor, [dim])], own))
        labels.merge(output, operands, call.site)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared among the rows that are summed, and what was there before."""
        index, dim = call["index"], int(call["dim"])
        source = _within(call["source"], index)
        if call.get("alpha", 1) != 1 or call.get("reduce", "sum") != "sum":
            return refused(relevance, call)
        add = torch.index_add if index.ndim < source.ndim else torch.scatter_add
        return _added(relevance, call, source, lambda base, rows: add(base, dim, index, rows))


def _added(relevance: RelevanceVerbs, call: Call, rows: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Shared among the rows that `add` sums up in their places, and what was there before."""
    x = call["input"]
    if not rows.requires_grad:
        return refused(relevance, call)
    if x.requires_grad or call.writes:
        with relevance.again():
            placed = add(torch.zeros_like(x), rows)
            return x.add_(placed) if call.writes else x + placed
    base = torch.zeros_like(x)
    return relevance.averages(call, rows, lambda own: add(base.to(own.dtype), own))


def _puts(relevance: RelevanceVerbs, call: Call) -> Any:
    """To whatever is there in the end, or shared among what is added up there."""
    indices, values = call["indices"], call["values"]
    if not call["accumulate"]:
        return relevance.writes(call)
    return _added(relevance, call, values, lambda base, rows: base.index_put(indices, rows, accumulate=True))


def _scatters(relevance: RelevanceVerbs, call: Call) -> Any:
    """To whatever is there in the end. What is combined with what was there has no derivative in torch."""
    if call["reduce"] is not None:
        return refused(relevance, call)
    x, dim, index, value = (call[name] for name in ("input", "dim", "index", "value"))
    within = _within(value, index) if isinstance(value, Tensor) else value
    return relevance.writes(call if within is value else call.given(x, dim, index, within))


def _within(source: Tensor, index: Tensor) -> Tensor:
    """The part of a source for which there are places. Torch differentiates a scatter only if that is all of it."""
    whole = index.ndim != source.ndim or index.shape == source.shape
    return source if whole else source[tuple(map(slice, index.shape))]


class NewData(Fixed):
    """`x.data = y`. A module that casts itself with `to` in its forward gives its weights to themselves."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        if call["value"] is not call["input"]:
            for tensor in call.tensors():
                labels.freeze_tensor(tensor, f"{call.site} {self.deed}")

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return call.run() if call["value"] is call["input"] else refused(relevance, call)


class Sampling(Ruled):
    """Images, and the places at which they are looked up. Channels go on, and the places stay as they are.

    `rows`: each place is in one of the images, so that there are as many results as places.
    """

    def __init__(self, rule: Any = averages, rows: bool = False) -> None:
        super().__init__(rule)
        self.rows = rows

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, reason = call["input"], f"{call.site} {_LOOKED_UP}"
        for tensor in call.tensors()[1:]:
            labels.freeze_tensor(tensor, reason)
        mixed = [0, *range(2, x.ndim)] if self.rows else list(range(2, x.ndim))
        for tensor in tensors_in(output):
            labels.carry(x, tensor, mixed, reason)


register("input value", Tensor.data.__set__, operation=NewData("replaces it"))  # type: ignore[attr-defined]
register_named("input indices dim=None", "take_along_dim", Fixed(_LOOKED_UP))
register_named("input dim index value|src reduce=None", "scatter", Scatter(_WRITTEN, _scatters))
register_named("input indices values accumulate=False", "index_put", Fixed(_WRITTEN, _puts))
register_named("input *rest", "masked_scatter index_copy", Fixed(_WRITTEN, writes))
register_named("input *rest", "select_scatter slice_scatter index_fill diagonal_scatter put", Fixed(_WRITTEN, refused))
register_named("input *rest", "take", Fixed(_LOOKED_UP, refused))
register_named("input dim index source|src alpha=1", "index_add scatter_add", AddedRows())
register_named("input dim index source|src reduce include_self=True", "scatter_reduce", AddedRows())
register_named("input dim index sparse_grad=False", "gather", Gather(_LOOKED_UP))
register_named("input|theta *rest", "affine_grid", Fixed(_LOOKED_UP))
register_named("input *rest", "masked_select nonzero argwhere", Selected(_LOOKED_UP))
register_named("input *rest", "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d", Sampling())
_LOSSES = " ".join(name for name in vars(F) if name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div")))
register_named("input|input1|anchor|log_probs *rest", _LOSSES, Fixed("computes a loss of it", refused))
register_named("input *rest", "as_strided", Fixed("reads it at fixed places"))
register("abs angle out=None", torch.polar, operation=Fixed("computes with it", refused))
