"""The floors of the package and the map in CONTRIBUTING: both show what is really there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "secateur"
MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def floors() -> ModuleType:
    """The script that draws the picture."""
    spec = importlib.util.spec_from_file_location("floors", ROOT / "docs" / "hooks" / "floors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_contract_covers_every_package(floors: ModuleType) -> None:
    (contract,) = [found for found in floors.settings()["contracts"] if found["type"] == "layers"]
    assert contract["containers"] == ["secateur"]
    assert contract["exhaustive"] is True
    assert "ignore_imports" not in contract
    assert "exhaustive_ignores" not in contract
    named = [name for floor in floors.floors() for name in floor]
    there = [path.stem for path in PACKAGE.glob("*.py")] + [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert sorted(named) == sorted(set(there) - {"__init__"})


def test_imports_go_down(floors: ModuleType) -> None:
    height = {name: -i for i, floor in enumerate(floors.floors()) for name in floor}
    upward = [f"{a} → {b}" for a, used in floors.imports().items() for b in used if height[a] <= height[b]]
    assert not upward


def test_the_picture_shows_todays_imports(floors: ModuleType) -> None:
    drawn = floors.draw()
    assert floors.PICTURE.read_text(encoding="utf-8") == drawn, "Fix: python docs/hooks/floors.py"
    assert len(drawn.encode()) < 40_000
    for name in floors.imports():
        assert f">{name}</text>" in drawn


def test_the_map_names_what_exists() -> None:
    rows = re.findall(r"^\|.*\| (`.*) \|$", MAP, re.M)
    assert len(rows) > 20
    missing = []
    for row in rows:
        package, *others = re.findall(r"`([\w./]+)`", row)
        for name in [package, *(other for other in others if other.endswith((".py", ".yml", "/")))]:
            if not any((folder / name).exists() for folder in (PACKAGE / package, PACKAGE, ROOT)):
                missing.append(f"{package}: {name}")
    assert not missing


def test_the_worked_examples_have_the_lines_they_promise() -> None:
    examples = re.findall(r"^### [^\n]*: (\d+) lines?\n.*?```python\n(.*?)```", MAP, re.M | re.S)
    assert len(examples) == 3
    for promised, code in examples:
        assert int(promised) == sum(not re.match(r"(from|import) |\s*$", line) for line in code.splitlines()), code
