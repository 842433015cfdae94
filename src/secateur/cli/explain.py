"""`secateur explain`: which pixels and which units decided a model's output."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from secateur.cli import options as o
from secateur.cli.output import Printer, table
from secateur.cli.run_folder import check_folder, keep_apart
from secateur.cli.task import output_names, outputs_in, read_model
from secateur.data.images import images_in, load
from secateur.errors import DataError, SecateurError
from secateur.relevance.composites import PRESETS
from secateur.relevance.explain import Explanation, draw
from secateur.relevance.explain import explain as run_explain
from secateur.running.devices import device_of

_BATCH = 8
_TARGET = "The output to explain, by number or ImageNet name. Default: the one that won."
_COMPOSITE = f"Which rules apply where: {', '.join(PRESETS)}."


@o.grouped()
def explain(
    *,
    source: o.Source,
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.", show_default=False)],
    out: o.Out,
    target: Annotated[str | None, typer.Option(help=_TARGET)] = None,
    composite: Annotated[str, typer.Option(help=_COMPOSITE)] = "epsilon_gamma_box",
    limit: Annotated[int, typer.Option(min=1, help="At most so many images.")] = 16,
    strict: o.Strict = False,
    seen: o.Seen,
    as_json: o.AsJson = False,
) -> None:
    """Draw heat maps: red pixels speak for the output, blue ones against it. Count relevance by layer.

    Writes one PNG per image into --out. The table says how many units of each layer hold 90 % of the relevance, and
    the last line whether relevance was conserved.

    Example: secateur explain torchvision:resnet50 --weights default cat.jpg dog.jpg --out maps

    Example: secateur explain small photos --target 1 --out maps
    """
    if composite not in PRESETS:
        raise SecateurError(f"there is no composite {composite!r}; there are {', '.join(PRESETS)}.")
    check_folder(out)
    for folder in images:
        if folder.is_dir():
            keep_apart(out, folder, "images", above=False)  # or the next call would explain heat maps
    printer = Printer(as_json)
    with printer.stage("building the model and reading images"):
        opened = read_model(source, seen)
        names = output_names(opened)
        wanted = _target(target, names)
        paths = _in_turn([path for item in images for path in (images_in(item) if item.is_dir() else [item])])
        if not paths:
            raise DataError(f"there are no images in {', '.join(map(str, images))}.")
        if len(paths) > limit:
            printer.note(f"{limit} of {len(paths)} images, in turn from every folder; --limit for more")
        inputs, kept = load(paths[:limit], opened.origin.view, strict=strict)
    out.mkdir(parents=True, exist_ok=True)
    pictures: list[dict[str, Any]] = []
    found: list[Explanation] = []
    with printer.stage(f"explaining {len(kept)} images"):
        for begin in range(0, len(kept), _BATCH):
            batch = inputs[begin : begin + _BATCH].to(device_of(opened.model))
            found.append(run_explain(opened.model, batch, wanted, composite=composite))
            colours = opened.origin.view.picture(batch)
            for i, path in enumerate(kept[begin : begin + _BATCH]):
                file = out / f"{begin + i:03d}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', path.stem)}.png"
                draw(colours[i : i + 1], found[-1].heat[i : i + 1], file)
                pictures.append(_entry(path, file, found[-1].output[i], names, wanted))
    rows = _layers(found)
    worst = max((item.conservation.worst for item in found), default=0.0)
    printer.json({"images": pictures, "layers": rows, "conservation": worst, "composite": composite})
    shown = [
        (Path(i["image"]).name, f"{i['predicted']} ({100 * i['probability']:.1f} %)", i["explained"], i["heat_map"])
        for i in pictures
    ]
    printer.result(table(("image", "says", "explained", "heat map"), (), shown))
    layers = [(r["layer"], f"{100 * r['arrives']:.1f} %", str(r["units"]), str(r["hold_90"])) for r in rows]
    printer.result(table(("layer",), ("relevance that arrives", "units", "hold 90 % of it"), layers))
    printer.result(f"conservation: at most {worst:.2%} of the relevance is lost or created (composite {composite})")


def _in_turn(paths: list[Path]) -> list[Path]:
    """One of each folder, then the next of each: a few images should not all be of the first class."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return [path for turn in zip_longest(*folders.values()) for path in turn if path is not None]


def _target(text: str | None, names: list[str]) -> int | None:
    if text is None:
        return None
    found = outputs_in(text, names)
    if len(found) != 1 or not 0 <= found[0] < len(names):
        raise DataError(f"--target {text!r} must be one of the model's outputs, 0 to {len(names) - 1}.")
    return found[0]


def _entry(path: Path, file: Path, output: Tensor, names: list[str], wanted: int | None) -> dict[str, Any]:
    shares = output.detach().float().softmax(0)
    best = int(shares.argmax())
    explained = best if wanted is None else wanted
    return {
        "image": str(path), "heat_map": str(file), "output": best, "predicted": names[best],
        "probability": float(shares[best]), "explained": names[explained], "explained_output": explained,
    }  # fmt: skip


def _layers(seen: list[Explanation]) -> list[dict[str, Any]]:
    """For each layer the share of relevance that arrives, and how few units hold nine tenths of it."""
    total = sum(item.conservation.size for item in seen) or 1.0
    rows = []
    for path in seen[0].units:
        units = torch.stack([item.units[path] for item in seen]).sum(0).abs().double().cpu().numpy()
        arrives = sum(item.conservation.layers.get(path, 0.0) * item.conservation.size for item in seen) / total
        ranked = np.sort(units)[::-1].cumsum()
        hold = int(np.searchsorted(ranked, 0.9 * ranked[-1]) + 1) if ranked[-1] > 0 else 0
        rows.append({"layer": path, "arrives": float(arrives), "units": len(units), "hold_90": hold})
    return rows
