"""How fast are pruned language models, and how long does a repair take?

`python -m benchmarks.language … --save FOLDER` writes each pruned model to a folder with its plan. This command opens
them again and times them in turn beside the unpruned model. A repair changes no shape, so it does not matter here.

    python -m benchmarks.language_speed --model smollm2 --pruned FOLDER/* --devices cpu cuda --out speeds.jsonl
    python -m benchmarks.language_speed --model smollm2 --pruned FOLDER/* --devices cuda --profile NAME --compile NAME
    python -m benchmarks.language_speed --model smollm2 --text wikitext-2 --repair FOLDER/80-default-none --threads 2

Prompt: the forward of whole texts. Decode: the forward of one token after the other, with a cache that holds the
prompt. float32 on a CPU, bfloat16 on a GPU. "graph": the forward is recorded as a CUDA graph, so that no time goes
into launching kernels. "compile": torch.compile. `--profile` prints what the GPU did, and how many kernels that took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc

#: Texts and tokens of each. On a GPU also one text, where launching kernels takes the time, and enough to fill it.
SHAPES = {"cpu": [(1, 256)], "cuda": [(1, 256), (64, 256), (32, 1024)]}
Run = Callable[[], Any]


def seconds(run: Run, cuda: bool, tokens: int) -> float:
    """Tokens per second."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - begin)


def prompt(model: nn.Module, x: Tensor) -> Any:
    """With a cache, as `generate` does it. Without one, recorded forwards get a mask and slow attention."""
    return model(input_ids=x, use_cache=True, logits_to_keep=1).logits


def decode(model: nn.Module, x: Tensor, tokens: int) -> Run:
    """Reads the prompt, and returns what writes so many tokens after it."""
    begun = model(input_ids=x, use_cache=True, logits_to_keep=1)

    def run() -> None:
        seen = begun
        for _ in range(tokens):
            last = seen.logits[:, -1:].argmax(-1)
            seen = model(input_ids=last, past_key_values=seen.past_key_values, use_cache=True)

    return run


def graphed(model: nn.Module, x: Tensor) -> Run:
    """The forward of a prompt as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            prompt(model, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prompt(model, x)
    return graph.replay


def compiled(model: nn.Module, x: Tensor) -> Run:
    """The forward of a prompt through torch.compile."""
    fast = torch.compile(lambda ids: prompt(model, ids), dynamic=False)
    fast(x)
    return lambda: fast(x)


def in_turn(runs: dict[str, Callable[[], Run]], cuda: bool, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Tokens per second of each in rounds in which all take turns; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, begin in runs.items():
            taken[name].append(seconds(begin(), cuda, tokens))
    return {name: found[1:] for name, found in taken.items()}


def profiled(model: nn.Module, x: Tensor) -> str:
    """Kernels of one prompt and of one token after it: how many, their time, and the longest."""
    from torch.profiler import ProfilerActivity, profile

    lines, after = [], decode(model, x, 1)
    for what, run in (("prompt", lambda: prompt(model, x)), ("token", after)):
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = 1000 * (time.perf_counter() - begin)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        found = [e for e in seen.key_averages() if e.self_device_time_total]
        found.sort(key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in found) / 1000
        most = ", ".join(f"{e.key[:60]} x{e.count} {e.self_device_time_total / 1000:.2f}" for e in found[:5])
        count = sum(e.count for e in found)
        lines.append(f"  {what}: {wall:.2f} ms, GPU busy {busy:.2f} ms, {count} kernels: {most}")
    return "\n".join(lines)


def speeds(models: dict[str, nn.Module], given: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Rows; they are printed and kept as they are found."""
    cuda, rows = device == "cuda", []
    models = {name: model.to(device, torch.bfloat16 if cuda else torch.float32) for name, model in models.items()}

    def keep(kind: str, how: str, texts: int, length: int, found: dict[str, list[float]]) -> None:
        for name, own in found.items():
            row = {"model": name, "device": device, "threads": torch.get_num_threads(), "texts": texts,
                   "length": length, "kind": kind, "how": how, "speed": statistics.median(own),
                   "least": min(own), "most": max(own)}  # fmt: skip
            rows.append(row)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            spread = f"{min(own):,.0f} to {max(own):,.0f}"
            print(f"{name} {kind} {how} {texts}x{length}: {row['speed']:,.0f} ({spread})", flush=True)

    def tried(how: Callable[[nn.Module, Tensor], Run], names: list[str], x: Tensor) -> dict[str, Callable[[], Run]]:
        found: dict[str, Run] = {}
        for name in names:
            try:
                found[name] = how(models[name], x)
            except Exception as error:  # the rest is measured all the same
                print(f"{name} {how.__name__}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return {name: (lambda run=run: run) for name, run in found.items()}  # type: ignore[misc]

    inputs = {
        (texts, length): torch.randint(0, 1000, (texts, length), generator=torch.Generator().manual_seed(0)).to(device)
        for texts, length in given.shapes or SHAPES[device]
    }
    with torch.no_grad():
        for (texts, length), x in inputs.items():
            ways = {name: (lambda m=model, x=x: lambda: prompt(m, x)) for name, model in models.items()}  # type: ignore[misc]
            keep("prompt", "eager", texts, length, in_turn(ways, cuda, given.rounds, x.numel()))
        for (texts, length), x in inputs.items():
            if length <= 256:
                ways = {name: (lambda m=model, x=x: decode(m, x, given.decoded)) for name, model in models.items()}  # type: ignore[misc]
                keep("decode", "eager", texts, length, in_turn(ways, cuda, given.rounds, given.decoded * texts))
        for (texts, length), x in inputs.items() if cuda and given.profile else ():
            for name in models:
                if name in ("dense", *given.profile):
                    print(f"{name}, {texts} x {length}\n{profiled(models[name], x)}", flush=True)
        for (texts, length), x in inputs.items() if cuda else ():
            runs = tried(graphed, [*models], x)
            keep("prompt", "graph", texts, length, in_turn(runs, cuda, given.rounds, x.numel()))
        if given.compile and cuda:
            (texts, length), x = list(inputs.items())[-1]
            names = [name for name in models if name == "dense" or name in given.compile]
            keep("prompt", "compile", texts, length, in_turn(tried(compiled, names, x), cuda, given.rounds, x.numel()))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: tokens per second, and how many times those of the unpruned model."""
    columns = list(dict.fromkeys((row["device"], row["kind"], row["how"], row["texts"], row["length"]) for row in rows))
    lines = ["| model | " + " | ".join(f"{d}, {k}, {h}, {t} x {n}" for d, k, h, t, n in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    by = {(r["model"], r["device"], r["kind"], r["how"], r["texts"], r["length"]): r["speed"] for r in rows}
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for column in columns:
            own, dense = by.get((name, *column)), by.get(("dense", *column))
            cells.append(f"{own:,.0f} ({own / dense:.2f}x)" if own and dense else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--shapes", type=lambda text: tuple(map(int, text.split("x"))), nargs="+", help="such as 64x256"
    )
    parser.add_argument("--profile", nargs="*", default=[], help="names of folders whose kernels to print too")
    parser.add_argument(
        "--compile", nargs="*", default=[], help="names of folders to compile too, beside the whole model"
    )
    parser.add_argument("--decoded", type=int, default=16, help="tokens after the prompt")
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
    rows = [row for device in given.devices for row in speeds(models, given, device)]
    print(table(rows))


if __name__ == "__main__":
    main()
