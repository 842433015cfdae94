"""Repair: exact recovery, no harm on any construct, nothing of the user's changes; ranking by cost; the loop."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import secateur as sc
from constructs import CONSTRUCTS, build
from oracle import fingerprint, outputs, random_scores, relative_gap, same
from secateur.errors import DataError, NotFiniteError, RepairError, SecateurWarning
from secateur.loop import Schedule
from secateur.plans import Limits
from secateur.plans.plan import plan_for
from secateur.repair import (
    NOTHING,
    Change,
    Correction,
    Mean,
    Moments,
    Outcome,
    Repair,
    Ridge,
    corrections,
    known_corrections,
    register_correction,
    repair,
    session,
)
from secateur.repair.layers import survey
from secateur.repair.reference import Reference
from secateur.repair.samples import Samples
from secateur.running.identity import digest
from secateur.running.progress import Event, Line, Repairing
from secateur.runtimes.clock import Clock


def without(model: nn.Module, example: Any, layer: str, units: list[int]) -> nn.Module:
    """The model with those units of that layer removed."""
    graph = sc.analyze(model, example)
    producer = next(p for p in graph.producers if p.sites[0].path == layer)
    removed = np.zeros(len(graph.root), np.bool_)
    removed[graph.root[producer.labels[units]]] = True
    return sc.apply(model, plan_for(graph, removed))


def gap(small: nn.Module, model: nn.Module, x: Any) -> float:
    return relative_gap(outputs(small, x), outputs(model, x))


def recovers(model: nn.Module, shape: tuple[int, ...], layer: str, units: list[int]) -> None:
    """What was removed followed from what stayed, so the repaired model must answer alike on new data."""
    model.eval()
    data, new = torch.randn(96, *shape), torch.randn(32, *shape)
    small = without(model, data[:1], layer, units)
    assert gap(small, model, new) > 1e-2
    mended = sc.repair(small, model, (data, None), "ridge", copies=0)
    assert gap(mended, model, new) < 1e-4


# -- exact recovery ------------------------------------------------------------------------------------------------
def test_recovery_of_a_multiple_behind_batch_norm_and_relu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(4),
    )  # fmt: skip
    model(torch.randn(64, 2, 9, 9))  # statistics
    with torch.no_grad():
        for tensor in (model[0].weight, model[1].running_var):
            tensor[5] = tensor[2]
        model[0].bias[5], model[1].running_mean[5] = model[0].bias[2], model[1].running_mean[2]
        model[1].weight[5], model[1].bias[5] = 2.5 * model[1].weight[2], 2.5 * model[1].bias[2]
    recovers(model, (2, 9, 9), "0", [5])


def test_recovery_of_a_combination_of_linear_units() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))
    recovers(model, (6,), "0", [1, 4])  # ten units of six inputs: any eight determine the others


def test_recovery_by_a_constant_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 2.0
    data = torch.randn(64, 6)
    small = without(model, data[:1], "0", [3])
    assert gap(small, model, data) > 1e-2
    for method in ("mean", "norm", "ridge", "best"):
        assert gap(sc.repair(small, model, (data, None), method), model, torch.randn(32, 6)) < 1e-4


def test_recovery_in_a_grouped_convolution() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.twice = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 8, 1)
            self.grouped, self.head = nn.Conv2d(8, 6, 3, groups=2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = self.twice(x) + self.twice(x.flip(3))  # used twice, so it stays as it is
            return self.head(self.grouped(x).relu().mean((2, 3)))

    torch.manual_seed(0)
    model = Grouped()
    assert "twice.weight" not in survey(model, torch.randn(2, 1, 7, 7)).layers
    recovers(model, (1, 7, 7), "stem", [1, 4])


class Stream(nn.Module):
    """A residual block between a stem and a head, with batch norm on the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.norm(self.b(F.relu(self.a(x))))).relu().mean((2, 3)))


def test_recovery_through_a_residual_stream() -> None:
    torch.manual_seed(0)
    model = Stream()
    model.train()(torch.randn(64, 3, 8, 8))
    model.eval()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
        model.a.weight[7], model.a.bias[7] = model.a.weight[3], model.a.bias[3]
    recovers(model, (3, 8, 8), "a", [7])


