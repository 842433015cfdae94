"""Random networks composed of the constructs, for property tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from constructs import randomise, shuffle

BLOCKS = [
    "conv", "depthwise", "grouped", "residual", "bottleneck", "gate", "concat", "shuffle", "chunk", "glu", "scale",
    "slice", "pad", "prelu", "group_norm", "layer_norm", "reuse", "attention", "pixel", "pool", "transposed", "stack",
    "mean_gate",
]  # fmt: skip


class Block(nn.Module):
    """One construct that maps (n, width, h, w) to the same shape, or to half the space for a pool."""

    def __init__(self, kind: str, width: int, previous: nn.Module | None) -> None:
        super().__init__()
        self.kind = kind
        c = lambda i, o, k=3, **kw: nn.Conv2d(i, o, k, padding=k // 2, **kw)  # noqa: E731
        w = width
        if kind == "reuse":
            self.a = previous.a if previous is not None and previous.kind == "conv" else c(w, w)
        elif kind in (
            "conv",
            "residual",
            "scale",
            "prelu",
            "group_norm",
            "layer_norm",
            "shuffle",
            "stack",
            "pad",
            "pool",
        ):
            self.a, self.b = c(w, w), c(w, w)
        elif kind == "depthwise":
            self.a, self.b = c(w, w, groups=w), c(w, w, 1)
        elif kind == "grouped":
            self.a, self.b = c(w, w, groups=4), c(w, w, 1)
        elif kind == "bottleneck":
            self.a, self.b, self.c = c(w, w // 2, 1), c(w // 2, w // 2), c(w // 2, w, 1)
        elif kind in ("gate", "mean_gate"):
            self.a, self.b = c(w, w // 2, 1), c(w // 2, w, 1)
        elif kind == "concat":
            self.a, self.b, self.c = c(w, w // 2), c(w, 3), c(w // 2 + 3 + w, w, 1)
        elif kind == "chunk":
            self.a, self.b = c(w // 2, w // 2), c(w, w, 1)
        elif kind == "glu":
            self.a, self.b = c(w, 2 * w, 1), c(w, w)
        elif kind == "slice":
            self.a, self.b = c(3, w), c(w - 3, w)
        elif kind == "attention":
            self.qkv, self.proj, self.num_heads, self.head_dim = nn.Linear(w, 3 * w), nn.Linear(w, w), 4, w // 4
        elif kind == "pixel":
            self.a, self.b = c(w, 4 * 5, 1), nn.Conv2d(5, w, 2, 2)
        elif kind == "transposed":
            self.a, self.b = nn.ConvTranspose2d(w, w // 2, 2, 2), nn.Conv2d(w // 2, w, 2, 2)
        if kind in ("conv", "residual", "bottleneck", "depthwise"):
            self.norm: nn.Module = nn.BatchNorm2d(w)
        elif kind == "group_norm":
            self.norm = nn.GroupNorm(4, w)
        elif kind == "layer_norm":
            self.norm = nn.LayerNorm(w)
        elif kind == "scale":
            self.gamma = nn.Parameter(torch.rand(w, 1, 1))
        elif kind == "prelu":
            self.slope = nn.PReLU(w)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind
        if kind in ("conv", "reuse"):
            return F.relu(self.a(x))
        if kind in ("depthwise", "grouped"):
            return self.b(F.relu(self.a(x)))
        if kind == "residual":
            return (x + self.norm(self.b(self.a(x).relu_()))).relu()
        if kind == "bottleneck":
            return F.relu(self.norm(self.c(F.silu(self.b(F.gelu(self.a(x)))))) + x)
        if kind == "gate":
            return x * self.b(F.relu(self.a(x.mean((2, 3), keepdim=True)))).sigmoid()
        if kind == "mean_gate":
            return x * torch.sigmoid(self.b(self.a(F.adaptive_avg_pool2d(x, 1)).relu()) + 1)
        if kind == "concat":
            return self.c(torch.cat([self.a(x), F.relu(self.b(x)), x], 1))
        if kind == "shuffle":
            return self.b(shuffle(self.a(x)))
        if kind == "chunk":
            left, right = x.chunk(2, 1)
            return self.b(torch.cat([left, self.a(right)], 1))
        if kind == "glu":
            return self.b(F.glu(self.a(x), 1))
        if kind == "scale":
            return x + self.gamma * self.a(x)
        if kind == "slice":
            return self.a(x[:, :3]) - self.b(x[:, 3:])
        if kind == "pad":
            return F.pad(self.a(x)[:, 2:], (0, 0, 0, 0, 0, 2)) + self.b(x)
        if kind == "prelu":
            return self.slope(self.b(self.slope(self.a(x))))
        if kind == "group_norm":
            return self.b(self.norm(self.a(x)))
        if kind == "layer_norm":
            return self.norm(self.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + x
        if kind == "attention":
            n, _, h, v = x.shape
            y = x.flatten(2).transpose(1, 2)
            q, k, u = self.qkv(y).reshape(n, h * v, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, u).transpose(1, 2).flatten(2)
            return x + self.proj(y).transpose(1, 2).reshape(n, -1, h, v)
        if kind == "pixel":
            return self.b(F.pixel_shuffle(self.a(x), 2))
        if kind == "transposed":
            return self.b(F.relu(self.a(x)))
        if kind == "stack":
            return torch.stack([self.a(x), self.b(x)], 1).amax(1)
        assert kind == "pool"
        return F.avg_pool2d(F.max_pool2d(self.a(x), 3, 1, 1), 3, 1, 1) + x


class RandomNet(nn.Module):
    """A stem, some blocks, a head that flattens or averages."""

    def __init__(self, kinds: list[str], width: int, flatten: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        for kind in kinds:
            self.blocks.append(Block(kind, width, self.blocks[-1] if len(self.blocks) else None))
        self.flatten, self.head = flatten, nn.Linear(width * 16 if flatten else width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1) if self.flatten else x.mean((2, 3)))


@st.composite
def networks(draw: st.DrawFn) -> RandomNet:
    kinds = draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6))
    width, flatten = draw(st.sampled_from([8, 16])), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 1000)))
    net = RandomNet(kinds, width, flatten)
    return randomise(net).eval()
