"""Attention in windows, as torchvision has it: heads and channels of the stream may leave."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from constructs import randomise
from oracle import random_scores, relative_gap, zeroed

pytest.importorskip("torchvision")
from torchvision.models.maxvit import MaxVit
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2


def swin(**options: Any) -> nn.Module:
    return SwinTransformer([4, 4], 12, [2, 2], [3, 3], [4, 4], num_classes=5, stochastic_depth_prob=0.0, **options)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "maxvit":
        model: nn.Module = MaxVit((32, 32), 8, 4, [12], [1], 4, 0.0, num_classes=5)
    elif name == "swin v2":
        model = swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)
    else:
        model = swin()
    return randomise(model).double().eval()


def pictures(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", ["swin", "swin v2", "maxvit"])
def test_heads_and_stream_leave(name: str) -> None:
    model = build(name)
    graph = sc.analyze(model, pictures())
    kinds = {layer.kind for layer in graph.layers if layer.prunable and ("attn" in layer.name or layer.kind == "head")}
    assert ("head" in kinds) == (name != "swin v2")  # which writes into a part of a bias at fixed places
    assert max(len(layer.paths) for layer in graph.layers if layer.prunable) > 3  # the stream
    plan = sc.plan(graph, random_scores(graph), remove=0.4)
    small, masked = sc.apply(model, plan), zeroed(model, graph, plan)
    sizes = (32,) if name == "maxvit" else (32, 40, 16)  # with a shift, with padding, and with a single window
    for size in sizes:
        with torch.no_grad():
            assert relative_gap([small(pictures(size))], [masked(pictures(size))]) < 1e-9
    assert sc.measure(small, pictures(), latency=False) == plan.after
    other = pickle.loads(pickle.dumps(copy.deepcopy(small)))
    torch.testing.assert_close(other(pictures()), small(pictures()))
    other.train()(pictures()).sum().backward()


def test_a_smaller_model_is_pruned_again_and_explained() -> None:
    model = build("swin")
    for _ in range(2):
        graph = sc.analyze(model, pictures())
        model = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.3))
    seen = sc.explain(model.float(), pictures().float(), 1)
    assert torch.isfinite(seen.input).all()
