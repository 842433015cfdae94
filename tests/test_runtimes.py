"""Latency tables: which calls are timed together, what is fitted, kept and predicted, and what plans make of it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_package
import onnxruntime
import pytest
import torch
import torchvision
from scipy.optimize import nnls
from torch import Tensor, nn

import secateur as sc
from oracle import random_scores
from secateur.errors import PlanError, SecateurError
from secateur.plans import Limits
from secateur.plans.allocation import order_by_price
from secateur.plans.plan import plan_for
from secateur.plans.scores import Scores
from secateur.runtimes import Latency, Setup, onnx
from secateur.runtimes.clock import Clock
from secateur.runtimes.eager import Eager
from secateur.runtimes.fit import nonnegative
from secateur.runtimes.segments import segments_of
from secateur.structure.cost import TermPrice
from secateur.surgery.cut import cut

IMAGE = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A stem, a branch of two convolutions that is added to it, a head."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.act = act
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.inner, self.outer = nn.Conv2d(32, 48, 3, padding=1, bias=False), nn.Conv2d(48, 32, 1)
        self.middle = nn.BatchNorm2d(48)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = torch.relu(x + self.outer(torch.relu(self.middle(self.inner(x)))))
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Attention with heads, and a layer that is a matrix product in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.attend = nn.Linear(6, 24), nn.MultiheadAttention(24, 4, batch_first=True)
        self.up, self.down, self.head = nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head((x + self.down(torch.relu(self.up(x)))).mean(1))


def lively(model: nn.Module) -> nn.Module:
    """In evaluation mode, with norms that do something."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def stopwatch(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, nn.Module], float]) -> list[int]:
    """A machine on which each module with weights takes what `seconds` says, and nothing else takes time."""
    asked = [0]

    def profile(_: Eager, model: nn.Module, plan: Any, paths: Sequence[str]) -> Callable[[], dict[str, float]]:
        asked[0] += 1
        return lambda: {path: seconds(path, model.get_submodule(path)) for path in paths}

    def passes(self: Clock, models: Sequence[tuple[nn.Module, Any]], each: Any = None) -> list[list[float]]:
        names = [name for name, module in self.model.named_modules() if hasattr(module, "weight")]
        return [[sum(seconds(name, model.get_submodule(name)) for name in names)] for model, _ in models]

    monkeypatch.setattr(Eager, "profile", profile)
    monkeypatch.setattr(Clock, "passes", passes)
    return asked


def by_size(path: str, module: nn.Module) -> float:
    """Something for the call, for each number of the weight, and for each output; norms are free."""
    if isinstance(module, nn.BatchNorm2d):
        return 0.0
    weight = module.weight
    outputs = len(weight) if isinstance(module, nn.Linear) else 144 * len(weight)
    return 1e-5 + 1e-8 * weight.numel() * (1 if isinstance(module, nn.Linear) else 144) + 1e-7 * outputs


