"""What a command works on: a model, the photographs, and which outputs mean them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import typer
from torch import Tensor, nn

from secateur.analysis.specialize import Merge, specialize
from secateur.cli.options import Fit, device_named, numbers
from secateur.data import imagenet
from secateur.data.images import Photographs, read
from secateur.data.outputs import Outputs, match
from secateur.data.views import View
from secateur.errors import DataError, SecateurWarning
from secateur.models import Opened, open_model
from secateur.models.zoo import runs_code
from secateur.running.accuracy import accuracy
from secateur.running.batches import Data
from secateur.running.copies import shared_copy
from secateur.running.logits import logits_of
from secateur.running.sandbox import quiet, run_or_explain
from secateur.surgery.provenance import plans_of

# How many images are used where the user does not say.
_REFERENCE, _TEST = 10, 50
# So many images are held as numbers: some 600 MB at the usual size.
_FEW = 1024


@dataclass(frozen=True)
class Look:
    """The options that say how images are seen."""

    size: int | None = None
    fit: Fit | None = None
    mean: str | None = None
    std: str | None = None

    def over(self, view: View) -> View:
        """The model's own view, with what the user said instead."""
        mean, std = numbers(self.mean, "--mean"), numbers(self.std, "--std")
        if (mean is None) != (std is None):
            raise typer.BadParameter("give both or none", param_hint="--mean, --std")
        return View(
            self.size or view.size,
            "squash" if self.fit is Fit.squash else "crop" if self.fit is Fit.crop else view.fit,
            mean or view.mean,
            std or view.std,
        )


def opened(
    model: str, weights: str | None, original: str | None, device: str, look: Look, *, trained: bool = True
) -> Opened:
    """The model on its device, with the view that applies. `trained`: random weights are worth a warning."""
    found = open_model(model, weights, device_named(device), original)
    if trained and weights is None and found.origin.model == model:
        file, _, factory = model.partition("?")[0].rpartition(":")
        maker = f"{factory}()" if file else Path(factory).name
        warnings.warn(
            f"no --weights were given: the network is as {maker} built it. Fix: --weights FILE, unless {maker} "
            f"loads them itself."
            if runs_code(model)
            else f"no --weights were given, and {model} has random weights, so the result means nothing. Fix: "
            f"--weights FILE, or --weights default to download the zoo's own.",
            SecateurWarning,
            stacklevel=2,
        )
    return replace(found, origin=replace(found.origin, view=look.over(found.origin.view)))


