"""What pruning changed in how a network sees: heat maps before and after, regions, units."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import DataError
from secateur.plans.plan import Plan
from secateur.relevance.composites import Composite
from secateur.relevance.engine import Start
from secateur.relevance.explain import Explanation, bound, explain, starter, visible
from secateur.relevance.rules import Rule
from secateur.relevance.weights import path_of
from secateur.running.batches import Data, as_data, batches, is_pair
from secateur.running.devices import device_of, to_device
from secateur.running.logits import one_output

Names = Sequence[str] | Mapping[int, str] | None
Map = np.ndarray[Any, Any]

_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
_LISTED = 5  # units of each kind
_LARGEST = 320  # pixels on a side
_COARSE = 64  # below this, pixels are shown as squares


@dataclass(frozen=True)
class Sample:
    """One input: its picture and heat maps as PNG, what the network said before and after, where it looks now."""

    label: str
    said: tuple[str, str] | None
    picture: bytes
    before: bytes
    after: bytes
    change: bytes
    agreement: float
    gained: tuple[str, float]
    lost: tuple[str, float]
    coarse: bool


@dataclass(frozen=True)
class UnitChange:
    """A unit, by its layer and its place in the unpruned network, and its share of all relevance."""

    layer: str
    index: int
    before: float
    after: float | None


@dataclass(frozen=True)
class Changes:
    """Samples, the one that changed most first; units that left with the most relevance, and those that gained most.

    `left` says for each layer which share of its relevance was that of the units that left.
    """

    samples: Sequence[Sample]
    count: int
    removed: Sequence[UnitChange]
    gained: Sequence[UnitChange]
    left: Mapping[str, float]

    @property
    def hardest_hit(self) -> str:
        """The layer whose removed units had the largest share; empty if none left."""
        return max(self.left, key=lambda layer: self.left[layer], default="")


def some_of(data: Data, count: int) -> tuple[Tensor, Tensor | None]:
    """A few samples, as many classes as can be among them: the first of each class, then the second, …"""
    data = as_data(data)
    inputs, targets = data if is_pair(data) else next(iter(islice(batches(data), 1)), (None, None))
    if not isinstance(inputs, Tensor):
        raise DataError(
            f"heat maps need a tensor of inputs, not {type(inputs).__name__}.",
            fix="leave out data=, or give inputs=(x, y) if the model takes one tensor",
        )
    if not isinstance(targets, Tensor):
        return inputs[:count], targets
    if targets.dim() != 1:
        return inputs[:count], targets[:count] if targets.dim() else targets
    seen: dict[int, int] = {}
    order = []
    for place, target in enumerate(targets.tolist()):
        seen[target] = seen.get(target, -1) + 1
        order.append((seen[target], place))
    index = torch.tensor(sorted(place for _, place in sorted(order)[:count]), device=inputs.device)
    return inputs[index], targets[index.to(targets.device)]


def changes(
    original: nn.Module,
    small: nn.Module,
    plan: Plan | None,
    inputs: tuple[Tensor, Tensor | None],
    *,
    classes: Names = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    composite: str | Composite | Rule = "alpha1beta0",
) -> Changes:
    """Explain the same inputs with both networks and compare. Each sample starts with relevance 1 at its class."""
    x, y = (to_device(part, device_of(original)) for part in inputs)
    if not isinstance(x, Tensor) or not len(x):
        raise DataError("there is no input to explain: give inputs=(x, y) with at least one sample.")
    if x.dim() == 4:
        check_scale(x, mean, std)
    before = explain(original, x, None if y is None else _begin(y, len(x)), composite=composite)
    target = y
    if y is None and not one_output(before.output, len(x)):
        target = before.output.argmax(1)
    place = device_of(small)
    begin = None if target is None else _begin(to_device(target, place), len(x))
    after = explain(small, to_device(x, place), begin, composite=composite)
    samples = _samples(before, after, x, y, classes, mean, std) if x.dim() == 4 else []
    removed, gained, total = _units(original, before, after, plan)
    return Changes(sorted(samples, key=lambda s: s.agreement), len(x), removed, gained, total)


def _begin(target: Tensor, samples: int) -> Start:
    """Relevance starts at the target; at the only output of a model whatever the target is, as in scoring."""
    return lambda output: starter(None if one_output(output, samples) else target, samples=samples)(output)


# -- pictures ----------------------------------------------------------------------------------------------------------
def _samples(
    before: Explanation, after: Explanation, x: Tensor, y: Tensor | None, classes: Names,
    mean: Sequence[float] | None, std: Sequence[float] | None,
) -> list[Sample]:  # fmt: skip
    pictures = _shown(x, mean, std)
    said_before, said_after = (_said(seen.output, classes) for seen in (before, after))
    made = []
    for i, (old, new) in enumerate(zip(_maps(before), _maps(after), strict=True)):
        limit = max(bound(old), bound(new))
        change = share(new) - share(old)
        cells = regions(change)
        most, least = max(cells, key=lambda name: cells[name]), min(cells, key=lambda name: cells[name])
        made.append(
            Sample(
                "" if y is None or y.dim() != 1 else name_of(int(y[i]), classes),
                (said_before[i], said_after[i]) if said_before and said_after else None,
                _png(pictures[i]),
                _coloured(old, limit, "seismic"),
                _coloured(new, limit, "seismic"),
                _coloured(torch.from_numpy(change), bound(torch.from_numpy(change)), "PuOr_r"),
                agreement(old.numpy(), new.numpy()),
                (most, cells[most]),
                (least, cells[least]),
                max(old.shape) < _COARSE,
            )
        )
    return made


def _maps(seen: Explanation) -> Tensor:
    return seen.heat.detach().double().cpu()


def check_scale(x: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    """Mean and deviation of the pixels must fit the pictures."""
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) not in (1, x.shape[1]):
            raise DataError(f"{name} has {len(values)} numbers, but the pictures have {x.shape[1]} channels.")


def _shown(x: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> list[Any]:
    """The pictures as they were before normalisation."""
    plain = x.detach().float().cpu()
    if std is not None:
        plain = plain * torch.tensor(list(std)).view(1, -1, 1, 1)
    if mean is not None:
        plain = plain + torch.tensor(list(mean)).view(1, -1, 1, 1)
    if mean is not None or std is not None:
        plain = plain.clamp(0, 1)
    return [visible(image) for image in plain]


def _said(output: Tensor, classes: Names) -> list[str] | None:
    """The predicted class and its softmax, if the output is one number per class."""
    if output.dim() != 2 or output.shape[1] < 2:
        return None
    sure, which = output.detach().double().softmax(1).max(1)
    pairs = zip(which.tolist(), sure.tolist(), strict=True)
    return [f"{name_of(c, classes)} ({100 * p:.0f} %)" for c, p in pairs]


def name_of(number: int, classes: Names) -> str:
    """What a class is called; its number if it has no name."""
    if isinstance(classes, Mapping):
        return str(classes.get(number, number))
    return str(classes[number]) if classes is not None and number < len(classes) else str(number)


def _png(picture: Any) -> bytes:
    from PIL import Image

    image = Image.fromarray((255 * np.asarray(picture)).round().astype(np.uint8))
    image.thumbnail((_LARGEST, _LARGEST))
    content = io.BytesIO()
    image.save(content, "png", optimize=True)
    return content.getvalue()


def _coloured(heat: Tensor, limit: float, palette: str) -> bytes:
    """A heat map as PNG with a palette: 256 colours about 0."""
    from matplotlib import colormaps
    from PIL import Image

    levels = ((heat.numpy() / limit).clip(-1, 1) + 1) / 2 * 255
    image = Image.fromarray(levels.round().astype(np.uint8), "P")
    colours = colormaps[palette](np.arange(256))[:, :3]
    image.putpalette((255 * colours).round().astype(np.uint8).tobytes())
    content = io.BytesIO()
    image.save(content, "png", optimize=True)
    return content.getvalue()


# -- regions -----------------------------------------------------------------------------------------------------------
def share(heat: Tensor) -> Map:
    """Where the relevance is, whatever its sign, adding up to 1."""
    size = heat.abs().numpy()
    total = float(size.sum())
    return np.asarray(size / total if total > 0 else size)


def regions(change: Map) -> dict[str, float]:
    """The sum of a map in each ninth of it, by the name of the place.

    >>> list(regions(np.eye(3)).items())[:2]
    [('top left', 1.0), ('top centre', 0.0)]
    """
    found = {}
    for row, strip in zip(_ROWS, np.array_split(change, 3, 0), strict=True):
        for column, part in zip(_COLUMNS, np.array_split(strip, 3, 1), strict=True):
            found["centre" if (row, column) == ("middle", "centre") else f"{row} {column}"] = float(part.sum())
    return found


def agreement(a: Map, b: Map) -> float:
    """Pearson's correlation of two heat maps, pixel by pixel; 0 where one is flat."""
    x, y = a.ravel() - a.mean(), b.ravel() - b.mean()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size > 0 else 0.0


