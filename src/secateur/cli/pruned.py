"""What `secateur prune` leaves in --out: the model, its history, ONNX, timings and the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from secateur.cli.options import message_of
from secateur.cli.output import Printer, expects, headline, sides
from secateur.cli.run_folder import Run
from secateur.cli.task import Task
from secateur.data.imagenet import title
from secateur.errors import SecateurError
from secateur.files.onnx import export, fixed_batch, time_onnx
from secateur.files.saved import save
from secateur.latency.measure import measure
from secateur.latency.timing import Timing, time_batches
from secateur.loop.prune import Result
from secateur.report import Page
from secateur.running.devices import device_of


def write_results(
    run: Run,
    task: Task,
    result: Result,
    printer: Printer,
    begin: float,
    *,
    onnx: bool,
    latency: bool,
    report: bool,
) -> None:
    """Write everything, note that the run is finished, and print the outcome."""
    out = run.out
    files = {"model": out / "model", "history": out / "history.csv"}
    save(result, files["model"], about={"origin": task.opened.origin.to_dict()})
    result.history.to_csv(files["history"])
    if onnx:
        with printer.stage("writing ONNX and checking it with ONNX Runtime"):
            files["onnx"] = export(result.model, out / "model.onnx", task.example())
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
        "steps": len(result.history) - 1, "seconds": round(time.perf_counter() - begin, 1),
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
            printer.note(f"ONNX timings are left out: the unpruned model cannot be exported ({message_of(error)})")
            return found
        return [*found, *time_onnx(whole, onnx, example)]


def _report(path: Path, task: Task, result: Result, timings: Sequence[Timing]) -> Path:
    view = task.reference.view
    about = {
        "images scored on": str(len(task.reference)),
        "images tested on": str(len(task.test)) if task.test is not None else "none",
        "outputs": "; ".join(f"{title(name)}: {described(members)}" for name, members in task.outputs.items()),
        **({"merged by": task.merge} if task.merge is not None else {}),
    }
    page = Page(
        title=f"{task.opened.origin.model} pruned by {result.settings['criterion']}", about=about,
        latency=timings or False, mean=view.mean, std=view.std,
    )  # fmt: skip
    classes = {number: title(name) for number, name in zip(task.reference.targets, task.classes, strict=True)}
    return result.report(path, inputs=_some_images(task), original=task.model, classes=classes, page=page)


def described(members: Sequence[int]) -> str:
    """The outputs of a class in words."""
    return f"output {members[0]}" if len(members) == 1 else f"{len(members)} outputs, {members[0]} to {members[-1]}"


def _some_images(task: Task, count: int = 6) -> tuple[Tensor, Tensor]:
    """A few test images, in turn from every class."""
    photos = task.test if task.test is not None else task.reference
    each = max(1, count // len(photos.classes))
    return photos.draw(each, at_most=True).of(photos.classes[:count]).tensors(device_of(task.model))
