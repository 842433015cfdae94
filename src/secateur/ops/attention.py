"""Matrix products, einsum, attention. With a parameter they are linear layers; otherwise a head is a unit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import reduce
from string import ascii_letters
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.errors import UnsupportedModelError
from secateur.ops.elementwise import operands_of
from secateur.ops.layers import Labels, column, is_zero, spread, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Decomposed, Operation, refused, register, register_named

#: Rows of grouped products must have whole 16 bytes: so many numbers in half precision.
_ALIGNED = 8
#: The operands, the index letters of each (`.` for a dimension that is broadcast), and those of the result.
Equation = tuple[list[Tensor], list[str], str]


class Contraction(Operation):
    """A sum of products over shared indices, described as an einsum. Subclasses say which."""

    def equation(self, call: Call) -> Equation:
        """What is multiplied and summed."""
        raise NotImplementedError

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Units along a contracted index leave on both sides; units along a batch index are heads."""
        operands, letters, result = self.equation(call)
        pairs = list(zip(operands, letters, strict=True))
        # Of a dimension that is broadcast, the larger size counts.
        found = sorted((s, c) for tensor, own in pairs for c, s in zip(own, tensor.shape, strict=True) if c != ".")
        sizes = {letter: size for size, letter in found}
        shared = {c for c in sizes if sum(c in own for own in letters) > 1}
        carried: dict[str, Labels] = {}
        for tensor, own in pairs:
            for layer in labels.layers(tensor):
                over = varying(layer)
                # Everything inside one head leaves with it.
                first = next((d for d in over if own[d] in result and own[d] in shared), over[0])
                units = column(labels.tied(layer, [d for d in over if d != first]))
                known = carried.setdefault(own[first], units)
                if known is not units:
                    labels.join(known, units)
                    # A product is 0 where one factor is.
                    carried[own[first]] = np.where(units > 0, abs(known), known)
        fixed: set[str] = set()
        for letter, units in carried.items():
            for tensor, own in pairs:
                if letter not in own or tensor.shape[own.index(letter)] == 1:
                    continue
                if labels.is_void(tensor):  # a first state, made to fit; trial removals tell
                    continue
                if any(own[d] == letter for layer in labels.layers(tensor) for d in varying(layer)):
                    continue
                if tensor.stride(own.index(letter)):
                    labels.freeze(units, f"multiplied by a tensor of fixed size in {call.site}")
                else:  # one tensor for all units, such as the value of a head that all queries share
                    fixed |= set(own) & set(result) & set(carried) - shared
        for letter in fixed:
            labels.freeze(carried[letter], f"width of a head that all queries share in {call.site}")
        layers = []
        carried.pop(".", None)  # each row meets one of these
        for letter, units in carried.items():
            if letter not in result:
                labels.freeze(units[units < 0], f"summed by {call.site} although it is not 0 when it is masked")
            elif letter not in fixed:
                layers.append(spread(units, result.index(letter), output.shape))
                if any(labels.is_weight(tensor) and letter in own for tensor, own in pairs):
                    if letter == result[-1] and len(np.unique(units)) == len(units):
                        labels.produce(units, call.site, "neuron")
                elif letter in shared:
                    labels.attend(units, call.site)
        labels.cost(call.site, math.prod(sizes.values()), *carried.values())
        labels.set(output, layers)


