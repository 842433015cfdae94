"""Small networks, one per construct that a pruner must understand. Each entry builds a net and an example input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A stem and a head around a body that is given as a function of the module."""

    def __init__(
        self, body: Callable[[Any, Tensor], Tensor], head_in: int = 16, flatten: bool = False, **parts: Any
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.head = nn.Linear(head_in, 5)
        self.body, self.flatten = body, flatten

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self, self.stem(x).relu())
        return self.head(x.flatten(1) if self.flatten else x.mean((2, 3)))


def image(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size)


def conv(i: int = 16, o: int = 16, k: int = 3, **kw: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=k // 2, **kw)


def shuffle(x: Tensor, groups: int = 4) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).reshape(b, c, h, w)


def squeeze_excite(m: Any, x: Tensor) -> Tensor:
    gate = m.up(F.relu(m.down(x.mean((2, 3), keepdim=True)))).sigmoid()
    return m.c(x * gate)


def glu(m: Any, x: Tensor) -> Tensor:
    return m.c(F.glu(m.wide(x), 1))


def slices(m: Any, x: Tensor) -> Tensor:
    return m.c(x[:, :8]) + m.d(x[:, 8:])


def option_a(m: Any, x: Tensor) -> Tensor:
    shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))
    return F.relu(m.b(m.a(x)) + shortcut)


def option_a_twice(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m.a(x) + x)
    return F.relu(m.c(F.relu(m.b(x))) + F.pad(x, (0, 0, 0, 0, 8, 8)))


def csp(m: Any, x: Tensor) -> Tensor:
    """The split-and-concat block of the YOLO family."""
    parts = list(m.wide(x).chunk(2, 1))
    parts.append(m.c(parts[-1]))
    parts.append(m.d(parts[-1]))
    return m.out(torch.cat(parts, 1))


def inception_like(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.cat([m.a(x), F.relu(m.b(x)), F.max_pool2d(x, 3, 1, 1)], 1))


