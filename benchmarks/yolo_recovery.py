"""YOLO11n after a removal and a repair: ten minutes of recovery on a GPU, with mAP by the state at given minutes.

    python -m benchmarks.yolo_coco … --criteria lrp --save folder
    python -m benchmarks.yolo_recovery --weights yolo11n.onnx --coco coco128_yolo --pruned folder --log rows.jsonl
    python -m benchmarks.yolo_recovery --pruned folder other … --onnx    (only latency in ONNX Runtime)

The student learns from the original: classes, bins of the boxes, and what the layers of the body return in the channels
that it kept. No label is used. It sees the 128 training images of COCO128 alone, flipped, cropped, scaled, in other
colours, and four at a time (mosaics); `--more` adds photographs of other folders. mAP is measured on the 128 validation
images, which are used for nothing else: the time and all settings were fixed before. Every row is the state at that
time, never the best. Only training counts as time. A run that was interrupted goes on where its state was saved. The
weights at the end are `recovered.safetensors`, for the smaller model that `sc.apply` makes of the plan.

On a GPU the models compute in bfloat16 and the losses in float32, and a step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import secateur as sc
from benchmarks.yolo_coco import SIDE, batches, latencies, letterbox, load, mean_precision, read
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
    mirror = 1.0 - 2.0 * (torch.rand(n, device=device) < 0.5).float()
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
    wanted = theirs["scores"].float().sigmoid()
    weight = wanted.amax(1)
    classes = F.binary_cross_entropy_with_logits(mine["scores"].float(), wanted, reduction="sum")
    own, known = (F.log_softmax(x["boxes"].float().unflatten(1, (4, -1)), 2) for x in (mine, theirs))
    sides = F.kl_div(own, known, reduction="none", log_target=True).sum(2).mean(1)
    return (classes + (weight * sides).sum()) / weight.sum()


def folded(model: nn.Module) -> nn.Module:
    """The model itself, without its batch norms: they became part of the convolutions before them."""
    for module in model.eval().modules():
        if isinstance(getattr(module, "bn", None), nn.BatchNorm2d):
            module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            module.bn = nn.Identity()
    return model


class Lesson:
    """One step of training after the other. On a GPU it is recorded once as a CUDA graph, and then replayed."""

    warm = 5  # plain steps before the recording: cuDNN chooses its ways, and the optimizer makes its tensors

    def __init__(
        self, student: nn.Module, teacher: nn.Module, kept: dict[int, Tensor | None], images: Tensor, options: Any
    ) -> None:
        self.student, self.teacher, self.images, self.options = student, folded(teacher), images, options
        for module in (student, teacher):
            module.to(memory_format=torch.channels_last)
        gpu = options.device == "cuda"
        self.rate = torch.tensor(options.rate, device=options.device)  # a graph reads it anew in each step
        parameters = list(student.parameters())
        self.optimizer = (
            torch.optim.AdamW(parameters, self.rate, fused=True, capturable=True)
            if gpu
            else torch.optim.AdamW(parameters, options.rate)
        )
        self.heard, self.known = Heard(student, dict.fromkeys(kept)), Heard(teacher, kept)
        self.lost = torch.zeros((), device=options.device)
        self.left, self.graph = (self.warm if gpu and not options.plain else -1), None

    def __call__(self, rate: float) -> None:
        """The next step."""
        if self.rate.is_cuda:
            self.rate.fill_(rate)
        else:
            self.optimizer.param_groups[0]["lr"] = rate
        if self.graph is not None:
            self.graph.replay()
            return
        if self.left < 0:
            self._step()
            return
        _training(self.student), _training(self.teacher)
        side = torch.cuda.Stream()  # as torch wants it for steps before a recording
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.left -= 1
        if self.left < 0:
            self._record()

    def _record(self) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()  # the gradients of the graph are its own
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"no CUDA graph, plain steps: {str(error).splitlines()[0]}", flush=True)
            self.optimizer.zero_grad()
            return
        self.graph = graph

    def _step(self) -> None:
        _training(self.student), _training(self.teacher)
        device = self.options.device
        with torch.no_grad():
            x = views(self.images, self.options.batch).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                wanted = self.teacher(x)
            made = self.student(x)
        seen = {n: (mine.float(), self.known.seen[n].float()) for n, mine in self.heard.seen.items()}
        parts = [(mine - theirs).square().sum() / theirs.square().sum() for mine, theirs in seen.values()]
        loss = distance(made, wanted) + torch.stack(parts).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.parameters(), 10.0)
        self.optimizer.step()
        self.lost += loss.detach()

    def _learning(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.student.named_parameters() if parameter.requires_grad]

    def save(self, file: Path, **numbers: float) -> None:
        """The state, under its name only once all of it is written."""
        found = {f"student.{k}": v for k, v in self.student.state_dict().items()}
        for name, parameter in self._learning():
            found |= {f"{kind}.{name}": v for kind, v in self.optimizer.state[parameter].items()}
        write(found, file, {k: repr(v) for k, v in numbers.items()})

    def load(self, file: Path) -> dict[str, float]:
        """Go on where a run was saved; the numbers that were saved with it."""
        found = load_file(file, self.options.device)
        start = "student."
        self.student.load_state_dict({k.removeprefix(start): v for k, v in found.items() if k.startswith(start)})
        for name, parameter in self._learning():
            self.optimizer.state[parameter] = {
                "step": found[f"step.{name}"],
                # laid out in memory as the parameter is: a fused optimizer walks through both at once
                **{k: torch.empty_like(parameter).copy_(found[f"{k}.{name}"]) for k in ("exp_avg", "exp_avg_sq")},
            }
        with safe_open(file, "pt") as opened:
            return {k: float(v) for k, v in opened.metadata().items()}


def write(tensors: dict[str, Tensor], file: Path, numbers: dict[str, str] | None = None) -> None:
    """A safetensors file that is there as a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, part, numbers)
    os.replace(part, file)


