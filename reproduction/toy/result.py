"""What the toy experiment measured, and the records of it that are written as JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import secateur
from reproduction.criteria import CRITERIA
from reproduction.toy import tables
from reproduction.toy.campaign import Outcome
from reproduction.toy.claims import Claim
from reproduction.toy.ranking import Spread
from reproduction.toy.recipe import Reading, Recipe
from reproduction.toy.store import source_digest
from reproduction.toy.tables import Row

FORMAT = "secateur-toy-1"


@dataclass(frozen=True)
class Reproduction:
    """All results, and the folder that they are written to."""

    recipe: Recipe
    readings: list[Reading]
    outcomes: list[Outcome]
    rows: list[Row]
    claims: list[Claim]
    seconds: float
    workers: int
    folder: Path

    @property
    def page(self) -> Path:
        """The page to look at first."""
        return self.folder / "report.html"


def as_json(result: Reproduction) -> dict[str, Any]:
    """All numbers. Times and machines are not among them: equal runs give equal files."""
    return {
        "format": FORMAT,
        "recipe": result.recipe.as_dict(),
        "nets": [
            {
                "net": outcome.reading.name,
                "set": outcome.name,
                "accuracy": round(outcome.trained_accuracy, 5),
                "removed": {key: _removed(outcome, i) for i, key in enumerate(map(str, result.recipe.sizes))},
            }
            for outcome in result.outcomes
        ],
        "lrp_variants": variants(result),
        "claims": [asdict(claim) | {"holds": claim.holds} for claim in result.claims],
        "columns": list(Row.__dataclass_fields__),
        "rows": [[tables.short(value) for value in vars(row).values()] for row in result.rows],
    }


def variants(result: Reproduction) -> list[dict[str, Any]]:
    """Accuracy on the training set by every way to compute LRP."""
    made = []
    for outcome in result.outcomes:
        for i, n in enumerate(result.recipe.variant_sizes):
            for v, variant in enumerate(outcome.reading.variants):
                spread = Spread.of(outcome.arrays["variants"][i, :, v].astype(np.float64))
                made.append(
                    {
                        "net": outcome.reading.name,
                        "set": outcome.name,
                        "n": n,
                        "variant": variant.text,
                        "main": variant == outcome.reading.variant,
                        "mean": round(spread.mean, 4),
                        "std": round(spread.std, 4),
                    }
                )
    return made


def _removed(outcome: Outcome, size: int) -> dict[str, list[float]]:
    """Mean number of units that each hidden layer lost, by criterion."""
    means = outcome.arrays["removed"][size].mean(0)
    return {name: [round(float(v), 1) for v in means[c]] for c, name in enumerate(CRITERIA)}


def run_record(result: Reproduction) -> dict[str, Any]:
    """Times, versions and the machine. These may differ between two runs with the same numbers."""
    return {
        "secateur": secateur.__version__,
        "code": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processes": result.workers,
        "seconds_since_this_start": round(result.seconds, 1),
        "largest_gap_to_pruned_networks": max(float(outcome.arrays["gap"].max()) for outcome in result.outcomes),
        "training_seconds": {
            f"{outcome.name}, {outcome.reading.name}": round(outcome.training_seconds, 1) for outcome in result.outcomes
        },
    }
