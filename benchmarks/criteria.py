"""Which criterion for which network? Seven real networks, ten criteria, ten draws, with and without repair.

    python -m benchmarks.criteria --data DIR --device cuda --out criteria.jsonl --minutes 8    # again until it is done
    python -m benchmarks.criteria --data DIR --networks resnet50 --draws 0:10 --out resnet50.jsonl     # one of them
    python -m benchmarks.criteria --out criteria.jsonl [more.jsonl …] --table

A draw chooses three classes and ten samples of each, to score and to repair with; others test. Units are scored once
and removed at once, down to 35 % of the MACs and then down to half; accuracy is measured before and after the repair.
A network is built once, and has all its draws before the next one; every criterion gets its turn before the next draw.
What is in the results already is not measured again. What failed is noted, and tried again at the end and by the next
start: another program may have had the memory. `--table` prints accuracies, the mean over the networks of pictures, and
what each criterion loses against LRP on the same draws.

DIR holds imagenette/{reference,test}, resnet50.safetensors, efficientnet_lite0.safetensors, vgg16_features.safetensors,
alexnet_features.safetensors, resnet56_cifar10.safetensors with cifar10-small.npz (`python -m benchmarks.cifar
cifar-10-batches-bin cifar10-small.npz` makes it of the official binary files), minilm/ (in float16 too) and
sst/{train,test}.tsv (sentence, tab, 0 or 1). Networks whose files are missing are left out. Classifiers that the
weights lack are fitted on reference samples that no draw uses. "vit" is like the transformer of
`benchmarks.faithfulness`: 40 pictures of a class train it, and its attention is written as separate linear layers.
Removals are not verified here: that takes time, and the tests do it.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur as sc
from benchmarks import cifar
from benchmarks.faithfulness import TARGETS, Body, _fitted, _through, _train, resnet50, view_of
from benchmarks.resnet56 import resnet56
from secateur.criteria import Custom
from secateur.data.images import read
from secateur.nest import map_tensors, select_samples
from secateur.plans import Limits
from secateur.repair import Repair

SHARES = (0.35, 0.5)
HELD = 40  # reference pictures per class that fit classifiers
STEPS = 16  # of integrated gradients
#: Criterion and where units compete, by name.
METHODS = {
    "lrp": ("lrp", "cost"), "taylor": ("taylor", "layer"), "weight": ("weight", "layer"),
    "activation": ("activation", "layer"), "gradient": ("gradient", "layer"),
    "integrated gradients": ("integrated", "layer"), "random": ("random", "layer"), "lrp, by layer": ("lrp", "layer"),
    "lrp:epsilon_plus": ("lrp:epsilon_plus", "cost"), "lrp:epsilon_gamma_box": ("lrp:epsilon_gamma_box", "cost"),
    "lrp:attnlrp_gamma": ("lrp:attnlrp_gamma", "cost"),
}  # fmt: skip
NETWORKS = ("efficientnet_lite0", "resnet50", "vgg16", "alexnet", "resnet56", "vit", "minilm")
TEXTS = ("vit", "minilm")  # have attention: attnlrp and attnlrp_gamma instead of the presets for pictures


@dataclass(frozen=True)
class Scene:
    """A network for a few classes, samples to score and repair it on, and others to test it."""

    model: nn.Module
    data: Any
    test: tuple[Any, Tensor]


# -- criteria ----------------------------------------------------------------------------------------------------------
def conductance(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    """Integrated gradients, told by hidden units (Dhamdhere et al., 2018): gradients of the class along the way from an
    input of zeros, times how much the unit's output changes on each step. Texts begin at embeddings of zeros."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    words = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    total: dict[str, Tensor] = {}
    for inputs, targets in batches:
        last: dict[str, Tensor] = {}
        for step in range(STEPS + 1):
            made: dict[str, Tensor] = {}
            with ExitStack() as stack, torch.enable_grad():
                for name, layer in layers.items():
                    keep = lambda m, i, output, name=name, to=made: to.__setitem__(name, output)  # noqa: E731
                    stack.callback(layer.register_forward_hook(keep).remove)
                scale = step / STEPS
                if words is not None:
                    begin = lambda m, i, output, s=scale: (s * output).detach().requires_grad_()  # noqa: E731
                    stack.callback(words.register_forward_hook(begin).remove)
                    logits = model(**inputs)
                else:
                    logits = model(scale * inputs.detach().requires_grad_())
                chosen = logits.gather(1, targets[:, None]).sum()
                live = {name: out for name, out in made.items() if out.requires_grad}
                slopes = torch.autograd.grad(chosen, list(live.values()), allow_unused=True)
            for (name, out), slope in zip(live.items(), slopes, strict=True):
                channel = 1 if out.dim() == 4 else -1
                total.setdefault(name, out.new_zeros(out.shape[channel], dtype=torch.float64))
                if name in last and slope is not None:
                    part = (slope * (out - last[name])).detach().movedim(channel, -1).flatten(0, -2).sum(0).double()
                    total[name] = total[name] + part
            last = {name: out.detach() for name, out in made.items()}
    return {name: values.abs() for name, values in total.items()}


