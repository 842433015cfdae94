"""Models of other libraries that were once cut wrongly, or withheld: removal against masking.

    pip install --target peers --no-deps monai segmentation-models-pytorch diffusers
    PYTHONPATH=peers python -m benchmarks.other_libraries

Each is pruned by 20 % and by 50 % at random, and compared with its masked version in double precision: in evaluation
and in training mode, on the size of the example and on a larger one where the original takes it. At last `sc.prune`
runs RAFT (torchvision) through several steps.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc
from secateur.nest import tensors_of_output

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from oracle import random_scores


class Encoder(nn.Module):
    """The encoder of a variational autoencoder, which returns a distribution inside an object."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
        self.vae = AutoencoderKL(
            down_block_types=down, up_block_types=up, block_out_channels=(16, 32), norm_num_groups=4, sample_size=32
        )
        self.vae.decoder = self.vae.post_quant_conv = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.vae.encode(x)


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    sides = {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 12, 16]}
    return DynUNet(2, 1, 2, deep_supervision=True, deep_supr_num=1, **sides)


def segresnetvae() -> nn.Module:
    from monai.networks.nets import SegResNetVAE

    return SegResNetVAE((32, 32), spatial_dims=2, in_channels=1, out_channels=2, init_filters=8, vae_nz=16)


def manet() -> nn.Module:
    from segmentation_models_pytorch import MAnet

    return MAnet("resnet18", encoder_weights=None)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MONAI DynUNet": (dynunet, (2, 1, 32, 32)),
    "MONAI SegResNetVAE": (segresnetvae, (2, 1, 32, 32)),
    "segmentation-models-pytorch MAnet": (manet, (2, 3, 64, 64)),
    "diffusers AutoencoderKL.encode": (Encoder, (1, 3, 32, 32)),
}


def returned(model: nn.Module, x: Tensor, training: bool) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors_of_output(copy.deepcopy(model).double().train(training)(x))


def gap(model: nn.Module, shape: tuple[int, ...]) -> tuple[float, int]:
    """The largest difference relative to an output's largest number, and how many comparisons were possible."""
    graph = sc.analyze(model, torch.randn(shape))
    worst, compared = 0.0, 0
    for share in (0.2, 0.5):
        plan = sc.plan(graph, random_scores(graph, 1), remove=share)
        small, masked = sc.apply(model, plan), sc.apply(model, plan, how="mask")
        for more in (0, 32):
            x = torch.randn(1, shape[1], shape[2] + more, shape[3] + more, dtype=torch.float64)
            for training in (False, True):
                try:
                    wanted = returned(model, x, training) and returned(masked, x, training)
                except RuntimeError:  # the original does not take this size
                    continue
                for a, b in zip(returned(small, x, training), wanted, strict=True):
                    worst = max(worst, float((a - b).abs().max() / b.abs().max()))
                compared += 1
    return worst, compared


def main() -> None:
    warnings.simplefilter("ignore")
    print("| model | comparisons | largest difference |\n|---|---:|---:|")
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(0)
        worst, compared = gap(make().eval(), shape)
        print(f"| {name} | {compared} | {worst:.1g} |", flush=True)
    from torchvision.models.optical_flow import raft_small

    pair = tuple(torch.rand(1, 3, 128, 128) * 2 - 1 for _ in range(2))
    result = sc.prune(raft_small(weights=None).eval(), [(pair, None)], "weight", remove=0.3, progress=False)
    print(f"\nRAFT:\n{result}")


if __name__ == "__main__":
    main()
