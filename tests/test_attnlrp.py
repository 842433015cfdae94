"""AttnLRP (arXiv 2402.05602) against its published formulas, written out rule by rule.

The oracle is a second implementation of four architectures in which relevance itself flows back, and every rule divides
by its output as the paper writes it. It knows nothing of gradients or of secateur. That it computes the same network is
checked by its output.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.criteria.relevance import LRP
from secateur.errors import ConservationWarning
from secateur.relevance import Conservation, Flow, explain

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[5, 9, 3, 7, 1, 2], [4, 4, 8, 6, 2, 3]])


# -- the published rules -----------------------------------------------------------------------------------------------
def over(r, z):
    return r / (z + 1e-14 * torch.where(z >= 0, 1.0, -1.0))


class Linear(torch.autograd.Function):
    """ε: R_i = Σ_j x_i w_ij / (Σ_i x_i w_ij + b_j) R_j."""

    @staticmethod
    def forward(ctx, x, w, b):
        z = x @ w.T if b is None else x @ w.T + b
        ctx.save_for_backward(x, w, z)
        return z

    @staticmethod
    def backward(ctx, r):
        x, w, z = ctx.saved_tensors
        return x * (over(r, z) @ w), None, None


class Add(torch.autograd.Function):
    """ε: R_a = a / (a + b) R."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a + b

    @staticmethod
    def backward(ctx, r):
        a, b = ctx.saved_tensors
        s = over(r, a + b)
        return (s * a).sum_to_size(a.shape), (s * b).sum_to_size(b.shape)


class Times(torch.autograd.Function):
    """A product of two signals: half to each."""

    @staticmethod
    def forward(ctx, a, b):
        return a * b

    @staticmethod
    def backward(ctx, r):
        return r / 2, r / 2


class MatMul(torch.autograd.Function):
    """R_ji = Σ_p a_ji b_ip R_jp / (2 O_jp), and the same for b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, r):
        a, b = ctx.saved_tensors
        s = over(r, 2 * (a @ b))
        return a * (s @ b.mT), b * (a.mT @ s)


class Softmax(torch.autograd.Function):
    """R_i = x_i (R_i - s_i Σ R)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, r):
        (x,) = ctx.saved_tensors
        s = x.softmax(-1)
        return torch.where(s > 0, x * (r - s * r.sum(-1, keepdim=True)), 0)


class Identity(torch.autograd.Function):
    """Nonlinearities and scales: R unchanged."""

    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, r):
        return r, None


class Centre(torch.autograd.Function):
    """x - mean(x), a linear layer: ε."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, r):
        (x,) = ctx.saved_tensors
        n = x.shape[-1]
        w = torch.eye(n, dtype=x.dtype) - 1 / n
        return x * (over(r, x @ w) @ w)


def layer_norm(x, norm):
    centred = Centre.apply(x)
    std = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt().detach()
    return Add.apply(Identity.apply(centred, lambda c: c / std * norm.weight), norm.bias)


def rms_norm(x, norm):
    rms = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt().detach()
    return Identity.apply(x, lambda c: c / rms * norm.weight)


def linear(x, layer):
    return Linear.apply(x, layer.weight, layer.bias)


def heads(x, width):
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def attention(q, k, v, mask=None):
    logits = Identity.apply(MatMul.apply(q, k.mT), lambda z: z / math.sqrt(q.shape[-1]))
    if mask is not None:
        logits = torch.where(mask, logits, -math.inf)
    return MatMul.apply(Softmax.apply(logits), v).transpose(1, 2).flatten(2)


def causal(x):
    return torch.ones(x.shape[1], x.shape[1]).tril().bool()


# -- the four networks -------------------------------------------------------------------------------------------------
def llama_oracle(net, x):
    body, width, n = net.model, 8, x.shape[1]
    angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(x) for f in (torch.cos, torch.sin))

    for block in body.layers:
        y, own = rms_norm(x, block.input_layernorm), block.self_attn
        q, k, v = (heads(linear(y, layer), width) for layer in (own.q_proj, own.k_proj, own.v_proj))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        q, k = (_Rotate.apply(t, cos, sin) for t in (q, k))
        x = Add.apply(x, linear(attention(q, k, v, causal(x)), own.o_proj))
        y, mlp = rms_norm(x, block.post_attention_layernorm), block.mlp
        gate = Identity.apply(linear(y, mlp.gate_proj), F.silu)
        x = Add.apply(x, linear(Times.apply(gate, linear(y, mlp.up_proj)), mlp.down_proj))
    return linear(rms_norm(x, body.norm), net.lm_head)


class _Rotate(torch.autograd.Function):
    """Rotary positions, a linear layer within each head: ε."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(x, cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, r):
        x, cos, sin = ctx.saved_tensors
        n = x.shape[-1]
        w = torch.stack([_rotated(row.expand_as(cos), cos, sin) for row in torch.eye(n, dtype=x.dtype)], 1)
        return x * torch.einsum("bhto,tio->bhti", over(r, _rotated(x, cos, sin)), w), None, None


