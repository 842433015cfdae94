"""`secateur explain` for text: which words decided a model's output, as a page of words in colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from secateur import atomic
from secateur.cli.given_model import output_names, outputs_in
from secateur.cli.output import Printer, table
from secateur.cli.text_task import check_tokens
from secateur.data.text import read_lines
from secateur.errors import DataError
from secateur.models import Opened
from secateur.models.hub import longest_text, tokenizer_of
from secateur.relevance.explain import Explanation, explain
from secateur.relevance.text import Text, Word, page
from secateur.running.devices import device_of, to_device
from secateur.running.targets import Reader

_LONGEST = 512  # tokens of a text that is explained
_LISTED = 5  # words in the table
_PAGE = "words.html"


def explain_texts(
    opened: Opened, given: str, out: Path, printer: Printer, *,
    target: str | None, against: str | None, position: int | None, composite: str | None, limit: int,
) -> None:  # fmt: skip
    """Explain a sentence, or each line of a file, and write one page."""
    tokenizer, texts = tokenizer_of(opened.origin.model), _texts(given, limit, printer)
    reader, most = Reader(opened.model), min(_LONGEST, longest_text(opened.model, tokenizer))
    names = [] if reader.generates else output_names(opened)
    wanted, other = (_class(word, tokenizer, names) for word in (target, against))
    found: list[tuple[Explanation, Text]] = []
    with printer.stage(f"explaining {len(texts)} {'text' if len(texts) == 1 else 'texts'}"):
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=most)
            if (whole := len(tokenizer(text, verbose=False)["input_ids"])) > most:
                printer.note(f"{_short(text)!r} has {whole} tokens; the first {most} of them are explained")
            if not tokens["input_ids"].shape[1]:
                raise DataError(f"{text!r} has no tokens.")
            check_tokens(opened, tokens["input_ids"])
            inputs = to_device(dict(tokens), device_of(opened.model))
            seen = explain(opened.model, inputs, wanted, against=other, position=position, composite=composite)
            if seen.text is None:
                raise DataError(
                    f"{type(opened.model).__name__} reads no token numbers, so there are no words to colour."
                )
            found.append((seen, seen.text))
    words = [text.words(tokenizer)[0] for _, text in found]
    said = [_said(seen, text, tokenizer, names) for seen, text in found]
    first = sum(text.first_token for _, text in found) / len(found)
    file = out if out.suffix.lower() in (".html", ".htm") else out / _PAGE
    with atomic.naming_failures(file):
        atomic.write(file, page(words, said, first).encode())
    worst = max(seen.conservation.worst for seen, _ in found)
    passes = [seen.conservation for seen, _ in found]
    held = sum(each.input / each.start for each in passes if each.start) / len(passes)
    entries = [
        {"text": text, "explained": what, "words": [word.text for word in row], "relevance": [w.relevance for w in row]}
        for text, what, row in zip(texts, said, words, strict=True)
    ]
    printer.json({"texts": entries, "first_token": first, "conservation": worst, "held": held,
                  "composite": found[0][0].composite, "file": str(file)})  # fmt: skip
    rows = [(_short(t), what, *_extremes(row)) for t, what, row in zip(texts, said, words, strict=True)]
    printer.result(table(("text", "explained", "words for it", "words against it"), (), rows))
    printer.result(f"{100 * first:.1f} % of all relevance, by size, lies on the first token")
    printer.result(
        f"conservation: at most {worst:.2%} of the relevance is lost or created (composite {found[0][0].composite})"
    )
    if abs(1 - held) >= 0.005:
        rest = f"biases and the softmax of attention the other {100 * (1 - held):.0f} %"
        printer.result(f"the words hold {100 * held:.0f} % of what is explained, {rest}")
    printer.result(f"written: {file}")


def _texts(given: str, limit: int, printer: Printer) -> list[str]:
    """The sentence, or the lines of the file of that name."""
    path = Path(given)
    if len(given) > 255 or "\n" in given or not path.is_file():
        if path.suffix.lower() in (".txt", ".md", ".csv") and " " not in given:
            raise DataError(f"there is no text file {given}.", fix="a file, or a sentence in quotes")
        if not given.strip():
            raise DataError("the text is empty.", fix="a sentence in quotes, or a file")
        return [given]
    lines = [line.strip() for line in read_lines(path).split("\n") if line.strip()]
    if len(lines) > limit:
        printer.note(f"the first {limit} of {len(lines)} lines; --limit for more")
    return lines[:limit]


def _class(word: str | None, tokenizer: Any, names: list[str]) -> int | None:
    """The output that a word means: a class, or for a language model a token."""
    if word is None:
        return None
    if names:
        numbers = outputs_in(word, names)
        if len(numbers) != 1 or not 0 <= numbers[0] < len(names):
            raise DataError(f"{word!r} must be one of the model's outputs: {', '.join(names[:8])}.")
        return numbers[0]
    if word.isdecimal():
        return int(word)
    ways = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f" {word.lstrip()}", word)]
    single = [ids[0] for ids in ways if len(ids) == 1 and ids[0] != tokenizer.unk_token_id]
    if not single:
        pieces = tokenizer.convert_ids_to_tokens(ways[0])
        raise DataError(
            f"{word!r} is no single token of this model, but {' '.join(map(repr, pieces))}.",
            fix="the first of them, or the number of a token",
        )
    return int(single[0])


def _said(seen: Explanation, text: Text, tokenizer: Any, names: list[str]) -> str:
    """What was explained, and what the model says there."""
    what = text.said(0, seen.classes, seen.against, tokenizer)
    logits = seen.output[0]
    if names and logits.ndim == 1 and seen.classes is not None:
        what = f"Explained: {names[int(seen.classes[0])]}"
        what += "." if seen.against is None else f" rather than {names[int(seen.against[0])]}."
    elif logits.ndim == 2 and seen.classes is not None:
        places = (seen.classes[0] >= 0).nonzero().ravel()
        logits = logits[int(places[-1])] if len(places) == 1 else logits[:0].flatten()
    if logits.ndim != 1 or len(logits) < 2:
        return what
    sure, which = logits.detach().double().softmax(0).max(0)
    name = names[int(which)] if names else text.named(int(which), tokenizer)
    return f"{what} The model says {name} ({100 * float(sure):.1f} %)."


def _extremes(words: list[Word]) -> tuple[str, str]:
    """The words that speak most for it and against it, with their shares."""
    total = sum(abs(word.relevance) for word in words) or 1.0
    ranked = sorted(words, key=lambda word: -abs(word.relevance))
    sides = ([w for w in ranked if sign * w.relevance > 0][:_LISTED] for sign in (1, -1))
    best, worst = (", ".join(f"{w.text} {100 * w.relevance / total:+.0f} %" for w in side) for side in sides)
    return best, worst


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
