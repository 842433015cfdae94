"""Ways to lose less at a third or a sixth of the MACs: redundancy among channels, widths by what stays lost, rounds.

    python -m benchmarks.redundancy --data DIR --device cuda --out redundancy.jsonl    # goes on where it stopped
    python -m benchmarks.redundancy --out redundancy.jsonl --table

DIR as for `benchmarks.criteria`; what failed is noted and tried again as there. A draw has ten samples of each class;
others test. Every variant is removed at once and repaired; told are accuracy, and the mean Kullback-Leibler divergence
from the whole model on test samples.

"lost" scores a channel by what the layers that read it lose of their outputs if the channels that stay make up for it
as well as a linear regression can (backward elimination, as in Optimal Brain Surgeon). Outputs count by their
relevance per variance, or by the squared slopes of the logits.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from benchmarks.criteria import HELD, _mean, _rows, _some, _why, numbers
from benchmarks.faithfulness import TARGETS, resnet50, view_of
from secateur.data.images import read
from secateur.plans import Limits, allocation
from secateur.plans.plan import Plan, plan_for
from secateur.plans.scores import Scores
from secateur.repair import Repair, crop_and_flip
from secateur.structure.graph import Graph

ROWS = 20_000  # positions of a layer that its covariances are estimated from
#: Scores, balance of the allocation (None: widths by LRP, channels by these scores), rounds and copies of the repair.
VARIANTS: dict[str, tuple[str, float | None, int, int]] = {
    "lrp": ("lrp", 1.0, 1, 8),
    "lrp, one fit": ("lrp", 1.0, 0, 8),
    "lrp's widths, lost relevance": ("relevance", None, 1, 8),
    "lost slopes": ("slopes", 0.0, 1, 8),
    "lrp, 3 rounds": ("lrp", 1.0, 3, 8),
    "lrp's widths, lost slopes": ("slopes", None, 1, 8),
    "lost relevance": ("relevance", 0.0, 1, 8),
    "lost slopes, 3 rounds": ("slopes", 0.0, 3, 8),
    "lrp, 20 copies": ("lrp", 1.0, 1, 20),
    "lost slopes, balanced": ("slopes", 1.0, 1, 8),
}
TASKS = {  # network, classes, share of the MACs
    "resnet50-10": ("resnet50", 10, 0.16), "lite0-10": ("efficientnet_lite0", 10, 0.35),
    "resnet50-3": ("resnet50", 3, 0.16), "lite0-3": ("efficientnet_lite0", 3, 0.35),
}  # fmt: skip
GOALS = {"resnet50-10": 90, "lite0-10": 86, "resnet50-3": 95, "lite0-3": 93}


# -- what is lost ------------------------------------------------------------------------------------------------------
@dataclass
class Reader:
    """A layer that mixes channels: the groups that it reads, sums over rows, and what each output counts."""

    groups: np.ndarray[Any, Any]
    weight: Tensor  # (outputs, inputs, taps)
    rows: int = 0
    x: Tensor | float = 0.0
    xx: Tensor | float = 0.0
    y: Tensor | float = 0.0
    yy: Tensor | float = 0.0
    slopes: Tensor | float = 0.0


def readers_of(model: nn.Module, graph: Graph) -> dict[str, Reader]:
    axes = {(axis.parameter, axis.dim): axis for axis in graph.axes.axes}
    found = {}
    for path, layer in model.named_modules():
        axis = axes.get((f"{path}.weight", 1))
        plain = isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
        if plain and axis is not None:
            weight = (
                layer.weight.detach().flatten(2) if isinstance(layer, nn.Conv2d) else layer.weight.detach()[..., None]
            )
            found[path] = Reader(graph.root[axis.span], weight)
    return found


def gather(model: nn.Module, readers: dict[str, Reader], x: Tensor, copies: int, size: int) -> None:
    """Sums over positions of what each layer reads and returns, and of the squared slopes of the logits."""
    draw = torch.Generator().manual_seed(0)
    images = torch.cat([x, *(crop_and_flip(x, draw) for _ in range(copies))])
    per = max(1, ROWS // len(images))
    for part in images.split(size):
        outputs: dict[str, Tensor] = {}
        with ExitStack() as stack, torch.enable_grad():
            for path, reader in readers.items():

                def see(
                    module: Any, args: Any, output: Tensor, path: str = path, reader: Reader = reader,
                    outputs: dict[str, Tensor] = outputs,
                ) -> None:  # fmt: skip
                    read, made = (
                        t.detach().flatten(2) if t.dim() == 4 else t.detach()[..., None] for t in (args[0], output)
                    )
                    places = torch.randperm(read.shape[2], generator=draw)[:per].to(read.device)
                    rows, y = read[:, :, places].transpose(1, 2).flatten(0, 1), made.transpose(1, 2).flatten(0, 1)
                    rows = rows.double() if rows.is_cuda else rows
                    reader.rows += len(rows)
                    reader.x, reader.xx = reader.x + rows.sum(0), reader.xx + rows.mT @ rows
                    reader.y = reader.y + y.mean(0).double() * len(read)
                    reader.yy = reader.yy + y.double().square().mean(0) * len(read)
                    outputs[path] = output

                stack.callback(model.get_submodule(path).register_forward_hook(see).remove)
            logits = model(part.detach().requires_grad_())
            logits = logits - logits.mean(1, keepdim=True)
            for _ in range(2):
                mixed = (logits * torch.randn(logits.shape, generator=draw).to(logits)).sum()
                slopes = torch.autograd.grad(mixed, list(outputs.values()), retain_graph=True)
                for path, slope in zip(outputs, slopes, strict=True):
                    whole = slope.double().square().flatten(2).sum(2) if slope.dim() == 4 else slope.double().square()
                    readers[path].slopes = readers[path].slopes + whole.sum(0) / 2
    for reader in readers.values():
        reader.y, reader.yy, reader.slopes = (t / len(images) for t in (reader.y, reader.yy, reader.slopes))


def counts_of(reader: Reader, relevance: Tensor | None, total: float, how: str) -> Tensor:
    """What the squared error of each output counts."""
    if how == "slopes":
        return torch.as_tensor(reader.slopes)
    variance = (torch.as_tensor(reader.yy) - torch.as_tensor(reader.y).square()).clamp_min(1e-12)
    if relevance is None:  # the classifier: all relevance begins there
        return 1 / (variance * len(variance))
    return relevance.to(variance).clamp_min(0) / total / variance.clamp_min(1e-6 * float(variance.mean()))


def eliminated(
    readers: list[Reader], counts: list[Tensor], groups: np.ndarray[Any, Any], ridge: float
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """What each group's leaving loses, the cheapest first, given that the rest makes up for it; and the order."""
    place = {group: i for i, group in enumerate(groups.tolist())}
    inverse, product = [], []
    for reader, count in zip(readers, counts, strict=True):
        index = torch.tensor([place[g] for g in reader.groups.tolist()], device=count.device).argsort()
        mean = torch.as_tensor(reader.x).double() / reader.rows
        cov = (torch.as_tensor(reader.xx).double() / reader.rows - mean[:, None] * mean)[index][:, index]
        strength = (ridge * cov.diagonal().mean()).clamp_min(1e-12)
        inverse.append(torch.linalg.inv(cov + strength * torch.eye(len(cov), device=cov.device, dtype=cov.dtype)))
        w = (reader.weight.double()[:, index] * count.double().sqrt()[:, None, None]).transpose(0, 1).flatten(1)
        product.append(w @ w.mT)
    left = torch.arange(len(groups), device=inverse[0].device)
    here = torch.ones(len(groups), dtype=torch.bool, device=left.device)
    values, order, peak = np.zeros(len(groups)), [], 0.0
    while len(order) < len(groups) - 1:
        ratios = [g.diagonal() / p.diagonal().clamp_min(1e-30) for p, g in zip(inverse, product, strict=True)]
        loss = torch.where(here, torch.stack(ratios).sum(0).clamp_min(0), torch.inf)
        step = max(1, min(len(groups) // 128, (len(groups) - len(order)) // 16))
        gone = loss.argsort()[:step]
        for value, number in zip(loss[gone].tolist(), left[gone].tolist(), strict=True):
            peak = max(peak, value)
            values[number] = peak
            order.append(number)
        here[gone] = False
        for p, g in zip(inverse, product, strict=True):
            own = p[gone]
            a = torch.linalg.solve(own[:, gone], own).mT  # (n, gone)
            first = g[gone]
            p.addmm_(a, own, alpha=-1)
            both = a @ (first - 0.5 * first[:, gone] @ a.mT)
            g.sub_(both).sub_(both.mT)
        if len(groups) - len(order) < 0.75 * len(left):
            inverse, product = ([m[here][:, here] for m in side] for side in (inverse, product))
            left, here = left[here], here[here]
    last = left[here].tolist()
    values[last] = peak
    return values, [*order, *last]


def lost(
    model: nn.Module, graph: Graph, readers: dict[str, Reader], lrp: Scores, how: str, ridge: float = 1e-2
) -> tuple[Scores, dict[int, list[int]]]:
    """Scores by what stays lost, and in which order each layer's groups leave."""
    relevance = {site.path: torch.from_numpy(np.asarray(values)) for site, values in lrp.units.items()}
    total = max(float(values.sum()) for values in relevance.values())  # of the network; a branch has a part of it
    units, orders = {}, {}
    for number, layer in enumerate(graph.layers):
        members = set(layer.groups.tolist())
        mine = {path: r for path, r in readers.items() if members.issuperset(r.groups.tolist())}
        mine = {path: r for path, r in mine.items() if len(set(r.groups.tolist())) == len(r.groups) == len(members)}
        if not layer.prunable or not mine:
            continue
        counts = [counts_of(r, relevance.get(path), total, how).to(r.weight.device) for path, r in mine.items()]
        values, orders[number] = eliminated(list(mine.values()), counts, layer.groups, ridge)
        by = dict(zip(layer.groups.tolist(), values.tolist(), strict=True))
        maker = next(p for p in graph.producers if members.issuperset(graph.root[p.labels].tolist()))
        units[maker.sites[0]] = np.array([by[g] for g in graph.root[maker.labels].tolist()])
    return Scores(f"lost {how}", units, "sum"), orders


def planned(
    graph: Graph, lrp: Scores, found: Scores, orders: dict[int, list[int]], balance: float | None, share: float
) -> Plan:
    old = allocation.BALANCE
    allocation.BALANCE = 1.0 if balance is None else balance
    try:
        plan = sc.plan(graph, lrp if balance is None else found, keep={"macs": share}, limits=Limits("cost"))
    finally:
        allocation.BALANCE = old
    if balance is not None:
        return plan
    removed = np.zeros(len(graph.root), np.bool_)
    removed[list(plan.groups)] = True
    for number, order in orders.items():  # as many of each layer, others of them
        groups = graph.layers[number].groups
        count = int(removed[groups].sum())
        removed[groups] = False
        removed[groups[order[:count]]] = True
    return plan_for(graph, removed)


# -- measuring ---------------------------------------------------------------------------------------------------------
class Data:
    """A network, its pictures, and draws of them."""

    def __init__(self, data: Path, name: str, device: str, size: int) -> None:
        view = view_of(name)
        parts = [read(data / "imagenette" / part, view=view) for part in ("reference", "test")]
        (x, y), (tx, ty) = (photos.tensors(device) for photos in parts)
        if size != 224:
            x, tx = (F.interpolate(t, (size, size), mode="bilinear", antialias=True) for t in (x, tx))
        place = torch.cat([torch.nonzero(y == c).ravel()[HELD:] for c in range(10)])
        self.train, self.test = (x[place], y[place]), (tx, ty)
        if name == "resnet50":
            self.net = resnet50(data).to(device)
        else:
            import timm
            from safetensors.torch import load_file

            state = load_file(data / f"{name}.safetensors")
            self.net = timm.create_model("tf_efficientnet_lite0").eval()
            self.net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
            self.net.to(device)

    def draw(self, number: int, classes: int, per_class: int, tested: int) -> Any:
        choose = np.random.default_rng(number)
        chosen = sorted(choose.choice(10, classes, replace=False).tolist())
        data = _some(self.train, chosen, per_class, choose)
        model = sc.specialize(self.net, [TARGETS[c] for c in chosen], data[0][:1]).eval()
        return model, data, _some(self.test, chosen, tested, np.random.default_rng(0))


@torch.no_grad()
def answers(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part).double().log_softmax(1) for part in x.split(50)])


