"""The page of Scenario 2: curves and tables over filters and over MACs, beside what the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.few_shot.campaign import Settings, grid
from reproduction.image_reference import margin
from reproduction.page import CAPTIONS, figure, folders, heading, table, told
from reproduction.runs import Folder, Run, areas, at, by_criterion
from secateur.errors import SecateurError
from secateur.results.comparison import Curve

_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
# Where leads are looked for: everywhere that a step may end.
_FINE = tuple(round(0.05 * k, 2) for k in range(1, 20))

Curves = Mapping[str, Sequence[Curve]]


def write_page(out: Path, pages: Path) -> Path:
    """Make `few-shot.md` and its figures from the runs in a folder."""
    found = folders(out)
    if not found:
        raise SecateurError(f"{out} has no finished runs to make a page of.")
    lines = [
        "# Few images, no fine-tuning (Scenario 2)",
        "",
        "A network is cut down to the outputs of a small task. Then a share of its filters leaves per step, scored "
        "anew each time on a few reference images; nothing is trained. All criteria see the same draws. Tables give "
        "the mean and standard deviation over draws in %; *area* is the mean of the curve over "
        "the range that all criteria cover, which the paper suggests as a measure of how hard a data set is.",
        "",
        *(f"- *{mode}*: {caption}" for mode, caption in CAPTIONS.items()),
        "",
    ]
    for folder in found:
        lines += _section(folder, pages)
    return told(pages / "few-shot.md", lines)


def _section(folder: Folder, pages: Path) -> list[str]:
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
        lines += ["Weights that have no classifier get one that is trained on the data set's own training images.", ""]
    lines += figure(pages, f"few-shot-{folder.path.name}", "Accuracy over filters and over MACs", lambda: _curves(runs))
    for mode in dict.fromkeys(run.mode for run in runs):
        mine = [run for run in runs if run.mode == mode]
        real = _by_criterion(mine, "curve")
        draws = min(map(len, real.values()))
        lines += _over(real, "removed", _RATES, f"{mode} mode: accuracy at a share of filters gone ({draws} draws)")
        lines += _over(real, "macs", _SHARES, f"{mode} mode: accuracy at a share of MACs really left")
        if mode == "paper":
            counted = _by_criterion(mine, "paper_curve")
            lines += _over(
                counted, "macs", _SHARES, "paper mode: accuracy at a share of MACs left as the paper counts them"
            )
        lines += _leads(real, mode, model if data == "ilsvrc" else "")
    lines += _grids(runs, folder, pages)
    return lines


def _task(settings: Mapping[str, Any]) -> str:
    if settings["data"] == "ilsvrc":
        return f"{settings['classes']} classes of ImageNet"
    how = settings.get("merge", "sum")
    if settings["data"] == "catsdogs":
        return f"cats and dogs, from ImageNet's outputs (the {how} of the probabilities of 281-285 and of 151-268)"
    return f"{settings['data']}, from ImageNet's outputs (the {how} of each group's probabilities)"


def _by_criterion(runs: Sequence[Run], which: str) -> dict[str, list[Curve]]:
    return {name: [getattr(run, which) for run in found] for name, found in by_criterion(runs).items()}


def _over(curves: Curves, over: str, places: Sequence[float], title: str) -> list[str]:
    rows, means = [], areas(curves, over)
    for criterion, found in curves.items():
        cells = [_cell([at(c, p, over) for c in found]) for p in places]
        rows.append([criterion, *cells, f"{100 * means[criterion]:.1f}"])
    return table(title, ["criterion", *(f"{100 * p:.0f} %" for p in places), "area"], rows)


def _cell(values: Sequence[float | None]) -> str:
    known = [100 * v for v in values if v is not None]
    return f"{np.mean(known):.0f} ± {np.std(known):.0f}" if known and len(known) == len(values) else ""


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


def _curves(runs: Sequence[Run]) -> bytes:
    from reproduction import pictures

    rows = []
    for mode in dict.fromkeys(run.mode for run in runs):
        curves = _by_criterion([run for run in runs if run.mode == mode], "curve")
        gone = "filters masked in %" if mode == "paper" else "filters removed in %"
        rows.append(
            [
                pictures.Panel(f"{mode} mode", gone, "removed", curves),
                pictures.Panel(f"{mode} mode", "MACs really saved in %", "macs", curves),
            ]
        )
    return pictures.curves(rows)


def _grids(runs: Sequence[Run], folder: Folder, pages: Path) -> list[str]:
    step = folder.settings()["step"]
    found: dict[str, dict[tuple[float, float], float]] = {}
    for criterion, chosen in by_criterion(runs).items():
        mine = [grid(run, step) for run in chosen]
        if mine and all(mine):
            shared = set.intersection(*(set(cells) for cells in mine))
            found[criterion] = {key: float(np.mean([cells[key] for cells in mine])) for key in sorted(shared)}
    if not found:
        return []

    def draw() -> bytes:
        from reproduction import pictures

        return pictures.heat("physical mode: filters and fully connected neurons gone", found)

    caption = "Accuracy by share of filters (rows) and of fully connected neurons (columns) gone, physical mode"
    return figure(pages, f"few-shot-{folder.path.name}-grid", caption, draw)
