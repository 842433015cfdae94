"""The thousand classes of ImageNet: number, WordNet id and name, and how to find one by either."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from secateur.errors import DataError

COUNT = 1000

# One word, two classes: the second is listed under a longer name, so equal names alone do not show it.
_TWICE = {"crane": (134, 517), "maillot": (638, 639)}


@dataclass(frozen=True)
class Entry:
    """One class."""

    index: int
    wnid: str
    name: str


@cache
def entries() -> tuple[Entry, ...]:
    """All classes, in the order of the outputs of an ImageNet model.

    >>> entries()[217]
    Entry(index=217, wnid='n02102040', name='English springer')
    """
    lines = files("secateur.data").joinpath("imagenet.txt").read_text("utf-8").splitlines()
    return tuple(Entry(i, *line.split(" ", 1)) for i, line in enumerate(lines))


def find(word: str) -> int | None:
    """The output for a WordNet id or a name, whatever its case and separators; None if there is no such class.

    >>> find("n01440764"), find("english_springer"), find("golf-ball"), find("cat")
    (0, 217, 574, None)
    """
    found = _index().get(_plain(word), ())
    if len(found) > 1:
        which = ", ".join(f"{i} ({entries()[i].wnid}, {entries()[i].name})" for i in found)
        raise DataError(f"{word!r} is the name of several ImageNet classes: {which}.", fix="use the number or wnid")
    return found[0] if found else None


def title(name: str) -> str:
    """A name for people: that of the class if `name` is a WordNet id, else itself.

    >>> title("n01440764"), title("my class")
    ('tench', 'my class')
    """
    if re.fullmatch(r"n\d{8}", name) and (index := find(name)) is not None:
        return entries()[index].name
    return name


def nearest(word: str, count: int = 3) -> list[str]:
    """Names of classes that share a word with `word`, or look like it, with their numbers.

    >>> nearest("springer", 2)
    ['English springer (217)', 'Welsh springer spaniel (218)']
    """
    plain = _plain(word)
    names = {_plain(entry.name): entry for entry in entries()}
    similar = difflib.get_close_matches(plain, names, count, 0.7)
    words = set(plain.split())
    inside = [name for name in names if words & set(name.split())]
    inside.sort(key=lambda name: -len(words & set(name.split())) / len(words | set(name.split())))
    chosen = list(dict.fromkeys([*inside, *similar]))[:count]
    return [f"{names[name].name} ({names[name].index})" for name in chosen]


def _plain(word: str) -> str:
    return " ".join(re.sub(r"[\s_\-]+", " ", word.casefold().replace("'", "")).split())


@cache
def _index() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for entry in entries():
        name = _plain(entry.name)
        found[name] = (*found.get(name, ()), entry.index)
        found[entry.wnid] = (entry.index,)
    return {**found, **_TWICE}
