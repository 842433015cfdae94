"""`secateur recover`: train a smaller model with the unpruned one as its teacher."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import nn

from secateur.analysis.specialize import MergedOutputs, specialize
from secateur.cli import options as o
from secateur.cli.given_model import count_outputs, noise, read_model, warn_of_no_weights
from secateur.cli.image_task import Task
from secateur.cli.outlook import after_training, doubt, training_outlook, warn_of_harm, warn_of_teacher
from secateur.cli.output import Printer, intervals, percent
from secateur.cli.prune import task_of
from secateur.cli.run_folder import Run, check_folder, check_model, only_run, request
from secateur.cli.text_task import TextTask, write_text_task
from secateur.errors import SecateurError
from secateur.files.architecture import note_of, was_pruned
from secateur.files.formats import as_stock
from secateur.files.pretrained import save_pretrained
from secateur.files.saved import save
from secateur.models import Opened, open_model
from secateur.models.hub import quiet_hub, reads_text
from secateur.models.origin import saved_folder
from secateur.models.zoo import runs_code
from secateur.recover import Recover
from secateur.recover import recover as run_recover
from secateur.running.accuracy import PERPLEXITY
from secateur.running.devices import device_of
from secateur.running.targets import Reader
from secateur.surgery.cut import cut
from secateur.surgery.provenance import plans_of

_TEACHER = "The unpruned model, as MODEL was given to prune. Without it, the labels alone teach."


@o.grouped()
def recover(
    ctx: typer.Context,
    *,
    source: o.Source,
    out: o.Out,
    teacher: Annotated[str | None, typer.Option(help=_TEACHER, metavar="MODEL")] = None,
    teacher_weights: Annotated[str | None, typer.Option(help="Its weights.", metavar="FILE|default")] = None,
    images: o.SomeImages,
    texts: o.Texts,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of training. Default: 10.")] = None,
    training: o.Training,
    seed: o.Seed = 0,
    seen: o.Seen,
    fresh: o.Fresh = False,
    as_json: o.AsJson = False,
) -> None:
    """Train a smaller model until it answers as the unpruned one does.

    All images that accuracy is not measured on are trained on. Without --text, a language model is trained on
    --sequences of --tokens that the teacher writes itself. Writes model/ into --out. An interrupted run goes on when
    the same command is given again.

    Example: secateur recover small --teacher torchvision:resnet50 --teacher-weights default --images photos --epochs 20
    --out better

    Example: secateur recover small --teacher hf:my-model --text train.txt --minutes 10 --out better
    """
    texts.check(images, written=True)
    check_folder(out, images=images.images, test=images.test)
    printer = Printer(as_json)
    with printer.stage("building the models and reading samples"):
        opened = read_model(source, seen)
        if not was_pruned(opened.model):  # before hours of training
            what = f"{source.model} was not pruned by secateur, which is what recover trains."
            raise SecateurError(what, fix="the folder that `secateur prune` wrote")
        check_model(out, pretrained=images.images is None or not plans_of(opened.model))
        whole = _teacher(teacher, teacher_weights, opened, source.original) if teacher is not None else None
        task = _task(opened, whole, images, texts, seed)
    settings = training.settings(epochs=epochs, teacher=0.0 if whole is None else Recover.teacher, seed=seed)
    for line in task.introduction("trained on") if isinstance(task, TextTask) else [task.prepared]:
        printer.note(line)
    ctx.with_resource(only_run(out))
    run = Run.begin(out, request(ctx, task), fresh, printer)
    printer.note(training_outlook(task, whole, settings.decided(opened.model)))
    measure = task.evaluate
    before = measure(opened.model) if measure is not None else None
    bare = isinstance(task, Task) and teacher_weights is None  # it may have been built without any
    if bare and measure is not None and before is not None and whole is not None:
        warn_of_teacher(str(teacher), measure(whole), before, task.tested)
    with run.working(), training.naming_sizes():
        done = run_recover(
            opened.model, whole, task.training_batches(training.batch_size), settings, checkpoint=run.checkpoint,
            progress=printer.progress(),
        )  # fmt: skip
    after = measure(done.model) if measure is not None else None
    place = out / "model"
    _save(done.model, opened, task, place)
    rows = [{"epoch": row.epoch, "loss": row.loss, "accuracy": row.accuracy} for row in done.history]
    sure = intervals([before, after], task.tested) if before is not None and after is not None else None
    summary = {"stopped": done.stopped, "accuracy": {"before": before, "after": after}, "intervals": sure,
               "epochs": rows, "seconds": round(printer.seconds, 1), "files": {"model": str(place)}}  # fmt: skip
    run.end(summary, ["model"])
    printer.json(summary)
    for name in before or {}:
        assert before is not None
        assert after is not None
        count, sides = task.tested.get(name, 0), (before[name], after[name])
        told = [f"{side:.4g}" if name == PERPLEXITY else percent(side, count) for side in sides]
        printer.result(f"{name}: {' → '.join(told)}")
    if after and (few := doubt(after, task.tested)):
        printer.result(few)
    if before and after:
        warn_of_harm(before, after, task.tested, settings.decided(opened.model))
    printer.result(f"{done.stopped}; {summary['seconds']:.0f} s. Written to {place}")
    for line in after_training(out, task):
        printer.result(line)


def _task(opened: Opened, whole: nn.Module | None, images: o.Images, texts: o.Texts, seed: int) -> Task | TextTask:
    """What to train on: images, or text, or what a language model that is the teacher writes itself."""
    if reads_text(opened.model) and images.images is not None:
        what = f"{type(opened.model).__name__} reads text, but --images is given."
        raise SecateurError(what, fix="--text FILE instead, or a --teacher that writes text itself")
    if texts.text is None and reads_text(opened.model):
        if whole is None or not Reader(whole).causal:
            what = f"{type(opened.model).__name__} reads text, and there is none to train on."
            raise SecateurError(what, fix="--text FILE; or --teacher MODEL, a language model, which writes text itself")
        return write_text_task(opened, whole, texts, seed)
    if texts.text is None and images.images is None:
        raise SecateurError("there is nothing to train on.", fix="--images FOLDER, or --text FILE for text")
    task = task_of(opened, images, texts, seed, narrow=False)
    return replace(task, pruned=True) if isinstance(task, Task) else task


def _teacher(spec: str, weights: str | None, student: Opened, original: str | None = None) -> nn.Module:
    """The unpruned model with the student's outputs: those that were removed first are removed from it as well. If it
    was itself pruned from the `original` of the student, it is rebuilt from that."""
    plain = (folder := saved_folder(spec)) is not None and note_of(folder) is None
    found = open_model(spec, weights, device_of(student.model), original if plain else None)
    if weights is None and found.origin.model == spec and not runs_code(spec):  # else its accuracy will tell
        warn_of_no_weights(spec, "--teacher-weights")
    found = replace(found, origin=student.origin)  # it sees the same
    model: Any = found.model
    if reads_text(found.model):
        return found.model
    had, has = count_outputs(found), count_outputs(student)
    if had != has:
        origin, small = student.origin, student.model
        if isinstance(small, MergedOutputs) and origin.outputs == had:
            named = dict(zip(origin.classes, origin.groups, strict=True))
            model = cut(MergedOutputs(model, named, had), plans_of(small)[0])
            model.members.copy_(small.members)  # sums or means
        elif len(origin.kept) == has and max(origin.kept) < had:
            model = specialize(model, list(origin.kept), noise(found, 2))
        else:
            raise SecateurError(
                f"--teacher {spec} has {had} outputs, the smaller model {has}.",
                fix="the model that it was pruned from; or `secateur prune --epochs`, which knows its original",
            )
    return cast(nn.Module, model).eval()


def _save(model: nn.Module, opened: Opened, task: Any, place: Path) -> None:
    """Write the model in the form that it was in."""
    if not isinstance(task, TextTask) and plans_of(model):
        save(model, place, about={"origin": opened.origin.to_dict()})
        return
    stored: torch.dtype | None = opened.stored
    tokenizer = task.tokenizer if isinstance(task, TextTask) else None
    with quiet_hub():
        save_pretrained(as_stock(deepcopy(model), stored) if stored is not None else model, place, tokenizer=tokenizer)
