"""Differences between what a smaller model and its layers return and what the masked ones do, beyond rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from secateur.plans.plan import Plan
from secateur.running.copies import named_modules, named_tensors
from secateur.structure.blocks import within
from secateur.surgery.cut import Known, sliced
from secateur.surgery.forwards import channel_dim

#: A difference relative to the largest number of an output, and the least that counts as such a number.
Limits = tuple[float, float]
# What rounding may make. An output that should be 0 holds rounding. What float32 cannot tell from rounding, float64
# decides.
LIMITS: Mapping[torch.dtype, Limits] = {torch.float64: (1e-10, 1e-6), torch.float32: (1e-5, 1e-30)}
COARSE: Limits = (1e-4, 1e-6)  # in float32, for a forward that does not run in float64
#: By path of a layer: the dimension of its output that it makes, and what it loses along it.
Cuts = Mapping[str, tuple[int, tuple[int, ...]]]


def difference(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], name: str, scales: Sequence[float], limits: Limits
) -> str:
    """In words: what differs by more than `limits` allow on the probe of this name, or nothing."""
    limit, least = limits
    if len(outputs) != len(expected):
        return f"the smaller model returns {len(outputs)} tensors instead of {len(expected)} on {name}"
    for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        if a.shape != b.shape:
            return f"removal and zero-masking disagree on {name}: output {i} is {tuple(a.shape)}, not {tuple(b.shape)}"
        gap = _gap(a, b, max(scales[i], least))
        if not gap <= (limit if is_real(b) else 0):
            where = f"in output {i} of shape {tuple(b.shape)}"
            return f"removal and zero-masking disagree on {name}: relative difference {gap:.2g} {where}"
    return ""


def scales_of(outputs: Sequence[Sequence[Tensor]]) -> list[float]:
    """The largest number of each output, over all probes."""
    scales = [0.0] * max(map(len, outputs), default=0)
    for made in outputs:
        for i, tensor in enumerate(made):
            if is_real(tensor) and tensor.numel():
                top = float(tensor.abs().max())
                if not math.isfinite(top):
                    top = float(torch.nan_to_num(tensor.abs(), nan=0.0, posinf=0.0).max())
                scales[i] = max(scales[i], top)
    return scales


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that are not whole."""
    return tensor.is_floating_point() or tensor.is_complex()


def _gap(a: Tensor, b: Tensor, scale: float) -> float:
    """The largest difference of two tensors relative to `scale`; of whole numbers, the share that differs."""
    if not b.numel():
        return 0.0
    if not is_real(b) or not is_real(a):
        return float((a != b).double().mean())
    gap = float((a - b).abs().max()) / scale
    if not math.isfinite(gap):
        same = (a == b) | (a.isnan() & b.isnan())  # infinite or undefined in both
        gap = float(torch.where(same, 0.0, (a - b).abs()).max()) / scale
    return gap if gap == gap else float("inf")


def informs(tensors: Sequence[Tensor]) -> bool:
    """Whether an output, as the probes saw it, holds real numbers that vary."""
    values = [t.abs().reshape(-1) if t.is_complex() else t.reshape(-1) for t in tensors if is_real(t)]
    values = [t[torch.isfinite(t)] for t in values]
    values = [t for t in values if t.numel()]
    if not values or all(bool((t == t.round()).all()) for t in values):
        return False
    return max(float(t.max()) for t in values) > min(float(t.min()) for t in values)


# -- what layers return ------------------------------------------------------------------------------------------------
def layer_cuts(model: nn.Module, plan: Plan, paths: Iterable[str]) -> Cuts:
    """What the layers at these paths lose that are still there."""
    names, modules = {id(t): name for name, t in named_tensors(model)}, dict(named_modules(model))
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for path in paths:
        layer = modules[path]
        cuts = plan.cuts.get(names.get(id(layer.weight), ""), {})
        if not any(within(path, item.path) for item in plan.stand_ins):
            found[path] = channel_dim(layer), tuple(cuts.get(int(getattr(layer, "transposed", False)), ()))
    return found


def kept(cuts: Cuts, masked: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """What layers of the masked model return and the smaller model keeps.

    Knows which units are gone as outputs of their layer. Elsewhere it may err.
    """
    known: Known = {}  # what layers lose, mostly together
    return {
        path: [sliced(t, {dim % t.ndim: gone}, known) if gone else t for t in masked[path]]
        for path, (dim, gone) in cuts.items()
        if path in masked
    }


def agree(found: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Sequence[Tensor]], limits: Limits) -> bool:
    """Whether layers return what is expected of them."""
    return not any(
        difference(found.get(path, ()), wanted, path, scales_of([wanted]), limits) for path, wanted in expected.items()
    )


def rest(found: Tensor, expected: Tensor, own: tuple[int, tuple[int, ...]], limits: Limits) -> Tensor | None:
    """What is left of a masked layer's output if it equals that of the smaller layer, in order; None if it does not.

    Units may be gone along any dimension. If that are several, `own` tells what the layer itself has lost along one.
    """
    if found.ndim != expected.ndim or any(a > b for a, b in zip(found.shape, expected.shape, strict=True)):
        return None
    scale, gone = max(*scales_of([[expected]]), limits[1]), _shorter(found, expected)
    if len(gone) > 1:
        expected = sliced(expected, {own[0] % found.ndim: own[1]})
        gone = _shorter(found, expected)
    if len(gone) > 1:
        return None
    if not gone:
        return expected if _gap(found, expected, scale) <= limits[0] else None
    rows, wanted, left = expected.movedim(gone[0], 0), found.movedim(gone[0], 0), list[int]()
    for i, row in enumerate(rows):
        if len(left) < len(wanted) and _gap(wanted[len(left)], row, scale) <= limits[0]:
            left.append(i)
    return rows[left] if len(left) == len(wanted) else None


def _shorter(found: Tensor, expected: Tensor) -> list[int]:
    return [dim for dim, (a, b) in enumerate(zip(found.shape, expected.shape, strict=True)) if a != b]
