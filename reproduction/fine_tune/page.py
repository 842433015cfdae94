"""The page of Scenario 1: Tables 3 and S3 with ours beside the paper's, and Figures 5 to 7."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from reproduction import page, pictures
from reproduction.fine_tune.campaign import Settings
from reproduction.image_reference import UNITS, printed, rate
from reproduction.page import accuracies, figure, heading, later, table
from reproduction.runs import Folder, Run, by_criterion, by_mode, curves, filters
from reproduction.uncoupled import paper_cost
from secateur.results.history import Row

_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# The paper divides the mean cross-entropy by its batch size and prints hundredths.
_PAPER_LOSS = 100 / 20


def write_page(out: Path, pages: Path) -> Path:
    """Make `fine-tune.md` and its figures from the runs in a folder."""
    text = (
        "A network is prepared for a data set. Then, in each step, the units are re-scored on the training set, a "
        "share of the filters is removed, and the network is fine-tuned. The paper's numbers are in brackets. "
        "± is the standard deviation over draws, where there are several."
    )
    remarks = (
        "Loss is the mean cross-entropy of the training batches of the last epoch, divided by 20 and in hundredths, "
        "as the paper prints it. The paper's parameter counts of the unpruned VGG and AlexNet leave out the frozen "
        "convolutions; ours include them."
    )
    section = partial(_section, pages)
    return page.write_page(out, pages / "fine-tune.md", "Pruning with fine-tuning (Scenario 1)", text, section, remarks)


def _section(pages: Path, folder: Folder) -> list[str]:
    name = folder.path.name
    model, data = name.split("-", 1)
    lines = heading(folder, "fine-tune", Settings("", "", ""))
    for mode, runs in by_mode(folder.runs()).items():
        found, where = curves(runs), f"{mode} mode: accuracy in % at a share of"
        lines += _compared(runs, mode, model, data)
        lines += accuracies(f"{where} filters gone", found, "removed", _RATES, _cell)
        lines += accuracies(f"{where} MACs really left", found, "macs", _SHARES, _cell)
        lines += _figures(runs, mode, f"fine-tune-{name}-{mode}{later(runs, '-')}", pages)
    return lines


def _cell(values: list[float]) -> str:
    """The mean, and the standard deviation over draws where there are several."""
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values):.1f}" if len(values) > 1 else "")


def _figures(runs: Sequence[Run], mode: str, name: str, pages: Path) -> list[str]:
    """Figure 5, and Figures 6 and 7 where there is something to draw."""
    title = f"{mode} mode"
    caption = f"Figure 5, {title}: accuracy over filters gone and over MACs saved"
    lines = figure(pages, name, caption, lambda: pictures.curves([pictures.panels(mode, curves(runs))]))
    if len({run.criterion for run in runs}) > 1 and any(run.criterion == "lrp" for run in runs):
        caption = f"Figure 6, {title}: LRP against others"
        lines += figure(pages, f"{name}-scatter", caption, lambda: pictures.scatter(title, runs, "overall"))
    if filters(runs[0].history[0]):
        caption = f"Figure 7, {title}: filters left per layer"
        lines += figure(pages, f"{name}-layers", caption, lambda: pictures.layers(title, runs))
    return lines


def _compared(runs: Sequence[Run], mode: str, model: str, data: str) -> list[str]:
    """Table 3: at the paper's rate, or at the last that was reached."""
    wanted = rate(model, data)
    reached = min(float(run.curve.removed[-1]) for run in runs)
    place = wanted if wanted is not None and wanted <= reached + 0.03 else reached
    draws = len({run.draw for run in runs})
    columns = list(by_criterion(runs))
    comparable = place == wanted
    rows = []
    for measure, unit in UNITS.items():
        title = f"{'MACs' if measure == 'flops' else measure} ({unit})"
        cells = [_beside(runs, None, 0.0, measure, model, data, comparable)]
        cells += [_beside(runs, c, place, measure, model, data, comparable) for c in columns]
        rows.append([title, *cells])
        if mode == "paper" and measure in ("params", "flops"):
            real = [_beside(runs, c, place, f"{measure} really", model, data, False) for c in columns]
            rows.append([f"{title}, really", "", *real])
    title = f"{mode} mode: at {100 * place:.0f} % of the filters gone ({draws} {'draw' if draws == 1 else 'draws'})"
    return table(title, ["", "unpruned", *columns], rows)


def _beside(
    runs: Sequence[Run], criterion: str | None, place: float, measure: str, model: str, data: str, comparable: bool
) -> str:
    chosen = [run for run in runs if criterion is None or run.criterion == criterion]
    values = [_value(run.at(place), measure) for run in chosen]
    varies = criterion is not None and len(values) > 1 and measure in ("accuracy", "loss")
    ours = f"{np.mean(values):.2f}" + (f" ± {np.std(values):.2f}" if varies else "")
    paper = printed(model, data, measure, criterion or "unpruned") if comparable else None
    return ours if paper is None else f"{ours} ({paper:g})"


def _value(row: Row, measure: str) -> float:
    if measure == "loss":
        return _PAPER_LOSS * row.metrics["loss"]
    if measure == "accuracy":
        return 100 * (row.overall or 0.0)
    name, _, really = measure.partition(" ")
    name = "macs" if name == "flops" else name
    cost = getattr(row, name) if really else paper_cost(row, name)
    return float(cost) / (1e6 if name == "params" else 1e9)
