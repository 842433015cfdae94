"""Where a run took place, in words."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import nn

from secateur.running.devices import device_of
from secateur.version import __version__


def environment(model: nn.Module) -> dict[str, str]:
    """Versions, processor and the device that the model is on.

    >>> list(environment(nn.Linear(2, 2)))[:3]
    ['secateur', 'torch', 'numpy']
    """
    cores = available_cores()
    return {
        "secateur": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} on {platform.machine()}",
        "processor": f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'}",
        "threads": str(torch.get_num_threads()),
        "the model ran on": _device(device_of(model)),
    }


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """What the processor calls itself. Python does not know on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "an unnamed processor"


def _device(device: torch.device | None) -> str:
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the processor" if device is None or device.type == "cpu" else str(device)