# -- networks and data -------------------------------------------------------------------------------------------------
class Networks:
    """Builds each network once, and its draws."""

    def __init__(self, data: Path, device: str, per_class: int, tested: int, side: int = 224, classes: int = 3) -> None:
        self.data, self.device, self.per_class, self.tested, self.side = data, device, per_class, tested, side
        self.classes = classes
        self._made: dict[str, Any] = {}

    def known(self) -> list[str]:
        files = {
            "vgg16": "vgg16_features", "alexnet": "alexnet_features", "vit": "resnet50", "resnet56": "resnet56_cifar10"
        }  # fmt: skip
        places = {name: self._file(files.get(name, name)) for name in NETWORKS} | {"minilm": self.data / "minilm"}
        return [name for name, place in places.items() if place.exists()]

    def scene(self, name: str, draw: int) -> Scene:
        if name not in self._made:
            torch.manual_seed(0)
            self._made = {name: self._built(name)}  # the others give their memory back
        net, outputs, train, test = self._made[name]
        numbers = sorted(set(train[1].tolist()))
        choose = np.random.default_rng(draw)
        classes = sorted(choose.choice(numbers, min(self.classes, len(numbers)), replace=False).tolist())
        x, y = _some(train, classes, self.per_class, choose)
        held = _some(test, classes, self.tested, np.random.default_rng(0))
        wanted, few = [outputs[c] for c in classes], select_samples(x, slice(2))
        with torch.no_grad():
            whole = (net(**few) if isinstance(few, Mapping) else net(few)).shape[1]
        if wanted != list(range(whole)):  # ten classes of ten are still ten of a thousand outputs
            net = sc.specialize(net, wanted, few).eval()
        return Scene(net, [(x, y)] if isinstance(x, Mapping) else (x, y), held)

    def _built(self, name: str) -> tuple[nn.Module, Any, Any, Any]:
        """The network, the outputs of its classes, samples to draw from, samples to test on."""
        if name == "minilm":
            return self._minilm()
        if name == "resnet56":
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar.MEAN, cifar.STD))
            with np.load(self.data / "cifar10-small.npz") as kept:
                x = ((torch.from_numpy(kept["images"]).float() / 255 - mean) / std).to(self.device)
                y = torch.from_numpy(kept["labels"]).long().to(self.device)
            net, half = resnet56(self._file("resnet56_cifar10")).to(self.device), len(x) // 2
            return net, range(10), (x[half:], y[half:]), (x[:half], y[:half])
        parts = [read(self.data / "imagenette" / part, view=view_of(name)) for part in ("reference", "test")]
        (x, y), test = ((self._sized(x), y) for x, y in (photos.tensors(self.device) for photos in parts))
        place = torch.cat([torch.nonzero(y == c).ravel()[HELD:] for c in range(10)])
        fitted = torch.cat([torch.nonzero(y == c).ravel()[:HELD] for c in range(10)])
        few, more = (x[place], y[place]), (x[fitted], y[fitted])
        if name == "resnet50":
            return resnet50(self.data).to(self.device), TARGETS, few, test
        if name == "efficientnet_lite0":
            import timm

            net = timm.create_model("tf_efficientnet_lite0").eval()
            net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in self._state(name).items()})
            return net.to(self.device), TARGETS, few, test
        if name == "vit":
            full, body = resnet50(self.data).to(self.device), Body().to(self.device)
            stem = nn.Sequential(full.conv1, full.bn1, full.relu, full.maxpool, full.layer1, full.layer2).eval()
            seen = torch.cat([_through(stem, more[0]), _through(stem, more[0].flip(3))])
            _train(body, seen, torch.cat([more[1]] * 2), 40)
            for block in body.blocks:
                block.mix = Attention(block.mix)
            return nn.Sequential(stem, body).eval(), range(10), few, test
        from torchvision import models

        features = getattr(models, name)().features
        features.load_state_dict({k[9:]: v.float() for k, v in self._state(f"{name}_features").items()})
        body = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval().to(self.device)
        return nn.Sequential(*body, _fitted(_through(body, more[0]), more[1])).eval(), range(10), few, test

    def _minilm(self) -> tuple[nn.Module, Any, Any, Any]:
        from transformers import AutoModel, AutoTokenizer

        folder = self.data / "minilm"
        encoder = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        tokenizer, net = AutoTokenizer.from_pretrained(folder), Sentiment(encoder).eval().to(self.device)
        sets = []
        for part, most in (("train", 1000), ("test", 600)):
            lines = (self.data / "sst" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
            rows = [line.split("\t") for line in lines][:most]
            found = tokenizer([row[0] for row in rows], padding="max_length", max_length=48, truncation=True,
                              return_tensors="pt")  # fmt: skip
            texts = {name: found[name].to(self.device) for name in ("input_ids", "attention_mask")}
            sets.append((texts, torch.tensor([int(row[1]) for row in rows], device=self.device)))
        (x, y), test = sets
        with torch.no_grad():
            pooled = torch.cat([net.pooled(**select_samples(x, slice(i, i + 50))) for i in range(0, 500, 50)])
        layer = _fitted(pooled, y[:500])  # has ten outputs
        net.head.weight.data, net.head.bias.data = layer.weight.data[:2].clone(), layer.bias.data[:2].clone()
        return net, range(2), (select_samples(x, slice(500, None)), y[500:]), test

    def _sized(self, x: Tensor) -> Tensor:
        size = (self.side, self.side)
        return x if x.shape[2:] == size else F.interpolate(x, size, mode="bilinear", antialias=True)

    def _file(self, name: str) -> Path:
        return self.data / f"{name}.safetensors"

    def _state(self, name: str) -> dict[str, Tensor]:
        return load_file(self._file(name))


class Attention(nn.Module):
    """What an `nn.MultiheadAttention` computes, written as linear layers, so that hooks see what each of them makes."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.heads, parts = like.num_heads, zip(like.in_proj_weight.chunk(3), like.in_proj_bias.chunk(3), strict=True)
        self.q, self.k, self.v, self.out = (
            _linear(w, b) for w, b in (*parts, (like.out_proj.weight, like.out_proj.bias))
        )

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return (self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)),)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
    layer.weight.data, layer.bias.data = weight.detach().clone(), bias.detach().clone()
    return layer


class Sentiment(nn.Module):
    """A sentence encoder and a classifier of the mean over its tokens."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, 2)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        counts = attention_mask[:, :, None].to(seen.dtype)
        return (seen * counts).sum(1) / counts.sum(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.pooled(input_ids, attention_mask))


def _some(data: tuple[Any, Tensor], classes: list[int], count: int, choose: np.random.Generator) -> tuple[Any, Tensor]:
    """So many samples of each class, renumbered from 0."""
    x, y = data
    places = [torch.nonzero(y == c).ravel().cpu().numpy() for c in classes]
    chosen = [choose.permutation(place)[:count] for place in places]
    index = torch.from_numpy(np.concatenate(chosen)).to(y.device)
    labels = torch.cat([torch.full((len(part),), i) for i, part in enumerate(chosen)]).to(y.device)
    return map_tensors(lambda t: t[index], x), labels


# -- measuring ---------------------------------------------------------------------------------------------------------
@torch.no_grad()
def accuracy(model: nn.Module, test: tuple[Any, Tensor]) -> float:
    x, y = test
    hits = 0
    for begin in range(0, len(y), 50):
        part = select_samples(x, slice(begin, begin + 50))
        logits = model(**part) if isinstance(part, Mapping) else model(part)
        hits += int((logits.argmax(1) == y[begin : begin + 50]).sum())
    return hits / len(y)


def measured(scene: Scene, wanted: list[str], draw: int, share: float, memory: str | None) -> Iterator[dict[str, Any]]:
    """A row for each method on one draw: scored, removed, repaired."""
    model, data = scene.model, scene.data
    inputs = data[0][0] if isinstance(data, list) else data[0]
    graph = sc.analyze(model, select_samples(inputs, slice(1)))
    session, whole = Repair("ridge", memory=memory).session(model, data), accuracy(model, scene.test)
    for method in wanted:
        begin = time.perf_counter()
        name, scope = METHODS[method]
        criterion: Any = Custom(function=conductance, name="integrated") if name == "integrated" else name
        torch.manual_seed(draw)
        row: dict[str, Any] = {"method": method, "share": share}
        try:
            scores = sc.score(model, data, criterion, graph=graph)
            plan = sc.plan(graph, scores, keep={"macs": share}, limits=Limits("layer" if scope == "layer" else "cost"))
            small = sc.apply(model, replace(plan, example=None))
            outcome = session.examine(small, False)
            row |= {"macs": plan.after.macs / plan.before.macs, "before": whole}
            row |= {"removed": accuracy(small, scene.test), "repaired": accuracy(outcome.model, scene.test)}
            row |= {"repair": outcome.method, "seconds": round(time.perf_counter() - begin, 2)}
            if outcome.method == "none":  # a repair that does harm, or fails: by what it was judged
                row["divergence"] = {name: repr(value) for name, value in outcome.divergence.items()}
        except Exception as error:  # noted, and tried again: others use the device too
            row["failed"] = _why(error)
        yield row


def attempted(
    networks: Networks, name: str, wanted: list[str], draw: int, share: float, memory: str | None
) -> Iterator[dict[str, Any]]:
    """The rows of a draw. One that cannot even begin is one row, of no method."""
    try:
        yield from measured(networks.scene(name, draw), wanted, draw, share, memory)
    except Exception as error:
        yield {"method": "", "share": share, "failed": _why(error)}


def _why(error: Exception) -> str:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"{type(error).__name__}: {str(error)[:200]}"


def methods(network: str) -> list[str]:
    """What is measured of a network."""
    pictures = ("lrp:epsilon_plus", "lrp:epsilon_gamma_box")
    return [m for m in METHODS if (m not in pictures if network in TEXTS else m != "lrp:attnlrp_gamma")]


def numbers(text: str) -> list[int]:
    """`3`, or `0:10` for ten of them."""
    first, _, last = text.partition(":")
    return list(range(int(first), int(last))) if last else [int(first)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True, nargs="+", help="several for a table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS))
    parser.add_argument("--draws", type=numbers, nargs="*", default=[list(range(10))], help="such as 0:10, or 3 7")
    parser.add_argument("--shares", type=float, nargs="*", default=list(SHARES))
    parser.add_argument("--classes", type=int, default=3, help="of a draw")
    parser.add_argument("--per-class", type=int, default=10, help="samples that are scored")
    parser.add_argument("--tested", type=int, default=50, help="test samples per class")
    parser.add_argument("--side", type=int, default=224, help="of photographs, in pixels")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no criterion after this")
    parser.add_argument("--memory", help="of a repair, such as '8 GiB'")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(_rows(*args.out)))
        return
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    networks = Networks(args.data, args.device, args.per_class, args.tested, args.side, args.classes)
    cells = list(product(args.networks or networks.known(), args.shares, chain(*args.draws)))
    for name, share, draw in cells * 2:  # the second time, what failed
        done = {_cell(row) for row in _rows(*args.out) if "failed" not in row}
        wanted = [m for m in args.methods or methods(name) if (name, args.classes, share, draw, m) not in done]
        if not wanted:
            continue
        for row in attempted(networks, name, wanted, draw, share, args.memory):
            with args.out[0].open("a", encoding="utf-8") as file:
                file.write(json.dumps({"network": name, "classes": args.classes, "draw": draw, **row}) + "\n")
            print(name, draw, *row.values(), flush=True)
            if time.monotonic() - begin > 60 * args.minutes:
                print("the minutes are over; the same command goes on")
                return
    print("done")


# -- tables ------------------------------------------------------------------------------------------------------------
#: What a standard error is multiplied by for a 95 % interval of so many draws (Student's t).
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 15: 2.14, 20: 2.09, 30: 2.05}
#: Accuracies in %, by network, method and draw.
Cells = dict[tuple[str, str], dict[int, float]]


