"""Inputs of our own that a removal is verified on: random, of the example's kind, in other numbers and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.nest import describe, map_tensors, tensors_in
from secateur.running.sandbox import Example


@dataclass(frozen=True)
class Probe:
    """Inputs to compare two models on. `share` is how large they are compared with the example.

    `cached`: the model keeps what a next call needs, such as keys and values. Those are as wide as its layers, so that
    only what it returns first is compared.
    """

    name: str
    inputs: Example
    share: float = 1.0
    training: bool = False
    cached: bool = False


#: Other sizes: new ones by dimension and old size.
Sizes = Mapping[tuple[int, int], int]


def given(example: Example, rows: Mapping[int, int]) -> Probe:
    """The example. Where it is the same number everywhere, which hides almost everything, random numbers."""
    drawn = _Drawn(rows, _ids(example))
    blank = [t for t in tensors_in(example) if drawn.is_blank(t)]
    if not blank:
        return Probe("the example", example)
    inputs = map_tensors(lambda t: drawn(t, tuple(t.shape)) if any(t is b for b in blank) else t, example)
    return Probe("random inputs of the example's shapes", inputs)


def corners(example: Example) -> Iterator[Probe]:
    """Parts of the example's images with as much noise of its kind: all that the code of a steady model has to see."""
    tensors = tensors_in(example)
    images = [t for t in tensors if t.is_floating_point() and t.ndim >= 4 and t.shape[0]]
    if not images or len(images) < len(tensors) or min(side for t in images for side in t.shape[2:]) < 128:
        return
    sides, whole = list(enumerate(images[0].shape))[2:], sum(t.numel() for t in tensors)
    for size in ({(dim, side): 32 if dim % 2 else 96 for dim, side in sides}, *list(_sizes(tensors))[1:2]):
        drawn = _Drawn({}, ())

        def part(image: Tensor, size: Sizes = size, drawn: _Drawn = drawn) -> Tensor:
            shape = _shape(image, size, len(image), 1)
            corner = image[
                tuple(slice((had - n) // 2, (had + n) // 2) for had, n in zip(image.shape, shape, strict=True))
            ]
            return torch.cat([drawn(image, shape), corner])

        inputs = map_tensors(part, example)
        yield Probe(
            f"parts of the example {describe(inputs)}", inputs, sum(t.numel() for t in tensors_in(inputs)) / whole
        )


def others(example: Example, rows: Mapping[int, int], light: bool) -> Iterator[Probe]:
    """Random inputs in order of what they show: another number of samples and another size, then less.

    The first that the model takes is used. `rows` tells which whole numbers are positions in a table, by address. A
    `light` model sees more samples, since units that are off in a few show nothing.
    """
    tensors = tensors_in(example)
    counts = [t.shape[0] for t in tensors if t.ndim]
    if not counts:
        return
    samples = counts[0]
    other = 7 if light and samples != 7 else 3 if samples == 2 else 2
    sizes = list(_sizes(tensors))
    tries = [(size, other, False) for size in [*sizes, {}]]
    tries += [(size, samples, False) for size in [*sizes[:1], {}]]
    tries += [({}, other, True), ({}, samples, True)]
    whole = sum(t.numel() for t in tensors)
    for size, batch, keep in tries:
        drawn = _Drawn(rows, _ids(example), keep)
        inputs = map_tensors(lambda t, d=drawn, s=size, b=batch: d(t, _shape(t, s, samples, b)), example)  # type: ignore[misc]
        share = sum(t.numel() for t in tensors_in(inputs)) / max(whole, 1)
        yield Probe(f"random inputs {describe(inputs)}", inputs, share)


def _shape(tensor: Tensor, sizes: Sizes, samples: int, batch: int) -> tuple[int, ...]:
    """The shape of a tensor like this one. Dimension 0 counts samples where it has their number."""
    shape = [sizes.get((dim, size), size) for dim, size in enumerate(tensor.shape)]
    if shape and tensor.shape[0] == samples:
        shape[0] = batch
    return tuple(shape)


def _sizes(tensors: list[Tensor]) -> Iterator[Sizes]:
    """Other sizes of images, lengths of texts, and lengths of series. The model decides whether it takes them."""
    images = [t for t in tensors if t.is_floating_point() and t.ndim >= 4]
    texts = [t for t in tensors if not t.is_floating_point() and t.ndim >= 2]
    series = [t for t in tensors if t.is_floating_point() and t.ndim == 3]
    for found, dims in ((texts, (1,)), ([] if images or texts else series, (1, 2))):
        for dim in dims if found else ():
            length = found[0].shape[dim]
            for new in (length // 2, length + 4) if length >= 8 else (length + 3,):
                yield dict.fromkeys([(d, length) for d in ((1, 2, 3) if found is texts else (dim,))], new)
    if images:
        sides = list(enumerate(images[0].shape))[2:]
        if min(side for _, side in sides) >= 128:  # most networks halve images five times
            yield {(dim, side): 64 >> dim % 2 for dim, side in sides}
        yield {(dim, side): _side(side)[dim % 2] for dim, side in sides}  # no square: sides must not be mixed up
        yield {(dim, side): _side(side)[2] for dim, side in sides}


def _side(side: int) -> tuple[int, int, int]:
    """Other sides of an image: a smaller and a larger one, and one for a square. Networks like multiples of 32 or 8."""
    if side >= 128:
        least = max(64, round(0.3 * side / 32) * 32)
        return least, least + 32, 3 * side // 128 * 32
    if side >= 64:
        return side, side + 32, 32
    if side >= 16:
        return 3 * side // 32 * 8, side + 8, side + 8
    return side, side + 4, side // 2 if side >= 8 else side + 1


def _ids(example: Example) -> tuple[int, ...]:
    """The shape of the first whole numbers in two dimensions: a mask of this shape says which of them count."""
    tensors = tensors_in(example)
    found = [t for t in tensors if not t.is_floating_point() and t.ndim == 2]
    return tuple(found[0].shape) if found and len(tensors) > 1 else ()


class _Drawn:
    """Draws tensors like given ones. `keep`: whole numbers repeat those of the example."""

    def __init__(self, rows: Mapping[int, int], ids: tuple[int, ...], keep: bool = False) -> None:
        self._rows, self._ids, self._keep = rows, ids, keep
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._is_mask(tensor):
            made = torch.ones(shape)
            made[-1, shape[1] - shape[1] // 3 :] = 0  # the end of one text is padding
        elif tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
            return _tiled(tensor, shape)
        elif tensor.is_floating_point():
            made = self._floats(tensor, shape)
        elif self._keep:
            return _tiled(tensor, shape)
        else:
            made = self._whole(tensor, shape)
        return made.to(tensor.device, tensor.dtype)

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether a tensor of floats is one number everywhere."""
        plain = tensor.is_floating_point() and tensor.numel() > 1 and tensor.ndim > 1
        return plain and not self._is_mask(tensor) and bool((tensor == tensor.reshape(-1)[0]).all())

    def _is_mask(self, tensor: Tensor) -> bool:
        known = tuple(tensor.shape) == self._ids and tensor.data_ptr() not in self._rows and not tensor.is_complex()
        return known and bool((tensor == 1).all())

    def _floats(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        values = tensor.detach().cpu().double()
        if tensor.ndim < 2:  # a time, a scale: what it is in the example, more or less
            return _tiled(values, shape) * (0.5 + torch.rand(shape, generator=self._generator))
        noise = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        spread = float(values.std()) if values.numel() > 1 else 0.0
        low, high = float(values.min()), float(values.max())
        if not spread > 0 or not high - low < float("inf"):
            return noise
        some = values.reshape(-1)[:256]  # of measurements, these tell
        if all(bool(((part == low) | (part == high)).all()) for part in (some, values)):  # marks, not measurements
            return torch.where(noise > 0, high, low)
        return (float(values.mean()) + spread * noise).clamp(low, high)

    def _whole(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows = self._rows.get(tensor.data_ptr())
        if rows is not None:
            return torch.randint(rows, shape, generator=self._generator)
        values = tensor.detach().cpu().reshape(-1)
        return values[torch.randint(len(values), shape, generator=self._generator)]


def _tiled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of another shape with the same numbers, from the start again where they end."""
    for dim, size in enumerate(shape):
        if size != tensor.shape[dim]:
            places = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
            tensor = tensor.index_select(dim, places)
    return tensor
