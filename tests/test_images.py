"""Photographs in folders: against torchvision's transforms, with broken files, by seed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as T

from photos import camera_notes, write_photos
from secateur.cli.image_task import digest
from secateur.data.images import images_in, load, read
from secateur.data.views import IMAGENET_MEAN, IMAGENET_STD, View
from secateur.errors import DataError, SecateurWarning


@settings(max_examples=25, deadline=None)
@given(st.integers(20, 90), st.integers(20, 90), st.integers(8, 40), st.integers(0, 99))
def test_crop_and_squash_are_what_torchvision_does(tmp_path_factory, width, height, size, seed) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("one") / "a.png"
    image = Image.fromarray(pixels)
    image.save(path)
    end = [T.ToTensor(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    view = View(size)
    ours, _ = load([path], view)
    side = round(size * 256 / 224)
    # A crop of `side`, then of `size`, differs from one of `size` by half a pixel where `side - size` is odd.
    theirs = T.Compose([T.Resize(side), T.CenterCrop(side), *end])(image)
    margin = (side - size) // 2
    assert torch.allclose(ours[0], theirs[:, margin : margin + size, margin : margin + size], atol=1e-6)
    squashed, _ = load([path], View(size, "squash"))
    assert torch.allclose(squashed[0], T.Compose([T.Resize((size, size)), *end])(image), atol=1e-6)


def test_the_usual_size_is_exactly_the_weights_transform(tmp_path: Path) -> None:
    from torchvision.models import ResNet50_Weights

    pixels = np.random.default_rng(0).integers(0, 256, (301, 411, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    expected = ResNet50_Weights.IMAGENET1K_V1.transforms(antialias=True)(Image.fromarray(pixels))
    assert torch.allclose(load([tmp_path / "a.png"])[0][0], expected, atol=1e-6)


def test_classes_labels_and_targets(tmp_path: Path) -> None:
    photos = read(write_photos(tmp_path / "set"), size=16)
    assert photos.classes == ("blue", "green", "red")
    assert photos.counts == {"blue": 4, "green": 4, "red": 4}
    x, y = photos.numbered([7, 3, 5]).tensors()
    assert x.shape == (12, 3, 16, 16)
    assert y.tolist() == [7] * 4 + [3] * 4 + [5] * 4
    # The strongest channel of each picture tells its class.
    assert View(16).picture(x).mean((2, 3)).argmax(1).tolist() == [2] * 4 + [1] * 4 + [0] * 4
    chosen = photos.numbered([7, 3, 5]).of(["red", "blue"])
    assert chosen.targets == (5, 7)
    assert [p.parent.name for p in chosen.paths] == [chosen.classes[label] for label in chosen.labels]


def test_batches_repeat_and_hold_everything_in_order(tmp_path: Path) -> None:
    photos = read(write_photos(tmp_path / "set"), size=16)
    whole, targets = photos.tensors()
    batches = photos.batches(5)
    assert len(batches) == 3
    for _ in range(2):
        parts = list(batches)
        assert [len(y) for _, y in parts] == [5, 5, 2]
        assert torch.equal(torch.cat([x for x, _ in parts]), whole)
        assert torch.equal(torch.cat([y for _, y in parts]), targets)


def test_training_crops_and_mirrors_and_follows_the_seed(tmp_path: Path) -> None:
    photos = read(write_photos(tmp_path / "set"), size=16)
    stored, _ = photos.pixels(training=True)
    assert stored.shape[-1] == 18
    view = photos.view
    torch.manual_seed(3)
    made = view.training(stored)
    # Every result is one of the 3 x 3 x 2 crops of its image.
    for image, result in zip(stored, made, strict=True):
        crops = [
            image[:, i : i + 16, j : j + 16] if not flip else image[:, i : i + 16, j : j + 16].flip(2)
            for i in range(3) for j in range(3) for flip in (False, True)
        ]  # fmt: skip
        assert sum(torch.equal(view.normalise(crop), result) for crop in crops) == 1
    batches = photos.training(4)
    torch.manual_seed(1)
    first, second = list(batches), list(batches)
    torch.manual_seed(1)
    again = list(batches)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))
    assert sorted(torch.cat([y for _, y in first]).tolist()) == [0] * 4 + [1] * 4 + [2] * 4


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40), st.floats(0.05, 0.95))
def test_split_parts_each_class(tmp_path_factory, seed, share) -> None:
    root = tmp_path_factory.getbasetemp() / "split"
    if not root.exists():
        write_photos(root, per_class=7)
    photos = read(root)
    first, rest = photos.split(share, seed)
    assert sorted([*first.paths, *rest.paths]) == sorted(photos.paths)
    assert set(first.counts.values()) == {min(max(1, round(7 * share)), 6)}
    assert photos.split(share, seed)[0] == first


def test_draws_follow_the_seed_and_not_the_other_classes(tmp_path: Path) -> None:
    photos = read(write_photos(tmp_path / "set", per_class=9), size=16)
    drawn = photos.draw(3, seed=5)
    assert drawn.counts == {"blue": 3, "green": 3, "red": 3}
    alone = photos.draw(3, ["red"], seed=5)
    assert [p for p in drawn.paths if p.parent.name == "red"] == list(alone.paths)
    assert len({photos.draw(3, seed=s).paths for s in range(6)}) > 1
    with pytest.raises(DataError, match="class 'blue' has 9 usable images, 10 were asked for"):
        photos.draw(10)


def test_broken_images_are_named_and_skipped_or_refused(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set")
    (root / "red" / "nonsense.jpg").write_bytes(b"this is no picture")
    whole = (root / "red" / "00.png").read_bytes()
    (root / "red" / "cut.png").write_bytes(whole[: len(whole) // 2])  # its head is fine
    with pytest.warns(SecateurWarning, match=r"1 broken image: .*nonsense\.jpg"):
        photos = read(root, size=16)
    with pytest.warns(SecateurWarning, match=r"1 broken image: .*cut\.png"):
        x, _ = photos.tensors()
    assert len(x) == 12
    assert len(photos.tensors()[0]) == 12  # said once, skipped always
    with pytest.raises(DataError, match=r"nonsense\.jpg"):
        read(root, strict=True)
    (root / "red" / "nonsense.jpg").unlink()
    with pytest.raises(DataError, match=r"cut\.png.*Fix"):
        read(root, strict=True).tensors()


def test_a_draw_passes_over_broken_images(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set", per_class=4)
    whole = (root / "red" / "00.png").read_bytes()
    (root / "red" / "01.png").write_bytes(whole[: len(whole) // 2])
    photos = read(root, size=16)
    with pytest.warns(SecateurWarning, match=r"01\.png"):
        drawn = photos.draw(3)
    assert drawn.counts["red"] == 3
    assert root / "red" / "01.png" not in drawn.paths


def test_grey_transparent_deep_and_turned_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    grey = rng.integers(0, 256, (30, 30), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(grey).convert("LA").save(tmp_path / "alpha.png")
    colour = Image.fromarray(rng.integers(0, 256, (30, 30, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn me a quarter to the right"
    colour.save(tmp_path / "turned.png", exif=exif)
    colour.rotate(-90, expand=True).save(tmp_path / "upright.png")
    names = ["grey.png", "deep.png", "alpha.png", "turned.png", "upright.png"]
    x, _ = load([tmp_path / name for name in names], View(26, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert torch.equal(x[0, 0], x[0, 1])
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[0], x[2])
    assert torch.equal(x[3], x[4])
    one, _ = load([tmp_path / "grey.png"], View(26, mean=(0.0,), std=(1.0,)))
    assert torch.equal(one[0, 0], x[0, 0])


#: What a viewer does with rows and columns for each way of holding a camera, by the text of EXIF: where its first row
#: and its first column are.
_SEEN = {
    1: lambda a: a,  # top, left
    2: lambda a: a[:, ::-1],  # top, right
    3: lambda a: a[::-1, ::-1],  # bottom, right
    4: lambda a: a[::-1],  # bottom, left
    5: lambda a: a.swapaxes(0, 1),  # left, top
    6: lambda a: a[::-1].swapaxes(0, 1),  # right, top
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),  # right, bottom
    8: lambda a: a[:, ::-1].swapaxes(0, 1),  # left, bottom
}


@pytest.mark.parametrize("held", _SEEN)
def test_photographs_are_upright_whatever_else_a_camera_wrote(held: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=camera_notes(held))
    with Image.open(tmp_path / "a.png") as file, pytest.raises(TypeError):
        file.getexif().tobytes()  # so that the picture is one of those
    seen = View(20, "squash").decode(tmp_path / "a.png").permute(1, 2, 0).numpy()
    assert np.array_equal(seen, _SEEN[held](pixels))


@pytest.mark.parametrize("notes", [b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0nothing", camera_notes(9)])
def test_damaged_metadata_do_not_spoil_a_photograph(notes: bytes, tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=notes)
    seen = View(20, "squash").decode(tmp_path / "a.png").permute(1, 2, 0).numpy()
    assert np.array_equal(seen, pixels)


def test_the_cache_does_not_change_what_is_seen(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set")
    small, large = read(root, size=16), read(root, size=16)
    small.decoder.room = 1000  # less than two images
    assert torch.equal(small.tensors()[0], large.tensors()[0])
    for path in root.rglob("*.png"):
        path.unlink()
    assert len(large.tensors()[0]) == 12  # from memory


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: root / "absent", "is not a folder"),
        (lambda root: root, "has no class folders"),
        (lambda root: (Image.new("RGB", (4, 4)).save(root / "a.png"), root)[1], "has no class folders, but 1 images"),
        (lambda root: ((root / "cat").mkdir(), root)[1], "'cat' has 0, at least 1 needed"),
    ],
)
def test_empty_folders_are_refused(tmp_path: Path, make, says) -> None:
    with pytest.raises(DataError, match=says):
        read(make(tmp_path))


def test_too_few_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'blue' has 4, .*at least 5 needed"):
        read(write_photos(tmp_path / "set"), least=5)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pictures_of_32_bits_are_refused_for_nothing_says_what_is_white(kind: type, tmp_path: Path) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (20, 20)).astype(kind)
    Image.fromarray(pixels / kind(255) if kind is np.float32 else pixels).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif.*no known range; save it with 8 or 16 bits"):
        load([tmp_path / "a.tif"], strict=True)


def test_links_are_followed_and_hidden_folders_are_not(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set", ("cat", "dog"), per_class=2)
    more = write_photos(tmp_path / "more", ("shared",), per_class=3) / "shared"
    (root / "cat" / "linked").symlink_to(more)
    (root / "cat" / "round").symlink_to(root)
    (root / "dog" / "again").symlink_to(root / "dog")
    (root / "dog" / ".ipynb_checkpoints").mkdir()
    (root / "dog" / ".ipynb_checkpoints" / "00-checkpoint.png").write_bytes((root / "dog" / "00.png").read_bytes())
    names = [path.relative_to(root / "cat").as_posix() for path in images_in(root / "cat")]
    assert names == ["00.png", "01.png", "linked/00.png", "linked/01.png", "linked/02.png"]
    assert [path.name for path in images_in(root / "dog")] == ["00.png", "01.png"]


def test_a_folder_that_may_not_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, listed = write_photos(tmp_path / "set", ("cat", "dog")), os.scandir
    (root / "cat" / "locked").mkdir()

    def scandir(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"the folder .*locked cannot be read: Permission denied.*Fix"):
        read(root)


def test_pictures_that_are_rarely_readable_are_named(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set", ("cat", "dog"))
    (root / "cat" / "phone.HEIC").write_bytes(b"\0\0\0\x24ftypheic")
    with pytest.warns(SecateurWarning, match=r"1 broken image: .*phone\.HEIC"):
        assert read(root).counts == {"cat": 4, "dog": 4}


def test_pictures_that_lie_elsewhere_or_have_another_ending_are_not_passed_over(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set", ("cat", "dog"))
    picture = (root / "cat" / "00.png").read_bytes()
    (root / "loose.png").write_bytes(picture)
    with pytest.warns(SecateurWarning, match=r"1 picture beside the class folders of .*set is left out.*loose\.png"):
        assert read(root).counts == {"cat": 4, "dog": 4}
    with pytest.raises(DataError, match=r"loose\.png.*Fix"):
        read(root, strict=True)
    (root / "loose.png").unlink()
    (root / "cat" / "without_ending").write_bytes(picture)
    (root / "cat" / "notes.txt").write_text("no picture")
    with pytest.warns(SecateurWarning, match=r"1 picture .*unknown ending is left out.*without_ending.*Fix: .*\.jpg"):
        assert read(root).counts == {"cat": 4, "dog": 4}
    (root / "cat" / "without_ending").unlink()
    (root / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.warns(SecateurWarning, match=r"1 broken image: .*gone\.png"):
        assert read(root).counts == {"cat": 4, "dog": 4}


def test_names_that_are_no_text(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    root = write_photos(tmp_path / "set", ("cat", "dog"))
    try:
        (root / "cat" / "00.png").rename(root / "cat" / f"{odd}.png")
    except OSError:
        pytest.skip("this system has no such names")
    photos = read(root)
    assert photos.draw(4).counts == {"cat": 4, "dog": 4}
    assert digest(photos).startswith("8 images")
    (root / "cat").rename(root / odd)
    with pytest.raises(DataError, match=r"caf.*is no text in UTF-8.*Fix: another name"):
        read(root)


@pytest.mark.parametrize("size", [(3000, 2), (2, 3000)])
def test_a_thin_picture_takes_no_more_memory_than_others(size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    whole = T.Compose([T.Resize(18), T.CenterCrop(18), T.PILToTensor()])(Image.fromarray(pixels))
    made, resize = [], Image.Image.resize

    def watched(image, *args, **options):
        made.append(resize(image, *args, **options))
        return made[-1]

    monkeypatch.setattr(Image.Image, "resize", watched)
    seen = View(16).decode(tmp_path / "a.png")
    centre = whole[:, 1:17, 1:17].int()
    assert int((seen.int() - centre).abs().max()) <= 1  # a centre that is a few millionths of a pixel off
    assert all(np.prod(image.size) <= 18 * 18 for image in made)