# -- units -------------------------------------------------------------------------------------------------------------
def _units(
    original: nn.Module, before: Explanation, after: Explanation, plan: Plan | None
) -> tuple[list[UnitChange], list[UnitChange], dict[str, float]]:
    removed: list[UnitChange] = []
    gained: list[UnitChange] = []
    totals: dict[str, float] = {}
    samples = len(before.output)
    for name, values in before.weights.items():
        old = values.detach().double().cpu().numpy() / samples
        new = after.weights.get(name)
        places = kept(original, name, len(old), plan)
        if new is None or len(new) != len(places):
            continue  # a layer whose units do not lie along one axis of its weight
        now = new.detach().double().cpu().numpy() / samples
        layer = path_of(name)
        gone = np.setdiff1d(np.arange(len(old)), places)
        if len(gone):
            totals[layer] = float(old[gone].sum())
        removed += [UnitChange(layer, int(i), float(old[i]), None) for i in gone]
        gained += [UnitChange(layer, int(i), float(old[i]), float(n)) for i, n in zip(places, now, strict=True)]
    removed.sort(key=lambda unit: -unit.before)
    gained.sort(key=lambda unit: unit.before - (unit.after or 0.0))
    return removed[:_LISTED], gained[:_LISTED], totals


def kept(original: nn.Module, weight: str, units: int, plan: Plan | None) -> Map:
    """The places that a layer's remaining units had in the unpruned network."""
    places = np.arange(units)
    if plan is None or weight not in plan.cuts:
        return places
    module = original.get_submodule(weight.rpartition(".")[0])
    dim = 1 if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) else 0
    indices = plan.cuts[weight].get(dim, ())
    return np.delete(places, list(indices)) if plan.shapes[weight][dim] == units else places
