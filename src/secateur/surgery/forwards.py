"""Forwards of a copy of a model on probes, in one number format or another, and what its layers return meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nest import map_tensors, tensors_in, tensors_of_output
from secateur.running.copies import named_modules, tensors_of
from secateur.running.memory import resident, trim_beyond
from secateur.running.sandbox import as_written, quiet, run
from secateur.surgery.cut import places
from secateur.surgery.precision import Precise, Pristine, seed, widen
from secateur.surgery.probes import Probe

#: Numbers of a tensor beyond which it pays to ask how much memory is held, and the part of it that holes may take.
_LARGE, _HOLES = 2**20, 8
_PLACES = 8  # of a layer's output are noted along each dimension, at least, if there are as many


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


#: What a parameter loses along its dimensions.
Cut = Mapping[int, tuple[int, ...]]
#: What a layer shall return instead, by path, in each call.
Forced = Mapping[str, Sequence[Tensor]]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Net:
    """A copy that is run in several formats. `masks`: what is 0 in parameters, although they do not show it."""

    def __init__(self, net: nn.Module, output: tuple[str, ...], masks: Mapping[str, Cut] = _NOTHING) -> None:
        self._net, self._output = net, output
        self._modules = named_modules(net)
        self._masks = {
            id(t): {dim: places(gone).to(t.device) for dim, gone in masks[name].items()}
            for name, t in (tensors_of(self._modules) if masks else ())
            if name in masks
        }
        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        #: Convolutions and linear layers, by path.
        self.layers = {path: module for path, module in self._modules if isinstance(module, kinds)}
        self._held = 0
        self._wide: torch.dtype | None = None
        self._pristine: Pristine | None = None

    def run(
        self,
        probe: Probe,
        wide: torch.dtype,
        even: Iterable[int] = (),
        whole: bool = False,
        forced: Forced = _NOTHING,
        noted: bool = False,
    ) -> Seen:
        """What the model returns, and its layers; of these some places, unless `whole` is set.

        In float64, where the outputs tell, what layers return is noted only if it is asked for: `whole`, or `noted`.

        `forced`: what layers return is noted, and then replaced by this, if it has the same shape.
        """
        modules = [module for _, module in self._modules]
        if self._pristine is not None and wide != self._wide:
            self._pristine.begin(training=False)
        if self._pristine is None or wide != self._wide:
            widen(modules, wide)
            self._wide, self._pristine = wide, Pristine(modules)
        self._pristine.begin(probe.training)
        inputs = map_tensors(lambda t: t.to(wide) if t.is_floating_point() else t, probe.inputs)
        layers: dict[str, list[Tensor]] = {}
        noted = noted or whole or bool(forced) or wide != torch.float64
        watched = self.layers.items() if noted else ()
        hooks = [layer.register_forward_hook(_note(path, layers, whole, forced)) for path, layer in watched]
        hooks += [layer.register_forward_hook(self._spare) for _, layer in watched]
        self._held = held = resident()
        mode = Precise(wide, frozenset(even), self._masks)
        try:
            with quiet(), as_written():
                seed(0)
                with mode:
                    outputs = run(self._net, inputs, probe.cached)
            made = tensors_in(outputs)[:1] if probe.cached else tensors_of_output(outputs, self._output)
            return Seen(made, mode.drawn, mode.rows, layers)
        finally:
            for hook in hooks:
                hook.remove()
            trim_beyond(held)

    def _spare(self, module: nn.Module, args: Any, output: Any) -> None:
        """Passes of large tensors leave holes in the heap, which others do not fill."""
        with torch._C.DisableTorchFunction():
            if isinstance(output, Tensor) and output.numel() > _LARGE:
                self._held = trim_beyond(self._held, _HOLES)


def _note(path: str, found: dict[str, list[Tensor]], whole: bool, forced: Forced) -> Callable[..., Any]:
    def keep(module: nn.Module, args: Any, output: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors_in(output)):
                return None  # inside `torch.vmap`, which hides a dimension; outside, nobody can read it
            made, dim = found.setdefault(path, []), channel_dim(module)
            wanted = forced.get(path, ())[len(made) : len(made) + 1]
            made.extend(t.clone() if whole or wanted else some_of(t, dim) for t in tensors_in(output))
            return wanted[0].clone() if wanted and wanted[0].shape == output.shape else None

    return keep


def channel_dim(layer: nn.Module) -> int:
    """The dimension of its output that a layer makes."""
    return -1 - len(getattr(layer, "kernel_size", ()))


def some_of(output: Tensor, channel: int) -> Tensor:
    """All channels at some places of an output."""
    for dim in range(output.ndim):
        if dim - output.ndim != channel and output.shape[dim] >= 2 * _PLACES:
            output = output[(slice(None),) * dim + (slice(None, None, output.shape[dim] // _PLACES),)]
    return output.clone()
