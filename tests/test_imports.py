"""What importing the package and asking for help costs: modules are counted, not seconds."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import secateur
from secateur.cli.app import COMMANDS, app

HEAVY = ("torch", "numpy", "torchvision", "transformers", "onnx", "matplotlib")


def loaded(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has imported after some code."""
    code += f"\nimport sys; print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_importing_the_package_imports_nothing_heavy_before_a_name_is_used() -> None:
    assert loaded("import secateur; secateur.__version__; dir(secateur)") == set()
    assert "torch" in loaded("import secateur; secateur.analyze")


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["prun"]])
def test_help_needs_no_torch(words: list[str]) -> None:
    code = f"""
from secateur.cli import app
try:
    app({words!r}, prog_name="secateur")
except SystemExit:
    pass"""
    assert loaded(code) == set()


@pytest.mark.parametrize(
    ("before", "said", "expected"),
    [("", {}, "1000"), ("", {"GOMP_SPINCOUNT": "7"}, "7"), ("", {"OMP_WAIT_POLICY": "active"}, "None"),
     ("import torch", {}, "None")],
)  # fmt: skip
def test_the_command_does_not_let_threads_wait_in_a_loop(before: str, said: dict[str, str], expected: str) -> None:
    code = f"{before}\nimport secateur.cli, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    own = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | said
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=own)
    assert done.stdout.strip() == expected


def test_every_public_name_is_there_and_typed_where_it_lives() -> None:
    tree = ast.parse(Path(secateur.__file__).read_text("utf-8"))
    typed = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("secateur.")
        for alias in node.names
    }
    assert set(typed) == set(secateur.__all__) <= set(dir(secateur))
    for name, module in typed.items():
        found = getattr(secateur, name)
        assert found is getattr(sys.modules[module], name)
        assert not inspect.ismodule(found), name
    with pytest.raises(AttributeError, match="no attribute 'prun'"):
        secateur.prun  # noqa: B018
    everything: dict[str, object] = {}
    exec("from secateur import *", everything)
    assert set(secateur.__all__) <= set(everything)


@pytest.mark.parametrize("order", ["import secateur.repair", "from secateur.loop.prune import prune", "pass"])
def test_a_function_is_not_hidden_by_a_package_of_its_name(order: str) -> None:
    code = f"{order}\nimport secateur, types; assert isinstance(secateur.repair, types.FunctionType), secateur.repair"
    code += "\nfrom secateur import repair; from secateur.repair import Correction; assert repair is secateur.repair"
    loaded(code)


def test_help_lists_each_command_as_the_command_describes_itself() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(commands) == list(COMMANDS)
    for name, line in COMMANDS.items():
        assert " ".join((commands[name].help or "").split("\n\n")[0].split()) == line
