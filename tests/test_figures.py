"""The figures of the README are those of the result pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = re.sub(r"\s+", " ", (ROOT / "README.md").read_text("utf-8"))


def rows(page: str, heading: str = "", after: str = "") -> dict[str, list[str]]:
    """The first table behind a heading: the cells of each row without marks and intervals, by the first cell."""
    text = (ROOT / page).read_text("utf-8")
    text = text[text.index(after) :]
    text = text[text.index(heading) :]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    cells = [[cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in lines[0].splitlines()]
    return {row[0]: [re.sub(r" [±(].*", "", cell).strip("* ") for cell in row[1:]] for row in cells}


def said(pattern: str) -> list[str]:
    """The numbers in a sentence of the README."""
    found = re.search(pattern, README)
    assert found is not None, f"the README no longer says {pattern}"
    return list(found.groups())


@pytest.mark.parametrize("criterion", ["lrp", "taylor", "weight", "gradient"])
def test_accuracy_without_repair(criterion: str) -> None:
    own = rows("README.md", after="no fine-tuning, no repair")[criterion]
    page, home = "docs/results/few-shot.md", "## resnet50 on ilsvrc"
    gone = rows(page, "### physical mode: accuracy at a share of filters gone", home)
    left = rows(page, "### physical mode: accuracy at a share of MACs really left", home)
    where = dict(zip(gone["criterion"], gone[criterion], strict=True))
    macs = dict(zip(left["criterion"], left[criterion], strict=True))
    assert own == [where[f"{n} %"] for n in (30, 40, 50)] + [macs[f"{n} %"] for n in (80, 60, 50, 40)]


def test_accuracy_with_repair() -> None:
    own = rows("README.md", after="The same task **with repair**")
    lines = re.findall(
        r"\| 3 \| (\d+) % \| ([\d.]+) ± \S+ \| \*\*([\d.]+) ±", (ROOT / "docs/results/repair.md").read_text()
    )
    table = {macs: (plain, repaired) for macs, plain, repaired in lines}
    assert own["not repaired"] == [table[n][0] for n in ("60", "35", "16")]
    assert own["repaired"] == [table[n][1] for n in ("60", "35", "16")]


def test_perplexity() -> None:
    table = rows("docs/results/language.md", "| criterion | what may leave |")
    own = said(r"repaired: perplexity (\d+) by LRP, (\d+) by Taylor's squares, (\d+) by weight")
    column = table["criterion"].index("80 %, repaired")
    names = ("LRP, squares (default)", "Taylor, squares", "weight")
    assert own == [f"{float(table[name][column]):.0f}" for name in names]


def test_the_trial() -> None:
    table = rows("docs/results/product.md", "| | before | after | |")
    before, after = said(r"Accuracy went from ([\d.]+) to ([\d.]+) %")
    assert [f"{before} %", f"{after} %"] == table["accuracy, 800 photographs"][:2]
    own = said(r"([\d.]+)x as fast on one image and ([\d.]+)x on 32; in ONNX Runtime ([\d.]+)x and ([\d.]+)x")
    names = ("PyTorch, batch 1", "PyTorch, batch 32", "ONNX Runtime, batch 1", "ONNX Runtime, batch 32")
    assert own == [f"{float(table[name][-1].rstrip('x')):.1f}" for name in names]


def test_families() -> None:
    passed, families = said(r"(\d+) of the (\d+) families of transformers")
    assert f"{passed} of {families} families pass" in (ROOT / "docs/results/transformers.md").read_text("utf-8")
