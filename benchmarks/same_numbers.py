"""Two checkouts of the code, the same numbers: relevance, scores, plans and repaired weights of models of the zoo.

    python -m benchmarks.same_numbers OLD_CHECKOUT [NEW_CHECKOUT] [--models resnet18 ...] [--keep FOLDER]

Each checkout runs in a process of its own, with one thread and the same seeds. Weights and samples are random, with
random batch-norm statistics. The table says "identical" if every bit agrees, else the largest difference, relative to
the largest entry of its tensor. The exit status is 1 if anything differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MODELS = {
    "resnet18": 64,
    "vgg11_bn": 64,
    "densenet121": 64,
    "mobilenet_v3_small": 64,
    "efficientnet_b0": 64,
    "shufflenet_v2_x0_5": 64,
    "googlenet": 64,
    "regnet_y_400mf": 64,
    "convnext_tiny": 64,
    "vit_b_16": 64,
    "swin_t": 64,
}
REPAIRED = (
    "resnet18", "densenet121", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5", "googlenet",
    "regnet_y_400mf",
)  # fmt: skip
TRANSFORMERS = ("vit_b_16", "swin_t")
CRITERIA = ("lrp", "taylor", "gradient", "weight", "activation")
PLANS: dict[str, dict[str, Any]] = {
    "remove 30 %": {"remove": 0.3},
    "keep 75 % of the MACs": {"keep": {"macs": 0.75}},
    "the same share of every layer": {"remove": 0.3, "scope": "layer"},
    "score per MAC": {"keep": {"macs": 0.75}, "scope": "cost"},
    "multiples of 4": {"remove": 0.3, "round_to": 4},
}
KINDS = ("relevance", "scores", "plans", "repair")
TOLERANCE = 1e-6
Numbers = dict[str, Tensor]
Plans = dict[str, Any]


# --- one checkout ----------------------------------------------------------------------------------------------------


def plan_with(graph: Any, scores: Any, remove: float | None = None, keep: Any = None, **limits: Any) -> Any:
    """`plan` of either checkout: limits as keywords, or as one object."""
    import secateur as sc

    try:
        from secateur.plans import Limits  # type: ignore[attr-defined]
    except ImportError:
        return sc.plan(graph, scores, remove=remove, keep=keep, **limits)
    return sc.plan(graph, scores, remove=remove, keep=keep, limits=Limits(**limits))


def repairs(small: nn.Module, model: nn.Module, data: Any) -> dict[str, nn.Module]:
    """A repair as it is by default, and one with settings that are not the default."""
    import secateur as sc

    try:
        from secateur.repair import Repair  # type: ignore[attr-defined]
    except ImportError:
        try:
            from secateur.repair.repair import Repair
        except ImportError:
            from secateur.pruning.repair.repair import Repair  # type: ignore[import-not-found, no-redef]
    settings = Repair(method="ridge", copies=2, seed=1, rounds=2, relevance=0.5)
    return {"default": sc.repair(small, model, data), "ridge": settings(small, model, data)}


def made(name: str, size: int) -> nn.Module:
    """A model of ten classes with random batch-norm statistics, biases and scales."""
    import torchvision

    from benchmarks.zoo import randomise

    torch.manual_seed(0)
    extra: dict[str, Any] = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    if name == "vit_b_16":
        extra["image_size"] = size
    model = randomise(torchvision.models.get_model(name, num_classes=10, **extra)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a head that starts at 0 lets no relevance pass
                parameter.normal_(0, 0.05)
    return model


def numbers(name: str, size: int) -> tuple[Numbers, Plans]:
    """Everything that must not change, for one model."""
    import secateur as sc

    model = made(name, size)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(10, 3, size, size, generator=generator)
    data = (inputs, torch.arange(10) % 10)
    found: Numbers = {}
    for composite in ("alpha1beta0", "epsilon_gamma_box", *(["attnlrp"] if name in TRANSFORMERS else [])):
        seen = sc.explain(model, inputs[:2], composite=composite)
        found[f"relevance/{composite}/heat"] = seen.heat
        for path, units in seen.units.items():
            found[f"relevance/{composite}/{path}"] = units
    graph = sc.analyze(model, inputs[:1])
    plans: Plans = {}
    for criterion in CRITERIA:
        scores = sc.score(model, data, criterion, graph=graph)
        for site, values in scores.units.items():
            found[f"scores/{criterion}/{site.path}/{site.function}/{site.visit}"] = torch.as_tensor(values)
        for what, request in PLANS.items() if criterion in ("lrp", "weight") else ():
            plan = plan_with(graph, scores, **request)
            plans[f"plans/{criterion}/{what}"] = json.loads(plan.to_json())
            if criterion == "lrp" and what == "remove 30 %" and name in REPAIRED:
                for how, repaired in repairs(sc.apply(model, plan), model, data).items():
                    for key, tensor in repaired.state_dict().items():
                        found[f"repair/{how}/{key}"] = tensor
    return {key: t.detach().clone().contiguous() for key, t in found.items()}, plans


def work(checkout: Path, folder: Path, models: list[str]) -> None:
    """The worker: the numbers of every model into files."""
    import secateur

    used = Path(str(secateur.__file__)).resolve()
    if not used.is_relative_to(checkout.resolve()):
        raise SystemExit(f"secateur was imported from {used}, not from {checkout}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in models:
        begin = time.perf_counter()
        tensors, plans = numbers(name, MODELS[name])
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps({"plans": plans, "seconds": time.perf_counter() - begin}))


# --- both ------------------------------------------------------------------------------------------------------------


def start(checkout: Path, folder: Path, models: list[str]) -> subprocess.Popen[bytes]:
    """A process that computes with the code of a checkout; this file itself is the same for both."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout.resolve() / "src"), str(here)])
    command = [sys.executable, "-m", "benchmarks.same_numbers", str(checkout), "--worker", str(folder)]
    return subprocess.Popen([*command, "--models", *models], env=environment, cwd=folder)


