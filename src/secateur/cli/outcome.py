"""What a command tells of two models: their times, their answers, what became of int8, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.cli.messages import message_of
from secateur.cli.output import Printer, percent
from secateur.errors import SecateurError
from secateur.files.int8 import Int8
from secateur.files.onnx import Exports
from secateur.files.session import time_onnx
from secateur.latency.timing import Timing
from secateur.loop.prune import Result
from secateur.nest import tensors_in
from secateur.report.answers import Answers
from secateur.report.page import UNEXPLAINED
from secateur.running.accuracy import Accuracy
from secateur.running.batches import Data
from secateur.running.memory import release, trim
from secateur.running.sandbox import Example
from secateur.runtimes import Runtime, Setup
from secateur.runtimes.clock import Clock
from secateur.structure.cost import size_of

_LISTED = 3  # layers that a table names


@dataclass(frozen=True)
class Quantised:
    """What became of `--int8`: how the file was made, and how accurate it is if that was measured; or why not.

    >>> Quantised(refused="the outputs change too much.").rows({}, {})
    [('int8', '', 'refused', 'not written')]
    >>> Quantised(Int8(5, ("stem", "fc"), 0.03)).rows({}, {})
    [('layers in int8', '', '3 of 5', 'in float32: stem, fc')]
    """

    how: Int8 | None = None
    accuracy: Mapping[str, float] | None = None
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.how is None:
            return {"refused": self.refused}
        return {"layers": self.how.layers, "in_float32": list(self.how.left_out), "error": self.how.error}

    def about(self) -> dict[str, str]:
        """For the report."""
        if self.how is None:
            return {"int8": f"refused: {self.refused}"}
        kept = f"; in float32: {', '.join(self.how.left_out)}" if self.how.left_out else ""
        found = {"layers in int8": f"{self._share}{kept}"}
        if self.accuracy is not None:
            found["accuracy in int8"] = f"{100 * self.accuracy['overall']:.1f} %"
        return found

    def rows(self, before: Mapping[str, float], counts: Mapping[str, int]) -> list[Sequence[str]]:
        """For the table. `before` are the accuracies of the unpruned model, `counts` on how many samples they are."""
        if self.how is None:
            return [("int8", "", "refused", "not written")]
        kept, more = self.how.left_out[:_LISTED], len(self.how.left_out) - _LISTED
        names = f"in float32: {', '.join(kept)}{f' and {more} more' if more > 0 else ''}" if kept else ""
        rows: list[Sequence[str]] = [("layers in int8", "", self._share, names)]
        if self.accuracy is not None:
            was, now, count = before["overall"], self.accuracy["overall"], counts.get("overall", 0)
            points = f"{100 * (now - was):+.1f} points"
            rows.append(("accuracy, int8", percent(was, count), percent(now, count), points))
        return rows

    @property
    def _share(self) -> str:
        assert self.how is not None
        return f"{self.how.layers - len(self.how.left_out)} of {self.how.layers}"


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
        trim()
    return found
