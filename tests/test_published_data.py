"""The paper's data sets, read from made folders of the published layouts."""

import numpy as np
import pytest
import torch

from image_sets import classes, picture
from reproduction.published import Samples, names, published
from secateur.data.views import View
from secateur.errors import DataError

pytest.importorskip("PIL")
VIEW = View(16, "squash")


def counts(samples):
    return np.bincount(samples.labels).tolist()


def paired(samples):
    return zip(samples.source, samples.labels, strict=True)


@pytest.mark.parametrize(("name", "share"), [("scene15", 0.2), ("event8", 0.4)])
def test_a_share_of_every_class_is_for_training(tmp_path, name, share):
    folder = classes(tmp_path, ["coast", "forest", "street"], 10)
    found = published(name, folder)
    assert found.classes == ("coast", "forest", "street")
    assert counts(found.train) == [round(10 * share)] * 3
    assert counts(found.test) == [10 - round(10 * share)] * 3
    assert not set(found.train.source) & set(found.test.source)
    for samples in (found.train, found.test):
        assert all(path.parent.name == found.classes[label] for path, label in paired(samples))
    assert published(name, folder).train == found.train
    assert published(name, folder, seed=1).train != found.train


def test_cats_and_dogs_in_class_folders(tmp_path):
    classes(tmp_path / "train", ["cat", "dog"], 4)
    classes(tmp_path / "test", ["cat", "dog"], 3, seed=1)
    found = published("catsdogs", tmp_path)
    assert (found.classes, counts(found.train), counts(found.test)) == (("cat", "dog"), [4, 4], [3, 3])


def test_cats_and_dogs_as_kaggle_has_them(tmp_path):
    (tmp_path / "train").mkdir()
    for i in range(5100):
        for kind in ("cat", "dog"):
            (tmp_path / "train" / f"{kind}.{i}.jpg").touch()
    found = published("catsdogs", tmp_path)
    assert counts(found.train) == [4005, 4000]
    assert len(found.test) == 2023
    assert not set(found.train.source) & set(found.test.source)
    assert all(path.name.startswith(("cat", "dog")[label]) for path, label in paired(found.test))


def test_flowers_train_on_two_of_the_official_sets(tmp_path):
    io = pytest.importorskip("scipy.io")
    rng = np.random.default_rng(0)
    for i in range(1, 10):
        picture(tmp_path / "jpg" / f"image_{i:05d}.jpg", rng, i)
    io.savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[1, 2, 3, 1, 2, 3, 1, 2, 3]])})
    io.savemat(tmp_path / "setid.mat", {"trnid": [[1, 5]], "valid": [[2]], "tstid": [[3, 4, 6, 7, 8, 9]]})
    found = published("flowers102", tmp_path)
    assert [(path.name, label) for path, label in paired(found.train)] == [
        ("image_00001.jpg", 0), ("image_00002.jpg", 1), ("image_00005.jpg", 1),
    ]  # fmt: skip
    assert found.test.labels == (2, 0, 2, 0, 1, 2)
    for i, label in ((3, "3"), (9, "3")):  # copies in class folders are common
        (tmp_path / "test" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "jpg" / f"image_{i:05d}.jpg").rename(tmp_path / "test" / label / f"image_{i:05d}.jpg")
    again = published("flowers102", tmp_path)
    assert [(path.name, label) for path, label in paired(again.test)] == [
        (path.name, label) for path, label in paired(found.test)
    ]
    (tmp_path / "test" / "3" / "image_00009.jpg").unlink()
    with pytest.raises(DataError, match=r"image_00009\.jpg, which does not exist"):
        published("flowers102", tmp_path)


def test_cifar_comes_as_bytes_and_is_scaled_to_what_the_network_sees(tmp_path):
    root = tmp_path / "cifar-10-batches-bin"
    root.mkdir()
    with pytest.raises(DataError, match="binary version"):
        published("cifar10", tmp_path)
    flat = np.array([50, 100, 150], np.uint8).repeat(1024)  # one colour per channel
    for number in (1, 2):
        records = [np.concatenate([[np.uint8(label)], flat]) for label in (number, 9)]
        (root / f"data_batch_{number}.bin").write_bytes(np.concatenate(records).tobytes())
    (root / "test_batch.bin").write_bytes(
        np.concatenate([[np.uint8(3)], np.arange(3072) % 251]).astype(np.uint8).tobytes()
    )
    found = published("cifar10", tmp_path)
    assert (found.train.labels, found.test.labels) == ((1, 9, 2, 9), (3,))
    same = found.test.pixels(View(32, "squash"))
    assert same[0].flatten().tolist() == (np.arange(3072) % 251).tolist()
    large = found.train.pixels(View(224, "squash"), training=True)
    assert (large.shape, large.dtype) == ((4, 3, 256, 256), torch.uint8)
    assert [large[0, c].unique().tolist() for c in range(3)] == [[50], [100], [150]]


