"""The cells of the repair study: one combination each, and what was measured of it, line by line in files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CRITERIA = ("lrp", "taylor", "gradient", "weight", "activation", "random")
ALLOCATIONS = ("global", "layer", "cost", "time")  # "time" was an estimate of older versions
REPAIRS = ("mean", "norm", "ridge")
RESCORINGS = ("once", "each step")


@dataclass(frozen=True)
class Cell:
    """One combination. `copies` is how many altered copies of each image the scoring sees.

    The target is a share of the MACs that stay, or of the units that leave.
    """

    classes: int
    draw: int
    criterion: str
    allocation: str
    rescoring: str
    macs: float | None
    copies: int = 0
    variant: str = "default"
    remove: float | None = None

    @property
    def target(self) -> str:
        """In words."""
        if self.macs is not None:
            return f"At {100 * self.macs:.0f} % of the MACs"
        return f"With {100 * (self.remove or 0):.0f} % of the units removed"


def results(folder: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Everything measured so far."""
    merged: dict[Cell, dict[str, Any]] = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            about, row = json.loads(line)
            merged[Cell(**about)].update(row)
    yield from merged.items()
