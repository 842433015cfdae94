"""Several students, trained at once on the same batches: the teacher answers each batch once for all of them.

Batches, loss and schedule are those of `sc.recover` (a test compares them). On a GPU, a step of all students is one
CUDA graph, in which each student is a branch of its own, with its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from secateur.recover.loss import Objective
from secateur.recover.samples import Samples
from secateur.recover.schedule import CURVES
from secateur.running.targets import Reader

WARM_UP, MOMENTUM = 3, 0.9


class Student:
    """A network in training, with its momentum. A step computes gradients and moves the weights; nothing waits."""

    def __init__(
        self, net: nn.Module, teacher: float, decay: float, temperature: float = 4.0, compiled: bool = False
    ) -> None:
        self.net, self.decay = net.train(), decay
        self.parameters = list(net.parameters())
        self.objective = Objective(Reader(net), teacher, temperature)
        self.momenta = [torch.zeros_like(p) for p in self.parameters]
        self.device = self.parameters[0].device
        self.sums = torch.zeros(3, device=self.device)
        self.call: Any = torch.compile(net, dynamic=False) if compiled else net
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def moving(self) -> list[Tensor]:
        return [*self.parameters, *self.net.buffers(), *self.momenta]

    def step(self, x: Tensor, y: Tensor, answer: Tensor | None, rate: Tensor) -> None:
        with half_precision(self.device):
            answer = answer if self.objective.teacher else None
            loss, right = self.objective(x, y, self.call(x), answer, check=False)
        found = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            pairs = zip(found, self.parameters, strict=True)
            gradients = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in pairs]
            torch._foreach_add_(gradients, self.parameters, alpha=self.decay)
            torch._foreach_mul_(self.momenta, MOMENTUM)
            torch._foreach_add_(self.momenta, gradients)
            torch._foreach_sub_(self.parameters, torch._foreach_mul(self.momenta, rate))
            self.sums += torch.cat([loss.detach().float().reshape(1), right])


def half_precision(device: torch.device) -> Any:
    # Without autocast's cache, because a recorded step must contain its conversions.
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if device.type == "cuda" else nullcontext()


class Together:
    """Students that are trained on the same batches. `teacher`, in evaluation mode, may be None."""

    def __init__(self, students: Sequence[Student], teacher: nn.Module | None, recorded: bool = True) -> None:
        self.students, self.teacher, self.device = students, teacher, students[0].device
        self.rate = torch.zeros((), device=self.device)
        self._recorded = recorded and self.device.type == "cuda"
        self._graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}
        self._seen: dict[int, int] = {}

    def step(self, x: Tensor, y: Tensor, rate: float) -> None:
        self.rate.fill_(rate)
        size = len(x)
        if size in self._graphs:
            graph, images, labels = self._graphs[size]
            images.copy_(x)
            labels.copy_(y)
            graph.replay()
            return
        self._compute(x, y, in_turn=self._recorded)  # libraries choose their algorithms in the first steps
        self._seen[size] = self._seen.get(size, 0) + 1
        if self._recorded and self._seen[size] == WARM_UP:
            images, labels, graph = x.clone(), y.clone(), torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self._compute(images, labels)
                self._graphs[size] = graph, images, labels
            except RuntimeError as error:
                print(f"steps of {size} are not recorded, and slow: {error}", flush=True)

    def _compute(self, x: Tensor, y: Tensor, in_turn: bool = False) -> None:
        answer = None
        if self.teacher is not None and any(s.objective.teacher for s in self.students):
            with torch.no_grad(), half_precision(self.device):
                answer = self.teacher(x)
        streams = [student.stream for student in self.students if student.stream is not None]
        here = torch.cuda.current_stream() if streams else None
        for student in self.students:
            with self._aside(student, here):
                student.step(x, y, answer, self.rate)
            if in_turn:
                torch.cuda.synchronize()
        for stream in streams:
            here.wait_stream(stream)

    @contextmanager
    def _aside(self, student: Student, here: Any) -> Iterator[None]:
        if student.stream is None:
            yield
            return
        student.stream.wait_stream(here)
        with torch.cuda.stream(student.stream):
            yield

    def epoch(self, samples: Samples, number: int, epochs: int, lr: float) -> list[float]:
        """The mean loss of each student."""
        for student in self.students:
            student.sums.zero_()
        steps, length = 0, samples.length or 1
        for x, y in samples.epoch():
            self.step(x, y, lr * CURVES["cosine"]((number + steps / length) / epochs))
            steps += 1
        losses = [float(student.sums[0]) / steps for student in self.students]
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss became {losses} in epoch {number + 1}")
        return losses
