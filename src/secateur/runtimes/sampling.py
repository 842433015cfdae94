"""Sample models: the user's own at other widths, on which the segments are timed."""

from __future__ import annotations

import numpy as np

from secateur.ops.layers import Mask
from secateur.structure.graph import Graph

_RANDOM = 6  # models whose layers have widths at random, beside the whole model and a narrow one
_LEAST = 0.12
_STEP = 8


def sample_masks(graph: Graph) -> list[Mask]:
    """What leaves from each sample model: nothing; three quarters of every layer; a share of its own from every layer.

    Over the random models, the shares of a layer are spread evenly, so that each is seen wide and narrow.
    """
    layers = [layer.groups for layer in graph.layers if layer.prunable]
    draw = np.random.default_rng(0)
    shares = np.ones((2 + _RANDOM, len(layers)))
    shares[1] = 0.25
    places = np.stack([draw.permutation(_RANDOM) for _ in layers], 1) if layers else np.zeros((_RANDOM, 0))
    shares[2:] = _LEAST + (1 - _LEAST) * (places + draw.random(places.shape)) / _RANDOM
    return [_mask(graph, layers, row.tolist()) for row in shares]


def _mask(graph: Graph, layers: list[np.ndarray], shares: list[float]) -> Mask:
    removed: Mask = np.zeros(len(graph.root), np.bool_)
    for groups, share in zip(layers, shares, strict=True):
        keep = max(1, round(share * len(groups)))
        if len(groups) >= 2 * _STEP:
            keep = min(len(groups), max(_STEP, round(keep / _STEP) * _STEP))
        removed[groups[keep:]] = True
    for axis in graph.axes.axes:  # nothing may be emptied
        groups = graph.root[axis.span]
        if removed[groups].all():
            removed[groups] = False
    return removed
