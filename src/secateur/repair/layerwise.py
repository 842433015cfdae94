"""Correct a smaller model layer by layer, in order of execution, so that each layer returns what the original's did."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.repair.corrections import Change, Correction, best_change
from secateur.repair.fit import Enough, LayerFit
from secateur.repair.layers import LayerObserver, Layers, RepairableLayer, survey
from secateur.repair.lockstep import Runner
from secateur.repair.moments import Moments
from secateur.repair.reference import Answers, Kept, Reference
from secateur.repair.rows import Places, Rows, is_convolution
from secateur.repair.samples import Samples
from secateur.running.batches import size_of
from secateur.running.copies import copy_with, named_tensors
from secateur.running.memory import resident, trim, trim_beyond
from secateur.running.progress import Listener, Rate, Repairing
from secateur.running.sandbox import evaluating, quiet, run, uncollected
from secateur.surgery.provenance import plans_of

_LARGE = 2**20  # weights of a layer before which memory is given back


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


@dataclass(frozen=True)
class Corrected:
    """Two corrected models, and their divergence from the original on held-out samples.

    The `trial` has seen no held-out sample. The choices for each layer were made with it. The other one is fitted to
    all samples, with the same choices. If nothing is held out, there is no trial. Where there is one, and the answers
    of the other are not known without asking again, its divergence is NaN.
    """

    model: nn.Module
    divergence: float
    trial: tuple[nn.Module, float] | None
    layers: dict[str, Correction]
    errors: dict[str, tuple[float, float]]


class LayerCorrector:
    """Corrects copies of the smaller model. Each layer's correction is chosen on held-out samples.

    `rounds` are extra fits of each layer that ignore errors which the ReLU (or ReLU6) after it hides. `tell` receives
    an event after each layer.
    """

    def __init__(
        self, small: nn.Module, reference: Reference, layers: Layers, rounds: int, tell: Listener, method: Correction,
        samples: Samples,
    ) -> None:  # fmt: skip
        self.reference, self.layers, self.method, self.rounds, self.samples = reference, layers, method, rounds, samples
        self._tell, self._near, self._rate, self._held = tell, method, Rate(), resident()
        self._whole = _Copy(small)
        self._trial = _Copy(small) if bool(samples.held.any()) else None
        self._chosen: dict[str, Correction] = {}
        self._errors: dict[str, tuple[float, float]] = {}
        self._order = sorted(layers.values(), key=lambda layer: layer.number)

    @property
    def has_trial(self) -> bool:
        """Whether something is held out."""
        return self._trial is not None

    def first(self, layer: RepairableLayer) -> bool:
        """Whether a layer's output is needed to correct it. What it reads tells that as well."""
        return not self.method.needs_inputs or layer.transposed

    def run(self) -> Corrected:
        """Correct all layers: with models that wait at each layer, or with a pass for each layer."""
        copies = [copy for copy in (self._whole, self._trial) if copy is not None]
        with quiet(), ExitStack() as stack:
            for copy in copies:
                stack.enter_context(evaluating(copy.model))
            answers = self._layer_by_layer() if self.reference.by_layer else self._in_lockstep()
        ask = [copy is copies[-1] or self.samples is self.reference.samples for copy in copies]
        found = [
            (self.reference.divergence_of(copy.model) if asked else math.nan)
            if made is None
            else self.reference.divergence(made)
            for copy, made, asked in zip(copies, answers, ask, strict=False)
        ]
        models = [copy.made() for copy in copies]
        trial = (models[1], found[1]) if self._trial is not None else None
        return Corrected(models[0], found[0], trial, self._chosen, self._errors)

    def _parts(self) -> list[tuple[_Copy, Places]]:
        """Which samples each model runs on together. Both run on all of them: a layer of the trial is fitted to what it
        will read. What the other model reads is close to that, but errors of all layers add up."""
        step, total = self.reference.together, self.samples.total
        parts: list[tuple[_Copy, Places]] = [
            (self._whole, slice(begin, min(begin + step, total))) for begin in range(0, total, step)
        ]
        if self._trial is not None:
            parts += [(self._trial, places) for _, places in parts]
        return parts

    def _in_lockstep(self) -> list[list[Answers] | None]:
        """All layers in one pass, in which the models wait at each layer."""
        reference, waiting = self.reference, self._parts()
        runners: list[tuple[_Copy | None, Runner]] = []
        try:
            for number, layer in enumerate(self._order):
                joined = reference.joined[layer.weight]
                ready = [part for part in waiting if _end(part[1]) <= joined]
                waiting = [part for part in waiting if _end(part[1]) > joined]
                left = {other.weight: replace(other, others=()) for other in self._order[number:]}
                for owner, places in ready:
                    x = self.samples.at(places)
                    if reference.streams and owner is self._whole:
                        original = {name: reference.layers[name] for name in left}  # of which none has other calls
                        runners.append((None, Runner(reference.original, original, places, x, lambda layer: True)))
                        runners[-1][1].go_on()
                    runners.append((owner, Runner(owner.model, left, places, x, self.first)))
                    runners[-1][1].go_on()
                here = [(copy, runner) for copy, runner in runners if runner.at(layer)]
                if len(here) == len(runners):  # else it runs on some samples only
                    self._correct(layer, here)
                for copy, runner in here:
                    runner.go_on(partial(self._made, layer, copy))
            return self._answers(runners, waiting)
        finally:
            for _, runner in runners:
                runner.close()

    def _answers(
        self, runners: list[tuple[_Copy | None, Runner]], waiting: list[tuple[_Copy, Places]]
    ) -> list[list[Answers] | None]:
        """What the corrected models answer to the samples that judge. None where that must be asked again."""
        if self.reference.apart or waiting or self.samples is not self.reference.samples:
            return [None, None]
        found: list[list[Answers] | None] = []
        for mine in (self._whole, self._trial):
            made = []
            for runner in (runner for owner, runner in runners if owner is mine):
                while not runner.done:
                    runner.go_on()
                answers = self.reference.judged(runner.output, runner.places)
                made.append(answers)
            found.append(None if None in made else cast("list[Answers]", made))
        return found

    def _correct(self, layer: RepairableLayer, here: list[tuple[_Copy | None, Runner]]) -> None:
        """Correct a layer at which the models wait."""
        originals = [runner for copy, runner in here if copy is None]
        for runner in originals:
            assert runner.rows is not None
            self.reference.store(layer, runner.rows)
        fit = LayerFit(self, layer)
        if self._whole.tensors[layer.weight].numel() > _LARGE:
            trim()
        self._held = trim_beyond(self._held)
        while not fit.solved:
            for copy, runner in here:
                if copy is not None:
                    assert runner.rows is not None
                    fit.add(layer, runner.rows, copy is self._trial)
                    if layer.others:  # a model that waits at the first call has not come to them
                        self._pass(fit, copy, runner.places)
            fit.solve()
        self._finish(fit)
        if originals:
            del self.reference.targets[layer.weight]

    def _made(self, layer: RepairableLayer, copy: _Copy | None, rows: Rows) -> Tensor:
        """The output of a layer that was corrected."""
        change = None if copy is None else copy.changes.get(layer.weight)
        if rows.output is None:
            return cast("Tensor", rows.call.run())
        output = rows.output
        if change is None or change.empty:
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

    def _layer_by_layer(self) -> list[list[Answers] | None]:
        """One layer at a time, each with passes of its own."""
        for layer in self._order:
            fit = LayerFit(self, layer)
            while not fit.solved:
                for copy, places in self._parts():
                    self._pass(fit, copy, places, first=True)
                fit.solve()
            self._finish(fit)
        return [None, None]

    def _pass(self, fit: LayerFit, copy: _Copy, places: Places, first: bool = False) -> None:
        """Add the rows of all calls of a layer in a pass of its own; those of the `first` call if asked to."""
        x, layer = self.samples.at(places), fit.layer
        collect = partial(fit.collect, copy is self._trial, first)
        watch = LayerObserver(copy.model, {layer.weight: layer}, collect, places, x, size_of(x), self.first)
        with suppress(Enough), watch:
            run(copy.model, x)

    def choose(self, layer: RepairableLayer, fit: Moments, held: Moments) -> Change:
        """The change of a layer that is best on held-out rows."""
        weight: Tensor | float = 1.0
        if layer.norm is not None:
            weight = layer.norm.scale(self._whole.tensors).square().view_as(held.ee)
        best, least, first = best_change(self.method, fit, held, layer.shifts, weight, self._near)
        if isinstance(best.correction, type(self.method)):
            self._near = best.correction  # where the search of the next layer begins
        scale = float((weight * (held if held.rows else fit).size).sum()) or 1.0
        self._errors[layer.weight] = first / scale, least / scale
        self._chosen[layer.weight] = best.correction
        return best

    def _finish(self, fit: LayerFit) -> None:
        for copy, change in zip((self._whole, self._trial), fit.changes, strict=True):
            if copy is not None and change is not None:
                copy.change(fit.layer, change)
        regressed = self.method.needs_inputs
        work = {layer.weight: layer.work(self._whole.tensors, self.samples.total, regressed) for layer in self._order}
        left = self._rate.left(sum(work[name] for name in self._chosen), sum(work.values()))
        self._tell(Repairing(self.method.name, len(self._chosen), len(self.layers), left))