class MatMul(Contraction):
    """`a @ b` with broadcasting of leading dimensions. `reflected`: the second argument is the left factor."""

    def __init__(self, reflected: bool = False) -> None:
        self.reflected = reflected

    def _factors(self, call: Call) -> tuple[Tensor, Tensor]:
        a, b = call["input"], call["other"]
        return (b, a) if self.reflected else (a, b)

    def equation(self, call: Call) -> Equation:
        """Leading dimensions are numbered from the right."""
        a, b = self._factors(call)
        lead = "abcdefgh"[: max(a.ndim, b.ndim, 2) - 2]

        def own(t: Tensor, tail: str) -> str:
            names = zip(lead[len(lead) - t.ndim + 2 :], t.shape, strict=False)
            return "".join("." if size == 1 else name for name, size in names) + tail

        left = own(a, "ik") if a.ndim > 1 else "k"
        right = own(b, "kj") if b.ndim > 1 else "k"
        return [a, b], [left, right], lead + ("i" if a.ndim > 1 else "") + ("j" if b.ndim > 1 else "")

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return self._multiplies(relevance, call, *self._factors(call))

    @staticmethod
    def _multiplies(relevance: RelevanceVerbs, call: Call, a: Tensor, b: Tensor) -> Tensor:
        axes = (None, b.ndim - 1) if b.ndim > 1 else (a.ndim - 2 if a.ndim > 1 else None, None)
        return relevance.multiplies(call, a, b, torch.matmul, axes)


class AddMatMul(MatMul):
    """`baddbmm`, `addmm`, `addmv`: a matmul, then a sum with another term."""

    scalars = True

    def equation(self, call: Call) -> Equation:
        a, b = call["batch1"], call["batch2"]
        if b.ndim == 1:  # `addmv`
            return [a, b], ["ik", "k"], "i"
        return ([a, b], ["aik", "akj"], "aij") if a.ndim == 3 else ([a, b], ["ik", "kj"], "ij")

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        super().channels(labels, call, output)
        labels.merge(output, operands_of(labels, output, call["input"]), call.site, all)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        x, weight, bias = call["batch1"], call["batch2"], call["input"]
        constant = weight.ndim == 2 and bias.ndim == 1 and not weight.requires_grad and not bias.requires_grad
        if x.requires_grad and constant and call["alpha"] == call["beta"] == 1 and len(bias) == weight.shape[1]:
            return relevance.dense(call, x, weight, bias, columns=True)  # as GPT-2 writes its layers
        carried = x.requires_grad or weight.requires_grad
        inner = Call(self, torch.matmul, (x, weight), {}, call.site)  # a layer is known by the place of the whole call
        product = self._multiplies(relevance, inner, x, weight) if carried else inner.run()
        with relevance.again():
            product = product if call["alpha"] == 1 else product * call["alpha"]
            return product + (call["input"] if call["beta"] == 1 else call["input"] * call["beta"])


