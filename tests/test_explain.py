"""`explain` works on a model as it is, leaves no trace of itself, and says no by name."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.errors import (
    ConservationWarning,
    CriterionError,
    DataError,
    ForwardError,
    RelevanceError,
    UnknownOperationError,
    UnsupportedModelError,
)
from secateur.relevance import (
    PRESETS,
    AlphaBeta,
    Attention,
    Box,
    Composite,
    Epsilon,
    Gamma,
    On,
    RelevancePass,
    explain,
    unit_relevance,
)
from secateur.relevance.explain import draw

pytestmark = pytest.mark.usefixtures("one_rule")


class Op(nn.Module):
    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 4),
    )  # fmt: skip


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# -- no trace ----------------------------------------------------------------------------------------------------------
def test_nothing_is_left_on_the_model():
    net = small().train()
    net[4].eval()
    net[0].weight.requires_grad_(False)
    net[8].weight.grad = torch.ones_like(net[8].weight)
    before, state = copy.deepcopy(net), torch.get_rng_state()
    x = X.clone()
    explain(net, x, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, X)
    assert not x.requires_grad
    for (name, module), (_, old) in zip(net.named_modules(), before.named_modules(), strict=True):
        assert module.training == old.training, name
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
        assert vars(module).keys() == vars(old).keys()
    for (name, p), (_, old) in zip(net.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(p, old), name
        assert p.requires_grad == old.requires_grad
        assert (p.grad is None) == (p is not net[8].weight)
        assert p._backward_hooks is None
    assert torch.equal(net[8].weight.grad, torch.ones(4, 32))
    for (name, b), (_, old) in zip(net.named_buffers(), before.named_buffers(), strict=True):
        assert torch.equal(b, old), name
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_nothing_is_left_after_an_error():
    def fails(self, x):
        self.conv(x)
        raise KeyError("inside")

    net = Op(fails, conv=nn.Conv2d(3, 4, 3)).train()
    with pytest.raises(ForwardError, match="inside"):
        explain(net, X)
    assert net.training
    assert net.conv.training
    assert not nn.modules.module._global_forward_hooks
    assert torch.relu(torch.ones(1, requires_grad=True)).grad_fn is not None


def test_train_mode_is_scored_in_eval_mode():
    net = small()
    for mode in (True, False):
        net.train(mode)
        seen = explain(net, X, 1)
        torch.testing.assert_close(seen.input, explain(net.eval(), X, 1).input)


def test_random_draws_are_given_back():
    net = Op(lambda self, x: F.dropout(x, 0.5, training=True).flatten(1))
    state = torch.get_rng_state()
    explain(net, X, 1)
    assert torch.equal(state, torch.get_rng_state())


# -- models as they are ------------------------------------------------------------------------------------------------
def test_in_place_and_out_of_place_are_the_same():
    net, other = small(), small()
    for module in other:
        if isinstance(module, nn.ReLU):
            module.inplace = False
    assert torch.equal(explain(net, X, 1).input, explain(other, X, 1).input)


def test_in_place_results_that_nobody_assigns():
    def forward(self, x):
        y = self.conv(x)
        z = y * 2
        F.relu(z, inplace=True)  # z is used below, its return value is not
        z.add_(y)
        z += 1
        z[:, 0] = 0.0
        return z.flatten(1)

    def written_out(self, x):
        y = self.conv(x)
        z = F.relu(y * 2) + y + 1
        return (z * torch.tensor([0.0, 1, 1, 1]).view(1, 4, 1, 1)).flatten(1)

    conv = nn.Conv2d(3, 4, 3)
    one, two = Op(forward, conv=conv), Op(written_out, conv=conv)
    torch.testing.assert_close(explain(one, X, 70).output, two(X).detach())
    torch.testing.assert_close(explain(one, X, 70).input, explain(two, X, 70).input)


def test_an_input_that_is_read_before_it_is_overwritten():
    def forward(self, x):
        y = F.relu(self.one(x))
        skip = self.two(y)
        y.mul_(3)  # torch itself could not differentiate this: `two` still needs the old y
        return (skip + y).flatten(1)

    def written_out(self, x):
        y = F.relu(self.one(x))
        return (self.two(y) + y * 3).flatten(1)

    layers = {"one": nn.Conv2d(3, 4, 1), "two": nn.Conv2d(4, 4, 1)}
    x = X * 1
    torch.testing.assert_close(
        explain(Op(forward, **layers), x, 3).input, explain(Op(written_out, **layers), x, 3).input
    )


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_overwriting_through_a_view_is_overwriting(composite):
    def forward(self, x):
        y = self.conv(x)
        y[:, 0].mul_(5)
        keys = y.new_empty(len(y), 6, *y.shape[2:])
        keys.transpose(1, 2)[:, :, :4].copy_(y.transpose(1, 2))
        keys[:, 4:].copy_(y[:, 2:])
        return keys.flatten(1)

    def written_out(self, x):
        y = self.conv(x)
        y = torch.cat([5 * y[:, :1], y[:, 1:]], 1)
        return torch.cat([y, y[:, 2:]], 1).flatten(1)

    conv = nn.Conv2d(3, 4, 3)
    seen, wanted = (explain(Op(f, conv=conv), X, 70, composite=composite) for f in (forward, written_out))
    torch.testing.assert_close(seen.output, wanted.output)
    torch.testing.assert_close(seen.input, wanted.input)
    torch.testing.assert_close(seen.units["conv"], wanted.units["conv"])


def test_overwriting_through_a_view_is_refused_if_it_cannot_be_followed():
    def forward(self, x):
        y = self.conv(x)
        before = y[:, 1:]
        y[:, 1].mul_(5)
        return before.flatten(1)

    with pytest.raises(UnsupportedModelError, match="through a view"):
        explain(Op(forward, conv=nn.Conv2d(3, 4, 3)), X, 1)


def test_complex_numbers_pass_relevance_as_the_matrix_that_they_stand_for():
    """Rotations as in rotary embeddings, and a Fourier transform: linear, so x · gradient is the oracle."""

    def forward(self, x):
        y = self.first(x)
        turned = torch.view_as_complex(y.view(2, 3, 2)) * torch.polar(torch.ones(3), torch.arange(3.0))
        return self.last(torch.fft.fftn(torch.view_as_real(turned).flatten(1), dim=(0, 1)).real)

    torch.manual_seed(3)
    net = Op(forward, first=nn.Linear(4, 6, bias=False), last=nn.Linear(6, 3, bias=False))
    x = torch.randn(2, 4, requires_grad=True)
    out = net(x)
    (gradient,) = torch.autograd.grad(out[:, 1].sum(), x)
    seen = explain(net, x.detach(), 1, start="logit")
    assert seen.composite == "attnlrp"
    torch.testing.assert_close(seen.input, (x * gradient).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"complex numbers.*'alpha1beta0'.*attnlrp"):
        explain(net, x.detach(), 1, composite="alpha1beta0")
    bent = Op(lambda m, x: m.last(torch.view_as_complex(m.first(x).view(2, 6, 2)).abs()), first=nn.Linear(4, 12),
              last=nn.Linear(6, 3))  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="complex numbers"):
        explain(bent, x.detach(), 1)


def test_reused_modules_add_up():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    twice = Op(lambda self, x: self.conv(F.relu(self.conv(x))).flatten(1), conv=conv)
    chain = nn.Sequential(conv, nn.ReLU(), copy.deepcopy(conv), nn.Flatten())
    seen, wanted = explain(twice, X, 5), explain(chain, X, 5)
    torch.testing.assert_close(seen.input, wanted.input)
    torch.testing.assert_close(seen.units["conv"], wanted.units["0"] + wanted.units["2"])


def test_functional_weights_are_known_by_name():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel, self.table = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(5, 4))

        def forward(self, x):
            return F.linear(F.conv2d(x, self.kernel).relu().mean((2, 3)), self.table)

    seen = explain(Plain(), X, 2)
    assert {name: tuple(u.shape) for name, u in seen.weights.items()} == {"kernel": (4,), "table": (5,)}
    assert float(seen.weights["kernel"].sum()) == pytest.approx(2)


def test_parts_of_one_weight_go_to_their_rows():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    net = Op(lambda self, x: self.attention(x, x, x, need_weights=False)[0].flatten(1), attention=attention)
    seen = explain(net, torch.randn(2, 3, 8), 1, composite="attnlrp")
    rows = seen.weights["attention.in_proj_weight"]
    assert rows.shape == (24,)
    assert bool((rows.view(3, 8) != 0).any(1).all())
    gate = explain(net, torch.randn(2, 3, 8), 1, composite="alpha1beta0").weights["attention.in_proj_weight"]
    for part in gate.view(3, 8):  # what gates is scored by what passes, see test_gates.py
        assert float(part.sum()) == pytest.approx(2)
    assert seen.weights["attention.out_proj.weight"].shape == (8,)


def test_attention_is_the_same_whether_fused_or_spelt_out():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(attention.in_proj_bias)
    fused = Op(lambda self, x: self.attention(x, x, x, need_weights=False)[0].flatten(1), attention=attention)
    spelt = Op(lambda self, x: self.attention(x, x, x, need_weights=True)[0].flatten(1), attention=attention)
    x = torch.randn(2, 3, 8)
    for preset in ("alpha1beta0", "attnlrp"):
        one, two = explain(fused, x, 1, composite=preset), explain(spelt, x, 1, composite=preset)
        torch.testing.assert_close(one.input, two.input, rtol=1e-3, atol=1e-5)
        for name, units in one.weights.items():
            torch.testing.assert_close(units, two.weights[name], rtol=1e-3, atol=1e-5)


def test_the_softmax_may_absorb_as_in_the_paper():
    net = Op(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v).flatten(1))
    qkv = tuple(torch.randn(1, 2, 3, 4) for _ in range(3))
    keep = explain(net, qkv, 1, composite=Composite(On(Attention(queries=True)))).conservation
    lose = explain(net, qkv, 1, composite=Composite(On(Attention(queries=True, constant="absorb")))).conservation
    assert keep.input == pytest.approx(1, abs=1e-4)
    assert lose.input + lose.absorbed == pytest.approx(1, abs=1e-4)
    assert abs(lose.absorbed) > 1e-3


def heads(self, x):
    return [layer(torch.stack([x, x.flip(1), x.cos()], 1)).unflatten(2, (3, -1)) for layer in (self.a, self.b, self.c)]


def by_products(self, x, over=-1, constant=None):
    q, k, v = (t.transpose(1, 2) for t in heads(self, x))
    logits = q @ k.mT
    weights = (logits if constant is None else logits + constant).softmax(over)
    return (weights @ v).transpose(1, 2).flatten(2).mean(1)


def by_einsum(self, x, over=-1, constant=None):
    q, k, v = heads(self, x)
    logits = torch.einsum("nqhd,nkhd->nhqk", q, k)
    weights = F.softmin(logits * -1, over) if constant is None else (logits - -constant).softmax(over)
    return torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(2).mean(1)


def by_columns(self, x):
    """Each key shares itself among the queries, as in slot attention: the transposed product of a plain softmax."""
    q, k, v = (t.transpose(1, 2) for t in heads(self, x))
    return torch.einsum("nhkq,nhkd->nhqd", (k @ q.mT).softmax(-1), v).transpose(1, 2).flatten(2).mean(1)


BIAS = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))


def attending(query, keys):
    return F.scaled_dot_product_attention(query, keys, keys.flip(1))[:, 0]


TWO = torch.full((8,), 2.0)
#: Ways to write the same function. The first is how most people write it.
SAME = {
    "power": (
        lambda self, x: self.a(torch.exp2(self.b(x))),
        lambda self, x: self.a(torch.pow(TWO, self.b(x))),
        lambda self, x: self.a(torch.float_power(2.0, self.b(x)).float()),
    ),
    "looked up in an activation": (
        lambda self, x: self.a(self.b(x)[[1, 0, 1]]),
        lambda self, x: self.a(F.embedding(torch.tensor([1, 0, 1]), self.b(x))),
    ),
    "written into some places": (
        lambda self, x: self.a(self.b(x).scatter(1, torch.zeros(2, 1).long(), self.c(x)[:, :1])),
        lambda self, x: self.a(self.b(x).scatter(1, torch.zeros(2, 1).long(), self.c(x))),
        lambda self, x: self.a(self.b(x).scatter_(dim=1, index=torch.zeros(2, 1).long(), src=self.c(x))),
    ),
    "added in some places": (
        lambda self, x: self.a(self.b(x).scatter_add(1, torch.zeros(2, 1).long(), self.c(x)[:, :1])),
        lambda self, x: self.a(self.b(x).scatter_add(1, torch.zeros(2, 1).long(), self.c(x))),
    ),
    "a product of matrices": (
        lambda self, x: torch.einsum("...a,ac->...c", self.b(x)[:, None, None], self.c.weight).mean((1, 2)),
        lambda self, x: torch.einsum("...A,AC->...C", self.b(x)[:, None, None], self.c.weight).mean((1, 2)),
    ),
    "added in places": (
        lambda self, x: self.a(self.b(x).index_add(0, torch.tensor([1, 1]), self.c(x))),
        lambda self, x: self.a(self.b(x).index_put((torch.tensor([1, 1]),), self.c(x), accumulate=True)),
        lambda self, x: self.a(self.b(x).index_put_((torch.tensor([1, 1]),), self.c(x), True)),
    ),
    "attention": (by_products, by_einsum),
    "attention with a constant": (
        lambda self, x: by_products(self, x, -1, BIAS),
        lambda self, x: by_einsum(self, x, -1, BIAS),
    ),
    "attention over queries": (
        lambda self, x: by_products(self, x, -2),
        lambda self, x: by_einsum(self, x, -2),
        by_columns,
    ),
    "attention of one query": (
        lambda self, x: attending(self.a(x[:1]).expand(2, 1, 9), torch.stack([self.b(x), self.c(x)], 1)),
        lambda self, x: attending(self.a(x[:1])[None], torch.stack([self.b(x), self.c(x)], 1)),
    ),
}


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp", "attnlrp_gamma"])
@pytest.mark.parametrize("ways", SAME)
def test_relevance_does_not_depend_on_how_it_is_written(ways, composite):
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 9 if "attention" in ways else 8) for name in "abc"}
    x = torch.rand(2, 8)
    usual, *others = (explain(Op(way, **layers), x, 1, composite=composite) for way in SAME[ways])
    for other in others:
        torch.testing.assert_close(other.input, usual.input, rtol=1e-4, atol=1e-6)
        for name, units in usual.units.items():
            torch.testing.assert_close(other.units[name], units, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_the_weight_of_a_layer_may_be_an_input(composite):
    layer, inputs = nn.Linear(8, 8), (torch.rand(2, 8), torch.rand(3, 8))
    usual = explain(Op(lambda self, x, w: self.a(x) @ w.mT, a=layer), inputs, 1, composite=composite)
    other = explain(Op(lambda self, x, w: F.linear(self.a(x), w), a=layer), inputs, 1, composite=composite)
    for one, two in zip(usual.input, other.input, strict=True):
        torch.testing.assert_close(one, two)
    convolves = Op(lambda self, x, w: F.conv1d(self.a(x)[:, None], w[:, None]).mean(2), a=layer)
    with pytest.raises(UnsupportedModelError, match="computes its weight from activations"):
        explain(convolves, (torch.rand(2, 8), torch.rand(3, 4)), 1, composite=composite)


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_what_is_combined_in_places_is_refused(composite):
    index = torch.zeros(2, 8, dtype=torch.long)
    net = Op(lambda self, x: torch.scatter(self.a(x), 1, index, self.a(x), reduce="add"), a=nn.Linear(8, 8))
    with pytest.raises(UnsupportedModelError, match=r"no relevance rule is known for torch\.scatter"):
        explain(net, torch.rand(2, 8), 1, composite=composite)


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_places_at_which_a_picture_is_sampled_take_no_relevance(composite):
    def sampled(self, x, fixed):
        places = torch.tanh(self.places(x)).permute(0, 2, 3, 1)
        return F.grid_sample(self.values(x), places.detach() if fixed else places, align_corners=False).mean((2, 3))

    torch.manual_seed(0)
    layers = {"places": nn.Conv2d(3, 2, 1), "values": nn.Conv2d(3, 4, 1)}
    free, fixed = (
        explain(Op(lambda self, x, f=f: sampled(self, x, f), **layers), X, 1, composite=composite)
        for f in (False, True)
    )
    torch.testing.assert_close(free.input, fixed.input)
    torch.testing.assert_close(free.units["values"], fixed.units["values"])


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_a_batch_norm_that_learns_is_refused(composite):
    def learning(self, x):
        return F.batch_norm(self.a(x), self.norm.running_mean, self.norm.running_var, training=True)

    with pytest.raises(UnsupportedModelError, match="updates its running statistics"):
        explain(Op(learning, a=nn.Linear(8, 8), norm=nn.BatchNorm1d(8)), torch.rand(2, 8), 1, composite=composite)


def test_weights_that_are_computed_are_not_kept():
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
    engine = RelevancePass(nn.Sequential(computed, nn.ReLU(), nn.Linear(6, 3)), "alpha1beta0")
    seen: list[weakref.ref] = []
    computed.register_forward_pre_hook(lambda module, _: seen.append(weakref.ref(module.weight)))
    for _ in range(3):
        engine.run(torch.rand(2, 8), torch.ones_like)
    gc.collect()
    assert len(engine.weights._maps) == 1
    assert all(weight() is None for weight in seen)


@pytest.mark.parametrize("composite", ["alpha1beta0", "epsilon_plus", "epsilon_gamma_box"])
def test_sums_in_half_precision(composite):
    torch.manual_seed(0)
    net = Op(lambda self, x: self.c(torch.relu(self.a(x) + self.b(x))), **{name: nn.Linear(8, 8) for name in "abc"})
    net.b.load_state_dict(net.a.state_dict())  # where one is negative, so is the other
    x, composite = torch.rand(4, 8), Composite(On(AlphaBeta(1, 0), kind="linear"), *PRESETS[composite].lines)
    wide = explain(net, x, 1, composite=composite).input
    narrow = explain(net.half(), x.half(), 1, composite=composite).input
    torch.testing.assert_close(narrow.float(), wide, rtol=2e-2, atol=2e-3)


def test_compiled_models_are_unwrapped():
    net = small()
    torch.testing.assert_close(explain(torch.compile(net), X, 1).input, explain(net, X, 1).input)
    inside = nn.Sequential(torch.compile(net[:6]), net[6:])
    torch.testing.assert_close(explain(inside, X, 1).input, explain(net, X, 1).input)


def test_inference_mode_and_no_grad_around_it():
    net = small()
    with torch.no_grad():
        one = explain(net, X, 1).input
    with torch.inference_mode():
        two = explain(net, X.clone(), 1).input
    assert torch.equal(one, two)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_dtypes(dtype, close):
    net = small().eval()
    wanted = explain(copy.deepcopy(net).double(), X.double(), 1).input
    seen = explain(net.to(dtype), X.to(dtype), 1)
    assert seen.input.dtype == dtype
    assert float((seen.input - wanted).abs().max()) <= close * float(wanted.abs().max()) * 2
    assert seen.conservation.input == pytest.approx(2, rel=close)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu():
    net = small()
    wanted = explain(net, X, 1)
    seen = explain(net.cuda(), X.cuda(), 1)
    torch.testing.assert_close(seen.input.cpu(), wanted.input, rtol=1e-2, atol=1e-4)


def test_unbatched_input():
    conv = nn.Conv2d(3, 4, 3)
    r = torch.rand(4, 6, 6)
    torch.testing.assert_close(explain(conv, X[0], r).input, explain(conv, X[:1], r[None]).input[0])


def test_several_inputs_and_keywords():
    net = Op(lambda self, a, b: self.one(a) + self.two(b), one=nn.Linear(3, 4), two=nn.Linear(5, 4))
    a, b = torch.randn(2, 3), torch.randn(2, 5)
    first, second = explain(net, (a, b), 1).input
    again = explain(net, {"b": b, "a": a}, 1).input
    assert torch.equal(first, again[1])
    assert torch.equal(second, again[0])
    assert float(first.sum() + second.sum()) == pytest.approx(2)


def test_tokens_get_relevance_at_their_embedding():
    net = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(18, 4))
    seen = explain(net, torch.tensor([[1, 2, 3], [4, 5, 6]]), 1)
    assert seen.input.shape == (2, 3, 6)
    assert seen.heat.shape == (2, 3)
    assert float(seen.heat.sum()) == pytest.approx(2)


# -- where it starts ---------------------------------------------------------------------------------------------------
def test_targets():
    net = small().eval()
    output = net(X).detach()
    best = output.argmax(1)
    assert torch.equal(explain(net, X).input, explain(net, X, best).input)
    assert torch.equal(explain(net, X, [1, 2]).input[0], explain(net, X, 1).input[0])
    assert explain(net, X, start="logit").conservation.start == pytest.approx(float(output.amax(1).sum()))
    both = explain(net, X, lambda out: torch.ones_like(out) / 4)
    assert both.conservation.start == pytest.approx(2)
    assert torch.equal(both.input, explain(net, X, torch.full((2, 4), 0.25)).input)
    torch.testing.assert_close(
        explain(net, X, 1).input, explain(net, X, lambda out: F.one_hot(torch.tensor([1, 1]), 4)).input
    )
    with pytest.raises(DataError, match="not among the 4 outputs"):
        explain(net, X, 4)
    with pytest.raises(DataError, match="shape"):
        explain(net, X, [1, 2, 3])
    with pytest.raises(DataError, match="one number per output"):
        explain(net, X, torch.ones(3))


@pytest.mark.parametrize("squeeze", [False, True])
def test_one_output_is_explained_for_every_sample(squeeze):
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.ReLU(), nn.Linear(5, 1))
    x = torch.rand(3, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    if squeeze:
        net.append(nn.Flatten(0))
    whole = explain(net, x, lambda out: torch.ones_like(out)).input
    for target in (None, 0, 1, [0, 1, 0], torch.tensor([1, 1, 0])):
        assert torch.equal(explain(net, x, target).input, whole)
    torch.testing.assert_close(whole.sum((1, 2, 3)), torch.ones(3))
    assert explain(net, x, start="logit").conservation.start == pytest.approx(float(net(x).detach().sum()))
    with pytest.raises(DataError, match=r"target 2 for a model with one output"):
        explain(net, x, 2)
    with pytest.raises(DataError, match=r"targets of shape \(2,\)"):
        explain(net, x, [0, 1])


def test_absolute_values_per_sample_and_per_element():
    net, y = small(), [1, 2]
    signed = {
        n: [explain(net, X[i : i + 1], y[i], composite=Gamma()).weights[n] for i in (0, 1)]
        for n in ("0.weight", "8.weight")
    }
    sums, _ = unit_relevance(net, [(X, y)], composite=Gamma())
    samples, _ = unit_relevance(net, [(X, y)], composite=Gamma(), absolute="sample")
    elements, _ = unit_relevance(net, [(X, y)], composite=Gamma(), absolute="element")
    for name, parts in signed.items():
        torch.testing.assert_close(sums[name].float(), parts[0] + parts[1], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(samples[name].float(), parts[0].abs() + parts[1].abs(), rtol=1e-3, atol=1e-5)
        assert bool((elements[name] >= samples[name] - 1e-9).all())


def test_batches_add_up_and_reset():
    net, engine = small(), RelevancePass(small(), heat_map=False)
    ones = lambda out: torch.ones_like(out)  # noqa: E731
    engine.run(X[:1], ones)
    engine.run(X[1:], ones)
    torch.testing.assert_close(engine.units["0.weight"].float(), explain(net, X, ones).weights["0.weight"])
    assert engine.samples == 2
    engine.reset()
    assert not engine.units
    assert engine.conservation().start == 0


def test_changed_weights_are_noticed_between_batches():
    net = small()
    engine = RelevancePass(net)
    engine.run(X, lambda out: torch.ones_like(out))
    with torch.no_grad():
        net[0].weight.neg_()
        net[1].running_var.mul_(4)
    engine.reset()
    _, (heat,) = engine.run(X, lambda out: torch.ones_like(out))
    torch.testing.assert_close(heat, explain(net, X, lambda out: torch.ones_like(out)).input)


class Moody(nn.Module):
    """Takes another way whenever the mood says so: other functions, or the same ones with other weights."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.norm.running_mean.normal_()
        self.mood = 0

    def forward(self, x):
        y = (self.two if self.mood == 1 else self.one)(x)
        if self.mood < 2:
            y = self.norm(y)
        return self.head(F.relu(y).mean((2, 3)) if self.mood != 3 else y.flatten(2).mean(2))


