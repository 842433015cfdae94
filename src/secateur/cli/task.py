"""The task of a command: a model, the photographs, and which outputs mean them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from secateur.analysis.specialize import Merge, specialize
from secateur.cli.options import Images, Seen, Source, device_named
from secateur.data import imagenet
from secateur.data.images import Photographs, read
from secateur.data.outputs import Outputs, match, parse
from secateur.errors import DataError, SecateurWarning
from secateur.models import Opened, open_model
from secateur.models.zoo import runs_code
from secateur.running.accuracy import accuracy
from secateur.running.batches import Data
from secateur.running.copies import shared_copy
from secateur.running.devices import device_of
from secateur.running.logits import logits_of
from secateur.running.sandbox import quiet, run_or_explain
from secateur.surgery.provenance import plans_of

# How many images per class are used if the user does not say.
_REFERENCE, _TEST = 10, 50
# Up to this many images are held in memory as numbers: about 600 MB at the usual size.
_FEW = 1024


def read_model(source: Source, seen: Seen, *, trained: bool = True) -> Opened:
    """The model on its device, with the view that applies. `trained`: warn if no weights are given."""
    model = source.model
    found = open_model(model, source.weights, device_named(source.device), source.original)
    if trained and source.weights is None and found.origin.model == model:
        file, _, factory = model.partition("?")[0].rpartition(":")
        maker = f"{factory}()" if file else Path(factory).name
        if runs_code(model):
            what, fix = f": the network is as {maker} built it", f"unless {maker} loads them itself"
        else:
            what = f", and {model} has random weights, so the result means nothing"
            fix = "or --weights default to download the zoo's own"
        warnings.warn(SecateurWarning(f"no --weights were given{what}.", fix=f"--weights FILE, {fix}"), stacklevel=2)
    return replace(found, origin=replace(found.origin, view=seen.over(found.origin.view)))


def noise(opened: Opened, batch: int = 1) -> Tensor:
    """Random inputs of the right shape, always the same."""
    view = opened.origin.view
    pixels = torch.rand(batch, view.channels, view.size, view.size, generator=torch.Generator().manual_seed(0))
    return view.normalise(pixels * 255).to(device_of(opened.model))


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
        return [imagenet.title(name) for name in opened.origin.classes]
    if count == imagenet.COUNT:
        return [entry.name for entry in imagenet.entries()]
    return [f"output {i}" for i in range(count)]


def outputs_in(text: str, names: list[str]) -> tuple[int, ...]:
    """The outputs that a text means: one by the name it has, or what `parse` reads."""
    return (names.index(text),) if text in names else parse(text, len(names))


@dataclass(frozen=True)
class Task:
    """A classifier, specialised or not, and the photographs to score units and to measure accuracy on."""

    opened: Opened
    whole: nn.Module  # before it was specialised
    outputs: Outputs
    reference: Photographs
    rest: Photographs  # neither reference nor test: more images to fine-tune on
    test: Photographs | None
    merge: Merge | None  # how outputs that mean the same became one

    @property
    def model(self) -> nn.Module:
        """The classifier, after it was specialised."""
        return self.opened.model

    @property
    def classes(self) -> tuple[str, ...]:
        """The class folders."""
        return self.reference.classes

    def data(self) -> Data:
        """The reference images: all at once if they are few, else in batches that are decoded when needed."""
        where = device_of(self.model)
        return self.reference.tensors(where) if len(self.reference) <= _FEW else self.reference.batches(32, where)

    def example(self) -> Tensor:
        """Two of the reference images."""
        inputs: Tensor = next(iter(self.reference.batches(2, device_of(self.model))))[0]
        return inputs if len(inputs) == 2 else torch.cat([inputs, inputs])

    def training(self) -> Photographs:
        """All images that accuracy is not measured on."""
        used, more = self.reference, self.rest
        return replace(used, paths=(*used.paths, *more.paths), labels=(*used.labels, *more.labels))

    def accuracy(self, model: nn.Module) -> dict[str, float]:
        """The share of test images that are classified right, overall and by class."""
        assert self.test is not None
        found = accuracy(model, self.test.batches(32, device_of(model)))
        shares = [found.classes.get(target, 0.0) for target in self.test.targets]
        # Two words have another meaning among metrics.
        names = [f"class {name}" if name in ("overall", "worst") else imagenet.title(name) for name in self.classes]
        return {"overall": found.overall, **dict(zip(names, shares, strict=True))}


def read_task(opened: Opened, given: Images, seed: int, narrow: bool) -> Task:
    """Match folders and outputs, keep only those outputs if `narrow`, and divide the photographs."""
    photos = read(given.images, view=opened.origin.view, strict=given.strict)
    count = count_outputs(opened)
    chosen = match(photos.classes, count, given.outputs or (), opened.origin.classes)
    merged = [name for name, members in chosen.items() if len(members) > 1]
    if merged and not narrow:
        raise DataError(
            f"{merged[0]!r} is meant by {len(chosen[merged[0]])} outputs; they must be merged into one.",
            fix="leave out --no-specialize",
        )
    targets = range(len(chosen)) if narrow else [members[0] for members in chosen.values()]
    photos = photos.numbered(targets)
    reference = photos.draw(given.per_class or _REFERENCE, seed=seed, at_most=given.per_class is None)
    whole, by = opened.model, None
    if narrow:
        if merged:
            by = _fairest(whole, chosen, reference) if given.merge == "auto" else given.merge
        opened = keep_outputs(opened, chosen, count, by or "sum")
    rest = photos.without(reference)
    held: Photographs | None = None
    if given.test is not None:
        held = _other_images(read(given.test, view=photos.view, strict=given.strict), photos, given.test)
        if given.test_per_class is not None:
            held = held.draw(given.test_per_class, seed=seed, at_most=True)
    elif min(rest.counts.values()) > 0:
        held = rest.draw(given.test_per_class or _TEST, seed=seed, at_most=True)
        rest = rest.without(held)
    return Task(opened, whole, chosen, reference, rest, held, by)


def _other_images(found: Photographs, photos: Photographs, where: Path) -> Photographs:
    """The images of --test: the same classes as in --images, and no image of those."""
    if set(found.classes) != set(photos.classes):
        odd = sorted(set(found.classes) ^ set(photos.classes))
        raise DataError(f"{where} and --images must have the same class folders; they differ in {', '.join(odd[:5])}.")
    both = {path.resolve() for path in found.paths} & {path.resolve() for path in photos.paths}
    if both:
        raise DataError(
            f"{len(both)} images are in --images and in --test, such as {min(both)}.",
            fix="a --test with other images, or none: then some of --images are held out",
        )
    return found.of(photos.classes).numbered(photos.targets)


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
