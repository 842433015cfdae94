"""Conservation on the torchvision zoo: what share of the relevance goes astray, at worst, in one operation or in all.

    python -m benchmarks.conservation [--presets alpha1beta0 attnlrp] [--all]

Weights are random, and so are biases and batch-norm statistics. `--all` runs every classifier of torchvision.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch import nn

from secateur.errors import SecateurError
from secateur.relevance import explain

SMALLEST = [
    "alexnet", "vgg11", "vgg11_bn", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "squeezenet1_1", "densenet121",
    "googlenet", "inception_v3", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5",
    "efficientnet_b0", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t",
    "swin_v2_t", "maxvit_t",
]  # fmt: skip
ATTENDING = ("vit", "swin", "maxvit", "convnext")


def build(name: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    net: nn.Module = models.get_model(name, weights=None, **options)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
        elif isinstance(getattr(module, "bias", None), torch.Tensor):
            nn.init.normal_(module.bias, 0, 0.1)
    if name.startswith("vit"):  # starts at zero
        nn.init.normal_(net.heads.head.weight, 0, 0.05)
    return net


def size_of(name: str) -> int:
    if name.startswith("vit_h"):
        return 224
    return 96 if name == "inception_v3" else 224 if name.startswith(ATTENDING[:3]) else 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["alpha1beta0", "attnlrp"])
    parser.add_argument("--all", action="store_true", help="every classifier of torchvision")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = SMALLEST
    if args.all:
        from torchvision import models

        names = models.list_models(models)
    print("| model | preset | input / start | absorbed by constants | worst | seconds |\n|---|---|---|---|---|---|")
    passed, tried = 0, 0
    for name in names:
        net = build(name)
        size = size_of(name)
        x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
        for preset in args.presets:
            if preset == "attnlrp" and not name.startswith(ATTENDING):
                continue
            tried += 1
            begin = time.perf_counter()
            try:
                books = explain(net, x, 3, composite=preset).conservation
            except SecateurError as error:
                print(f"| {name} | {preset} | {type(error).__name__} | | | |")
                continue
            passed += books.worst <= (0.05 if name.startswith(ATTENDING) else 0.01)
            seconds = time.perf_counter() - begin
            print(
                f"| {name} | {preset} | {books.input / books.start:.5f} | {books.absorbed / books.start:.5f} | "
                f"{books.worst:.2%} | {seconds:.1f} |",
                flush=True,
            )
    print(f"\n{passed} of {tried} within 1 % (5 % for {', '.join(ATTENDING)})")


if __name__ == "__main__":
    main()
