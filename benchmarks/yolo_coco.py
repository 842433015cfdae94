"""YOLO11n on COCO128: mAP before and at 70 % of the MACs without training; latency in ONNX Runtime.

    python -m benchmarks.yolo_coco --weights yolo11n.onnx --coco coco128_yolo
    python -m benchmarks.yolo_coco … --criteria lrp --save folder; then `benchmarks.yolo_recovery`

The weights are those of an ONNX file that Ultralytics exported. They are read as tensors: nothing is unpickled. Its
batch norms are folded into the convolutions, so those of the model get the bias, and no statistics. 32 images score the
units and repair, of those that the model was trained on. mAP is measured on the 128 of the validation set, which it has
not seen. Needs ultralytics, whose licence is AGPL-3.0.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Detection, Taylor, Weight
from secateur.plans import Limits
from secateur.plans.plan import Plan
from secateur.running.goals import overlaps

SIDE = 640
Picture = tuple[Tensor, dict[str, Tensor]]


def load(path: Path) -> nn.Module:
    """YOLO11n with the tensors of an ONNX file."""
    import onnx
    from onnx import numpy_helper
    from ultralytics.nn.tasks import DetectionModel

    known = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in onnx.load(str(path)).graph.initializer}
    model = DetectionModel("yolo11n.yaml", verbose=False).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                module.weight.copy_(known[f"{name}.weight"])
                if module.bias is not None:
                    module.bias.copy_(known[f"{name}.bias"])
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
                module.running_var.fill_(1 - module.eps)
                module.bias.copy_(known[f"{name.removesuffix('bn')}conv.bias"])
    return model


def letterbox(picture: Image.Image) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
    """An image in the middle of a grey square, its width and height there, and its left and upper edge."""
    scale = SIDE / max(picture.size)
    wide, high = (round(side * scale) for side in picture.size)
    pixels = torch.from_numpy(np.asarray(picture.resize((wide, high), Image.Resampling.BILINEAR)).copy())
    left, top = (SIDE - wide) // 2, (SIDE - high) // 2
    edges = (left, SIDE - wide - left, top, SIDE - high - top)
    return F.pad(pixels.permute(2, 0, 1).float() / 255, edges, value=114 / 255), (wide, high), (left, top)


def read(images: Path, labels: Path) -> list[Picture]:
    """Images on a grey square, and boxes by their corners in its pixels."""
    found = []
    for file in sorted(images.glob("*.jpg")):
        text = labels / f"{file.stem}.txt"
        rows = np.loadtxt(text, ndmin=2) if text.exists() and text.stat().st_size else np.zeros((0, 5))
        square, size, corner = letterbox(Image.open(file).convert("RGB"))
        centre, size = rows[:, 1:3] * size + corner, rows[:, 3:5] * size
        boxes = torch.from_numpy(np.concatenate([centre - size / 2, centre + size / 2], 1)).float()
        found.append((square, {"boxes": boxes, "labels": torch.from_numpy(rows[:, 0]).long()}))
    return found


def batches(pictures: list[Picture], size: int, device: str) -> list[tuple[Tensor, list[dict[str, Tensor]]]]:
    parts = [pictures[i : i + size] for i in range(0, len(pictures), size)]
    return [
        (torch.stack([x for x, _ in part]).to(device), [{k: v.to(device) for k, v in y.items()} for _, y in part])
        for part in parts
    ]


# -- mean average precision, from its definition -----------------------------------------------------------------------
def detect(
    answer: Tensor, least: float = 0.001, overlap: float = 0.7, most: int = 300
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, scores and classes of one image after non-maximum suppression for each class."""
    from torchvision.ops import batched_nms

    centre, half = answer[:2].T, answer[2:4].T / 2
    scores, classes = answer[4:].max(0)
    keep = scores > least
    boxes = torch.cat([centre - half, centre + half], 1)[keep]
    chosen = batched_nms(boxes, scores[keep], classes[keep], overlap)[:most]
    return boxes[chosen], scores[keep][chosen], classes[keep][chosen]


def mean_precision(model: nn.Module, data: list[Any]) -> tuple[float, float]:
    """mAP at overlaps 0.5 to 0.95, and at 0.5, over the classes that occur: 101 points of recall, as COCO does it."""
    levels = torch.arange(0.5, 1.0, 0.05)
    rows: dict[int, list[tuple[float, Tensor]]] = {}
    wanted: dict[int, int] = {}
    with torch.no_grad():
        for images, targets in data:
            made = model(images)
            answers = made[0] if isinstance(made, tuple) else made
            for answer, target in zip(answers.float().cpu(), targets, strict=True):
                boxes, scores, classes = detect(answer)
                true, labels = target["boxes"].cpu(), target["labels"].cpu()
                for c in {*labels.tolist(), *classes.tolist()}:
                    mine, own = classes == c, labels == c
                    wanted[c] = wanted.get(c, 0) + int(own.sum())
                    shared = overlaps(boxes[mine], true[own])
                    taken, at = torch.zeros(len(levels), int(own.sum()), dtype=torch.bool), torch.arange(len(levels))
                    for score, row in zip(scores[mine].tolist(), shared, strict=True):  # the surest comes first
                        hits = torch.zeros(len(levels), dtype=torch.bool)
                        if len(row) and float(row.max()) >= 0.5:
                            best, place = torch.where(taken, -1.0, row).max(1)
                            hits = best >= levels
                            taken[at[hits], place[hits]] = True
                        rows.setdefault(c, []).append((score, hits))
    found = []
    for c, count in wanted.items():
        if not count:
            continue
        ordered = sorted(rows.get(c, []), key=lambda row: -row[0])
        if not ordered:
            found.append(torch.zeros(len(levels)))
            continue
        hits = torch.stack([row for _, row in ordered]).double().cumsum(0)
        recall, precision = hits / count, hits / torch.arange(1, len(hits) + 1)[:, None]
        precision = precision.flip(0).cummax(0).values.flip(0)
        points = torch.linspace(0, 1, 101, dtype=torch.float64)
        at = torch.searchsorted(recall.T.contiguous(), points.expand(len(levels), -1).contiguous())
        padded = torch.cat([precision, torch.zeros(1, len(levels), dtype=torch.float64)])
        found.append(padded.gather(0, at.T).mean(0).float())
    table = torch.stack(found)
    return float(table.mean()), float(table[:, 0].mean())


