"""Gates take no relevance. What makes them is scored by what they let pass, and nothing else changes by that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.relevance import explain

pytestmark = pytest.mark.usefixtures("one_rule")


class Excited(nn.Module):
    """A convolution whose channels are gated by a squeeze-and-excitation block."""

    def __init__(self, constant: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.down, self.up = nn.Linear(4, 5), nn.Linear(5, 4)
        with torch.no_grad():
            self.up.weight[:, 0] = 0.5  # no output of `up` is without a positive contribution
            self.down.bias.add_(1)
        self.constant = constant

    def gate(self, x):
        hidden = F.relu(self.down(x.mean((2, 3))))
        return hidden, torch.sigmoid(self.up(hidden))

    def forward(self, x):
        x = F.relu(self.conv(x))
        _, gate = self.gate(x)
        if self.constant:
            gate = gate.detach().clone()
        x = x * gate[:, :, None, None]
        return self.head(x.mean((2, 3)))


X = torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_squeeze_and_excitation_is_scored_by_what_it_lets_pass():
    net = Excited().double()
    up, down = torch.zeros(4).double(), torch.zeros(5).double()
    for x in X.split(1):
        passed = explain(net, x, 1).units["conv"]  # ReLU and product pass it on: this is also the relevance of x * gate
        hidden = net.gate(F.relu(net.conv(x)))[0][0].detach()
        up += passed
        for c in range(4):
            share = (hidden * net.up.weight[c].detach()).clamp(min=0)
            down += passed[c] * share / share.sum()
    found = explain(net, X, 1)
    torch.testing.assert_close(found.units["up"], up, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.units["down"], down, rtol=1e-6, atol=1e-9)
    assert float(found.units["down"].sum()) == pytest.approx(3)


def test_the_rest_does_not_notice():
    with_gate, without = explain(Excited().double(), X, 1), explain(Excited(constant=True).double(), X, 1)
    torch.testing.assert_close(with_gate.input, without.input)
    for path in ("conv", "head"):
        torch.testing.assert_close(with_gate.units[path], without.units[path])
    assert with_gate.conservation.input == pytest.approx(3)
    assert not {"up", "down"} & set(with_gate.conservation.layers)


def test_a_gate_inside_a_gate():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.signal, self.outer, self.inner, self.head = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            gate = F.relu(self.outer(x)) * torch.sigmoid(self.inner(x))
            return self.head(F.relu(self.signal(x)) * torch.sigmoid(gate))

    units = explain(Nested().double(), torch.rand(2, 4).double(), 1).units
    torch.testing.assert_close(units["outer"], units["signal"])
    torch.testing.assert_close(units["inner"], units["signal"])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_queries_and_keys_are_scored_by_what_attention_gathers(packed, need_weights):
    torch.manual_seed(3)
    options = {} if packed else {"kdim": 8, "vdim": 8}
    net = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    net._qkv_same_embed_dim = packed
    if not packed:
        net = _unpacked(net)

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = net

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[0].mean(1)

    weights = explain(Attend(), torch.randn(2, 5, 8), 1, composite="alpha1beta0").weights
    if packed:
        queries, keys, values = weights["attention.in_proj_weight"].view(3, 8)
    else:
        queries, keys, values = (weights[f"attention.{name}_proj_weight"] for name in "qkv")
    for rows in (queries, keys, values):
        assert float(rows.sum()) == pytest.approx(2, rel=1e-4)
    # By head, all three have the relevance that passes through the head.
    torch.testing.assert_close(queries.view(2, 4).sum(1), values.view(2, 4).sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(keys.view(2, 4).sum(1), values.view(2, 4).sum(1), rtol=1e-4, atol=1e-5)


def _unpacked(net: nn.MultiheadAttention) -> nn.MultiheadAttention:
    for name in "qkv":
        setattr(net, f"{name}_proj_weight", nn.Parameter(torch.randn(8, 8) / 3))
    net.register_parameter("in_proj_weight", None)
    return net


def test_an_embedding_is_scored_by_what_reaches_it():
    torch.manual_seed(4)
    net = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(18, 4))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    seen = explain(net, tokens, 1)
    torch.testing.assert_close(seen.units["0"], seen.input.sum((0, 1)))


def test_gates_do_not_leave_first():
    net, data = Excited(), (X.float(), torch.tensor([0, 1, 1]))
    scores = sc.score(net, data, "lrp", graph=sc.analyze(net, X.float()[:1]))
    by_path = {site.path: values for site, values in scores.units.items()}
    assert by_path["down"].sum() == pytest.approx(by_path["conv"].sum(), rel=1e-4)
    assert np.count_nonzero(by_path["down"]) > 2
