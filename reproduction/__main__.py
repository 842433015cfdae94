"""`python -m reproduction toy | few-shot | fine-tune`: the paper's experiments, from a checkout of the repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reproduction.few_shot import campaign as few
from reproduction.few_shot import page as few_page
from reproduction.fine_tune import campaign as fine
from reproduction.fine_tune import page as fine_page
from reproduction.shrink import SIDE
from reproduction.shrink import shrink as smaller
from reproduction.toy import experiment
from reproduction.toy.recipe import FULL, QUICK, readings
from reproduction.toy.store import default_cache
from secateur.analysis.specialize import Merge
from secateur.cli.app import Commands
from secateur.cli.run_folder import check_folder
from secateur.errors import SecateurError

T = TypeVar("T")

commands = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run the paper's experiments and compare with its numbers.",
)


class Net(StrEnum):
    """Which network the toy experiments use."""

    paper = "paper"
    script = "script"


def _progress() -> Progress:
    """A bar where somebody is looking."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@commands.callback()
def group() -> None:
    """Run the paper's experiments and compare with its numbers."""


@commands.command()
def toy(
    quick: Annotated[bool, typer.Option("--quick", help="Narrower networks, fewer seeds. Under a minute.")] = False,
    net: Annotated[
        Net | None, typer.Option(help="The network as the paper states it, or as in its script. Default: both.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, figures and tables.")] = Path("secateur-toy"),
    cache: Annotated[Path | None, typer.Option(help="Folder for networks and finished parts.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """The toy experiments: every table and figure, beside the paper's numbers."""
    with _progress() as bar:
        work = bar.add_task("starting", total=None)

        def show(text: str, done: int, total: int) -> None:
            bar.update(work, description=text, completed=done, total=total)

        chosen = readings([net.value] if net else None)
        recipe, place = QUICK if quick else FULL, cache or default_cache()
        result = experiment.reproduce(out, recipe, chosen, place, workers, show)
    if as_json:
        print(json.dumps([asdict(claim) | {"holds": claim.holds} for claim in result.claims]))
        return
    for claim in result.claims:
        state = "holds" if claim.holds else f"{len(claim.exceptions)} of {claim.cases} cases differ"
        print(f"{claim.net:>6}  {claim.text}: {state}")
    print(f"\n{result.seconds:.0f} s; page: {result.page}")


_SOME = "A:B is for those from A up to, not including, B."


def _range(text: str) -> range:
    """The draws that are meant: 3 is for 0, 1 and 2, and 1:3 for 1 and 2."""
    first, colon, last = text.rpartition(":")
    try:
        found = range(int(first) if colon else 0, int(last))
    except ValueError:
        found = range(0)
    if not found or found[0] < 0:
        raise typer.BadParameter(f"{text!r} is no number of draws, such as 3 or 1:3", param_hint="--draws")
    return found


# Options that both image experiments have.
_Model = Annotated[
    str | None,
    typer.Option("--model", help="alexnet, vgg16, resnet18, resnet50, or a text such as FILE.py:NAME."),
]
_Images = Annotated[Path | None, typer.Option("--images", help="The folder of the data set.")]
_Weights = Annotated[str | None, typer.Option("--weights", help="A file, or `default` for torchvision's download.")]
_Early = Annotated[
    bool, typer.Option("--early-strides", help="For weights of the original ResNet-50, which strides early.")
]
_Criteria = Annotated[str, typer.Option("--criteria", help="Names, separated by commas.")]
_Step = Annotated[float, typer.Option("--step", help="The share of all filters that is removed in a step.")]
_Steps = Annotated[int, typer.Option("--steps", min=1, help="How many steps.")]
_Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 …")]
_Jobs = Annotated[int, typer.Option("--jobs", min=1, help="How many runs at a time, each in its own process.")]
_Size = Annotated[int, typer.Option("--size", min=8, help="Height and width of the images that the network sees.")]
_Pages = Annotated[
    Path | None, typer.Option("--pages", help="Folder for the page and the figures. Default: the output folder.")
]
_Only = Annotated[bool, typer.Option("--table-only", help="Run nothing. Make the page from the runs in the folder.")]


@commands.command("few-shot")
def few_shot(
    model: _Model = None,
    images: _Images = None,
    weights: _Weights = None,
    data: Annotated[
        str, typer.Option(help="ilsvrc, catsdogs, or a pair: aircraft+birds, aircraft+cars, birds+cars.")
    ] = "ilsvrc",
    early_strides: _Early = False,
    draws: Annotated[str, typer.Option(help=f"Repetitions with different classes and images. {_SOME}")] = "20",
    classes: Annotated[int, typer.Option(min=2, help="Classes in a draw (ilsvrc).")] = 3,
    per_class: Annotated[int, typer.Option(min=1, help="Reference images per class.")] = 10,
    criteria: _Criteria = "lrp,taylor,gradient,weight",
    mode: Annotated[
        str,
        typer.Option(help="paper (filters masked one by one), physical (coupled filters removed), or both."),
    ] = "paper,physical",
    step: _Step = 0.05,
    steps: _Steps = 18,
    grid: Annotated[
        int, typer.Option(min=0, help="Steps on the fully connected layers, at every share of filters (VGG, AlexNet).")
    ] = 0,
    prepare_epochs: Annotated[
        int, typer.Option(min=1, help="Epochs for the classifier, if the weights have none.")
    ] = 200,
    size: _Size = 224,
    merge: Annotated[
        Merge, typer.Option(help="How the probabilities of the outputs of one class are combined (catsdogs, pairs).")
    ] = "sum",
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 50,
    device: _Device = "cpu",
    jobs: _Jobs = 1,
    out: Annotated[Path, typer.Option(help="Folder for everything; finished runs are not repeated.")] = Path(
        "secateur-few-shot"
    ),
    pages: _Pages = None,
    table_only: _Only = False,
) -> None:
    """Scenario 2: ten images per class, no fine-tuning. Figures 8 to 10, over filters and over MACs."""

    def work() -> None:
        settings = few.Settings(
            _given("--model", model), data, str(_given("--images", images)), weights, early_strides, step=step,
            steps=steps, prepare_epochs=prepare_epochs, score_batch=batch_size, size=size, classes=classes,
            per_class=per_class, grid=grid, merge=merge,
        )  # fmt: skip
        few.few_shot(
            settings, out, _names("--criteria", criteria), _names("--mode", mode), _range(draws), device, jobs, _line
        )

    _work_and_page(None if table_only else work, few_page.write_page, out, pages, images)


@commands.command("fine-tune")
def fine_tune(
    model: _Model = None,
    data: Annotated[
        str, typer.Option(help="scene15, event8, catsdogs, flowers102, cifar10, aircraft, birds, cars or ilsvrc.")
    ] = "scene15",
    images: _Images = None,
    weights: _Weights = None,
    early_strides: _Early = False,
    draws: Annotated[str, typer.Option(help=f"Repetitions with different splits and seeds. {_SOME}")] = "1",
    criteria: _Criteria = "weight,taylor,gradient,lrp",
    mode: Annotated[
        str,
        typer.Option(help="physical (the paper's way with VGG and AlexNet), paper (its way with ResNets)."),
    ] = "physical",
    step: _Step = 0.05,
    steps: _Steps = 18,
    prepare_epochs: Annotated[int, typer.Option(min=1, help="Epochs of training before pruning.")] = 200,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of fine-tuning after every step.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a training batch.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    size: _Size = 224,
    score_batch: Annotated[int, typer.Option(min=1, help="Images at a time when scoring.")] = 50,
    score_images: Annotated[
        int, typer.Option(min=0, help="How many training images score, drawn at random. 0: all of them.")
    ] = 0,
    device: _Device = "cpu",
    jobs: _Jobs = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for everything; a stopped run is resumed from its last step.")
    ] = Path("secateur-fine-tune"),
    pages: _Pages = None,
    table_only: _Only = False,
) -> None:
    """Scenario 1: prepare, then remove 5 % of the filters at a time and fine-tune. Tables 3 and S3, Figures 5 to 7."""

    def work() -> None:
        settings = fine.Settings(
            _given("--model", model), data, str(_given("--images", images)), weights, early_strides, step=step,
            steps=steps, prepare_epochs=prepare_epochs, score_batch=score_batch, size=size, epochs=epochs,
            batch_size=batch_size, lr=lr, score_images=score_images,
        )  # fmt: skip
        modes = _names("--mode", mode)
        fine.fine_tune(settings, out, _names("--criteria", criteria), modes, _range(draws), device, jobs, _line)

    _work_and_page(None if table_only else work, fine_page.write_page, out, pages, images)


@commands.command()
def shrink(
    source: Annotated[Path, typer.Argument(help="The folder of a data set.")],
    out: Annotated[Path, typer.Argument(help="The folder of the smaller copy.")],
    side: Annotated[int, typer.Option(min=8, help="The shorter side of the photographs that are written.")] = SIDE,
) -> None:
    """A copy of a data set whose photographs are smaller, for a machine that is far away."""
    with _progress() as bar:
        work = bar.add_task("shrinking", total=None)
        made = smaller(source, out, side, lambda done, of: bar.update(work, completed=done, total=of))
    print(f"{made} photographs were made smaller")


def _work_and_page(
    work: Callable[[], None] | None,
    write_page: Callable[[Path, Path], Path],
    out: Path,
    pages: Path | None,
    images: Path | None,
) -> None:
    """Check the folders, do the work, write the page."""
    for folder in (out, pages):
        if folder is not None:
            check_folder(folder, images=images)
    if work is not None:
        work()
    print(f"page: {write_page(out, pages or out)}")


def _given(option: str, value: T | None) -> T:
    if value is None:
        raise SecateurError(f"{option} is needed.", fix="give it, or use --table-only")
    return value


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise SecateurError(f"{option} {text!r} has no names, or the same name twice.")
    return names


def _line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    commands(prog_name="python -m reproduction")
