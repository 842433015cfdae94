"""`nn.MultiheadAttention` with fewer heads, or on a narrower stream, than its own forward can express."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.ops.attention import attend, combined_mask, more_keys
from secateur.plans.plan import Plan

_PARAMETERS = (
    "in_proj_weight",
    "in_proj_bias",
    *(f"{x}_proj_weight" for x in "qkv"),
    "out_proj.weight",
    "out_proj.bias",
    "bias_k",
    "bias_v",
)


class NarrowAttention(nn.MultiheadAttention):
    """Multi-head attention whose inner width (heads times head width) may differ from the width of the stream.

    PyTorch's own module takes the head width to be the stream's width divided by the number of heads, which stops being
    true once heads, or channels of the stream, are gone.
    """

    head_dim: int
    packed: bool  # query, key and value share one weight

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        unbatched = query.dim() == 2
        if unbatched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        if self.packed:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        q, k, v = (
            torch.unflatten(F.linear(t, w, b), -1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for t, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        k, v, attn_mask, key_padding_mask = more_keys(
            k, v, (attn_mask, key_padding_mask), (self.bias_k, self.bias_v), self.add_zero_attn
        )
        mask = combined_mask(attn_mask, key_padding_mask, q, k)
        mixed, shown = attend(q, k, v, mask, need_weights, self.dropout if self.training else 0.0, is_causal)
        if shown is not None and average_attn_weights:
            shown = shown.mean(1)
        # As in PyTorch's own module, the last layer is called as a function: its units keep their place in scores.
        out = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if unbatched:
            return out.squeeze(0), None if shown is None else shown.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), shown


def narrow_attention(small: nn.Module, path: str, old: nn.MultiheadAttention, plan: Plan) -> None:
    """Give the module at `path` the forward and the attributes that fit its cut weights, if any was cut."""
    prefix = f"{path}." if path else ""
    if not any(prefix + name in plan.cuts for name in _PARAMETERS):
        return
    module: Any = small.get_submodule(path)
    packed = old.packed if isinstance(old, NarrowAttention) else old._qkv_same_embed_dim
    weight = module.in_proj_weight if packed else module.q_proj_weight
    module.__class__ = NarrowAttention
    module.packed = packed
    # False keeps nn.TransformerEncoderLayer off its fused path, which would take the stream's width for the heads'.
    module._qkv_same_embed_dim = False
    module.head_dim = old.head_dim
    module.num_heads = weight.shape[0] // (3 if packed else 1) // old.head_dim
    module.embed_dim = module.out_proj.out_features
    module.kdim = weight.shape[1] if packed else module.k_proj_weight.shape[1]
    module.vdim = weight.shape[1] if packed else module.v_proj_weight.shape[1]
