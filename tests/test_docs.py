"""The documentation: every code block runs, every command parses, the site builds without a warning and is complete."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import reproduction
import secateur
from browser import SCHEMES, WIDTHS
from reproduction.__main__ import commands as experiments
from secateur import errors
from secateur.cli.app import app

ROOT = Path(__file__).parent.parent
PACKAGES = [Path(package.__path__[0]) for package in (secateur, reproduction)]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES.insert(1, ROOT / "CONTRIBUTING.md")


@dataclass(frozen=True)
class Block:
    """A piece of code in a page. `reason` says why it is not run, where it is not."""

    language: str
    code: str
    line: int
    reason: str | None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, and its indented ones where they hold commands."""
    text = page.read_text(encoding="utf-8")
    found = []
    fence = re.compile(r"(?:<!-- not run: ([^\n]*?) -->\n+)?^```([a-z]*)\n(.*?)^```$", re.M | re.S)
    for match in fence.finditer(text):
        found.append(Block(match[2], match[3], text[: match.start(3)].count("\n") + 1, match[1]))
    for match in re.finditer(r"(?:^    (?:secateur|python|make) .*\n)+", fence.sub("", text), re.M):
        found.append(Block("sh", re.sub(r"^    ", "", match[0], flags=re.M), 0, "an indented block is for looking"))
    return found


def commands(block: Block) -> list[list[str]]:
    """The command lines of a shell block, as words."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def parse(words: list[str], program: typer.Typer = app) -> None:
    """Refuse a command line that the program would refuse."""
    command: Any = typer.main.get_command(program)
    rest = [word for word in words if word not in ("--debug", "--help")]
    while rest and hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    if not hasattr(command, "commands"):
        command.make_context(command.name, rest)


def exists(words: list[str]) -> bool:
    """Whether a command line that is not ours means something here."""
    if words[0] == "make":
        return re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M) is not None
    if words[:2] == ["python", "-m"]:
        return (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    if words[0] == "python":
        return (ROOT / words[1]).is_file() or words[1] == "-c"
    if words[:2] == ["pip", "install"]:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        return set(re.findall(r"\w+", "".join(re.findall(r"\[(.*?)\]", words[2])))) <= set(known)
    return words[0] in ("git", "cd", "torchrun")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}, line {block.line}"
        if block.language == "python":
            # Line numbers of a traceback are those of the page.
            tree = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            if block.reason is None:
                exec(tree, space)
        elif block.language == "sh":
            for words in commands(block):
                if words[:3] == ["python", "-m", "reproduction"]:
                    assert block.reason is not None, f"{where}: takes long"
                    parse(words[3:], experiments)
                    continue
                if words[0] != "secateur":
                    assert exists(words), f"{where}: {words}"
                    continue
                parse(words[1:])
                if block.reason is None:
                    ran = CliRunner().invoke(app, words[1:])
                    assert ran.exit_code == 0, f"{where}: {ran.output}{ran.stderr}"
        else:
            assert block.language in ("", "text", "json", "toml", "pycon"), f"{where}: {block.language}?"


def test_blocks_are_found_with_their_reasons(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n```python\nx = 1\n```\n<!-- not run: no GPU -->\n```sh\nsecateur prune \\\n  m\n```\n\n    secateur demo\n"
    )
    first, second, third = blocks(page)
    assert (first.language, first.code, first.line, first.reason) == ("python", "x = 1\n", 3, None)
    assert (second.language, second.reason, commands(second)) == ("sh", "no GPU", [["secateur", "prune", "m"]])
    assert commands(third) == [["secateur", "demo"]]


def test_wrong_commands_are_refused() -> None:
    parse(["prune", "torchvision:resnet18", "--images", "a", "--out", "b"])
    for words in (
        ["prune", "m", "--images", "a", "--out", "b", "--unheard"],
        ["prune", "m"],
    ):
        with pytest.raises(Exception, match=r"No such option|Missing"):
            parse(words)
    with pytest.raises(Exception, match="unexpected"):
        parse(["toy", "x"], experiments)
    with pytest.raises(KeyError):
        parse(["fell"])


def _modules_with_examples() -> list[str]:
    files = [(path, folder) for folder in PACKAGES for path in sorted(folder.rglob("*.py"))]
    return [
        ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for path, folder in files
        if ">>>" in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = importlib.import_module(name.removesuffix(".__init__"))
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0, "see the output"


def test_every_public_function_has_an_example() -> None:
    functions = [n for n in secateur.__all__ if n[0].islower()]
    for name in functions:
        text = getattr(secateur, name).__doc__
        assert text, name
        assert ">>>" in text or name in ("save", "export"), name  # load shows save; export needs an extra


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_scripts(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runs as a program would, but in this process: importing torch again would take longer than the example."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path / "out")])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert list((tmp_path / "out").rglob("*.*")), "it writes something"


class _Links(HTMLParser):
    """What a page loads, and its anchors and text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        got = dict(attrs)
        if got.get("id"):
            self.ids.add(str(got["id"]))
        if tag in ("script", "img", "iframe", "source") and got.get("src"):
            self.loads.append(str(got["src"]))
        if tag == "link" and got.get("href"):
            self.loads.append(str(got["href"]))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder


