"""`secateur demo`: the main job on a small network, offline, in a minute or two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from torch import nn


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report page, the smaller network and the curves.")] = Path(
        "secateur-demo"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training the digits network.")] = 15,
) -> None:
    """Train a small network on digits, keep four of its ten outputs, compare four criteria, prune it by relevance.

    Example: secateur demo --out my-demo
    """
    from secateur.experiments.digits import REFERENCE, Digits, accuracies, demonstrate, train
    from secateur.pruning.files import save
    from secateur.pruning.loop import prune

    console = Console()
    digits, classes = Digits.load(), [0, 1, 4, 7]
    with console.status("training a residual network on 1348 hand-written digits"):
        net = train(digits, epochs)
    with console.status("pruning by four criteria, re-scored every 5 %, from ten images per class"):
        shown = demonstrate(digits, net, classes)
    console.print(f"accuracy on held-out digits: {100 * shown.whole:.1f} % among ten classes,")
    console.print(f"{100 * shown.narrow:.1f} % among {classes} after keeping those four outputs.\n")
    table = Table(title="accuracy in % without fine-tuning, by share of units removed; below it the MACs left in %")
    table.add_column("criterion", no_wrap=True)
    rates = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8)
    for rate in rates:
        table.add_column(f"{100 * rate:.0f} %", justify="right")
    for name, curve in shown.comparison.curves.items():
        cells = []
        for rate in rates:
            at = int(abs(curve.removed - rate).argmin())
            cells.append(f"{100 * curve.overall[at]:.1f}\n[dim]{100 * curve.macs[at]:.0f}[/dim]")
        table.add_row(name, *cells)
    console.print(table)
    console.print(str(shown.comparison), highlight=False)
    reference, test, names = digits.of(classes, REFERENCE), digits.of(classes), [f"digit {c}" for c in classes]

    def held_out_accuracy(model: nn.Module) -> dict[str, float]:
        return accuracies(model, test, names)

    with console.status("looking for the smallest network within 2 points, and drawing the page"):
        result = prune(
            shown.network, reference, "lrp", max_drop=0.02, evaluate=held_out_accuracy, progress=False
        )  # fmt: skip
        save(out / "model", result)
        (out / "comparison.json").write_text(shown.comparison.to_json(), encoding="utf-8")
        result.history.to_csv(out / "history.csv")
        page = result.report(
            out / "report.html", data=test, comparison=shown.comparison, classes=names,
            title=f"A digits network, specialised to {', '.join(map(str, classes))} and pruned by explaining",
        )  # fmt: skip
    console.print(f"\nsmallest within 2 points by lrp: {result.cost_before} → {result.cost_after}")
    console.print(f"written: {out / 'model'} (safetensors and plan), {out / 'history.csv'}, {out / 'comparison.json'}")
    console.print(f"report page: {page.resolve().as_uri()}", soft_wrap=True)
