"""A page as a reader without a browser finds it: elements in order, their attributes, their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "img", "br", "link", "input", "hr", "source", "base"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    pieces: list[str | Element] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, tag: str, **attributes: str) -> list[Element]:
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [
            e
            for e in self.walk()
            if e.tag == tag
            and all(
                value in e.attributes.get(k, "").split() or value == e.attributes.get(k) for k, value in wanted.items()
            )
        ]

    @property
    def text(self) -> str:
        return " ".join(" ".join(p if isinstance(p, str) else p.text for p in self.pieces).split())

    def by_id(self, name: str) -> Element:
        (found,) = [e for e in self.walk() if e.attributes.get("id") == name]
        return found

    @property
    def rows(self) -> list[list[str]]:
        """The body of the first table below."""
        (table, *_) = self.find("table")
        return [[cell.text for cell in row.children] for body in table.find("tbody") for row in body.find("tr")]

    @property
    def heads(self) -> list[str]:
        (table, *_) = self.find("table")
        return [cell.text for cell in table.find("thead")[0].find("th")]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {key: value or "" for key, value in attrs})
        self.open[-1].children.append(made)
        self.open[-1].pieces.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].pieces.append(data)


def parse(text: str) -> Element:
    """The page, whose every element must be closed where it was opened."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert len(parser.open) == 1
    return parser.root
