"""Allocation at equal MACs or parameters: the knapsack beside a fixed order, single filters beside whole blocks.

    python -m benchmarks.blocks --out results --weights resnet50.safetensors --images imagenette --device cuda
    python -m benchmarks.blocks --out results --table

Scenes are those of `benchmarks.latency accuracy`: three classes of Imagenette, ten photographs each, by draw. All cells
of a draw run in one process on one analysis, one set of scores and one repair session; each cell is kept at once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import secateur as sc
from benchmarks.latency import MODELS
from benchmarks.latency_accuracy import accuracy, rounds
from benchmarks.latency_rows import keep, known
from secateur.plans import Limits, allocation
from secateur.plans.plan import Plan, plan_for
from secateur.plans.ranking import _Chooser
from secateur.plans.scores import Scores
from secateur.structure.graph import Graph

#: "fixed order": score per MAC of the whole model. "linear": weighed again as it shrinks. "knapsack": the worth of a
#: unit grows as its layer loses relevance, too.
CHOICES = ("fixed order", "linear", "knapsack", "knapsack, blocks", "only blocks")


def choose(name: str, graph: Graph, scores: Scores, share: float, currency: str = "macs") -> Plan:
    """The plan that keeps so much of the MACs, or of the parameters."""
    allocation.BALANCE = 0.0 if name == "linear" else 1.0
    blocks = "only" if name == "only blocks" else name.endswith("blocks")
    bound, prices = share * getattr(graph.cost, currency), graph.cost_of.prices
    limits = Limits("cost", round_to=8, blocks=blocks)
    chooser = _Chooser(graph, scores, limits, None, prices, currency, None if name == "fixed order" else bound)
    return plan_for(graph, chooser.by_cost({currency: bound}))


def measure(options: argparse.Namespace) -> None:
    """Every cell that is not known yet."""
    where = {"what": options.currency, "model": options.model, "repair": options.repair}
    file = f"{options.currency}-{options.model}-{options.draws[0]}"
    begin = time.perf_counter()
    for draw, todo, stage, graph, scores, whole, session in rounds(options, "choice", options.choices, where):
        for share, name in todo:
            if time.perf_counter() - begin > options.seconds:
                return
            row = {**where, "draw": draw, "share": share, "choice": name, "whole": whole}
            try:
                plan = choose(name, graph, scores, share, options.currency)
            except sc.SecateurError as error:  # whole blocks alone do not reach every target
                keep(options.out, file, {**row, "refused": str(error)[:200]})
                continue
            small = sc.apply(stage.model, plan)
            row |= {
                "macs": plan.after.macs / plan.before.macs, "params": plan.after.params / plan.before.params,
                "blocks": [block.name for block in plan.blocks], "none": accuracy(small, stage.test),
                "repaired": accuracy(session.examine(small).model, stage.test),
            }  # fmt: skip
            keep(options.out, file, row)


def table(options: argparse.Namespace) -> None:
    """Means over draws, as Markdown."""
    rows = [row for row in known(options.out, options.logs, what=options.currency) if "refused" not in row]
    print("| model | asked | choice | draws | MACs | parameters | blocks | not repaired | repaired |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, share in sorted({(row["model"], row["share"]) for row in rows}, key=lambda key: (key[0], -key[1])):
        for name in CHOICES:
            mine = [row for row in rows if (row["model"], row["share"], row["choice"]) == (model, share, name)]
            if mine:
                macs, params, none, last = (
                    100 * np.array([row[key] for row in mine]) for key in ("macs", "params", "none", "repaired")
                )
                half = 1.96 * last.std(ddof=1) / len(mine) ** 0.5 if len(mine) > 1 else 0.0
                count = np.mean([len(row["blocks"]) for row in mine])
                cells = [model, f"{100 * share:.0f} %", name, len(mine), f"{macs.mean():.1f} %"]
                cells += [f"{params.mean():.1f} %", f"{count:.1f}", f"{none.mean():.1f}"]
                print(f"| {' | '.join(map(str, cells))} | {last.mean():.1f} ± {half:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", nargs="*", type=Path, default=[], help="output of earlier runs")
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repair", default="best")
    parser.add_argument("--currency", choices=("macs", "params"), default="macs")
    parser.add_argument("--draws", type=lambda t: tuple(map(int, t.split(":"))), default=(0, 10), help="from:to")
    parser.add_argument("--shares", nargs="+", type=float, default=(0.6, 0.35, 0.16), help="of the currency")
    parser.add_argument("--choices", nargs="+", default=CHOICES)
    parser.add_argument("--seconds", type=float, default=400, help="begin no cell after so many seconds")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.data = "imagenette"
    (table if options.table else measure)(options)


if __name__ == "__main__":
    main()
