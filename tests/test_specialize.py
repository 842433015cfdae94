"""k of N outputs, merged outputs, and the paper's uncoupled masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.uncoupled import paper_cost, prune_uncoupled
from secateur.analysis.analyze import analyze
from secateur.analysis.specialize import MergedOutputs, specialize
from secateur.criteria.scoring import score
from secateur.criteria.weight import Weight
from secateur.errors import (
    NotFiniteError,
    NothingToPruneError,
    PlanError,
    TargetError,
    UnsupportedModelError,
    VerificationError,
)
from secateur.files.saved import load, save
from secateur.loop.prune import prune


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(8, 10)).eval()


X = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("outputs", [[2, 5], [7, 0, 4], [9], list(range(10)), list(reversed(range(10)))])
def test_kept_outputs_in_the_order_given(outputs: list[int], tmp_path: Path) -> None:
    net = conv_net()
    narrow = specialize(net, outputs, X)
    assert narrow[5].out_features == len(outputs) == len(narrow[5].weight)
    torch.testing.assert_close(narrow(X), net(X)[:, outputs])
    assert net[5].out_features == 10
    save(narrow, tmp_path / "narrow")
    torch.testing.assert_close(load(tmp_path / "narrow", conv_net())(X), narrow(X))


def test_a_fully_convolutional_classifier() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    narrow = specialize(net, [8, 1], X)
    assert narrow[2].out_channels == 2
    torch.testing.assert_close(narrow(X), net(X)[:, [8, 1]])


def test_models_that_end_in_a_softmax() -> None:
    net = nn.Sequential(conv_net(), nn.Softmax(1))
    narrow = specialize(net, [4, 3], X)
    shares = net(X)[:, [4, 3]]
    torch.testing.assert_close(narrow(X), shares / shares.sum(1, keepdim=True))


def test_merged_outputs_sum_probabilities(tmp_path: Path) -> None:
    net, groups = conv_net(), {"cat": [7, 1, 3], "dog": [0, 9]}
    merged = specialize(net, groups, X)
    assert merged.body[5].out_features == 5
    p = net(X)[:, [7, 1, 3, 0, 9]].softmax(1)  # among the rows that are kept
    expected = torch.stack([p[:, :3].sum(1), p[:, 3:].sum(1)], 1)
    torch.testing.assert_close(merged(X).exp(), expected)
    assert merged.names == ("cat", "dog")
    save(merged, tmp_path / "merged")
    again = load(tmp_path / "merged", MergedOutputs(conv_net(), groups, 10))
    torch.testing.assert_close(again(X), merged(X))
    exported = torch.export.export(merged, (X,))
    torch.testing.assert_close(exported.module()(X), merged(X))


def test_a_graph_of_another_model_is_refused() -> None:
    other = nn.Sequential(*conv_net()[:5], nn.Linear(8, 11))
    with pytest.raises(PlanError, match=r"another model, in which `5\.bias` has the shape \(11,\)"):
        specialize(conv_net(), [1, 2], X, graph=analyze(other.eval(), X))
    with pytest.raises(TargetError, match="outputs is a generator"):
        specialize(conv_net(), (i for i in [1, 2]), X)  # type: ignore[arg-type]


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"returns probabilities.*without its softmax"):
        specialize(nn.Sequential(conv_net(), nn.Softmax(1)), {"cat": [7, 1], "dog": [0]}, X)

    class Placed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = super().forward(x)
            return made * torch.linspace(0, 1, made.shape[1])

    with pytest.raises(VerificationError, match="by position"):
        specialize(Placed(*conv_net()).eval(), {"cat": [7, 1], "dog": [0]}, X)


def test_specialised_models_can_be_scored_and_pruned(tmp_path: Path) -> None:
    for outputs in ([4, 2, 7], {"a": [1, 2], "b": [3, 4, 5]}):
        narrow = specialize(conv_net(), outputs, X)
        y = torch.arange(5) % len(outputs)
        result = prune(narrow, (X, y), "lrp", remove=0.5, schedule=0.25)
        assert result.model(X).shape == (5, len(outputs))
        for name in ("taylor", "gradient"):
            score(narrow, (X, y), name)
        save(result, tmp_path / "small")
        built = conv_net() if isinstance(outputs, list) else MergedOutputs(conv_net(), outputs, 10)
        torch.testing.assert_close(load(tmp_path / "small", built)(X), result.model(X))


def test_lrp_starts_at_the_members_by_their_probability() -> None:
    """The relevance of a merged output is shared among its members as their probabilities are."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4))
    x = torch.rand(1, 3)
    merged = specialize(net, {"a": [0, 1], "b": [2, 3]}, x)
    scores = score(merged, (x, torch.tensor([0])), "lrp")
    found = next(v for s, v in scores.units.items() if s.path == "body.0")
    p = net(x)[0].softmax(0).detach().double().numpy()
    np.testing.assert_allclose(found, [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0], rtol=1e-4, atol=1e-6)


