"""Conservation in whole zoos: what share of the relevance goes astray, at worst, in one operation or in all of them.

    python -m benchmarks.conservation                  one torchvision model per family, and the table
    python -m benchmarks.conservation torchvision      every classifier of torchvision
    python -m benchmarks.conservation timm             one timm model per family
    python -m benchmarks.conservation --write          all rows so far, as docs/results/conservation.md

Weights are random, and so are batch-norm statistics, biases and scales; images have the size that the model is made for
(224² where any will do). Networks are run under `alpha1beta0`, those with layer norms under `attnlrp` as well. Rows go
to a JSON-lines file as they come, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.zoo import TIMM_SMALLEST, TORCHVISION_SMALLEST, make, torchvision_models
from secateur.errors import SecateurError
from secateur.relevance import explain

PAGE = Path("docs/results/conservation.md")


def presets(net: nn.Module) -> list[str]:
    """The paper's rule for all; a network with layer norms is a transformer or built like one."""
    normed = any(isinstance(module, nn.LayerNorm) for module in net.modules())
    return ["alpha1beta0", "attnlrp"] if normed else ["alpha1beta0"]


def rows_of(zoo: str, name: str) -> list[dict[str, Any]]:
    """One row for each preset."""
    net, x = make(zoo, name, None)
    if zoo == "torchvision" and name.startswith("vit"):  # starts at zero
        nn.init.normal_(net.heads.head.weight, 0, 0.05)
    found = []
    for preset in presets(net):
        row: dict[str, Any] = {"zoo": zoo, "model": name, "preset": preset, "input": x.shape[-1]}
        begin = time.perf_counter()
        try:
            books = explain(net, x, 3, composite=preset).conservation
            row |= {
                "reached": books.input / books.start,
                "absorbed": books.absorbed / books.start,
                "worst": books.worst,
                "limit": 0.01 if len(presets(net)) == 1 else 0.05,
                "operations": len(books.flows),
            }
        except SecateurError as error:
            row["refused"] = f"{type(error).__name__}: {error}"
        found.append(row | {"seconds": round(time.perf_counter() - begin, 1)})
    return found


def ok(row: dict[str, Any]) -> bool:
    return "worst" in row and row["worst"] <= row["limit"]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | image | preset | input / start | absorbed by constants | worst | operations |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        head = f"| {row['model']} | {row['input']}² | {row['preset']} |"
        if "refused" in row:
            lines.append(f"{head} refused | | | |")
            continue
        worst = f"{row['worst']:.3%}" if ok(row) else f"**{row['worst']:.3%}**"
        lines.append(f"{head} {row['reached']:.5f} | {row['absorbed']:.5f} | {worst} | {row['operations']} |")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """How many conserve, and who was refused why."""
    models = sorted({row["model"] for row in rows})
    good = [m for m in models if all(ok(row) for row in rows if row["model"] == m)]
    text = (
        f"{len(good)} of {len(models)} models conserve relevance (1 %; 5 % with layer norms) under every preset tried."
    )
    refused = {row["model"]: row["refused"] for row in rows if "refused" in row}
    if refused:
        text += "\n\nRefused by name:\n\n" + "\n".join(f"- `{name}`: {why}" for name, why in refused.items())
    astray = [f"`{row['model']}` under `{row['preset']}`" for row in rows if "worst" in row and not ok(row)]
    if astray:
        text += "\n\nBeyond the limit: " + ", ".join(astray) + "."
    return text


def page(rows: list[dict[str, Any]]) -> str:
    parts = [
        "# Conservation in whole zoos\n\n"
        "    python -m benchmarks.conservation torchvision\n"
        "    python -m benchmarks.conservation timm\n"
        "    python -m benchmarks.conservation --write\n\n"
        "Relevance starts at one output: 1, or its logit under `attnlrp`. *Input / start* is the share that\n"
        "reaches the image. *Absorbed* is what constants take by definition (class tokens, zero padding; under\n"
        "`attnlrp` also biases and the constant part of a softmax, often most of it in random networks). The two\n"
        "add up to 1 unless relevance is lost or created. *Worst* is the largest share that is lost or created,\n"
        "in one operation or in all.\n"
        "Weights, batch-norm statistics, biases and scales are random; one image, float32.\n"
    ]
    for zoo, title in (("torchvision", "every classifier"), ("timm", "the smallest member of each family")):
        own = [row for row in rows if row["zoo"] == zoo]
        if own:
            parts.append(f"## {zoo}: {title}\n\n{summary(own)}\n\n{table(own)}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", nargs="?", choices=["torchvision", "timm"])
    parser.add_argument("--only", nargs="*", help="just these models")
    parser.add_argument("--out", type=Path, default=Path("out/conservation.jsonl"))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.write:
        PAGE.write_text(page(sorted(rows, key=lambda row: (row["zoo"], row["model"]))))
        return
    zoo = args.zoo or "torchvision"
    names = args.only or (
        TIMM_SMALLEST if zoo == "timm" else torchvision_models() if args.zoo else TORCHVISION_SMALLEST
    )
    done = {(row["zoo"], row["model"]) for row in rows}
    for name in names:
        if (zoo, name) in done:
            continue
        new = rows_of(zoo, name)
        rows += new
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
        for row in new:
            verdict = "refused" if "refused" in row else f"{row['worst']:.3%}"
            print(f"{name} {row['preset']}: {verdict}, {row['seconds']} s", flush=True)
    own = [row for row in rows if row["zoo"] == zoo and row["model"] in names]
    print(f"\n{table(own)}\n\n{summary(own)}")


if __name__ == "__main__":
    main()
