"""`python -m reproduction toy | few-shot | fine-tune`: the paper's experiments."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from secateur.cli.app import Commands
from secateur.cli.folder import check_folder
from secateur.cli.options import Merging
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


@commands.callback()
def group() -> None:
    """Run the paper's experiments and compare with its numbers."""


@commands.command()
def toy(
    quick: Annotated[bool, typer.Option("--quick", help="Narrower networks, fewer seeds: under a minute.")] = False,
    net: Annotated[
        Net | None, typer.Option(help="As the paper states it, or as its script has it. Default: both.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, figures and tables.")] = Path("secateur-toy"),
    cache: Annotated[Path | None, typer.Option(help="Folder for networks and finished parts.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """The toy experiments: every table and figure, beside the paper's numbers."""
    from reproduction.toy.recipe import FULL, QUICK, readings
    from reproduction.toy.reproduction import reproduce
    from reproduction.toy.store import default_cache

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        work = bar.add_task("starting", total=None)

        def show(text: str, done: int, total: int) -> None:
            bar.update(work, description=text, completed=done, total=total)

        chosen = readings([net.value] if net else None)
        result = reproduce(out, QUICK if quick else FULL, chosen, cache or default_cache(), workers, show)
    if as_json:
        print(json.dumps([asdict(claim) | {"holds": claim.holds} for claim in result.claims]))
        return
    for claim in result.claims:
        state = "holds" if claim.holds else f"{len(claim.exceptions)} of {claim.cases} cases differ"
        print(f"{claim.net:>6}  {claim.text}: {state}")
    print(f"\n{result.seconds:.0f} s; page: {result.page}")


# Options that both image experiments have.
_Model = Annotated[
    str | None,
    typer.Option("--model", help="alexnet, vgg16, resnet18, resnet50, or a text such as FILE.py:NAME."),
]
_Images = Annotated[Path | None, typer.Option("--images", help="The folder that the data set lies in.")]
_Weights = Annotated[str | None, typer.Option("--weights", help="A file, or `default` for torchvision's download.")]
_Early = Annotated[
    bool, typer.Option("--early-strides", help="The weights are the original ResNet-50's, which strides early.")
]
_Criteria = Annotated[str, typer.Option("--criteria", help="Names, with commas.")]
_Step = Annotated[float, typer.Option("--step", help="The share of all filters that leaves at a time.")]
_Steps = Annotated[int, typer.Option("--steps", min=1, help="How many times.")]
_Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 …")]
_Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time, each in a process of its own.")]
_Size = Annotated[int, typer.Option("--size", min=8, help="The side of the images that the network sees.")]
_Pages = Annotated[
    Path | None, typer.Option("--pages", help="Folder for the page and the figures. Default: the output folder.")
]
_Only = Annotated[bool, typer.Option("--table-only", help="Run nothing: make the page from what is in the folder.")]


@commands.command("few-shot")
def few_shot(
    model: _Model = None,
    images: _Images = None,
    weights: _Weights = None,
    data: Annotated[
        str, typer.Option(help="ilsvrc, catsdogs, or a pair: aircraft+birds, aircraft+cars, birds+cars.")
    ] = "ilsvrc",
    early_strides: _Early = False,
    draws: Annotated[int, typer.Option(min=1, help="Repetitions, each with other classes and images.")] = 20,
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
        int, typer.Option(min=0, help="Steps on the fully connected layers at every share of filters (VGG, AlexNet).")
    ] = 0,
    prepare_epochs: Annotated[
        int, typer.Option(min=1, help="Epochs for the classifier, where the weights have none.")
    ] = 200,
    size: _Size = 224,
    merge: Annotated[
        Merging, typer.Option(help="How the probabilities of outputs that mean the same become one (catsdogs, pairs).")
    ] = Merging.sum,
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
    from reproduction.few_shot.campaign import Settings
    from reproduction.few_shot.campaign import few_shot as work
    from reproduction.few_shot.page import write_page

    check_folder(out, images=images)
    if pages is not None:
        check_folder(pages, images=images)
    if not table_only:
        settings = Settings(
            _given("--model", model), data, str(_given("--images", images)), weights, early_strides, classes, per_class,
            step, steps, grid, prepare_epochs, size, merge.value,
        )  # fmt: skip
        chosen = _listed("--criteria", criteria), _modes(mode)
        work(settings, out, *chosen, draws, device, batch_size, jobs, _line)
    print(f"page: {write_page(out, pages or out)}")


@commands.command("fine-tune")
def fine_tune(
    model: _Model = None,
    data: Annotated[
        str, typer.Option(help="scene15, event8, catsdogs, flowers102, cifar10, aircraft, birds, cars or ilsvrc.")
    ] = "scene15",
    images: _Images = None,
    weights: _Weights = None,
    early_strides: _Early = False,
    draws: Annotated[int, typer.Option(min=1, help="Repetitions, each with another split and seed.")] = 1,
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
    device: _Device = "cpu",
    jobs: _Jobs = 1,
    out: Annotated[Path, typer.Option(help="Folder for everything; a stopped run goes on from its last step.")] = Path(
        "secateur-fine-tune"
    ),
    pages: _Pages = None,
    table_only: _Only = False,
) -> None:
    """Scenario 1: prepare, then remove 5 % of the filters at a time and fine-tune. Tables 3 and S3, Figures 5 to 7."""
    from reproduction.fine_tune.campaign import Settings
    from reproduction.fine_tune.campaign import fine_tune as work
    from reproduction.fine_tune.page import write_page

    check_folder(out, images=images)
    if pages is not None:
        check_folder(pages, images=images)
    if not table_only:
        settings = Settings(
            _given("--model", model), data, str(_given("--images", images)), weights, early_strides, prepare_epochs,
            epochs, batch_size, lr, step, steps, score_batch, size,
        )  # fmt: skip
        work(settings, out, _listed("--criteria", criteria), _modes(mode), draws, device, jobs, _line)
    print(f"page: {write_page(out, pages or out)}")


def _given(option: str, value: T | None) -> T:
    if value is None:
        raise SecateurError(f"{option} is needed (with --table-only it is not).")
    return value


def _listed(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise SecateurError(f"{option} {text!r} names nothing, or something twice.")
    return names


def _modes(text: str) -> tuple[str, ...]:
    from reproduction.runs import MODES

    names = _listed("--mode", text)
    wrong = [name for name in names if name not in MODES]
    if wrong:
        raise SecateurError(f"--mode {wrong[0]!r} is not known; there are {', '.join(MODES)}.")
    return names


def _line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    commands(prog_name="python -m reproduction")
