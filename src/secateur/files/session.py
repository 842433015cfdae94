"""ONNX files opened by ONNX Runtime: what they answer, how long they take, and as a module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.latency.timing import Timing, medians, repeated
from secateur.nest import tensors_in
from secateur.running.sandbox import Example


def session_of(file: Path | bytes, threads: int | None = None, profile: str = "") -> Any:
    """An ONNX file opened by ONNX Runtime on the processor. Default: as many threads as PyTorch uses.

    `profile` is a folder for what each node takes.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = threads or torch.get_num_threads()
    # Threads wait for more work in a loop, and would take the processor from a session that is timed in turn.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if profile:
        settings.enable_profiling, settings.profile_file_prefix = True, f"{profile}/profile"
    content = file if isinstance(file, bytes) else str(file)
    return onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])


def answers(session: Any, inputs: Any) -> list[Tensor]:
    """What ONNX Runtime computes."""
    tensors = [tensor.detach().cpu().numpy() for tensor in tensors_in(inputs)]
    feeds = {item.name: numbers for item, numbers in zip(session.get_inputs(), tensors, strict=True)}
    return [torch.from_numpy(item) for item in session.run(None, feeds)]


class Session(nn.Module):
    """An ONNX file as a module that takes one tensor, so that its accuracy is measured as any model's."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._session = session_of(file)
        self.batch = fixed_size(self._session)

    def __deepcopy__(self, memo: object) -> Session:
        return self  # nothing in it changes

    def forward(self, x: Tensor) -> Tensor:
        """The first output."""
        return answers(self._session, x)[0]


def time_onnx(before: Path, after: Path, example: Example, batches: Sequence[int] = (1, 32)) -> list[Timing]:
    """Time two ONNX files in turn on the processor, with as many threads as PyTorch uses.

    Files with a fixed batch size are timed for that one, if it is asked for.
    """
    sessions = [session_of(path) for path in (before, after)]
    fixed = {fixed_size(session) for session in sessions} - {None}
    found = []
    for batch in batches:
        if fixed <= {batch}:
            inputs = repeated(example, batch)
            first, second = medians([partial(answers, session, inputs) for session in sessions])
            found.append(Timing(batch, first, second, "ONNX Runtime"))
    return found


def fixed_batch(path: Path) -> int | None:
    """The only batch size that an ONNX file takes, or None if it takes any."""
    return fixed_size(session_of(path))


def fixed_size(session: Any) -> int | None:
    """The same of one that is open."""
    shape = session.get_inputs()[0].shape
    return shape[0] if shape and isinstance(shape[0], int) else None
