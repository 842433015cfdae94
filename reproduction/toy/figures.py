"""Figures 2, 3 and 4, each for a light and a dark page."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

import secateur as sc
from reproduction.criteria import COLOURS, CRITERIA, DARK_COLOURS, MARKERS, NAMES
from reproduction.toy.blocks import Task, reference_scores
from reproduction.toy.nets import percent_right, trained
from reproduction.toy.recipe import REMOVED, SETS, Reading, Recipe
from reproduction.toy.store import source_digest
from reproduction.toy.tables import Index

THEMES = {
    "light": {"page": "#ffffff", "ink": "#1b1f24", "grid": "#d5d9de", **COLOURS},
    "dark": {"page": "#14171b", "ink": "#e6e9ed", "grid": "#3a4048", **DARK_COLOURS},
}

# Classes differ in colour and in shape, so that colour-blind readers can tell them apart.
_CLASSES = {"light": ["#0969da", "#d1242f", "#9a6700", "#1a7f37"], "dark": ["#58a6ff", "#ff7b72", "#e3b341", "#56d364"]}
_SHAPES = ["o", "s", "^", "D"]

# Reference points per class in Figure 2, and the bars of Figure 4.
_SHOWN_SIZE = 5
_BARS = (1, 5, 20, 100)
_RESOLUTION = 130


@dataclass(frozen=True)
class Picture:
    """A figure as PNG in both themes, with its caption and a text for readers who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str
    png: dict[str, bytes]


def _rendered(name: str, title: str, caption: str, alt: str, draw: Callable[[str], Figure]) -> Picture:
    return Picture(name, title, caption, alt, {theme: _png(theme, draw) for theme in THEMES})


def _png(theme: str, draw: Callable[[str], Figure]) -> bytes:
    with _style(theme):
        figure = draw(theme)
        FigureCanvasAgg(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150)
    # 256 colours are enough and a third of the size. No date or version inside: equal results give equal files.
    content = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(content, "png", optimize=True)
    return content.getvalue()


