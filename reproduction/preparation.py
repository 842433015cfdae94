"""Preparing a network for a data set, as the paper does before it prunes; a prepared network is kept in a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from reproduction.networks import Features, is_split, with_classes
from reproduction.tensor_files import load, save
from reproduction.training import HeadTrainer, Images, Schedule, Trainer, accuracy, arrange
from secateur.running.identity import numbers
from secateur.running.sandbox import evaluating, seeded
from secateur.running.tensor_files import fill


@dataclass(frozen=True)
class Prepared:
    """A network that is ready to be pruned. `loss` is that of the last epoch, `accuracy` on the test set."""

    model: nn.Module
    loss: float
    accuracy: float
    seconds: float


def prepare(
    model: nn.Module,
    classes: int,
    train: Images,
    test: Images,
    schedule: Schedule,
    file: Path,
    settings: Mapping[str, Any],
    seed: int = 0,
) -> Prepared:
    """Give the network a new classifier and train it, or read it from `file` if that was done before.

    If the network has features and a classifier (VGG, AlexNet), only the classifier is trained, as in the authors'
    script. In other networks the last layer is replaced and all layers are trained. Afterwards nothing is frozen.
    """
    settings = {**settings, "schedule": asdict(schedule), "seed": seed, "classes": classes}
    device = train.labels.device
    with seeded(seed, 0, salt=3):
        model = with_classes(model, classes).to(device)
        arrange(model)
        found = load(file, "prepared", settings)
        if found is not None:
            notes, tensors = found
            fill(numbers(model), tensors, file, "the model")
        else:
            begin = time.perf_counter()
            if is_split(model):
                head = HeadTrainer(train, schedule)
                head(Features(model), model.classifier)  # type: ignore[arg-type]
                loss = head.loss
            else:
                whole = Trainer(train, schedule)
                whole(model)
                loss = whole.loss
            with evaluating(model):
                right = accuracy(model, test)
            notes = {"loss": loss, "accuracy": right, "seconds": time.perf_counter() - begin}
            save(file, "prepared", settings, notes, numbers(model))
    return Prepared(model.eval(), notes["loss"], notes["accuracy"], notes["seconds"])
