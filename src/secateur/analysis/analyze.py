"""`analyze`: run the label passes, then try out removals that the labels allow, on copies without numbers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from secateur.analysis.block_trial import sound_blocks
from secateur.analysis.trial import OtherCalls, Trial
from secateur.analysis.variants import (
    computed_weights,
    freeze_never_run,
    other_answers,
    other_sizes,
    shows_no_sizes,
    trains_otherwise,
)
from secateur.errors import Argument, DataError, SecateurError, UnsupportedModelError
from secateur.nest import entries, tensors_of_output
from secateur.running.copies import (
    check_followed,
    meta_copy,
    named_modules,
    named_parameters,
    named_tensors,
    never_share,
    set_mode,
    shared_copy,
    unchanged,
    unwrap,
)
from secateur.running.sandbox import Example, leaves_no_trace, uncollected
from secateur.structure.blocks import find_blocks
from secateur.structure.choices import settle_choices
from secateur.structure.findings import Findings
from secateur.structure.followed import Question, Questions
from secateur.structure.graph import Graph, RepeatedSize, build
from secateur.structure.label_pass import LabelPass, watch, watch_copy

log = logging.getLogger("secateur")


@leaves_no_trace
def analyze(model: nn.Module, example: Example, output: str | Sequence[str] = (), *, strict: bool = False) -> Graph:
    """Find the groups of coupled units of a model, which may leave, and what they cost.

    `example` is an input the model runs on: a tensor, a tuple of positional inputs or a dict of named ones. The model
    is not changed.

    What the model returns keeps its size. If it returns several things, `output` names those that count, such as
    "logits"; the others may become narrower. Beside logits, hidden states and caches do not count.

    Units that reach a function without an entry in the table of operations stay, with that reason. `strict` refuses the
    model instead.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = analyze(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer.name, len(layer.groups), layer.prunable) for layer in graph.layers]
    [('0', 8, True), ('2', 4, False)]
    """
    model = unwrap(model)
    check_followed(model, strict)
    if example is None or isinstance(example, str):
        raise DataError(
            f"the example is {example!r}, which is no input of a model.",
            fix="a tensor, a tuple of positional inputs, or a dict of named ones",
        )
    computed = computed_weights(model, strict)
    names = (output,) if isinstance(output, str) else tuple(output)
    with uncollected, unchanged(model):
        try:
            return _found(model, example, names, computed, strict, doubt=True)
        except OtherCalls:  # now the cache is filled
            return _found(model, example, names, computed, strict, doubt=False)


def _found(
    model: nn.Module, example: Example, names: tuple[str, ...], computed: Mapping[str, str], strict: bool, doubt: bool
) -> Graph:
    """The graph, as labels and trials tell it. `doubt`: raise `OtherCalls` if the model does not repeat its calls."""
    copy, inputs, watched, made = watch_copy(model, example, strict)
    shapes = [tensor.shape for tensor in tensors_of_output(made, names)]
    for name, tensor in named_tensors(copy):
        if name in computed:
            watched.labels.freeze_tensor(tensor, computed[name])
    if names and len(names) > sum(bool(tensors_of_output(made, [name])) for name in names):
        raise UnsupportedModelError(
            f"the model returns {_entries(made)}, but {{output}} names {', '.join(names)}.",
            fix="name entries of what it returns",
            output=Argument("output"),
        )
    passes = [_with_frozen_output(watched, made, names)]
    unseen = any(name not in watched.found.seen for name, _ in named_parameters(model))
    if unseen or trains_otherwise(copy, inputs, made):
        # Auxiliary heads run only in training; what they read must shrink with the rest.
        set_mode(copy, training=True)
        passes += _another_pass(copy, inputs, watched, names)
        set_mode(copy)
    if watched.questions.asked:
        passes += _other_answers(model, watched, inputs, names)
    if watched.sized and watched.numberless:
        # Code that reads sizes may couple other units for another input.
        passes += next((found for x in other_sizes(inputs) if (found := _another_pass(copy, x, watched, names))), [])
    never_share(model, {name for found in passes for name in found.overwritten})
    freeze_never_run(model, passes)
    settle_choices(passes)
    blocks = find_blocks(watched.flow, watched.found, model)
    known = len(passes) == 1 and shows_no_sizes(copy, watched)
    plain = frozenset(map(type, dict(named_modules(copy)).values())) if known and not watched.noisy else frozenset()
    fresh = copy if known and not watched.wrote else _fresh(model, watched)
    steps, loose = watched.found.steps, watched.counted or watched.steered
    if not watched.numberless and any(choice.used for choice in watched.found.choices):
        steps = {}  # a router that has fewer experts sends tokens elsewhere
    elif watched.steered:  # what came before is the same for all numbers
        steps = dict(islice(steps.items(), watched.certain))
    trial = Trial(fresh, inputs, steps, watched.unsure, loose)
    trial.repeated |= {key: RepeatedSize(*key, labels) for p in passes for key, labels in p.counted.items()}
    tried = partial(sound_blocks, copy=fresh, inputs=inputs, shapes=shapes) if len(blocks) else None
    while True:
        repeated = tuple(trial.repeated.values())
        graph = build(model, example, passes, trial.blocked, repeated, names, blocks, tried, watched.steady, plain)
        if known or not trial.finds_more(graph, doubt and not trial.blocked):
            break
    # A copy that shares the user's parameters is not kept: they may change, or be given up.
    return graph if tried is None or watched.numberless else replace(graph, branches=graph.blocks, trial=None)


def _fresh(model: nn.Module, watched: LabelPass) -> nn.Module:
    """A copy of the kind that was watched. The one that ran may keep what it computed, and would do other things."""
    return set_mode((meta_copy if watched.numberless else shared_copy)(model))


def _other_answers(model: nn.Module, first: LabelPass, inputs: Example, names: Sequence[str]) -> list[Findings]:
    """What further label passes find in which tensors answer otherwise."""

    def run(questions: Questions) -> tuple[Findings, Collection[Question]] | None:
        found = _another_pass(_fresh(model, first), inputs, first, names, questions)
        return (found[0], questions.asked) if found else None

    return other_answers(first.questions.asked, run)


def _another_pass(
    copy: nn.Module, inputs: Example, first: LabelPass, names: Sequence[str], questions: Questions | None = None
) -> list[Findings]:
    """What a further label pass finds; nothing if the forward does not run so."""
    try:
        return [_with_frozen_output(*watch(copy, inputs, first.found.axes, questions, first.strict), names)]
    except SecateurError:
        if copy.training or questions:  # what trains must be understood; another size need not be possible
            raise
        return []
    except Exception as error:  # e.g. batch norm refuses a single value per channel
        log.debug("no further label pass for %s: %s", type(copy).__name__, error)
        return []


def _entries(output: Any) -> str:
    inside = entries(output)
    return type(output).__name__ if inside is None else ", ".join(str(name) for name, _ in inside)


def _with_frozen_output(watched: LabelPass, output: Any, names: Sequence[str]) -> Findings:
    for tensor in tensors_of_output(output, names):
        watched.labels.freeze_tensor(tensor, "model output")
        watched.flow.ends.add(watched.flow.value(tensor))
    return watched.found
