"""Hooks for MkDocs: pages by folder in the navigation, and lists of commands made from the programs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer

# In a page, `<!-- commands of NAME -->` becomes the list of commands of a program.
_MARK = re.compile("<!-- commands of (.*?) -->")


def on_config(config: Any) -> Any:
    """Replace `folder/` in the navigation by the pages of that folder that are not listed."""
    docs = Path(config["docs_dir"])
    listed = set(_pages(config["nav"]))
    config["nav"] = _filled(config["nav"], docs, listed)
    return config


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(item)]


def _filled(nav: Any, docs: Path, listed: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _filled(item, docs, listed) for title, item in nav.items()}
    if isinstance(nav, str):
        return nav
    filled: list[Any] = []
    for item in nav:
        if isinstance(item, str) and item.endswith("/"):
            found = sorted(f"{item}{path.name}" for path in (docs / item).glob("*.md"))
            filled += [page for page in found if page not in listed]
        else:
            filled.append(_filled(item, docs, listed))
    return filled


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace each mark by the commands of its program."""
    return _MARK.sub(lambda found: commands(found[1]), markdown)


def commands(name: str) -> str:
    """Every command of a program with its options, as Markdown."""
    from reproduction.__main__ import commands as reproduction
    from secateur.cli.app import app

    call, program, level = {
        "secateur": ("secateur", app, "##"),
        "reproduction": ("python -m reproduction", reproduction, "###"),
    }[name]
    parts: list[str] = []
    for path, command in leaves(call, typer.main.get_command(program)):
        parts.append(f"{level} {path}\n\n{_prose(command.help or '')}\n")
        parts.append("\n".join(["| option | meaning |", "|---|---|", *_rows(command)]) + "\n")
    return "\n".join(parts)


def leaves(path: str, command: Any) -> list[tuple[str, Any]]:
    """Commands that are no groups, with the words that call them."""
    inside = getattr(command, "commands", None)
    if inside is None:
        return [(path, command)]
    return [leaf for name, item in inside.items() for leaf in leaves(f"{path} {name}", item)]


def _prose(text: str) -> str:
    """Help text as Markdown: examples become code."""
    done, paragraphs = [], [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]
    for paragraph in paragraphs:
        found = re.fullmatch(r"(?:(Example[^:]*):\s*)?(secateur .*)", paragraph)
        if found:
            done.append((f"{found[1]}:\n\n" if found[1] else "") + f"```sh\n{_folded(found[2])}\n```")
        else:
            done.append(paragraph)
    return "\n\n".join(done)


def _folded(line: str, width: int = 76) -> str:
    """A long command line over several lines, broken before an option."""
    lines = [""]
    for word in re.split(r" (?=--)", line):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return " \\\n  ".join(lines)


def _rows(command: Any) -> list[str]:
    """What the program itself would print for each argument and option."""
    context = command.make_context(command.name, [], resilient_parsing=True)
    records = [p.get_help_record(context) for p in command.params]
    return [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in filter(None, records)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