def test_batches_that_take_different_ways():
    torch.manual_seed(3)
    net, ones = Moody().eval(), lambda out: torch.ones_like(out)
    engine = RelevancePass(net)
    wanted: dict[str, torch.Tensor] = {}
    for mood in (0, 0, 1, 1, 0, 2, 2, 3, 0, 3):
        net.mood = mood
        _, (heat,) = engine.run(X, ones)
        fresh = explain(net, X, ones)
        torch.testing.assert_close(heat, fresh.input)
        for name, values in fresh.weights.items():
            wanted[name] = wanted.get(name, 0) + values
        path = "two" if mood == 1 else "one"
        assert {name for site, (name, _, _) in engine.places.items() if site.path == path} == {f"{path}.weight"}
    assert engine.units.keys() == wanted.keys()
    for name, values in engine.units.items():
        torch.testing.assert_close(values.float(), wanted[name])


def test_a_layer_is_followed_by_its_batch_norm_or_by_something_else():
    torch.manual_seed(4)
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.bias)
    ways = {
        "norm first": lambda m, x: (lambda y: F.relu(m.norm(y)) + y)(m.conv(x)),
        "norm last": lambda m, x: (lambda y: y + F.relu(m.norm(y)))(m.conv(x)),
        "overwritten first": lambda m, x: (lambda y: m.norm(y.relu_()))(m.conv(x)),
        "statistics of the batch": lambda m, x: F.batch_norm(m.conv(x), None, None, training=True),
        "looked at": lambda m, x: (lambda y: m.norm(y) if y.shape[1] == 4 and y.dim() == 4 else y)(m.conv(x)),
        "returned": lambda m, x: m.conv(x),
    }
    for way, function in ways.items():
        net = Op(function, conv=conv, norm=norm).double()
        x = X.double()
        engine = RelevancePass(net)
        out, (heat,) = engine.run(x, lambda out: torch.ones_like(out))
        torch.testing.assert_close(out, net(x).detach(), msg=way)
        _, (again,) = engine.run(x, lambda out: torch.ones_like(out))
        torch.testing.assert_close(again, heat, msg=way)
        torch.testing.assert_close(heat.sum(), torch.tensor(float(out.numel())).double(), msg=way)


