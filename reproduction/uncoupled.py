"""The paper's way with ResNets: each filter is ranked and masked on its own. Nothing is coupled, nothing is removed.

The masked networks do not get smaller, and the share of masked filters includes filters that could not be removed
alone. This module reproduces the paper's curves; use `secateur.prune` for real work. One difference: the batch norm
behind a masked filter is silenced too. In the authors' script it still emits a constant.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reproduction.tensor_files import load, save
from secateur.analysis.analyze import analyze
from secateur.criteria.registry import Choice, criterion_named
from secateur.criteria.scoring import score
from secateur.errors import NothingToPruneError, TargetError
from secateur.loop.settings import Evaluate, Tuner
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.layers import Mask
from secateur.ops.linear import Linear
from secateur.ops.norm import BatchNorm
from secateur.ops.table import Call, Site
from secateur.results.history import History, Row
from secateur.running.batches import Data, example_of, repeatable
from secateur.running.copies import copy_with, shared_copy, unwrap
from secateur.running.identity import digest, numbers
from secateur.running.observer import Observer
from secateur.running.sandbox import evaluating, quiet, run, seeded
from secateur.running.tensor_files import fill
from secateur.structure.graph import Graph

# The paper's costs are kept among the metrics of a row, under this prefix.
_PAPER = "paper "


@dataclass(frozen=True)
class MaskedResult:
    """A model of the original shapes in which `masked` filters (by module path) give 0.

    In `history`, `macs` and `params` count what the zeros would save on both sides of a layer: an input channel is gone
    once all filters that feed it are masked, and the numbers of a batch norm go with their filter. `paper_cost` gives
    the paper's count of a row: only the masked filters themselves are discounted.
    """

    model: nn.Module
    masked: dict[str, Mask]
    history: History
    graph: Graph


def paper_cost(row: Row, name: str) -> float:
    """The "macs" or "params" of a row as the paper counts them. For a row without masks these are the real ones."""
    return row.metrics.get(_PAPER + name, getattr(row, name))


def with_paper_costs(rows: Any) -> Any:
    """Rows of a JSON file, with the paper's costs among the metrics. Older files have them as columns of their own."""
    for row in rows if isinstance(rows, list) else ():
        for name in ("macs", "params"):
            value = row.pop(f"{name}_alone", None) if isinstance(row, dict) else None
            if value is not None:
                row.setdefault("metrics", {})[_PAPER + name] = value
    return rows


