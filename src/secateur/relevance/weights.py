"""The weights of layers: their names, the batch norms folded into them, and linear maps kept for the next batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from secateur.ops.table import Call, Site
from secateur.relevance.linear_maps import Geometry, LinearMap
from secateur.running.memory import spares_parts

#: Makes the linear map of a layer from its weight and bias; equal ones make equal maps.
Build = Callable[[Tensor, Tensor | None], LinearMap]


@dataclass(frozen=True, slots=True, eq=False)
class LayerUse:
    """A conv or linear call at one place in the forward pass: what is known before it runs, in every batch."""

    site: Site
    source: Tensor  # the parameter that is its weight, or the tensor itself where that is no parameter
    options: tuple[Any, ...]
    build: Build
    name: str  # of the weight
    rows: slice  # of the weight that make the outputs
    kind: str
    channel: int  # the dimension of the units in the output

    @property
    def path(self) -> str:
        return path_of(self.name).partition("#")[0]


@dataclass(slots=True, eq=False)
class LinearCall:
    """A conv or linear call of this batch, whose output may yet meet a batch norm."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    use: LayerUse
    index: int  # among the weight layers of this forward pass
    normed: bool = False  # a batch norm has read the output


class Weights:
    """Names, and linear maps with folded weights and their positive parts. Nothing is written to the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: The layers of the batch before, by the place of the call.
        self.uses: dict[Site, LayerUse] = {}
        self._maps: dict[Hashable, tuple[Any, LinearMap]] = {}
        self._plain: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the parameter
        self._parameters: dict[int, Tensor] = {}  # by the identity of what stands for it
        self._names: dict[tuple[int, int], tuple[Tensor, str]] = {}  # by the identity of the parameter, and the axis
        self._made: dict[Site, str] = {}  # names of weights that are no parameters
        self._axes: dict[str, int] = {}  # along which axis of each parameter its units lie
        self._owners: dict[int, list[tuple[str, Tensor]]] | None = None  # by the address of the storage
        #: The number of units of each parameter, of which a call may use only some rows.
        self.heights: dict[str, int] = {}
        #: Whether W⁺ and W⁻ of a layer are freed once its relevance is known.
        self.spares = False

    def begin(self) -> None:
        """A batch begins. Parameters may have been moved or replaced since the last one."""
        self.spares = spares_parts(self.model)
        self._plain.clear()
        self._parameters.clear()
        self._owners = None

    def forget(self) -> None:
        self._maps.clear()
        self.begin()

    def plain(self, parameter: Tensor) -> Tensor:
        """A parameter without its gradient flag."""
        known = self._plain.get(id(parameter))
        if known is None:
            known = self._plain[id(parameter)] = (parameter, parameter.detach())
            self._parameters[id(known[1])] = parameter
        return known[1]

    def source(self, weight: Tensor) -> Tensor:
        """The parameter that a tensor stands for, or the tensor itself."""
        return self._parameters.get(id(weight), weight)

    def prepared(self, record: LinearCall, stats: tuple[Tensor | None, ...] = (), eps: float = 0.0) -> LinearMap:
        """The linear map of a layer with its batch norm folded in. It is kept for the next batch, with W⁺ and W⁻ if
        there is room for them."""
        sources = (record.weight, record.bias, *stats)
        build = record.use.build
        if not isinstance(record.use.source, nn.Parameter) and not self.is_owned(record.weight):
            # It is computed anew in every batch, and would be kept each time.
            return build(*(folded(record, stats, eps) if stats else (record.weight, record.bias)))
        key = (build, *[None if t is None else (*_bits(t), t._version) for t in sources])
        if key not in self._maps:
            weight, bias = folded(record, stats, eps) if stats else (record.weight, record.bias)
            # The sources are held so that nothing else can get their addresses.
            self._maps[key] = (sources, build(weight, bias))
        return self._maps[key][1]

    def name(self, weight: Tensor, call: Call, outputs: int, axis: int = 0) -> tuple[str, slice]:
        """The parameter that a weight is part of, and its rows (columns for axis 1) that make the outputs.

        A computed weight is named by its module (and from the second call on by a number: it may be another one), and
        so is one whose units lie along the other axis elsewhere: an embedding that is the last layer as well.
        """
        source = self.source(weight)
        known = self._names.get((id(source), axis))
        if known is not None and known[0] is source:
            return known[1], slice(0, outputs)
        owned = self._owner(weight, axis)
        if owned is None:
            return self._computed(call.site), slice(0, outputs)
        name, owner, along, first = owned
        if self._axes.setdefault(name, along) != along:
            other = self._computed(call.site)
            name = other if other != name else f"{name}.T"
        self.heights[name] = owner.shape[along]
        if source is owner:
            self._names[id(owner), axis] = (owner, name)
        return name, slice(first, first + outputs)

    def _computed(self, site: Site) -> str:
        """The name of a weight that is no parameter: that of its module, with a number if that has several."""
        if site not in self._made:
            base, taken = site.path or site.function, set(self._made.values())
            names = (f"{base}{f'#{n}' if n > 1 else ''}.weight" for n in count(1))
            self._made[site] = next(name for name in names if name not in taken)
        return self._made[site]

    def is_owned(self, weight: Tensor) -> bool:
        """Whether a matrix is a parameter, or part of one, transposed or not."""
        return self._owner(weight, 1) is not None

    def _owner(self, weight: Tensor, axis: int) -> tuple[str, Tensor, int, int] | None:
        """The parameter that a weight is part of, the axis of its units there, and the first of them."""
        if self._owners is None:
            self._owners = {}
            for name, parameter in self.model.named_parameters():
                if parameter.dim() > 1:
                    self._owners.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
        for name, owner in self._owners.get(weight.untyped_storage().data_ptr(), []):
            offset = weight.data_ptr() - owner.data_ptr()
            along = _axis_in(owner, weight, axis)
            if along is None or (weight.shape[axis] > 1 and weight.stride(axis) != owner.stride(along)):
                continue  # every second row, for example, is no range of rows
            if 0 <= offset < owner.numel() * owner.element_size():
                step = owner.stride(along) * owner.element_size()
                if owner.dim() == 3 > along > 0 and weight.dim() == 2:  # the matrix of one expert
                    offset %= owner.stride(0) * owner.element_size()
                return name, owner, along, offset // step if step else 0
        return None


def _axis_in(owner: Tensor, weight: Tensor, axis: int) -> int | None:
    """Which axis of a parameter is this axis of a part of it, which may be transposed; None if it is no such part."""
    if weight.dim() == 2 and owner.dim() == 3 and owner.is_contiguous():  # (experts, rows, columns)
        owner, shift = owner[0], 1
    elif weight.dim() != 2 or owner.dim() != 2:
        return axis if weight.shape[1:] == owner.shape[1:] else None
    else:
        shift = 0
    for along, part in ((axis, weight), (1 - axis, weight.mT)):
        across = 1 - along
        if part.shape[across] == owner.shape[across] and (
            part.shape[across] == 1 or part.stride(across) == owner.stride(across)
        ):
            return along + shift
    return None


def _bits(tensor: Tensor) -> tuple[Hashable, ...]:
    """What tells the numbers of one tensor from those of another that may look at the same memory."""
    layout = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (*layout, tensor.is_neg(), tensor.is_conj())


def folded(record: LinearCall, stats: Sequence[Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of the one layer that equals the layer followed by its batch norm."""
    mean, variance, gamma, beta = stats
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance.double() + eps)
    if gamma is not None:
        scale = scale * gamma.double()
    shift = -mean.double() * scale + (0 if beta is None else beta.double())
    if record.bias is not None:
        shift = shift + record.bias.double() * scale
    weight, geometry = record.weight, record.use.build
    if isinstance(geometry, Geometry) and geometry.transposed:  # (in, out / groups, ...)
        rows = weight.shape[0] // geometry.groups
        per = scale.view(geometry.groups, 1, -1).expand(-1, rows, -1).reshape(weight.shape[0], -1)
        return (weight * per.to(weight).reshape(*per.shape, *[1] * (weight.dim() - 2))), shift.to(weight)
    return weight * scale.to(weight).view(-1, *[1] * (weight.dim() - 1)), shift.to(weight)


def path_of(name: str) -> str:
    """`layer1.0.conv1.weight -> layer1.0.conv1`."""
    return name.removesuffix(".weight")
