"""`recover`: train a smaller model until it answers as the original does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import check_callable, check_path
from secateur.errors import DataError, SecateurError, TrainingError
from secateur.nest import counts_of_samples, map_tensors, select_samples
from secateur.recover.blocks import Blocks
from secateur.recover.checkpoint import Checkpoint
from secateur.recover.samples import Samples
from secateur.recover.settings import Recover, Recovered, model_of
from secateur.recover.text import merged, with_adapters, write_text
from secateur.recover.trainer import Trainer
from secateur.results.history import Record
from secateur.running.batches import Data
from secateur.running.copies import copy_with, named_tensors, shared_copy, unwrap
from secateur.running.devices import device_of, full
from secateur.running.identity import data_identity, described, digest
from secateur.running.layout import arrange, bears_channels_last, has_images, learns_channels_last
from secateur.running.processes import active, agree, check_same, same_everywhere, share, together
from secateur.running.progress import Line, Listener
from secateur.running.sandbox import check_weights, leaves_no_trace, seeded
from secateur.running.targets import Reader

_HALF = (torch.float16, torch.bfloat16)
_SALT = 8


@leaves_no_trace
@together()
def recover(
    small: nn.Module | Record,
    original: nn.Module | None = None,
    data: Data = None,
    settings: Recover | int | None = None,
    *,
    test: Data = None,
    checkpoint: str | Path | None = None,
    progress: bool | Listener = True,
    **options: Any,
) -> Recovered:
    """A copy of a smaller model, trained with the original as its teacher.

    `small` is the model, or the result of `prune`, which knows its original. `data` is a pair (X, y), a list of batches
    or a DataLoader; labels may be None. A language model without `data` is trained on text that the original writes.
    `settings` is a `secateur.recover.Recover`, or the number of epochs; its fields can be given as `options`, such as
    `lr=0.05`. On `test`, loss and accuracy are measured after each epoch.

    With `checkpoint`, a file is replaced atomically after epochs. The same call made again goes on from there and ends
    the same. In several processes (`torchrun`) each takes its share of every batch. `progress` draws a line on a
    terminal; a function receives events.

    >>> import secateur as sc
    >>> net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> data = (torch.rand(64, 4), torch.arange(64) % 3)
    >>> result = sc.prune(net, data, remove=0.5)
    >>> sc.recover(result, net, data, epochs=2)
    <Recovered Sequential: 2 epochs; all epochs are done>
    """
    asked = _asked(settings, options)
    check_callable("progress", None if isinstance(progress, bool) else progress, "True, False, or a function f(event)")
    if checkpoint is not None:
        check_path("checkpoint", checkpoint, "a file name, such as 'run.safetensors'")
    if original is None and isinstance(small, Record):
        original = small.original
    student = unwrap(model_of(small))
    if original is None and _asks(asked):
        raise SecateurError(
            "there is no original to learn from.",
            fix="recover(small, original, data), or teacher=0 and blocks=0 for labels alone",
        )
    if data is not None and asked.data is not None:
        raise SecateurError("there are data, and other data in the settings.", fix="give one of the two")
    file = None
    if checkpoint is not None:
        asked_for = {"weights": digest(student), **_identity(asked, data, test), "processes": share()[1]}
        if original is not None:
            asked_for["teacher"] = digest(unwrap(original))
        file = Checkpoint(Path(checkpoint), asked_for)
    with Line(progress is True) as line, seeded(asked.seed, 0, salt=share()[0] if active() else 0):
        done = trained(student, original, data, asked, test, progress if callable(progress) else line, file)
    if isinstance(small, Record):
        # What the run measured is not of this model.
        known = {**small.settings, "recover": repr(asked), "trained_afterwards": True}
        return replace(done, result=replace(small, model=done.model, settings=known, reasons=None))
    return done


def _asked(settings: Recover | int | None, options: Mapping[str, Any]) -> Recover:
    """The settings with the options that are given beside them."""
    known = [field.name for field in fields(Recover)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            raise SecateurError(f"`recover` takes no {name}.", where=name, fix=near[0] if near else ", ".join(known))
    if settings is False:
        raise SecateurError("recover(…, False) asks for no training.", fix="a number of epochs, or None for the usual")
    return replace(Recover.of(settings) or Recover(), **options)


def _asks(settings: Recover) -> bool:
    return settings.teacher > 0 or settings.blocks > 0


def _identity(settings: Recover, data: Data, test: Data) -> dict[str, Any]:
    """The settings and data of a run. Each process may bring its own share of the data: that of the first counts."""
    used = data if settings.data is None else settings.data
    own = {
        "settings": described(replace(settings, data=None)),
        "data": data_identity(used),
        "test": data_identity(test),
    }
    return dict(same_everywhere(own))


def trained(
    small: nn.Module, original: nn.Module | None, data: Data, settings: Recover, test: Data = None,
    tell: Listener = lambda event: None, file: Checkpoint | None = None,
) -> Recovered:  # fmt: skip
    """`recover` of a plain model, with the random numbers that are drawn around it."""
    check_weights(small)
    if original is not None:
        check_weights(original)
    settings = settings.decided(small)
    asked = _asks(settings) and original is not None
    teacher = _teacher(unwrap(original), small) if asked and original is not None else None
    for model in (small, teacher):
        if model is not None:
            check_same(model)
    samples = Samples.of(_data(small, original, data, settings), settings, test, device_of(small))
    student, forms = _student(small)
    if settings.channels_last and has_images(student):
        few = _looked(samples, settings, 2)
        student = _arranged(student, map_tensors(full, few), training=True)
        teacher = _arranged(teacher, few, training=False) if teacher is not None else None
    blocks = None
    if settings.blocks and teacher is not None and original is not None:
        first = _looked(samples, settings, 64)
        blocks = Blocks.of(student, teacher, (small, unwrap(original)), first)
    reader, trainable = Reader(student), {id(p) for p in student.parameters() if p.requires_grad}
    net = with_adapters(student, settings.lora) if settings.lora else student
    trainer = Trainer(net, teacher, samples, settings, blocks=blocks, reader=reader, tell=tell, file=file)

    def ended(stopped: str) -> Recovered:
        whole = merged(net) if settings.lora else student
        for parameter in whole.parameters():
            parameter.requires_grad_(id(parameter) in trainable)
        _restored(whole, forms, formats=_too_large(whole, forms) is None)
        return Recovered(whole, tuple(trainer.history), stopped)

    try:
        stopped = trainer.run()
    except TrainingError as error:
        error.result = ended(trainer.stopped or error.what)
        raise
    done = ended(stopped)
    name = _too_large(done.model, forms)
    if name is not None:
        spoilt = TrainingError(
            f"`{name}` has learnt numbers that are infinite in {str(forms[name].dtype).removeprefix('torch.')}.",
            where=name, fix="the smaller model in another number format, such as model.bfloat16()",
        )  # fmt: skip
        spoilt.result = done
        raise spoilt
    return done


def _data(small: nn.Module, original: nn.Module | None, data: Data, settings: Recover) -> Data:
    """What to train on: the settings' own data, or those given, or what the original writes."""
    found = data if settings.data is None else settings.data
    if found is not None:
        return found
    if original is None or not Reader(original).causal:
        raise DataError(
            "there are no data to train on.", fix="data=(X, y), or (X, None) without labels; language models write text"
        )
    return write_text(original, seed=settings.seed)


