"""Training steps on a GPU as one recorded graph, so that it need not wait for the host at every layer.

A replay runs no Python. So before the recording a step is rehearsed and taken back: nothing is recorded if the step
waits for the GPU, draws random numbers on the processor, or changes a number that a module or a loss keeps in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SecateurError, SecateurWarning
from secateur.running.capture import Host, as_if_recording, never_waiting
from secateur.running.sandbox import drawing_again, unmoved

# Steps before a recording. In these, libraries choose their algorithms.
_WARM_UP = 3

#: `f(inputs, targets)` computes the gradients of a batch, and returns a few numbers about it.
Compute = Callable[[Any, Any], Tensor]


class Recording:
    """Computes gradients. Batches of tensors, all of the shape of the first one, are replayed as a graph."""

    def __init__(
        self, compute: Compute, parameters: Sequence[nn.Parameter], models: Sequence[object], wanted: bool
    ) -> None:
        self._compute, self._parameters, self._models, self._wanted = compute, parameters, models, wanted
        self._stream = torch.cuda.Stream() if wanted else None  # type: ignore[no-untyped-call]
        self._graph: Any = None
        self._held: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._result: Tensor | None = None
        self._seen = 0

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """The gradients of one batch. Returns its numbers."""
        if not self._wanted or not isinstance(inputs, Tensor) or not isinstance(targets, Tensor | None):
            return self._compute(inputs, targets)
        given = [inputs] if targets is None else [inputs, targets]
        if not self._held:
            self._held = [torch.empty_like(tensor) for tensor in given]
        if [_form(t) for t in given] != [_form(t) for t in self._held]:
            return self._compute(inputs, targets)  # such as the last batch of an epoch
        self._seen += 1
        for kept, tensor in zip(self._held, given, strict=True):
            kept.copy_(tensor)
        if self._graph is None:
            with self._aside():
                found = self._compute(*self._pair())
            if self._seen > _WARM_UP:
                self._record()
            return found
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        assert self._result is not None
        return self._result.clone()

    def close(self) -> None:
        """Give the memory of the graph back."""
        self._graph, self._gradients, self._result = None, [], None

    def _pair(self) -> tuple[Tensor, Tensor | None]:
        return self._held[0], self._held[1] if len(self._held) > 1 else None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context on a separate stream, which CUDA requires of the steps before a recording."""
        here = torch.cuda.current_stream()
        assert self._stream is not None
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)

    def _record(self) -> None:
        """Record one step, without running it. A model that asks the device for numbers cannot be recorded."""
        gradients = [parameter.grad for parameter in self._parameters]
        graph = torch.cuda.CUDAGraph()
        try:
            self._rehearse()
            for parameter in self._parameters:
                parameter.grad = None  # so that gradients are allocated in the memory of the graph
            with torch.cuda.graph(graph):
                self._result = self._compute(*self._pair())
            self._graph, self._gradients = graph, [parameter.grad for parameter in self._parameters]
        except (RuntimeError, SecateurError) as error:
            self._wanted, self._result = False, None
            what = "a training step cannot be recorded as a CUDA graph, so training is slower: {error}"
            warnings.warn(SecateurWarning(what, error=str(error).partition("\n")[0]), stacklevel=2)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _rehearse(self) -> None:
        """Take a step as if it was recorded, and take it back. An error where a replay would do something else."""
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(unmoved(model))
            for entered in (drawing_again(), self._aside(), as_if_recording(), never_waiting()):
                stack.enter_context(entered)
            before = Host(self._models)
            self._compute(*self._pair())
            change = before.change()
        if change:
            raise SecateurError(change)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
