"""What pages are made of: their settings, tables and numbers, and templates that escape what they are given."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.arguments import check_kind
from secateur.errors import SecateurError
from secateur.latency.timing import Timing
from secateur.plans.targets import brief
from secateur.relevance.composites import Composite
from secateur.relevance.rules import Rule


@dataclass(frozen=True, repr=False)
class Page:
    """How a report looks: `result.report(path, page=Page(title="…"))`.

    `about` is shown among the settings. Both models are timed in turn for batches of 1 and 32, unless `latency` is
    False or holds what was measured already. Heat maps are made with `composite`, by default that of the run. `mean`
    and `std` are those that the images were normalised with. `tokenizer` gives the words of texts. `answers` are what
    both models said to the test samples, if that is known already.
    """

    title: str | None = None
    about: Mapping[str, str] | None = None
    latency: bool | Sequence[Timing] = True
    composite: str | Composite | Rule | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    tokenizer: Any = None
    answers: Any = None

    __repr__ = brief

    def __post_init__(self) -> None:
        for name, kind, fix in (
            ("title", str, "a text"),
            ("about", Mapping, "{'name': 'text'}"),
            ("latency", (bool, Sequence), "True, False, or timings"),
            ("mean", Sequence, "a number for each channel"),
            ("std", Sequence, "a number for each channel"),
        ):
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), kind, fix)


@dataclass(frozen=True)
class Cell:
    """A number, with small print below it. `state` is a class of the style sheet; `hint` shows on hovering."""

    text: str
    small: str = ""
    state: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """`heads` name the columns behind the `keys` that name a line."""

    title: str
    keys: Sequence[str]
    heads: Sequence[str]
    lines: Sequence[tuple[Sequence[str], Sequence[Cell]]]
    note: str = ""

    @classmethod
    def of(cls, title: str, keys: Sequence[str], heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
        """A table of plain text: each row has its keys first."""
        count = len(keys)
        return cls(title, keys, heads, [(row[:count], [Cell(text) for text in row[count:]]) for row in rows])

    @property
    def csv(self) -> str:
        """The whole table as CSV text, with plain minus signs."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.keys, *self.heads])
        for keys, cells in self.lines:
            writer.writerow([*keys, *(cell.text.replace("−", "-") for cell in cells)])
        return text.getvalue()

    @property
    def file(self) -> str:
        """What the table is called as a file.

        >>> Table("Accuracy, % by class", (), (), ()).file
        'accuracy-by-class.csv'
        """
        return "-".join(re.findall(r"\w+", self.title.lower())) + ".csv"


def number(value: float, form: str = ".6g") -> str:
    """A number with a real minus sign, by default without zeros at the end.

    >>> number(97.5), number(100.0), number(-0.25), number(-0.25, "+.1f")
    ('97.5', '100', '−0.25', '−0.2')
    """
    return format(value, form).replace("-", "−")


def percent(share: float) -> str:
    """A share in a table."""
    return number(100 * share, ".2f")


def fill(template: str, package: str = "secateur", **content: Any) -> str:
    """A template of a package, by its path there, with everything in it escaped. Parts of ours are at hand in any."""
    try:
        import jinja2
    except ImportError as error:
        raise SecateurError("pages need jinja2.", fix="pip install 'secateur[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in dict.fromkeys((package, "secateur"))]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["uri"] = lambda png: "data:image/png;base64," + base64.b64encode(png).decode()
    environment.filters["csv"] = (  # with a mark by which spreadsheets know the encoding
        lambda table: "data:text/csv;charset=utf-8;base64," + base64.b64encode(table.csv.encode("utf-8-sig")).decode()
    )
    return environment.get_template(template).render(**content)
