"""Which criterion finds the experts that a mixture needs least? A tiny Mixtral, trained here on the bytes of a text.

    python -m benchmarks.experts --text wikitext-2 --minutes 2 --out out/experts

First the truth: each expert leaves alone, and the loss on held-out text says what it was worth. A criterion is good if
its scores have the same order (Spearman's correlation, per layer), and if little is lost when it removes a quarter or
half of all experts at once. Nothing is trained or repaired after a removal. The trained model is kept in `--out`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP
from secateur.plans.plan import plan_for
from secateur.structure.graph import Graph, Layer

_CONTEXT, _SEEDS = 128, 5
CRITERIA: dict[str, Any] = {
    "LRP (default)": "lrp",
    "LRP, |sum|": LRP(absolute="after"),
    "taylor": "taylor",
    "gradient": "gradient",
    "activation": "activation",
    "weight": "weight",
}


def built() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=96, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=_CONTEXT,
        output_router_logits=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def drawn(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    begin = torch.randint(len(text) - _CONTEXT, (count,), generator=generator)
    return torch.stack([text[b : b + _CONTEXT] for b in begin.tolist()])


def train(model: Any, text: Tensor, minutes: float) -> None:
    generator, begin = torch.Generator().manual_seed(1), time.perf_counter()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    step = 0
    model.train()
    while (share := (time.perf_counter() - begin) / (60 * minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1, 50 * share) * 0.5 * (1 + math.cos(math.pi * share))
        ids = drawn(text, 16, generator).to(model.device)
        loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss  # with the loss that balances experts
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits per byte", flush=True)
    model.eval()


def bits(model: Any, held: Tensor) -> float:
    """Bits per byte of held-out text."""
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss.item() for part in held.to(model.device).split(64)]
    return statistics.fmean(losses) / math.log(2)


def experts(graph: Graph) -> list[Layer]:
    return [layer for layer in graph.layers if layer.kind == "expert"]


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def study(model: Any, text: Tensor, held: Tensor) -> None:
    drawn_ids = drawn(text, 64, torch.Generator().manual_seed(2)).to(model.device)
    data = [{"input_ids": part} for part in drawn_ids.split(16)]
    graph = sc.analyze(model, data[0])
    layers, dense = experts(graph), bits(model, held)
    print(f"whole model: {dense:.4f} bits per byte; {sum(len(layer.groups) for layer in layers)} experts\n")
    worth: list[list[float]] = []
    for layer in layers:
        worth.append([])
        for group in layer.groups.tolist():
            removed = np.zeros(len(graph.root), np.bool_)
            removed[group] = True
            worth[-1].append(bits(sc.apply(model, plan_for(graph, removed)), held) - dense)
    print("lost if one leaves:", [[round(x, 4) for x in row] for row in worth], "\n", flush=True)
    print("| criterion | rank correlation with the truth | 25 % of the experts gone | 50 % |\n|---|---|---|---|")

    def left(scores: sc.Scores) -> list[float]:
        lost = []
        for share in (0.25, 0.5):  # of each layer
            removed = np.zeros(len(graph.root), np.bool_)
            for layer in layers:
                order = np.argsort(values(scores, graph, layer), kind="stable")
                removed[layer.groups[order[: round(share * len(order))]]] = True
            lost.append(bits(sc.apply(model, plan_for(graph, removed)), held) - dense)
        return lost

    def row(name: str, many: list[sc.Scores]) -> None:
        pairs = list(zip(layers, worth, strict=True))
        found = [spearman(known, values(scores, graph, layer)) for scores in many for layer, known in pairs]
        lost = [statistics.fmean(each) for each in zip(*map(left, many), strict=True)]
        print(f"| {name} | {np.mean(found):.2f} | {lost[0]:+.4f} | {lost[1]:+.4f} |", flush=True)

    for name, criterion in CRITERIA.items():
        row(name, [sc.score(model, data, criterion, graph=graph)])
    rng = np.random.default_rng(0)
    at_random = [
        sc.Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers}) for _ in range(_SEEDS)
    ]
    row(f"random, mean of {_SEEDS}", at_random)
    truth = {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers}
    for layer, known in zip(layers, worth, strict=True):
        truth[_producer(graph, layer).sites[0]] = np.array(known)
    row("the truth itself, one at a time", [sc.Scores("truth", truth)])


def _producer(graph: Graph, layer: Layer) -> Any:
    return next(p for p in graph.producers if p.kind == "expert" and np.isin(graph.root[p.labels], layer.groups).all())


def values(scores: sc.Scores, graph: Graph, layer: Layer) -> Any:
    """The score of each expert, in the order of the groups."""
    producer = _producer(graph, layer)
    place = {int(root): i for i, root in enumerate(graph.root[producer.labels])}
    own = scores.units[producer.sites[0]]
    return [own[place[int(group)]] for group in layer.groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a folder of text files, or one")
    parser.add_argument("--minutes", type=float, default=2, help="of training")
    parser.add_argument("--held", type=int, default=256, help="sequences of held-out text")
    parser.add_argument("--out", type=Path, default=Path("out/experts"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    files = sorted(given.text.glob("*.txt")) if given.text.is_dir() else [given.text]
    raw = b"".join(file.read_bytes() for file in files)
    whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    cut = len(whole) * 9 // 10
    held = drawn(whole[cut:], given.held, torch.Generator().manual_seed(3))
    model = built().to("cuda" if torch.cuda.is_available() else "cpu")
    if (given.out / "config.json").exists():
        model = type(model).from_pretrained(given.out).to(model.device)
    else:
        train(model, whole[:cut], given.minutes)
        model.save_pretrained(given.out)
    study(model.eval(), whole[:cut], held)


if __name__ == "__main__":
    main()
