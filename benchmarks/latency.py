"""Latency: how well the table predicts, and what is left of accuracy at equal measured latency.

    python -m benchmarks.latency predict --out results --model resnet50 --runtime onnxruntime --batch 1 --threads 2
    python -m benchmarks.latency accuracy --out results --weights resnet50.safetensors --images imagenette --device cuda
    python -m benchmarks.latency text --out results --weights minilm --images data --shares 0.5 --batch 8
    python -m benchmarks.latency runtimes --out results --model resnet50 --batch 1 --threads 2
    python -m benchmarks.latency table --out results

`predict` measures the table of a model and then models of other plans, in turn with the whole one; `again` predicts the
same plans by tables that today's code makes of the same measurements. `accuracy` is
described in `benchmarks.latency_accuracy`, `text` in `benchmarks.latency_text`. `runtimes` times a model, and what a
plan for half of the MACs leaves of it, in each runtime. Results are kept line by line, so that a run can be stopped and
goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torchvision
from torch import nn

import secateur as sc
from benchmarks import latency_accuracy, latency_text
from benchmarks.latency_rows import keep, known
from secateur.ops.layers import Mask
from secateur.plans import Limits
from secateur.plans.plan import Plan, plan_for
from secateur.plans.scores import Scores
from secateur.runtimes import Latency, clock
from secateur.runtimes import table as of_tables
from secateur.runtimes.clock import Clock
from secateur.runtimes.sampling import sample_masks
from secateur.runtimes.segments import segments_of
from secateur.runtimes.setup import Runtime, Setup
from secateur.runtimes.table import _SLOW
from secateur.runtimes.table import fitted as _fitted
from secateur.structure.graph import Graph
from secateur.surgery.cut import cut

MODELS = ("resnet50", "mobilenet_v3_large", "efficientnet_lite0", "vit_s")


def network(name: str) -> nn.Module:
    """A network with random weights: its speed is that of a trained one."""
    torch.manual_seed(0)
    if name == "vit_s":
        return torchvision.models.VisionTransformer(224, 16, 12, 6, 384, 1536).eval()
    if name == "efficientnet_lite0":
        import timm

        return timm.create_model("tf_efficientnet_lite0").eval()
    return getattr(torchvision.models, name)().eval()


def some_plan(graph: Graph, number: int) -> Plan:
    """A plan of a user's: some ranking of random scores down to some share of the MACs; every third has widths at
    random instead."""
    draw = np.random.default_rng(1000 + number)
    if number % 3 == 2:
        removed: Mask = np.zeros(len(graph.root), np.bool_)
        middle = draw.uniform(0.25, 1)
        for layer in graph.layers:
            if layer.prunable:
                share = float(np.clip(middle * draw.uniform(0.5, 1.5), 0.1, 1))
                keep = max(1, round(share * len(layer.groups)))
                if len(layer.groups) >= 16:
                    keep = min(len(layer.groups), max(8, round(keep / 8) * 8))
                removed[draw.permutation(layer.groups)[keep:]] = True
        for axis in graph.axes.axes:
            if removed[graph.root[axis.span]].all():
                removed[graph.root[axis.span]] = False
        return plan_for(graph, removed)
    units = {p.sites[0]: draw.gamma(draw.uniform(0.5, 3), 1, len(p.labels)) for p in graph.producers}
    limits = Limits(scope=("layer", "cost")[number % 2], round_to=8)
    return sc.plan(graph, Scores("random", units), keep={"macs": float(draw.uniform(0.2, 0.9))}, limits=limits)


def predict(options: argparse.Namespace) -> None:
    """Predicted and measured seconds of some plans."""
    where = {key: getattr(options, key) for key in ("model", "runtime", "batch", "threads", "device")}
    where = {"what": "predict", **where}
    name = "-".join(map(str, where.values()))
    done = {row["plan"] for row in known(options.out, options.logs, **where) if "plan" in row}
    todo = [number for number in range(options.first, options.plans) if number not in done]
    if not todo:
        return
    model, example = network(options.model), torch.rand(1, 3, 224, 224)
    if options.device == "cuda":
        model, example = model.cuda(), example.cuda()
    of_tables.fitted = partial(_noted, options.out / f"raw-{name}.json")  # type: ignore[attr-defined]
    begin = time.perf_counter()
    settings = {key: where[key] for key in ("runtime", "batch", "threads", "device")}
    table: Latency = sc.latency(model, example, cache=options.cache, **settings)
    took = time.perf_counter() - begin
    keep(options.out, name, {**where, "table_seconds": took, "whole": table.whole, "error": table.error})
    watch = table.clock(model)
    begin = time.perf_counter()
    together = 4 if table.whole > _SLOW else 1  # as the sample models of the table were timed
    if table.whole > 1:
        clock._MOST = 2  # passes: more take long, and change little
    for start in range(0, len(todo), together):
        plans = [some_plan(table.graph, number) for number in todo[start : start + together]]
        smaller = [(cut(model, plan).eval(), plan) for plan in plans]
        whole, *times = watch.in_turn([(model, None), *smaller])
        for number, plan, seconds in zip(todo[start:], plans, times, strict=False):
            predicted = table.predict(plan)
            # As shares of what the whole model takes, timed in turn: a machine that changes its pace hits both.
            gap = predicted / table.whole * whole / seconds - 1
            row = {"whole": whole, "seconds": seconds, "predicted": predicted, "gap": gap}
            keep(options.out, name, {**where, "plan": number, "macs": plan.after.macs / plan.before.macs, **row})
        if time.perf_counter() - begin > options.seconds:
            break


def _noted(path: Path, segments: Any, masks: Any, parts: Any, pairs: Any) -> dict[str, Any]:
    """A table, of which is kept what it was made of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"parts": parts, "pairs": pairs}))
    return _fitted(segments, masks, parts, pairs)


