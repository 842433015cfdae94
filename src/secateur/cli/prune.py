"""`secateur prune`: from a model and a folder of photographs to a smaller model, a history and a report."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from torch import nn

from secateur.cli import options as o
from secateur.cli.folder import (
    CHECKPOINT,
    begin_run,
    check_folder,
    check_model,
    drop_stale,
    end_run,
    need,
    request,
    undone_if_impossible,
)
from secateur.cli.output import Lines, Talk, expects, headline, sides
from secateur.cli.subject import Look, Task, device_of, opened, task
from secateur.cli.wording import spoken
from secateur.data.imagenet import title
from secateur.errors import SecateurError, SecateurWarning
from secateur.files.folder import save
from secateur.files.onnx import export, fixed_batch, time_onnx
from secateur.latency.measure import measure
from secateur.latency.timing import Timing, time_batches
from secateur.loop.finetune import FineTune
from secateur.loop.prune import prune as run_prune
from secateur.loop.result import Result
from secateur.loop.schedule import Schedule
from secateur.plans.limits import Limits
from secateur.report.page import Page
from secateur.structure.cost import human, size_of
from secateur.surgery.provenance import plans_of

_TARGET, _METHOD, _MORE = "Target (one is needed)", "Method", "What is written"


class Repair(StrEnum):
    """How consumers of what was removed are corrected."""

    auto = "auto"
    best = "best"
    none = "none"
    mean = "mean"
    norm = "norm"
    ridge = "ridge"


class Scope(StrEnum):
    """Where units compete."""

    everywhere = "global"
    layer = "layer"
    cost = "cost"
    time = "time"


def prune(
    ctx: typer.Context,
    model: o.Model,
    images: o.Images,
    out: o.Out,
    weights: o.Weights = None,
    original: o.Original = None,
    device: o.Device = "auto",
    keep_macs: Annotated[
        float | None, typer.Option(help="MACs to keep: a share, 0.5, or a number, 2e9.", rich_help_panel=_TARGET)
    ] = None,
    keep_params: Annotated[
        float | None, typer.Option(help="Parameters to keep: a share or a number.", rich_help_panel=_TARGET)
    ] = None,
    keep_latency: Annotated[
        float | None,
        typer.Option(help="Share of the measured latency of one image to keep.", rich_help_panel=_TARGET),
    ] = None,
    remove: Annotated[float | None, typer.Option(help="Share of the units to remove.", rich_help_panel=_TARGET)] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Stop before accuracy falls by more than this: 0.01 is one point. Alone, or beside another target.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    outputs: o.Outputs = None,
    test: o.Test = None,
    per_class: o.PerClass = None,
    test_per_class: o.TestPerClass = None,
    merge: o.MergeByData = o.MergingByData.auto,
    strict: o.Strict = False,
    specialize: Annotated[
        bool,
        typer.Option(help="Keep only the outputs that the class folders mean.", rich_help_panel=_METHOD),
    ] = True,
    criterion: Annotated[
        str,
        typer.Option(
            help="lrp, taylor, gradient, weight, activation, random, lrp:COMPOSITE or captum:METHOD.",
            rich_help_panel=_METHOD,
        ),
    ] = "lrp",
    step: Annotated[
        float | None,
        typer.Option(
            help="Share of the units per step, 0.05 where there are several. Giving it asks for the paper's algorithm, "
            "without repair unless --repair is given.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    rescore: Annotated[
        bool | None,
        typer.Option(
            help="Score anew before each step, as the paper's algorithm does; then there is no repair unless --repair "
            "is given. Default: not where there is repair.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    scope: Annotated[
        Scope | None,
        typer.Option(
            help="Units compete in the whole network, in each layer, or in the network by score per MAC (cost) or per "
            "estimated time. Default: cost with lrp (time with --keep-latency), layer with other criteria; global "
            "where --step, --rescore, --finetune-epochs or --repair none ask for the paper's algorithm.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    round_to: Annotated[
        int, typer.Option(min=1, help="Widths that are multiples of this; 8 suits hardware.", rich_help_panel=_METHOD)
    ] = 8,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layers to leave alone, by wildcard: 'layer4.*'. Repeatable.", rich_help_panel=_METHOD),
    ] = None,
    repair: Annotated[
        Repair,
        typer.Option(
            help="Regress what is left back to the original's answers, without training. 'auto' does so unless "
            "--finetune-epochs, --step or --rescore asks for the paper's algorithm; 'none' is that algorithm too.",
            rich_help_panel=_METHOD,
        ),
    ] = Repair.auto,
    finetune_epochs: Annotated[
        int, typer.Option(min=0, help="Epochs of training after each step.", rich_help_panel=_METHOD)
    ] = 0,
    learning_rate: Annotated[float, typer.Option(help="For fine-tuning.", rich_help_panel=_METHOD)] = 1e-3,
    seed: o.Seed = 0,
    size: o.Size = None,
    fit: o.Fitting = None,
    mean: o.Mean = None,
    std: o.Std = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write model.onnx, checked.", rich_help_panel=_MORE)
    ] = False,
    report: Annotated[bool, typer.Option(help="Write report.html.", rich_help_panel=_MORE)] = True,
    latency: Annotated[
        bool, typer.Option(help="Time both models for 1 and for 32 images.", rich_help_panel=_MORE)
    ] = True,
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
    o.check_target(keep, remove, step)
    o.check_criterion(criterion)
    talk, begin = Talk(as_json), time.perf_counter()
    check_folder(out, images=images, test=test)
    check_model(out)
    if report:
        need("report", "--no-report", "jinja2", "matplotlib")
    if onnx:
        need("export", "no --onnx", "onnx", "onnxscript", "onnxruntime")
    with talk.stage("building the model and reading images"):
        subject = opened(model, weights, original, device, Look(size, fit, mean, std))
        job = task(
            subject, images, outputs=outputs or (), narrow=specialize, merge=merge.value, test=test,
            per_class=per_class, test_per_class=test_per_class, seed=seed, strict=strict,
        )  # fmt: skip
    if job.test is None and max_drop is not None:
        raise SecateurError(
            "--max-drop needs images that are not used for scoring.", fix="--test, or a smaller --per-class"
        )
    _introduce(talk, job)
    asked = request(ctx, job)
    earlier = begin_run(out, asked, fresh, talk)
    where = device_of(job.model)
    tuner = None
    if finetune_epochs:
        tuner = FineTune(job.training().training(20, where), epochs=finetune_epochs, lr=learning_rate)
    # What the user leaves open is for `prune` to choose.
    schedule = Schedule(step=step, rescore=rescore, finetune=tuner, seed=seed)
    limits = Limits(scope=scope.value if scope is not None else None, round_to=round_to, ignore=tuple(ignore or ()))
    talk.note(f"pruning by {criterion}; this can be interrupted, and the same command goes on")
    with undone_if_impossible(out, earlier):
        result = run_prune(
            job.model, job.data(), criterion, remove, keep or None, schedule, limits=limits, repair=repair.value,
            evaluate=_watchful(job) if job.test is not None else None, max_drop=max_drop,
            checkpoint=out / CHECKPOINT, progress=talk.err.is_terminal or Lines(talk),
        )  # fmt: skip
    if not plans_of(result.model):
        raise SecateurError(
            f"nothing was removed ({result.stopped}), so nothing is written.",
            fix="a larger --max-drop, more images, or smaller steps with repair (--step 0.01 --repair best)",
        )
    files = {"model": out / "model", "history": out / "history.csv"}
    save(result, files["model"], about={"origin": job.subject.origin.to_dict()})
    result.history.to_csv(files["history"])
    if onnx:
        with talk.stage("writing ONNX and checking it with ONNX Runtime"):
            files["onnx"] = export(result.model, out / "model.onnx", job.example())
    timings = _timed(talk, job, result, files.get("onnx")) if latency else []
    if report:
        with talk.stage("drawing heat maps and writing the report"):
            files["report"] = _report(out / "report.html", job, result, timings)
    had, has = (measure(model, job.example()[:1], latency=False) for model in (job.model, result.model))
    before, after = sides(had, has, timings)
    metrics = [row.metrics for row in result.history if row.held and row.metrics]
    summary = {
        "stopped": result.stopped, "before": before, "after": after,
        "accuracy": {"before": metrics[0], "after": metrics[-1]} if metrics else None,
        "images": {"reference": len(job.reference), "test": len(job.test) if job.test is not None else 0},
        "steps": len(result.history) - 1, "seconds": round(time.perf_counter() - begin, 1),
        "files": {name: str(path) for name, path in files.items()},
    }  # fmt: skip
    drop_stale(out, earlier, [path.name for path in files.values()])
    end_run(out, asked, summary)
    talk.json(summary)
    talk.result(headline(had, has, timings, metrics))
    if onnx:
        named = f"; outputs: {', '.join(map(title, job.subject.origin.classes))}" if specialize else ""
        talk.result(f"{files['onnx'].name}: {expects(job.reference.view, fixed_batch(files['onnx']))}{named}")
    written = ", ".join(path.name for path in files.values())
    talk.result(f"{spoken(result.stopped)}; {summary['seconds']:.0f} s. Written to {out}: {written}")


def _watchful(job: Task) -> Callable[[nn.Module], dict[str, float]]:
    """Accuracy, with a warning if it is poor before anything was removed: then pruning is not what is wrong."""
    whole, chance = size_of(job.model), 1 / len(job.classes)

    def accuracy(model: nn.Module) -> dict[str, float]:
        found = job.accuracy(model)
        if size_of(model) == whole and found["overall"] < (1 + chance) / 2:
            warnings.warn(
                f"the unpruned model is right on only {100 * found['overall']:.1f} % of the test images (chance is "
                f"{100 * chance:.1f} %). Are the weights for this very architecture, --outputs and --merge right, and "
                f"--input-size, --mean and --std those of its training?",
                SecateurWarning,
                stacklevel=2,
            )
        return found

    return accuracy


def _introduce(talk: Talk, job: Task) -> None:
    """Say what is done with which images, so that nobody has to guess."""
    had, has = size_of(job.whole), size_of(job.model)
    if has < had:
        talk.note(f"outputs that no folder means are removed first: {human(had)} → {human(has)} parameters")
    for name, members in job.outputs.items():
        tested = job.test.counts[name] if job.test is not None else 0
        talk.note(
            f"{title(name)}: {_listed(members)}; {job.reference.counts[name]} images to score on, {tested} to test on"
        )
    if job.merge is not None:
        talk.note(f"outputs that mean the same become one: {job.merge} of their probabilities")
    if job.test is None:
        talk.note("no image is left to test on, so accuracy is not measured. Fix: --test, or a smaller --per-class.")


def _timed(talk: Talk, job: Task, result: Result, onnx: Path | None) -> list[Timing]:
    """Both models in turn, in PyTorch and, if it is asked for, in ONNX Runtime."""
    example = job.example()
    with talk.stage("timing both models for 1 and for 32 images"):
        found = time_batches(job.model, result.model, example)
    if onnx is None or example.device.type != "cpu":
        return found
    with talk.stage("timing both models in ONNX Runtime"), TemporaryDirectory() as folder:
        try:
            whole = export(job.model, Path(folder) / "unpruned.onnx", example)
        except (SecateurError, RuntimeError) as error:
            talk.note(f"the unpruned model cannot be written as ONNX, so there is nothing to compare with: {error}")
            return found
        return [*found, *time_onnx(whole, onnx, example)]


def _report(path: Path, job: Task, result: Result, timings: Sequence[Timing]) -> Path:
    view = job.reference.view
    page = Page(
        title=f"{job.subject.origin.model} pruned by {result.settings['criterion']}", about=_about(job),
        latency=timings or False, mean=view.mean, std=view.std,
    )  # fmt: skip
    classes = {number: title(name) for number, name in zip(job.reference.targets, job.classes, strict=True)}
    return result.report(path, inputs=_a_few(job), original=job.model, classes=classes, page=page)


def _about(job: Task) -> dict[str, str]:
    """What the page should say about the task, for those who were not there."""
    made = {
        "images scored on": str(len(job.reference)),
        "images tested on": str(len(job.test)) if job.test is not None else "none",
        "outputs": "; ".join(f"{title(name)}: {_listed(members)}" for name, members in job.outputs.items()),
    }
    return {**made, "merged by": job.merge} if job.merge is not None else made


def _listed(members: Sequence[int]) -> str:
    return f"output {members[0]}" if len(members) == 1 else f"{len(members)} outputs, {members[0]} to {members[-1]}"


def _a_few(job: Task, count: int = 6) -> Any:
    """A few test images, in turn from every class."""
    photos = job.test if job.test is not None else job.reference
    each = max(1, count // len(photos.classes))
    return photos.draw(each, at_most=True).of(photos.classes[:count]).tensors(device_of(job.model))
