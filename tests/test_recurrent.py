"""Hidden units of recurrent layers: removal equals a loop over the steps, written from the formulas, on kept units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import secateur as sc
from oracle import random_scores, relative_gap, zeroed

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
}


def step(kind: str, x: Tensor, h: Tensor, c: Tensor, w: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One step by the formulas of torch's documentation. `w`: input and state weights and biases, as (gates, units)."""
    a, b = x @ w[0].flatten(0, 1).T + w[2].flatten(), h @ w[1].flatten(0, 1).T + w[3].flatten()
    gates, size = len(w[0]), h.shape[-1]
    i, j = a.unflatten(-1, (gates, size)).unbind(-2), b.unflatten(-1, (gates, size)).unbind(-2)
    if kind == "lstm":
        c = torch.sigmoid(i[1] + j[1]) * c + torch.sigmoid(i[0] + j[0]) * torch.tanh(i[2] + j[2])
        return torch.sigmoid(i[3] + j[3]) * torch.tanh(c), c
    if kind == "gru":
        r, z = torch.sigmoid(i[0] + j[0]), torch.sigmoid(i[1] + j[1])
        return (1 - z) * torch.tanh(i[2] + r * j[2]) + z * h, c
    return (torch.tanh if kind == "tanh" else torch.relu)(a + b), c


def by_formula(kind: str, net: Any, x: Tensor, kept: list[int], step: Any = step) -> tuple[Tensor, Tensor, Tensor]:
    """What a recurrent module with only the kept units returns for (steps, samples, channels): outputs, states, cells.

    The reference knows nothing of secateur: it picks rows and columns of the weights of the whole module.
    """
    ways, size, states, cells = 1 + net.bidirectional, net.hidden_size, [], []
    for layer in range(net.num_layers):
        made = []
        for way in range(ways):
            name = f"l{layer}{'_reverse' * way}"
            wi, wh = getattr(net, f"weight_ih_{name}"), getattr(net, f"weight_hh_{name}")
            gates = len(wi) // size
            wi, wh = wi.view(gates, size, -1)[:, kept], wh.view(gates, size, size)[:, kept][:, :, kept]
            if layer:
                wi = wi.unflatten(-1, (ways, size))[..., kept].flatten(-2)
            biases = [torch.zeros(gates, len(kept)).to(x)] * 2
            if net.bias:
                biases = [getattr(net, f"bias_{k}_{name}").view(gates, size)[:, kept] for k in ("ih", "hh")]
            h = c = x.new_zeros(x.shape[1], len(kept))
            out = []
            for value in reversed(x.unbind(0)) if way else x.unbind(0):
                h, c = step(kind, value, h, c, [wi, wh, *biases])
                out.append(h)
            made.append(torch.stack(out[::-1] if way else out))
            states.append(h)
            cells.append(c)
        x = torch.cat(made, -1)
    return x, torch.stack(states), torch.stack(cells)


class Net(nn.Module):
    """A recurrent module between linear layers. `read` makes vectors of what it returns."""

    def __init__(self, inner: Any, width: int, read: Callable[[Any, Any], Tensor] = lambda out, state: out) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.read = nn.Linear(4, 6), inner, nn.Linear(width, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(*self.inner(self.first(x).tanh())))


def planned(model: nn.Module, example: Any, remove: float = 0.4, seed: int = 1) -> tuple[Any, Any, nn.Module]:
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph, seed), remove=remove)
    return graph, plan, sc.apply(model, plan)


