"""What is left of accuracy at equal measured latency, by allocation: part of `benchmarks.latency`.

ResNet-50 or EfficientNet-Lite0 with real weights and a few photographs. Units are scored and layers repaired on
`--device`; models are timed on the processor with `--threads`. Each cell is planned by the table of latencies, measured
in turn with the whole model, and planned again until it takes what it may.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur as sc
from benchmarks.latency_rows import keep, known
from secateur.data.images import read
from secateur.data.views import View
from secateur.errors import TargetError
from secateur.files.int8 import Int8
from secateur.files.session import Session, answers, session_of
from secateur.latency.timing import medians, repeated
from secateur.ops.layers import Mask
from secateur.plans import Limits, allocation
from secateur.plans.plan import Plan, plan_for
from secateur.plans.ranking import _Chooser
from secateur.plans.scores import Scores
from secateur.repair import Repair
from secateur.repair import Session as RepairSession
from secateur.runtimes import Latency
from secateur.runtimes.clock import Clock
from secateur.structure.cost import TermPrice
from secateur.structure.graph import Graph
from secateur.surgery.cut import cut

#: ImageNet's outputs for the folders of Imagenette, in order of their names.
IMAGENETTE = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)
ALLOCATIONS = ("latency", "latency, blocks", "linear", "cost", "layer", "old time", "torch-pruning")
#: What a row of int8 has in common with that of the same model in float.
CELL = ("model", "data", "runtime", "batch", "threads", "draw", "share", "allocation")
_HALF = View(224, "crop", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Scene:
    """A network for a small task, samples to score and repair it on, and others to test it."""

    model: nn.Module
    reference: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def network(name: str, weights: Path) -> nn.Module:
    state = {key: value.float() if value.is_floating_point() else value for key, value in load_file(weights).items()}
    if name == "efficientnet_lite0":
        import timm

        model: nn.Module = timm.create_model("tf_efficientnet_lite0")
    else:
        model = torchvision.models.resnet50()
        for stage in (model.layer2, model.layer3, model.layer4):  # the weights keep Caffe's strides
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    model.load_state_dict(state, strict=False)
    return model.eval()


def scene(options: argparse.Namespace, draw: int) -> Scene:
    """Three classes of Imagenette, ten photographs each, by draw; or cats and dogs, ten each."""
    model = network(options.model, options.weights).to(options.device)
    view = _HALF if options.model == "efficientnet_lite0" else View()
    if options.data == "cats_dogs":
        outputs: Any = {"cat": list(range(281, 286)), "dog": list(range(151, 269))}
        train, test = (read(options.images / part, view=view) for part in ("train", "test"))
    else:
        train, test = (read(options.images / part, view=view) for part in ("reference", "test"))
        chosen = sorted(np.random.default_rng(draw).choice(10, 3, replace=False).tolist())
        train, test = (photos.of([photos.classes[i] for i in chosen]) for photos in (train, test))
        outputs = [IMAGENETTE[i] for i in chosen]
    train = train.draw(10, seed=draw).numbered(range(len(outputs)))
    reference, held = train.tensors(options.device), test.numbered(range(len(outputs))).tensors(options.device)
    return Scene(sc.specialize(model, outputs, reference[0][:1], merge="mean").eval(), reference, held)


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        hits = [(model.eval()(x).argmax(1) == y).sum() for x, y in zip(*(t.split(100) for t in test), strict=True)]
    return float(sum(hits)) / len(test[1])


def planner(name: str, stage: Scene, graph: Graph, scores: Scores, table: Latency) -> Callable[[float], Plan]:
    """A function that plans for so many predicted seconds."""
    if name in ("latency", "latency, blocks", "linear", "layer"):

        def by_table(seconds: float) -> Plan:
            allocation.BALANCE = 0.0 if name == "linear" else 1.0
            limits = Limits("layer" if name == "layer" else "cost", round_to=8, blocks=name.endswith("blocks"))
            return sc.plan(graph, scores, keep={"seconds": seconds}, limits=limits, latency=table)

        return by_table
    if name == "torch-pruning":
        return by_magnitude(copy.deepcopy(stage.model).cpu(), graph, table)
    work = graph.cost_of.work
    spared = TermPrice([((1 if item.macs else 300) * item.term[0], item.term[1]) for item in work])
    prices = {"spared": spared if name == "old time" else graph.cost_of.prices["macs"], "seconds": table}

    def by_price(seconds: float) -> Plan:
        chooser = _Chooser(graph, scores, Limits("cost", round_to=8), None, prices, "spared")
        return plan_for(graph, chooser.by_cost({"seconds": seconds}))

    return by_price


def by_magnitude(model: nn.Module, graph: Graph, table: Latency) -> Callable[[float], Plan]:
    """What Torch-Pruning removes at the ratio for which so many seconds are predicted."""
    import torch_pruning as tp

    @cache
    def at(ratio: float) -> Mask:
        small = copy.deepcopy(model)
        heads = [m for m in small.modules() if isinstance(m, nn.Linear)]
        pruner = tp.pruner.BasePruner(
            small, torch.zeros(1, 3, 224, 224), tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=ratio,
            ignored_layers=heads, round_to=8,
        )  # fmt: skip
        pruner.step()
        removed: Mask = np.zeros(len(graph.root), np.bool_)
        axes = {(axis.parameter, axis.dim): axis for axis in graph.axes.axes}
        for path, is_out, indices in pruner.pruning_history():
            axis = axes[f"{path}.weight", 0 if is_out else 1]
            removed[graph.root[axis.span][indices]] = True
        return removed

    def by_ratio(seconds: float) -> Plan:
        low, high = 0.0, 0.96
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (low, middle) if table(at(middle)) <= seconds else (middle, high)
        return plan_for(graph, at(high))

    return by_ratio


def reach(make: Callable[[float], Plan], model: nn.Module, clock: Clock, table: Latency, share: float) -> Any:
    """The plan that takes this share of the latency when it is measured, or a little less; and what was measured."""
    aim, best = share * table.whole, None
    for _ in range(5):
        try:
            plan = make(aim)
        except TargetError:  # the machine was busy when it was measured, and too little was aimed at
            break
        before, after = clock.in_turn([(model, None), (cut(model, plan).eval(), plan)])
        found = after / before
        if found <= share and (best is None or found > best[1]):
            best = plan, found, before, table.predict(plan) / table.whole
        if 0.97 * share <= found <= share:
            break
        aim = table.predict(plan) * 0.985 * share / found
    return best


class Round(NamedTuple):
    """What all cells of a draw share, and those that are not in the results yet: a share and a choice each."""

    draw: int
    todo: list[tuple[float, str]]
    stage: Scene
    graph: Graph
    scores: Scores
    whole: float
    session: RepairSession


def rounds(
    options: argparse.Namespace, choice: str, choices: Sequence[str], where: Mapping[str, Any]
) -> Iterator[Round]:
    """Draw by draw. `choice` is what rows call it."""
    done = {(row["draw"], row["share"], row[choice]) for row in known(options.out, options.logs, **where)}
    for draw in range(*options.draws):
        todo = [(s, c) for s in options.shares for c in choices if (draw, s, c) not in done]
        if not todo:
            continue
        stage = scene(options, draw)
        graph = sc.analyze(stage.model, stage.reference[0][:1])
        scores, whole = sc.score(stage.model, stage.reference, "lrp", graph=graph), accuracy(stage.model, stage.test)
        repair = Repair(options.repair, at_once=1024 if options.device == "cuda" else None)
        yield Round(draw, todo, stage, graph, scores, whole, repair.session(stage.model, stage.reference))


def measure(options: argparse.Namespace) -> None:
    """Every cell that is not in the results yet."""
    where = {key: getattr(options, key) for key in ("model", "data", "runtime", "batch", "threads")}
    where = {"what": "accuracy", **where}
    file = "-".join(map(str, (*where.values(), options.draws[0])))
    begin = time.perf_counter()
    for draw, todo, stage, graph, scores, whole, session in rounds(options, "allocation", options.allocations, where):
        local = copy.deepcopy(stage.model).cpu()
        table = sc.latency(
            local, stage.reference[0][:1].cpu(), options.runtime, batch=options.batch, threads=options.threads,
            cache=options.cache,
        )  # fmt: skip
        clock = table.clock(local)
        for share, name in todo:
            found = reach(planner(name, stage, graph, scores, table), local, clock, table, share)
            if found is None:
                print(draw, share, name, "not reached", flush=True)
                continue
            plan, measured, before, predicted = found
            small = sc.apply(stage.model, plan)
            row = {
                **where, "draw": draw, "share": share, "allocation": name, "measured": measured,
                "whole_ms": 1000 * before, "predicted": predicted, "macs": plan.after.macs / plan.before.macs,
                "whole": whole, "params": plan.after.params / plan.before.params,
                "blocks": len(plan.blocks), "none": accuracy(small, stage.test),
            }  # fmt: skip
            small = session.examine(small).model
            row["repaired"] = accuracy(small, stage.test)
            keep(options.out, file, row)  # before int8 is tried, which may be refused
            if options.int8:
                try:
                    more = in_int8(local, small.cpu(), stage, options)
                except sc.SecateurError as refused:
                    more = {"refused": str(refused)}
                keep(options.out, file, {**{key: row[key] for key in CELL}, **more, "what": "int8"})
            if time.perf_counter() - begin > options.seconds:
                return


def in_int8(whole: nn.Module, small: nn.Module, stage: Scene, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy of the smaller model in int8; seconds in ONNX Runtime of the whole model, the smaller one, and int8."""
    photos, (x, y) = stage.reference[0].cpu(), stage.test
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.onnx" for name in ("whole", "small", "int8")]
        for model, file in zip((whole, small, small), files, strict=True):
            sc.export(model, file, photos[:2], quantize=photos if file.stem == "int8" else None)
        inputs = repeated(photos, options.batch)
        seconds = medians([partial(answers, session_of(file, options.threads), inputs) for file in files])
        how = Int8.of(files[2])
        return {
            "int8": accuracy(Session(files[2]), (x.cpu(), y.cpu())), "int8_seconds": seconds, "int8_layers": how.layers,
            "in_float32": list(how.left_out), "int8_error": how.error,
        }  # fmt: skip


