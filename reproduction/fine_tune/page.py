"""The page of Scenario 1: Tables 3 and S3 with ours beside the paper's, and Figures 5 to 7."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reproduction.fine_tune.campaign import Settings
from reproduction.image_reference import UNITS, printed, rate
from reproduction.page import CAPTIONS, figure, folders, heading, table, told
from reproduction.runs import Folder, Run, areas, at, by_criterion, filters
from secateur.errors import SecateurError
from secateur.results.history import Row

_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# The paper divides the mean cross-entropy by its batch size and prints hundredths.
_PAPER_LOSS = 100 / 20


def write_page(out: Path, pages: Path) -> Path:
    """Make `fine-tune.md` and its figures from the runs in a folder."""
    found = folders(out)
    if not found:
        raise SecateurError(f"{out} has no finished runs to make a page of.")
    lines = [
        "# Pruning with fine-tuning (Scenario 1)",
        "",
        "A network is prepared for a data set. Then a share of its filters leaves per step, scored anew each time on "
        "the training set, with fine-tuning after each step. The paper's numbers are in brackets.",
        "",
        *(f"- *{mode}*: {caption}" for mode, caption in CAPTIONS.items()),
        "",
        "Loss is the mean cross-entropy of the last epoch of training, as the batches were trained on, divided by 20 "
        "and in hundredths, as the paper prints it. The paper's unpruned parameters of VGG and AlexNet leave out the "
        "frozen convolutions; ours are whole.",
        "",
    ]
    for folder in found:
        lines += _section(folder, pages)
    return told(pages / "fine-tune.md", lines)


def _section(folder: Folder, pages: Path) -> list[str]:
    runs, name = folder.runs(), folder.path.name
    model, data = name.split("-", 1)
    lines = heading(folder, "fine-tune", Settings("", "", ""))
    for mode in dict.fromkeys(run.mode for run in runs):
        mine = [run for run in runs if run.mode == mode]
        lines += _compared(mine, mode, model, data)
        lines += _over(mine, "removed", _RATES, f"{mode} mode: accuracy in % at a share of filters gone")
        lines += _over(mine, "macs", _SHARES, f"{mode} mode: accuracy in % at a share of MACs really left")
        caption = f"Figure 5, {mode} mode: accuracy over filters gone and over MACs saved"
        lines += figure(pages, f"fine-tune-{name}-{mode}", caption, lambda mine=mine, mode=mode: _curves(mine, mode))  # type: ignore[misc]
        lines += _others(mine, mode, name, pages)
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
    ours = f"{np.mean(values):.2f}"
    paper = printed(model, data, measure, criterion or "unpruned") if comparable else None
    return ours if paper is None else f"{ours} ({paper:g})"


def _value(row: Row, measure: str) -> float:
    if measure == "loss":
        return _PAPER_LOSS * row.metrics["loss"]
    if measure == "accuracy":
        return 100 * (row.overall or 0.0)
    name, _, really = measure.partition(" ")
    alone = row.params_alone if name == "params" else row.macs_alone
    whole = row.params if name == "params" else row.macs
    return (whole if really or alone is None else alone) / (1e6 if name == "params" else 1e9)


def _over(runs: Sequence[Run], over: str, places: Sequence[float], title: str) -> list[str]:
    found = {name: [run.curve for run in mine] for name, mine in by_criterion(runs).items()}
    rows, means = [], areas(found, over)
    for criterion, curves in found.items():
        cells = []
        for place in places:
            values = [at(c, place, over) for c in curves]
            known = [100 * v for v in values if v is not None]
            cells.append(f"{np.mean(known):.1f}" if len(known) == len(values) else "")
        rows.append([criterion, *cells, f"{100 * means[criterion]:.1f}"])
    return table(title, ["criterion", *(f"{100 * p:.0f} %" for p in places), "area"], rows)


def _curves(runs: Sequence[Run], mode: str) -> bytes:
    from reproduction import pictures

    curves = {name: [run.curve for run in mine] for name, mine in by_criterion(runs).items()}
    gone = "filters masked in %" if mode == "paper" else "filters removed in %"
    return pictures.curves(
        [
            [
                pictures.Panel(f"{mode} mode", gone, "removed", curves),
                pictures.Panel(f"{mode} mode", "MACs really saved in %", "macs", curves),
            ]
        ]
    )


def _others(runs: Sequence[Run], mode: str, name: str, pages: Path) -> list[str]:
    """Figures 6 and 7, where there is something to draw."""
    lines: list[str] = []
    if len({run.criterion for run in runs}) > 1 and any(run.criterion == "lrp" for run in runs):

        def points() -> bytes:
            from reproduction import pictures

            return pictures.scatter(f"{mode} mode", runs, "overall")

        lines += figure(pages, f"fine-tune-{name}-{mode}-scatter", f"Figure 6, {mode} mode: LRP against others", points)
    if filters(runs[0].history[0]):

        def kept() -> bytes:
            from reproduction import pictures

            return pictures.layers(f"{mode} mode", runs)

        lines += figure(
            pages, f"fine-tune-{name}-{mode}-layers", f"Figure 7, {mode} mode: filters left per layer", kept
        )
    return lines
