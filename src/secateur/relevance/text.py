"""Relevance of texts: numbers of tokens, merged into words, in colours on a page or in a picture."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.errors import DataError, SecateurError
from secateur.running.targets import IGNORED

# How tokens of byte-level and sentence-piece tokenizers say that a space comes before them, and a word piece that none.
_SPACES, _INSIDE = ("Ġ", "▁", " "), "##"
# From here on, scripts put no spaces between words.
_UNSPACED = 0x2E80
# Colours for and against the target, at full strength: black text can be read on both.
_FOR, _AGAINST = (244, 109, 82), (98, 160, 234)
_COLUMNS = 88  # letters in a line of a picture


class Word(NamedTuple):
    """A word of a text: its letters, the sum of the relevance of its tokens, and which tokens these are."""

    text: str
    relevance: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Text:
    """Token numbers and their relevance, (samples, positions). `counts` is False for padding.

    `speaks`: the model's classes are tokens themselves. `ids` is None if the model read no numbers, but embeddings.
    """

    ids: Tensor | None
    relevance: Tensor
    counts: Tensor
    speaks: bool = False

    @property
    def first_token(self) -> float:
        """The share of all relevance, by size, that lies on the first token of each text."""
        size = torch.where(self.counts, self.relevance.abs().double(), 0)
        first = self.counts & (self.counts.cumsum(1) == 1)
        return float(size[first].sum() / size.sum().clamp_min(1e-300))

    def words(self, tokenizer: Any = None) -> list[list[Word]]:
        """The words of each text; without a tokenizer a token number for each."""
        found = []
        for row, counts in enumerate(self.counts):
            places = counts.nonzero().ravel().tolist()
            values = self.relevance[row].double().tolist()
            if self.ids is None or tokenizer is None:
                names = [str(p if self.ids is None else int(self.ids[row, p])) for p in places]
                groups = [[i] for i in range(len(places))]
            else:
                numbers = [int(self.ids[row, p]) for p in places]
                groups = list(_grouped(tokenizer, numbers))
                names = [_spelt(tokenizer, [numbers[i] for i in group]) for group in groups]
            tokens = [tuple(places[i] for i in group) for group in groups]
            found.append([Word(n, sum(values[p] for p in t), t) for n, t in zip(names, tokens, strict=True)])
        return found

    def said(self, row: int, classes: Tensor | None, against: Tensor | None, tokenizer: Any = None) -> str:
        """What was explained in a text, in words."""
        if classes is None:
            return "Relevance starts at the only output, or as the given function says."
        mine = classes[row].reshape(-1)
        started = (mine != IGNORED).nonzero().ravel()
        if len(started) != 1:
            return f"Relevance starts at {len(started)} positions."
        name = self.named(int(mine[started[0]]), tokenizer)
        if against is not None:
            name += f" rather than {self.named(int(against[row].reshape(-1)[started[0]]), tokenizer)}"
        if classes.ndim == 1:
            return f"Explained: {name}."
        place = int(started[0])
        if self.counts.shape == classes.shape:
            place = int(self.counts[row, :place].sum())
        return f"Explained: {name}, the answer at position {place}."

    def named(self, number: int, tokenizer: Any = None) -> str:
        """What a class is called."""
        if not self.speaks:
            return f"class {number}"
        return f"token {number}" if tokenizer is None else f"“{_spelt(tokenizer, [number])}”"


# -- words -------------------------------------------------------------------------------------------------------------
def _pieces(tokenizer: Any, numbers: Sequence[int]) -> list[str]:
    """Tokens as the tokenizer spells them, with its marks of spaces."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [str(piece) for piece in tokenizer.convert_ids_to_tokens(list(numbers))]
    if isinstance(tokenizer, Mapping | Sequence) and not isinstance(tokenizer, str):
        try:
            return [str(tokenizer[number]) for number in numbers]
        except (KeyError, IndexError) as error:
            what = f"the tokenizer has no text for the token {error.args[0] if error.args else ''}."
            raise DataError(what, fix="a text for each token number") from error
    raise DataError(
        f"tokenizer is a {type(tokenizer).__name__}, which does not tell the text of a token.",
        fix="a tokenizer of transformers, or texts by token number: {0: 'the', …} or ['the', …]",
    )


