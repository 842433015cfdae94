"""Whether `channels_last` and `compile` of `Recover` pay: seconds of an epoch with and without them, in turn.

    python -m benchmarks.compiled --epochs 6 --steps 20
    python -m benchmarks.compiled --device cpu --epochs 3 --steps 2 --side 160

Random images and tokens, random weights: only the time is looked at. Each network is cut to half of its MACs (text: of
its units), then trained with its original as teacher. An epoch has so many steps. The first epoch of a compiled run is
left out of the median and printed by itself, since it includes compiling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import secateur as sc
from secateur.recover import Recover


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as make

    return make()


def compact() -> nn.Module:
    import timm

    return timm.create_model("tf_efficientnet_lite0", pretrained=False)


def language() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 9}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=16384))


NETWORKS = {"ResNet-50": (resnet50, 64), "EfficientNet-Lite0": (compact, 64), "Llama, 12 blocks": (language, 16)}
#: The usual way, its images in the usual order, and compiled.
WAYS: dict[str, dict[str, bool]] = {
    "usual": {},
    "not channels last": {"channels_last": False},
    "compiled": {"compile": True},
}


def data(name: str, count: int, side: int, device: str) -> Any:
    if name.startswith("Llama"):
        return {"input_ids": torch.randint(16384, (count, 256), device=device)}
    return torch.randn(count, 3, side, side, device=device), torch.randint(1000, (count,), device=device)


def timed(
    small: nn.Module, whole: nn.Module, samples: Any, batch: int, epochs: int, way: dict[str, bool]
) -> list[float]:
    """Seconds of each epoch."""
    told = [time.perf_counter()]

    def note(event: Any) -> None:
        told.append(time.perf_counter())

    settings = Recover(epochs=epochs, batch_size=batch, **way)
    sc.recover(small, whole, samples, settings, progress=note)
    return [after - before for before, after in pairwise(told)]


def main(given: argparse.Namespace) -> None:
    for name, (make, usual) in NETWORKS.items():
        if given.networks not in name:
            continue
        batch = given.batch or usual
        torch.manual_seed(0)
        whole = make().to(given.device).eval()
        samples = data(name, batch * given.steps, given.side, given.device)
        few = samples if isinstance(samples, dict) else tuple(part[:8] for part in samples)
        few = [({"input_ids": few["input_ids"][:2]}, None)] if isinstance(few, dict) else few
        share = {"remove": 0.5} if name.startswith("Llama") else {"keep": {"macs": 0.5}}
        small = sc.prune(whole, few, "weight", repair=None, progress=False, **share).model
        ways = {way: told for way, told in WAYS.items() if "channels_last" not in told or not name.startswith("Llama")}
        found: dict[str, list[float]] = {way: [] for way in ways}
        first: list[float] = []
        for _ in range(given.rounds):
            for way, told in ways.items():
                seconds = timed(small, whole, samples, batch, given.epochs, told)
                found[way] += seconds[1:]
                first += seconds[:1] if way == "compiled" else []
        medians = {way: statistics.median(seconds) for way, seconds in found.items()}
        line = {way: round(median / medians["usual"], 3) for way, median in medians.items() if way != "usual"}
        seconds_of = {"network": name, "seconds": round(medians["usual"], 3), "first compiled": round(max(first), 1)}
        print(json.dumps(seconds_of | line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side", type=int, default=224, help="of images")
    parser.add_argument("--batch", type=int, default=0, help="samples in a step; 0 for those of each network")
    parser.add_argument("--networks", default="", help="only those whose names have this in them")
    parser.add_argument("--rounds", type=int, default=2)
    main(parser.parse_args())