class Tokens(nn.Module):
    """A tiny vision transformer with class token, position embedding and PyTorch's own attention module."""

    def __init__(self, width: int = 16, heads: int = 4, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.norm1, self.norm2, self.norm3 = norm(width), norm(width), norm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.scale = nn.Parameter(torch.rand(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.scale * self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x)[:, 0])


class HandWritten(nn.Module):
    """Attention as people write it: one qkv layer, reshapes with the number of heads, scaled dot product."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.inp, self.qkv, self.proj, self.out = (
            nn.Linear(6, 16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )
        self.num_heads, self.head_dim, self.fused = 4, 4, fused

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q * self.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(x + self.proj(y.transpose(1, 2).flatten(2)))


class GroupedQuery(nn.Module):
    """Four query heads share two key/value heads, with rotary factors and RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(6, 16), nn.RMSNorm(16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o, self.out = nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("cos", torch.rand(7, 4))
        self.num_heads, self.kv_heads = 4, 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        b, n, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(b, n, -1, 4).transpose(1, 2) * self.cos
        k, v = (p(y).view(b, n, -1, 4).transpose(1, 2) for p in (self.k, self.v))
        k, v = ((t * self.cos if t is k else t).repeat_interleave(2, 1) for t in (k, v))
        return self.out(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Tied(nn.Module):
    """Embedding and output layer share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        return self.out(y + self.mix(y).tanh())


class Mixer(nn.Module):
    """Layers across tokens and across channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, 4)
        self.a, self.b, self.c, self.d = nn.Linear(4, 9), nn.Linear(9, 4), nn.Linear(12, 20), nn.Linear(20, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.b(F.gelu(self.a(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.d(F.gelu(self.c(x)))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inp, self.rnn, self.out = nn.Linear(6, 10), kind(10, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.inp(x).relu())[0][:, -1])


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.loop, self.head = conv(3, 12), conv(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = F.relu(self.loop(x), inplace=True)
        return self.head(x.mean((2, 3)))


def _sequential(*parts: nn.Module) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (nn.Sequential(*parts, nn.Flatten(), nn.LazyLinear(5)), image())


def _net(body: Callable[[Any, Tensor], Tensor], **parts: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Net(body, **parts), image())


def rows_written(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :, 0] = m.c(x)[:, :, 0]
    y[:, :, 1:] = m.d(x)[:, :, 1:]
    return m.e(y)  # type: ignore[no-any-return]


def solved(m: Any, x: Tensor) -> Tensor:
    return m.e(torch.linalg.solve_triangular(m.c(x), m.d(x), upper=False, unitriangular=True))  # type: ignore[no-any-return]


CONSTRUCTS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "conv chain": _sequential(conv(3, 12), nn.BatchNorm2d(12), nn.ReLU(True), conv(12, 9)),
    "conv1d": lambda: (
        nn.Sequential(nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(36, 4)),
        torch.randn(2, 2, 10),
    ),
    "conv3d": lambda: (
        nn.Sequential(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(64, 4)),
        torch.randn(2, 2, 6, 6, 6),
    ),
    "transposed": _sequential(conv(3, 8), nn.ConvTranspose2d(8, 6, 2, 2), nn.ReLU(), conv(6, 4)),
    "transposed grouped": _sequential(conv(3, 8), nn.ConvTranspose2d(8, 12, 2, 2, groups=4), nn.ReLU(), conv(12, 4)),
    "grouped": _sequential(conv(3, 16), nn.ReLU(), conv(16, 24, groups=4), nn.ReLU(), conv(24, 4)),
    "depthwise": _sequential(conv(3, 12), conv(12, 12, groups=12), nn.BatchNorm2d(12), nn.ReLU6(), conv(12, 6, 1)),
    "depthwise multiplier": _sequential(conv(3, 6), conv(6, 12, groups=6), nn.ReLU(), conv(12, 6, 1)),
    "single output filter": _sequential(conv(3, 1), nn.ReLU(), conv(1, 6), nn.ReLU(), conv(6, 6)),
    "group norm": _sequential(conv(3, 16), nn.GroupNorm(4, 16), nn.ReLU(), conv(16, 4)),
    "group norm, one group": _sequential(conv(3, 16), nn.GroupNorm(1, 16), nn.ReLU(), conv(16, 4)),
    "instance norm": _sequential(conv(3, 16), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), conv(16, 4)),
    "prelu": _sequential(conv(3, 16), nn.PReLU(16), conv(16, 8), nn.PReLU(), conv(8, 4)),
    "local response norm": _sequential(conv(3, 8), nn.LocalResponseNorm(3), conv(8, 8), nn.ReLU(), conv(8, 4)),
    "pools": _sequential(conv(3, 8), nn.MaxPool2d(3, 2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(2), conv(8, 4)),
    "pixel shuffle": _sequential(conv(3, 16), nn.PixelShuffle(2), conv(4, 8), nn.PixelUnshuffle(2), conv(32, 4)),
    "flatten": lambda: (Net(lambda m, x: m.c(x), c=conv(16, 6), flatten=True, head_in=384), image()),
    "residual": _net(lambda m, x: F.relu(x + m.d(F.relu(m.c(x)))), c=conv(), d=conv()),
    "residual inplace": _net(lambda m, x: m.d(m.c(x).relu_()).add_(x).relu_(), c=conv(), d=conv()),
    "residual on the input": lambda: (nn.Sequential(_Skip(conv(3, 8), conv(8, 3)), conv(3, 4)), image()),
    "concat": _net(inception_like, a=conv(16, 8), b=conv(16, 4), out=conv(28, 16)),
    "squeeze-excite": _net(squeeze_excite, down=conv(16, 4, 1), up=conv(4, 16, 1), c=conv()),
    "spatial gate": _net(lambda m, x: m.c(x * m.gate(x).sigmoid()), gate=conv(16, 1), c=conv()),
    "channel shuffle": _net(lambda m, x: m.d(shuffle(m.c(x))), c=conv(), d=conv()),
    "channel shuffle, depthwise": _net(lambda m, x: m.e(m.d(shuffle(m.c(x)))), c=conv(), d=conv(groups=16), e=conv()),
    "slices": _net(slices, c=conv(8, 16), d=conv(8, 16)),
    "slice from the end": _net(lambda m, x: m.c(x[:, -6:]) + m.d(x[:, :-6]), c=conv(6, 16), d=conv(10, 16)),
    "chunk": _net(lambda m, x: m.c(x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid()), c=conv(8, 16)),
    "split, csp": _net(csp, wide=conv(16, 16), c=conv(8, 8), d=conv(8, 8), out=conv(32, 16)),
    "glu": _net(glu, wide=conv(16, 20), c=conv(10, 16)),
    "zero-padded shortcut": lambda: (Net(option_a, a=conv(), b=conv(16, 32, stride=2), head_in=32), image()),
    "zero-padded shortcut, deeper": lambda: (
        Net(option_a_twice, a=conv(), b=conv(), c=conv(16, 32), head_in=32),
        image(),
    ),
    "layer scale": _net(lambda m, x: x + m.s * m.c(x), s=nn.Parameter(torch.rand(16, 1, 1)), c=conv()),
    "buffer": _net(lambda m, x: m.c(x * m.s), s=torch.rand(16, 1, 1), c=conv()),
    "constant": _net(lambda m, x: m.c(x * torch.ones(16, 1, 1)), c=conv()),
    "constants in view": _net(lambda m, x: m.c(x.view(x.shape[0], 4, 4, 8, 8).sum(2).repeat(1, 4, 1, 1)), c=conv()),
    "sigmoid between": _sequential(conv(3, 8), nn.Sigmoid(), conv(8, 8), nn.Softplus(), conv(8, 4)),
    "channel maximum": _net(lambda m, x: m.d(m.c(x) + x.amax(1, keepdim=True)), c=conv(), d=conv()),
    "channel sum": _net(lambda m, x: m.d(m.c(x) + x.sum(1, keepdim=True)), c=conv(), d=conv()),
    "channel softmax": _net(lambda m, x: m.d(m.c(x).softmax(1)), c=conv(), d=conv()),
    "rows written": _net(rows_written, c=conv(), d=conv(), e=conv()),
    "solved": _net(solved, c=conv(), d=conv(), e=conv()),
    "stack": _net(lambda m, x: m.e(torch.stack([m.c(x), m.d(x)]).sum(0)), c=conv(), d=conv(), e=conv()),
    "interpolate": _net(lambda m, x: m.d(F.interpolate(m.c(x), scale_factor=2)), c=conv(), d=conv()),
    "reflect pad": _net(lambda m, x: m.d(F.pad(m.c(x), (1, 1, 1, 1), mode="reflect")), c=conv(), d=conv()),
    "vstack": _net(lambda m, x: m.c(sum(torch.vstack([x, m.d(x)]).chunk(2))), c=conv(), d=conv()),
    "hstack": _net(lambda m, x: m.c(torch.hstack([x, m.d(x)])), c=conv(32), d=conv(16, 16)),
    "column_stack": lambda: (Net(lambda m, x: m.c(torch.column_stack((x, x))), c=conv(32)), image()),
    "broadcast_tensors": _net(
        lambda m, x: m.c(torch.mul(*torch.broadcast_tensors(x, x.mean((2, 3), keepdim=True)))), c=conv()
    ),
    "diff": _net(lambda m, x: m.c(torch.diff(x, dim=2)), c=conv()),
    "diff of units": _net(lambda m, x: m.c(m.d(x).diff(dim=1)), c=conv(15), d=conv()),
    "windows": _net(lambda m, x: m.c(x.unfold(2, 3, 2).mean(-1)), c=conv()),
    "windows of units": _net(lambda m, x: m.c(m.d(x).unfold(1, 4, 4).sum(-1)), c=conv(4), d=conv()),
    "exp2, trunc, hypot": _net(lambda m, x: m.c(torch.hypot(m.d(x).exp2(), torch.trunc(3 * x))), c=conv(), d=conv()),
    "tensordot": _net(
        lambda m, x: m.c(torch.tensordot(x, m.d(x).mean((0, 2, 3)), dims=([1], [0]))[:, None]), c=conv(1), d=conv()
    ),
    "inner": _net(
        lambda m, x: m.c(torch.inner(m.d(x).movedim(1, -1), m.e.weight).movedim(-1, 1)),
        c=conv(2),
        d=conv(),
        e=nn.Linear(16, 2),
    ),
    "cdist": _net(
        lambda m, x: m.c(torch.cdist(m.d(x).flatten(2).mT, x.flatten(2).mT).mean(2).view(-1, 1, 8, 8)),
        c=conv(1),
        d=conv(),
    ),
    "reused": lambda: (Reused(), image()),
    "transformer": lambda: (Tokens(), image()),
    "transformer, RMS norm": lambda: (Tokens(norm=nn.RMSNorm), image()),
    "handwritten attention": lambda: (HandWritten(fused=False), torch.randn(2, 7, 6)),
    "fused attention": lambda: (HandWritten(fused=True), torch.randn(2, 7, 6)),
    "grouped queries": lambda: (GroupedQuery(), torch.randn(2, 7, 6)),
    "encoder layer": lambda: (
        nn.Sequential(nn.Linear(6, 16), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), nn.Linear(16, 3)),
        torch.randn(2, 7, 6),
    ),
    "tied": lambda: (Tied(), torch.randint(0, 11, (2, 7))),
    "mixer": lambda: (Mixer(), image()),
    "lstm": lambda: (Recurrent(nn.LSTM), torch.randn(2, 7, 6)),
    "gru": lambda: (Recurrent(nn.GRU), torch.randn(2, 7, 6)),
    "dict input": lambda: (_Named(), {"left": torch.randn(2, 4), "right": torch.randn(2, 4)}),
    "two outputs": lambda: (_TwoHeads(), torch.randn(2, 4)),
}


class _Skip(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.c(torch.maximum(self.a(left), self.b(right)))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x).relu()
        return {"a": self.a(x), "b": self.b(x)}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A construct with weights, biases and BatchNorm statistics that hide no mistake."""
    torch.manual_seed(seed)
    model, example = CONSTRUCTS[name]()
    model = copy.deepcopy(model).eval()  # the parts were made when the table was
    with torch.no_grad():
        model(**example) if isinstance(example, dict) else model(example)
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
            module.reset_parameters()
    randomise(model)
    return model, example


def randomise(model: nn.Module) -> nn.Module:
    """Random BatchNorm statistics and non-zero biases, so that mistakes show."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model
