"""Everyday operations of torch: which units pass through them, compared with zero-masking, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from oracle import random_scores
from test_by_construction import exact

Body = Callable[[Any, Tensor, Tensor], Tensor]
NODES = torch.tensor([0, 2, 2, 1, 0, 3])


class Net(nn.Module):
    """Two linear layers of six tokens (or nodes), something made of them, and a reader."""

    def __init__(self, body: Body, width: int = 8, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(5, 8), nn.Linear(5, 8), body
        for name, part in parts.items():
            setattr(self, name, part)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.a(x), self.b(x)))


def tokens() -> Tensor:
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def spread(h: Tensor) -> Tensor:
    """The nodes, repeated over batch and channels."""
    return NODES.view(1, -1, 1).expand_as(h)


def ranks(k: Tensor) -> Tensor:
    """Tokens in the order of their sums."""
    return k.sum(-1).argsort(1).unsqueeze(-1)


def added_in_place(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made.index_add_(1, NODES, h)
    return made


def image(h: Tensor) -> Tensor:
    """Tokens as an image of 2 x 3 pixels."""
    return h.mT.unflatten(2, (2, 3))


def assigned(h: Tensor, k: Tensor) -> Tensor:
    """Rows of two layers, each written into the rows that a mask names."""
    made = torch.zeros((*h.shape[:2], h.shape[2]), dtype=h.dtype)
    made[:, NODES > 0] = h[:, NODES > 0]
    made[:, torch.where(NODES == 0)[0]] = k[:, NODES == 0]
    return made


def unpooled(m: Any, h: Tensor, k: Tensor) -> Tensor:
    small, places = F.max_pool1d(h.mT, 2, return_indices=True)
    return F.max_unpool1d(small, places, 2).mT + k


GRID = torch.rand(2, 4, 4, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 - 1
WINDOW = torch.ones(8)

#: What is done with two layers, the width of the result, and the layers that may lose units (what nobody reads may).
EVERYDAY: dict[str, tuple[Body, int, str]] = {
    "sum over nodes, in place": (lambda m, h, k: added_in_place(h) + k, 8, "a"),
    "index_add": (lambda m, h, k: torch.index_add(k, 1, NODES, h), 8, "a"),
    "scatter_add": (lambda m, h, k: torch.zeros_like(k).scatter_add(1, spread(h), h), 8, "a"),
    "scatter_add_ onto units": (lambda m, h, k: k.clone().scatter_add_(dim=1, index=spread(h), src=h), 8, "a"),
    "scatter_reduce": (lambda m, h, k: k.scatter_reduce(1, spread(h), h, reduce="mean"), 8, "a"),
    "scatter_reduce amax": (lambda m, h, k: k.scatter_reduce(1, spread(h), h, "amax", include_self=False), 8, "a"),
    "scatter_add across channels": (lambda m, h, k: k.scatter_add(2, (h > 0).long(), h), 8, ""),
    "rows that are written": (lambda m, h, k: assigned(h, k), 8, "a"),
    "channels that are written": (lambda m, h, k: h.clone().index_put_((torch.arange(2),), k) + k, 8, ""),
    "gather of tokens": (lambda m, h, k: h.gather(1, spread(h)) + k, 8, "a"),
    "gather, repeated": (lambda m, h, k: h.gather(1, NODES.view(1, -1, 1).repeat(2, 1, h.shape[2])), 8, "ab"),
    "gather, computed": (lambda m, h, k: h.gather(1, ranks(k).repeat(1, 1, h.shape[2])), 8, "ab"),
    "gather, computed, of a fixed size": (lambda m, h, k: h.gather(1, ranks(k).repeat(1, 1, 8)), 8, "b"),
    "scatter_add, computed": (lambda m, h, k: k.scatter_add(1, ranks(k).tile(1, 1, h.shape[2]), h), 8, "a"),
    "gather of channels": (lambda m, h, k: h.gather(2, (k > 0).long()), 8, ""),
    "index_select of nodes": (lambda m, h, k: h.index_select(1, NODES) * k, 8, "a"),
    "invert": (lambda m, h, k: h * ~(k > 0), 8, "a"),
    "hstack": (lambda m, h, k: torch.hstack([h, k]), 8, "a"),
    "dstack": (lambda m, h, k: torch.dstack((h, k)), 16, "ab"),
    "vsplit": (lambda m, h, k: torch.vsplit(h, 2)[0] + k[:1], 8, "a"),
    "dsplit": (lambda m, h, k: torch.cat(h.dsplit(2), 2) + k, 8, "a"),
    "atleast_3d": (lambda m, h, k: torch.atleast_3d(h, k)[1] + h, 8, "a"),
    "meshgrid": (lambda m, h, k: h + torch.meshgrid(k[0, 0], h[0, :, 0], indexing="xy")[0], 8, "a"),
    "channel_shuffle": (lambda m, h, k: F.channel_shuffle(image(h), 2).flatten(2).mT, 8, "ab"),
    "as_tensor": (lambda m, h, k: torch.as_tensor(h) + torch.as_tensor(1.5), 8, "ab"),
    "cosine_similarity": (lambda m, h, k: h * F.cosine_similarity(h, k, dim=-1)[..., None], 8, "a"),
    "cosine_similarity over tokens": (lambda m, h, k: torch.cosine_similarity(h, k), 8, "a"),
    "pairwise_distance": (lambda m, h, k: h * F.pairwise_distance(h, k)[..., None], 8, ""),
    "cdist": (lambda m, h, k: torch.cdist(h, k) @ h, 8, "a"),
    "linalg.norm": (lambda m, h, k: h * torch.linalg.norm(k, dim=-1, keepdim=True), 8, "ab"),
    "linalg.norm, ord": (lambda m, h, k: h * torch.linalg.norm(input=k, ord=1, dim=-1, keepdim=True), 8, "ab"),
    "smallest norm": (lambda m, h, k: h * torch.linalg.norm(k, -float("inf"), -1, True), 8, "a"),
    "matrix_norm": (lambda m, h, k: h * torch.linalg.matrix_norm(k)[:, None, None], 8, "ab"),
    "count_nonzero": (lambda m, h, k: h * k.relu().count_nonzero(-1).unsqueeze(-1), 8, "ab"),
    "aminmax": (lambda m, h, k: h - h.aminmax(dim=1, keepdim=True)[0] + k, 8, "a"),
    "kthvalue": (lambda m, h, k: h - h.kthvalue(2, 1, True).values + k, 8, "a"),
    "cummax": (lambda m, h, k: h.cummax(1)[0] + k, 8, "a"),
    "cummax of channels": (lambda m, h, k: h.cummax(2)[0] + k, 8, ""),
    "cumsum_": (lambda m, h, k: (h + 0).cumsum_(1) + k, 8, "a"),
    "outer": (lambda m, h, k: h + torch.outer(h[0, :, 0], k[0, 0]), 8, "a"),
    "vecdot": (lambda m, h, k: h * torch.linalg.vecdot(h, k)[..., None], 8, "a"),
    "multi_dot": (lambda m, h, k: torch.linalg.multi_dot([h[0], k[0].T, h[1]]), 8, "a"),
    "fft over tokens": (lambda m, h, k: torch.fft.fft(h, dim=1).real + k, 8, "a"),
    "rfft2 over space": (lambda m, h, k: torch.fft.irfft2(torch.fft.rfft2(image(h)), s=(2, 3)).flatten(2).mT, 8, "ab"),
    "fft over channels": (lambda m, h, k: torch.fft.fft(h).real + k, 8, ""),
    "fftn": (lambda m, h, k: torch.fft.fftn(h, dim=(0, 1)).abs(), 8, "ab"),
    "fftshift": (lambda m, h, k: torch.fft.fftshift(h, dim=1) + k, 8, "a"),
    "stft": (lambda m, h, k: h + torch.stft(k.flatten(1), 8, return_complex=True, window=WINDOW).abs().sum(), 8, "a"),
    "max_unpool": (unpooled, 8, "a"),
    "grid_sample": (lambda m, h, k: F.grid_sample(image(h), GRID, align_corners=False).flatten(2).mT, 8, "ab"),
    "constant_pad_nd": (lambda m, h, k: torch.constant_pad_nd(h, (0, 0, 1, 0), 0.0), 8, "ab"),
    "arctan2": (lambda m, h, k: torch.arctan2(h, k), 8, "a"),
    "in place": (lambda m, h, k: (h + 0).sin_().erf_().atan_() + (k + 0).sinh_().nan_to_num_().sub_(h), 8, "a"),
    "logical in place": (lambda m, h, k: h * (h > 0).logical_or_(k > 0).logical_not_(), 8, "a"),
    "floor division in place": (lambda m, h, k: h.clone().__ifloordiv__(0.25) + k.clone().__imod__(2.0), 8, "a"),
    "getters": (lambda m, h, k: h + k * (1 + h.itemsize + h.is_meta * 0 + h.retains_grad), 8, "a"),
    "loss": (lambda m, h, k: h * F.mse_loss(k, torch.zeros(())), 8, "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYDAY)
def test_units_that_pass_through(name: str) -> None:
    body, width, free = EVERYDAY[name]
    graph = exact(Net(body, width), tokens())
    assert {layer.name[0] for layer in graph.layers if layer.prunable} == set(free), str(graph)
    sc.analyze(Net(body, width).double(), tokens(), strict=True)  # it has an entry


# -- layers -----------------------------------------------------------------------------------------------------------
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bag((x.abs() * 19 / x.abs().max()).long().flatten(1)))


def cell(kind: type[nn.RNNCellBase]) -> Net:
    def body(m: Any, h: Tensor, k: Tensor) -> Tensor:
        state: Any = None
        for step in h.unbind(1):
            state = m.cell(step, state)
        return state[0] if isinstance(state, tuple) else state

    return Net(body, 7, cell=kind(8, 7))  # type: ignore[call-arg]


class Keys(nn.Module):
    """Attention to keys that belong to no token, too."""

    def __init__(self, weights: bool, **given: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mix = nn.Linear(5, 8), nn.MultiheadAttention(8, 2, batch_first=True, **given)
        self.last, self.weights = nn.Linear(8, 3), weights

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h, hidden = self.a(x), torch.arange(x.shape[1]).expand(len(x), -1) > 4
        return self.last(h + self.mix(h, h, h, hidden, self.weights, later)[0])


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: each input has a curve for each output, a sum of a few functions."""

    def __init__(self, before: int, after: int, kind: str, order: int = 2) -> None:
        super().__init__()
        self.after, self.kind, self.order = after, kind, order
        self.base, self.sizes = (nn.Parameter(torch.randn(after, before)) for _ in range(2))
        self.curves = nn.Parameter(torch.randn(after, before, 5))
        knots = torch.linspace(-3, 3, 6 + order)
        own = knots.expand(before, -1).contiguous()
        self.register_buffer("knots", {"bells": knots[:5], "splines": knots, "own splines": own}[kind])

    def functions(self, x: Tensor) -> Tensor:
        """What each function says about each input: (samples, inputs, functions)."""
        x, t = x.unsqueeze(-1), self.knots
        if self.kind == "bells":
            return torch.exp(-((x - t) ** 2))
        found = ((x >= t[..., :-1]) & (x < t[..., 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            up = (x - t[..., : -(k + 1)]) / (t[..., k:-1] - t[..., : -(k + 1)]) * found[..., :-1]
            down = (t[..., k + 1 :] - x) / (t[..., k + 1 :] - t[..., 1:-k]) * found[..., 1:]
            found = up + down
        return found

    def forward(self, x: Tensor) -> Tensor:
        weight = self.curves * self.sizes.unsqueeze(-1) if self.kind != "bells" else self.curves
        made = F.linear(self.functions(x).view(x.size(0), -1), weight.view(self.after, -1))
        return F.linear(F.silu(x), self.base) + made


@pytest.mark.parametrize("kind", ["bells", "splines", "own splines"])
def test_layers_of_curves(kind: str) -> None:
    """A flattened weight: the inputs cross the functions in it, and leave without them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Splines(6, 7, kind), Splines(7, 8, kind), nn.Linear(8, 3))
    graph = exact(model, tokens()[0])
    stay = {layer.name: layer.reason for layer in graph.layers if not layer.prunable}
    assert {name for name in "012" if name in stay} == ({"0", "1"} if kind == "own splines" else set()), str(graph)
    if kind == "own splines":  # knots of masked inputs are all 0, and the distance of two is divided by
        assert stay["0"] == "torch.Tensor.div in `1` divides by it, and it is 0 when it is masked"
        return
    plan = sc.plan(graph, random_scores(graph, 1), remove=0.4)
    assert sc.measure(sc.apply(model, plan), tokens()[0], latency=False) == plan.after


LAYERS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "lstm cell": (lambda: cell(nn.LSTMCell), {"a", "b", "cell"}),
    "gru cell": (lambda: cell(nn.GRUCell), {"a", "b", "cell"}),
    "rnn cell": (lambda: cell(nn.RNNCell), {"a", "b", "cell"}),
    "bilinear": (lambda: Net(lambda m, h, k: m.both(h, k), 6, both=nn.Bilinear(8, 8, 6)), {"a", "b", "both"}),
    "embedding bag": (Bag, {"bag"}),
    "attention to learnt keys": (lambda: Keys(True, add_bias_kv=True), {"a", "mix"}),
    "attention to a zero": (lambda: Keys(False, add_zero_attn=True), {"a", "mix"}),
    "attention to both": (lambda: Keys(False, add_bias_kv=True, add_zero_attn=True), {"a", "mix"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, free = LAYERS[name]
    model = make()
    graph = exact(model, tokens())
    assert {layer.name for layer in graph.layers if layer.prunable} == free, str(graph)


class Written(nn.Module):
    """`Keys` as one writes it, with a learnt key and then a zero, and no mask."""

    def __init__(self, net: Keys) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        mix, h = self.net.mix, self.net.a(x)
        q, k, v = F.linear(h, mix.in_proj_weight, mix.in_proj_bias).chunk(3, -1)
        k, v = (torch.cat([t, b.expand(len(x), 1, 8)], 1) for t, b in ((k, mix.bias_k), (v, mix.bias_v)))
        q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in (q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))))
        mixed = (q * 0.5 @ k.mT).softmax(-1) @ v
        out = F.linear(mixed.transpose(1, 2).flatten(2), mix.out_proj.weight, mix.out_proj.bias)
        return self.net.last(h + out)


def test_relevance_of_attention_to_learnt_keys() -> None:
    nets = [Keys(weights, add_bias_kv=True, add_zero_attn=True).double().eval() for weights in (True, False)]
    for net in nets:
        torch.nn.init.normal_(net.mix.in_proj_bias)
    nets[1].load_state_dict(nets[0].state_dict())
    x, by_hand = tokens()[:, :5], Written(nets[0])
    torch.testing.assert_close(by_hand(x)[:, -1], nets[1](x)[:, -1])  # the last token sees all others
    wanted = sc.explain(by_hand, x, lambda out: out[:, -1, 0], composite="attnlrp").input
    for net in nets:
        found = sc.explain(net, x, lambda out: out[:, -1, 0], composite="attnlrp").input
        torch.testing.assert_close(found, wanted)


# -- torchvision ------------------------------------------------------------------------------------------------------
class Regions(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        ops = pytest.importorskip("torchvision").ops
        torch.manual_seed(0)
        self.stem, self.next = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 1)
        if how == "deform_conv2d":
            self.offset, self.deform = nn.Conv2d(3, 18, 1), ops.DeformConv2d(8, 8, 3, padding=1)
        self.last, self.how = nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        y, ops = self.stem(x), pytest.importorskip("torchvision").ops
        if self.how == "deform_conv2d":
            y = self.deform(y, self.offset(x))
        else:
            boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 6.0, 5.0], [1.0, 1.5, 6.0, 5.0]], dtype=x.dtype)
            kept = boxes[ops.nms(boxes, x[0, 0, 0, :3], 0.5)] if self.how == "nms" else boxes
            pool = ops.roi_pool if self.how == "roi_pool" else ops.roi_align
            y = pool(y, [kept] * len(x), 2)
        return self.last(self.next(y).relu().mean((2, 3)))


@pytest.mark.parametrize("how", ["roi_align", "roi_pool", "nms", "deform_conv2d"])
def test_regions_of_images(how: str) -> None:
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    graph = exact(Regions(how), x)
    free = {layer.name for layer in graph.layers if layer.prunable}
    assert free == ({"stem", "deform", "next"} if how == "deform_conv2d" else {"stem", "next"})


# -- relevance --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce"])
def test_relevance_of_a_sum_over_nodes_is_shared_as_by_a_matrix(how: str) -> None:
    """Adding rows to nodes is a product with a matrix of zeros and ones."""
    matrix = torch.zeros(6, 6, dtype=torch.float64).index_put_((NODES, torch.arange(6)), torch.ones(6).double())

    def added(m: Any, h: Tensor, k: Tensor) -> Tensor:
        h, zeros = h.relu(), torch.zeros(2, 6, 8, dtype=torch.float64)
        if how.startswith("index_add"):
            made = getattr(zeros, how)(1, NODES, h)
        elif how == "scatter_reduce":
            made = zeros.scatter_reduce(1, spread(h), h, "sum")
        else:
            made = getattr(zeros, how)(1, spread(h), h)
        return (zeros if how.endswith("_") else made).mean(1)

    net = Net(added).double().eval()
    plain = Net(lambda m, h, k: (matrix @ h.relu()).mean(1)).double().eval()
    found, wanted = (sc.explain(each, tokens(), 1) for each in (net, plain))
    torch.testing.assert_close(found.input, wanted.input)
    torch.testing.assert_close(found.units["a"], wanted.units["a"])


@pytest.mark.parametrize("how", ["addcmul_", "lerp_", "sub_"])
def test_relevance_follows_what_is_overwritten(how: str) -> None:
    def body(m: Any, h: Tensor, k: Tensor, in_place: bool = True) -> Tensor:
        made = h * 1.0
        args = {"addcmul_": (k, k.detach()), "lerp_": (k, 0.25), "sub_": (k,)}[how]
        if in_place:
            getattr(made, how)(*args)
            return made.mean(1)
        return getattr(made, how[:-1])(*args).mean(1)

    nets = [Net(lambda m, h, k, way=way: body(m, h, k, way)).double().eval() for way in (True, False)]
    found, wanted = (sc.explain(net, tokens(), 1).input for net in nets)
    torch.testing.assert_close(found, wanted)


class Positioned(nn.Module):
    """Positions are computed once for all models, as in RT-DETR: later forwards make fewer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    @staticmethod
    @lru_cache
    def places(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.arange(count, device=device, dtype=dtype).unsqueeze(-1) / count

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) + self.places(x.shape[1], x.device, x.dtype).unsqueeze(0)))


def test_a_cache_that_all_models_share_blocks_no_layer() -> None:
    Positioned.places.cache_clear()
    net, x = Positioned().eval(), torch.randn(2, 5, 6)
    graph = sc.analyze(net, x)
    assert [(layer.name, layer.prunable) for layer in graph.layers] == [("first", True), ("last", False)]
    plan = sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5)
    kept = [i for i in range(8) if i not in plan.cuts["first.weight"][0]]
    small, hidden = sc.apply(net, plan), torch.relu(net.first(x) + torch.arange(5)[None, :, None] / 5)
    expected = hidden[..., kept] @ net.last.weight[:, kept].T + net.last.bias
    torch.testing.assert_close(small(x), expected)


# -- einops -----------------------------------------------------------------------------------------------------------
class Arranged(nn.Module):
    """Images become tokens, and tokens images, by layers of einops."""

    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.flat, self.up = layers.Rearrange("b c h w -> b (h w) c"), nn.Linear(8, 12)
        self.back = layers.Rearrange("b (h w) c -> b c h w", h=2)
        self.next, self.mean = nn.Conv2d(12, 6, 1), layers.Reduce("b c h w -> b c", "mean")
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mean(self.next(self.back(self.up(self.flat(self.patch(x))).relu())).relu()))


def test_layers_of_einops_move_units() -> None:
    x = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    graph = exact(Arranged(), x)
    assert {layer.name for layer in graph.layers if layer.prunable} == {"patch", "up", "next"}, str(graph)
    seen = sc.explain(Arranged().double().eval(), x, 1, composite="alpha1beta0")
    assert seen.conservation.worst <= 0.01, str(seen.conservation)
