"""Fourier transforms: they mix positions, and leave channels across them alone."""

from __future__ import annotations

from typing import Any

import torch

from secateur.ops.layers import head, varying
from secateur.ops.protocols import LabelVerbs
from secateur.ops.shape import Fixed, Roll
from secateur.ops.table import Call, Ruled, refused, register, register_named, transforms

#: The dimensions that a transform mixes unless it is told, by the end of its name. None: all.
_DIMS: dict[str, tuple[int, ...] | None] = {"": (-1,), "2": (-2, -1), "n": None}


class Fourier(Ruled):
    """A transform along some dimensions. Units along them stay; of a channel of zeros it makes zeros."""

    def __init__(self, dims: tuple[int, ...] | None) -> None:
        super().__init__(transforms)
        self.dims = dims

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, dims = call["input"], call["dim"] if call["dim"] is not None else self.dims
        if dims is None:
            dims = range(x.ndim) if call["n"] is None else range(x.ndim - len(call["n"]), x.ndim)
        mixed, kept = {d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims)}, []
        for layer in labels.layers(x):
            if mixed.intersection(varying(layer)):
                labels.freeze(layer, f"{call.site} mixes it by a Fourier transform")
            else:
                kept.append(head(layer, mixed).expand(output.shape))
        labels.set(output, kept)


for _end, _dims in _DIMS.items():
    _functions = [getattr(torch.fft, f"{inverse}{kind}fft{_end}") for inverse in ("", "i") for kind in ("", "r", "h")]
    register("input n|s=None dim=None norm=None out=None", *_functions, operation=Fourier(_dims))
register("input dims|dim=None", torch.fft.fftshift, torch.fft.ifftshift, operation=Roll(transforms))
register_named("input *rest", "stft istft", Fixed("mixes it by a Fourier transform", refused))
