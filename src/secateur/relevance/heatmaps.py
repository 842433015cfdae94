"""Heat maps as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import DataError, SecateurError


def draw(images: Any, heat: Tensor, path: Path, clip: float = 0.995) -> Path:
    """One row per sample: the image, and its relevance in the colours of `seismic`, white at 0."""
    if heat.dim() != 3:
        raise DataError(
            f"relevance of shape {tuple(heat.shape)} is no picture: only inputs of shape (N, C, H, W) can be drawn."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SecateurError("drawing needs matplotlib.", fix="pip install 'secateur[report]'") from error
    rows = heat.shape[0]
    figure = Figure(figsize=(6.4, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, squeeze=False)
    for row, (image, relevance) in enumerate(zip(images, heat, strict=True)):
        axes[row][0].imshow(visible(image))
        flat = relevance.detach().float().cpu()
        limit = bound(flat, clip)
        axes[row][1].imshow(flat.numpy(), cmap="seismic", vmin=-limit, vmax=limit)
        for axis in axes[row]:
            axis.set_axis_off()
    figure.savefig(path, dpi=100, format="png")
    return path


def bound(heat: Tensor, clip: float = 0.995) -> float:
    """Where colours saturate: the `clip` quantile of the absolute values, so that one pixel does not hide the rest."""
    size = heat.detach().abs().flatten()
    return float(size.quantile(clip)) or float(size.max()) or 1.0


def visible(image: Tensor) -> Any:
    """An image tensor of any range as an array (H, W) or (H, W, 3) in [0, 1]."""
    picture = image.detach().float().cpu()
    low, high = picture.amin(), picture.amax()
    if low < 0 or high > 1:
        picture = (picture - low) / (high - low).clamp(min=1e-12)
    if picture.shape[0] >= 3:
        return picture[:3].permute(1, 2, 0).numpy()
    return torch.stack([picture[0]] * 3, -1).numpy()
