"""Memory: what is free is found out, limits hold, and work on a GPU goes on in smaller parts."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc
from command import fail, furnished, succeed
from oracle import random_scores
from photos import write_photos
from secateur import models
from secateur.analysis.reasons import srg
from secateur.cli import image_task
from secateur.cli.given_model import read_model
from secateur.cli.options import Images, Seen, Source
from secateur.errors import ConservationWarning, DataError, SecateurError, SecateurWarning
from secateur.files import onnx as onnx_files
from secateur.latency import timing
from secateur.loop import Schedule
from secateur.ops.layers import compact
from secateur.plans import Limits
from secateur.relevance import backward, explain, gradients
from secateur.relevance.engine import RelevancePass
from secateur.relevance.rules import Gamma
from secateur.repair import Repair, fit, session
from secateur.repair.layerwise import Corrected, LayerCorrector
from secateur.repair.moments import FewRows, Regression
from secateur.repair.reference import Reference
from secateur.repair.rows import Rows
from secateur.repair.samples import Samples
from secateur.running import memory
from secateur.running.accuracy import accuracy
from secateur.surgery import forwards
from secateur.surgery.probes import Probe


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [("2 GiB", 2 * 2**30), ("1.5gib", 3 * 2**29), ("800 MB", 800_000_000), ("20000000", 20_000_000), (2**30, 2**30)],
)
def test_amounts_of_memory(given: Any, bytes_: int) -> None:
    assert memory.parse(given) == bytes_


@pytest.mark.parametrize(
    "given", ["much", "3 GiB of it", "1 kB", -1, 0, True, [2**30], float("nan"), float("inf"), "."]
)
def test_what_is_no_amount_is_refused(given: Any) -> None:
    with pytest.raises(SecateurError, match=r"memory=.*Fix: bytes, or a text"):
        sc.prune(nn.Linear(2, 2), (torch.rand(4, 2), None), remove=0.5, memory=given)
    with pytest.raises(SecateurError, match="memory"):
        Repair(memory=given)


def test_the_command_line_takes_an_amount(tmp_path: Path) -> None:
    place = furnished(tmp_path)
    error = fail("prune", *place.job, "--remove", "0.3", "--out", tmp_path / "out", "--memory", "much")
    assert "--memory much is no amount of memory" in error
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        usual = memory.allowed
        patch.setattr(session, "allowed", lambda *args, **kwargs: seen.append(usual(*args, **kwargs)) or seen[-1])
        succeed("prune", *place.job, "--remove", "0.3", "--out", tmp_path / "out", "--memory", "300MiB")
    assert seen == [300 * 2**20]


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_containers_and_of_those_around_them(version: int, tmp_path: Path) -> None:
    own, top = tmp_path / "own", tmp_path / ("memory" if version == 1 else "")
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    own.write_text("4:memory,hugetlb:/a/b\n" if version == 1 else "0::/a/b\n")
    for group, most, used, cache in ((top / "a" / "b", "max", 10, 5), (top / "a", "1000", 400, 100)):
        group.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names[:2], (most, used), strict=True):
            (group / name).write_text(f"{value}\n")
        (group / "memory.stat").write_text(f"anon 3\n{names[2]} {cache}\n")
    assert memory._of_the_container(str(tmp_path), str(own)) == 1000 - 400 + 100
    assert memory._of_the_container(str(tmp_path / "none"), str(own)) is None


def test_what_is_free_is_the_least_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.free_on(torch.device("cpu"))
    assert 0 < free <= 1024 * memory._numbers("/proc/meminfo").get("MemTotal", 2**40)
    monkeypatch.setattr(memory, "_of_the_container", lambda: 12345)
    assert memory.free_on(None) == 12345
    with memory.limited("64 MiB"):
        assert memory.allowed(None) == 64 * 2**20
        assert memory.allowed(None, taken=2**40) == 16 * 2**20
        with memory.limited(None):
            assert memory.allowed(None) == 64 * 2**20


def test_too_little_memory_on_a_gpu_halves_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def work(size: int) -> str:
        tried.append(size)
        if size > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")
        return "done"

    assert memory.in_smaller_parts(work, 100) == "done"
    assert tried == [100, 50, 25, 12]
    with pytest.raises(SecateurError, match=r"too little memory.*Tried to allocate 2 GiB\..*Fix"):
        memory.in_smaller_parts(work, 100, least=30)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).eval()  # fmt: skip


def test_samples_without_room_join_in_later_layers() -> None:
    """All samples are large in the first layers. Those that wait are fitted to as well, and classes are mixed."""
    net, x, y = network(), torch.rand(60, 3, 48, 48), torch.arange(60) // 6
    samples = Samples.collect((x, y), 1024, 2, None, 0.2, 0, None)
    tight = Reference(net, samples, 20_000, memory=128 * 2**20)
    joined = [tight.joined[name] for name in tight.layers]
    assert joined == sorted(joined)
    assert joined[0] < 60 < joined[-1] <= samples.total == 180
    first = tight.samples.held[: joined[0]].double().mean()
    assert 0.1 < float(first) < 0.3
    assert sorted(tight.samples.inputs.sum((1, 2, 3)).tolist()) == sorted(x.sum((1, 2, 3)).tolist())
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    found = Repair("ridge", copies=2, memory=128 * 2**20).examine(small, net, (x, y))
    roomy = Repair("ridge", copies=2, memory=2**30).examine(small, net, (x, y))
    assert set(found.layers) == set(roomy.layers)
    assert found.divergence["ridge"] < 0.5 * found.divergence["none"]
    assert found.divergence["ridge"] < 2 * roomy.divergence["ridge"] + 1e-4


@pytest.mark.parametrize("loaded", [True, False])
def test_many_samples_are_not_all_held(loaded: bool) -> None:
    """Copies are made when they are asked for. Samples are held, and there may be any number of them."""
    x, y = torch.rand(300, 3, 16, 16), torch.arange(300) % 3
    data: Any = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 300, 50)] if loaded else (x, y)
    size = x[0].numel() * 4

    def collected(room: float) -> Samples:
        return Samples.collect(data, 1024, 8, None, 0.2, 0, None, room)

    assert collected(1e12).count == 300
    few = collected(100 * size)
    assert (few.count, few.copies, few.inputs.numel() * 4) == (100, 8, 100 * size)
    assert set(y[[int((x == sample).flatten(1).all(1).nonzero()[0]) for sample in few.inputs]].tolist()) == {0, 1, 2}
    assert collected(40 * size).count == 64  # fewer say little: they may take twice as much
    assert collected(25 * size).count == 50
    assert collected(0).count == 8


def test_a_session_holds_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[float] = []
    usual = Samples.collect.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Samples, "collect", lambda *args: rooms.append(args[-1]) or usual(Samples, *args))
    Repair("ridge", memory="600 MiB").session(network(), (torch.rand(4, 3, 48, 48), None)).reference()
    assert rooms == [100 * 2**20]


def test_memory_decides_how_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room and time for them, each layer has 20,000. Else layers have fewer, but never fewer than 4,096."""
    net, x = network(), torch.rand(60, 3, 48, 48)
    samples = Samples.collect((x, None), 1024, 2, None, 0.2, 0, None)

    def each(memory: int) -> dict[str, int]:
        found = Reference(net, samples, 20_000, memory=memory)
        assert not found.streams
        assert {name: rows.numel() // rows.shape[-1] for name, rows in found.targets.items()} == {
            name: found.joined[name] * found.targets[name].shape[1] for name in found.layers
        }
        return {name: found.joined[name] * found.targets[name].shape[1] for name in found.layers}

    positions = {"0.weight": 48 * 48, "2.weight": 24 * 24, "4.weight": 6 * 6, "8.weight": 1}
    home = sys.modules[Reference.__module__]
    for most in (20_000, 5_000):  # a CPU has less time than a GPU
        monkeypatch.setattr(home, "_ON_CPU", most)
        assert each(2**30) == {name: 180 * min(most // 180, count) for name, count in positions.items()}
    monkeypatch.setattr(home, "_ON_CPU", 20_000)
    monkeypatch.setattr(home, "_KEPT", 3 / 1024)
    tight = each(2**30)
    assert all(3900 < tight[name] < 19_000 for name in ("0.weight", "2.weight"))
    assert 4 * sum(rows * (10 if name == "8.weight" else 32) for name, rows in tight.items()) <= 3 * 2**20


class Depthwise(nn.Module):
    """What its second layer reads is 25 times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.norm, self.wide, self.last = nn.BatchNorm2d(16), nn.Conv2d(16, 24, 1), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = (x + self.norm(self.deep(x))).relu()
        return self.last(self.wide(x).relu().mean((2, 3)))


def test_held_out_rows_of_large_kernels_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept, each would be as large as the kernel for each channel. The result is the same."""
    torch.manual_seed(0)
    net, x = Depthwise().double().eval(), torch.rand(12, 3, 12, 12).double()
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    groups, make = len(small.deep.weight), fit.moments_for
    kinds = set[type]()

    def noted(count: int, *given: Any, **how: Any) -> Any:
        found = make(count, *given, **how)
        if count == groups:
            kinds.add(type(found))
        return found

    def repaired() -> dict[str, Any]:
        kinds.clear()
        return Repair("ridge", copies=2)(small, net, (x, torch.arange(12) % 3)).state_dict()

    monkeypatch.setattr(fit, "moments_for", noted)
    rows = repaired()
    assert kinds == {FewRows, Regression}
    monkeypatch.setattr(fit, "_FEW", 2**10)
    sums = repaired()
    assert kinds == {Regression}
    for name, tensor in rows.items():
        assert torch.allclose(tensor, sums[name], rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize("method", ["ridge", "norm"])
@pytest.mark.parametrize("share", [2e-2, 1e-5])  # some samples at a time, or some positions of one
def test_rows_are_looked_at_in_parts_that_fit(method: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums over all rows are the same, whatever is held out and whichever errors a ReLU hides."""
    torch.manual_seed(0)
    net, x = Depthwise().double().eval(), torch.rand(12, 3, 20, 20).double()
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    sizes: list[int] = []
    usual = Rows.read
    monkeypatch.setattr(Rows, "read", lambda *args: sizes.append((made := usual(*args)).nbytes) or made)

    def repaired() -> dict[str, Any]:
        sizes.clear()
        return Repair(method, copies=2, memory=2**30)(small, net, (x, torch.arange(12) % 3)).state_dict()

    whole, most = repaired(), max(sizes, default=0)
    home, room = sys.modules[Reference.__module__], share * 2**30
    monkeypatch.setattr(home, "_LOOKED_AT", share)
    parts = repaired()
    if method == "ridge":
        assert most > 4e6
        assert max(sizes) <= max(room / 2, 25 * 16 * 8)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.allclose(tensor, parts[name], rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize("better", [True, False])
def test_no_copy_of_the_original_waits_while_a_step_is_repaired(better: bool) -> None:
    """Its weights would be there three times. A run that keeps none of its steps makes that copy at its end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 41), nn.ReLU(), nn.Linear(41, 3)).eval()
    before, seen = {name: t.clone() for name, t in net.state_dict().items()}, list[int]()

    def count(small: nn.Module, original: nn.Module, data: Any) -> nn.Module:
        gc.collect()
        alike = [o for o in gc.get_objects() if type(o) is nn.Parameter and o.shape == (3, 41)]
        seen.append(len({parameter.data_ptr() for parameter in alike}))
        return small

    result = sc.prune(
        net, (torch.rand(20, 6), torch.arange(20) % 3), "weight", remove=0.1, repair=count, max_drop=0.1,
        limits=Limits(ignore=["2"]), schedule=Schedule(one_shot=True), progress=False,
        evaluate=lambda model: float(better or model[0].out_features == 9),
    )  # fmt: skip
    assert seen == [2]  # of the original and of the smaller model
    assert (result.model[0].out_features < 9) == better
    assert not {t.data_ptr() for t in result.model.parameters()} & {t.data_ptr() for t in net.parameters()}
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert better or torch.equal(tensor, result.model.state_dict()[name])


def test_a_repair_holds_one_model_of_those_it_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []
    usual = LayerCorrector.run

    def run(corrector: LayerCorrector) -> Corrected:
        alive.append(sum(model() is not None for model in made))
        found = usual(corrector)
        assert found.trial is not None
        made.extend(map(weakref.ref, (found.model, found.trial[0])))
        return found

    monkeypatch.setattr(LayerCorrector, "run", run)
    monkeypatch.setattr(session, "_CLOSE", 0.0)  # nothing is good enough to leave others out
    net, x = network(), torch.rand(12, 3, 32, 32)
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    Repair(copies=1).examine(small, net, (x, None))
    assert len(alive) >= 3
    assert max(alive) <= 1


@pytest.mark.parametrize("norm", [False, True])
def test_parts_of_large_weights_are_not_kept(norm: bool) -> None:
    """Positive and negative weights and those with a folded norm are three times all weights. The numbers stay."""
    torch.manual_seed(0)
    wide: list[nn.Module] = [nn.Conv2d(3, 800, 1), *([nn.BatchNorm2d(800)] if norm else []), nn.ReLU()]
    wide += [nn.Conv2d(800, 800, 1), *([nn.BatchNorm2d(800)] if norm else []), nn.ReLU()]
    net, x = nn.Sequential(*wide, nn.Flatten(), nn.Linear(3200, 3)).eval(), torch.rand(2, 3, 2, 2)
    heats = []
    for given, kept in (("16 MiB", 0), ("1 GiB", 2)):
        engine = RelevancePass(net, Gamma())
        with memory.limited(given), torch.no_grad():
            for _ in range(2):  # the second time, norms and activations are computed with their layers
                _, heat = engine.run(x, lambda output: output)
        maps = [made for _, made in engine.weights._maps.values() if made.weight.shape[:2] == (800, 800)]
        assert [len(vars(made).keys() & {"positive", "negative"}) for made in maps] == [kept]
        heats.append(heat[0])
    assert torch.equal(heats[0], heats[1])


def test_copies_of_the_weights_count_among_what_relevance_takes() -> None:
    x = torch.rand(64, 3, 64, 64)
    slim = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    heavy = nn.Sequential(*slim[:4], nn.Linear(16, 300_000), nn.Linear(300_000, 3))  # 23 MB
    with memory.limited("64 MiB"):
        few, many = (memory.together(net, x, backward=True) for net in (heavy, slim))
        room = 2**26 - sum(p.nbytes for p in heavy.parameters())
        total, _ = memory.footprint(heavy, x)
        assert few == room // (2 * total) < many


def test_relevance_lets_go_of_a_layer_once_it_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all outputs are held to the end, beside what flows back."""
    depth, width = 9, 37
    net = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))
    held, passed = list[int](), gradients.by_factor

    def counted(*given: Tensor) -> Tensor:
        alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (5, width)]
        held.append(len({t.untyped_storage().data_ptr() for t in alive}))
        return passed(*given)

    monkeypatch.setattr(gradients, "by_factor", counted)
    explain(net, torch.rand(5, width), composite="attnlrp")
    assert len(held) == depth
    assert held[0] >= 2 * depth  # what each linear layer and each GELU has made
    assert held[-1] <= 8  # of the last of them, what flows back and the input


class _Talking(nn.Module):
    """Attention whose heads are mixed before they meet the values."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.mix = heads, nn.Linear(width, 3 * width), nn.Linear(heads, heads)
        self.began = 0

    def forward(self, x: Tensor) -> Tensor:
        self.began += 1
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.mix((q @ k.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + (weights @ v).transpose(1, 2).flatten(2)


def test_a_try_that_is_given_up_ends_early_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a network attends is known in its first block, and what was computed until then goes."""
    tries, attempt = list[tuple[str, int]](), RelevancePass._attempt
    net = nn.Sequential(*(_Talking() for _ in range(6))).eval()

    def computed() -> list[Tensor]:
        return [t for t in gc.get_objects() if type(t) is Tensor and t.grad_fn is not None]

    before = computed()  # by other tests

    def counted(self: RelevancePass, *given: Any) -> Any:
        tries.append((self.composite.name, sum(all(t is not other for other in before) for t in computed())))
        return attempt(self, *given)

    monkeypatch.setattr(RelevancePass, "_attempt", counted)
    engine = RelevancePass(net)
    engine.run(torch.rand(2, 5, 16), torch.ones_like)
    assert tries == [("alpha1beta0", 0), ("attnlrp", 0)]
    assert [block.began for block in engine.model] == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(2, 8), (2, 6, 8), (2, 3, 2, 8)])
def test_layers_that_read_what_a_softmax_makes_do_not_attend(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Linear(8, 3))
    engine = RelevancePass(net)
    engine.run(torch.rand(shape), torch.ones_like)
    assert engine.composite.name == "alpha1beta0"


class _Differentiates(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.a(x).relu()
            made = self.b(h).relu()
            (slope,) = torch.autograd.grad(made.sum(), h, retain_graph=True)
        return self.out(made + 0 * slope.detach())


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
def test_gradients_that_a_forward_takes_leave_its_layers_as_they_are(composite: str) -> None:
    torch.manual_seed(0)
    net, x = _Differentiates().eval(), torch.rand(2, 6)
    plain = nn.Sequential(net.a, nn.ReLU(), net.b, nn.ReLU(), net.out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConservationWarning)  # the first pass is counted as well
        found = explain(net, x, 0, composite=composite)
    torch.testing.assert_close(found.input, explain(plain, x, 0, composite=composite).input)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_single_large_sample_leaves_no_holes(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, as many are taken together as fit twice."""
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(backward, "trim_beyond", lambda held, part: asked.append((held, part)) or held)
    net = nn.Sequential(nn.Linear(4, 700), nn.ReLU(), nn.Linear(700, 1))
    explain(net, torch.rand(samples, 500, 4), lambda out: torch.ones_like(out))
    assert len(asked) >= (2 if samples == 1 else 0)
    assert bool(asked) == (samples == 1)
    assert all(held > 2**20 and part == 16 for held, part in asked)


def test_verification_gives_back_what_a_pass_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(forwards, "trim_beyond", lambda held, part=4: asked.append(held) or held)
    for width, times in ((2, 1), (2**20 + 1, 2)):  # at the end, and after what is large
        asked.clear()
        forwards.Net(nn.Linear(1, width), ()).run(Probe("a row", torch.rand(1, 1)), torch.float32)
        assert len(asked) == times
        assert all(2**20 < held <= memory.peak() for held in asked)


def test_labels_hold_no_more_than_what_varies() -> None:
    labels = torch.arange(1, 9).expand(50, 60, 8).contiguous()
    small = compact(labels)
    assert torch.equal(small, labels)
    assert small.untyped_storage().nbytes() == 8 * labels.element_size()


def test_a_wide_layer_has_fewer_rows_than_unknowns() -> None:
    """Its equations have an unknown for each row then: with one for each of 4,608 features they take 340 MB."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 512, 1), nn.ReLU(), nn.Conv2d(512, 8, 3), nn.Flatten(), nn.LazyLinear(3)).eval()
    x = torch.rand(10, 3, 30, 30)
    net(x)
    samples = Samples.collect((x, None), 1024, 0, None, 0.2, 0, None)

    def rows(memory: int, kept: dict[str, Any] | None = None) -> int:
        found = Reference(net, samples, 20_000, memory=memory, kept=kept)
        return found.joined["2.weight"] * found.targets["2.weight"].shape[1]

    assert rows(2**31) == 10 * 28**2
    assert rows(2**31, {"2.weight": {1: np.arange(64)}}) == 10 * 28**2
    few = rows(2**28)
    assert 500 < few < 4608
    assert 24 * few**2 + 8 * few * 4608 <= 2**28 / 3
    assert rows(2**28, {"2.weight": {1: np.arange(64)}}) > 4608  # of which few are left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems decide for themselves")
def test_what_nothing_uses_is_given_back() -> None:
    parts = [torch.ones(2**16) for _ in range(800)]  # 200 MiB in pieces that malloc keeps
    last, much = torch.ones(2**10), memory.resident()
    del parts
    memory.release()
    assert memory.resident() < much - 150 * 2**20 <= memory.peak()
    assert bool(last.all())


_PARENT = """
import subprocess, sys
much = b"x" * 2**31
del much
code = "from secateur.running.memory import peak, resident; print(resident(), peak())"
subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_the_peak_of_a_process_is_its_own() -> None:
    """A child of a process that once held 2 GiB. By `getrusage` it has held them too, before it ran any code."""
    paths = [str(Path(__file__).parent.parent / "src"), *sys.path]
    made = subprocess.run(
        [sys.executable, "-c", _PARENT], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    now, most = map(int, made.stdout.split())
    assert 2**26 < now <= most < 2**31


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems decide for themselves")
def test_a_report_begins_with_what_nothing_uses(tmp_path: Path) -> None:
    net, x = network(), torch.rand(4, 3, 48, 48)
    result = sc.prune(net, (x, torch.arange(4)), remove=0.3, repair=None, schedule=0.3, progress=False)
    parts = [torch.ones(2**16) for _ in range(800)]  # 200 MiB in pieces that malloc keeps
    held = parts[::50]
    del parts
    before = memory.resident()
    result.report(tmp_path / "page.html", data=(x, torch.arange(4)))
    assert memory.resident() < before - 100 * 2**20
    assert len(held) == 16


def test_copies_are_made_once() -> None:
    x, calls = torch.rand(40, 3, 16, 16), list[int]()

    def alter(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        calls.append(len(images))
        return images + torch.rand(len(images), 1, 1, 1, generator=generator)

    samples = Samples.collect((x, None), 1024, 2, alter, 0.2, 0, None)
    parts = torch.cat([part for _, part in samples.chunks(4)])
    assert calls == [32, 8, 32, 8]
    assert torch.equal(parts, samples.at(slice(None)))
    spread = samples.spread()
    order = [int((x == image).all((1, 2, 3)).nonzero()) for image in spread.inputs]
    apart = spread.at(slice(40, None)).sub(x[order + order])
    assert torch.allclose(apart, apart[:, :1, :1, :1].expand_as(apart), atol=1e-6), "copies of these images"


def test_large_batches_are_scored_in_parts() -> None:
    net, x, y = network(), torch.rand(40, 3, 32, 32), torch.arange(40) % 10
    graph, seen = sc.analyze(net, x[:1]), []
    whole = sc.score(net, [(x, y)], "taylor", graph=graph)
    net.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    parts = sc.score(net, [(x, y)], "taylor", graph=graph, memory="16 MiB")
    assert 1 < max(seen) < 40
    for site, values in whole.units.items():
        torch.testing.assert_close(torch.tensor(parts.units[site]), torch.tensor(values), rtol=1e-4, atol=1e-7)


_LIMITED = """
import resource, torch
import secateur as sc
from secateur.repair import Repair, session
from test_memory import network

torch.set_num_threads(1)
net, data = network(), (torch.rand(40, 3, 96, 96), torch.arange(40) % 10)
result = sc.prune(net, (data[0][:4], data[1][:4]), remove=0.3, repair=None, progress=False)  # everything is loaded
used = {l.split(":")[0]: l.split()[1] for l in open("/proc/self/status") if l.startswith("VmData")}
most = 1024 * int(used["VmData"]) + 500 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
result = sc.prune(net, data, keep={"macs": 0.5}, progress=False)
print("ended", result.settings["repair"], len(result.history))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are those of Linux")
def test_a_limit_of_the_process_holds() -> None:
    """40 images with copies: one activation of all of them is 400 MiB, and several are alive. 500 MiB must do."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "src"), *sys.path]
    made = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=300, check=False,
        env={"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert made.stdout.strip() == "ended Repair 2", made.stderr[-2000:]


@pytest.mark.parametrize("target", [None, 3, torch.arange(24) % 10])
def test_many_samples_are_explained_in_parts(target: Any) -> None:
    net, x, seen = network(), torch.rand(24, 3, 48, 48), list[int]()
    whole = sc.explain(net, x, target)
    net.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    parts = sc.explain(net, x, target, memory="16 MiB")
    assert 1 <= max(seen) < 24
    for name, values in whole.units.items():
        torch.testing.assert_close(parts.units[name], values, rtol=1e-4, atol=1e-6)
    for name in ("input", "output", "heat"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-3, atol=1e-6)
    assert parts.classes is None or torch.equal(parts.classes, whole.classes)
    assert len(parts.conservation.flows) == len(whole.conservation.flows)


def test_memory_means_the_same_everywhere() -> None:
    net, x, y = network(), torch.rand(24, 3, 48, 48), torch.arange(24) % 10
    small = sc.prune(net, (x, y), remove=0.3, repair=None, progress=False).model
    tasks: list[Any] = [
        lambda m: accuracy(net, [(x, y)], memory=m),
        lambda m: sc.explain(net, x, memory=m),
        lambda m: sc.score(net, [(x, y)], "taylor", memory=m),
        lambda m: sc.repair(small, net, (x, y), copies=0, memory=m, progress=False),
        lambda m: sc.prune(net, [(x, y)], "taylor", remove=0.3, repair=None, memory=m, progress=False),
    ]
    for work in tasks:
        with pytest.raises(SecateurError, match=r"memory=.*Fix: bytes, or a text"):
            work("1 kB")
    seen: list[int] = []
    net.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for work in tasks:
        seen.clear()
        work("16 MiB")
        assert 1 <= max(seen) < 24


def test_the_report_keeps_to_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is timed while it is written: as many samples as fit instead of 32."""
    net, x = network(), torch.rand(4, 3, 256, 256)
    result = sc.prune(net, (x, torch.arange(4)), remove=0.3, repair=None, schedule=0.3, progress=False)
    page, seen, usual = sys.modules["secateur.report.page"], list[Any](), timing.time_batches
    tried: list[int] = []
    monkeypatch.setattr(page, "time_batches", lambda *args: seen.append(usual(*args)) or seen[-1])
    monkeypatch.setattr(timing, "fits", lambda models, batch: tried.append(len(batch)) or len(models) == 2)
    monkeypatch.setattr(
        page, "changes", lambda *args: seen.append(memory.allowed(None)) or (_ for _ in ()).throw(DataError("not now"))
    )
    with pytest.warns(UserWarning, match="not now"):
        result.report(tmp_path / "page.html", data=(x, None), memory="128 MiB")
    assert seen[0] == 128 * 2**20
    largest = 32 * 256**2 * 4  # of the first layer, for one image; four of its size are alive
    assert [found.batch for found in seen[1]] == [1, 128 * 2**20 // (4 * largest)]
    assert tried == [4], "both models try it first"
    assert memory._given.get() is None


def test_only_what_does_not_fit_is_timed_otherwise() -> None:
    net, x = network(), torch.rand(1, 3, 256, 256)
    with memory.limited("2 GiB"):
        assert timing.fitting([net], x) == [1, 32]
    with memory.limited("16 MiB"):
        assert timing.fitting([net], x) == [1]
        assert timing.fitting([net], x[..., :8, :8]) == [1, 32]


class Hoard(nn.Module):
    """Holds many small tensors until its end, as malloc does with a DenseNet: 4 MiB for each sample."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        held = [self.first(x)]
        for _ in range(31):
            held.append(held[-1] + 1)
        self.seen.append((len(x), memory.resident()))
        return held[-1].mean((2, 3))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_a_batch_is_timed_only_if_a_trial_has_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its largest tensor, of which 4 are alive in most networks, 32 samples would need 16 MiB."""
    small, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.rand(1, 3, 64, 64)
    with memory.limited("128 MiB"):
        for models in ([Hoard(), small], [small, Hoard()]):
            Hoard.seen.clear()
            held = memory.resident()
            found = timing.time_batches(*models, x)
            assert [timed.batch for timed in found] == [1, 16]
            assert max(size for size, _ in Hoard.seen) == 16, "a trial that takes too much is broken off"
            assert max(most for _, most in Hoard.seen) - held < 128 * 2**20
        with monkeypatch.context() as patch:
            patch.setattr(memory, "resident", lambda: 0)  # a system that does not tell
            assert timing.fitting([Hoard(), small], x) == [1, 32]


def test_covered_pictures_keep_to_the_memory() -> None:
    """They tell how faithful heat maps are, and ran all together once, 24 of a DenseNet-161 in 1 GiB."""
    net, x, heat, y = network(), torch.rand(20, 3, 96, 96), torch.rand(20, 96, 96), torch.arange(20) % 10
    sizes = list[int]()
    net.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    whole = srg(net, x, heat, y)
    assert max(sizes) == 20
    sizes.clear()
    with memory.limited("16 MiB"):
        torch.testing.assert_close(srg(net, x, heat, y), whole, rtol=1e-4, atol=1e-6)
    largest = 32 * 96**2 * 4
    assert max(sizes) == 16 * 2**20 // (4 * largest) == 3


def test_holes_are_given_back_once_they_are_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = list[int]()
    monkeypatch.setattr(memory, "resident", lambda: 100 * 2**20)
    monkeypatch.setattr(memory, "trim", lambda: trims.append(1))
    for held, given in ((100, "16 MiB"), (97, "16 MiB"), (95, "16 MiB"), (61, "160 MiB"), (59, "160 MiB")):
        with memory.limited(given):
            left = memory.trim_beyond(held * 2**20)
        assert left == (100 if trims[-1:] == [1] else held) * 2**20
        trims.append(0)
    assert trims == [0, 0, 1, 0, 0, 1, 0]


def test_a_trial_leaves_errors_to_those_who_explain_them() -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(1, -1)[:, :4]

    def fail(x: Tensor) -> Tensor:
        raise ValueError("not this one")

    broken = Single()
    broken.forward = fail  # type: ignore[method-assign]
    with memory.limited("16 MiB"):
        assert timing.fitting([Single(), broken], torch.rand(1, 3, 64, 64)) == [1, 32]


def test_what_is_held_is_what_the_kernel_says() -> None:
    held = memory.resident()
    assert held == pytest.approx(1024 * memory._numbers("/proc/self/status").get("VmRSS", 0), rel=0.02)


def test_everything_that_a_command_does_keeps_to_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = furnished(tmp_path), dict[str, int]()

    def watch(owner: Any, name: str) -> None:
        usual = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kw: seen.setdefault(name, memory.allowed(None)) and usual(*args, **kw)
        )

    for name in ("data", "times", "report", "save", "accuracy"):
        watch(image_task.Task, name)
    watch(image_task, "read")
    watch(onnx_files.Exports, "write")
    job = [item for item in place.job if item not in ("--no-report", "--no-latency")]
    succeed("prune", *job, "--remove", "0.3", "--onnx", "--out", tmp_path / "out", "--memory", "300MiB")
    assert seen == dict.fromkeys(("read", "data", "accuracy", "save", "write", "times", "report"), 300 * 2**20)
    assert memory._given.get() is None


def test_photographs_are_held_as_long_as_there_is_memory(tmp_path: Path) -> None:
    """As numbers a sixth of it, as bytes a third. Else they come in batches whose first hold all classes."""
    place = furnished(tmp_path)
    given = Images(images=Path(place.train), test=Path(place.test))
    opened = read_model(Source(model=place.net, weights=place.weights), Seen(16))
    size = 18 * 3 * 16**2 * 4
    for room, held in ((6 * size, True), (6 * size - 1, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image_task, "allowed", lambda *_, room=room: room)
            task = image_task.read_task(opened, given, 0, narrow=True)
            data = task.data()
            # Some photographs are decoded by now: those that units are scored on.
            decoded = sum(pixels.numel() for pixels in task.reference.decoder._kept.values())
        assert task.test is not None
        assert task.test.decoder is task.reference.decoder
        assert decoded + task.reference.decoder.room == room // 3
        assert isinstance(data, tuple) is held
        targets = data[1] if isinstance(data, tuple) else next(iter(data))[1]
        assert sorted(targets[: 18 if held else 3].tolist()) == ([0] * 6 + [1] * 6 + [2] * 6 if held else [0, 1, 2])


def test_the_model_with_all_outputs_goes_once_it_is_specialised(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "two", ["red", "green"], 3, (16, 16))
    place = furnished(tmp_path)
    opened = read_model(Source(model=place.net, weights=place.weights), Seen(16))
    whole, had = weakref.ref(opened.model), sum(p.numel() for p in opened.model.parameters())
    given = Images(images=photos, outputs=["red=2", "green=0"])
    task = image_task.read_task(opened, given, 0, narrow=True)
    del opened
    gc.collect()
    assert whole() is None
    assert task.had == had > sum(p.numel() for p in task.model.parameters())


_JOB = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
from secateur.cli.app import app
from secateur.running.memory import peak
app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)  # its peak is that of pytest, if that is higher
print(peak() / 2**30, used.ru_utime + used.ru_stime)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not limit data")
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "mobilenet_v2"])
def test_twelve_classes_of_ten_photographs_in_three_gibibytes(name: str, tmp_path: Path) -> None:
    """The whole command, with repair, timings and report. It was once killed above 9.8 GiB with such a network."""
    (tmp_path / "net.py").write_text(
        f"from torchvision.models import {name}\n\ndef make():\n    return {name}(num_classes=12)\n"
    )
    torch.manual_seed(0)
    net = models.build(f"{tmp_path / 'net.py'}:make")
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    photos = write_photos(tmp_path / "photos", [f"class {i:02d}" for i in range(12)], 10, (240, 230))
    here = Path(__file__).parent
    made = subprocess.run(
        [sys.executable, "-c", _JOB, "prune", f"{tmp_path / 'net.py'}:make", "--weights", tmp_path / "net.safetensors",
         "--images", photos, "--keep-macs", "0.5", "--device", "cpu", "--out", tmp_path / "small"],
        capture_output=True, text=True, timeout=1800, check=False,
        env={"PYTHONPATH": ":".join([str(here.parent / "src"), *sys.path]), "OMP_NUM_THREADS": "1", "PATH": "/bin"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    assert (tmp_path / "small" / "report.html").stat().st_size > 10_000
    (told,) = [line for line in made.stderr.splitlines() if line.startswith("this takes about ")]
    peak, seconds = map(float, made.stdout.splitlines()[-1].split())
    print(f"{name}: {peak:.2f} GiB, {seconds:.0f} s of CPU time")
    assert 0.3 < peak < 3.0
    assert peak < float(told.split()[-4]) + 0.05 < 3.1  # what it says at its beginning, rounded


class Counting(nn.Module):
    """Counts how many outputs of its layers are alive at the same time, in one forward."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
        self.outer = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for inner, outer in zip(self.inner, self.outer, strict=True):
            added = outer(torch.relu(inner(x)))
            made.append(weakref.ref(added))
            Counting.most = max(Counting.most, sum(ref() is not None for ref in made))
            x = x + added
            del added
        return self.head(x.mean(1))


def test_a_repair_that_looks_at_answers_keeps_no_outputs_of_layers() -> None:
    torch.manual_seed(0)
    net, x = Counting().eval(), torch.randn(32, 64, 64)
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.3))
    work = Repair("ridge", copies=0, memory="16 MiB").session(net, (x, None))
    Counting.most = 0
    work.examine(small)
    assert work._reference is not None
    assert work._reference.streams  # the original runs once more for its answers
    assert Counting.most == 1


@pytest.mark.parametrize("kind", ["pair", "list", "loader"])
def test_samples_that_find_no_room_are_told(kind: str) -> None:
    """On 2,500 photographs of ImageNet's classes, that was the difference between 34 and 46 %."""
    x = torch.rand(300, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.Conv2d(8, 8, 3, 4), nn.Flatten(), nn.Linear(128, 4)]
    net = nn.Sequential(*layers).eval()
    made: dict[str, Any] = {
        "pair": (x, None), "list": [(part, None) for part in x.split(25)],
        "loader": DataLoader(TensorDataset(x, torch.zeros(300, dtype=torch.long)), 25),
    }  # fmt: skip
    graph = sc.analyze(net, x[:1])
    small = sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.3))
    few = "of 300 samples that a repair could use, 64 find room in the 0.016 GiB that it may take.*memory='1 GiB'"
    with pytest.warns(SecateurWarning, match=few):
        Repair("mean", copies=0, memory="16 MiB")(small, net, made[kind])
    with pytest.warns(SecateurWarning, match="of 100 samples"):
        Repair("mean", copies=0, samples=100, memory="16 MiB")(small, net, made[kind])
    # A loader that leaves samples out of its own accord.
    loose = DataLoader(TensorDataset(x[:50], torch.zeros(50, dtype=torch.long)), 40, drop_last=True)
    assert Repair("mean", copies=0, memory="16 MiB").examine(small, net, loose, progress=False).divergence
    for enough in (Repair("mean", copies=0, memory="1 GiB"), Repair("mean", copies=0, samples=60, memory="16 MiB")):
        assert enough.examine(small, net, made[kind], progress=False).divergence  # a warning would be an error
