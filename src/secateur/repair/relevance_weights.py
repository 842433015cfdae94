"""Weights of a regression's rows: positions through which more relevance passes count more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from secateur.relevance.engine import RelevancePass
from secateur.relevance.explain import starter
from secateur.relevance.weights import LayerUse
from secateur.repair.layers import Layers
from secateur.repair.rows import Positions
from secateur.repair.samples import Samples

# Relevance needs what a gradient needs, so fewer samples are in flight than in a forward pass.
_AT_ONCE = 32


def relevance_weights(
    model: nn.Module, layers: Layers, positions: Mapping[str, Positions], samples: Samples, at_once: int, share: float,
) -> dict[str, Tensor]:  # fmt: skip
    """By layer the weights of its sampled positions, (samples, positions), 1 on average.

    `share` of a weight is the relevance for the class that the original predicts; the rest is the same everywhere, so
    that every position counts. Layers that no relevance reaches are left out.
    """
    seen: dict[str, Tensor] = {}  # by weight: (samples, positions)

    def watch(use: LayerUse, relevance: Tensor) -> None:
        """Note how much relevance lies at each position of a layer's output, over all channels, for each sample."""
        if use.name in layers:
            batch = layers[use.name].batch
            seen[use.name] = relevance.abs().movedim(use.channel, -1).sum(-1).movedim(batch, 0)

    engine = RelevancePass(model, heat_map=False, watch=watch)
    made: dict[str, Tensor] = {}
    for place, x in samples.chunks(min(at_once, _AT_ONCE)):
        seen.clear()
        engine.run(x, starter(None, samples=place.stop - place.start))
        for name, found in seen.items():
            flat = found.reshape(place.stop - place.start, -1, 1)
            rows = positions[name].take(flat, place)[..., 0]
            if name not in made:
                made[name] = torch.zeros(samples.total, rows.shape[1], device=rows.device)
            made[name][place] = rows.float()
    means = {name: rows.mean() for name, rows in made.items()}
    return {name: 1 - share + share * rows / means[name] for name, rows in made.items() if bool(means[name] > 0)}
