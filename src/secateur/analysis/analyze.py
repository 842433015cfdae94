"""`analyze`: run the label passes, then try out removals that the labels allow, on copies without numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from secateur.errors import SecateurError, UnsupportedModelError
from secateur.nest import tensors_of_output
from secateur.plans.plan import plan_for
from secateur.running.copies import meta_copy, shared_copy, unwrap
from secateur.running.observer import Rehearsal
from secateur.running.sandbox import Example, quiet, run, run_or_explain, to_meta
from secateur.structure.axes import AxisTable
from secateur.structure.findings import Findings
from secateur.structure.graph import Graph, Layer, RepeatedSize, build
from secateur.structure.labels import LabelPass
from secateur.surgery.cut import cut

log = logging.getLogger("secateur")


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
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"{type(model).__name__} is TorchScript: its code is compiled and cannot be followed.",
            fix="the Python module that it was made from",
        )
    _refuse_parametrized(model)
    copy, inputs, axes, main = _first_watch(model, example)
    passes = [main]
    missing = {name for name, _ in model.named_parameters()} - main.seen
    if missing:
        extra = _watch_training(copy, inputs, axes)
        if extra is not None:
            passes.append(extra)
    trial = Trial(model, example, axes, passes, copy, inputs)
    while not trial.settled():
        pass
    return trial.graph


def _refuse_parametrized(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            names = ", ".join(module.parametrizations)
            raise UnsupportedModelError(
                f"`{path}` computes {names} by torch.nn.utils.parametrize; slicing what it is computed from "
                "could change it.",
                fix="torch.nn.utils.parametrize.remove_parametrizations(module, name) first",
            )


def _first_watch(model: nn.Module, example: Example) -> tuple[nn.Module, Example, AxisTable, Findings]:
    """Watch a copy without numbers if the forward runs without them, else one that shares the parameters' memory."""
    copy, inputs, axes = meta_copy(model).eval(), to_meta(example), AxisTable()
    try:
        return copy, inputs, axes, _watch(copy, inputs, axes)
    except SecateurError:
        raise
    except Exception as error:  # numbers steer the forward, or tensors are made on a device of their own
        log.debug("no forward without numbers for %s: %s", type(model).__name__, error)
    copy, axes = shared_copy(model).eval(), AxisTable()
    with quiet():
        run_or_explain(copy, example)
    return copy, example, axes, _watch(copy, example, axes)


def _watch(copy: nn.Module, inputs: Example, axes: AxisTable) -> Findings:
    watched = LabelPass(copy, axes)
    with quiet(), watched:
        output = run(copy, inputs)
    for tensor in tensors_of_output(output):
        watched.labels.freeze_tensor(tensor, "model output")
    return watched.found


def _watch_training(copy: nn.Module, inputs: Example, axes: AxisTable) -> Findings | None:
    """Auxiliary heads run only in training; what they read must shrink with the rest."""
    copy.train()
    try:
        return _watch(copy, inputs, axes)
    except SecateurError:
        raise
    except Exception as error:  # e.g. batch norm refuses a single value per channel
        log.debug("no forward in training mode: %s", error)
        return None
    finally:
        copy.eval()


class Trial:
    """Removes units from a copy and runs it, to find sizes that are written into the forward."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        axes: AxisTable,
        passes: list[Findings],
        copy: nn.Module,
        inputs: Example,
    ) -> None:
        self._known = (model, example, axes, passes)
        self.copy, self.inputs = copy, inputs
        self.blocked: dict[str, str] = {}
        self.repeated: tuple[RepeatedSize, ...] = ()
        self.graph: Graph = self._graph()

    def _graph(self) -> Graph:
        return build(*self._known, self.blocked, self.repeated)

    def settled(self) -> bool:
        """Try one unit of every layer at once. Layers that break the forward are blocked, and the rest tried again."""
        known = len(self.blocked) + len(self.repeated)
        self._search([layer for layer in self.graph.layers if layer.prunable])
        if len(self.blocked) + len(self.repeated) == known:
            return True
        self.graph = self._graph()
        return False

    def _breaks(self, layers: list[Layer]) -> str | None:
        plan = plan_for(self.graph, _one_of_each(self.graph, layers), self.repeated)
        small = cut(self.copy, plan)
        with quiet():
            try:
                with Rehearsal(small):
                    run(small, self.inputs)
            except Exception as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    def _search(self, layers: list[Layer]) -> None:
        """Find the layers that break the forward. Blocks of one kind share their code, so one speaks for all."""
        error = self._breaks(layers)
        if error is None:
            return
        kinds = _alike(layers)
        if len(kinds) == 1:
            if self._repeats(layers):
                return
            alone = error if len(layers) == 1 else self._breaks(layers[:1])
            if alone is not None:
                return self._block(layers, alone)
            kinds = [layers[: len(layers) // 2], layers[len(layers) // 2 :]]
        before = len(self.blocked) + len(self.repeated)
        for kind in kinds:
            self._search(kind)
        if len(self.blocked) + len(self.repeated) == before:
            # Each is fine alone, together they are not: only the first kind may shrink.
            for kind in kinds[1:]:
                self._block(kind, error)

    def _block(self, layers: list[Layer], error: str) -> None:
        self.blocked.update({layer.name: f"a size is written into the forward ({error})" for layer in layers})

    def _repeats(self, layers: list[Layer]) -> bool:
        """Whether the forward runs once attributes that repeat the layers' sizes shrink too."""
        before = self.repeated
        found = {(item.path, item.name): item for item in _attributes(self.graph, self.copy, layers)}
        found |= {(item.path, item.name): item for item in before}
        self.repeated = tuple(found.values())
        if len(self.repeated) > len(before) and self._breaks(layers) is None:
            return True
        self.repeated = before
        return False


def _attributes(graph: Graph, model: nn.Module, layers: list[Layer]) -> Iterator[RepeatedSize]:
    """Numbers kept by the user's own modules, around the layers, that equal a size that shrinks."""
    for layer in layers:
        touched = np.unique(graph.axis_of[np.concatenate([graph.labels_of(g) for g in layer.groups[:1].tolist()])])
        for position in touched.tolist():
            axis = graph.axes.axes[position]
            parts = axis.parameter.split(".")[:-1] if axis.parameter else []
            for end in range(len(parts), -1, -1):
                path = ".".join(parts[:end])
                module = model.get_submodule(path)
                if type(module).__module__.startswith("torch.nn."):
                    continue
                for name, value in vars(module).items():
                    if type(value) is int and value == axis.size:
                        yield RepeatedSize(path, name, position)


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
    for axis in graph.axes.axes:  # small layers may be split among several; none may be emptied
        groups = graph.root[axis.base : axis.base + axis.size]
        if removed[groups].all():
            removed[groups[0]] = False
    return removed
