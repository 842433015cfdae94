"""Architectures that do not classify images: what may leave, is it exact, and does the smaller model live on?

    python -m benchmarks.zoo --beyond --log out/beyond.jsonl --workers 8
    python -m benchmarks.zoo --beyond --only torchvision:fcos_resnet50_fpn own:unet
    python -m benchmarks.zoo --beyond --only ultralytics:

For each architecture: analyse; remove 40 % of the units at random; compare the smaller model with the masked one on
fresh inputs of another size, in double precision where the model knows it; take a step of training; save and load;
export to ONNX. Weights are random. Where outputs are lists of boxes, the answers of all layers are compared as well. A
row says which share of the MACs may leave, and why the rest may not. Packages that are not installed are left out. With
`--log`, rows are kept as they come, and architectures that have a row are not run again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.beyond import catalogue
from benchmarks.zoo import keep, randomise, rows_in
from secateur.nest import map_tensors, tensors_of_output
from secateur.running.sandbox import run

_SECONDS = int(os.environ.get("BEYOND_SECONDS", "240"))  # for one architecture, without ONNX
_ONNX_SECONDS = int(os.environ.get("BEYOND_ONNX_SECONDS", "120"))  # 0: no export
# Relative to the largest number of an output: in double precision, and for forwards that know single precision only.
_ROUNDING, _COARSE = 1e-6, 2e-4


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before, left = signal.signal(signal.SIGALRM, stop), signal.alarm(seconds)
    begin = time.monotonic()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.alarm(max(1, left - int(time.monotonic() - begin)))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def mill(name: str) -> dict[str, Any]:
    """One architecture; the row of the table. What cannot be built here is no member of the zoo."""
    row: dict[str, Any] = {"model": name}
    try:
        model, example, other = _made(name)
        with torch.no_grad():
            run(model, example)
            run(model, other)
    except Exception as error:
        return row | {"unbuilt": _said(error)}
    begin = time.process_time()
    graph = sc.analyze(model, example)
    row["analyse_s"] = round(time.process_time() - begin, 2)
    gone = np.zeros(len(graph.root), np.bool_)
    gone[graph.candidates] = True
    row["macs"], row["params"] = graph.cost.macs, graph.cost.params
    row["free"] = round(1 - graph.cost_of(gone).macs / max(graph.cost.macs, 1), 4)
    stays = Counter[str]()
    for layer in graph.layers:
        if layer.reason and layer.reason != "model output":
            stays[layer.reason] += int(graph.units[layer.groups].sum())
    row["stays"] = dict(stays.most_common(4))
    rng = np.random.default_rng(0)
    scores = sc.Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})
    graph, small, plan = _removed(model, graph, scores)
    row["left"] = round(plan.after.macs / max(plan.before.macs, 1), 4)
    row["cost_exact"] = sc.measure(small, example, latency=False) == plan.after
    row["gap"] = _gap(small, sc.apply(model, plan, how="mask"), other)
    row["trains"] = _step(small, example)
    row["reload"] = _reload(small, name, other)
    row["onnx"] = _onnx(small, example)
    exact = row["gap"][0] <= (_ROUNDING if row["gap"][1] == "double" else _COARSE)
    # (Costs of detectors depend on how many boxes a model finds, so that they are noted and do not count.)
    row["ok"] = bool(exact and row["trains"] is True and row["reload"] is True)
    return row


def _made(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, example, other = catalogue()[name]()
    return randomise(model).eval(), example, other


def _removed(model: nn.Module, graph: sc.Graph, scores: sc.Scores) -> tuple[sc.Graph, nn.Module, sc.Plan]:
    """Remove 40 %, or less if less may leave. As in a run, layers whose removal fails its check stay."""
    for share in (0.4, 0.4, 0.4, 0.2, 0.1):
        try:
            plan = sc.plan(graph, scores, remove=share)
            return graph, sc.apply(model, plan), plan
        except sc.errors.VerificationError as error:
            if not error.layers:
                raise
            graph = graph.frozen(dict.fromkeys(error.layers, "found by the check of the removal"))
        except sc.errors.TargetError:
            continue
    raise ValueError("no share of the units can leave")


def _gap(small: nn.Module, masked: nn.Module, inputs: Any) -> tuple[float, str]:
    """The largest difference relative to the largest number, over outputs and over the layers that keep their width."""
    for kind, dtype in (("double", torch.float64), ("single", torch.float32)):
        try:
            return max(_distances(small, masked, inputs, dtype), default=0.0), kind
        except (RuntimeError, TypeError, ValueError):
            if kind == "single":
                raise
    raise AssertionError


def _distances(small: nn.Module, masked: nn.Module, inputs: Any, dtype: torch.dtype) -> list[float]:
    answers: list[list[Tensor]] = []
    widths = {path: _width(module) for path, module in small.named_modules()}
    given = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    for model in (small, masked):
        made: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda m, i, o, made=made: made.append(o))
            for path, module in model.named_modules()
            if _width(module) and widths.get(path) == _width(module) == _width(dict(masked.named_modules())[path])
        ]
        try:
            torch.manual_seed(0)
            with torch.no_grad():
                output = run(model.to(dtype), given)
        finally:
            for hook in hooks:
                hook.remove()
            model.float()
        answers.append([*made, *(t for t in tensors_of_output(output) if t.is_floating_point())])
    if [t.shape for t in answers[0]] != [t.shape for t in answers[1]]:
        raise AssertionError(f"shapes differ: {[tuple(t.shape) for t in answers[0]][-3:]}")
    return [
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in zip(*answers, strict=True) if b.numel()
    ]


def _width(module: nn.Module) -> int:
    """The outputs of a conv or linear layer, else 0."""
    layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    return int(getattr(module, "out_features", 0) or getattr(module, "out_channels", 0)) if layer else 0


def _step(small: nn.Module, example: Any) -> bool | str:
    """Whether a step of training runs: gradients reach parameters, and the answer stays finite."""
    try:
        small.train()
        for module in small.modules():  # one sample has no statistics
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        targets = _targets(small, example)
        output = run(small, (*example, targets) if targets is not None else example)
        real = [t for t in tensors_of_output(output) if t.is_floating_point() and t.requires_grad]
        if not real:  # some return numbers to train with in evaluation mode only
            small.eval()
            real = [t for t in tensors_of_output(run(small, example)) if t.is_floating_point() and t.requires_grad]
        torch.stack([t.float().square().mean() for t in real if t.numel()]).mean().backward()
        reached = [p for p in small.parameters() if p.grad is not None and bool(torch.isfinite(p.grad).all())]
        nn.utils.clip_grad_norm_(reached, 1.0)  # random weights may have gradients of any size
        torch.optim.SGD(reached, 1e-4).step()
        small.eval().zero_grad(set_to_none=True)
        with torch.no_grad():
            again = [t for t in tensors_of_output(run(small, example)) if t.is_floating_point()]
        return bool(reached) and all(bool(torch.isfinite(t).all()) for t in again)
    except Exception as error:
        return _said(error)
    finally:
        small.eval()


def _targets(model: nn.Module, example: Any) -> list[dict[str, Tensor]] | None:
    """What torchvision's detectors are trained with."""
    if "torchvision.models.detection" not in type(model).__module__:
        return None
    box = {"boxes": torch.tensor([[8.0, 8.0, 60.0, 70.0]]), "labels": torch.tensor([1])}
    box |= (
        {"masks": torch.ones(1, *example[0][0].shape[1:], dtype=torch.uint8)} if "Mask" in type(model).__name__ else {}
    )
    box |= {"keypoints": torch.full((1, 17, 3), 20.0)} if "Keypoint" in type(model).__name__ else {}
    return [dict(box) for _ in example[0]]


