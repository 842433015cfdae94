"""`secateur prune`: from a model and photographs or text to a smaller model, a history and a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from secateur.cli import options as o
from secateur.cli.given_model import read_model
from secateur.cli.image_task import Task, read_task
from secateur.cli.outcome import Quantised
from secateur.cli.outlook import doubt, next_steps, outlook, warn_of_steps
from secateur.cli.output import Printer, headline, intervals, sides
from secateur.cli.run_folder import RUN, Run, check_folder, check_model, need_packages, only_run, request, write_model
from secateur.cli.text_task import TextTask, read_text_task
from secateur.errors import SecateurError
from secateur.files.onnx import Exports, export
from secateur.latency.measure import measure
from secateur.loop.prune import Result
from secateur.loop.prune import prune as run_prune
from secateur.loop.settings import Schedule
from secateur.models import Opened
from secateur.models.hub import reads_text
from secateur.nest import select_samples
from secateur.plans.targets import Limits, Scope
from secateur.report.changes import name_of
from secateur.running.memory import limited, release
from secateur.runtimes import Runtime, Setup
from secateur.surgery.provenance import plans_of

_target = partial(typer.Option, rich_help_panel="Target (one is needed)")
_method = partial(typer.Option, rich_help_panel="Method")
_where = partial(typer.Option, rich_help_panel="Where it will run")
_more = partial(typer.Option, rich_help_panel="What is written")

_DROP = "Stop before accuracy falls by more than this: 0.01 is one point. Alone, or beside another target."
_DRIFT = (
    "Stop before the reasons change by more than this: 1 minus the correlation of heat maps before and after. Alone, "
    "or beside another target."
)
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
    "Units compete in the whole network, in each layer, or in the network by score for what they save (cost): MACs, "
    "or parameters or time with --keep-params or --keep-latency. Default: cost with lrp, layer with other criteria; "
    "global where --step, --rescore or --repair none ask for the paper's algorithm."
)
_RUNTIME = (
    "What runs the model: --keep-latency plans for it and measures in it. PyTorch, PyTorch with channels last in "
    "memory, torch.compile, or ONNX Runtime, which also writes model.onnx."
)
_INT8 = (
    "Also write model.onnx, and model.int8.onnx, which computes in int8 with ranges from the images that units are "
    "scored on. For convolutional networks."
)
_UNIFORM = "The same width in all blocks of a transformer, so that stock transformers loads the result."
_BLOCKS = (
    "Whether residual branches (ResNet blocks, attention, MLPs) may leave as a whole: beside single units, or as the "
    "only ones. With --uniform, whole layers of a transformer do."
)
#: Classes of which each has a line of its own.
_TOLD = 10
_REPAIR = (
    "Regress what is left back to the original's outputs, without training. 'auto' does so unless --step or "
    "--rescore asks for the paper's algorithm; 'none' is that algorithm too."
)


@o.grouped()
def prune(
    ctx: typer.Context,
    *,
    out: o.Out,
    images: o.SomeImages,
    texts: o.Texts,
    source: o.Source,
    keep_macs: Annotated[float | None, _target(help="MACs to keep: a share, 0.5, or a number, 2e9.")] = None,
    keep_params: Annotated[float | None, _target(help="Parameters to keep: a share or a number.")] = None,
    keep_latency: Annotated[float | None, _target(help="Share of the measured latency to keep.")] = None,
    remove: Annotated[float | None, _target(help="Share of the units to remove.")] = None,
    max_drop: Annotated[float | None, _target(min=0.0, help=_DROP)] = None,
    max_drift: Annotated[float | None, _target(min=0.0, max=2.0, help=_DRIFT)] = None,
    runtime: Annotated[Runtime, _where(help=_RUNTIME)] = "torch",
    batch: Annotated[int, _where(min=1, help="Samples at once, for --keep-latency.")] = 1,
    threads: Annotated[int | None, _where(min=1, help="Threads of the processor. Default: as PyTorch chooses.")] = None,
    specialize: Annotated[bool, _method(help="Keep only the outputs that the class folders mean.")] = True,
    criterion: Annotated[str, _method(help=_CRITERION)] = "lrp",
    step: Annotated[float | None, _method(help=_STEP)] = None,
    rescore: Annotated[bool | None, _method(help=_RESCORE)] = None,
    scope: Annotated[Scope | None, _method(help=_SCOPE)] = None,
    uniform: Annotated[bool, _method("--uniform", help=_UNIFORM)] = False,
    blocks: Annotated[Literal["no", "yes", "only"], _method(help=_BLOCKS)] = "no",
    round_to: Annotated[int, _method(min=1, help="Widths that are multiples of this; 8 suits hardware.")] = 8,
    ignore: Annotated[list[str] | None, _method(help=_IGNORE)] = None,
    repair: Annotated[Literal["auto", "best", "none", "mean", "norm", "ridge"], _method(help=_REPAIR)] = "auto",
    epochs: Annotated[int, _method(min=0, help=o.EPOCHS)] = 0,
    training: o.Training,
    seed: o.Seed = 0,
    memory: o.Memory = None,
    seen: o.Seen,
    onnx: Annotated[bool, _more("--onnx", help="Also write model.onnx, checked.")] = False,
    int8: Annotated[bool, _more("--int8", help=_INT8)] = False,
    report: Annotated[bool, _more(help="Write report.html.")] = True,
    latency: Annotated[bool, _more(help="Time both models, for one sample and for a batch.")] = True,
    fresh: o.Fresh = False,
    as_json: o.AsJson = False,
) -> None:
    """Make a model smaller, keeping what your images or your text need.

    A few images per class, or a few sequences of text, score the units. Others measure accuracy and perplexity.
    Everything lands in --out: model/, history.csv, report.html, run.json and, with --onnx, model.onnx. An interrupted
    run goes on when the same command is given again.

    Example, cats and dogs out of ImageNet's thousand classes, at half of the MACs:

    secateur prune torchvision:resnet50 --weights default --images photos --outputs cat=281-285 --outputs dog=151-268
    --keep-macs 0.5 --onnx --out small

    Example, your own trained network, one folder per output, at most one point of accuracy lost:

    secateur prune net.py:make --weights net.safetensors --images train --test test --max-drop 0.01 --out small

    Example, a language model at 80 % of its parameters, in a form that transformers loads:

    secateur prune hf:my-model --text train.txt --test-text test.txt --keep-params 0.8 --uniform --out small

    Example, a classifier of texts:

    secateur prune hf:my-classifier --text train.csv --labels --keep-params 0.6 --out small
    """
    keep = {k: v for k, v in (("macs", keep_macs), ("params", keep_params), ("latency", keep_latency)) if v is not None}
    if not keep and remove is None and max_drop is None and max_drift is None:
        raise typer.BadParameter(
            "say how small: --keep-macs 0.5, --keep-params 0.5, --keep-latency 0.5, --remove 0.3 or --max-drop 0.01",
            param_hint="target",
        )
    o.check_target(step, remove, keep, max_drop, max_drift)
    o.check_criteria(criterion)
    chosen = getattr(ctx.get_parameter_source("epochs"), "name", "") == "COMMANDLINE"  # 0 epochs may be a script's
    if not epochs and training.minutes is None and not chosen:
        training.check()
    ctx.with_resource(limited(memory))  # reading, writing, timing and the report are part of it
    texts.check(images)
    check_folder(out, images=images.images, test=images.test)
    check_model(out, pretrained=texts.text is not None)
    if report:
        need_packages("report", "--no-report", "jinja2", "matplotlib")
    if int8 and texts.text is not None:
        raise SecateurError("--int8 is for convolutional networks, not for text.", fix="leave out --int8")
    onnx |= runtime == "onnxruntime" or int8
    if onnx:
        need_packages("export", "no --onnx", "onnx", "onnxscript", "onnxruntime")
    printer = Printer(as_json)
    with printer.stage(f"building the model and reading {'images' if texts.text is None else 'text'}"):
        task = task_of(read_model(source, seen), images, texts, seed, specialize)
        if onnx and isinstance(task, Task):
            task = replace(task, exports=Exports())
    if task.test is None and max_drop is not None:
        kind, fix = (
            ("images", "--test, or a smaller --per-class") if isinstance(task, Task) else ("texts", "--test-text")
        )
        raise SecateurError(f"--max-drop needs {kind} that are not used for scoring.", fix=fix)
    if int8 and isinstance(task, Task):
        with printer.stage("seeing whether the model can compute in int8"):
            task.check_int8()
    for line in task.introduction():
        printer.note(line)
    setup = Setup.of(task.example(), runtime, batch, threads)
    ctx.with_resource(only_run(out))
    run = Run.begin(out, request(ctx, task), fresh, printer)
    trained = None
    if epochs or training.minutes is not None:
        data = task.training_batches(training.batch_size)
        trained = training.settings(epochs=epochs or None, data=data)
    # `prune` chooses what the user leaves open.
    schedule = Schedule(step=step, rescore=rescore, seed=seed)
    limits = Limits(
        scope, ignore or (), round_to=round_to, uniform=uniform, blocks="only" if blocks == "only" else blocks == "yes"
    )
    share = next((number for number in (*keep.values(), 1 - (remove or 0.5)) if number <= 1), 0.5)
    paper = step is not None or bool(rescore) or repair == "none"
    steps, repaired = paper or max_drop is not None or max_drift is not None, repair != "auto" and repair != "none"
    printer.note(
        outlook(
            task, kept=share, steps=steps, repair=repaired or not paper, timed=latency, epochs=epochs,
            minutes=training.minutes,
        )
    )  # fmt: skip
    printer.note(f"pruning by {criterion}; you can interrupt this, and the same command goes on")
    with run.working(), training.naming_sizes():
        result = run_prune(
            task.model, task.data(), criterion, remove, keep or None, schedule, limits=limits, repair=repair,
            recover=trained, evaluate=task.evaluate, max_drop=max_drop, max_drift=max_drift,
            watch=task.shown() if report or max_drift is not None else None, checkpoint=run.checkpoint,
            progress=printer.progress(), latency=setup if keep_latency is not None else None,
        )  # fmt: skip
    if not plans_of(result.model):
        raise SecateurError(
            f"nothing was removed ({result.stopped}), so nothing is written.",
            fix="a larger --max-drop or --max-drift, more samples, or smaller steps (--step 0.01 --repair best)",
        )
    release()  # ONNX Runtime needs memory of its own
    timed = setup if latency else None
    files, quantised = _write(run, task, result, printer, onnx=onnx, int8=int8, setup=timed, report=report)
    metrics = _measured(result)
    if metrics and paper and repair == "auto":
        warn_of_steps(metrics[0], metrics[-1], task.tested)
    for line in next_steps(out, task, source, images, texts, result, files, uniform):
        printer.result(line)
    if quantised is not None and quantised.refused:  # a script that asked for the file must not go on without it
        raise SecateurError(f"model.int8.onnx was not written; everything else was. {quantised.refused}")


def _measured(result: Result) -> list[Mapping[str, float]]:
    """What was measured of the models that were kept, the unpruned one first."""
    return [row.metrics for row in result.history if row.held and row.metrics]


def task_of(opened: Opened, images: o.Images, texts: o.Texts, seed: int, narrow: bool) -> Task | TextTask:
    """The task that fits the model: of text or of images."""
    if reads_text(opened.model):
        if texts.text is None:
            raise SecateurError(f"{type(opened.model).__name__} reads text.", fix="--text FILE")
        return read_text_task(opened, texts)
    if texts.text is not None:
        what = f"{type(opened.model).__name__} is no model of text that the command line knows; these are hf:FOLDER."
        raise SecateurError(what, fix="--images FOLDER for a model of images; else the Python functions")
    if images.images is None:
        raise SecateurError("there is nothing to score units on.", fix="--images FOLDER, or --text FILE for text")
    return read_task(opened, images, seed, narrow=narrow)


def _write(
    run: Run,
    task: Task | TextTask,
    result: Result,
    printer: Printer,
    *,
    onnx: bool,
    int8: bool,
    setup: Setup | None,
    report: bool,
) -> tuple[dict[str, Path], Quantised | None]:
    """Write the model, its history, ONNX, int8, timings and the report; note that the run is finished; print the
    outcome. Return which files there are, and what became of int8 if that was asked for."""
    out = run.out
    example = task.example()
    write = task.exports.write if isinstance(task, Task) and task.exports is not None else export
    models = write_model(result.model, partial(task.save, result), out, example if onnx else None, printer, write)
    files = {"model": models.pop("model"), "history": out / "history.csv", **models}
    result.history.to_csv(files["history"])
    quantised: Quantised | None = None
    if int8 and isinstance(task, Task):
        with printer.stage("writing int8 and measuring its accuracy"):
            quantised = task.in_int8(result.model, out / "model.int8.onnx")
        if quantised.how is not None:
            files["int8"] = out / "model.int8.onnx"
    timings = task.times(result, files, printer, setup) if setup is not None else []
    if report:
        more = {} if quantised is None else quantised.about()
        with printer.stage("explaining a few samples and writing the report"):
            files["report"] = task.report(out / "report.html", result, timings, more)
    one = select_samples(example, slice(1))
    had, has = (measure(model, one, latency=False) for model in (task.model, result.model))
    before, after = sides(had, has, timings)
    metrics = _measured(result)
    blocks = [block.name for block in result.plan.blocks] if result.plan is not None else []
    accuracy = {} if quantised is None or quantised.accuracy is None else {"int8": quantised.accuracy}
    rows = [] if quantised is None else quantised.rows(metrics[0] if metrics else {}, task.tested)
    moved, named = result.reasons, lambda number: name_of(number, task.meanings)
    why = {"not measured": result.settings["reasons"]} if "reasons" in result.settings else None
    summary = {
        "stopped": result.stopped, "before": before, "after": after,
        "accuracy": {"before": metrics[0], "after": metrics[-1], **accuracy} if metrics else None,
        "intervals": intervals(metrics, task.tested), **task.counts,
        **({"int8": quantised.to_dict()} if quantised is not None else {}),
        **({"timed": {"threads": setup.threads, "device": setup.device}} if setup is not None else {}),
        "reasons": moved.to_dict(named) if moved is not None else why, "removed_blocks": blocks,
        "steps": len(result.history) - 1, "seconds": round(printer.seconds, 1),
        "files": {name: str(path) for name, path in files.items()},
    }  # fmt: skip
    run.end(summary, [path.name for path in files.values()])
    printer.json(summary)
    printer.result(headline(had, has, timings, metrics, task.sample, task.tested, rows))
    if metrics and (few := doubt(metrics[-1], task.tested)):
        printer.result(few)
    if moved is not None:
        printer.result(moved.summary(named))
        if 1 < len(moved.by_class) <= _TOLD:
            printer.result(moved.table(named))
    if blocks:
        printer.result(f"whole blocks that left: {', '.join(blocks)}")
    if onnx:
        printer.result(f"{files['onnx'].name}: {task.exported(files['onnx'])}")
    written = ", ".join([*(path.name for path in files.values()), RUN])
    printer.result(f"{result.stopped}; {summary['seconds']:.0f} s. Written to {out}: {written}")
    return files, quantised
