"""`secateur reproduce`: the paper's experiments."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

commands = typer.Typer(no_args_is_help=True, help="Run the paper's experiments and compare with its numbers.")


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
    from secateur.experiments.toy.recipe import FULL, QUICK, readings
    from secateur.experiments.toy.reproduction import reproduce
    from secateur.experiments.toy.store import default_cache

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
