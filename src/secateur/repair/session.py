"""Repair: bring a smaller model's answers back to the original's, from a few samples, without training."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from secateur.arguments import check_callable, check_count, check_number
from secateur.errors import Argument, RepairError, SecateurWarning
from secateur.nest import tensors_in
from secateur.repair.corrections import Correction, corrections_named
from secateur.repair.layers import Layers
from secateur.repair.layerwise import Corrected, LayerCorrector, Outcome, kept_indices, layers_in_both
from secateur.repair.reference import Kept, Reference
from secateur.repair.samples import Alter, Samples
from secateur.running.batches import Data, repeatable
from secateur.running.copies import copy_with, unwrap
from secateur.running.devices import device_of
from secateur.running.memory import Memory, allowed, in_smaller_parts, parse, trim
from secateur.running.processes import agree, check_same, synchronise, together
from secateur.running.progress import Line, Listener, Recording, telling
from secateur.running.sandbox import check_weights, leaves_no_trace, quiet
from secateur.running.tensor_facts import version

# A correction that leaves less than this share of the divergence is good: simpler ones do not come close to it.
_CLOSE = 0.25
# A part of the memory: what samples may take.
_HELD = 6


@dataclass(frozen=True)
class Repair:
    """The settings of a repair. Call it, or give it to `prune(..., repair=Repair(...))`.

    `method`: "mean" adds a constant to each output, "norm" also scales it, "ridge" regresses the original's outputs on
    what the surviving inputs give; "best" takes the one that is closest to the original on held-out samples. A
    correction that you registered is another method.

    `copies`: altered copies of each sample that join the regression. Images are cropped and flipped; texts exchange
    words, if there are few; `alter` is a function of your own. `held_out`: the share of samples that choose strengths
    and methods. They help to fit after that. `samples` and `rows`: at most so many samples with their copies, and
    positions per layer, take part. `memory` (bytes, or a text such as "2 GiB"; default: what is free, at most 1.5 GiB
    on a CPU): samples that find no room in early layers join in later ones. `at_once`: at most so many samples are in
    memory at once. More samples than that take much longer, since each layer needs passes of its own. `rounds`: extra
    fits of each layer that ignore errors which a ReLU or a ReLU6 hides. `relevance`: the share of a position's weight
    in the regression that is its relevance.
    """

    method: str = "best"
    copies: int = 8
    alter: Alter | None = None
    held_out: float = 0.2
    samples: int = 1024
    rows: int = 20_000
    at_once: int | None = None
    memory: Memory = field(default=None, compare=False, repr=False)
    seed: int = 0
    rounds: int = 1
    relevance: float = 0.0

    def __post_init__(self) -> None:
        corrections_named(self.method)
        for name in ("held_out", "relevance"):
            check_number(name, getattr(self, name), error=RepairError)
        check_callable("alter", self.alter, "a function f(images, generator)", error=RepairError)
        check_count("seed", self.seed, None, error=RepairError)
        parse(self.memory)
        if not 0 <= self.held_out < 1 or not 0 <= self.relevance <= 1:
            raise RepairError(
                f"held_out={self.held_out} or relevance={self.relevance} is not a share.",
                fix="held_out from 0 to below 1, relevance from 0 to 1",
            )
        for name, least in {"copies": 0, "rounds": 0, "samples": 1, "rows": 1, "at_once": 1}.items():
            if name != "at_once" or self.at_once is not None:
                check_count(name, getattr(self, name), least, error=RepairError)

    def __call__(self, small: nn.Module, original: nn.Module, data: Data) -> nn.Module:
        """The repaired model. `small` is not changed."""
        return self.examine(small, original, data).model

    @leaves_no_trace
    @together()
    def examine(self, small: nn.Module, original: nn.Module, data: Data, progress: bool | Listener = True) -> Outcome:
        """The repaired model, and what was done. `progress` draws a line on a terminal; a function receives events.

        In several processes, all samples of all processes take part, and all get the same model.
        """
        for model in (small, original):
            check_same(unwrap(model))
        return self.session(original, data).examine(small, progress)

    def session(self, original: nn.Module, data: Data) -> Session:
        """Repairs of several smaller models of one original: what the original answers is computed once."""
        return Session(original, data, self)


class Session:
    """Repairs with the same original, data and settings. Keeps the original's answers between them."""

    def __init__(self, original: nn.Module, data: Data, settings: Repair) -> None:
        self.original, self.data, self.settings = unwrap(original), repeatable(data), settings
        self._reference: Reference | None = None
        self._versions: list[tuple[int, int]] = []
        self._tensors: list[Tensor] = []  # held, so that no other one gets the same id
        self._memory = allowed(device_of(self.original), memory=parse(settings.memory))

    def examine(self, small: nn.Module, progress: bool | Listener = True) -> Outcome:
        """The repaired model, and what was done. `progress` is as for `Repair.examine`."""
        check_callable("progress", None if isinstance(progress, bool) else progress, "True, False, or f(event)")
        if isinstance(progress, bool):
            with Line(progress) as line:
                return self.examine(small, line)
        small = unwrap(small)
        kept = kept_indices(small, self.original)
        check_weights(small)
        check_weights(self.original)
        trim()  # of what scoring took

        def attempt(memory: int) -> Outcome:
            if memory < self._memory:
                self._memory, self._reference = memory, None
            reference = self.reference(progress, kept)
            return self._best(small, reference, layers_in_both(small, reference, kept), progress)

        with torch.inference_mode(False), telling(progress):
            outcome = in_smaller_parts(attempt, self._memory, 2**28)
            synchronise(outcome.model)
        trim()  # others do not share what the sums took
        return outcome

    def reference(self, tell: Listener = lambda event: None, kept: Kept | None = None) -> Reference:
        """The original's side, for smaller models that `kept` at most these indices. It is computed again if somebody
        wrote to the model or the data, or for a model that kept others."""
        original, asked = self.original, self.settings
        tensors = [*original.parameters(), *original.buffers(), *tensors_in(self.data)]
        versions = [(id(t), version(t)) for t in tensors]
        known = self._reference is not None and versions == self._versions
        known = known and (kept is None or cast("Reference", self._reference).covers(kept))
        if not agree(flag=not known) and self._reference is not None:
            return self._reference
        self._reference = None  # its memory is needed now
        tell(Recording())
        with quiet():
            torch.manual_seed(asked.seed)  # a loader that shuffles gives the same samples whenever it is asked
            samples = Samples.collect(
                self.data,
                asked.samples,
                asked.copies,
                asked.alter,
                asked.held_out,
                asked.seed,
                device_of(original),
                self._memory // _HELD,
            )
        if samples.count < samples.wanted:
            _warn_of_room(samples, self._memory)
        self._reference = Reference(original, samples, asked.rows, asked.at_once, asked.relevance, self._memory, kept)
        self._versions, self._tensors = versions, tensors
        return self._reference

    def _best(self, small: nn.Module, reference: Reference, layers: Layers, tell: Listener) -> Outcome:
        """Try each correction on the whole model, and take the best, if it is better than none."""
        if not layers:
            warnings.warn(
                f"{type(self.original).__name__} has no convolution or linear layer that can be repaired: such a layer "
                f"has a weight that is used once, and does not mix samples. The smaller model stays as it is.",
                SecateurWarning,
                stacklevel=3,
            )

        divergence = {"none": reference.divergence_of(small)}
        methods = {method.name: method for method in corrections_named(self.settings.method)} if layers else {}
        corrector = partial(LayerCorrector, small, reference, layers, self.settings.rounds, tell)
        samples = reference.samples
        best, found, cheaply, least = "none", None, False, _finite(divergence["none"])

        def corrected(method: Correction, cheap: bool) -> tuple[Corrected, float]:
            """What came of a correction, without the model that is not needed, and its divergence."""
            made = corrector(method, samples.plain if cheap else samples).run()
            if made.trial is None:
                return made, made.divergence
            # What was held out to choose with helps to fit, unless that does harm.
            harmful = not made.divergence <= _finite(divergence["none"])
            return replace(made, model=made.trial[0] if harmful else made.model, trial=None), made.trial[1]

        for name, method in sorted(methods.items(), key=lambda pair: pair[1].fallback):
            if method.fallback and found is not None and least <= _CLOSE * _finite(divergence["none"]):
                continue
            # A few numbers for each unit need few samples, if there are others to choose from.
            cheap = len(methods) > 1 and not method.needs_inputs and samples.copies > 0
            made, divergence[name] = corrected(method, cheap)
            if _finite(divergence[name]) < least:  # "none" comes first
                best, found, cheaply, least = name, made, cheap, _finite(divergence[name])
            del made  # the next one needs the memory
        if found is None:
            copy = copy_with(small, lambda name, old: old.detach().clone())
            return Outcome(copy, "none", divergence, {}, {})
        if cheaply:
            found = None
            found, _ = corrected(methods[best], cheap=False)
        return Outcome(found.model, best, divergence, found.layers, found.errors)


