"""What a command tells of two models: their times, their answers, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.cli.messages import message_of
from secateur.cli.output import Printer
from secateur.errors import SecateurError
from secateur.files.onnx import Exports
from secateur.files.session import time_onnx
from secateur.latency.timing import Timing
from secateur.loop.prune import Result
from secateur.nest import tensors_in
from secateur.report.answers import Answers
from secateur.report.page import UNEXPLAINED
from secateur.running.accuracy import Accuracy
from secateur.running.batches import Data
from secateur.running.memory import release
from secateur.running.sandbox import Example
from secateur.runtimes import Runtime, Setup
from secateur.runtimes.clock import Clock
from secateur.structure.cost import size_of


def write_page(result: Result, path: Path, shown: tuple[Any, Tensor | None], **options: Any) -> Path:
    """The report with heat maps of some samples. The page of a model that cannot be explained says why."""
    try:
        return result.report(path, inputs=shown, **options)
    except UNEXPLAINED:
        return result.report(path, data=shown, **options)


def time_files(
    model: nn.Module,
    files: Mapping[str, Path],
    example: Example,
    batches: Sequence[int],
    printer: Printer,
    exports: Exports | None = None,
) -> list[Timing]:
    """The unpruned model and the files of the smaller one in turn in ONNX Runtime, if there are files for it."""
    found: list[Timing] = []
    exports = exports or Exports()
    if "onnx" not in files or any(tensor.device.type != "cpu" for tensor in tensors_in(example)):
        return found
    release()  # what PyTorch took to be timed is not there for others otherwise
    with printer.stage("timing both models in ONNX Runtime"):
        try:
            whole = exports.of(model, example)
            for name, runtime in (("onnx", "ONNX Runtime"), ("int8", "ONNX Runtime, int8")):
                if name in files:
                    timed = time_onnx(whole, files[name], example, batches)
                    found += [replace(timing, runtime=runtime) for timing in timed]
        except (SecateurError, RuntimeError) as error:
            printer.note(f"ONNX timings are left out: the unpruned model cannot be exported ({message_of(error)})")
    return found


def answered(
    measured: Mapping[int, Accuracy], measure: Callable[[nn.Module], Any], models: Sequence[nn.Module], data: Data
) -> Answers | None:
    """What two models say to the test data. `measured`, by size, is what `measure` found and finds."""
    for model in models:
        if size_of(model) not in measured:
            measure(model)
    old, new = (measured[size_of(model)] for model in models)
    return Answers.of(old, new, data)


def time_elsewhere(
    before: nn.Module, after: nn.Module, example: Tensor, plain: Sequence[Timing], runtime: Runtime, setup: Setup
) -> list[Timing]:
    """Two models in turn in another form of PyTorch. Channels last are left out where they do not help."""
    found = []
    for timing in plain:
        other = replace(setup, runtime=runtime, batch=timing.batch)
        first, second = Clock(other, example, before).in_turn([(before, None), (after, None)])
        if runtime != "channels-last" or second < timing.after:
            found.append(Timing(timing.batch, first, second, other.name))
    return found
