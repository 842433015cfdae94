"""`secateur compare`: which criterion for my model and my images?"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Annotated

import typer

from secateur.cli import options as o
from secateur.cli.given_model import read_model
from secateur.cli.image_task import read_task
from secateur.cli.outlook import known_within
from secateur.cli.output import Printer, curves_table
from secateur.cli.run_folder import Run, check_folder, only_run, request
from secateur.errors import SecateurError
from secateur.loop.compare import compare as run_compare
from secateur.loop.settings import Schedule
from secateur.results.comparison import Comparison
from secateur.running.memory import limited

_CRITERIA = "One to compare; repeatable. Default: lrp, taylor, gradient, weight."


@o.grouped()
def compare(
    ctx: typer.Context,
    *,
    out: o.Out,
    images: o.Images,
    criteria: Annotated[list[str] | None, typer.Option("--criterion", help=_CRITERIA)] = None,
    source: o.Source,
    specialize: Annotated[bool, typer.Option(help="Keep only the outputs that the class folders mean.")] = True,
    remove: Annotated[float, typer.Option(help="Share of the units to remove in the end.")] = 0.5,
    step: Annotated[float, typer.Option(help="Share of the units per step.")] = 0.05,
    seed: o.Seed = 0,
    memory: o.Memory = None,
    seen: o.Seen,
    fresh: o.Fresh = False,
    as_json: o.AsJson = False,
) -> None:
    """Prune by several criteria on the same images, by the paper's algorithm without repair, and compare.

    Accuracy is given over the share of units removed and over the share of MACs left: the second is what you pay for.
    Writes comparison.json and comparison.png into --out. An interrupted comparison goes on from where it was.

    Example: secateur compare torchvision:resnet50 --weights default --images photos --out which

    Example: secateur compare net.py:make --weights net.pt --images train --test test --criterion lrp --criterion taylor
    --out which
    """
    chosen = criteria or ["lrp", "taylor", "gradient", "weight"]
    o.check_target(step, remove, keep={}, max_drop=None)
    o.check_criteria(*chosen)
    ctx.with_resource(limited(memory))
    printer = Printer(as_json)
    check_folder(out, images=images.images, test=images.test)
    with printer.stage("building the model and reading images"):
        task = read_task(read_model(source, seen), images, seed, narrow=specialize)
    if task.test is None:
        raise SecateurError(
            "a comparison needs images that are not used for scoring.", fix="--test, or a smaller --per-class"
        )
    printer.note(task.prepared)
    ctx.with_resource(only_run(out))
    run = Run.begin(out, request(ctx, task, criteria=chosen), fresh, printer)
    with run.working():
        found = run_compare(
            task.model, task.data(), chosen,
            evaluate=task.accuracy, remove=remove, schedule=Schedule(step=step, seed=seed), checkpoint=run.checkpoint,
            progress=printer.progress(),
        )  # fmt: skip
    files = out / "comparison.json", out / "comparison.png"
    found.to_json(files[0])
    _draw(found, files[1])
    run.end({"best": found.best})
    printer.json({**json.loads(found.to_json()), **task.counts, "files": list(map(str, files))})
    longest = max(found.curves.values(), key=lambda curve: float(curve.removed[-1])).removed
    printer.result(curves_table(found.curves, longest[:: max(1, (len(longest) - 1) // 6)].tolist(), "units"))
    printer.result(known_within(task.tested["overall"]))
    printer.result(str(found))
    used = f"{len(task.reference)} images to score on, {task.tested['overall']} to test on"
    printer.result(f"\n{used}. Written to {out}: comparison.json, comparison.png")


def _draw(found: Comparison, path: Path) -> None:
    """Two charts: accuracy over units removed, and over MACs left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, curve), mark in zip(found.curves.items(), cycle("osD^vPX*"), strict=False):
        for axis, share in ((left, curve.removed), (right, curve.macs)):
            axis.plot(100 * share, 100 * curve.overall, marker=mark, markersize=4, linewidth=1.6, label=name)
    for axis, over in ((left, "units removed in %"), (right, "MACs left in %")):
        axis.set_xlabel(over)
        axis.grid(alpha=0.3)
    right.invert_xaxis()
    left.set_ylabel("accuracy in %")
    left.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")