def _rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def gpt2_oracle(net, x):
    body = net.transformer

    def conv1d(x, layer):
        return Linear.apply(x, layer.weight.T, layer.bias)

    x = Add.apply(x, body.wpe.weight[: x.shape[1]][None])
    for block in body.h:
        y = layer_norm(x, block.ln_1)
        q, k, v = (heads(t, 8) for t in conv1d(y, block.attn.c_attn).chunk(3, -1))
        x = Add.apply(x, conv1d(attention(q, k, v, causal(x)), block.attn.c_proj))
        y = Identity.apply(conv1d(layer_norm(x, block.ln_2), block.mlp.c_fc), block.mlp.act)
        x = Add.apply(x, conv1d(y, block.mlp.c_proj))
    return linear(layer_norm(x, body.ln_f), net.lm_head)


def bert_oracle(net, x):
    table = net.bert.embeddings
    x = Add.apply(Add.apply(x, table.token_type_embeddings.weight[0]), table.position_embeddings.weight[: x.shape[1]])
    x = layer_norm(x, table.LayerNorm)
    for block in net.bert.encoder.layer:
        own = block.attention.self
        q, k, v = (heads(linear(x, layer), 8) for layer in (own.query, own.key, own.value))
        mixed = linear(attention(q, k, v), block.attention.output.dense)
        x = layer_norm(Add.apply(mixed, x), block.attention.output.LayerNorm)
        y = linear(Identity.apply(linear(x, block.intermediate.dense), F.gelu), block.output.dense)
        x = layer_norm(Add.apply(y, x), block.output.LayerNorm)
    return linear(Identity.apply(linear(x[:, 0], net.bert.pooler.dense), torch.tanh), net.classifier)


def vit_oracle(net, x):
    table = net.vit.embeddings
    layer = table.patch_embeddings.projection
    patches = F.unfold(x, 4, stride=4).mT
    x = Linear.apply(patches, layer.weight.flatten(1), layer.bias)
    x = torch.cat([table.cls_token.expand(len(x), -1, -1), x], 1)
    x = Add.apply(x, table.position_embeddings)
    for block in net.vit.layers:
        own = block.attention
        y = layer_norm(x, block.layernorm_before)
        q, k, v = (heads(linear(y, layer), 8) for layer in (own.q_proj, own.k_proj, own.v_proj))
        x = Add.apply(linear(attention(q, k, v), own.o_proj), x)
        y = Identity.apply(linear(layer_norm(x, block.layernorm_after), block.mlp.fc1), F.gelu)
        x = Add.apply(linear(y, block.mlp.fc2), x)
    return linear(layer_norm(x, net.vit.layernorm)[:, 0], net.classifier)


