"""YOLO11n after a removal and a repair: ten minutes of recovery on a GPU, with mAP by the state at given minutes.

    python -m benchmarks.yolo_coco … --criteria lrp --save folder
    python -m benchmarks.yolo_recovery --weights yolo11n.onnx --coco coco128_yolo --pruned folder --log rows.jsonl
    python -m benchmarks.yolo_recovery … --onnx    (only latency in ONNX Runtime, of the files in `folder`)

The student learns from the original: classes, bins of the boxes, and what the layers of the body return in the channels
that it kept. No label is used. It sees the 128 training images of COCO128 alone, flipped, cropped, scaled, in other
colours, and four at a time (mosaics); `--more` adds photographs of other folders. mAP is measured on the 128 validation
images, which are used for nothing else: the time and all settings were fixed before. Every row is the state at that
time, never the best. Only training counts as time. A run that was interrupted goes on where its state was saved.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur as sc
from benchmarks.yolo_coco import SIDE, batches, letterbox, load, mean_precision, read
from secateur.plans.plan import Plan
from secateur.repair.layerwise import kept_indices

GREY = 114 / 255


def pool(coco: Path, more: list[Path], device: str) -> Tensor:
    """All images to learn from, on grey squares, as bytes on the device."""
    files = sorted((coco / "images" / "train2017").glob("*.jpg"))
    for folder in more:
        files += sorted(f for f in folder.rglob("*") if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
    made = [(letterbox(Image.open(file).convert("RGB"))[0] * 255).round().byte() for file in files]
    return torch.stack(made).to(device)


def views(images: Tensor, number: int) -> Tensor:
    """Altered copies, one half of them mosaics of four images."""
    device, half = images.device, number // 2
    tiles = images[torch.randint(len(images), (half, 2, 2), device=device)]  # (half, rows, columns, 3, side, side)
    canvas = tiles.permute(0, 3, 1, 4, 2, 5).reshape(half, 3, 2 * SIDE, 2 * SIDE)
    single = images[torch.randint(len(images), (number - half,), device=device)]
    parts = [_window(canvas, 0.35, 1.0), _window(single, 0.6, 1.6)]
    return _colours(torch.cat(parts))


def _window(source: Tensor, least: float, most: float) -> Tensor:
    """A window of each image, so many times as large as it, at a random place; it may be mirrored and stretched."""
    n, device = len(source), source.device
    zoom = least * (most / least) ** torch.rand(n, device=device)
    stretch = 1.25 ** (2 * torch.rand(n, device=device) - 1)
    wide, high = zoom * stretch, zoom / stretch
    place = (2 * torch.rand(n, 2, device=device) - 1) * (torch.stack([wide, high], 1) - 1).abs()
    mirror = torch.where(torch.rand(n, device=device) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(wide)
    matrix = torch.stack([wide * mirror, zero, place[:, 0], zero, high, place[:, 1]], 1).view(n, 2, 3)
    grid = F.affine_grid(matrix, [n, 3, SIDE, SIDE], align_corners=False)
    return F.grid_sample(source.float() / 255 - GREY, grid, align_corners=False) + GREY


def _colours(x: Tensor) -> Tensor:
    factor = 1 + 0.3 * (2 * torch.rand(3, len(x), 1, 1, 1, device=x.device) - 1)
    x = x.mean(1, keepdim=True) + factor[0] * (x - x.mean(1, keepdim=True))
    mean = x.mean((1, 2, 3), keepdim=True)
    return ((mean + factor[1] * (x - mean)) * factor[2]).clamp(0, 1)


class Heard:
    """What the layers of a body return, by number; of the teacher, the channels that the student kept."""

    def __init__(self, model: nn.Module, kept: dict[int, Tensor | None]) -> None:
        self.seen: dict[int, Tensor] = {}
        for number, index in kept.items():
            model.model[number].register_forward_hook(self._note(number, index))

    def _note(self, number: int, index: Tensor | None) -> Any:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen[number] = output if index is None else output.index_select(1, index)

        return note


def kept_channels(small: nn.Module, original: nn.Module, device: str) -> dict[int, Tensor | None]:
    """By layer of the body the channels that the smaller model has; None: all. Layers without weights are left out."""
    known, found = kept_indices(small, original), {}
    for number, module in enumerate(original.model[:-1]):
        last = [name for name, inner in module.named_modules() if isinstance(inner, nn.Conv2d)]
        name = next((n for n in ("cv2.conv", "conv") if n in last), None)
        if name is not None:
            index = known.get(f"model.{number}.{name}.weight", {}).get(0)
            found[number] = None if index is None else torch.from_numpy(index).to(device)
    return found


def distance(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the classes, and KL divergence of the bins of box sides where the teacher sees something."""
    wanted = theirs["scores"].sigmoid()
    weight = wanted.amax(1)
    classes = F.binary_cross_entropy_with_logits(mine["scores"], wanted, reduction="sum")
    own, known = (F.log_softmax(x["boxes"].unflatten(1, (4, -1)), 2) for x in (mine, theirs))
    sides = F.kl_div(own, known, reduction="none", log_target=True).sum(2).mean(1)
    return (classes + (weight * sides).sum()) / weight.sum()


