"""Preparing a network for a data set, as the paper does before it prunes; a prepared network is kept in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import nn

from reproduction.networks import Features, is_split, with_classes
from reproduction.runs import refuse_others
from reproduction.training import HeadTrainer, Images, Schedule, Trainer, accuracy, arrange
from secateur.errors import FileFormatError
from secateur.loop.checkpoint import fill, numbers
from secateur.loop.prune import seeded
from secateur.report.document import write
from secateur.running.sandbox import evaluating

_FORMAT = "secateur-prepared-1"


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
        notes = _read(file, model, settings)
        if notes is None:
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
                found = accuracy(model, test)
            notes = {"loss": loss, "accuracy": found, "seconds": time.perf_counter() - begin}
            _write(file, model, settings, notes)
    return Prepared(model.eval(), notes["loss"], notes["accuracy"], notes["seconds"])


def _write(file: Path, model: nn.Module, settings: Mapping[str, Any], notes: Mapping[str, float]) -> None:
    tensors = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in numbers(model).items()}
    header = {"format": _FORMAT, "settings": settings, "notes": notes}
    write(file, safetensors.torch.save(tensors, {"secateur": json.dumps(header)}))


def _read(file: Path, model: nn.Module, settings: Mapping[str, Any]) -> dict[str, float] | None:
    if not file.exists():
        return None
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get("secateur", "null"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, RuntimeError, OSError) as error:
        raise FileFormatError(f"{file} is not a prepared network, or is damaged: {error}") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise FileFormatError(f"{file} is not a prepared network of this version of secateur.")
    fix = "use another --out, or remove the file"
    refuse_others(f"{file} was prepared otherwise", header["settings"], settings, fix)
    fill(model, tensors, file)
    return {str(key): float(value) for key, value in header["notes"].items()}
