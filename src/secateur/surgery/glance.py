"""The quick way to verify a removal: one look at a network whose code the analysis has seen through.

Such code asks for neither sizes nor numbers and calls only functions that do the same to any channel. Nothing has to be
watched then: convolutions, linear layers and batch norms get a forward that widens and masks their tensors when they
read them, and everything else runs as it is. A glance can only accept. Whatever it finds odd, an error or a difference,
`verify` looks at in its own way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secateur.nest import map_tensors, tensors_of_output
from secateur.plans.plan import Plan
from secateur.running.copies import named_modules, named_tensors, shared_copy, tensors_of
from secateur.running.modes import reads_training
from secateur.running.observer import is_plain, is_torchs_own, weight_and_bias
from secateur.running.sandbox import Example, as_written, caches, quiet, run
from secateur.surgery.cut import places
from secateur.surgery.differences import COARSE, LIMITS, agree, difference, informs, kept, layer_cuts, scales_of
from secateur.surgery.forwards import Cut, channel_dim, some_of
from secateur.surgery.mask import reference
from secateur.surgery.precision import depthwise, seed, widen
from secateur.surgery.probes import Probe, corners

log = logging.getLogger("secateur")

_CONVOLUTIONS: dict[type, Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_LAYERS = frozenset((*_CONVOLUTIONS, nn.Linear))
#: Batch norms, and how many dimensions they take.
_NORMS: dict[type, tuple[int, ...]] = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


def accepts(
    model: nn.Module,
    small: nn.Module,
    plan: Plan,
    example: Example,
    formats: Callable[[Probe], Sequence[torch.dtype]],
) -> bool:
    """Whether one look shows that the smaller model is the masked one. If not, nothing is said."""
    if not _seen_through(model, plan, example):
        return False
    with quiet(), as_written():
        for probe in corners(example):
            try:
                masked = _masked(model, plan, formats(probe)[0])
                expected = masked.run(probe.inputs, plan.output)
            except Exception as error:  # the user's own code decides what it takes
                log.debug("no glance at %s: %s", probe.name, error)
                continue
            try:
                return _agree(model, small, plan, probe, masked, expected)
            except Exception as error:
                log.debug("the smaller model does not take %s: %s", probe.name, error)
                return False
    return False


def _seen_through(model: nn.Module, plan: Plan, example: Example) -> bool:
    """Whether one look is enough: the code is the one that was analysed, and there is no other forward to verify."""
    graph = plan.graph
    if graph is None or not graph.plain or example is not graph.example:
        return False
    if plan.norms or plan.blocks or plan.stand_ins or plan.attributes or plan.heads:
        return False
    modules = [module for _, module in named_modules(model)]
    kinds = set(map(type, modules))
    if not kinds <= graph.plain or not all(map(is_plain, modules)):  # hooks may read weights
        return False
    if not all(map(is_torchs_own, kinds & (_LAYERS | _NORMS.keys()))):
        return False
    return not caches(model) and not reads_training(model)


def _agree(
    model: nn.Module, small: nn.Module, plan: Plan, probe: Probe, masked: _Glance, expected: Sequence[Tensor]
) -> bool:
    """Whether the smaller model returns what the masked one did, and its layers if need be."""
    # In float32 what a branch does that is scaled down to nothing does not show at the end: layers are compared, too.
    wide = masked.wide
    if not expected or not all(t.is_floating_point() and bool(torch.isfinite(t).all()) for t in expected):
        return False
    telling = all(informs([t]) for t in expected)
    net = _Glance(shared_copy(small), wide, noted=wide != torch.float64 or not telling)
    outputs, scales = net.run(probe.inputs, plan.output), scales_of([expected])
    if difference(outputs, expected, probe.name, scales, LIMITS[wide]):
        return False
    if net.noted:
        left = kept(layer_cuts(model, plan, masked.layers), masked.layers)
        limits = LIMITS[wide] if wide == torch.float64 else COARSE
        return agree(net.layers, left, limits) and (telling or any(map(informs, left.values())))
    return True


def _masked(model: nn.Module, plan: Plan, wide: torch.dtype) -> _Glance:
    """The masked model. Weights of layers share the model's memory, and are masked where they are read."""
    modules, names = named_modules(model), {id(tensor): name for name, tensor in named_tensors(model)}
    own = {
        id(m._parameters["weight"])
        for _, m in modules
        if type(m) in _LAYERS and m._parameters.get("weight") is not None
    }
    others = {id(t) for _, m in modules if type(m) not in _LAYERS for t in m._parameters.values()}
    late = {names[weight] for weight in own - others}
    return _Glance(reference(model, plan, late), wide, {name: plan.cuts[name] for name in late & plan.cuts.keys()})


