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
from torchvision.models.video.swin_transformer import SwinTransformer3d


def swin(**options: Any) -> nn.Module:
    return SwinTransformer([4, 4], 12, [2, 2], [3, 3], [4, 4], num_classes=5, stochastic_depth_prob=0.0, **options)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "maxvit":
        model: nn.Module = MaxVit((32, 32), 8, 4, [12], [1], 4, 0.0, num_classes=5)
    elif name == "swin 3d":
        model = SwinTransformer3d([2, 4, 4], 12, [2, 2], [3, 3], [2, 4, 4], num_classes=5, stochastic_depth_prob=0.0)
    elif name == "swin v2":
        model = swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)
    else:
        model = swin()
    return randomise(model).double().eval()


def pictures(*size: int) -> Tensor:
    return torch.randn(2, 3, *size or (32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


#: What they run on: with a shift, with padding, and with a single window.
SIZES: dict[str, list[tuple[int, ...]]] = {
    "swin": [(32, 32), (40, 40), (16, 16)],
    "swin v2": [(32, 32), (40, 40), (16, 16)],
    "swin 3d": [(8, 32, 32), (6, 40, 24), (2, 16, 16)],
    "maxvit": [(32, 32)],
}


@pytest.mark.parametrize("name", SIZES)
def test_heads_and_stream_leave(name: str) -> None:
    model, x = build(name), pictures(*SIZES[name][0])
    graph = sc.analyze(model, x)
    kinds = {layer.kind for layer in graph.layers if layer.prunable and ("attn" in layer.name or layer.kind == "head")}
    assert ("head" in kinds) == (name != "swin v2")  # which writes into a part of a bias at fixed places
    assert max(len(layer.paths) for layer in graph.layers if layer.prunable) > 3  # the stream
    plan = sc.plan(graph, random_scores(graph), remove=0.4)
    small, masked = sc.apply(model, plan), zeroed(model, graph, plan)
    for size in SIZES[name]:
        with torch.no_grad():
            assert relative_gap([small(pictures(*size))], [masked(pictures(*size))]) < 1e-9
    assert sc.measure(small, x, latency=False) == plan.after
    other = pickle.loads(pickle.dumps(copy.deepcopy(small)))
    torch.testing.assert_close(other(x), small(x))
    other.train()(x).sum().backward()


def test_a_smaller_model_is_pruned_again_and_explained() -> None:
    model = build("swin")
    for _ in range(2):
        graph = sc.analyze(model, pictures())
        model = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.3))
    seen = sc.explain(model.float(), pictures().float(), 1)
    assert torch.isfinite(seen.input).all()


def test_a_smaller_model_is_traced_for_batches_of_any_size() -> None:
    model, x = build("swin 3d"), pictures(2, 16, 16)
    graph = sc.analyze(model, x)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.3))
    program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim("samples", min=2)},))
    more = torch.cat([x, x.flip(0)])
    torch.testing.assert_close(program.module()(more), small(more))
