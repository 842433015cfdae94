"""Texts as samples for language models and text classifiers."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import Argument, DataError

#: Named inputs of a model, and the targets if they are not the inputs themselves.
Batch = tuple[dict[str, Tensor], Tensor | None]

_LARGEST = 256 * 2**20  # bytes that are read at once
# What columns are called, the first that is there counts.
_TEXTS = ("text", "sentence", "content", "review", "document", "question", "title")
_LABELS = ("label", "labels", "target", "class", "category", "sentiment")
_TABLES = {".csv": ",", ".tsv": "\t", ".jsonl": "", ".ndjson": ""}


def read_text(path: str | os.PathLike[str]) -> str:
    """A text file."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no text file {file}.", where=file)
    if (size := file.stat().st_size) > _LARGEST:
        what = f"{file} has {size / 2**20:.0f} MB; it is read at once, up to {_LARGEST >> 20} MB."
        raise DataError(what, where=file, fix="a part of it: a few hundred sequences are drawn")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}.",
            where=file,
            fix=_converted(file, "utf-16" if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "latin1"),
        ) from None
    if "\0" in text:
        what = f"{file} is no text in UTF-8: byte {text.index(chr(0))} is zero, as in UTF-16 or in what is no text."
        raise DataError(what, where=file, fix=_converted(file, "utf-16le"))
    if not text.strip():
        raise DataError(f"{file} is empty.", where=file)
    return text


def read_lines(path: str | os.PathLike[str]) -> str:
    r"""A text file whose lines end in \n, wherever it was written: a model has hardly seen others."""
    return read_text(path).replace("\r\n", "\n").replace("\r", "\n")


def _converted(file: Path, encoding: str) -> str:
    return f"convert it: iconv -f {encoding} -t utf-8 {shlex.quote(str(file))}"


