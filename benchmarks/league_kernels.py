"""Convolutions of 3 x 3 between few channels, which the GPU's libraries compute with most of their work for nothing.

With 8 or 16 channels, cuDNN fills its tiles of 32 with zeros. These kernels have tiles as wide as the channels. Tensors
have their channels last. Where there is no GPU, torch's own convolution is taken. The widths of tiles are those that
were fastest on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # then there is no GPU that it could be for
    triton = None

FEW = 64  # channels up to which these kernels are faster: every layer of a ResNet-56
_LEAST = 16  # the narrowest tile of a matrix unit

if triton is not None:

    @triton.jit
    def _convolve(
        x, w, out, positions, by_tap, by_input, by_output,
        turned: tl.constexpr, height: tl.constexpr, width: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr,
        wide_in: tl.constexpr, wide_out: tl.constexpr, tile: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0) * tile + tl.arange(0, tile)
        row, column = (at // width) % height, at % width
        i, o = tl.arange(0, wide_in), tl.arange(0, wide_out)
        total = tl.zeros((tile, wide_out), tl.float32)
        for tap in tl.static_range(9):
            down = tap // 3 - 1
            right = tap % 3 - 1
            inside = (at < positions) & (row + down >= 0) & (row + down < height)
            inside = inside & (column + right >= 0) & (column + right < width)
            seen = tl.load(
                x + (at + down * width + right)[:, None] * inputs + i[None, :],
                mask=inside[:, None] & (i < inputs)[None, :], other=0.0,
            )  # fmt: skip
            number = 8 - tap if turned else tap
            weight = tl.load(
                w + number * by_tap + i[:, None] * by_input + o[None, :] * by_output,
                mask=(i < inputs)[:, None] & (o < outputs)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.dot(seen, weight)
        tl.store(
            out + at[:, None] * outputs + o[None, :], total.to(out.dtype.element_ty),
            mask=(at < positions)[:, None] & (o < outputs)[None, :],
        )  # fmt: skip

    @triton.jit
    def _correlate_at_once(
        x, slope, found, positions, tiles,
        height: tl.constexpr, width: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr,
        wide_in: tl.constexpr, wide_out: tl.constexpr, tile: tl.constexpr,
    ):  # fmt: skip
        part = tl.program_id(0)
        o, last = tl.arange(0, wide_out), tl.arange(0, wide_in)
        both = tl.arange(0, 8 * wide_in)  # eight taps, and the channels of each; the ninth tap comes alone
        tap, i = both // wide_in, both % wide_in
        down, right = (tap // 3 - 1)[:, None], (tap % 3 - 1)[:, None]
        eight = tl.zeros((8 * wide_in, wide_out), tl.float32)
        ninth = tl.zeros((wide_in, wide_out), tl.float32)
        for number in range(tiles):
            at = (part * tiles + number) * tile + tl.arange(0, tile)
            row, column, there = (at // width) % height, at % width, at < positions
            g = tl.load(
                slope + at[:, None] * outputs + o[None, :], mask=there[:, None] & (o < outputs)[None, :], other=0.0
            )
            below, beside = row[None, :] + down, column[None, :] + right
            inside = there[None, :] & (below >= 0) & (below < height) & (beside >= 0) & (beside < width)
            seen = tl.load(
                x + (at[None, :] + down * width + right) * inputs + i[:, None],
                mask=inside & (i < inputs)[:, None], other=0.0,
            )  # fmt: skip
            inside = there & (row + 1 < height) & (column + 1 < width)
            corner = tl.load(
                x + (at + width + 1)[None, :] * inputs + last[:, None],
                mask=inside[None, :] & (last < inputs)[:, None], other=0.0,
            )  # fmt: skip
            eight += tl.dot(seen, g)
            ninth += tl.dot(corner, g)
        own = (i < inputs)[:, None] & (o < outputs)[None, :]
        tl.atomic_add(found + (tap * inputs + i)[:, None] * outputs + o[None, :], eight, mask=own, sem="relaxed")
        own = (last < inputs)[:, None] & (o < outputs)[None, :]
        base = found + 8 * inputs * outputs + last[:, None] * outputs + o[None, :]
        tl.atomic_add(base, ninth, mask=own, sem="relaxed")

    @triton.jit
    def _correlate(
        x, slope, found, positions, tiles,
        height: tl.constexpr, width: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr,
        wide_in: tl.constexpr, wide_out: tl.constexpr, tile: tl.constexpr,
    ):  # fmt: skip
        part, down = tl.program_id(0), tl.program_id(1) - 1
        i, o = tl.arange(0, wide_in), tl.arange(0, wide_out)
        left = tl.zeros((wide_in, wide_out), tl.float32)
        middle = tl.zeros((wide_in, wide_out), tl.float32)
        right = tl.zeros((wide_in, wide_out), tl.float32)
        for number in range(tiles):
            at = (part * tiles + number) * tile + tl.arange(0, tile)
            row, column, there = (at // width) % height, at % width, at < positions
            g = tl.load(
                slope + at[:, None] * outputs + o[None, :], mask=there[:, None] & (o < outputs)[None, :], other=0.0
            )
            there = there & (row + down >= 0) & (row + down < height)
            first = x + (at + down * width)[None, :] * inputs + i[:, None]
            own = (i < inputs)[:, None]
            left += tl.dot(tl.load(first - inputs, mask=own & (there & (column > 0))[None, :], other=0.0), g)
            middle += tl.dot(tl.load(first, mask=own & there[None, :], other=0.0), g)
            right += tl.dot(tl.load(first + inputs, mask=own & (there & (column < width - 1))[None, :], other=0.0), g)
        base = found + (down + 1) * 3 * inputs * outputs + i[:, None] * outputs + o[None, :]
        own = (i < inputs)[:, None] & (o < outputs)[None, :]
        tl.atomic_add(base, left, mask=own, sem="relaxed")
        tl.atomic_add(base + inputs * outputs, middle, mask=own, sem="relaxed")
        tl.atomic_add(base + 2 * inputs * outputs, right, mask=own, sem="relaxed")


def _wide(channels: int) -> int:
    return max(_LEAST, 1 << (channels - 1).bit_length())


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def convolved(x: Tensor, weight: Tensor, turned: bool = False) -> Tensor:
    """The convolution, or its backward step if the weight is to be turned round."""
    x, (images, inputs, height, width) = _last(x), x.shape
    outputs = weight.shape[1 if turned else 0]
    out = torch.empty(images, outputs, height, width, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    positions, strides, tile = images * height * width, weight.stride(), 256 if max(inputs, outputs) <= 32 else 128
    assert strides[2] == 3 * strides[3], "the taps of the weight do not follow each other"
    by_input, by_output = (strides[0], strides[1]) if turned else (strides[1], strides[0])
    _convolve[(triton.cdiv(positions, tile),)](
        x, weight, out, positions, strides[3], by_input, by_output,
        turned, height, width, inputs, outputs, _wide(inputs), _wide(outputs), tile,
    )  # fmt: skip
    return out


def correlated(x: Tensor, slope: Tensor) -> Tensor:
    """The gradient of the weight: sums of products of what was seen and the gradient of the output."""
    x, slope, (images, inputs, height, width), outputs = _last(x), _last(slope), x.shape, slope.shape[1]
    positions, most, found = (
        images * height * width,
        max(inputs, outputs),
        torch.zeros(9, inputs, outputs, device=x.device),
    )
    # All taps at once take memory for nine times the channels, which is there for few of them.
    tile, programs, warps, stages = (
        (32, 528, 4, 3) if most <= 16 else (64, 396, 4, 3) if most <= 32 else (256, 264, 8, 1)
    )
    kernel, rows = (_correlate_at_once, 1) if most <= 32 else (_correlate, 3)
    tiles = triton.cdiv(positions, tile)
    each = triton.cdiv(tiles, programs)
    kernel[(triton.cdiv(tiles, each), rows)](
        x, slope, found, positions, each, height, width, inputs, outputs, _wide(inputs), _wide(outputs), tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return found.view(3, 3, inputs, outputs).permute(3, 2, 0, 1)


@torch.library.custom_op("league::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor) -> Tensor:
    return convolved(x, weight)


@torch.library.custom_op("league::to_input", mutates_args=())
def to_input(slope: Tensor, weight: Tensor) -> Tensor:
    return convolved(slope, weight, turned=True)


@torch.library.custom_op("league::to_weight", mutates_args=())
def to_weight(x: Tensor, slope: Tensor) -> Tensor:
    return _last(correlated(x, slope).to(x.dtype))


@convolution.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _last(x.new_empty(len(x), len(weight), *x.shape[2:]))


@to_input.register_fake
def _(slope: Tensor, weight: Tensor) -> Tensor:
    return _last(slope.new_empty(len(slope), weight.shape[1], *slope.shape[2:]))


@to_weight.register_fake
def _(x: Tensor, slope: Tensor) -> Tensor:
    return _last(x.new_empty(slope.shape[1], x.shape[1], 3, 3))


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return to_input(slope, weight) if needs[0] else None, to_weight(x, slope) if needs[1] else None


convolution.register_autograd(_backward, setup_context=_remember)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """A convolution of 3 x 3 with a margin of 1, by our own kernels where they are faster."""
    if not x.is_cuda or stride != 1 or max(weight.shape[:2]) > FEW or x.dtype != torch.bfloat16:
        return F.conv2d(x, weight, bias, stride, 1)
    out: Tensor = convolution(x, weight)
    return out if bias is None else out + bias.view(1, -1, 1, 1)
