"""The command line. Each command lives in a module of its own that `app` lists."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

# Threads of GNU's OpenMP, which torch has on Linux, wait for each other in a loop of 300,000 turns. Where another
# program has one of the cores, that is most of what they do: the demo took 337 s, and takes 19 with 1,000 turns (alone:
# 11 either way). It has to be said before torch is loaded. Users may have said otherwise.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

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
