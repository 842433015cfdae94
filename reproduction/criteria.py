"""The paper's criteria: their order in its tables, their names in text, and their colours and markers in figures."""

from __future__ import annotations

CRITERIA = ("weight", "taylor", "gradient", "lrp")
NAMES = {"weight": "weight", "taylor": "Taylor", "gradient": "gradient", "lrp": "LRP"}
MARKERS = {"weight": "s", "taylor": "^", "gradient": "v", "lrp": "o"}

#: On a light page; Taylor, gradient and LRP have lighter colours on a dark one.
COLOURS = {"weight": "#1b1f24", "taylor": "#1f6feb", "gradient": "#1a7f37", "lrp": "#cf222e"}
DARK_COLOURS = {"weight": "#e6e9ed", "taylor": "#6cb0ff", "gradient": "#56d364", "lrp": "#ff7b72"}
