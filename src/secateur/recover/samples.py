"""The samples of a training run: shuffled batches, altered images, and what is held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from secateur.errors import Argument, DataError, EvaluationError, SecateurError
from secateur.nest import lists_samples, map_tensors, select_samples, tensors_in
from secateur.recover.settings import Augment, Recover
from secateur.running.batches import (
    Batch,
    Data,
    as_data,
    batches,
    check_pair,
    checked_batch,
    is_pair,
    repeatable,
    size_of,
)
from secateur.running.processes import share

_END: Any = object()
_MARGIN = 8  # images are shifted by up to their side over this
_MIXING = ("MixUp", "CutMix")
# Transforms of torchvision that leave every pixel where it is.
_STILL = (
    "Normalize", "ToDtype", "ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "RandomGrayscale",
    "RandomInvert", "RandomPosterize", "RandomSolarize", "RandomAdjustSharpness", "RandomAutocontrast",
    "RandomEqualize", "RandomChannelPermutation", "RandomPhotometricDistort",
)  # fmt: skip
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
    #: Batches that were looked at before training, and the iterator that has the others.
    _ahead: list[tuple[list[Batch], Iterator[Any]]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, data: Data, settings: Recover, test: Data, device: torch.device | None) -> Samples:
        """Check the data, and hold out a share of them if that is asked for."""
        assert settings.batch_size is not None
        data = as_data(data)
        if data is None:
            raise DataError("there are no data to train on.", fix="a pair (X, y), a list of batches or a DataLoader")
        if isinstance(data, Tensor) or not isinstance(data, Iterable) or isinstance(data, Iterator):
            raise DataError("training repeats the data: give a pair (X, y), a list or a DataLoader.")
        if test is not None:
            test = repeatable(test)  # it is measured on before training and after each epoch
        if settings.held_out and test is not None:
            raise DataError("held_out divides the data, and test=… are other data to measure on.", fix="one of the two")
        if settings.held_out:
            data, test = _split(data, settings.held_out, settings.seed)
        elif settings.patience is not None and test is None:
            raise DataError("patience needs samples that are not trained on.", fix="held_out=0.1, or test=(X, y)")
        if is_pair(data):
            _check(data, settings)
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
        return known if plain and not (_is_transform(self.augment) and _mixes(self.augment)) else None

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators that a loader draws its order from, if they are its own."""
        found = [getattr(part, "generator", None) for part in (self.data, *self._samplers)]
        return list({id(own): own for own in found if isinstance(own, torch.Generator)}.values())

    @property
    def _samplers(self) -> list[Any]:
        """What decides about the order of a loader."""
        batched = getattr(self.data, "batch_sampler", None)
        found = (getattr(self.data, "sampler", None), batched, getattr(batched, "sampler", None))
        return list({id(part): part for part in found if part is not None}.values())

    def epoch(self, drawn: Tensor | None = None, number: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, on the device, with altered images. Of a pair, a process gets its share of each.

        Of several processes all draw the order of a pair from one state of the generator, `drawn`. A sampler that
        draws by the number of the epoch, as torch's for several processes, is told this number.
        """
        self._tell(number)
        yield from map(self._made, self._plain(drawn))

    def look(self, count: int) -> Iterator[Batch]:
        """Up to `count` batches, before training. The first epoch begins with them where they may not come again."""
        if self._repeats:
            yield from islice(self.epoch(), count)
            return
        if not self._ahead:
            self._tell(0)
            self._ahead.append(([], iter(self.data)))
        known, rest = self._ahead[0]
        for number in range(count):
            if number == len(known):
                batch = next(rest, _END)
                if batch is _END:
                    return
                known.append(_copied(checked_batch(batch), None))  # the next batch may come in the same memory
            yield self._made(known[number])

    def forget(self) -> None:
        """The next epoch begins anew: it is not the first."""
        self._ahead.clear()

    @property
    def _repeats(self) -> bool:
        """Whether the data are known to be the same when they are read again. Other iterables may be streams."""
        if isinstance(self.data, DataLoader):
            return not isinstance(self.data.dataset, IterableDataset) and not any(
                isinstance(sampler, Iterator) for sampler in self._samplers
            )
        return isinstance(self.data, tuple | list)

    def _tell(self, number: int) -> None:
        for sampler in self._samplers:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(number)

    def _made(self, batch: Batch) -> Batch:
        inputs, targets = _copied(batch, self.device)
        return (inputs, targets) if self.augment is None else altered(self.augment, inputs, targets)

    def _plain(self, drawn: Tensor | None) -> Iterator[Batch]:
        if self._ahead:
            known, rest = self._ahead.pop()
            yield from known
            yield from map(checked_batch, rest)
            return
        if not is_pair(self.data):
            yield from map(checked_batch, self.data)
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
            if len(chunk) < 2 * world and len(chunk) < self.batch_size and begin:
                continue  # a rest; batch norm cannot train on a single sample
            mine = chunk[rank::world]
            yield select_samples(inputs, mine), select_samples(targets, mine)

    def held_batches(self) -> Iterator[Batch]:
        """What is held out, this process's share of a pair."""
        for batch in batches(self.held, self.batch_size, share=share()):
            yield _copied(batch, self.device)


def _copied(batch: Batch, device: torch.device | None) -> Batch:
    """A batch of its own, on the device: a forward, a loss or a function of images may write to it."""
    inputs, targets = (map_tensors(lambda t: t.detach().to(device or t.device, copy=True), part) for part in batch)
    return inputs, targets


def _check(pair: Data, settings: Recover) -> None:
    """Refuse a pair without samples, or too few for each process."""
    count, (_, world), size = check_pair(*pair), share(), settings.batch_size or 1
    if not count:
        raise DataError("the data are empty: there is no sample to train on.")
    if min(count, size) < world:
        raise DataError(
            "{count} samples in {given} cannot be shared by {world} processes.", count=count, world=world,
            given=Argument("batch_size", size), fix="{more}", more=Argument("batch_size", world),
        )  # fmt: skip


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
    places = next((f" of shape {tuple(t.shape)}" for t in tensors_in(targets) if t.ndim > 2), None)
    if (places is not None or lists_samples(targets)) and _moves(augment):  # maps, or dicts with boxes
        raise DataError(
            f"augment would move images, but not their targets{places or ', a dict for each'}.",
            fix="a DataLoader whose data set alters both, or a function of a batch that moves nothing",
        )
    if isinstance(augment, str):
        return shifted(inputs, inputs.shape[-1] // _MARGIN), targets
    if not _is_transform(augment):
        try:
            made, known = augment(inputs), targets
        except (torch.OutOfMemoryError, SecateurError):
            raise
        except Exception as error:
            what = f"augment raised {type(error).__name__}: {error}."
            raise EvaluationError(what, fix="a function f(images) of a batch") from error
    else:
        made, known = _mixed(augment, inputs, targets) if _mixes(augment) else (_transformed(augment, inputs), targets)
    if not isinstance(made, Tensor) or made.ndim != inputs.ndim or len(made) != len(inputs):
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise DataError(f"augment made {shape} of images of shape {tuple(inputs.shape)}.")
    return made, known


def _is_transform(augment: Any) -> bool:
    return type(augment).__module__.startswith("torchvision.transforms")


def _parts(transform: Any) -> list[Any]:
    """The transforms that one consists of, such as a Compose."""
    parts = getattr(transform, "transforms", None)
    return list(parts) if isinstance(parts, list | tuple | nn.ModuleList) else []


def _mixes(transform: Any) -> bool:
    """Whether a transform of torchvision, or a part of it, mixes the images of a batch."""
    return type(transform).__name__ in _MIXING or any(map(_mixes, _parts(transform)))


def _moves(augment: Augment) -> bool:
    """Whether pixels may end in another place. Your own functions are trusted not to."""
    if isinstance(augment, str):
        return True
    parts = _parts(augment)
    return any(map(_moves, parts)) if parts else _is_transform(augment) and type(augment).__name__ not in _STILL


def _mixed(transform: Any, images: Any, targets: Any) -> Batch:
    """What transforms make of a batch, of which some mix its images."""
    if type(transform).__name__ == "Compose":
        for part in transform.transforms:
            if _mixes(part):
                images, targets = _mixed(part, images, targets)
            else:
                images = _transformed(part, images)
        return images, targets
    name = type(transform).__name__
    if not all(map(_mixes, _parts(transform))):
        raise DataError(
            f"{name} has parts that mix batches and parts that alter an image.", fix="v2.Compose([…, mixing])"
        )
    if not isinstance(targets, Tensor):
        raise DataError(f"{name} mixes labels, and there are none.", fix="your own function of a batch of images")
    try:
        made, known = transform(images, targets)
    except (ValueError, TypeError) as error:
        what = f"{name} raised {type(error).__name__}: {error}"
        raise DataError(what, fix="num_classes=…, and class numbers") from error
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
