"""A YOLO goes on in Ultralytics. Its package is not needed here: what matters of it is written out."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.criteria import LRP, Detection
from secateur.errors import ModelError, UnsupportedModelError
from secateur.integrations.ultralytics import put, trainer_of
from secateur.models.zoo import fresh


class Conv(nn.Module):
    def __init__(self, before: int, after: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(after), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class C2f(nn.Module):
    """As Ultralytics has it: `forward_split` is the forward of its export."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.c = after // 2
        self.cv1, self.cv2 = Conv(before, 2 * self.c), Conv(3 * self.c, after)
        self.m = nn.ModuleList([nn.Sequential(Conv(self.c, self.c, 3), Conv(self.c, self.c, 3))])

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(y[-1] + m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))

    def forward_split(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).split((self.c, self.c), 1))
        y.extend(y[-1] + m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class Detect(nn.Module):
    """Boxes by distributions over distances, and classes, on two feature maps."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.nc, self.reg_max = classes, 8
        self.cv2 = nn.ModuleList(nn.Sequential(Conv(w, 16, 3), nn.Conv2d(16, 4 * self.reg_max, 1)) for w in widths)
        self.cv3 = nn.ModuleList(nn.Sequential(Conv(w, 16, 3), nn.Conv2d(16, classes, 1)) for w in widths)

    def forward(self, x: list[Tensor]) -> Any:
        x = [torch.cat([a(level), b(level)], 1) for a, b, level in zip(self.cv2, self.cv3, x, strict=True)]
        flat = torch.cat([level.flatten(2) for level in x], 2)
        boxes, classes = flat.split((4 * self.reg_max, self.nc), 1)
        steps = torch.arange(self.reg_max, dtype=flat.dtype, device=flat.device).view(1, 1, -1, 1)
        far = (boxes.view(len(flat), 4, self.reg_max, -1).softmax(2) * steps).sum(2)
        places = torch.arange(flat.shape[2], device=flat.device, dtype=flat.dtype) % 8 + 0.5
        low, high = places - far[:, :2], places + far[:, 2:]
        return torch.cat([(low + high) / 2 * 8, (high - low) * 8, classes.sigmoid()], 1), x


class DetectionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleList(
            [Conv(3, 16, 3, 2), C2f(16, 24), Conv(24, 32, 3, 2), C2f(32, 32), Detect(3, (24, 32))]
        )
        self.names = {0: "a", 1: "b", 2: "c"}

    def forward(self, x: Tensor) -> Any:
        first = self.model[1](self.model[0](x))
        return self.model[4]([first, self.model[3](self.model[2](first))])


class DetectionTrainer:
    data: ClassVar[dict[str, int]] = {"nc": 3}

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
        return DetectionModel()  # built anew, as wide as the YAML file says


def yolo() -> Any:
    return SimpleNamespace(model=DetectionModel().eval(), predictor="old", _smart_load=lambda key: DetectionTrainer)


X = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TARGETS = [{"boxes": torch.tensor([[4.0, 4, 40, 44]]), "labels": torch.tensor([i % 3])} for i in range(4)]


def test_a_smaller_yolo_is_trained_and_exported_as_it_is() -> None:
    whole = yolo()
    result = sc.prune(whole.model, [(X, TARGETS)], remove=0.4, progress=False)
    small = put(whole, result.model).model
    assert small is result.model
    assert whole.predictor is None
    plain = small(X)[0]
    for block in small.modules():  # as the export of Ultralytics does
        if isinstance(block, C2f):
            block.forward = block.forward_split
    assert torch.equal(small(X)[0], plain)
    assert trainer_of(whole)().get_model("yolo.yaml", None) is small
    small(X)[0].sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_boxes_and_classes_both_count() -> None:
    scores = sc.score(DetectionModel().eval(), [(X, TARGETS)], LRP(start=Detection()))
    heads = {site.path: values for site, values in scores.units.items() if site.path.startswith("model.4")}
    assert len(heads) == 8
    boxes, classes = (
        {p: v.sum() for p, v in heads.items() if p.startswith(f"model.4.{name}.1")} for name in ("cv2", "cv3")
    )
    assert min(boxes.values()) == pytest.approx(max(classes.values()), rel=1e-3)  # each box starts at both


def test_other_models_and_other_classes_are_refused() -> None:
    whole = yolo()
    with pytest.raises(UnsupportedModelError, match="holds a DetectionModel"):
        put(whole, nn.Linear(2, 2))
    trainer = trainer_of(whole)
    trainer.data = {"nc": 5}
    with pytest.raises(UnsupportedModelError, match="5 classes"):
        trainer().get_model()


def test_a_yolo_itself_is_no_network() -> None:
    kind = type("YOLO", (nn.Module,), {"__module__": "ultralytics.engine.model"})
    with pytest.raises(UnsupportedModelError, match=r"prune\(yolo.model"):
        sc.analyze(kind(), X)


def test_the_command_line_says_why_it_reads_no_yolo() -> None:
    with pytest.raises(ModelError, match=r"pickled.*YOLO\(FILE\)\.model"):
        fresh("yolo:yolo11n.pt")


def test_the_package_never_imports_ultralytics() -> None:
    code = "import sys, secateur.integrations.ultralytics, secateur.cli; print('ultralytics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
