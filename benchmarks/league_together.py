"""Several students, trained at once on the same batches: the teacher answers each batch once for all of them.

Batches, loss and schedule are those of `sc.recover` (a test compares them). On a GPU, a step of each student, with its
optimizer, is a CUDA graph of its own, and they run side by side. What fails there is done the slower way.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.league_steps import MOMENTUM, PLAIN, Flat, Functions, Layer, Teacher, compiled, prepared
from secateur.recover.norms import settle
from secateur.recover.samples import Samples
from secateur.recover.schedule import CURVES

WARM_UP = 3


class Student:
    """A ResNet in training, with its momentum. A step computes gradients and moves the weights; nothing waits.

    Weights lie in one tensor, so that the optimizer and the conversion to half precision are a few operations.
    `faster` multiplies the learning rate of the group. If `fading`, the teacher's share goes down as the rate does.
    """

    def __init__(
        self, net: nn.Module, teacher: float, decay: float, half: bool | None = None, faster: float = 1.0,
        fading: bool = False,
    ) -> None:  # fmt: skip
        self.net, self.decay, self.faster, self.fading = net.train(), decay, faster, fading
        self.parameters = list(net.parameters())
        self.device = self.parameters[0].device
        self.half = self.device.type == "cuda" if half is None else half
        self.teacher, self.share = teacher, torch.tensor(teacher, device=self.device)
        self.sums = torch.zeros(3, device=self.device)
        self._weights = Flat([p.detach() for p in self.parameters])
        self._gradients, self._momenta = (Flat(self._weights.parts, filled=False) for _ in range(2))
        for parameter, part in zip(self.parameters, self._weights.parts, strict=True):
            parameter.data = part
        self._halves = Flat(self._weights.parts, torch.bfloat16) if self.half else None
        self._read()
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _read(self) -> None:
        """What the functions of a step are given. Batch norms stay in full precision."""
        net: Any = self.net
        full = {id(p) for m in net.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
        self._leaves = [
            p if id(p) in full or self._halves is None else self._halves.parts[i].detach().requires_grad_()
            for i, p in enumerate(self.parameters)
        ]
        leaf = {id(p): used for p, used in zip(self.parameters, self._leaves, strict=True)}

        def layer(owner: Any, number: int) -> Layer:
            conv, bn = getattr(owner, f"conv{number}"), getattr(owner, f"bn{number}")
            return leaf[id(conv.weight)], leaf[id(bn.weight)], leaf[id(bn.bias)], bn.running_mean, bn.running_var

        self._stem = layer(net, 1)
        blocks = [module for module in net.modules() if hasattr(module, "more")]
        self._blocks = [(layer(b, 1), layer(b, 2), b.stride, b.more) for b in blocks]
        self._head = leaf[id(net.linear.weight)], leaf[id(net.linear.bias)]
        self._counters = [m.num_batches_tracked for m in net.modules() if isinstance(m, nn.BatchNorm2d)]

    @property
    def inputs(self) -> int:
        """The channels that the first convolution reads."""
        return self._stem[0].shape[1]

    @property
    def moving(self) -> list[Tensor]:
        return [*self.parameters, *self.net.buffers(), *self._momenta.parts]

    def step(self, x: Tensor, y: Tensor, answer: Tensor | None, rate: Tensor, functions: Functions = PLAIN) -> None:
        if self._halves is not None:
            self._halves.all.copy_(self._weights.all)
        out = functions.stem(x, self._stem)
        for first, second, stride, more in self._blocks:
            out = functions.block(out, first, second, stride, more)
        loss, numbers = functions.head(out, *self._head, y, answer if self.teacher else None, self.share)
        found = torch.autograd.grad(loss, self._leaves)
        with torch.no_grad():
            self._gradients.take(found)
            weights, gradients, momenta = self._weights.all, self._gradients.all, self._momenta.all
            gradients.add_(weights, alpha=self.decay)
            momenta.mul_(MOMENTUM).add_(gradients)
            weights.sub_(momenta * (rate * self.faster))
            self.sums += numbers

    def count(self, steps: int) -> None:
        """Tell the batch norms how many batches they have seen."""
        for counter in self._counters:
            counter += steps


class Together:
    """Students that are trained on the same batches. `teacher`, in evaluation mode, may be None. `both`: it answers
    mirrored images too, and the mean counts.

    If the compiler or the recording fails, a line says so, and steps are computed without it. Only batches of the size
    of the first one are compiled.
    """

    def __init__(
        self, students: Sequence[Student], teacher: nn.Module | None, recorded: bool = True, backend: str = "",
        both: bool = False,
    ) -> None:  # fmt: skip
        self.students, self.device, self.half, self.both = students, students[0].device, students[0].half, both
        self.teacher = None if teacher is None else Teacher(teacher, self.half)
        self.rate = torch.zeros((), device=self.device)
        self.functions = compiled(backend) if backend else PLAIN
        self._recorded = recorded and self.device.type == "cuda"
        self._recordings: dict[int, Recording] = {}
        self._seen: dict[int, int] = {}
        self._usual = 0

    @property
    def way(self) -> str:
        how = "compiled" if self.functions is not PLAIN else "plain"
        return f"{how}, {'recorded' if self._recordings else 'not recorded'}"

    def step(self, x: Tensor, y: Tensor, rate: float, left: float = 1.0) -> None:
        """One step of all students. `left` is what is left of the highest rate."""
        self.rate.fill_(rate)
        for student in self.students:
            if student.fading:
                student.share.fill_(student.teacher * left)
        size = len(x)
        self._usual = self._usual or size
        if size in self._recordings:
            self._recordings[size].replay(x, y)
            return
        try:
            self._compute(x, y, in_turn=self._recorded)  # libraries choose their algorithms in the first steps
        except Exception as error:
            if self.functions is PLAIN or size != self._usual:
                raise
            self._plainly("steps cannot be compiled", error)
            self._compute(x, y, in_turn=self._recorded)
        self._seen[size] = self._seen.get(size, 0) + 1
        if self._recorded and self._seen[size] == WARM_UP:
            self._record(x, y)

    def _record(self, x: Tensor, y: Tensor) -> None:
        try:
            with nothing_collected():
                self._recordings[len(x)] = Recording(self, x, y)
        except Exception as error:
            torch.cuda.synchronize()  # which fails if nothing can go on here
            if self.functions is not PLAIN and len(x) == self._usual:
                self._plainly("compiled steps cannot be recorded", error)
            else:
                print(f"steps of {len(x)} are not recorded, and slow: {_short(error)}", flush=True)

    def _plainly(self, what: str, error: Exception) -> None:
        """Go on without the compiler."""
        print(f"{what}; on without the compiler: {_short(error)}", flush=True)
        self.functions, self._seen = PLAIN, {}

    def shown(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """The images as the students read them, and what the teacher says."""
        x = prepared(images, self.half, max(student.inputs for student in self.students))
        if self.teacher is None or not any(student.teacher for student in self.students):
            return x, None
        with torch.no_grad():
            return x, self.teacher(images, x, self.used(images), self.both)

    def used(self, images: Tensor) -> Functions:
        """What computes a batch of this size."""
        return self.functions if len(images) == self._usual else PLAIN

    def _compute(self, images: Tensor, y: Tensor, in_turn: bool = False) -> None:
        x, answer = self.shown(images)
        for student in beside(self.students):
            student.step(x, y, answer, self.rate, self.used(images))
            if in_turn:
                torch.cuda.synchronize()

    def epoch(
        self, samples: Samples, number: int, epochs: int, lr: float,
        curve: Callable[[float], float] = CURVES["cosine"],
    ) -> list[float]:  # fmt: skip
        """The mean loss of each student. One that became NaN or infinite does not stop the others."""
        for student in self.students:
            student.sums.zero_()
        steps, length = 0, samples.length or 1
        for x, y in samples.epoch():
            left = curve((number + steps / length) / epochs)
            self.step(x, y, lr * left, left)
            steps += 1
        losses = [float(student.sums[0]) / steps for student in self.students]
        for student in self.students:
            student.count(steps)
        if not any(map(math.isfinite, losses)):
            raise RuntimeError(f"every loss is NaN or infinite in epoch {number + 1}: {losses}")
        return losses


def begin(students: Sequence[Student], samples: Samples, seed: int) -> None:
    """What `recover` does before its first epoch: batch norms learn what they divide by, which changes no answer."""
    for student in students:
        channels = student.inputs
        settle(
            student.net, samples, seed, lambda net, images, channels=channels: net(prepared(images, False, channels))
        )


def beside(students: Sequence[Student]) -> Iterator[Student]:
    """The students, each in a stream of its own, so that the GPU computes them at the same time."""
    if students[0].device.type != "cuda":
        yield from students
        return
    here = torch.cuda.current_stream()
    for student in students:
        student.stream.wait_stream(here)
        with torch.cuda.stream(student.stream):
            yield student
    for student in students:
        here.wait_stream(student.stream)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect what is not used any more, and then nothing: graphs that are freed while one is recorded spoil it."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Recording:
    """One step as CUDA graphs: one of the teacher, and one of each student. Those of students run side by side.

    Each student is recorded in its own stream: libraries keep working memory by stream, and two that run at the same
    time must not share it.
    """

    def __init__(self, group: Together, x: Tensor, y: Tensor) -> None:
        # Not the group, which knows its recordings: what is gone at once needs no collector.
        self.students, self.images, self.labels = group.students, x.clone(), y.clone()
        self.first, self.rest = torch.cuda.CUDAGraph(), list[Any]()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.first):
            self.shown = group.shown(self.images)
        for student in group.students:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=student.stream):
                student.step(self.shown[0], self.labels, self.shown[1], group.rate, group.used(x))
            self.rest.append(graph)
        torch.cuda.synchronize()

    def replay(self, x: Tensor, y: Tensor) -> None:
        self.images.copy_(x)
        self.labels.copy_(y)
        self.first.replay()
        for _, graph in zip(beside(self.students), self.rest, strict=True):
            graph.replay()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
