"""Matching what blocks return: a student's against its teacher's, with channels weighted by relevance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SecateurError
from secateur.nest import map_tensors, tensors_in
from secateur.repair.layerwise import kept_indices
from secateur.repair.reference import Kept
from secateur.running.copies import named_modules, shared_copy
from secateur.running.devices import full
from secateur.running.logits import logits_of
from secateur.running.sandbox import run
from secateur.running.targets import Reader


@dataclass(eq=False)
class Blocks:
    """The blocks that both models have. While it is open (`with`), both note what their blocks return."""

    student: nn.Module
    teacher: nn.Module
    kept: dict[str, Tensor | None]
    weights: dict[str, Tensor] = field(default_factory=dict)
    _seen: tuple[dict[str, Tensor], dict[str, Tensor]] = field(default_factory=lambda: ({}, {}))
    _hooks: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, student: nn.Module, teacher: nn.Module, given: tuple[nn.Module, nn.Module], inputs: Any) -> Blocks:
        """Find the blocks and the relevance of their channels on a batch. `given` are the models before any copy."""
        names, indices = _block_names(teacher), kept_indices(*given)
        # On copies: frozen weights have no gradients, and in training mode the student's statistics would move.
        probe = cls(shared_copy(student).eval(), shared_copy(teacher), dict.fromkeys(names))
        for parameter in probe.teacher.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        kept: dict[str, Tensor | None] = {}
        with probe:
            with torch.enable_grad():
                output = logits_of(run(probe.teacher, map_tensors(torch.clone, inputs)), warn=False)
            with torch.no_grad():
                run(probe.student, map_tensors(full, inputs))
            seen, returned = (dict(side) for side in probe._seen)
        weights = _relevance(probe.teacher, inputs, output, returned)
        mine, theirs = ({name: _channels_first(t) for name, t in side.items()} for side in (seen, returned))
        for name in weights.keys() & mine.keys():
            index = _channels(name, mine[name], theirs[name], teacher, indices)
            if index is not None:
                kept[name] = None if len(index) == theirs[name].shape[1] else index
        if not kept:
            raise SecateurError(
                f"{type(teacher).__name__} has no block whose outputs both models share: an item of a list of modules "
                "that returns (samples, channels, …).",
                fix="blocks=0",
            )
        return cls(student, teacher, {name: kept[name] for name in names if name in kept}, weights)

    def __enter__(self) -> Blocks:
        for model, seen in zip((self.student, self.teacher), self._seen, strict=True):
            for name, module in named_modules(model):
                if name in self.kept:
                    self._hooks.append(module.register_forward_hook(_noting(seen, name, model)))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for seen in self._seen:
            seen.clear()

    def loss(self) -> Tensor:
        """The mean over blocks of Σ w (student − teacher)² / Σ w teacher², of the last batch of both."""
        parts = []
        for name, index in self.kept.items():
            mine, theirs = (_channels_first(side[name]).float() for side in self._seen)
            weights = self.weights[name]
            if index is not None:
                theirs, weights = theirs.index_select(1, index), weights[index]
            shape = [1, -1, *[1] * (theirs.ndim - 2)]
            weights, theirs = weights.view(shape), theirs.detach()
            parts.append(
                (weights * (mine - theirs).square()).sum() / (weights * theirs.square()).sum().clamp_min(1e-12)
            )
        return torch.stack(parts).mean()


def _noting(seen: dict[str, Tensor], name: str, model: nn.Module) -> Any:
    learning = model.training

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        # While a student is trained, it also runs in evaluation mode: on held-out samples, and where its classes are
        # looked for. These runs are not those that the loss is about.
        if model.training != learning:
            return
        found = [t for t in tensors_in(output) if t.is_floating_point() and t.ndim > 1]
        if found:
            seen[name] = found[0]

    return note


def _channels_first(tensor: Tensor) -> Tensor:
    return tensor.movedim(-1, 1) if tensor.ndim == 3 else tensor  # channels of tokens come last


def _block_names(model: nn.Module) -> list[str]:
    """Items of lists of modules that are built of modules themselves; the outermost. Else all items with weights."""
    lists = [(path, m) for path, m in named_modules(model) if isinstance(m, nn.ModuleList | nn.Sequential)]
    items = [(f"{path}.{name}" if path else name, item) for path, m in lists for name, item in m.named_children()]
    items = [(name, item) for name, item in items if next(item.parameters(), None) is not None]
    deep = [name for name, item in items if next(item.children(), None) is not None]
    names = deep or [name for name, _ in items[:-1]]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _relevance(teacher: nn.Module, inputs: Any, output: Tensor, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By block the share of the relevance of each channel, 1 on average: |activation × gradient| of what is answered.

    For layers with ReLU this is what relevance propagation gives by its basic rule. `seen` is what the blocks returned
    on the way to `output`.
    """
    with torch.enable_grad():
        view = Reader(teacher).view(inputs, None, output).logits
        answered = view.amax(1 if view.ndim > 1 else 0).sum()
        tensors = {name: tensor for name, tensor in seen.items() if tensor.requires_grad}
        if not tensors:
            return {}
        slopes = torch.autograd.grad(answered, list(tensors.values()), allow_unused=True)
    found = {}
    for (name, tensor), slope in zip(tensors.items(), slopes, strict=True):
        if slope is not None:
            each = _channels_first(tensor * slope).detach().float().abs().transpose(0, 1).flatten(1).sum(1)
            if bool(each.sum() > 0):
                found[name] = each / each.mean()
    return found


def _channels(name: str, mine: Tensor, theirs: Tensor, teacher: nn.Module, kept: Kept) -> Tensor | None:
    """Which channels of the teacher's block the student's has; None if that is not known."""
    if mine.shape[2:] != theirs.shape[2:]:
        return None
    if mine.shape[1] == theirs.shape[1]:
        return torch.arange(theirs.shape[1], device=theirs.device)
    block = teacher.get_submodule(name)
    for inner, parameter in reversed(list(block.named_parameters(name))):  # the last layer of that width made them
        index = kept.get(inner, {}).get(0)
        if index is not None and len(parameter) == theirs.shape[1] and len(index) == mine.shape[1]:
            return torch.from_numpy(index).to(theirs.device)
    return None
