"""Random networks as source code, pruned and judged. `benchmarks/fuzz_networks.py` has the long version."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from benchmarks import fuzz_networks as fuzz
from random_nets import TABLES, Network, network

BLOCKS = [f"{family}: {name}" for family, table in TABLES.items() for name in table]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("family", TABLES)
def test_every_block_runs(family: str) -> None:
    """Some alternatives of each, in single precision."""
    for block in (block for block in BLOCKS if block.startswith(family)):
        for number in (1, 2):
            net = replace(network(number, only=block), dtype=torch.float32)
            assert net.source == network(number, only=block).source
            with torch.no_grad():
                fuzz.called(net.build().eval(), net.inputs(0))


def test_a_number_always_means_the_same_network() -> None:
    for number in range(20):
        one, two = network(number).build(), network(number).build()
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize("part", range(4))
def test_random_networks(part: int) -> None:
    """Exact, kept or refused by name; nothing else."""
    bad = [v for v in map(fuzz.judged_in_time, range(part * 15, part * 15 + 15)) if v.ending in fuzz.BAD]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("number", [1281, 5835, 6293, 6816])
def test_networks_that_once_failed(number: int) -> None:
    """1281: `explain` of a grid sample in half precision. 6816: `F.normalize` over two dimensions. 6293: an expert
    that gets no sample. 5835: a weight that is made of every ninth unit of another layer."""
    verdict = fuzz.judged_in_time(number)
    assert verdict.ending in fuzz.GOOD, verdict


# -- does the judge see what it should see? ----------------------------------------------------------------------------
PLAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.a(self.stem(x).relu())
        {body}
"""


def plain(body: str = "return self.head(y)") -> Network:
    source = PLAIN.replace("{body}", body.replace("\n", "\n        "))
    return Network(1, source, ("vector: plain",), "vector", "random", torch.float32, "tensor", False, False, "y")


def test_the_judge_passes_what_is_right() -> None:
    assert fuzz.judged(plain()).ending == "exact"
    assert fuzz.judged(plain("return self.head(torch.dropout(y, 0.5, self.training))")).ending == "exact"


def test_the_judge_sees_another_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, plan: sc.Plan, **kw: Any) -> nn.Module:
        small = right(model, plan, **kw)
        small.get_submodule("head").register_forward_hook(lambda m, args, out: out * (1 + 1e-6))
        return small

    right = sc.apply
    monkeypatch.setattr(sc, "apply", wrong)
    verdict = fuzz.judged(plain())
    assert (verdict.ending, verdict.cause) == ("SILENT", "a fresh batch of 3: off by 1e-06")


def test_the_judge_sees_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, plan: sc.Plan, **kw: Any) -> nn.Module:
        small = right(model, plan, **kw)
        small.get_buffer("calls").add_(1)
        return small

    right = sc.apply
    monkeypatch.setattr(sc, "apply", wrong)
    verdict = fuzz.judged(plain())
    assert (verdict.ending, verdict.cause) == ("TOUCHED", "weights of the new model: calls")


@pytest.mark.parametrize("harm", ["weight", "buffer", "mode", "attribute", "random numbers"])
def test_the_judge_sees_changes_of_the_users_model(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, example: Any) -> sc.Graph:
        graph = right(model, example)
        with torch.no_grad():
            if harm == "weight":
                next(model.parameters())[0, 0] += 1e-7
            elif harm == "buffer":
                model.get_buffer("calls").add_(1)
            elif harm == "mode":
                model.get_submodule("a").training ^= True
            elif harm == "attribute":
                model.note = 1  # type: ignore[assignment]
            else:
                torch.rand(1)
        return graph

    right = sc.analyze
    monkeypatch.setattr(sc, "analyze", wrong)
    assert fuzz.judged(plain()).ending == "TOUCHED"


def test_the_judge_names_foreign_errors_and_endless_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: BaseException) -> Any:
        def wrong(*_: Any, **__: Any) -> Any:
            raise error

        return wrong

    for error, ending in [(KeyError("x"), "FOREIGN"), (fuzz._Stop(), "ENDLESS"), (sc.SecateurError("no"), "refused")]:
        monkeypatch.setattr(sc, "analyze", raises(error))
        assert fuzz.judged(plain()).ending == ending


def test_noise_is_the_same_for_models_of_other_sizes() -> None:
    for noise in (
        "torch.randn_like(y)",
        "torch.rand(y.shape)",
        "torch.empty_like(y).normal_()",
        "y.sigmoid().bernoulli()",
    ):
        net = plain(f"return y.sum(), ({noise}).mean()").build()
        small = copy.deepcopy(net)
        small.a = nn.Linear(8, 3)
        wide, narrow = (fuzz.outputs(fuzz.doubled(m), torch.rand(2, 6), False) for m in (net, small))
        assert float(wide[1]) == pytest.approx(float(narrow[1]), rel=1e-12)
        assert float(wide[1]) != float(wide[3])  # another draw in the second call


def test_the_judge_looks_into_objects() -> None:
    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    a, b, c = torch.rand(3, 2)
    assert [id(t) for t in fuzz.flat([Box({"a": a, "n": 3}), (None, Box([b, Box(c)]))])] == [id(a), id(b), id(c)]
    assert len(list(fuzz.flat(torch.distributions.Normal(a, 1.0)))) == 2


def test_a_process_that_crashes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(number: int) -> fuzz.Verdict:
        if number == 2:
            os._exit(1)
        return fuzz.Verdict(number, "exact")

    monkeypatch.setattr(fuzz, "judged_in_time", judge)
    found = sorted(fuzz.verdicts([1, 2, 3], 2), key=lambda v: v.number)
    assert [v.ending for v in found] == ["exact", "FOREIGN", "exact"]