def _student(small: nn.Module) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """A copy to train, in float32, and tensors without numbers in the formats and the order in memory that it had."""
    forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in named_tensors(small)}

    def fresh(name: str, old: Tensor) -> Tensor:
        new = old.detach().clone()
        return new.float() if old.dtype in _HALF else new

    return copy_with(small, fresh), forms


def _teacher(original: nn.Module, small: nn.Module) -> nn.Module:
    """The original in evaluation mode, where the student is. Weights are shared unless its forward writes to them."""
    place = device_of(small)
    moved = place is not None and device_of(original) != place
    writes = any(getattr(module, "max_norm", None) is not None for module in original.modules())  # of an embedding
    if moved or writes:
        return copy_with(original, lambda name, old: old.detach().clone().to(place)).eval()
    return shared_copy(original).eval()


def _looked(samples: Samples, settings: Recover, count: int) -> Any:
    """Some samples of a batch, before training; all, where its tensors have not as many."""
    with seeded(settings.seed, share()[0], salt=_SALT):
        looked = next(samples.look(1), None)
    if looked is None:
        raise DataError("there is no batch to train on.")
    alike = len(set(counts_of_samples(looked[0]))) == 1  # else one may hold the numbers of others' samples
    return select_samples(looked[0], slice(count)) if alike else looked[0]


def _arranged(model: nn.Module, sample: Any, training: bool) -> nn.Module:
    """A model of images in the order that convolutions like, if it bears that, in all processes alike."""
    for bears in (bears_channels_last, learns_channels_last)[: 1 + training]:
        if agree(flag=not bears(model, sample)):
            return model
    return arrange(model)


def _too_large(model: nn.Module, forms: Mapping[str, Tensor]) -> str | None:
    """The first tensor with finite numbers that would not be so in the number format it had."""
    for name, tensor in named_tensors(model):
        kind = forms.get(name, tensor).dtype
        if kind in _HALF and tensor.dtype != kind and bool((tensor.isfinite() & tensor.to(kind).isinf()).any()):
            return name
    return None


def _restored(model: nn.Module, forms: Mapping[str, Tensor], formats: bool) -> None:
    """The order in memory as it was, and the number formats, if the numbers fit."""
    for name, tensor in named_tensors(model):
        form = forms.get(name, tensor)
        if form.shape != tensor.shape:  # a buffer that grew
            form = torch.empty(tensor.shape, dtype=form.dtype)
        kind = form.dtype if formats else tensor.dtype
        tensor.data = torch.empty_like(form, dtype=kind, device=tensor.device).copy_(tensor.data)
