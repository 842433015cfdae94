"""The task of a command on photographs: a model, the images, and which outputs mean them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secateur.analysis.specialize import Merge
from secateur.cli.given_model import count_outputs, keep_outputs
from secateur.cli.messages import message_of
from secateur.cli.options import Images
from secateur.cli.outcome import Quantised, answered, time_elsewhere, time_files, write_page
from secateur.cli.output import Printer, expects, prepared
from secateur.data.imagenet import title
from secateur.data.images import Decoder, Photographs, read
from secateur.data.outputs import Outputs, match
from secateur.errors import DataError, SecateurError, SecateurWarning
from secateur.files.architecture import is_pretrained
from secateur.files.int8 import Int8, check
from secateur.files.onnx import Exports, export
from secateur.files.saved import save
from secateur.files.session import Session, fixed_batch
from secateur.latency.timing import Timing, fitting, time_batches
from secateur.loop.prune import Result
from secateur.models import Opened
from secateur.models.hub import hub_view, label_names, quiet_hub
from secateur.report import Page
from secateur.report.answers import Answers
from secateur.running.accuracy import Accuracy, accuracy
from secateur.running.batches import Data
from secateur.running.devices import device_of
from secateur.running.logits import logits_of
from secateur.running.memory import allowed, release
from secateur.runtimes import Setup
from secateur.structure.cost import human, size_of

# How many images per class are used if the user does not say.
_REFERENCE, _TEST = 10, 50
_TRAINED = 20  # images of one training step, as in the paper
_SHOWN = 6  # images with heat maps in the report
# The reference images are held as numbers if they take at most this share of the memory, decoded ones as bytes.
_HELD, _DECODED = 6, 3
_MANY = 256  # test images for which ONNX Runtime pays


@dataclass(frozen=True)
class Task:
    """A classifier, specialised or not, and the photographs to score units and to measure accuracy on."""

    opened: Opened
    had: int  # parameters before it was specialised
    outputs: Outputs
    reference: Photographs
    rest: Photographs  # neither reference nor test: more images to fine-tune on
    test: Photographs | None
    merge: Merge | None  # how outputs that mean the same became one
    measured: dict[int, Accuracy] = field(default_factory=dict, repr=False, compare=False)  # by size of the model
    exports: Exports | None = field(default=None, repr=False, compare=False)  # if ONNX is asked for
    pruned: bool = False  # before the command began
    sample: ClassVar[str] = "image"

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
        where, view = device_of(self.model), self.reference.view
        held = 4 * len(self.reference) * view.channels * view.size**2
        if held <= allowed(where) // _HELD:
            return self.reference.tensors(where)
        return self.reference.mixed().batches(32, where)  # a repair takes the first of them

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
        asked = model
        if self.exports is not None and self._fast and not isinstance(model, Session):
            asked = self.exports.module(model, self.example())
        found = accuracy(asked, self.test.batches(8 if isinstance(asked, Session) else 32, device_of(model)))
        if asked is not model:
            del asked
            release()  # what an export and a session took is not there for the repair otherwise
        self.measured[size_of(model)] = found
        unseen = [
            name for name, target in zip(self.names, self.test.targets, strict=True) if target not in found.classes
        ]
        if unseen:  # that none of no images is right would read as if all were wrong
            what = f"no image to test on can be read of {', '.join(unseen)}."
            raise DataError(what, fix="repair the images, or give others by --test")
        shares = [found.classes[target] for target in self.test.targets]
        return {"overall": found.overall, **dict(zip(self.names, shares, strict=True))}

    @property
    def _fast(self) -> bool:
        """Whether ONNX Runtime measures accuracy: on so many images it saves more time than writing a file takes."""
        device = device_of(self.model)
        on_cpu = device is None or device.type == "cpu"
        return self.exports is not None and on_cpu and self.test is not None and len(self.test) >= _MANY

    # -- pruning ---------------------------------------------------------------------------------------------------
    def found(self) -> dict[str, Any]:
        """What a run is recognised by, beside the options."""
        return {
            "outputs": self.outputs, "merge": self.merge, "view": self.reference.view.to_dict(),
            "reference": digest(self.reference), "held_out": digest(self.test),
        }  # fmt: skip

    @property
    def counts(self) -> dict[str, Any]:
        """How many samples are used for what, for JSON."""
        return {"images": {"reference": len(self.reference), "test": self.tested.get("overall", 0)}}

    @property
    def load(self) -> tuple[float, float]:
        """How many images units are scored on, and how many accuracy is measured on."""
        return len(self.reference), len(self.test) if self.test is not None else 0

    @property
    def tested(self) -> dict[str, int]:
        """How many images each accuracy is measured on, by its name. Those that turn out to be broken do not count."""
        if self.test is None:
            return {}
        good = self.test.readable()
        return {"overall": len(good), **dict(zip(self.names, good.counts.values(), strict=True))}

    @property
    def names(self) -> list[str]:
        """What the accuracy of each class is called: two words have another meaning among metrics."""
        return [f"class {name}" if name in ("overall", "worst") else title(name) for name in self.classes]

    @property
    def prepared(self) -> str:
        """How images are prepared, in a line."""
        return f"images: {prepared(self.reference.view)}"

    def introduction(self) -> list[str]:
        """Which images are used for what, in lines."""
        has, lines = size_of(self.model), [self.prepared]
        if has < self.had:
            lines.append(f"outputs that no folder means are removed first: {human(self.had)} → {human(has)} parameters")
        for name, members in self.outputs.items():
            scored, tested = (photos.counts[name] if photos else 0 for photos in (self.reference, self.test))
            lines.append(f"{title(name)}: {_described(members)}; {scored} images to score on, {tested} to test on")
        if self.merge is not None:
            lines.append(f"outputs that mean the same become one: {self.merge} of their probabilities")
        if self._fast:
            lines.append("accuracy is measured in ONNX Runtime, on files whose outputs are checked against PyTorch's")
        if self.test is None:
            lines.append(
                "no image is left to test on, so accuracy is not measured. Fix: --test, or a smaller --per-class."
            )
        return lines

    @property
    def evaluate(self) -> Callable[[nn.Module], dict[str, float]] | None:
        """Accuracy, with a warning if it is low before anything is removed: then pruning is not what is wrong."""
        if self.test is None:
            return None
        whole, chance = size_of(self.model), 1 / len(self.classes)

        def accuracy(model: nn.Module) -> dict[str, float]:
            found = self.accuracy(model)
            if not self.pruned and size_of(model) == whole and found["overall"] < (1 + chance) / 2:
                warnings.warn(
                    f"the unpruned model is right on only {100 * found['overall']:.1f} % of the test images (chance is "
                    f"{100 * chance:.1f} %). Are the weights for exactly this architecture, are --outputs and --merge "
                    f"right, and are --input-size, --mean and --std those of its training?",
                    SecateurWarning,
                    stacklevel=2,
                )
            return found

        return accuracy

    def training_batches(self, size: int | None = None) -> Any:
        """For training."""
        return self.training().training(size or _TRAINED, device_of(self.model))

    def save(self, result: Result, folder: Path) -> None:
        """Write the smaller model and where it came from. One of transformers is written as transformers does, unless
        images are shown to it in another way than its own."""
        origin = self.opened.origin
        whole = is_pretrained(result.model) and origin.classes == label_names(result.model)
        if whole and origin.view == hub_view(origin.model, result.model):
            with quiet_hub():
                result.save_pretrained(folder)
            return
        save(result, folder, about={"origin": self.opened.origin.to_dict()})

    def check_int8(self) -> None:
        """Refuse a model that int8 does not suit, before the work. The smaller one will have the same operations."""
        assert self.exports is not None
        try:
            file = self.exports.of(self.model, self.example())
        except (SecateurError, RuntimeError):  # the smaller model may still be exported
            return
        check(file, type(self.model).__name__)
        release()

    def in_int8(self, model: nn.Module, path: Path) -> Quantised:
        """Write a model in int8 and measure its accuracy. A refusal must not cost what was done before."""
        try:
            how = Int8.of(export(model, path, self.example(), quantize=self.data()))
        except SecateurError as error:
            return Quantised(refused=message_of(error))
        return Quantised(how, self.accuracy(Session(path)) if self.test is not None else None)

    def times(self, result: Result, files: Mapping[str, Path], printer: Printer, setup: Setup) -> list[Timing]:
        """Both models in turn: in PyTorch, with channels last where that is faster, compiled if that is asked for, and
        in ONNX Runtime if there are files for it."""
        example = self.example()
        batches = sorted({setup.batch, *fitting([self.model, result.model], example)})  # the user's is timed as it is
        threads = setup.threads if setup.device == "cpu" else 0
        with setup.threaded():
            with printer.stage(f"timing both models for {', '.join(map(str, batches))} images"):
                found = time_batches(self.model, result.model, example, batches)
                for runtime in ("channels-last", "compile") if setup.runtime == "compile" else ("channels-last",):
                    found += time_elsewhere(self.model, result.model, example, found, runtime, setup)
            found += time_files(self.model, files, example, batches, printer, self.exports)
        return [replace(timing, threads=threads) for timing in found]

    def report(
        self, path: Path, result: Result, timings: Sequence[Timing], more: Mapping[str, str] = MappingProxyType({})
    ) -> Path:
        """Write the page, with heat maps of a few images."""
        view = self.reference.view
        about = {
            "images scored on": str(len(self.reference)),
            "images tested on": str(self.tested.get("overall", "none")),
            "images are": prepared(view),
            "outputs": "; ".join(f"{title(name)}: {_described(members)}" for name, members in self.outputs.items()),
            **({"merged by": self.merge} if self.merge is not None else {}),
            **more,
        }
        page = Page(
            title=f"{self.opened.origin.model} pruned by {result.settings['criterion']}", about=about,
            latency=timings or False, mean=view.mean, std=view.std, answers=self._answers(result),
        )  # fmt: skip
        return write_page(result, path, self.shown(), original=self.model, classes=self.meanings, page=page)

    @property
    def meanings(self) -> dict[int, str]:
        """What the outputs that have photographs mean."""
        return {number: title(name) for number, name in zip(self.reference.targets, self.classes, strict=True)}

    def shown(self) -> tuple[Tensor, Tensor]:
        """A few images to explain, of as many classes as can be."""
        photos = self.test if self.test is not None else self.reference
        few = photos.draw(max(1, _SHOWN // len(photos.classes)), at_most=True).of(photos.classes[:_SHOWN])
        return few.tensors(device_of(self.model))

    def _answers(self, result: Result) -> Answers | None:
        """What both models say to the test images, as it was measured during the run, or now if the run went on."""
        if (photos := self.test) is None:
            return None
        found, where = answered(self.measured, self.accuracy, (self.model, result.model), None), device_of(self.model)
        good = photos.readable()
        return None if found is None else replace(found, pick=lambda places: [good.at(places).tensors(where)[0]])

    def exported(self, onnx: Path) -> str:
        """What the exported model takes and returns, in words."""
        classes = ", ".join(map(title, self.opened.origin.classes))
        return expects(self.reference.view, fixed_batch(onnx)) + (f"; outputs: {classes}" if classes else "")


def digest(photos: Photographs | None) -> str | None:
    """A fingerprint of images and their order, by names and sizes."""
    if photos is None:
        return None
    found = hashlib.sha256()
    for path, label in zip(photos.paths, photos.labels, strict=True):
        found.update(f"{path.name} {path.stat().st_size} {label}\n".encode(errors="surrogateescape"))
    return f"{len(photos)} images, {found.hexdigest()[:16]}"


def _described(members: Sequence[int]) -> str:
    """The outputs of a class in words."""
    return f"output {members[0]}" if len(members) == 1 else f"{len(members)} outputs, {members[0]} to {members[-1]}"


def read_task(opened: Opened, given: Images, seed: int, narrow: bool) -> Task:
    """Match folders and outputs, keep only those outputs if `narrow`, and divide the photographs."""
    assert given.images is not None
    decoder = Decoder(given.strict, allowed(None) // _DECODED)
    photos = read(given.images, view=opened.origin.view, decoder=decoder)
    count = count_outputs(opened)
    chosen = match(photos.classes, count, given.outputs or (), opened.origin.classes)
    merged = [name for name, members in chosen.items() if len(members) > 1]
    if narrow and len(chosen) == 1:  # any model with a single output is right on all of its images
        raise DataError(
            f"{given.images} has one class folder, {photos.classes[0]!r}: a model for one class is right whatever it "
            "sees.",
            fix="a folder for every class that it must tell apart; or --no-specialize, which keeps all outputs",
        )
    if merged and not narrow:
        raise DataError(
            f"{merged[0]!r} is meant by {len(chosen[merged[0]])} outputs; they must be merged into one.",
            fix="leave out --no-specialize",
        )
    targets = range(len(chosen)) if narrow else [members[0] for members in chosen.values()]
    photos = photos.numbered(targets)
    reference = photos.draw(given.per_class or _REFERENCE, seed=seed, at_most=given.per_class is None)
    had, by = size_of(opened.model), None  # the model itself goes as soon as it is specialised
    if narrow:
        if merged:
            by = _fairest(opened.model, chosen, reference) if given.merge == "auto" else given.merge
        opened = keep_outputs(opened, chosen, count, by or "sum")
    rest = photos.without(reference)
    held: Photographs | None = None
    if given.test is not None:
        held = _other_images(read(given.test, view=photos.view, decoder=decoder), photos, given.test)
        if given.test_per_class is not None:
            held = held.draw(given.test_per_class, seed=seed, at_most=True)
    elif min(rest.counts.values()) > 0:
        held = rest.draw(given.test_per_class or _TEST, seed=seed, at_most=True)
        rest = rest.without(held)
    return Task(opened, had, chosen, reference, rest, held, by)


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
