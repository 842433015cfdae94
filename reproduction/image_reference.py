"""The paper's numbers for its image experiments: Tables 3 and S3, and LRP's leads in Scenario 2."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

#: The unit of each measure in these tables.
UNITS = {"loss": "×10⁻²", "accuracy": "%", "params": "M", "flops": "GMAC"}


@cache
def numbers() -> dict[str, Any]:
    """The whole file."""
    text = resources.files("reproduction").joinpath("image_reference.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def rate(model: str, data: str) -> float | None:
    """The share of filters gone at which the paper's table compares criteria.

    >>> rate("vgg16", "scene15")
    0.55
    """
    found = [key for key in numbers()["tables"].get(model, {}) if key.partition("@")[0] == data]
    return int(found[0].partition("@")[2]) / 100 if found else None


def printed(model: str, data: str, measure: str, criterion: str) -> float | None:
    """A number of Table 3 or S3; `criterion` may be `unpruned`. MACs are in G for every network.

    >>> printed("resnet50", "scene15", "accuracy", "lrp")
    85.38
    """
    for key, table in numbers()["tables"].get(model, {}).items():
        if key.partition("@")[0] == data:
            value: float | None = table.get(measure, {}).get(criterion)
            return value / 1000 if value is not None and model == "alexnet" and measure == "flops" else value
    return None


def margin(model: str, other: str) -> float | None:
    """By how many points LRP leads over another criterion at its best rate (Scenario 2, three classes).

    >>> margin("resnet50", "taylor")
    51.8
    """
    short = {"taylor": "taylor", "gradient": "grad", "weight": "weight"}.get(other, other)
    value: float | None = numbers()["scenario2"].get(f"vs_{short}_l2", {}).get(model)
    return value
