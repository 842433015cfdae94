"""Scenario 2: narrow a network to a task, then remove 5 % at a time, judged by ten images per class. No training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.few_shot.draws import Source
from reproduction.networks import Features, is_split, kept, network, parts
from reproduction.page import note_machine
from reproduction.preparation import prepare
from reproduction.runs import Folder, Run, noted, spread
from reproduction.training import Images, Schedule
from reproduction.uncoupled import prune_uncoupled
from secateur.analysis.analyze import analyze
from secateur.analysis.specialize import Merge, specialize
from secateur.data.views import View
from secateur.errors import SecateurError
from secateur.loop.prune import prune, seeded
from secateur.results.history import History
from secateur.structure.graph import Graph

Report = Callable[[str], None]
_GRID = "fc "


@dataclass(frozen=True)
class Settings:
    """What to do. The defaults are the paper's.

    `grid` is for networks with fully connected layers: how many shares of their neurons are removed, by `step`s of
    equal size, at every share of filters; 0 leaves them alone.
    """

    model: str
    data: str
    images: str
    weights: str | None = None
    early_strides: bool = False
    classes: int = 3
    per_class: int = 10
    step: float = 0.05
    steps: int = 18
    grid: int = 0
    prepare_epochs: int = 200
    size: int = 224
    merge: Merge = "sum"

    @property
    def view(self) -> View:
        """Both sides scaled to one size, as the paper tests."""
        return View(self.size, "squash")

    @property
    def name(self) -> str:
        """For folders and headings."""
        model = self.model.rpartition(":")[2].partition("?")[0]
        return f"{model}-{self.data.replace('+', '-')}" + (f"-{self.merge}" if self.merge != "sum" else "")

    def recorded(self) -> dict[str, object]:
        """What identifies a run: not where its files lie."""
        return {k: v for k, v in asdict(self).items() if k not in ("images", "weights")}


@dataclass(frozen=True)
class Task:
    """One run. It is sent to another process."""

    settings: Settings
    folder: Path
    draw: int
    mode: str
    criterion: str
    device: str
    batch_size: int


@dataclass(frozen=True)
class Scene:
    """A network narrowed to the task of a draw, its reference samples and its test."""

    model: nn.Module
    graph: Graph
    reference: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outputs: dict[str, list[int]]


def few_shot(
    settings: Settings,
    out: Path,
    criteria: tuple[str, ...],
    modes: tuple[str, ...],
    draws: int = 20,
    device: str = "cpu",
    batch_size: int = 50,
    jobs: int = 1,
    report: Report = lambda text: None,
) -> Folder:
    """Do every run that is not done, and return the folder they are in."""
    folder = Folder(out / settings.name)
    folder.claim(settings.recorded())
    note_machine(folder.path, device)
    tasks = [
        Task(settings, folder.path, draw, mode, criterion, device, batch_size)
        for draw in range(draws)
        for mode in modes
        for criterion in criteria
        if not folder.place(draw, mode, criterion).exists()
    ]
    if tasks and jobs > 1:
        whole(settings, folder.path, device)  # so that no two processes train the same classifier
        whole.cache_clear()
    spread(run, tasks, jobs, report)
    return folder


@lru_cache(maxsize=1)
def whole(settings: Settings, folder: Path, device: str) -> tuple[nn.Module, bool, Source]:
    """The network before any draw, whether its outputs are those of the data set, and the images.

    Weights without a classifier get one that is trained on the data set's own training images.
    """
    source = Source.read(settings.data, Path(settings.images))
    with seeded(0, 0, salt=4):  # what the weights do not fill is drawn
        model, complete = network(settings.model, settings.weights, settings.early_strides)
    if complete or settings.weights is None:
        return model.to(device).eval(), False, source
    if len(source.found) != 1:
        raise SecateurError(f"{settings.weights} has no classifier, and {settings.data} cannot train one.")
    (found,) = source.found
    view = settings.view
    images = {
        part: Images(samples.pixels(view, train, device), torch.tensor(samples.labels, device=device), view)
        for part, samples, train in (("train", found.train, True), ("test", found.test, False))
    }
    file = folder / "prepared" / "00.safetensors"
    schedule = Schedule(settings.prepare_epochs)
    known = {key: settings.recorded()[key] for key in ("model", "data", "size")}
    ready = prepare(model, len(found.classes), images["train"], images["test"], schedule, file, known)
    return ready.model, True, source


@lru_cache(maxsize=1)
def scene(settings: Settings, folder: Path, number: int, device: str) -> Scene:
    """Everything that the runs of one draw share."""
    model, own, source = whole(settings, folder, device)
    view = settings.view
    example = torch.zeros(1, 3, view.size, view.size, device=device)
    with torch.no_grad():
        count = model(example).shape[1]
    drawn = source.draw(number, settings.classes, settings.per_class, count, own)
    pairs = []
    for samples in (drawn.reference, drawn.test):
        pixels = samples.pixels(view, False, device)
        pairs.append((view.evaluation(pixels), torch.tensor(samples.labels, device=device)))
    outputs = {name: list(members) for name, members in drawn.outputs.items()}
    wanted: Any = outputs if drawn.merged else [members[0] for members in outputs.values()]
    narrow = specialize(model, wanted, pairs[0][0][:1], merge=settings.merge)
    return Scene(narrow, analyze(narrow, pairs[0][0][:1]), pairs[0], pairs[1], outputs)


def run(task: Task) -> str:
    """Do one run."""
    settings, folder = task.settings, Folder(task.folder)
    stage = scene(settings, task.folder, task.draw, task.device)
    goal = settings.steps * settings.step

    def measured(model: nn.Module) -> dict[str, float]:
        found = {"overall": right(model, *stage.test, task.batch_size), **noted(kept(model))}
        if settings.grid and is_split(model):
            found |= columns(model, stage, task)
        return found

    begin = time.perf_counter()
    common: dict[str, Any] = {
        "graph": stage.graph, "evaluate": measured, "batch_size": task.batch_size, "progress": False, "seed": task.draw,
    }  # fmt: skip
    history: History
    if task.mode == "paper":
        history = prune_uncoupled(stage.model, stage.reference, task.criterion, goal, settings.step, **common).history
    elif task.mode == "physical":
        layers = parts(stage.model)
        only = {"conv": layers["conv"]} if layers["fc"] else None
        history = prune(
            stage.model, stage.reference, task.criterion, goal, step=settings.step, parts=only, **common
        ).history
    else:
        raise SecateurError(f"there is no mode {task.mode!r}; there are paper and physical.")
    folder.keep(Run(task.draw, task.mode, task.criterion, history))
    return (
        f"{settings.name}, draw {task.draw} ({', '.join(stage.outputs)}), {task.mode}, {task.criterion}: "
        f"{time.perf_counter() - begin:.0f} s, {len(history) - 1} steps, {100 * (history[-1].overall or 0):.1f} %"
    )


def columns(model: nn.Module, stage: Scene, task: Task) -> dict[str, float]:
    """Accuracy as fully connected neurons leave a network whose filters are where they are: a row of the grid.

    What the filters make of the images does not change meanwhile, so it is computed once.
    """
    settings = task.settings
    body, head = Features(model), model.classifier
    assert isinstance(head, nn.Module)
    inputs = [
        torch.cat([body(part) for part in torch.split(images, task.batch_size)])
        for images in (stage.reference[0], stage.test[0])
    ]

    def measured(small: nn.Module) -> float:
        return right(small, inputs[1], stage.test[1], len(inputs[1]))

    history = prune(
        head, (inputs[0], stage.reference[1]), task.criterion, settings.grid * settings.step, step=settings.step,
        evaluate=measured, progress=False, seed=task.draw,
    ).history  # fmt: skip
    return {f"{_GRID}{row.step * settings.step:.4f}": row.overall or 0.0 for row in history}


def grid(run: Run, step: float) -> dict[tuple[float, float], float]:
    """Accuracy by share of filters and share of neurons gone, where it was measured."""
    return {
        (round(row.step * step, 4), float(key.removeprefix(_GRID))): value
        for row in run.history
        for key, value in row.metrics.items()
        if key.startswith(_GRID)
    }


def right(model: nn.Module, inputs: Tensor, labels: Tensor, batch_size: int) -> float:
    """The share of samples whose class has the largest output."""
    found = torch.zeros((), device=labels.device)
    with torch.no_grad():
        for x, y in zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True):
            found += (model(x).argmax(1) == y).sum()
    return float(found) / len(labels)
