"""What the example does not show: layers that never ran, a training forward that differs, inputs of another size."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from secateur.nest import map_tensors, tensors_in, tensors_of_output
from secateur.ops.layers import varying
from secateur.running.copies import named_modules, named_tensors
from secateur.running.observer import Rehearsal
from secateur.running.sandbox import Example, quiet, run
from secateur.structure.findings import Findings

log = logging.getLogger("secateur")
#: How many pixels an image gets in addition. Most networks halve images five times.
_MORE_PIXELS = 32


def trains_otherwise(copy: nn.Module, inputs: Example, output: Any) -> bool:
    """Whether the forward in training mode returns other tensors than `output`. Asked only if code reads the mode."""
    kinds: set[Any] = {type(module) for _, module in named_modules(copy)}
    if not any(_reads_mode(kind) for kind in kinds):
        return False
    copy.train()
    try:
        with quiet(), Rehearsal(copy):
            made = run(copy, inputs)
    except Exception as error:
        log.debug("no forward in training mode: %s", error)
        return False
    finally:
        copy.eval()
    return [t.shape for t in tensors_of_output(made)] != [t.shape for t in tensors_of_output(output)]


@cache
def _reads_mode(kind: type) -> bool:
    """Whether a method that a user wrote mentions `training`."""
    own = [parent for parent in kind.__mro__ if not parent.__module__.startswith("torch.")]
    methods = [item for parent in own for item in vars(parent).values() if isinstance(item, FunctionType)]
    return any("training" in method.__code__.co_names for method in methods)


def other_sizes(inputs: Example) -> Iterator[Example]:
    """The inputs without numbers in other sizes: larger images, or sequences that are shorter by one."""
    if any(t.ndim > 3 and t.is_floating_point() for t in tensors_in(inputs)):
        yield map_tensors(lambda t: _larger(t, _MORE_PIXELS), inputs)
        yield map_tensors(lambda t: _larger(t, max(t.shape[-1], 1)), inputs)
    elif all(t.ndim > 1 and t.shape[1] > 2 for t in tensors_in(inputs)):
        yield map_tensors(lambda t: t[:, :-1], inputs)


def _larger(tensor: Tensor, more: int) -> Tensor:
    if tensor.ndim < 4 or not tensor.is_floating_point():
        return tensor
    return tensor.new_empty((*tensor.shape[:2], *(size + more for size in tensor.shape[2:])))


def freeze_never_run(model: nn.Module, passes: Sequence[Findings]) -> None:
    """Keep what a layer that never ran may read or add to: units around it whose number is one of its sizes."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    seen, ran = (set().union(*sets) for sets in ([p.seen for p in passes], [p.ran for p in passes]))
    for path, module in named_modules(model):
        own = [tensor for tensor in module._parameters.values() if tensor is not None]
        if path in ran or not own or any(names[id(tensor)] in seen for tensor in own):
            continue
        reason = f"`{path}` never ran with this example and may read it"
        around = path
        while around:  # the innermost module that ran, and in which such units are
            around = around.rpartition(".")[0]
            if around in ran and _freeze_inside(passes, around, _sizes(module), reason):
                break


def _sizes(module: nn.Module) -> set[int]:
    """How many channels a layer reads and writes."""
    groups = getattr(module, "groups", 1)
    sizes: set[int] = set()
    for tensor in module._parameters.values():
        if tensor is not None and tensor.ndim > 1:
            sizes |= {tensor.shape[0], tensor.shape[1], tensor.shape[1] * groups}
        elif tensor is not None and "norm" in type(module).__name__.lower():
            sizes.add(len(tensor))
    return sizes - {1}


def _freeze_inside(passes: Sequence[Findings], path: str, sizes: set[int], reason: str) -> bool:
    """Freeze units, of any of these numbers, of tensors that are made inside a module. Whether there are any."""
    before = sum(len(found.frozen) for found in passes)
    for found in passes:
        for site, step in found.steps.items():
            if path and site.path != path and not site.path.startswith(f"{path}."):
                continue
            for shape, layers in step.made:
                for layer in layers:
                    over = varying(layer)
                    if len(over) == 1 and shape[over[0]] in sizes:
                        found.freeze(layer, reason)
    return sum(len(found.frozen) for found in passes) > before