def _reload(small: nn.Module, name: str, inputs: Any) -> bool | str:
    """Whether a saved model, loaded into a new one, gives equal answers."""
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            sc.save(small, Path(folder, "m"))
            again = sc.load(Path(folder, "m"), _made(name)[0]).eval()
            answers = []
            for model in (small, again):
                torch.manual_seed(0)
                answers.append(tensors_of_output(run(model, inputs)))
        return all(torch.equal(a, b) for a, b in zip(*answers, strict=True)) or "answers differ"
    except Exception as error:
        return _said(error)


def _onnx(small: nn.Module, example: Any) -> bool | str:
    """Whether ONNX Runtime gives the same answers; the export checks that itself."""
    if not _ONNX_SECONDS:
        return "not tried"
    try:
        with tempfile.TemporaryDirectory() as folder, _at_most(_ONNX_SECONDS):
            sc.export(small, Path(folder, "m.onnx"), example)
        return True
    except Exception as error:
        return _said(error)


def _row(name: str) -> dict[str, Any]:
    """A row, whatever happens."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    begin = time.perf_counter()
    try:
        with _at_most(_SECONDS):
            row = mill(name)
    except Exception as error:
        row = {"model": name, "error": _said(error)}
    return row | {"seconds": round(time.perf_counter() - begin, 1)}


def main(only: Sequence[str] | None, log: Path | None, workers: int = 1) -> None:
    """Print a line for each architecture as it comes, and the table. A name that ends with a colon is a package.

    Architectures run in the order in which `only` names them: slow ones first fill all workers to the end.
    """
    rows, known = rows_in(log), list(catalogue())
    wanted = [
        name for ask in only or [""] for name in known if name == ask or not ask or f"{name.split(':')[0]}:" == ask
    ]
    todo = [name for name in wanted if name not in rows]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=8) as pool:
        for row in pool.imap_unordered(_row, dict.fromkeys(todo)):
            rows[row["model"]] = row
            keep(log, row)
    print()
    print(table([rows[name] for name in known if name in wanted and name in rows]))


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each architecture, the counts, and what could not be built."""
    names = [
        "architecture",
        "MACs",
        "may leave",
        "left after 40 %",
        "removal = masking",
        "trains",
        "reload",
        "ONNX",
        "what stays, and why",
    ]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    built = [row for row in rows if "unbuilt" not in row]
    for row in built:
        if "error" in row:
            cells = ["", "", "", "", "", "", "", f"**{row['error']}**"]
        else:
            marks = [{True: "yes"}.get(row[key], f"no: {str(row[key])[:80]}") for key in ("trains", "reload", "onnx")]
            why = "; ".join(f"{reason} ({units})" for reason, units in row["stays"].items())
            cells = [
                f"{row['macs'] / 1e6:.3g} M", f"{100 * row['free']:.0f} %", f"{100 * row['left']:.0f} %",
                f"{row['gap'][0]:.0e}", *marks, why,
            ]  # fmt: skip
        lines.append(f"| {row['model']} | {' | '.join(text.replace('|', '/')[:200] for text in cells)} |")
    good = [row for row in built if row.get("ok")]
    wide = [row for row in built if row.get("free", 0) >= 0.5]
    exported = [row for row in built if row.get("onnx") is True]
    lines += [
        "",
        f"{len(good)} of {len(built)} architectures pass: removal equals masking on inputs of another size, a step of "
        f"training runs, and the loaded model gives equal answers. {len(wide)} may lose half of their MACs or more. "
        f"{len(exported)} run in ONNX Runtime.",
    ]
    unbuilt = [f"{row['model']} ({row['unbuilt'][:100]})" for row in rows if "unbuilt" in row]
    lines += ["", "Not built here: " + "; ".join(unbuilt) + "."] if unbuilt else []
    return "\n".join(lines)
