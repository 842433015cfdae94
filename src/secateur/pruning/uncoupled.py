"""The paper's way with ResNets: every filter ranked on its own and masked, nothing coupled, nothing removed.

Its "percent of filters" counts filters that coupled removal could not take out alone, and its networks do not get
smaller: this is for reproducing curves, `prune` is for use. One thing is set right: batch norm behind a masked filter
is silenced too (the authors' script lets it emit its constant).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.criteria.batches import Data, repeatable
from secateur.criteria.criterion import Absolute, Loss, Norm
from secateur.criteria.registry import Choice, criterion_named
from secateur.criteria.scoring import example_of, score
from secateur.errors import NothingToPruneError, TargetError
from secateur.graph.analysis import analyze
from secateur.graph.graph import Graph
from secateur.graph.shadow import Example, duplicate, quiet, run, twin, unwrap
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.linear import Linear
from secateur.ops.norm import BatchNorm
from secateur.ops.table import Call, Site
from secateur.pruning.history import History, Row
from secateur.pruning.loop import Evaluate, seeded
from secateur.pruning.plan import Mask
from secateur.pruning.progress import Progress
from secateur.relevance.isolation import evaluating
from secateur.tracing import Observer


@dataclass(frozen=True)
class MaskedResult:
    """A model of the original shapes in which `masked` filters (by module path) give 0.

    In `history`, `macs` counts what the zeros would save on both sides of a layer (an input channel counts as gone once
    all filters that feed it are), `macs_alone` only the masked filters themselves.
    """

    model: nn.Module
    masked: dict[str, Mask]
    history: History
    graph: Graph


def prune_uncoupled(
    model: nn.Module,
    data: Data,
    criterion: Choice = "lrp",
    remove: float = 0.5,
    step: float = 0.05,
    *,
    example: Example = None,
    kinds: Sequence[str] = ("filter",),
    evaluate: Evaluate | None = None,
    min_units: int = 1,
    norm: Norm | str = "default",
    absolute: Absolute | str = "default",
    loss: Loss | None = None,
    batch_size: int = 32,
    progress: bool = True,
    seed: int = 0,
    graph: Graph | None = None,
) -> MaskedResult:
    """Mask the least important filters one by one, each on its own, in steps with re-scoring. The model is not changed.

    `kinds` are "filter" and "neuron". Layers that make the model's output are left alone.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    >>> data = (torch.rand(6, 3, 5, 5), torch.arange(6) % 2)
    >>> result = prune_uncoupled(net, data, remove=0.5, step=0.25)
    >>> sum(int(mask.sum()) for mask in result.masked.values())
    6
    """
    if not 0 < remove < 1 or not 0 < step < 1:
        raise TargetError(f"remove={remove} and step={step} must lie strictly between 0 and 1.")
    data, original = repeatable(data), unwrap(model)
    if graph is None:
        graph = analyze(original, example if example is not None else example_of(original, data))
    masks = _Masks(original, graph, kinds, min_units)
    chosen = criterion_named(criterion, norm, absolute)
    goals = [min((k + 1) * step, remove) for k in range(int(np.ceil(remove / step - 1e-9)))]
    history = History()
    with Progress(progress, len(goals)) as shown:
        for number, goal in enumerate([0.0, *goals]):
            begin = time.perf_counter()
            if number:
                with seeded(seed, number):
                    scores = score(masks.model, data, chosen, graph=graph, loss=loss, batch_size=batch_size)
                masks.extend(scores.units, int(np.floor(goal * masks.total + 1e-9)))
            scored = time.perf_counter() - begin
            metrics: dict[str, float] = {}
            if evaluate is not None:
                with seeded(seed, number, salt=2), evaluating(masks.model), torch.no_grad():
                    found = evaluate(masks.model)
                metrics = dict(found) if isinstance(found, Mapping) else {"overall": float(found)}
            both, alone = masks.macs()
            gone = masks.gone()
            history.rows.append(
                Row(
                    number, masks.total - gone, gone / masks.total, graph.cost.params, both, metrics,
                    score_seconds=scored if number else 0.0, seconds=time.perf_counter() - begin, macs_alone=alone,
                )
            )  # fmt: skip
            shown(history[-1])
    return MaskedResult(masks.model, masks.by_path(), history, graph)


class _Masks:
    """Which filters are masked, and the model in which they are."""

    def __init__(self, model: nn.Module, graph: Graph, kinds: Sequence[str], min_units: int) -> None:
        self.model = duplicate(model, lambda name, old: old.detach().clone())
        self.graph, self.min_units = graph, min_units
        watcher = _Tails(twin(model).eval())
        with quiet(), watcher:
            run(watcher.model, graph.example)
        self.tails = watcher.tails
        outputs = [layer.groups for layer in graph.layers if layer.reason == "model output"]
        final = np.concatenate(outputs) if outputs else np.zeros(0, np.int64)
        self.masked: dict[int, Mask] = {
            i: np.zeros(len(p.labels), np.bool_)
            for i, p in enumerate(graph.producers)
            if p.kind in kinds and p.sites[0] in self.tails and not np.isin(graph.root[p.labels], final).any()
        }
        if not self.masked:
            raise NothingToPruneError(f"{graph.model_name} has no layer of the kinds {list(kinds)} before its output.")
        self.total = sum(len(mask) for mask in self.masked.values())

    def gone(self) -> int:
        """How many filters are masked."""
        return sum(int(mask.sum()) for mask in self.masked.values())

    def by_path(self) -> dict[str, Mask]:
        """The masks by module path."""
        return {self.graph.producers[i].sites[0].path: mask.copy() for i, mask in self.masked.items()}

    def extend(self, units: Any, goal: int) -> None:
        """Mask the lowest of those that are left until `goal` are. The best of each layer stay."""
        values, where, which = [], [], []
        for i, mask in self.masked.items():
            own = units[self.graph.producers[i].sites[0]]
            free = np.flatnonzero(~mask)
            free = free[np.argsort(own[free], kind="stable")][: max(len(free) - self.min_units, 0)]
            values.append(own[free])
            where.append(np.full(len(free), i))
            which.append(free)
        order = np.argsort(np.concatenate(values), kind="stable")[: max(goal - self.gone(), 0)]
        owners, rows = np.concatenate(where)[order], np.concatenate(which)[order]
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for i in np.unique(owners).tolist():
            mine = rows[owners == i]
            self.masked[i][mine] = True
            for site in self.graph.producers[i].sites:
                for name, dim in self.tails.get(site, ()):
                    tensor = tensors[name].detach()
                    tensor.index_fill_(dim, torch.from_numpy(mine).to(tensor.device), 0)

    def macs(self) -> tuple[int, int]:
        """MACs without the masked filters: also discounting inputs that are always 0, and the filters alone."""
        graph = self.graph
        makers, silent = np.zeros(len(graph.root)), np.zeros(len(graph.root))
        for i, producer in enumerate(graph.producers):
            classes = graph.root[producer.labels]
            np.add.at(makers, classes, 1)
            if i in self.masked:
                np.add.at(silent, classes[self.masked[i]], 1)
        dead = (makers > 0) & (silent == makers)
        inputs = {axis.parameter: axis for axis in graph.axes.axes if axis.dim == 1}
        both = alone = float(graph.cost.macs)
        for i, producer in enumerate(graph.producers):
            macs = graph.module_macs.get(producer.sites[0].path, 0)
            kept = 1 - float(self.masked[i].mean()) if i in self.masked else 1.0
            weight = self.tails.get(producer.sites[0], (("", 0),))[0][0]
            axis = inputs.get(weight)
            read = 1.0
            if axis is not None:
                read = 1 - float(dead[graph.root[axis.base : axis.base + axis.size]].mean())
            alone -= macs * (1 - kept)
            both -= macs * (1 - kept * read)
        return round(both), round(alone)


class _Tails(Observer):
    """Finds, for each conv and linear call, the tensors that make its channels: its own, and those of a batch norm that
    reads its output.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        self.tails: dict[Site, list[tuple[str, int]]] = {}
        self._names = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self._last: list[tuple[Tensor, Site]] = []

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of no interest."""
        return func(*args, **kwargs)

    def observe(self, call: Call) -> Any:
        """Note parameters of layers, and of the batch norms right behind them."""
        output = call.run()
        if isinstance(call.operation, Convolution | TransposedConvolution | Linear):
            transposed = isinstance(call.operation, TransposedConvolution)
            if not (transposed and int(call["groups"]) > 1):
                self._note(call.site, call["weight"], int(transposed))
                self._note(call.site, call["bias"], 0)
                self._last.append((output, call.site))
        elif isinstance(call.operation, BatchNorm):
            source = next((site for tensor, site in reversed(self._last) if tensor is call["input"]), None)
            if source is not None:
                for name in ("weight", "bias", "running_mean"):
                    self._note(source, call[name], 0)
        return output

    def _note(self, site: Site, tensor: Tensor | None, dim: int) -> None:
        name = self._names.get(id(tensor))
        if name is not None:
            self.tails.setdefault(site, []).append((name, dim))
