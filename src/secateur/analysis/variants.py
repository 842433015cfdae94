"""What the example does not show: layers that never ran, a training forward that differs, inputs of another size, and
what the forward does if numbers in tensors are others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from secateur.errors import UnsupportedModelError
from secateur.nest import map_tensors, tensors_in, tensors_of_output
from secateur.ops.layers import varying
from secateur.running.copies import named_modules, named_tensors, set_mode
from secateur.running.heads import names_reached
from secateur.running.modes import reads_training
from secateur.running.observer import Rehearsal
from secateur.running.sandbox import Example, quiet, run
from secateur.structure.blocks import within
from secateur.structure.findings import Findings
from secateur.structure.followed import Question, Questions
from secateur.structure.label_pass import LabelPass

log = logging.getLogger("secateur")
#: How many pixels an image gets in addition. Most networks halve images five times.
_MORE_PIXELS = 32
#: How many lines of code that ask tensors for numbers get other answers, and in how many forwards.
_MOST_LINES, _MOST_PASSES = 16, 32


def trains_otherwise(copy: nn.Module, inputs: Example, output: Any) -> bool:
    """Whether the forward in training mode returns other tensors than `output`. Asked only if code reads the mode."""
    if not reads_training(copy):
        return False
    set_mode(copy, training=True)
    try:
        with quiet(), Rehearsal(copy):
            made = run(copy, inputs)
    except Exception as error:
        log.debug("no forward in training mode: %s", error)
        return False
    finally:
        set_mode(copy)
    return [t.shape for t in tensors_of_output(made)] != [t.shape for t in tensors_of_output(output)]


#: Names under which code would find the size of a layer.
_SIZES = frozenset(
    ("in_channels", "out_channels", "in_features", "out_features", "num_features", "groups", "weight", "bias",
     "running_mean", "running_var", "parameters", "named_parameters", "buffers", "state_dict", "_parameters",
     "_buffers", "getattr", "vars", "__dict__", "repr", "str")
)  # fmt: skip


_CODE = (FunctionType, MethodType, partial)  # that a model holds, and nobody looks into


def shows_no_sizes(model: nn.Module, watched: LabelPass) -> bool:
    """Whether nothing can depend on how many units a layer has, so that trial removals would teach nothing: the code
    asks for no sizes, and calls only what takes any. (A verification would still tell.)"""
    if not watched.steady or watched.rigid:
        return False
    own = [module for _, module in named_modules(model) if not type(module).__module__.startswith("torch.nn.")]
    if any(isinstance(value, _CODE) for module in own for value in vars(module).values()):
        return False
    kinds: set[Any] = {type(module) for module in own}
    return all(_SIZES.isdisjoint(names_reached(kind)) for kind in kinds)


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


def other_answers(
    first: Collection[Question], watch: Callable[[Questions], tuple[Findings, Collection[Question]] | None]
) -> list[Findings]:
    """What the forward does if tensors answer otherwise, where code asks them for numbers.

    `first` is what it asked; `watch` runs it with other answers, and returns None if it fails then. Every line of code
    gets other answers once. Then every two questions get all four pairs of answers: of n questions, those whose number
    has a certain binary digit are turned, or the others. What a branch adds is asked in its turn.
    """
    lines: dict[str, bool] = {}
    tried: set[frozenset[Question]] = set()
    found: list[Findings] = []
    asked = dict.fromkeys(first)

    def turn(some: Iterable[Question]) -> bool:
        turned = frozenset(some)
        if not turned or turned in tried:
            return True
        tried.add(turned)
        seen = watch(Questions(turned, 4 * len(asked) + 1000))
        if seen is not None:
            found.append(seen[0])
            asked.update(dict.fromkeys(seen[1]))
        return seen is not None

    while len(tried) < _MOST_PASSES:
        before = len(tried)
        for line in dict.fromkeys(q.line for q in asked):
            if line not in lines and len(lines) < _MOST_LINES:
                lines[line] = turn(q for q in asked if q.line == line)
        free = [q for q in asked if lines.get(q.line)]
        turn(free)
        for digit in range(len(free).bit_length() if len(free) > 1 else 0):
            for value in (0, 1):
                turn(q for number, q in enumerate(free) if number >> digit & 1 == value)
        if len(tried) == before:
            break
    for question in asked:
        if question.line not in lines:
            reason = f"numbers decide what `{question.path or 'the forward'}` does, in more ways than can be tried"
            _freeze_inside(found, question.path, None, reason)
    return found


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


def computed_weights(model: nn.Module, strict: bool = False) -> dict[str, str]:
    """Parameters from which torch.nn.utils.parametrize computes a weight, which slicing could change, and why they
    stay. `strict`: anything but weight norm is refused."""
    found: dict[str, str] = {}
    for path, module in named_modules(model):
        if "parametrizations" not in module._modules:
            continue
        steps_of: Any = getattr(module, "parametrizations", {}) if parametrize.is_parametrized(module) else {}
        for name, steps in steps_of.items():
            kinds = [type(step).__name__.lstrip("_") for step in steps]
            if strict and set(kinds) != {"WeightNorm"}:
                raise UnsupportedModelError(
                    f"`{path}` computes {name} by torch.nn.utils.parametrize; slicing what it is computed from could "
                    "change it.",
                    fix="torch.nn.utils.parametrize.remove_parametrizations(module, name) first",
                )
            inner = f"{path}.parametrizations.{name}.".lstrip(".")
            reason = f"`{path}` computes {name} by {' and '.join(kinds)}; remove_parametrizations would free it"
            found |= {own: reason for own, _ in named_tensors(model) if own.startswith(inner)}
    return found


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


def _freeze_inside(passes: Sequence[Findings], path: str, sizes: set[int] | None, reason: str) -> bool:
    """Freeze units, of any of these numbers, of tensors that are made inside a module. Whether there are any."""
    before = sum(len(found.frozen) for found in passes)
    for found in passes:
        for site, step in found.steps.items():
            if path and not within(site.path, path):
                continue
            for shape, layers in step.made:
                for layer in layers:
                    over = varying(layer)
                    if sizes is None or (len(over) == 1 and shape[over[0]] in sizes):
                        found.freeze(layer, reason)
    return sum(len(found.frozen) for found in passes) > before
