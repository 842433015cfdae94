"""What a run will take, told at its beginning, and what can be done next, told at its end."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from secateur.cli.image_task import Task
from secateur.cli.options import Images, Source, Texts
from secateur.cli.text_task import TextTask, how_to_open, opened_by_transformers
from secateur.errors import SecateurWarning
from secateur.loop.prune import Result
from secateur.models.zoo import runs_code
from secateur.recover import Recover
from secateur.running.accuracy import PERPLEXITY, interval
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import device_of
from secateur.running.memory import allowed, resident
from secateur.running.sandbox import quiet, run

# Forward passes of the original that one sample costs, as measured with ResNet-50: scored by relevance, and repaired
# with its copies, which takes both networks and the regressions.
_SCORING, _REPAIR, _COPIES, _MOST = 4.5, 6.0, 9, 1024
# Passes that analysis, verification, export and report take; those that are timed, in samples; and seconds of the rest.
_ANALYSIS, _TIMING, _OTHERS = 60, 200, 12.0
# What is taken beyond the allowance, as measured with torchvision's classifiers: by a repair up to 0.1 GiB and a copy
# of the weights; where batches are timed, by what malloc keeps between calls (less than 0.1 GiB with most; there is no
# trial of channels last and of ONNX Runtime, which tells). And what the packages that write ONNX files take.
_REPAIRED, _TIMED, _EXPORT = int(0.1 * 2**30), int(0.6 * 2**30), 2**29
# Copies of the weights that training holds: themselves, their slopes and what the optimizer and the average remember.
_TRAINED = 5
# With intervals wider than this on either side, the test images are few.
_FEW = 0.025


def outlook(
    task: Task | TextTask, *, kept: float, steps: bool, repair: bool, timed: bool, epochs: int,
    minutes: float | None = None,
) -> str:  # fmt: skip
    """About how long a run takes, from one pass of the model, and how much memory at most.

    `kept` is the share of the work that is left; `steps`: there are several, whose number is not known.
    """
    scored, tested = task.load
    each = _seconds(task)
    passes = tested + _SCORING * scored + (_REPAIR * min(_COPIES * scored, _MOST) if repair else 0)
    passes += tested * kept
    training = epochs * scored * (1 + 3 * kept)
    if minutes is not None:
        training = min(training or float("inf"), 60 * minutes / each)
    passes += training
    whole = each * (passes + _ANALYSIS + (_TIMING * (1 + kept) if timed else 0)) + _OTHERS
    device = device_of(task.model)
    room = allowed(device)
    if device is None or device.type == "cpu":
        weights = sum(p.numel() * p.element_size() for p in task.model.parameters())
        beyond = max((_REPAIRED + weights) * repair, _TIMED * timed)  # not at the same time
        room += resident() + beyond + _EXPORT * (getattr(task, "exports", None) is not None)
    what = "every step takes" if steps else "this takes"
    return f"{what} about {_duration(each * passes if steps else whole)}, and at most {room / 2**30:.1f} GiB of memory"


def training_outlook(task: Task | TextTask, teacher: nn.Module | None, settings: Recover) -> str:
    """About how long training takes: a step passes the model three times, and its teacher once."""
    count = len(task.training()) if isinstance(task, Task) else task.load[0]
    each = 3 * _seconds(task) + (_seconds(task, teacher) if teacher is not None else 0.0)
    epoch = f"an epoch of {count:.0f} samples takes about {_duration(count * each)}"
    weights = sum(p.numel() * p.element_size() for p in task.model.parameters())
    device = device_of(task.model)
    used = resident() if device is None or device.type == "cpu" else 0
    room = f"{(used + _TRAINED * weights) / 2**30:.1f} GiB of memory beside what a batch takes"
    limit = f"it ends after {_duration(60 * settings.minutes)}" if settings.minutes is not None else ""
    if settings.epochs is not None:
        whole = f"{settings.epochs} of them {_duration(settings.epochs * count * each)}"
        limit = f"{whole}, and {limit} at the latest" if limit else whole
    return f"{epoch}, {limit}; {room}"


def _seconds(task: Task | TextTask, other: nn.Module | None = None) -> float:
    """Of the forward pass of the model, or of another one, for one sample."""
    model = shared_copy(unwrap(task.model if other is None else other)).eval()
    example, seconds = task.example(), 0.0
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


def _worse(before: Mapping[str, float], after: Mapping[str, float], tested: Mapping[str, int]) -> bool:
    """Whether a model has become worse than chance explains."""
    if PERPLEXITY in before:
        return after[PERPLEXITY] > before[PERPLEXITY] * (1 + _FEW)
    return after["overall"] < interval(before["overall"], tested["overall"])[0]


def warn_of_harm(
    before: Mapping[str, float], after: Mapping[str, float], tested: Mapping[str, int], settings: Recover
) -> None:
    """Warn if training did more harm than chance explains: most often its steps were too large."""
    if _worse(before, after, tested):
        slower = f"a smaller --learning-rate than {settings.lr:g}" if settings.lr else "another --learning-rate"
        fix = slower if settings.is_limited else f"--clip 1, or {slower}"
        warnings.warn(SecateurWarning("training made it worse.", fix=fix), stacklevel=2)


def warn_of_steps(before: Mapping[str, float], after: Mapping[str, float], tested: Mapping[str, int]) -> None:
    """Warn if a run by the paper's Algorithm 1 has lost accuracy: whoever asks for steps may expect a repair."""
    if _worse(before, after, tested):
        what = "nothing was repaired: --step and --rescore ask for the paper's algorithm, which only removes."
        warnings.warn(SecateurWarning(what, fix="--repair best, or leave them out"), stacklevel=2)


