"""The messages of the Python functions in the words of the command line: options instead of arguments."""

from __future__ import annotations

import re

# An argument's name in running text, but not in a path, an option or a text such as net.py:make?step=2.
_ALONE, _END = r"(?<![^\s(`])", r"(?![\w-])"

# What a message says, and what that is on the command line. Each is tried on the whole text, whole phrases first.
_WORDS: tuple[tuple[str, str], ...] = (
    (r"a smaller min_units or round_to", "a smaller --round-to"),
    (r"every layer keeps min_units", "every layer keeps one unit at least"),
    (r"every layer is down to min_units or ignored", "every layer is as narrow as --round-to and --ignore allow"),
    (
        r"(s per forward pass cannot be reached: [^.]*\.)$",
        r"\1 Fix: a larger --keep-latency, or a smaller --round-to.",
    ),
    (r"a smaller fraction, or fewer exceptions", "a smaller --remove, or fewer --ignore"),
    (r"leave strict off to skip them", "leave out --strict to skip them"),
    (r"weights was '[0-9a-f]{64}', is now '[0-9a-f]{64}'", "other weights"),
    (r"another checkpoint path, or remove the file", "--fresh, or another --out"),
    (r"call prune again with the same arguments, it goes on from there", "give the same command again: it goes on"),
    (r" What came before is in `error\.result`\.", ""),
    (r"`print\(graph\)` shows", "`secateur inspect` shows"),
    (_ALONE + r"keep=\{'(macs|params|latency)': ([^,}]+)\}", r"--keep-\1 \2"),
    (_ALONE + r"ignore=\[([^]]*)\], only=\['\*'\]", r"--ignore \1"),
    (_ALONE + r"ignore=\[\.\.\.\]", "--ignore"),
    (_ALONE + r"ignore=(?='[^']*' fits no layer)", "--ignore "),
    (_ALONE + r"(remove|step|scope|seed)=(?=\S)", r"--\1 "),
    (_ALONE + r"round_to=(?=\S)", "--round-to "),
    (_ALONE + r"max_drop=(?=\S)", "--max-drop "),
    (_ALONE + r"round_to" + _END, "--round-to"),
    (_ALONE + r"max_drop" + _END, "--max-drop"),
)


def spoken(text: str) -> str:
    """A message as it is printed: in one line, about options.

    >>> spoken("remove=0.9 asks for 9 of 9 units")
    '--remove 0.9 asks for 9 of 9 units'
    """
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return " ".join(text.split())
