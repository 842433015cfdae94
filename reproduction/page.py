"""What the pages of the image experiments share: sections, tables and figures in Markdown."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from reproduction.runs import Folder
from secateur.report.document import write

CAPTIONS = {
    "paper": "every filter is ranked and masked on its own, nothing is coupled and nothing leaves, as the paper does "
    "with ResNets. Costs are given as the paper counts them (only the masked filter's own output is discounted) and as "
    "they would really be (an input channel costs nothing once all filters that feed it are masked).",
    "physical": "filters that must leave together are ranked together and removed; costs are real. For VGG and "
    "AlexNet, which couple nothing, this is the paper's own way.",
}


def folders(out: Path) -> list[Folder]:
    """The folders of one network and data set each that have finished runs."""
    inside = sorted(p for p in out.iterdir() if p.is_dir()) if out.is_dir() else []
    found = [Folder(p) for p in inside]
    return [folder for folder in found if folder.settings() and folder.runs()]


def note_machine(folder: Path, device: str) -> None:
    """Remember what computed the runs of a folder."""
    name = platform.machine()
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    found = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    write(folder / "machine.json", json.dumps(found, indent=1).encode())


def heading(folder: Folder, command: str, usual: Any) -> list[str]:
    """The title of a section, the command that ran it, and on what. `usual` are the settings that need not be said."""
    settings, runs = folder.settings(), folder.runs()
    model, data = folder.path.name.split("-", 1)
    text = f"secateur reproduce {command} --model {model} --data {settings['data']} --images DIR --weights FILE"
    for key, value in settings.items():
        if key in ("model", "data") or getattr(usual, key, None) == value:
            continue
        option = f"--{key.replace('_', '-')}"
        text += f" {option}" if value is True else f" {option} {value}"
    text += f" --draws {1 + max(run.draw for run in runs)} --mode {','.join(dict.fromkeys(run.mode for run in runs))}"
    lines = [f"## {model} on {data}", "", f"    {text}", ""]
    machine = folder.path / "machine.json"
    if machine.exists():
        known = json.loads(machine.read_text("utf-8"))
        lines += [f"Computed on {known['device']} with torch {known['torch']}.", ""]
    return lines


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with its title."""
    made = [f"### {title}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    made += ["| " + " | ".join(row) + " |" for row in rows]
    return [*made, ""]


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


def told(path: Path, lines: Sequence[str]) -> Path:
    """Write the page."""
    return write(path, ("\n".join(lines).rstrip() + "\n").encode())