def warn_of_teacher(
    name: str, teacher: Mapping[str, float], student: Mapping[str, float], tested: Mapping[str, int]
) -> None:
    """Warn if a teacher knows less than its student, as one with random weights does."""
    if teacher["overall"] < interval(student["overall"], tested["overall"])[0]:
        first, last = (f"{100 * side['overall']:.1f} %" for side in (teacher, student))
        shares = f"{first} of the test images, the smaller model on {last}"
        what = f"--teacher {name} is right on only {shares}: it would teach mistakes."
        warnings.warn(SecateurWarning(what, fix="--teacher-weights FILE, or 'default'"), stacklevel=2)


def known_within(count: int) -> str:
    """How sure the accuracies of a table are that so many test samples give."""
    wide = [100 * max(high - share, share - low) for share in (0.95, 0.5) for low, high in [interval(share, count)]]
    return (
        f"On {count} test images, 95 % intervals reach about {wide[0]:.0f} points from an accuracy of 95 %, and "
        f"{wide[1]:.0f} from one of 50 %."
    )


def next_steps(
    out: Path, task: Task | TextTask, source: Source, images: Images, texts: Texts, result: Result,
    files: Mapping[str, Path], uniform: bool,
) -> list[str]:  # fmt: skip
    """How to load the model in Python, to serve it, and to train it, in three lines that can be copied."""
    lines = after_training(out, task)
    if isinstance(task, TextTask):
        lines[0] = f"load it in Python: {how_to_open(files['model'], result, uniform)}"
    if "onnx" in files:
        lines[1] = f"serve it: onnxruntime.InferenceSession({str(files['onnx'])!r})"
    if isinstance(task, TextTask):
        data: list[Any] = ["--text", texts.text, *(["--labels"] if texts.labels else [])]
        data += ["--columns", texts.columns] if texts.columns is not None else []
        data += ["--test-text", texts.test_text] if texts.test_text is not None else []
        data += ["--tokens", texts.tokens] if texts.tokens != Texts.tokens else []
    else:
        data = ["--images", images.images, *(["--test", images.test] if images.test is not None else [])]
    teacher = ["--teacher", source.model]
    teacher += ["--teacher-weights", source.weights] if source.weights is not None else []
    train = ["secateur", "recover", out, *_original(task), *teacher, *data, "--out", f"{out}-recovered"]
    return [*lines, f"train it, if it lost too much: {_shell(train)}"]


def after_training(out: Path, task: Task | TextTask) -> list[str]:
    """How to load the model in Python, and to serve it."""
    origin = task.opened.origin.model
    own = f", original={origin!r}" if runs_code(origin) else ""
    load = f"secateur.models.open_model({str(out)!r}{own}).model"
    if isinstance(task, TextTask):
        place = out / "model"
        load = opened_by_transformers(place, task.opened.model) or f"secateur.load({str(place)!r})"
    write = _shell(["secateur", "export", out, *_original(task), "--out", out / "model.onnx"])
    return [f"load it in Python: {load}", f"serve it: {write}"]


def _original(task: Task | TextTask) -> list[str]:
    origin = task.opened.origin.model
    return ["--original", origin] if runs_code(origin) else []


def _shell(words: list[Any]) -> str:
    return shlex.join(str(word) for word in words)
