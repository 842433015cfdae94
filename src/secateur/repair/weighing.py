"""What each position of a layer's output counts in the regression: more where relevance passes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from secateur.relevance.engine import RelevancePass
from secateur.relevance.explain import starter
from secateur.relevance.weights import LayerSite as Unit

if TYPE_CHECKING:
    from secateur.repair.reference import Reference

# Relevance needs what a gradient needs, so fewer samples are in flight than in a forward pass.
_AT_ONCE = 32


class _Places(RelevancePass):
    """Notes where relevance is at each layer's output, for each sample, whatever the channel."""

    def __init__(self, model: nn.Module, batch: Mapping[str, int]) -> None:
        super().__init__(model, heat_map=False)
        self._batch = batch
        #: By weight: (samples, positions).
        self.found: dict[str, Tensor] = {}

    def unit_sums(self, site: Unit, r: Tensor, besides: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Note it on the way."""
        batch = self._batch.get(site.name)
        if batch is not None and besides is None:
            self.found[site.name] = r.abs().movedim(site.channel, -1).sum(-1).movedim(batch, 0)
        return super().unit_sums(site, r, besides)


def weights_by_relevance(model: nn.Module, reference: Reference, share: float) -> dict[str, Tensor]:
    """For each layer what its sampled positions count, (samples, positions), 1 on average.

    `share` of that is the relevance of the class which the original answers with; the rest is the same for all, so that
    no position is lost sight of. Layers that no relevance reaches are left out.
    """
    engine = _Places(model, {name: site.batch for name, site in reference.sites.items()})
    made: dict[str, Tensor] = {}
    samples = reference.samples
    for place, x in samples.chunks(min(reference.at_once, _AT_ONCE)):
        engine.found.clear()
        engine.run(x, starter(None, samples=place.stop - place.start))
        for name, found in engine.found.items():
            site = reference.sites[name]
            flat = found.reshape(place.stop - place.start, -1, 1)
            rows = reference.place(site, flat.shape[1]).take(flat, place)[..., 0]
            if name not in made:
                made[name] = torch.zeros(samples.total, rows.shape[1], device=rows.device)
            made[name][place] = rows.float()
    means = {name: rows.mean() for name, rows in made.items()}
    return {name: 1 - share + share * rows / means[name] for name, rows in made.items() if bool(means[name] > 0)}
