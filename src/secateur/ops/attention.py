"""Products of activations: matmul, einsum, attention. A head is a unit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.errors import UnsupportedModelError
from secateur.ops.layers import narrow, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Decomposed, Operation, named, register


class Contraction(Operation):
    """A sum of products over shared indices, described as an einsum. Subclasses say which."""

    name = "contraction"

    def equation(self, call: Call) -> tuple[list[Tensor], list[str], str]:
        """The operands, the index letters of each (`.` for a dimension that is broadcast), and those of the result."""
        raise NotImplementedError

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Units along a contracted index leave on both sides; units along a batch index are heads."""
        operands, letters, result = self.equation(call)
        sizes = {
            c: s for t, ls in zip(operands, letters, strict=True) for c, s in zip(ls, t.shape, strict=True) if c != "."
        }
        carried: dict[str, np.ndarray[Any, Any]] = {}
        for tensor, own in zip(operands, letters, strict=True):
            for layer in labels.layers(tensor):
                over = varying(layer)
                shared = [d for d in over if own[d] in result and sum(own[d] in ls for ls in letters) > 1]
                if shared:  # heads: everything inside one head leaves with it
                    layer = labels.tied(layer, [d for d in over if d != shared[0]])
                elif len(over) > 1:
                    layer = labels.tied(layer, over[1:])
                (dim,) = varying(layer) or [over[0]]
                column = narrow(layer).reshape(-1).numpy()
                if own[dim] in carried:
                    labels.join(carried[own[dim]], column)
                else:
                    carried[own[dim]] = column
        for letter, column in carried.items():
            for tensor, own in zip(operands, letters, strict=True):
                if letter not in own or tensor.shape[own.index(letter)] == 1:
                    continue
                if not any(own[d] == letter for layer in labels.layers(tensor) for d in varying(layer)):
                    labels.freeze(column, f"multiplied by a tensor of fixed size in {call.site}")
        layers = []
        for letter, column in carried.items():
            if letter in result:
                dim = result.index(letter)
                shape = [len(column) if d == dim else 1 for d in range(output.ndim)]
                layers.append(torch.from_numpy(column.copy()).reshape(shape).expand(output.shape))
                if sum(letter in own for own in letters) > 1:
                    labels.attend(column, call.site)
        macs = math.prod(sizes.values())
        labels.cost(call.site, macs, *carried.values())
        labels.set(output, layers)


