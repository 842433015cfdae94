"""The networks of the image experiments: made by name, with weights from a file; and their parts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from secateur.errors import FileFormatError, UnsupportedModelError
from secateur.models.weights import fill, read_weights
from secateur.models.zoo import fresh

#: The paper's networks. Any other model text that `secateur.models` understands works too.
NAMES = ("alexnet", "vgg16", "resnet18", "resnet50")


def network(name: str, weights: str | Path | None = None, early_strides: bool = False) -> tuple[nn.Module, bool]:
    """A network by name, and whether its classifier is trained.

    `weights` is a file, or "default" for torchvision's download. A file may lack the classifier (keys that start with
    `classifier.`); the classifier then keeps its initial weights. `early_strides` is for weights of the original
    ResNet-50: its bottlenecks have the stride in the first convolution, those of torchvision in the second.
    """
    spec = f"torchvision:{name}" if name in NAMES else name
    model = fresh(spec, pretrained=str(weights) == "default")
    if early_strides:
        _stride_early(model)
    if weights is None or str(weights) == "default":
        return model, weights is not None
    state = read_weights(weights)
    own = model.state_dict()
    missing = [key for key in own if key not in state]
    if missing and all(key.startswith("classifier.") for key in missing) and set(state) <= set(own):
        wrong = [key for key in state if own[key].shape != state[key].shape]
        if wrong:
            raise FileFormatError(
                f"{weights} does not fit {name}: `{wrong[0]}` has shape {tuple(state[wrong[0]].shape)}."
            )
        model.load_state_dict(state, strict=False)
        return model, False
    fill(model, weights)
    return model, True


def _stride_early(model: nn.Module) -> None:
    moved = 0
    for module in model.modules():
        first, second = getattr(module, "conv1", None), getattr(module, "conv2", None)
        if hasattr(module, "conv3") and isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d):
            first.stride, second.stride = second.stride, first.stride
            moved += 1
    if not moved:
        raise UnsupportedModelError(f"{type(model).__name__} has no bottlenecks, so --early-strides does not apply.")


def with_classes(model: nn.Module, classes: int) -> nn.Module:
    """Replace the last linear layer, in place. All layers of a `classifier` get new weights."""
    name, last = _last_linear(model)
    fitting = nn.Linear(last.in_features, classes)
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], fitting)
    if is_split(model):
        for module in model.classifier.modules():  # type: ignore[union-attr]
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return model


def small_stem(model: nn.Module) -> nn.Module:
    """Make a ResNet fit images of 32², as in the paper: a first convolution of 3² without stride, no max-pool."""
    first = getattr(model, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(model, "maxpool"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a ResNet: it lacks `conv1` or `maxpool`.")
    model.conv1 = nn.Conv2d(first.in_channels, first.out_channels, 3, 1, 1, bias=first.bias is not None)
    model.maxpool = nn.Identity()
    return model


def is_split(model: nn.Module) -> bool:
    """Whether the network has `features` and a `classifier`, as VGG and AlexNet do."""
    return all(isinstance(getattr(model, part, None), nn.Module) for part in ("features", "classifier"))


class Features(nn.Module):
    """Everything before the classifier of VGG or AlexNet."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.features: nn.Module = model.features  # type: ignore[assignment]
        pool = getattr(model, "avgpool", None)
        self.avgpool = pool if isinstance(pool, nn.Module) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """One vector per image."""
        return torch.flatten(self.avgpool(self.features(x)), 1)


def parts(model: nn.Module) -> dict[str, list[str]]:
    """Paths of the convolutions, and of all linear layers except the last."""
    last = _last_linear(model)[0]
    found: dict[str, list[str]] = {"conv": [], "fc": []}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            found["conv"].append(name)
        elif isinstance(module, nn.Linear) and name != last:
            found["fc"].append(name)
    return found


def kept(model: nn.Module) -> dict[str, int]:
    """How many filters each convolution still has: those with a weight that is not 0."""
    return {
        name: int((module.weight.detach().flatten(1) != 0).any(1).sum())
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    }


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layer, so there is no classifier to replace."
        )
    return found[-1]