class _Block(nn.Module):
    """A residual block of a language model, with linear layers as torch or as GPT-2 writes them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.up, self.down, self.head = layer(6, 12), layer(12, 6), layer(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["mean", "norm", "ridge", "best"])
def test_layers_as_gpt2_writes_them_are_repaired_like_linear_ones(method: str) -> None:
    torch.manual_seed(0)
    plain = _Block(nn.Linear).double()
    other = _Block(lambda inputs, outputs: Conv1D(outputs, inputs)).double()
    other.load_state_dict({k: v.mT if v.ndim == 2 else v for k, v in plain.state_dict().items()})
    x = torch.randn(40, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(other(x), plain(x))
    mended = [sc.repair(without(net, x[:1], "up", [1, 4, 7]), net, (x, None), method) for net in (plain, other)]
    for name, weight in mended[1].named_parameters():
        wanted = mended[0].get_parameter(name)
        torch.testing.assert_close(weight.mT if weight.ndim == 2 else weight, wanted, rtol=1e-6, atol=1e-9)
    assert not torch.equal(mended[1].down.bias, other.down.bias)


def test_the_branch_makes_up_for_what_the_stream_lacks() -> None:
    torch.manual_seed(0)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 12), nn.Linear(12, 3)
            self.skip, self.other = nn.Linear(6, 5), nn.Linear(5, 12)

        def forward(self, x: Tensor) -> Tensor:
            h = self.skip(x).relu()
            stream = self.other(h) + self.other(h * 0.5)  # used twice, so it stays as it is
            return self.c(torch.tanh(stream + self.b(self.a(x))))

    model = Sum()
    with torch.no_grad():  # what the stream loses with its unit 0 is, up to ReLU, a linear function of x
        model.skip.weight[0] *= 0.1
        model.skip.bias[0] = 5.0
    recovers(model, (6,), "skip", [0])


# -- no harm, for everything that apply handles --------------------------------------------------------------------
def samples_like(example: Any, count: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if isinstance(example, dict):
        return {key: samples_like(value, count, seed + i) for i, (key, value) in enumerate(example.items())}
    if not example.is_floating_point():
        return torch.randint(0, 11, (count, *example.shape[1:]))
    return torch.randn(count, *example.shape[1:]).to(example)


def divergence(small: nn.Module, model: nn.Module, x: Any, rows: Tensor) -> float:
    """As the documentation says: Jensen-Shannon of the classes, or the relative squared distance; added up."""
    total = 0.0
    for mine, wanted in zip(outputs(small, x), outputs(model, x), strict=True):
        mine, wanted = mine[rows].double(), wanted[rows].double()
        if mine.ndim == 2:
            p, q = wanted.softmax(1), mine.softmax(1)
            m = (p + q) / 2
            total += float(((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)).mean()) / 2
        else:
            total += float((mine - wanted).square().sum() / wanted.square().sum())
    return total


@pytest.mark.filterwarnings("ignore::secateur.errors.SecateurWarning")
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_no_construct_is_harmed(name: str) -> None:
    model, example = build(name)
    data = samples_like(example, 12)
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph, 1), remove=0.4))
    before, small_before = fingerprint(model), fingerprint(small)
    repairer = Repair(copies=0, rows=400)
    session = repairer.session(model, (data, None))
    found = session.examine(small)
    assert same(before, fingerprint(model))
    assert same(small_before, fingerprint(small))
    assert type(found.model) is type(small)
    assert {n: p.shape for n, p in found.model.state_dict().items()} == {
        n: p.shape for n, p in small.state_dict().items()
    }
    held = session.reference().samples.held
    first, last = (divergence(net, model, data, held) for net in (small, found.model))
    assert math.isclose(first, found.divergence["none"], rel_tol=1e-3, abs_tol=1e-9)
    assert last <= first * (1 + 1e-6) + 1e-12
    if found.method == "none":
        assert digest(found.model) == digest(small)
    if name == "tensordot":  # a sample's answer depends on the others in its batch
        return
    in_parts = replace(repairer, at_once=5).examine(small, model, (data, None))
    for key, value in found.divergence.items():
        assert math.isclose(in_parts.divergence[key], value, rel_tol=0.05, abs_tol=1e-6)


def repaired(
    name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, nn.Module, Any, Outcome]:
    model, example = build(name)
    model, data = model.to(dtype), samples_like(example.to(dtype), 24)
    graph = sc.analyze(model, example.to(dtype))
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.4))
    return model, small, data, Repair(copies=0, **options).examine(small, model, (data, None))


@pytest.mark.parametrize("name", ["residual", "conv chain", "transformer", "grouped", "transposed", "encoder layer"])
def test_repair_helps_on_the_samples(name: str) -> None:
    _, _, _, found = repaired(name)
    assert min(found.divergence.values()) < 0.7 * found.divergence["none"]
    assert "ridge" in str(found)


@pytest.mark.parametrize("method", ["mean", "norm", "ridge"])
def test_a_layer_that_lacks_nothing_stays_to_the_bit(method: str) -> None:
    """What it lacks by rounding is no reason to change it, not even where nothing is held out."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten()
    ).eval()
    x = torch.randn(24, 3, 12, 12)
    small = without(model, x[:1], "2", list(range(6)))
    found = Repair(method, copies=1, held_out=0.0).examine(small, model, (x, None), progress=False)
    assert [str(found.layers[name]) for name in ("0.weight", "2.weight")] == ["none", "none"]
    assert str(found.layers["4.weight"]) != "none"
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert torch.equal(found.model.state_dict()[name], small.state_dict()[name])


def test_parts_give_the_same_weights() -> None:
    _, small, _, whole = repaired("residual", method="ridge")
    _, _, _, parts = repaired("residual", method="ridge", at_once=7)
    assert whole.layers == parts.layers
    moved = 0.0
    for (name, a), (_, b), (_, old) in zip(
        whole.model.named_parameters(), parts.model.named_parameters(), small.named_parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)
        moved = max(moved, float((a - old).detach().abs().max()))
    assert moved > 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    *_, found = repaired("residual", dtype)
    assert {p.dtype for p in found.model.parameters()} == {dtype}
    assert min(found.divergence.values()) < 0.8 * found.divergence["none"]
    if dtype == torch.float64:
        assert found.method == "ridge"


def test_the_same_seed_gives_the_same_model() -> None:
    (*_, a), (*_, b) = repaired("residual", seed=3), repaired("residual", seed=3)
    assert digest(a.model) == digest(b.model)


def test_shuffled_loaders_inference_mode_and_wrappers() -> None:
    model, small, data, _ = repaired("conv chain")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, torch.zeros(24).long()), 8, shuffle=True)
    before = torch.random.get_rng_state()
    a = sc.repair(small, model, loader)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(99)
    assert digest(a) == digest(sc.repair(small, model, loader))  # the same samples, whatever the state
    with torch.inference_mode():
        b = sc.repair(nn.DataParallel(small), torch.compile(model), loader)
    assert digest(a) == digest(b)
    assert not next(b.parameters()).is_inference()


def test_flags_are_kept() -> None:
    model, small, data, _ = repaired("conv chain")
    small.train()
    small[1].eval()
    small[0].weight.requires_grad_(False)
    made = sc.repair(small, model, (data, None))
    assert [m.training for m in made.modules()] == [m.training for m in small.modules()]
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in small.parameters()]


def test_the_repaired_model_can_be_saved(tmp_path: Any) -> None:
    model, _, _, found = repaired("conv chain")
    sc.save(found.model, tmp_path / "small")
    assert digest(sc.load(tmp_path / "small", model)) == digest(found.model)


def test_one_sample_is_not_learnt_by_heart() -> None:
    model, example = build("conv chain")
    small = without(model, example, "0", [1, 2])
    data, new = torch.randn(1, 3, 8, 8), torch.randn(64, 3, 8, 8)
    found = Repair(copies=0).examine(small, model, (data, None))
    assert all(not isinstance(kind, Ridge) or kind.strength >= 1 for kind in found.layers.values())
    rows = torch.arange(64)
    assert divergence(found.model, model, new, rows) < 1.5 * divergence(small, model, new, rows)


