"""`repair`: bring a smaller model's answers back to the original's, from a few samples, without training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from torch import nn

from secateur.criteria.batches import Data, device_of, repeatable
from secateur.criteria.scoring import check_weights
from secateur.errors import RepairError
from secateur.graph.shadow import unwrap
from secateur.pruning.distributed import synchronise
from secateur.pruning.files import plans_of
from secateur.pruning.repair.augment import Alter, crop_and_flip, suits
from secateur.pruning.repair.mend import Kept, Mended, mend, unmended
from secateur.pruning.repair.reference import Reference, Samples
from secateur.pruning.repair.solve import Method

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
    and methods, and then help to fit. At most `samples` samples and `rows` positions per layer take part, and at most
    `at_once` samples are in flight, so that memory does not grow with the data.
    """

    method: Choice = "best"
    copies: int = 8
    alter: Alter | None = None
    held_out: float = 0.2
    samples: int = 1024
    rows: int = 20_000
    at_once: int = 512
    seed: int = 0
    _known: tuple[Any, Any, Reference] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.method not in get_args(Choice):
            raise RepairError(f"repair {self.method!r} is not known; there are {', '.join(get_args(Choice))}.")
        if not 0 <= self.held_out < 1 or self.copies < 0 or min(self.samples, self.rows, self.at_once) < 1:
            raise RepairError("held_out must lie between 0 and 1, copies from 0 on, samples, rows, at_once from 1 on.")

    def __call__(self, small: nn.Module, original: nn.Module, data: Data) -> nn.Module:
        """The repaired model; `small` is not changed."""
        return self.examine(small, original, data).model

    def examine(self, small: nn.Module, original: nn.Module, data: Data) -> Outcome:
        """The repaired model and what was done to it."""
        small, original = unwrap(small), unwrap(original)
        kept = _kept(small, original)
        check_weights(small)
        reference = self._reference(original, data)
        tried: dict[str, Mended] = {}
        divergence = {"none": unmended(small, reference, self.at_once)}
        for method in _METHODS if self.method == "best" else (self.method,):
            tried[method] = mend(small, reference, kept, method, at_once=self.at_once)
            divergence[method] = tried[method].divergence
        best = min(divergence, key=lambda name: _comparable(divergence[name]))
        if best == "none":
            copy = mend(small, reference, kept, "mean", chosen={}, at_once=self.at_once).model
            return Outcome(copy, best, divergence, {}, {})
        found = tried[best]
        model = found.model
        if bool(reference.samples.held.any()):
            # What was held out to choose with now helps to fit.
            model = mend(small, reference, kept, best, chosen=found.chosen, at_once=self.at_once).model  # type: ignore[arg-type]
        synchronise(model)
        return Outcome(model, best, divergence, found.chosen, found.errors)

    def _reference(self, original: nn.Module, data: Data) -> Reference:
        known = self._known
        if known is not None and known[0] is original and known[1] is data:
            return known[2]
        device = device_of(original)
        alter = self.alter
        samples = Samples.collect(
            repeatable(data), self.samples, self.copies, alter, self.held_out, self.seed, device
        )  # fmt: skip
        if alter is None and self.copies and suits(samples.inputs):
            samples = Samples(
                samples.inputs, samples.count, self.copies, crop_and_flip, samples.held, self.seed
            )  # fmt: skip
        reference = Reference(original, samples, self.rows, batch_size=64)
        if not reference.sites:
            raise RepairError(f"{type(original).__name__} has no convolution or linear layer that could be repaired.")
        self._known = (original, data, reference)
        return reference


def repair(
    small: nn.Module, original: nn.Module, data: Data, method: Choice = "best", *, copies: int = 8,
    alter: Alter | None = None, held_out: float = 0.2, seed: int = 0,
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
    return Repair(method, copies, alter, held_out, seed=seed)(small, original, data)


def _comparable(value: float) -> float:
    return value if np.isfinite(value) else np.inf


def _kept(small: nn.Module, original: nn.Module) -> Kept:
    """What the plans between the original and the smaller model left of each dimension."""
    before, after = plans_of(original), plans_of(small)
    if after[: len(before)] != before or len(after) == len(before):
        raise RepairError(
            f"this {type(small).__name__} was not made by secateur.apply or prune from the given original, so its "
            f"units cannot be told. Way out: give the model that was pruned, and the one that came out."
        )
    kept: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for plan in after[len(before) :]:
        for name, dims in plan.cuts.items():
            for dim, gone in dims.items():
                have = kept.setdefault(name, {}).get(dim, np.arange(plan.shapes[name][dim]))
                kept[name][dim] = np.delete(have, list(gone))
    return kept