def prune_uncoupled(
    model: nn.Module,
    data: Data,
    criterion: Choice = "lrp",
    remove: float = 0.5,
    step: float = 0.05,
    *,
    finetune: Tuner | None = None,
    evaluate: Evaluate | None = None,
    batch_size: int = 32,
    checkpoint: Path | None = None,
    seed: int = 0,
    graph: Graph | None = None,
) -> MaskedResult:
    """Mask the least important filters, each on its own, in steps with re-scoring. The model is not changed.

    Layers that make the model's output are never masked, and every layer keeps a filter. `finetune(model, step)` trains
    the masked model in place; masked weights get no gradient and stay 0. With `checkpoint`, a file is replaced after
    each step, and the same call resumes from it.

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
        graph = analyze(original, example_of(original, data))
    masks = _Masks(original, graph)
    chosen = criterion_named(criterion)
    goals = [min((k + 1) * step, remove) for k in range(int(np.ceil(remove / step - 1e-9)))]
    settings: dict[str, Any] = {}
    history = History()
    if checkpoint is not None:
        settings = {
            "model": graph.model_name, "weights": digest(original), "criterion": repr(chosen), "remove": remove,
            "step": step, "seed": seed,
        }  # fmt: skip
        history = masks.resume(checkpoint, settings)
    for number, goal in list(enumerate([0.0, *goals]))[len(history) :]:
        begin = time.perf_counter()
        if number:
            with seeded(seed, number):
                scores = score(masks.model, data, chosen, graph=graph, batch_size=batch_size)
            masks.extend(scores.units, int(np.floor(goal * masks.total + 1e-9)))
        scored = time.perf_counter() - begin
        if number and finetune is not None:
            with seeded(seed, number, salt=1), masks.held():
                finetune(masks.model, number)
        metrics: dict[str, float] = {}
        if evaluate is not None:
            with seeded(seed, number, salt=2), evaluating(masks.model), torch.no_grad():
                found = evaluate(masks.model)
            metrics = dict(found) if isinstance(found, Mapping) else {"overall": float(found)}
        (macs, metrics[f"{_PAPER}macs"]), (params, metrics[f"{_PAPER}params"]) = masks.macs(), masks.params()
        gone = masks.gone()
        history.rows.append(
            Row(
                number, masks.total - gone, gone / masks.total, params, macs, metrics,
                score_seconds=scored if number else 0.0, seconds=time.perf_counter() - begin,
            )
        )  # fmt: skip
        if checkpoint is not None:
            masks.save(checkpoint, settings, history)
    return MaskedResult(masks.model, masks.by_path(), history, graph)


class _Masks:
    """Which filters are masked, and the model in which they are."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.model = copy_with(model, lambda name, old: old.detach().clone())
        self.graph = graph
        self.inputs = {axis.parameter: axis for axis in graph.axes.axes if axis.dim == 1}
        watcher = _Tails(shared_copy(model).eval())
        with quiet(), watcher:
            run(watcher.model, graph.example)
        self.tails = watcher.tails
        outputs = [layer.groups for layer in graph.layers if layer.reason == "model output"]
        final = np.concatenate(outputs) if outputs else np.zeros(0, np.int64)
        self.masked: dict[int, Mask] = {
            i: np.zeros(len(p.labels), np.bool_)
            for i, p in enumerate(graph.producers)
            if p.kind == "filter" and p.sites[0] in self.tails and not np.isin(graph.root[p.labels], final).any()
        }
        if not self.masked:
            raise NothingToPruneError(f"{graph.model_name} has no convolution before its output.")
        self.total = sum(len(mask) for mask in self.masked.values())

    def gone(self) -> int:
        """How many filters are masked."""
        return sum(int(mask.sum()) for mask in self.masked.values())

    def by_path(self) -> dict[str, Mask]:
        """The masks by module path."""
        return {self.graph.producers[i].sites[0].path: mask.copy() for i, mask in self.masked.items()}

    def extend(self, units: Any, goal: int) -> None:
        """Mask the filters with the lowest scores until `goal` are masked. The best filter of each layer stays."""
        values, where, which = [], [], []
        for i, mask in self.masked.items():
            own = units[self.graph.producers[i].sites[0]]
            free = np.flatnonzero(~mask)
            free = free[np.argsort(own[free], kind="stable")][:-1]
            values.append(own[free])
            where.append(np.full(len(free), i))
            which.append(free)
        order = np.argsort(np.concatenate(values), kind="stable")[: max(goal - self.gone(), 0)]
        owners, rows = np.concatenate(where)[order], np.concatenate(which)[order]
        for i in np.unique(owners).tolist():
            self.masked[i][rows[owners == i]] = True
        self._clear()

    def _clear(self) -> None:
        """Set masked entries to 0."""
        tensors = numbers(self.model)
        for name, dim, mask in self._tensors():
            tensor = tensors[name].detach()
            tensor.index_fill_(dim, torch.from_numpy(np.flatnonzero(mask)).to(tensor.device), 0)

    def _tensors(self) -> Iterator[tuple[str, int, Mask]]:
        """Every tensor with entries of masked filters, the dimension of these entries, and the mask."""
        for i, mask in self.masked.items():
            if mask.any():
                for site in self.graph.producers[i].sites:
                    for name, dim in self.tails.get(site, ()):
                        yield name, dim, mask

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which masked rows get no gradient. At its end they are set to 0 again."""
        parameters, hooks = dict(self.model.named_parameters()), []
        for name, dim, mask in self._tensors():
            if name in parameters and parameters[name].requires_grad:
                shape = [1] * parameters[name].ndim
                shape[dim] = len(mask)
                kept = torch.from_numpy(~mask).to(parameters[name]).view(shape)
                hooks.append(parameters[name].register_hook(partial(torch.mul, kept)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._clear()

    def save(self, path: Path, settings: Mapping[str, Any], history: History) -> None:
        """Write a checkpoint."""
        tensors = {f"model/{name}": tensor for name, tensor in numbers(self.model).items()}
        tensors.update({f"mask/{i}": torch.from_numpy(mask) for i, mask in self.masked.items()})
        save(path, "masks", settings, history.to_json(), tensors)

    def resume(self, path: Path, settings: Mapping[str, Any]) -> History:
        """Restore the state of a checkpoint. Returns its history, which is empty if there is no checkpoint."""
        found = load(path, "masks", settings)
        if found is None:
            return History()
        rows, tensors = found
        kept = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
        fill(numbers(self.model), kept, path, "the model")
        for i in self.masked:
            self.masked[i] = tensors[f"mask/{i}"].numpy().copy()
        return History.from_json(rows)

    def macs(self) -> tuple[int, int]:
        """MACs without masked filters and inputs that are always 0; and MACs without masked filters only."""
        both = alone = float(self.graph.cost.macs)
        dead = self._dead()
        for i, producer in enumerate(self.graph.producers):
            macs = self.graph.module_macs.get(producer.sites[0].path, 0)
            kept, read = self._kept(i), self._read(i, dead)
            alone -= macs * (1 - kept)
            both -= macs * (1 - kept * read)
        return round(both), round(alone)

    def params(self) -> tuple[int, int]:
        """Parameters without masked filters, their inputs, biases and batch norms; and without masked filters only."""
        both = alone = float(self.graph.cost.params)
        dead, sizes = self._dead(), {name: p.numel() for name, p in self.model.named_parameters()}
        for i, producer in enumerate(self.graph.producers):
            kept, read = self._kept(i), self._read(i, dead)
            names = dict.fromkeys(name for site in producer.sites for name, _ in self.tails.get(site, ()))
            for position, name in enumerate(name for name in names if name in sizes):
                both -= sizes[name] * (1 - kept * (read if position == 0 else 1))
                alone -= sizes[name] * (1 - kept) if position == 0 else 0
        return round(both), round(alone)

    def _kept(self, index: int) -> float:
        return 1 - float(self.masked[index].mean()) if index in self.masked else 1.0

    def _dead(self) -> Mask:
        """By group of coupled units: whether every filter that makes it is masked."""
        makers, silent = np.zeros(len(self.graph.root)), np.zeros(len(self.graph.root))
        for i, producer in enumerate(self.graph.producers):
            groups = self.graph.root[producer.labels]
            np.add.at(makers, groups, 1)
            if i in self.masked:
                np.add.at(silent, groups[self.masked[i]], 1)
        dead: Mask = (makers > 0) & (silent == makers)
        return dead

    def _read(self, index: int, dead: Mask) -> float:
        """The share of a layer's input channels that are not always 0."""
        weight = self.tails.get(self.graph.producers[index].sites[0], [("", 0)])[0][0]
        axis = self.inputs.get(weight)
        if axis is None:
            return 1.0
        return 1 - float(dead[self.graph.root[axis.base : axis.base + axis.size]].mean())


class _Tails(Observer):
    """Finds, for each call of a convolution or linear layer, the tensors with one entry per output channel.

    These are its own weight and bias, and those of a batch norm that reads its output.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        self.tails: dict[Site, list[tuple[str, int]]] = {}
        self._names = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self._last: list[tuple[Tensor, Site]] = []

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run other calls unobserved."""
        return func(*args, **kwargs)

    def observe(self, call: Call) -> Any:
        """Note the tensors of layers and of the batch norms right behind them."""
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
