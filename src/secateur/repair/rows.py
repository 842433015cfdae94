"""A layer as a regression: rows of what it reads and returns, at sampled positions of each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.nest import map_tensors
from secateur.ops.attention import AddMatMul
from secateur.ops.conv import Convolution, TransposedConvolution, each
from secateur.ops.linear import Linear
from secateur.ops.table import Call

#: Which samples: their places among all.
Places = slice | Tensor
#: All positions.
EVERY = slice(None)


def operands(call: Call) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The input, the weight and the bias of a layer that can be corrected; None for other calls.

    GPT-2 writes its linear layers as a bias plus a matrix product. Their weight is (in, out).
    """
    if isinstance(call.operation, Convolution | TransposedConvolution | Linear) and call["weight"].ndim > 1:
        return call["input"], call["weight"], call["bias"]
    if isinstance(call.operation, AddMatMul):
        bias, x, weight = call["input"], call["batch1"], call["batch2"]
        if weight.ndim == 2 and bias.ndim == 1 and len(bias) == weight.shape[1] and call["alpha"] == call["beta"] == 1:
            return x, weight, bias
    return None


def is_convolution(call: Call) -> bool:
    """Whether a layer's channels lie along dimension 1. Those of others are last."""
    return isinstance(call.operation, Convolution | TransposedConvolution)


def channel_last(call: Call, tensor: Tensor, batch: int = 0, positions: int | None = None) -> Tensor:
    """A layer's input or output as (samples, positions, channels).

    Samples lie along dimension `batch`. There, a linear layer may have several entries for each: `positions` in all.
    """
    if is_convolution(call):
        return tensor.flatten(2).transpose(1, 2)
    tensor = tensor.movedim(batch, 0)
    shape = (len(tensor), -1) if positions is None else (-1, positions)
    return tensor.reshape(*shape, tensor.shape[-1])


def wide(rows: Tensor) -> Tensor:
    """At least single precision."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


@dataclass(frozen=True)
class Positions:
    """For each sample the positions of a layer's output that take part; None for all of them."""

    chosen: Tensor | None

    @classmethod
    def draw(
        cls, samples: int, positions: int, most: int, generator: torch.Generator, counts: Tensor | None = None
    ) -> Positions:
        """At most `most` positions per sample, drawn for each sample: those that count, and then others."""
        if positions <= most:
            return cls(None)
        lots = torch.rand(samples, positions, generator=generator)
        if counts is not None:
            lots += counts.cpu()
        return cls(lots.topk(most, dim=1, sorted=False).indices.sort(1).values)

    def of(self, samples: Places, device: torch.device) -> Tensor | None:
        """The positions of some samples."""
        return None if self.chosen is None else self.chosen[samples].to(device)

    def take(self, values: Tensor, samples: Places) -> Tensor:
        """The chosen positions of (samples, positions, channels)."""
        return _at(values, self.of(samples, values.device))


ALL = Positions(None)


@dataclass(frozen=True)
class Rows:
    """A layer that is called for some samples, and what is added to its output later, in the same units: (samples,
    positions, channels) at the positions that take part.

    `output` is what the call returned, if it has run already.
    """

    call: Call
    places: Places
    sampled: Positions
    batch: int
    positions: int
    added: Tensor | None = None
    output: Tensor | None = None

    @property
    def groups(self) -> int:
        """Regressions that have nothing to do with each other."""
        return int(self.call["groups"]) if isinstance(self.call.operation, Convolution) else 1

    @property
    def count(self) -> int:
        """Positions of each sample that take part."""
        return self.positions if self.sampled.chosen is None else self.sampled.chosen.shape[1]

    def returned(self, members: Tensor | None = None, part: slice = EVERY) -> Tensor:
        """What the layer returned at the positions that take part; of some samples, at some of these positions."""
        assert self.output is not None
        made = channel_last(self.call, self.output, self.batch, self.positions)
        made, chosen = self._of(made, members, part)
        return wide(_at(made, chosen))

    @property
    def total(self) -> Tensor:
        """What it returned, and what is added to that."""
        return self.returned() if self.added is None else self.returned() + self.added

    def read(self, members: Tensor | None = None, part: slice = EVERY) -> Tensor:
        """What the layer reads for each of its rows: (samples, positions, groups, features); of some samples, at some
        of their positions."""
        own = operands(self.call)
        assert own is not None
        x = own[0]
        if not is_convolution(self.call):
            x = channel_last(self.call, x, self.batch, self.positions)
        return read_rows(self.call, *self._of(x, members, part))

    def _of(self, values: Tensor, members: Tensor | None, part: slice) -> tuple[Tensor, Tensor | None]:
        """Numbers of some samples, and which positions of each take part; None for all of them."""
        chosen = self.sampled.of(self.places, values.device)
        if chosen is None and part != EVERY:
            chosen = torch.arange(self.positions, device=values.device).expand(len(values), -1)
        if members is not None:
            values, chosen = values[members], None if chosen is None else chosen[members]
        return values, None if chosen is None else chosen[:, part]


