"""The command line. Each command lives in a module of its own that `app` lists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

app: Callable[..., Any]
try:
    from secateur.cli.app import app
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich", "click"):
        raise

    def app(*_: Any, **__: Any) -> None:
        """Say what is missing."""
        sys.exit("secateur: the command line needs typer and rich. Fix: pip install 'secateur[cli]'")


__all__ = ["app"]
