"""Altered copies of reference images, by crops and flips, keep a regression from learning thirty images by heart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: `f(images, generator)` returns altered images of the same shape. The generator lives on the CPU.
Alter = Callable[[Tensor, torch.Generator], Tensor]


def crop_and_flip(images: Tensor, generator: torch.Generator, least: float = 0.5) -> Tensor:
    """Each image cropped to 50-100 % of its area, brought back to its size, and mirrored half of the time.

    `least` is another smallest area.
    """
    count = len(images)
    zoom = (least + (1 - least) * torch.rand(count, generator=generator)).sqrt()
    # The window's centre, such that it stays inside.
    centre = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - zoom)[:, None]
    flip = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = flip * zoom, zoom, centre
    grid = F.affine_grid(theta.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def suits(inputs: Any) -> bool:
    """Whether inputs look like images: (samples, 1, 3 or 4 channels, height, width) of real numbers."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 4:
        return False
    return inputs.shape[1] in (1, 3, 4) and min(inputs.shape[2:]) >= 8
