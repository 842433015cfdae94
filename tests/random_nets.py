"""Random networks: composed of the constructs, for property tests, and as source code, for fuzzing."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from textwrap import indent
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import more_blocks
from constructs import randomise, shuffle
from random_blocks import IMAGES, PRELUDE, TOKENS, VECTORS

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


# -- networks as source code -------------------------------------------------------------------------------------------
OUTPUTS = [
    "y", "y", "y", "y", "y", "y", "(y, y.sigmoid())", "{'logits': y}", "[y]", "(y, None)", "Out(y, y * 100)",
    "[Box(y)]", "{'out': Box(y), 'n': 3}", "(y, {'features': x})", "Pair(y, x)",
    "[Out(y[i], x[i]) for i in range(len(y))]",
    "{'boxes': y * 1000, 'scores': y[..., :2] * 1e-3}", "(y.argmax(-1), y)", "y.argmax(-1)", "y > 0", "Named(logits=y)",
    "torch.distributions.Normal(y, 1.0)", "Slots(y)", "(y.softmax(-1), x.mean())", "y.round()", "y.log_softmax(-1)",
    "{'dist': Box(Box(x))}", "Box([y, (y, {'z': Box(y + 1)})])", "y.squeeze()", "y[..., 0]", "y.exp().clamp_max(99)",
]  # fmt: skip
_OBJECTS = """
Pair = namedtuple("Pair", "first second")

class Named(OrderedDict):
    def __getattr__(self, name):
        return self[name]

@dataclass
class Out:
    logits: torch.Tensor
    boxes: torch.Tensor
    step: int = 0

@dataclass(slots=True)
class Slots:
    logits: torch.Tensor

class Box:
    def __init__(self, inside):
        self.inside = inside
