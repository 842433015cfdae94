"""Speed and memory of a relevance pass against a gradient pass and the LRP libraries, in one run.

    python -m benchmarks.relevance                     # ResNet-18 and VGG-16, 8 images of 224²
    python -m benchmarks.relevance --transformers      # small ones: 6 layers (ViT: 12), width 384
    python -m benchmarks.relevance --device cuda       # ResNet-50, VGG-16, ResNet-18, batch 64, channels-last, TF32
    python -m benchmarks.relevance --device cuda --transformers   # SmolLM2-135M, ViT-B/16, BERT base; 128 tokens each

The gradient pass is forward and backward with parameter gradients. Contestants take turns, so that a busy moment of
the machine hits all of them; the table has medians. With `--cpu-time`, they are of CPU time. Memory on the CPU is the
growth of the resident set in a process of its own. On a GPU a second list says how long the host takes to launch
everything, how long the device is busy, and with what. Libraries that are not installed are left out by name.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from secateur.relevance import RelevancePass, _kernels
from secateur.relevance.ledger import Page
from secateur.relevance.starts import starter

Contestant = Callable[[], object]
OURS = ("secateur, units", "secateur, units and heat map")


def transformer(name: str, patched: bool = False) -> nn.Module:
    """A transformer with random weights; `patched`: of classes of its own, changed by lxt."""
    import transformers

    name, same = SIZES[name]
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if patched:
        spec = importlib.util.spec_from_file_location(f"{modeling.__name__}_patched", modeling.__file__)
        assert spec is not None
        assert spec.loader is not None
        modeling = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modeling
        spec.loader.exec_module(modeling)
        patch_with_lxt(modeling)
    torch.manual_seed(0)
    if name == "llama":
        shared = same["num_attention_heads"] // 3  # three heads share a key
        config = transformers.LlamaConfig(**same, num_key_value_heads=shared, vocab_size=VOCABULARY, use_cache=False)
        net = modeling.LlamaForCausalLM(config)
    elif name == "bert":
        config = transformers.BertConfig(**same, vocab_size=VOCABULARY, num_labels=1000)
        net = modeling.BertForSequenceClassification(config)
    else:
        config = transformers.ViTConfig(**same, num_labels=1000)
        net = modeling.ViTForImageClassification(config)
    return net.eval()


def patch_with_lxt(modeling: Any) -> None:
    """What `lxt.efficient.monkey_patch` does, which does not import with transformers 5."""
    from transformers import pytorch_utils

    vars(pytorch_utils).setdefault("find_pruneable_heads_and_indices", None)
    from lxt.efficient import patches

    class Table(dict[str, Any]):
        def get_interface(self, name: str, default: object) -> object:
            return self.get(name, default)

    patches.patch_method(patches.gated_mlp_forward, modeling.LlamaMLP)
    patches.patch_method(patches.rms_norm_forward, modeling.LlamaRMSNorm)
    patches.patch_attention(modeling)
    modeling.ALL_ATTENTION_FUNCTIONS = Table(modeling.ALL_ATTENTION_FUNCTIONS)


def build(name: str, device: str) -> nn.Module:
    if name in TRANSFORMERS:
        return transformer(name).to(device)
    from torchvision import models

    torch.manual_seed(0)
    net: nn.Module = getattr(models, name)(weights=None).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            nn.init.normal_(module.bias, 0, 0.05)
    return net.cuda().to(memory_format=torch.channels_last) if device == "cuda" else net


def batch(args: argparse.Namespace, name: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name in TRANSFORMERS and SIZES[name][0] != "vit":
        ids = torch.randint(VOCABULARY, (args.batch, 128), generator=generator).to(args.device)
        return ids, torch.randint(1000, (args.batch,), generator=generator).to(args.device)
    x = torch.randn(args.batch, 3, args.size, args.size, generator=generator).to(args.device)
    y = torch.randint(1000, (args.batch,), generator=generator).to(args.device)
    return (x.to(memory_format=torch.channels_last) if args.device == "cuda" else x), y


def own(name: str, args: argparse.Namespace) -> dict[str, Contestant]:
    net, (x, y) = build(name, args.device), batch(args, name)

    def gradient() -> None:
        net.zero_grad(set_to_none=True)
        F.cross_entropy(logits(net(x)), y).backward()

    units, heat = RelevancePass(net, heat_map=False), RelevancePass(net)
    args.passes[name] = units
    start = starter(y) if name not in TRANSFORMERS else lambda output: at_class(output, y)
    return {
        "gradient pass": gradient,
        OURS[0]: lambda: units.run(x, start),
        OURS[1]: lambda: heat.run(x, start),
    }


def logits(output: object) -> torch.Tensor:
    """One row of logits per sample: those of the last token."""
    found: torch.Tensor = getattr(output, "logits", output)  # type: ignore[assignment]
    return found[:, -1] if found.dim() == 3 else found


def at_class(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Relevance of a transformer's output: the logit of the class, at the last token."""
    seed, rows = torch.zeros_like(output), torch.arange(len(y), device=y.device)
    logits(seed)[rows, y] = logits(output)[rows, y]
    return seed


