"""A language model without training: WikiText-2 perplexity over the share of the body's parameters that is left.

Calibration: sequences of the validation text, evenly drawn. Measured: the test text, context 1024. Each setting that is
not in the results yet is measured; results are kept line by line, so that a run can be stopped.

    python -m benchmarks.language --model smollm2 --text wikitext-2 --out results.jsonl
    python -m benchmarks.language --model smollm2 --text wikitext-2 --out results.jsonl --save FOLDER
    python -m benchmarks.language --out results.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Custom, Taylor
from secateur.loop import Schedule
from secateur.plans import Limits
from secateur.repair import Repair

CONTEXT = 1024


def by_columns(model: nn.Module, batches: list[Any], fluctuation: bool) -> dict[str, Tensor]:
    """What the output projection of each MLP reads, per neuron: its norm (or variance) times the norm of its column.

    Wanda-sp: ‖x‖ · ‖W‖. FLAP: the variance of x times ‖W‖², standardised in each layer so that layers compare.
    """
    sums: dict[str, list[Any]] = {}

    def hook(name: str) -> Any:
        def see(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().double().flatten(0, -2)
            known = sums.setdefault(name, [0.0, 0.0, 0])
            known[0], known[1], known[2] = known[0] + x.sum(0), known[1] + x.square().sum(0), known[2] + len(x)

        return see

    blocks = {name: module for name, module in model.named_modules() if name.endswith(".mlp")}
    handles = [block.down_proj.register_forward_hook(hook(name)) for name, block in blocks.items()]  # type: ignore
    with torch.no_grad():
        for inputs, _ in batches:
            model(**inputs)
    for handle in handles:
        handle.remove()
    found = {}
    for name, block in blocks.items():
        total, squares, count = sums[name]
        weight = block.down_proj.weight.detach().double()  # type: ignore
        if fluctuation:
            value = (squares / count - (total / count).square()) * weight.square().sum(0)
            value = (value - value.mean()) / value.std()
            value = value - value.min()
        else:
            value = (squares / count).sqrt() * weight.norm(dim=0)
        found |= {f"{name}.gate_proj": value.cpu(), f"{name}.up_proj": value.cpu()}
    return found


def by_influence(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    """How far each residual branch turns the state that it is added to, 1 - cos, mean over tokens (ShortGPT's "block
    influence"), spread over the outputs of the branch's last layer."""
    sums: dict[str, list[float]] = {}
    state: list[Tensor] = []

    def begin(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        state[:] = [(inputs or (named.get("hidden_states"),))[0]]  # type: ignore[list-item]

    def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        after = state[0] + output
        turned = 1 - F.cosine_similarity(state[0].float(), after.float(), dim=-1)
        sums.setdefault(name, []).append(float(turned.mean()))
        state[:] = [after]

    handles = []
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            handles.append(module.register_forward_hook(partial(see, name)))
        elif hasattr(module, "self_attn") and hasattr(module, "mlp"):
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
    with torch.no_grad():
        for inputs, _ in batches:
            model(**inputs)
    for handle in handles:
        handle.remove()
    width = state[0].shape[-1]
    return {name: torch.full((width,), statistics.mean(seen) / width) for name, seen in sums.items()}


def criteria() -> dict[str, Any]:
    """Each by a name for the table."""
    return {
        "default": "lrp",
        "lrp, |sum|": LRP(absolute="after"),
        "lrp, |sum| of a sample": LRP(absolute="sample"),
        "taylor": "taylor",
        "taylor, squares": Taylor(norm=None, absolute="square"),
        "wanda-sp": Custom(name="wanda-sp", function=partial(by_columns, fluctuation=False), norm=1),
        "flap": Custom(name="flap", function=partial(by_columns, fluctuation=True)),
        "block influence": Custom(name="influence", function=by_influence),
        "activation": "activation",
        "weight": "weight",
        "random": "random",
    }


def tokens_of(model: Path, text: Path) -> Tensor:
    """A text as the model's tokens."""
    from transformers import AutoTokenizer

    found: Tensor = AutoTokenizer.from_pretrained(model)(text.read_text(), return_tensors="pt").input_ids[0]
    return found


def sequences(model: Path, text: Path, count: int, length: int) -> Tensor:
    """So many sequences of the validation text, evenly drawn."""
    valid = tokens_of(model, text / "valid.txt")
    begins = torch.linspace(0, len(valid) - length - 1, count).long()
    return torch.stack([valid[b : b + length] for b in begins.tolist()])


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
    """A scope of `Limits`, "uniform" before it for the same width in all blocks; "branches" for whole residual
    branches and nothing else, "layers" for pairs of them. A number at the end: multiples of it."""
    parts = tuple(only.split(",")) if only else ("*",)
    if scope in ("branches", "layers"):
        return Limits(only=parts, blocks="only", uniform=scope == "layers")
    words = scope.split()
    uniform, multiple = "uniform" in words, next((int(word) for word in words if word.isdecimal()), None)
    kind = next((word for word in words if word in ("global", "layer", "cost")), None)
    if uniform and multiple is None:
        multiple = 32
    return Limits(scope=kind, only=parts, uniform=uniform, round_to=multiple)  # type: ignore[arg-type]


def watched(method: str, look: Callable[[nn.Module], None]) -> Repair:
    """A repair that shows the smaller model before it begins."""

    class Watched(Repair):
        def session(self, original: nn.Module, data: Any) -> Any:
            session: Any = super().session(original, data)
            examine = session.examine

            def seen(small: nn.Module, *args: Any) -> Any:
                look(small)
                return examine(small, *args)

            session.examine = seen
            return session

    return Watched(method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--windows", type=int, default=1000, help="of the test text, at most")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.8, 0.7])
    parser.add_argument("--criteria", nargs="+", default=["default"])
    parser.add_argument("--scopes", nargs="+", default=["default"])
    parser.add_argument("--repairs", nargs="+", default=["best", "none"])
    parser.add_argument("--only", default="")
    parser.add_argument("--memory", help='what a run may take, such as "40 GiB", if several share a device')
    parser.add_argument("--save", type=Path, help="keep pruned models here, for benchmarks.language_speed")
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.table:
        print(table(done))
        return
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    ids = sequences(given.model, given.text, given.sequences, given.tokens).to(device)
    test = tokens_of(given.model, given.text / "test.txt")[: given.windows * CONTEXT]
    data = [({"input_ids": part}, None) for part in ids.split(8)]
    whole, inner = sum(p.numel() for p in model.parameters()), body(model)
    print(f"dense: perplexity {perplexity(model, test, device):.2f}, {device.type}", flush=True)
    for setting in settings(given):
        if any(all(row.get(k) == v for k, v in setting.items()) for row in done):
            continue
        begin = time.perf_counter()
        looks: list[tuple[float, float, float]] = []  # the same before the repair, which spares a run

        def look(small: nn.Module, found: list[tuple[float, float, float]] = looks) -> None:
            now = time.perf_counter()
            found.append((now, perplexity(small, test, device), time.perf_counter() - now))

        keep = {"params": (whole - inner + setting["left"] * inner) / whole}
        try:
            result = sc.prune(
                model,
                data,
                criteria()[setting["criterion"]],
                keep=keep,
                schedule=Schedule(one_shot=True, rescore=False),
                limits=limits_for(setting["scope"], setting["only"]),
                repair=None if setting["repair"] == "none" else watched(setting["repair"], look),
                memory=given.memory,
                progress=False,
            )
        except sc.SecateurError as error:
            print(setting, type(error).__name__, error, flush=True)
            continue
        seconds, small = time.perf_counter() - begin - sum(took for _, _, took in looks), result.model
        shape = {"body": body(small) / inner, "device": device.type}
        row = {**setting, "ppl": perplexity(small, test, device), "seconds": seconds, **shape}
        removed = [setting | {"repair": "none", "ppl": ppl, "seconds": at - begin} | shape for at, ppl, _ in looks]
        if given.save:
            kind = setting["criterion"] if setting["scope"] in ("branches", "layers") else ""
            parts = (f"{100 * setting['left']:.0f}", setting["scope"], kind, setting["repair"])
            folder = given.save / "-".join(part.replace(" ", "_") for part in parts if part)
            result.save_pretrained(folder)
            folder.with_suffix(".json").write_text(result.plan.to_json())
        for each in (row, *removed):
            if all(any(known.get(k) != each[k] for k in setting) for known in done):
                done.append(each)
                with given.out.open("a") as file:
                    file.write(json.dumps(each) + "\n")
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in each.items()}, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per setting, a column per share."""
    shares = sorted({row["left"] for row in rows}, reverse=True)
    lines = [
        "| criterion | ranking | repair | " + " | ".join(f"{100 * s:.0f} %" for s in shares) + " |",
        "|---" * (3 + len(shares)) + "|",
    ]
    keys = dict.fromkeys((row["criterion"], row["scope"], row["only"], row["repair"]) for row in rows)
    for key in keys:
        found = {
            row["left"]: row for row in rows if (row["criterion"], row["scope"], row["only"], row["repair"]) == key
        }
        cells = [f"{found[s]['ppl']:.2f}" if s in found else "" for s in shares]
        where = key[1] + (f", {key[2]}" if key[2] else "")
        lines.append(f"| {key[0]} | {where} | {key[3]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