"""
_ACTS = [
    "F.relu", "F.relu", "F.relu", "F.gelu", "F.silu", "torch.tanh", "F.leaky_relu", "torch.sigmoid", "F.elu",
    "F.softplus", "F.hardswish", "F.mish", "torch.sin", "torch.cos", "torch.abs", "F.softsign", "F.relu6",
    "torch.square", "F.selu", "torch.Tensor.relu", "F.tanhshrink", "F.logsigmoid", "F.hardtanh",
]  # fmt: skip
_FORMATS = [torch.float32] * 16 + [torch.float64, torch.float64, torch.bfloat16, torch.bfloat16, torch.float16]
_EXAMPLES = ["random"] * 8 + ["zeros", "zeros", "ones", "half", "positive", "one sample", "short"]


def _table(text: str) -> dict[str, tuple[str, str]]:
    parts = [part.partition("\n") for part in text.split("## ")[1:]]
    return {name.strip(): (body.split("--\n")[0], body.split("--\n")[1]) for name, _, body in parts}


#: The blocks of networks up to a number that tests name, and those of all others.
_FIRST, _FIRST_NUMBERS = {"image": _table(IMAGES), "tokens": _table(TOKENS), "vector": _table(VECTORS)}, 7_000
TABLES = {
    "image": _FIRST["image"] | _table(more_blocks.IMAGES),
    "tokens": _FIRST["tokens"] | _table(more_blocks.TOKENS),
    "vector": _FIRST["vector"] | _table(more_blocks.VECTORS),
}
_SIZES = {"image": (8, 12), "tokens": (6, 9), "ids": (6, 9), "vector": (6, 6)}


@dataclass(frozen=True)
class Network:
    """A random network as source code, and what it is called on."""

    number: int
    source: str
    blocks: tuple[str, ...]
    family: str
    example: str
    dtype: torch.dtype
    form: str
    extra: bool
    training: bool
    output: str

    @property
    def traits(self) -> tuple[str, ...]:
        """What it is made of, for counts."""
        rest = [
            f"output: {self.output}",
            f"example: {self.example}",
            f"format: {str(self.dtype).removeprefix('torch.')}",
        ]
        rest += [f"input: {self.form}", *["input: optional"] * self.extra, *["in training mode"] * self.training]
        rest += ["heads that only training returns"] * ("self.aux" in self.source)
        return (*self.blocks, *rest)

    def build(self) -> nn.Module:
        """The same module every time."""
        module = ModuleType("random_network")
        sys.modules[module.__name__] = module  # dataclasses look themselves up
        exec(compile(self.source, f"<network {self.number}>", "exec"), vars(module))
        torch.manual_seed(self.number)
        net: nn.Module = randomise(module.Net())
        net._apply(lambda t: t.to(self.dtype) if t.is_floating_point() else t)
        return net.train(self.training)

    def inputs(self, seed: int, kind: str = "random", batch: int = 3, size: int = 0, extra: bool = False) -> Any:
        """What the network is called on. `size` 1 is another height, width or length than that of the example."""
        draw = torch.Generator().manual_seed(seed)
        n, t = (1 if kind == "one sample" else batch), _SIZES[self.family][size]
        if kind == "short" and self.family in ("tokens", "ids") and not any(b.endswith("!") for b in self.blocks):
            t = 1
        shape = {"image": (n, 3, t, t), "tokens": (n, t, 6), "ids": (n, t), "vector": (n, 6)}[self.family]
        if self.family == "ids":
            x = torch.randint(0, 11, shape, generator=draw)
            x = torch.full_like(x, 0 if kind == "zeros" else 1) if kind in ("zeros", "ones", "half") else x
        else:
            x = torch.randn(shape, generator=draw)
            x = {"zeros": 0 * x, "ones": 0 * x + 1, "half": 0 * x + 0.5, "positive": x.abs(), "negative": -x.abs()}.get(
                kind, x
            )
            x = x.to(self.dtype)
        given = {"x": x} | ({"extra": torch.randn(n, 4, generator=draw).to(self.dtype)} if extra else {})
        return given if self.form == "dict" else tuple(given.values()) if self.form == "tuple" or extra else x


def _filled(text: str, rng: random.Random, width: int, heads: int) -> str:
    """Source code without alternatives and placeholders."""
    while "«" in text:
        text = re.sub("«([^«»]*)»", lambda found: rng.choice(found[1].split("|")), text)
    text = re.sub(r"\$act", lambda _: rng.choice(_ACTS), text)
    return text.replace("$c", str(width)).replace("$h", str(heads))


_STEMS = {
    "image": "conv(3, $c)", "tokens": "nn.Linear(6, $c)", "ids": "nn.Embedding(11, $c)", "vector": "nn.Linear(6, $c)",
}  # fmt: skip
_ADDED = {"image": "[:, :, None, None]", "tokens": "[:, None]", "vector": ""}
_POOLS = {
    "image": [
        "x = x.mean((2, 3))", "x = x.mean((2, 3))", "x = F.adaptive_avg_pool2d(x, 1).flatten(1)", "x = x.amax((2, 3))",
        "x = x.flatten(2).mean(-1)", "x = x.permute(0, 2, 3, 1)", "x = x.flatten(1)",
    ],
    "tokens": ["x = x.mean(1)", "x = x[:, 0]", "x = x[:, -1]", "pass", "x = x.amax(1)", "x = x.mean(dim=-2)"],
    "vector": ["pass"],
}  # fmt: skip


def network(number: int, *, only: str | None = None) -> Network:
    """The random network of that number. `only` is the name of a block, such as "image: conv", that it consists of."""
    rng, tables = random.Random(number), _FIRST if number < _FIRST_NUMBERS else TABLES
    family = only.split(": ")[0] if only else rng.choices(["image", "tokens", "ids", "vector"], [9, 6, 2, 4])[0]
    stage, (width, heads) = "tokens" if family == "ids" else family, rng.choice([(8, 2), (8, 4), (12, 2), (16, 4)])
    parts, names, classes = [f"self.stem = {_STEMS[family]}"], [], []
    calls = [rng.choice(["x = self.stem(x)", "x = self.stem(x)", "x = $act(self.stem(x))"])]
    extra = rng.random() < 0.08
    if extra:
        parts.append("self.extra = nn.Linear(4, $c)")
        calls.append(f"if extra is not None:\n    x = x {rng.choice('+*')} self.extra(extra){_ADDED[stage]}")
    free = True  # whether the size may vary
    for i in range(1 if only else rng.choice([1, 1, 2, 2, 3, 4])):
        if i and stage != "vector" and rng.random() < 0.15:
            calls.append("x = F.avg_pool2d(x, 2).flatten(2).transpose(1, 2)" if stage == "image" else "x = x.mean(1)")
            stage, free = ("tokens", False) if stage == "image" else ("vector", free)
        name = only.split(": ")[1] if only else rng.choice([b for b in tables[stage] if free or not b.endswith("!")])
        names.append(f"{stage}: {name}")
        init, run = TABLES[stage][name]
        classes.append(_module(f"Block{i}", init, "x", run.rstrip(), f"  # {name}"))
        parts.append(f"self.block{i} = Block{i}()")
        calls.append(f"x = self.block{i}(x)")
        if "BatchNorm" not in init and rng.random() < 0.05:
            calls.append(f"x = self.block{i}(x)")
    calls.append(rng.choice(_POOLS[stage]))
    wide = "$c * 64" if calls[-1] == "x = x.flatten(1)" else "$c"
    output = rng.choice(OUTPUTS)
    tied = family == "ids" and rng.random() < 0.3
    head = "nn.Linear($c, 11, bias=False)\nself.head.weight = self.stem.weight" if tied else f"nn.Linear({wide}, 5)"
    parts.append(f"self.head = {head}")
    calls.append("y = self.head(x)")
    if rng.random() < 0.06:
        parts.append(f"self.aux = nn.Linear({wide}, 3)")
        calls.append(f"if self.training:\n    return {output}, self.aux(x)")
    if rng.random() < 0.04:
        parts.append("self.spare = nn.Linear($c, $c)")
    calls.append(f"return {output}")
    net = _module("Net", "\n".join(parts), "x, extra=None" if extra else "x", "\n".join(calls))
    source = _filled("\n\n".join([*classes, net]), rng, width, heads)
    objects = _OBJECTS if re.search(r"Out\(|Box\(|Pair\(|Named\(|Slots\(", output) else ""
    return Network(
        number, f"{PRELUDE}{objects}\n{source}\n", tuple(names), family, rng.choice(_EXAMPLES), rng.choice(_FORMATS),
        rng.choice(["tensor", "tensor", "tensor", "tuple", "dict"]), extra, rng.random() < 0.15, output,
    )  # fmt: skip


def _module(name: str, init: str, takes: str, run: str, note: str = "") -> str:
    head = f"class {name}(nn.Module):{note}\n    def __init__(self):\n        super().__init__()\n"
    return f"{head}{indent(init.rstrip(), ' ' * 8)}\n    def forward(self, {takes}):\n{indent(run, ' ' * 8)}"
