"""Options that several commands share, checks of them, and messages in terms of options."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from secateur.analysis.specialize import Merge
from secateur.criteria.registry import criterion_named, known_criteria
from secateur.data.views import Fit, Interpolation, View
from secateur.errors import (
    Argument,
    CriterionError,
    DataError,
    SecateurError,
    SecateurWarning,
    TargetError,
    TrainingError,
)
from secateur.plans.targets import Target, check_share
from secateur.recover import Recover
from secateur.relevance.composites import PRESETS

_model = partial(typer.Option, rich_help_panel="Model")
_image = partial(typer.Option, rich_help_panel="Images")
_text = partial(typer.Option, rich_help_panel="Text")
_view = partial(typer.Option, rich_help_panel="How images are seen")
_training = partial(typer.Option, rich_help_panel="Training")

_FORMS = (
    "torchvision:NAME, timm:NAME, hf:FOLDER or hf:NAME (Hugging Face, with its weights and tokenizer), FILE.py:FACTORY "
    "(runs that file), or a folder that secateur wrote. Options follow a question mark: "
    "torchvision:resnet50?num_classes=10"
)
_WEIGHTS = (
    "File with the weights (.safetensors, or a state dict), or 'default' to download the zoo's own. Without it they "
    "are what the model was built with: random, for a zoo."
)
_ORIGINAL = "What a saved folder was cut from, if rebuilding that runs a FILE.py."
_OUTPUTS = (
    "Which outputs mean a class folder: cat=281-285 or dog=207,208; once per folder. Without it folders are named by "
    "output number, or by ImageNet name or wnid, or there is one per output."
)
_COUNT = "Images of each class that units are scored on, drawn by --seed. Default: up to 10."
_TEST = "Folder of held-out images, the same class folders. Without it some of --images are held out."
_TEST_COUNT = "Images of each class that accuracy is measured on. Default: up to 50 without --test, all with it."
_MERGE = "How the probabilities of outputs that mean the same become one"
_FAIR = "The mean is fairer to small groups"
_MERGE_BY_DATA = f"{_MERGE}; 'auto' takes what suits the images that units are scored on. {_FAIR}."
_TEXT = "Text file that units are scored on, for a language model. With --labels: a CSV, TSV or JSONL file."
_LABELS = "The model is a classifier: --text is a table with a column of texts and one of labels."
_COLUMNS = "Names of these two columns. Default: text, sentence, …, and label, target, …."
_TEST_TEXT = "File of held-out text. Without it the last fifth of --text is held out."
_TOKENS = "Length of the sequences that units are scored on."
_SEQUENCES = "How many sequences (or texts with labels) units are scored on. They are drawn evenly."
_TEST_SEQUENCES = (
    "How many sequences, each up to 1024 tokens, the perplexity is measured on, or texts with labels. Default: 64, "
    "or with labels 1000."
)
_SIZE = "Side of the network's input. Default: what its zoo or a saved folder says, else 224."
_FIT = (
    "Scale the short side and take the centre (crop), squeeze the whole image into the square (squash), or scale the "
    "long side and add borders (pad). Default: what the zoo or a saved folder says, else crop."
)
_RESIZE = (
    "Pixels to which sides are scaled before the centre is taken. Default: what the zoo or a saved folder says, else "
    "8/7 of the input's (256 for 224) with crop, and the input's with squash and pad."
)
_INTERPOLATION = "How pixels are scaled. Default: what the zoo or a saved folder says, else bilinear."
_MINUTES = "Train for so long, instead of a number of epochs."
_BATCH_SIZE = "Samples of one training step. Default: 20 images, or as many sequences of text as suits the model."
_CLIP = "Largest norm of the gradient; 0 is for no limit. Default: what suits the model."
_LORA = "For a language model: train adapters of this rank (peft), and merge them. Default: all weights are trained."
_MEMORY = (
    "What the work may take, from reading images to the report: '1GiB'. What the packages, the model and its files "
    "take comes on top. Default: what is free, at most 1.5 GiB without a GPU."
)
_MEAN = (
    "Mean of the training pixels, 0 to 1: three numbers, or one for grey. Default: what the zoo or a saved folder "
    "says, else ImageNet's."
)

Strict = Annotated[bool, _image("--strict", help="Refuse broken images instead of skipping them.")]
MergeBy = Annotated[Merge, _image(help=f"{_MERGE}. {_FAIR} where a network spreads some probability over all outputs.")]
EPOCHS = "Epochs of training after each removal, with the unpruned model as teacher. 0 is for none."
Seed = Annotated[int, typer.Option(help="Decides every random choice.")]
Memory = Annotated[str | None, typer.Option(help=_MEMORY, metavar="SIZE")]
Out = Annotated[Path, typer.Option(help="Folder for everything that is written.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget an unfinished run in --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on standard output.")]


@dataclass(frozen=True)
class Source:
    """Options that say which model a command takes."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=_FORMS, show_default=False)]
    weights: Annotated[str | None, _model(help=_WEIGHTS, metavar="FILE|default")] = None
    original: Annotated[str | None, _model(help=_ORIGINAL, metavar="MODEL")] = None
    device: Annotated[str, _model(help="'cpu', 'cuda', 'cuda:1', …, or 'auto': a GPU if there is one.")] = "auto"


