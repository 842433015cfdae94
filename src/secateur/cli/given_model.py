"""The model that a command is given: how it is opened, random inputs that fit it, and what its outputs mean."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.analysis.specialize import Merge, specialize
from secateur.cli.options import Seen, Source, device_named
from secateur.data import imagenet
from secateur.data.imagenet import title
from secateur.data.outputs import parse
from secateur.data.views import View
from secateur.errors import DataError, ForwardError, SecateurWarning
from secateur.models import Opened, open_model
from secateur.models.hub import HUB, longest_text, reads_text
from secateur.models.zoo import runs_code
from secateur.running.copies import shared_copy
from secateur.running.devices import device_of
from secateur.running.logits import logits_of
from secateur.running.sandbox import quiet, run, run_or_explain
from secateur.surgery.provenance import plans_of

_LENGTH = 64  # tokens of random text


def read_model(source: Source, seen: Seen, *, trained: bool = True) -> Opened:
    """The model on its device, with the view that applies. `trained`: warn if no weights are given."""
    model = source.model
    seen.over(View())  # what makes no sense is refused before anything is built
    found = open_model(model, source.weights, device_named(source.device), source.original)
    if trained and source.weights is None and found.origin.model == model:
        warn_of_no_weights(model)
    found = replace(found, origin=replace(found.origin, view=seen.over(found.origin.view)))
    _check_channels(found)
    return found


def _check_channels(opened: Opened) -> None:
    """Refuse grey images for a network that takes colours, and the reverse, in terms of options."""
    view = opened.origin.view
    takes = next((m.in_channels for m in opened.model.modules() if isinstance(m, nn.Conv2d)), view.channels)
    if takes == view.channels or takes not in (1, 3) or reads_text(opened.model):
        return
    error = _failure(opened, view)
    if error is None or _failure(opened, View(view.size, view.fit, (0.0,) * takes, (1.0,) * takes)) is not None:
        return  # a network may make one of the other itself, and what else is wrong is told elsewhere
    kinds = {1: ("grey", "one number each"), 3: ("colour", "three numbers each")}
    raise ForwardError(
        f"--mean and --std have {kinds[view.channels][1]}, which makes {kinds[view.channels][0]} images, and "
        f"{type(opened.model).__name__} takes {kinds[takes][0]}: {type(error).__name__}: {error}",
        fix=f"--mean and --std of its training, {kinds[takes][1]}",
    )


def _failure(opened: Opened, view: View) -> Exception | None:
    """What the model raises on images of such a view, if anything."""
    seen = replace(opened, origin=replace(opened.origin, view=view))
    try:
        with quiet():
            run(shared_copy(opened.model).eval(), noise(seen))
    except Exception as error:
        return error
    return None


def warn_of_no_weights(model: str, option: str = "--weights") -> None:
    """Warn that a model is as it was built: a zoo's is random."""
    if model.startswith(HUB):
        return
    file, _, factory = model.partition("?")[0].rpartition(":")
    maker = f"{factory}()" if file else Path(factory).name
    if runs_code(model):
        what, fix = f": the network is as {maker} built it", f"unless {maker} loads them itself"
    else:
        what = f", and {model} has random weights, so the result means nothing"
        fix = f"or {option} default to download the zoo's own"
    warnings.warn(SecateurWarning(f"no {option} were given{what}.", fix=f"{option} FILE, {fix}"), stacklevel=3)


def noise(opened: Opened, batch: int = 1) -> Any:
    """Random inputs of the right shape, always the same: images, or named token numbers."""
    device, generator = device_of(opened.model), torch.Generator().manual_seed(0)
    if reads_text(opened.model):
        model: Any = opened.model
        shape = batch, min(_LENGTH, longest_text(model))
        ids = torch.randint(len(model.get_input_embeddings().weight), shape, generator=generator).to(device)
        second = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
        return {"input_ids": ids, **second}
    view = opened.origin.view
    pixels = torch.rand(batch, view.channels, view.size, view.size, generator=generator)
    return view.normalise(pixels * 255).to(device)


def sample_of(opened: Opened) -> str:
    """What one sample of such inputs is, in words."""
    if reads_text(opened.model):
        return f"text of {noise(opened)['input_ids'].shape[1]} tokens"
    side = opened.origin.view.size
    return f"image of {side} x {side}"


def count_outputs(opened: Opened) -> int:
    """How many outputs a model has."""
    with quiet():
        output = logits_of(run_or_explain(shared_copy(opened.model).eval(), noise(opened)))
    if output.ndim != 2:
        raise DataError(
            f"the model returns a tensor of shape {tuple(output.shape)}; a classifier returns (samples, classes).",
            fix="use the Python functions, which take any loss",
        )
    return int(output.shape[1])


def output_names(opened: Opened) -> list[str]:
    """What the outputs mean, as far as is known."""
    count = count_outputs(opened)
    if len(opened.origin.classes) == count:
        return [title(name) for name in opened.origin.classes]
    if count == imagenet.COUNT:
        return [entry.name for entry in imagenet.entries()]
    return [f"output {i}" for i in range(count)]


def outputs_in(text: str, names: list[str]) -> tuple[int, ...]:
    """The outputs that a text means: one by the name it has, or what `parse` reads."""
    if text in names:
        return (names.index(text),)
    own = len(names) != imagenet.COUNT and names[0] != "output 0"  # else `parse` knows more
    if own and not any(sign.isdigit() for sign in text):
        called = f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
        raise DataError(f"{text!r} is no output of this model.", fix=f"one of {called}, or a number from 0")
    return parse(text, len(names))


def keep_outputs(opened: Opened, outputs: Mapping[str, tuple[int, ...]], count: int, merge: Merge = "sum") -> Opened:
    """The model with only these outputs, in this order, merged where several mean the same."""
    members = [index for group in outputs.values() for index in group]
    merged = any(len(group) > 1 for group in outputs.values())
    if not merged and members == list(range(count)):
        return replace(opened, origin=replace(opened.origin, classes=tuple(outputs)))
    if merged and plans_of(opened.model):
        raise DataError(
            "this model was cut before, and its outputs can no longer be merged.",
            fix="merge them in the first command, starting from the unpruned model",
        )
    wanted = {name: list(group) for name, group in outputs.items()} if merged else members
    model = specialize(opened.model, wanted, noise(opened, 2), merge=merge)
    return Opened(model.eval(), opened.origin.specialized(dict(outputs), count))
