"""Language models: what relevance adds up to over tokens, what heads cost, and a repair that keeps few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Taylor
from secateur.plans import Limits
from secateur.repair import Repair, reference
from secateur.repair.layers import survey
from secateur.repair.lockstep import Runner

IDS = torch.randint(0, 64, (12, 9), generator=torch.Generator().manual_seed(1))


def llama(neurons: int = 40) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=neurons, num_hidden_layers=2, num_attention_heads=6,
        head_dim=4, num_key_value_heads=3, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def data(masked: bool = False) -> list[Any]:
    mask = torch.ones_like(IDS)
    if masked:
        mask[::3, 6:] = 0
    parts = zip(IDS.split(4), mask.split(4), strict=True)
    return [({"input_ids": ids, "attention_mask": own}, None) for ids, own in parts]


class Tokens(nn.Module):
    """Without biases and norms, ε-relevance is activation times gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().mean(1))


@pytest.mark.parametrize("start", ["one", "logit"])
def test_squares_of_relevance_at_each_token(start: Any) -> None:
    """Σ over samples and tokens of (a · ∂logit/∂a)²; a start with 1 divides each share by the logit."""
    net, x, y = Tokens().double(), torch.randn(6, 4, 5, dtype=torch.float64), torch.arange(6) % 3
    made = net.first(x).detach().requires_grad_(True)
    logits = net.last(made.relu().mean(1)).gather(1, y[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logits.sum(), made)
    shares = (made * gradient).detach()
    if start == "one":
        shares = shares / logits.detach()[:, None, None]
    expected = shares.square().sum((0, 1))
    found = sc.score(net, (x, y), LRP(composite="attnlrp", start=start, absolute="square"))
    torch.testing.assert_close(torch.tensor(next(iter(found.units.values()))), expected, rtol=1e-4, atol=1e-9)
    if start == "logit":  # what attnlrp does by itself
        default = sc.score(net, (x, y), LRP(composite="attnlrp"))
        assert all((default.units[site] == found.units[site]).all() for site in found.units)


def test_squares_of_taylor() -> None:
    net, x, y = Tokens().double(), torch.randn(6, 4, 5, dtype=torch.float64), torch.arange(6) % 3
    made = net.first(x).detach().requires_grad_(True)
    loss = nn.functional.cross_entropy(net.last(made.relu().mean(1)), y, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, made)
    expected = (made * gradient).detach().square().mean(1).sum(0) / 6**2
    found = sc.score(net, (x, y), Taylor(norm=None, absolute="square"))
    torch.testing.assert_close(torch.tensor(next(iter(found.units.values()))), expected)


@pytest.mark.parametrize(("worth", "leaves"), [(0.9, "self_attn"), (1.1, "mlp")])
def test_a_head_is_worth_all_its_channels(worth: float, leaves: str) -> None:
    """A neuron has 2 channels and 3 · 24 parameters. A group of heads has 4 · (1 + 1 + 2) channels and
    24 · 4 · (1 + 1 + 2 + 2) parameters. Both have 36 per channel, so that the lower score leaves first."""
    model = llama()
    graph = sc.analyze(model, data()[0][0])
    units = {
        p.sites[0]: np.full(len(p.labels), worth if "self_attn" in p.sites[0].path else 1.0) for p in graph.producers
    }
    limits = Limits(scope="cost", only=("*.mlp.*", "*.self_attn.*"))
    plan = sc.plan(graph, sc.Scores("given", units), keep={"params": 0.97}, limits=limits)
    assert {name.split(".")[3] for name, (had, has) in plan.layers.items() if has < had} == {leaves}


@pytest.mark.parametrize(("ratio", "kept"), [(0.5, 6), (0.1, 4), (0.02, 2)])
def test_the_last_heads_of_a_layer_are_dear(ratio: float, kept: int) -> None:
    """One head stays. Per parameter, others have `ratio` of a neuron's relevance times (7 / so many left)³: they leave
    while that is below 1, and then neurons do."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    graph = sc.analyze(model, data()[0][0])
    saved = graph.cost_of.prices["params"].savings(np.zeros(len(graph.root), np.bool_))
    channels = np.bincount(np.concatenate([graph.root[p.labels] for p in graph.producers]), minlength=len(graph.root))
    value = saved / np.maximum(channels, 1)
    heads = [layer for layer in graph.layers if layer.kind == "head"]
    neurons = [layer for layer in graph.layers if layer.name.endswith("intermediate.dense")]
    for layer in heads:
        value[layer.groups] *= ratio
    units = {p.sites[0]: value[graph.root[p.labels]] for p in graph.producers}
    goal = graph.cost.params - sum((8 - kept) * saved[h.groups[0]] for h in heads) - 3 * saved[neurons[0].groups[0]]
    limits = Limits(scope="cost", only=("*.intermediate.*", "*.attention.self.*"))
    plan = sc.plan(graph, sc.Scores("given", units), keep={"params": goal}, limits=limits)
    assert [plan.layers[h.name] for h in heads] == [(8, kept)] * 2
    assert sum(had - has for had, has in (plan.layers[n.name] for n in neurons)) == 3


@pytest.mark.parametrize("masked", [False, True])
def test_a_repair_that_keeps_no_rows_finds_the_same_weights(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    graph = sc.analyze(model, data()[0][0])
    plan = sc.plan(graph, sc.score(model, None, "random", graph=graph), remove=0.3)
    small = sc.apply(model, plan)
    settings = Repair("ridge", copies=0)  # copies of texts do not judge where rows are not kept
    kept = settings.examine(small, model, data(masked), progress=False)
    monkeypatch.setattr(reference, "_KEPT", 0)
    session = settings.session(model, data(masked))
    streamed = session.examine(small, progress=False)
    assert session.reference().streams
    assert not session.reference().targets
    assert kept.layers == streamed.layers
    for (name, a), b in zip(kept.model.state_dict().items(), streamed.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)
    assert any(not torch.equal(a, b) for a, b in zip(small.parameters(), streamed.model.parameters(), strict=True))


def test_a_pass_waits_at_each_layer_and_hands_on_its_errors() -> None:
    model = Tokens()
    x = torch.randn(4, 3, 5)
    layers = survey(model, x[:2]).layers
    runner = Runner(model, layers, slice(0, 4), x, lambda layer: layer.weight == "last.weight")
    assert runner.layer is None
    runner.go_on()
    assert runner.at(layers["first.weight"])
    torch.testing.assert_close(runner.rows.read().reshape(4, 3, 5), x)
    assert runner.rows.output is None
    runner.go_on(lambda rows: 2 * rows.call.run())  # what the model gets to see
    torch.testing.assert_close(runner.rows.returned().reshape(4, 3), 2 * model(x))
    runner.go_on()
    assert runner.done
    torch.testing.assert_close(runner.output, 2 * model(x))
    torch.testing.assert_close(model.last(model.first(x).relu().mean(1)), model(x))  # nothing stays behind
    with pytest.raises(RuntimeError, match="dim"):
        Runner(model, layers, slice(0, 4), torch.randn(4, 3, 6), lambda layer: False).go_on()
    early = Runner(model, layers, slice(0, 4), x, lambda layer: False).go_on()
    early.close()
    assert early.done
    assert early.rows is None
