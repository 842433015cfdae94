"""Rule zero: removal equals zero-masking, on the example and on inputs of our own, for every output by itself."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import Argument, VerificationError
from secateur.nest import map_tensors, tensors_in, tensors_of_output
from secateur.plans.plan import Plan, plan_for
from secateur.running.copies import named_modules, named_tensors, shared_copy
from secateur.running.devices import device_of, dtype_of
from secateur.running.sandbox import Example, caches, quiet, run
from secateur.structure.blocks import Block, within
from secateur.structure.graph import Layer
from secateur.surgery.cut import cut, sliced
from secateur.surgery.mask import reference
from secateur.surgery.precision import Precise, unwritten, widen
from secateur.surgery.probes import Probe, given, others

log = logging.getLogger("secateur")

# Differences that rounding may make, relative to the largest number of an output, and the least that counts as such a
# number: an output that should be 0 holds rounding. What float32 cannot tell from rounding, float64 decides.
_LIMITS = {torch.float64: (1e-10, 1e-6), torch.float32: (1e-5, 1e-30)}
_COARSE = (1e-4, 1e-6)  # in float32, for a forward that does not run in float64
# Above these, float32 is tried first: MACs on the inputs, and parameters. Then every layer is compared, too: what a
# branch does that is scaled down to nothing, only float64 would see at the end.
_MACS, _PARAMETERS = 2e7, 2e8
_LIGHT = 1e7  # in training mode float32 is tried first above this
_PLACES = 8  # of a layer's output are compared along each dimension, at least, if there are as many
_MOST_CHECKS, _MOST_ALIKE = 80, 40


@dataclass(frozen=True)
class Seen:
    """What a model returned, the shapes of the noise it drew, and the tables it read (see `Precise`).

    `layers` has some places of what its layers returned, by path, in each call.
    """

    outputs: list[Tensor]
    drawn: list[tuple[int, ...]]
    rows: dict[int, int]
    layers: dict[str, list[Tensor]]


@dataclass(frozen=True)
class Trial:
    """A probe that the masked model took, in which format, what it returned, and which noise was even (`Precise`)."""

    probe: Probe
    wide: torch.dtype
    masked: Seen
    even: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Where the smaller model and the masked one differ, in words."""

    trial: Trial
    what: str


def verify(model: nn.Module, small: nn.Module, plan: Plan, example: Example) -> None:
    """Raise unless the smaller model and the masked one agree. If the plan knows its graph, the layers are named."""
    masked = _Net(reference(model, plan), plan.output)
    trials = _trials(model, masked, plan, example)
    fault = _fault(model, masked, small, plan, trials)
    if fault is None:
        return
    names = culprits(model, plan, fault.trial)
    raise disagreement(fault.what, names, plan)


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


class _Net:
    """A copy that is run in several formats."""

    def __init__(self, net: nn.Module, output: tuple[str, ...]) -> None:
        self._net, self._output = net, output
        self._wide: torch.dtype | None = None

    def run(self, probe: Probe, wide: torch.dtype, even: Iterable[int] = (), whole: bool = False) -> Seen:
        """What the model and its layers return; of these some places, unless `whole` is set."""
        if wide != self._wide:
            widen(self._net, wide)
            self._wide = wide
        inputs = map_tensors(lambda t: t.to(wide) if t.is_floating_point() else t, probe.inputs)
        layers: dict[str, list[Tensor]] = {}
        hooks = self._watch(layers, whole)
        mode = Precise(wide, frozenset(even))
        try:
            with quiet(), unwritten(self._net, probe.training):
                torch.manual_seed(0)
                with mode:
                    outputs = run(self._net, inputs, probe.cached)
            made = tensors_in(outputs)[:1] if probe.cached else tensors_of_output(outputs, self._output)
            return Seen(made, mode.drawn, mode.rows, layers)
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, found: dict[str, list[Tensor]], whole: bool) -> list[Any]:
        def note(path: str, dim: int) -> Callable[..., None]:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                found.setdefault(path, []).extend(t if whole else _some(t, dim) for t in tensors_in(output))

            return keep

        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        layers = [(path, module) for path, module in named_modules(self._net) if isinstance(module, kinds)]
        return [module.register_forward_hook(note(path, _channel_dim(module))) for path, module in layers]


def _channel_dim(layer: nn.Module) -> int:
    """The dimension of its output that a layer makes."""
    return -1 - len(getattr(layer, "kernel_size", ()))


