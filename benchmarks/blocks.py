"""Whole blocks beside filters: accuracy at equal MACs, and how fast the smaller models are.

Each cell runs `secateur prune` in a process of its own; results are kept line by line, so that a run can be stopped.

    python -m benchmarks.blocks --model timm:efficientnet_lite0 --weights lite0.safetensors --images reference
        --test test --classes n01440764 n02979186 n03000684 --out results.jsonl
    python -m benchmarks.blocks --out results.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

BLOCKS, MACS = ("no", "yes", "only"), (0.7, 0.5, 0.35)


def run(cell: dict[str, object], given: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as place:
        folders = {}
        for name in ("images", "test"):
            folders[name] = Path(place) / name
            folders[name].mkdir()
            for wanted in given.classes:
                (folders[name] / wanted).symlink_to(Path(getattr(given, name)).resolve() / wanted)
        command = [
            sys.executable, "-m", "secateur", "prune", given.model, "--weights", given.weights,
            "--device", given.device, "--no-report", "--json", "--out", str(Path(place) / "small"),
            "--images", str(folders["images"]), "--test", str(folders["test"]), "--per-class", str(given.per_class),
            "--keep-macs", str(cell["macs"]), "--blocks", str(cell["blocks"]), "--repair", str(cell["repair"]),
            "--scope", "cost", "--seed", str(cell["seed"]),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {**cell, **(json.loads(done.stdout) if not done.returncode else {"error": done.stderr[-2000:]})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "weights", "images", "test"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--classes", nargs="*", default=[])
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.table:
        heads = ("MACs", "blocks", "draw", "blocks that left", "accuracy", "MACs left", "ms, 1 image", "seconds")
        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for row in known:
            if "error" not in row:
                ratio = row["after"]["macs"] / row["before"]["macs"]
                print(f"| {row['macs']} | {row['blocks']} | {row['seed']} | {', '.join(row['blocks_left'])} | "
                      f"{100 * row['accuracy']['after']['overall']:.1f} | {ratio:.2f} | "
                      f"{1000 * row['after']['latency_1']:.1f} | {row['seconds']:.0f} |")  # fmt: skip
        return
    for seed, macs, blocks in product(range(given.seeds), MACS, BLOCKS):
        cell = {"macs": macs, "repair": "best", "seed": seed}
        if any({**cell, "asked": blocks}.items() <= row.items() for row in known):
            continue
        row = run({**cell, "blocks": blocks}, given)
        row = {**row, "blocks_left": row.get("removed_blocks", []), "blocks": blocks, "asked": blocks}
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = ("macs", "blocks", "blocks_left", "accuracy", "error")
        print(json.dumps({key: row.get(key) for key in shown}), flush=True)


if __name__ == "__main__":
    main()