def told(model: nn.Module, whole: Tensor, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    mine = answers(model, test[0])
    return {
        "accuracy": float((mine.argmax(1) == test[1]).double().mean()),
        "kl": float((whole.exp() * (whole - mine)).sum(1).mean()),
    }


def measured(
    source: Data, task: str, number: int, wanted: list[str], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each variant on one draw."""
    _, classes, share = TASKS[task]
    model, data, test = source.draw(number, classes, args.per_class, args.tested)
    graph, whole = sc.analyze(model, data[0][:1]), answers(model, test[0])
    lrp = sc.score(model, data, "lrp", graph=graph)
    found: dict[str, tuple[Scores, dict[int, list[int]]]] = {"lrp": (lrp, {})}
    sessions: dict[tuple[int, int], Any] = {}
    readers = readers_of(model, graph)
    if any(VARIANTS[v][0] != "lrp" for v in wanted):
        gather(model, readers, data[0], args.altered, 50)
    for variant in wanted:
        start = time.perf_counter()
        how, balance, rounds, copies = VARIANTS[variant]
        row: dict[str, Any] = {"variant": variant}
        try:
            if how not in found:
                found[how] = lost(model, graph, readers, lrp, how)
            plan = planned(graph, lrp, *found[how], balance, share)
            small, key = sc.apply(model, plan), (rounds, copies)
            scored = time.perf_counter() - start
            if key not in sessions:
                sessions = {key: Repair("ridge", copies, rounds=rounds, memory=args.memory).session(model, data)}
            repaired = sessions[key].examine(small, False).model
            row |= {
                "macs": plan.after.macs / plan.before.macs,
                "whole": float((whole.argmax(1) == test[1]).double().mean()), **told(repaired, whole, test),
                "planned": round(scored, 2), "seconds": round(time.perf_counter() - start, 2),
            }  # fmt: skip
        except Exception as error:
            row["failed"], sessions = _why(error), {}
        yield row


def measure(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    known: dict[str, Data] = {}

    def attempted(task: str, number: int, wanted: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of a draw. One that cannot even begin is one row, of no variant."""
        nonlocal known
        name = TASKS[task][0]
        try:
            if name not in known:
                known = {name: Data(args.data, name, args.device, args.size)}
            yield from measured(known[name], task, number, wanted, args)
        except Exception as error:
            yield {"variant": "", "failed": _why(error)}

    for task, number in list(product(args.tasks, chain(*args.draws))) * 2:  # the second time, what failed
        done = {(row["task"], row["draw"], row["variant"]) for row in _rows(*args.out) if "failed" not in row}
        wanted = [v for v in args.variants if (task, number, v) not in done]
        for row in attempted(task, number, wanted) if wanted else ():
            row = {"task": task, "draw": number, **row}
            with args.out[0].open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(*row.values(), flush=True)
            if time.monotonic() - begin > 60 * args.minutes:
                print("the minutes are over; the same command goes on")
                return
    print("done")


def table(rows: list[dict[str, Any]]) -> str:
    """For each task: accuracy with its 95 % interval, the difference to LRP on the same draws, and divergence."""
    cells: dict[Any, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if "failed" not in row:
            cells[row["task"], row["variant"]][row["draw"]] = row
    lines = []
    for task in dict.fromkeys(key[0] for key in cells):
        lines += [
            f"\n### {task}, aim {GOALS[task]}\n",
            "| variant | draws | accuracy | than lrp | divergence | seconds |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        base = cells[task, "lrp"]
        for variant in [v for v in VARIANTS if (task, v) in cells]:
            mine = cells[task, variant]
            both = [100 * (row["accuracy"] - base[d]["accuracy"]) for d, row in mine.items() if d in base]
            lines.append(
                f"| {variant} | {len(mine)} | {_mean([100 * r['accuracy'] for r in mine.values()], True)} "
                f"| {_mean(both, True, '+')} "
                f"| {np.mean([r['kl'] for r in mine.values()]):.3f} "
                f"| {np.median([r['seconds'] for r in mine.values()]):.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True, nargs="+", help="several for a table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--draws", type=numbers, nargs="*", default=[list(range(10))], help="such as 0:10, or 3 7")
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--tested", type=int, default=50)
    parser.add_argument("--altered", type=int, default=4, help="altered copies that covariances are estimated from")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after this")
    parser.add_argument("--memory", help="of a repair, such as '8 GiB'")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.table:
        print(table(_rows(*args.out)))
    else:
        measure(args)


if __name__ == "__main__":
    main()
