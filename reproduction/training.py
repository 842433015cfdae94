"""Fast training: images are stored and cropped on the device, and on CUDA a step is replayed as one graph.

With the paper's batches of 20, a GPU would wait for the host at every layer. All steps between two removals have the
same shapes, so one step is recorded (`torch.cuda.CUDAGraph`) and replayed. On a CPU the same steps run normally.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.alignment import aligned, take_back
from reproduction.published import scaled
from secateur.data.views import View
from secateur.errors import DataError
from secateur.running import accuracy as measured

# Steps before the recording. In these, libraries choose their algorithms.
_WARM_UP = 3
# Images that are cropped, or passed through frozen layers, at a time.
_CHUNK = 512


@dataclass(frozen=True)
class Images:
    """Images as bytes and their classes, on the device that computes. Other sizes are scaled when they are needed."""

    pixels: Tensor
    labels: Tensor
    view: View

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, count: int, seed: int) -> Images:
        """So many of them, drawn at random, in order; all if there are no more."""
        if count >= len(self):
            return self
        drawn = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count].sort().values
        index = drawn.to(self.labels.device)
        return Images(self.pixels[index], self.labels[index], self.view)

    def batches(self, size: int) -> Inputs:
        """Inputs in order, as networks take them, without augmentation."""
        return Inputs(self, size)


@dataclass(frozen=True)
class Inputs:
    """Batches of (inputs, labels) that can be iterated more than once."""

    images: Images
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images = self.images
        for pixels, labels in zip(*(torch.split(t, self.size) for t in (images.pixels, images.labels)), strict=True):
            sized = scaled(pixels, images.view.side(training=False))
            yield arranged(images.view.evaluation(sized)), labels


@dataclass(frozen=True)
class Schedule:
    """How long and how to train. The defaults are the paper's, for fine-tuning after a removal."""

    epochs: int = 10
    batch_size: int = 20
    lr: float = 1e-3
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise DataError(f"{self.epochs} epochs with batches of {self.batch_size}: both must be at least 1.")


@dataclass
class Trainer:
    """Trains a whole network in place. `prune` takes it as `finetune`. `loss` is the loss of the last epoch.

    The order of images and the crops come from torch's random numbers on the CPU, dropout from those of the device.
    Every epoch has a new order. The last batch of an epoch is skipped if it is incomplete.
    """

    images: Images
    schedule: Schedule
    loss: float = float("nan")

    def __call__(self, model: nn.Module, step: int = 0) -> None:
        """Train. Afterwards the training flag of every module is as before."""
        arrange(model)
        flags = [(module, module.training) for module in model.modules()]
        on_gpu = any(p.is_cuda for p in model.parameters())
        trained = aligned(model.train()) if on_gpu else model.train()
        try:
            with Steps(trained, self.schedule) as steps:
                for _ in range(self.schedule.epochs):
                    steps.begin_epoch()
                    for inputs, labels in self._chunks():
                        steps.take(arranged(inputs), labels)
                self.loss = steps.loss()
            if trained is not model:
                take_back(trained, model)
        finally:
            for module, flag in flags:
                module.training = flag

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from crops(self.images, self.schedule.batch_size)


@dataclass
class HeadTrainer:
    """Trains only `head`. Its inputs are the outputs of the frozen `body`, which runs in larger batches."""

    images: Images
    schedule: Schedule
    loss: float = float("nan")

    def __call__(self, body: nn.Module, head: nn.Module) -> None:
        """Train the head in place. The body runs in evaluation mode and is not changed."""
        arrange(body)
        body.eval()
        head.train()
        with Steps(head, self.schedule) as steps:
            for _ in range(self.schedule.epochs):
                steps.begin_epoch()
                for inputs, labels in crops(self.images, self.schedule.batch_size):
                    with torch.no_grad(), half(inputs.device):
                        found = torch.cat([body(part) for part in torch.split(arranged(inputs), 256)])
                    steps.take(found.float(), labels)
            self.loss = steps.loss()
        head.eval()