@dataclass
class _Glance:
    """A copy that runs once, in the format `wide`. `masks` are places where weights of layers are 0, though they do not
    show it. If `noted`, `layers` gets some places of what convolutions and linear layers return, by path."""

    net: nn.Module
    wide: torch.dtype
    masks: Mapping[str, Cut] = field(default_factory=dict)
    noted: bool = True
    layers: dict[str, list[Tensor]] = field(default_factory=dict)

    def run(self, inputs: Example, output: Sequence[str]) -> list[Tensor]:
        """What the model returns."""
        tour, others = named_modules(self.net), []
        names = {id(tensor): name for name, tensor in tensors_of(tour, ("_parameters",))} if self.masks else {}
        known: dict[int, Tensor] = {}  # what layers lose, mostly together
        for path, module in tour:
            if module.training:
                module.training = False
            forward = None
            if type(module) in _NORMS:
                forward = self._norm(module)
            elif type(module) in _LAYERS:
                weight: Any = module._parameters.get("weight")
                mask = dict[int, Tensor]()
                for dim, gone in self.masks.get(names.get(id(weight), ""), {}).items():
                    if id(gone) not in known:
                        known[id(gone)] = places(gone).to(weight.device)
                    mask[dim] = known[id(gone)]
                forward = self._layer(module, path, mask)
                if forward is None and mask:
                    raise NotImplementedError(f"no forward that masks `{path}`")
            if forward is None:
                others.append(module)
            else:
                vars(module)["forward"] = forward
        widen(others, self.wide)
        for module in others:
            for name, tensor in module._parameters.items():
                if tensor is not None and tensor.is_floating_point() and tensor.dtype != self.wide:
                    module._parameters[name] = tensor.to(self.wide)  # type: ignore[assignment]
        seed(0)
        # The forward may write to what it is given.
        own = map_tensors(lambda t: t.to(self.wide, copy=True) if t.is_floating_point() else t.clone(), inputs)
        return tensors_of_output(run(self.net, own), output)

    def _norm(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        own = weight_and_bias(module)
        statistics = [module._buffers.get(name) for name in ("running_mean", "running_var")]
        if own is None or any(t is None for t in statistics):
            return None
        weight, bias, mean, variance = [None if t is None else t.to(self.wide) for t in (*own, *statistics)]
        taken, eps, fast = _NORMS[type(module)], module.eps, torch.backends.cudnn.enabled

        def norm(x: Tensor) -> Tensor:  # (nothing here refers to the module: a cycle would outlive the look)
            if x.ndim not in taken:
                raise ValueError(f"a batch norm takes {taken} dimensions, not {x.ndim}")
            return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, fast)

        return norm

    def _layer(self, module: Any, path: str, mask: Mapping[int, Tensor]) -> Callable[[Tensor], Tensor] | None:
        """A forward of a layer. Where its weight is masked, what it reads and makes is, which is smaller."""
        (weight, bias), wide = weight_and_bias(module) or (None, None), self.wide
        groups, dim = getattr(module, "groups", 1), channel_dim(module)
        if weight is None or not weight.is_floating_point() or not mask.keys() <= {0, 1} or (groups > 1 and 1 in mask):
            return None
        if getattr(module, "padding_mode", "zeros") != "zeros":
            return None
        shift = None if bias is None else bias.to(wide)
        found = self.layers.setdefault(path, []) if self.noted else None
        read, made = mask.get(1), mask.get(0)
        late = None if shift is None or made is None else shift.view(-1, *[1] * (-1 - dim))
        first = shift if late is None else None
        function = _CONVOLUTIONS.get(type(module), F.linear)
        rest = () if function is F.linear else (module.stride, module.padding, module.dilation, groups)
        alone = function is F.conv2d and groups > 1 and wide == torch.float64

        def layer(x: Tensor) -> Tensor:
            x, own = x if read is None else x.index_fill(dim, read, 0), weight.to(wide)
            y = depthwise(x, own, first, *rest) if alone else None
            if y is None:
                y = function(x, own, first, *rest)
            if made is not None:
                y.index_fill_(dim, made, 0)
            if late is not None:
                y += late
            if found is not None:
                found.append(some_of(y, dim))
            return y

        return layer
