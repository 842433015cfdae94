"""Photographs in class folders, as samples for networks."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.arguments import check_count
from secateur.data.views import View
from secateur.errors import Argument, DataError, SecateurWarning

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Pictures too, which pillow reads with what some systems lack: those that it cannot read are named, not passed over.
_RARE = (".avif", ".heic", ".heif", ".jp2", ".jpe", ".jxl", ".apng", ".tga", ".pbm", ".pnm", ".dib", ".mpo")
# What the parts of a data set are called: folders of class folders.
_PARTS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}
_CACHE_BYTES = 2**29  # of decoded photographs, if nothing else is said
_AHEAD = 2  # batches that are decoded while the network computes


class Decoder:
    """Reads photographs in threads, keeps them while they take at most `room` bytes, and records broken ones."""

    def __init__(self, strict: bool = False, room: int = _CACHE_BYTES) -> None:
        self.strict = strict
        self.room = room
        self.broken: dict[Path, str] = {}
        self._kept: dict[tuple[Path, View, bool], Tensor] = {}
        self._named: set[Path] = set()
        self._lock = threading.Lock()

    def __call__(self, path: Path, view: View, training: bool = False) -> Tensor | None:
        """The bytes of an image; None if it cannot be read."""
        key = (path, view, training)
        if (kept := self._kept.get(key)) is not None:
            return kept
        if path in self.broken:
            return None
        pixels: Tensor | None = self._attempt(path, lambda: view.decode(path, training))
        with self._lock:
            if pixels is not None and self.room >= pixels.numel():
                self.room -= pixels.numel()
                self._kept[key] = pixels
        return pixels

    def check(self, path: Path) -> None:
        """Find out from the first bytes of a file whether it is an image."""
        from PIL import Image

        self._attempt(path, lambda: Image.open(path).close())

    def _attempt(self, path: Path, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (MemoryError, ModuleNotFoundError):
            raise
        except Exception as error:  # decoders raise many kinds of errors on damaged files
            self.broken[path] = f"{type(error).__name__}: {error}"
            return None

    def complain(self, paths: Sequence[Path]) -> None:
        """Report what could not be read: a warning, once for each file, or an error if strict."""
        if not self.strict:
            paths = [path for path in paths if path not in self._named]
            self._named.update(paths)
        if not paths:
            return
        named = [f"{path} ({self.broken[path]})" for path in paths[:5]]
        named += [f"and {len(paths) - 5} more"] if len(paths) > 5 else []
        fact = f"{len(paths)} broken {'image' if len(paths) == 1 else 'images'}: {'; '.join(named)}"
        if self.strict:
            raise DataError(
                "{fact}.", fix="repair or remove them, or leave out {strict} to skip them", where=paths[0],
                fact=fact, strict=Argument("strict", True),
            )  # fmt: skip
        warnings.warn(f"{fact}. Skipped.", SecateurWarning, stacklevel=3)


@dataclass(frozen=True)
class Batches:
    """Batches of (inputs, targets) that can be iterated over several times."""

    samples: int
    batch_size: int
    # Not shown: a resumed run recognises its data by the fields that are.
    photos: Photographs = field(repr=False)
    device: torch.device | str | None = field(repr=False)
    training: bool = field(repr=False)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(self.samples).tolist() if self.training else range(self.samples)
        seen = self.photos.view.training if self.training else self.photos.view.evaluation
        for images, targets in self.photos._decoded(order, self.batch_size, self.training):
            if not self.training or len(images) > 1 or self.samples == 1:
                yield seen(images.to(self.device)), targets.to(self.device)

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True)
class Photographs:
    """Photographs and the class of each. `read` makes them; subsets share what is decoded.

    `labels` are positions in `classes`; `targets`, one number per class, is what a network calls them. Images are
    decoded when they are needed; those that cannot be are named and left out, or refused with `strict`.
    """

    classes: tuple[str, ...]
    paths: tuple[Path, ...] = field(repr=False)
    labels: tuple[int, ...] = field(repr=False)
    targets: tuple[int, ...]
    view: View = View()  # noqa: RUF009 (frozen)
    decoder: Decoder = field(default_factory=Decoder, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def counts(self) -> dict[str, int]:
        """How many images each class has."""
        found = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, found, strict=True))

    # -- choosing --------------------------------------------------------------------------------------------------
    def of(self, classes: Sequence[str]) -> Photographs:
        """Only these classes, in this order."""
        unknown = [name for name in classes if name not in self.classes]
        if unknown or not classes or len(set(classes)) < len(classes):
            raise DataError(f"classes {list(classes)}: choose some of {', '.join(self.classes)}, each once.")
        old = [self.classes.index(name) for name in classes]
        kept = self.at([i for i, label in enumerate(self.labels) if label in old])
        labels, targets = tuple(map(old.index, kept.labels)), tuple(self.targets[i] for i in old)
        return replace(kept, classes=tuple(classes), labels=labels, targets=targets)

    def draw(
        self, per_class: int, classes: Sequence[str] | None = None, seed: int = 0, *, at_most: bool = False
    ) -> Photographs:
        """`per_class` images of each class, chosen at random by seed; `at_most` takes what there is of smaller classes.

        Broken ones are skipped. A class's images depend on seed and file names only, not on what other classes are
        drawn with it.
        """
        whole = self.of(classes) if classes is not None else self
        check_count("per_class", per_class, error=DataError)
        chosen: list[int] = []
        for label, name in enumerate(whole.classes):
            order = whole._shuffled(label, seed)
            good: list[int] = []
            while order and len(good) < per_class:
                batch, order = order[: per_class - len(good)], order[per_class - len(good) :]
                with _pool() as pool:
                    found = list(pool.map(lambda i: whole.decoder(whole.paths[i], whole.view), batch))
                good += [i for i, _ in whole._good(batch, found)]
            if len(good) < (1 if at_most else per_class):
                raise DataError(
                    f"class {name!r} has {len(good)} usable images, {per_class} were asked for.",
                    fix="fewer per class, or more images",
                )
            chosen += good
        return whole.at(chosen)

    def split(self, share: float, seed: int = 0) -> tuple[Photographs, Photographs]:
        """Two sets: `share` of each class (at least one image) at random by seed, and the rest."""
        if not 0 < share < 1:
            raise DataError("{share} must lie strictly between 0 and 1.", share=Argument("share", share))
        first, rest = list[int](), list[int]()
        for label, name in enumerate(self.classes):
            order = self._shuffled(label, seed)
            if len(order) < 2:
                raise DataError(f"class {name!r} has {len(order)} image, too few to be split in two.")
            count = min(max(1, round(share * len(order))), len(order) - 1)
            first += order[:count]
            rest += order[count:]
        return self.at(sorted(first)), self.at(sorted(rest))

    def without(self, others: Photographs) -> Photographs:
        """The images that are not among the others."""
        gone = set(others.paths)
        return self.at([i for i, path in enumerate(self.paths) if path not in gone])

    def numbered(self, targets: Sequence[int]) -> Photographs:
        """The same with other target numbers, one per class: e.g. the outputs of an ImageNet model."""
        if len(targets) != len(self.classes):
            raise DataError(f"{len(targets)} target numbers for {len(self.classes)} classes.")
        return replace(self, targets=tuple(targets))

    def readable(self) -> Photographs:
        """Without the images that could not be decoded so far."""
        return self.at([i for i, path in enumerate(self.paths) if path not in self.decoder.broken])

    def at(self, places: Sequence[int]) -> Photographs:
        """Those at some places, in this order."""
        paths, labels = tuple(self.paths[i] for i in places), tuple(self.labels[i] for i in places)
        return replace(self, paths=paths, labels=labels)

    def mixed(self) -> Photographs:
        """In another order: the first so many hold a fair share of each class."""
        sizes, seen = np.bincount(self.labels, minlength=len(self.classes)), np.zeros(len(self.classes))
        ranks = []
        for label in self.labels:
            ranks.append((seen[label] + 0.5) / sizes[label])
            seen[label] += 1
        return self.at(np.argsort(ranks, kind="stable").tolist())

    def _shuffled(self, label: int, seed: int) -> list[int]:
        mine = [i for i, own in enumerate(self.labels) if own == label]
        name = list(self.classes[label].encode())
        order = np.random.default_rng([seed % 2**32, *name]).permutation(len(mine))
        return [mine[i] for i in order]

    def _good(self, indices: Sequence[int], found: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        """Images that could be decoded, with their indices. The others are reported."""
        pairs = list(zip(indices, found, strict=True))
        self.decoder.complain([self.paths[i] for i, pixels in pairs if pixels is None])
        return [(i, pixels) for i, pixels in pairs if pixels is not None]

    # -- samples ---------------------------------------------------------------------------------------------------
    def pixels(self, training: bool = False, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """All images as bytes (N, C, side, side) and their targets, on a device."""
        parts = list(self._decoded(range(len(self)), 64, training))
        if not parts:
            raise DataError("there is no image that can be read.")
        images, targets = torch.cat([p for p, _ in parts]), torch.cat([t for _, t in parts])
        return images.to(device), targets.to(device)

    def tensors(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """All images as one pair (inputs, targets), as `prune` and `score` take it."""
        images, targets = self.pixels(device=device)
        return self.view.evaluation(images), targets

    def batches(self, batch_size: int = 32, device: torch.device | str | None = None) -> Batches:
        """Batches in order, for scoring and evaluation. They are decoded ahead, in threads."""
        return Batches(len(self), batch_size, self, device, training=False)

    def training(self, batch_size: int = 20, device: torch.device | str | None = None) -> Batches:
        """Shuffled batches of random crops and mirror images, as in the paper. `torch.manual_seed` decides which.

        A last batch of a single image is left out: batch norm cannot train on it.
        """
        return Batches(len(self), batch_size, self, device, training=True)

    def _decoded(self, order: Sequence[int], batch_size: int, training: bool) -> Iterator[tuple[Tensor, Tensor]]:
        check_count("batch_size", batch_size, error=DataError)
        chunks = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
        pool, waiting = _pool(), deque[list[Future[Tensor | None]]]()
        try:
            for number, chunk in enumerate(chunks):
                for later in chunks[number + len(waiting) : number + 1 + _AHEAD]:
                    waiting.append([pool.submit(self.decoder, self.paths[i], self.view, training) for i in later])
                good = self._good(chunk, [job.result() for job in waiting.popleft()])
                if good:
                    targets = torch.tensor([self.targets[self.labels[i]] for i, _ in good])
                    yield torch.stack([pixels for _, pixels in good]), targets
        finally:
            pool.shutdown(cancel_futures=True)


def read(
    folder: str | os.PathLike[str], size: int = 224, *, view: View | None = None, strict: bool = False, least: int = 1,
    decoder: Decoder | None = None,
) -> Photographs:  # fmt: skip
    """The photographs in a folder of class folders; classes are the folders' names, sorted.

    `view` says what a network sees of them (default: the centre, ImageNet's mean and deviation). Subfolders and links
    are followed, hidden folders are not. The first bytes of every file are checked: what is no image is reported and
    skipped, or refused with `strict`; so are images beside the class folders or without an ending that says so. A class
    with fewer than `least` images is an error. A `decoder` that reads several folders decides what is kept of all of
    them, and whether it is strict.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder.", where=root, fix="a folder with one folder of images per class")
    names = sorted(item.name for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))
    if not names:
        loose = sum(_is_image(item) for item in root.iterdir())
        raise DataError(
            f"{root} has no class folders{f', but {loose} images' if loose else ''}.",
            where=root,
            fix=f"put the images of each class into a folder of its own, such as {root / 'cat'}",
        )
    for name in names:
        if name != name.encode(errors="replace").decode():
            what = f"the name of the class folder {root / name} is no text in UTF-8."
            raise DataError(what, where=root, fix="another name for the folder")
    decoder, numbers = decoder if decoder is not None else Decoder(strict), tuple(range(len(names)))
    files = [_files_in(root / name) for name in names]
    listed = [(path, label) for label in numbers for path in files[label] if _is_image(path)]
    inside = bool(listed) and all(path.parent.parent != root for path, _ in listed)
    if inside and {name.casefold() for name in names} <= _PARTS:
        what = f"the folders in {root} are parts of a data set ({', '.join(names)}), not classes."
        raise DataError(what, where=root, fix=f"one of them, such as {root / names[-1]}")
    _tell_of_others(root, {path for some in files for path in some}.difference(path for path, _ in listed), decoder)
    with _pool() as pool:
        list(pool.map(decoder.check, [path for path, _ in listed]))
    decoder.complain([path for path, _ in listed if path in decoder.broken])
    kept = [(path, label) for path, label in listed if path not in decoder.broken]
    paths, labels = tuple(path for path, _ in kept), tuple(label for _, label in kept)
    found = Photographs(tuple(names), paths, labels, numbers, view if view is not None else View(size), decoder)
    few = {name: count for name, count in found.counts.items() if count < max(least, 1)}
    if few:
        which = ", ".join(f"{name!r} has {count}" for name, count in list(few.items())[:5])
        raise DataError(
            f"too few images in {root}: {which}, at least {max(least, 1)} needed.",
            where=root,
            fix=f"add images; their names end in {', '.join(SUFFIXES)}",
        )
    return found