class Early(nn.Module):
    """conv, batch norm and ReLU, which are computed together from the second batch on; then something looks between."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.side = nn.Conv2d(4, 4, 1)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.look = None

    def forward(self, x):
        y = self.conv(x)
        if self.look == "bias":
            y = y + 1
        z = self.norm(y)
        if self.look == "number" and float(z.min()) > 0:
            return self.head(z)
        if self.look == "end":
            return z
        if self.look == "mean":
            z = z - z.mean()
        if self.look == "before":
            return self.head(F.relu(z, inplace=True) + y)
        if self.look == "again":
            z = self.norm(z)
        a = F.relu(z, inplace=self.look != "kept")
        b = a + self.side(a)
        if self.look == "sum":
            b = b * 2
        b += a
        return self.head(b.relu_() if self.look != "plain" else b)


@pytest.mark.parametrize("look", [None, "bias", "number", "end", "mean", "before", "again", "kept", "sum", "plain"])
def test_layers_computed_ahead_are_not_seen_too_early(look):
    torch.manual_seed(6)
    net, ones = Early().eval().double(), lambda out: torch.ones_like(out)
    engine, x = RelevancePass(net), X.double()
    for way in (None, None, look, look, look, None):
        net.look = way
        out, (heat,) = engine.run(x, ones)
        torch.testing.assert_close(out, net(x).detach())
        torch.testing.assert_close(heat, explain(net, x, ones).input)


def test_functions_that_torch_shows_to_nobody_are_noticed():
    torch.manual_seed(7)

    def hidden(y):
        with torch._C.DisableTorchFunction():
            return y.detach() * 2

    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
    norm.running_mean.normal_()
    net = Op(lambda m, x: (lambda y: F.relu(m.norm(y), inplace=True) + hidden(y))(m.conv(x)), conv=conv, norm=norm)
    engine = RelevancePass(net)
    for _ in range(3):
        out, _ = engine.run(X, lambda out: torch.ones_like(out))
        torch.testing.assert_close(out, net(X).detach())


def test_facts_do_not_survive_an_overwriting():
    # a + b is ≥ 0, then it is not: the layer that reads it must look at both signs.
    torch.manual_seed(5)
    layer = nn.Linear(4, 3).double()
    x = torch.randn(2, 4).double()
    found = explain(Op(lambda m, x: m.layer((x.relu() + x.abs()).neg_()), layer=layer), x, 1).units["layer"]
    plain = explain(Op(lambda m, x: m.layer(-(x.relu() + x.abs())), layer=layer), x, 1)
    torch.testing.assert_close(found, plain.units["layer"])
    inside = explain(Op(lambda m, x: m.layer((x.relu() + x.abs()).neg_()), layer=layer), x, 1)
    torch.testing.assert_close(inside.input, plain.input)


def _put(y, write):
    y = y.clone()
    write(y)
    return y


OVERWRITTEN = {
    "item": lambda y: _put(y, lambda y: y.__setitem__(y > 0.3, 0.7)),
    "items": lambda y: _put(y, lambda y: y.__setitem__((slice(None), slice(2)), torch.full((2, 2), 0.7).to(y))),
    "a part of ones": lambda y: _put(torch.ones_like(y), lambda z: z.__setitem__((slice(None), slice(2)), y[:, :2])),
    "a view of ones": lambda y: _put(torch.ones_like(y), lambda z: z[:, :2].copy_(y[:, :2])),
    "fill": lambda y: y.masked_fill(y > 0.3, 0.7),
    "fill in place": lambda y: _put(y, lambda y: y.masked_fill_(mask=y > 0.3, value=0.7)),
    "where": lambda y: torch.where(y > 0.3, 0.7, y),
    "maximum": lambda y: torch.maximum(y, torch.full((5,), 0.3).to(y)),
    "put": lambda y: y.index_put((torch.tensor([0, 1]), torch.tensor([2, 3])), torch.tensor(0.7).to(y)),
    "scatter": lambda y: y.scatter(1, torch.tensor([[1], [2]]), 0.7),
}


@pytest.mark.parametrize("how", OVERWRITTEN)
def test_constants_that_are_written_over_units_absorb(how):
    torch.manual_seed(3)
    net = Op(lambda m, x: m.last(OVERWRITTEN[how](m.first(x))), first=nn.Linear(6, 5), last=nn.Linear(5, 3)).double()
    x = torch.randn(2, 6).double().requires_grad_()
    seen = explain(net, x.detach(), torch.ones_like, composite="attnlrp")
    assert abs(seen.conservation.missing) < 1e-9
    # Without nonlinearities, this composite is input times gradient of the start, which is 1 = z · (1 / z) here.
    out = net(x)
    (gradient,) = torch.autograd.grad(out, x, 1 / out.detach())
    torch.testing.assert_close(seen.input, (x * gradient).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert abs(explain(net, x.detach(), 1).conservation.missing) < 1e-9


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (2 * x).round() / 2

    @staticmethod
    def backward(ctx, g):
        return -3 * g


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x, by=2.0):
        return x * by

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_functions_with_a_derivative_of_their_own_are_followed_inside(composite):
    torch.manual_seed(4)
    torchs = inspect.getattr_static(torch.autograd.Function, "apply")
    layers = {"first": nn.Linear(6, 5), "last": nn.Linear(5, 3)}
    own = Op(lambda m, x: m.last(Doubled.apply(Rounded.apply(m.first(x)))), **layers).double()
    plain = Op(lambda m, x: m.last((2 * m.first(x)).round() / 2 * 2.0), **layers).double()
    x = torch.randn(2, 6).double()
    found, wanted = (explain(net, x, 1, composite=composite) for net in (own, plain))
    torch.testing.assert_close(found.input, wanted.input)
    assert inspect.getattr_static(torch.autograd.Function, "apply") is torchs


def test_modules_are_called_as_before_after_an_observation():
    before = nn.Module._call_impl
    explain(small(), X, 1)
    assert nn.Module._call_impl is before
    with pytest.raises(UnknownOperationError):
        explain(Op(lambda m, x: torch.special.i0(x)), X, 1)
    assert nn.Module._call_impl is before


# -- composites --------------------------------------------------------------------------------------------------------
def test_rules_by_kind_depth_module_and_input():
    net = small()
    spy = {}

    class Spy(AlphaBeta):
        def __init__(self, name):
            object.__setattr__(self, "alpha", 1.0)
            object.__setattr__(self, "beta", 0.0)
            object.__setattr__(self, "name", name)

        def __call__(self, layer, a, r):
            spy.setdefault(self.name, []).append(tuple(layer.weight.shape))
            return super().__call__(layer, a, r)

    explain(
        net, X, 1, composite=Composite(On(Spy("first"), first=True), On(Spy("dense"), kind="linear"), On(Spy("rest")))
    )
    assert spy == {"dense": [(4, 32)], "rest": [(8, 6, 3, 3)], "first": [(6, 3, 3, 3)]}
    spy.clear()
    explain(
        net,
        X,
        1,
        composite=Composite(On(Spy("4"), modules=["4", "9*"]), On(Spy("top"), depth=(0.9, 1.0)), On(Spy("rest"))),
    )
    assert spy == {"top": [(4, 32)], "4": [(8, 6, 3, 3)], "rest": [(6, 3, 3, 3)]}


def test_lines_of_a_composite_that_would_never_fit_are_refused():
    with pytest.raises(CriterionError, match=r"kind='convolution' is no kind.*conv, linear"):
        On(Epsilon(), kind="convolution")
    with pytest.raises(CriterionError, match=r"rule='epsilon' is no rule"):
        On("epsilon")
    with pytest.raises(CriterionError, match=r"lines of the form On\("):
        Composite(Epsilon())


def test_presets_by_name():
    with pytest.raises(CriterionError, match="alpha1beta0"):
        explain(small(), X, 1, composite="alpha3")
    same = explain(small(), X, 1, composite=AlphaBeta(1, 0)).input
    assert torch.equal(explain(small(), X, 1).input, same)


def test_box_rule_at_the_input_needs_no_bounds():
    net = small()
    seen = explain(net, X, 1, composite=Composite(On(Box(), first=True), On(AlphaBeta())))
    assert float(seen.input.min()) >= -1e-6
    assert float(seen.input.sum()) == pytest.approx(2, rel=1e-4)


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_unknown_operations_are_refused_by_name():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Op(lambda self, x: torch.special.i0(x)), nn.Flatten())
    with pytest.raises(UnknownOperationError, match=r"i0.*`1`.*\(2, 4, 6, 6\)"):
        explain(net, X, 1)


def test_a_model_that_ignores_its_input():
    with pytest.raises(RelevanceError, match="does not depend"):
        explain(Op(lambda self, x: self.w.repeat(2, 1), w=nn.Parameter(torch.ones(1, 3))), X, 1)


def test_not_a_number_in_inputs_and_weights():
    bad = X.clone()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        explain(small(), bad, 1)
    net = small()
    with torch.no_grad():
        net[4].weight[2, 1, 0, 0] = float("inf")
    with pytest.raises(RelevanceError, match=r"4\.weight"):
        explain(net, X, 1)


def test_no_data():
    with pytest.raises(DataError, match="no batch"):
        unit_relevance(small(), [])


def test_leaks_are_warned_about_by_name():
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    nn.init.constant_(net[1].bias, 3.0)
    leaky = Epsilon(5.0, bias="ignore")  # a huge ε swallows most of it
    with pytest.warns(ConservationWarning, match="`1` loses"):
        seen = explain(net, X, 1, composite=leaky)
    assert seen.conservation.leaks["1"] > 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        absorbed = explain(net, X, 1, composite=Epsilon(1e-6, bias="absorb")).conservation
    assert absorbed.input + absorbed.absorbed == pytest.approx(2, rel=1e-4)
    assert "by definition" in str(absorbed)


# -- pictures ----------------------------------------------------------------------------------------------------------
def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = explain(small(), X, 1).plot(tmp_path / "heat.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="no picture"):
        explain(nn.Linear(3, 2), torch.randn(2, 3), 1).plot(tmp_path / "none.png")


def test_plot_says_what_it_shows(tmp_path, monkeypatch, recwarn):
    """Which output won and which is explained, by number, or in words of any script that are no formula."""
    Axes = pytest.importorskip("matplotlib.axes").Axes
    titles, usual = [], Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **more: titles.append(text) or usual(self, text, **more))
    net = small().eval()
    explain(net, X, [2, 0]).plot(tmp_path / "heat.png")
    won = net(X).argmax(1).tolist()
    assert titles == [
        f"says output {won[0]}", "relevance for output 2", f"says output {won[1]}", "relevance for output 0"
    ]  # fmt: skip
    draw(X[:1], X[:1, 0], tmp_path / "other.png", titles=[("says 猫", "relevance for a$b$_")])
    assert (tmp_path / "other.png").is_file()
    assert not [str(one.message) for one in recwarn if "Glyph" in str(one.message)]


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    import sys

    from secateur.errors import SecateurError

    seen = explain(small(), X, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SecateurError, match="report"):
        seen.plot(tmp_path / "heat.png")


def dying() -> nn.Sequential:
    """Its pool sees nothing but zeros, so that some rules divide by a number that half precision rounds to zero."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        net[0].bias.fill_(-100)
        net[4].weight.mul_(1e-4)
    return net


