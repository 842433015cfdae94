"""Where latency tables are kept: one small JSON file for each model structure, setup, machine and versions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur import atomic
from secateur.arguments import check_path
from secateur.runtimes.segments import STEPS
from secateur.runtimes.setup import Setup

FORMAT = "secateur-latency-4"


@dataclass(frozen=True)
class Cache:
    """The file of one table. What is unreadable or of another format counts as not there."""

    path: Path
    key: dict[str, Any]

    @classmethod
    def at(cls, folder: str | Path | bool, setup: Setup, weights: str, kinds: Sequence[str]) -> Cache | None:
        """The file in a folder; True is for the user's cache, False for none. `weights` says what numbers they are."""
        if folder is False:
            return None
        if folder is True:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secateur"
        check_path("cache", folder, "a folder, True or False")
        key = {"format": FORMAT, **setup.key(), "weights": weights, "kinds": list(kinds)}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return cls(Path(folder) / f"latency-{name}.json", key)

    def read(self) -> dict[str, Any] | None:
        """The table, if it is there and whole."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            found = content["table"]
            sound = content["key"] == self.key and set(found["kinds"]) == set(self.key["kinds"])
            numbers = [
                found["whole"],
                found["error"],
                found["bend"],
                *(n for k in found["kinds"].values() for n in k),
            ]
            sound &= found["step"] in STEPS and all(isinstance(n, float) for n in numbers)
            return found if sound else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, table: dict[str, Any]) -> None:
        """Keep the table. A cache that cannot be written is no reason to fail."""
        with suppress(OSError):
            atomic.write(self.path, json.dumps({"key": self.key, "table": table}))