def train(lesson: Lesson, options: Any, say: Callable[..., None]) -> None:
    """Train for some time, and tell about the state at given minutes."""
    spent, steps, seconds = 0.0, 0, options.seconds
    if options.state.exists():
        numbers = lesson.load(options.state)
        spent, steps = numbers["spent"], int(numbers["steps"])
        print(time.strftime("%H:%M:%S"), f"goes on after {spent:.0f} s and {steps} steps", flush=True)
    torch.manual_seed(steps)
    due = [60 * m for m in options.minutes if 60 * m > spent]
    saved, noted, begin = spent, steps, time.perf_counter()
    while spent < seconds:
        lesson(options.rate * min(1, (steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * min(spent / seconds, 1))))
        steps += 1
        if steps % options.every:
            continue
        mean = float(lesson.lost) / (steps - noted)  # waits for the device
        if not math.isfinite(mean):
            raise SystemExit(f"the loss is {mean} after {steps} steps")
        spent += time.perf_counter() - begin
        lesson.lost.zero_()
        noted = steps
        if (due and spent >= due[0]) or spent >= seconds:
            say(seconds=round(spent), steps=steps, loss=round(mean, 4))
            due = [s for s in due if s > spent]
        if spent >= seconds or spent - saved >= options.save_every:
            saved = spent
            lesson.save(options.state, spent=spent, steps=steps)
        begin = time.perf_counter()
    write(lesson.student.state_dict(), options.recovered or options.pruned[0] / "recovered.safetensors")


def _training(model: nn.Module) -> None:
    """Training mode, for what the heads return; batch norms stay as they are: see `yolo_coco.load`."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def onnx_files(folders: list[Path]) -> dict[str, Path]:
    """The whole model of the first folder, and the smaller one of each."""
    found = {"whole": folders[0] / "whole.onnx"}
    found |= {str(folder / "small"): folder / "small.onnx" for folder in folders}
    missing = [str(file) for file in found.values() if not file.exists()]
    if missing:
        raise SystemExit(f"no {', '.join(missing)}: `benchmarks.yolo_coco --save` writes them")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="yolo11n.onnx")
    parser.add_argument("--coco", type=Path, help="the folder of lightly-ai/coco128_yolo")
    parser.add_argument("--pruned", type=Path, nargs="+", required=True, help="what `yolo_coco --save` wrote")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="folders of further photographs to learn from")
    parser.add_argument("--log", type=Path, default=Path("yolo_recovery.jsonl"))
    parser.add_argument(
        "--state", type=Path, default=Path("yolo_recovery.safetensors"), help="where an interrupted run goes on"
    )
    parser.add_argument("--save-every", type=float, default=30, help="seconds between two states")
    parser.add_argument("--recovered", type=Path, help="default: recovered.safetensors in the folder of --pruned")
    parser.add_argument("--plain", action="store_true", help="no CUDA graph")
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
        for count in options.threads:
            for name, (low, middle, high) in latencies(onnx_files(options.pruned), count, 60).items():
                print(f"{name}: {middle:.1f} ms ({low:.1f} to {high:.1f}) in ONNX Runtime, {count} threads", flush=True)
        return
    if len(options.pruned) > 1:
        parser.error("only one folder of --pruned can be trained")
    torch.backends.cudnn.benchmark = True
    tested = batches(
        read(options.coco / "images" / "val2017", options.coco / "object_detection" / "labels" / "val2017")[
            : options.limit
        ],
        16,
        options.device,
    )
    net = load(options.weights)
    plan = Plan.from_json((options.pruned[0] / "plan.json").read_text())
    small = sc.apply(net, plan)
    small.load_state_dict(load_file(options.pruned[0] / "repaired.safetensors"))
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
    train(Lesson(small, net, kept, images, options), options, say)


if __name__ == "__main__":
    main()
