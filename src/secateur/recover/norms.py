"""What batch norms know of their inputs, brought up to date before training.

In evaluation mode a batch norm divides by the numbers that it learnt before units left. In training mode it divides by
those of the batch. After a removal and a repair the two differ, so that the first step would train another network than
the one that was repaired. Here the learnt numbers become those of the data, and scale and shift make up for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from secateur.nest import tensors_of_output
from secateur.ops.activation import Identity
from secateur.ops.norm import BatchNorm
from secateur.ops.table import Call, Site, lookup
from secateur.recover.samples import Samples
from secateur.running.devices import precise
from secateur.running.logits import logits_of
from secateur.running.modes import module_reads_training, reads_training
from secateur.running.processes import active, share
from secateur.running.sandbox import as_written, evaluating, seeded, training, unmoved

#: How many batches are looked at.
_BATCHES = 16
#: How much an output may differ afterwards, as a share of the largest one.
_CLOSE = 1e-3
_SALT = 7
_NAMES = ("weight", "bias", "running_mean", "running_var")


def settle(model: nn.Module, samples: Samples, seed: int, answer: Callable[[nn.Module, Any], Any]) -> bool:
    """Give batch norms the mean and variance of their inputs; in evaluation mode the model computes the same as before.

    `answer(model, inputs)` runs the model. Nothing is changed, and the result is False, if there is no batch norm that
    has learnt anything and may be trained, or if the model would not compute the same: a layer of the user's own may
    use these numbers in another way. Nor is it if the model does not run in evaluation mode, or does something else
    there than in training: the inputs of its norms would be others.
    """
    seen = [_Seen(norm) for norm in _learning(model)]
    if not seen:
        return False
    first: Any = None
    with seeded(seed, share()[0], salt=_SALT), torch.no_grad(), as_written():  # a compiled part would compile the watch
        with unmoved(model):
            for inputs, _ in samples.look(_BATCHES):
                with evaluating(model), _Watched(seen, _Seen.note):
                    found = _asked(answer, model, inputs)
                if found is None:
                    return False
                if first is None:
                    with unmoved(model):
                        first, seen = (inputs, found), _alike(model, seen, answer, inputs, found)
                if not seen:
                    return False
        if first is None:
            return False
        for norm in seen:
            norm.change()
        with unmoved(model), evaluating(model):
            found = _asked(answer, model, first[0])
        if found is not None and _close(found, first[1]):
            return True
        for norm in seen:
            norm.undo()
    return False


def _learning(model: nn.Module) -> list[_BatchNorm]:
    """Batch norms that have learnt something, and that go on learning in training mode."""
    owners = Counter(id(tensor) for module in model.modules() for tensor in _own(module))
    known = [module for module in model.modules() if isinstance(module, _BatchNorm) and _has_learnt(module)]
    # What one layer makes up for, another one with the same scale would do as well.
    known = [norm for norm in known if all(owners[id(tensor)] == 1 for tensor in _own(norm))]
    if not known:
        return []
    with training(model):  # which may freeze parameters as well
        return [norm for norm in known if norm.training and _has_learnt(norm)]


def _own(module: nn.Module) -> list[Tensor]:
    """The tensors that a module itself holds."""
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _has_learnt(norm: _BatchNorm) -> bool:
    """Whether a batch norm has learnt numbers, and trains a scale and a shift of its own.

    New ones have mean 0 and variance 1. A scale that a parametrization computes cannot be written to.
    """
    mean, var = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
    scale, shift = norm._parameters.get("weight"), norm._parameters.get("bias")
    if mean is None or var is None or scale is None or shift is None:
        return False
    return scale.requires_grad and shift.requires_grad and bool((mean != 0).any() or (var != 1).any())


class _Seen:
    """The inputs of a batch norm: how many, their mean, and the sum of their squared distances from it."""

    def __init__(self, norm: _BatchNorm) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.norm, self.mean, self.var = norm, norm.running_mean, norm.running_var
        self.before = [t.detach().clone() for t in self._numbers]
        self.count = self.calls = 0
        #: Every call takes these four numbers, and nothing else, in the usual way.
        self.usual = True
        self.wide = precise(self.mean.device)
        self.middle, self.squares = torch.zeros(2, len(self.mean), dtype=self.wide, device=self.mean.device)

    @property
    def _numbers(self) -> tuple[Tensor, ...]:
        return self.norm.weight, self.norm.bias, self.mean, self.var

    def note(self, call: Call) -> None:
        """Count the inputs of one call. The channels are dimension 1."""
        inputs = call["input"]
        self.calls += 1
        self.usual &= not call["training"] and call["eps"] == self.norm.eps
        self.usual &= all(call[name] is own for name, own in zip(_NAMES, self._numbers, strict=True))
        others, count = [0, *range(2, inputs.ndim)], inputs.numel() // len(self.mean)
        if not count:
            return
        # Around their own mean, since squares of large numbers have no digits left for a small variance.
        around = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        middle = around.mean(others, dtype=self.wide)
        around = around - middle.to(around.dtype).view(1, -1, *(1 for _ in others[1:]))
        squares = around.square().sum(others, dtype=self.wide)
        total, apart = self.count + count, middle - self.middle
        self.middle += apart * (count / total)
        self.squares += squares + apart.square() * (self.count * (count / total))
        self.count = total

    def change(self) -> None:
        """The learnt numbers become those of the inputs."""
        if not self.count or not self.usual or not bool(torch.isfinite(self.middle + self.squares).all()):
            return
        weight, bias, mean, var = (t.detach().to(self.wide) for t in self._numbers)
        middle, spread = self.middle.to(self.mean.dtype).to(self.wide), self.squares / self.count
        old, new = (var + self.norm.eps).sqrt(), (spread + self.norm.eps).sqrt()
        after = weight * new / old, bias + weight * (middle - mean) / old, middle, spread
        for own, value in zip(self._numbers, after, strict=True):
            own.copy_(value)

    def undo(self) -> None:
        """As it was."""
        for own, value in zip(self._numbers, self.before, strict=True):
            own.copy_(value)


class _Watched(TorchFunctionMode):
    """While the model runs, every call that divides by the numbers of these layers is noted.

    What a module is called on need not be what is normalised: a subclass may turn it round first.
    """

    def __init__(self, seen: list[_Seen], note: Callable[[_Seen, Call], None]) -> None:
        super().__init__()
        self._note = note
        # By any of the two: without `track_running_stats`, training has no mean.
        self._seen = {id(own): known for known in seen for own in (known.mean, known.norm.weight)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation, kwargs = lookup(func), kwargs or {}
        if isinstance(operation, BatchNorm):
            call = Call(operation, func, args, kwargs, Site("", "", 0))
            known = self._seen.get(id(call["weight"])) or self._seen.get(id(call["running_mean"]))
            if known is not None:
                self._note(known, call)
        return func(*args, **kwargs)


class _Undropped(TorchFunctionMode):
    """Dropout does nothing, wherever it is called."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation, kwargs = lookup(func), kwargs or {}
        if isinstance(operation, Identity) and operation.scales:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def _alike(
    model: nn.Module, seen: list[_Seen], answer: Callable[[nn.Module, Any], Any], inputs: Any, known: list[Tensor]
) -> list[_Seen]:
    """The norms that training uses as evaluation does; none if the model's code does something else in training."""
    if reads_training(model):
        if active():  # what it does in training may wait for another process
            return []
        with training(model), _Undropped():
            for module in model.modules():
                module.training &= module_reads_training(module) and not isinstance(module, _BatchNorm)
            found = _asked(answer, model, inputs)
        if found is None or not _close(found[:1], known[:1]):
            return []
    if active():  # as a norm over all processes does
        return seen
    calls = Counter[int]()
    with training(model), _Watched(seen, lambda norm, call: calls.update([id(norm)] if call["training"] else [])):
        found = _asked(answer, model, inputs)
    return [norm for norm in seen if found is not None and calls[id(norm)] == norm.calls > 0]


def _asked(answer: Callable[[nn.Module, Any], Any], model: nn.Module, inputs: Any) -> list[Tensor] | None:
    """Copies of the tensors that a model answers with, the one that counts first. None if it does not run.

    If that happens in training as well, it says why, and which batch size would fit into memory.
    """
    try:
        output = answer(model, inputs)
        return [tensor.detach().clone() for tensor in (logits_of(output, warn=False), *tensors_of_output(output))]
    except Exception:
        return None


def _close(found: list[Tensor], known: list[Tensor]) -> bool:
    """Whether numbers are nearly the same. Infinite ones, as of masks, must stay; NaN is never the same.

    Of whole numbers the shape counts, since rounding can change which of two classes is the larger one.
    """
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in known]:
        return False
    pairs = [pair for pair in zip(found, known, strict=True) if pair[1].is_floating_point() or pair[1].is_complex()]
    try:
        for one, other in pairs:
            if other.numel():
                most = float(torch.where(other.isfinite(), other, 0).abs().max())
                if not torch.allclose(one, other, rtol=0, atol=_CLOSE * most):
                    return False
    except torch.OutOfMemoryError:  # training names a batch size that fits
        return False
    return bool(pairs)