def load(
    paths: Sequence[str | os.PathLike[str]], view: View | None = None, *, strict: bool = False
) -> tuple[Tensor, list[Path]]:
    """Single files as network inputs, and the paths of those that could be read."""
    view, decoder = view if view is not None else View(), Decoder(strict)
    files = [Path(path) for path in paths]
    absent = [path for path in files if not path.is_file() and not path.is_symlink()]
    if absent:
        raise DataError(f"there is no image {', '.join(map(str, absent[:5]))}.")
    good = [(path, pixels) for path in files if (pixels := decoder(path, view)) is not None]
    decoder.complain(list(decoder.broken))
    if not good:
        raise DataError("there is no image that can be read.")
    return view.evaluation(torch.stack([pixels for _, pixels in good])), [path for path, _ in good]


def _is_image(path: Path) -> bool:
    if path.suffix.lower() not in (*SUFFIXES, *_RARE) or path.name.startswith("."):
        return False
    return path.is_file() or (path.is_symlink() and not path.exists())  # a link to nowhere is a broken picture


def _tell_of_others(root: Path, others: Iterable[Path], decoder: Decoder) -> None:
    """Pictures that are not read: beside the class folders, or, of the other files in them, with an unknown ending."""
    loose = sorted(item for item in root.iterdir() if _is_image(item))
    odd = sorted(path for path in others if path.is_file() and _opens(path))
    for paths, where, fix in (
        (loose, f"beside the class folders of {root}", "move them into folders, or away"),
        (odd, f"in {root} with an unknown ending", f"names that end in {', '.join(SUFFIXES)}"),
    ):
        if paths:
            count = "1 picture" if len(paths) == 1 else f"{len(paths)} pictures"
            named = f"{', '.join(map(str, paths[:3]))}{', …' if len(paths) > 3 else ''}"
            what = f"{count} {where} {'is' if len(paths) == 1 else 'are'} left out: {named}."
            if decoder.strict:
                raise DataError(what, where=paths[0], fix=fix)
            warnings.warn(SecateurWarning(what, where=paths[0], fix=fix), stacklevel=3)


