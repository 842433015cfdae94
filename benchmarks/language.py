"""A language model without training: WikiText-2 perplexity over the share of the body's parameters that is left.

Calibration: sequences of the validation text, evenly drawn. Measured: the test text, context 1024. Each setting that is
not in the results yet is measured; results are kept line by line, so that a run can be stopped.

    python -m benchmarks.language --model smollm2 --text wikitext-2 --out results.jsonl
    python -m benchmarks.language --out results.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Activation, Taylor
from secateur.plans import Limits
from secateur.repair import Repair

CONTEXT = 1024



def criteria() -> dict[str, Any]:
    """Each by a name for the table."""
    return {
        "default": "lrp",
        "lrp, signed": LRP(absolute=None),
        "lrp, per sample": LRP(absolute="sample"),
        "lrp, squares": LRP(absolute="square"),
        "taylor": "taylor",
        "taylor, squares": Taylor(norm=None, absolute="square"),
        "activation": "activation",
        "weight": "weight",
        "random": "random",
    }


def perplexity(model: nn.Module, ids: Tensor, device: torch.device, context: int = CONTEXT) -> float:
    """exp of the mean loss of every token but the first of each window."""
    total, count = 0.0, 0
    windows = ids[: len(ids) // context * context].view(-1, context)
    with torch.no_grad():
        for part in windows.split(8):
            x = part.to(device)
            logits = model(input_ids=x).logits[:, :-1].float()
            total += float(F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum"))
            count += x[:, 1:].numel()
    return math.exp(total / count)


def speed(model: nn.Module, device: torch.device, batch: int = 8, length: int = 256) -> float:
    """Tokens per second of a forward pass, the median of seven."""
    x = torch.randint(0, 1000, (batch, length), device=device, generator=torch.Generator(device).manual_seed(0))
    times = []
    with torch.no_grad():
        for _ in range(9):
            begin = time.perf_counter()
            model(input_ids=x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return batch * length / sorted(times[2:])[len(times[2:]) // 2]


def body(model: nn.Module) -> int:
    """Parameters of the blocks: all that are neither embeddings nor the head."""
    return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)


def settings(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for share in given.shares:
        for name in given.criteria:
            for scope in given.scopes:
                for repair in given.repairs:
                    yield {"left": share, "criterion": name, "scope": scope, "repair": repair, "only": given.only}


def limits_for(scope: str, only: str) -> Limits:
    parts = tuple(only.split(",")) if only else ("*",)
    uniform, kind = scope.startswith("uniform"), scope.removeprefix("uniform").strip() or None
    return Limits(scope=None if kind in (None, "default") else kind, only=parts, uniform=uniform, round_to=32 if uniform else 1)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.8, 0.7])
    parser.add_argument("--criteria", nargs="+", default=["default"])
    parser.add_argument("--scopes", nargs="+", default=["default"])
    parser.add_argument("--repairs", nargs="+", default=["best", "none"])
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.table:
        print(table(done))
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    valid, test = (tokenizer((given.text / f"{n}.txt").read_text(), return_tensors="pt").input_ids[0] for n in ("valid", "test"))
    begins = torch.linspace(0, len(valid) - given.tokens - 1, given.sequences).long()
    ids = torch.stack([valid[b : b + given.tokens] for b in begins.tolist()]).to(device)
    data = [({"input_ids": part}, None) for part in ids.split(8)]
    whole, inner = sum(p.numel() for p in model.parameters()), body(model)
    print(f"dense: perplexity {perplexity(model, test, device):.2f}, {speed(model, device):.0f} tokens/s on {device.type}", flush=True)
    for setting in settings(given):
        if any(all(row.get(k) == v for k, v in setting.items()) for row in done):
            continue
        begin = time.perf_counter()
        keep = {"params": (whole - inner + setting["left"] * inner) / whole}
        try:
            result = sc.prune(
                model, data, criteria()[setting["criterion"]], keep=keep, schedule=sc.loop.Schedule(one_shot=True, rescore=False, batch_size=8),
                limits=limits_for(setting["scope"], setting["only"]),
                repair=None if setting["repair"] == "none" else Repair(setting["repair"]), progress=False,
            )  # fmt: skip
        except sc.SecateurError as error:
            print(setting, type(error).__name__, error, flush=True)
            continue
        small = result.model
        row = {
            **setting,
            "ppl": perplexity(small, test, device),
            "body": body(small) / inner,
            "speed": speed(small, device) / speed(model, device),
            "seconds": time.perf_counter() - begin,
            "device": device.type,
        }
        done.append(row)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per setting, a column per share."""
    shares = sorted({row["left"] for row in rows}, reverse=True)
    lines = ["| criterion | ranking | repair | " + " | ".join(f"{100 * s:.0f} %" for s in shares) + " |", "|---" * (3 + len(shares)) + "|"]
    keys = dict.fromkeys((row["criterion"], row["scope"], row["only"], row["repair"]) for row in rows)
    for key in keys:
        found = {row["left"]: row for row in rows if (row["criterion"], row["scope"], row["only"], row["repair"]) == key}
        cells = [f"{found[s]['ppl']:.2f}" if s in found else "" for s in shares]
        where = key[1] + (f", {key[2]}" if key[2] else "")
        lines.append(f"| {key[0]} | {where} | {key[3]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
