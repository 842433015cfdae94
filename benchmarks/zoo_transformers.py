"""Every family of `transformers` that builds from a tiny configuration without a network: what may leave, is it exact?

    python -m benchmarks.zoo --hf
    python -m benchmarks.zoo --hf --only llama gpt2

For each family: analyse, remove 30 % and 60 % of the units at random, and compare with masking in double precision, on
the example, on another length, and with padding. Then save and load. A row says which share of heads, neurons and
width may leave, and why the rest may not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import secateur as sc
from benchmarks.tiny_transformers import build, families, inputs, parts
from secateur.nest import tensors_of_output

# Relative to the largest output. Forwards cast to single precision in places.
_ROUNDING = 1e-5
_PARTS = ("heads", "neurons", "width")


def mill(family: str, mapping: str) -> dict[str, Any]:
    """One family; the row of the table. A model that cannot be built is no member of the zoo."""
    row: dict[str, Any] = {"model": family}
    try:
        model = build(family, mapping).float()
        examples = [inputs(model), inputs(model, 3, 11, 0, 1), inputs(model, 2, 13, 4, 2)]
        with torch.no_grad():
            finite = all(bool(torch.isfinite(_logits(model, example)).all()) for example in examples)
        if not finite:
            raise ValueError("the model itself computes NaN or infinity")
    except Exception as error:
        return row | {"unbuilt": f"{type(error).__name__}: {error}"}
    graph = sc.analyze(model, examples[0])
    row["parts"] = parts(graph)
    rng = np.random.default_rng(0)
    scores = sc.Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})
    small = None
    row["gap"] = 0.0
    for share in (0.3, 0.6):
        try:
            plan = sc.plan(graph, scores, remove=share)
        except sc.SecateurError as error:
            if "at most" not in str(error):
                raise
            continue
        small, masked = sc.apply(model, plan), sc.apply(model, plan, how="mask")
        for example in examples:
            a, b = (_logits(sc_model, example, double=True) for sc_model in (small, masked))
            row["gap"] = max(row["gap"], float((a - b).abs().max() / b.abs().max()))
    assert small is not None
    with tempfile.TemporaryDirectory() as folder:
        sc.save(small.float(), Path(folder, "m"))
        again = sc.load(Path(folder, "m"), build(family, mapping).float()).eval()
        row["reload_equal"] = torch.equal(_logits(small, examples[0]), _logits(again, examples[0]))
    row["ok"] = row["gap"] < _ROUNDING and row["reload_equal"]
    return row


def _logits(model: nn.Module, example: dict[str, Tensor], double: bool = False) -> Tensor:
    wanted = torch.float64 if double else torch.float32
    given = {name: t.to(wanted) if t.is_floating_point() else t for name, t in example.items()}
    with torch.no_grad():
        return tensors_of_output(model.to(wanted)(**given))[0]


def main(only: Sequence[str] | None) -> None:
    """Print a line for each family as it comes, and the table."""
    transformers.logging.set_verbosity_error()
    rows = []
    for family, mapping in families():
        if only and family not in only:
            continue
        begin = time.perf_counter()
        try:
            row = mill(family, mapping)
        except Exception as error:
            row = {"model": family, "error": f"{type(error).__name__}: {error}"}
        state = row.get("error") or row.get("unbuilt") or ("ok" if row.get("ok") else "NOT OK")
        print(f"{family}: {state[:200]} ({time.perf_counter() - begin:.1f} s)", flush=True)
        rows.append(row)
    print()
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each family that could be built, and the count."""
    lines = [
        "| family | heads | neurons | width | removal = masking | what stays, and why |",
        "|---|---|---|---|---|---|",
    ]
    built = [row for row in rows if "unbuilt" not in row]
    for row in built:
        found = row.get("parts", {})
        shares = [f"{found[p][0]} of {found[p][1]}" if p in found else "" for p in _PARTS]
        why = "; ".join(f"{part}: {found[part][2]}" for part in _PARTS if part in found and found[part][2])
        verdict = "error" if "error" in row else f"{row['gap']:.0e}" if row["ok"] else f"**{row['gap']:.0e}**"
        text = row.get("error", why).replace("|", "/")
        lines.append(f"| {row['model']} | {' | '.join(shares)} | {verdict} | {text[:160]} |")
    good = sum(bool(row.get("ok")) for row in built)
    lines += ["", f"{good} of {len(built)} families pass. {len(rows) - len(built)} have no tiny model."]
    return "\n".join(lines)