class Replay(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run the step with the current content of the recorded tensors."""


class Steps:
    """Steps of SGD on batches of one size."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise DataError("every parameter is frozen (requires_grad=False): there is nothing to train.")
        self.model = model
        self.size = schedule.batch_size
        self.device = parameters[0].device
        # Fused: with batches of 20, the classifier of VGG costs more in the optimizer than anywhere else.
        self.optimizer = torch.optim.SGD(
            parameters, lr=schedule.lr, momentum=schedule.momentum, fused=self.device.type == "cuda" or None
        )
        self.sum = torch.zeros((), device=self.device)
        self.count = 0
        self.done = 0
        self.records = self.device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.records else None  # type: ignore[no-untyped-call]
        self.graph: Replay | None = None
        self.inputs: Tensor | None = None
        self.labels: Tensor | None = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        # The gradients are in the memory of the recording.
        self.graph = None
        self.optimizer.zero_grad(set_to_none=True)

    def begin_epoch(self) -> None:
        """Set the loss to 0."""
        self.sum.zero_()
        self.count = 0

    def loss(self) -> float:
        """The mean cross-entropy over the batches of this epoch, each computed before its step."""
        return float(self.sum) / max(self.count, 1)

    def take(self, inputs: Tensor, labels: Tensor) -> None:
        """One step per batch."""
        size = min(self.size, len(labels))
        for begin in range(0, len(labels) - size + 1, size):
            self._step(inputs[begin : begin + size], labels[begin : begin + size])

    def _step(self, inputs: Tensor, labels: Tensor) -> None:
        self.count += 1
        self.done += 1
        if not self.records:
            self._compute(inputs, labels)
            return
        if self.inputs is None or self.inputs.shape != inputs.shape:
            self.inputs, self.labels, self.graph = torch.empty_like(inputs), torch.empty_like(labels), None
            self.done = 1
        assert self.labels is not None
        self.inputs.copy_(inputs)
        self.labels.copy_(labels)
        if self.graph is not None:
            self.graph.replay()
        elif self.done <= _WARM_UP:
            with self._aside():
                self._compute(self.inputs, self.labels)
        else:
            self.graph = self._recorded()
            self.graph.replay()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context on a separate stream, which CUDA requires of the steps before a recording."""
        assert self.stream is not None
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            yield
        here.wait_stream(self.stream)

    def _recorded(self) -> Replay:
        """One step as a graph. Recording does not run it."""
        assert self.inputs is not None
        assert self.labels is not None
        self.optimizer.zero_grad(set_to_none=True)  # gradients are then allocated in the graph's memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute(self.inputs, self.labels)
        return graph

    def _compute(self, inputs: Tensor, labels: Tensor) -> None:
        with torch.enable_grad():
            self.optimizer.zero_grad(set_to_none=True)
            with half(self.device):
                output = self.model(inputs)
            loss = F.cross_entropy(output.float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.sum += loss.detach()


def crops(images: Images, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch: a random crop of every image, mirrored at random, in random order, in chunks of whole batches."""
    count = len(images)
    batch_size = min(batch_size, count)
    order = torch.randperm(count)[: count - count % batch_size].to(images.labels.device)
    for chunk in torch.split(order, max(_CHUNK // batch_size, 1) * batch_size):
        sized = scaled(images.pixels[chunk], images.view.side(training=True))
        yield images.view.training(sized), images.labels[chunk]


def accuracy(model: nn.Module, images: Images, batch_size: int = 250) -> float:
    """The share of images whose class has the largest output. On CUDA in half precision."""
    with half(images.labels.device):
        return measured.accuracy(model, images.batches(batch_size)).overall


def half(device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision on CUDA. Without autocast's cache, because a recorded step must contain its conversions."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def arranged(inputs: Tensor) -> Tensor:
    """Images in the memory format that is fastest on the device."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.is_cuda and inputs.ndim == 4 else inputs


def arrange(model: nn.Module) -> None:
    """Put a network's weights into the same memory format, in place."""
    if any(p.is_cuda for p in model.parameters()):
        model.to(memory_format=torch.channels_last)