def test_aircraft_by_variant(tmp_path):
    rng = np.random.default_rng(0)
    for i, part in enumerate(("trainval", "trainval", "test")):
        picture(tmp_path / "data" / "images" / f"{i:07d}.jpg", rng, i)
        with (tmp_path / "data" / f"images_variant_{part}.txt").open("a") as file:
            file.write(f"{i:07d} {('DHC-8-100', 'Boeing 717', 'DHC-8-100')[i]}\n")
    found = published("aircraft", tmp_path)
    assert found.classes == ("Boeing 717", "DHC-8-100")
    assert (found.train.labels, found.test.labels) == ((1, 0), (1,))
    assert found.test.source[0].name == "0000002.jpg"


def test_birds_by_the_lists_of_cub(tmp_path):
    root = tmp_path / "CUB_200_2011"
    rng = np.random.default_rng(0)
    rows = [("001.Albatross/a.jpg", 1, 1), ("002.Auklet/b.jpg", 2, 0), ("002.Auklet/c.jpg", 2, 1)]
    for i, (name, _, _) in enumerate(rows):
        picture(root / "images" / name, rng, i)
    (root / "classes.txt").write_text("1 001.Albatross\n2 002.Auklet\n")
    (root / "images.txt").write_text("".join(f"{i + 1} {name}\n" for i, (name, _, _) in enumerate(rows)))
    (root / "image_class_labels.txt").write_text("".join(f"{i + 1} {label}\n" for i, (_, label, _) in enumerate(rows)))
    (root / "train_test_split.txt").write_text("".join(f"{i + 1} {train}\n" for i, (_, _, train) in enumerate(rows)))
    found = published("birds", tmp_path)
    assert found.classes == ("001.Albatross", "002.Auklet")
    assert (found.train.labels, found.test.labels) == ((0, 1), (1,))


def test_birds_by_folders(tmp_path):
    classes(tmp_path / "train", ["001.Albatross", "002.Auklet"], 2)
    classes(tmp_path / "test", ["001.Albatross", "002.Auklet"], 1)
    found = published("birds", tmp_path)
    assert found.classes == ("001.Albatross", "002.Auklet")
    assert (found.train.labels, found.test.labels) == ((0, 0, 1, 1), (0, 1))


def test_cars_by_the_annotations_or_by_folders(tmp_path):
    io = pytest.importorskip("scipy.io")
    rng = np.random.default_rng(0)
    kind = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
    for part, rows in (("train", [(2, "00001.jpg"), (1, "00002.jpg")]), ("test", [(2, "00001.jpg")])):
        for i, (_, name) in enumerate(rows):
            picture(tmp_path / f"cars_{part}" / name, rng, i)
        annotations = np.array([(0, label, name) for label, name in rows], dtype=kind)
        file = {"train": "cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}[part]
        (tmp_path / "devkit").mkdir(exist_ok=True)
        io.savemat(tmp_path / "devkit" / file, {"annotations": annotations})
    meta = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)
    io.savemat(tmp_path / "devkit" / "cars_meta.mat", {"class_names": meta})
    found = published("cars", tmp_path)
    assert found.classes == ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
    assert (found.train.labels, found.test.labels) == ((1, 0), (1,))
    other = tmp_path / "folders"
    classes(other / "train", ["Audi", "BMW"], 2)
    classes(other / "test", ["BMW"], 2)
    assert published("cars", other).test.labels == (1, 1)


@pytest.mark.parametrize("parts", [("train", "val"), ("reference", "test")])
def test_imagenet_folders_of_any_classes(tmp_path, parts):
    classes(tmp_path / parts[0], ["n01440764", "n02102040"], 3)
    classes(tmp_path / parts[1], ["n01440764", "n02102040"], 2)
    found = published("ilsvrc", tmp_path)
    assert found.classes == ("n01440764", "n02102040")
    assert (counts(found.train), counts(found.test)) == ([3, 3], [2, 2])
    classes(tmp_path / parts[1], ["a", "b", "n09999999"], 1)
    with pytest.raises(DataError, match=r"classes that .* lacks"):
        published("ilsvrc", tmp_path)


def test_files_become_bytes_of_the_size_the_network_sees(tmp_path):
    from PIL import Image

    Image.fromarray(np.full((30, 10), 77, np.uint8)).save(tmp_path / "grey.png")
    samples = Samples((tmp_path / "grey.png",), (0,))
    assert samples.pixels(VIEW).shape == (1, 3, 16, 16)
    large = samples.pixels(VIEW, training=True)
    assert large.shape == (1, 3, 18, 18)
    assert large.unique().tolist() == [77]
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"broken\.png"):
        Samples((tmp_path / "broken.png",), (0,)).pixels(VIEW)


def test_what_is_not_there_is_named(tmp_path):
    assert set(names()) == {
        "scene15", "event8", "catsdogs", "flowers102", "cifar10", "aircraft", "birds", "cars", "ilsvrc",
    }  # fmt: skip
    with pytest.raises(DataError, match="the data set 'mnist' is not known"):
        published("mnist", tmp_path)
    with pytest.raises(DataError, match="not a folder"):
        published("scene15", tmp_path / "absent")
    with pytest.raises(DataError, match="images_variant_trainval"):
        published("aircraft", tmp_path)
    with pytest.raises(DataError, match="no folder `train`"):
        published("ilsvrc", tmp_path)
    with pytest.raises(DataError, match=r"neither train/cat"):
        published("catsdogs", tmp_path)