def by_sixteen(path: str, module: nn.Module) -> float:
    """The same where channels are computed sixteen at once; three colours are read as they are."""
    if isinstance(module, nn.BatchNorm2d):
        return 0.0
    outputs, inputs = (size if size < 8 else -(-size // 16) * 16 for size in module.weight.shape[:2])
    return 1e-5 + 1e-6 * outputs * inputs + 1e-6 * (outputs + inputs)


def some_masks(graph: sc.Graph, count: int) -> list[np.ndarray]:
    """Widths at random, in steps of eight."""
    draw, found = np.random.default_rng(3), []
    for _ in range(count):
        removed = np.zeros(len(graph.root), np.bool_)
        for layer in graph.layers:
            if layer.prunable:
                keep = 8 * int(draw.integers(1, max(2, len(layer.groups) // 8 + 1)))
                removed[draw.permutation(layer.groups)[keep:]] = True
        found.append(removed)
    return found


def test_segments_are_modules_with_weights_and_what_follows() -> None:
    segments = segments_of(sc.analyze(lively(Residual()), IMAGE))
    assert [segment.path for segment in segments] == ["stem", "inner", "outer", "head"]
    sizes = {segment.path: sorted(tuple(len(axis) for axis in axes) for axes in segment.parts) for segment in segments}
    # The stem reads pixels, which stay. The branch is a block: what lies in it is gone with it, a factor of one group.
    assert sizes["stem"] == [(), (32,)]
    assert sizes["inner"] == [(1,), (32, 1), (48, 1), (48, 32, 1)]
    assert sizes["outer"] == [(1,), (32, 1), (32, 48, 1), (48, 1)]
    assert sizes["head"] == [(), (32,)]


def test_modules_that_hold_others_are_no_segments() -> None:
    segments = segments_of(sc.analyze(Encoder().eval(), torch.rand(1, 7, 6)))
    assert [segment.path for segment in segments] == ["read", "attend", "up", "down", "head"]


def test_the_fit_is_that_of_scipy() -> None:
    draw = np.random.default_rng(0)
    for rows, columns in product((3, 8, 30), (1, 2, 5)):
        matrix, wanted = draw.random((rows, columns)), draw.normal(size=rows)
        found, best = nonnegative(matrix, wanted), nnls(matrix, wanted)[0]
        assert (found >= 0).all()
        errors = [np.linalg.norm(matrix @ x - wanted) for x in (found, best)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-6)


@pytest.mark.parametrize("by_size", [by_size, by_sixteen])
def test_predictions_are_right_where_time_is_a_function_of_widths(
    by_size: Callable[[str, nn.Module], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lively(Residual())
    stopwatch(monkeypatch, by_size)
    table = sc.latency(model, IMAGE, cache=False)
    assert table.error < 1e-6
    for removed in some_masks(table.graph, 12):
        plan = plan_for(table.graph, removed)
        small = sc.apply(model, plan)
        took = sum(by_size(path, module) for path, module in small.named_modules() if hasattr(module, "weight"))
        assert table.predict(plan) == pytest.approx(took, rel=1e-6)
        assert table.predict(sc.Plan.from_json(plan.to_json())) == table.predict(plan)
    # Without the branch, what is left is the stem and the head.
    (block,) = table.graph.blocks.prunable
    removed = np.zeros(len(table.graph.root), np.bool_)
    removed[block.group] = True
    rest = sum(by_size(name, model.get_submodule(name)) for name in ("stem", "head"))
    assert table(removed) == pytest.approx(rest, rel=1e-6)
    assert table.savings(np.zeros(len(removed), np.bool_))[block.group] == pytest.approx(table.whole - rest, rel=1e-6)
    shown = str(table)
    assert f"Residual: {1000 * table.whole:.2f} ms in PyTorch, batch 1" in shown
    assert "inner" in shown
    other = sc.analyze(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), torch.rand(1, 4))
    with pytest.raises(PlanError, match="this table for another model"):
        table.predict(sc.plan(other, random_scores(other, 0), remove=0.5))


@pytest.mark.parametrize("all_of_them", [True, False])
def test_the_sum_is_corrected_by_what_most_sample_models_take(
    all_of_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where small models take less than their parts, predictions are right. A few such models change nothing."""
    stopwatch(monkeypatch, by_size)
    plain = Clock.passes
    model = lively(Residual())
    ((whole,),) = plain(Clock(Setup(), IMAGE, model), [(model, None)])

    def bent(seconds: float) -> float:
        return seconds * (1 - 0.3 * (1 - seconds / whole)) if all_of_them or seconds < 0.2 * whole else seconds

    timed: list[float] = []

    def passes(*given: Any) -> list[list[float]]:
        found = plain(*given)
        timed.extend(one for (one,) in found)
        return [[bent(one)] for (one,) in found]

    monkeypatch.setattr(Clock, "passes", passes)
    table = sc.latency(model, IMAGE, cache=False)
    assert sum(bent(one) != one for one in timed) in ({7} if all_of_them else {1, 2, 3})
    assert table.bend == pytest.approx(-0.3 if all_of_them else 0.0, abs=1e-6)
    for removed in some_masks(table.graph, 6):
        ((took,),) = plain(table.clock(model), [(cut(model, plan_for(table.graph, removed)), None)])
        assert table(removed) == pytest.approx(bent(took) if all_of_them else took, rel=1e-6)


def test_savings_are_the_slope_of_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch(monkeypatch, by_size)
    table = sc.latency(lively(Residual()), IMAGE, cache=False)
    nothing = np.zeros(len(table.graph.root), np.bool_)
    saved = table.savings(nothing)
    for layer in table.graph.layers:
        if layer.prunable:
            removed = nothing.copy()
            removed[layer.groups[:8]] = True  # a step
            assert table(nothing) - table(removed) == pytest.approx(saved[layer.groups[:8]].sum(), rel=0.35)


def test_tables_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = stopwatch(monkeypatch, by_size)
    model = lively(Residual())
    first = sc.latency(model, IMAGE, cache=tmp_path)
    measured = asked[0]
    assert measured == 8
    again = sc.latency(lively(Residual()), IMAGE, cache=tmp_path)  # other weights, the same layers
    assert asked[0] == measured
    assert (again.whole, again.kinds) == (first.whole, first.kinds)
    assert len(list(tmp_path.iterdir())) == 1
    for other in ({"batch": 4}, {"threads": 3}, {"runtime": "channels-last"}):
        sc.latency(model, IMAGE, cache=tmp_path, **other)
        measured += 8
        assert asked[0] == measured
    half, smooth = lively(Residual()).bfloat16(), lively(Residual(torch.nn.functional.gelu))
    for changed, example in ((half, IMAGE.bfloat16()), (smooth, IMAGE)):  # as large, but not as fast
        sc.latency(changed, example, cache=tmp_path)
        measured += 8
        assert asked[0] == measured
    (file, *_) = (path for path in tmp_path.iterdir() if json.loads(path.read_text())["key"]["batch"] == 4)
    for damage in ("{", "[]", json.dumps({"key": json.loads(file.read_text())["key"], "table": {}})):
        file.write_text(damage)
        sc.latency(model, IMAGE, cache=tmp_path, batch=4)
        measured += 8
        assert asked[0] == measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    sc.latency(model, IMAGE)
    assert len(list((tmp_path / "home" / "secateur").iterdir())) == 1
    asked[0] = 0
    sc.latency(model, IMAGE, cache=False)
    assert asked[0] == 8
    (tmp_path / "file").write_text("")
    sc.latency(model, IMAGE, cache=tmp_path / "file")  # a cache that cannot be written is no reason to fail


def Vision() -> nn.Module:
    """Layers that reshape alike, and may lose different heads."""
    model = torchvision.models.VisionTransformer(12, 4, 3, 4, 32, 48, num_classes=3)
    for parameter in model.parameters():  # biases that are all zero would be one tensor in a file
        nn.init.uniform_(parameter, -0.3, 0.3)
    return model


class Depthwise(nn.Module):
    """An inverted bottleneck: a convolution of each channel by itself between two of all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.each = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False)
        self.norm, self.narrow, self.head = nn.BatchNorm2d(24), nn.Conv2d(24, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.narrow(torch.relu(self.norm(self.each(torch.relu(self.wide(x)))))).mean((2, 3)))


@pytest.mark.parametrize("model", [Residual, Depthwise, Encoder])
def test_onnx_files_are_narrowed_as_the_model_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against PyTorch's own output of the smaller model. What was cut wrongly is not timed: it is exported anew."""
    net, example = lively(model()), torch.rand(1, 7, 6) if model is Encoder else IMAGE
    runner = onnx.Onnx(Setup("onnxruntime", 2), example, net)
    graph = sc.analyze(net, example)
    exported: list[nn.Module] = []
    export, named = (
        onnx._exported,
        tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7),
    )  # older files have no names
    monkeypatch.setattr(onnx, "_exported", lambda m, x: exported.append(m) or export(m, x))
    for keep, only in ((0.5, "*"), (0.7, {Encoder: "up", Residual: "inner", Depthwise: "narrow"}[model])):
        plan = sc.plan(graph, random_scores(graph, 1), keep={"macs": keep}, limits=Limits(only=only))
        small, sizes = cut(net, plan), []
        hook = small.register_forward_pre_hook(lambda _, x, sizes=sizes: sizes.append(len(x[0])))
        found = runner.prepare(small, plan)()
        hook.remove()
        if named:  # one sample is enough, unless shapes are written in the file; other files are exported anew
            assert sizes[0] == (2 if model is Encoder else 1)
        expected = small(runner.inputs).detach().numpy()
        np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-5)
    assert not (named and exported)
    exported.clear()
    monkeypatch.setattr(onnx, "_narrowed", lambda file, *_: copy.deepcopy(file))  # nothing is cut: other numbers
    plan = sc.plan(graph, random_scores(graph, 2), keep={"macs": 0.6})
    small = cut(net, plan)
    expected = small(runner.inputs).detach().numpy()
    np.testing.assert_allclose(runner.prepare(small, plan)()[0], expected, rtol=1e-3, atol=1e-5)
    assert len(exported) == 1
    seen = runner.profile(net, None, [segment.path for segment in segments_of(graph)])()
    assert set(seen) <= {segment.path for segment in segments_of(graph)}
    assert {"inner", "outer"} <= set(seen) or {"up", "down", "attend"} <= set(seen) or {"each", "narrow"} <= set(seen)
    assert sum(seen.values()) > 0


def operations(file: bytes, path: Path) -> list[str]:
    """What ONNX Runtime makes of a file: the kinds of its operations after fusions."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level, settings.optimized_model_filepath = 3, str(path)
    onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    return sorted(node.op_type for node in onnx_package.load(path).graph.node)


@pytest.mark.parametrize("model", [Residual, Depthwise, Encoder, Vision])
def test_narrowed_files_run_as_others(model: Any, tmp_path: Path) -> None:
    """Else the smaller model would be timed with other fusions. Each module is found again under their names."""
    net, example = lively(model()), torch.rand(1, 7, 6) if model is Encoder else IMAGE
    graph = sc.analyze(net, example)
    runner, paths = onnx.Onnx(Setup("onnxruntime", 2), example, net), [segment.path for segment in segments_of(graph)]
    plan = sc.plan(graph, random_scores(graph, 1), keep={"macs": 0.5})
    small = cut(net, plan)
    exported = sc.export(small, tmp_path / "small.onnx", runner.inputs).read_bytes()
    # Of another width, its attention is another module. Blocks of channels depend on the width of a convolution.
    narrowed, wanted = runner._narrow(small, plan), runner.file.SerializeToString() if model is Encoder else exported
    assert narrowed is not None
    found, expected = (operations(file, tmp_path / "o.onnx") for file in (narrowed[0], wanted))
    assert found == expected or model is Vision  # where a GELU is fused in one file only
    assert set(runner.profile(small, plan, paths)()) == set(runner.profile(net, None, paths)()) == set(paths)
    runner._made[plan.groups] = runner._anew(small)  # whose tensors have names of their own
    assert set(runner.profile(small, plan, paths)()) == set(paths)


@pytest.mark.parametrize("runtime", ["torch", "channels-last"])
def test_a_table_is_measured(runtime: Any) -> None:
    threads = torch.get_num_threads()
    table = sc.latency(lively(Residual()), IMAGE, runtime, batch=2, threads=1, cache=False)
    assert isinstance(table, Latency)
    assert table.whole > 0
    assert str(table.setup).endswith("batch 2, 1 thread")
    assert torch.get_num_threads() == threads
    assert table(np.zeros(len(table.graph.root), np.bool_)) == pytest.approx(table.whole)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Dynamo compiles once more for another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.usefixtures("one_thread")
def test_a_table_of_compiled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each smaller version is compiled for its own widths: dynamo alone runs the ninth uncompiled."""
    net, x = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).eval(), torch.rand(2, 4)
    made: list[Any] = []
    compiled = torch.compile

    def note(model: Any, **options: Any) -> Any:
        made.append(compiled(model, **options, backend=lambda graph, _: calls.append(graph) or graph.forward))
        return made[-1]

    table = sc.latency(net, x, "compile", threads=1, cache=False)
    assert str(table.setup) == "torch.compile, batch 2, 1 thread"
    calls: list[Any] = []
    monkeypatch.setattr(torch, "compile", note)
    watch = table.clock(net)
    for width in range(31, 20, -1):
        plan = sc.plan(table.graph, random_scores(table.graph, 0), remove=1 - width / 32)
        small = cut(net, plan).eval()
        watch.passes([(small, plan)], 1e-3)
        assert len(calls) == len(made) == 32 - width
        with torch.no_grad():
            torch.testing.assert_close(made[-1](x), small(x))


def test_a_model_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled(model, **options, backend=broken))
    with pytest.raises(SecateurError, match=r"torch.compile fails on Sequential.*no compiler.*Fix: another runtime"):
        Eager(Setup("compile", 1, 1), torch.rand(1, 4)).prepare(nn.Sequential(nn.Linear(4, 3)))


def test_a_plan_for_a_latency_keeps_the_relevance_that_is_worth_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains beside each other, equal scores: the slow one gives more. No layer is emptied, however slow."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.fast = nn.Linear(8, 64), nn.Linear(7, 64)
            self.a, self.b = nn.Linear(64, 3), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.relu(self.slow(x))) + self.b(torch.relu(self.fast(x[:, 1:])))

    stopwatch(monkeypatch, lambda path, m: (1e-4 if path == "slow" else 1e-6) * len(m.weight))
    net = Twins().eval()
    table = sc.latency(net, torch.rand(1, 8), cache=False)
    graph, scores = table.graph, random_scores(table.graph, 2)
    plans = {
        scope: sc.plan(graph, scores, keep={"latency": 0.3}, limits=Limits(scope, round_to=8), latency=table)
        for scope in (None, "layer", "global")
    }
    assert all(table.predict(plan) <= 0.3 * table.whole for plan in plans.values())
    assert plans[None].layers["slow"][1] == 16
    assert plans[None].layers["fast"][1] > plans["layer"].layers["fast"][1]
    assert sc.plan(graph, scores, keep={"seconds": 0.3 * table.whole}, latency=table).groups


@pytest.mark.parametrize("currency", ["macs", "params"])
def test_the_knapsack_is_near_the_best_of_all_choices(currency: str) -> None:
    """Against every choice of widths, for the sum over layers of relevance · log(share kept)."""
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 2))
    graph = sc.analyze(net.eval(), torch.rand(1, 6))
    layers = [layer.groups for layer in graph.layers if layer.prunable]
    price = graph.cost_of.prices[currency]
    for seed in range(4):
        worth = np.zeros(len(graph.root))
        draw = np.random.default_rng(seed)
        for groups in layers:
            worth[groups] = draw.gamma(0.7, 1, len(groups))
        candidates = np.concatenate(layers)

        def kept(removed: np.ndarray, worth: np.ndarray = worth) -> float:
            sums = [(worth[g].sum(), worth[g][~removed[g]].sum()) for g in layers]
            return sum(whole * np.log(max(left, 1e-12) / whole) for whole, left in sums)

        def mask(widths: Sequence[int], worth: np.ndarray = worth) -> np.ndarray:
            removed = np.zeros(len(graph.root), np.bool_)
            for groups, width in zip(layers, widths, strict=True):
                removed[groups[np.argsort(worth[groups])][: len(groups) - width]] = True
            return removed

        nothing = np.zeros(len(graph.root), np.bool_)
        order = order_by_price(graph, candidates, worth[candidates], nothing, price)
        assert sorted(order.tolist()) == sorted(candidates.tolist())
        scores = Scores("given", {p.sites[0]: worth[graph.root[p.labels]] for p in graph.producers})
        for share in (0.7, 0.4, 0.2):
            limit = share * price(nothing)
            fitting = [m for w in product(range(1, 13), repeat=3) if price(m := mask(w)) <= limit]
            best = max(map(kept, fitting))
            found = nothing.copy()
            found[list(sc.plan(graph, scores, keep={currency: share}, limits=Limits("cost")).groups)] = True
            assert price(found) <= limit
            whole = sum(worth[g].sum() for g in layers)
            assert kept(found) >= best - 0.04 * whole


