"""The samples of a training run: shuffled batches, altered images, and what is held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.errors import DataError
from secateur.nest import select_samples, tensors_in
from secateur.recover.settings import Augment, Recover
from secateur.running.batches import Batch, Data, as_batch, as_data, batches, is_pair, size_of
from secateur.running.devices import to_device
from secateur.running.processes import share

_MARGIN = 8  # images are shifted by up to their side over this
_MIXING = ("MixUp", "CutMix")
# Transforms of torchvision that draw nothing, and the dimensions that mirroring ones turn round.
_PLAIN, _MIRRORS = (
    ("Normalize", "Resize", "CenterCrop", "ToDtype"),
    {"RandomHorizontalFlip": -1, "RandomVerticalFlip": -2},
)


@dataclass(frozen=True)
class Samples:
    """What to train on, and `held`: what not to train on. `length` is the number of batches, if it is known."""

    data: Data
    batch_size: int
    augment: Augment | None
    held: Data
    device: torch.device | None

    @classmethod
    def of(cls, data: Data, settings: Recover, test: Data, device: torch.device | None) -> Samples:
        """Check the data, and hold out a share of them if that is asked for."""
        assert settings.batch_size is not None
        data = as_data(data)
        if data is None:
            raise DataError("there are no data to train on.", fix="a pair (X, y), a list of batches or a DataLoader")
        if isinstance(data, Tensor) or not isinstance(data, Iterable) or isinstance(data, Iterator):
            raise DataError("training repeats the data: give a pair (X, y), a list or a DataLoader.")
        if settings.held_out and test is None:
            data, test = _split(data, settings.held_out, settings.seed)
        elif settings.patience is not None and test is None:
            raise DataError("patience needs samples that are not trained on.", fix="held_out=0.1, or test=(X, y)")
        if is_pair(data) and not size_of(data[0]):
            raise DataError("the data are empty: there is no sample to train on.")
        return cls(data, settings.batch_size, settings.augment, test, device)

    @property
    def length(self) -> int | None:
        """How many batches an epoch has, if that is known."""
        if is_pair(self.data):
            return max(1, -(-size_of(self.data[0]) // self.batch_size))
        try:
            return len(self.data)
        except (TypeError, NotImplementedError):
            return None

    @property
    def labels(self) -> Tensor | None:
        """All class numbers, if they are known and trained on as they are."""
        known = self.data[1] if is_pair(self.data) else None
        plain = isinstance(known, Tensor) and known.ndim == 1 and not known.is_floating_point()
        return known if plain and type(self.augment).__name__ not in _MIXING else None

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators that a loader draws its order from, if they are its own."""
        found = [getattr(self.data, "generator", None), getattr(getattr(self.data, "sampler", None), "generator", None)]
        return list({id(own): own for own in found if isinstance(own, torch.Generator)}.values())

    def epoch(self, drawn: Tensor | None = None) -> Iterator[Batch]:
        """The batches of one epoch, on the device, with altered images. Of a pair, a process gets its share of each.

        Of several processes all draw the order of a pair from one state of the generator, `drawn`.
        """
        for inputs, targets in self._plain(drawn):
            inputs, targets = to_device(inputs, self.device), to_device(targets, self.device)
            yield (inputs, targets) if self.augment is None else altered(self.augment, inputs, targets)

    def _plain(self, drawn: Tensor | None) -> Iterator[Batch]:
        if not is_pair(self.data):
            yield from map(as_batch, self.data)
            return
        inputs, targets = self.data
        count, (rank, world) = size_of(inputs), share()
        order = torch.randperm(count)
        if drawn is not None:
            generator = torch.Generator()
            generator.set_state(drawn)
            order = torch.randperm(count, generator=generator)
        order = order.to(tensors_in(inputs)[0].device)
        for begin in range(0, count, self.batch_size):
            chunk = order[begin : begin + self.batch_size]
            if len(chunk) < 2 * world and begin:
                continue  # batch norm cannot train on a single sample
            mine = chunk[rank::world]
            yield select_samples(inputs, mine), select_samples(targets, mine)

    def held_batches(self) -> Iterator[Batch]:
        """What is held out, this process's share of a pair."""
        yield from batches(self.held, self.batch_size, self.device, share())


