"""Rule zero: removal equals zero-masking, on the example and on inputs of our own, for every output by itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import Argument, VerificationError
from secateur.plans.plan import Plan, plan_for
from secateur.running.copies import named_modules, named_parameters, shared_copy
from secateur.running.devices import device_of, dtype_of
from secateur.running.modes import reads_training
from secateur.running.sandbox import Example, caches, uncollected
from secateur.structure.blocks import Block
from secateur.structure.graph import Layer
from secateur.surgery.cut import cut
from secateur.surgery.differences import (
    COARSE,
    LIMITS,
    Cuts,
    Limits,
    agree,
    difference,
    informs,
    is_real,
    kept,
    layer_cuts,
    rest,
    scales_of,
)
from secateur.surgery.forwards import Net, Seen, Trial
from secateur.surgery.glance import accepts
from secateur.surgery.mask import reference
from secateur.surgery.probes import Probe, corners, given, others

log = logging.getLogger("secateur")

# Above these, float32 is tried first: MACs on the inputs, and parameters. Then every layer is compared, too: what a
# branch does that is scaled down to nothing, only float64 would see at the end.
_MACS, _PARAMETERS = 2e7, 2e8
_LIGHT = 1e7  # in training mode float32 is tried first above this
_LARGE = 2**20  # numbers of a parameter that is masked where it is read
_STEPWISE = 0.5  # probes below this share of the example are compared layer by layer in training mode
_MOST_CHECKS, _MOST_ALIKE = 80, 40
_ROUNDING = 1e-14  # of what a layer returns in double precision, relatively


@dataclass(frozen=True)
class Fault:
    """Where the smaller model and the masked one differ, in words."""

    trial: Trial
    what: str


def verify(model: nn.Module, small: nn.Module, plan: Plan, example: Example) -> None:
    """Raise unless the smaller model and the masked one agree. If the plan knows its graph, the layers are named."""
    with uncollected:
        if accepts(model, small, plan, example, lambda probe: _formats(model, plan, probe, _MACS)):
            return
        masked = _masked(model, plan)
        trials = _trials(model, masked, plan, example)
        fault = _fault(model, masked, small, plan, trials)
    if fault is None:
        return
    names = culprits(model, plan, fault.trial)
    raise disagreement(fault.what, names, plan)


def _masked(model: nn.Module, plan: Plan) -> Net:
    """The masked model, with no copy of large matrices; of a very large model, with none of other parameters either."""
    recurrent = {id(t) for _, m in named_modules(model) if isinstance(m, nn.RNNBase) for t in m._parameters.values()}
    all_kinds = plan.before.params > _PARAMETERS
    large = {
        name
        for name, t in named_parameters(model)
        if t.numel() >= _LARGE and (all_kinds or t.ndim == 2) and id(t) not in recurrent
    }
    masks = {name: plan.cuts[name] for name in large & set(plan.cuts)}
    return Net(reference(model, plan, masks.keys()), plan.output, masks)


def disagreement(what: str, names: Sequence[str], plan: Plan) -> VerificationError:
    """The error for a removal that is not a masking. `names` are the layers at fault, if known."""
    paths: list[str] = []
    if plan.graph is not None:
        paths = [layer.paths[0] or layer.name for layer in plan.graph.layers if layer.name in names]
        paths += [block.name for block in plan.graph.blocks if block.name in names]
    cause = f"The removal from {', '.join(names)} is at fault." if names else "The layer at fault is not known."
    error = VerificationError(
        "{problem}. {cause} The smaller model is withheld.",
        fix="{ignore}, and please report the model" if names else "name the layer in {ignore}, and report the model",
        problem=what,
        cause=cause,
        ignore=Argument("ignore", paths) if names else Argument("ignore"),
    )
    error.layers = tuple(names)
    return error


# -- the probes that a model takes -------------------------------------------------------------------------------------
def _trials(model: nn.Module, masked: Net, plan: Plan, example: Example) -> list[Trial]:
    """The example, then what else the masked model takes, at last in training mode if that may be another forward."""
    graph, second = plan.graph, None
    known = [given(example, {}), Probe("the example", example)]
    # Code that asks for neither sizes nor numbers does the same with every image: small ones show it all, in one look.
    steady = graph is not None and graph.steady and example is graph.example
    first, reason = _first_taken(masked, corners(example) if steady else known, model, plan)
    if steady and first is None:
        steady, (first, reason) = False, _first_taken(masked, known, model, plan)
    if first is None:
        raise VerificationError(
            "the masked model does not run on the example: {reason}.",
            fix="{analyze} with the inputs of {apply}, which the model takes in float32",
            reason=reason,
            analyze=Argument("analyze"),
            apply=Argument("apply"),
        )
    trials = [first]
    if not steady:
        second, _ = _first_taken(masked, others(example, first.masked.rows, plan.before.macs < _LIGHT), model, plan)
    trials += [second] if second is not None else []
    last = trials[-1].probe
    if caches(model):
        cached, _ = _first_taken(masked, [replace(last, name=f"{last.name} with a cache", cached=True)], model, plan)
        trials += [cached] if cached is not None else []
    if reads_training(model):
        learning = replace(last, name=f"{last.name} in training mode", training=True)
        third, _ = _first_taken(masked, [learning], model, plan, _LIGHT)
        trials += [third] if third is not None and _finite(third) else []
    return trials


def _first_taken(
    masked: Net, probes: Iterable[Probe], model: nn.Module, plan: Plan, macs: float = _MACS
) -> tuple[Trial | None, str]:
    """The first probe that the masked model takes, or the first error."""
    reason, coarse = "", None
    for probe in probes:
        for wide in _formats(model, plan, probe, macs):
            try:
                trial = Trial(probe, wide, masked.run(probe, wide, whole=_stepwise(probe, wide)))
                if wide == torch.float64 or _finite(trial):
                    return trial, ""
                coarse = coarse or trial  # float64 overflows later
            except Exception as error:  # the user's own code decides what it takes
                log.debug("%s is not taken: %s", probe.name, error)
                reason = reason or f"{type(error).__name__}: {error}"
                if not _about_formats(error):
                    break
        if coarse is not None:
            return coarse, ""
    return None, reason


def _finite(trial: Trial) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in trial.masked.outputs if is_real(t))


def _stepwise(probe: Probe, wide: torch.dtype) -> bool:
    """Whether each layer of the smaller model goes on with what the masked one returned.

    Batch norms of few numbers multiply rounding from layer to layer in training mode, until float32 shows nothing.
    """
    return probe.training and wide == torch.float32 and probe.share < _STEPWISE


def _about_formats(error: Exception) -> bool:
    return re.search(r"type|implemented|Double|Float", str(error)) is not None


def _formats(model: nn.Module, plan: Plan, probe: Probe, macs: float) -> tuple[torch.dtype, ...]:
    """The formats to try, in order."""
    device = device_of(model)
    if device is not None and device.type == "mps":
        return (torch.float32,)
    if dtype_of(model) == torch.float64:
        return (torch.float64,)
    heavy = plan.before.params > _PARAMETERS or plan.before.macs * probe.share > macs
    return (torch.float32, torch.float64) if heavy else (torch.float64, torch.float32)


# -- comparing ---------------------------------------------------------------------------------------------------------
def _fault(model: nn.Module, masked: Net, small: nn.Module, plan: Plan, trials: Sequence[Trial]) -> Fault | None:
    """The first difference that is no rounding."""
    net, done = Net(shared_copy(small), plan.output), []
    cuts = layer_cuts(model, plan, masked.layers)
    for trial in trials:
        found = _run_small(net, model, masked, cuts, trial)
        if isinstance(found, Fault):
            return found
        done += [found] if found is not None else []
    if not done:
        return Fault(trials[0], f"neither the smaller model nor the original runs on {trials[0].probe.name}")
    scales = scales_of([trial.masked.outputs for trial, _ in done])
    ties = []
    for trial, seen in done:
        what = _differs(trial, seen, scales)
        if trial.wide != torch.float64:
            limits = LIMITS[trial.wide] if _stepwise(trial.probe, trial.wide) else COARSE
            if what or not agree(seen.layers, kept(cuts, trial.masked.layers), limits):
                trial, what = _decided(net, model, masked, trial, seen, scales)
        if what and _steady(masked, trial, scales):
            return Fault(trial, what)
        ties += [(trial, net.run(trial.probe, trial.wide, trial.even))] if what else []
    return _unproven(net, model, masked, cuts, ties or done, bool(ties))


def _steady(masked: Net, trial: Trial, scales: Sequence[float]) -> bool:
    """Whether the masked model returns the same if its layers round otherwise. A choice among boxes of the same score
    is not, and shows nothing."""
    if trial.wide != torch.float64 or trial.probe.training or trial.probe.cached:
        return True
    noise = torch.Generator().manual_seed(0)

    def rounded(t: Tensor) -> Tensor:
        return t * (1 + _ROUNDING * torch.randn(t.shape, generator=noise, dtype=t.dtype).to(t.device))

    whole = masked.run(trial.probe, trial.wide, trial.even, whole=True).layers
    forced = {path: [rounded(t) if is_real(t) else t for t in made] for path, made in whole.items()}
    return not _differs(trial, masked.run(trial.probe, trial.wide, trial.even, forced=forced), scales)


def _differs(trial: Trial, seen: Seen, scales: Sequence[float], limits: Limits | None = None) -> str:
    return difference(seen.outputs, trial.masked.outputs, trial.probe.name, scales, limits or LIMITS[trial.wide])


def _run_small(net: Net, model: nn.Module, masked: Net, cuts: Cuts, trial: Trial) -> tuple[Trial, Seen] | Fault | None:
    """What the smaller model returns where the masked one returned something, with the same noise.

    None if the original, which decides, does not take the probe either.
    """
    stepwise = _stepwise(trial.probe, trial.wide)

    def run(even: Iterable[int] = ()) -> Seen:
        return net.run(trial.probe, trial.wide, even, forced=kept(cuts, trial.masked.layers) if stepwise else {})

    try:
        seen = run()
        if seen.drawn != trial.masked.drawn:
            # Noise as wide as a layer cannot be the same in both: it is one number everywhere instead. A branch that
            # left draws none, so that nobody knows which numbers belong together.
            even = tuple(range(max(len(seen.drawn), len(trial.masked.drawn))))
            if len(seen.drawn) == len(trial.masked.drawn):
                even = tuple(i for i in even if seen.drawn[i] != trial.masked.drawn[i])
            trial = replace(trial, masked=masked.run(trial.probe, trial.wide, even, stepwise), even=even)
            seen = run(even)
    except Exception as error:
        if not _takes(model, trial):
            return None
        what = f"the smaller model does not run on {trial.probe.name}: {type(error).__name__}: {error}"
        return Fault(trial, what.rstrip("."))
    return trial, seen


def _takes(model: nn.Module, trial: Trial) -> bool:
    try:
        Net(shared_copy(model), ()).run(trial.probe, trial.wide)
    except Exception as error:
        log.debug("%s is not taken by the original: %s", trial.probe.name, error)
        return False
    return True


def _decided(
    net: Net, model: nn.Module, masked: Net, trial: Trial, seen: Seen, scales: Sequence[float]
) -> tuple[Trial, str]:
    """The comparison again in double precision, where only a real difference survives."""
    try:
        expected = masked.run(trial.probe, torch.float64)
    except Exception as error:  # a forward that needs its own precision is judged by that
        log.debug("no forward in float64: %s", error)
        return trial, _differs(trial, seen, scales, COARSE)
    trial = replace(trial, wide=torch.float64, masked=expected)
    scales = [max(pair) for pair in zip_longest(scales, scales_of([expected.outputs]), fillvalue=0.0)]  # no overflow
    found = _run_small(net, model, masked, {}, trial)
    if isinstance(found, Fault):
        return found.trial, found.what
    if found is None:
        return trial, ""
    return found[0], _differs(*found, scales)


def _unproven(
    net: Net, model: nn.Module, masked: Net, cuts: Cuts, done: Sequence[tuple[Trial, Seen]], ties: bool
) -> Fault | None:
    """Outputs that are empty, whole-numbered, constant or chosen among `ties` hide what happens: then every layer is
    compared."""
    plain = [(trial, seen) for trial, seen in done if not trial.probe.training and not trial.probe.cached]
    counts = {len(trial.masked.outputs) for trial, _ in plain}
    columns = list(zip(*(trial.masked.outputs for trial, _ in plain), strict=False))
    if not plain or (not ties and len(counts) == 1 and columns and all(map(informs, columns))):
        return None
    trial, seen = plain[-1]
    if trial.wide == torch.float64:
        trial = replace(trial, masked=masked.run(trial.probe, trial.wide, trial.even, noted=True))
        seen = net.run(trial.probe, trial.wide, trial.even, noted=True)
    limits, left = LIMITS[trial.wide] if trial.wide == torch.float64 else COARSE, kept(cuts, trial.masked.layers)
    if agree(seen.layers, left, limits) and any(map(informs, left.values())):
        return None
    whole = masked.run(trial.probe, trial.wide, trial.even, whole=True).layers
    small = net.run(trial.probe, trial.wide, trial.even, whole=True).layers
    proven = any(map(informs, columns))
    for path in [path for path in cuts if path in whole]:
        found, expected = small.get(path, []), whole[path]
        rests = [rest(a, b, cuts[path], limits) for a, b in zip(found, expected, strict=False)]
        if len(found) != len(expected) or any(left is None for left in rests):
            return Fault(trial, f"removal and zero-masking disagree on {trial.probe.name} in what `{path}` returns")
        proven |= informs([left for left in rests if left is not None])
    if not proven:
        raise VerificationError(
            f"{type(model).__name__} returns no real numbers that vary, and neither do its layers: nothing shows "
            "whether removal equals zero-masking.",
            fix="a model that returns its logits, and an example with varied numbers",
        )
    return None


# -- who is at fault ---------------------------------------------------------------------------------------------------
def culprits(model: nn.Module, plan: Plan, trial: Trial) -> list[str]:
    """The layers without whose removal the rest of the plan is right, on this trial. None if the plan has no graph."""
    graph = plan.graph
    if graph is None:
        return []
    removed = np.zeros(len(graph.root), np.bool_)
    removed[list(plan.groups)] = True
    checks = 0

    def fails(layers: Sequence[Layer | Block]) -> bool:
        nonlocal checks
        checks += 1
        some = np.zeros_like(removed)
        for layer in layers:
            if isinstance(layer, Block):
                some[layer.group] = True
            else:
                some[layer.groups] = removed[layer.groups] & ~inner[layer.groups]
        part = plan_for(graph, some)
        try:
            masked = _masked(model, part)
            expected = masked.run(trial.probe, trial.wide)
        except Exception as error:
            log.debug("no masked forward: %s", error)
            return False
        return _fault(model, masked, cut(model, part), part, [replace(trial, masked=expected)]) is not None

    def enough(layers: list[Layer | Block], beside: list[Layer | Block]) -> list[Layer | Block]:
        """Some of the layers, as few as possible, that are wrong beside the others, which are right alone."""
        if len(layers) == 1:
            return layers
        halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        for half in halves:
            if fails([*beside, *half]):
                return enough(half, beside)
        return enough(halves[0], [*beside, *halves[1]])

    # What leaves because it lies in a block leaves with it.
    blocks, inner = graph.blocks.gone(removed), np.zeros_like(removed)
    for block in blocks:
        inner[block.groups] = True
    found: list[Layer | Block] = []
    rest: list[Layer | Block] = [layer for layer in graph.layers if (removed & ~inner)[layer.groups].any()]
    rest += blocks
    while rest and checks < _MOST_CHECKS and fails(rest):
        wrong = enough(rest, [])
        if len(wrong) == 1:  # blocks of one kind share their code
            alike = [layer for layer in rest if layer is not wrong[0] and layer.family == wrong[0].family]
            wrong += [layer for layer in alike[:_MOST_ALIKE] if fails([layer])]
        found += wrong
        rest = [layer for layer in rest if not any(layer is item for item in wrong)]
    return [layer.name for layer in found]
