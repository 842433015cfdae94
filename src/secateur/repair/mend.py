"""Mending: layer by layer in order of execution, bring a smaller model's outputs back to the original's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.nest import map_tensors
from secateur.ops.conv import Convolution
from secateur.ops.linear import Linear
from secateur.ops.table import Call
from secateur.repair.reference import Holding, Reference, answers_in, wide
from secateur.repair.rows import channel_last, read_rows
from secateur.repair.solve import Correction, FewRows, Method, Moments, Regression, best_of, remake
from secateur.repair.survey import LayerSite, survey
from secateur.running.copies import copy_with
from secateur.running.sandbox import evaluating, quiet, run

#: For each parameter and dimension the indices that the smaller model kept.
Kept = Mapping[str, Mapping[int, np.ndarray[Any, Any]]]
# Rows of what a layer reads are made in blocks of at most this many numbers.
_BLOCK = 2**25


@dataclass(frozen=True)
class Mended:
    """A mended copy: the correction chosen for each weight, the error it had and has on held-out samples (relative to
    the original's output), and how far the model's answers are from the original's there."""

    model: nn.Module
    chosen: dict[str, str]
    errors: dict[str, tuple[float, float]]
    divergence: float


def mend(
    small: nn.Module, reference: Reference, sites: Mapping[str, LayerSite], kept: Kept, method: Method,
    chosen: Mapping[str, str] | None = None, rounds: int = 0, step: Callable[[], None] = lambda: None,
) -> Mended:  # fmt: skip
    """Mend a copy. Strengths are found on held-out samples; with `chosen` they are given, and all samples fit.

    In further `rounds` a layer before a ReLU may give what it likes where the ReLU lets nothing pass in either model.
    """
    copy = copy_with(small, lambda name, old: old.detach().clone())
    work = _Work(copy, reference, sites, kept, method, chosen, rounds, step)
    samples, at_once = reference.samples, reference.at_once
    answers = []
    with quiet(), evaluating(copy):
        if samples.total <= at_once:
            place, x = next(samples.chunks(at_once))
            with _Mending(copy, work, place, x, to=None):
                answers.append(answers_in(run(copy, x), samples.total))
        else:
            for site in sorted(work.sites.values(), key=lambda site: site.number):
                while True:
                    for place, x in samples.chunks(at_once):
                        try:
                            with _Mending(copy, work, place, x, to=site):
                                run(copy, x)
                        except _Enough:
                            continue
                    if work.solve(site):
                        break
                work.finish(site)
            for place, x in samples.chunks(at_once):
                answers.append(answers_in(run(copy, x), place.stop - place.start))
    return Mended(copy, work.chosen, work.errors, _divergence(answers, reference))


def sites_in(small: nn.Module, reference: Reference) -> dict[str, LayerSite]:
    """The layers of a smaller model that have a counterpart in the original, as the smaller model runs them.

    Where units lie along the positions of a layer (a layer across tokens), rows cannot be told apart: it is left out.
    """
    own = survey(small, reference.samples.two).sites
    pairs = ((site, own[name]) for name, site in reference.sites.items() if name in own)
    return {site.weight: replace(site, batch=mine.batch) for site, mine in pairs if mine.positions == site.positions}


def unmended(small: nn.Module, reference: Reference) -> float:
    """How far the smaller model as it is answers from the original on held-out samples. Others are not run."""
    copy = copy_with(small, lambda name, old: old.detach().clone())
    answers: list[list[Tensor]] = []
    samples, judges = reference.samples, reference.samples.judges
    with quiet(), evaluating(copy):
        for (place, x), wanted in zip(samples.chunks(reference.at_once), reference.answers, strict=True):
            rows = judges[place]
            if any(len(answer) != len(rows) for answer in wanted):
                answers.append(answers_in(run(copy, x), len(rows)))
            elif bool(rows.any()):
                some = map_tensors(lambda t, r=rows: t[r.to(t.device)], x)  # type: ignore[misc]
                answers.append(answers_in(run(copy, some), int(rows.sum())))
            else:
                answers.append([answer[:0] for answer in wanted])
    return _divergence(answers, reference)


def _divergence(answers: list[list[Tensor]], reference: Reference) -> float:
    """How far a model's answers, to all samples or to those that judge, are from the original's."""
    pairs = []
    judges = reference.samples.judges
    for place, mine, theirs in zip(reference.places, answers, reference.answers, strict=True):
        rows = judges[place]
        pairs.append(([_judging(t, rows) for t in mine], [_judging(t, rows) for t in theirs]))
    return diverges(pairs)


def _judging(answer: Tensor, rows: Tensor) -> Tensor:
    return answer[rows.to(answer.device)] if len(answer) == len(rows) else answer


def _flat(answer: Tensor) -> Tensor:
    return answer.double().reshape(len(answer), math.prod(answer.shape[1:]))


def diverges(pairs: list[tuple[list[Tensor], list[Tensor]]]) -> float:
    """Mean Jensen-Shannon divergence of answers from those wanted, or relative squared distance where they are no
    classes. Several answers are added up.

    It is bounded: one sure mistake does not outweigh everything else, as it does in a Kullback-Leibler divergence.
    """
    total = 0.0
    for mine, theirs in pairs:
        if [t.shape for t in mine] != [t.shape for t in theirs]:
            shapes = [[tuple(t.shape) for t in side] for side in (mine, theirs)]
            raise RepairError(
                f"the smaller model's answers have shapes {shapes[0]}, the original's {shapes[1]}.",
                fix="give the model that was pruned, and the one that came out",
            )
    for number, first in enumerate(pairs[0][1]):
        ours, wanted = (torch.cat([_flat(pair[side][number]) for pair in pairs]) for side in (0, 1))
        if first.ndim == 2 and ours.shape[1] > 1:
            sides = [F.log_softmax(side, 1) for side in (ours, wanted)]
            between = torch.logaddexp(*sides) - math.log(2)
            total += float(sum(0.5 * (side.exp() * (side - between)).sum(1).mean() for side in sides))
        else:
            total += float((ours - wanted).square().mean() / wanted.square().mean().clamp_min(1e-30))
    return total


class _Enough(Exception):
    """The layer in question has been seen."""


@dataclass(frozen=True)
class _Rows:
    """Rows of a layer for some samples, (samples, positions, channels): what it gives, what it should give together
    with what is added to it, and that."""

    site: LayerSite
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
        """Those of some of the samples."""
        positions, added = (None if t is None else t[index] for t in (self.positions, self.added))
        return replace(self, positions=positions, y=self.y[index], wanted=self.wanted[index], added=added)

    def free(self, made: Tensor, level: Tensor) -> Tensor:
        """How much less may be missing where the original's ReLU lets nothing pass and `made` is added to the output:
        there, it is enough to stay where nothing passes."""
        begins, side = level.to(self.y.dtype)
        limit = begins - self.y if self.added is None else begins - self.y - self.added
        enough = torch.where(side > 0, made.minimum(limit), made.maximum(limit))
        return torch.where((self.wanted - begins) * side < 0, enough - self.missing, 0.0)


class _Work:
    """The sites, the moments of the one being mended, and what was chosen so far."""

    def __init__(
        self, copy: nn.Module, reference: Reference, sites: Mapping[str, LayerSite], kept: Kept, method: Method,
        given: Mapping[str, str] | None, rounds: int, step: Callable[[], None],
    ) -> None:  # fmt: skip
        self.reference, self.method, self.given, self.kept = reference, method, given, kept
        self._rounds, self._step, self._near = rounds, step, ""
        self.tensors = dict([*copy.named_parameters(), *copy.named_buffers()])
        self.sites = {n: site for n, site in sites.items() if given is None or given.get(n, "none") != "none"}
        self.inverse = {name: self._left(site, reference.inverse[name]) for name, site in self.sites.items()}
        self._levels = {name: self._left(site, reference.levels[name]) for name, site in self.sites.items()}
        self.chosen: dict[str, str] = {}
        self.errors: dict[str, tuple[float, float]] = {}
        # Of the layer at hand: fit and held-out rows, the correction so far, the rounds left, moved rows.
        self._moments: tuple[Moments, Moments] | None = None
        self._best: Correction | None = None
        self._left_over = 0
        self._moved: Regression | None = None

    def _left(self, site: LayerSite, values: Tensor | None) -> Tensor | None:
        """Of numbers whose last dimension is the original's output channels, those of channels that are left."""
        kept = self.kept.get(site.weight, {}).get(1 if site.transposed else 0)
        if kept is None or values is None:
            return values
        return values.index_select(-1, torch.as_tensor(kept, device=values.device))

    def rows_of(self, site: LayerSite, call: Call, output: Tensor, place: slice, holding: _Mending) -> _Rows:
        """What a layer of the copy gives for some samples, and what it should give."""
        given = channel_last(call, output, site.batch, site.positions)
        positions = self.reference.place(site, given.shape[1])
        y = wide(positions.take(given, place))
        wanted = self._left(site, self.reference.targets[site.weight][place])
        if wanted is None or wanted.shape != y.shape:
            left = None if wanted is None else tuple(wanted.shape)
            raise RepairError(
                f"`{site.weight}` gives rows of shape {tuple(y.shape)}, where {left} are left of the original's.",
                fix="repair the model that apply or prune made from this original",
            )
        partner = holding.partner(site, call, output)
        added = None if partner is None else holding.scaled(site, positions.take(partner, place))
        return _Rows(site, call, place, positions.of(place, y.device), y, wanted, added)

    def add(self, rows: _Rows) -> None:
        """Add the rows of some samples; in further rounds, move those that are fitted."""
        call, y = rows.call, rows.y
        groups = int(call["groups"]) if isinstance(call.operation, Convolution) else 1
        samples, count, outputs = y.shape
        full = self.method == "ridge" and not rows.site.transposed
        features = call["weight"][0].numel() if full else 0
        if self._moments is None:
            total = self.reference.samples.total * count
            self._moments = tuple(_empty(groups, outputs // groups, features, total, y.device) for _ in range(2))  # type: ignore[assignment]
            assert self._moments is not None
        held = self.reference.samples.held_all[rows.place]
        if self.given is not None:
            held = torch.zeros_like(held)
        x: Tensor = call["input"]
        if isinstance(call.operation, Linear):
            x = channel_last(call, x, rows.site.batch, rows.site.positions)
        weights = self.reference.weights.get(rows.site.weight)
        level = self._levels[rows.site.weight]
        block = max(1, _BLOCK // (count * groups * max(features, 1)))
        for moments, mask in zip(self._moments, (~held, held), strict=True):
            if self._moved is not None and moments is self._moments[1]:
                continue
            members = mask.nonzero().ravel().to(y.device)
            for begin in range(0, len(members), block):
                index = members[begin : begin + block]
                part = rows if len(index) == samples else rows.of(index)
                read = None
                if full:
                    read = read_rows(call, x if part is rows else x[index], part.positions).flatten(0, 1)
                counts = None if weights is None else weights[rows.place][index].ravel()
                shape = (-1, groups, outputs // groups)
                if self._moved is None:
                    moments.add(part.missing.reshape(shape), part.y.reshape(shape), read, counts)
                else:
                    assert read is not None
                    assert level is not None
                    more = part.free(self._made(read).reshape(part.y.shape), level)
                    self._moved.move(more.reshape(shape), read, counts)

    def _made(self, rows: Tensor) -> Tensor:
        """What the correction so far adds to the layer's output."""
        assert self._best is not None
        assert self._best.weight is not None
        rows = wide(rows)
        made = (rows.transpose(0, 1) @ self._best.weight.to(rows.dtype)).transpose(0, 1)
        return made if self._best.shift is None else made + self._best.shift.to(rows.dtype)

    def solve(self, site: LayerSite) -> bool:
        """Find the correction of a layer from the rows; False if they are needed once more."""
        if self._moments is None:
            return True
        fit, held = self._moments
        if self._best is not None:
            assert self._moved is not None
            self._best = remake(self._best.name, self._moved, site.shifts)
            self._left_over -= 1
        elif self.given is not None:
            self._best, self._left_over = remake(self.given[site.weight], fit, site.shifts), self._rounds
        else:
            self._best, self._left_over = self._choose(site, fit, held), self._rounds
        if not self._left_over or self._best.weight is None or self._levels[site.weight] is None:
            return True
        assert isinstance(fit, Regression)
        self._moved = fit.renewed()
        return False

    def finish(self, site: LayerSite) -> Correction | None:
        """Carry out the correction of a layer; None if the model did not run it."""
        best = self._best
        self._moments, self._best, self._moved = None, None, None
        if best is None:
            return None
        self.chosen[site.weight] = best.name
        self._carry_out(site, best)
        self._step()
        return best

    def _choose(self, site: LayerSite, fit: Moments, held: Moments) -> Correction:
        weight: Tensor | float = 1.0
        if site.norm is not None:
            weight = site.norm.scale(self.tensors).square().view_as(held.ee)
        best, least, first = best_of(self.method, fit, held, site.shifts, weight, self._near)
        if best.weight is not None:
            self._near = best.name
        scale = float((weight * (held if held.rows else fit).size).sum()) or 1.0
        self.errors[site.weight] = first / scale, least / scale
        return best

    def _carry_out(self, site: LayerSite, best: Correction) -> None:
        """Change the layer. Sums are made in double precision, and rounded once."""
        weight = self.tensors[site.weight]
        bias = self.tensors[site.bias] if site.bias is not None else None
        new = weight.detach().double()
        constant = torch.zeros(1) if bias is None else bias.detach().double()
        if best.scale is not None:
            scale = best.scale.reshape(-1)
            shape = [1, -1] if site.transposed else [-1, 1]
            new = new * scale.view(*shape, *[1] * (weight.ndim - 2))
            constant = constant.to(scale) * scale
        if best.weight is not None:
            new = new + best.weight.mT.reshape(weight.shape)
        with torch.no_grad():
            if best.scale is not None or best.weight is not None:
                weight.copy_(new)
            if best.shift is not None and bias is None:
                assert site.norm is not None
                mean = self.tensors[site.norm.mean]
                mean.copy_(mean.double() - best.shift.reshape(-1))
            elif bias is not None:
                bias.copy_(constant if best.shift is None else constant + best.shift.reshape(-1))


class _Mending(Holding):
    """One pass of the copy. Without `to` every layer is mended as it is met; else rows of layer `to` are collected."""

    def __init__(self, model: nn.Module, work: _Work, place: slice, inputs: Any, to: LayerSite | None) -> None:
        sites = work.sites if to is None else {to.weight: to}
        super().__init__(model, sites, work.inverse, inputs)
        self._work, self._place, self._to = work, place, to

    def layer(self, site: LayerSite, call: Call) -> Any:
        """Collect rows, and mend at once if all samples are here."""
        output: Tensor = call.run()
        rows = self._work.rows_of(site, call, output, self._place, self)
        self._work.add(rows)
        if self._to is not None:
            raise _Enough
        while not self._work.solve(site):
            self._work.add(rows)
        best = self._work.finish(site)
        if best is None or best.name == "none":
            return output
        if best.weight is None and output.dtype in (torch.float32, torch.float64):
            return _adjusted(site, call, best, output)  # a pass through the layer is saved
        return call.run()


def _adjusted(site: LayerSite, call: Call, best: Correction, output: Tensor) -> Tensor:
    """A layer's output as it is after a correction by scale and constant."""
    shape = [-1] if isinstance(call.operation, Linear) else [-1, *[1] * (output.ndim - 2)]
    if best.scale is not None:
        output = output.mul_(best.scale.reshape(shape).to(output.dtype))
    if best.shift is not None and site.bias is not None:  # else the norm behind takes it
        output = output.add_(best.shift.reshape(shape).to(output.dtype))
    return output


def _empty(groups: int, outputs: int, features: int, rows: int, device: torch.device) -> Moments:
    if not features:
        return Moments(groups, outputs, device)
    # Beyond that the sums would be larger than the rows, and slower.
    kind = FewRows if rows <= features else Regression
    return kind(groups, outputs, features, device)
