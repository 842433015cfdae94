"""One architecture of each family that does not classify images: `benchmarks.zoo --beyond` without its exports.

What needs other packages (ultralytics, segmentation_models_pytorch, monai, torchaudio, diffusers) runs where these are.
"""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import zoo_beyond
from benchmarks.beyond import catalogue

#: By family one that is quick, and the share of its MACs that may leave at least.
FAMILIES = {
    "torchvision:lraspp_mobilenet_v3_large": 0.99, "ultralytics:yolo11n": 0.95,
    "smp:Unet-resnet18": 0.99, "monai:BasicUNet": 0.99, "torchaudio:ConvTasNet": 0.99, "diffusers:UNet2DModel": 0.9,
    "transformers:detr": 0.99, "transformers:segformer": 0.99, "transformers:timesformer": 0.99,
    "own:unet": 0.99, "own:pointnet": 0.99, "own:dcgan-generator": 0.99, "own:lstm": 0.99, "own:wavenet": 0.99,
    "own:graph-network": 0.99, "own:siamese": 0.99, "own:style-generator": 0.99,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_beyond_classification(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"smp": "segmentation_models_pytorch", "own": "torch"}.get(name.split(":")[0], name.split(":")[0])
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert name in catalogue()
    monkeypatch.setattr(zoo_beyond, "_ONNX_SECONDS", 0)
    row = zoo_beyond.mill(name)
    assert row.get("ok"), row
    assert row["free"] >= FAMILIES[name]
