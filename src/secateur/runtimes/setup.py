"""Where a model runs: runtime, batch, threads, device; and the machine, by which tables are kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

from secateur.arguments import check_choice, check_count
from secateur.errors import Argument, SecateurError
from secateur.latency.timing import RUNTIMES, batch_of, repeated
from secateur.nest import map_tensors, tensors_in
from secateur.running.sandbox import Example

#: What runs a model. "channels-last" is PyTorch with the channels of images last in memory.
Runtime = Literal["torch", "channels-last", "compile", "onnxruntime"]


@dataclass(frozen=True)
class Setup:
    """Where a model runs. `str(setup)` says so in words."""

    runtime: Runtime = "torch"
    batch: int = 1
    threads: int = 1
    device: str = "cpu"

    @classmethod
    def of(
        cls, example: Example, runtime: Runtime, batch: int | None, threads: int | None, device: str | None = None
    ) -> Setup:
        """What the user gives, with the example's batch and device and torch's threads for what is left open."""
        check_choice("runtime", runtime, get_args(Runtime))
        for name, value in (("batch", batch), ("threads", threads)):
            if value is not None:
                check_count(name, value)
        try:
            where = next((t.device for t in tensors_in(example)), torch.device("cpu"))
            where = where if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise SecateurError("{it} is no device.", fix="'cpu' or 'cuda'", it=Argument("device", device)) from None
        if runtime == "onnxruntime":
            for package in ("onnx", "onnxscript", "onnxruntime"):
                if find_spec(package) is None:
                    raise SecateurError(
                        f"{{runtime}} needs the package {package}.",
                        fix="pip install 'secateur[export]'",
                        runtime=Argument("runtime", runtime),
                    )
            if where.type != "cpu":
                raise SecateurError(
                    "{runtime} is measured on the processor.",
                    fix="device='cpu', or runtime='torch'",
                    runtime=Argument("runtime", runtime),
                )
        if where.type == "cuda" and not torch.cuda.is_available():
            raise SecateurError("{device} is not there.", fix="device='cpu'", device=Argument("device", device))
        if where.type == "cuda" and where.index not in (None, torch.cuda.current_device()):
            raise SecateurError(
                "{device} is not the current GPU, on which times are measured.",
                fix=f"torch.cuda.set_device({where.index})",
                device=Argument("device", str(where)),
            )
        return cls(runtime, batch or batch_of(example), threads or torch.get_num_threads(), where.type)

    @property
    def name(self) -> str:
        """The runtime in words."""
        return RUNTIMES[self.runtime]

    def __str__(self) -> str:
        where = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else self.device
        return f"{self.name}, batch {self.batch}, {where}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def inputs(self, example: Example) -> Example:
        """The example's first sample as a batch of the wanted size, on the device."""
        if batch_of(example) != self.batch:
            example = repeated(example, self.batch)
        return map_tensors(lambda t: t.to(self.device), example)

    @contextmanager
    def threaded(self) -> Iterator[None]:
        """PyTorch with as many threads; afterwards with as many as before."""
        before = torch.get_num_threads()
        try:
            if before != self.threads:
                torch.set_num_threads(self.threads)
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def key(self) -> dict[str, Any]:
        """What a table depends on beside the model: this, the machine, versions, and how exactly torch multiplies."""
        packages = ("torch", "onnxruntime") if self.runtime == "onnxruntime" else ("torch",)
        versions, precision = {p: _version(p) for p in packages}, torch.get_float32_matmul_precision()
        return {**self.to_dict(), "machine": _machine(self.device), "versions": versions, "precision": precision}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine(device: str) -> list[str]:
    """Name and processor of this machine, how many cores this process may use, and the GPU if it counts."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:  # not Linux
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [platform.node(), model, str(cores), torch.cuda.get_device_name() if device == "cuda" else ""]
