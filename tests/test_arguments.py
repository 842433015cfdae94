"""Every argument of a public function is checked by name, before any work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc
from secateur.criteria import LRP, Random, Taylor
from secateur.errors import (
    CriterionError,
    DataError,
    ForwardError,
    NothingToPruneError,
    PlanError,
    RepairError,
    SecateurError,
    TargetError,
    UnsupportedModelError,
)
from secateur.loop import Schedule
from secateur.plans import Limits
from secateur.plans.targets import Target
from secateur.recover import Recover
from secateur.repair import Repair
from secateur.report import Page

Call = Callable[[], Any]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


NET, X, Y = _net(), torch.rand(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
DATA = (X, Y)
COLOURS, MASKS = torch.rand(4, 3, 9, 9), torch.arange(4 * 81).view(4, 9, 9) % 2
PIXELS = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
CONV = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
GRAPH = sc.analyze(NET, X[:1])
SCORES = sc.score(NET, DATA, graph=GRAPH)
PLAN = sc.plan(GRAPH, SCORES, remove=0.5)
SMALL = sc.apply(NET, PLAN)
RESULT = sc.prune(NET, DATA, remove=0.5, progress=False)


def right(model: nn.Module) -> float:
    return float((model(X).argmax(1) == Y).float().mean())


def pruned(**given: Any) -> Call:
    return lambda: sc.prune(NET, DATA, progress=False, **given)


def explained(**given: Any) -> Call:
    return lambda: sc.explain(NET, X, **given)


bad: Any = object()
ANY: Any = sc  # calls with wrong types, which a type checker would refuse

WRONG: list[tuple[Call, type[SecateurError], str]] = [
    # targets
    (pruned(keep={}), TargetError, "keep"),
    (pruned(keep={}, max_drop=0.1, evaluate=right), TargetError, "keep={}"),
    (pruned(keep={"macs": None}), TargetError, "'macs': None"),
    (pruned(keep={"macs": math.nan}), TargetError, "finite"),
    (pruned(keep={"macs": "half"}), TargetError, "must be a number"),
    (pruned(max_drop={}, evaluate=right), TargetError, "max_drop={}"),
    (pruned(max_drop=math.nan, evaluate=right), TargetError, "max_drop=nan"),
    (pruned(max_drop=math.inf, evaluate=right), TargetError, "max_drop=inf"),
    (pruned(max_drop=-1, evaluate=right), TargetError, "max_drop=-1"),
    (pruned(max_drop="1%", evaluate=right), TargetError, "must be a number, not str"),
    (pruned(max_drop={"overall": -0.1}, evaluate=right), TargetError, "'overall': -0.1"),
    (pruned(max_drop={"overall": None}, evaluate=right), TargetError, "'overall': None"),
    (pruned(remove=True), TargetError, "must be a number, not bool"),
    (pruned(remove=math.nan), TargetError, "remove=nan"),
    (pruned(remove=1 + 2j), TargetError, "must be a number, not complex"),
    (lambda: Target(remove=0.5, max_drop=-1), TargetError, "at least 0"),
    # schedules and limits
    (pruned(remove=0.5, schedule=1e-12), TargetError, "far less than one unit"),
    (pruned(max_drop=0.9, evaluate=right, schedule=1e-9), TargetError, "far less than one unit"),
    (pruned(remove=0.5, schedule="slow"), TargetError, "schedule is a str"),
    (lambda: Schedule(step=bad), TargetError, "step"),
    (lambda: Schedule(step=math.nan), TargetError, "step=nan"),
    (lambda: Schedule(batch_size=0), TargetError, "batch_size=0"),
    (lambda: Schedule(batch_size=-1), TargetError, "batch_size=-1"),
    (lambda: Schedule(batch_size=1.5), TargetError, "whole number"),  # type: ignore[arg-type]
    (lambda: Schedule(seed="a"), SecateurError, "seed='a'"),  # type: ignore[arg-type]
    (lambda: Schedule(seed=0.5), SecateurError, "seed=0.5"),  # type: ignore[arg-type]
    (lambda: Schedule(finetune="sgd"), SecateurError, "finetune is a str"),  # type: ignore[arg-type]
    (lambda: Schedule(carry=bad), SecateurError, "carry"),
    (lambda: Schedule(parts={}), TargetError, "names no part"),
    (lambda: Schedule(parts=["0"]), TargetError, "parts is a list"),  # type: ignore[arg-type]
    (lambda: Schedule(rescore="yes"), TargetError, "rescore='yes'"),  # type: ignore[arg-type]
    (lambda: Limits(ignore=["0", 3]), TargetError, "holds 3"),  # type: ignore[list-item]
    (lambda: Limits(ignore=3), TargetError, "ignore is a int"),  # type: ignore[arg-type]
    (lambda: Limits(min_units="4"), TargetError, "min_units='4'"),  # type: ignore[arg-type]
    (lambda: Limits(round_to=8.5), TargetError, "round_to=8.5"),  # type: ignore[arg-type]
    (lambda: Limits(round_to=True), TargetError, "whole number"),
    (pruned(remove=0.5, limits={"round_to": 8}), TargetError, "Limits(round_to=8)"),
    (lambda: ANY.plan(GRAPH, SCORES, 0.5, limits={"round_to": 8}), TargetError, "Limits(round_to=8)"),
    # functions of the user's
    (pruned(remove=0.5, evaluate=0.9), SecateurError, "evaluate is a float"),
    (pruned(remove=0.5, repair=5), SecateurError, "repair is a int"),
    (pruned(remove=0.5, repair="glue"), RepairError, "glue"),
    (pruned(remove=0.5, checkpoint=5), SecateurError, "checkpoint is a int"),
    (lambda: ANY.prune(NET, DATA, remove=0.5, progress="yes"), SecateurError, "progress is a str"),
    # scores and plans
    (lambda: sc.score(NET, DATA, batch_size=0), SecateurError, "batch_size=0"),
    (lambda: sc.score(NET, DATA, batch_size=-1), SecateurError, "batch_size=-1"),
    (lambda: ANY.score(NET, DATA, graph=NET), SecateurError, "graph is a Sequential"),
    (lambda: ANY.score(NET, DATA, start=RESULT, graph=GRAPH), SecateurError, "result.plan"),
    (lambda: sc.score(NET, DATA, []), CriterionError, "no criterion"),
    (lambda: ANY.score(NET, DATA, 5), CriterionError, "criterion"),
    (lambda: ANY.score(RESULT, DATA), UnsupportedModelError, "result.model"),
    (lambda: ANY.plan(SCORES, GRAPH, 0.5), SecateurError, "plan(graph, scores"),
    (lambda: ANY.plan(GRAPH, RESULT, 0.5), SecateurError, "scores is a Result"),
    (lambda: ANY.plan(GRAPH, SCORES, 0.5, start=3), SecateurError, "start is a int"),
    (lambda: Taylor(norm=3), CriterionError, "norm=3"),  # type: ignore[arg-type]
    (lambda: Taylor(loss="mse"), CriterionError, "loss is a str"),  # type: ignore[arg-type]
    (lambda: Random(seed="a"), CriterionError, "seed='a'"),  # type: ignore[arg-type]
    (lambda: LRP(start="two"), CriterionError, "start='two'"),  # type: ignore[arg-type]
    (pruned(remove=0.5, recover="sgd"), SecateurError, "recover is a str"),
    (lambda: Recover(lr="fast"), SecateurError, "lr='fast'"),  # type: ignore[arg-type]
    (lambda: Taylor(name=3), CriterionError, "name is a int"),  # type: ignore[arg-type]
    # removing
    (lambda: ANY.apply(NET, GRAPH), PlanError, "plan is a Graph"),
    (lambda: ANY.apply(NET, RESULT), PlanError, "result.plan"),
    (lambda: ANY.apply(PLAN, NET), UnsupportedModelError, "not an nn.Module"),
    (lambda: ANY.apply(RESULT, PLAN), UnsupportedModelError, "result.model"),
    (lambda: ANY.apply(NET, PLAN, "cut"), SecateurError, "how='cut'"),
    (lambda: ANY.specialize(NET, 1, X), TargetError, "outputs is a int"),
    (lambda: ANY.specialize(NET, [0.5], X), TargetError, "no whole number"),
    (lambda: ANY.specialize(NET, {"cat": 1}, X), TargetError, "outputs['cat'] is a int"),
    (lambda: ANY.specialize(NET, [0], X, graph=NET), SecateurError, "graph is a Sequential"),
    (lambda: ANY.repair(RESULT, NET, DATA), UnsupportedModelError, "result.model"),
    (lambda: sc.repair(SMALL, NET, None), SecateurError, "data is None"),
    (lambda: sc.repair(SMALL, NET, DATA, progress=3), SecateurError, "progress is a int"),  # type: ignore[arg-type]
    (lambda: Repair(samples=0), RepairError, "samples=0"),
    (lambda: Repair(copies=1.5), RepairError, "copies=1.5"),  # type: ignore[arg-type]
    (lambda: Repair(held_out="some"), RepairError, "held_out='some'"),  # type: ignore[arg-type]
    (lambda: Repair(seed="a"), RepairError, "seed='a'"),  # type: ignore[arg-type]
    (lambda: Repair(alter=3), RepairError, "alter is a int"),  # type: ignore[arg-type]
    (lambda: Repair(method=3), RepairError, "3"),  # type: ignore[arg-type]
    # explaining and measuring
    (explained(start="two"), SecateurError, "start='two'"),
    (explained(absolute="all"), SecateurError, "absolute='all'"),
    (explained(composite=3), SecateurError, "composite"),
    (explained(composite="zeta"), SecateurError, "zeta"),
    (explained(target="cat"), SecateurError, "target"),
    (lambda: ANY.explain(RESULT, X), UnsupportedModelError, "result.model"),
    (lambda: ANY.explain(NET, "x"), SecateurError, "inputs"),
    (lambda: ANY.measure(RESULT, X), UnsupportedModelError, "result.model"),
    (lambda: sc.measure(NET, X, repeats=0), SecateurError, "repeats=0"),
    (lambda: ANY.measure(NET, X, latency="yes"), SecateurError, "latency='yes'"),
    (lambda: ANY.analyze(RESULT, X), UnsupportedModelError, "result.model"),
    (lambda: ANY.analyze(X, NET), UnsupportedModelError, "not an nn.Module"),
    (lambda: ANY.analyze(NET, DATA), SecateurError, "example"),
    # comparing
    (lambda: sc.compare(NET, DATA, "lpr", evaluate=right), CriterionError, "lpr"),
    (lambda: ANY.compare(NET, DATA, evaluate=None), SecateurError, "evaluate"),
    (lambda: ANY.compare(NET, DATA, evaluate=3), SecateurError, "evaluate is a int"),
    (lambda: sc.compare(NET, DATA, evaluate=right, remove=0.5, keep={"macs": 0.5}), TargetError, "different targets"),
    (lambda: sc.compare(NET, DATA, evaluate=right, fractions=(0.0,)), TargetError, "fractions"),
    (lambda: sc.compare(NET, DATA, evaluate=right, fractions=0.5), TargetError, "fractions"),
    # inputs and targets as they often come
    (lambda: sc.analyze(NET, "photo.jpg"), DataError, "no input of a model"),
    (lambda: sc.analyze(NET, None), DataError, "no input of a model"),
    (lambda: sc.analyze(CONV, torch.rand(3, 9, 9)), ForwardError, "x[None]"),
    (lambda: sc.analyze(CONV, torch.rand(2, 9, 9, 3)), ForwardError, "x.permute(0, 3, 1, 2)"),
    (lambda: sc.prune(NET, [{"image": X, "label": Y}], remove=0.5), ForwardError, "pairs (inputs, targets)"),
    (lambda: sc.prune(NET, X, remove=0.5), DataError, "(X, None)"),
    (lambda: ANY.prune(NET, TensorDataset(X, Y), remove=0.5), DataError, "DataLoader(dataset"),
    (lambda: sc.prune(NET, (X, nn.functional.one_hot(Y)), remove=0.5), DataError, "targets.argmax(1)"),
    (lambda: sc.prune(NET, (X, Y[:, None]), remove=0.5), DataError, "one class number for each"),
    (lambda: sc.prune(NET, (X, ["cat"] * 24), remove=0.5), DataError, "class numbers as a tensor"),
    (lambda: sc.prune(NET, "photos", remove=0.5), DataError, "secateur.data.images.read('photos').tensors()"),
    (lambda: sc.prune(NET, Path("photos"), remove=0.5), DataError, "secateur.data.images.read('photos').tensors()"),
    (lambda: sc.prune(NET, (["a.jpg", "b.jpg", "c.jpg"], [0, 1, 2]), remove=0.5), DataError, "images.read(FOLDER)"),
    (lambda: sc.prune(NET, ([Image.new("RGB", (9, 9))] * 3, [0, 1, 2]), remove=0.5), DataError, "images.read(FOLDER)"),
    (lambda: sc.prune(NET, ["a.jpg", "b.jpg", "c.jpg"], remove=0.5), DataError, "images.read(FOLDER)"),
    (lambda: sc.prune(NET, DataLoader(X, 4), remove=0.5), DataError, "(x, None) for each batch x"),
    (lambda: sc.prune(CONV, (list(torch.rand(4, 3, 9, 9)), [{}] * 4), remove=0.5), DataError, "[(images, targets)]"),
    (lambda: sc.prune(CONV, (torch.rand(3, 9, 9), Y[:1]), remove=0.5), DataError, "x[None] for a single image"),
    (lambda: sc.prune(CONV, (COLOURS.mul(255).byte(), Y[:4]), remove=0.5), ForwardError, "x.float() / 255, normalised"),
    (lambda: sc.prune(CONV, (COLOURS[:, :1], Y[:4]), remove=0.5), ForwardError, "x.expand(-1, 3, -1, -1)"),
    (lambda: sc.prune(PIXELS, (COLOURS, 255 * MASKS), remove=0.5), DataError, "LRP(start=Segmentation())"),
    (lambda: sc.prune(PIXELS, (COLOURS, MASKS[:, ::2, ::2]), remove=0.5), DataError, "take masks of another size"),
    (lambda: sc.load("nowhere", NET), SecateurError, "there is no folder nowhere"),
    # files
    (lambda: ANY.save("folder", RESULT), SecateurError, "sc.save(result, path)"),
    (lambda: ANY.save(RESULT, 3), SecateurError, "path is a int"),
    (lambda: ANY.load(NET, "folder"), SecateurError, "sc.load(path, model)"),
    (lambda: ANY.load("folder", RESULT), UnsupportedModelError, "result.model"),
    (lambda: ANY.load(3, NET), SecateurError, "path is a int"),
    (lambda: ANY.export(NET, X, "x.onnx"), SecateurError, "export(model, path, example)"),
    (lambda: ANY.export(RESULT, "x.onnx", X), UnsupportedModelError, "result.model"),
    (lambda: sc.export(NET, "x.txt", X), SecateurError, ".onnx or .pt2"),
    (lambda: ANY.export(NET, "x.onnx", X, dynamic_batch="no"), SecateurError, "dynamic_batch='no'"),
    # reports
    (lambda: RESULT.report(3), SecateurError, "path is a int"),  # type: ignore[arg-type]
    (lambda: RESULT.report("x.html", page="blue"), SecateurError, "page is a str"),  # type: ignore[arg-type]
    (lambda: RESULT.report("x.html", original=RESULT), UnsupportedModelError, "result.model"),  # type: ignore[arg-type]
    (lambda: RESULT.report("x.html", classes=3), SecateurError, "classes is a int"),  # type: ignore[arg-type]
    (lambda: Page(title=3), SecateurError, "title is a int"),  # type: ignore[arg-type]
    (lambda: Page(about=["x"]), SecateurError, "about is a list"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG, ids=[f"{i}-{case[2]}" for i, case in enumerate(WRONG)])
def test_wrong_arguments_are_refused_by_name(
    call: Call, error: type[SecateurError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(words)) as caught:
        call()
    assert caught.value.what
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


def test_a_whole_share_does_not_suggest_one_per_cent() -> None:
    with pytest.raises(TargetError) as caught:
        sc.prune(NET, DATA, remove=1.0)
    assert "per cent" not in str(caught.value)


def test_a_generator_loses_no_batch() -> None:
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]
    listed, drawn = sc.score(NET, batches), sc.score(NET, iter(batches))
    assert all((listed.units[site] == drawn.units[site]).all() for site in listed.units)
    once = sc.score(NET, iter(batches[:1]))
    assert once.units.keys() == listed.units.keys()


def test_a_report_reads_a_generator_for_both_models(tmp_path: Path) -> None:
    page = RESULT.report(tmp_path / "page.html", test=iter([DATA]), page=Page(latency=False))
    assert "24 held-out samples" in page.read_text(encoding="utf-8")


def test_repair_is_switched_by_a_flag() -> None:
    none, usual = (sc.prune(NET, DATA, remove=0.5, repair=flag, progress=False) for flag in (False, True))
    assert "repair" not in none.settings
    assert usual.settings["repair"] == RESULT.settings["repair"]


def test_a_single_criterion_and_a_size_can_be_compared() -> None:
    table = sc.compare(NET, DATA, "lrp", evaluate=right, keep={"macs": 0.6}, schedule=0.2, progress=False)
    assert list(table.curves) == ["lrp"]
    assert str(table)
    assert table.histories["lrp"][-1].macs <= 0.6 * GRAPH.cost.macs


@pytest.mark.parametrize("model", [nn.LayerNorm(4), nn.Sequential(nn.ReLU())])
def test_a_model_without_units_says_why(model: nn.Module) -> None:
    with pytest.raises(NothingToPruneError, match="units are made by convolutions"):
        sc.prune(model, [(torch.rand(2, 5, 4), None)], "weight", remove=0.5, progress=False)
    assert "units are made by convolutions" in str(sc.analyze(model, torch.rand(2, 5, 4)))


def test_costs_of_several_samples_say_so() -> None:
    (one, four), macs = (str(sc.analyze(CONV, COLOURS[:n])).splitlines()[0] for n in (1, 4)), 7 * 7 * 9 * 3 * 8 + 8 * 3
    assert f" {macs / 1000:.2f} k MACs; " in one
    assert f" {4 * macs / 1000:.2f} k MACs for the 4 samples of the example; " in four


def test_objects_are_short_and_tables_print() -> None:
    table = sc.compare(NET, DATA, ["lrp", "weight"], evaluate=right, schedule=0.25, progress=False)
    for item in (GRAPH, SCORES, PLAN, RESULT, RESULT.history, table):
        assert len(repr(item)) < 300
        assert repr(item).count("\n") < 2
        assert type(item).__name__ in repr(item)
        assert str(item).count("\n") >= 2
    for name in ("0", "2", "4"):
        assert re.search(rf"^{name} ", str(SCORES), re.MULTILINE)
