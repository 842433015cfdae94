"""What batch norms know of their inputs, brought up to date before training.

In evaluation mode a batch norm divides by the numbers that it learnt before units left. In training mode it divides by
those of the batch. After a removal and a repair the two differ, so that the first step would train another network than
the one that was repaired. Here the learnt numbers become those of the data, and scale and shift make up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from secateur.nest import tensors_of_output
from secateur.ops.norm import BatchNorm
from secateur.ops.table import Call, Site, lookup
from secateur.recover.samples import Samples
from secateur.running.devices import precise
from secateur.running.sandbox import evaluating, seeded, training

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
    use these numbers in another way.
    """
    seen = [_Seen(norm) for norm in _learning(model)]
    if not seen:
        return False
    first: Any = None
    with seeded(seed, 0, salt=_SALT), evaluating(model), torch.no_grad():
        try:
            with _Watched(seen):
                for inputs, _ in islice(samples.epoch(), _BATCHES):
                    found = answer(model, inputs)
                    first = first or (inputs, _tensors(found))
            if first is None:
                return False
            for norm in seen:
                norm.change()
            if _close(_tensors(answer(model, first[0])), first[1]):
                return True
        except torch.OutOfMemoryError:  # training names a batch size that fits
            pass
        for norm in seen:
            norm.undo()
    return False


def _learning(model: nn.Module) -> list[_BatchNorm]:
    """Batch norms that have learnt something, and that go on learning in training mode."""
    known = [module for module in model.modules() if isinstance(module, _BatchNorm) and _has_learnt(module)]
    if not known:
        return []
    with training(model):  # which may freeze parameters as well
        return [norm for norm in known if norm.training and _has_learnt(norm)]


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
        self.count = 0
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

    def __init__(self, seen: list[_Seen]) -> None:
        super().__init__()
        self._seen = {id(known.mean): known for known in seen}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation, kwargs = lookup(func), kwargs or {}
        if isinstance(operation, BatchNorm):
            call = Call(operation, func, args, kwargs, Site("", "", 0))
            if id(call["running_mean"]) in self._seen:
                self._seen[id(call["running_mean"])].note(call)
        return func(*args, **kwargs)


def _tensors(output: Any) -> list[Tensor]:
    """Copies of all tensors that a model answers with, also in objects: the next call may write to the same memory."""
    return [tensor.detach().clone() for tensor in tensors_of_output(output)]


def _close(found: list[Tensor], known: list[Tensor]) -> bool:
    """Whether numbers are nearly the same. Infinite ones, as of masks, must stay; NaN is never the same.

    Of whole numbers the shape counts, since rounding can change which of two classes is the larger one.
    """
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in known]:
        return False
    pairs = [pair for pair in zip(found, known, strict=True) if pair[1].is_floating_point() or pair[1].is_complex()]
    for one, other in pairs:
        if other.numel():
            most = float(torch.where(other.isfinite(), other, 0).abs().max())
            if not torch.allclose(one, other, rtol=0, atol=_CLOSE * most):
                return False
    return bool(pairs)
