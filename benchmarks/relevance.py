"""Speed and memory of a relevance pass against a gradient pass and the LRP libraries, in one run.

    python -m benchmarks.relevance                          # ResNet-18 and VGG-16, 8 images of 224²
    python -m benchmarks.relevance --device cuda --models resnet50 vgg16 --batch 64 --rivals zplus

The gradient pass is forward and backward with parameter gradients. Contestants take turns, so that a busy moment of
the machine hits all of them; the table has medians. Memory on the CPU is the growth of the resident set in a process of
its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from secateur.relevance import RelevancePass
from secateur.relevance.explain import starter

Contestant = Callable[[], object]


def build(name: str, device: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    net = getattr(models, name)(weights=None).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            nn.init.normal_(module.bias, 0, 0.05)
    if device == "cuda":
        return net.cuda().to(memory_format=torch.channels_last)
    return net


def contestants(name: str, args: argparse.Namespace, only: str | None = None) -> dict[str, Contestant]:
    net = build(name, args.device)
    x = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    if args.device == "cuda":
        x = x.to(memory_format=torch.channels_last)
    y = torch.randint(1000, (args.batch,), device=args.device)

    def gradient() -> None:
        net.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()

    units, heat = RelevancePass(net, heat_map=False), RelevancePass(net)
    entries: dict[str, Contestant] = {
        "gradient pass": gradient,
        "secateur, units": lambda: units.run(x, starter(y)),
        "secateur, units and heat map": lambda: heat.run(x, starter(y)),
    }
    if only is None:
        for rival in args.rivals:
            entries[RIVALS[rival]] = zennit(build(name, args.device), x, y, rival)
    return entries if only is None else {only: entries[only]}


RIVALS = {"zplus": "zennit ZPlus", "alphabeta": "zennit AlphaBeta(1, 0)"}


def zennit(net: nn.Module, x: torch.Tensor, y: torch.Tensor, rule: str) -> Contestant:
    from zennit.attribution import Gradient
    from zennit.canonizers import SequentialMergeBatchNorm
    from zennit.composites import LayerMapComposite
    from zennit.layer import Sum
    from zennit.rules import AlphaBeta, Norm, Pass, ZPlus
    from zennit.torchvision import ResNetCanonizer
    from zennit.types import Activation, AvgPool, BatchNorm, Convolution, Linear

    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    layer = ZPlus() if rule == "zplus" else AlphaBeta(1, 0)
    maps = [(Activation, Pass()), (Sum, Norm()), (AvgPool, Norm()), (BatchNorm, Pass())]
    maps += [(Convolution, layer), (Linear, layer)]
    residual = any("downsample" in path for path, _ in net.named_modules())
    canonizers = [ResNetCanonizer() if residual else SequentialMergeBatchNorm()]
    seed = torch.eye(1000, device=x.device)[y]

    def run() -> None:
        with Gradient(net, LayerMapComposite(maps, canonizers=canonizers)) as attributor:
            attributor(x, seed)

    return run


def clock(run: Contestant, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def memory(name: str, who: str, args: argparse.Namespace) -> float:
    """MiB at the peak, above what model and data take."""
    if args.device == "cuda":
        (run,) = contestants(name, args, who).values()
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / 2**20
    command = [sys.executable, "-m", "benchmarks.relevance", "--peak", who, "--models", name]
    command += ["--batch", str(args.batch), "--size", str(args.size), "--threads", str(args.threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def peak(args: argparse.Namespace) -> None:
    (run,) = contestants(args.models[0], args, args.peak).values()
    before = resident("VmRSS")
    run()
    run()
    print(resident("VmHWM") - before)


def resident(what: str) -> float:
    """MiB now (VmRSS) or at the peak (VmHWM). The peak of `getrusage` is no use: a child inherits its parent's."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(what)]
    return int(line.split()[1]) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "vgg16"])
    parser.add_argument("--rivals", nargs="*", default=["zplus", "alphabeta"], choices=RIVALS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high" if args.device == "cuda" else "highest")
    torch.backends.cudnn.benchmark = True
    if args.peak:
        peak(args)
        return
    print(f"{args.batch} images of {args.size}², {args.device}, {args.threads} threads, medians of {args.repeat}\n")
    print("| model | pass | seconds | x gradient pass | peak MiB | x gradient pass |\n|---|---|---|---|---|---|")
    for name in args.models:
        runs = contestants(name, args)
        times: dict[str, list[float]] = {who: [] for who in runs}
        for run in runs.values():
            run()
        for _ in range(args.repeat):
            for who, run in runs.items():
                times[who].append(clock(run, args.device))
        base = statistics.median(times["gradient pass"])
        del runs
        first = None
        for who, seconds in times.items():
            middle = statistics.median(seconds)
            cells = f"| {name} | {who} | {middle:.3f} | {middle / base:.2f} |"
            if who in RIVALS.values():
                print(cells + " | |")
                continue
            used = memory(name, who, args)
            first = first or used
            print(cells + f" {used:.0f} | {used / first:.2f} |")


if __name__ == "__main__":
    main()