# -- rivals ------------------------------------------------------------------------------------------------------------
def zennit(rule: str) -> Callable[[str, argparse.Namespace], Contestant]:
    def make(name: str, args: argparse.Namespace) -> Contestant:
        from zennit.attribution import Gradient
        from zennit.canonizers import SequentialMergeBatchNorm
        from zennit.composites import LayerMapComposite
        from zennit.layer import Sum
        from zennit.rules import AlphaBeta, Norm, Pass, ZPlus
        from zennit.torchvision import ResNetCanonizer
        from zennit.types import Activation, AvgPool, BatchNorm, Convolution, Linear

        net, (x, y) = out_of_place(build(name, args.device)), batch(args)
        layer = ZPlus() if rule == "zplus" else AlphaBeta(1, 0)
        maps = [(Activation, Pass()), (Sum, Norm()), (AvgPool, Norm()), (BatchNorm, Pass())]
        maps += [(Convolution, layer), (Linear, layer)]
        canonizers = [ResNetCanonizer() if name.startswith("resnet") else SequentialMergeBatchNorm()]
        seed = torch.eye(1000, device=x.device)[y]

        def run() -> None:
            with Gradient(net, LayerMapComposite(maps, canonizers=canonizers)) as attributor:
                attributor(x, seed)

        return run

    return make


