"""How a photograph becomes a network's input: size, fit, augmentation, normalisation. No torchvision needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from secateur.arguments import check_count
from secateur.errors import Argument, DataError

Fit = Literal["crop", "squash"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Images that are cropped, and all images for training, are kept this much larger than the network's input.
_MARGIN = 256 / 224
_THIN = 16  # a picture is scaled as a whole if it is at most so many times as long as wide
ORIENTATION = 0x0112  # the tag of EXIF


def orientation(image: Any) -> int:
    """How the camera was held, from 1 to 8 as in EXIF: 1 also where nobody knows.

    Metadata that cannot be read do not spoil a picture, so they count as none.
    """
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # pillow raises many kinds of errors on damaged metadata
        return 1
    return found if found in range(1, 9) else 1


def upright(image: Any) -> Any:
    """The picture as it is meant to be seen. `ImageOps.exif_transpose` also writes all other metadata anew, and fails
    where a camera wrote a tag that pillow cannot."""
    from PIL.Image import Transpose

    turns = (
        None, Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE,
        Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90,
    )  # fmt: skip
    turn = turns[orientation(image) - 1]
    return image if turn is None else image.transpose(turn)


def _check_depth(image: Any) -> None:
    """Refuse numbers of 32 bits: nothing says which of them is white, and pillow clips them to 8 bits."""
    # What pillow calls `I` has 16 bits where the format has no more.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = "floating point" if image.mode == "F" else "32 bits"
        raise ValueError(f"its pixels are numbers of {kind}, which have no known range; save it with 8 or 16 bits")


@dataclass(frozen=True)
class View:
    """What a network sees of a photograph.

    `fit="crop"` scales the short side to 8/7 of `size` and cuts out the centre, as the weights of most zoos expect;
    `fit="squash"` scales both sides to `size`, as the paper tests. One mean and standard deviation make grey images,
    three make colour. Decoded images are bytes; augmentation and normalisation work on any device.

    >>> View(size=4).evaluation(torch.full((1, 3, 5, 5), 255, dtype=torch.uint8)).shape
    torch.Size([1, 3, 4, 4])
    """

    size: int = 224
    fit: Fit = "crop"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_count("size", self.size, error=DataError)
        if self.fit not in ("crop", "squash"):
            raise DataError("{fit} is not known.", fix="'crop' or 'squash'", fit=Argument("fit", self.fit))
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3) or not all(s > 0 for s in self.std):
            what = "{mean} and {std} need one number each (grey) or three (colour), {std} above 0."
            raise DataError(what, mean=Argument("mean"), std=Argument("std"))

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return len(self.mean)

    def side(self, training: bool) -> int:
        """The side of the square that is kept in memory."""
        return round(self.size * _MARGIN) if training or self.fit == "crop" else self.size

    def decode(self, path: Path, training: bool = False) -> Tensor:
        """Read a file as bytes, channels first: rotated by its EXIF tag, grey or RGB, scaled to a square."""
        from PIL import Image

        side = self.side(training)
        with Image.open(path) as file:
            _check_depth(file)
            image: Any = upright(file)
            if image.mode.startswith("I"):  # 16 bits: pillow would clip them to 8
                image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
            image = image.convert("RGB" if self.channels == 3 else "L")
        if self.fit == "squash":
            image = image.resize((side, side), Image.Resampling.BILINEAR)
        else:
            width, height = image.size
            short = min(width, height)
            scaled = int(side * width / short), int(side * height / short)
            left, top = round((scaled[0] - side) / 2), round((scaled[1] - side) / 2)
            if max(scaled) <= _THIN * side:
                image = image.resize(scaled, Image.Resampling.BILINEAR)
                image = image.crop((left, top, left + side, top + side))
            else:  # the whole of a thin picture may be larger than the memory
                across, down = width / scaled[0], height / scaled[1]
                box = left * across, top * down, (left + side) * across, (top + side) * down
                image = image.resize((side, side), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image))
        return pixels.permute(2, 0, 1).contiguous() if pixels.ndim == 3 else pixels[None]

    def evaluation(self, pixels: Tensor) -> Tensor:
        """Inputs from a batch of bytes: the centre, normalised."""
        spare = (pixels.shape[-2] - self.size) // 2, (pixels.shape[-1] - self.size) // 2
        return self.normalise(pixels[..., spare[0] : spare[0] + self.size, spare[1] : spare[1] + self.size])

    def training(self, pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inputs from a batch of bytes: a random crop of each, mirrored or not, normalised.

        Random numbers are drawn on the CPU (by torch's own generator unless one is given), so that every device gets
        the same crops.
        """
        count, channels, height, width = pixels.shape
        top = torch.randint(height - self.size + 1, (count, 1), generator=generator)
        left = torch.randint(width - self.size + 1, (count, 1), generator=generator)
        mirrored = torch.rand((count, 1), generator=generator) < 0.5
        along = torch.arange(self.size)
        rows = (top + along).to(pixels.device)
        columns = (left + torch.where(mirrored, along.flip(0), along)).to(pixels.device)
        sample = torch.arange(count, device=pixels.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=pixels.device).view(1, -1, 1, 1)
        return self.normalise(pixels[sample, channel, rows[:, None, :, None], columns[:, None, None, :]])

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes as numbers with the network's mean and standard deviation."""
        mean, std = self._moments(pixels)
        return (pixels.float() / 255 - mean) / std

    def picture(self, inputs: Tensor) -> Tensor:
        """Inputs as pictures again: numbers between 0 and 1."""
        mean, std = self._moments(inputs)
        return (inputs * std + mean).clamp(0, 1)

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(values, device=like.device).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std
