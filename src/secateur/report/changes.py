"""What pruning changed in how a network sees: heat maps before and after, regions, units."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.analysis.reasons import Drift, Viewer, compared
from secateur.errors import DataError
from secateur.plans.plan import Plan
from secateur.relevance.explain import Explanation, bound, visible
from secateur.relevance.text import Shade, shaded
from secateur.relevance.weights import path_of
from secateur.report.document import Page
from secateur.results.history import Record
from secateur.running.batches import size_of
from secateur.running.targets import IGNORED

Names = Sequence[str] | Mapping[int, str] | None
Map = np.ndarray[Any, Any]

_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
_LISTED = 5  # units of each kind
_LARGEST = 320  # pixels on a side
COARSE = 64  # below this, pixels are shown as squares


@dataclass(frozen=True)
class Sample:
    """One input: its picture and heat maps as PNG, what the network said before and after, where it looks now."""

    label: str
    said: tuple[str, str]
    picture: bytes
    before: bytes
    after: bytes
    change: bytes
    agreement: float
    gained: tuple[str, float]
    lost: tuple[str, float]
    coarse: bool


@dataclass(frozen=True)
class Passage:
    """One text: what was explained, what the network said before and after, and the words in their colours."""

    explained: str
    said: tuple[str, str]
    before: Sequence[Shade]
    after: Sequence[Shade]
    agreement: float


@dataclass(frozen=True)
class UnitChange:
    """A unit, by its layer and its place in the unpruned network, and its share of all relevance."""

    layer: str
    index: int
    before: float
    after: float = 0.0


@dataclass(frozen=True)
class Changes:
    """Samples, the one that changed most first; units that left with the most relevance, and those that gained most.

    Samples are pictures, or passages of text. `hardest_hit` is the layer whose removed units had the largest share of
    its relevance, with that share.
    """

    samples: Sequence[Sample]
    passages: Sequence[Passage]
    count: int
    reasons: Drift
    removed: Sequence[UnitChange]
    gained: Sequence[UnitChange]
    hardest_hit: tuple[str, float] | None


def changes(
    original: nn.Module, result: Record, inputs: tuple[Any, Tensor | None], classes: Names, page: Page
) -> Changes:
    """Explain the same inputs with both networks and compare. Each sample starts at its class: with 1, or with its
    logit under a composite that has signs."""
    if isinstance(inputs[0], Tensor):
        check_scale(inputs[0], page)
    known = result.reasons
    look = known.look if known is not None else None
    if look is not None and look.shows((original, result.model), inputs, page.composite):
        viewer, after = look.viewer, look.after  # the run has explained them
    else:
        viewer = Viewer(original, inputs, page.composite)
        after = viewer.look(result.model)
    reasons = known if known is not None and known.of(viewer.before, after) else None
    reasons = reasons or compared(viewer, original, result.model, after, faithful=True)
    samples, passages = pairs(viewer, after, classes, page)
    units = _units(original, viewer.before, after, result.plan)
    return Changes(samples, passages, size_of(viewer.x), reasons, *units)


def pairs(viewer: Viewer, after: Explanation, classes: Names, page: Page) -> tuple[list[Sample], list[Passage]]:
    """What both networks see, sample by sample: pictures, or passages of text. What changed most comes first."""
    before, x, y = viewer.before, viewer.x, viewer.y
    samples, passages = list[Sample](), list[Passage]()
    alike = viewer.agreement(after.heat).tolist()
    if before.text is not None and after.text is not None:
        passages = [_passage(i, before, after, alike[i], classes, page.tokenizer) for i in range(len(alike))]
    elif isinstance(x, Tensor) and x.dim() == 4:
        labels = [name_of(int(c), classes) for c in y] if y is not None and y.dim() == 1 else [""] * len(x)
        said = zip(*(_said(seen.output, len(x), classes) for seen in (before, after)), strict=True)
        maps = (seen.heat.detach().double().cpu() for seen in (before, after))
        samples = [_sample(*parts) for parts in zip(labels, said, shown(x, page), *maps, alike, strict=True)]
    samples.sort(key=lambda sample: sample.agreement)
    passages.sort(key=lambda passage: passage.agreement)
    return samples, passages


# -- texts -------------------------------------------------------------------------------------------------------------
def _passage(
    row: int, before: Explanation, after: Explanation, alike: float, classes: Names, tokenizer: Any
) -> Passage:
    old, new = before.text, after.text
    assert old is not None
    assert new is not None
    place = _place(before, row)

    def says(seen: Explanation) -> str:
        logits = seen.output[row] if place is None else seen.output[row, place]
        if logits.dim() != 1 or len(logits) < 2:
            return ""
        sure, which = logits.detach().double().softmax(0).max(0)
        number = int(which)
        name = old.named(number, tokenizer) if old.speaks else name_of(number, classes)
        return f"{name} ({100 * float(sure):.0f} %)"

    explained = old.said(row, before.classes, before.against, tokenizer)
    if not old.speaks and before.classes is not None and before.classes.dim() == 1:
        explained = f"Explained: {name_of(int(before.classes[row]), classes)}."
    was, now = (shaded(text.words(tokenizer)[row]) for text in (old, new))
    return Passage(explained, (says(before), says(after)), was, now, alike)


def _place(seen: Explanation, row: int) -> int | None:
    """The position of a text whose answer was explained; None if there is an answer for the text as a whole."""
    if seen.output.dim() < 3 or seen.classes is None:
        return None
    places = (seen.classes[row].reshape(-1) != IGNORED).nonzero().ravel()
    return int(places[-1]) if len(places) else None


# -- pictures ----------------------------------------------------------------------------------------------------------
def _sample(label: str, said: tuple[str, str], picture: bytes, old: Tensor, new: Tensor, alike: float) -> Sample:
    limit = max(bound(old), bound(new))
    change = share(new) - share(old)
    cells = regions(change).items()
    gained, lost = (most(cells, key=lambda cell: cell[1]) for most in (max, min))
    before, after = (coloured(heat.numpy(), limit, "seismic") for heat in (old, new))
    moved, coarse = coloured(change, bound(torch.from_numpy(change)), "PuOr_r"), max(old.shape) < COARSE
    return Sample(label, said, picture, before, after, moved, alike, gained, lost, coarse)


def check_scale(x: Any, page: Page) -> None:
    """Mean and deviation of the pixels must fit the pictures."""
    for name, values in (("mean", page.mean), ("std", page.std)):
        if isinstance(x, Tensor) and x.dim() == 4 and values is not None and len(values) not in (1, x.shape[1]):
            raise DataError(f"{name} has {len(values)} numbers, but the pictures have {x.shape[1]} channels.")


def shown(x: Tensor, page: Page) -> list[bytes]:
    """The pictures as they were before normalisation, as PNG."""
    plain = x.detach().float().cpu()
    if page.std is not None:
        plain = plain * torch.tensor(list(page.std)).view(1, -1, 1, 1)
    if page.mean is not None:
        plain = plain + torch.tensor(list(page.mean)).view(1, -1, 1, 1)
    if page.mean is not None or page.std is not None:
        plain = plain.clamp(0, 1)
    return [_png(255 * visible(image)) for image in plain]


def _said(output: Tensor, samples: int, classes: Names) -> list[str]:
    """The predicted class and its softmax, if the output is one number per class."""
    if output.dim() != 2 or output.shape[1] < 2:
        return [""] * samples
    sure, which = output.detach().double().softmax(1).max(1)
    pairs = zip(which.tolist(), sure.tolist(), strict=True)
    return [f"{name_of(c, classes)} ({100 * p:.0f} %)" for c, p in pairs]


def name_of(number: int, classes: Names) -> str:
    """What a class is called; its number if it has no name."""
    if isinstance(classes, Mapping):
        return str(classes.get(number, number))
    return str(classes[number]) if classes is not None and number < len(classes) else str(number)


def coloured(heat: Map, limit: float, palette: str) -> bytes:
    """A heat map as PNG: 256 colours about 0."""
    from matplotlib import colormaps

    colours = colormaps[palette](np.arange(256))[:, :3]
    levels = ((heat / limit).clip(-1, 1) + 1) / 2 * 255
    return _png(levels, (255 * colours).round().astype(np.uint8).tobytes())


def _png(levels: Map, palette: bytes | None = None) -> bytes:
    """A picture of numbers from 0 to 255. Those with a palette keep their size."""
    from PIL import Image

    image = Image.fromarray(levels.round().astype(np.uint8), "P" if palette else None)
    if palette:
        image.putpalette(palette)
    else:
        image.thumbnail((_LARGEST, _LARGEST))
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


# -- units -------------------------------------------------------------------------------------------------------------
def _units(
    original: nn.Module, before: Explanation, after: Explanation, plan: Plan | None
) -> tuple[list[UnitChange], list[UnitChange], tuple[str, float] | None]:
    removed: list[UnitChange] = []
    gained: list[UnitChange] = []
    totals: dict[str, float] = {}
    for name, values in before.weights.items():
        old = values.detach().double().cpu().numpy() / (before.conservation.size or 1)
        new = after.weights.get(name)
        places = kept(original, name, len(old), plan)
        if new is None or len(new) != len(places):
            continue  # a layer whose units do not lie along one axis of its weight
        now = new.detach().double().cpu().numpy() / (after.conservation.size or 1)
        layer = path_of(name)
        gone = np.setdiff1d(np.arange(len(old)), places)
        if len(gone):
            totals[layer] = float(old[gone].sum())
        removed += [UnitChange(layer, int(i), float(old[i])) for i in gone]
        gained += [UnitChange(layer, int(i), float(old[i]), float(n)) for i, n in zip(places, now, strict=True)]
    removed.sort(key=lambda unit: -unit.before)
    gained.sort(key=lambda unit: unit.before - unit.after)
    return removed[:_LISTED], gained[:_LISTED], max(totals.items(), key=lambda layer: layer[1], default=None)


def kept(original: nn.Module, weight: str, units: int, plan: Plan | None) -> Map:
    """The places that a layer's remaining units had in the unpruned network."""
    places = np.arange(units)
    if plan is None or weight not in plan.cuts:
        return places
    dim = unit_dim(original, weight)
    indices = plan.cuts[weight].get(dim, ())
    return np.delete(places, list(indices)) if plan.shapes[weight][dim] == units else places


def unit_dim(model: nn.Module, weight: str) -> int:
    """The dimension of a weight along which the layer's own units lie."""
    module = model.get_submodule(weight.rpartition(".")[0])
    return 1 if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) else 0
