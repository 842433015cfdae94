"""`secateur specialize`: keep some outputs of a classifier, without any images."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from secateur.cli import options as o
from secateur.cli.given_model import keep_outputs, noise, output_names, outputs_in, read_model
from secateur.cli.output import Printer, expects, headline, sides
from secateur.cli.run_folder import check_folder, check_model, write_model
from secateur.data.outputs import Outputs, assignments, parse
from secateur.errors import DataError
from secateur.files.saved import save
from secateur.latency.measure import measure
from secateur.surgery.provenance import plans_of

_OUTPUTS = (
    "Outputs to keep, by number, range, or ImageNet name or wnid: 0,217 or tench. With NAME=… they are merged into one "
    "output: cat=281-285. Repeatable; the order is kept."
)


@o.grouped()
def specialize(
    *,
    source: o.Source,
    out: o.Out,
    outputs: Annotated[list[str], typer.Option(help=_OUTPUTS, metavar="[NAME=]OUTPUTS", show_default=False)],
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
        names = output_names(opened)
        chosen = _chosen(outputs, names)
        narrow = keep_outputs(opened, chosen, len(names), merge)
    if not plans_of(narrow.model):
        raise DataError(f"these are all {len(names)} outputs, in order: there is nothing to remove.")
    keep = partial(save, narrow.model, about={"origin": narrow.origin.to_dict()})
    files = write_model(narrow.model, keep, out, noise(narrow, 2) if onnx else None, printer)
    written = {name: str(path) for name, path in files.items()}
    had, has = (measure(model, noise(opened), latency=False) for model in (opened.model, narrow.model))
    before, after = sides(had, has)
    printer.json({"outputs": chosen, "before": before, "after": after, "files": written})
    for place, (name, members) in enumerate(chosen.items()):
        shown = ", ".join(map(str, members[:8])) + (" …" if len(members) > 8 else "")
        printer.result(f"output {place}: {name}, was {shown}")
    printer.result(headline(had, has))
    takes = f"; {expects(narrow.origin.view)}" if onnx else ""
    printer.result(f"written: {', '.join(written.values())}{takes}")


def _chosen(texts: list[str], names: list[str]) -> Outputs:
    """Named groups, or single outputs under the names they have."""
    if all("=" in text for text in texts):
        return {name: parse(numbers, len(names)) for name, numbers in assignments(texts).items()}
    if any("=" in text for text in texts):
        raise DataError("either every --outputs has a NAME=, or none has: merged and single outputs do not mix.")
    wanted = [index for text in texts for index in outputs_in(text, names)]
    if max(wanted) >= len(names) or len(set(wanted)) < len(wanted):
        raise DataError(f"outputs {wanted}: each must be named once, and lie between 0 and {len(names) - 1}.")
    titles = [names[i] for i in wanted]
    return {names[i] if titles.count(names[i]) == 1 else f"{names[i]} {i}": (i,) for i in wanted}
