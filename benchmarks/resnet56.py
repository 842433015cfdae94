"""CIFAR-10's ResNet-56 with shortcuts that have no weights (He et al., option A), as its published weights need it."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(out + x)


class ResNet(nn.Module):
    def __init__(self, blocks: int = 9, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        stages = [
            nn.Sequential(*(Block(before if i == 0 else width, width, stride if i == 0 else 1) for i in range(blocks)))
            for before, width, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        ]
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def resnet56(weights: Path) -> ResNet:
    net = ResNet()
    found = net.load_state_dict(safetensors.torch.load_file(weights), strict=False)
    assert not found.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in found.missing_keys)
    return net.eval()
