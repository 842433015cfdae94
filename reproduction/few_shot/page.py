"""The page of Scenario 2: curves and tables over filters and over MACs, beside what the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import page, pictures
from reproduction.few_shot.campaign import Settings, grid
from reproduction.image_reference import margin
from reproduction.page import Curves, accuracies, figure, heading, later, table
from reproduction.runs import Folder, Run, at, by_criterion, by_mode, curves
from secateur.results.comparison import Curve

_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
# The shares at which LRP's lead is computed: wherever a step may end.
_FINE = tuple(round(0.05 * k, 2) for k in range(1, 20))


def write_page(out: Path, pages: Path) -> Path:
    """Make `few-shot.md` and its figures from the runs in a folder."""
    text = (
        "A network is reduced to the outputs of a small task. Then, in each step, the units are re-scored on a few "
        "reference images and a share of the filters is removed. Nothing is trained. All criteria see the same draws. "
        "Tables give the mean and standard deviation over draws in %. *Area* is the mean of the curve over the range "
        "that all criteria cover; the paper suggests it as a measure of how hard a data set is."
    )
    section = partial(_section, pages)
    return page.write_page(out, pages / "few-shot.md", "Few images, no fine-tuning (Scenario 2)", text, section)


def _section(pages: Path, folder: Folder) -> list[str]:
    settings, runs = folder.settings(), folder.runs()
    chance = 100 / (settings["classes"] if settings["data"] == "ilsvrc" else 2)
    model, data = folder.path.name.split("-", 1)
    draws = len({run.draw for run in runs})
    lines = [
        *heading(folder, "few-shot", Settings("", "", "")),
        f"{draws} draws of {_task(settings)}, {settings['per_class']} reference images of each. "
        f"Chance is {chance:.0f} %.",
        "",
    ]
    if settings["model"] in ("vgg16", "alexnet"):
        lines += ["If the weights have no classifier, one is trained on the training images of the data set.", ""]
    modes, name = by_mode(runs), f"few-shot-{folder.path.name}{later(runs, '-')}"
    real = {mode: curves(mine) for mode, mine in modes.items()}
    lines += figure(
        pages, name, "Accuracy over filters and over MACs",
        lambda: pictures.curves([pictures.panels(mode, found) for mode, found in real.items()]),
    )  # fmt: skip
    for mode, found in real.items():
        draws = min(map(len, found.values()))
        where = f"{mode} mode: accuracy at a share of"
        lines += accuracies(f"{where} filters gone ({draws} draws)", found, "removed", _RATES, _cell)
        lines += accuracies(f"{where} MACs really left", found, "macs", _SHARES, _cell)
        if mode == "paper":
            counted = {name: [run.paper_curve for run in mine] for name, mine in by_criterion(modes[mode]).items()}
            lines += accuracies(f"{where} MACs left as the paper counts them", counted, "macs", _SHARES, _cell)
        lines += _leads(found, mode, model if data == "ilsvrc" else "")
    lines += _grids(runs, folder, pages, name)
    return lines


def _task(settings: Mapping[str, Any]) -> str:
    if settings["data"] == "ilsvrc":
        return f"{settings['classes']} classes of ImageNet"
    how = settings.get("merge", "sum")
    if settings["data"] == "catsdogs":
        return f"cats and dogs, from ImageNet's outputs (the {how} of the probabilities of 281-285 and of 151-268)"
    return f"{settings['data']}, from ImageNet's outputs (the {how} of each group's probabilities)"


def _cell(values: list[float]) -> str:
    return f"{np.mean(values):.0f} ± {np.std(values):.0f}"


def _leads(curves: Curves, mode: str, model: str) -> list[str]:
    """By how much LRP leads at its best rate, over filters and over MACs."""
    if "lrp" not in curves or len(curves) < 2:
        return []
    rows = []
    for other in curves:
        if other == "lrp":
            continue
        best, where = lead(curves["lrp"], curves[other], "removed")
        cheap, left = lead(curves["lrp"], curves[other], "macs")
        paper = margin(model, other)
        rows.append(
            [
                other, f"{best:+.1f} at {100 * where:.0f} % gone", "" if paper is None else f"{paper:+.1f}",
                f"{cheap:+.1f} at {100 * left:.0f} % left",
            ]
        )  # fmt: skip
    heads = ["LRP over", "at equal filters, ours", "the paper's", "at equal MACs really left, ours"]
    return table(f"{mode} mode: LRP's largest lead in points", heads, rows)


def lead(lrp: Sequence[Curve], other: Sequence[Curve], over: str) -> tuple[float, float]:
    """The largest difference of the two means in points, and where it is."""
    found = []
    for place in _FINE:
        pair = [[at(c, place, over) for c in curves] for curves in (lrp, other)]
        if None not in pair[0] and None not in pair[1]:
            found.append((100 * (float(np.mean(pair[0])) - float(np.mean(pair[1]))), place))  # type: ignore[arg-type]
    return max(found) if found else (0.0, 0.0)


def _grids(runs: Sequence[Run], folder: Folder, pages: Path, name: str) -> list[str]:
    step = folder.settings()["step"]
    found: dict[str, dict[tuple[float, float], float]] = {}
    for criterion, chosen in by_criterion(runs).items():
        mine = [grid(run, step) for run in chosen]
        if mine and all(mine):
            shared = set.intersection(*(set(cells) for cells in mine))
            found[criterion] = {key: float(np.mean([cells[key] for cells in mine])) for key in sorted(shared)}
    if not found:
        return []
    caption = "Accuracy by share of filters (rows) and of fully connected neurons (columns) gone, physical mode"
    title = "physical mode: filters and fully connected neurons gone"
    return figure(pages, f"{name}-grid", caption, lambda: pictures.heat(title, found))