def test_what_changes_is_read_again() -> None:
    model, small, data, _ = repaired("conv chain")
    session = Repair(copies=0).session(model, (data, None))
    first = session.examine(small).model
    assert digest(session.examine(small).model) == digest(first)
    reference = session.reference()
    session.examine(small)
    assert session.reference() is reference  # kept
    with torch.no_grad():
        model[-1].bias += 1
    assert digest(session.examine(small).model) != digest(first)
    data.mul_(0.5)
    session.examine(small)
    assert session.reference() is not reference
    for _ in range(2):  # other tensors, to which nobody has written
        reference = session.reference()
        model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()}, assign=True)
        assert session.reference() is not reference


# -- which layers --------------------------------------------------------------------------------------------------
def test_tied_and_reused_weights_are_left_alone() -> None:
    model, example = build("tied")
    assert set(survey(model, example).layers) == {"mix.weight"}
    model, example = build("reused")
    assert set(survey(model, example).layers) == {"stem.weight", "head.weight"}


def test_a_norm_that_two_layers_share_takes_no_constant() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Conv2d(3, 6, 1, bias=False) for _ in range(2))
            self.c, self.norm, self.own = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.a(x)) + self.norm(self.b(x))
            z = self.c(y.relu())
            return self.own(z) + z.sigmoid()  # the norm is not the only one who reads z

    found = survey(Shared().eval(), torch.randn(2, 3, 4, 4)).layers
    assert [site.shifts for site in found.values()] == [False, False, False]
    assert all(site.norm is not None for site in found.values())


def test_norms_without_weights_or_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, affine=False), nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(3),
    )  # fmt: skip
    model(torch.randn(8, 3, 8, 8))
    model.eval()
    sites = survey(model, torch.randn(2, 3, 8, 8)).layers
    assert sites["0.weight"].norm is not None
    assert "7.weight" not in sites  # statistics of the batch: samples are not kept apart from there on
    assert sites["3.weight"].norm is None
    assert not sites["3.weight"].shifts
    data = torch.randn(24, 3, 8, 8)
    small = without(model, data[:4], "0", [1, 5])
    assert Repair(copies=0).examine(small, model, (data, None)).divergence["ridge"] >= 0


def test_a_norm_that_silences_a_channel() -> None:
    model = Stream().eval()
    with torch.no_grad():
        model.norm.weight[2], model.norm.weight[6] = 0.0, 1e-9
    data = torch.randn(24, 3, 8, 8)
    small = without(model, data[:1], "a", [1, 2])
    mended = Repair("ridge", copies=0).examine(small, model, (data, None))
    assert all(torch.isfinite(p).all() for p in mended.model.parameters())
    assert float(mended.model.b.weight.detach().abs().max()) < 10


def test_samples_along_the_second_dimension_and_mixed_ones() -> None:
    class Layout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:  # (samples, 5, 6)
            y = self.a(x.transpose(0, 1)).relu()  # samples second
            windows = self.b(y.transpose(0, 1).flatten(0, 1)).relu()  # five rows for each sample
            mixed = self.c(windows.unflatten(0, (-1, 5)).transpose(0, 1).flatten(0, 1)).relu()  # samples interleaved
            return self.d(mixed.unflatten(0, (5, -1)).mean(0))

    torch.manual_seed(0)
    model = Layout().eval()
    data = torch.randn(40, 5, 6)
    sites = survey(model, data[:2]).layers
    assert [(site.weight, site.batch, site.positions) for site in sites.values()] == [
        ("a.weight", 1, 5), ("b.weight", 0, 5), ("d.weight", 0, 1),
    ]  # fmt: skip
    graph = sc.analyze(model, data[:1])
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.3))
    found = Repair("ridge", copies=0).examine(small, model, (data, None))
    assert found.divergence["ridge"] < found.divergence["none"]


def test_a_stream_that_is_overwritten_is_no_partner() -> None:
    class Overwritten(nn.Module):
        def __init__(self, write: bool) -> None:
            super().__init__()
            self.a, self.b, self.write = nn.Linear(4, 6), nn.Linear(6, 6), write

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu()
            y = self.b(x)
            if self.write:
                x[:, 0] = 0.0
            return x + y

    for write in (False, True):
        site = survey(Overwritten(write), torch.randn(2, 4)).layers["b.weight"]
        assert (site.partner is None) == write


def test_in_place_streams_give_what_others_give() -> None:
    """The same residual net, written with and without overwriting, is repaired alike."""
    made = []
    for name in ("residual", "residual inplace"):
        model, example = build(name)
        if made:
            model.load_state_dict(made[0][0].state_dict())
        data = samples_like(example, 24)
        small = without(model, example, "c", [1, 5, 6])
        made.append((model, Repair("ridge", copies=0).examine(small, model, (data, None))))
    (_, a), (_, b) = made
    assert a.layers == b.layers
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


# -- samples and copies --------------------------------------------------------------------------------------------
def collected(data: Any, **options: Any) -> Samples:
    asked = {"most": 1000, "copies": 3, "alter": lambda x, g: x + 100, "held_out": 0.25, "seed": 0, "device": None}
    return Samples.collect(data, **{**asked, **options})


def test_copies_of_what_is_held_out_are_held_out() -> None:
    samples = collected((torch.arange(40.0)[:, None], torch.arange(40) % 4))
    everything = torch.cat([x for _, x in samples.chunks(7)])
    assert len(everything) == samples.total == 160
    held = {float(v) % 100 for v in everything[samples.held_all]}
    fitted = {float(v) % 100 for v in everything[~samples.held_all]}
    assert held.isdisjoint(fitted)
    assert len(held) == 10
    assert len(fitted) == 30


