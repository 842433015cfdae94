"""An accelerator: on a GPU, batches of the same shape are the same kernels on other numbers, so these are recorded.

Python takes longer to launch a small kernel than the kernel takes. A recording (a CUDA graph) leaves Python out. It is
made only where that is safe: the model's own code does not run in a replay, so models with hooks are not recorded, and
changed weights or modules end a recording. The first replay must give the same numbers as the batch that was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.errors import SecateurError
from secateur.nest import describe, leaves, map_tensors, tensors_in
from secateur.relevance.accelerators import Attempt, Deviation
from secateur.relevance.forward import check_input
from secateur.relevance.ledger import Batch
from secateur.running.capture import as_if_recording, never_waiting, turn
from secateur.running.sandbox import isolated

if TYPE_CHECKING:
    from secateur.relevance.engine import RelevancePass, Start

# Batches of the same shape before a recording is made. It takes as long as a few of them.
_PATIENCE = 4


class Recorder:
    """Counts batches of the same shape, and records when it is worth it."""

    def __init__(self, allowed: bool = True) -> None:
        self.recording: Recording | None = None
        #: Why nothing is recorded; empty if it may be.
        self.refusal = "" if allowed and torch.cuda.is_available() else "there is no GPU, or recording is switched off"
        self._shape: Any = None
        self._seen = 0

    def refuse(self, reason: str) -> None:
        """No recording, now or later."""
        self.recording, self.refusal = None, reason

    def play(self, engine: RelevancePass, inputs: Any, start: Start) -> Batch | None:
        """A batch from the recording, None if there is none that fits."""
        if self.recording is not None and _shape_of(inputs) == self._shape:
            if self.recording.still_true():
                return self.recording.play(engine, inputs, start)
            self.recording, self._seen = None, 0
        return None

    def consider(self, engine: RelevancePass, inputs: Any, start: Start, batch: Batch) -> None:
        """Record, if batches like this one have come often enough."""
        if self.refusal or self.recording is not None:
            return
        shape = _shape_of(inputs)
        self._seen = self._seen + 1 if shape == self._shape else 1
        self._shape = shape
        if self._seen < _PATIENCE:
            return
        if shape is None or not _records(engine.model, inputs):
            self.refuse("recordings are for models on one GPU, without hooks and autocast, that read tensors alone")
            return
        try:
            recording = Recording(engine, inputs, batch)
            if recording.agrees(engine, inputs, start, batch):
                self.recording = recording
                return
            self.refuse("a replay did not give what the pass itself gave")
        except (RuntimeError, SecateurError, Deviation) as error:  # e.g. the forward waits for the device
            self.refuse(f"{type(error).__name__}: {error}")
        engine.weights.forget()
        torch.cuda.empty_cache()


class Recording:
    """The kernels of one relevance pass: forward until the output is known, and backward from the seed on."""

    def __init__(self, engine: RelevancePass, inputs: Any, batch: Batch) -> None:
        device = batch.output.device
        self._members = list(_members(engine.model))
        self._seed = torch.zeros_like(batch.output)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with turn, torch.cuda.device(device), torch.inference_mode(False), isolated(engine.model, [batch.output]):
            self._inputs = [tensor.detach().clone() for tensor in tensors_in(inputs)]
            mine = iter(self._inputs)
            nest, attempt = map_tensors(lambda _: next(mine), inputs), Attempt(expected=True)
            try:
                self._rehearse(engine, nest, attempt)
            except Deviation:  # the model makes other calls while it is recorded, so these are noted
                self._rehearse(engine, nest, Attempt(expected=False))
                attempt = Attempt(expected=True)
            propagation, entries = engine.begin(nest, attempt)
            stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            with _own_random_numbers(device):
                # Other threads, such as one that pins the next batch, may go on meanwhile.
                how: Any = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
                with torch.cuda.graph(self._forward, **how):
                    output = engine.forward.run(propagation, attempt, entries)
                with torch.cuda.graph(self._backward, **how):
                    self._heat, self._page = propagation.backward.run(output, self._seed)
        self._output = output.detach()

    def _rehearse(self, engine: RelevancePass, inputs: Any, attempt: Attempt) -> None:
        """Run as if this was the recording. An error where something waits for the device."""
        propagation, entries = engine.begin(inputs, attempt)
        with as_if_recording(), never_waiting():
            propagation.backward.run(engine.forward.run(propagation, attempt, entries), self._seed)

    def play(self, engine: RelevancePass, inputs: Any, start: Start) -> Batch:
        with torch.inference_mode(False), torch.no_grad():
            for mine, given in zip(self._inputs, tensors_in(inputs), strict=True):
                mine.copy_(given)
            self._forward.replay()
            value = self._output.clone()
            self._seed.copy_(start(value))
            self._backward.replay()
            for given in tensors_in(inputs):  # asking waits for the device, which has enough to do by now
                check_input(given)
            heat = [None if relevance is None else relevance.clone() for relevance in self._heat]
            return engine.finish(value, heat, self._page)

    def agrees(self, engine: RelevancePass, inputs: Any, start: Start, batch: Batch) -> bool:
        """Whether a replay gives what the batch gave."""
        again = self.play(engine, inputs, start)
        if again.layout != batch.layout or [f.name for f in again.flows] != [f.name for f in batch.flows]:
            return False
        pairs = [(again.output, batch.output), (again.row, batch.row), *zip(again.heat, batch.heat, strict=True)]
        return all(_close(mine, theirs) for mine, theirs in pairs)

    def still_true(self) -> bool:
        """Whether weights and modules are those that were recorded."""
        return all(
            members.get(name) is member and _state(member) == state for members, name, member, state in self._members
        )


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Recordings draw from a generator of their own, so that neither they nor replays touch the user's."""
    generator = torch.cuda.default_generators[device.index]
    users = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(users)


def _records(model: nn.Module, inputs: Any) -> bool:
    """Whether a model may be recorded: on one GPU, without hooks or autocast."""
    tensors = [*tensors_in(inputs), *model.parameters(), *model.buffers()]
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    devices = {tensor.device for tensor in tensors}
    return not hooked and not torch.is_autocast_enabled("cuda") and len(devices) == 1 and tensors[0].is_cuda


def _shape_of(inputs: Any) -> Any:
    """What two batches must have in common; None for what is not made of tensors alone."""
    tensors = list(leaves(inputs))
    alone = all(isinstance(leaf, Tensor) for leaf in tensors)
    return (describe(inputs), [tensor.device for tensor in tensors]) if alone else None


def _members(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Where the modules, parameters and buffers of a model are, and the state of each."""
    for module in model.modules():
        for members in (module._modules, module._parameters, module._buffers):
            for name, member in members.items():
                yield members, name, member, _state(member)


def _state(member: Any) -> Any:
    """What changes when somebody writes to a tensor, gives it other memory, or hooks into a module."""
    if isinstance(member, Tensor):
        return member._version, member.data_ptr()
    return None if member is None else (len(member._forward_hooks), len(member._forward_pre_hooks))


def _close(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    apart = (mine.double() - theirs.double()).norm()
    return bool(apart <= 1e-3 * theirs.double().norm())
