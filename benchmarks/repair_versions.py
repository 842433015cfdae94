"""Accuracy after a ridge repair with two versions of the code: same photographs, own plans or the plans of the other.

    git worktree add ../old 48a29b2
    PYTHONPATH=../old/src:../old python benchmarks/repair_versions.py run old resnet50 --data DIR --plans plans
    PYTHONPATH=src:. python benchmarks/repair_versions.py run new resnet50 --data DIR
    PYTHONPATH=src:. python benchmarks/repair_versions.py run cross resnet50 --data DIR --plans plans
    python benchmarks/repair_versions.py table

PYTHONPATH decides which code runs. `old` writes its plans, `cross` repairs models that were cut by them. `--data` has
resnet50.safetensors, efficientnet_lite0.safetensors and imagenette/{reference,test}. Results are appended to `--out`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

MODELS: dict[str, tuple[list[int], list[float]]] = {
    "resnet50": ([0, 217, 491], [0.6, 0.35, 0.16]),
    "efficientnet_lite0": ([0, 217, 482, 491, 497, 566, 569, 571, 574, 701], [0.5, 0.35]),
}
#: Student's t for 95 % intervals of so many draws.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def build(name: str, data: Path) -> tuple[Any, Any, Any]:
    """The network, and what it sees of photographs: for scoring, and for testing."""
    from secateur.data.images import read
    from secateur.data.views import View

    if name == "resnet50":
        from reproduction.networks import network

        net, view = network("resnet50", str(data / "resnet50.safetensors"), True)[0], View(224)
    else:
        import safetensors.torch
        import timm

        net, view = timm.create_model("tf_efficientnet_lite0"), View(224, mean=(0.5,) * 3, std=(0.5,) * 3)
        saved = safetensors.torch.load_file(data / "efficientnet_lite0.safetensors")
        net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in saved.items()})
    photos = [read(data / "imagenette" / part, view=view) for part in ("reference", "test")]
    if name == "resnet50":
        photos = [part.of(["n01440764", "n02102040", "n03000684"]) for part in photos]
    return net.float().eval(), *photos


def run(options: argparse.Namespace) -> None:
    import torch

    from secateur import analyze, apply, plan, score, specialize
    from secateur.plans import Limits
    from secateur.plans.plan import Plan
    from secateur.repair import Repair

    classes, shares = MODELS[options.model]
    net, photos, test = build(options.model, options.data)
    net = specialize(net.to(options.device), classes, torch.zeros(2, 3, 224, 224, device=options.device)).eval()

    def pair(some: Any) -> tuple[Any, Any]:
        x, y = some.tensors(options.device)
        return x, torch.unique(y, return_inverse=True)[1]  # the numbers of the outputs that are left

    tx, ty = pair(test)

    def right(model: Any) -> float:
        with torch.no_grad():
            said = torch.cat([model.eval()(part).argmax(1) for part in tx.split(50)])
        return round(100 * float((said == ty).float().mean()), 2)

    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(r["label"], r["model"], r["draw"], r["share"]) for r in rows}
    for draw in options.draws:
        x, y = pair(photos.draw(10, seed=draw))
        graph = analyze(net, x[:1])
        scores = score(net, (x, y), "lrp", graph=graph, batch_size=50)
        at_once = {"at_once": 1024} if options.label == "old" else {}  # newer versions find that out
        session = Repair("ridge", **at_once).session(net, (x, y))
        for share in shares:
            if (options.label, options.model, draw, share) in done:
                continue
            file = options.plans / f"{options.model}-{draw}-{share}.json"
            if options.label == "cross":
                chosen = Plan.from_json(file.read_text())
            else:
                chosen = plan(graph, scores, keep={"macs": share}, limits=Limits("cost"))
            if options.label == "old":
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(chosen.to_json())
            small, begin = apply(net, chosen), time.perf_counter()
            made = session.examine(small).model
            row = {"label": options.label, "model": options.model, "draw": draw, "share": share, "none": right(small)}
            row |= {"accuracy": right(made), "seconds": round(time.perf_counter() - begin, 2)}
            with options.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return "" if not values else f"{values[0]:.1f}"
    half = _T.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.1f} ± {half:.1f}"


def table(options: argparse.Namespace) -> None:
    rows = {(r["model"], r["share"], r["label"], r["draw"]): r for r in map(json.loads, options.out.open())}
    print(
        "| model | MACs left | version | draws | not repaired | repaired | than old, same draws |\n" + "|---" * 7 + "|"
    )
    for model, share in sorted({key[:2] for key in rows}, reverse=True):
        for label in ("old", "new", "cross", "cpu"):
            mine = {key[3]: row for key, row in rows.items() if key[:3] == (model, share, label)}
            if not mine:
                continue
            base = {draw: rows.get((model, share, "old", draw)) for draw in mine}
            more = [row["accuracy"] - old["accuracy"] for draw, row in mine.items() if (old := base[draw])]
            none = statistics.mean(row["none"] for row in mine.values())
            cells = (f"{100 * share:.0f} %", label, len(mine), f"{none:.1f}")
            print(f"| {model} | " + " | ".join(map(str, cells)), end=" | ")
            print(spread([row["accuracy"] for row in mine.values()]), "|", spread(more) if label != "old" else "", "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("label", nargs="?", choices=["old", "new", "cross"])
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--plans", type=Path, default=Path("plans"))
    parser.add_argument("--out", type=Path, default=Path("repair_versions.jsonl"))
    parser.add_argument("--draws", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.what == "run" and (options.label is None or options.model is None or options.data is None):
        parser.error("run LABEL MODEL --data DIR")
    (run if options.what == "run" else table)(options)


if __name__ == "__main__":
    main()