def left(plan: Any, name: str, size: int) -> list[int]:
    return sorted(set(range(size)) - {i % size for i in plan.cuts[name][0]})


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_removal_equals_the_formulas_of_the_kept_units(kind: str, setting: str) -> None:
    torch.manual_seed(0)
    inner = KINDS[kind](6, 8, **SETTINGS[setting])  # type: ignore[operator]
    ways = 1 + inner.bidirectional
    model = Net(inner, 8 * ways).double().eval()
    graph, plan, small = planned(model, torch.randn(5, 2, 4).double())
    kept, inputs = left(plan, "inner.weight_hh_l0", 8), left(plan, "first.weight", 6)
    assert 0 < len(kept) < 8
    assert (small.inner.hidden_size, small.inner.input_size) == (len(kept), len(inputs))  # type: ignore[union-attr]
    x = torch.randn(7, 3, 4).double()
    with torch.no_grad():
        hidden = torch.zeros(7, 3, 6).double()
        hidden[..., inputs] = model.first(x).tanh()[..., inputs]
        swap = inner.batch_first
        out, state, cell = by_formula(kind, inner, hidden.transpose(0, 1) if swap else hidden, kept)
        columns = model.last.weight.view(3, ways, 8)[..., kept].flatten(1)
        expected = (out.transpose(0, 1) if swap else out) @ columns.T + model.last.bias
        for made in (small, sc.apply(model, plan, how="mask"), zeroed(model, graph, plan)):
            assert relative_gap([made(x)], [expected]) < 1e-12
        _, states = small.inner(small.first(x).tanh())  # type: ignore[operator]
        found = list(states) if kind == "lstm" else [states]
        assert relative_gap(found, [state, cell][: len(found)]) < 1e-12


def test_units_of_one_number_leave_all_layers_and_both_directions() -> None:
    graph = sc.analyze(Net(nn.LSTM(6, 8, num_layers=2, bidirectional=True), 16), torch.randn(5, 2, 4))
    layer = next(layer for layer in graph.layers if layer.name == "inner")
    assert (layer.kind, len(layer.groups), layer.prunable) == ("hidden", 8, True)
    members = {(m.parameter, m.dim): m.indices for m in graph.members(int(layer.groups[3]))}
    for name in ("l0", "l1", "l0_reverse", "l1_reverse"):
        for parameter in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            assert members[f"inner.{parameter}_{name}", 0] == (3, 11, 19, 27)
        assert members[f"inner.weight_hh_{name}", 1] == (3,)
    assert members["inner.weight_ih_l1", 1] == members["last.weight", 1] == (3, 11)
    assert not any("ih_l0" in name and dim for name, dim in members)


