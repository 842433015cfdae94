"""Linear layers and embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.ops.layers import Labels, column, like, lost, spread, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, lookup, refused, register


def produce_with_bias(labels: LabelVerbs, made: Labels, call: Call, kind: str) -> None:
    """These labels number the units of a layer, whose biases leave with them."""
    in_order = bool((made[1:] == made[:-1] + 1).all())
    if not in_order and len(np.unique(made)) < len(made):  # e.g. a dynamic convolution, with a weight per sample
        labels.freeze(made, f"{call.site} computes with a weight in which a unit occurs several times")
    else:
        labels.produce(made, call.site, kind)
    held = None if call["bias"] is None else labels.along(call["bias"], 0)
    if held is not None:
        labels.join(made, held)


def read_by_weight(labels: LabelVerbs, call: Call, read: Labels | None, taken: Labels | None) -> None:
    """The units `read` leave with the columns `taken` of the weight that reads them."""
    if read is not None and taken is not None:
        labels.join(taken, read)
        if taken.min() < 0:  # the weight may be an activation too
            summed = f"summed by {call.site} although it is not 0 when it is masked"
            labels.freeze(read[(read < 0) & (taken < 0)], summed)
    else:
        labels.freeze(taken, "reads the model's input or another tensor of fixed size")
        labels.freeze(read, f"read by {call.site} through a weight of fixed size")


def crossing_lines(labels: LabelVerbs, x: Tensor, weight: Tensor) -> list[tuple[Labels | None, Labels | None]]:
    """Kinds of units that cross along what a weight reads, as inputs and functions do in the flattened weight of a
    layer of curves: each kind of the input with that of the weight which lies in the same places. Empty if there is
    one kind only, or if they do not lie alike."""
    kinds = []
    for tensor, dim in ((x, x.ndim - 1), (weight, 1)):
        found = [layer for layer in labels.layers(tensor) if dim in varying(layer)]
        if len(found) < 2 or any(varying(layer) != [dim] for layer in found):
            return []
        kinds.append({_pattern(line): line for line in map(column, found)})
    read, taken = kinds
    return [(read[key], taken[key]) for key in read] if read.keys() == taken.keys() and len(read) > 1 else []


def _pattern(line: Labels) -> tuple[int, ...]:
    """Which places have the same label: for each place the first one that has its label."""
    _, first, inverse = np.unique(np.abs(line), return_index=True, return_inverse=True)
    return tuple(first[inverse].tolist())


class Linear(Operation):
    """`weight` is (out, in). The last dimension of the input is read; units along the others go on."""

    differentiates = False

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, weight = call["input"], call["weight"]
        if weight.ndim == 1:  # the product with a vector, which makes no units
            product = lookup(torch.matmul)
            assert product is not None
            product.channels(labels, Call(product, torch.matmul, (x, weight), {}, call.site), output)
            return
        made = labels.along(weight, 0)
        pairs = crossing_lines(labels, x, weight) or [(labels.along(x, -1), labels.along(weight, 1))]
        for read, taken in pairs:
            read_by_weight(labels, call, read, taken)
        passing = labels.others(x, [-1])
        crossing = [column(layer) for layer in passing if len(varying(layer)) == 1]
        labels.cost(call.site, output.numel() * weight.shape[-1], made, *(taken for _, taken in pairs), *crossing)
        layers = [layer[..., :1].expand(output.shape) for layer in passing]
        if call["bias"] is not None:  # added to what carries another kind of units
            layers = [lost(layer) for layer in layers]
        if made is not None:
            produce_with_bias(labels, made, call, "neuron")
            layers.insert(0, spread(made, output.ndim - 1, output.shape))
        else:
            labels.freeze_tensor(call["bias"], f"added by {call.site} to units of fixed number")
        labels.set(output, layers)

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic. What does not fit is left to torch to refuse."""
        x, weight, bias = call["input"], call["weight"], call["bias"]
        fits = weight.ndim == 2 and x.ndim and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
        if not x.is_meta or not fits or (bias is not None and tuple(bias.shape) != (len(weight),)):
            return call.run()
        return like(x, (*x.shape[:-1], len(weight)))

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        if not is_activation(call["weight"]) and call["weight"].ndim > 1:
            return relevance.dense(call, call["input"], call["weight"], call["bias"])
        with relevance.again():  # a weight that is an activation: a matrix product
            product = call["input"] @ (call["weight"].mT if call["weight"].ndim > 1 else call["weight"])
            return product if call["bias"] is None else product + call["bias"]


def is_activation(weight: Tensor) -> bool:
    """Whether the weight of a layer carries relevance itself: it is computed, or an input of the model."""
    return weight.grad_fn is not None or (weight.requires_grad and not isinstance(weight, nn.Parameter))


class Embedding(Operation):
    """Rows of a table: `weight` is (entries, width). Relevance that starts at discrete tokens ends here."""

    enters = True

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        weight = call["weight"]
        made = labels.along(weight, 1)
        labels.freeze(labels.along(weight, 0), "entries of an embedding")
        if made is not None:
            labels.produce(made, call.site, "neuron")
            labels.set(output, [spread(made, output.ndim - 1, output.shape)])

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        if not call["weight"].requires_grad:
            return relevance.enters_here(call, call["weight"])
        with relevance.again():  # a table that is an activation: its rows are chosen
            return call["weight"][call["input"]]


class Bilinear(Operation):
    """`weight` is (out, in1, in2): each output is a product of two inputs with a matrix of its own."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        weight = call["weight"]
        made = labels.along(weight, 0)
        for dim, x in ((1, call["input1"]), (2, call["input2"])):
            read_by_weight(labels, call, labels.along(x, -1), labels.along(weight, dim))
            for layer in labels.others(x, [-1]):
                labels.freeze(layer, f"{call.site} runs along it")
        axes = [labels.along(weight, dim) for dim in (1, 2)]
        labels.cost(call.site, output.numel() * (weight.numel() // len(weight)), made, *axes)
        if made is not None:
            produce_with_bias(labels, made, call, "neuron")
            labels.set(output, [spread(made, output.ndim - 1, output.shape)])


class EmbeddingBag(Embedding):
    """Sums, means or maxima of rows of a table."""

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return refused(relevance, call) if call["weight"].requires_grad else super().relevance(relevance, call)


register("input weight bias=None", F.linear, operation=Linear())
register("input1 input2 weight bias=None", F.bilinear, torch.bilinear, operation=Bilinear())
register("input weight *rest", F.embedding_bag, operation=EmbeddingBag())
register(
    "input weight padding_idx=None max_norm=None norm_type=2 scale_grad_by_freq=False sparse=False",
    F.embedding,
    operation=Embedding(),
)
register("weight input|indices padding_idx=-1", torch.embedding, operation=Embedding())