def test_bad_outputs_are_named() -> None:
    net = conv_net()
    for wrong in ([], [10], [-1], [1, 1], {"a": [], "b": [1]}, {"a": [1], "b": [1]}):
        with pytest.raises(TargetError):
            specialize(net, wrong, X)

    with pytest.raises(TargetError, match="'cat' is the only group: its probability would be 1 for every input"):
        specialize(net, {"cat": [1, 2]}, X)

    class Energy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).cumsum(1)

    with pytest.raises(UnsupportedModelError):
        specialize(nn.Sequential(nn.Conv2d(3, 2, 1), Energy()), [1], X)


# -- uncoupled ---------------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bna = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.b, self.bnb = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bna(self.a(x)))
        return self.fc(F.relu(x + self.bnb(self.b(x))).mean((2, 3)))


def residual() -> Residual:
    torch.manual_seed(0)
    net = Residual()
    for bn in (net.bna, net.bnb):
        bn.running_mean.uniform_(-0.5, 0.5)
        bn.bias.data.uniform_(-0.5, 0.5)
    return net.eval()


def test_masked_filters_are_silent_and_independent() -> None:
    net, y = residual(), torch.arange(5) % 3
    result = prune_uncoupled(net, (X, y), Weight(norm=None), remove=0.5, step=0.25)
    assert result.history[-1].removed == 0.5
    assert not np.array_equal(result.masked["a"], result.masked["b"])  # nothing ties the two ends of the sum
    with torch.no_grad():
        made = result.model
        a = made.bna(made.a(X))
        b = made.bnb(made.b(F.relu(a)))
        assert not a[:, result.masked["a"]].any()
        assert not b[:, result.masked["b"]].any()
        # the others are what the original makes of the silenced inputs
        h = net.bna(net.a(X)) * torch.from_numpy(~result.masked["a"])[:, None, None]
        torch.testing.assert_close(a, h)
        rest = net.bnb(net.b(F.relu(h))) * torch.from_numpy(~result.masked["b"])[:, None, None]
        torch.testing.assert_close(b, rest)
    assert made.a.weight.shape == net.a.weight.shape
    assert list(result.masked) == ["a", "b"]


def test_costs_are_counted_both_ways() -> None:
    net, y = residual(), torch.arange(5) % 3

    def only_a(model: nn.Module, batches: object) -> dict[str, Tensor]:
        return {"a": torch.tensor([0.0, 0, 0, 1, 1, 1]), "b": torch.tensor([0.0, 0, 1, 1, 1, 1])}

    result = prune_uncoupled(net, (X, y), only_a, remove=5 / 12, step=5 / 12)
    assert [m.sum() for m in result.masked.values()] == [3, 2]
    row = result.history[-1]
    conv_a, conv_b, fc = 64 * 27 * 6, 64 * 54 * 6, 18
    assert paper_cost(row, "macs") == round(conv_a / 2 + conv_b * 4 / 6 + fc)
    # b reads 3 channels that are always 0; the sum's channel is 0 only where both ends are: 2 of the fc's 6 inputs
    assert row.macs == round(conv_a / 2 + conv_b * 4 / 6 * conv_b_inputs() + fc * 4 / 6)


def conv_b_inputs() -> float:
    """a's channels feed b and the sum; as a coupled class they are dead only with b's: channels 0 and 1 of 6."""
    return 4 / 6


def test_the_paper_counts_4800_filters_in_resnet18() -> None:
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet18(num_classes=4).eval()
    x, y = torch.rand(2, 3, 32, 32), torch.tensor([0, 3])
    result = prune_uncoupled(net, (x, y), "random", remove=0.9, step=0.45, evaluate=lambda m: {"overall": 1.0})
    assert result.history[0].units == 4800
    assert result.history[-1].units == 480
    assert all((~mask).any() for mask in result.masked.values())
    with pytest.raises(NothingToPruneError):
        prune_uncoupled(nn.Sequential(nn.Linear(3, 2)), (torch.rand(2, 3), torch.tensor([0, 1])))


def test_merged_by_the_mean() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 10))
    x = torch.rand(5, 4)
    groups = {"many": [0, 2, 4, 6], "one": [3]}
    merged = specialize(net, groups, x, merge="mean")
    shares = net(x)[:, [0, 2, 3, 4, 6]].softmax(1)
    wanted = torch.stack([shares[:, [0, 1, 3, 4]].mean(1), shares[:, 2]], 1).log()
    assert torch.allclose(merged(x), wanted, atol=1e-6)
    with pytest.raises(TargetError, match="sum or their mean"):
        specialize(net, groups, x, merge="max")  # type: ignore[arg-type]


def test_weights_that_are_no_numbers_are_named() -> None:
    """They would look as if the kept outputs differed."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    model[0].weight.data[0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"`0.weight` of Sequential has NaN"):
        specialize(model, [0, 1], torch.randn(2, 4))