def build(name, attention="sdpa", **options):
    torch.manual_seed(0)
    same = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    same |= {"attn_implementation": attention}
    if name == "llama":
        config = transformers.LlamaConfig(**same, num_key_value_heads=2, vocab_size=50, use_cache=False, **options)
        net = transformers.LlamaForCausalLM(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32, use_cache=False, bos_token_id=0,
            eos_token_id=0, attn_implementation=attention, tie_word_embeddings=False, **options,
        )  # fmt: skip
        net = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        config = transformers.BertConfig(**same, vocab_size=50, max_position_embeddings=32, num_labels=50, **options)
        net = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.ViTConfig(**same, image_size=16, patch_size=4, num_labels=50, **options)
        net = transformers.ViTForImageClassification(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():  # biases and norms start at 0 and 1
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return net.eval().double()


#: The oracle, and the module whose output it starts from.
NETS = {
    "llama": (llama_oracle, lambda net: net.model.embed_tokens),
    "gpt2": (gpt2_oracle, lambda net: net.transformer.wte),
    "bert": (bert_oracle, lambda net: net.bert.embeddings.word_embeddings),
    "vit": (vit_oracle, None),
}


def seed_at(position, target=3):
    """The logit of a class, at one position of a sequence."""

    def start(output):
        seed = torch.zeros_like(output)
        place = (slice(None), position, target) if output.dim() == 3 else (slice(None), target)
        seed[place] = output[place]
        return seed

    return start


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NETS)
def test_the_published_rules(name, attention):
    net = build(name, attention)
    oracle, table = NETS[name]
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64) if table is None else IDS
    entry = (x if table is None else table(net)(x)).detach().requires_grad_(True)
    output, start = oracle(net, entry), seed_at(-1)
    torch.testing.assert_close(output, net(x).logits, rtol=1e-5, atol=1e-6)  # Llama's norms compute in float32
    (wanted,) = torch.autograd.grad(output, entry, start(output.detach()))
    seen = explain(net, x, start, composite="attnlrp")
    found = seen.input if isinstance(seen.input, torch.Tensor) else seen.input[0]
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    books = seen.conservation
    assert books.worst <= 1e-6, str(books)
    assert books.input + books.absorbed == pytest.approx(books.start, rel=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_units_add_up_to_what_arrives(name):
    """The relevance of a layer's outputs is output times modified gradient: checked at the last layer by hand."""
    net = build(name)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64) if name == "vit" else IDS
    seen = explain(net, x, seed_at(-1), composite="attnlrp")
    last = "lm_head" if "lm_head" in seen.units else "classifier"
    logits = net(x).logits
    wanted = (logits[:, -1, 3] if logits.dim() == 3 else logits[:, 3]).sum()
    assert float(seen.units[last][3]) == pytest.approx(wanted.item())
    assert float(seen.units[last].sum()) == pytest.approx(wanted.item())
    alone = [explain(net, x[i : i + 1], seed_at(-1), composite="attnlrp") for i in range(2)]
    for path, units in seen.units.items():
        torch.testing.assert_close(units, alone[0].units[path] + alone[1].units[path])


def test_all_positions_are_the_sum_of_single_positions():
    """Where relevance starts at one token, most rows are zeros and are skipped."""
    net = build("llama")
    together = explain(net, IDS, lambda z: sum(seed_at(i)(z) for i in range(6)), composite="attnlrp")
    alone = [explain(net, IDS, seed_at(i), composite="attnlrp") for i in range(6)]
    torch.testing.assert_close(together.input, sum(seen.input for seen in alone))
    for path, units in together.units.items():
        torch.testing.assert_close(units, sum(seen.units[path] for seen in alone))


def test_relevance_that_explodes_is_reported():
    flows = (Flow("head", "linear", 18.0, 18.0), Flow("h.0.attn.c_attn", "linear", -3657.0, -3657.0))
    exploded = Conservation(18.0, -3657.0, (*flows, Flow("wpe", "constant", 3675.0, 0.0, absorbs=True)), 18.0)
    with pytest.warns(ConservationWarning, match=r"grows to 204 times .* at `wpe`"):
        exploded.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Conservation(18.0, 18.0, flows[:1], 18.0).warn()


def test_a_model_that_does_not_conserve_says_where():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 5), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(x * torch.logsumexp(self.first(x), -1, keepdim=True).expand_as(x).clone())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        books = explain(Odd(), torch.randn(3, 4), 1, composite="attnlrp").conservation
    assert (books.worst > 0.01) == bool(caught)


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_shifted_windows(composite):
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=36, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3
    )
    net = transformers.SwinForImageClassification(config).eval()
    seen = explain(net, torch.randn(2, 3, 36, 36), 1, composite=composite)
    assert bool(torch.isfinite(seen.input).all())
    assert all(bool(torch.isfinite(units).all()) for units in seen.units.values())
    assert seen.conservation.worst <= 1e-4