@dataclass(frozen=True)
class Images:
    """Options that say which images are used for what, and what they mean."""

    images: Annotated[Path, _image(help="Folder with one folder of images per class.", show_default=False)]
    outputs: Annotated[list[str] | None, _image(help=_OUTPUTS, metavar="FOLDER=OUTPUTS")] = None
    test: Annotated[Path | None, _image(help=_TEST)] = None
    per_class: Annotated[int | None, _image(min=1, help=_COUNT)] = None
    test_per_class: Annotated[int | None, _image(min=1, help=_TEST_COUNT)] = None
    merge: Annotated[Literal["auto", Merge], _image(help=_MERGE_BY_DATA)] = "auto"
    strict: Strict = False


@dataclass(frozen=True)
class SomeImages(Images):
    """The same, for commands that take text as well."""

    images: Annotated[Path | None, _image(help="Folder with one folder of images per class.")] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Texts:
    """Options that say which text is used for what."""

    text: Annotated[Path | None, _text(help=_TEXT)] = None
    labels: Annotated[bool, _text("--labels", help=_LABELS)] = False
    columns: Annotated[str | None, _text(help=_COLUMNS, metavar="TEXT,LABEL")] = None
    test_text: Annotated[Path | None, _text(help=_TEST_TEXT)] = None
    tokens: Annotated[int, _text(min=2, help=_TOKENS)] = 256
    sequences: Annotated[int, _text(min=1, help=_SEQUENCES)] = 128
    test_sequences: Annotated[int | None, _text(min=1, help=_TEST_SEQUENCES)] = None

    def check(self, images: Images, written: bool = False) -> None:
        """Refuse options for images beside text, and options for text without any, unless it may be `written`."""
        folder: Path | None = images.images  # None only where a command takes text as well
        if self.text is None and not (written and not folder):
            given: dict[str, object] = {
                "--labels": self.labels,
                "--columns": self.columns,
                "--test-text": self.test_text,
            }
            for option in (name for name, value in given.items() if value):
                raise DataError(f"{option} says more about --text, which is missing.", fix="--text FILE")
            return
        if self.text is None and (self.labels or self.columns):
            what = "--labels and --columns say more about --text, which is missing."
            raise DataError(what, fix="--text FILE")
        given = {
            "--images": images.images, "--outputs": images.outputs, "--test": images.test,
            "--per-class": images.per_class, "--test-per-class": images.test_per_class,
        }  # fmt: skip
        for option in (name for name, value in given.items() if value):
            fix = "--test-text" if option == "--test" else f"leave out {option}"
            raise DataError(f"{option} is for images, but --text is given.", fix=fix)
        if self.columns and not self.labels:
            raise DataError("--columns says more about --labels, which is missing.", fix="--labels as well, or neither")
        if self.text and self.test_text and self.test_text.resolve() == self.text.resolve():
            what = f"--text and --test-text are the same file, {self.text}."
            raise DataError(what, fix="another --test-text, or none: then the last fifth is held out")


@dataclass(frozen=True)
class Training:
    """Options that say how a smaller model is trained."""

    minutes: Annotated[float | None, _training(min=0.01, help=_MINUTES)] = None
    learning_rate: Annotated[float | None, _training(min=0.0, help="Default: what suits the model.")] = None
    batch_size: Annotated[int | None, _training(min=2, help=_BATCH_SIZE)] = None
    clip: Annotated[float | None, _training(min=0.0, help=_CLIP)] = None
    lora: Annotated[int | None, _training(min=0, help=_LORA)] = None

    def check(self) -> None:
        """Warn of options about training where there is none."""
        given = {
            "--learning-rate": self.learning_rate, "--batch-size": self.batch_size, "--clip": self.clip,
            "--lora": self.lora,
        }  # fmt: skip
        for option in (name for name, value in given.items() if value is not None):
            what = f"{option} says how to train, but nothing asks for training, so it has no effect."
            warnings.warn(SecateurWarning(what, fix=f"--epochs or --minutes, or leave out {option}"), stacklevel=2)

    def settings(self, **more: Any) -> Recover:
        """As the Python function takes them."""
        return Recover(
            minutes=self.minutes, lr=self.learning_rate, batch_size=self.batch_size, clip=self.clip,
            lora=self.lora or 0, **more,
        )  # fmt: skip

    @contextmanager
    def naming_sizes(self) -> Iterator[None]:
        """The command makes the batches, so that a fix about their size is an option."""
        try:
            yield
        except TrainingError as error:
            if error.fits is None:
                raise
            size = Argument("batch_size", error.fits)
            what = error.what.replace("{", "{{").replace("}", "}}")
            fixed = TrainingError(what, fix="{size}", where=error.where, size=size)
            fixed.result = error.result
            raise fixed from error


