"""`analyze`: run the label passes, then try out removals that the labels allow, on copies without numbers."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from secateur.analysis.trial import Trial
from secateur.analysis.variants import freeze_never_run, other_sizes, trains_otherwise
from secateur.errors import SecateurError, UnsupportedModelError
from secateur.nest import tensors_of_output
from secateur.running.copies import check_followed, meta_copy, shared_copy, unwrap
from secateur.running.sandbox import Example, leaves_no_trace
from secateur.structure.findings import Findings
from secateur.structure.graph import Graph, build
from secateur.structure.labels import LabelPass, watch, watch_copy

log = logging.getLogger("secateur")


@leaves_no_trace
def analyze(model: nn.Module, example: Example) -> Graph:
    """Find the groups of coupled units of a model, which may leave, and what they cost.

    `example` is an input the model runs on: a tensor, a tuple of positional inputs or a dict of named ones. The model
    is not changed.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = analyze(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer.name, len(layer.groups), layer.prunable) for layer in graph.layers]
    [('0', 8, True), ('2', 4, False)]
    """
    model = unwrap(model)
    check_followed(model)
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise UnsupportedModelError(
                f"`{path}` computes {', '.join(module.parametrizations)} by torch.nn.utils.parametrize; slicing what "
                "it is computed from could change it.",
                fix="torch.nn.utils.parametrize.remove_parametrizations(module, name) first",
            )
    copy, inputs, watched, output = watch_copy(model, example)
    passes = [_with_frozen_output(watched, output)]
    unseen = any(name not in watched.found.seen for name, _ in model.named_parameters())
    if unseen or trains_otherwise(copy, inputs, output):
        # Auxiliary heads run only in training; what they read must shrink with the rest.
        copy.train()
        passes += _another_pass(copy, inputs, watched)
        copy.eval()
    if watched.sized and watched.numberless:
        # Code that reads sizes may couple other units for another input.
        passes += next((found for x in other_sizes(inputs) if (found := _another_pass(copy, x, watched))), [])
    freeze_never_run(model, passes)
    # A forward may keep what it computed, so that the copy that ran would now do other things.
    fresh = (meta_copy if watched.numberless else shared_copy)(model).eval()
    trial = Trial(fresh, inputs, {} if watched.steered else watched.found.steps)
    while True:
        graph = build(model, example, passes, trial.blocked, tuple(trial.repeated.values()))
        if not trial.finds_more(graph):
            return graph


def _another_pass(copy: nn.Module, inputs: Example, first: LabelPass) -> list[Findings]:
    """What a further label pass finds; nothing if the forward does not run so."""
    try:
        return [_with_frozen_output(*watch(copy, inputs, first.found.axes))]
    except SecateurError:
        if copy.training:  # what trains must be understood; another size need not be possible
            raise
        return []
    except Exception as error:  # e.g. batch norm refuses a single value per channel
        log.debug("no further label pass for %s: %s", type(copy).__name__, error)
        return []


def _with_frozen_output(watched: LabelPass, output: Any) -> Findings:
    for tensor in tensors_of_output(output):
        watched.labels.freeze_tensor(tensor, "model output")
    return watched.found