@pytest.mark.parametrize("composite", ["alpha1beta0", "epsilon_plus"])
def test_half_precision_has_its_own_way_out(composite):
    x = torch.rand(2, 1, 8, 8)
    large = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    nn.init.constant_(large[1].weight, 60_000)
    with pytest.raises(RelevanceError) as caught:
        explain(large.half(), x.half(), composite=composite)
    assert "Fix: model.float()" in str(caught.value)
    assert "alpha1beta0" not in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConservationWarning)
        explain(dying(), x, composite=composite)
        narrow = explain(dying().half(), x.half(), composite=composite)  # on the processor it is widened for that layer
    assert torch.isfinite(narrow.input).all()


def test_the_way_out_is_another_composite_than_the_one_that_failed():
    with pytest.raises(RelevanceError, match=r"pool2d in `2`\. Fix: .*'alpha1beta0'"):
        explain(dying(), torch.rand(2, 1, 8, 8), composite=Epsilon(0.0))


@pytest.mark.parametrize(("convolutions", "composite"), [(2, "epsilon_gamma_box"), (0, "attnlrp")])
def test_a_network_that_convolves_and_then_attends_is_explained_as_one_that_convolves(
    convolutions, composite, monkeypatch
):
    """On such a network "attnlrp" had an SRG of 0.12, "epsilon_gamma_box" one of 0.43. Scoring has its own default."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            stem = [nn.Conv2d(3 if not i else 16, 16, 3, padding=1) for i in range(convolutions)]
            self.stem, self.cut = nn.Sequential(*stem), nn.Conv2d(16 if stem else 3, 16, 4, 4)
            self.mix, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 3)
            self.wide = nn.Linear(16, 32)

        def forward(self, x):
            x = self.cut(self.stem(x)).flatten(2).mT
            x = x + self.mix(x, x, x, need_weights=False)[0]
            return self.head(x.mean(1)) + self.wide(x).mean((1, 2))[:, None]

    torch.manual_seed(0)
    net, x = Net().eval(), torch.rand(2, 3, 16, 16)
    monkeypatch.undo()  # the default of the package
    assert sc.explain(net, x, 1).composite == composite
    assert sc.score(net, (x, torch.tensor([0, 1])), "lrp").composite == "attnlrp"
