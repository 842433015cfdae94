"""The page: one file with all figures and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reproduction.criteria import CRITERIA, NAMES
from reproduction.toy import reference
from reproduction.toy.recipe import DEPTHS, SETS, Reading, Recipe
from reproduction.toy.result import Reproduction, run_record, variants
from reproduction.toy.tables import ENDS, Index, Row
from secateur.report.document import Cell, Table, fill

if TYPE_CHECKING:
    from reproduction.toy.figures import Picture

_PRINTED_SIZE = 10
_PRINTED_DEPTH = 250


def render(result: Reproduction, pictures: dict[str, list[Picture]]) -> str:
    """The page as text."""
    index = Index(result.rows)
    sections = [
        {
            "reading": reading,
            "claims": [claim for claim in result.claims if claim.net == reading.name],
            "pictures": pictures[reading.name],
            "tables": _tables(index, reading, result.recipe, [v for v in variants(result) if v["net"] == reading.name]),
        }
        for reading in result.readings
    ]
    return fill(
        "toy/page.html",
        "reproduction",
        recipe=result.recipe,
        sections=sections,
        known=reference.numbers(),
        run=run_record(result),
        holds=sum(claim.holds for claim in result.claims),
        claims=len(result.claims),
    )


def _tables(index: Index, reading: Reading, recipe: Recipe, variants: list[dict[str, Any]]) -> list[tuple[Table, bool]]:
    """Each table, and whether it is folded away."""
    net = reading.name
    printed = min(recipe.sizes, key=lambda n: abs(n - _PRINTED_SIZE))
    others = [n for n in recipe.sizes if n != printed]
    first = f"Table 1: share of units chosen as LRP chooses, n = {printed}"
    second = f"Table 2: share of units chosen again over all pairs of seeds, n = {printed}"
    third = f"Supplementary Table 2: LRP with n = {printed} against LRP with m"
    sizes, depths = list(recipe.sizes), list(DEPTHS)
    return [
        (_accuracy(index, net, recipe, "train", "Supplementary Table 1, all n: accuracy on the training set"), False),
        *(
            (_accuracy(index, net, recipe, v, f"Accuracy on test sets with noise σ = {v}"), True)
            for v in recipe.views[1:]
        ),
        (_variants(variants, recipe), False),
        (_similarity(index, net, "with_lrp", [printed], first), False),
        (_similarity(index, net, "with_lrp", others, "Table 1 for all other n"), True),
        (_similarity(index, net, "self", [printed], second), False),
        (_similarity(index, net, "self", others, "Table 2 for all other n"), True),
        (_across(index, net, recipe, [printed], [_PRINTED_DEPTH], third), False),
        (_across(index, net, recipe, sizes, depths, "Supplementary Table 2 for all n, m and k"), True),
        (_correlation(index, net, recipe), False),
    ]


def _cell(row: Row, digits: int) -> Cell:
    spread = f" ± {row.std:.{digits}f}" if row.std >= 0.5 * 10**-digits else ""
    ours = f"{row.mean:.{digits}f}{spread}" if row.mean == row.mean else "–"
    known = []
    if row.paper is not None:
        known.append(f"paper {row.paper:.{digits}f}")
    if row.logs is not None and (row.paper is None or abs(row.logs - row.paper) > 0.6 * 10**-digits):
        known.append(f"logs {row.logs:.{digits}f}")
    if row.difference is not None:
        known.append(f"{row.difference:+.{digits}f}".replace("-", "−"))
    state = "" if row.within is None else "within" if row.within else "outside"
    if state == "outside" and abs(row.difference or 0) > (1 if digits == 2 else 0.05):
        state = "far"
    return Cell(ours, " · ".join(known), "erratum" if row.erratum else state, row.erratum or "")


def _accuracy(index: Index, net: str, recipe: Recipe, view: str, title: str) -> Table:
    lines = []
    for name in SETS:
        before = _cell(index.unpruned(net, name, view), 2)
        for n in recipe.sizes:
            cells = [_cell(index.accuracy(net, name, view, n, criterion), 2) for criterion in CRITERIA]
            lines.append(([name, str(n)], [before, *cells]))
    note = "" if view == "train" else "The authors' test sets had 500 points in all, ours have 500 per class."
    return Table(title, ("set", "n"), ("unpruned", *NAMES.values()), lines, note)


def _similarity(index: Index, net: str, table: str, sizes: list[int], title: str) -> Table:
    lines = []
    for name in SETS:
        for n in sizes:
            for measure in (f"{end}-{k}" for k in DEPTHS for end in ENDS):
                rows = [index.similarity(table, net, name, n, measure, criterion) for criterion in CRITERIA]
                lines.append(([name, str(n), measure], [_cell(row, 3) for row in rows]))
    note = "Two random choices would share k/3000: 0.042, 0.083, 0.167 and 0.333."
    return Table(title, ("set", "n", "units"), tuple(NAMES.values()), lines, note)


def _across(index: Index, net: str, recipe: Recipe, sizes: list[int], depths: list[int], title: str) -> Table:
    lines = []
    for name in SETS:
        for n in sizes:
            for measure in (f"{end}-{k}" for k in depths for end in ENDS):
                rows = [index.across(net, name, n, m, measure) for m in recipe.sizes]
                lines.append(([name, str(n), measure], [_cell(row, 3) for row in rows]))
    note = "Over all pairs of seeds; where m = n a reference set is not compared with itself, which the logs did."
    return Table(title, ("set", "n", "units"), tuple(f"m = {m}" for m in recipe.sizes), lines, note)


def _correlation(index: Index, net: str, recipe: Recipe) -> Table:
    lines = []
    for name in SETS:
        for n in recipe.sizes:
            cells = []
            for table in ("self", "with_lrp"):
                for criterion in CRITERIA:
                    cell = _cell(index.similarity(table, net, name, n, "rank correlation", criterion), 3)
                    if table == "self" and n == _PRINTED_SIZE:
                        misprint = reference.misprinted_correlation(name, criterion)
                        cell = Cell(cell.text, f"print {misprint:.3f}", "erratum", "computed on ids, not on ranks")
                    cells.append(cell)
            lines.append(([name, str(n)], cells))
    heads = [f"{label} {which}" for which in ("with itself", "with LRP") for label in NAMES.values()]
    note = "Spearman's coefficient of the ranks. With itself: over all pairs of seeds. With LRP: at equal seeds."
    return Table("Rank correlation", ("set", "n"), heads, lines, note)


def _variants(found: list[dict[str, Any]], recipe: Recipe) -> Table:
    names = list(dict.fromkeys(v["variant"] for v in found))
    lines = []
    for name in SETS:
        for n in recipe.variant_sizes:
            mine = {v["variant"]: v for v in found if v["set"] == name and v["n"] == n}
            lines.append(([name, str(n)], [Cell(f"{mine[v]['mean']:.2f} ± {mine[v]['std']:.2f}") for v in names]))
    main = next(v["variant"] for v in found if v["main"])
    note = f"Accuracy on the training set. The other tables of this network use: {main}."
    return Table("Ways to compute LRP", ("set", "n"), names, lines, note)
