"""Shows the examples in docstrings as code. Without this, Markdown reads `>>>` as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a line that begins with the prompt to the next empty line.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.S | re.M)


class Examples(griffe.Extension):
    """Puts a code fence around every example that begins with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