class _Copy:
    """A copy of the smaller model whose layers are changed one by one."""

    def __init__(self, small: nn.Module) -> None:
        with uncollected:
            self._small, self.model = small, copy_with(small, lambda name, old: old.detach().clone())
        self.tensors = dict(named_tensors(self.model))
        self.changes: dict[str, Change] = {}
        self._changed: set[str] = set()

    def change(self, layer: RepairableLayer, change: Change) -> None:
        """Change a layer. Sums are double precision, and rounded once."""
        self.changes[layer.weight] = replace(
            change, weight=None if change.weight is None else change.weight.new_empty(0)
        )
        self._changed |= {layer.weight, layer.bias or "", *layer.means}
        weight = self.tensors[layer.weight]
        bias = self.tensors[layer.bias] if layer.bias is not None else None
        new = weight.detach().to(torch.float64, copy=True)
        constant = torch.zeros(1) if bias is None else bias.detach().double()
        if change.scale is not None:
            scale = change.scale.reshape(-1)
            shape = [1, -1] if layer.outputs else [-1, 1]
            new *= scale.view(*shape, *[1] * (weight.ndim - 2))
            constant = constant.to(scale) * scale
        if change.weight is not None:
            new += (change.weight if layer.columns else change.weight.mT).reshape(weight.shape)
        with torch.no_grad():
            if change.scale is not None or change.weight is not None:
                weight.copy_(new)
            if change.shift is not None and bias is None:
                assert layer.means
                for mean in (self.tensors[name] for name in layer.means):
                    mean.copy_(mean.double() - change.shift.reshape(-1))
            elif bias is not None:
                bias.copy_(constant if change.shift is None else constant + change.shift.reshape(-1))

    def made(self) -> nn.Module:
        """The corrected model. What the forward wrote to the copy (counters, averages) stays there. Weights that were
        changed are handed over: the copy has served."""

        def tensor(name: str, old: Tensor) -> Tensor:
            return self.tensors[name].detach() if name in self._changed else old.detach().clone()

        with uncollected:
            return copy_with(self._small, tensor)


def _end(places: Places) -> int:
    return int(places.stop) if isinstance(places, slice) else int(places.max()) + 1