# -- linear layers that are no `nn.Linear` -----------------------------------------------------------------------------
class Written(nn.Module):
    """A layer as a product with a parameter."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        shape = (7, 5) if how in ("mT", "t()", "linear") else (5, 7)
        weight, self.how = torch.randn(7, 5, dtype=torch.float64), how
        self.weight = nn.Parameter((weight if shape == (7, 5) else weight.T).contiguous())
        self.bias = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.head = nn.Linear(7, 4).double()

    def forward(self, x):
        flat, bias = x.flatten(0, 1), self.bias
        z = {
            "linear": lambda: F.linear(flat, self.weight, bias),
            "addmm": lambda: torch.addmm(bias, flat, self.weight),
            "@": lambda: flat @ self.weight,
            "mT": lambda: flat @ self.weight.mT,
            "t()": lambda: torch.matmul(flat, self.weight.t()),
        }[self.how]()
        return self.head(F.relu(z).view(*x.shape[:2], -1).mean(1))


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp", "epsilon_plus"])
@pytest.mark.parametrize("how", ["addmm", "@", "mT", "t()"])
def test_products_with_a_parameter_are_linear_layers(how, composite):
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    plain = Written("linear")
    if how != "addmm":
        nn.init.zeros_(plain.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, found = (explain(net, x, 1, composite=composite) for net in (plain, Written(how)))
    torch.testing.assert_close(found.input, wanted.input)
    assert found.weights["weight"].shape == (7,)
    torch.testing.assert_close(found.weights["weight"], wanted.weights["weight"])
    assert found.conservation.layers.keys() == wanted.conservation.layers.keys()


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_an_embedding_that_is_also_the_last_layer(composite):
    net = build("llama", tie_word_embeddings=True)
    seen = explain(net, IDS, seed_at(-1), composite=composite)
    assert seen.units["model.embed_tokens"].shape == (32,)
    assert seen.units["lm_head"].shape == (50,)
    torch.testing.assert_close(seen.units["model.embed_tokens"], seen.input.sum((0, 1)))
    assert float(seen.units["lm_head"].sum()) == pytest.approx(seen.conservation.start)
    free = build("llama")
    free.load_state_dict(net.state_dict())
    torch.testing.assert_close(explain(free, IDS, seed_at(-1), composite=composite).input, seen.input)


# -- the default -------------------------------------------------------------------------------------------------------
class Attending(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.second, self.qkv = how, nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 18)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = self.qkv(self.second(F.relu(self.first(x)))).chunk(3, -1)
        if self.how == "none":
            return self.head(F.relu(q).mean(1))
        if self.how == "fused":
            return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))
        return self.head(((q @ k.mT / 6**0.5).softmax(-1) @ v).mean(1))


@pytest.mark.parametrize(("how", "preset"), [("none", "alpha1beta0"), ("fused", "attnlrp"), ("written out", "attnlrp")])
def test_models_with_attention_get_attnlrp(how, preset):
    net, x = Attending(how).eval(), torch.randn(4, 5, 6)
    seen, wanted = explain(net, x, 1), explain(net, x, 1, composite=preset)
    assert seen.composite == wanted.composite == preset
    assert torch.equal(seen.input, wanted.input)
    assert seen.conservation.start == pytest.approx(4 if how == "none" else net(x)[:, 1].sum().item())
    scores = sc.score(net, (x, torch.tensor([0, 1, 2, 1])), "lrp")
    assert scores.composite == preset
    assert preset in repr(scores)
    assert preset in str(scores)
    named = sc.score(net, (x, torch.tensor([0, 1, 2, 1])), f"lrp:{preset}")
    assert repr(named).startswith(f"<Scores by lrp:{preset}: ")
    for site, values in scores.units.items():
        np.testing.assert_array_equal(values, named.units[site])
    result = sc.prune(net, (x, torch.tensor([0, 1, 2, 1])), remove=0.2, progress=False)
    assert result.settings["composite"] == preset


class Hybrid(nn.Module):
    """Convolutions or one that cuts patches, then attention written with convolutions, as in YOLO11, or not."""

    def __init__(self, patches):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 4, 4) if patches else nn.Conv2d(3, 8, 3, 2, 1)
        self.qkv, self.head = nn.Linear(8, 24) if patches else nn.Conv2d(8, 24, 1), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        if isinstance(self.qkv, nn.Linear):
            q, k, v = self.qkv(x.flatten(2).mT).chunk(3, -1)
        else:
            q, k, v = (t.mT for t in self.qkv(x).flatten(2).chunk(3, 1))
        return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))


def test_convolutional_networks_with_some_attention_are_scored_as_convolutional():
    x, y = torch.rand(2, 3, 16, 16), torch.tensor([0, 1])
    for patches, scored, drawn in ((False, "alpha1beta0", "epsilon_gamma_box"), (True, "attnlrp", "attnlrp")):
        net = Hybrid(patches).eval()
        scores, seen = sc.score(net, (x, y), "lrp"), explain(net, x, 1)
        assert (scores.composite, seen.composite) == (scored, drawn)
        for site, values in sc.score(net, (x, y), f"lrp:{scored}").units.items():
            np.testing.assert_array_equal(scores.units[site], values)
        assert torch.equal(seen.input, explain(net, x, 1, composite=drawn).input)


def test_the_start_may_be_chosen():
    net, x = Attending("fused").eval().double(), torch.randn(4, 5, 6, dtype=torch.float64)
    logits = net(x)[:, 2].detach()
    one, logit = (explain(net, x, 2, start=start).input for start in ("one", "logit"))
    torch.testing.assert_close(one * logits[:, None, None], logit)
    assert LRP(start="one").start == "one"
    with pytest.raises(sc.SecateurError, match="start"):
        explain(net, x, start="two")


# -- masks and padding -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp", "attnlrp_gamma"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_rows_in_which_everything_is_masked(composite, kind):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 3)

        def forward(self, x, mask):
            q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            return self.head(mixed[:, -1])

    keep = torch.ones(5, 5).tril().bool()
    keep[:, :2] = False  # left padding: the first two rows see nothing
    mask = keep[None, None] if kind == torch.bool else torch.zeros(1, 1, 5, 5).masked_fill(~keep, -math.inf)
    net, x = Masked().eval(), torch.randn(2, 5, 6)
    seen = explain(_Closed(net, mask), x, 1, composite=composite)
    alone = explain(_Closed(net, torch.ones(3, 3).tril().bool()[None, None]), x[:, 2:], 1, composite=composite)
    assert bool(torch.isfinite(seen.input).all())
    torch.testing.assert_close(seen.input[:, 2:], alone.input, rtol=1e-4, atol=1e-6)
    assert not seen.input[:, :2].any()


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp", "attnlrp_gamma", "epsilon_gamma_box"])
def test_a_border_of_minus_infinity_before_a_pooling_is_the_pooling_with_its_own_border(composite):
    class Pools(nn.Module):
        def __init__(self, written_out):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.head, self.written_out = nn.Conv2d(3, 6, 3), nn.Linear(6, 3), written_out

        def forward(self, x):
            x = self.conv(x)
            if self.written_out:
                x = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-math.inf), 3, 2)
            else:
                x = F.max_pool2d(x, 3, 2, 1)
            return self.head(x.mean((2, 3)))

    x = torch.rand(2, 3, 11, 11)
    seen, known = (explain(Pools(way).eval(), x, 1, composite=composite) for way in (True, False))
    assert bool(torch.isfinite(seen.input).all())
    torch.testing.assert_close(seen.input, known.input)


class _Closed(nn.Module):
    """A model with its mask inside."""

    def __init__(self, net, mask):
        super().__init__()
        self.net, self.mask = net, mask

    def forward(self, x):
        return self.net(x, self.mask)


@pytest.mark.parametrize("composite", ["attnlrp", "alpha1beta0"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "side"), [("llama", "right"), ("llama", "left"), ("bert", "right")])
def test_padding_changes_nothing(name, side, attention, composite):
    net, pad = build(name, attention), torch.zeros(1, 2, dtype=torch.long)
    net = net.float() if (side, attention) == ("left", "eager") else net  # its softmax overflows in float64
    close = {"rtol": 1e-5, "atol": 1e-7} if net.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    short = IDS[:1, :4]
    row = torch.cat([short, pad] if side == "right" else [pad, short], 1)
    kept = slice(0, 4) if side == "right" else slice(2, 6)
    mask = torch.ones_like(IDS)
    mask[0] = 0
    mask[0, kept] = 1
    batch = {"input_ids": torch.cat([row, IDS[1:]]), "attention_mask": mask}
    if name == "llama":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    last = torch.tensor([3 if side == "right" else 5, 5])

    def at_last(output):
        place = (torch.arange(2), last, 3) if output.dim() == 3 else (slice(None), 3)
        seed = torch.zeros_like(output)
        seed[place] = output[place]
        return seed

    seen = explain(net, batch, at_last, composite=composite)
    alone = [explain(net, {"input_ids": ids}, seed_at(-1), composite=composite) for ids in (short, IDS[1:])]
    padded, first, second = (s.input[0] if isinstance(s.input, list) else s.input for s in (seen, *alone))
    torch.testing.assert_close(padded[:1, kept], first, **close)
    torch.testing.assert_close(padded[1:], second, **close)
    hidden = padded[0][mask[0] == 0]
    assert float(hidden.abs().max()) <= 1e-12
    for path, units in seen.units.items():
        torch.testing.assert_close(units, alone[0].units[path] + alone[1].units[path], **close)


# -- gates, in-place calls, half precision -----------------------------------------------------------------------------
class Excited(nn.Module):
    """A convolution whose channels are gated by a squeeze-and-excitation block."""

    def __init__(self, constant=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.down, self.up, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        self.constant = constant

    def forward(self, x):
        x = F.relu(self.conv(x))
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        gate = gate.detach().clone() if self.constant else gate
        return self.head((x * gate[:, :, None, None]).mean((2, 3)))


def test_gates_take_nothing_and_are_scored_by_what_they_let_pass():
    x = torch.randn(3, 3, 6, 6, dtype=torch.float64)
    seen, wanted = (explain(Excited(c).double(), x, 1, composite="attnlrp") for c in (False, True))
    torch.testing.assert_close(seen.input, wanted.input)
    torch.testing.assert_close(seen.units["conv"], wanted.units["conv"])
    torch.testing.assert_close(seen.units["up"], seen.units["conv"])
    assert bool(seen.units["down"].any())
    assert seen.conservation.input + seen.conservation.absorbed == pytest.approx(seen.conservation.start)


def test_in_place_calls_change_nothing():
    class Block(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            torch.manual_seed(0)
            self.inplace, self.first, self.second, self.head = inplace, *(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            y, z = self.first(x), self.second(x)
            if self.inplace:
                y = F.silu(y, inplace=True)
                y.mul_(z).add_(x).div_(2).neg_()
            else:
                y = -((F.silu(y) * z + x) / 2)
            return self.head(y)

    x = torch.randn(3, 6, dtype=torch.float64)
    one, two = (explain(Block(inplace).double(), x, 1, composite="attnlrp") for inplace in (False, True))
    torch.testing.assert_close(one.input, two.input)
    for path, units in one.units.items():
        torch.testing.assert_close(units, two.units[path])
    assert one.conservation.worst <= 1e-9


@pytest.mark.parametrize("written", [False, True])
def test_a_nonlinearity_written_out_is_one(written):
    class Gelu(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.first(x)
            if not written:
                return self.second(F.gelu(x, approximate="tanh"))
            return self.second(0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))))

    net, x = Gelu().double(), torch.randn(3, 6, dtype=torch.float64)
    seen = explain(net, x, 1, composite="attnlrp")
    entry = x.clone().requires_grad_(True)
    hidden = Identity.apply(linear(entry, net.first), lambda z: F.gelu(z, approximate="tanh"))
    output = linear(hidden, net.second)
    (wanted,) = torch.autograd.grad(output, entry, F.one_hot(torch.tensor([1, 1, 1]), 3) * output.detach())
    torch.testing.assert_close(seen.input, wanted)


def test_half_precision():
    net = build("llama").float()
    wanted = explain(net, IDS, seed_at(-1), composite="attnlrp")
    seen = explain(net.to(torch.bfloat16), IDS, seed_at(-1), composite="attnlrp")
    assert seen.input.dtype == torch.bfloat16
    assert float(F.cosine_similarity(seen.input.float().flatten(), wanted.input.flatten(), dim=0)) > 0.98


def test_a_gate_made_of_products_gets_no_relevance():
    """Nothing goes back through a gate, so that the product in it has no gradient at all."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 6)
            self.stem, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)

        def forward(self, x, gate=None):
            x = self.stem(x)
            gate = torch.sigmoid((self.a(x) * self.b(x)).sum(-1, keepdim=True)) if gate is None else gate
            return self.head(x * gate)

    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 6, 6, dtype=torch.float64)
    hidden = net.stem(x)
    gate = torch.sigmoid((net.a(hidden) * net.b(hidden)).sum(-1, keepdim=True)).detach()
    z = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(z, gate).sum(), z)
    seen = explain(net, x, lambda z: z, composite="attnlrp")
    torch.testing.assert_close(seen.input, x * gradient, rtol=1e-4, atol=1e-6)


def test_a_factor_without_gradients_is_a_constant():
    """A part that the forward computes under `no_grad` gets no relevance."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)

        def forward(self, x):
            x = self.stem(x)
            with torch.no_grad():
                scale = x.sigmoid()
            return self.head(x * scale)

    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 6, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    seen = explain(net, x.detach(), lambda z: z, composite="attnlrp")
    torch.testing.assert_close(seen.input, (x * gradient).detach(), rtol=1e-4, atol=1e-6)