def _warn_of_room(samples: Samples, memory: int) -> None:
    """Tell that memory, not the data, decides how good a repair is."""
    enough = math.ceil(memory * samples.wanted / samples.count / 2**30)
    warnings.warn(
        SecateurWarning(
            "of {wanted} samples that a repair could use, {count} find room in the {memory} GiB that it may take. "
            "More make it better.",
            fix="{more}", wanted=samples.wanted, count=samples.count, memory=f"{memory / 2**30:.2g}",
            more=Argument("memory", f"{enough} GiB"),
        ),
        stacklevel=4,
    )  # fmt: skip


def _finite(divergence: float) -> float:
    return divergence if math.isfinite(divergence) else math.inf


def repair(
    small: nn.Module, original: nn.Module, data: Data, method: str = "best", *, copies: int = 8, held_out: float = 0.2,
    seed: int = 0, memory: Memory = None, progress: bool = True,
) -> nn.Module:  # fmt: skip
    """A copy of a smaller model whose layers return what the original's did, as far as the samples tell.

    Layer by layer, in order of execution, what a layer lacks compared with the original is made up for by a constant
    ("mean"), a scale and a constant ("norm") or new weights ("ridge"). "best" takes what is closest to the original on
    held-out samples, if need be nothing. Targets are not needed: `data` may be `(X, None)`. `memory` (bytes, or a text
    such as "2 GiB"; default: what is free) limits what it takes. `Repair` has more settings.

    >>> import torch, secateur as sc
    >>> net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> data = (torch.rand(64, 4), torch.arange(64) % 3)
    >>> result = sc.prune(net, data, remove=0.5, schedule=0.25)
    >>> sc.repair(result.model, net, data)[0]
    Linear(in_features=4, out_features=16, bias=True)
    """
    settings = Repair(method, copies, held_out=held_out, seed=seed, memory=memory)
    return settings.examine(small, original, data, progress).model
