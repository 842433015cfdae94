"""The paper's data sets, read from the folders in which they are published, and split as in the paper.

Nothing is downloaded. Every set is a list of files and class numbers for training and for testing. CIFAR-10 comes as
arrays and is read into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.data.images import Decoder, Photographs, read
from secateur.data.views import View
from secateur.errors import DataError


@dataclass(frozen=True)
class Samples:
    """Images and their classes. `source` is a tuple of files, or bytes of shape (count, 3, side, side)."""

    source: tuple[Path, ...] | Tensor
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Sequence[int]) -> Samples:
        """Some of them, in the order given."""
        labels = tuple(self.labels[i] for i in index)
        if isinstance(self.source, Tensor):
            return Samples(self.source[list(index)], labels)
        return Samples(tuple(self.source[i] for i in index), labels)

    def of_class(self, label: int) -> list[int]:
        """The indices of one class, in order."""
        return [i for i, found in enumerate(self.labels) if found == label]

    def stored(self, view: View, training: bool = False, device: torch.device | str | None = None) -> Tensor:
        """As `pixels`, but images that come as bytes keep their own size. `scaled` changes it, a batch at a time."""
        return self.source.to(device) if isinstance(self.source, Tensor) else self.pixels(view, training, device)

    def pixels(self, view: View, training: bool = False, device: torch.device | str | None = None) -> Tensor:
        """All images as bytes of shape (count, channels, side, side), as `view` keeps them, on a device."""
        if isinstance(self.source, Tensor):
            return scaled(self.stored(view, training, device), view.side(training))
        targets = tuple(range(max(self.labels) + 1))
        # Strict: every label must have its image. Room 0: decoded images are not cached.
        reader = Photographs(tuple(map(str, targets)), self.source, self.labels, targets, view, Decoder(True, room=0))
        return reader.pixels(training, device)[0]


def scaled(pixels: Tensor, side: int) -> Tensor:
    """Bytes at another size. Done in parts, because the intermediate floats need four times the memory."""
    if pixels.shape[-1] == side:
        return pixels
    parts = []
    for part in torch.split(pixels, 1000):
        wide = F.interpolate(part.float(), (side, side), mode="bilinear", antialias=True)
        parts.append(wide.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


@dataclass(frozen=True)
class Published:
    """A data set, split."""

    name: str
    classes: tuple[str, ...]
    train: Samples
    test: Samples


def published(name: str, folder: Path, seed: int = 0) -> Published:
    """A data set of the paper, from its folder. If the paper draws the split at random, `seed` determines it.

    scene15 (20 % of each class for training) and event8 (40 %): class folders. catsdogs: `train` and `test` with
    class folders, or Kaggle's `train/cat.0.jpg`, of which 4005 cats and 4000 dogs are drawn for training and 2023
    others for testing. flowers102: the photographs in folders of any names, `imagelabels.mat`, `setid.mat`;
    training is the official training and validation set. cifar10: the binary version. aircraft: `data/images` with
    the lists of variants. birds: CUB-200-2011, or class folders. cars: the devkit's annotations, or class folders.
    ilsvrc: `train` (or `reference`) and `val` (or `test`) with one folder per WordNet id; a subset of the classes
    is enough.
    """
    if name not in _READERS:
        raise DataError(f"the data set {name!r} is not known.", fix=f"use one of {', '.join(_READERS)}")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder.", fix=f"give the folder of {name}")
    found = replace(_READERS[name](folder, np.random.default_rng([seed, 6])), name=name)
    for part, samples in (("training", found.train), ("test", found.test)):
        if not len(samples):
            raise DataError(f"{folder} has no {part} images of {name}.")
    return found


def names() -> tuple[str, ...]:
    """Every data set that `published` knows."""
    return tuple(_READERS)


def folders(root: Path) -> tuple[tuple[str, ...], Samples]:
    """A folder of class folders: the names in order, and every image in them."""
    found = read(root)
    return found.classes, Samples(found.paths, found.labels)


# -- readers -----------------------------------------------------------------------------------------------------------
def _shared(share: float) -> Callable[[Path, np.random.Generator], Published]:
    """Class folders of which a share is drawn for training."""

    def read(folder: Path, rng: np.random.Generator) -> Published:
        classes, samples = folders(folder)
        train: list[int] = []
        for label in range(len(classes)):
            mine = samples.of_class(label)
            drawn = rng.permutation(len(mine))[: max(1, round(share * len(mine)))]
            train += [mine[i] for i in sorted(drawn.tolist())]
        chosen = set(train)
        test = [i for i in range(len(samples)) if i not in chosen]
        return Published("", classes, samples.take(train), samples.take(test))

    return read


def _catsdogs(folder: Path, rng: np.random.Generator) -> Published:
    if (folder / "test").is_dir() and any(p.is_dir() for p in (folder / "train").glob("*")):
        return _two_folders("train", "test")(folder, rng)
    places = [p for p in (folder / "train", folder) if any(p.glob("cat.*.*"))]
    if not places:
        raise DataError(f"{folder} has neither train/cat/… and test/cat/… nor Kaggle's train/cat.0.jpg.")
    files = {kind: sorted(places[0].glob(f"{kind}.*.*")) for kind in ("cat", "dog")}
    # The paper trains on 4005 cats and 4000 dogs and tests on 2023 images. A smaller set is split in the same ratio.
    whole = sum(len(found) for found in files.values())
    scale = min(1.0, whole / (4005 + 4000 + 2023))
    train: list[tuple[Path, int]] = []
    rest: list[tuple[Path, int]] = []
    for label, (kind, wanted) in enumerate((("cat", 4005), ("dog", 4000))):
        order = rng.permutation(len(files[kind])).tolist()
        cut = round(wanted * scale)
        train += [(files[kind][i], label) for i in sorted(order[:cut])]
        rest += [(files[kind][i], label) for i in sorted(order[cut:])]
    test = [rest[i] for i in sorted(rng.permutation(len(rest))[: round(2023 * scale)].tolist())]
    return Published("", ("cat", "dog"), _listed(train), _listed(test))


def _two_folders(train: str, test: str) -> Callable[[Path, np.random.Generator], Published]:
    """Class folders that are already split. The test folder may lack classes, but all of its classes must be known."""

    def read(folder: Path, rng: np.random.Generator) -> Published:
        classes, known = folders(folder / train)
        others, held = folders(folder / test)
        unknown = sorted(set(others) - set(classes))
        if unknown:
            raise DataError(f"{folder / test} has classes that {folder / train} lacks: {', '.join(unknown[:5])}.")
        labels = tuple(classes.index(others[label]) for label in held.labels)
        return Published("", classes, known, replace(held, labels=labels))

    return read


def _flowers(folder: Path, rng: np.random.Generator) -> Published:
    labels = _matlab(folder / "imagelabels.mat")["labels"].ravel().astype(int) - 1
    sets = _matlab(folder / "setid.mat")
    places = {path.name: path for path in folder.rglob("image_*.jpg")}  # in `jpg`, or in class folders

    def samples(*parts: str) -> Samples:
        ids = sorted(np.concatenate([sets[part].ravel().astype(int) for part in parts]).tolist())
        names = {i: f"image_{i:05d}.jpg" for i in ids}
        return _listed([(places.get(name, folder / "jpg" / name), int(labels[i - 1])) for i, name in names.items()])

    classes = tuple(str(i + 1) for i in range(int(labels.max()) + 1))
    return Published("", classes, samples("trnid", "valid"), samples("tstid"))


def _cifar10(folder: Path, rng: np.random.Generator) -> Published:
    root = folder if (folder / "test_batch.bin").exists() else folder / "cifar-10-batches-bin"
    if not (root / "test_batch.bin").exists():
        raise DataError(
            f"{folder} has no test_batch.bin.", fix="use the binary version of CIFAR-10; pickles are not read"
        )
    named = root / "batches.meta.txt"
    classes = tuple(named.read_text().split()) if named.exists() else tuple(str(i) for i in range(10))

    def samples(files: list[Path]) -> Samples:
        records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
        pixels = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy())
        return Samples(pixels, tuple(records[:, 0].astype(int).tolist()))

    batches = sorted(root.glob("data_batch_*.bin"))
    if not batches:
        raise DataError(f"{root} has no data_batch_1.bin.")
    return Published("", classes, samples(batches), samples([root / "test_batch.bin"]))


def _aircraft(folder: Path, rng: np.random.Generator) -> Published:
    root = folder / "data" if (folder / "data").is_dir() else folder

    def pairs(part: str) -> list[tuple[str, str]]:
        lines = _lines(root / f"images_variant_{part}.txt")
        return [(number, variant) for number, variant in (line.split(" ", 1) for line in lines)]

    train, test = pairs("trainval"), pairs("test")
    classes = tuple(sorted({variant for _, variant in train}))
    return Published(
        "",
        classes,
        _listed([(root / "images" / f"{n}.jpg", classes.index(v)) for n, v in train]),
        _listed([(root / "images" / f"{n}.jpg", classes.index(v)) for n, v in test]),
    )


def _birds(folder: Path, rng: np.random.Generator) -> Published:
    root = folder / "CUB_200_2011" if (folder / "CUB_200_2011").is_dir() else folder
    if not (root / "images.txt").exists() and (root / "train").is_dir():
        return _two_folders("train", "test")(root, rng)

    def table(name: str) -> dict[str, str]:
        return dict(line.split(" ", 1) for line in _lines(root / name))

    files, labels, training = table("images.txt"), table("image_class_labels.txt"), table("train_test_split.txt")
    classes = table("classes.txt")
    numbers = {key: i for i, key in enumerate(classes)}
    rows = [(root / "images" / files[key], numbers[labels[key]], training[key] == "1") for key in files]
    return Published(
        "",
        tuple(classes.values()),
        _listed([(file, label) for file, label, train in rows if train]),
        _listed([(file, label) for file, label, train in rows if not train]),
    )


def _cars(folder: Path, rng: np.random.Generator) -> Published:
    if not (folder / "devkit").is_dir():
        return _two_folders("train", "test")(folder, rng)
    names = [str(name) for name in _matlab(folder / "devkit" / "cars_meta.mat", flat=True)["class_names"]]

    def samples(part: str, *annotations: str) -> Samples:
        places = [folder / "devkit" / a for a in annotations] + [folder / a for a in annotations]
        found = next((p for p in places if p.exists()), None)
        if found is None:
            raise DataError(f"{folder} has none of {', '.join(annotations)}: the labels of cars_{part} are needed.")
        rows = np.atleast_1d(_matlab(found, flat=True)["annotations"])
        return _listed([(folder / f"cars_{part}" / str(row.fname), int(getattr(row, "class")) - 1) for row in rows])

    return Published(
        "",
        tuple(names),
        samples("train", "cars_train_annos.mat"),
        samples("test", "cars_test_annos_withlabels.mat"),
    )


def _ilsvrc(folder: Path, rng: np.random.Generator) -> Published:
    train = next((n for n in ("train", "reference") if (folder / n).is_dir()), "train")
    test = next((n for n in ("val", "test") if (folder / n).is_dir()), "val")
    for part in (train, test):
        if not (folder / part).is_dir():
            raise DataError(f"{folder} has no folder `{part}` with one folder per WordNet id.")
    return _two_folders(train, test)(folder, rng)


_READERS: dict[str, Callable[[Path, np.random.Generator], Published]] = {
    "scene15": _shared(0.2),
    "event8": _shared(0.4),
    "catsdogs": _catsdogs,
    "flowers102": _flowers,
    "cifar10": _cifar10,
    "aircraft": _aircraft,
    "birds": _birds,
    "cars": _cars,
    "ilsvrc": _ilsvrc,
}


def _listed(rows: Sequence[tuple[Path, int]]) -> Samples:
    missing = next((file for file, _ in rows if not file.exists()), None)
    if missing is not None:
        raise DataError(f"the lists name {missing}, which does not exist.")
    return Samples(tuple(file for file, _ in rows), tuple(label for _, label in rows))


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise DataError(f"{path} does not exist; it lists the images and their classes.")
    return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]


def _matlab(path: Path, flat: bool = False) -> dict[str, Any]:
    if not path.exists():
        raise DataError(f"{path} does not exist; it lists the images and their classes.")
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise DataError(f"reading {path.name} needs scipy.", fix="pip install scipy") from error
    found: dict[str, Any] = loadmat(path, struct_as_record=not flat, squeeze_me=flat)
    return found
