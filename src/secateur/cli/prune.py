"""`secateur prune`: from a model and a folder of photographs to a smaller model, a history and a report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer
from torch import nn

from secateur.cli import options as o
from secateur.cli.output import Printer, expects, headline, sides
from secateur.cli.run_folder import Run, check_folder, check_model, need_packages, request, write_model
from secateur.cli.task import Task, read_model, read_task
from secateur.data.imagenet import title
from secateur.errors import SecateurError, SecateurWarning
from secateur.files.onnx import export, fixed_batch, time_onnx
from secateur.latency.measure import measure
from secateur.latency.timing import Timing, time_batches
from secateur.loop.finetune import FineTune
from secateur.loop.prune import Result
from secateur.loop.prune import prune as run_prune
from secateur.loop.settings import Schedule
from secateur.plans.targets import Limits, Scope
from secateur.report import Page
from secateur.running.devices import device_of
from secateur.structure.cost import human, size_of
from secateur.surgery.provenance import plans_of

_target = partial(typer.Option, rich_help_panel="Target (one is needed)")
_method = partial(typer.Option, rich_help_panel="Method")
_more = partial(typer.Option, rich_help_panel="What is written")

_SHOWN = 6  # images with heat maps in the report

_DROP = "Stop before accuracy falls by more than this: 0.01 is one point. Alone, or beside another target."
_CRITERION = "lrp, taylor, gradient, weight, activation, random, lrp:COMPOSITE or captum:METHOD."
_IGNORE = "Layers to leave alone, by wildcard: 'layer4.*'. Repeatable."
_STEP = (
    "Share of the units per step, 0.05 where there are several. Giving it asks for the paper's algorithm, without "
    "repair unless --repair is given."
)
_RESCORE = (
    "Score anew before each step, as the paper's algorithm does; then there is no repair unless --repair is given. "
    "Default: not where there is repair."
)
_SCOPE = (
    "Units compete in the whole network, in each layer, or in the network by score per MAC (cost) or per estimated "
    "time. Default: cost with lrp (time with --keep-latency), layer with other criteria; global where --step, "
    "--rescore, --finetune-epochs or --repair none ask for the paper's algorithm."
)
_REPAIR = (
    "Regress what is left back to the original's outputs, without training. 'auto' does so unless --finetune-epochs, "
    "--step or --rescore asks for the paper's algorithm; 'none' is that algorithm too."
)


@o.grouped()
def prune(
    ctx: typer.Context,
    *,
    out: o.Out,
    images: o.Images,
    source: o.Source,
    keep_macs: Annotated[float | None, _target(help="MACs to keep: a share, 0.5, or a number, 2e9.")] = None,
    keep_params: Annotated[float | None, _target(help="Parameters to keep: a share or a number.")] = None,
    keep_latency: Annotated[float | None, _target(help="Share of the measured latency of one image to keep.")] = None,
    remove: Annotated[float | None, _target(help="Share of the units to remove.")] = None,
    max_drop: Annotated[float | None, _target(min=0.0, max=1.0, help=_DROP)] = None,
    specialize: Annotated[bool, _method(help="Keep only the outputs that the class folders mean.")] = True,
    criterion: Annotated[str, _method(help=_CRITERION)] = "lrp",
    step: Annotated[float | None, _method(help=_STEP)] = None,
    rescore: Annotated[bool | None, _method(help=_RESCORE)] = None,
    scope: Annotated[Scope | None, _method(help=_SCOPE)] = None,
    round_to: Annotated[int, _method(min=1, help="Widths that are multiples of this; 8 suits hardware.")] = 8,
    ignore: Annotated[list[str] | None, _method(help=_IGNORE)] = None,
    repair: Annotated[Literal["auto", "best", "none", "mean", "norm", "ridge"], _method(help=_REPAIR)] = "auto",
    finetune_epochs: Annotated[int, _method(min=0, help="Epochs of training after each step.")] = 0,
    learning_rate: Annotated[float, _method(help="For fine-tuning.")] = 1e-3,
    seed: o.Seed = 0,
    seen: o.Seen,
    onnx: Annotated[bool, _more("--onnx", help="Also write model.onnx, checked.")] = False,
    report: Annotated[bool, _more(help="Write report.html.")] = True,
    latency: Annotated[bool, _more(help="Time both models for 1 and for 32 images.")] = True,
    fresh: o.Fresh = False,
    as_json: o.AsJson = False,
) -> None:
    """Make a model smaller, keeping what your images need.

    A few images per class score the units, others measure accuracy. Everything lands in --out: model/ (safetensors and
    plan), history.csv, report.html, run.json and, with --onnx, model.onnx. An interrupted run goes on when the same
    command is given again.

    Example, cats and dogs out of ImageNet's thousand classes, at half of the MACs:

    secateur prune torchvision:resnet50 --weights default --images photos --outputs cat=281-285 --outputs dog=151-268
    --keep-macs 0.5 --onnx --out small

    Example, your own trained network, one folder per output, at most one point of accuracy lost:

    secateur prune net.py:make --weights net.safetensors --images train --test test --max-drop 0.01 --out small
    """
    keep = {k: v for k, v in (("macs", keep_macs), ("params", keep_params), ("latency", keep_latency)) if v is not None}
    if not keep and remove is None and max_drop is None:
        raise typer.BadParameter(
            "say how small: --keep-macs 0.5, --keep-params 0.5, --keep-latency 0.5, --remove 0.3 or --max-drop 0.01",
            param_hint="target",
        )
    o.check_target(step, remove, keep, max_drop)
    o.check_criteria(criterion)
    check_folder(out, images=images.images, test=images.test)
    check_model(out)
    if report:
        need_packages("report", "--no-report", "jinja2", "matplotlib")
    if onnx:
        need_packages("export", "no --onnx", "onnx", "onnxscript", "onnxruntime")
    printer = Printer(as_json)
    with printer.stage("building the model and reading images"):
        task = read_task(read_model(source, seen), images, seed, narrow=specialize)
    if task.test is None and max_drop is not None:
        raise SecateurError(
            "--max-drop needs images that are not used for scoring.", fix="--test, or a smaller --per-class"
        )
    _introduce(printer, task)
    run = Run.begin(out, request(ctx, task), fresh, printer)
    tuner = None
    if finetune_epochs:
        batches = task.training().training(20, device_of(task.model))
        tuner = FineTune(batches, epochs=finetune_epochs, lr=learning_rate)
    # `prune` chooses what the user leaves open.
    schedule = Schedule(step=step, rescore=rescore, finetune=tuner, seed=seed)
    limits = Limits(scope=scope, round_to=round_to, ignore=tuple(ignore or ()))
    printer.note(f"pruning by {criterion}; you can interrupt this, and the same command goes on")
    with run.working():
        result = run_prune(
            task.model, task.data(), criterion, remove, keep or None, schedule, limits=limits, repair=repair,
            evaluate=_accuracy(task) if task.test is not None else None, max_drop=max_drop, checkpoint=run.checkpoint,
            progress=printer.progress(),
        )  # fmt: skip
    if not plans_of(result.model):
        raise SecateurError(
            f"nothing was removed ({result.stopped}), so nothing is written.",
            fix="a larger --max-drop, more images, or smaller steps with repair (--step 0.01 --repair best)",
        )
    _write(run, task, result, printer, onnx=onnx, latency=latency, report=report)


def _accuracy(task: Task) -> Callable[[nn.Module], dict[str, float]]:
    """Accuracy, with a warning if it is low before anything is removed: then pruning is not what is wrong."""
    whole, chance = size_of(task.model), 1 / len(task.classes)

    def accuracy(model: nn.Module) -> dict[str, float]:
        found = task.accuracy(model)
        if size_of(model) == whole and found["overall"] < (1 + chance) / 2:
            warnings.warn(
                f"the unpruned model is right on only {100 * found['overall']:.1f} % of the test images (chance is "
                f"{100 * chance:.1f} %). Are the weights for exactly this architecture, are --outputs and --merge "
                f"right, and are --input-size, --mean and --std those of its training?",
                SecateurWarning,
                stacklevel=2,
            )
        return found

    return accuracy


def _introduce(printer: Printer, task: Task) -> None:
    """Say which images are used for what."""
    had, has = size_of(task.whole), size_of(task.model)
    if has < had:
        printer.note(f"outputs that no folder means are removed first: {human(had)} → {human(has)} parameters")
    for name, members in task.outputs.items():
        scored, tested = (photos.counts[name] if photos is not None else 0 for photos in (task.reference, task.test))
        printer.note(f"{title(name)}: {_described(members)}; {scored} images to score on, {tested} to test on")
    if task.merge is not None:
        printer.note(f"outputs that mean the same become one: {task.merge} of their probabilities")
    if task.test is None:
        printer.note("no image is left to test on, so accuracy is not measured. Fix: --test, or a smaller --per-class.")


def _write(run: Run, task: Task, result: Result, printer: Printer, *, onnx: bool, latency: bool, report: bool) -> None:
    """Write the model, its history, ONNX, timings and the report; note that the run is finished; print the outcome."""
    out = run.out
    pruned = replace(task.opened, model=result.model)
    models = write_model(pruned, out, task.example() if onnx else None, printer)
    files = {"model": models.pop("model"), "history": out / "history.csv", **models}
    result.history.to_csv(files["history"])
    timings = _timed(printer, task, result, files.get("onnx")) if latency else []
    if report:
        with printer.stage("drawing heat maps and writing the report"):
            files["report"] = _report(out / "report.html", task, result, timings)
    had, has = (measure(model, task.example()[:1], latency=False) for model in (task.model, result.model))
    before, after = sides(had, has, timings)
    metrics = [row.metrics for row in result.history if row.held and row.metrics]
    summary = {
        "stopped": result.stopped, "before": before, "after": after,
        "accuracy": {"before": metrics[0], "after": metrics[-1]} if metrics else None,
        "images": {"reference": len(task.reference), "test": len(task.test) if task.test is not None else 0},
        "steps": len(result.history) - 1, "seconds": round(printer.seconds, 1),
        "files": {name: str(path) for name, path in files.items()},
    }  # fmt: skip
    run.end(summary, [path.name for path in files.values()])
    printer.json(summary)
    printer.result(headline(had, has, timings, metrics))
    if onnx:
        classes = ", ".join(map(title, task.opened.origin.classes))
        expected = expects(task.reference.view, fixed_batch(files["onnx"]))
        printer.result(f"{files['onnx'].name}: {expected}{f'; outputs: {classes}' if classes else ''}")
    written = ", ".join(path.name for path in files.values())
    printer.result(f"{result.stopped}; {summary['seconds']:.0f} s. Written to {out}: {written}")


def _timed(printer: Printer, task: Task, result: Result, onnx: Path | None) -> list[Timing]:
    """Both models in turn, in PyTorch and, if there is an ONNX file, in ONNX Runtime."""
    example = task.example()
    with printer.stage("timing both models for 1 and for 32 images"):
        found = time_batches(task.model, result.model, example)
    if onnx is None or example.device.type != "cpu":
        return found
    with printer.stage("timing both models in ONNX Runtime"), TemporaryDirectory() as folder:
        try:
            whole = export(task.model, Path(folder) / "unpruned.onnx", example)
        except (SecateurError, RuntimeError) as error:
            printer.note(f"ONNX timings are left out: the unpruned model cannot be exported ({o.message_of(error)})")
            return found
        return [*found, *time_onnx(whole, onnx, example)]


def _report(path: Path, task: Task, result: Result, timings: Sequence[Timing]) -> Path:
    view = task.reference.view
    about = {
        "images scored on": str(len(task.reference)),
        "images tested on": str(len(task.test)) if task.test is not None else "none",
        "outputs": "; ".join(f"{title(name)}: {_described(members)}" for name, members in task.outputs.items()),
        **({"merged by": task.merge} if task.merge is not None else {}),
    }
    page = Page(
        title=f"{task.opened.origin.model} pruned by {result.settings['criterion']}", about=about,
        latency=timings or False, mean=view.mean, std=view.std,
    )  # fmt: skip
    classes = {number: title(name) for number, name in zip(task.reference.targets, task.classes, strict=True)}
    photos = task.test if task.test is not None else task.reference
    few = photos.draw(max(1, _SHOWN // len(photos.classes)), at_most=True).of(photos.classes[:_SHOWN])
    inputs = few.tensors(device_of(task.model))
    return result.report(path, inputs=inputs, original=task.model, classes=classes, page=page)


def _described(members: Sequence[int]) -> str:
    """The outputs of a class in words."""
    return f"output {members[0]}" if len(members) == 1 else f"{len(members)} outputs, {members[0]} to {members[-1]}"