def again(options: argparse.Namespace) -> None:
    """The predictions of a finished run, by tables that today's code makes of what was measured then."""
    for path in sorted(options.out.glob("raw-*.json")):
        rows = [json.loads(line) for line in (options.out / f"{path.stem[4:]}.jsonl").read_text().splitlines()]
        head, raw = next(row for row in rows if "table_seconds" in row), json.loads(path.read_text())
        graph = sc.analyze(network(head["model"]), torch.rand(1, 3, 224, 224))
        segments = tuple(segments_of(graph))
        made = _fitted(segments, sample_masks(graph), raw["parts"], raw["pairs"])
        setup = Setup(*(head[key] for key in ("runtime", "batch", "threads", "device")))
        values = [made[key] for key in ("whole", "error", "bend", "step", "kinds")]
        table = Latency(setup, *values, graph, segments)
        gaps = []
        for row in rows:
            if "plan" in row:
                plan = some_plan(graph, row["plan"])
                assert abs(plan.after.macs / plan.before.macs - row["macs"]) < 1e-4  # the same plan
                predicted = table.predict(plan)
                gaps.append(predicted / table.whole * row["whole"] / row["seconds"] - 1)
        near, worst = np.mean(np.abs(gaps) <= 0.1), max(gaps, key=abs)
        print(f"{path.stem[12:]}: {len(gaps)} plans, {100 * near:.0f} % within 10 %, median error "
              f"{100 * np.median(np.abs(gaps)):.1f} %, worst {100 * worst:+.0f} %", flush=True)  # fmt: skip


