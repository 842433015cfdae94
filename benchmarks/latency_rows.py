"""Results of the latency benchmarks: one line of JSON for each, in files and on the screen.

A run can be stopped and goes on: what is in the folder, or in a log of an earlier run, is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def known(out: Path, logs: Sequence[Path] = (), **where: Any) -> list[dict[str, Any]]:
    """What was measured so far, as far as it has these values."""
    found: dict[str, dict[str, Any]] = {}
    for path in (*sorted(out.glob("*.jsonl")), *logs):
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                if where.items() <= row.items():
                    found[line] = row
    return list(found.values())


def keep(out: Path, name: str, row: dict[str, Any]) -> None:
    """Keep one more result."""
    out.mkdir(parents=True, exist_ok=True)
    line = json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
    with (out / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)
