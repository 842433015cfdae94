"""How fast are pruned language models, and how long does a repair take?

`python -m benchmarks.language … --save FOLDER` writes each pruned model to a folder with its plan. This command opens
them again and times them in turn beside the unpruned model. A repair changes no shape, so it does not matter here.

    python -m benchmarks.language_speed --model smollm2 --pruned FOLDER/* --devices cpu cuda --out speeds.jsonl
    python -m benchmarks.language_speed --model smollm2 --text wikitext-2 --repair FOLDER/80-default-none --threads 2

Prompt: the forward of whole texts of 256 tokens. Decode: the forward of one token after the other, with a cache that
holds the prompt. On a CPU one text in float32; on a GPU 64 of them in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc

PROMPT = 256


def timed(model: nn.Module, x: Tensor, tokens: int) -> tuple[float, float]:
    """Tokens per second of the prompt, and of `tokens` that follow it."""

    def now() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    with torch.no_grad():
        begin = now()
        model(input_ids=x, use_cache=False)
        prompt = x.numel() / (now() - begin)
        seen = model(input_ids=x, use_cache=True, logits_to_keep=1)
        begin = now()
        for _ in range(tokens):
            last = seen.logits[:, -1:].argmax(-1)
            seen = model(input_ids=last, past_key_values=seen.past_key_values, use_cache=True)
        return prompt, tokens * len(x) / (now() - begin)


def speeds(models: dict[str, nn.Module], device: str, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Medians over rounds in which all models take turns; the first round does not count."""
    texts, dtype = (64, torch.bfloat16) if device == "cuda" else (1, torch.float32)
    x = torch.randint(0, 1000, (texts, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    models = {name: model.to(device, dtype) for name, model in models.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            taken[name].append(timed(model, x, tokens))
    rows = []
    for name, pairs in taken.items():
        prompt, decode = (statistics.median(part) for part in zip(*pairs[1:], strict=True))
        rows.append({"model": name, "device": device, "threads": torch.get_num_threads(), "texts": texts,
                     "prompt": prompt, "decode": decode})  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: tokens per second, and how many times those of the unpruned model."""
    lines = ["| model | device | prompt | decode |", "|---|---|---:|---:|"]
    dense = {row["device"]: row for row in rows if row["model"] == "dense"}
    for row in rows:
        first = dense[row["device"]]
        cells = [f"{row[key]:,.0f} ({row[key] / first[key]:.2f}x)" for key in ("prompt", "decode")]
        lines.append(f"| {row['model']} | {row['device']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def time_repair(model: nn.Module, folder: Path, batches: list[Any]) -> float:
    """Seconds of a repair after the removal that the folder's plan describes."""
    small = sc.apply(model, sc.Plan.from_json(folder.with_suffix(".json").read_text()))
    begin = time.perf_counter()
    sc.repair(small, model, batches, progress=False)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the folder of the unpruned model")
    parser.add_argument("--pruned", type=Path, nargs="*", default=[], help="folders that benchmarks.language saved")
    parser.add_argument("--devices", nargs="+", default=["cpu"], choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--decoded", type=int, default=32, help="tokens after the prompt")
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    parser.add_argument("--repair", type=Path, help="time the repair of this folder's plan instead")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    from transformers import AutoModelForCausalLM

    from benchmarks.language import sequences

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    if given.repair:
        device = torch.device(given.devices[0])
        ids = sequences(given.model, given.text, given.sequences, given.tokens)
        batches = [({"input_ids": part.to(device)}, None) for part in ids.split(8)]
        seconds = time_repair(model.to(device), given.repair, batches)
        print(f"repair of {given.repair.name}: {seconds:.0f} s ({device}, {given.threads} threads, {len(ids)} texts)")
        return
    models = {"dense": model} | {folder.name: sc.load(folder).eval() for folder in given.pruned if folder.is_dir()}
    rows = [row for device in given.devices for row in speeds(models, device, given.rounds, given.decoded)]
    if given.out:
        with given.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))


if __name__ == "__main__":
    main()