def difference(old: Tensor, new: Tensor) -> float:
    """0 if every bit agrees; else the largest difference, relative to the largest entry; infinite if not comparable."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    if torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8)):
        return 0.0
    a, b = old.double(), new.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    apart = float((a - b).abs().max()) if a.numel() else 0.0
    # Equal numbers with other bits are zeros of either sign.
    return apart / max(float(a.abs().max()), 1e-300) if apart else 0.0


def compare(old: Path, new: Path, name: str) -> tuple[dict[str, float], list[str]]:
    """The largest difference of each kind of number, and what differs."""
    before, after = load_file(old / f"{name}.safetensors"), load_file(new / f"{name}.safetensors")
    plans = [json.loads((folder / f"{name}.json").read_text())["plans"] for folder in (old, new)]
    worst: dict[str, float] = {}
    notes = []
    for key in sorted(before.keys() | after.keys()):
        both = key in before and key in after
        apart = difference(before[key], after[key]) if both else float("inf")
        kind = key.split("/")[0]
        worst[kind] = max(worst.get(kind, 0.0), apart)
        if apart:
            notes.append(f"{name}: {key}: " + (f"{apart:.1e}" if both else "only in one of them"))
    for key in sorted(plans[0].keys() | plans[1].keys()):
        same = plans[0].get(key) == plans[1].get(key)
        worst["plans"] = max(worst.get("plans", 0.0), 0.0 if same else float("inf"))
        if not same:
            fields = [f for f in plans[0].get(key, {}) if plans[0][key][f] != plans[1].get(key, {}).get(f)]
            notes.append(f"{name}: {key}: {', '.join(fields) or 'fields'} differ")
    return worst, notes


def cell(apart: float | None) -> str:
    if apart is None:
        return ""
    return "identical" if apart == 0 else "**differs**" if apart == float("inf") else f"{apart:.1e}"


def report(old: Path, new: Path, models: list[str]) -> bool:
    """Print the table and what differs; whether all is the same."""
    print("| model | " + " | ".join(KINDS) + " | numbers | s old | s new |")
    print("|---|" + "---|" * (len(KINDS) + 3))
    notes = []
    good = True
    for name in models:
        worst, found = compare(old, new, name)
        seconds = [json.loads((folder / f"{name}.json").read_text())["seconds"] for folder in (old, new)]
        count = sum(t.numel() for t in load_file(old / f"{name}.safetensors").values())
        cells = [name, *(cell(worst.get(kind)) for kind in KINDS), f"{count:,}", *(f"{s:.0f}" for s in seconds)]
        print("| " + " | ".join(cells) + " |", flush=True)
        notes += found
        good &= all(apart <= TOLERANCE for apart in worst.values())
    for note in notes[:40]:
        print(note)
    if len(notes) > 40:
        print(f"and {len(notes) - 40} more")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parents[1], help="this one")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--keep", type=Path, help="a folder for the numbers, to look at")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.old, options.worker, options.models)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        workers = [
            start(checkout, folder / side, options.models)
            for side, checkout in (("old", options.old), ("new", options.new))
        ]
        if any([worker.wait() for worker in workers]):  # noqa: C419 - wait for both
            raise SystemExit("a worker failed: see its error above")
        if not report(folder / "old", folder / "new", options.models):
            raise SystemExit(f"numbers differ by more than {TOLERANCE:.0e}")
    print(f"all numbers agree to {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