def test_batches_do_not_depend_on_their_size() -> None:
    def noise(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    samples = collected((torch.zeros(70, 2), None), alter=noise)
    sizes = (1, 33, 64, 1000)
    all_of = [torch.cat([x for _, x in samples.chunks(size)]) for size in sizes]
    assert all(torch.equal(all_of[0], other) for other in all_of[1:])


def test_of_sorted_classes_every_one_takes_part() -> None:
    x, y = torch.arange(1000.0)[:, None], torch.arange(1000) // 100
    samples = collected((x, y), most=50)
    assert samples.count == 50
    assert {int(v) // 100 for v in samples.inputs} == set(range(10))


# -- corrections and settings ---------------------------------------------------------------------------------------
def test_a_correction_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "_KNOWN", dict(corrections._KNOWN))

    @register_correction
    class Half(Correction):
        name = "half"

        def fit(self, moments: Moments, shifts: bool) -> Change:
            return Change(self, shift=moments.e / moments.rows / 2) if shifts else Change(NOTHING)

    assert {"mean", "norm", "ridge", "half"} <= set(known_corrections())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 2.0  # always gives 2, so half of what is missing is its weight
    data = (torch.randn(64, 6), None)
    small = without(model, data[0][:1], "0", [3])
    found = Repair("half").examine(small, model, data)
    assert (found.method, found.layers["2.weight"]) == ("half", Half())
    torch.testing.assert_close(found.model[2].bias, small[2].bias + model[2].weight[:, 3])
    assert "half" not in Repair().examine(small, model, data).divergence
    monkeypatch.setattr(Half, "in_best", True)
    assert set(Repair().examine(small, model, data).divergence) == {"none", "ridge", "half"}, "the ridge is close"
    monkeypatch.setattr(session, "_CLOSE", -1.0)
    assert set(Repair().examine(small, model, data).divergence) == {"none", "mean", "norm", "ridge", "half"}
    pruned = sc.prune(model, data, "weight", remove=0.3, repair="half", progress=False)
    assert digest(pruned.model) == digest(repair(sc.apply(model, pruned.plan), model, data, "half"))
    with pytest.raises(RepairError, match="'best'"):
        register_correction(type("Best", (Half,), {"name": "best"}))


def test_corrections_are_values() -> None:
    assert Ridge(0.1) == Ridge(0.1) != Ridge(1.0)
    assert Mean() != NOTHING
    assert [str(kind) for kind in (NOTHING, Mean(), Ridge(0.01))] == ["none", "mean", "ridge 0.01"]


def test_settings_do_not_change_and_the_package_has_the_function() -> None:
    assert sc.repair is repair
    assert len(inspect.signature(sc.repair).parameters) <= 9
    settings = Repair("ridge", rounds=2)
    with pytest.raises(FrozenInstanceError):
        settings.rounds = 3  # type: ignore[misc]
    assert settings == Repair("ridge", rounds=2)
    assert "rounds=2" in repr(settings)


# -- errors --------------------------------------------------------------------------------------------------------
def test_errors_say_what_is_wrong() -> None:
    model, small, data, _ = repaired("conv chain")
    with pytest.raises(RepairError, match=r"'magic'.*best, mean, norm, ridge"):
        sc.repair(small, model, (data, None), "magic")
    with pytest.raises(RepairError, match="copies=-1"):
        Repair(copies=-1)
    with pytest.raises(RepairError, match=r"was not made by secateur\.apply or prune from the given original"):
        sc.repair(copy.deepcopy(model), model, (data, None))
    other, *_ = repaired("residual")
    with pytest.raises(RepairError, match="Fix"):
        sc.repair(small, other, (data, None))
    with pytest.raises(DataError, match="no sample"):
        sc.repair(small, model, [])
    with pytest.raises(DataError, match="NaN"):
        sc.repair(small, model, (data * math.nan, None))
    for alter, says in ((lambda x, _: x * math.nan, "NaN"), (lambda x, _: x[:1], r"alter makes \(1, .* of \(")):
        with pytest.raises(DataError, match=says):
            Repair(copies=1, alter=alter)(small, model, (data, None))


def test_a_forward_that_catches_errors_does_not_keep_a_stopped_repair_waiting() -> None:
    class Cautious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu()
            with contextlib.suppress(Exception):
                x = self.b(x)
            return self.c(x)

    def stop(event: object) -> None:
        if isinstance(event, Repairing) and event.layer == 2:
            raise KeyboardInterrupt

    model = Cautious().eval()
    small = without(model, torch.randn(1, 4), "a", [1, 2])
    with pytest.raises(KeyboardInterrupt):
        Repair("mean").examine(small, model, (torch.randn(20, 4), None), stop)


@pytest.mark.parametrize("held_out", [0.2, 0.8])
def test_a_layer_that_few_samples_join_is_repaired_in_the_trial_too(held_out: float) -> None:
    """With so little memory a single sample finds room: at 0.2 it is none that is held out, at 0.8 it is one."""
    torch.manual_seed(0)
    ends = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), *ends).eval()
    small, x = without(model, torch.rand(1, 3, 96, 96), "0", list(range(20))), torch.rand(10, 3, 96, 96)
    outcome = Repair("mean", copies=0, held_out=held_out, memory="16 MiB").examine(small, model, (x, None))
    if held_out > 0.5:
        assert outcome.method == "none"
    else:
        assert outcome.divergence["mean"] < 0.1 * outcome.divergence["none"]
        assert gap(outcome.model, model, x) < 0.5 * gap(small, model, x)


def test_a_single_number_among_the_inputs_is_the_same_for_all_samples() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, factor: Any) -> Tensor:
            return self.b(self.a(x).relu()) * factor

    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.rand(20, 4)
    for number, other in ((torch.tensor(2.0), torch.tensor(3.0)), (2.0, 3.0)):
        data = [((part, number), torch.arange(10) % 3) for part in x.split(10)]
        scores = sc.score(model, data, "taylor")
        doubled = [((part, torch.full((10, 1), 2.0)), y) for (part, _), y in data]
        for site, values in sc.score(model, doubled, "taylor").units.items():
            assert values == pytest.approx(scores.units[site], rel=1e-5, abs=1e-7)
        small = without(model, (x[:1], number), "a", [0, 1])
        assert Repair("ridge").examine(small, model, data).method == "ridge"
        with pytest.raises(DataError, match="repair needs the same"):
            Repair("ridge").examine(small, model, [data[0], ((x[10:], other), None)])