def tables(rows: Sequence[Mapping[str, Any]], quantised: Sequence[Mapping[str, Any]] = ()) -> None:
    """What was measured, as Markdown: means over draws. `quantised` are the rows of int8."""
    found = {tuple(row[key] for key in CELL): row for row in quantised}
    rows = [{**found.get(tuple(row[key] for key in CELL), {}), **row} for row in rows]
    for place in sorted({(row["data"], row["model"], row["runtime"], row["batch"]) for row in rows}):
        mine = [row for row in rows if (row["data"], row["model"], row["runtime"], row["batch"]) == place]
        whole = 100 * np.mean([row["whole"] for row in mine])
        print(f"\n{place[0]}, {place[1]}, {place[2]}, batch {place[3]}; unpruned {whole:.1f} %\n")
        print("| latency asked | allocation | draws | measured | MACs | not repaired | repaired | in int8 | speed |")
        print("|---|---|---|---|---|---|---|---|---|")
        for share in sorted({row["share"] for row in mine}, reverse=True):
            for name in dict.fromkeys(row["allocation"] for row in mine):
                some = [row for row in mine if (row["share"], row["allocation"]) == (share, name)]
                if some:
                    measured, macs, none, kept = (
                        100 * np.array([row[key] for row in some]) for key in ("measured", "macs", "none", "repaired")
                    )
                    half = 1.96 * np.std(kept, ddof=1) / np.sqrt(len(some)) if len(some) > 1 else 0.0
                    print(
                        f"| {100 * share:.0f} % | {name} | {len(some)} | {measured.mean():.1f} % | {macs.mean():.0f} % "
                        f"| {none.mean():.1f} | {kept.mean():.1f} ± {half:.1f} | {_int8(some)} |"
                    )


def _int8(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy in int8, and how many times as fast as the whole model the smaller one is, in float and in int8."""
    refused = sum("refused" in row for row in rows)
    rows = [row for row in rows if "int8" in row]
    if not rows:
        return f"refused ({refused} draws) |" if refused else "|"
    fast = np.mean([[row["int8_seconds"][0] / seconds for seconds in row["int8_seconds"][1:]] for row in rows], 0)
    return f"{100 * np.mean([row['int8'] for row in rows]):.1f} ({len(rows)} draws) | {fast[0]:.2f}x, {fast[1]:.2f}x"
