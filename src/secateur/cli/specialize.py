"""`secateur specialize`: keep some outputs of a classifier, without any images."""

from __future__ import annotations

from typing import Annotated

import typer

from secateur.cli import options as o
from secateur.cli.output import Printer, headline, sides
from secateur.cli.run_folder import check_folder, check_model
from secateur.cli.task import count_outputs, keep_outputs, noise, output_names, read_model
from secateur.data.outputs import Outputs, assignments, parse
from secateur.errors import DataError
from secateur.files.onnx import export
from secateur.files.saved import save
from secateur.latency.measure import measure
from secateur.surgery.provenance import plans_of


@o.grouped(fit=None)
def specialize(
    *,
    source: o.Source,
    out: o.Out,
    outputs: Annotated[
        list[str],
        typer.Option(
            help="Outputs to keep, by number, range, or ImageNet name or wnid: 0,217 or tench. With NAME=… they are "
            "merged into one output: cat=281-285. Repeatable; the order is kept.",
            metavar="[NAME=]OUTPUTS",
            show_default=False,
        ),
    ],
    merge: o.MergeBy = "sum",
    seen: o.Seen,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx, checked.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Keep some of a classifier's outputs and remove the rest; outputs that mean the same can be merged.

    The kept outputs are exactly what they were. Writes model/ into --out; prune goes on from there.

    Example: secateur specialize torchvision:resnet50 --weights default --outputs tench --outputs 217 --out two

    Example: secateur specialize torchvision:resnet50 --weights default --outputs cat=281-285 --outputs dog=151-268
    --out pets
    """
    printer = Printer(as_json)
    check_folder(out)
    check_model(out)
    with printer.stage("removing outputs"):
        opened = read_model(source, seen)
        count = count_outputs(opened)
        chosen = _chosen(outputs, count, output_names(opened, count))
        narrow = keep_outputs(opened, chosen, count, merge)
    if not plans_of(narrow.model):
        raise DataError(f"these are all {count} outputs, in order: there is nothing to remove.")
    save(narrow.model, out / "model", about={"origin": narrow.origin.to_dict()})
    files = {"model": str(out / "model")}
    if onnx:
        with printer.stage("writing ONNX and checking it with ONNX Runtime"):
            files["onnx"] = str(export(narrow.model, out / "model.onnx", noise(narrow, 2)))
    had, has = (measure(model, noise(opened), latency=False) for model in (opened.model, narrow.model))
    before, after = sides(had, has)
    kept = {name: list(members) for name, members in chosen.items()}
    printer.json({"outputs": kept, "before": before, "after": after, "files": files})
    for place, (name, members) in enumerate(chosen.items()):
        printer.result(
            f"output {place}: {name}, was {', '.join(map(str, members[:8]))}{' …' if len(members) > 8 else ''}"
        )
    printer.result(headline(had, has))
    printer.result(f"written: {', '.join(files.values())}")


def _chosen(texts: list[str], count: int, names: list[str]) -> Outputs:
    """Named groups, or single outputs under the names they have."""
    if all("=" in text for text in texts):
        return {name: parse(numbers, count) for name, numbers in assignments(texts).items()}
    if any("=" in text for text in texts):
        raise DataError("either every --outputs has a NAME=, or none has: merged and single outputs do not mix.")
    wanted = [index for text in texts for index in ([names.index(text)] if text in names else parse(text, count))]
    wrong = [index for index in wanted if index >= count]
    if wrong or len(set(wanted)) < len(wanted):
        raise DataError(f"outputs {wanted}: each must be named once, and lie between 0 and {count - 1}.")
    titles = [names[index] for index in wanted]
    return {
        title if titles.count(title) == 1 else f"{title} {i}": (i,) for title, i in zip(titles, wanted, strict=True)
    }