def _letters(tokenizer: Any, numbers: Sequence[int]) -> str:
    """The letters of some tokens. A tokenizer knows how bytes become letters."""
    if hasattr(tokenizer, "decode"):
        return str(tokenizer.decode(list(numbers), clean_up_tokenization_spaces=False))
    return "".join(piece.removeprefix(_INSIDE) for piece in _pieces(tokenizer, numbers))


def _spelt(tokenizer: Any, numbers: Sequence[int]) -> str:
    """A word without the spaces around it, and with signs for what cannot be seen."""
    text = _letters(tokenizer, numbers).removeprefix(_INSIDE).lstrip("".join(_SPACES)).rstrip(" ")
    return text.replace("\n", "↵").replace("\t", "⇥") or "␣"


def _grouped(tokenizer: Any, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the tokens that are one word.

    Marks tell where a word begins or goes on. If there are none at all, each token is a word. Punctuation stands alone.
    """
    pieces, special = _pieces(tokenizer, numbers), set(getattr(tokenizer, "all_special_ids", ()))
    shown = [_letters(tokenizer, [number]) for number in numbers]
    spaced = any(piece.startswith(_SPACES) for piece in pieces)
    inside = any(piece.startswith(_INSIDE) for piece in pieces)
    group: list[int] = []
    for i, piece in enumerate(pieces):
        if i and special.isdisjoint(numbers[i - 1 : i + 1]):
            goes_on = piece.startswith(_INSIDE)
            if spaced and not inside and not piece.startswith(_SPACES):
                alone = not shown[i - 1].strip(" ")  # a space that is a token of its own
                goes_on = alone or (_is_letter(shown[i - 1][-1:]) and _is_letter(shown[i][:1]))
        else:
            goes_on = not i
        if not goes_on:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _is_letter(letter: str) -> bool:
    """Whether words are made of it: letters, digits and apostrophes. A byte that is part of a letter is shown as �."""
    return letter in ("�", "'", "’") or (unicodedata.category(letter or " ")[0] in "LMN" and ord(letter) < _UNSPACED)


# -- colours -----------------------------------------------------------------------------------------------------------
def _limit(words: Sequence[Word], clip: float) -> float:
    """Where colours saturate."""
    size = torch.tensor([abs(word.relevance) for word in words], dtype=torch.float64)
    return (float(size.quantile(clip)) or float(size.max()) or 1.0) if len(size) else 1.0


def _colour(relevance: float, limit: float) -> tuple[int, int, int]:
    """White at 0, red for the target, blue against it."""
    strength, full = min(abs(relevance) / limit, 1.0), _FOR if relevance > 0 else _AGAINST
    return tuple(round(255 + (channel - 255) * strength) for channel in full)  # type: ignore[return-value]


class Shade(NamedTuple):
    """A word as a page shows it: its letters, its colour in CSS, its relevance, and its share of all relevance."""

    text: str
    colour: str
    relevance: str
    share: str


def shaded(words: Sequence[Word], clip: float = 0.995) -> list[Shade]:
    """The words of a text with their colours. Nothing is escaped yet."""
    limit, total = _limit(words, clip), sum(abs(word.relevance) for word in words) or 1.0
    return [
        Shade(w.text, f"rgb{_colour(w.relevance, limit)}", _minus(f"{w.relevance:.4g}"), _signed(w.relevance / total))
        for w in words
    ]


_STYLE = """
:root { color-scheme: light; }
body { background: #fff; color: #1a1a1a; margin: 0 auto; max-width: 52rem; padding: 1.5rem 1rem 3rem;
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .25rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; } .note { color: #4a4a4a; font-size: .875rem; }
.text { border: 1px solid #d0d0d0; border-radius: .5rem; padding: .75rem 1rem; font-size: 1.1rem; line-height: 2.1;
  overflow-wrap: anywhere; }
.text span { border-radius: .25rem; box-decoration-break: clone; -webkit-box-decoration-break: clone;
  padding: .15rem .3rem; }
.legend { align-items: center; display: flex; flex-wrap: wrap; gap: .25rem .75rem; }
.bar { background: linear-gradient(90deg, AGAINST, #fff, FOR); border: 1px solid #d0d0d0; border-radius: .25rem;
  height: .9rem; width: 9rem; }
details { margin-top: .5rem; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: .875rem; margin-top: .5rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #e0e0e0; padding: .2rem .75rem .2rem 0; text-align: left; overflow-wrap: anywhere; }
td + td, th + th { overflow-wrap: normal; text-align: right; white-space: nowrap; }
@media print { body { max-width: none; } span, .bar { print-color-adjust: exact; } }
"""


def page(texts: Sequence[Sequence[Word]], said: Sequence[str], first: float, clip: float = 0.995) -> str:
    """An HTML page of its own that shows each text. Everything in it is escaped."""
    style = _STYLE.replace("AGAINST", f"rgb{_AGAINST}").replace("FOR", f"rgb{_FOR}")
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', "<title>Relevance of words</title>",
        f"<style>{style}</style></head><body><main>", "<h1>Relevance of words</h1>",
        '<p class="note legend"><span>against</span><span class="bar" role="img" aria-label="Colours: blue words '
        'speak against what is explained, white ones neither way, red ones for it"></span><span>for what is '
        "explained</span></p>",
        f'<p class="note">{100 * first:.1f} % of all relevance, by size, lies on the first token.</p>',
    ]  # fmt: skip
    for number, (words, what) in enumerate(zip(texts, said, strict=True), 1):
        shown = [shade._replace(text=html.escape(shade.text)) for shade in shaded(words, clip)]
        parts.append(f"<section><h2>Text {number}</h2><p>{html.escape(what)}</p>")
        parts.append('<p class="text">')
        parts += [f'<span style="background: {w.colour}" title="{w.share}">{w.text}</span>' for w in shown]
        parts.append("</p><details><summary>Numbers</summary><table><thead><tr><th scope=col>word</th>")
        parts.append("<th scope=col>relevance</th><th scope=col>share</th></tr></thead><tbody>")
        parts += [f"<tr><td>{w.text}</td><td>{w.relevance}</td><td>{w.share}</td></tr>" for w in shown]
        parts.append("</tbody></table></details></section>")
    return "\n".join([*parts, "</main></body></html>", ""])


def _signed(share: float) -> str:
    """A share with its sign.

    >>> _signed(0.125), _signed(-0.5)
    ('+12.5 %', '−50.0 %')
    """
    return _minus(f"{100 * share:+.1f} %")


def _minus(number: str) -> str:
    return number.replace("-", "−")


def draw_text(texts: Sequence[Sequence[Word]], path: Path, clip: float = 0.995) -> Path:
    """A PNG with the words of each text in their colours."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SecateurError("drawing needs matplotlib.", fix="pip install 'secateur[report]'") from error
    placed: list[tuple[int, int, Word, float]] = []
    line = 0
    for words in texts:
        column, limit = 0, _limit(words, clip)
        for word in words:
            if column and column + len(word.text) > _COLUMNS:
                line, column = line + 1, 0
            placed.append((line, column, word, limit))
            column += len(word.text) + 2
        line += 2
    height = max(line - 1, 1)
    figure = Figure(figsize=(9.2, 0.34 * height + 0.3))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.02, 0, 0.96, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, _COLUMNS + 8), ylim=(height - 0.2, -0.8))
    for row, column, word, limit in placed:
        face = "#{:02x}{:02x}{:02x}".format(*_colour(word.relevance, limit))
        box = {"boxstyle": "round,pad=0.2", "facecolor": face, "edgecolor": "none"}
        shown = word.text.replace("$", r"\$")
        axes.text(column, row, shown, family="monospace", fontsize=11, va="center", bbox=box)
    figure.savefig(path, dpi=120, format="png", facecolor="white")
    return path
