"""Mending: layer by layer in order of execution, bring a smaller model's outputs back to the original's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import RepairError
from secateur.graph.shadow import duplicate, quiet, run
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.table import Call
from secateur.pruning.repair.reference import Holding, Reference
from secateur.pruning.repair.rows import channel_last, read_rows
from secateur.pruning.repair.solve import Correction, Method, Moments, candidates, error, nothing, remake
from secateur.pruning.repair.survey import LayerSite
from secateur.relevance.isolation import logits_of

#: For each parameter and dimension the indices that the smaller model kept.
Kept = Mapping[str, Mapping[int, np.ndarray[Any, Any]]]
# Rows of what a layer reads are made in blocks of at most this many numbers.
_BLOCK = 2**25


@dataclass(frozen=True)
class Mended:
    """A mended copy: the correction chosen for each weight, the error it had and has on held-out samples (relative to
    the original's output), and how far the model's output is from the original's there."""

    model: nn.Module
    chosen: dict[str, str]
    errors: dict[str, tuple[float, float]]
    divergence: float


def mend(
    small: nn.Module, reference: Reference, kept: Kept, method: Method, chosen: Mapping[str, str] | None = None,
    at_once: int = 512, step: Callable[[], None] = lambda: None,
) -> Mended:  # fmt: skip
    """Mend a copy. Strengths are chosen on the held-out samples; with `chosen` they are given, and all samples fit."""
    copy = duplicate(small, lambda name, old: old.detach().clone())
    flags = [(module, module.training) for module in copy.modules()]
    copy.eval()
    work = _Work(copy, reference, kept, method, chosen, step)
    chunks = reference.samples.total > at_once
    outputs = []
    with quiet():
        if not chunks:
            place, x = next(reference.samples.chunks(at_once))
            with _Mending(copy, work, place, x, to=None):
                outputs.append(logits_of(run(copy, x)).float())
        else:
            for call in sorted(work.sites):
                for place, x in reference.samples.chunks(at_once):
                    try:
                        with _Mending(copy, work, place, x, to=call):
                            run(copy, x)
                    except _Enough:
                        continue
                work.finish(call)
            outputs = [logits_of(run(copy, x)).float() for _, x in reference.samples.chunks(at_once)]
    for module, flag in flags:
        module.training = flag
    divergence = diverges(torch.cat(outputs), reference, fit=chosen is not None)
    return Mended(copy, work.chosen, work.errors, divergence)


def unmended(small: nn.Module, reference: Reference, at_once: int = 512) -> float:
    """How far the smaller model as it is answers from the original on held-out samples."""
    copy = duplicate(small, lambda name, old: old.detach()).eval()
    with quiet():
        outputs = [logits_of(run(copy, x)).float() for _, x in reference.samples.chunks(at_once)]
    return diverges(torch.cat(outputs), reference)


def diverges(outputs: Tensor, reference: Reference, fit: bool = False) -> float:
    """Mean Kullback-Leibler divergence of the answers, or relative squared distance where they are no classes."""
    held = reference.samples.held_all.to(outputs.device)
    mask = torch.ones_like(held) if fit or not bool(held.any()) else held
    mine, theirs = outputs[mask].double(), reference.outputs[mask].to(outputs.device).double()
    if mine.shape != theirs.shape:
        raise RepairError(f"the outputs differ in shape: {tuple(mine.shape)} against {tuple(theirs.shape)}.")
    if mine.ndim == 2 and mine.shape[1] > 1:
        log_mine, log_theirs = F.log_softmax(mine, 1), F.log_softmax(theirs, 1)
        return float((log_theirs.exp() * (log_theirs - log_mine)).sum(1).mean())
    return float((mine - theirs).square().mean() / theirs.square().mean().clamp_min(1e-30))


class _Enough(Exception):
    """The layer in question has been seen."""


class _Work:
    """The sites, the moments of the one being mended, and what was chosen so far."""

    def __init__(
        self, copy: nn.Module, reference: Reference, kept: Kept, method: Method, given: Mapping[str, str] | None,
        step: Callable[[], None],
    ) -> None:  # fmt: skip
        self.reference, self.method, self.given, self.step = reference, method, given, step
        self.tensors = dict([*copy.named_parameters(), *copy.named_buffers()])
        self.kept = kept
        self.sites = {call: site for call, site in reference.sites.items() if site.weight in self.tensors}
        self.chosen: dict[str, str] = {}
        self.errors: dict[str, tuple[float, float]] = {}
        self._moments: tuple[Moments, Moments] | None = None
        self._groups = 1
        self._transposed = False

    def add(self, site: LayerSite, call: Call, output: Tensor, partner: Tensor | None, place: slice) -> None:
        """Add the rows of some samples."""
        self._transposed = isinstance(call.operation, TransposedConvolution)
        groups = int(call["groups"]) if isinstance(call.operation, Convolution) else 1
        self._groups = groups
        given = channel_last(call, output)
        positions = self.reference.place(site.call, given.shape[1])
        y = positions.take(given, place).float()
        kept = self.kept.get(site.weight, {}).get(1 if self._transposed else 0)
        wanted = self.reference.targets[site.call][place]
        if kept is not None:
            wanted = wanted.index_select(2, torch.as_tensor(kept, device=wanted.device))
        if wanted.shape != y.shape:
            raise RepairError(
                f"`{site.weight}` gives rows of shape {tuple(y.shape)}, the original {tuple(wanted.shape)} after the "
                f"cut. Way out: repair the model that apply or prune made from this original."
            )
        if partner is not None:
            wanted = wanted - positions.take(partner, place).float()
        missing = wanted - y
        full = self.method == "ridge" and not self._transposed
        _, count, outputs = y.shape
        features = call["weight"][0].numel() if full else 1
        if self._moments is None:
            shape = (groups, features, outputs // groups, y.device, full)
            self._moments = Moments.empty(*shape), Moments.empty(*shape)
        held = self.reference.samples.held_all[place]
        if self.given is not None:
            held = torch.zeros_like(held)
        block = max(1, _BLOCK // (count * groups * features))
        chosen = positions.of(place, y.device)
        for side, mask in ((0, ~held), (1, held)):
            members = mask.nonzero().ravel().to(y.device)
            for begin in range(0, len(members), block):
                index = members[begin : begin + block]
                x = read_rows(_of(call, index), None if chosen is None else chosen[index]) if full else None
                e, own = (rows[index].reshape(-1, groups, outputs // groups) for rows in (missing, y))
                self._moments[side].add(None if x is None else x.flatten(0, 1), e, own)

    def finish(self, call: int) -> bool:
        """Choose and carry out the correction of a layer. Says whether anything changed."""
        site = self.sites[call]
        assert self._moments is not None
        (fit, held), self._moments = self._moments, None
        self.step()
        if self.given is not None:
            name = self.given.get(site.weight, "none")
            best = remake(name, fit, site.shifts)
        else:
            best = self._choose(site, fit, held)
        self.chosen[site.weight] = best.name
        self._carry_out(site, best)
        return best.name != "none"

    def _choose(self, site: LayerSite, fit: Moments, held: Moments) -> Correction:
        weight: Tensor | float = 1.0
        if site.norm is not None:
            weight = site.norm.scale(self.tensors).square().view_as(held.ee)
        seen = held if held.rows else fit
        first: float | None = None
        least = math.inf
        best = nothing()
        for option in candidates(self.method, fit, site.shifts):
            cost = float((weight * error(option, seen)).sum())
            first = cost if first is None else first
            if cost < least:
                least, best = cost, option
            elif cost > least and option.weight is not None and best.weight is not None:
                break  # weaker ridges only follow the samples more closely still
        size = (seen.yy + 2 * seen.ey + seen.ee) / seen.rows
        scale = float((weight * size).sum()) or 1.0
        self.errors[site.weight] = ((first or 0.0) / scale, least / scale)
        return best

    def _carry_out(self, site: LayerSite, best: Correction) -> None:
        weight = self.tensors[site.weight]
        bias = self.tensors[site.bias] if site.bias is not None else None
        with torch.no_grad():
            if best.scale is not None:
                scale = best.scale.reshape(-1)
                shape = [1, -1] if self._transposed else [-1, 1]
                weight.mul_(scale.view(*shape, *[1] * (weight.ndim - 2)).to(weight))
                if bias is not None:
                    bias.mul_(scale.to(bias))
            if best.weight is not None:
                weight.add_(best.weight.mT.reshape(weight.shape).to(weight))
            if best.shift is not None:
                shift = best.shift.reshape(-1)
                if bias is not None:
                    bias.add_(shift.to(bias))
                elif site.norm is not None:
                    mean = self.tensors[site.norm.mean]
                    mean.sub_(shift.to(mean))


class _Mending(Holding):
    """One pass of the copy. Without `to` every layer is mended as it is met; else rows of layer `to` are collected."""

    def __init__(self, model: nn.Module, work: _Work, place: slice, inputs: Any, to: int | None) -> None:
        super().__init__(model, work.sites, inputs)
        self._work, self._place, self._to = work, place, to

    def layer(self, site: LayerSite, call: Call) -> Any:
        """Collect rows, and mend at once if all samples are here."""
        if self._to is not None and site.call != self._to:
            return call.run()
        output: Tensor = call.run()
        self._work.add(site, call, output, self.partner(site, call, output), self._place)
        if self._to is not None:
            raise _Enough
        return call.run() if self._work.finish(site.call) else output


def _of(call: Call, samples: Tensor) -> Call:
    """The call on some of its samples."""
    x: Tensor = call["input"]
    bound = {**(call._bound or {}), "input": x[samples] if len(samples) != len(x) else x}
    return Call(call.operation, call.function, call.args, call.kwargs, call.site, bound)
