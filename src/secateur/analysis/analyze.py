"""`analyze`: run the label passes, then try out removals that the labels allow, on copies without numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.nn.utils import parametrize

from secateur.errors import SecateurError, UnsupportedModelError
from secateur.nest import tensors_of_output
from secateur.plans.plan import plan_for
from secateur.running.copies import check_followed, unwrap
from secateur.running.observer import Rehearsal
from secateur.running.sandbox import Example, leaves_no_trace, quiet, run
from secateur.structure.cost import Mask
from secateur.structure.findings import Findings
from secateur.structure.graph import Graph, Layer, RepeatedSize, build
from secateur.structure.labels import LabelPass, watch, watch_copy
from secateur.surgery.cut import cut

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
    if any(name not in watched.found.seen for name, _ in model.named_parameters()):
        # Auxiliary heads run only in training; what they read must shrink with the rest.
        copy.train()
        try:
            passes.append(_with_frozen_output(*watch(copy, inputs, watched.found.axes)))
        except SecateurError:
            raise
        except Exception as error:  # e.g. batch norm refuses a single value per channel
            log.debug("no forward in training mode: %s", error)
        finally:
            copy.eval()
    trial = Trial(copy, inputs)
    while True:
        graph = build(model, example, passes, trial.blocked, tuple(trial.repeated.values()))
        if not trial.finds_more(graph):
            return graph


def _with_frozen_output(watched: LabelPass, output: Any) -> Findings:
    for tensor in tensors_of_output(output):
        watched.labels.freeze_tensor(tensor, "model output")
    return watched.found


class Trial:
    """Removes units from a copy and runs it, to find sizes that are written into the forward.

    `blocked` has the layers that break it, with the reason; `repeated` the attributes that repeat a layer's size.
    """

    def __init__(self, copy: nn.Module, inputs: Example) -> None:
        self.copy, self.inputs = copy, inputs
        self.blocked: dict[str, str] = {}
        self.repeated: dict[tuple[str, str], RepeatedSize] = {}

    @property
    def _known(self) -> int:
        return len(self.blocked) + len(self.repeated)

    def finds_more(self, graph: Graph) -> bool:
        """Try one unit of every layer at once. If layers break the forward, the rest must be tried again."""
        before = self._known
        self._search(graph, [layer for layer in graph.layers if layer.prunable])
        return self._known > before

    def _breaks(self, graph: Graph, layers: list[Layer]) -> str | None:
        small = cut(self.copy, plan_for(graph, _one_of_each(graph, layers), tuple(self.repeated.values())))
        with quiet():
            try:
                with Rehearsal(small):
                    run(small, self.inputs)
            except Exception as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    def _search(self, graph: Graph, layers: list[Layer]) -> None:
        """Find the layers that break the forward. Blocks of one kind share their code, so one speaks for all."""
        error = self._breaks(graph, layers)
        if error is None:
            return
        kinds = _alike(layers)
        if len(kinds) == 1:
            if self._repeats(graph, layers):
                return
            alone = error if len(layers) == 1 else self._breaks(graph, layers[:1])
            if alone is not None:
                return self._block(layers, alone)
            kinds = [layers[: len(layers) // 2], layers[len(layers) // 2 :]]
        before = self._known
        for kind in kinds:
            self._search(graph, kind)
        if self._known == before:
            # Each is fine alone, together they are not: only the first kind may shrink.
            for kind in kinds[1:]:
                self._block(kind, error)

    def _block(self, layers: list[Layer], error: str) -> None:
        self.blocked.update({layer.name: f"a size is written into the forward ({error})" for layer in layers})

    def _repeats(self, graph: Graph, layers: list[Layer]) -> bool:
        """Whether the forward runs once attributes that repeat the layers' sizes shrink too."""
        before = self.repeated
        found = {(item.path, item.name): item for item in _attributes(graph, self.copy, layers)}
        self.repeated = found | before
        if len(self.repeated) > len(before) and self._breaks(graph, layers) is None:
            return True
        self.repeated = before
        return False


def _attributes(graph: Graph, model: nn.Module, layers: list[Layer]) -> Iterator[RepeatedSize]:
    """Numbers kept by the user's own modules, around the layers, that equal a size that shrinks."""
    for layer in layers:
        for position in np.unique(graph.axis_of[graph.labels_of(int(layer.groups[0]))]).tolist():
            axis = graph.axes.axes[position]
            parts = axis.parameter.split(".")[:-1]
            for end in range(len(parts), -1, -1):
                path = ".".join(parts[:end])
                module = model.get_submodule(path)
                if type(module).__module__.startswith("torch.nn."):
                    continue
                parents = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.")]
                known = {name for kind in parents for name in getattr(kind, "__constants__", ())}  # `cut` sets those
                for name, value in vars(module).items():
                    if type(value) is int and value == axis.size and name not in known:
                        yield RepeatedSize(path, name, position)


def _alike(layers: list[Layer]) -> list[list[Layer]]:
    """Layers whose paths differ in numbers only, together."""
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(re.sub(r"\d+", "*", "|".join(layer.paths[:2])), []).append(layer)
    return list(kinds.values())


def _one_of_each(graph: Graph, layers: list[Layer]) -> Mask:
    removed = np.zeros(len(graph.root), np.bool_)
    for layer in layers:
        removed[layer.groups[len(layer.groups) // 2]] = True
    for axis in graph.axes.axes:  # small layers may be split among several; none may be emptied
        groups = graph.root[axis.span]
        if removed[groups].all():
            removed[groups[0]] = False
    return removed
