"""What every process of the league holds: the data in the memory of the device, the unpruned network, smaller ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from benchmarks.cifar import read
from benchmarks.league_models import DECAY, RATE, Job, chosen, folded, padded, shaped
from benchmarks.league_together import Student, Together
from benchmarks.resnet56 import resnet56


def keep(file: Path, net: nn.Module) -> None:
    """Write the weights of a network, unless another process was faster."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(f".{os.getpid()}")
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, half)
    half.unlink() if file.exists() else half.rename(file)


class Worker:
    """Runs jobs, one after another, with the data in the memory of the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        self.device, self.out = options.device, Path(options.out)
        self.train, self.test = read(Path(options.data), self.device)
        if options.samples:
            self.train, self.test = ((x[: options.samples], y[: options.samples]) for x, y in (self.train, self.test))
        self.weights, self.as_they_are = options.weights, options.norms_as_they_are
        self.net = resnet56(Path(self.weights)).to(self.device)
        self.teacher = folded(self.net)

    def group(self, jobs: Sequence[Job], backend: str = "", recorded: bool = True) -> Together:
        """The students of these jobs, ready to be trained together."""
        order = torch.channels_last if self.device == "cuda" else torch.preserve_format
        students = []
        for job in jobs:
            net = padded(self.prepared(job)).to(self.device, memory_format=order)
            students.append(Student(net, job.row.share, DECAY, faster=job.row.rate / RATE, fading=job.row.fading))
        teacher = self.teacher if any(job.row.teacher for job in jobs) else None
        return Together(students, teacher, recorded, backend, both=jobs[0].row.recipe.both)

    def prepared(self, job: Job) -> nn.Module:
        path = self.out / "models" / job.prepared
        if not path.exists():
            keep(path, chosen(self.net, self.train, job))
        return shaped(safetensors.torch.load_file(path)).to(self.device).eval()