@contextmanager
def _style(theme: str) -> Iterator[None]:
    colours = THEMES[theme]
    ink, page = colours["ink"], colours["page"]
    settings: dict[Any, Any] = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), colours["grid"]),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **{"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.6},
        **{"font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 12},
    }
    with matplotlib.rc_context(settings):
        yield


def boundaries(reading: Reading, recipe: Recipe, cache: Path) -> Picture:
    """Figure 2: how the decision boundary changes, seed 0."""
    size = min(recipe.sizes, key=lambda n: abs(n - _SHOWN_SIZE))
    panels = {name: _panels(name, reading, recipe, size, cache) for name in SETS}

    def draw(theme: str) -> Figure:
        figure = Figure(figsize=(13, 6.9), layout="constrained")
        axes = figure.subplots(3, 6)
        for row, name in zip(axes, SETS, strict=True):
            _boundary_row(row, panels[name], theme, top=name == SETS[0], name=name)
        return figure

    found = ", ".join(
        f"{name}: " + ", ".join(f"{title} {right:.1f} %" for title, _, right in panels[name]["maps"]) for name in SETS
    )
    caption = (
        f"Decision boundaries before and after removing a third of all hidden units in one step, for the {size} "
        f"reference points per class of seed 0. Under each panel the accuracy on the training set."
    )
    alt = f"Three rows of six panels. Accuracy on the training set by panel: {found}."
    return _rendered(f"figure2-{reading.name}", "Figure 2", caption, alt, draw)


def _panels(name: str, reading: Reading, recipe: Recipe, size: int, cache: Path) -> dict[str, Any]:
    subject = trained(name, reading, recipe, cache)
    graph = sc.analyze(subject.net, torch.zeros(1, 2))
    training, chosen = recipe.training(name), recipe.reference(name, size, 0)
    low, high = training.x.min(0) - 0.15, training.x.max(0) + 0.15
    grid = np.stack(np.meshgrid(*(np.linspace(a, b, _RESOLUTION) for a, b in zip(low, high, strict=True))), -1)
    where = torch.from_numpy(grid.reshape(-1, 2)).float()
    x, y = training.tensors()
    nets: list[tuple[str, torch.nn.Module]] = [("unpruned", subject.net)]
    task = Task(name, reading, recipe, (0,), cache, source_digest())
    scores = reference_scores(task, subject, size, 0, graph)
    for criterion in CRITERIA:
        small = sc.apply(subject.net, sc.plan(graph, scores[criterion], remove=REMOVED))
        nets.append((NAMES[criterion], small))
    maps = []
    with torch.no_grad():
        for title, net in nets:
            right = percent_right(net, x, y)
            maps.append((title, net(where).argmax(1).reshape(_RESOLUTION, _RESOLUTION).numpy(), right))
    extent = (low[0], high[0], low[1], high[1])
    return {"training": training, "chosen": chosen, "maps": maps, "extent": extent}


def _boundary_row(row: Any, panel: dict[str, Any], theme: str, top: bool, name: str) -> None:
    colours, ink = _CLASSES[theme], THEMES[theme]["ink"]
    training, chosen = panel["training"], panel["chosen"]
    row[0].set_ylabel(name, fontsize=12)
    order = [0, None, 1, 2, 3, 4]
    for column, (axis, which) in enumerate(zip(row, order, strict=True)):
        axis.set(xticks=[], yticks=[], xlim=panel["extent"][:2], ylim=panel["extent"][2:])
        axis.grid(False)
        for spine in axis.spines.values():
            spine.set_visible(True)
        if which is None:
            points, size = chosen, 34
            axis.set_xlabel(f"{len(chosen) // len(set(chosen.y.tolist()))} per class", fontsize=10)
        else:
            _, decided, right = panel["maps"][which]
            axis.imshow(
                decided, origin="lower", extent=panel["extent"], cmap=ListedColormap(colours), alpha=0.28,
                vmin=-0.5, vmax=len(colours) - 0.5, aspect="auto", interpolation="nearest",
            )  # fmt: skip
            points, size = training, 3
            axis.set_xlabel(f"{right:.1f} %", fontsize=10)
        for c in range(int(points.y.max()) + 1):
            mine = points.x[points.y == c]
            edge = {"edgecolors": ink, "linewidths": 0.7} if which is None else {"linewidths": 0}
            axis.scatter(mine[:, 0], mine[:, 1], s=size, color=colours[c], marker=_SHAPES[c], **edge)
        if top:
            axis.set_title(["unpruned", "reference points", "weight", "Taylor", "gradient", "LRP"][column], fontsize=12)


def influence(index: Index, reading: Reading, recipe: Recipe) -> Picture:
    """Figure 3: accuracy over the number of reference points, training set and noisy test sets."""

    def draw(theme: str) -> Figure:
        colours = THEMES[theme]
        figure = Figure(figsize=(12, 3 * len(recipe.views)), layout="constrained")
        axes = figure.subplots(len(recipe.views), len(SETS), squeeze=False, sharex=True)
        for i, view in enumerate(recipe.views):
            for j, name in enumerate(SETS):
                axis = axes[i, j]
                for criterion in CRITERIA:
                    rows = [index.accuracy(reading.name, name, view, n, criterion) for n in recipe.sizes]
                    mean, std = (np.array([getattr(row, key) for row in rows]) for key in ("mean", "std"))
                    colour = colours[criterion]
                    style = {"marker": MARKERS[criterion], "markersize": 4.5, "label": NAMES[criterion]}
                    axis.plot(recipe.sizes, mean, color=colour, **style)
                    top = np.minimum(mean + std, 100)
                    axis.fill_between(recipe.sizes, mean - std, top, color=colour, alpha=0.14, linewidth=0)
                    logged = [(row.n, row.logs) for row in rows if row.logs is not None]
                    axis.plot(*zip(*logged, strict=True), color=colour, linestyle=":", linewidth=1.4)
                before = index.unpruned(reading.name, name, view).mean
                axis.axhline(before, color=colours["ink"], linestyle="--", linewidth=1, label="unpruned")
                axis.set_xscale("log")
                axis.set_xticks(recipe.sizes, [str(n) for n in recipe.sizes])
                axis.minorticks_off()
                if i == 0:
                    axis.set_title(name, fontsize=12)
                if i == len(recipe.views) - 1:
                    axis.set_xlabel("reference points per class")
                if j == 0:
                    axis.set_ylabel(("training set" if view == "train" else f"test set, σ = {view}") + "\naccuracy, %")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        dotted = Line2D([], [], color=colours["ink"], linestyle=":", label="authors' logs")
        figure.legend([*handles, dotted], [*labels, "authors' logs"], loc="outside upper center", ncols=6)
        return figure

    caption = (
        f"Accuracy after pruning over the number of reference points per class: mean and standard deviation (shaded) "
        f"over {recipe.seeds} seeds. Dashed: unpruned. Dotted: the means in the authors' logs."
    )
    return _rendered(f"figure3-{reading.name}", "Figure 3", caption, _influence_alt(index, reading, recipe), draw)


def _influence_alt(index: Index, reading: Reading, recipe: Recipe) -> str:
    parts, sizes = [], (recipe.sizes[0], recipe.sizes[-1])
    for name in SETS:
        ends = []
        for criterion in CRITERIA:
            first, last = (index.accuracy(reading.name, name, "train", n, criterion).mean for n in sizes)
            ends.append(f"{NAMES[criterion]} {first:.1f} to {last:.1f}")
        parts.append(f"{name}: {', '.join(ends)}")
    return f"Lines of accuracy. Training set, from n={sizes[0]} to n={sizes[1]}: {'; '.join(parts)}."


def bars(index: Index, reading: Reading, recipe: Recipe) -> Picture:
    """Figure 4: the numbers of Supplementary Table 1 as bars, the paper's beside them."""
    sizes = [n for n in _BARS if n in recipe.sizes]

    def draw(theme: str) -> Figure:
        colours = THEMES[theme]
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        axes = figure.subplots(1, len(SETS), sharey=True)
        for axis, name in zip(axes, SETS, strict=True):
            for c, criterion in enumerate(CRITERIA):
                rows = [index.accuracy(reading.name, name, "train", n, criterion) for n in sizes]
                place = np.arange(len(sizes)) + 0.2 * (c - 1.5)
                spread = [[row.std for row in rows], [min(row.std, 100 - row.mean) for row in rows]]
                axis.bar(
                    place, [row.mean for row in rows], 0.18, yerr=spread, color=colours[criterion], alpha=0.85,
                    label=NAMES[criterion], error_kw={"ecolor": colours["ink"], "elinewidth": 1, "capsize": 2},
                )  # fmt: skip
                printed = [(p, row.paper) for p, row in zip(place, rows, strict=True) if row.paper is not None]
                if printed:
                    fill = {"color": colours["page"], "edgecolors": colours["ink"]}
                    axis.scatter(*zip(*printed, strict=True), marker="D", s=22, zorder=4, **fill)
            before = index.unpruned(reading.name, name, "train").mean
            axis.axhline(before, color=colours["ink"], linestyle="--", linewidth=1)
            axis.set_xticks(range(len(sizes)), [f"n = {n}" for n in sizes])
            axis.set_title(name, fontsize=12)
            axis.set_ylim(0, 104)
            axis.grid(False, axis="x")
        axes[0].set_ylabel("accuracy on the training set, %")
        handles, labels = axes[0].get_legend_handles_labels()
        mark = Line2D([], [], linestyle="", marker="D", markersize=5)
        mark.set(markerfacecolor=colours["page"], markeredgecolor=colours["ink"])
        figure.legend([*handles, mark], [*labels, "the paper"], loc="outside upper center", ncols=5)
        return figure

    caption = (
        f"Accuracy on the training set after removing a third of all hidden units: mean over {recipe.seeds} seeds, "
        f"lines for the standard deviation, diamonds for the paper's Supplementary Table 1. Dashed: unpruned."
    )
    parts = []
    for name in SETS:
        for n in sizes:
            rows = [index.accuracy(reading.name, name, "train", n, criterion) for criterion in CRITERIA]
            parts.append(f"{name}, n={n}: " + ", ".join(f"{NAMES[row.criterion]} {row.mean:.1f}" for row in rows))
    alt = f"Bars of accuracy in percent. {'; '.join(parts)}."
    return _rendered(f"figure4-{reading.name}", "Figure 4", caption, alt, draw)
