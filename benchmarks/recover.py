"""What training wins back after pruning and repair, in minutes. Killed runs go on when the same command is given again.

    python -m benchmarks.recover compact --weights efficientnet_lite0.safetensors --images imagenette --out runs
    python -m benchmarks.recover language --model smollm2 --text wikitext-2/test.txt --out runs

compact: EfficientNet-Lite0 for Imagenette's ten classes at 35 % of its MACs. Ten images per class score and repair, all
1,000 reference images train, 500 others measure. language: a language model at 80 % of its body. It is scored, repaired
and trained on text that it writes itself, and measured on a text that it has not seen. Results are lines of
`runs/recover.jsonl`. The smaller model and the text are kept in `runs`, so that a run that goes on only trains. What it
has left of its minutes is in its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from benchmarks.language import body, perplexity
from secateur.recover import Recover, write_text

IMAGENETTE = [0, 217, 482, 491, 497, 566, 569, 571, 574, 701]  # outputs of its classes, in order of their folders


def kept(folder: Path, original: nn.Module, make: Callable[[], Any]) -> nn.Module:
    """The smaller model in a folder; it is made if there is none."""
    if not folder.exists():
        sc.save(make(), folder)
    device = next(original.parameters()).device
    return sc.load(folder, original).to(device).eval()


def kept_text(file: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The text in a file; it is written if there is none."""
    if not file.exists():
        half = file.with_suffix(".part")
        safetensors.torch.save_file(make(), half)
        half.rename(file)
    return safetensors.torch.load_file(file)


def compact(given: argparse.Namespace, settings: Recover) -> dict[str, float]:
    from benchmarks.latency_accuracy import network
    from secateur.data.images import read
    from secateur.data.views import View
    from secateur.running.accuracy import accuracy

    view = View(mean=(0.5,) * 3, std=(0.5,) * 3)
    whole = network("efficientnet_lite0", given.weights).to(given.device)
    model = sc.specialize(whole, IMAGENETTE, torch.zeros(2, 3, 224, 224, device=given.device))
    train, test = (read(given.images / part, view=view) for part in ("reference", "test"))
    left, few = given.left or 0.35, train.draw(10, seed=given.seed)
    small = kept(
        given.out / f"compact-{left:g}-{given.seed}", whole,
        lambda: sc.prune(model, few.tensors(given.device), keep={"macs": left}, progress=False),
    )  # fmt: skip
    if given.mix:  # all images in memory; the teacher answers what it is shown, so labels are not needed
        settings = replace(settings, teacher=1.0, batch_size=128, lr=given.lr or 0.02, augment=partial(mixed, view))
    data = train.pixels(True, given.device) if given.mix else train.training(64, given.device)
    file = given.out / f"compact-{left:g}-{given.seed}.safetensors"
    done = sc.recover(small, model, data, settings, checkpoint=file, progress=every(10))
    models = {"unpruned": model, "repaired": small, "trained": done.model}
    measured = test.batches(100, given.device)
    return {name: accuracy(m, measured).overall for name, m in models.items()} | {"epochs": len(done.history)}


def mixed(view: Any, pixels: Tensor) -> Tensor:
    """Random parts of the images, of a third of the area or more, mirrored or not; half of the batches are mixtures."""
    count, device = len(pixels), pixels.device
    images = view.normalise(pixels)
    side = torch.empty(count, 2, device=device).uniform_(0.55, 1)
    move = (1 - side) * torch.empty(count, 2, device=device).uniform_(-1, 1)
    scale = side * torch.stack(
        [torch.randint(2, (count,), device=device) * 2.0 - 1, torch.ones(count, device=device)], 1
    )
    where = torch.cat([torch.diag_embed(scale), move[:, :, None]], 2)
    grid = F.affine_grid(where, [count, pixels.shape[1], view.size, view.size], align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)
    share = torch.rand(count, 1, 1, 1, device=device) * (torch.rand((), device=device) < 0.5)
    return images.lerp(images.flip(0), share)


def every(number: int) -> Any:
    def tell(event: Any) -> None:
        if (event.epoch - 1) % number == 0 or event.epoch == event.epochs:
            print(f"{event.seconds:.0f} s {event}", flush=True)

    return tell


def language(given: argparse.Namespace, settings: Recover) -> dict[str, float]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device(given.device)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenizer(given.text.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    name = f"language-{given.sequences}-{given.tokens}-{given.seed}"
    text: Any = kept_text(
        given.out / f"{name}-text.safetensors",
        lambda: write_text(model, given.sequences, given.tokens, given.seed, batch_size=given.written),
    )
    print(f"{time.perf_counter() - given.begin:.0f} s: there is text", flush=True)
    few = [({"input_ids": part.to(device)}, None) for part in text["input_ids"][:128].split(8)]
    whole, inner = sum(p.numel() for p in model.parameters()), body(model)
    left = given.left or 0.8
    keep = {"params": (whole - inner + left * inner) / whole}
    small = kept(given.out / f"{name}-{left:g}", model, lambda: sc.prune(model, few, keep=keep, progress=False))
    file = given.out / f"{name}-{left:g}.safetensors"
    print(f"{time.perf_counter() - given.begin:.0f} s: there is a smaller model", flush=True)
    # The rate goes with the root of the batch size: 1e-4 for 8 sequences.
    settings = replace(settings, batch_size=given.batch, lr=given.lr or 1e-4 * (given.batch / 8) ** 0.5)
    context = min(1024, len(ids))
    before = {name: perplexity(m, ids, device, context) for name, m in (("unpruned", model), ("repaired", small))}
    print(json.dumps(before), flush=True)
    done = sc.recover(small, model, text, settings, checkpoint=file, progress=every(1))
    trained = perplexity(done.model.eval(), ids, device, context)
    return before | {"trained": trained, "epochs": len(done.history), "loss": done.history[-1].loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compact", "language"])
    for name in ("weights", "images", "model", "text"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--lr", type=float, help="default: what suits the model")
    parser.add_argument("--left", type=float, help="share of the MACs, or of the body, that is left")
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--written", type=int, default=512, help="language: sequences that are written at a time")
    parser.add_argument("--batch", type=int, default=32, help="language: sequences of a step")
    parser.add_argument("--mix", action="store_true", help="compact: train on mixtures of parts of the images")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = options.begin = time.perf_counter()
    asked = Recover(minutes=options.minutes, lr=options.lr, seed=options.seed)
    line = {
        "what": options.what,
        "minutes": options.minutes,
        "lr": options.lr,
        "seed": options.seed,
        "mix": options.mix,
    }
    line |= {"compact": compact, "language": language}[options.what](options, asked)
    line["seconds"] = round(time.perf_counter() - begin, 1)
    with (options.out / "recover.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
