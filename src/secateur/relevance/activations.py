"""What is known about the activations of one forward pass, and which of them a call may overwrite.

Nothing here keeps a tensor alive, apart from replacements of tensors that are still in use.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.table import Call
from secateur.relevance.weights import LinearCall
from secateur.running.tensor_facts import TensorFacts


class Activations:
    """Facts about tensors. In-place calls run on copies, unless nobody else can see the old numbers."""

    def __init__(self) -> None:
        #: The tensor that replaces one that was overwritten.
        self.newer: TensorFacts[Tensor] = TensorFacts()
        #: Tensors that are ≥ 0 everywhere.
        self.nonneg: TensorFacts[bool] = TensorFacts()
        #: Tensors that act as a gate when they multiply, and whether a softmax made them.
        self.gate: TensorFacts[bool] = TensorFacts()
        #: Unchanged outputs of conv and linear layers, which may meet a batch norm.
        self.linear: TensorFacts[LinearCall] = TensorFacts()
        #: The logits behind the output of a softmax, and its dimension.
        self.logits: TensorFacts[tuple[Tensor, int]] = TensorFacts()
        #: The constant part of a sum.
        self.offset: TensorFacts[Tensor] = TensorFacts()
        self._of_numbers: tuple[TensorFacts[Any], ...] = (self.nonneg, self.gate, self.logits, self.offset)
        #: The first call that wrote in place through a view, which cannot be followed.
        self.doubtful = ""
        self._fresh: weakref.ref[Tensor] | None = None  # the output of the last call, if only the user has it
        self._writable: weakref.ref[Tensor] | None = None  # the same for the call before

    def next_call(self) -> None:
        self._fresh, self._writable = None, self._fresh

    def note_fresh(self, output: Tensor) -> None:
        """This call made `output`, and nothing but the user's code has it. The next call may overwrite it."""
        self._fresh = weakref.ref(output)

    def may_overwrite(self, call: Call, x: Tensor) -> bool:
        """Whether `x` is what the call overwrites, and its old numbers are needed by nobody."""
        return self._writable is not None and self._writable() is x and call.tensors()[0] is x

    def run(self, call: Call) -> Any:
        """The output of a call. An in-place call runs on a copy, which replaces what it would overwrite."""
        if not call.writes:
            return call.run()
        output = self.run_on_copy(call)
        self.replace(call, output)
        return output

    def run_on_copy(self, call: Call) -> Any:
        """The output of an in-place call, run on a copy of what it would overwrite."""
        target = call.tensors()[0]
        copy = target.clone()
        output = call.on(target)(copy)
        return copy if output is None else output  # `__setitem__` returns None

    def replace(self, call: Call, output: Tensor) -> None:
        """From now on, the tensor that an in-place call would overwrite means `output`."""
        target = call.tensors()[0]
        if output is target or self.newer.get(target) is output:
            return
        self.linear.forget(target)
        self.newer[target] = output
        if target._is_view():
            self.doubtful = self.doubtful or str(call.site)
            self._replace_whole(target, output)

    def _replace_whole(self, part: Tensor, output: Tensor) -> None:
        """The tensor of which `part` is a view has the new numbers as well. Its other views do not: there, the output
        of the model comes out wrong, and is refused."""
        base: Any = part._base
        if base.dtype != output.dtype or base.layout != torch.strided:
            return
        numbers = torch.empty_strided(base.shape, base.stride(), dtype=torch.int64, device=base.device)
        numbers.copy_(torch.arange(base.numel(), device=base.device).view(base.shape))
        offset = part.storage_offset() - base.storage_offset()
        written = torch.unravel_index(numbers.as_strided(part.shape, part.stride(), offset), base.shape)
        whole = base
        while (newer := self.newer.get(whole)) is not None:
            whole = newer
        with torch.enable_grad():  # what carries relevance still does where nothing was written
            self.newer[whole] = whole.index_put(written, output)

    def settle(self, call: Call, output: Any) -> None:
        """`replace`, unless it was done."""
        target = call.tensors()[0]
        if isinstance(output, Tensor) and target not in self.newer:
            self.replace(call, output)

    def overwritten(self, tensor: Tensor) -> None:
        """The tensor has other numbers now, so nothing is known about it."""
        for facts in (self.linear, *self._of_numbers):
            facts.forget(tensor)

    def copied(self, source: Tensor, output: Any) -> None:
        """What is known about `source` holds for `output`, which has the same numbers."""
        if isinstance(output, Tensor) and output is not source:
            for facts in self._of_numbers:
                fact = facts.get(source)
                if fact is not None:
                    facts[output] = fact

    def note_nonneg(self, output: Any) -> None:
        """The tensors in `output` are ≥ 0 everywhere, so that layers reading them need only their positive weights."""
        for tensor in tensors_in(output):
            self.nonneg[tensor] = True
