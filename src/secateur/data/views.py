"""How a photograph becomes a network's input: size, fit, augmentation, normalisation. No torchvision needed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from secateur.arguments import check_count
from secateur.errors import Argument, DataError

Fit = Literal["crop", "squash", "pad"]
Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # in the order of their numbers

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Images that are cropped are scaled to this much more than the network's input if nothing else is said; so are all
# images for training.
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


def _begin(length: int, side: int) -> int:
    """Where the middle of so many pixels begins, as torchvision's `CenterCrop` has it; below 0 is a border."""
    return round((length - side) / 2) if length >= side else -((side - length) // 2)


@dataclass(frozen=True)
class View:
    """What a network sees of a photograph.

    `fit="crop"` scales the short side to `resize` (default: 8/7 of `size`), `fit="squash"` both sides (default:
    `size`, as the paper tests), and `fit="pad"` the long side (default: `size`), with borders in the colour of `mean`.
    Then the centre of `size` is cut out. `interpolation` is the filter, as Pillow has it. One mean and standard
    deviation make grey images, three make colour. Decoded images are bytes; augmentation and normalisation work on any
    device.

    >>> View(size=4).evaluation(torch.full((1, 3, 5, 5), 255, dtype=torch.uint8)).shape
    torch.Size([1, 3, 4, 4])
    """

    size: int = 224
    fit: Fit = "crop"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    resize: int | None = None
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_count("size", self.size, error=DataError)
        if self.resize is not None:
            check_count("resize", self.resize, error=DataError)
        for name, kinds in (("fit", Fit), ("interpolation", Interpolation)):
            if (given := getattr(self, name)) not in get_args(kinds):
                known = ", ".join(map(repr, get_args(kinds)))
                raise DataError("{given} is not known.", fix=f"one of {known}", given=Argument(name, given))
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3) or not all(s > 0 for s in self.std):
            what = "{mean} and {std} need one number each (grey) or three (colour), {std} above 0."
            raise DataError(what, mean=Argument("mean"), std=Argument("std"))

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return len(self.mean)

    @property
    def scaled(self) -> int:
        """To how many pixels a side is scaled before the centre is cut out."""
        return self.resize or (round(self.size * _MARGIN) if self.fit == "crop" else self.size)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. A view that older versions had as well is written as they wrote it."""
        unsaid = {"resize": None, "interpolation": "bilinear"}
        return {name: value for name, value in asdict(self).items() if name not in unsaid or value != unsaid[name]}

    def sized(self, size: int) -> View:
        """The same view in another size."""
        return replace(self, size=size, resize=self.resize and max(1, round(self.resize * size / self.size)))

    def side(self, training: bool) -> int:
        """The side of the square that is kept in memory. Random crops need a margin."""
        return round(self.size * _MARGIN) if training else self.size

    def decode(self, path: Path, training: bool = False) -> Tensor:
        """Read a file as bytes, channels first: rotated by its EXIF tag, grey or RGB, scaled to a square."""
        from PIL import Image

        with Image.open(path) as file:
            _check_depth(file)
            image: Any = upright(file)
            if image.mode.startswith("I"):  # 16 bits: pillow would clip them to 8
                image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
            image.load()
            if image.mode != (mode := "RGB" if self.channels == 3 else "L"):  # a copy costs time
                image = image.convert(mode)
            image = self._square(image, self.side(training), self.side(training) if training else self.scaled)
        pixels = torch.from_numpy(np.array(image))
        return pixels.permute(2, 0, 1).contiguous() if pixels.ndim == 3 else pixels[None]

    def _square(self, image: Any, side: int, scaled: int) -> Any:
        """The centre of an image: `side` pixels of `scaled` ones."""
        from PIL import Image

        interpolation = Image.Resampling[self.interpolation.upper()]
        (width, height), wide, high = image.size, scaled, scaled
        if self.fit == "crop":
            wide, high = (scaled * length // min(image.size) for length in image.size)
        elif self.fit == "pad":  # rounded as timm rounds
            wide, high = (max(1, round(length / (max(image.size) / scaled))) for length in image.size)
        # Without `resize`, the square of `scaled` is cut out first: that is how it was before there was `resize`.
        between = side if self.resize is not None else scaled
        left, top = (_begin(length, between) + (between - side) // 2 for length in (wide, high))
        if max(wide, high) > _THIN * scaled:  # the whole of a thin picture may be larger than the memory
            across, down = width / wide, height / high
            box = max(left, 0), max(top, 0), min(left + side, wide), min(top + side, high)
            place = box[0] * across, box[1] * down, box[2] * across, box[3] * down
            image = image.resize((box[2] - box[0], box[3] - box[1]), interpolation, place)
            left, top = min(left, 0), min(top, 0)
        else:
            image = image.resize((wide, high), interpolation)
        if self.fit != "pad" or image.size == (side, side):
            return image.crop((left, top, left + side, top + side))  # black where there is no image
        colour = tuple(round(255 * value) for value in self.mean)
        canvas = Image.new(image.mode, (side, side), colour if self.channels == 3 else colour[0])
        canvas.paste(image, (-left, -top))
        return canvas

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