class Branches(nn.Module):
    """Three branches that are added to a stream of fixed width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 2)
        hidden = [nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for _ in range(3)]
        self.branches = nn.ModuleList(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


@pytest.mark.parametrize("blocks", [False, True], ids=["widths", "widths and blocks"])
def test_plans_for_a_latency_prefer_widths_that_the_machine_likes(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every choice of widths and blocks: nothing more is free, and widths alone are near the best."""
    stopwatch(monkeypatch, by_sixteen)
    width = 40
    net = Branches(width).eval()
    table = sc.latency(net, torch.rand(1, 6), cache=False)
    assert table.step == 16
    graph = table.graph
    inner = [next(layer.groups for layer in graph.layers if f"branches.{i}.0" in layer.paths) for i in range(3)]
    whole = [block.group for block in graph.blocks.prunable] if blocks else []
    limits = {"scope": "cost", "ignore": ["stem"], "blocks": blocks}
    nothing = np.zeros(len(graph.root), np.bool_)
    for seed, share in product(range(3), (0.8, 0.6, 0.4)):
        draw = np.random.default_rng(seed)
        units = {p.sites[0]: draw.gamma(0.7, 1, len(p.labels)) for p in graph.producers}
        scores = Scores("given", units, blocks={block.name: draw.gamma(2, 8) for block in graph.blocks})
        worth = scores.of(graph)

        def mask(widths: Sequence[int], worth: np.ndarray = worth) -> np.ndarray:
            removed = nothing.copy()
            for i, (groups, kept) in enumerate(zip(inner, widths, strict=True)):
                removed[groups[np.argsort(worth[groups])][: width - kept]] = True
                if not kept:
                    removed[whole[i]] = True
            return graph.blocks.closed(removed)

        def kept(removed: np.ndarray, worth: np.ndarray = worth) -> float:
            sums = [(worth[g].sum(), worth[g][~removed[g]].sum()) for g in inner]
            return float(sum(all_ * np.log(left / all_) for all_, left in sums))

        def planned(worth: Scores = scores, share: float = share, **more: Any) -> np.ndarray:
            made = sc.plan(graph, worth, keep={"latency": share}, limits=Limits(**limits, **more), latency=table)
            removed = nothing.copy()
            removed[list(made.groups)] = True
            return removed

        found, plain = planned(), planned(round_to=1)
        limit = share * table(nothing)
        assert table(found) <= limit
        assert not (found & ~plain).any()  # nothing leaves that stays where any width is allowed
        widths = [int((~found[g]).sum()) for g in inner]
        assert {*widths} <= {*range(8), 16, 32, width}
        assert (found == mask(widths)).all()
        options = [*range(not blocks, 8), 16, 32, width]  # between these, the prediction does not change
        choices = [(w, removed) for w in product(options, repeat=3) if table(removed := mask(w)) <= limit]
        more = [
            w for w, removed in choices if min(np.subtract(w, widths)) >= 0 and (np.sign(w) == np.sign(widths)).all()
        ]
        assert all(table(mask(w)) > table(found) for w in more if list(w) != widths)  # nothing more would be free
        if not blocks:  # a block that leaves may save more than is needed
            best = max(kept(removed) for _, removed in choices)
            assert kept(found) >= best - 0.02 * sum(worth[g].sum() for g in inner)
            assert kept(found) > kept(plain)


