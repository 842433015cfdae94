"""Correct a smaller model layer by layer, in order of execution, so that each layer returns what the original's did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.ops.conv import Convolution
from secateur.ops.linear import Linear
from secateur.ops.table import Call
from secateur.repair.corrections import NOTHING, Change, Correction, best_change
from secateur.repair.layers import LayerObserver, Layers, RepairableLayer
from secateur.repair.moments import Moments, Regression, moments_for
from secateur.repair.reference import Reference, answers_in
from secateur.repair.rows import channel_last, read_rows, wide
from secateur.repair.survey import survey
from secateur.running.copies import copy_with
from secateur.running.sandbox import evaluating, quiet, run
from secateur.surgery.provenance import plans_of

#: For each parameter and dimension the indices that the smaller model kept.
Kept = Mapping[str, Mapping[int, np.ndarray[Any, Any]]]
# Rows of what a layer reads are made in blocks of at most this many numbers.
_BLOCK = 2**25


def kept_indices(small: nn.Module, original: nn.Module) -> Kept:
    """What the plans between the original and the smaller model left of each dimension."""
    before, after = plans_of(original), plans_of(small)
    known = {name: tuple(t.shape) for name, t in [*original.named_parameters(), *original.named_buffers()]}
    fits = after[: len(before)] == before and len(after) > len(before)
    if not fits or any(known.get(name) != tuple(shape) for name, shape in after[len(before)].shapes.items()):
        raise RepairError(
            f"this {type(small).__name__} was not made by secateur.apply or prune from the given original, so "
            "it is not known which units it kept.",
            fix="give the model that was pruned, and the one that came out",
        )
    kept: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for plan in after[len(before) :]:
        for name, dims in plan.cuts.items():
            for dim, gone in dims.items():
                have = kept.setdefault(name, {}).get(dim, np.arange(plan.shapes[name][dim]))
                kept[name][dim] = np.delete(have, list(gone))
    return kept


def layers_in_both(small: nn.Module, reference: Reference, kept: Kept) -> dict[str, RepairableLayer]:
    """The layers of the original that the smaller model has too, with the smaller model's batch dimension.

    Layers whose number of positions changed (a layer across tokens) are left out: their rows have no counterparts.
    """
    own = survey(small, reference.samples.two).layers
    pairs = ((layer, own[name]) for name, layer in reference.layers.items() if name in own)
    return {
        a.weight: replace(a, batch=b.batch, kept=kept.get(a.weight, {}).get(1 if a.transposed else 0))
        for a, b in pairs
        if a.positions == b.positions
    }


@dataclass(frozen=True)
class Corrected:
    """A corrected copy: the correction of each weight, its error before and after on held-out samples (relative to the
    original's output), and the divergence of the model's answers from the original's there."""

    model: nn.Module
    chosen: dict[str, Correction]
    errors: dict[str, tuple[float, float]]
    divergence: float


class _Enough(Exception):
    """The layer in question has run."""


@dataclass(frozen=True)
class _Rows:
    """Rows of a layer for some samples, (samples, positions, channels): what it returns (y), what is added to that,
    and what both together should be (wanted)."""

    call: Call
    place: slice
    positions: Tensor | None
    y: Tensor
    wanted: Tensor
    added: Tensor | None

    @property
    def missing(self) -> Tensor:
        """What the layer's own output lacks."""
        return (self.wanted if self.added is None else self.wanted - self.added) - self.y

    def of(self, index: Tensor) -> _Rows:
        """The rows of some samples."""
        positions, added = (None if t is None else t[index] for t in (self.positions, self.added))
        return replace(self, positions=positions, y=self.y[index], wanted=self.wanted[index], added=added)

    def hidden(self, made: Tensor, level: Tensor) -> Tensor:
        """How `missing` changes where the original's ReLU passes nothing, if `made` is added to the output.

        There, any output that does not pass is right.
        """
        begins, side = level.to(self.y.dtype)
        limit = begins - self.y if self.added is None else begins - self.y - self.added
        enough = torch.where(side > 0, made.minimum(limit), made.maximum(limit))
        return torch.where((self.wanted - begins) * side < 0, enough - self.missing, 0.0)


class LayerCorrector:
    """Corrects a copy of the smaller model. Each layer's correction is chosen on held-out samples.

    If the corrections are `given`, all samples fit. `rounds` are extra fits of each layer that ignore errors which the
    ReLU after it hides. `step` is called after each layer.
    """

    def __init__(
        self, small: nn.Module, reference: Reference, layers: Layers, method: Correction,
        given: Mapping[str, Correction] | None = None, rounds: int = 0, step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.reference, self.method, self.given, self.rounds = reference, method, given, rounds
        self._copy = copy_with(small, lambda name, old: old.detach().clone())
        self._tensors = dict([*self._copy.named_parameters(), *self._copy.named_buffers()])
        self.layers = {n: layer for n, layer in layers.items() if given is None or given.get(n, NOTHING) != NOTHING}
        self.inverse = {name: layer.left(reference.inverse[name]) for name, layer in self.layers.items()}
        self._step, self._near = step, method
        self._chosen: dict[str, Correction] = {}
        self._errors: dict[str, tuple[float, float]] = {}

    def run(self) -> Corrected:
        """Correct all layers: in one pass if all samples fit into memory, else with a pass for each layer."""
        model, samples, at_once = self._copy, self.reference.samples, self.reference.at_once
        answers = []
        with quiet(), evaluating(model):
            if samples.total <= at_once:
                place, x = next(samples.chunks(at_once))
                with _Pass(model, self, place, x):
                    answers.append(answers_in(run(model, x), samples.total))
            else:
                for layer in sorted(self.layers.values(), key=lambda layer: layer.number):
                    fit = _LayerFit(self, layer)
                    while True:
                        for place, x in samples.chunks(at_once):
                            with suppress(_Enough), _Pass(model, self, place, x, fit):
                                run(model, x)
                        if fit.solve():
                            break
                    self.finish(layer, fit.change)
                for place, x in samples.chunks(at_once):
                    answers.append(answers_in(run(model, x), place.stop - place.start))
        return Corrected(model, self._chosen, self._errors, self.reference.divergence(answers))

    def choose(self, layer: RepairableLayer, fit: Moments, held: Moments) -> Change:
        """The change of a layer that is best on held-out rows."""
        weight: Tensor | float = 1.0
        if layer.norm is not None:
            weight = layer.norm.scale(self._tensors).square().view_as(held.ee)
        best, least, first = best_change(self.method, fit, held, layer.shifts, weight, self._near)
        if isinstance(best.correction, type(self.method)):
            self._near = best.correction  # where the search of the next layer begins
        scale = float((weight * (held if held.rows else fit).size).sum()) or 1.0
        self._errors[layer.weight] = first / scale, least / scale
        return best

    def finish(self, layer: RepairableLayer, change: Change | None) -> None:
        """Change the layer; None if the model did not run it. Sums are double precision, and rounded once."""
        if change is None:
            return
        self._chosen[layer.weight] = change.correction
        weight = self._tensors[layer.weight]
        bias = self._tensors[layer.bias] if layer.bias is not None else None
        new = weight.detach().double()
        constant = torch.zeros(1) if bias is None else bias.detach().double()
        if change.scale is not None:
            scale = change.scale.reshape(-1)
            shape = [1, -1] if layer.transposed else [-1, 1]
            new = new * scale.view(*shape, *[1] * (weight.ndim - 2))
            constant = constant.to(scale) * scale
        if change.weight is not None:
            new = new + change.weight.mT.reshape(weight.shape)
        with torch.no_grad():
            if change.scale is not None or change.weight is not None:
                weight.copy_(new)
            if change.shift is not None and bias is None:
                assert layer.norm is not None
                mean = self._tensors[layer.norm.mean]
                mean.copy_(mean.double() - change.shift.reshape(-1))
            elif bias is not None:
                bias.copy_(constant if change.shift is None else constant + change.shift.reshape(-1))
        self._step()


class _LayerFit:
    """The regression of one layer: `add` rows, then `solve`; again while that returns False."""

    def __init__(self, corrector: LayerCorrector, layer: RepairableLayer) -> None:
        self._corrector, self.layer, self._rounds = corrector, layer, corrector.rounds
        self._level = layer.left(corrector.reference.levels[layer.weight])
        #: The change so far; None if the model does not run the layer.
        self.change: Change | None = None
        # Sums over rows that fit and that are held out; in further rounds, those that fit with moved targets.
        self._sums: tuple[Moments, Moments] | None = None
        self._moved: Regression | None = None

    def add(self, rows: _Rows) -> None:
        """Add the rows of some samples; in further rounds, move those that fit."""
        call, y, reference = rows.call, rows.y, self._corrector.reference
        groups = int(call["groups"]) if isinstance(call.operation, Convolution) else 1
        samples, count, outputs = y.shape
        full = self._corrector.method.needs_inputs and not self.layer.transposed
        features = call["weight"][0].numel() if full else 0
        if self._sums is None:
            size = (groups, outputs // groups, features, reference.samples.total * count, y.device)
            self._sums = moments_for(*size), moments_for(*size)
        held = reference.samples.held_all[rows.place]
        if self._corrector.given is not None:
            held = torch.zeros_like(held)
        x: Tensor = call["input"]
        if isinstance(call.operation, Linear):
            x = channel_last(call, x, self.layer.batch, self.layer.positions)
        weights = reference.weights.get(self.layer.weight)
        block = max(1, _BLOCK // (count * groups * max(features, 1)))
        shape = (-1, groups, outputs // groups)
        for sums, mask in zip(self._sums, (~held, held), strict=True):
            if self._moved is not None and sums is self._sums[1]:
                continue
            members = mask.nonzero().ravel().to(y.device)
            for begin in range(0, len(members), block):
                index = members[begin : begin + block]
                part = rows if len(index) == samples else rows.of(index)
                read = None
                if full:
                    read = read_rows(call, x if part is rows else x[index], part.positions).flatten(0, 1)
                counts = None if weights is None else weights[rows.place][index].ravel()
                if self._moved is None:
                    sums.add(part.missing.reshape(shape), part.y.reshape(shape), read, counts)
                else:
                    assert read is not None
                    assert self._level is not None
                    more = part.hidden(self._made(read).reshape(part.y.shape), self._level)
                    self._moved.move(more.reshape(shape), read, counts)

    def _made(self, rows: Tensor) -> Tensor:
        """What the change so far adds to the layer's output."""
        assert self.change is not None
        assert self.change.weight is not None
        rows = wide(rows)
        made = (rows.transpose(0, 1) @ self.change.weight.to(rows.dtype)).transpose(0, 1)
        return made if self.change.shift is None else made + self.change.shift.to(rows.dtype)

    def solve(self) -> bool:
        """Find the change from the rows; False if they are needed once more."""
        if self._sums is None:
            return True
        fit, held = self._sums
        if self.change is not None:
            assert self._moved is not None
            self.change = self.change.correction.fit(self._moved, self.layer.shifts)
            self._rounds -= 1
        elif self._corrector.given is not None:
            self.change = self._corrector.given[self.layer.weight].fit(fit, self.layer.shifts)
        else:
            self.change = self._corrector.choose(self.layer, fit, held)
        if not self._rounds or self._level is None or self.change.weight is None or self.change.scale is not None:
            return True
        assert isinstance(fit, Regression)
        self._moved = copy(fit)
        return False


class _Pass(LayerObserver):
    """One pass of the copy. It corrects each layer when it runs, or collects rows for one `fit` and stops."""

    def __init__(
        self, model: nn.Module, corrector: LayerCorrector, place: slice, inputs: Any, fit: _LayerFit | None = None
    ) -> None:
        layers = corrector.layers if fit is None else {fit.layer.weight: fit.layer}
        super().__init__(model, layers, corrector.inverse, corrector.reference.positions, place, inputs)
        self._corrector, self._fit = corrector, fit

    def run_layer(self, layer: RepairableLayer, call: Call) -> Any:
        """The output of the corrected layer."""
        output: Tensor = call.run()
        positions, y, added = self.sampled(layer, call, output)
        wanted = layer.left(self._corrector.reference.targets[layer.weight][self.place])
        if wanted.shape != y.shape:
            raise RepairError(
                f"`{layer.weight}` returns rows of shape {tuple(y.shape)}, but {tuple(wanted.shape)} are left of the "
                "original's.",
                fix="repair the model that apply or prune made from this original",
            )
        rows = _Rows(call, self.place, positions, y, wanted, added)
        if self._fit is not None:
            self._fit.add(rows)
            raise _Enough
        fit = _LayerFit(self._corrector, layer)
        fit.add(rows)
        while not fit.solve():
            fit.add(rows)
        change = fit.change
        self._corrector.finish(layer, change)
        if change is None or change.empty:
            return output
        if change.weight is None and output.dtype in (torch.float32, torch.float64):
            return _adjusted(layer, call, change, output)  # saves a run of the layer
        return call.run()


def _adjusted(layer: RepairableLayer, call: Call, change: Change, output: Tensor) -> Tensor:
    """A layer's output after a change of scale and constant."""
    shape = [-1] if isinstance(call.operation, Linear) else [-1, *[1] * (output.ndim - 2)]
    if change.scale is not None:
        output = output.mul_(change.scale.reshape(shape).to(output.dtype))
    if change.shift is not None and layer.bias is not None:  # else the norm takes it
        output = output.add_(change.shift.reshape(shape).to(output.dtype))
    return output
