"""The paper's tables in Markdown, with our numbers beside the printed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reproduction.criteria import CRITERIA, NAMES
from reproduction.toy.recipe import SETS, Recipe
from reproduction.toy.result import Reproduction, variants
from reproduction.toy.tables import Index, Row

_PRINTED = (1, 5, 20, 100)
_MEASURES = ("first-250", "last-250", "first-1000", "last-1000")


def markdown(result: Reproduction) -> str:
    """Claims, then Supplementary Table 1, Tables 1 and 2, Supplementary Table 2 and rank correlations, by network."""
    index = Index(result.rows)
    ways = variants(result)
    parts = []
    for reading in result.readings:
        net = reading.name
        parts += [f"## The {net} network", f"Read {reading.text}. Each cell: ours, then the print in brackets."]
        for claim in result.claims:
            if claim.net == net:
                state, right = "holds" if claim.holds else "does not hold", claim.cases - len(claim.exceptions)
                parts.append(f"- **{state}** ({right}/{claim.cases}): {claim.text}")
                parts += [f"  - {exception}" for exception in claim.exceptions]
        parts += ["### Accuracy on the training set (Supplementary Table 1)", _accuracies(index, net, result.recipe)]
        mine = [way for way in ways if way["net"] == net]
        names = list(dict.fromkeys(way["variant"] for way in mine))
        places = list(dict.fromkeys((way["set"], way["n"]) for way in mine))
        cell = {(way["set"], way["n"], way["variant"]): f"{way['mean']:.2f} ± {way['std']:.2f}" for way in mine}
        lines = [[name, str(n), *(cell[name, n, variant] for variant in names)] for name, n in places]
        parts += ["### Ways to compute LRP", _table(["set", "n", *names], lines)]
        n = min(result.recipe.sizes, key=lambda size: abs(size - 10))
        for table, title in (("with_lrp", "Table 1: chosen as LRP chooses"), ("self", "Table 2: chosen again")):
            lines = []
            for name in SETS:
                for measure in (*_MEASURES, "rank correlation"):
                    rows = [index.similarity(table, net, name, n, measure, criterion) for criterion in CRITERIA]
                    lines.append([name, measure, *(_cell(row, 3) for row in rows)])
            parts += [f"### {title}, n = {n}", _table(["set", "units", *NAMES.values()], lines)]
        lines = []
        for name in SETS:
            for measure in _MEASURES[:2]:
                cells = [_cell(index.across(net, name, n, m, measure), 3) for m in result.recipe.sizes]
                lines.append([name, measure, *cells])
        heads = ["set", "units", *(f"m = {m}" for m in result.recipe.sizes)]
        parts += [f"### Supplementary Table 2: LRP with n = {n} against LRP with m", _table(heads, lines)]
    return _spaced(parts)


def _accuracies(index: Index, net: str, recipe: Recipe) -> str:
    lines = []
    for name in SETS:
        before = _cell(index.unpruned(net, name, "train"), 2)
        for n in (size for size in recipe.sizes if size in _PRINTED):
            rows = [index.accuracy(net, name, "train", n, criterion) for criterion in CRITERIA]
            lines.append([name, str(n), before, *(_cell(row, 2) for row in rows)])
    return _table(["set", "n", "unpruned", *NAMES.values()], lines)


def _cell(row: Row, digits: int) -> str:
    spread = f" ± {row.std:.{digits}f}" if row.std >= 0.5 * 10**-digits else ""
    printed = "" if row.paper is None else f" ({row.paper:.{digits}f}{'†' if row.erratum else ''})"
    return f"{row.mean:.{digits}f}{spread}{printed}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * 2 + ["---:"] * (len(heads) - 2)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *lines])


def _spaced(parts: Sequence[str]) -> str:
    """Blank lines between blocks, none inside lists."""
    text = ""
    for part in parts:
        item = part.lstrip().startswith("- ")
        text += part + "\n" if item else ("\n" if text else "") + part + "\n\n"
    return text.replace("\n\n\n", "\n\n")
