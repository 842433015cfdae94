"""`secateur demo`: the main job on a small network, offline, in a minute or two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from secateur.analysis.reasons import some_of
from secateur.cli.outlook import known_within
from secateur.cli.output import Printer, curves_table, headline, percent
from secateur.cli.run_folder import check_folder, check_model
from secateur.demo import REFERENCE, Digits, demonstrate, train
from secateur.files.saved import save
from secateur.latency.timing import time_batches
from secateur.loop.prune import prune
from secateur.report import Page
from secateur.report.answers import Answers
from secateur.results.comparison import curve
from secateur.running.accuracy import accuracy

_OUT = "Folder for the report page, the smaller network and the curves."
_BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1)


def demo(
    out: Annotated[Path, typer.Option(help=_OUT)] = Path("secateur-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training the digits network.")] = 6,
) -> None:
    """Train a small network on digits, keep four of its ten outputs, compare four criteria, prune it by relevance.

    Example: secateur demo --out my-demo
    """
    check_folder(out)
    check_model(out)
    printer = Printer(as_json=False)
    printer.note("this takes a minute or two, and less than 1 GiB of memory")
    digits, classes = Digits.load(), [0, 1, 4, 7]
    reference, test, names = digits.of(classes, REFERENCE), digits.of(classes), [f"digit {c}" for c in classes]

    def held_out_accuracy(model: nn.Module) -> dict[str, float]:
        return accuracy(model, test).named(lambda number: names[number])

    with printer.stage(f"training a residual network on {len(digits.train[0])} hand-written digits"):
        net = train(digits, epochs)
    with printer.stage("pruning by four criteria, re-scored every 5 %, from ten images per class"):
        shown = demonstrate(digits, net, classes)
    whole, narrow = percent(shown.whole, len(digits.test[1])), percent(shown.narrow, len(test[1]))
    printer.result(f"right on held-out digits: {whole} among ten classes, {narrow} "
                f"among {', '.join(map(str, classes))} after cutting off the other outputs\n")  # fmt: skip
    printer.note("removing 5 % at a time by lrp, repaired after each step, until more than 2 points are lost")
    result = prune(
        shown.network, reference, "lrp", max_drop=0.02, evaluate=held_out_accuracy, watch=some_of(test, 4),
        progress=printer.progress(),
    )  # fmt: skip
    repaired = curve("lrp", result.history, every=True)
    printer.result(curves_table({"lrp, repaired": repaired, **shown.comparison.curves}, _BUDGETS, "macs"))
    printer.result(known_within(len(test[1])))
    printer.result(
        "Ten images per class, nothing trained. Repaired is what `secateur prune` does, until 2 points are lost; the "
        "others are the\npaper's method. One network and one draw of images: see docs/results for means over many.\n"
    )
    with printer.stage("timing both networks and drawing the page"):
        timings = time_batches(shown.network, result.model, reference[0][:1])
        save(result, out / "model")
        shown.comparison.to_json(out / "comparison.json")
        result.history.to_csv(out / "history.csv")
        old, new = (accuracy(model, test) for model in (shown.network, result.model))
        page = result.report(
            out / "report.html", data=test, comparison=shown.comparison, classes=names,
            page=Page(f"A digits network, specialised to {', '.join(map(str, classes))} and pruned by explaining",
                      latency=timings, answers=Answers.of(old, new, test)),
        )  # fmt: skip
    metrics = [row.metrics for row in result.history if row.held]
    printer.result("the last network that lost at most 2 points, by lrp, repaired:")
    counts = {"overall": len(test[1]), **{name: int((test[1] == number).sum()) for number, name in enumerate(names)}}
    printer.result(headline(result.cost_before, result.cost_after, timings, metrics, counts=counts))
    printer.result(f"written: {out / 'model'} (safetensors and plan), {out / 'history.csv'}, {out / 'comparison.json'}")
    printer.result(f"report page: {page.resolve().as_uri()}")
    load = f"small = secateur.load({str(out / 'model')!r}, secateur.demo.ResidualDigits())"
    printer.result(f"load it in Python: import secateur.demo; {load}")
    printer.result(f"serve it: secateur.export(small, {str(out / 'model.onnx')!r}, torch.zeros(1, 1, 8, 8))")
    printer.result(f"{printer.seconds:.0f} s")
