"""Scenario 1: prepare a network, then remove 5 % of its filters at a time and fine-tune after each removal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from reproduction.networks import kept, network, parts, small_stem
from reproduction.page import note_machine
from reproduction.preparation import Prepared, prepare
from reproduction.published import published
from reproduction.runs import Folder, Run, noted, spread
from reproduction.training import Images, Schedule, Trainer, accuracy
from reproduction.uncoupled import prune_uncoupled
from secateur.analysis.analyze import analyze
from secateur.data.views import View
from secateur.errors import SecateurError
from secateur.loop.prune import prune, seeded
from secateur.results.history import History

#: Called with a line about what was just finished.
Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to do. The defaults are the paper's."""

    model: str
    data: str
    images: str
    weights: str | None = None
    early_strides: bool = False
    prepare_epochs: int = 200
    epochs: int = 10
    batch_size: int = 20
    lr: float = 1e-3
    step: float = 0.05
    steps: int = 18
    score_batch: int = 50
    size: int = 224

    @property
    def view(self) -> View:
        """Both sides scaled to one size, as the paper does it. Its ResNets see CIFAR-10 as it is."""
        return View(32 if self.is_small else self.size, "squash")

    @property
    def is_small(self) -> bool:
        """Whether the network is made for images of 32²."""
        return self.data == "cifar10" and "resnet" in self.model

    @property
    def name(self) -> str:
        """For folders and headings."""
        model = self.model.rpartition(":")[2].partition("?")[0]
        return f"{model}-{self.data}"

    def recorded(self) -> dict[str, object]:
        """What identifies a run: not where its files lie."""
        return {k: v for k, v in asdict(self).items() if k not in ("images", "weights", "score_batch")}


@dataclass(frozen=True)
class Task:
    """One run. It is sent to another process."""

    settings: Settings
    folder: Path
    draw: int
    mode: str
    criterion: str
    device: str


def fine_tune(
    settings: Settings,
    out: Path,
    criteria: tuple[str, ...],
    modes: tuple[str, ...],
    draws: int = 1,
    device: str = "cpu",
    jobs: int = 1,
    report: Report = lambda text: None,
) -> Folder:
    """Do every run that is not done, and return the folder they are in. A run that was stopped goes on."""
    folder = Folder(out / settings.name)
    folder.claim(settings.recorded())
    note_machine(folder.path, device)
    tasks = []
    for draw in range(draws):
        wanted = [
            Task(settings, folder.path, draw, mode, criterion, device)
            for mode in modes
            for criterion in criteria
            if not folder.place(draw, mode, criterion).exists()
        ]
        if not wanted:
            continue
        ready = prepared(settings, folder.path, draw, device)[0]
        report(
            f"{settings.name}, draw {draw}: prepared in {ready.seconds:.0f} s, "
            f"loss {ready.loss:.4f}, test accuracy {100 * ready.accuracy:.2f} %"
        )
        tasks += wanted
    if jobs > 1:
        prepared.cache_clear()  # other processes need the room
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    spread(run, tasks, jobs, report)
    return folder


@lru_cache(maxsize=1)
def prepared(settings: Settings, folder: Path, draw: int, device: str) -> tuple[Prepared, Images, Images, Images]:
    """The prepared network of a draw, and the images: to train with, to score with, to test with."""
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    found = published(settings.data, Path(settings.images), seed=draw)
    view = settings.view
    labels = {part: torch.tensor(getattr(found, part).labels, device=device) for part in ("train", "test")}
    train = Images(found.train.pixels(view, True, device), labels["train"], view)
    plain = Images(found.train.pixels(view, False, device), labels["train"], view)
    test = Images(found.test.pixels(view, False, device), labels["test"], view)
    with seeded(draw, 0, salt=4):  # what the weights do not fill is drawn
        model, _ = network(settings.model, settings.weights, settings.early_strides)
        if settings.is_small:
            small_stem(model)
    schedule = Schedule(settings.prepare_epochs, settings.batch_size, settings.lr)
    known = {key: settings.recorded()[key] for key in ("model", "data", "early_strides", "size")}
    file = folder / "prepared" / f"{draw:02d}.safetensors"
    ready = prepare(model, len(found.classes), train, test, schedule, file, known, seed=draw)
    return ready, train, plain, test


def run(task: Task) -> str:
    """Do one run, from the start or from where it was stopped."""
    settings, folder = task.settings, Folder(task.folder)
    ready, train, plain, test = prepared(settings, task.folder, task.draw, task.device)
    trainer = Trainer(train, Schedule(settings.epochs, settings.batch_size, settings.lr), ready.loss)
    model = ready.model

    def measured(current: nn.Module) -> dict[str, float]:
        return {"overall": accuracy(current, test), "loss": trainer.loss, **noted(kept(current))}

    begin = time.perf_counter()
    graph = analyze(model, next(iter(plain.batches(1)))[0])
    common = {
        "graph": graph, "finetune": trainer, "evaluate": measured, "batch_size": settings.score_batch,
        "checkpoint": folder.checkpoint(task.draw, task.mode, task.criterion), "progress": False, "seed": task.draw,
    }  # fmt: skip
    data = plain.batches(settings.score_batch)
    goal = settings.steps * settings.step
    history: History
    if task.mode == "paper":
        history = prune_uncoupled(model, data, task.criterion, goal, settings.step, **common).history  # type: ignore[arg-type]
    elif task.mode == "physical":
        conv = {"conv": parts(model)["conv"]}
        history = prune(model, data, task.criterion, goal, step=settings.step, parts=conv, **common).history  # type: ignore[arg-type]
    else:
        raise SecateurError(f"there is no mode {task.mode!r}; there are paper and physical.")
    folder.keep(Run(task.draw, task.mode, task.criterion, history))
    last = history[-1]
    return (
        f"{settings.name}, draw {task.draw}, {task.mode}, {task.criterion}: {time.perf_counter() - begin:.0f} s, "
        f"{len(history) - 1} steps, loss {last.metrics['loss']:.4f}, test accuracy {100 * (last.overall or 0):.2f} %"
    )
