"""Scenario 2: specialise a network to a small task, then remove 5 % of its filters at a time. Nothing is trained.

Ten images per class are all that the criteria see.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reproduction import campaign
from reproduction.campaign import Report, spread, unfinished
from reproduction.few_shot.draws import Source
from reproduction.networks import Features, is_split, kept, network, parts
from reproduction.preparation import prepare
from reproduction.runs import Folder, Run, noted
from reproduction.training import Images, Schedule
from secateur.analysis.analyze import analyze
from secateur.analysis.specialize import Merge, specialize
from secateur.errors import SecateurError
from secateur.loop.prune import prune
from secateur.loop.settings import Schedule as Steps
from secateur.running.accuracy import accuracy
from secateur.running.sandbox import seeded
from secateur.structure.graph import Graph

_GRID = "fc "


@dataclass(frozen=True)
class Settings(campaign.Settings):
    """What to do. The defaults are the paper's.

    `grid` is for networks with fully connected layers: at every share of filters, neurons of these layers are removed
    in that many steps of size `step`. With 0 these layers stay whole.
    """

    classes: int = 3
    per_class: int = 10
    grid: int = 0
    merge: Merge = "sum"

    @property
    def name(self) -> str:
        """For folders and headings."""
        return super().name + (f"-{self.merge}" if self.merge != "sum" else "")


Task = campaign.Task[Settings]


@dataclass(frozen=True)
class Scene:
    """A network specialised to the task of a draw, its reference samples and its test samples."""

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
    draws: int | range = 20,
    device: str = "cpu",
    jobs: int = 1,
    report: Report = lambda text: None,
) -> Folder:
    """Do every run that is not done, and return the folder they are in."""
    folder, tasks = unfinished(settings, out, criteria, modes, draws, device)
    if tasks and jobs > 1:
        whole(settings, folder.path, device)  # otherwise several processes would train the same classifier
        whole.cache_clear()
    spread(run, tasks, jobs, report)
    return folder


@lru_cache(maxsize=1)
def whole(settings: Settings, folder: Path, device: str) -> tuple[nn.Module, bool, Source]:
    """The network before any draw, whether its outputs are those of the data set, and the images.

    If the weights have no classifier, one is trained on the training images of the data set.
    """
    source = Source.read(settings.data, Path(settings.images))
    with seeded(0, 0, salt=4):  # layers without weights are drawn at random
        model, complete = network(settings.model, settings.weights, settings.early_strides)
    if complete or settings.weights is None:
        return model.to(device).eval(), False, source
    if len(source.found) != 1:
        raise SecateurError(f"{settings.weights} has no classifier, and a pair of data sets cannot train one.")
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
    settings = task.settings
    stage = scene(settings, task.folder, task.draw, task.device)

    def measured(model: nn.Module) -> dict[str, float]:
        found = {"overall": right(model, *stage.test, settings.score_batch), **noted(kept(model))}
        if settings.grid and is_split(model):
            found |= columns(model, stage, task)
        return found

    begin, layers = time.perf_counter(), parts(stage.model)
    only = {"conv": layers["conv"]} if layers["fc"] else None
    history = task.prune(stage.model, stage.reference, measured, only, graph=stage.graph)
    outcome = f"{100 * (history[-1].overall or 0):.1f} % on {', '.join(stage.outputs)}"
    return task.finish(history, time.perf_counter() - begin, outcome)


def columns(model: nn.Module, stage: Scene, task: Task) -> dict[str, float]:
    """A row of the grid: accuracy while fully connected neurons are removed and the filters stay as they are.

    The outputs of the filters do not change here, so they are computed once.
    """
    settings = task.settings
    body, head = Features(model), model.classifier
    assert isinstance(head, nn.Module)
    inputs = [
        torch.cat([body(part) for part in torch.split(images, settings.score_batch)])
        for images in (stage.reference[0], stage.test[0])
    ]

    def measured(small: nn.Module) -> float:
        return right(small, inputs[1], stage.test[1], len(inputs[1]))

    history = prune(
        head, (inputs[0], stage.reference[1]), task.criterion, settings.grid * settings.step,
        schedule=Steps(step=settings.step, seed=task.draw), evaluate=measured, progress=False,
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
    return accuracy(model, (inputs, labels), batch_size).overall