def runtimes(options: argparse.Namespace) -> None:
    """Seconds of a model, and of what a plan for half of the MACs leaves of it, in each runtime."""
    where = {"what": "runtimes", **{key: getattr(options, key) for key in ("model", "batch", "threads", "device")}}
    done = {row["runtime"] for row in known(options.out, options.logs, **where)}
    model, example = network(options.model).to(options.device), torch.rand(1, 3, 224, 224, device=options.device)
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, sc.score(model, None, "weight", graph=graph), keep={"macs": 0.5}, limits=Limits(round_to=8))
    small = cut(model, plan).eval()
    for runtime in sorted(get_args(Runtime), key="compile".__eq__):  # compiling takes long
        if runtime in done or (runtime == "onnxruntime" and options.device != "cpu"):
            continue
        try:
            watch = Clock(Setup.of(example, runtime, options.batch, options.threads), example, model)
            before, after = watch.in_turn([(model, None), (small, plan)])
        except sc.SecateurError as error:  # no compiler
            print(f"# {runtime}: {error}", flush=True)
            continue
        row = {"runtime": runtime, "whole": before, "seconds": after, "macs": plan.after.macs / plan.before.macs}
        keep(options.out, "-".join(map(str, where.values())), {**where, **row})


def tables(options: argparse.Namespace) -> None:
    """What was measured, as Markdown."""
    print(
        "| model | runtime | batch | whole | table took | plans | within 10 % | median error | worst | of the seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    keys = ("model", "runtime", "batch", "threads", "device")
    rows = known(options.out, options.logs, what="predict")
    for place in sorted({tuple(row[key] for key in keys) for row in rows}):
        mine = [row for row in rows if tuple(row[key] for key in keys) == place]
        plans, heads = [row for row in mine if "plan" in row], [row for row in mine if "table_seconds" in row]
        if not plans:
            continue
        head = max(heads, key=lambda row: row["table_seconds"])  # later ones read it from the cache
        errors = np.array([row["gap"] for row in plans])
        plain = np.array([row["predicted"] / row["seconds"] - 1 for row in plans])
        where = f"{head['runtime']}, " + (f"{head['threads']} threads" if head["device"] == "cpu" else head["device"])
        near, middle = 100 * np.mean(np.abs(errors) <= 0.1), 100 * np.median(np.abs(errors))
        cells = [
            head["model"], where, head["batch"], f"{1000 * head['whole']:.1f} ms", f"{head['table_seconds']:.0f} s",
            len(plans), f"{near:.0f} %", f"{middle:.1f} %", f"{100 * errors[np.abs(errors).argmax()]:+.1f} %",
            f"{100 * np.mean(np.abs(plain) <= 0.1):.0f} %",
        ]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")
    rows = known(options.out, options.logs, what="runtimes")
    print("\n| model | batch | threads, device | runtime | whole | half of the MACs | times as fast |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["device"], row["batch"], row["model"])):
        print(
            f"| {row['model']} | {row['batch']} | {row['threads']}, {row['device']} | {row['runtime']} "
            f"| {1000 * row['whole']:.1f} ms | {1000 * row['seconds']:.1f} ms | {row['whole'] / row['seconds']:.2f} |"
        )
    latency_accuracy.tables(*(known(options.out, options.logs, what=what) for what in ("accuracy", "int8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "again", "accuracy", "text", "runtimes", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder of tables; by default one in --out")
    parser.add_argument("--logs", nargs="*", type=Path, default=[], help="output of earlier runs")
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--runtime", default="onnxruntime")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, default=0, help="plan")
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=400, help="stop after so many seconds of plans")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--data", choices=("imagenette", "cats_dogs"), default="imagenette")
    parser.add_argument("--draws", type=lambda t: tuple(map(int, t.split(":"))), default=(0, 10), help="from:to")
    parser.add_argument("--shares", nargs="+", type=float, default=(0.6, 0.4, 0.25), help="of the latency")
    parser.add_argument("--allocations", nargs="+", default=latency_accuracy.ALLOCATIONS)
    parser.add_argument("--repair", default="best")
    parser.add_argument("--int8", action="store_true", help="quantise what was repaired, too")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for timing each model")
    options = parser.parse_args()
    options.cache = options.cache or options.out / "cache"
    clock._BUDGET = options.budget
    torch.set_num_threads(options.threads)
    measured = {"runtimes": runtimes, "accuracy": latency_accuracy.measure, "text": latency_text.measure}
    {"predict": predict, "again": again, "table": tables, **measured}[options.what](options)


if __name__ == "__main__":
    main()