READERS: dict[str, tuple[Callable[[Any, Any], Tensor], int]] = {
    "last state": (lambda out, state: state[0][-1], 8),
    "last cell": (lambda out, state: state[1][-1], 8),
    "states of both directions": (lambda out, state: torch.cat([state[0][-2], state[0][-1]], 1), 16),
    "all states": (lambda out, state: state[0].transpose(0, 1).flatten(1), 32),
    "mean over steps": (lambda out, state: out.mean(0), 16),
    "attention over steps": (lambda out, state: (out @ out.mT).softmax(-1) @ out, 16),
    "one direction": (lambda out, state: out[..., :8], 8),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_reads_it(name: str) -> None:
    torch.manual_seed(0)
    read, width = READERS[name]
    model = Net(nn.LSTM(6, 8, num_layers=2, bidirectional=True), width, read).double().eval()
    if name == "one direction":
        assert next(x for x in sc.analyze(model, torch.randn(5, 2, 4)).layers if x.name == "inner").reason
        return
    graph, plan, small = planned(model, torch.randn(5, 2, 4).double())
    assert small.inner.hidden_size < 8  # type: ignore[union-attr]
    x = torch.randn(7, 3, 4).double()
    assert relative_gap([small(x).detach()], [zeroed(model, graph, plan)(x).detach()]) < 1e-12


class Started(nn.Module):
    """A GRU that starts from a state: zeros or ones, learnt, computed, or given."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last, self.how = nn.Linear(4, 6), nn.GRU(6, 8, 2), nn.Linear(8, 3), how
        if how == "learnt":
            self.start = nn.Parameter(torch.randn(2, 1, 8))
        elif how == "computed":
            self.make = nn.Linear(4, 8)
        self.size = 8

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        h = self.first(x).tanh()
        if self.how == "zeros":
            state = torch.zeros(2, x.shape[1], self.size, dtype=x.dtype)
        elif self.how == "ones":
            state = x.new_ones(2, x.shape[1], self.inner.hidden_size)
        elif self.how == "learnt":
            state = self.start.expand(-1, x.shape[1], -1).contiguous()
        elif self.how == "computed":
            state = self.make(x.mean(0)).cos().expand(2, -1, -1).contiguous()
        else:
            assert given is not None
            state = given
        out = self.inner(h, state)[0]
        return self.last(out) + out.sum(-1, keepdim=True) if self.how == "zeros" else self.last(out)


@pytest.mark.parametrize("how", ["zeros", "ones", "learnt", "computed"])
def test_states_to_start_from(how: str) -> None:
    model = Started(how).double().eval()
    graph, plan, small = planned(model, torch.randn(5, 2, 4).double())
    kept = left(plan, "inner.weight_hh_l0", 8)
    assert small.inner.hidden_size == len(kept) < 8  # type: ignore[union-attr]
    if how == "learnt":
        assert torch.equal(small.start, model.start[..., kept])  # type: ignore[arg-type]
    x = torch.randn(7, 3, 4).double()
    assert relative_gap([small(x).detach()], [zeroed(model, graph, plan)(x).detach()]) < 1e-12


def test_what_starts_at_one_is_not_summed() -> None:
    """A masked unit that starts at 1 fades but is not 0, and a sum would count it."""

    class Summed(Started):
        def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
            state = torch.ones(2, x.shape[1], self.inner.hidden_size)
            out = self.inner(self.first(x), state)[0]
            return self.last(out) + out.sum(-1, keepdim=True)

    layer = next(layer for layer in sc.analyze(Summed("ones"), torch.randn(5, 2, 4)).layers if layer.name == "inner")
    assert "although it is not 0 when it is masked" in str(layer.reason)


def test_a_state_that_the_user_gives_has_a_fixed_size() -> None:
    graph = sc.analyze(Started("given"), (torch.randn(5, 2, 4), torch.randn(2, 2, 8)))
    layer = next(layer for layer in graph.layers if layer.name == "inner")
    assert not layer.prunable
    assert "state of fixed size" in str(layer.reason) or "compared" in str(layer.reason)


def test_projected_states() -> None:
    torch.manual_seed(0)
    model = Net(nn.LSTM(6, 8, num_layers=2, proj_size=5, bidirectional=True), 10).double().eval()
    graph, plan, small = planned(model, torch.randn(5, 2, 4).double())
    inner: Any = small.inner
    assert (inner.hidden_size, inner.proj_size) == (8, len(left(plan, "inner.weight_hr_l0", 5)))
    assert inner.proj_size < 5
    x = torch.randn(7, 3, 4).double()
    assert relative_gap([small(x).detach()], [zeroed(model, graph, plan)(x).detach()]) < 1e-12


@pytest.mark.parametrize("inner", [nn.RNN(6, 1), nn.utils.parametrizations.weight_norm(nn.RNN(6, 5), "weight_ih_l0")])
def test_what_a_state_that_stays_reads_may_leave(inner: Any) -> None:
    """A single unit, and weights that are computed."""
    graph = sc.analyze(Net(inner, inner.hidden_size), torch.randn(5, 2, 4))
    free = [layer.name for layer in graph.layers if layer.prunable]
    assert free == (["first"] if inner.hidden_size == 1 else [])
    assert graph.module_macs["inner"] == 10 * inner.hidden_size * (6 + inner.hidden_size)


# -- cells -------------------------------------------------------------------------------------------------------------
class Stepwise(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 6), kind(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, made = None, []
        for value in self.first(x).tanh().unbind(0):
            state = self.cell(value, state)
            made.append(self.last(state[0] if isinstance(state, tuple) else state))
        return torch.stack(made)


@pytest.mark.parametrize(("kind", "cell"), [("lstm", nn.LSTMCell), ("gru", nn.GRUCell), ("tanh", nn.RNNCell)])
def test_cells(kind: str, cell: Any) -> None:
    torch.manual_seed(0)
    model = Stepwise(cell).double().eval()
    _, plan, small = planned(model, torch.randn(5, 2, 4).double())
    kept, inputs = left(plan, "cell.weight_hh", 8), left(plan, "first.weight", 6)
    assert small.cell.hidden_size == len(kept) < 8  # type: ignore[union-attr]
    whole: Any = model.cell
    gates = len(whole.weight_ih) // 8
    weights = [whole.weight_ih.view(gates, 8, 6)[:, kept][..., inputs]]
    weights += [whole.weight_hh.view(gates, 8, 8)[:, kept][..., kept]]
    weights += [bias.view(gates, 8)[:, kept] for bias in (whole.bias_ih, whole.bias_hh)]
    x = torch.randn(7, 3, 4).double()
    h = c = torch.zeros(3, len(kept)).double()
    expected = []
    with torch.no_grad():
        for value in model.first(x).tanh()[..., inputs].unbind(0):
            h, c = step(kind, value, h, c, weights)
            expected.append(h @ model.last.weight[:, kept].T + model.last.bias)
        assert relative_gap([small(x)], [torch.stack(expected)]) < 1e-12


class Translator(nn.Module):
    """An encoder, and a decoder that starts from its state, attends to its outputs, and reads what it said."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encode = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True)
        self.decode, self.last = nn.LSTMCell(6, 8), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        seen, (h, c) = self.encode(self.embed(ids))
        h, c, token, said = h[0], c[0], self.embed(ids[:, 0]), []
        for _ in range(3):
            h, c = self.decode(token, (h, c))
            context = (torch.bmm(seen, h.unsqueeze(2)).softmax(1) * seen).sum(1)
            said.append(self.last(torch.cat([h, context], -1)))
            token = self.embed(said[-1].argmax(-1))
        return torch.stack(said, 1)


def test_encoder_and_decoder_share_their_units() -> None:
    model, ids = Translator().double().eval(), torch.arange(30).view(3, 10) % 20
    graph, plan, small = planned(model, ids)
    assert small.encode.hidden_size == small.decode.hidden_size < 8  # type: ignore[union-attr]
    assert relative_gap([small(ids).detach()], [zeroed(model, graph, plan)(ids).detach()]) < 1e-12


# -- packed sequences --------------------------------------------------------------------------------------------------
class Packed(nn.Module):
    def __init__(self, kind: Any, last: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = (
            nn.Linear(4, 6),
            kind(6, 8, bidirectional=True, batch_first=True),
            nn.Linear(16, 3),
        )
        self.only_last = last

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(self.first(x).tanh(), lengths, True, enforce_sorted=False)
        out, state = self.inner(packed)
        if self.only_last:
            state = state[0] if isinstance(state, tuple) else state
            return self.last(torch.cat([state[-2], state[-1]], 1))
        return self.last(rnn.pad_packed_sequence(out, True)[0])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: Any, last: bool) -> None:
    torch.manual_seed(0)
    model = Packed(kind, last).double().eval()
    graph, plan, small = planned(model, (torch.randn(3, 5, 4).double(), torch.tensor([3, 5, 2])))
    assert small.inner.hidden_size < 8  # type: ignore[union-attr]
    assert small.first.out_features < 6  # type: ignore[union-attr]
    inputs = torch.randn(4, 7, 4).double(), torch.tensor([1, 7, 4, 4])
    with torch.no_grad():
        assert relative_gap([small(*inputs)], [zeroed(model, graph, plan)(*inputs)]) < 1e-12
        whole, lengths = small(*inputs), inputs[1].tolist()
        alone = [small(inputs[0][i : i + 1, :n], torch.tensor([n])) for i, n in enumerate(lengths)]
        together = [whole[i : i + 1] if last else whole[i : i + 1, :n] for i, n in enumerate(lengths)]
        assert relative_gap(alone, together) < 1e-12


# -- scores ------------------------------------------------------------------------------------------------------------
def data(samples: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(samples, 7, 4), torch.arange(samples) % 3


def test_weights_of_all_gates_count() -> None:
    torch.manual_seed(0)
    inner = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
    model = Net(inner, 16, lambda out, state: out[:, -1])
    scores = sc.score(model, None, sc.criteria.Weight(norm=None), graph=sc.analyze(model, data()[0]))
    found = next(values for site, values in scores.units.items() if site.path == "inner")
    expected = []
    for way in ("", "_reverse"):
        weights = [getattr(inner, f"weight_{k}_l{n}{way}").detach().double() for k in ("ih", "hh") for n in (0, 1)]
        expected.append(sum(w.view(4, 8, -1).abs().sum((0, 2)) for w in weights))
    np.testing.assert_allclose(found, torch.cat(expected).numpy(), rtol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", ["out", "state"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_taylor_is_the_output_times_its_gradient(kind: str, read: str) -> None:
    """The gradient by autograd through the loop over the steps."""
    torch.manual_seed(0)
    inner: Any = KINDS[kind](6, 8, batch_first=True)  # type: ignore[operator]
    model = Net(inner, 8, lambda out, s: out[:, -1] if read == "out" else (s[0] if kind == "lstm" else s)[0]).double()
    x, y = data()
    scores = sc.score(model, (x.double(), y), sc.criteria.Taylor(norm=None), batch_size=5)
    found = next(values for site, values in scores.units.items() if site.path == "inner")
    out = by_formula(kind, inner, model.first(x.double()).tanh().transpose(0, 1), list(range(8)))[0].detach()
    z = out[-1].requires_grad_()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(model.last(z), y), z)
    expected = (z.detach() * g).sum(0).abs() / len(x) / (7 if read == "out" else 1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:right for other reasons")  # of random weights
@pytest.mark.parametrize("criterion", ["lrp", "lrp:attnlrp", "weight", "activation", "gradient", "taylor", "random"])
def test_every_criterion_prunes_them(criterion: str) -> None:
    torch.manual_seed(0)
    model = Net(nn.GRU(6, 8, batch_first=True), 8, lambda out, state: out[:, -1])
    result = sc.prune(model, data(), criterion=criterion, remove=0.4, schedule=0.2, repair="best", progress=False)
    assert result.model.inner.hidden_size < 8


# -- relevance ---------------------------------------------------------------------------------------------------------
class Linearised:
    """`step` in which gates are constants and an activation is a constant factor, so that relevance is gradient times
    input where all weights and inputs are positive and there is no bias. Remembers all states."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def __call__(self, kind: str, x: Tensor, h: Tensor, c: Tensor, w: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        gates, size = len(w[0]), h.shape[-1]
        a, b = ((v @ m.flatten(0, 1).T).unflatten(-1, (gates, size)).unbind(-2) for v, m in ((x, w[0]), (h, w[1])))
        sums, gate = [i + j for i, j in zip(a, b, strict=True)], lambda v: torch.sigmoid(v).detach()
        bent = lambda v: v * (torch.tanh(v) / v).detach()  # noqa: E731
        if kind == "lstm":
            c = gate(sums[1]) * c + gate(sums[0]) * bent(sums[2])
            h = gate(sums[3]) * bent(c)
        elif kind == "gru":
            h = (1 - gate(sums[1])) * bent(a[2] + gate(sums[0]) * b[2]) + gate(sums[1]) * h
        else:
            h = bent(sums[0]) if kind == "tanh" else sums[0]
        self.states.append(h)
        return h, c


@pytest.mark.parametrize("setting", ["plain", "two layers, both ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_relevance_is_that_of_the_steps(kind: str, setting: str) -> None:
    """For positive numbers: gradient times input of the loop, from 1 at the class, with gates that get nothing."""
    torch.manual_seed(0)
    inner: Any = KINDS[kind](4, 5, bias=False, **SETTINGS[setting])  # type: ignore[operator]
    ways = 1 + inner.bidirectional

    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(5 * ways, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out, state = self.inner(x.transpose(0, 1))
            state = state[0] if kind == "lstm" else state
            return self.last(out.sum(0)) + self.last(torch.cat([*state[-ways:]], 1))

    model = Positive().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_().add_(0.01)
    x, y = torch.rand(6, 7, 4).double().requires_grad_(), torch.arange(6) % 3
    steps = Linearised()
    out, state, _ = by_formula(kind, inner, x.transpose(0, 1), list(range(5)), steps)
    logits = (out.sum(0) + torch.cat([*state[-ways:]], 1)) @ model.last.weight.T
    chosen = logits[torch.arange(6), y]
    heat, *grads = torch.autograd.grad((chosen / chosen.detach()).sum(), [x, *steps.states])
    parts = torch.stack([(s * g).sum(0) for s, g in zip(steps.states, grads, strict=True)])  # layers, ways, steps
    expected = parts.view(inner.num_layers, ways, 7, 5).sum((0, 2)).flatten()
    scores = sc.score(model, (x.detach(), y), "lrp:alpha1beta0", batch_size=4)
    found = next(values for site, values in scores.units.items() if site.path == "inner")
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-6)
    explained = sc.explain(model, x.detach(), y, composite="alpha1beta0")
    np.testing.assert_allclose(explained.input, (x * heat).detach().numpy(), rtol=1e-6)


def test_relevance_of_two_cells_in_one_forward_is_kept_apart() -> None:
    class Two(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.last, self.apart = nn.GRUCell(4, 8), nn.GRUCell(8, 5), nn.Linear(5, 3), apart

        def forward(self, x: Tensor) -> Tensor:
            if self.apart:
                return self.last(self.b(self.a(x)))
            for cell in (self.a, self.b):
                weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
                x = torch.gru_cell(x, x.new_zeros(len(x), cell.hidden_size), *weights)
            return self.last(x)

    given = torch.rand(6, 4), torch.arange(6) % 3
    one, two = (list(sc.score(Two(apart), given, "lrp").units.values()) for apart in (True, False))
    for mine, theirs in zip(one, two, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert set(sc.explain(Two(True), given[0]).units) >= {"a", "b", "last"}


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_relevance_of_packed_sequences_is_that_of_each_alone(kind: Any, composite: str) -> None:
    torch.manual_seed(0)
    model, lengths = Packed(kind, last=True).double().eval(), [3, 5, 2]
    x, y = torch.randn(3, 5, 4).double(), torch.tensor([0, 1, 2])
    together = sc.explain(model, (x, torch.tensor(lengths)), y, composite=composite)
    assert relative_gap([together.output], [model(x, torch.tensor(lengths)).detach()]) < 1e-12
    for i, n in enumerate(lengths):
        one = sc.explain(model, (x[i : i + 1, :n], torch.tensor([n])), y[i : i + 1], composite=composite)
        heats = [(made.input[0] if isinstance(made.input, list) else made.input) for made in (together, one)]
        assert heats[0] is not None
        assert heats[1] is not None
        assert relative_gap([heats[0][i, :n]], [heats[1][0]]) < 1e-9


# -- afterwards --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gru", pytest.param("lstm", marks=pytest.mark.slow)])
def test_onnx(kind: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = Net(KINDS[kind](6, 8, batch_first=True), 8).eval(), torch.randn(2, 2, 4)  # type: ignore[operator]
    _, _, small = planned(model, x)
    session = runtime.InferenceSession(
        str(sc.export(small, tmp_path / "m.onnx", x)), providers=["CPUExecutionProvider"]
    )
    found = torch.as_tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert relative_gap([found], [small(x).detach()]) < 1e-5


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_saved_loaded_and_trained_on(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make = lambda: Net(KINDS[kind](6, 8, num_layers=2, batch_first=True), 8, lambda out, state: out[:, -1])  # noqa: E731 # type: ignore[operator]
    model = make()
    x, y = data()
    result = sc.prune(model, (x, y), criterion="taylor", remove=0.4, progress=False)
    sc.save(result, tmp_path / "small.pt")
    again = sc.load(tmp_path / "small.pt", make())
    assert torch.equal(again(x), result.model(x))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    before = nn.functional.cross_entropy(again(x), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(again(x), y) < before
