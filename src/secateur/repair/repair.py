"""`repair`: bring a smaller model's answers back to the original's, from a few samples, without training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from secateur.errors import RepairError, SecateurWarning
from secateur.nest import tensors_in
from secateur.repair.augment import Alter, crop_and_flip, suits
from secateur.repair.mend import Kept, Mended, mend, sites_in, unmended
from secateur.repair.reference import Reference, Samples
from secateur.repair.solve import Method
from secateur.repair.survey import version
from secateur.running.batches import Data, repeatable
from secateur.running.copies import copy_with, unwrap
from secateur.running.devices import device_of
from secateur.running.processes import synchronise
from secateur.running.progress import Line
from secateur.running.sandbox import check_weights, quiet
from secateur.surgery.provenance import plans_of

Choice = Literal["best", "mean", "norm", "ridge"]
_METHODS: tuple[Method, ...] = ("mean", "norm", "ridge")


@dataclass(frozen=True)
class Outcome:
    """What a repair did. `divergence` says how far each candidate was from the original on held-out samples; `method`
    is the one that was taken, "none" if nothing came closer; `layers` names the correction of each weight."""

    model: nn.Module
    method: str
    divergence: dict[str, float]
    layers: dict[str, str]
    errors: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        tried = ", ".join(f"{name} {value:.4g}" for name, value in self.divergence.items())
        lines = [f"{self.method}; divergence from the original on held-out samples: {tried}"]
        width = max([len(name) for name in self.layers] or [0])
        for name, kind in self.layers.items():
            before, after = self.errors.get(name, (float("nan"), float("nan")))
            lines.append(f"{name.ljust(width)}  {kind:<10}  error {100 * before:6.2f} % → {100 * after:6.2f} %")
        return "\n".join(lines)


@dataclass
class Repair:
    """The settings of a repair; call it, or hand it to `prune(..., repair=Repair(...))`.

    `method`: "mean" adds a constant to each output, "norm" also scales it, "ridge" regresses the original's outputs on
    what the surviving inputs give; "best" takes whichever is closest to the original on held-out samples. `copies` of
    each image (crops and flips; `alter` for your own) join the regression, `held_out` of the samples choose strengths
    and methods, and then help to fit. At most `samples` samples and `rows` positions per layer take part (fewer where
    they would not fit into 4 GiB), and at most `at_once` samples are in flight (left out: what fits into memory), so
    that memory does not grow with the data. More samples than that take longer: each layer is a pass of its own.

    In so many further `rounds` of each layer, outputs that a ReLU cuts off in the original need only be cut off too.
    `relevance` is the share of a position's weight in the regression that goes by the relevance there.
    """

    method: Choice = "best"
    copies: int = 8
    alter: Alter | None = None
    held_out: float = 0.2
    samples: int = 1024
    rows: int = 20_000
    at_once: int | None = None
    seed: int = 0
    rounds: int = 1
    relevance: float = 0.0
    progress: bool = field(default=True, repr=False, compare=False)
    _known: tuple[nn.Module, Any, list[int], Reference] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.method not in get_args(Choice):
            raise RepairError(f"repair {self.method!r} is not known; there are {', '.join(get_args(Choice))}.")
        least = min(self.samples, self.rows, 1 if self.at_once is None else self.at_once)
        if not 0 <= self.held_out < 1 or self.copies < 0 or least < 1:
            raise RepairError(
                f"held_out={self.held_out} must lie in [0, 1), copies={self.copies} must not be negative, and "
                f"samples={self.samples}, rows={self.rows}, at_once={self.at_once} must be at least 1."
            )
        if not 0 <= self.relevance <= 1 or self.rounds < 0:
            raise RepairError(
                f"relevance={self.relevance} must lie in [0, 1], and rounds={self.rounds} must not be negative."
            )

    def __call__(self, small: nn.Module, original: nn.Module, data: Data) -> nn.Module:
        """The repaired model; `small` is not changed."""
        return self.examine(small, original, data).model

    def examine(
        self, small: nn.Module, original: nn.Module, data: Data, tell: Callable[[str], None] | None = None
    ) -> Outcome:
        """The repaired model and what was done to it. `tell` is told how it gets on; left out, a terminal is."""
        if tell is None:
            with Line(self.progress) as line:
                return self.examine(small, original, data, line)
        small, original = unwrap(small), unwrap(original)
        kept = _kept(small, original)
        check_weights(small)
        with torch.inference_mode(False):
            outcome = self._examined(small, original, kept, self._reference(original, data, tell), tell)
            synchronise(outcome.model)
        return outcome

    def _examined(
        self, small: nn.Module, original: nn.Module, kept: Kept, reference: Reference, tell: Callable[[str], None]
    ) -> Outcome:
        sites = sites_in(small, reference)
        layers = len(sites)
        if not layers:
            warnings.warn(
                f"{type(original).__name__} has no convolution or linear layer that could be repaired: it must have "
                f"a weight that is used once, and keep samples apart. The smaller model stays as it is.",
                SecateurWarning,
                stacklevel=2,
            )
        methods = () if not layers else _METHODS if self.method == "best" else (self.method,)

        def mended(method: Method, chosen: Mapping[str, str] | None = None) -> Mended:
            numbers = count(1)
            what = method if chosen is None else f"{method}, with all samples"
            step = lambda: tell(f"repair: {what}, layer {next(numbers)}/{layers}")  # noqa: E731
            return mend(small, reference, sites, kept, method, chosen, self.rounds, step)

        before = unmended(small, reference)
        tried = {method: mended(method) for method in methods}
        divergence: dict[str, float] = {"none": before}
        divergence.update((method, found.divergence) for method, found in tried.items())
        best = min(tried, key=lambda name: _comparable(divergence[name]), default=None)
        if best is None or not _comparable(divergence[best]) < _comparable(before):
            return Outcome(copy_with(small, lambda name, old: old.detach().clone()), "none", divergence, {}, {})
        found = tried[best]
        model = found.model
        if bool(reference.samples.held.any()):
            # What was held out to choose with now helps to fit, unless that does harm.
            again = mended(best, found.chosen)
            model = again.model if _comparable(again.divergence) <= _comparable(before) else model
        return Outcome(model, best, divergence, found.chosen, found.errors)

    def _reference(self, original: nn.Module, data: Data, tell: Callable[[str], None]) -> Reference:
        # Whether somebody wrote to the model or the data since.
        versions = [version(t) for t in [*original.parameters(), *original.buffers(), *tensors_in(data)]]
        known = self._known
        if known is not None and known[0] is original and known[1] is data and known[2] == versions:
            return known[3]
        self._known = None  # its memory is needed now
        tell("repair: what the original answers")
        with quiet():
            torch.manual_seed(self.seed)  # the same samples from a loader that shuffles, whenever it is asked
            samples = Samples.collect(
                repeatable(data), self.samples, self.copies, self.alter, self.held_out, self.seed, device_of(original)
            )
        if self.alter is None and self.copies and suits(samples.inputs):
            samples = replace(samples, copies=self.copies, alter=crop_and_flip)
        reference = Reference(original, samples, self.rows, self.at_once, self.relevance)
        self._known = (original, data, versions, reference)
        return reference


def repair(
    small: nn.Module, original: nn.Module, data: Data, method: Choice = "best", *, copies: int = 8,
    alter: Alter | None = None, held_out: float = 0.2, seed: int = 0, progress: bool = True,
) -> nn.Module:  # fmt: skip
    """A copy of a smaller model whose layers answer as the original's did, as far as the samples tell.

    Layer by layer, in order of execution, what the layer lacks compared with the original is made up by a constant
    ("mean"), a scale and a constant ("norm") or new weights ("ridge"); "best" takes what is closest to the original on
    held-out samples, if need be nothing. Targets are not needed: `data` may be `(X, None)`.

    >>> import torch, secateur as sc
    >>> net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> data = (torch.rand(64, 4), torch.arange(64) % 3)
    >>> result = sc.prune(net, data, remove=0.5, step=0.25)
    >>> sc.repair(result.model, net, data)[0]
    Linear(in_features=4, out_features=16, bias=True)
    """
    return Repair(method, copies, alter, held_out, seed=seed, progress=progress)(small, original, data)


def _comparable(value: float) -> float:
    return value if np.isfinite(value) else np.inf


def _kept(small: nn.Module, original: nn.Module) -> Kept:
    """What the plans between the original and the smaller model left of each dimension."""
    before, after = plans_of(original), plans_of(small)
    known = {name: tuple(t.shape) for name, t in [*original.named_parameters(), *original.named_buffers()]}
    fits = after[: len(before)] == before and len(after) > len(before)
    if not fits or any(known.get(name) != tuple(shape) for name, shape in after[len(before)].shapes.items()):
        raise RepairError(
            f"this {type(small).__name__} was not made by secateur.apply or prune from the given original, so "
            "its units cannot be told.",
            fix="give the model that was pruned, and the one that came out",
        )
    kept: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for plan in after[len(before) :]:
        for name, dims in plan.cuts.items():
            for dim, gone in dims.items():
                have = kept.setdefault(name, {}).get(dim, np.arange(plan.shapes[name][dim]))
                kept[name][dim] = np.delete(have, list(gone))
    return kept
