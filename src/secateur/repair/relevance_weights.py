"""Weights of a regression's rows: positions through which more relevance passes count more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from secateur.relevance.engine import RelevancePass
from secateur.relevance.explain import starter
from secateur.relevance.weights import LayerSite
from secateur.repair.layers import Layers
from secateur.repair.rows import Positions
from secateur.repair.samples import Samples

# Relevance needs what a gradient needs, so fewer samples are in flight than in a forward pass.
_AT_ONCE = 32


class _Places(RelevancePass):
    """Notes how much relevance lies at each position of each layer's output, over all channels, for each sample."""

    def __init__(self, model: nn.Module, batch: Mapping[str, int]) -> None:
        super().__init__(model, heat_map=False)
        self._batch = batch
        #: By weight: (samples, positions).
        self.found: dict[str, Tensor] = {}

    def unit_sums(self, site: LayerSite, r: Tensor, besides: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Note it on the way."""
        batch = self._batch.get(site.name)
        if batch is not None and besides is None:
            self.found[site.name] = r.abs().movedim(site.channel, -1).sum(-1).movedim(batch, 0)
        return super().unit_sums(site, r, besides)


def relevance_weights(
    model: nn.Module, layers: Layers, positions: Mapping[str, Positions], samples: Samples, at_once: int, share: float,
) -> dict[str, Tensor]:  # fmt: skip
    """By layer the weights of its sampled positions, (samples, positions), 1 on average.

    `share` of a weight is the relevance for the class that the original predicts; the rest is the same everywhere, so
    that every position counts. Layers that no relevance reaches are left out.
    """
    engine = _Places(model, {name: layer.batch for name, layer in layers.items()})
    made: dict[str, Tensor] = {}
    for place, x in samples.chunks(min(at_once, _AT_ONCE)):
        engine.found.clear()
        engine.run(x, starter(None, samples=place.stop - place.start))
        for name, found in engine.found.items():
            flat = found.reshape(place.stop - place.start, -1, 1)
            rows = positions[name].take(flat, place)[..., 0]
            if name not in made:
                made[name] = torch.zeros(samples.total, rows.shape[1], device=rows.device)
            made[name][place] = rows.float()
    means = {name: rows.mean() for name, rows in made.items()}
    return {name: 1 - share + share * rows / means[name] for name, rows in made.items() if bool(means[name] > 0)}