def train(
    student: nn.Module, teacher: nn.Module, kept: dict[int, Tensor | None], images: Tensor, options: Any, say: Any
) -> None:
    """Train for some time, and tell about the state at given minutes."""
    for module in (student, teacher):
        module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(student.parameters(), options.rate, fused=options.device == "cuda")
    heard, known = Heard(student, dict.fromkeys(kept)), Heard(teacher, kept)
    spent, steps, total, due = 0.0, 0, 0.0, [60 * m for m in options.minutes]
    if options.state.exists():
        state = torch.load(options.state, map_location=options.device, weights_only=True)
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        spent, steps = state["spent"], state["steps"]
    torch.manual_seed(steps)
    due, seconds = [s for s in due if s > spent], options.seconds
    saved, begin, noted, lost = spent, time.perf_counter(), steps, torch.zeros((), device=options.device)
    while True:
        _training(student), _training(teacher)
        rate = options.rate * min(1, (steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * min(spent / seconds, 1)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        x = views(images, options.batch).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            wanted = teacher(x)
        made = student(x)
        loss = distance(made, wanted) + torch.stack([
            (mine - known.seen[n]).square().sum() / known.seen[n].square().sum() for n, mine in heard.seen.items()
        ]).mean()  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 10.0)
        optimizer.step()
        steps += 1
        lost += loss.detach()
        if steps % options.every:
            continue
        total = float(lost) / (steps - noted)  # waits for the device
        if not math.isfinite(total):
            raise SystemExit(f"the loss is {total} after {steps} steps")
        spent += time.perf_counter() - begin
        noted, lost = steps, torch.zeros_like(lost)
        over = spent >= seconds
        if (due and spent >= due[0]) or over:
            say(seconds=round(spent), steps=steps, loss=round(total, 4))
            due = [s for s in due if s > spent]
        if over:
            return
        if spent - saved > 60:
            saved = spent
            state = {"student": student.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "spent": spent, "steps": steps}, options.state)
        begin = time.perf_counter()


def _training(model: nn.Module) -> None:
    """Training mode, for what the heads return; batch norms stay as they are: see `yolo_coco.load`."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def latencies(folder: Path, threads: list[int], rounds: int) -> None:
    """Milliseconds of ONNX Runtime for one image: the median of rounds in which the models take turns."""
    import onnxruntime

    x = np.random.default_rng(0).random((1, 3, SIDE, SIDE), dtype=np.float32)
    for count in threads:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count
        sessions = {
            file.stem: onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            for file in sorted(folder.glob("*.onnx"))
        }
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(rounds):
            for name, session in sessions.items():
                begin = time.perf_counter()
                session.run(None, {session.get_inputs()[0].name: x})
                times[name].append(1000 * (time.perf_counter() - begin))
        for name, found in times.items():
            low, middle, high = np.percentile(found[3:], [10, 50, 90])
            print(f"{name}: {middle:.1f} ms ({low:.1f} to {high:.1f}) in ONNX Runtime, {count} threads", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="yolo11n.onnx")
    parser.add_argument("--coco", type=Path, help="the folder of lightly-ai/coco128_yolo")
    parser.add_argument("--pruned", type=Path, required=True, help="plan.json and repaired.safetensors")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="folders of further photographs to learn from")
    parser.add_argument("--log", type=Path, default=Path("yolo_recovery.jsonl"))
    parser.add_argument("--state", type=Path, default=Path("yolo_recovery.pt"), help="where an interrupted run goes on")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--minutes", type=float, nargs="*", default=[1, 2, 5, 10])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--every", type=int, default=20, help="steps between looks at the clock")
    parser.add_argument("--limit", type=int, help="only so many images to test on")
    parser.add_argument("--name", default="recovered")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--onnx", action="store_true", help="only latency")
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    options = parser.parse_args()
    if options.onnx:
        latencies(options.pruned, options.threads, 60)
        return
    torch.backends.cudnn.benchmark = True
    tested = batches(
        read(options.coco / "images" / "val2017", options.coco / "object_detection" / "labels" / "val2017")[
            : options.limit
        ],
        16,
        options.device,
    )
    net = load(options.weights)
    plan = Plan.from_json((options.pruned / "plan.json").read_text())
    small = sc.apply(net, plan)
    small.load_state_dict(load_file(options.pruned / "repaired.safetensors"))
    kept = kept_channels(small, net, options.device)
    net, small = net.to(options.device), small.to(options.device)

    def say(model: nn.Module = small, **more: Any) -> None:
        torch.backends.cudnn.allow_tf32 = False
        mean, half = mean_precision(model.eval(), tested)
        torch.backends.cudnn.allow_tf32 = True
        row = {"name": options.name, "map": round(mean, 4), "map50": round(half, 4), **more}
        with options.log.open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(time.strftime("%H:%M:%S"), row, flush=True)

    images = pool(options.coco, options.more, options.device)
    print(time.strftime("%H:%M:%S"), f"{len(images)} images to learn from; kept by layer: "
          + ", ".join(f"{n}: {'all' if k is None else len(k)}" for n, k in kept.items()), flush=True)  # fmt: skip
    if not options.state.exists():
        say(net, state="whole")
        say(state="repaired", seconds=0, share=round(plan.after.macs / plan.before.macs, 4))
    train(small, net, kept, images, options, say)


if __name__ == "__main__":
    main()