def test_the_site_is_complete_and_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not [url for url in _Links(page).loads if re.match(r"(https?:)?//", url)], page
    for page, name, program in (
        ("reference/commands.html", "secateur", app),
        ("how-to/reproduce-the-paper.html", "python -m reproduction", experiments),
    ):
        shown = _Links(site / page).text
        for path, command in _leaves(name, typer.main.get_command(program)):
            assert path in shown
            for parameter in command.params:
                for option in [*parameter.opts, *parameter.secondary_opts]:
                    assert parameter.param_type_name == "argument" or option in shown, f"{path} {option}"
    anchors = {name for page in (site / "reference").glob("*.html") for name in _Links(page).ids}
    assert {f"secateur.{name}" for name in secateur.__all__ if name not in ("SecateurError", "__version__")} <= anchors
    known = {
        name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, Warning | Exception)
    }
    assert {f"secateur.errors.{name}" for name in known} <= anchors
    table = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert all(f"`{name}`" in table for name in known)


def _leaves(path: str, command: Any) -> list[tuple[str, Any]]:
    inside = getattr(command, "commands", {})
    return [leaf for name, item in inside.items() for leaf in _leaves(f"{path} {name}", item)] or [(path, command)]


def test_pages_fit_every_width(site: Path, browser: Any) -> None:
    """No page is wider than its window, none asks for anything from elsewhere, none has errors in its scripts."""
    wrong: list[str] = []
    asked: list[str] = []
    context = browser.new_context()
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        for width, scheme in zip(WIDTHS, SCHEMES, strict=True):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{path.relative_to(site)} at {width}")
    context.close()
    assert not wrong
    assert asked
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


# -- documented names exist --------------------------------------------------------------------------------------------
def found_at(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute or field of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            item: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            fields = {f for kind in getattr(item, "__mro__", ()) for f in getattr(kind, "__annotations__", {})}
            if not hasattr(item, part) and part not in fields:
                break
            item = getattr(item, part, None)  # of a field only the name is known
        else:
            return True
    return False


def documented(text: str) -> set[str]:
    """The names of ours that a text mentions, in full."""
    text = re.sub(r"https?://\S+", "", text)
    names = {match[0] for match in re.finditer(r"(?<![\w./-])(?:secateur|reproduction|benchmarks)(?:\.\w+)+", text)}
    names |= {f"secateur.{match[1]}" for match in re.finditer(r"(?<![\w.])sc\.(\w+(?:\.\w+)*)", text)}
    for match in re.finditer(r"from ((?:secateur|reproduction|benchmarks)[\w.]*) import (\([^)]*\)|[^\n]*)", text):
        listed = re.sub(r"#.*|[()]", "", match[2]).split(",")
        names |= {f"{match[1]}.{item.split()[0]}" for item in listed if item.strip()}
    return {name for name in names if not re.search(r"\.(py|md|json|html|safetensors|toml|svg|png)$", name)}


def docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


WRITTEN = [*PAGES, ROOT / "CONTRIBUTING.md"]
CODE = [path for folder in ("src", "reproduction", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_documented_names_exist() -> None:
    """Every module, function, class and attribute of ours that a page or a docstring names."""
    texts = {path: path.read_text(encoding="utf-8") for path in WRITTEN} | {path: docstrings(path) for path in CODE}
    where: dict[str, list[str]] = {}
    for path, text in texts.items():
        for name in documented(text):
            where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(where) > 100
    wrong = {name: places for name, places in where.items() if not found_at(name)}
    assert not wrong


def test_documented_files_exist() -> None:
    """Every path of the repository that a page or a docstring names."""
    pattern = re.compile(r"(?<![\w./<-])(?:src|tests|benchmarks|reproduction|docs|examples)/[\w./-]*\w")
    texts = {path: path.read_text(encoding="utf-8") for path in WRITTEN} | {path: docstrings(path) for path in CODE}
    wrong = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts.items()
        for match in pattern.finditer(re.sub(r"https?://\S+", "", text))
        if not (ROOT / match[0]).exists()
    }
    assert not wrong


def test_names_are_found_in_texts() -> None:
    text = "`sc.prune(x).model` of secateur.plans.plan.Plan\n    from secateur.relevance import (On,\n  Rule)  # both\n"
    assert documented(text) == {
        "secateur.prune", "secateur.plans.plan.Plan",
        "secateur.relevance", "secateur.relevance.On", "secateur.relevance.Rule",
    }  # fmt: skip
    assert found_at("secateur.Plan.cuts")
    assert found_at("secateur.repair.Repair.method")
    assert not found_at("secateur.Plan.curts")
    assert not found_at("secateur.plans.plan.Plane")