def _rows(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text("utf-8").splitlines()]


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["network"], row.get("classes", 3), row["share"], row["draw"], row["method"]


def table(rows: list[dict[str, Any]]) -> str:
    """For each share and number of classes: accuracies, repaired and not, and differences to LRP on the same draws."""
    good = {_cell(row): row for row in rows if "failed" not in row}
    lines = []
    for share, classes in sorted({(key[2], key[1]) for key in good}):
        mine = [row for key, row in good.items() if (key[2], key[1]) == (share, classes)]
        for what in ("repaired", "removed"):
            lines.append(f"\n### {100 * share:g} % of the MACs, {classes} classes, {what}\n")
            lines += _accuracies(*_told(mine, what))
            lines.append("\nAgainst LRP on the same draws, in points, with 95 % intervals:\n")
            lines += _differences(_told(mine, what)[0])
    failed = {_cell(row): row["failed"] for row in rows if "failed" in row and _cell(row) not in good}
    return "\n".join([*lines, *(f"\n{cell}: {why}" for cell, why in failed.items())])


def _told(rows: list[dict[str, Any]], what: str) -> tuple[Cells, Cells]:
    """Accuracies by method, and of the whole model. "pictures" is the mean of their networks where all have a draw."""
    cells: Cells = defaultdict(dict)
    whole: Cells = defaultdict(dict)
    for row in rows:
        cells[row["network"], row["method"]][row["draw"]] = 100 * row[what]
        whole[row["network"], ""][row["draw"]] = 100 * row["before"]
    names = [name for name in NETWORKS if name != "minilm" and (name, "lrp") in cells]
    for found in (cells, whole):
        for method in {key[1] for key in found}:
            columns = [found.get((name, method), {}) for name in names]
            draws = set.intersection(*map(set, columns)) if len(columns) > 1 else set()
            if draws:
                found["pictures", method] = {d: float(np.mean([c[d] for c in columns])) for d in sorted(draws)}
    return cells, whole