def captum(name: str, args: argparse.Namespace) -> Contestant:
    """α1β0 in every layer. Left out where the total is wrong: reused modules and sums are not what captum expects."""
    from captum.attr import LRP
    from captum.attr._utils.lrp_rules import Alpha1_Beta0_Rule

    net, (x, y) = out_of_place(build(name, args.device)), batch(args)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.rule = Alpha1_Beta0_Rule(set_bias_to_zero=True)

    def run(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
        found: torch.Tensor = LRP(net).attribute(x, y)
        return found

    with torch.no_grad():
        start = float(net(x[:1])[0, y[0]])
    total = float(run(x[:1], y[:1]).sum()) / start
    if not abs(total - 1) < 0.05:
        raise ValueError(f"wrong: {total:.2g} of the relevance reaches the input")
    return run


def lxt(name: str, args: argparse.Namespace) -> Contestant:
    """AttnLRP of its authors: input times gradient, with patched modules."""
    if SIZES[name][0] != "llama":
        raise ValueError("its patch is for other versions of transformers")
    net, (ids, y) = transformer(name, patched=True).to(args.device).requires_grad_(False), batch(args, name)
    table, rows = net.get_input_embeddings(), torch.arange(args.batch)  # type: ignore[operator]

    def run() -> None:
        x = table(ids).requires_grad_(True)
        logits(net(inputs_embeds=x))[rows, y].sum().backward()
        (x * x.grad).sum(-1)

    return run


def out_of_place(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return net


RIVALS: dict[str, tuple[str, Callable[[str, argparse.Namespace], Contestant]]] = {
    "zplus": ("zennit ZPlus", zennit("zplus")),
    "alphabeta": ("zennit AlphaBeta(1, 0)", zennit("alphabeta")),
    "captum": ("captum LRP, α1β0", captum),
    "lxt": ("lxt", lxt),
}
VOCABULARY = 4096


def sizes(width: int, heads: int, layers: int, inner: int) -> dict[str, int]:
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    return dict(zip(names, (width, heads, layers, inner), strict=True))


#: Small transformers, and three of common sizes. (The vocabulary is small everywhere.)
SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama", sizes(384, 6, 6, 1024)),
    "vit": ("vit", sizes(384, 6, 12, 1536)),  # ViT-S/16
    "bert": ("bert", sizes(384, 6, 6, 1024)),
    "smollm2": ("llama", sizes(576, 9, 30, 1536)),
    "vit-b": ("vit", sizes(768, 12, 12, 3072)),  # ViT-B/16
    "bert-base": ("bert", sizes(768, 12, 12, 3072)),
}
TRANSFORMERS = tuple(SIZES)


# -- measuring ---------------------------------------------------------------------------------------------------------
def clock(run: Contestant, args: argparse.Namespace) -> float:
    now = time.process_time if args.cpu_time else time.perf_counter
    if args.device == "cuda":
        torch.cuda.synchronize()
    begin = now()
    run()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return now() - begin


def turns(runs: dict[str, Contestant], args: argparse.Namespace) -> dict[str, list[float] | str]:
    """Times of all contestants, taking turns; a sentence for those that fail."""
    times: dict[str, list[float] | str] = {}
    for who, run in runs.items():
        try:
            for _ in range(2 if args.device == "cpu" else 8):  # on a GPU the fifth batch is recorded
                run()
            times[who] = []
        except torch.OutOfMemoryError:
            times[who] = "out of memory"
    for _ in range(args.repeat):
        for who, run in runs.items():
            seconds = times[who]
            if isinstance(seconds, list):
                seconds.append(clock(run, args))
    return times


def memory(name: str, who: str, args: argparse.Namespace) -> float:
    """MiB at the peak, above what model and data take."""
    if args.device == "cuda":
        run = own(name, args)[who]
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    command = [sys.executable, "-m", "benchmarks.relevance", "--peak", who, "--models", name]
    command += ["--batch", str(args.batch), "--size", str(args.size), "--threads", str(args.threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def peak(args: argparse.Namespace) -> None:
    size, args.batch = args.batch, 1
    own(args.models[0], args)[args.peak]()  # libraries that are loaded on the way do not count
    args.batch = size
    run = own(args.models[0], args)[args.peak]
    before = resident("VmRSS")
    run()
    run()
    print(resident("VmHWM") - before)


def resident(what: str) -> float:
    """MiB now (VmRSS) or at the peak (VmHWM). The peak of `getrusage` is no use: a child inherits its parent's."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(what)]
    return int(line.split()[1]) / 2**10


def launched(run: Contestant) -> float:
    """Seconds until everything is launched: until the call returns, or the relevance pass waits for its sums."""
    moments: list[float] = []
    read = Page.read

    def noted(self: Page) -> object:
        moments.append(time.perf_counter())
        return read(self)

    Page.read = noted  # type: ignore[assignment, method-assign]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    try:
        run()
    finally:
        Page.read = read  # type: ignore[method-assign]
    return (moments[0] if moments else time.perf_counter()) - begin


def kernels(run: Contestant) -> tuple[float, int, list[tuple[str, int, float]]]:
    """Milliseconds that the device is busy, how many kernels it runs, and the longest by name."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    busy: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in trace.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            busy[event.name[:90]] += event.time_range.elapsed_us() / 1e3
            count[event.name[:90]] += 1
    longest = [(name, count[name], ms) for name, ms in busy.most_common(12)]
    return sum(busy.values()), sum(count.values()), longest


def split(name: str, times: dict[str, list[float] | str], runs: dict[str, Contestant], units: RelevancePass) -> None:
    for who in ("gradient pass", *OURS):
        wall = 1e3 * statistics.median(times[who])  # type: ignore[type-var]
        host = 1e3 * statistics.median([launched(runs[who]) for _ in range(5)])
        busy, count, longest = kernels(runs[who])
        print(f"\n{name}, {who}: wall {wall:.1f} ms, host {host:.1f} ms, device {busy:.1f} ms in {count} kernels")
        for kernel, number, ms in longest:
            print(f"  {ms:7.2f} ms {number:4d} x  {kernel}")
    books = units.conservation()
    lost = sorted((abs(flow.lost / flow.arrived) for flow in books.flows if flow.arrived), reverse=True)
    astray = f"at most {lost[0]:.1e} goes astray in one"
    print(f"\n{name}, {units.composite.name}: relevance got stuck in {len(units.attentive)} layers; {astray}")
    recorder = units._recorder
    print(f"{name}: {'recorded' if recorder.recording else f'not recorded: {recorder.refusal}'}")
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{name}: compiled kernels: {', '.join(_kernels.available(device)) or 'none'}")


def report(name: str, args: argparse.Namespace) -> None:
    runs, missing = own(name, args), dict[str, str]()
    units = args.passes[name]
    for rival in args.rivals:
        if (rival == "lxt") != (name in TRANSFORMERS):
            continue
        who, make = RIVALS[rival]
        try:
            runs[who] = make(name, args)
        except ImportError as error:
            missing[who] = f"not installed ({error.name})"
        except ValueError as error:
            missing[who] = str(error)
    times = turns(runs, args)
    base = statistics.median(times["gradient pass"])  # type: ignore[type-var]
    first = None
    for who, seconds in times.items():
        if isinstance(seconds, str):
            missing[who] = seconds
            continue
        middle = statistics.median(seconds)
        cells = f"| {name} | {who} | {middle:.4f} | {middle / base:.2f} |"
        if who in ("gradient pass", *OURS):
            used = memory(name, who, args)
            first = first or used
            cells += f" {used:.0f} | {used / first:.2f} |"
        else:
            cells += " | |"
        print(cells, flush=True)
    for who, reason in missing.items():
        print(f"| {name} | {who} | {reason} | | | |", flush=True)
    if args.device == "cuda":
        args.splits.append((name, times, {who: runs[who] for who in ("gradient pass", *OURS)}, units))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="default: resnet18 vgg16; on a GPU resnet50 vgg16 resnet18")
    parser.add_argument("--transformers", action="store_true", help="models: llama vit bert; on a GPU larger ones")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of the time on the wall")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="default: 8, on a GPU 64")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    if args.transformers:
        args.models = ["smollm2", "vit-b", "bert-base"] if gpu else ["llama", "vit", "bert"]
    args.models = args.models or (["resnet50", "vgg16", "resnet18"] if gpu else ["resnet18", "vgg16"])
    args.batch, args.splits, args.passes = args.batch or (64 if gpu else 8), [], {}
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high" if gpu else "highest")
    torch.backends.cudnn.benchmark = True
    if args.peak:
        peak(args)
        return
    where = torch.cuda.get_device_name() + ", channels-last, TF32" if gpu else f"CPU, {args.threads} threads"
    print(f"{args.batch} images of {args.size}², {where}, torch {torch.__version__}, medians of {args.repeat}\n")
    print("| model | pass | seconds | x gradient pass | peak MiB | x gradient pass |\n|---|---|---|---|---|---|")
    for name in args.models:
        report(name, args)
        gc.collect()
    for taken in args.splits:
        split(*taken)


if __name__ == "__main__":
    main()
