"""Errors and warnings as the command line prints them: in one line, about options. Needs no torch."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from secateur.errors import Argument, Message, SecateurWarning, printable

# What the command line calls by another name than Python.
_NAMES = {"print(graph)": "`secateur inspect`", "size": "--input-size", "lr": "--learning-rate"}


def as_option(argument: Argument) -> str:
    """An argument of a Python function as the option of the same purpose.

    >>> as_option(Argument("keep", 0.5, key="macs")), as_option(Argument("ignore", ["fc", "layer4.*"]))
    ('--keep-macs 0.5', "--ignore fc --ignore 'layer4.*'")
    """
    usual = f"--{argument.name}{'-' if argument.key else ''}{argument.key}".replace("_", "-")
    option = _NAMES.get(argument.name, usual)
    if not argument.given or argument.value is True:
        return option
    values = argument.value if isinstance(argument.value, list) else [argument.value]
    texts = (f"{value:g}" if isinstance(value, float) else shlex.quote(str(value)) for value in values)
    return " ".join(f"{option} {text}" for text in texts)


def message_of(error: BaseException) -> str:
    """An error or warning as the command line prints it: in one line, about options."""
    return printable(" ".join((error.render(as_option) if isinstance(error, Message) else str(error)).split()))


@contextmanager
def _exporters(level: int) -> Iterator[None]:
    """Hide what the ONNX exporters log below this level: they comment on every node that they do not change."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(level, logger.level))
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)


@contextmanager
def warnings_as_lines(stream: TextIO, everything: bool) -> Iterator[None]:
    """secateur's warnings as one line each; others, which are for programmers, only when debugging."""
    with warnings.catch_warnings(), _exporters(logging.NOTSET if everything else logging.ERROR):
        usual = warnings.showwarning
        if not everything:
            warnings.simplefilter("ignore")
        warnings.simplefilter("default", SecateurWarning)

        def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if issubclass(category, SecateurWarning):
                print(f"secateur: warning: {message_of(message)}", file=stream)
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
