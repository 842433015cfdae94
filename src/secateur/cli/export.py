"""`secateur export`: a model as ONNX or as a `torch.export` program, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secateur.cli import options as o
from secateur.cli.given_model import noise, read_model
from secateur.cli.output import Printer, expects
from secateur.data.imagenet import title
from secateur.files.onnx import export as run_export
from secateur.models.hub import reads_text
from secateur.structure.cost import human


@o.grouped(device="cpu", fit=None)
def export(
    *,
    source: o.Source,
    file: Annotated[
        Path, typer.Option("--out", help="model.onnx or model.pt2; the ending decides.", show_default=False)
    ],
    fixed_batch: Annotated[
        int | None, typer.Option(min=1, help="Fix the batch size. Default: any, where the model allows it.")
    ] = None,
    seen: o.Seen,
    as_json: o.AsJson = False,
) -> None:
    """Write a model as ONNX, and check with ONNX Runtime that it computes the same.

    A file that differs from PyTorch by more than 1e-4 is not kept.

    Example: secateur export small --out small.onnx

    Example: secateur export torchvision:resnet18 --weights default --out resnet18.onnx --fixed-batch 1
    """
    printer = Printer(as_json)
    with printer.stage(f"writing {file.name} and checking it"):
        opened = read_model(source, seen)
        path = run_export(
            opened.model, file, noise(opened, fixed_batch or 2), dynamic_batch=fixed_batch is None
        )  # fmt: skip
    view, text = opened.origin.view, reads_text(opened.model)
    shape = {"input": [fixed_batch, view.channels, view.size, view.size], "mean": view.mean, "std": view.std}
    printer.json(
        {
            "file": str(path), "bytes": path.stat().st_size, **({"input": [fixed_batch, None]} if text else shape),
            "classes": list(opened.origin.classes),
        }
    )  # fmt: skip
    takes = f"token numbers, {fixed_batch or 'N'} x tokens" if text else expects(view, fixed_batch)
    printer.result(f"{path}: {human(path.stat().st_size)}B, same output as PyTorch; {takes}")
    if opened.origin.classes:
        printer.result(f"outputs: {', '.join(map(title, opened.origin.classes))}")
