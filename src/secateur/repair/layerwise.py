"""Correct a smaller model layer by layer, in order of execution, so that each layer returns what the original's did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.ops.conv import Convolution
from secateur.repair.corrections import NOTHING, Change, Correction, best_change
from secateur.repair.layers import LayerObserver, Layers, RepairableLayer, survey
from secateur.repair.moments import Moments, Regression, moments_for
from secateur.repair.reference import Answers, Reference, answers_in
from secateur.repair.rows import Rows, channel_last, is_convolution, operands, read_rows
from secateur.running.copies import copy_with, named_tensors
from secateur.running.progress import Listener, Repairing
from secateur.running.sandbox import evaluating, quiet, run
from secateur.surgery.provenance import plans_of

#: For each parameter and dimension the indices that the smaller model kept.
Kept = Mapping[str, Mapping[int, np.ndarray[Any, Any]]]
# Rows of what a layer reads are made in blocks of at most this many numbers.
_BLOCK = 2**25


def kept_indices(small: nn.Module, original: nn.Module) -> Kept:
    """What the plans between the original and the smaller model left of each dimension."""
    before, after = plans_of(original), plans_of(small)
    known = {name: tuple(t.shape) for name, t in named_tensors(original)}
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
    """The layers of the original that the smaller model has too, with the smaller model's batch dimension and calls.

    Layers whose number of positions changed (a layer across tokens) are left out: their rows have no counterparts. So
    are those to which something is added in one of the models only.
    """
    own = survey(small, reference.samples.two).layers
    return {
        name: layer.cut(kept.get(name, {}).get(layer.outputs), own[name])
        for name, layer in reference.layers.items()
        if name in own
        and layer.positions == own[name].positions
        and (layer.partner is None) == (own[name].partner is None)
    }


@dataclass(frozen=True)
class Outcome:
    """What a repair did.

    `divergence` says how far each candidate was from the original on held-out samples. `method` names the one that was
    taken, "none" if no repair came closer than no repair. `layers` has the correction of each weight, `errors` the
    error of its output before and after, relative to the original's output.
    """

    model: nn.Module
    method: str
    divergence: dict[str, float]
    layers: dict[str, Correction]
    errors: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        tried = ", ".join(f"{name} {value:.4g}" for name, value in self.divergence.items())
        lines = [f"{self.method}; divergence from the original on held-out samples: {tried}"]
        width = max([len(name) for name in self.layers] or [0])
        for name, correction in self.layers.items():
            before, after = self.errors.get(name, (math.nan, math.nan))
            lines.append(f"{name.ljust(width)}  {correction!s:<10}  error {100 * before:6.2f} % → {100 * after:6.2f} %")
        return "\n".join(lines)


class _Enough(Exception):
    """The layer in question has run."""


class LayerCorrector:
    """Corrects a copy of the smaller model. Each layer's correction is chosen on held-out samples.

    If the corrections are `given`, all samples fit. `rounds` are extra fits of each layer that ignore errors which the
    ReLU after it hides. `tell` receives an event after each layer.
    """

    def __init__(
        self, small: nn.Module, reference: Reference, layers: Layers, rounds: int, tell: Listener, method: Correction,
        given: Mapping[str, Correction] | None = None,
    ) -> None:  # fmt: skip
        self.reference, self.method, self.given, self.rounds = reference, method, given, rounds
        self._small, self._copy = small, copy_with(small, lambda name, old: old.detach().clone())
        self._tensors = dict(named_tensors(self._copy))
        self.layers = {n: layer for n, layer in layers.items() if given is None or given.get(n, NOTHING) != NOTHING}
        self._total, self._tell, self._near = len(layers), tell, method
        self._chosen: dict[str, Correction] = {}
        self._changed: set[str] = set()
        self._errors: dict[str, tuple[float, float]] = {}
        self.wanted: Callable[[str], Tensor] = reference.wanted  # what a layer should return

    def run(self) -> Outcome:
        """Correct all layers: in one pass if all samples fit into memory, else with a pass for each layer."""
        model, samples, at_once = self._copy, self.reference.samples, self.reference.at_once
        answers: list[Answers] = []
        with quiet(), evaluating(model):
            if samples.total <= at_once:
                place, x = next(samples.chunks(at_once))
                with self.reference.beside(place, x) as self.wanted:
                    self._run_once(model, place, x, answers)
            else:
                for layer in sorted(self.layers.values(), key=lambda layer: layer.number):
                    fit, only = _LayerFit(self, layer), {layer.weight: layer}
                    while not fit.solved:
                        for place, x in samples.chunks(at_once):
                            with suppress(_Enough), LayerObserver(model, only, fit.collect, place, x):
                                run(model, x)
                        fit.solve()
                    if fit.change is not None:
                        self._finish(layer, fit.change)
                for place, x in samples.chunks(at_once):
                    answers.append(answers_in(run(model, x), place.stop - place.start))
        sparse = self.reference.sparse
        found = self.reference.divergence_of(model) if sparse else self.reference.divergence(answers)
        divergence = {self.method.name: found}
        # What the forward wrote to the copy (counters, averages) stays there.
        corrected = copy_with(
            self._small, lambda name, old: (self._tensors[name] if name in self._changed else old).detach().clone()
        )
        return Outcome(corrected, self.method.name, divergence, self._chosen, self._errors)

    def _run_once(self, model: nn.Module, place: slice, x: Any, answers: list[Answers]) -> None:
        with suppress(_Enough), LayerObserver(model, self.layers, self._correct, place, x):
            answers.append(answers_in(run(model, x), self.reference.samples.total))

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

    def _correct(self, layer: RepairableLayer, rows: Rows, output: Tensor) -> Tensor:
        """Correct a layer when it runs; returns its new output."""
        fit = _LayerFit(self, layer)
        while not fit.solved:
            fit.add(rows)
            fit.solve()
        change = fit.change
        assert change is not None
        self._finish(layer, change)
        if self.reference.sparse and len(self._chosen) == len(self.layers):
            raise _Enough  # the answers are large, and looked at elsewhere
        if change.empty:
            return output
        if change.weight is not None or output.dtype not in (torch.float32, torch.float64):
            return cast("Tensor", rows.call.run())
        # A change of scale and constant needs no second run.
        shape = [-1, *[1] * (output.ndim - 2)] if is_convolution(rows.call) else [-1]
        if change.scale is not None:
            output = output.mul_(change.scale.reshape(shape).to(output.dtype))
        if change.shift is not None and layer.bias is not None:  # else the norm takes it
            output = output.add_(change.shift.reshape(shape).to(output.dtype))
        return output

    def _finish(self, layer: RepairableLayer, change: Change) -> None:
        """Change the layer. Sums are double precision, and rounded once."""
        self._chosen[layer.weight] = change.correction
        self._changed |= {layer.weight, layer.bias or "", layer.norm.mean if layer.norm is not None else ""}
        weight = self._tensors[layer.weight]
        bias = self._tensors[layer.bias] if layer.bias is not None else None
        new = weight.detach().double()
        constant = torch.zeros(1) if bias is None else bias.detach().double()
        if change.scale is not None:
            scale = change.scale.reshape(-1)
            shape = [1, -1] if layer.outputs else [-1, 1]
            new = new * scale.view(*shape, *[1] * (weight.ndim - 2))
            constant = constant.to(scale) * scale
        if change.weight is not None:
            new = new + (change.weight if layer.columns else change.weight.mT).reshape(weight.shape)
        with torch.no_grad():
            if change.scale is not None or change.weight is not None:
                weight.copy_(new)
            if change.shift is not None and bias is None:
                assert layer.norm is not None
                mean = self._tensors[layer.norm.mean]
                mean.copy_(mean.double() - change.shift.reshape(-1))
            elif bias is not None:
                bias.copy_(constant if change.shift is None else constant + change.shift.reshape(-1))
        self._tell(Repairing(self.method.name, len(self._chosen), self._total, self.given is not None))


class _LayerFit:
    """The regression of one layer: `add` rows, then `solve`; again until it is `solved`."""

    def __init__(self, corrector: LayerCorrector, layer: RepairableLayer) -> None:
        self._corrector, self.layer, self._rounds = corrector, layer, corrector.rounds
        self.solved = False
        #: The change so far; None if the model does not run the layer.
        self.change: Change | None = None
        # Sums over rows that fit and that are held out; in further rounds, those that fit with moved targets.
        self._sums: tuple[Moments, Moments] | None = None
        self._moved: Regression | None = None

    def collect(self, layer: RepairableLayer, rows: Rows, output: Tensor) -> Tensor:
        """Add the rows, and stop the model: nothing after the layer is needed."""
        self.add(rows)
        raise _Enough

    def add(self, rows: Rows) -> None:
        """Add the rows of some samples; in further rounds, move those that fit."""
        call, y, reference = rows.call, rows.y, self._corrector.reference
        wanted = self.layer.left(self._corrector.wanted(self.layer.weight)[rows.place])
        if wanted.shape != y.shape:
            raise RepairError(
                f"`{self.layer.weight}` returns rows of shape {tuple(y.shape)}, but {tuple(wanted.shape)} are left of "
                "the original's.",
                fix="repair the model that apply or prune made from this original",
            )
        groups = int(call["groups"]) if isinstance(call.operation, Convolution) else 1
        samples, count, outputs = y.shape
        full = self._corrector.method.needs_inputs and not self.layer.transposed
        x, weight, _ = cast("tuple[Tensor, Tensor, Tensor | None]", operands(call))
        features = weight.numel() // weight.shape[self.layer.outputs] if full else 0
        if self._sums is None:
            size = (groups, outputs // groups, features, reference.samples.total * count, y.device)
            self._sums = moments_for(*size), moments_for(*size)
        held = reference.samples.held_all[rows.place] & (self._corrector.given is None)
        if not is_convolution(call):
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
                part, goal, inputs = rows, wanted, x
                if len(index) < samples:
                    part, goal, inputs = rows.of(index), wanted[index], x[index]
                read = read_rows(call, inputs, part.chosen).flatten(0, 1) if full else None
                if self._moved is None:
                    lacks = part.missing(goal)
                else:
                    assert read is not None
                    assert self.layer.level is not None
                    assert self.change is not None
                    lacks = part.hidden(goal, self.change.adds(read).reshape(part.y.shape), self.layer.level)
                lacking, own, counts = lacks.reshape(shape), part.y.reshape(shape), None
                if weights is not None:  # rows that do not count may hold anything
                    counts = weights[rows.place][index].ravel().to(y.device)
                    live = counts > 0
                    lacking, own, counts = lacking[live], own[live], counts[live]
                    read = None if read is None else read[live]
                if self._moved is None:
                    sums.add(lacking, own, read, counts)
                else:
                    self._moved.move(lacking, cast("Tensor", read), counts)

    def solve(self) -> None:
        """Find the change from the rows."""
        self.solved = True
        if self._sums is None:
            return
        fit, held = self._sums
        if self.change is not None:
            assert self._moved is not None
            change = self.change.correction.fit(self._moved, self.layer.shifts)
            self._rounds -= 1
        elif self._corrector.given is not None:
            change = self._corrector.given[self.layer.weight].fit(fit, self.layer.shifts)
        else:
            change = self._corrector.choose(self.layer, fit, held)
        self.change = change
        if self._rounds and self.layer.level is not None and change.weight is not None and change.scale is None:
            assert isinstance(fit, Regression)
            self._moved, self.solved = copy(fit), False
