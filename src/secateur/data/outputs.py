"""Which outputs of a model mean which class folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from secateur.data import imagenet
from secateur.errors import Argument, DataError

#: For each class, the outputs that mean it.
Outputs = dict[str, tuple[int, ...]]


def match(classes: Sequence[str], count: int, outputs: Sequence[str] = (), names: Sequence[str] = ()) -> Outputs:
    """The outputs for each class folder of a model with `count` outputs.

    `outputs` are texts such as `cat=281-285` or `dog=151-268,273`, one per folder. Without them the folders' names
    decide. If the outputs have `names`, folders must have the same. If not, a number means that output; a model with
    1000 outputs is ImageNet's, and a folder is a WordNet id or name; any other model needs one folder per output, in
    order. Nothing is guessed.

    >>> match(["cat", "dog"], 1000, ["cat=281-285", "dog=207,208"])
    {'cat': (281, 282, 283, 284, 285), 'dog': (207, 208)}
    >>> match(["cat", "dog"], 2, names=["dog", "cat"])
    {'cat': (1,), 'dog': (0,)}
    >>> match(["golf_ball", "n01440764"], 1000), match(["no", "yes"], 2)
    ({'golf_ball': (574,), 'n01440764': (0,)}, {'no': (0,), 'yes': (1,)})
    """
    if outputs:
        found = _given(classes, count, outputs)
    else:
        found = _called(classes, names) if len(names) == count else _by_name(classes, count)
    owners: dict[int, str] = {}
    for name, members in found.items():
        for index in members:
            if not 0 <= index < count:
                raise DataError(f"output {index} (for {name!r}) does not exist: the model has {count}, from 0.")
            if index in owners:
                raise DataError(f"output {index} is claimed by {owners[index]!r} and by {name!r}; it can mean one.")
            owners[index] = name
    return found


def parse(text: str, count: int = imagenet.COUNT) -> tuple[int, ...]:
    """Outputs from a text: numbers, ranges and, for a model with ImageNet's 1000 outputs, WordNet ids and names.

    >>> parse("3, 7-9, tench")
    (3, 7, 8, 9, 0)
    """
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        if bounds := re.fullmatch(r"(\d+)\s*(?:-|\.\.)\s*(\d+)", part):
            first, last = int(bounds[1]), int(bounds[2])
            if last < first:
                raise DataError(f"the range {part!r} runs backwards.")
            if last >= count:
                raise DataError(f"the range {part!r} goes beyond the model's {count} outputs (0 to {count - 1}).")
            found.extend(range(first, last + 1))
        elif part.isdecimal():
            found.append(int(part))
        else:
            found.append(_named(part, count))
    return tuple(found)


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """`["cat=281-285", "dog=207"]` by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, numbers = text.rpartition("=")
        if not equals or not name or not numbers.strip():
            raise DataError(f"{text!r} is not of the form FOLDER=OUTPUTS, such as cat=281-285.")
        if name in found:
            raise DataError(f"{name!r} is named twice.", fix=f"list several outputs after one name: {name}=1,5,7-9")
        found[name] = numbers
    return found


def _named(word: str, count: int) -> int:
    index = imagenet.find(word) if count == imagenet.COUNT else None
    if index is None:
        ways = "a number or a range such as 281-285"
        if count == imagenet.COUNT:
            near = imagenet.nearest(word)
            ways += ", an ImageNet name or wnid" + (f". Did you mean {', '.join(near)}?" if near else "")
        raise DataError(f"{word!r} is no output of this model.", fix=f"give {ways}")
    return index


def _given(classes: Sequence[str], count: int, given: Sequence[str]) -> Outputs:
    chosen = assignments(given)
    for name in chosen:
        if name not in classes:
            if "=" in name and "," in name:  # the numbers that follow belong to the last of them
                raise DataError(
                    "{text} names several class folders.", fix="once for each, such as {first}",
                    text=f"{name}={chosen[name]}", first=Argument("outputs", name.rpartition(",")[0]),
                )  # fmt: skip
            near = difflib.get_close_matches(name, classes, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise DataError(f"there is no class folder {name!r}; there are {', '.join(classes)}.{hint}")
    missing = [name for name in classes if name not in chosen]
    if missing:
        raise _unmatched(f"class folders without outputs: {', '.join(missing)}.", f"{missing[0]}=NUMBERS")
    return {name: parse(chosen[name], count) for name in classes}


def _unmatched(fact: str, example: str, more: str = "") -> DataError:
    return DataError(
        "{fact}", fix="say which outputs mean them, such as {outputs}{more}",
        fact=fact, outputs=Argument("outputs", [example]), more=more,
    )  # fmt: skip


def _called(classes: Sequence[str], names: Sequence[str]) -> Outputs:
    """By the names that the outputs were given when the model was specialised."""
    titles = [imagenet.title(name).casefold() for name in names]
    wanted = {name: imagenet.title(name).casefold() for name in classes}
    if twice := [name for name, title in wanted.items() if titles.count(title) > 1]:
        raise _unmatched(f"several outputs of this model are called {twice[0]!r}.", f"{twice[0]}=0")
    unknown = [name for name, title in wanted.items() if title not in titles]
    if unknown:
        raise _unmatched(
            f"class folders that are no output of this model: {', '.join(unknown[:5])}. Its outputs are "
            f"called {', '.join(names[:8])}{', …' if len(names) > 8 else ''}.",
            f"{unknown[0]}=0",
            ", or rename the folders",
        )
    return {name: (titles.index(title),) for name, title in wanted.items()}


def _by_name(classes: Sequence[str], count: int) -> Outputs:
    if all(name.isdecimal() for name in classes):
        return {name: (int(name),) for name in classes}
    if count == imagenet.COUNT:
        found = {name: imagenet.find(name) for name in classes}
        unknown = [name for name, index in found.items() if index is None]
        if not unknown:
            return {name: (index,) for name, index in found.items() if index is not None}
        near = imagenet.nearest(unknown[0])
        raise _unmatched(
            f"class folders that are no ImageNet name, wnid or number: {', '.join(unknown[:5])}."
            + (f" Similar to {unknown[0]!r}: {', '.join(near)}." if near else ""),
            f"{unknown[0]}=NUMBERS",
        )
    if len(classes) == count:
        return {name: (i,) for i, name in enumerate(classes)}
    raise _unmatched(
        f"{len(classes)} class folders ({', '.join(classes[:4])}{', …' if len(classes) > 4 else ''}) for a "
        f"model with {count} outputs.",
        f"{classes[0]}=0",
        ", or make one folder per output",
    )
