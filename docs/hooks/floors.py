"""Draws the floors of the package from its real imports.

python docs/hooks/floors.py        writes docs/images/floors.svg
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parent.parent.parent
PICTURE = ROOT / "docs" / "images" / "floors.svg"
PACKAGE = "secateur"

WIDTH, LEFT, EDGE, GAP, PAD = 900, 64, 14, 9, 11  # the picture, its margins, between boxes, inside a box
LINE, BESIDE = 18, 106  # height of a line, room for a name
CHARACTER = {"holds": 7.0, "uses": 6.2}  # mean width
STYLE = """
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#33413a}
.name{font-size:15px;font-weight:650;fill:#14261c}.uses{font-size:12px;fill:#5d6d64}
.ground{fill:#f6f8f6}.box{fill:#fff;stroke:#c4d3c9}.mark{fill:#3f8f5f}.arrow{stroke:#3f8f5f;fill:none;stroke-width:1.6}
@media(prefers-color-scheme:dark){text{fill:#cfdad3}.name{fill:#f0f6f2}.uses{fill:#9db0a4}
.ground{fill:#141b17}.box{fill:#1f2923;stroke:#3a4a40}.mark{fill:#6cc08c}.arrow{stroke:#6cc08c}}
"""


def settings() -> dict[str, Any]:
    """What pyproject.toml tells import-linter."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return dict(table)


def floors() -> list[list[str]]:
    """The layers contract, from the top down."""
    (layers,) = [contract["layers"] for contract in settings()["contracts"] if contract["type"] == "layers"]
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def imports() -> dict[str, list[str]]:
    """Which packages every package really imports."""
    excluded = settings().get("exclude_type_checking_imports", False)
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=excluded, cache_dir=None)
    packages = sorted(graph.find_children(PACKAGE))
    for package in packages:
        graph.squash_module(package)
    found = {}
    for package in packages:
        used = graph.find_modules_directly_imported_by(package) - {package, PACKAGE}
        found[_short(package)] = sorted(map(_short, used))
    return found


def _short(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def holds(name: str) -> str:
    """The first sentence of a package's docstring."""
    path = ROOT / "src" / PACKAGE / name
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.replace("`", "").split()).split(". ")[0].rstrip(".")


def draw() -> str:
    """The picture, as SVG."""
    rows, used = floors(), imports()
    common = _common(rows, used)
    parts: list[str] = []
    top = EDGE
    for row in rows:
        width = (WIDTH - LEFT - EDGE - GAP * (len(row) - 1)) / len(row)
        boxes = [_text(name, used[name], common, width) for name in row]
        height = 2 * PAD - 5 + LINE * max(1 + lines[-1][0] for lines in boxes)
        for i, (name, lines) in enumerate(zip(row, boxes, strict=True)):
            parts.append(_box(round(LEFT + i * (width + GAP)), top, round(width), height, name, lines))
        top += height + GAP
    parts.append(
        _line(LEFT, top + 12, "uses", f"Nearly all packages use {_listed(common)}: not repeated in the boxes.")
    )
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24}" role="img">',
            f"<title>The floors of {PACKAGE}: each package imports only packages of lower floors</title>",
            f'<style>{STYLE.strip()}</style><rect class="ground" width="100%" height="100%" rx="10"/>\n',
            f'<path class="arrow" d="M40 {EDGE}V{top - GAP}m-6-9l6 9 6-9"/>',
            f'<text class="uses" text-anchor="middle" transform="translate(26 {top // 2}) rotate(-90)">',
            "imports go down only</text>\n",
            *parts,
            "</svg>\n",
        ]
    )


def _common(rows: list[list[str]], used: dict[str, list[str]]) -> list[str]:
    """Packages that at least two thirds of the packages on higher floors import: no need to repeat them in each box."""
    common: list[str] = []
    for i, row in enumerate(rows):
        above = [name for higher in rows[:i] for name in higher]
        common += [name for name in row if len(above) > 9 and 3 * sum(name in used[a] for a in above) >= 2 * len(above)]
    return sorted(common)


def _text(name: str, used: list[str], common: list[str], width: float) -> list[tuple[int, str, str]]:
    """The lines of a box: number, style, text. A wide box says what it holds beside its name."""
    first = 0 if width > WIDTH / 2 else 1
    room = width - 2 * PAD - (0 if first else BESIDE)
    lines = [(i, "holds", line) for i, line in enumerate(_wrapped(holds(name), "holds", room), first)]
    shown = [other for other in used if other not in common]
    if shown:
        lines += [
            (i, "uses", line)
            for i, line in enumerate(_wrapped(f"uses {', '.join(shown)}", "uses", room), lines[-1][0] + 1)
        ]
    return lines


def _wrapped(text: str, style: str, room: float) -> list[str]:
    return textwrap.wrap(text, int(room / CHARACTER[style]), break_on_hyphens=False)


def _box(x: int, y: int, width: int, height: int, name: str, lines: list[tuple[int, str, str]]) -> str:
    shift = 0 if lines[0][0] else BESIDE
    base = y + PAD + 11
    return "".join(
        [
            f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
            f'<rect class="mark" x="{x}" y="{y}" width="4" height="{height}" rx="2"/>\n',
            _line(x + PAD + 2, base, "name", name),
            *(_line(x + PAD + 2 + shift, base + LINE * i, style, line) for i, style, line in lines),
        ]
    )


def _line(x: int, y: int, style: str, text: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>\n'


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
