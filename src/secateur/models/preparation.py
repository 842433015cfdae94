"""How the images of a zoo's network are prepared for it: what timm, torchvision and transformers say beside weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from secateur.data.views import Fit, Interpolation, View
from secateur.errors import DataError, ModelError

_IN_PYTHON = "the Python functions, with tensors that you prepared yourself"
# timm's `crop_mode`.
_FITS: dict[str, Fit] = {"center": "crop", "squash": "squash", "border": "pad"}
_SQUEEZED = 384  # from this side on, ConvNeXt's images are not cut
# Settings of image processors that no view has.
_ODD = (
    "do_flip_channel_order", "do_pad", "do_thumbnail", "do_align_long_axis", "do_color_quantize", "size_divisor",
    "max_num_patches",
)  # fmt: skip


def timm_view(spec: str, notes: Mapping[str, Any], usual: View | None = None) -> View:
    """The view in a model's `pretrained_cfg`. What it does not say is as in timm, the size and colours as in `usual`.

    >>> timm_view("timm:some", {"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic"}).scaled
    248
    """
    usual = usual if usual is not None else View()
    try:
        high, wide = map(int, (notes.get("input_size") or (3, usual.size, usual.size))[1:])
        if high != wide:
            raise ValueError(f"its images are {high} x {wide} pixels, no squares")
        mode = notes.get("crop_mode") or "center"
        if mode not in _FITS:
            raise ValueError(f"crop_mode {mode!r} is none of {', '.join(_FITS)}")
        mean, std = (tuple(map(float, notes.get(name) or getattr(usual, name))) for name in ("mean", "std"))
        scaled = math.floor(wide / float(notes.get("crop_pct") or 0.875))
        return View(wide, _FITS[mode], mean, std, scaled, notes.get("interpolation") or "bicubic")
    except (TypeError, ValueError, DataError) as error:
        raise _unknown(spec, "timm", error) from error


def torchvision_view(spec: str, weights: object = None) -> View:
    """The view of the newest weights in the zoo, or of those whose downloaded file is `weights`. A file of the user's
    own has the view of the oldest, which is that of torchvision's training script.

    >>> torchvision_view("torchvision:inception_v3").size, torchvision_view("torchvision:resnet50?num_classes=3").scaled
    (299, 232)
    >>> torchvision_view("torchvision:resnet50", "mine.safetensors").scaled
    256
    """
    from torchvision.models import get_model_weights

    known = get_model_weights(spec.partition("?")[0].removeprefix("torchvision:"))
    usual = known.DEFAULT if weights is None or str(weights) == "default" else next(iter(known))
    file = Path(str(weights)).name
    preset = next((one for one in known if one.url.rpartition("/")[2] == file), usual).transforms()
    try:
        (size,), (scaled,) = preset.crop_size, preset.resize_size
        return View(size, "crop", tuple(preset.mean), tuple(preset.std), scaled, preset.interpolation.value)
    except (AttributeError, TypeError, ValueError, DataError) as error:
        raise _unknown(spec, "torchvision", error) from error


def processor_view(spec: str, notes: Mapping[str, Any]) -> View:
    """The view of an image processor of transformers, from all of its settings."""
    try:
        odd = [name for name in _ODD if notes.get(name)] + ["do_resize = false"] * (not notes.get("do_resize"))
        if odd:
            raise ValueError(", ".join(odd))
        kind, share = str(notes.get("image_processor_type", "")), float(notes.get("crop_pct") or 1)
        scaled, short = _side(notes["size"])
        size = _side(notes["crop_size"])[0] if notes.get("do_center_crop") else scaled
        if kind.startswith("ConvNext"):
            short, scaled = (True, int(scaled / share)) if scaled < _SQUEEZED else (False, scaled)
        elif kind.startswith("PoolFormer"):
            short, scaled = True, int(scaled / share)
        elif kind.startswith("Levit") and short:
            scaled = int(256 / 224 * scaled)
        mean, std = _moments(notes)
        names = get_args(Interpolation)
        number = int(notes.get("resample", names.index("bilinear")))
        if number not in range(len(names)):
            raise ValueError(f"resample {number}")
        return View(size, "crop" if short else "squash", mean, std, scaled, names[number])
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise _unknown(spec, "its image processor", error) from error


def _moments(notes: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation for pixels from 0 to 1, whatever range the processor scales them to."""
    plain = not notes.get("do_normalize")
    mean, std = ((usual,) * 3 if plain else notes[name] for name, usual in (("image_mean", 0.0), ("image_std", 1.0)))
    largest = 255 * float(notes.get("rescale_factor", 1 / 255)) if notes.get("do_rescale", True) else 255.0
    if math.isclose(largest, 1):
        largest = 1.0
    offset = 1 if notes.get("rescale_offset") else 0
    # EfficientNet's divides by the deviation twice.
    twice = std if notes.get("include_top") else (1.0,) * len(std)
    return tuple((m + offset) / largest for m in mean), tuple(s * t / largest for s, t in zip(std, twice, strict=True))


def _side(size: Any) -> tuple[int, bool]:
    """The side of a square, and whether it is that of the short side alone."""
    sides = {name: int(side) for name, side in dict(size).items() if side}
    if sides.keys() == {"shortest_edge"}:
        return sides["shortest_edge"], True
    if sides.keys() != {"height", "width"} or len(set(sides.values())) > 1:
        raise ValueError(f"images of {sides} are no squares")
    return sides["height"], False


def _unknown(spec: str, who: str, error: Exception) -> ModelError:
    what = error.what if isinstance(error, DataError) else f"no {error}" if isinstance(error, KeyError) else str(error)
    return ModelError(f"{spec}: images cannot be prepared as {who} says ({what.rstrip('.')}).", fix=_IN_PYTHON)
