"""The steps of a run one after the other: what each costs, how good it is, and what the network sees there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.relevance.explain import bound
from secateur.relevance.text import Shade, Text, shaded
from secateur.report.changes import COARSE, Names, coloured, name_of, shown
from secateur.report.curves import Metric
from secateur.report.document import Page
from secateur.results.history import Record, Row
from secateur.running.accuracy import between
from secateur.running.batches import counted, masks_in
from secateur.running.targets import ids_in
from secateur.structure.cost import human

_FRAMES = 12  # that are shown; a page with more is slow to load
_SAMPLES = 4
_SIDE = 112  # pixels of a heat map


@dataclass(frozen=True)
class Frame:
    """A step: its name, its numbers, and heat maps as PNG or words in colours. `chosen` is the model of the page."""

    name: str
    facts: Sequence[tuple[str, str]]
    maps: Sequence[bytes]
    words: Sequence[Sequence[Shade]]
    chosen: bool


@dataclass(frozen=True)
class Film:
    """Frames in order, and the samples that the heat maps are of, with their names."""

    frames: Sequence[Frame]
    pictures: Sequence[tuple[bytes, str]]
    coarse: bool
    skipped: int


def film(result: Record, metric: Metric, classes: Names, page: Page) -> Film | None:
    """The steps as frames. A single step needs none: the page shows it as before and after."""
    rows, count = list(result.history), 0 if page.answers is None else len(page.answers.targets)
    if len(rows) < 3:
        return None
    last = max(i for i, row in enumerate(rows) if row.held)
    chosen = _some(len(rows), last)
    pictures, maps, words, coarse = _drawn(result, [rows[i].step for i in chosen], classes, page)
    frames = []
    for place, i in enumerate(chosen):
        row = rows[i]
        name = "unpruned" if not i else f"step {row.step}{'' if row.held else ', taken back'}"
        frames.append(Frame(name, _facts(row, rows[0], metric, count), maps[place], words[place], i == last))
    return Film(frames, pictures, coarse, len(rows) - len(chosen))


def _some(count: int, last: int) -> list[int]:
    """Places of the frames: the first, the chosen one with its neighbours, the last, and others evenly between."""
    if count <= _FRAMES:
        return list(range(count))
    needed = {0, last, count - 1, max(last - 1, 0), min(last + 1, count - 1)}
    spare = _FRAMES - len(needed)
    return sorted(needed | {round((k + 1) * (count - 1) / (spare + 1)) for k in range(spare)})


def _facts(row: Row, first: Row, metric: Metric, count: int) -> list[tuple[str, str]]:
    left = f"{100 * row.macs / max(first.macs, 1):.1f} % left"
    found = [("Units removed", f"{100 * row.removed:.1f} %"), ("MACs", f"{human(row.macs)}, {left}"),
             ("Parameters", human(row.params))]  # fmt: skip
    if row.overall is not None:
        sides = f" ({between(row.overall, count)})" if metric.percent and count else ""
        found.insert(0, (metric.word.capitalize(), metric.text(row.overall) + sides))
    if row.latency is not None:
        found.append(("Latency", f"{1000 * row.latency:.3g} ms"))
    if row.drift is not None:
        found.append(("Drift of the heat maps", f"{row.drift:.3f}"))
    return found


def _drawn(
    result: Record, steps: Sequence[int], classes: Names, page: Page
) -> tuple[list[tuple[bytes, str]], list[list[bytes]], list[list[list[Shade]]], bool]:
    """The samples, and what the network sees in them at each step, where that was recorded."""
    empty: Any = [[] for _ in steps]
    if result.watched is None or not all(step in result.seen for step in steps):
        return [], empty, empty, False
    x, y = result.watched
    heats = [result.seen[step][:_SAMPLES].double() for step in steps]
    if isinstance(x, Tensor) and x.dim() == 4:
        names = ["" if y is None or y.dim() != 1 else name_of(int(c), classes) for c in (y if y is not None else x)]
        coarse, scaled = max(heats[0].shape[1:]) < COARSE, [_shares(heat) for heat in heats]
        limits = [max(bound(maps[i]) for maps in scaled) for i in range(len(scaled[0]))]
        maps = [[coloured(h.numpy(), limit, "seismic") for h, limit in zip(m, limits, strict=True)] for m in scaled]
        return list(zip(shown(x[:_SAMPLES], page), names, strict=False)), maps, empty, coarse
    ids = ids_in(x)
    if ids is None or heats[0].shape != ids[:_SAMPLES].shape:
        return [], empty, empty, False
    ids, masks = ids[:_SAMPLES].cpu(), [mask[:_SAMPLES].cpu() for mask in masks_in(x, decoder=False)]
    counts = counted(masks, ids.shape)
    counts = torch.ones_like(ids, dtype=torch.bool) if counts is None else counts
    words = [[shaded(w) for w in Text(ids, heat, counts, False).words(page.tokenizer)] for heat in heats]
    return [], empty, words, False


def _shares(heat: Tensor) -> Tensor:
    """Heat maps that are comparable over the steps, whatever relevance they started with, and small enough."""
    if max(heat.shape[1:]) > _SIDE:
        heat = F.adaptive_avg_pool2d(heat[:, None], (_SIDE, _SIDE))[:, 0]
    return heat / heat.abs().sum((1, 2), keepdim=True).clamp_min(torch.finfo(heat.dtype).tiny)
