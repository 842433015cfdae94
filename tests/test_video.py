"""Relevance of networks for videos and of DETR: finite numbers, and nothing is lost. Random weights and small sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from constructs import randomise
from secateur.criteria import LRP, Detection
from secateur.relevance import explain

video = pytest.importorskip("torchvision.models.video")

Net = Callable[[], nn.Module]


class Pooled(nn.Module):
    """A body, the mean over time and space, and a classifier."""

    def __init__(self, width: int, *body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3, 4)))  # type: ignore[no-any-return]


def r3d() -> nn.Module:
    plain = video.resnet.Conv3DSimple
    shorter = nn.Sequential(nn.Conv3d(64, 16, 1, 2, bias=False), nn.BatchNorm3d(16))
    blocks = video.resnet.BasicBlock(64, 16, plain, 2, shorter), video.resnet.BasicBlock(16, 16, plain)
    return Pooled(16, video.resnet.BasicStem(), *blocks)


def s3d() -> nn.Module:
    parts = import_module("torchvision.models.video.s3d")  # in the package, a function has its name
    norm = partial(nn.BatchNorm3d, eps=0.001)
    first = parts.TemporalSeparableConv(3, 8, 3, 2, 1, norm)
    return Pooled(20, first, parts.SepInceptionBlock3D(8, 6, 4, 6, 4, 4, 4, norm))


def mvit() -> nn.Module:
    blocks = [
        video.mvit.MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        video.mvit.MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return video.MViT((32, 32), 4, blocks, True, False, True, True, dropout=0.0, num_classes=5)  # type: ignore[no-any-return]


def swin3d() -> nn.Module:
    return video.SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=5)  # type: ignore[no-any-return]


VIDEO: dict[str, Net] = {"r3d": r3d, "s3d": s3d, "mvit": mvit, "swin3d": swin3d}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomise(VIDEO[name]().eval())


@pytest.mark.parametrize("composite", ["alpha1beta0", "attnlrp"])
@pytest.mark.parametrize("name", VIDEO)
def test_relevance_of_a_video_is_finite_and_conserved(name: str, composite: str) -> None:
    frames = torch.randn(2, 3, 4, 32, 32, generator=torch.Generator().manual_seed(1))
    seen = explain(build(name), frames, target=[1, 3], composite=composite)
    books = seen.conservation
    assert seen.input.shape == frames.shape
    assert bool(torch.isfinite(seen.input).all())
    assert all(bool(torch.isfinite(units).all()) for units in seen.units.values())
    assert float(seen.input.abs().sum()) > 0
    assert books.worst <= 0.01, str(books)
    assert books.input + books.absorbed == pytest.approx(books.start, rel=0.01)


def test_detr_is_scored_by_the_boxes_that_match() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    body = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    settings = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 6, "num_labels": 4,
    }  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=body, **settings
    )
    net = transformers.DetrForObjectDetection(config).eval()
    images = torch.rand(3, 3, 64, 64)
    targets = [
        {"class_labels": torch.tensor([i % 4, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.6], [0.2, 0.3, 0.2, 0.2]])}
        for i in range(3)
    ]
    data = [(images, targets)]
    graph = sc.analyze(net, images[:1])
    scores = sc.score(net, data, LRP(start=Detection()), graph=graph)
    assert all(bool(np.isfinite(np.asarray(units)).all()) for units in scores.units.values())
    assert scores.conservation is not None
    assert scores.conservation.worst <= 0.01, str(scores.conservation)
    worth = {site.path: float(np.abs(np.asarray(units)).sum()) for site, units in scores.units.items()}
    reading = ("class_labels_classifier", "bbox_predictor.layers.0", "model.encoder.layers.0.mlp.fc1")
    assert all(worth[path] > 0 for path in reading if path in worth), worth
    others = [(images, [{**target, "class_labels": (target["class_labels"] + 1) % 4} for target in targets])]
    again = sc.score(net, others, LRP(start=Detection()), graph=graph)
    assert any(
        not np.allclose(np.asarray(units), np.asarray(again.units[site])) for site, units in scores.units.items()
    )
    small = sc.apply(net, sc.plan(graph, scores, remove=0.3))
    assert small(images).pred_boxes.shape == (3, 6, 4)