# -- running text ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Tokens:
    """A running text as token numbers. Each sequence begins with `begin`, such as a mark of the start."""

    ids: Tensor
    begin: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, tokenizer: Any) -> Tokens:
        """The tokens of a text."""
        begin = tuple(tokenizer("")["input_ids"])
        if begin and begin != (tokenizer.bos_token_id,):
            begin = ()  # marks that enclose a text, not those that begin it
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return cls(torch.tensor(ids, dtype=torch.int64), begin)

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, share: float) -> tuple[Tokens, Tokens]:
        """The beginning, and the last `share`."""
        cut = len(self) - round(share * len(self))
        return replace(self, ids=self.ids[:cut]), replace(self, ids=self.ids[cut:])

    def sequences(self, length: int, count: int, name: str) -> Tensor:
        """Up to `count` sequences of `length` tokens, drawn evenly from all: (sequences, length). `name` is the text's.

        >>> Tokens(torch.arange(10)).sequences(2, 3, "a text")
        tensor([[0, 1],
                [2, 3],
                [6, 7]])
        """
        step = length - len(self.begin)
        if step < 2:
            raise DataError(
                "{given} must be at least {least}.", given=Argument("tokens", length), least=2 + len(self.begin)
            )
        whole = len(self) // step
        if not whole:
            raise DataError(
                "{name} has {own} tokens, too few for a sequence of {step}.",
                fix="a longer text, or a smaller {tokens}",
                name=name, own=len(self), step=step, tokens=Argument("tokens"),
            )  # fmt: skip
        rows = self.ids[: whole * step].view(whole, step)
        count = min(count, whole)
        chosen = rows[torch.arange(count) * whole // count]
        return torch.cat([torch.tensor([self.begin], dtype=torch.int64).expand(count, -1), chosen], 1)


def in_batches(ids: Tensor, size: int) -> list[Batch]:
    """Sequences as batches for a language model, whose targets are the sequences themselves."""
    return [({"input_ids": part}, None) for part in torch.split(ids, size)]


# -- texts with labels -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sentences:
    """Texts and the numbers of their classes, which have names."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each class."""
        found = Counter(self.labels)
        return {name: found[number] for number, name in enumerate(self.classes)}

    def draw(self, count: int) -> Sentences:
        """Up to `count` of them: as many of each class as can be, evenly from all of that class."""
        mine = [[i for i, own in enumerate(self.labels) if own == label] for label in range(len(self.classes))]
        left, taken = min(count, len(self)), dict.fromkeys(range(len(mine)), 0)
        for place, label in enumerate(sorted(taken, key=lambda label: len(mine[label]))):
            taken[label] = min(len(mine[label]), left // (len(mine) - place))
            left -= taken[label]
        chosen = [items[i * len(items) // taken[k]] for k, items in enumerate(mine) for i in range(taken[k])]
        return self._only(sorted(chosen))

    def split(self, share: float) -> tuple[Sentences, Sentences]:
        """The first ones of each class, and the last `share`."""
        seen, counts, first, last = Counter[int](), Counter(self.labels), list[int](), list[int]()
        for i, label in enumerate(self.labels):
            seen[label] += 1
            (last if seen[label] > counts[label] - int(share * counts[label]) else first).append(i)
        return self._only(first), self._only(last)

    def batches(self, tokenizer: Any, size: int, length: int) -> list[Batch]:
        """Padded batches of texts, which are cut after `length` tokens."""
        found: list[Batch] = []
        for begin in range(0, len(self), size):
            texts = list(self.texts[begin : begin + size])
            tokens = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
            found.append((dict(tokens), torch.tensor(self.labels[begin : begin + size])))
        return found

    def _only(self, chosen: Sequence[int]) -> Sentences:
        return replace(self, texts=tuple(self.texts[i] for i in chosen), labels=tuple(self.labels[i] for i in chosen))


def read_sentences(
    path: str | os.PathLike[str], outputs: int, names: Sequence[str] = (), columns: Sequence[str] | None = None
) -> Sentences:
    """Texts with labels from a CSV, TSV or JSONL file. Labels are numbers of the model's `outputs`, or their `names`.

    `columns` names those of the text and of the label. Without it they are found by their usual names.
    """
    file = Path(path)
    if file.suffix.lower() not in _TABLES:
        raise DataError(
            f"{file} has no ending that says what it is.", where=file, fix=f"a file that ends in {', '.join(_TABLES)}"
        )
    rows = _rows(file, read_text(file))
    if not rows:
        raise DataError(f"{file} has no rows below its header.", where=file)
    text, label = columns if columns is not None else _columns(file, rows[0][1])
    plain = Counter(name.casefold() for name in names)
    known = {name.casefold(): number for number, name in enumerate(names) if plain[name.casefold()] == 1}
    known |= {name: number for number, name in enumerate(names)}
    texts, labels = [], []
    for line, row in rows:
        for column in (text, label):
            if row.get(column) in (None, ""):
                there = ", ".join(map(str, row))
                raise DataError(f"{file}, line {line} has nothing in {column!r}; it has {there}.", where=file)
        if isinstance(row[text], list | dict):
            raise DataError(f"{file}, line {line} has a {type(row[text]).__name__} in {text!r}, no text.", where=file)
        if any("\ud800" <= letter <= "\udfff" for letter in str(row[text])):
            raise DataError(f"{file}, line {line} has half a character in {text!r}: a surrogate.", where=file)
        texts.append(str(row[text]))
        labels.append(_label(row[label], known, outputs, f"{file}, line {line}"))
    return Sentences(tuple(texts), tuple(labels), tuple(names) or tuple(f"class {i}" for i in range(outputs)))


def _rows(file: Path, text: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The rows of a table with their line numbers."""
    delimiter = _TABLES[file.suffix.lower()]
    if delimiter:
        # Strict: a quotation mark that nothing closes would take all rows below it for one text.
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        table: list[tuple[int, Mapping[str, Any]]] = []
        longest = csv.field_size_limit(_LARGEST)
        try:
            table.extend((reader.line_num, row) for row in reader)
        except csv.Error as error:
            good = table[-1][0] if table else 1
            what = f"{file} cannot be read as a table, after line {good}: {error}."
            fix = 'quotes around a text, and two for each quotation mark in it: "say ""yes"""'
            raise DataError(what, where=file, fix=fix) from error
        finally:
            csv.field_size_limit(longest)
        if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1 and name]:
            raise DataError(f"{file} has several columns called {twice[0]!r}.", where=file, fix="a name for each")
        if longer := [line for line, row in table if None in row]:
            what = f"{file}, line {longer[0]} has more cells than the header."
            raise DataError(what, where=file, fix="put texts that hold the separator into quotes")
        return table
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold other ends of lines
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is no JSON: {error}.", where=file) from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number} is no object with a text and a label.", where=file)
            rows.append((number, row))
    return rows


def _columns(file: Path, row: Mapping[str, Any]) -> tuple[str, str]:
    """The columns of text and label, by their usual names."""
    there = {str(name).strip().casefold(): name for name in row if name is not None}
    text, label = (next((there[name] for name in usual if name in there), None) for usual in (_TEXTS, _LABELS))
    if text is None or label is None:
        missing = " and ".join(what for what, found in (("the text", text), ("the label", label)) if found is None)
        fact = f"{file}: which column holds {missing}? There are {', '.join(map(str, there.values()))}."
        if len(there) == 1 and any(mark in next(iter(there)) for mark in ";,\t|"):
            raise DataError(fact, where=file, fix="commas between the cells of a .csv, tabs in a .tsv")
        columns = Argument("columns", "TEXT,LABEL")
        raise DataError("{fact}", where=file, fix="{columns}", fact=fact, columns=columns)
    return text, label


def _label(value: Any, known: Mapping[str, int], outputs: int, where: str) -> int:
    """The number of a class."""
    word = str(value).strip()
    for spelt in (word, word.casefold()):
        if spelt in known:
            return known[spelt]
    if word.isdecimal() and len(word) < 10 and int(word) < outputs:
        return int(word)
    names = f" or {', '.join(list(known)[:8])}" if known else ""
    raise DataError(f"{where}: {word!r} is no label of this model.", fix=f"a number from 0 to {outputs - 1}{names}")
