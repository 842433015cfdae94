"""Samples to repair with, and altered copies of them, so that few are not overfitted: crops and flips of images, texts
that exchange words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.errors import Argument, DataError
from secateur.nest import Images, describe, map_leaves, select_samples, tensors_in
from secateur.repair.rows import Places
from secateur.running.batches import Data, batches, check_inputs, counted, is_pair, masks_in, size_of, total_of
from secateur.running.devices import to_device
from secateur.running.layout import Order, unordered
from secateur.running.processes import active, gathered, share
from secateur.running.targets import are_shares

#: `f(images, generator)` returns altered images of the same shape (or other inputs). The generator lives on the CPU.
Alter = Callable[[Any, torch.Generator], Any]
# Copies are drawn for this many samples together, whatever the batch size is.
_PART = 32
# So many samples are held even if they take twice their share of the memory; and so many whatever they take.
_FEW, _FEWEST = 64, 8
#: Texts with more tokens than that get no copies: with 700 tokens copies helped, with 2,900 they did harm.
FEW_TOKENS = 2048


def crop_and_flip(images: Tensor, generator: torch.Generator, least: float = 0.5) -> Tensor:
    """Crop each image to between `least` and all of its area, resize it back, and mirror it half of the time."""
    count = len(images)
    zoom = (least + (1 - least) * torch.rand(count, generator=generator)).sqrt()
    # The window's centre, such that it stays inside.
    centre = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - zoom)[:, None]
    flip = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = flip * zoom, zoom, centre
    grid = F.affine_grid(theta.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def exchange_words(texts: Mapping[str, Any], generator: torch.Generator, share: float = 0.3) -> dict[str, Any]:
    """Give a share of the tokens of each text those of other texts. Tokens that every text has, such as marks of its
    beginning and end, stay, and so does padding."""
    ids: Tensor = texts["input_ids"]
    counts = counted(masks_in(texts, decoder=False), ids.shape)
    free = torch.ones_like(ids, dtype=torch.bool) if counts is None else counts.to(ids.device)
    kinds, place = torch.unique(ids, return_inverse=True)
    has = torch.zeros(len(ids), len(kinds), device=ids.device).scatter_add_(1, place, free.float()) > 0
    free = free & ~has.all(0)[place]
    others = ids[free]
    if not len(others):
        return dict(texts)
    chosen = torch.rand(ids.shape, generator=generator).to(ids.device) < share
    drawn = others[torch.randint(len(others), ids.shape, generator=generator).to(ids.device)]
    return {**texts, "input_ids": torch.where(free & chosen, drawn, ids)}


@dataclass(frozen=True)
class Samples:
    """Reference inputs and altered copies of them. Copies are made on request, and are always the same."""

    inputs: Any
    count: int
    copies: int
    alter: Alter | None
    held: Tensor
    seed: int
    #: Whether the targets are real numbers and no probabilities, so that the model's answers are no classes.
    quantities: bool = False
    #: How what is asked for lies in memory.
    order: Order = unordered
    #: So many samples would be used if memory were no limit, as far as the data tell how many there are.
    wanted: int = 0
    # The copies that were made last: they are asked for a few at a time.
    _made: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def collect(
        cls, data: Data, most: int, copies: int, alter: Alter | None, held_out: float, seed: int,
        device: torch.device | None, room: float = math.inf,
    ) -> Samples:  # fmt: skip
        """Take at most `most` samples, and as many copies of each as that leaves room for. Hold out a share of the
        samples: the same share of each class if targets are known. Samples are held, so that many take at most about
        `room` bytes. Copies are not.

        Of a pair (X, y) samples are taken evenly, since classes may lie together there; of batches, the first are. In
        several processes, each of which has batches of its own, those of all are taken.
        Without `alter`, images are cropped and flipped, and a few texts exchange words. Other inputs get no copies.
        """
        inputs, targets, count, quantities = [], [], 0, False
        shared = not is_pair(data) and active()
        limit, room = most, math.inf if active() else room  # processes have to agree
        there = total_of(data)
        if is_pair(data) and size_of(data[0]) > (limit := _fitting(data[0], most, room)):
            index = torch.linspace(0, size_of(data[0]) - 1, limit, dtype=torch.float64).round().long()
            data = select_samples(tuple(data), index)
        # All at once are not copied, only looked at.
        for x, y in [to_device(tuple(data), device)] if is_pair(data) else batches(data, 64, device):
            check_inputs(x)
            limit = limit if count else _fitting(x, most, room)
            take = min(size_of(x), limit - count)
            inputs.append(select_samples(x, slice(take)))
            targets.append(y[:take] if isinstance(y, Tensor) and y.ndim == 1 else None)
            quantities |= isinstance(y, Tensor) and y.ndim > 0 and y.is_floating_point() and not are_shares(y)
            count += take
            if count >= limit:
                break
        if shared:
            inputs, targets = _of_all(inputs, targets, most, device)
            count, quantities = sum(map(size_of, inputs)), any(gathered(quantities))
        if not count:
            raise DataError("repair needs data: there is no sample in what was given.")
        numbers = [t for t in targets if t is not None]
        known = torch.cat(numbers).cpu() if len(numbers) == len(targets) else None
        held = _held(count, known, held_out, torch.Generator().manual_seed(seed))
        joined = _joined(inputs)
        if alter is None and _are_images(joined[0] if _lists_images(joined) else joined):
            alter = crop_and_flip
        elif alter is None and isinstance(joined, Mapping) and isinstance(joined.get("input_ids"), Tensor):
            counts = counted(masks_in(joined, decoder=False), joined["input_ids"].shape)
            tokens = joined["input_ids"].numel() if counts is None else int(counts.sum())
            alter = exchange_words if count > 1 and tokens <= FEW_TOKENS else None
        copies = min(copies, max(0, most // count - 1)) if alter is not None else 0
        # A loader may leave samples out of its own accord; here it was memory.
        crowded = count >= limit and limit < most
        wanted = min(most, there) if crowded and there is not None and not shared else count
        return cls(joined, count, copies, alter, held, seed, quantities, wanted=max(wanted, count))

    @property
    def two(self) -> Any:
        """The first two samples, or the only one."""
        return select_samples(self.inputs, slice(2))

    @property
    def total(self) -> int:
        """The number of samples and copies."""
        return self.count * (1 + self.copies)

    @property
    def held_all(self) -> Tensor:
        """For each sample and copy whether it is held out. Copies of held-out samples are."""
        return self.held.repeat(1 + self.copies)

    @property
    def judges(self) -> Tensor:
        """For each sample and copy whether the divergence is measured on it: if held out, or if nothing is."""
        return self.held_all if bool(self.held.any()) else torch.ones(self.total, dtype=torch.bool)

    @property
    def masks(self) -> list[Tensor]:
        """For each sample and copy which of its tokens are no padding, if there is an attention mask."""
        return [mask.repeat(1 + self.copies, 1) for mask in masks_in(self.inputs)]

    @property
    def plain(self) -> Samples:
        """The samples without copies."""
        return replace(self, copies=0)

    def spread(self) -> Samples:
        """The same in another order: the first so many hold of everything, also of what is held out, a fair share."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed))
        ranks = torch.empty(self.count)
        for mask in (self.held[order], ~self.held[order]):
            ranks[mask] = (torch.arange(int(mask.sum())) + 0.5) / max(int(mask.sum()), 1)
        order = order[ranks.sort().indices]
        return replace(self, inputs=select_samples(self.inputs, order), held=self.held[order])

    def at(self, places: Places) -> Any:
        """The samples and copies at these places, in order. Their numbers do not depend on what else is asked for."""
        index = torch.arange(self.total)[places]
        parts = torch.unique_consecutive(index // self.count * self.count + index % self.count // _PART * _PART)
        made = []
        for begin in parts.tolist():
            copy, first = divmod(begin, self.count)
            mine = index[(index >= begin) & (index < copy * self.count + min(first + _PART, self.count))] - begin
            made.append(select_samples(self._part(copy, first), mine))
        return self.order(_joined(made))

    def chunks(self, size: int) -> Iterator[tuple[slice, Any]]:
        """Inputs in batches of about `size`, with their places among all. Their numbers do not depend on `size`."""
        for begin in range(0, self.total, size):
            place = slice(begin, min(begin + size, self.total))
            yield place, self.at(place)

    def _part(self, copy: int, begin: int) -> Any:
        x = select_samples(self.inputs, slice(begin, min(begin + _PART, self.count)))
        if not copy:
            return x
        if (copy, begin) not in self._made:
            assert self.alter is not None
            key = (self.seed * 1_000_003 + copy) * 1_000_003 + begin
            draw = torch.Generator().manual_seed(key % 2**63)
            made = (Images(self.alter(torch.stack(x[0]), draw)),) if _lists_images(x) else self.alter(x, draw)
            check_inputs(made)
            if [t.shape for t in tensors_in(made)] != [t.shape for t in tensors_in(x)]:
                what = f"alter makes {describe(made)[:200]} of {describe(x)[:200]}."
                raise DataError(what, where="alter", fix="a function that returns inputs of the same shapes")
            for old in list(self._made)[:-1]:
                del self._made[old]
            self._made[copy, begin] = made
        return self._made[copy, begin]


def _fitting(x: Any, most: int, room: float) -> int:
    """How many samples like these are held."""
    size = sum(t.numel() * t.element_size() for t in tensors_in(x)) / max(size_of(x), 1)
    fitting = room / max(size, 1)
    return int(min(most, max(_FEWEST, min(_FEW, 2 * fitting), fitting)))


def _lists_images(inputs: Any) -> bool:
    """Whether the only input is a list of images, as detectors take it."""
    return isinstance(inputs, tuple) and len(inputs) == 1 and isinstance(inputs[0], Images)


def _even(images: Sequence[Tensor]) -> Images:
    """Images of the size of the first. A repair compares positions, so all need the same."""
    size = tuple(images[0].shape[1:])
    return Images(
        t if t.shape[1:] == size else F.interpolate(t[None], size, mode="bilinear", align_corners=False)[0]
        for t in images
    )


def _are_images(inputs: Any) -> bool:
    """Whether inputs look like images: (samples, 1, 3 or 4 channels, height, width) of real numbers."""
    if isinstance(inputs, Images):
        inputs = torch.stack(inputs[:1])
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 4:
        return False
    return inputs.shape[1] in (1, 3, 4) and min(inputs.shape[2:]) >= 8


def _held(count: int, targets: Tensor | None, share: float, generator: torch.Generator) -> Tensor:
    """Which samples are held out: the same share of every class where that is known."""
    held = torch.zeros(count, dtype=torch.bool)
    order = torch.randperm(count, generator=generator)
    if targets is not None and len(targets) == count:
        order = order[torch.sort(targets[order], stable=True).indices]
    # Spread evenly along the order, in which classes lie together. Of two samples or more, at least one on either side.
    marks = torch.floor(torch.arange(count + 1) * share + 0.5).diff() > 0
    if share and count > 1 and not bool(marks.any()):
        marks[count // 2] = True
    if bool(marks.all()):
        marks[0] = False
    held[order[marks]] = True
    return held


def _of_all(
    inputs: list[Any], targets: list[Tensor | None], most: int, device: torch.device | None
) -> tuple[list[Any], list[Tensor | None]]:
    """The batches of all processes, `most` samples altogether, about as many of each process."""
    counts = gathered(sum(map(size_of, inputs)))
    left, shares = most, dict.fromkeys(range(len(counts)), 0)
    for done, number in enumerate(sorted(shares, key=counts.__getitem__)):
        shares[number] = min(counts[number], left // (len(counts) - done))
        left -= shares[number]
    mine = []
    room = shares[share()[0]]
    for x, y in zip(inputs, targets, strict=True):
        take = min(size_of(x), room)
        room -= take
        if take:
            cut = select_samples(x, slice(take)), None if y is None else y[:take]
            mine.append(to_device(cut, torch.device("cpu")))
    batches = [batch for part in gathered(mine) for batch in part]
    return [to_device(x, device) for x, _ in batches], [y for _, y in batches]


def _joined(parts: list[Any]) -> Any:
    """Nests of tensors, joined along their samples. Texts are padded at their end, where an attention mask tells.
    Images in lists are resized to the first."""
    if all(map(_lists_images, parts)):
        return (_even([image for part in parts for image in part[0]]),)
    if len(parts) == 1:
        return parts[0]
    if all(masks_in(part) for part in parts):
        parts = _padded(parts)
    shapes = [[tuple(t.shape[1:]) for t in tensors_in(part)] for part in parts]
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is not None:
        raise DataError(
            f"repair needs samples of one shape, but batches have {shapes[0]} and {other}.",
            fix="resize or pad the samples (with an attention_mask among the inputs, texts are padded), or {repair}",
            repair=Argument("repair", None),
        )
    return map_leaves(_one, *parts)


def _one(first: Any, *others: Any) -> Any:
    """A leaf of nests that are joined: what is no tensor with samples must be the same in all."""
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([first, *others])
    if other := [item for item in others if item is not first and not bool(item == first)]:
        raise DataError(f"repair needs the same {type(first).__name__} in all batches, not {first} and {other[0]}.")
    return first


def _padded(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Batches of texts with tokens of padding after them, such that all are as long as the longest.

    The numbers of these tokens do not matter, and what comes after a text does not move its positions.
    """
    made = [dict(part) for part in parts]
    for name in ("attention_mask", "decoder_attention_mask"):
        if not all(isinstance(part.get(name), Tensor) for part in parts):
            continue
        longest = max(part[name].shape[1] for part in parts)
        for part, new in zip(parts, made, strict=True):
            length, prefix = part[name].shape[1], name.removesuffix("attention_mask")
            for key, value in part.items():
                mine = key.startswith("decoder_") == bool(prefix)
                if mine and isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length < longest:
                    new[key] = F.pad(value, [0, 0] * (value.ndim - 2) + [0, longest - length])
    return made
