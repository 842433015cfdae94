"""`secateur specialize`: keep some outputs of a classifier, without any images."""

from __future__ import annotations

from typing import Annotated

import typer

from secateur.cli import options as o
from secateur.cli.folder import check_folder, check_model
from secateur.cli.output import Talk, headline, sides
from secateur.cli.subject import Look, blank, count_outputs, names_of, narrowed, opened
from secateur.data.outputs import Outputs, assignments, parse
from secateur.errors import DataError
from secateur.files.folder import save
from secateur.files.onnx import export
from secateur.latency.measure import measure
from secateur.surgery.provenance import plans_of


def specialize(
    model: o.Model,
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
    merge: o.Merge = o.Merging.sum,
    weights: o.Weights = None,
    original: o.Original = None,
    device: o.Device = "auto",
    size: o.Size = None,
    mean: o.Mean = None,
    std: o.Std = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx, checked.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Keep some of a classifier's outputs and remove the rest; outputs that mean the same can be merged.

    The kept outputs are exactly what they were. Writes model/ into --out; prune goes on from there.

    Example: secateur specialize torchvision:resnet50 --weights default --outputs tench --outputs 217 --out two

    Example: secateur specialize torchvision:resnet50 --weights default --outputs cat=281-285 --outputs dog=151-268
    --out pets
    """
    talk = Talk(as_json)
    check_folder(out)
    check_model(out)
    with talk.stage("removing outputs"):
        subject = opened(model, weights, original, device, Look(size, None, mean, std))
        count = count_outputs(subject)
        chosen = _chosen(outputs, count, names_of(subject, count))
        narrow = narrowed(subject, chosen, count, merge.value)
    if not plans_of(narrow.model):
        raise DataError(f"these are all {count} outputs, in order: there is nothing to remove.")
    save(narrow.model, out / "model", about={"origin": narrow.origin.to_dict()})
    files = {"model": str(out / "model")}
    if onnx:
        with talk.stage("writing ONNX and checking it with ONNX Runtime"):
            files["onnx"] = str(export(narrow.model, out / "model.onnx", blank(narrow, 2)))
    had, has = (measure(model, blank(subject), latency=False) for model in (subject.model, narrow.model))
    before, after = sides(had, has)
    kept = {name: list(members) for name, members in chosen.items()}
    talk.json({"outputs": kept, "before": before, "after": after, "files": files})
    for place, (name, members) in enumerate(chosen.items()):
        talk.result(f"output {place}: {name}, was {', '.join(map(str, members[:8]))}{' …' if len(members) > 8 else ''}")
    talk.result(headline(had, has))
    talk.result(f"written: {', '.join(files.values())}")


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
