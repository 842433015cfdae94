"""Where a model comes from, so that a smaller one can be saved and rebuilt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.analysis.specialize import MergedOutputs
from secateur.data.views import View
from secateur.errors import Argument, DataError, FileFormatError, ModelError
from secateur.files.architecture import CONFIG, note_of
from secateur.files.saved import PLANS, about, load
from secateur.models.hub import HUB, hub_view, label_names, open_hub, reads_text
from secateur.models.preparation import timm_view, torchvision_view
from secateur.models.weights import fill
from secateur.models.zoo import FORMS, fresh, runs_code


@dataclass(frozen=True)
class Origin:
    """How to build the model that a saved one was cut from, and what it expects.

    `classes` are the names of its outputs after `specialize`, `groups` the outputs that were merged into each, and
    `outputs` how many there were before. `kept` are those that are left, in order, where none were merged.
    """

    model: str
    view: View = View()  # noqa: RUF009 (frozen)
    classes: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    outputs: int = 0
    kept: tuple[int, ...] = ()

    def fresh(self) -> nn.Module:
        """The unpruned architecture, with merged outputs if it had some; weights are random."""
        model = fresh(self.model)
        if not self.groups:
            return model
        return MergedOutputs(model, dict(zip(self.classes, self.groups, strict=True)), self.outputs)

    def specialized(self, outputs: Mapping[str, tuple[int, ...]], count: int) -> Origin:
        """The origin of a model that was cut down to these outputs."""
        if all(len(members) < 2 for members in outputs.values()):
            chosen = [members[0] for members in outputs.values() if members]
            kept = tuple(self.kept[i] for i in chosen) if self.kept else tuple(chosen)
            return replace(self, classes=tuple(outputs), kept=() if self.groups else kept)
        if self.groups:
            raise DataError("the outputs of this model are merged already; they cannot be merged again.")
        return replace(self, classes=tuple(outputs), groups=tuple(outputs.values()), outputs=count)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "view": self.view.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: Path) -> Origin:
        """Read it back, or raise."""
        try:
            view = data["view"]
            mean, std = (tuple(map(float, view[name])) for name in ("mean", "std"))
            groups = tuple(tuple(map(int, members)) for members in data["groups"])
            classes, resize = tuple(map(str, data["classes"])), view.get("resize")  # older files lack it
            resize, filters = None if resize is None else int(resize), view.get("interpolation", "bilinear")
            seen = View(int(view["size"]), view["fit"], mean, std, resize, filters)
            kept = tuple(map(int, data.get("kept", ())))
            return cls(str(data["model"]), seen, classes, groups, int(data["outputs"]), kept)
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise FileFormatError(f"{where / PLANS}: its model is not described properly ({error})") from error


@dataclass(frozen=True)
class Opened:
    """A model ready for use, and its origin. `stored` is the number format that it had on disk, if that is known."""

    model: nn.Module
    origin: Origin
    stored: torch.dtype | None = None


def build(
    spec: str, weights: str | os.PathLike[str] | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """A model in evaluation mode from a text, with weights from a file or, with `"default"`, from its zoo's download.

    `spec` is `torchvision:NAME`, `timm:NAME`, `hf:FOLDER` or `hf:NAME` (Hugging Face, with its weights),
    `FILE.py:FACTORY` (which runs that file) or a folder saved by the command line; options follow a question mark.

    >>> build("torchvision:resnet18?num_classes=3").fc.out_features
    3
    """
    return open_model(spec, weights, device).model


def open_model(
    spec: str,
    weights: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    original: str | None = None,
) -> Opened:
    """As `build`, with the origin. `original` says what a saved folder was cut from, if rebuilding that runs code."""
    folder = None if spec.startswith(HUB) else saved_folder(spec)
    hub = f"{HUB}{folder}" if folder is not None and note_of(folder) is not None else spec
    if weights is not None and (folder is not None or hub.startswith(HUB)):
        raise ModelError(
            "{folder} holds its own weights.", fix="leave out {weights}, which is for unpruned models",
            folder=folder or spec, weights=Argument("weights"),
        )  # fmt: skip
    if original is not None and (folder is None or hub.startswith(HUB)):
        what = "{original} is for folders saved by secateur that do not describe their model; {spec!r} is none."
        raise ModelError(what, original=Argument("original"), spec=spec)
    if hub.startswith(HUB):
        model, stored = open_hub(hub)
        opened = Opened(model, Origin(hub, view_of(model, hub), label_names(model)), stored)
    elif folder is not None:
        opened = _saved(folder, original)
    else:
        model = fresh(spec, pretrained=str(weights) == "default")
        if weights is not None and str(weights) != "default":
            fill(model, weights)
        opened = Opened(model, Origin(spec, view_of(model, spec, weights)))
    opened.model.to(device).eval()
    return opened


def saved_folder(spec: str) -> Path | None:
    """The folder of a saved model, if the text names one: itself, or the `model` inside a run's output folder."""
    for folder in (Path(spec), Path(spec) / "model"):
        if (folder / PLANS).is_file() or note_of(folder) is not None:
            return folder
    if Path(spec).is_dir():
        fix = f"{HUB}{spec}" if (Path(spec) / CONFIG).is_file() else f"give {FORMS}"
        raise ModelError(f"{spec} is a folder, but no model was saved in it ({PLANS} is missing).", fix=fix)
    return None


def view_of(model: nn.Module, spec: str, weights: object = None) -> View:
    """The inputs that a model was made for: timm stores that in the model, the others beside its weights."""
    if spec.startswith(HUB):
        return View() if reads_text(model) else hub_view(spec, model)
    known = torchvision_view(spec, weights) if spec.startswith("torchvision:") else View()
    fixed = getattr(model, "image_size", None)  # torchvision's transformers take only this size
    known = known.sized(fixed) if isinstance(fixed, int) else known
    notes = getattr(model, "pretrained_cfg", None)
    return timm_view(spec, notes, known) if isinstance(notes, Mapping) else known


def _saved(folder: Path, original: str | None) -> Opened:
    noted = about(folder)
    if noted.get("origin") is None and original is None:
        raise ModelError(
            "{folder} does not say which model it was cut from (it was saved by sc.save, not by a command).",
            fix="{original}, or timm:NAME or FILE.py:FACTORY",
            folder=folder, original=Argument("original", "torchvision:NAME"),
        )  # fmt: skip
    origin = Origin.from_dict(noted["origin"], folder) if noted.get("origin") is not None else Origin(str(original))
    if original is not None:
        origin = replace(origin, model=original)
    elif runs_code(origin.model):
        raise ModelError(
            "{folder} was cut from {model}; rebuilding it runs that file, which a saved folder may not ask for.",
            fix="if you trust that file, say so with {original}",
            folder=folder, model=origin.model, original=Argument("original", origin.model),
        )  # fmt: skip
    model = load(folder, origin.fresh())
    if noted.get("origin") is None:  # nobody noted how images are prepared
        origin = replace(origin, view=view_of(model, origin.model, folder))
    return Opened(model, origin)
