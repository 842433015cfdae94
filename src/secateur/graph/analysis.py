"""`analyze`: run the label passes, then try the removals that the labels allow, on copies without numbers."""

from __future__ import annotations

import logging
import re

import numpy as np
from torch import nn
from torch.nn.utils import parametrize

from secateur.errors import SecateurError, UnsupportedModelError
from secateur.graph.axes import AxisTable
from secateur.graph.graph import Graph, Layer, build
from secateur.graph.labels import LabelPass
from secateur.graph.shadow import Example, describe, ghost, quiet, run, run_or_explain, to_meta, twin, unwrap
from secateur.ops.table import tensors_in

log = logging.getLogger("secateur")


def analyze(model: nn.Module, example: Example) -> Graph:
    """Find the groups of coupled units of a model, which may leave, and what they cost.

    `example` is an input the model runs on: a tensor, a tuple of positional inputs or a dict of named ones. The model is
    not changed.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = analyze(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer.name, len(layer.groups), layer.prunable) for layer in graph.layers]
    [('0', 8, True), ('2', 4, False)]
    """
    model = unwrap(model)
    _refuse_parametrized(model)
    axes = AxisTable()
    shadow, inputs = _shadow(model, example)
    main = _watch(shadow, inputs, axes)
    passes = [main]
    missing = {name for name, _ in model.named_parameters()} - main.seen
    if missing:
        extra = _watch_training(shadow, inputs, axes)
        if extra is not None:
            passes.append(extra)
    blocked: dict[str, str] = {}
    while True:
        graph = build(model, example, axes, passes, blocked)
        found = _try_removals(graph, shadow, inputs)
        if not found:
            return graph
        blocked |= found


def _refuse_parametrized(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
            raise UnsupportedModelError(
                f"`{path}` computes {names} by torch.nn.utils.parametrize; slicing what it is computed from could change "
                f"it. Way out: torch.nn.utils.parametrize.remove_parametrizations(module, name) first."
            )


def _shadow(model: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """A copy without numbers if the forward runs without them, else a copy that shares the parameters' memory."""
    shadow, inputs = ghost(model).eval(), to_meta(example)
    with quiet():
        try:
            run(shadow, inputs)
            return shadow, inputs
        except Exception as error:
            log.debug("no meta forward for %s: %s", type(model).__name__, error)
        shadow = twin(model).eval()
        run_or_explain(shadow, example)
    return shadow, example


def _watch(shadow: nn.Module, inputs: Example, axes: AxisTable) -> LabelPass:
    labels = LabelPass(shadow, axes)
    with quiet(), labels:
        output = run(shadow, inputs)
    for tensor in outputs_of(output):
        labels.freeze_tensor(tensor, "model output")
    return labels


def outputs_of(output: object) -> list[object]:
    """All tensors a model returns, also inside dataclass-like objects."""
    found: list[object] = list(tensors_in(output))
    if not found and hasattr(output, "__dict__"):
        found = list(tensors_in(vars(output)))
    return found


def _watch_training(shadow: nn.Module, inputs: Example, axes: AxisTable) -> LabelPass | None:
    """Auxiliary heads run only in training; what they read must shrink with the rest."""
    shadow.train()
    try:
        return _watch(shadow, inputs, axes)
    except SecateurError:
        raise
    except Exception as error:  # e.g. batch norm refuses a single value per channel
        log.debug("no forward in training mode: %s", error)
        return None
    finally:
        shadow.eval()


def _try_removals(graph: Graph, shadow: nn.Module, inputs: Example) -> dict[str, str]:
    """Take one unit out of every layer and run. Layers that break the forward hold sizes written into the code."""
    from secateur.pruning.plan import plan_for
    from secateur.pruning.surgery import cut

    layers = [layer for layer in graph.layers if layer.prunable and layer.name]

    def breaks(part: list[Layer]) -> str | None:
        removed = _one_of_each(graph, part)
        with quiet():
            try:
                run(cut(shadow, plan_for(graph, removed)), inputs)
            except Exception as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    found: dict[str, str] = {}

    def block(part: list[Layer], error: str) -> None:
        found.update({layer.name: f"a size is written into the forward ({error})" for layer in part})

    def search(part: list[Layer]) -> None:
        """Find the layers that break the forward. Blocks of one kind share their code, so one speaks for all."""
        error = breaks(part)
        if error is None:
            return
        if len(part) == 1:
            return block(part, error)
        kinds = _alike(part)
        if len(kinds) == 1:
            alone = breaks(part[:1])
            if alone is not None:
                return block(part, alone)
            kinds = [part[: len(part) // 2], part[len(part) // 2 :]]
        before = len(found)
        for kind in kinds:
            search(kind)
        if len(found) == before:  # each is fine alone, together they are not: the first kind may shrink
            for kind in kinds[1:]:
                block(kind, error)

    search(layers)
    if found:
        log.debug("rigid layers on %s: %s", describe(inputs), found)
    return found


def _alike(layers: list[Layer]) -> list[list[Layer]]:
    """Layers whose paths differ in numbers only, together."""
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(re.sub(r"\d+", "*", "|".join(layer.paths[:2])), []).append(layer)
    return list(kinds.values())


def _one_of_each(graph: Graph, layers: list[Layer]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    removed = np.zeros(len(graph.root), np.bool_)
    for layer in layers:
        removed[layer.groups[len(layer.groups) // 2]] = True
    for producer in graph.producers:  # small layers may be split among several; none may be emptied
        groups = graph.root[producer.labels]
        if removed[groups].all():
            removed[groups[0]] = False
    return removed