def _opens(path: Path) -> bool:
    """Whether a file begins as a picture does."""
    from PIL import Image

    try:
        with Image.open(path):
            return True
    except Exception:  # whatever it is, it is no picture
        return False


def images_in(folder: Path) -> list[Path]:
    """Every image in a folder and its subfolders, sorted by path."""
    return [path for path in _files_in(folder) if _is_image(path)]


def _files_in(folder: Path) -> list[Path]:
    """Every file in a folder and its subfolders, sorted by path.

    Links are followed. What is hidden is left out: programs keep copies of the pictures there.
    """
    found = list[Path]()
    above: dict[Path, tuple[Path, ...]] = {folder: (Path(os.path.realpath(folder)),)}
    for name, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        place = Path(name)
        found += [place / file for file in files if not file.startswith(".")]
        way, folders[:] = above.pop(place), [inside for inside in folders if not inside.startswith(".")]
        for inside in list(folders):
            real = Path(os.path.realpath(place / inside))
            if any(real in (passed, *passed.parents) for passed in way):  # a link upwards leads round in circles
                folders.remove(inside)
            else:
                above[place / inside] = (*way, real)
    return sorted(found)


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed must not pass for an empty one."""
    what = f"the folder {error.filename} cannot be read: {error.strerror}."
    raise DataError(what, where=error.filename, fix="allow reading it, or move it away") from error


def in_turn(paths: Sequence[Path]) -> list[Path]:
    """One of each folder, then the next of each: a few images should not all be of the first class."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return [path for turn in zip_longest(*folders.values()) for path in turn if path is not None]


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "decoder")
