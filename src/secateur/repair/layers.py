"""A layer that can be repaired, and watching such layers run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.linear import Linear
from secateur.ops.table import Call, Site
from secateur.repair.rows import Positions, channel_last, wide
from secateur.running.observer import Observer

#: Stands for the model's own input among the calls.
INPUT = Site("", "input", -1)
#: Operations whose weight can be corrected.
LAYERS = Convolution | TransposedConvolution | Linear
Tensors = Mapping[str, Tensor]
Values = TypeVar("Values", Tensor, Tensor | None)


@dataclass(frozen=True)
class FollowingNorm:
    """The batch norm that reads a layer's output: names of its tensors, and eps.

    It is `alone` if it reads nothing else and nothing else reads that output. Then its mean can carry a constant.
    """

    mean: str
    variance: str
    weight: str | None
    bias: str | None
    eps: float
    alone: bool = True

    def scale(self, tensors: Tensors) -> Tensor:
        """The factor of each channel."""
        scale = (tensors[self.variance].detach().double() + self.eps).rsqrt()
        return scale if self.weight is None else scale * tensors[self.weight].detach().double()

    def zero(self, tensors: Tensors) -> Tensor:
        """The input of each channel that becomes zero."""
        mean = tensors[self.mean].detach().double()
        return mean if self.bias is None else mean - tensors[self.bias].detach().double() / self.scale(tensors)


@dataclass(frozen=True)
class RepairableLayer:
    """The one call of a convolution or linear layer. `number` counts the calls of a forward pass.

    A layer is known by its weight: an attention module makes other calls after it was cut.
    """

    number: int
    weight: str
    bias: str | None
    #: The output channels of a transposed convolution lie along dimension 1 of its weight, others along 0.
    transposed: bool = False
    #: The dimension of input and output along which samples lie.
    batch: int = 0
    #: Of the output for one sample.
    channels: int = 0
    positions: int = 0
    norm: FollowingNorm | None = None
    #: The call whose output is added to this layer's output, if it runs before this layer.
    partner: Site | None = None
    #: Whether a ReLU alone reads the output, after the norm and after the partner was added.
    rectified: bool = False
    #: In a smaller model: which of the original's output channels are left; None for all.
    kept: np.ndarray[Any, Any] | None = field(default=None, compare=False)

    @property
    def shifts(self) -> bool:
        """Whether a constant per output can be added: to a bias, or to the mean of the batch norm that follows."""
        return self.bias is not None or (self.norm is not None and self.norm.alone)

    def left(self, values: Values) -> Values:
        """Numbers for the original's output channels, which are the last dimension, for those that are left."""
        if self.kept is None or values is None:
            return values
        return values.index_select(-1, torch.as_tensor(self.kept, device=values.device))

    def inverse(self, tensors: Tensors) -> Tensor | None:
        """The factor that turns what is added after the norm into units of the layer's output."""
        if self.norm is None:
            return None
        scale = self.norm.scale(tensors)
        # A channel that the norm nearly silences cannot make up for anything.
        return torch.where(scale.abs() > 1e-3 * scale.abs().max(), 1 / scale, 0.0)

    def relu_level(self, tensors: Tensors) -> Tensor | None:
        """For each channel the output at which the ReLU begins to pass, and 1 if it passes more, -1 if less."""
        if not self.rectified:
            return None
        if self.norm is None:
            return torch.stack([torch.zeros(self.channels), torch.ones(self.channels)]).to(tensors[self.weight].device)
        scale = self.norm.scale(tensors)
        # A channel that the norm nearly silences has no such level: everything counts as passed.
        silent = scale.abs() <= 1e-3 * scale.abs().max()
        level = torch.where(silent, -torch.inf, self.norm.zero(tensors))
        return torch.stack([level, torch.where(silent | (scale > 0), 1.0, -1.0)])


Layers = Mapping[str, RepairableLayer]


class LayerObserver(Observer):
    """Hands each repairable layer to `run_layer`, and keeps tensors until the layer runs whose output they join.

    `inverse` has, by weight, the factor that turns such a tensor into units of the layer's output. `place` are the
    samples that `inputs` are.
    """

    def __init__(
        self, model: nn.Module, layers: Layers, inverse: Mapping[str, Tensor | None],
        positions: Mapping[str, Positions], place: slice, inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(model)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._layers = {id(tensors[name]): layer for name, layer in layers.items() if name in tensors}
        self._inverse, self._positions, self.place = inverse, positions, place
        self._wanted = Counter(layer.partner for layer in self._layers.values() if layer.partner is not None)
        self._kept: dict[Site, Tensor] = {INPUT: inputs} if isinstance(inputs, Tensor) else {}

    def observe(self, call: Call) -> Any:
        """Run the call, and keep its output if it is needed later."""
        layer = self._layers.get(id(call["weight"])) if isinstance(call.operation, LAYERS) else None
        output = call.run() if layer is None else self.run_layer(layer, call)
        if call.site in self._wanted and isinstance(output, Tensor):
            self._kept[call.site] = output
        return output

    def unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it: the model was analysed before."""
        return func(*args, **kwargs)

    def run_layer(self, layer: RepairableLayer, call: Call) -> Any:
        """What a repairable layer returns."""
        raise NotImplementedError

    def sampled(
        self, layer: RepairableLayer, call: Call, output: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The sampled positions (None for all), the output there, and what will be added to it in the same units."""
        given = channel_last(call, output, layer.batch, layer.positions)
        positions = self._positions[layer.weight]
        y, partner = wide(positions.take(given, self.place)), self._partner(layer, output)
        added = None
        if partner is not None:
            added = wide(positions.take(channel_last(call, partner, layer.batch, layer.positions), self.place))
            inverse = self._inverse[layer.weight]
            added = added if inverse is None else added * inverse.to(added)
        return positions.of(self.place, y.device), y, added

    def _partner(self, layer: RepairableLayer, output: Tensor) -> Tensor | None:
        """What will be added to a layer's output. It is let go when the last layer has read it: it is large."""
        if layer.partner is None:
            return None
        other = self._kept.get(layer.partner)
        self._wanted[layer.partner] -= 1
        if not self._wanted[layer.partner]:
            self._kept.pop(layer.partner, None)
        return other if other is not None and other.shape == output.shape else None
