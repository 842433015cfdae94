"""`secateur export`: a model as ONNX or as a `torch.export` program, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from secateur.cli import options as o
from secateur.cli.given_model import noise, read_model
from secateur.cli.outcome import Quantised
from secateur.cli.output import Printer, expects
from secateur.data.imagenet import title
from secateur.data.images import images_in, in_turn, load
from secateur.errors import DataError, SecateurError
from secateur.files.int8 import SAMPLES, Int8
from secateur.files.onnx import export as run_export
from secateur.models import Opened
from secateur.models.hub import reads_text
from secateur.structure.cost import human

_INT8 = "Compute in int8, with ranges from the images in this folder: a few dozen of the real kind. For .onnx only."


@o.grouped(device="cpu")
def export(
    *,
    source: o.Source,
    file: Annotated[
        Path, typer.Option("--out", help="model.onnx or model.pt2; the ending decides.", show_default=False)
    ],
    fixed_batch: Annotated[
        int | None, typer.Option(min=1, help="Fix the batch size. Default: any, where the model allows it.")
    ] = None,
    int8: Annotated[Path | None, typer.Option(help=_INT8, show_default=False)] = None,
    seen: o.Seen,
    as_json: o.AsJson = False,
) -> None:
    """Write a model as ONNX, and check with ONNX Runtime that it computes the same.

    A file that differs from PyTorch by more than 1e-4 is not kept. With --int8, the outputs may change by 10 % of their
    spread on the images that are given.

    Example: secateur export small --out small.onnx

    Example: secateur export torchvision:resnet18 --weights default --out resnet18.onnx --fixed-batch 1

    Example: secateur export small --out small.int8.onnx --int8 photos
    """
    printer = Printer(as_json)
    with printer.stage(f"writing {file.name} and checking it"):
        opened = read_model(source, seen)
        path = run_export(
            opened.model, file, noise(opened, fixed_batch or 2), dynamic_batch=fixed_batch is None,
            quantize=_photographs(opened, int8) if int8 is not None else None,
        )  # fmt: skip
    quantised = Quantised(Int8.of(path)) if int8 is not None else None
    view, text = opened.origin.view, reads_text(opened.model)
    shape = {
        "input": [fixed_batch, view.channels, view.size, view.size], "mean": view.mean, "std": view.std,
        "fit": view.fit, "resize": view.scaled, "interpolation": view.interpolation,
    }  # fmt: skip
    printer.json(
        {
            "file": str(path), "bytes": path.stat().st_size, **({"input": [fixed_batch, None]} if text else shape),
            "classes": list(opened.origin.classes),
            **({"int8": quantised.to_dict()} if quantised is not None else {}),
        }
    )  # fmt: skip
    takes = f"token numbers, {fixed_batch or 'N'} x tokens" if text else expects(view, fixed_batch)
    same = "same output as PyTorch"
    if quantised is not None and quantised.how is not None:
        same = f"layers in int8: {quantised.about()['layers in int8']}"
        same += f"; outputs change by {100 * quantised.how.error:.1f} % of their spread"
    printer.result(f"{path}: {human(path.stat().st_size)}B, {same}; {takes}")
    if opened.origin.classes:
        printer.result(f"outputs: {', '.join(map(title, opened.origin.classes))}")


def _photographs(opened: Opened, folder: Path) -> Tensor:
    """Images to take ranges from, some of every folder."""
    if reads_text(opened.model):
        raise SecateurError("--int8 is for convolutional networks, not for text.", fix="leave out --int8")
    if not folder.is_dir():
        raise DataError(f"--int8 {folder} is not a folder.", where=folder, fix="a folder of images")
    paths = in_turn(images_in(folder))
    if not paths:
        raise DataError(f"there are no images in {folder}, the folder of --int8.", where=folder)
    return load(paths[:SAMPLES], opened.origin.view)[0]
