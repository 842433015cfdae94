"""Options that several commands share, spelt the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from secateur.errors import SecateurError

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
    """`0.5,0.5,0.5` as numbers."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.5,0.5", param_hint=option) from None


def device_named(name: str) -> torch.device:
    """A device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SecateurError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
