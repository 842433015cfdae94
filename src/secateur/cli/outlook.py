"""What a run will take, told at its beginning, and what can be done next, told at its end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secateur.cli.image_task import Task
from secateur.cli.options import Images, Source, Texts
from secateur.cli.text_task import TextTask, how_to_open
from secateur.loop.prune import Result
from secateur.models.zoo import runs_code
from secateur.running.accuracy import interval
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import device_of
from secateur.running.memory import allowed, resident
from secateur.running.sandbox import quiet, run

# Forward passes of the original that one sample costs, as measured with ResNet-50: scored by relevance, and repaired
# with its copies, which takes both networks and the regressions.
_SCORING, _REPAIR, _COPIES, _MOST = 4.5, 6.0, 9, 1024
# Passes that analysis, verification, export and report take; those that are timed, in samples; and seconds of the rest.
_ANALYSIS, _TIMING, _OTHERS = 60, 200, 12.0
# What the packages that write ONNX files take beyond the allowance.
_EXPORT = 2**29
# With intervals wider than this on either side, the test images are few.
_FEW = 0.025


def outlook(task: Task | TextTask, *, kept: float, steps: bool, repair: bool, timed: bool, epochs: int) -> str:
    """About how long a run takes, from one pass of the model, and how much memory at most.

    `kept` is the share of the work that is left; `steps`: there are several, whose number is not known.
    """
    scored, tested = task.load
    each = _seconds(task)
    passes = tested + _SCORING * scored + (_REPAIR * min(_COPIES * scored, _MOST) if repair else 0)
    passes += tested * kept + epochs * scored * (1 + 3 * kept)
    whole = each * (passes + _ANALYSIS + (_TIMING * (1 + kept) if timed else 0)) + _OTHERS
    device = device_of(task.model)
    room = allowed(device)
    if device is None or device.type == "cpu":
        room += resident() + _EXPORT * (getattr(task, "exports", None) is not None)
    what = "every step takes" if steps else "this takes"
    return f"{what} about {_duration(each * passes if steps else whole)}, and at most {room / 2**30:.1f} GiB of memory"


def _seconds(task: Task | TextTask) -> float:
    """Of the model's forward pass for one sample."""
    model, example, seconds = shared_copy(unwrap(task.model)).eval(), task.example(), 0.0
    with quiet():
        for _ in range(2):  # the first one is a warm-up
            begin = time.perf_counter()
            run(model, example)
            seconds = time.perf_counter() - begin
    return seconds / 2


def _duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def doubt(metrics: Mapping[str, float], counts: Mapping[str, int]) -> str:
    """A sentence if too few samples were tested to tell small differences; empty if not."""
    if "overall" not in counts:
        return ""
    low, high = interval(metrics["overall"], counts["overall"])
    wide = max(high - metrics["overall"], metrics["overall"] - low)
    if wide <= _FEW:
        return ""
    return (
        f"{counts['overall']} test samples are few: accuracy is known to within about {100 * wide:.0f} points. "
        "Fix: more of them (--test, --test-per-class, --test-text)"
    )


def next_steps(
    out: Path, task: Task | TextTask, source: Source, images: Images, texts: Texts, result: Result,
    files: Mapping[str, Path], uniform: bool,
) -> list[str]:  # fmt: skip
    """How to load the model in Python, to serve it, and to train it, in three lines that can be copied."""
    origin = task.opened.origin.model
    own = f", original={origin!r}" if runs_code(origin) else ""
    load = f"secateur.models.open_model({str(out)!r}{own}).model"
    if isinstance(task, TextTask):
        load = how_to_open(files["model"], result, uniform)
    original = ["--original", origin] if own else []
    write = _shell(["secateur", "export", out, *original, "--out", out / "model.onnx"])
    serve = f"onnxruntime.InferenceSession({str(files['onnx'])!r})" if "onnx" in files else write
    if isinstance(task, TextTask):
        data: list[Any] = ["--text", texts.text, *(["--labels"] if texts.labels else [])]
    else:
        data = ["--images", images.images, *(["--test", images.test] if images.test is not None else [])]
    teacher = ["--teacher", source.model] if source.original is None else []
    teacher += ["--teacher-weights", source.weights] if source.weights is not None else []
    train = ["secateur", "recover", out, *original, *teacher, *data, "--out", f"{out}-recovered"]
    return [f"load it in Python: {load}", f"serve it: {serve}", f"train it, if it lost too much: {_shell(train)}"]


def _shell(words: list[Any]) -> str:
    return shlex.join(str(word) for word in words)
