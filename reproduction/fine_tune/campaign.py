"""Scenario 1: prepare a network, then remove 5 % of its filters at a time and fine-tune after each removal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reproduction import campaign
from reproduction.campaign import Report, spread, unfinished
from reproduction.networks import kept, network, parts, small_stem
from reproduction.preparation import Prepared, prepare
from reproduction.published import published
from reproduction.runs import Folder, noted
from reproduction.training import Images, Schedule, Trainer, accuracy
from secateur.analysis.analyze import analyze
from secateur.data.views import View
from secateur.running.sandbox import seeded


@dataclass(frozen=True)
class Settings(campaign.Settings):
    """What to do. The defaults are the paper's. `score_images` of the training images score; with 0 all of them."""

    epochs: int = 10
    batch_size: int = 20
    lr: float = 1e-3
    score_images: int = 0

    def recorded(self) -> dict[str, Any]:
        """What identifies a run. Runs that scored on all images were recorded before there was a choice."""
        found = super().recorded()
        return found if self.score_images else {k: v for k, v in found.items() if k != "score_images"}

    @property
    def view(self) -> View:
        """As the paper does it: both sides scaled to one size, but ResNets see CIFAR-10 at its own size."""
        return View(32, "squash") if self.is_small else super().view

    @property
    def is_small(self) -> bool:
        """Whether the network is made for images of 32²."""
        return self.data == "cifar10" and "resnet" in self.model


Task = campaign.Task[Settings]


def fine_tune(
    settings: Settings,
    out: Path,
    criteria: tuple[str, ...],
    modes: tuple[str, ...],
    draws: int | range = 1,
    device: str = "cpu",
    jobs: int = 1,
    report: Report = lambda text: None,
) -> Folder:
    """Do every run that is not done, and return the folder they are in. A run that was stopped is resumed."""
    folder, tasks = unfinished(settings, out, criteria, modes, draws, device)
    for draw in dict.fromkeys(task.draw for task in tasks):
        ready = prepared(settings, folder.path, draw, device)[0]
        report(
            f"{settings.name}, draw {draw}: prepared in {ready.seconds:.0f} s, "
            f"loss {ready.loss:.4f}, test accuracy {100 * ready.accuracy:.2f} %"
        )
    if jobs > 1:
        prepared.cache_clear()  # other processes need the memory
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
    train = Images(found.train.stored(view, True, device), labels["train"], view)
    plain = Images(found.train.stored(view, False, device), labels["train"], view)
    test = Images(found.test.stored(view, False, device), labels["test"], view)
    if settings.score_images:
        plain = plain.take(settings.score_images, seed=draw)
    with seeded(draw, 0, salt=4):  # layers without weights are drawn at random
        model, _ = network(settings.model, settings.weights, settings.early_strides)
        if settings.is_small:
            small_stem(model)
    schedule = Schedule(settings.prepare_epochs, settings.batch_size, settings.lr)
    known = {key: settings.recorded()[key] for key in ("model", "data", "early_strides", "size")}
    file = folder / "prepared" / f"{draw:02d}.safetensors"
    ready = prepare(model, len(found.classes), train, test, schedule, file, known, seed=draw)
    return ready, train, plain, test


def run(task: Task) -> str:
    """Do one run, from the start or from its checkpoint."""
    settings = task.settings
    ready, train, plain, test = prepared(settings, task.folder, task.draw, task.device)
    trainer = Trainer(train, Schedule(settings.epochs, settings.batch_size, settings.lr), ready.loss)
    model = ready.model

    def measured(current: nn.Module) -> dict[str, float]:
        return {"overall": accuracy(current, test), "loss": trainer.loss, **noted(kept(current))}

    begin, data, conv = time.perf_counter(), plain.batches(settings.score_batch), {"conv": parts(model)["conv"]}
    graph = analyze(model, next(iter(plain.batches(1)))[0])
    history = task.prune(model, data, measured, conv, graph=graph, finetune=trainer, checkpoint=task.checkpoint)
    outcome = f"loss {history[-1].metrics['loss']:.4f}, test accuracy {100 * (history[-1].overall or 0):.2f} %"
    return task.finish(history, time.perf_counter() - begin, outcome)
