"""Trials of blocks: each branch is taken out of a copy without numbers, to see whether the rest runs and adds zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.nest import map_leaves, tensors_in, tensors_of_output
from secateur.ops.table import Call, Site
from secateur.plans.plan import plan_for
from secateur.running.observer import Rehearsal
from secateur.running.sandbox import Example, leaves_no_trace, quiet, run
from secateur.running.tensor_facts import TensorFacts
from secateur.structure.blocks import Block, Blocks
from secateur.structure.graph import Graph, families
from secateur.surgery.bypass import Bypass
from secateur.surgery.cut import cut_copy


@leaves_no_trace
def sound_blocks(graph: Graph, copy: nn.Module, inputs: Example, shapes: Sequence[torch.Size]) -> Blocks:
    """The branches of a graph; those that cannot leave have a reason. `shapes`: of what the whole copy returns."""
    found = graph.branches

    def fails(blocks: Sequence[Block], whole: bool) -> str | None:
        tried = replace(graph, branches=found if whole else Blocks(found.found), trial=None)
        removed = np.zeros(len(graph.root), np.bool_)
        removed[[block.group for block in blocks]] = True
        adds = {block.site: block for block in blocks}
        try:
            small = cut_copy(copy, plan_for(tried, removed))
            with quiet(), _Silence(small, adds) as heard:
                made = run(small, inputs)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return f"the forward does not run without it ({text})"
        if [tensor.shape for tensor in tensors_of_output(made, graph.output)] != shapes:
            return "without it the model returns tensors of other shapes"
        return heard.reason

    reasons: dict[str, str] = {}
    for level in _levels(found):
        if level and fails(level, whole=False) is not None:
            for kind in families(level):
                reason = fails(kind, whole=False)
                reasons |= {block.name: reason for block in kind} if reason is not None else {}
    blocks = found.frozen(reasons)
    if blocks.passages and fails([b for p in blocks.passages for b in blocks.found if b.group in p.blocks], whole=True):
        blocks = Blocks(blocks.found)
    return blocks


def _levels(blocks: Blocks) -> Iterator[list[Block]]:
    """Blocks that may leave, those that lie in no other first. None of a level lies in another of it."""
    left = blocks.prunable
    while left:
        inner = {int(group) for block in left for group in block.groups}
        yield [block for block in left if block.group not in inner]
        left = [block for block in left if block.group in inner]


class _Silence(Rehearsal):
    """Follows zeros through a model, and notes in `reason` the first branch that is not 0 where it is added."""

    def __init__(self, model: nn.Module, adds: dict[Site, Block]) -> None:
        super().__init__(model)
        self.reason: str | None = None
        #: Tensors that are 0, with the version for which this holds: a write through any view makes it void.
        self._adds, self._zero = adds, TensorFacts[int]()

    def runs(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().runs(module, plain, args, kwargs)
        if isinstance(module, Bypass) and module.returns not in ("input", "nothing"):
            self._mark(output)
        return output

    def observe(self, call: Call) -> Any:
        sources, block = call.tensors(), self._adds.get(call.site)
        if block is not None and not self._is_zero(sources[block.operand]):
            self.reason = self.reason or f"its branch is not 0 in {call.site} although its layers are gone"
        silent = any(map(self._is_zero, sources)) and self._stays_zero(call)
        output = super().observe(call)
        if silent:
            self._mark([output, *sources[: call.writes]])
        elif call.writes:  # a rehearsal may not have written
            torch.autograd.graph.increment_version(sources[0])
        return output

    def _mark(self, output: Any) -> None:
        for tensor in tensors_in(output):
            self._zero[tensor] = tensor._version

    def _is_zero(self, tensor: Tensor) -> bool:
        known = self._zero.get(tensor)
        return known is not None and known == tensor._version

    def _stays_zero(self, call: Call) -> bool:
        """Whether a call makes zeros of zeros, whatever else it reads."""
        if not self._made_zero(call, 1, 1):
            return False
        below = self._made_zero(call, -1, -1)
        return bool(self._made_zero(call, -1, 1) if below is None else below)  # an index, say, is not below 0

    def _made_zero(self, call: Call, other: int, whole: int) -> bool | None:
        """Whether zeros come of zeros if all else is `other`, whole numbers `whole`; None if the call fails.

        Conditions are false for -1. Whole numbers are never 0, for a branch may be divided by a count.
        """

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            fill = max(other, 0) if leaf.dtype == torch.bool else other if leaf.is_floating_point() else whole
            return torch.full(leaf.shape, 0 if self._is_zero(leaf) else fill, dtype=leaf.dtype, device="cpu")

        try:
            args, kwargs = map_leaves(number, (call.args, call.kwargs))
            output = call.function(*args, **kwargs)
        except Exception:
            return None
        made = tensors_in([output, *tensors_in((args, kwargs))[: call.writes]])
        return bool(made) and not any(bool(tensor.any()) for tensor in made)
