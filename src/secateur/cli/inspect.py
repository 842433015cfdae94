"""`secateur inspect`: what a model is made of, what may leave, what may not and why."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import typer

from secateur.analysis.analyze import analyze
from secateur.cli import options as o
from secateur.cli.given_model import noise, read_model, sample_of
from secateur.cli.output import Printer, table
from secateur.latency.measure import measure
from secateur.latency.timing import time_forward
from secateur.nest import tensors_in
from secateur.structure.cost import human
from secateur.structure.graph import Graph


@o.grouped(fit=None, resize=None, interpolation=None)
def inspect(
    *,
    source: o.Source,
    seen: o.Seen,
    latency: Annotated[bool, typer.Option("--latency", help="Also time 1 and 32 samples.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show a model's layers, what they cost, what may leave, and what may not and why.

    No images and no text are needed.

    Example: secateur inspect torchvision:mobilenet_v3_small

    Example: secateur inspect net.py:make --input-size 64 --json

    Example: secateur inspect hf:my-language-model
    """
    printer = Printer(as_json)
    with printer.stage("analysing"):
        opened = read_model(source, seen, trained=False)
        graph = analyze(opened.model, noise(opened))
        cost = measure(opened.model, noise(opened), latency=False)
        one, many = (time_forward(opened.model, noise(opened, batch)) if latency else None for batch in (1, 32))
    rows, units = _rows(graph), int(graph.units.sum())
    printer.json(
        {
            "model": graph.model_name, "params": cost.params, "macs": cost.macs, "latency_1": one,
            "latency_32": many, "units": units, "removable_units": graph.total_units,
            "groups": len(graph), "removable_groups": len(graph.candidates), "layers": rows, "unused": graph.unused,
            "blocks": [{"block": b.name, "macs": b.macs, "units": b.units, "reason": b.reason} for b in graph.blocks],
            "input": list(tensors_in(noise(opened))[0].shape), "classes": list(opened.origin.classes),
        }
    )  # fmt: skip
    printer.result(table(("layer", "kind"), ("groups", "units", "MACs"), map(_cells, rows), ("may leave",)))
    sample = sample_of(opened)
    costs = f"{human(cost.params)} parameters, {human(cost.macs)} MACs"
    printer.result(f"{graph.model_name}: {costs} per {sample}")
    if one is not None and many is not None:
        printer.result(f"{1000 * one:.1f} ms for one {sample.partition(' ')[0]}, {1000 * many:.1f} ms for 32")
    printer.result(f"{graph.total_units} of {units} units may leave, in {len(graph.candidates)} groups")
    if len(graph.blocks):
        free = graph.blocks.prunable
        macs = human(sum(block.macs for block in free))
        printer.result(f"{len(free)} of {len(graph.blocks)} blocks may leave as a whole (--blocks), {macs} MACs: "
                       + _few([block.name for block in free]))  # fmt: skip
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["removable_groups"] < row["groups"]:
            reasons[row["reason"] or "no reason is known"].append(row["layer"])
    for block in graph.blocks:
        if block.reason is not None:
            reasons[block.reason].append(f"block {block.name}")
    for reason, layers in reasons.items():
        printer.result(f"must stay: {_few(layers)}: {reason}")
    if graph.unused:
        printer.result(f"not used by this input: {', '.join(graph.unused[:6])}{' …' if len(graph.unused) > 6 else ''}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _rows(graph: Graph) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer.name,
            "kind": layer.kind,
            "paths": list(layer.paths),
            "groups": len(layer.groups),
            "removable_groups": int(graph.prunable[layer.groups].sum()),
            "units": int(graph.units[layer.groups].sum()),
            "macs": sum(graph.module_macs.get(path, 0) for path in layer.paths),
            "reason": layer.reason,
        }
        for layer in graph.layers
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    more = f" (+{len(row['paths']) - 1})" if len(row["paths"]) > 1 else ""
    free, groups = row["removable_groups"], row["groups"]
    may_leave = "yes" if free == groups else "no" if not free else f"{free} of {groups}"
    return [row["layer"] + more, row["kind"], str(groups), str(row["units"]), human(row["macs"]), may_leave]
