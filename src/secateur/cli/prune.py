"""`secateur prune`: from a model and a folder of photographs to a smaller model, a history and a report."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import typer
from torch import nn

from secateur.cli import options as o
from secateur.cli.output import Printer
from secateur.cli.pruned import described, write_results
from secateur.cli.run_folder import Run, check_folder, check_model, need_packages, request
from secateur.cli.task import Task, ViewOptions, read_model, read_task
from secateur.data.imagenet import title
from secateur.errors import SecateurError, SecateurWarning
from secateur.loop.finetune import FineTune
from secateur.loop.prune import prune as run_prune
from secateur.loop.settings import Schedule
from secateur.plans.targets import Limits, Scope
from secateur.running.devices import device_of
from secateur.structure.cost import human, size_of
from secateur.surgery.provenance import plans_of

_target = partial(typer.Option, rich_help_panel="Target (one is needed)")
_method = partial(typer.Option, rich_help_panel="Method")
_more = partial(typer.Option, rich_help_panel="What is written")

_DROP = "Stop before accuracy falls by more than this: 0.01 is one point. Alone, or beside another target."
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


def prune(
    ctx: typer.Context,
    model: o.Model,
    images: o.Images,
    out: o.Out,
    weights: o.Weights = None,
    original: o.Original = None,
    device: o.Device = "auto",
    keep_macs: Annotated[float | None, _target(help="MACs to keep: a share, 0.5, or a number, 2e9.")] = None,
    keep_params: Annotated[float | None, _target(help="Parameters to keep: a share or a number.")] = None,
    keep_latency: Annotated[float | None, _target(help="Share of the measured latency of one image to keep.")] = None,
    remove: Annotated[float | None, _target(help="Share of the units to remove.")] = None,
    max_drop: Annotated[float | None, _target(min=0.0, max=1.0, help=_DROP)] = None,
    outputs: o.Outputs = None,
    test: o.Test = None,
    per_class: o.PerClass = None,
    test_per_class: o.TestPerClass = None,
    merge: o.MergeByData = "auto",
    strict: o.Strict = False,
    specialize: Annotated[bool, _method(help="Keep only the outputs that the class folders mean.")] = True,
    criterion: Annotated[
        str, _method(help="lrp, taylor, gradient, weight, activation, random, lrp:COMPOSITE or captum:METHOD.")
    ] = "lrp",
    step: Annotated[float | None, _method(help=_STEP)] = None,
    rescore: Annotated[bool | None, _method(help=_RESCORE)] = None,
    scope: Annotated[Scope | None, _method(help=_SCOPE)] = None,
    round_to: Annotated[int, _method(min=1, help="Widths that are multiples of this; 8 suits hardware.")] = 8,
    ignore: Annotated[
        list[str] | None, _method(help="Layers to leave alone, by wildcard: 'layer4.*'. Repeatable.")
    ] = None,
    repair: Annotated[Literal["auto", "best", "none", "mean", "norm", "ridge"], _method(help=_REPAIR)] = "auto",
    finetune_epochs: Annotated[int, _method(min=0, help="Epochs of training after each step.")] = 0,
    learning_rate: Annotated[float, _method(help="For fine-tuning.")] = 1e-3,
    seed: o.Seed = 0,
    size: o.Size = None,
    fit: o.Fitting = None,
    mean: o.Mean = None,
    std: o.Std = None,
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
    o.check_target(remove, keep, max_drop, step)
    o.check_criterion(criterion)
    check_folder(out, images=images, test=test)
    check_model(out)
    if report:
        need_packages("report", "--no-report", "jinja2", "matplotlib")
    if onnx:
        need_packages("export", "no --onnx", "onnx", "onnxscript", "onnxruntime")
    printer, begin = Printer(as_json), time.perf_counter()
    with printer.stage("building the model and reading images"):
        opened = read_model(model, weights, original, device, ViewOptions(size, fit, mean, std))
        task = read_task(
            opened, images, outputs=outputs or (), narrow=specialize, merge=merge, test=test,
            per_class=per_class, test_per_class=test_per_class, seed=seed, strict=strict,
        )  # fmt: skip
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
    write_results(run, task, result, printer, begin, onnx=onnx, latency=latency, report=report)


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
        printer.note(f"{title(name)}: {described(members)}; {scored} images to score on, {tested} to test on")
    if task.merge is not None:
        printer.note(f"outputs that mean the same become one: {task.merge} of their probabilities")
    if task.test is None:
        printer.note("no image is left to test on, so accuracy is not measured. Fix: --test, or a smaller --per-class.")
