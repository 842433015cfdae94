"""The program `secateur`: options that all commands share, and errors in one line."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from secateur import __version__
from secateur.cli.compare import compare
from secateur.cli.demo import demo
from secateur.cli.explain import explain
from secateur.cli.export import export
from secateur.cli.inspect import inspect
from secateur.cli.options import message_of
from secateur.cli.output import warnings_as_lines
from secateur.cli.prune import prune
from secateur.cli.specialize import specialize
from secateur.errors import SecateurError
from secateur.running.progress import printable

# What to install when an optional package is missing.
_EXTRAS = {
    "matplotlib": "report",
    "jinja2": "report",
    "PIL": "vision",
    "torchvision": "vision",
    "timm": "timm",
    "transformers": "hf",
    "onnx": "export",
    "sklearn": "demo",
}

# typer has click's errors, or its own copies of them, depending on its version.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130  # the exit status that shells use


class Commands(TyperGroup):
    """Commands whose errors are one readable line, unless `--debug` is given, before or after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:
            os.environ["SECATEUR_DEBUG"] = "1"
            args = [arg for arg in args if arg != "--debug"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        debugging = bool(os.environ.get("SECATEUR_DEBUG"))
        try:
            with warnings_as_lines(sys.stderr, debugging):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("stopped. What was finished is kept; the same command goes on from there.")
            raise typer.Exit(_INTERRUPTED) from None
        except _USAGE as error:  # for example about a path that does not exist
            vars(error)["message"] = printable(str(vars(error)["message"]))
            raise
        except (SecateurError, OSError) as error:
            if debugging:
                raise
            _say(f"error: {message_of(error)}")
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None or debugging:
                raise
            _say(f"error: this command needs {error.name}. Fix: pip install 'secateur[{extra}]'")
        raise typer.Exit(1)


def _say(text: str) -> None:
    print(f"secateur: {text}", file=sys.stderr)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Prune neural networks by explaining them.",
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
) -> None:
    """Prune neural networks by explaining them."""


for command in (prune, explain, inspect, compare, specialize, export, demo):
    app.command()(command)