def _columns(cells: Cells) -> list[str]:
    return [name for name in (*NETWORKS, "pictures") if any(key[0] == name for key in cells)]


def _accuracies(cells: Cells, whole: Cells) -> list[str]:
    """Mean and standard error over draws. A method that lacks some of LRP's draws tells how many it has."""
    columns = _columns(cells)
    draws = {name: cells.get((name, "lrp"), {}).keys() for name in columns}
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines.append(f"| draws | {' | '.join(str(len(draws[name])) for name in columns)} |")
    means = [list(whole.get((name, ""), {}).values()) for name in columns]
    lines.append(f"| whole model | {' | '.join(f'{np.mean(m):.1f}' if m else '' for m in means)} |")
    for method in [m for m in METHODS if any(key[1] == m for key in cells)]:
        texts = []
        for name in columns:
            found = cells.get((name, method), {})
            few = found and not draws[name] <= found.keys()
            texts.append(_mean(list(found.values())) + (f" ({len(found)})" if few else ""))
        lines.append(f"| {method} | {' | '.join(texts)} |")
    return lines


def _differences(cells: Cells) -> list[str]:
    """Paired: a draw that is hard is hard for both. The range is that of the networks of pictures."""
    columns = _columns(cells)
    lines = [f"| | {' | '.join(columns)} | networks of pictures |", "|---|" + "---:|" * (len(columns) + 1)]
    for method in [m for m in METHODS if m != "lrp" and any(key[1] == m for key in cells)]:
        texts, means = [], []
        for name in columns:
            base, found = cells.get((name, "lrp"), {}), cells.get((name, method), {})
            apart = [found[d] - base[d] for d in sorted(found.keys() & base.keys())]
            texts.append(_mean(apart, interval=True, sign="+"))
            means += [float(np.mean(apart))] if apart and name not in ("minilm", "pictures") else []
        spread = f"{min(means):+.1f} to {max(means):+.1f}" if means else ""
        lines.append(f"| {method} | {' | '.join(texts)} | {spread} |")
    return lines


def _mean(values: list[float], interval: bool = False, sign: str = "") -> str:
    """With its standard error, or half of the 95 % interval."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:{sign}.1f}"
    error = np.std(values, ddof=1) / len(values) ** 0.5
    factor = T95[max(count for count in T95 if count <= len(values))] if interval else 1.0
    return f"{np.mean(values):{sign}.1f} ± {factor * error:.1f}"


if __name__ == "__main__":
    main()
