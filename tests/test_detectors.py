"""torchvision's detectors, with a small backbone: lists of images go in, lists of dicts come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Detection
from secateur.repair import Repair
from tests.oracle import zeroed

detection = pytest.importorskip("torchvision.models.detection")


class Backbone(nn.Module):
    """Two feature maps of different sizes."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 32, 3, 2, 1))
        self.two = nn.Sequential(nn.ReLU(), nn.Conv2d(32, 20, 3, 2, 1), nn.ReLU(), nn.Conv2d(20, 32, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.one(x)
        return {"0": first, "1": self.two(first)}


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    anchors = detection.anchor_utils.AnchorGenerator(((16,), (32,)), ((0.5, 1.0, 2.0),) * 2)
    sizes = {"min_size": 48, "max_size": 64}
    few = {
        "rpn_post_nms_top_n_test": 12,
        "box_detections_per_img": 4,
        "box_score_thresh": 0.0,
        "rpn_anchor_generator": anchors,
    }
    rcnn = {"fasterrcnn": "FasterRCNN", "maskrcnn": "MaskRCNN", "keypointrcnn": "KeypointRCNN"}
    if family in rcnn:
        kind, boxes = getattr(detection, rcnn[family]), detection.faster_rcnn
        more: dict[str, Any] = {}
        if family == "maskrcnn":
            masks = detection.mask_rcnn
            more = {
                "mask_head": masks.MaskRCNNHeads(32, (16, 16), 1),
                "mask_predictor": masks.MaskRCNNPredictor(16, 16, 4),
            }
        if family == "keypointrcnn":
            points = detection.keypoint_rcnn
            more = {
                "keypoint_head": points.KeypointRCNNHeads(32, (16, 16)),
                "keypoint_predictor": points.KeypointRCNNPredictor(16, 5),
            }
        more |= {"box_head": boxes.TwoMLPHead(32 * 7 * 7, 24), "box_predictor": boxes.FastRCNNPredictor(24, 4)}
        net = kind(Backbone(), **sizes, **few, **more)
    elif family == "retinanet":
        net = detection.RetinaNet(
            Backbone(), 4, anchor_generator=anchors, score_thresh=0.0, detections_per_img=6, **sizes
        )
    elif family == "fcos":
        points = detection.anchor_utils.AnchorGenerator(((16,), (32,)), ((1.0,),) * 2)
        net = detection.FCOS(Backbone(), 4, anchor_generator=points, score_thresh=0.0, detections_per_img=6, **sizes)
    else:
        boxes = detection.anchor_utils.DefaultBoxGenerator([[2], [2]])
        head = (
            detection.ssd.SSDHead([32, 32], [4, 4], 4)
            if family == "ssd"
            else detection.ssdlite.SSDLiteHead([32, 32], [4, 4], 4, nn.BatchNorm2d)
        )
        net = detection.ssd.SSD(Backbone(), boxes, (48, 64), 4, head=head, score_thresh=0.0, detections_per_img=6)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.5, 1.5)
    return net.eval()


def images(count: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 48, 56 + 8 * (i % 2), generator=draw) for i in range(count)]


def batch(net: nn.Module, seed: int) -> tuple[tuple[Tensor, ...], tuple[dict[str, Tensor], ...]]:
    """As torchvision's loaders make it. The targets are what the network finds itself."""
    given = images(2, seed)
    with torch.no_grad():
        return tuple(given), tuple({name: one[name][:2] for name in ("boxes", "labels")} for one in net(given))


FAMILIES = ["fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd", "ssdlite"]


@pytest.mark.parametrize("family", FAMILIES)
def test_removal_is_masking_in_every_detector(family: str, tmp_path: Path) -> None:
    net = build(family)
    graph = sc.analyze(net, (images(1),))
    scores = sc.score(net, None, "weight", graph=graph)
    plan = sc.plan(graph, scores, remove=0.3)
    small, masked = sc.apply(net, plan), zeroed(net, graph, plan)
    fresh = [torch.rand(3, 60, 48), torch.rand(3, 50, 64)]
    for mine, wanted in zip(_answers(small, fresh), _answers(masked, fresh), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)
    assert plan.after.macs < plan.before.macs
    sc.save(small, tmp_path / "m")
    again = sc.load(tmp_path / "m", build(family)).eval()
    for mine, wanted in zip(_answers(again, fresh), _answers(small, fresh), strict=True):
        assert torch.equal(mine, wanted)
    losses = small.train()(fresh, [_target(family, image) for image in fresh])
    sum(losses.values()).backward()
    assert sum(p.grad is not None for p in small.parameters()) > 10


def _answers(net: nn.Module, given: list[Tensor]) -> list[Tensor]:
    """What its heads return. Which boxes are left in the end, rounding may decide."""
    heads: list[Tensor] = []
    names = ("cls_logits", "bbox_pred", "bbox_reg", "cls_score")
    hooks = [
        module.register_forward_hook(lambda m, i, o: heads.append(o))
        for path, module in net.named_modules()
        if path.endswith(names)
    ]
    with torch.no_grad():
        found = net(given)
    for hook in hooks:
        hook.remove()
    assert all(len(one["boxes"]) for one in found)
    return heads


def _target(family: str, image: Tensor) -> dict[str, Tensor]:
    known: dict[str, Tensor] = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 44.0]]), "labels": torch.tensor([1])}
    if family == "maskrcnn":
        known["masks"] = torch.ones(1, *image.shape[1:], dtype=torch.uint8)
    if family == "keypointrcnn":
        known["keypoints"] = torch.full((1, 5, 3), 20.0)
    return known


@pytest.mark.filterwarnings("ignore::secateur.errors.ConservationWarning")  # FCOS multiplies two scores
@pytest.mark.parametrize("family", ["fasterrcnn", "maskrcnn", "retinanet", "fcos", "ssd"])
def test_a_loader_of_torchvision_prunes_a_detector_by_relevance(family: str) -> None:
    net = build(family)
    loader = [batch(net, seed) for seed in range(3)]
    result = sc.prune(net, loader, LRP(start=Detection()), remove=0.3, repair=Repair("mean", copies=0), progress=False)
    assert result.plan is not None
    assert result.plan.after.macs < result.plan.before.macs
    found: Any = result.model(images(2, 7))
    assert all({"boxes", "labels", "scores"} <= set(one) for one in found)