def test_quantities_are_compared_by_their_distance() -> None:
    """Their softmax says nothing: here it is 0 and 1 whatever the model does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)).eval()
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([0.0, 1000.0]))
    x, small = torch.rand(40, 6), without(model, torch.rand(1, 6), "0", list(range(16)))
    wanted, cut = model(x).detach().double(), small(x).detach().double()
    outcome = Repair("ridge", held_out=0).examine(small, model, (x, wanted.float()))
    assert outcome.divergence["none"] == pytest.approx(float((cut - wanted).square().mean() / wanted.square().mean()))
    assert outcome.method == "ridge"
    assert Repair("ridge", held_out=0).examine(small, model, (x, None)).divergence["none"] == 0  # as classes


def test_a_model_that_lists_boxes_is_repaired_after_each_of_several_cuts() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 5, 3)

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            found = self.c(self.b(self.a(torch.stack(images)).relu()).relu()).mean((2, 3))
            return [{"boxes": row[None, :4], "scores": row[4:].sigmoid()} for row in found]

    model, images = Detector().eval(), [torch.rand(3, 12, 12) for _ in range(6)]
    repairs = Repair("mean", copies=0).session(model, [((images,), None)])
    small = without(model, (images,), "a", [1, 2])
    first = repairs.examine(small, False).divergence
    assert repairs.examine(without(small, (images,), "b", [0]), False).divergence["none"] > 0  # another layer now
    assert repairs.examine(small, False).divergence == first


class Pyramid(nn.Module):
    """Feature maps of three sizes, of an image or of three images, and a head that all of them share."""

    def __init__(self, images: bool) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.images = images

    def maps(self, x: Tensor) -> list[Tensor]:
        if self.images:
            return [self.body(x[..., ::step, ::step]).relu() for step in (1, 2, 4)]
        first = self.body(x).relu()
        second = 2 * F.avg_pool2d(first, 2).square()
        return [first, second, 2 * F.avg_pool2d(second, 2).square()]

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.b(self.a(m).relu()) for m in self.maps(x)]


@pytest.mark.parametrize("at_once", [None, 16])
def test_a_head_on_several_sizes_is_fitted_to_the_rows_of_all(at_once: int | None) -> None:
    """A ridge over all rows of all sizes, written out, for what the body still gives the head."""
    torch.manual_seed(0)
    model, x = Pyramid(images=False).double().eval(), torch.randn(40, 3, 8, 8, dtype=torch.float64)
    small = without(model, x[:1], "body", [1, 4, 7])
    settings = Repair("ridge", copies=0, held_out=0.0, rounds=0, at_once=at_once)
    found = settings.examine(small, model, (x, None))
    strength = found.layers["a.weight"].strength  # type: ignore[attr-defined]
    kept = [c for c in range(10) if c not in (1, 4, 7)]
    reads, lacks = [], []
    for m in model.maps(x):
        reads.append(F.unfold(m[:, kept], 3, padding=1).mT.flatten(0, 1))
        lacks.append((model.a(m) - small.a(m[:, kept])).flatten(2).mT.flatten(0, 1))
    left, right = torch.cat(reads), torch.cat(lacks)
    assert len(left) == 40 * (64 + 16 + 4)
    left, right = left - left.mean(0), right - right.mean(0)
    gram = left.mT @ left / len(left)
    ridge = strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    wanted = torch.linalg.solve(gram + ridge, left.mT @ right / len(left)).mT.reshape(small.a.weight.shape)
    torch.testing.assert_close(found.model.a.weight - small.a.weight, wanted, rtol=1e-6, atol=1e-8)


def test_a_head_on_several_sizes_comes_closer_on_each() -> None:
    torch.manual_seed(0)
    model, x, new = Pyramid(images=True).eval(), torch.randn(96, 3, 16, 16), torch.randn(32, 3, 16, 16)
    assert [len(survey(model, x[:2]).layers[f"{name}.weight"].calls) for name in ("body", "a", "b")] == [3] * 3
    small = without(model, x[:1], "body", [1, 4, 7])
    mended = sc.repair(small, model, (x, None), "ridge", copies=0)
    with torch.no_grad():
        for whole, before, after in zip(model(new), small(new), mended(new), strict=True):
            assert float((after - whole).square().mean()) < 0.9 * float((before - whole).square().mean())


def test_a_model_in_which_nothing_can_be_repaired_stays_as_it_is() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.b(self.a(x).relu())
            return x

    model = Loop().eval()
    small = without(model, torch.randn(1, 4), "a", [1, 2])
    with pytest.warns(SecateurWarning, match="used once"):
        found = Repair().examine(small, model, (torch.randn(8, 4), None))
    assert found.method == "none"
    assert digest(found.model) == digest(small)


def test_specialized_originals() -> None:
    model, example = build("conv chain")
    narrow = sc.specialize(model, outputs=[0, 3], example=example)
    small = without(narrow, example, "0", [1, 2])
    found = Repair(copies=0).examine(small, narrow, (torch.randn(24, 3, 8, 8), None))
    assert min(found.divergence.values()) <= found.divergence["none"]
    with pytest.raises(RepairError):  # its outputs are not those of the whole model
        sc.repair(small, model, (torch.randn(24, 3, 8, 8), None))


def test_progress_is_shown_to_terminals_only() -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        with Line(True, stream) as line:
            line(Repairing("ridge", 3, 9))
        assert ("layer 3/9" in stream.getvalue()) == shown
    told: list[Event] = []
    model, small, data, _ = repaired("conv chain")
    Repair("ridge", copies=0).examine(small, model, (data, None), told.append)
    assert any("layer 3/3" in str(event) for event in told)


# -- ranking by cost -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["conv chain", "residual", "depthwise", "concat", "transformer"])
@pytest.mark.parametrize("spared", ["macs", "params"])
def test_savings_are_what_leaves_with_a_group_alone(name: str, spared: str) -> None:
    model, example = build(name)
    graph = sc.analyze(model, example)
    groups = np.unique(graph.root[np.concatenate([layer.groups for layer in graph.layers])])
    saved = graph.cost_of.prices[spared].savings(np.zeros(len(graph.root), np.bool_))
    whole, exact = getattr(graph.cost, spared), {}
    for group in groups:
        removed = np.zeros(len(graph.root), np.bool_)
        removed[group] = True
        exact[group] = whole - getattr(graph.cost_of(removed), spared)
        # To first order: what a group saves on both sides of one weight is counted twice where the two meet.
        assert exact[group] <= saved[group] + 1e-6
    once = [g for g in groups if math.isclose(exact[g], saved[g], abs_tol=0.5)]
    assert once if name in ("conv chain", "concat") else True


@pytest.mark.parametrize("name", ["conv chain", "grouped", "concat", "depthwise"])
@pytest.mark.parametrize("keep", [{"macs": 0.6}, {"params": 0.6}])
def test_scope_cost_takes_the_least_score_per_operation_first(name: str, keep: dict[str, float]) -> None:
    model, example = build(name)
    graph = sc.analyze(model, example)
    scores = random_scores(graph, 5)
    chosen = sc.plan(graph, scores, keep=keep, limits=Limits(scope="cost"))
    (spared,) = keep
    whole, value = getattr(graph.cost, spared), scores.of(graph)
    ratio: dict[int, float] = {}
    for layer in graph.layers:
        for group in layer.groups[graph.prunable[layer.groups]]:
            removed = np.zeros(len(graph.root), np.bool_)
            removed[group] = True
            units = sum(int(np.count_nonzero(graph.root[p.labels] == group)) for p in graph.producers)
            ratio[int(group)] = value[group] * units / (whole - getattr(graph.cost_of(removed), spared))
    gone = set(chosen.groups)
    assert gone
    worst_gone = max(ratio[g] for g in gone)
    # What stayed though it was cheaper is the last of its layer.
    for group, worth in ratio.items():
        if group not in gone and worth < worst_gone * (1 - 1e-9):
            holders = [p for p in graph.producers if group in graph.root[p.labels]]
            assert any(len(set(graph.root[p.labels]) - gone) == 1 for p in holders)


# -- the loop ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """A small trained net, ten samples of each class, fresh samples."""
    pytest.importorskip("sklearn")
    from secateur.demo import Digits, train

    loaded = Digits.load()
    return train(loaded, epochs=3), loaded.of(list(range(10)), 10), loaded.test[0]


def kl(small: nn.Module, model: nn.Module, x: Tensor) -> float:
    return divergence(small, model, x, torch.arange(len(x)))


def test_pruning_repairs_unless_told_otherwise(digits: Any) -> None:
    model, data, fresh = digits
    default = sc.prune(model, data, keep={"macs": 0.5}, progress=False)
    at_once = {"limits": Limits(scope="cost"), "schedule": Schedule(one_shot=True)}
    bare = sc.prune(model, data, keep={"macs": 0.5}, repair=None, **at_once, progress=False)
    assert default.plan.groups == bare.plan.groups
    assert kl(default.model, model, fresh) < 0.5 * kl(bare.model, model, fresh)
    assert [row.step for row in default.history] == [0, 1]
    assert default.history[-1].macs == default.plan.after.macs <= 0.5 * default.cost_before.macs
    assert sc.measure(default.model, fresh[:1], latency=False) == default.plan.after
    assert default.settings["repair"] == "Repair"


@pytest.mark.parametrize(
    ("criterion", "scope"),
    [("lrp", "cost"), ("lrp:epsilon_plus", "cost"), ("taylor", "layer"), ("weight", "layer"), ("random", "layer")],
)
def test_only_relevance_is_compared_across_layers_by_default(digits: Any, criterion: str, scope: Any) -> None:
    model, (x, y), _ = digits
    data, asked = (x[::5], y[::5]), {"keep": {"macs": 0.5}, "repair": "mean", "progress": False}
    plans = {
        name: sc.prune(model, data, criterion, limits=Limits(scope=name), **asked).plan.groups
        for name in (None, "cost", "layer")
    }
    assert plans[None] == plans[scope]
    assert plans["cost"] != plans["layer"]


def test_never_far_behind_on_fresh_samples(digits: Any) -> None:
    model, (x, y), fresh = digits
    for share in (0.05, 0.3):
        plain, mended = 0.0, 0.0
        for seed in range(3):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:50]
            data = (x[order], y[order])
            result = sc.prune(model, data, remove=share, repair=None, schedule=Schedule(one_shot=True), progress=False)
            plain += kl(result.model, model, fresh)
            mended += kl(sc.repair(result.model, model, data, copies=2, seed=seed), model, fresh)
        assert mended <= plain


def test_stepwise_repairs_start_from_the_original_and_resume(digits: Any, tmp_path: Any) -> None:
    model, data, fresh = digits
    seen: list[str] = []

    def evaluate(net: nn.Module) -> float:
        seen.append(digest(net))
        if len(seen) == 5 + 4:  # in the second run
            raise KeyboardInterrupt
        return 1.0

    data = (data[0][::4], data[1][::4])
    asked = {"remove": 0.4, "repair": Repair("ridge", copies=1), "progress": False, "evaluate": evaluate}
    asked["schedule"] = Schedule(step=0.1, rescore=False)
    whole = sc.prune(model, data, **asked, checkpoint=tmp_path / "a.safetensors")
    with pytest.raises(KeyboardInterrupt):
        sc.prune(model, data, **asked, checkpoint=tmp_path / "b.safetensors")
    resumed = sc.prune(model, data, **asked, checkpoint=tmp_path / "b.safetensors")
    assert digest(resumed.model) == digest(whole.model)
    assert [row.units for row in resumed.history] == [row.units for row in whole.history]
    assert len(whole.history) == 5
    direct = sc.repair(sc.apply(model, replace(whole.plan, example=fresh[:1])), model, data, "ridge", copies=1)
    assert digest(direct) == digest(whole.model)


def test_rescoring_with_repair(digits: Any) -> None:
    model, data, _ = digits
    once = sc.prune(model, data, remove=0.3, schedule=Schedule(step=0.1, rescore=False), repair="mean", progress=False)
    anew = sc.prune(model, data, remove=0.3, schedule=Schedule(step=0.1, rescore=True), repair="mean", progress=False)
    assert once.plan.groups != anew.plan.groups
    assert len(once.history) == len(anew.history) == 4


def test_max_drop_and_latency_with_repair(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, fresh = digits

    def agreement(net: nn.Module) -> float:
        return float((net(fresh).argmax(1) == model(fresh).argmax(1)).float().mean())

    result = sc.prune(model, data, max_drop=0.1, evaluate=agreement, schedule=0.2, repair="mean", progress=False)
    assert agreement(result.model) >= 0.9
    assert not result.history[-1].held or result.stopped != ""
    # A stopwatch that cannot be disturbed: a microsecond for each weight.
    monkeypatch.setattr(
        Clock, "in_turn", lambda _, models: [1e-6 * sum(p.numel() for p in m.parameters()) for m, _ in models]
    )
    timed = sc.prune(model, data, keep={"latency": 0.9}, progress=False, repair="mean")
    assert timed.cost_after.latency == pytest.approx(1e-6 * timed.plan.after.params)
    assert timed.cost_after.latency <= 0.9 * timed.cost_before.latency


def test_a_user_s_own_repair_and_settings(digits: Any) -> None:
    model, data, _ = digits
    calls = []

    def mine(small: nn.Module, original: nn.Module, given: Any) -> nn.Module:
        calls.append(original is model)
        return small

    sc.prune(model, data, remove=0.3, repair=mine, progress=False)
    assert calls == [True]
    with pytest.raises(RepairError, match="magic"):
        sc.prune(model, data, remove=0.3, repair="magic", progress=False)
    own = sc.prune(model, data, remove=0.3, repair=Repair("mean", copies=0), progress=False)
    assert own.settings["repair"] == "Repair"


def test_no_data_no_repair() -> None:
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    result = sc.prune(net, [(torch.zeros(1, 4), None)], "weight", remove=0.5, progress=False)
    assert "repair" not in result.settings


def test_a_model_that_answers_with_one_number_per_sample() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 12), nn.Linear(12, 7), nn.Linear(7, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)).relu()).squeeze(1)

    torch.manual_seed(0)
    recovers(One(), (5,), "a", [0, 3, 7])


# -- weights of rows -----------------------------------------------------------------------------------------------
def test_rows_count_by_the_relevance_of_their_position() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3, bias=False))
    x = torch.rand(6, 2, 3, 3)
    samples = Samples.collect((x, None), 6, 0, None, 0.2, 0, None)
    reference = Reference(model, samples, rows=1000, relevance=0.75)
    with torch.no_grad():
        inner = model[:3](x)
        answer = model(x).argmax(1)
        parts = inner * model[3].weight[answer].clamp(min=0)  # what adds to the class: all of its relevance
    share = (parts / parts.sum(1, keepdim=True)).view(6, 4, 9).sum(1)  # by position
    torch.testing.assert_close(reference.weights["0.weight"], 0.25 + 0.75 * 9 * share)
    torch.testing.assert_close(reference.weights["3.weight"], torch.ones(6, 1))
    some = Reference(model, samples, rows=24, relevance=1.0)  # four positions of each sample
    chosen = some.layers["0.weight"].sampled.chosen
    assert chosen is not None
    taken = share.gather(1, chosen)
    torch.testing.assert_close(some.weights["0.weight"], taken / taken.mean())


def test_a_repair_by_relevance_brings_relevant_positions_closer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 4)
    ).eval()
    with torch.no_grad():  # only a corner is looked at
        seen = torch.zeros(8, 12, 12)
        seen[:, :4, :4] = 1
        model[5].weight *= seen.flatten()
    brighter = torch.zeros(16, 16)  # there, other units are active
    brighter[:8, :8] = 2
    data = (torch.randn(64, 3, 16, 16) + brighter, None)
    small = without(model, data[0][:1], "0", [1, 4, 6, 7, 9, 11])

    def corner(candidate: nn.Module) -> float:
        with torch.no_grad():
            x = torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(1)) + brighter
            gaps = candidate[:4](x) - model[:4](x)
        return float(gaps[:, :, :4, :4].square().mean())

    plain, by_relevance = (Repair("ridge", copies=0, relevance=r)(small, model, data) for r in (0.0, 0.9))
    assert corner(by_relevance) < min(corner(plain), corner(small))


@pytest.mark.parametrize("settings", [{"relevance": 0.5}, {"rounds": 0}, {"rounds": 2}])
def test_other_settings_recover_and_stream_alike(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))
    data, new = torch.randn(96, 6), torch.randn(32, 6)
    small = without(model, data[:1], "0", [1, 4])
    whole, stream = (Repair("ridge", at_once=n, **settings)(small, model, (data, None)) for n in (None, 32))
    assert gap(whole, model, new) < 1e-4
    assert gap(stream, model, new) < 1e-4


@pytest.mark.parametrize("settings", [{"relevance": 1.5}, {"rounds": -1}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RepairError, match=next(iter(settings))):
        Repair(**settings)


# -- rounds --------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A residual block as torchvision has it, and one whose stream is changed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d, self.down = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (8, 8, 8, 8, 6, 6))
        self.relu, self.head, self.twice = nn.ReLU(inplace=True), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norms
        x = self.relu(n[0](self.stem(x)))
        out = n[2](self.b(self.relu(n[1](self.a(x)))))
        out += x
        x = self.relu(out)
        out = n[4](self.d(self.relu(n[3](self.c(x)))))
        out += n[5](self.down(x))
        x = self.head(self.relu(out).mean((2, 3)))
        return self.twice(x.relu()) + x


def test_layers_before_a_relu_are_found() -> None:
    found = survey(Block().eval(), torch.randn(2, 3, 8, 8)).layers
    # `d` is there before what is added to it, and the output of `head` is read twice.
    expected = {"stem": True, "a": True, "b": True, "c": True, "d": False, "down": True, "head": False, "twice": False}
    assert {name.removesuffix(".weight"): site.limits == (0, torch.inf) for name, site in found.items()} == expected


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [None, 20])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_further_rounds_leave_free_what_the_relu_cuts_off(
    normed: bool, stream: bool, at_once: int | None, rounds: int
) -> None:
    _rounds_leave_free_what_is_cut_off(torch.relu, 0, math.inf, normed, stream, at_once, rounds)


LIMITS: list[tuple[Any, float, float]] = [
    (F.relu6, 0, 6), (partial(F.hardtanh, min_val=-0.2, max_val=0.3), -0.2, 0.3), (lambda x: x.clamp(0, 0.4), 0, 0.4),
    (lambda x: x.clamp(max=0.25), -math.inf, 0.25), (lambda x: torch.clamp_min(x, 0.1), 0.1, math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("function", "low", "high"), LIMITS)
@pytest.mark.parametrize("normed", [False, True])
def test_further_rounds_leave_free_what_is_beyond_a_limit(function: Any, low: float, high: float, normed: bool) -> None:
    _rounds_leave_free_what_is_cut_off(function, low, high, normed, stream=True, at_once=None, rounds=2)


def _rounds_leave_free_what_is_cut_off(
    function: Any, low: float, high: float, normed: bool, stream: bool, at_once: int | None, rounds: int
) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 12), nn.Linear(12, 5), nn.Linear(5, 3)
            self.norm = nn.BatchNorm1d(5) if normed else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.b(self.a(x).relu()))
            return self.c(function(y + x if stream else y))

    model = Net().double()
    x = torch.randn(60, 5).double()
    if normed:
        model(x)
        with torch.no_grad():
            model.norm.weight.copy_(torch.tensor([1.5, -0.7, 0.4, -1.0, 2.0]))
            model.norm.bias.uniform_(-0.5, 0.5)
    model.eval()
    small = without(model, x[:1], "a", [0, 3, 4, 8, 9, 10])
    outcome = Repair("ridge", copies=0, at_once=at_once, rounds=rounds).examine(small, model, (x, None))
    chosen = outcome.layers["b.weight"]
    assert isinstance(chosen, Ridge)

    def array(t: Tensor) -> np.ndarray[Any, Any]:
        return t.detach().numpy()

    scale, offset = np.ones(5), np.zeros(5)
    if normed:
        scale = array(model.norm.weight) / np.sqrt(array(model.norm.running_var) + model.norm.eps)
        offset = array(model.norm.bias) - array(model.norm.running_mean) * scale
    more = array(x) / scale if stream else np.zeros((60, 5))
    read = array(outcome.model.a(x).relu())
    target = array(model.b(model.a(x).relu())) + more
    asked = target * scale + offset  # what the limits see
    begin = read @ array(small.b.weight).T + array(small.b.bias) + more
    centred = read - read.mean(0)
    ridge = chosen.strength * (centred**2).mean() * len(read)
    wanted = target
    for _ in range(1 + rounds):
        lack = wanted - begin
        change = np.linalg.solve(centred.T @ centred + ridge * np.eye(6), centred.T @ (lack - lack.mean(0)))
        constant = lack.mean(0) - read.mean(0) @ change
        now = begin + read @ change + constant
        shown = now * scale + offset
        free = np.where(asked < low, np.minimum(shown, low), np.where(asked > high, np.maximum(shown, high), asked))
        wanted = (free - offset) / scale
    np.testing.assert_allclose(array(outcome.model.b.weight), array(small.b.weight) + change.T, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(array(outcome.model.b.bias), array(small.b.bias) + constant, rtol=1e-6, atol=1e-8)


def test_weights_of_the_original_that_are_not_finite_are_refused() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(12, 4)
    small = without(net, x, "0", [1, 2])
    with torch.no_grad():
        net[0].weight[1, 0] = torch.nan  # a unit that the smaller model does not have
    with pytest.raises(NotFiniteError, match=r"`0\.weight` of Sequential has NaN"):
        repair(small, net, (x, None))


class Mixture(nn.Module):
    """Two experts, each of which sees the samples that the gate gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(4, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        chosen, made = self.gate(h).argmax(1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            made = made.index_copy(0, mine, expert(h[mine]))
        return self.last(made)


@pytest.mark.parametrize("at_once", [None, 16])
@pytest.mark.parametrize("seed", range(3))
def test_experts_that_see_some_samples_stay_as_they_are(seed: int, at_once: int | None) -> None:
    torch.manual_seed(seed)
    net, x = Mixture().double().eval(), torch.randn(60, 4, dtype=torch.float64)
    with torch.no_grad():  # each gets half of them
        net.gate.bias -= net.gate(net.first(x).relu()).median(0).values
    small = without(net, x, "experts.0.0", [0, 5])
    outcome = Repair("ridge", at_once=at_once).examine(small, net, (x, None))
    assert not [name for name in outcome.layers if name.startswith("experts")]
    assert "last.weight" in outcome.layers
    for number in range(2):
        assert digest(outcome.model.experts[number]) == digest(small.experts[number])
    assert outcome.divergence[outcome.method] <= outcome.divergence["none"]


def test_a_session_repairs_models_that_kept_other_units() -> None:
    model, example = build("residual")
    data = samples_like(example, 24)
    session = Repair("ridge", copies=0).session(model, (data, None))
    graph, references = sc.analyze(model, example), []
    for share, seed in ((0.2, 1), (0.4, 1), (0.4, 2)):
        small = sc.apply(model, sc.plan(graph, random_scores(graph, seed), remove=share))
        alone = Repair("ridge", copies=0)(small, model, (data, None))
        assert digest(session.examine(small).model) == digest(alone)
        references.append(session.reference())
        assert references[-1].kept
        assert all(references[-1].targets[name].shape[-1] == len(kept) for name, kept in references[-1].kept.items())
    assert references[0] is not references[2]  # the last kept units that the first did not


class Mapped(nn.Module):
    """Something beside the layers, or between two of them, that `torch.vmap` may compute."""

    def __init__(self, beside: bool, mapped: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 3)
        self.beside, self.double = beside, torch.vmap(lambda row: row * 2) if mapped else lambda x: x * 2

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(y) + self.double(x[:, :3]) if self.beside else self.c(self.double(y))


@pytest.mark.parametrize("beside", [True, False])
def test_layers_behind_a_transform_of_what_layers_made_are_left_out(beside: bool) -> None:
    """Against the same model without a transform, of which the layer in front of it is repaired alike."""
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    made = []
    for mapped in (True, False):
        torch.manual_seed(0)
        net = Mapped(beside, mapped).eval()
        assert ("c.weight" in survey(net, x[:2]).layers) == (beside or not mapped)
        graph = sc.analyze(net, x)
        gone = np.zeros(len(graph.root), np.bool_)
        gone[next(layer.groups for layer in graph.layers if layer.name == "a")[:4]] = True
        plan = plan_for(graph, gone)
        small = repair(sc.apply(net, plan), net, (x, None), "ridge", progress=False)
        assert len(small.a.weight) == 8
        made.append(dict(small.named_parameters()))
    for name in ("a.weight", "b.weight", "b.bias"):
        torch.testing.assert_close(made[0][name], made[1][name])
