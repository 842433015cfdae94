"""The program `secateur`: options that all commands share, and errors in one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from secateur.cli.messages import message_of, warnings_as_lines
from secateur.errors import SecateurError, printable
from secateur.version import __version__

#: Each command and what `secateur --help` says of it. `secateur.cli.NAME` has the command.
COMMANDS = {
    "prune": "Make a model smaller, keeping what your images or your text need.",
    "recover": "Train a smaller model until it answers as the unpruned one does.",
    "explain": "Draw heat maps: red pixels or words speak for the output, blue ones against it.",
    "inspect": "Show a model's layers, what they cost, what may leave, and what may not and why.",
    "compare": "Prune by several criteria on the same images, by the paper's algorithm without repair, and compare.",
    "specialize": "Keep some of a classifier's outputs and remove the rest; outputs that mean the same can be merged.",
    "export": "Write a model as ONNX, and check with ONNX Runtime that it computes the same.",
    "demo": (
        "Train a small network on digits, keep four of its ten outputs, compare four criteria, prune it by relevance."
    ),
}

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

# Commands that an interruption sends back to their beginning. Others, also those of other programs, go on.
_BEGIN_AGAIN = ("demo", "explain", "export", "inspect", "specialize")
# typer has click's errors, or its own copies of them, depending on its version.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130  # the exit status that shells use


class Commands(TyperGroup):
    """Commands whose errors are one readable line, unless `--debug` is given, before or after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a result must not be lost to a letter that a terminal lacks
            sys.stdout.reconfigure(errors="backslashreplace")
        if "--debug" in args:
            os.environ["SECATEUR_DEBUG"] = "1"
            args = [arg for arg in args if arg != "--debug"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        debugging = bool(os.environ.get("SECATEUR_DEBUG"))
        given = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        try:
            with warnings_as_lines(sys.stderr, debugging):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = " What was finished is kept; the same command goes on from there."
            _say(f"stopped.{'' if ctx.invoked_subcommand in _BEGIN_AGAIN else kept}")
            raise typer.Exit(_INTERRUPTED) from None
        except _USAGE as error:  # for example about a path that does not exist
            vars(error)["message"] = printable(str(vars(error)["message"])) + _swallowed(error, given)
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


def _swallowed(error: Exception, given: list[str]) -> str:
    """If an option is missing that was given: which option before it took its name for a value."""
    if "Missing" not in type(error).__name__:  # what has a wrong value was not swallowed
        return ""
    missing = set(getattr(getattr(error, "param", None), "opts", ()))
    for before, word in pairwise(given):
        if word in missing and before.startswith("--"):
            return f" {before} needs a value, and took {word} for it."
    return ""


class _Imported(Mapping[str, Any]):
    """Commands by name. Each is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Program(Commands):
    """The commands of `secateur`. Their modules, and torch with them, are imported when a command is called."""

    _listing = False

    @property  # type: ignore[override]
    def commands(self) -> Mapping[str, Any]:
        """All commands. Their names are known at once, for "Did you mean …?"."""
        return _Imported()

    @commands.setter
    def commands(self, none: Any) -> None:
        pass

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if self._listing else _command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


@cache
def _command(name: str) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    alone.command(name)(getattr(import_module(f"secateur.cli.{name}"), name))
    return typer.main.get_command(alone)


def _say(text: str) -> None:
    print(f"secateur: {text}", file=sys.stderr)


app = typer.Typer(
    cls=Program,
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