def _split(data: Data, held_out: float, seed: int) -> tuple[Data, Data]:
    """A pair or a list of batches in two."""
    if not is_pair(data) and not isinstance(data, list):
        raise DataError(f"held_out cannot divide a {type(data).__name__}.", fix="give what is held out: test=…")
    count = size_of(data[0]) if is_pair(data) else len(data)
    held = round(held_out * count)
    if not 0 < held < count:
        what = "samples" if is_pair(data) else "batches"
        raise DataError(f"held_out={held_out} of {count} {what} are {held}.", fix="more data, or another share")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if not is_pair(data):
        return [data[i] for i in order[held:].tolist()], [data[i] for i in order[:held].tolist()]
    inputs, targets = data
    first, second = ((select_samples(inputs, i), select_samples(targets, i)) for i in (order[held:], order[:held]))
    return first, second


def altered(augment: Augment, inputs: Any, targets: Any) -> Batch:
    """A batch with altered images. Mixup and cutmix alter the targets as well."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 3 or (isinstance(augment, str) and inputs.ndim != 4):
        raise DataError("augment alters images, and the inputs are none.", fix="augment=None, or inputs (N, C, H, W)")
    if isinstance(augment, str):
        return shifted(inputs, inputs.shape[-1] // _MARGIN), targets
    if not type(augment).__module__.startswith("torchvision.transforms"):
        made, known = augment(inputs), targets
    elif type(augment).__name__ in _MIXING:
        made, known = augment(inputs, targets)
    else:
        made, known = _transformed(augment, inputs), targets
    if not isinstance(made, Tensor) or made.ndim != inputs.ndim or len(made) != len(inputs):
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise DataError(f"augment made {shape} of images of shape {tuple(inputs.shape)}.")
    return made, known


def _transformed(transform: Any, images: Tensor) -> Tensor:
    """What a transform of torchvision makes of images. Each draws for itself; the usual ones are computed at once."""
    kind = type(transform).__name__ if type(transform).__module__.startswith("torchvision.transforms") else ""
    if kind == "Compose":
        for part in transform.transforms:
            images = _transformed(part, images)
        return images
    if kind in _PLAIN:
        return torch.as_tensor(transform(images))
    if kind in _MIRRORS:
        chosen = (torch.rand(len(images)) < transform.p).to(images.device)
        return torch.where(chosen.view(-1, *[1] * (images.ndim - 1)), images.flip(_MIRRORS[kind]), images)
    if kind == "RandomCrop" and hasattr(transform, "make_params") and images.ndim == 4:
        drawn = [transform.make_params([image]) for image in images]
        padded = transform.transform(images, {**drawn[0], "needs_crop": False})
        rows, columns = (
            torch.tensor([[own[begin]] for own in drawn]) + torch.arange(drawn[0][size])
            for begin, size in (("top", "height"), ("left", "width"))
        )
        return _cut(padded, rows.to(images.device), columns.to(images.device))
    return torch.stack([transform(image) for image in images])  # which draws once for all that it is given


def shifted(images: Tensor, most: int) -> Tensor:
    """Each image shifted by up to `most` pixels, 0 where nothing was, and mirrored half of the time.

    All on the images' device, so that nothing waits.
    """
    count, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, [most] * 4)
    top, left = torch.randint(2 * most + 1, (2, count, 1), device=device)
    along = torch.arange(width, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    rows = top + torch.arange(height, device=device)
    columns = left + torch.where(mirrored, along.flip(0), along)
    return _cut(padded, rows, columns)


def _cut(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Of each image its own rows and columns, in this order."""
    sample = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