class Solved(MatMul):
    """The unknowns of a triangular system: its inverse times the right side. Units may not lie along the unknowns.

    As the state of linear attention it is linear in the right side, to which all relevance goes."""

    def _factors(self, call: Call) -> tuple[Tensor, Tensor]:
        a, b = call["input"], call["other"]
        return (a, b) if call["left"] else (b, a)

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        a, b = call["input"], call["other"]
        unknowns = b.ndim - (2 if call["left"] else 1)
        for tensor, dims in ((a, {a.ndim - 1, a.ndim - 2}), (b, {unknowns})):
            for layer in labels.layers(tensor):
                if dims & set(varying(layer)):
                    for each in (a, b):
                        labels.freeze_tensor(each, f"{call.site} computes with it")
                    return
        super().channels(labels, call, output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        a, b = call["input"].detach(), call["other"]
        if not b.requires_grad:
            return refused(relevance, call)
        one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        options = {name: call[name] for name in ("upper", "unitriangular")}
        inverse = torch.linalg.solve_triangular(a, one, **options)
        return relevance.multiplies(call, *((inverse, b) if call["left"] else (b, inverse)), torch.matmul)


class GroupedMatMul(Contraction):
    """Rows (sorted by expert) times the matrix of their expert: (rows, in) and (experts, in, out)."""

    def equation(self, call: Call) -> Equation:
        return [call["input"], call["weight"]], ["ik", ".kj"], "ij"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        rows, weight = call["input"], call["weight"]
        if rows.ndim != 2 or weight.ndim != 3 or call["bias"] is not None:
            raise UnsupportedModelError(
                f"{call.site} of tensors of shape {tuple(rows.shape)} and {tuple(weight.shape)}, or with a bias.",
                fix="give (rows, in) and (experts, in, out), and add the bias afterwards",
            )
        experts, widths = labels.along(weight, 0), [labels.along(weight, dim) for dim in (1, 2)]
        if not labels.looks_up(experts, call["offs"], labels.is_weight(weight)):
            labels.freeze(experts, f"experts among which {call.site} chooses")
        for width in widths:
            labels.require(width, multiple=_ALIGNED)
        super().channels(labels, call, output)

    def rehearse(self, call: Call) -> Any:
        """As torch does it, but for any width, and for numbers of any format."""
        rows, weight, ends = call["input"], call["weight"], call["offs"]
        if ends is None or len(ends) != len(weight) or rows.ndim != 2 or rows.shape[1] != weight.shape[1]:
            return call.run()
        if rows.is_meta:
            return rows.new_empty((len(rows), weight.shape[2]))
        return torch.cat([part @ expert for part, expert in _by_expert(rows, weight, ends)])

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        if call["offs"] is None or call["bias"] is not None or call["weight"].ndim != 3 or call["input"].ndim != 2:
            raise UnsupportedModelError(
                f"no relevance rule is known for {call.site} of tensors of shape {tuple(call['input'].shape)} and "
                f"{tuple(call['weight'].shape)}, or with a bias.",
                fix="give (rows, in), (experts, in, out) and offs, or model.set_experts_implementation('eager')",
            )
        parts = _by_expert(call["input"], call["weight"], call["offs"])
        calls = [(Call(self, torch.matmul, part, {}, call.site), *part) for part in parts]
        return torch.cat([relevance.dense(each, x, weight, None, columns=True) for each, x, weight in calls])


def _by_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The rows of each expert, and its matrix."""
    return list(zip(rows.tensor_split(ends[:-1].cpu().long()), weight.unbind(), strict=True))


class Einsum(Contraction):
    """Any einsum of two tensors in which no index is repeated within one of them."""

    def equation(self, call: Call) -> Equation:
        text, operands = str(call["equation"]).replace(" ", ""), list(call["operands"])
        left, _, result = text.partition("->")
        letters = left.split(",")
        if "->" not in text:
            flat = "".join(letters)
            result = "".join(sorted(c for c in set(flat) if flat.count(c) == 1))
        if "..." in text:
            widths = [t.ndim - len(own.replace("...", "")) for t, own in zip(operands, letters, strict=True)]
            dots = "".join(c for c in ascii_letters if c not in text)[: max(widths)]
            letters = [
                own.replace("...", dots[len(dots) - width :]) for own, width in zip(letters, widths, strict=True)
            ]
            result = result.replace("...", dots)
        return operands, letters, result

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        operands, letters, result = self.equation(call)
        text = ",".join(letters) + "->" + result
        if len(operands) == 1:
            return relevance.averages(call, operands[0], lambda a: torch.einsum(text, a))
        if len(operands) > 2:
            raise UnsupportedModelError(f"{call.site} of {len(operands)} tensors.", fix="write it as products of two")
        first, second = (own.find(result[-1:] or "-") for own in letters)
        axes = (first, None) if second < 0 <= first else (None, second) if first < 0 <= second else (None, None)
        return relevance.multiplies(call, operands[0], operands[1], lambda a, b: torch.einsum(text, a, b), axes)


class Attention(Operation):
    """`scaled_dot_product_attention`: queries, keys and values of a head leave together; the mask may have heads."""

    scalars = True

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
        pairs = math.prod(query.shape[:-1]) * key.shape[-2]
        heads: list[tuple[int, Labels]] = []
        for tensor in (query, key, value):
            for layer in labels.layers(tensor):
                over = varying(layer)
                if over[0] < tensor.ndim - 2:
                    layer = labels.tied(layer, over[1:])
                    heads.append((over[0] - tensor.ndim, column(layer)))
                elif tensor is not value or over != [tensor.ndim - 1]:
                    labels.freeze(layer, f"width of a single head in {call.site}")
        if not heads:
            layers = [layer for layer in labels.layers(value) if varying(layer) == [value.ndim - 1]]
            labels.cost(call.site, pairs * query.shape[-1])
            labels.cost(call.site, pairs * value.shape[-1], *map(column, layers[:1]))
            labels.set(output, [layer[..., :1, :].expand(output.shape) for layer in labels.layers(value)])
            return
        for layer in labels.layers(value):
            if varying(layer) == [value.ndim - 1]:
                labels.freeze(layer, f"width of a head that all queries share in {call.site}")
        dim, first = heads[0]
        for _, other in heads[1:]:
            if len(first) % len(other) == 0:  # fewer keys and values than queries: grouped queries
                labels.join(first, np.repeat(other, len(first) // len(other)))
        carrying = {id(t) for t in (query, key, value) if labels.layers(t)}
        if len(carrying) < len({id(query), id(key), id(value)}):
            labels.freeze(first, f"attends to a tensor of fixed size in {call.site}")
        zero = all(map(is_zero, labels.layers(value)))  # heads make 0 of values of 0
        labels.set(output, [spread(first if zero else -abs(first), dim, output.shape)])
        labels.attend(first, call.site)
        labels.cost(call.site, pairs * (query.shape[-1] + value.shape[-1]), first)
        if mask is not None:
            scores = torch.empty((*query.shape[:-1], key.shape[-2]), device="meta")
            operands = [([spread(first, dim, scores.shape)], list(scores.shape)), *operands_of(labels, mask)]
            labels.merge(scores, operands, call.site)
            labels.bind([mask], scores)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        query, key, mask = call["query"], call["key"], call["attn_mask"]
        scale = call["scale"] or 1 / math.sqrt(query.shape[-1])
        return relevance.attends(call, scale, lambda: _logit_mask(mask, bool(call["is_causal"]), query, key))


def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` spelt out; tensors are (length, batch, width), or (length, width)."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    if given.static_k is not None or given.static_v is not None:
        raise UnsupportedModelError(
            "F.multi_head_attention_forward with static keys is not supported.", fix="leave static_k and static_v out"
        )
    tensors = (given.query, given.key, given.value)
    unbatched = given.query.dim() == 2
    if unbatched:
        tensors = tuple(tensor.unsqueeze(1) for tensor in tensors)
    if given.use_separate_proj_weight:
        weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    else:
        weights = given.in_proj_weight.chunk(3, 0)
    biases = (None, None, None) if given.in_proj_bias is None else given.in_proj_bias.chunk(3, 0)
    heads = []
    for tensor, weight, bias in zip(tensors, weights, biases, strict=True):
        projected = F.linear(tensor, weight, bias)
        length, batch, width = projected.shape
        heads.append(projected.view(length, batch, given.num_heads, width // given.num_heads).permute(1, 2, 0, 3))
    q, k, v = heads
    k, v, attn_mask, padding = more_keys(
        k, v, (given.attn_mask, given.key_padding_mask), (given.bias_k, given.bias_v), given.add_zero_attn
    )
    mask = combined_mask(attn_mask, padding, q, k)
    dropout = given.dropout_p if given.training else 0.0
    mixed, shown = attend(q, k, v, mask, given.need_weights, dropout, given.is_causal)
    batch, _, length, width = mixed.shape
    joined = mixed.permute(2, 0, 1, 3).reshape(length, batch, given.num_heads * width)
    out = F.linear(joined, given.out_proj_weight, given.out_proj_bias)
    if shown is not None:
        shown = shown.mean(1) if given.average_attn_weights else shown
        shown = shown.squeeze(0) if unbatched else shown
    return out.squeeze(1) if unbatched else out, shown


def more_keys(
    k: Tensor, v: Tensor, masks: Sequence[Tensor | None], learnt: Sequence[Tensor | None], zero: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys and values of heads with those that belong to no token, learnt or 0, and masks that let them through."""
    bias_k, bias_v = learnt
    if bias_k is not None and bias_v is not None:
        own = [t.view(1, 1, k.shape[1], -1).transpose(1, 2).expand(len(k), -1, -1, -1) for t in (bias_k, bias_v)]
        k, v = (torch.cat(pair, 2) for pair in zip((k, v), own, strict=True))
    if zero:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    more = (0, (bias_k is not None) + zero)
    attn_mask, padding = (t if t is None or not more[1] else F.pad(t, more) for t in masks)
    return k, v, attn_mask, padding


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


register_named("input other|mat2|vec|tensor", "matmul bmm mm mv dot __matmul__", MatMul())
register_named("input other", "__rmatmul__", MatMul(reflected=True))
register(
    "input other|B upper left=True unitriangular=False out=None", torch.linalg.solve_triangular, operation=Solved()
)
register_named("input batch1|mat1|mat batch2|mat2|vec beta=1 alpha=1", "baddbmm addmm addmv", AddMatMul())
register(
    "input|mat_a weight|mat_b|mat2 offs=None bias=None out_dtype=None",
    getattr(F, "grouped_mm", None),
    getattr(torch, "_grouped_mm", None),
    operation=GroupedMatMul(),
)


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Tensor:
    """A sum of products over pairs of dimensions, as an einsum."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    count = dims if isinstance(dims, int) else 0
    pairs = (range(a.ndim - count, a.ndim), range(count)) if isinstance(dims, int) else dims
    letters = "abcdefghijklmnopqrstuvwxyz"
    own, other = list(letters[: a.ndim]), list(letters[a.ndim : a.ndim + b.ndim])
    summed = [(int(i) % a.ndim, int(j) % b.ndim) for i, j in zip(*pairs, strict=True)]
    for i, j in summed:
        other[j] = own[i]
    shared = {own[i] for i, _ in summed}
    kept = [letter for letter in (*own, *other) if letter not in shared]
    return torch.einsum(f"{''.join(own)},{''.join(other)}->{''.join(kept)}", a, b)


def _inner(input: Tensor, other: Tensor, out: None = None) -> Tensor:
    """Products of vectors along the last dimension."""
    return _tensordot(input, other, ([-1], [-1])) if input.ndim and other.ndim else input * other


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    """The distance of every two rows."""
    lengths: Tensor = torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)
    return lengths


def _cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors."""
    lengths = [torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(eps) for x in (x1, x2)]
    product: Tensor = (x1 / lengths[0]) * (x2 / lengths[1])
    return product.sum(dim)


def _distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The distance of vectors along the last dimension."""
    length: Tensor = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
    return length


def _outer(input: Tensor, vec2: Tensor, out: None = None) -> Tensor:
    """All products of numbers of two vectors."""
    return input.unsqueeze(1) * vec2.unsqueeze(0)


def _vecdot(x: Tensor, y: Tensor, dim: int = -1, out: None = None) -> Tensor:
    """Products of vectors along a dimension."""
    return (x.conj() * y if x.is_complex() else x * y).sum(dim)


def _chain(*matrices: Any, out: None = None) -> Tensor:
    """A product of several matrices."""
    many = matrices[0] if isinstance(matrices[0], tuple | list) else matrices
    product: Tensor = reduce(torch.matmul, many)
    return product


register_named("x1 x2 dim=1 eps=1e-8", "cosine_similarity", Decomposed(_cosine))
register_named("x1 x2 p=2.0 eps=1e-6 keepdim=False", "pairwise_distance", Decomposed(_distance))
register_named("input vec2", "outer ger", Decomposed(_outer))
register("x y dim=-1 out=None", torch.linalg.vecdot, operation=Decomposed(_vecdot))
register("*tensors", torch.linalg.multi_dot, torch.chain_matmul, operation=Decomposed(_chain))
register_named("a b dims=2 out=None", "tensordot", Decomposed(_tensordot))
register_named("input other out=None", "inner", Decomposed(_inner))
register_named("x1 x2 p=2.0 compute_mode=None", "cdist", Decomposed(_cdist))
register("equation *operands", torch.einsum, torch.functional.einsum, operation=Einsum())
register_named(
    "query key value attn_mask=None dropout_p=0 is_causal=False scale=None enable_gqa=False",
    "scaled_dot_product_attention",
    Attention(),
)
register("query *rest", F.multi_head_attention_forward, operation=Decomposed(_multi_head_attention))
