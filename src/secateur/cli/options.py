"""Options that several commands share, spelt the same everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from secateur.criteria.registry import criterion_named, known_criteria
from secateur.errors import CriterionError, DataError, SecateurError, TargetError
from secateur.relevance.composites import PRESETS

_MODEL, _IMAGES, _PICTURES = "Model", "Images", "How images are seen"


class Fit(StrEnum):
    """How a photograph is made square."""

    crop = "crop"
    squash = "squash"


class Merging(StrEnum):
    """How the probabilities of several outputs become one."""

    sum = "sum"
    mean = "mean"


class MergingByData(StrEnum):
    """The same, or what suits the images."""

    auto = "auto"
    sum = "sum"
    mean = "mean"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision:NAME, timm:NAME, FILE.py:FACTORY (runs that file), or a folder that secateur wrote. Options "
        "follow a question mark: torchvision:resnet50?num_classes=10",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="File with the weights (.safetensors, or a state dict), or 'default' to download the zoo's own. Without "
        "it they are what the model was built with: random, for a zoo.",
        metavar="FILE|default",
        rich_help_panel=_MODEL,
    ),
]
Original = Annotated[
    str | None,
    typer.Option(
        help="What a saved folder was cut from, if rebuilding that runs a FILE.py.",
        metavar="MODEL",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str, typer.Option(help="'cpu', 'cuda', 'cuda:1', …, or 'auto': a GPU if there is one.", rich_help_panel=_MODEL)
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        help="Which outputs mean a class folder: cat=281-285 or dog=207,208; once per folder. Without it folders are "
        "named by output number, or by ImageNet name or wnid, or there is one per output.",
        metavar="FOLDER=OUTPUTS",
        rich_help_panel=_IMAGES,
    ),
]
Merge = Annotated[
    Merging,
    typer.Option(
        help="How the probabilities of outputs that mean the same become one. The mean is fairer to small groups where "
        "a network spreads some probability over all outputs.",
        rich_help_panel=_IMAGES,
    ),
]
MergeByData = Annotated[
    MergingByData,
    typer.Option(
        help="How the probabilities of outputs that mean the same become one; 'auto' takes what suits the images that "
        "units are scored on. The mean is fairer to small groups.",
        rich_help_panel=_IMAGES,
    ),
]
Images = Annotated[
    Path,
    typer.Option(help="Folder with one folder of images per class.", rich_help_panel=_IMAGES, show_default=False),
]
Test = Annotated[
    Path | None,
    typer.Option(
        help="Folder of held-out images, the same class folders. Without it some of --images are held out.",
        rich_help_panel=_IMAGES,
    ),
]
PerClass = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Images of each class that units are scored on, drawn by --seed. Default: up to 10.",
        rich_help_panel=_IMAGES,
    ),
]
TestPerClass = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Images of each class that accuracy is measured on. Default: up to 50 without --test, all with it.",
        rich_help_panel=_IMAGES,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse broken images instead of skipping them.", rich_help_panel=_IMAGES)
]
Size = Annotated[
    int | None,
    typer.Option("--input-size", min=1, help="Side of the network's input. Default: 224, or what timm says.",
                 rich_help_panel=_PICTURES),
]  # fmt: skip
Fitting = Annotated[
    Fit | None,
    typer.Option("--fit", help="Take the centre (crop, the default) or squeeze the whole image into the square.",
                 rich_help_panel=_PICTURES),
]  # fmt: skip
Mean = Annotated[
    str | None,
    typer.Option(help="Mean of the training pixels, 0 to 1: three numbers, or one for grey. Default: ImageNet's.",
                 metavar="R,G,B", rich_help_panel=_PICTURES),
]  # fmt: skip
Std = Annotated[
    str | None,
    typer.Option(help="Their standard deviation.", metavar="R,G,B", rich_help_panel=_PICTURES),
]
Seed = Annotated[int, typer.Option(help="Decides every random choice.")]
Out = Annotated[Path, typer.Option(help="Folder for everything that is written.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget an unfinished run in --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on standard output.")]


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """`0.5,0.5,0.5` as numbers for pixels from 0 to 1."""
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.5,0.5", param_hint=option) from None
    if not all(number <= 1 for number in found):
        scaled = ",".join(f"{number / 255:.3g}" for number in found)
        raise DataError(
            f"{option} {text} is for pixels from 0 to 255; here they run from 0 to 1.",
            fix=f"divide by 255, {option} {scaled}",
        )
    return found


def device_named(name: str) -> torch.device:
    """A device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        family, colon, number = name.lower().partition(":")
        if family in ("gpu", "nvidia", "cuda") and name != f"cuda{colon}{number}":
            raise SecateurError(
                f"there is no device {name!r}.", fix=f"--device cuda{colon}{number}, or auto: a GPU if there is one"
            ) from None
        fact = str(error).splitlines()[0].rstrip(". ")
        raise SecateurError(f"the device {name!r} cannot be used: {fact}.", fix="--device cpu, or auto") from None
    return device


def check_criterion(name: str) -> None:
    """Refuse a criterion that is not known, before anything is read."""
    try:
        criterion_named(name)
    except CriterionError:
        known = [*known_criteria(), *(f"lrp:{preset}" for preset in PRESETS)]
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CriterionError(
            f"--criterion {name} is not known.{hint} There are {', '.join(known_criteria())}, captum:METHOD and "
            f"lrp:COMPOSITE, with {', '.join(PRESETS)} for COMPOSITE."
        ) from None


def check_criteria(names: Sequence[str]) -> None:
    """Refuse to compare what is not known, or the same twice."""
    for name in names:
        check_criterion(name)
        if names.count(name) > 1:
            raise CriterionError(f"--criterion {name} is given {names.count(name)} times.", fix="each one once")


def check_target(keep: Mapping[str, float], remove: float | None, step: float | None) -> None:
    """Refuse targets that exclude each other or make no sense, before anything is read. `keep` says what of which."""
    given = [f"--keep-{name}" for name in keep] + (["--remove"] if remove is not None else [])
    if remove is not None and keep:
        raise TargetError(f"{' and '.join(given)} are different targets.", fix="give one of them")
    if "latency" in keep and len(keep) > 1:
        raise TargetError(f"{' and '.join(given)}: a latency is approached alone.", fix="give one of them")
    for name, value in keep.items():
        if not value > 0:
            raise TargetError(f"--keep-{name} {value:g} must be above 0.", fix=f"a share such as --keep-{name} 0.5")
        if 1 < value <= 100:
            raise TargetError(
                f"--keep-{name} {value:g} is no share, which lies between 0 and 1.",
                fix=f"--keep-{name} {value / 100:g} for {value:g} per cent",
            )
    if keep.get("latency", 0) > 1:
        raise TargetError(f"--keep-latency {keep['latency']:g} must be a share of what is measured, up to 1.")
    for option, share in (("--remove", remove), ("--step", step)):
        if share is not None and not 0 < share < 1:
            hint = f" Fix: {option} {share / 100:g} for {share:g} per cent." if 1 <= share < 100 else ""
            raise TargetError(f"{option} {share:g} must lie strictly between 0 and 1: a share of the units.{hint}")