class MatMul(Contraction):
    """`a @ b` with broadcasting of leading dimensions. `reflected`: the second argument is the left factor."""

    name = "matmul"

    def __init__(self, reflected: bool = False) -> None:
        self.reflected = reflected

    def _factors(self, call: Call) -> tuple[Tensor, Tensor]:
        a, b = call["input"], call["other"]
        return (b, a) if self.reflected else (a, b)

    def equation(self, call: Call) -> tuple[list[Tensor], list[str], str]:
        """Leading dimensions are numbered from the right."""
        a, b = self._factors(call)
        batch = max(a.ndim, b.ndim) - 2
        lead = "abcdefgh"[: max(batch, 0)]

        def own(t: Tensor, tail: str) -> str:
            if t.ndim == 1:
                return tail[1] if tail == "ik" else tail[0]
            names = lead[len(lead) - (t.ndim - 2) :] if t.ndim > 2 else ""
            return "".join("." if s == 1 else c for c, s in zip(names, t.shape, strict=False)) + tail

        left, right = own(a, "ik"), own(b, "kj")
        result = lead + ("i" if a.ndim > 1 else "") + ("j" if b.ndim > 1 else "")
        return [a, b], [left, right], result

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared by both factors; attention weights act as a gate or share as the composite says."""
        return relevance.multiplies(call, *self._factors(call), torch.matmul)


class AddMatMul(MatMul):
    """`baddbmm`, `addmm`: a matmul plus a term."""

    name = "addmm"

    def equation(self, call: Call) -> tuple[list[Tensor], list[str], str]:
        """The product only; the added term must carry nothing."""
        a, b = call["batch1"], call["batch2"]
        return ([a, b], ["aik", "akj"], "aij") if a.ndim == 3 else ([a, b], ["ik", "kj"], "ij")

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """The product, then the sum."""
        super().channels(labels, call, output)
        operands = [
            (labels.layers(output), list(output.shape)),
            (labels.layers(call["input"]), list(call["input"].shape)),
        ]
        labels.merge(output, operands, call.site)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """The product, then the sum."""
        with relevance.again():
            product = call["batch1"] @ call["batch2"]
            product = product if call["alpha"] == 1 else product * call["alpha"]
            return product + (call["input"] if call["beta"] == 1 else call["input"] * call["beta"])


class Einsum(Contraction):
    """Any einsum of two tensors without an ellipsis or repeated index."""

    name = "einsum"

    def equation(self, call: Call) -> tuple[list[Tensor], list[str], str]:
        """As the user wrote it."""
        text = str(call["equation"]).replace(" ", "")
        operands = list(call["operands"])
        if len(operands) == 1 and isinstance(operands[0], tuple | list):
            operands = list(operands[0])
        left, _, result = text.partition("->")
        letters = left.split(",")
        if "->" not in text:
            flat = "".join(letters)
            result = "".join(sorted(c for c in set(flat) if flat.count(c) == 1))
        if "..." in text:
            width = max(t.ndim - len(ls.replace("...", "")) for t, ls in zip(operands, letters, strict=True))
            dots = "ABCDEFGH"[:width]
            letters = [
                ls.replace("...", dots[width - (t.ndim - len(ls.replace("...", ""))) :])
                for t, ls in zip(operands, letters, strict=True)
            ]
            result = result.replace("...", dots)
        return operands, letters, result

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """One operand shares as a sum does, two share as factors do."""
        operands, letters, result = self.equation(call)
        text = ",".join(letters) + "->" + result
        if len(operands) == 1:
            return relevance.averages(call, operands[0], lambda a: torch.einsum(text, a))
        if len(operands) > 2:
            raise UnsupportedModelError(f"{call.site} of {len(operands)} tensors.", fix="write it as products of two")
        return relevance.multiplies(call, operands[0], operands[1], lambda a, b: torch.einsum(text, a, b))


class Attention(Contraction):
    """`scaled_dot_product_attention`: queries, keys and values of a head leave together."""

    name = "attention"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Tie each head over its width and over query, key, value; the mask may have heads too."""
        query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
        macs = math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        columns = []
        for tensor in (query, key, value):
            for layer in labels.layers(tensor):
                over = varying(layer)
                heads = [d for d in over if d < tensor.ndim - 2]
                if not heads:
                    if tensor is value and over == [tensor.ndim - 1]:
                        continue
                    labels.freeze(layer, f"width of a single head in {call.site}")
                    continue
                layer = labels.tied(layer, [d for d in over if d != heads[0]])
                columns.append((heads[0] - tensor.ndim, narrow(layer).reshape(-1).numpy()))
        if columns:
            dim, first = columns[0]
            for _, column in columns[1:]:
                if len(column) == len(first):
                    labels.join(first, column)
                elif len(first) % len(column) == 0:  # grouped queries
                    labels.join(first, np.repeat(column, len(first) // len(column)))
            carrying = {id(t) for t in (query, key, value) if any(varying(layer) for layer in labels.layers(t))}
            if len(carrying) < len({id(query), id(key), id(value)}):
                labels.freeze(first, f"attends to a tensor of fixed size in {call.site}")
            layer = torch.from_numpy(first.copy()).reshape(
                [-1 if d == output.ndim + dim else 1 for d in range(output.ndim)]
            )
            labels.set(output, [layer.expand(output.shape)])
            labels.attend(first, call.site)
            labels.cost(call.site, macs, first)
            if mask is not None and labels.layers(mask):
                shape = (*query.shape[:-1], key.shape[-2])
                scores = torch.empty(shape, device="meta")
                operands = [([layer[..., :1].expand(shape)], list(shape)), (labels.layers(mask), list(mask.shape))]
                labels.merge(scores, operands, call.site)
            return
        labels.cost(call.site, macs)
        labels.set(output, [layer[..., :1, :].expand(output.shape) for layer in labels.layers(value)])

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To the values, and to queries and keys if the composite says so."""
        query, key, mask = call["query"], call["key"], call["attn_mask"]
        scale = call["scale"] or 1 / math.sqrt(query.shape[-1])
        return relevance.attends(call, scale, lambda: _logit_mask(mask, bool(call["is_causal"]), query, key))


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` spelt out; tensors are (length, batch, width), or (length, width)."""
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise UnsupportedModelError(
            "nn.MultiheadAttention with bias_k/bias_v, add_zero_attn or static keys is not supported.",
            fix="build the module without them",
        )
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = list(in_proj_weight.chunk(3, 0))
    biases = [None, None, None] if in_proj_bias is None else list(in_proj_bias.chunk(3, 0))
    heads = []
    for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True):
        assert weight is not None
        projected = F.linear(tensor, weight, bias)
        length, batch, width = projected.shape
        heads.append(projected.view(length, batch, num_heads, width // num_heads).permute(1, 2, 0, 3))
    q, k, v = heads
    mask = combined_mask(attn_mask, key_padding_mask, q, k)
    mixed, shown = attend(q, k, v, mask, need_weights, dropout_p if training else 0.0, is_causal)
    batch, _, length, width = mixed.shape
    joined = mixed.permute(2, 0, 1, 3).reshape(length, batch, num_heads * width)
    out = F.linear(joined, out_proj_weight, out_proj_bias)
    if shown is not None:
        shown = shown.mean(1) if average_attn_weights else shown
        shown = shown.squeeze(0) if unbatched else shown
    return out.squeeze(1) if unbatched else out, shown


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, dropout: float, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of heads (batch, heads, length, width), and its weights if they are needed."""
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal and mask is None), None
    scores = q.mul(1 / math.sqrt(q.shape[-1])).matmul(k.transpose(-2, -1))
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout) if dropout else weights).matmul(v), weights


def combined_mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as one additive one, shaped (batch, heads, queries, keys) or broadcastable to it."""
    mask = None if attn_mask is None else _additive(attn_mask, q)
    if mask is not None and mask.dim() == 3 and mask.shape[0] > 1:
        # Masks of single heads cannot be told apart once heads are removed.
        if mask.shape[0] != q.shape[0] * q.shape[1]:
            raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not fit {q.shape[1]} heads")
        mask = mask.view(q.shape[0], -1, q.shape[2], k.shape[2])
    if padding is not None:
        extra = _additive(padding, q)[:, None, None, :]
        mask = extra if mask is None else mask + extra
    return mask


def _logit_mask(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask of `scaled_dot_product_attention` as a term to add to the logits."""
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return mask if mask is None or mask.dtype != torch.bool else _additive(~mask, query)


def _additive(hidden: Tensor, like: Tensor) -> Tensor:
    """A mask as a term to add: minus infinity where a Boolean one is true."""
    if hidden.dtype != torch.bool:
        return hidden.to(like.dtype)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -math.inf)


register("input other", *named("matmul bmm mm mv dot __matmul__"), operation=MatMul())
register("input other", *named("__rmatmul__"), operation=MatMul(reflected=True))
register("input batch1 batch2 beta=1 alpha=1", *named("baddbmm addmm addbmm addmv"), operation=AddMatMul())
register("equation *operands", torch.einsum, torch.functional.einsum, operation=Einsum())
register(
    "query key value attn_mask=None dropout_p=0 is_causal=False scale=None enable_gqa=False",
    F.scaled_dot_product_attention,
    operation=Attention(),
)
register("query *rest", F.multi_head_attention_forward, operation=Decomposed(_multi_head_attention))