# -- latency -----------------------------------------------------------------------------------------------------------
def latencies(files: dict[str, Path], threads: int = 1, rounds: int = 40) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of ONNX Runtime for one image (10th percentile, median, 90th). The models take turns."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    x = np.random.default_rng(0).random((1, 3, SIDE, SIDE), dtype=np.float32)
    sessions = {
        name: onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        for name, file in files.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            begin = time.perf_counter()
            session.run(None, {session.get_inputs()[0].name: x})
            times[name].append(1000 * (time.perf_counter() - begin))
    return {name: tuple(np.percentile(found[3:], [10, 50, 90]).tolist()) for name, found in times.items()}


def export(model: nn.Module, file: Path) -> Path:
    """The ONNX file of a model, for images of `SIDE`²."""
    sc.export(copy.deepcopy(model).cpu(), file, torch.rand(1, 3, SIDE, SIDE))
    return file


def save(folder: Path, plan: Plan, whole: nn.Module, repaired: nn.Module) -> None:
    """What `yolo_recovery` reads: the plan, the repaired weights, and the ONNX files of both models."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    save_file({k: v.cpu().contiguous() for k, v in repaired.state_dict().items()}, folder / "repaired.safetensors")
    for name, model in (("whole", whole), ("small", repaired)):
        export(model, folder / f"{name}.onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="yolo11n.onnx")
    parser.add_argument("--coco", type=Path, required=True, help="the folder of lightly-ai/coco128_yolo")
    parser.add_argument("--keep", type=float, default=0.7, help="share of the MACs")
    parser.add_argument("--score-on", type=int, default=32, help="images")
    parser.add_argument("--limit", type=int, help="only so many images to test on")
    parser.add_argument("--side", type=int, help="of the images that score and repair; default: as they are")
    parser.add_argument("--scope", choices=["cost", "layer", "global"], help="default: as `prune` chooses")
    parser.add_argument("--round-to", type=int, default=8)
    parser.add_argument("--criteria", nargs="*", default=["lrp", "taylor", "weight"])
    parser.add_argument("--save", type=Path, help="a folder for the plan, the repaired weights and both ONNX files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-latency", action="store_true")
    options = parser.parse_args()
    seen, unseen = (
        read(options.coco / "images" / part, options.coco / "object_detection" / "labels" / part)
        for part in ("train2017", "val2017")
    )
    scored, unseen = seen[: options.score_on], unseen[: options.limit]
    tested = batches(unseen, 8, options.device)
    net = load(options.weights).to(options.device)
    data = batches(scored, 8, options.device)
    if options.side:
        scale = partial(F.interpolate, size=(options.side,) * 2, mode="bilinear", align_corners=False)
        data = [(scale(x), [{**t, "boxes": t["boxes"] * options.side / SIDE} for t in y]) for x, y in data]
    print(f"YOLO11n on {len(unseen)} images; scored on {len(scored)}", flush=True)

    def say(name: str, model: nn.Module) -> None:
        mean, half = mean_precision(model, tested)
        print(f"{name}: mAP50-95 {mean:.4f}, mAP50 {half:.4f}", flush=True)

    say("whole", net)
    ways = {
        "lrp": LRP(start=Detection()), "lrp:attnlrp": LRP(composite="attnlrp", start=Detection()),
        "taylor": Taylor(loss=Detection()), "weight": Weight(), "random": "random",
    }  # fmt: skip
    graph, timed = sc.analyze(net, data[0][0][:1]), {"whole": net}
    for number, criterion in enumerate(options.criteria):
        begin, scores = time.time(), sc.score(net, data, ways[criterion], graph=graph)
        limits = Limits(options.scope or ("cost" if "lrp" in criterion else "layer"), round_to=options.round_to)
        plan = sc.plan(graph, scores, keep={"macs": options.keep}, limits=limits)
        small = sc.apply(net, plan)
        share = 100 * plan.after.macs / plan.before.macs
        name = f"{criterion} {scores.composite}, by {limits.scope}, {share:.0f} % of the MACs"
        say(f"{name}, {time.time() - begin:.0f} s", small)
        narrow = sorted(plan.layers.items(), key=lambda item: item[1][1] / item[1][0])[:6]
        print("  " + ", ".join(f"{layer} {had} → {has}" for layer, (had, has) in narrow), flush=True)
        begin, repaired = time.time(), sc.repair(small, net, data, progress=False)
        say(f"{name}, repaired in {time.time() - begin:.0f} s", repaired)
        timed[name] = repaired
        if options.save and not number:
            save(options.save, plan, net, repaired)
    if options.no_latency:
        return
    with tempfile.TemporaryDirectory() as folder:
        files = {name: export(model, Path(folder, f"{n}.onnx")) for n, (name, model) in enumerate(timed.items())}
        for name, (_, middle, _) in latencies(files).items():
            print(f"{name}: {middle:.1f} ms in ONNX Runtime, one thread, one image of {SIDE}²", flush=True)


if __name__ == "__main__":
    main()