def hidden(wanted: Tensor, total: Tensor, span: Tensor) -> Tensor:
    """How what a layer should return changes where a ReLU of the original, or another limit, passes nothing, if it and
    what is added to it return `total` now. There, any output beyond the same limit is right.
    """
    low, high = span.to(total.dtype)
    below = torch.where(wanted < low, total.minimum(low), wanted)
    return torch.where(wanted > high, total.maximum(high), below) - wanted


def shape_of(call: Call) -> torch.Size:
    """The shape of a layer's output, without computing it."""
    args, kwargs = map_tensors(lambda t: torch.empty_like(t, device="meta"), (call.args, call.kwargs))
    made: Tensor = call.function(*args, **kwargs)
    return made.shape


def read_rows(call: Call, x: Tensor, chosen: Tensor | None) -> Tensor:
    """What the layer reads of its input `x` for each chosen output position: (samples, positions, groups, features).

    For a linear layer `x` is `channel_last`, for a convolution it is as it is. Features are ordered as in the weight:
    by channel, then by place in the kernel.
    """
    if not isinstance(call.operation, Convolution):
        return _at(x, chosen)[:, :, None]
    spatial, kernel, groups = call.operation.spatial, call["weight"].shape[2:], int(call["groups"])
    stride, dilation = each(call["stride"], spatial), each(call["dilation"], spatial)
    spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = _padding(call["padding"], spans)
    if math.prod(kernel) == 1 and not any(padding):  # nothing to unfold
        for dim, s in enumerate(stride):
            x = x[(slice(None),) * (2 + dim) + (slice(None, None, s),)]
        taken = _at(x.flatten(2).transpose(1, 2), chosen)
        return taken.reshape(*taken.shape[:2], groups, -1)
    x = F.pad(x, padding)
    # Indices into the flattened image: (output positions, places in the kernel).
    places = torch.arange(x[0, 0].numel(), device=x.device).view(x.shape[2:])
    for dim, (span, step, apart) in enumerate(zip(spans, stride, dilation, strict=True)):
        places = places.unfold(dim, span + 1, step)[..., ::apart]
    places = places.reshape(-1, math.prod(kernel))
    samples, channels, size = len(x), x.shape[1], x[0, 0].numel()
    used = places.expand(samples, -1, -1) if chosen is None else places[chosen]
    # Channels side by side are copied faster, once they lie so.
    if used[0].numel() >= size or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        begins = size * torch.arange(samples, device=x.device)[:, None, None]
        found = x.flatten(2).transpose(1, 2).reshape(-1, channels).index_select(0, (used + begins).ravel())
        rows = found.view(samples, -1, places.shape[1], channels).transpose(2, 3)
    else:
        found = x.flatten(2).gather(2, used.flatten(1)[:, None].expand(-1, channels, -1))
        rows = found.view(samples, channels, -1, places.shape[1]).transpose(1, 2)
    return rows.reshape(samples, rows.shape[1], groups, -1)


def _at(values: Tensor, chosen: Tensor | None) -> Tensor:
    """The chosen positions of each sample of (samples, positions, channels)."""
    if chosen is None:
        return values
    if values.is_contiguous():  # whole rows are copied, not numbers
        begins = values.shape[1] * torch.arange(len(values), device=values.device)[:, None]
        return values.flatten(0, 1).index_select(0, (chosen + begins).ravel()).view(*chosen.shape, -1)
    return values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[-1]))


def _padding(padding: Any, spans: list[int]) -> list[int]:
    """Padding in the order of `F.pad`: last dimension first, before and after. `spans`: of the kernel, less 1."""
    if padding == "same":
        sides = [(span // 2, span - span // 2) for span in spans]
    else:
        sides = [(p, p) for p in each(0 if padding == "valid" else padding, len(spans))]
    return [side for pair in reversed(sides) for side in pair]
