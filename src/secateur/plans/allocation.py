"""Allocation: in which order groups leave, so that what is kept of the relevance is worth most for what it costs."""

from __future__ import annotations

import numpy as np

from secateur.ops.layers import Labels, Mask
from secateur.plans.scores import Values
from secateur.structure.cost import Price
from secateur.structure.graph import Graph, Layer

# How much of the cost leaves before everything is weighed again.
_SHARE = 0.02
#: How much dearer the rest of a layer becomes as the layer loses relevance: by (whole / rest) to this power. With 1,
#: what is maximised is the sum over layers of relevance · log(share of it that is kept): no layer is emptied cheaply.
BALANCE = 1.0
#: The same for heads, in models with attention; neurons keep their worth there. Heads alone carry anything from token
#: to token, so that the last ones of a layer are worth far more than their relevance: MiniLM at half its size
#: would keep one per layer.
HEAD_BALANCE = 3.0


def order_by_price(
    graph: Graph,
    candidates: Labels,
    worth: Values,
    gone: Mask,
    price: Price,
    until: float = 0.0,
    by_heads: bool = False,
) -> Labels:
    """The candidates, those first that lose least for what they save, until the cost is `until`; then the rest.

    `worth` is the score of each candidate. A greedy knapsack: what a group saves depends on the widths of its
    neighbours, and what it is worth on what is left of its layer, so both are weighed again as the model shrinks. With
    `by_heads`, only heads and filters become dearer with what is left.
    """
    removed: Mask = gone.copy()
    balance = np.full(len(graph.layers) + 1, BALANCE)
    if by_heads:
        neurons = {site.path for maker in graph.producers if maker.kind == "neuron" for site in maker.sites}
        balance = np.array([_balance(layer, neurons) for layer in graph.layers] + [0.0])
    layer_of = np.full(len(graph.root), len(graph.layers), np.int64)  # all blocks together are such a layer
    for number, layer in enumerate(graph.layers):
        layer_of[layer.groups] = number
    home = layer_of[candidates]
    worth = np.maximum(worth, 0.0)
    whole = np.bincount(home, worth, len(graph.layers) + 1)
    inside = {block.group: np.isin(candidates, block.groups) for block in graph.branches if block.group in candidates}
    left = whole.copy()
    waiting = np.ones(len(candidates), np.bool_)
    order: list[Labels] = []
    cost = price(removed)
    while waiting.any():
        saved = price.savings(removed)[candidates]
        scarce = (whole / np.maximum(left, 1e-9 * np.maximum(whole, 1e-30))) ** balance
        # What saves nothing is not worth its score, however low: it leaves last, not first.
        least = 1e-6 * max(float(saved.max()), 1e-30)
        key = np.where(waiting, worth * scarce[home] / np.maximum(saved, least), np.inf)
        ranked = np.argsort(key, kind="stable")[: int(np.count_nonzero(waiting))]
        if cost > until:
            ranked = ranked[: 1 + int(np.searchsorted(np.cumsum(saved[ranked]), _SHARE * cost))]
        leaving = np.zeros(len(candidates), np.bool_)
        leaving[ranked] = True
        for group in candidates[ranked].tolist():
            if group in inside:  # what lies in a block leaves with it, at no further cost
                leaving |= inside[group] & waiting
        ranked = np.concatenate([ranked, np.setdiff1d(np.flatnonzero(leaving), ranked)])
        order.append(candidates[ranked])
        waiting[ranked] = False
        removed[candidates[ranked]] = True
        left -= np.bincount(home[ranked], worth[ranked], len(left))
        cost = price(removed)
    return np.concatenate([np.zeros(0, np.int64), *order])


def _balance(layer: Layer, neurons: set[str]) -> float:
    """How a layer of a model with attention becomes dearer. `neurons` are the paths of linear layers: the stream of a
    vision transformer, which begins with a convolution, is no layer of filters."""
    if layer.kind == "filter" and neurons.isdisjoint(layer.paths):
        return BALANCE
    return HEAD_BALANCE if layer.kind == "head" else 0.0
