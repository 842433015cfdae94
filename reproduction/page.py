"""What the pages of the image experiments share: sections, tables and figures in Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reproduction.campaign import Settings
from reproduction.runs import Folder, Run, areas, at
from secateur.atomic import write
from secateur.errors import SecateurError
from secateur.results.comparison import Curve

Curves = Mapping[str, Sequence[Curve]]

_CAPTIONS = {
    "paper": "every filter is ranked and masked on its own. Nothing is coupled and nothing is removed, as in the "
    "paper's experiments with ResNets. Costs are given twice: as the paper counts them (a masked filter saves only "
    "its own output) and as they would really be (an input channel costs nothing once all filters that feed it are "
    "masked).",
    "physical": "filters that must leave together are ranked together and removed. Costs are real. VGG and AlexNet "
    "have no coupled filters, so for them this is what the paper does.",
}


def write_page(
    out: Path, file: Path, title: str, text: str, section: Callable[[Folder], list[str]], remarks: str = ""
) -> Path:
    """Make a page from the folders in `out` that have finished runs. `section` makes the part of one folder."""
    inside = sorted(p for p in out.iterdir() if p.is_dir()) if out.is_dir() else []
    found = [folder for folder in map(Folder, inside) if folder.settings() and folder.runs()]
    if not found:
        raise SecateurError(f"{out} has no finished runs, so there is nothing to show.")
    lines = [f"# {title}", "", text, "", *(f"- *{mode}*: {caption}" for mode, caption in _CAPTIONS.items()), ""]
    lines += [remarks, ""] if remarks else []
    made = [section(folder) for folder in found]
    lines += with_kept(file.read_text("utf-8") if file.exists() else "", made)
    return write(file, ("\n".join(lines).rstrip() + "\n").encode())


def with_kept(page: str, made: Sequence[Sequence[str]]) -> list[str]:
    """The lines of all sections: those of the page as it is, replaced where there is a new one, then the others.

    The runs of a section need not be at hand, and it must not be lost for that.
    """
    kept = [["## " + part.split("\n")[0], *part.rstrip().split("\n")[1:], ""] for part in page.split("\n## ")[1:]]
    fresh = {lines[0]: list(lines) for lines in made}
    sections = [fresh.pop(lines[0], lines) for lines in kept]
    return [line for lines in (*sections, *fresh.values()) for line in lines]


def heading(folder: Folder, command: str, usual: Settings) -> list[str]:
    """The title of a section, the command and the machine that ran it. Settings that equal `usual` are left out."""
    settings, runs = folder.settings(), folder.runs()
    model, data = folder.path.name.split("-", 1)
    text = f"python -m reproduction {command} --model {model} --data {settings['data']} --images DIR --weights FILE"
    for key, value in settings.items():
        if key in ("model", "data") or getattr(usual, key, None) == value:
            continue
        option = f"--{key.replace('_', '-')}"
        text += f" {option}" if value is True else f" {option} {value}"
    first, last = (choose(run.draw for run in runs) for choose in (min, max))
    drawn = f"{first}:{last + 1}" if first else str(last + 1)
    text += f" --draws {drawn} --mode {','.join(dict.fromkeys(run.mode for run in runs))}"
    lines = [f"## {model} on {data}{later(runs, ', draw ')}", "", f"    {text}", ""]
    machine = folder.path / "machine.json"
    if machine.exists():
        known = json.loads(machine.read_text("utf-8"))
        lines += [f"Computed on {known['device']} with torch {known['torch']}.", ""]
    return lines


def later(runs: Sequence[Run], before: str) -> str:
    """What tells runs without the first draw from those with it: `before` and the number of the draw.

    The files of the first need not be at hand. The others then have a section and figures of their own on the page.
    """
    first = min(run.draw for run in runs)
    return f"{before}{first}" if first else ""


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with its title."""
    made = [f"### {title}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    made += ["| " + " | ".join(row) + " |" for row in rows]
    return [*made, ""]


def accuracies(
    title: str, curves: Curves, over: str, places: Sequence[float], cell: Callable[[list[float]], str]
) -> list[str]:
    """A table of accuracies in % by criterion and place. A cell that some run did not reach is empty."""
    rows, means = [], areas(curves, over)
    for criterion, found in curves.items():
        cells = []
        for place in places:
            values = [at(curve, place, over) for curve in found]
            known = [100 * value for value in values if value is not None]
            cells.append(cell(known) if len(known) == len(values) else "")
        rows.append([criterion, *cells, f"{100 * means[criterion]:.1f}"])
    return table(title, ["criterion", *(f"{100 * p:.0f} %" for p in places), "area"], rows)


def figure(pages: Path, name: str, caption: str, draw: Callable[[], bytes]) -> list[str]:
    """Draw a figure into the folder and refer to it. Without matplotlib there are tables only."""
    try:
        content = draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(f"{name}.png is left out: figures need matplotlib (pip install 'secateur[report]')", file=sys.stderr)
        return []
    write(pages / f"{name}.png", content)
    return [f"![{caption}]({name}.png)", ""]
