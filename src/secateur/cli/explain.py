"""`secateur explain`: which pixels or words, and which units, decided a model's output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from secateur.cli import options as o
from secateur.cli.explain_text import explain_texts
from secateur.cli.given_model import output_names, outputs_in, read_model
from secateur.cli.output import Printer, prepared, table
from secateur.cli.run_folder import check_folder, keep_apart
from secateur.data.images import images_in, in_turn, load
from secateur.errors import DataError, SecateurError
from secateur.models.hub import reads_text
from secateur.relevance.composites import PRESETS
from secateur.relevance.explain import Explanation, draw, fitting
from secateur.relevance.explain import explain as run_explain
from secateur.running.devices import device_of

_BATCH = 8
_TARGET = "The output to explain, by number or name; of a language model a word. Default: the one that won."
_AGAINST = "Another output: explain why --target and not this one."
_POSITION = "Which answer of a language model is explained, counted in tokens; -1 is the last, the default."
_COMPOSITE = (
    f"Which rules apply where: {', '.join(PRESETS)}. Default: attnlrp for transformers; for others "
    "epsilon_gamma_box for images, alpha1beta0 for text."
)


@o.grouped()
def explain(
    *,
    source: o.Source,
    images: Annotated[
        list[Path] | None, typer.Argument(help="Images, or folders of images.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to; for text also a file.html.", show_default=False)],
    text: Annotated[str | None, typer.Option(help="A sentence, or a file with a text in each line.")] = None,
    target: Annotated[str | None, typer.Option(help=_TARGET)] = None,
    against: Annotated[str | None, typer.Option(help=_AGAINST)] = None,
    position: Annotated[int | None, typer.Option(help=_POSITION)] = None,
    composite: Annotated[str | None, typer.Option(help=_COMPOSITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many images, or lines of a file.")] = 16,
    strict: o.Strict = False,
    seen: o.Seen,
    as_json: o.AsJson = False,
) -> None:
    """Draw heat maps: red pixels or words speak for the output, blue ones against it.

    Writes one PNG per image into --out, or one page with all texts. The table for images says how many units of each
    layer hold 90 % of the relevance. The last line says whether relevance was conserved.

    Example: secateur explain torchvision:resnet50 --weights default cat.jpg dog.jpg --out maps

    Example: secateur explain small photos --target 1 --out maps

    Example: secateur explain hf:my-model --text "The capital of France is" --target Paris --against London
    --out why.html
    """
    if composite is not None and composite not in PRESETS:
        raise SecateurError(f"there is no composite {composite!r}; there are {', '.join(PRESETS)}.")
    check_folder(out.parent if text is not None and out.suffix else out)
    printer = Printer(as_json)
    if text is None and not images:
        raise DataError("there is nothing to explain.", fix='images, folders of images, or --text "a sentence"')
    if text is not None:
        if images:
            raise DataError(f"--text is given, and images too ({images[0]}).", fix="one of the two")
        with printer.stage("building the model"):
            opened = read_model(source, seen)
        if not reads_text(opened.model):
            raise DataError(f"{type(opened.model).__name__} reads no text.", fix="images instead of --text")
        explain_texts(
            opened, text, out, printer,
            target=target, against=against, position=position, composite=composite, limit=limit,
        )  # fmt: skip
        return
    for option, value in (("--against", against), ("--position", position)):
        if value is not None:
            raise DataError(f"{option} is for text.", fix=f"leave out {option}")
    _explain_images(source, seen, images or [], out, printer, target, composite, limit, strict)


def _explain_images(
    source: o.Source, seen: o.Seen, images: list[Path], out: Path, printer: Printer,
    target: str | None, composite: str | None, limit: int, strict: bool,
) -> None:  # fmt: skip
    """Heat maps of images, and relevance by layer."""
    for folder in images:
        if folder.is_dir():
            keep_apart(out, folder, "images", above=False)  # or the next call would explain heat maps
    with printer.stage("building the model and reading images"):
        opened = read_model(source, seen)
        if reads_text(opened.model):
            raise DataError(f"{type(opened.model).__name__} reads text, not images.", fix='--text "a sentence"')
        names = output_names(opened)
        wanted = _target(target, names)
        paths = in_turn([path for item in images for path in (images_in(item) if item.is_dir() else [item])])
        if not paths:
            raise DataError(f"there are no images in {', '.join(map(str, images))}.")
        if len(paths) > limit:
            printer.note(f"{limit} of {len(paths)} images, in turn from every folder; --limit for more")
        printer.note(f"images: {prepared(opened.origin.view)}")
        inputs, kept = load(paths[:limit], opened.origin.view, strict=strict)
    out.mkdir(parents=True, exist_ok=True)
    pictures: list[dict[str, Any]] = []
    found: list[Explanation] = []
    with printer.stage(f"explaining {len(kept)} images"):
        composite = composite or fitting(opened.model, inputs[:1].to(device_of(opened.model)))
        for begin in range(0, len(kept), _BATCH):
            batch = inputs[begin : begin + _BATCH].to(device_of(opened.model))
            found.append(run_explain(opened.model, batch, wanted, composite=composite))
            colours = opened.origin.view.picture(batch)
            for i, path in enumerate(kept[begin : begin + _BATCH]):
                file = out / f"{begin + i:03d}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', path.stem)}.png"
                entry = _entry(path, file, found[-1].output[i], names, wanted)
                said = f"says {entry['predicted']} ({100 * entry['probability']:.1f} %)"
                titles = [(said, f"relevance for {entry['explained']}")]
                draw(colours[i : i + 1], found[-1].heat[i : i + 1], file, titles=titles)
                pictures.append(entry)
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
    total = sum(item.conservation.size for item in found) or 1.0
    kept_back = sum(item.conservation.absorbed for item in found) / total
    printer.result(
        f"conservation: {kept_back:.1%} of the relevance stays in biases or constants, as the rules define it; at most "
        f"{worst:.2%} is lost or created (composite {composite})"
    )


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
