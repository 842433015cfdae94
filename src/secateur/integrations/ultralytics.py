"""A smaller YOLO goes on in Ultralytics: its training, its `.pt` files, its export.

from ultralytics import YOLO
from secateur.integrations.ultralytics import put, trainer_of

yolo = YOLO("yolo11n.pt")
result = secateur.prune(yolo.model, data, keep={"macs": 0.7})
put(yolo, result.model)
yolo.train(data="coco128.yaml", trainer=trainer_of(yolo))
yolo.export(format="onnx")

Ultralytics is AGPL-3.0. It is not imported: whoever has a YOLO has imported it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from secateur.errors import UnsupportedModelError


def put(yolo: Any, small: nn.Module) -> Any:
    """Let a `YOLO` have a smaller model from now on. Returns it.

    Some modules of Ultralytics note their width for a second forward that its export uses: it is noted anew.
    """
    before = getattr(yolo, "model", None)
    if not isinstance(before, nn.Module) or type(before) is not type(small):
        what = (
            f"{type(yolo).__name__} holds a {type(before).__name__}, and the smaller model is a {type(small).__name__}."
        )
        raise UnsupportedModelError(what, fix="yolo = YOLO(…); small = prune(yolo.model, …).model; put(yolo, small)")
    for module in small.modules():
        if hasattr(module, "forward_split") and hasattr(module, "c"):
            setattr(module, "c", _outputs(module.cv1) // 2)  # noqa: B010 (to mypy, attributes of modules are tensors)
    for name in ("names", "stride", "args", "task", "nc", "yaml"):  # what its trainer has set
        if hasattr(before, name) and not hasattr(small, name):
            setattr(small, name, getattr(before, name))
    yolo.model = small.requires_grad_(True)
    yolo.predictor = None  # it holds the other one
    return yolo


def _outputs(block: Any) -> int:
    return int(getattr(block, "conv", block).out_channels)


def trainer_of(yolo: Any) -> type[Any]:
    """A trainer for `yolo.train(trainer=…)` that trains the model as it is. The usual one builds that of the YAML file
    anew, and drops weights that do not fit."""
    usual, own = yolo._smart_load("trainer"), yolo.model

    class Trainer(usual):  # type: ignore[misc, valid-type]
        """Trains a smaller model."""

        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
            """The smaller model, whatever the YAML file says."""
            classes, known = (getattr(self, "data", None) or {}).get("nc"), getattr(own.model[-1], "nc", None)
            if classes is not None and known is not None and classes != known:
                what = f"the data have {classes} classes, and the smaller model has {known}."
                raise UnsupportedModelError(what, fix="train the original on these classes, then prune it")
            return own  # type: ignore[no-any-return]

    return Trainer