def device_of(model: nn.Module) -> torch.device:
    """Where a model lives."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def blank(subject: Opened, batch: int = 1) -> Tensor:
    """Inputs of the right shape that are no photograph; the same for everyone."""
    view = subject.origin.view
    noise = torch.rand(batch, view.channels, view.size, view.size, generator=torch.Generator().manual_seed(0))
    return view.normalise(noise * 255).to(device_of(subject.model))


def count_outputs(subject: Opened) -> int:
    """How many outputs a model has."""
    with quiet():
        output = logits_of(run_or_explain(shared_copy(subject.model).eval(), blank(subject)))
    if output.ndim != 2:
        raise DataError(
            f"the model returns a tensor of shape {tuple(output.shape)}; a classifier returns (samples, classes).",
            fix="use the Python functions, which take any loss",
        )
    return int(output.shape[1])


def names_of(subject: Opened, count: int) -> list[str]:
    """What the outputs mean, as far as is known."""
    if len(subject.origin.classes) == count:
        return [imagenet.title(name) for name in subject.origin.classes]
    if count == imagenet.COUNT:
        return [entry.name for entry in imagenet.entries()]
    return [f"output {i}" for i in range(count)]


@dataclass(frozen=True)
class Task:
    """A classifier, specialised or not, and the photographs it is scored on and tried on."""

    subject: Opened
    whole: nn.Module  # before it was specialised
    outputs: Outputs
    reference: Photographs
    rest: Photographs | None  # neither reference nor test: more images to fine-tune on
    test: Photographs | None
    merge: Merge | None  # how outputs became one, where several mean the same

    @property
    def model(self) -> nn.Module:
        """The classifier."""
        return self.subject.model

    @property
    def classes(self) -> tuple[str, ...]:
        """The class folders."""
        return self.reference.classes

    def data(self) -> Data:
        """The reference images: all at once where they are few, else in batches that are decoded as they are needed."""
        where = device_of(self.model)
        return self.reference.tensors(where) if len(self.reference) <= _FEW else self.reference.batches(32, where)

    def example(self) -> Tensor:
        """Two of the reference images."""
        inputs: Tensor = next(iter(self.reference.batches(2, device_of(self.model))))[0]
        return inputs if len(inputs) == 2 else torch.cat([inputs, inputs])

    def training(self) -> Photographs:
        """Everything that is not tested on."""
        more = self.rest
        if more is None or not len(more):
            return self.reference
        return replace(
            self.reference,
            paths=(*self.reference.paths, *more.paths),
            labels=(*self.reference.labels, *more.labels),
        )

    def accuracy(self, model: nn.Module) -> dict[str, float]:
        """The share of test images that are classified right, overall and by class."""
        assert self.test is not None
        found = accuracy(model, self.test.batches(32, device_of(model)))
        shares = [found.classes.get(target, 0.0) for target in self.test.targets]
        return {"overall": found.overall, **dict(zip(metric_names(self.classes), shares, strict=True))}


def metric_names(classes: Sequence[str]) -> list[str]:
    """The classes by names for people, clear of the words that mean something else among metrics."""
    return [f"class {name}" if name in ("overall", "worst") else imagenet.title(name) for name in classes]


def task(
    subject: Opened,
    images: Path,
    *,
    outputs: Sequence[str] = (),
    narrow: bool = True,
    merge: Merge | Literal["auto"] = "auto",
    test: Path | None = None,
    per_class: int | None = None,
    test_per_class: int | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Task:
    """Match folders and outputs, keep only those outputs if asked to, and part the photographs."""
    view = subject.origin.view
    photos = read(images, view=view, strict=strict)
    count = count_outputs(subject)
    chosen = match(photos.classes, count, outputs, subject.origin.classes)
    reference = photos.draw(per_class or _REFERENCE, seed=seed, at_most=per_class is None)
    whole, by = subject.model, None
    if narrow:
        if any(len(members) > 1 for members in chosen.values()):
            by = _fairest(whole, chosen, reference) if merge == "auto" else merge
        subject = narrowed(subject, chosen, count, by or "sum")
        targets = list(range(len(photos.classes)))
    else:
        merged = [name for name, members in chosen.items() if len(members) > 1]
        if merged:
            raise DataError(
                f"{merged[0]!r} is meant by {len(chosen[merged[0]])} outputs; they must be merged into one.",
                fix="leave out --no-specialize",
            )
        targets = [members[0] for members in chosen.values()]
    photos, reference = photos.numbered(targets), reference.numbered(targets)
    rest = photos.without(reference)
    held: Photographs | None
    if test is not None:
        held = _same_classes(read(test, view=view, strict=strict), photos, test).numbered(targets)
        twins = {path.resolve() for path in held.paths} & {path.resolve() for path in photos.paths}
        if twins:
            raise DataError(
                f"{len(twins)} images are in --images and in --test, such as {min(twins)}.",
                fix="a --test with other images, or none: then some of --images are held out",
            )
        if test_per_class is not None:
            held = held.draw(test_per_class, seed=seed, at_most=True)
    elif min(rest.counts.values()) > 0:
        held = rest.draw(test_per_class or _TEST, seed=seed, at_most=True)
        rest = rest.without(held)
    else:
        held = None
    return Task(subject, whole, chosen, reference, rest, held, by)


def _fairest(model: nn.Module, outputs: Outputs, reference: Photographs) -> Merge:
    """The sum or the mean of the members' probabilities: whichever makes the right classes more probable."""
    columns = [index for members in outputs.values() for index in members]
    groups = torch.repeat_interleave(torch.tensor([len(members) for members in outputs.values()]))
    sizes = torch.bincount(groups).float()
    losses = {"sum": 0.0, "mean": 0.0}
    with torch.no_grad():
        for inputs, labels in reference.numbered(range(len(outputs))).batches(32, device_of(model)):
            shares = logits_of(model(inputs))[:, columns].float().softmax(1).cpu()
            sums = torch.zeros(len(shares), len(outputs)).index_add_(1, groups, shares)
            for name, merged in (("sum", sums), ("mean", sums / sizes)):
                logs = merged.clamp_min(torch.finfo(torch.float32).tiny).log()
                losses[name] += float(nn.functional.cross_entropy(logs, labels.cpu(), reduction="sum"))
    return "mean" if losses["mean"] < losses["sum"] else "sum"


def narrowed(subject: Opened, outputs: Mapping[str, tuple[int, ...]], count: int, merge: Merge = "sum") -> Opened:
    """The model with only these outputs, in this order, merged where several mean the same."""
    members = [index for group in outputs.values() for index in group]
    merged = any(len(group) > 1 for group in outputs.values())
    if not merged and members == list(range(count)):
        return replace(subject, origin=replace(subject.origin, classes=tuple(outputs)))
    if merged and plans_of(subject.model):
        raise DataError(
            "this model was cut before, and its outputs can no longer be merged.",
            fix="merge them in the first command, starting from the unpruned model",
        )
    wanted = {name: list(group) for name, group in outputs.items()} if merged else members
    model = specialize(subject.model, wanted, blank(subject, 2), merge=merge)
    return Opened(model.eval(), subject.origin.specialized(dict(outputs), count))


def _same_classes(found: Photographs, like: Photographs, where: Path) -> Photographs:
    if set(found.classes) != set(like.classes):
        odd = sorted(set(found.classes) ^ set(like.classes))
        raise DataError(f"{where} and --images must have the same class folders; they differ in {', '.join(odd[:5])}.")
    return found.of(like.classes)
