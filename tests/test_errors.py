"""Errors and warnings are data: fields, one text for Python, one for the command line, and no text that is searched."""

from __future__ import annotations

import ast
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch

import secateur as sc
from secateur.cli.messages import as_option, message_of
from secateur.errors import Argument, EvaluationError, SecateurWarning, TargetError

SOURCE = Path(sc.__file__).parent


def error() -> TargetError:
    return TargetError(
        "{remove} asks for {wanted} units of `{path}`.", fix="a smaller {keep}",
        remove=Argument("remove", 0.9), wanted=9, path="a{b}", keep=Argument("keep", key="macs"),
    )  # fmt: skip


def test_fields_and_both_texts() -> None:
    found = pickle.loads(pickle.dumps(error()))  # processes hand errors on
    assert (found.where, found.value) == ("remove", 0.9)
    assert found.what == "remove=0.9 asks for 9 units of `a{b}`."
    assert found.fix == "a smaller keep['macs']"
    assert str(found) == f"{found.what} Fix: {found.fix}."
    assert message_of(found) == "--remove 0.9 asks for 9 units of `a{b}`. Fix: a smaller --keep-macs."


@pytest.mark.parametrize(
    ("argument", "python", "option"),
    [
        (Argument("round_to"), "round_to", "--round-to"),
        (Argument("round_to", 8), "round_to=8", "--round-to 8"),
        (Argument("remove", 30.0), "remove=30.0", "--remove 30"),
        (Argument("keep", 0.5, key="latency"), "keep={'latency': 0.5}", "--keep-latency 0.5"),
        (Argument("strict", True), "strict=True", "--strict"),
        (Argument("ignore", ["fc", "a b"]), "ignore=['fc', 'a b']", "--ignore fc --ignore 'a b'"),
        (Argument("size", 0), "size=0", "--input-size 0"),
        (Argument("print(graph)"), "print(graph)", "`secateur inspect`"),
    ],
)
def test_arguments_are_options(argument: Argument, python: str, option: str) -> None:
    assert str(argument) == python
    assert as_option(argument) == option


def test_warnings_have_the_same_fields() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(SecateurWarning("{strict} is on.", fix="less", strict=Argument("strict")), stacklevel=1)
        warnings.warn("a plain {text}", SecateurWarning, stacklevel=1)
    first, second = (item.message for item in caught)
    assert isinstance(first, SecateurWarning)
    assert isinstance(second, SecateurWarning)
    assert (str(first), message_of(first)) == ("strict is on. Fix: less.", "--strict is on. Fix: less.")
    assert (str(second), second.fix) == ("a plain {text}", "")


def test_only_python_is_told_of_the_result() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with pytest.raises(EvaluationError) as caught:
        sc.prune(net, (torch.rand(6, 4), torch.arange(6) % 2), remove=0.5, evaluate=lambda _: 1 / 0, progress=False)
    assert str(caught.value).endswith("What was completed is in `error.result`.")
    assert "error.result" not in message_of(caught.value)


def texts(path: Path) -> list[str]:
    """All texts in a module but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    notes = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, owners) and isinstance(n.body[0], ast.Expr)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [node.value for node in found if id(node) not in notes]


def test_the_library_does_not_speak_of_options() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if "cli" not in path.relative_to(SOURCE).parts]
    assert len(modules) > 50
    spoken = [(path, text) for path in modules for text in texts(path) if re.search(r"(^|[\s(`])--[a-z]", text)]
    assert spoken == []


def test_a_fix_is_a_field_and_not_a_part_of_the_text() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.name not in ("errors.py", "__init__.py")]
    assert [(path, text) for path in modules for text in texts(path) if "Way out" in text] == []
    raised = [
        (path, node.lineno)
        for path in modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and "Fix:" in ast.unparse(node)
    ]
    assert raised == []