@dataclass(frozen=True)
class Seen:
    """Options that say what the model sees of an image."""

    size: Annotated[int | None, _view("--input-size", min=1, help=_SIZE)] = None
    fit: Annotated[Fit | None, _view("--fit", help=_FIT)] = None
    resize: Annotated[int | None, _view(min=1, help=_RESIZE)] = None
    interpolation: Annotated[Interpolation | None, _view(help=_INTERPOLATION)] = None
    mean: Annotated[str | None, _view(help=_MEAN, metavar="R,G,B")] = None
    std: Annotated[str | None, _view(help="Their standard deviation.", metavar="R,G,B")] = None

    def over(self, view: View) -> View:
        """The model's own view, with the options that were given."""
        mean, std = _numbers(self.mean, "--mean"), _numbers(self.std, "--std")
        if (mean is None) != (std is None):
            raise typer.BadParameter(
                "give both or none, with three numbers each, or one for grey", param_hint="--mean, --std"
            )
        view = view.sized(self.size) if self.size else view
        resize = self.resize or (view.resize if self.fit in (None, view.fit) else None)
        return View(
            view.size, self.fit or view.fit, mean or view.mean, std or view.std, resize,
            self.interpolation or view.interpolation,
        )  # fmt: skip


def grouped(**fixed: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take its options in groups, such as `Source`. Options that are `fixed` are not offered."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        taken = inspect.signature(command, eval_str=True).parameters
        groups = {name: taken[name].annotation for name in taken if is_dataclass(taken[name].annotation)}
        offered: list[inspect.Parameter] = []
        for name, parameter in taken.items():
            inside = inspect.signature(groups[name], eval_str=True).parameters if name in groups else {name: parameter}
            offered += [item.replace(kind=item.KEYWORD_ONLY) for item in inside.values() if item.name not in fixed]

        @wraps(command)
        def run(**given: Any) -> None:
            given |= fixed
            made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
            command(**given, **made)

        run.__signature__ = inspect.Signature(offered)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in offered}
        return run

    return decorate


def _numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """`0.5,0.5,0.5` as numbers for pixels from 0 to 1."""
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
        if not all(map(math.isfinite, found)):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.5,0.5", param_hint=option) from None
    if not all(number <= 1 for number in found):
        scaled = ",".join(f"{number / 255:.3g}" for number in found)
        raise DataError(
            f"{option} {text} is for pixels from 0 to 255; here they run from 0 to 1.",
            fix=f"divide by 255, {option} {scaled}",
        )
    return found


def device_named(name: str) -> torch.device:
    """A device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        family, colon, number = name.lower().partition(":")
        if family in ("gpu", "nvidia", "cuda") and name != f"cuda{colon}{number}":
            raise SecateurError(
                f"there is no device {name!r}.", fix=f"--device cuda{colon}{number}, or auto: a GPU if there is one"
            ) from None
        fact = str(error).splitlines()[0].rstrip(". ")
        raise SecateurError(f"the device {name!r} cannot be used: {fact}.", fix="--device cpu, or auto") from None
    return device


def check_criteria(*names: str) -> None:
    """Refuse criteria that are not known, or given twice, before anything is read."""
    for name in names:
        try:
            criterion_named(name)
        except CriterionError:
            if "," in name:
                fix = " ".join(f"--criterion {one}" for one in name.split(","))
                raise CriterionError(f"--criterion {name} names several.", fix=f"once for each: {fix}") from None
            known = [*known_criteria(), *(f"lrp:{preset}" for preset in PRESETS)]
            near = difflib.get_close_matches(name.lower(), known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise CriterionError(
                f"--criterion {name} is not known.{hint} There are {', '.join(known_criteria())}, captum:METHOD and "
                f"lrp:COMPOSITE, with {', '.join(PRESETS)} for COMPOSITE."
            ) from None
        if names.count(name) > 1:
            raise CriterionError(f"--criterion {name} is given {names.count(name)} times.", fix="each one once")


def check_target(
    step: float | None, remove: float | None, keep: Mapping[str, float], max_drop: float | None,
    max_drift: float | None = None,
) -> None:  # fmt: skip
    """Refuse targets that make no sense before anything is read. A share above 1 is probably a percentage."""
    for name, value in keep.items():
        if 1 < value <= 100:
            raise TargetError(
                "{given} is no share, which lies between 0 and 1.", fix="{share} for {percent:g} per cent",
                given=Argument("keep", value, key=name), share=Argument("keep", value / 100, key=name), percent=value,
            )  # fmt: skip
    if max_drop is not None and max_drop > 1:
        what = f"{max_drop:g} is no share from 0 to 1; {max_drop / 100:g} is for {max_drop:g} points of accuracy"
        raise typer.BadParameter(what, param_hint="'--max-drop'")
    Target(remove, keep or None, max_drop, max_drift)
    if step is not None:
        check_share("step", step)