def test_prices_are_sums_of_terms() -> None:
    removed = np.array([False, True, False, False])
    price = TermPrice([(2.0, [np.array([0, 1]), np.array([2, 3])]), (5.0, [np.array([1])]), (1.0, [])])
    assert price(~removed & False) == 2 * 2 * 2 + 5 + 1
    assert price(removed) == 2 * 1 * 2 + 0 + 1
    assert price.savings(removed & False).tolist() == [4, 9, 4, 4]


def test_a_model_in_training_stays_in_training() -> None:
    """Also where a smaller file is compared with the model that it is of."""
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.rand(2, 8)
    graph = sc.analyze(net, x)
    plan = sc.plan(graph, random_scores(graph, 0), remove=0.5)
    small = cut(net, plan).train()
    assert onnx.Onnx(Setup("onnxruntime", 2, 1), x, net).prepare(small, plan)() is not None
    assert all(module.training for module in small.modules())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sc.latency(Residual(), IMAGE, "tflite"), "runtime='tflite' is not known"),
        (lambda: sc.latency(Residual(), IMAGE, batch=0), "batch=0 must be at least 1"),
        (lambda: sc.latency(Residual(), IMAGE, threads=1.5), "threads=1.5 must be a whole number"),
        (lambda: sc.latency(Residual(), IMAGE, "onnxruntime", device="meta"), "is measured on the processor"),
        (lambda: sc.latency(Residual(), IMAGE, cache=3), "cache is a int"),
        (lambda: sc.latency(Residual(), IMAGE, device="gpu"), "device='gpu' is no device"),
        (lambda: sc.latency(nn.Sequential(nn.ReLU()), IMAGE), "Sequential has no layer whose time"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(SecateurError, match=said):
        call()


def test_a_model_runs_on_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for runtime in ("torch", "channels-last"):
        forward: Any = Eager(Setup(runtime, 1, 1, "meta"), IMAGE).prepare(Residual())
        assert {p.device.type for p in forward.args[0].parameters()} == {"meta"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert Setup.of(IMAGE, "torch", None, 1, "cuda:0").device == "cuda"
    with pytest.raises(SecateurError, match=r"device='cuda:1' is not the current GPU.*set_device\(1\)"):
        Setup.of(IMAGE, "torch", None, 1, "cuda:1")