def _some(output: Tensor, channel: int) -> Tensor:
    """All channels at some places of an output."""
    with torch._C.DisableTorchFunction():
        for dim in range(output.ndim):
            if dim - output.ndim != channel and output.shape[dim] >= 2 * _PLACES:
                output = output[(slice(None),) * dim + (slice(None, None, output.shape[dim] // _PLACES),)]
        return output.clone()


# -- the probes that a model takes -------------------------------------------------------------------------------------
def _trials(model: nn.Module, masked: _Net, plan: Plan, example: Example) -> list[Trial]:
    """The example, then what else the masked model takes, at last in training mode if that may be another forward."""
    known = [given(example, {}), Probe("the example", example)]
    first, reason = _first_taken(masked, known, model, plan)
    if first is None:
        raise VerificationError(
            "the masked model does not run on the example: {reason}.",
            fix="{analyze} with the inputs of {apply}, which the model takes in float32",
            reason=reason,
            analyze=Argument("analyze"),
            apply=Argument("apply"),
        )
    trials = [first]
    second, _ = _first_taken(masked, others(example, first.masked.rows, plan.before.macs < _LIGHT), model, plan)
    trials += [second] if second is not None else []
    last = trials[-1].probe
    if caches(model):
        cached, _ = _first_taken(masked, [replace(last, name=f"{last.name} with a cache", cached=True)], model, plan)
        trials += [cached] if cached is not None else []
    if _reads_training(model):
        learning = replace(last, name=f"{last.name} in training mode", training=True)
        third, _ = _first_taken(masked, [learning], model, plan, _LIGHT)
        trials += [third] if third is not None and _finite(third) else []
    return trials


def _first_taken(
    masked: _Net, probes: Iterable[Probe], model: nn.Module, plan: Plan, macs: float = _MACS
) -> tuple[Trial | None, str]:
    """The first probe that the masked model takes, or the first error."""
    reason, coarse = "", None
    for probe in probes:
        for wide in _formats(model, plan, probe, macs):
            try:
                trial = Trial(probe, wide, masked.run(probe, wide))
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
    return all(bool(torch.isfinite(t).all()) for t in trial.masked.outputs if _real(t))


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


def _reads_training(model: nn.Module) -> bool:
    """Whether code outside torch's own modules asks for the mode."""
    kinds = {kind for _, module in named_modules(model) for kind in type(module).__mro__}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.nn.") and kind is not object]
    functions = [inspect.unwrap(item) for kind in own for item in vars(kind).values() if callable(item)]
    return any(_names_training(getattr(function, "__code__", None)) for function in functions)


def _names_training(code: CodeType | None) -> bool:
    if code is None:
        return False
    return "training" in code.co_names or any(_names_training(c) for c in code.co_consts if isinstance(c, CodeType))


# -- comparing ---------------------------------------------------------------------------------------------------------
def _fault(model: nn.Module, masked: _Net, small: nn.Module, plan: Plan, trials: Sequence[Trial]) -> Fault | None:
    """The first difference that is no rounding."""
    net, done = _Net(shared_copy(small), plan.output), []
    for trial in trials:
        found = _run_small(net, model, masked, trial)
        if isinstance(found, Fault):
            return found
        done += [found] if found is not None else []
    scales = _scales([trial.masked.outputs for trial, _ in done])
    for trial, seen in done:
        what = _difference(trial, seen.outputs, scales, _LIMITS[trial.wide])
        if trial.wide != torch.float64 and (what or _kept(model, plan, trial, seen) is None):
            trial, what = _decided(net, model, masked, trial, seen, scales)
        if what:
            return Fault(trial, what)
    return _unproven(net, model, masked, plan, done)


def _run_small(net: _Net, model: nn.Module, masked: _Net, trial: Trial) -> tuple[Trial, Seen] | Fault | None:
    """What the smaller model returns where the masked one returned something, with the same noise.

    None if the original, which decides, does not take the probe either.
    """
    try:
        seen = net.run(trial.probe, trial.wide)
        if seen.drawn != trial.masked.drawn:
            # Noise as wide as a layer cannot be the same in both: it is one number everywhere instead. A branch that
            # left draws none, so that nobody knows which numbers belong together.
            even = tuple(range(max(len(seen.drawn), len(trial.masked.drawn))))
            if len(seen.drawn) == len(trial.masked.drawn):
                even = tuple(i for i in even if seen.drawn[i] != trial.masked.drawn[i])
            trial = replace(trial, masked=masked.run(trial.probe, trial.wide, even), even=even)
            seen = net.run(trial.probe, trial.wide, even)
    except Exception as error:
        if not _takes(model, trial):
            return None
        what = f"the smaller model does not run on {trial.probe.name}: {type(error).__name__}: {error}"
        return Fault(trial, what.rstrip("."))
    return trial, seen


def _takes(model: nn.Module, trial: Trial) -> bool:
    try:
        _Net(shared_copy(model), ()).run(trial.probe, trial.wide)
    except Exception as error:
        log.debug("%s is not taken by the original: %s", trial.probe.name, error)
        return False
    return True


def _decided(
    net: _Net, model: nn.Module, masked: _Net, trial: Trial, seen: Seen, scales: Sequence[float]
) -> tuple[Trial, str]:
    """The comparison again in double precision, where only a real difference survives."""
    try:
        expected = masked.run(trial.probe, torch.float64)
    except Exception as error:  # a forward that needs its own precision is judged by that
        log.debug("no forward in float64: %s", error)
        return trial, _difference(trial, seen.outputs, scales, _COARSE)
    trial = replace(trial, wide=torch.float64, masked=expected)
    scales = [max(pair) for pair in zip_longest(scales, _scales([expected.outputs]), fillvalue=0.0)]  # no overflow
    found = _run_small(net, model, masked, trial)
    if isinstance(found, Fault):
        return found.trial, found.what
    if found is None:
        return trial, ""
    return found[0], _difference(found[0], found[1].outputs, scales, _LIMITS[torch.float64])


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _scales(outputs: Sequence[Sequence[Tensor]]) -> list[float]:
    """The largest number of each output, over all probes."""
    scales = [0.0] * max(map(len, outputs), default=0)
    for made in outputs:
        for i, tensor in enumerate(made):
            if _real(tensor) and tensor.numel():
                top = float(torch.nan_to_num(tensor.abs(), nan=0.0, posinf=0.0).max())
                scales[i] = max(scales[i], top)
    return scales


def _difference(trial: Trial, outputs: Sequence[Tensor], scales: Sequence[float], limits: tuple[float, float]) -> str:
    """In words: what differs by more than `limits` allow, or nothing."""
    limit, least = limits
    expected, name = trial.masked.outputs, trial.probe.name
    if len(outputs) != len(expected):
        return f"the smaller model returns {len(outputs)} tensors instead of {len(expected)} on {name}"
    for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        where = f"in output {i} of shape {tuple(b.shape)}"
        if a.shape != b.shape:
            return f"removal and zero-masking disagree on {name}: output {i} is {tuple(a.shape)}, not {tuple(b.shape)}"
        gap = _gap(a, b, max(scales[i], least))
        if not gap <= (limit if _real(b) else 0):
            return f"removal and zero-masking disagree on {name}: relative difference {gap:.2g} {where}"
    return ""


def _gap(a: Tensor, b: Tensor, scale: float) -> float:
    """The largest difference of two tensors relative to `scale`; of whole numbers, the share that differs."""
    if not b.numel():
        return 0.0
    if not _real(b) or not _real(a):
        return float((a != b).double().mean())
    same = (a == b) | (a.isnan() & b.isnan())  # infinite or undefined in both
    gap = float(torch.where(same, 0.0, (a - b).abs()).max()) / scale
    return gap if gap == gap else float("inf")


# -- what layers return ------------------------------------------------------------------------------------------------
def _own(model: nn.Module, plan: Plan, paths: Iterable[str]) -> dict[str, tuple[int, Sequence[int]]]:
    """For each layer that is still there: the dimension of its output that it makes, and what it loses along it."""
    names, modules = {id(t): name for name, t in named_tensors(model)}, dict(named_modules(model))
    found: dict[str, tuple[int, Sequence[int]]] = {}
    for path in paths:
        layer = modules[path]
        cuts = plan.cuts.get(names.get(id(layer.weight), ""), {})
        if not any(within(path, item.path) for item in plan.stand_ins):
            found[path] = _channel_dim(layer), cuts.get(int(getattr(layer, "transposed", False)), ())
    return found


def _kept(model: nn.Module, plan: Plan, trial: Trial, seen: Seen) -> dict[str, list[Tensor]] | None:
    """What layers of the masked model return and the smaller model keeps; None if it returns something else.

    Looks at the places that are noted, and at units that are gone as outputs of their layer. Elsewhere it may err.
    """
    limits, kept = _COARSE if trial.wide != torch.float64 else _LIMITS[trial.wide], {}
    for path, (dim, gone) in _own(model, plan, trial.masked.layers).items():
        expected = [sliced(t, {dim % t.ndim: tuple(gone)} if gone else {}) for t in trial.masked.layers[path]]
        inner = replace(trial, masked=replace(trial.masked, outputs=expected))
        if _difference(inner, seen.layers.get(path, []), _scales([expected]), limits):
            return None
        kept[path] = expected
    return kept


def _unproven(
    net: _Net, model: nn.Module, masked: _Net, plan: Plan, done: Sequence[tuple[Trial, Seen]]
) -> Fault | None:
    """Outputs that are empty, whole-numbered or constant hide what happens: then every layer is compared."""
    plain = [(trial, seen) for trial, seen in done if not trial.probe.training and not trial.probe.cached]
    counts = {len(trial.masked.outputs) for trial, _ in plain}
    columns = list(zip(*(trial.masked.outputs for trial, _ in plain), strict=False))
    if not plain or (len(counts) == 1 and columns and all(map(_informs, columns))):
        return None
    trial, seen = plain[-1]
    kept = _kept(model, plan, trial, seen)
    if kept is not None and any(map(_informs, kept.values())):
        return None
    limits = _LIMITS[trial.wide] if trial.wide == torch.float64 else _COARSE
    whole = masked.run(trial.probe, trial.wide, trial.even, whole=True).layers
    small = net.run(trial.probe, trial.wide, trial.even, whole=True).layers
    proven = any(map(_informs, columns))
    for path, own in _own(model, plan, whole).items():
        found, expected = small.get(path, []), whole[path]
        rests = [_rest(a, b, own, limits) for a, b in zip(found, expected, strict=False)]
        if len(found) != len(expected) or any(rest is None for rest in rests):
            return Fault(trial, f"removal and zero-masking disagree on {trial.probe.name} in what `{path}` returns")
        proven |= _informs([rest for rest in rests if rest is not None])
    if not proven:
        raise VerificationError(
            f"{type(model).__name__} returns no real numbers that vary, and neither do its layers: nothing shows "
            "whether removal equals zero-masking.",
            fix="a model that returns its logits, and an example with varied numbers",
        )
    return None


def _rest(
    found: Tensor, expected: Tensor, own: tuple[int, Sequence[int]], limits: tuple[float, float]
) -> Tensor | None:
    """What is left of a masked layer's output if it equals that of the smaller layer, in order; None if it does not.

    Units may be gone along any dimension. If that are several, `own` tells what the layer itself has lost along one.
    """
    if found.ndim != expected.ndim or any(a > b for a, b in zip(found.shape, expected.shape, strict=True)):
        return None
    scale, gone = max(*_scales([[expected]]), limits[1]), _shorter(found, expected)
    if len(gone) > 1:
        expected = sliced(expected, {own[0] % found.ndim: tuple(own[1])})
        gone = _shorter(found, expected)
    if len(gone) > 1:
        return None
    if not gone:
        return expected if _gap(found, expected, scale) <= limits[0] else None
    rows, wanted, kept = expected.movedim(gone[0], 0), found.movedim(gone[0], 0), list[int]()
    for i, row in enumerate(rows):
        if len(kept) < len(wanted) and _gap(wanted[len(kept)], row, scale) <= limits[0]:
            kept.append(i)
    return rows[kept] if len(kept) == len(wanted) else None


def _shorter(found: Tensor, expected: Tensor) -> list[int]:
    return [dim for dim, (a, b) in enumerate(zip(found.shape, expected.shape, strict=True)) if a != b]


def _informs(tensors: Sequence[Tensor]) -> bool:
    """Whether an output, as the probes saw it, holds real numbers that vary."""
    values = [t.abs().reshape(-1) if t.is_complex() else t.reshape(-1) for t in tensors if _real(t)]
    values = [t[torch.isfinite(t)] for t in values]
    values = [t for t in values if t.numel()]
    if not values or all(bool((t == t.round()).all()) for t in values):
        return False
    return max(float(t.max()) for t in values) > min(float(t.min()) for t in values)


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
            masked = _Net(reference(model, part), part.output)
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
