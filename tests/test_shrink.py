"""A smaller copy of a data set has the same files at the same places, and the same pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from photos import camera_notes
from reproduction.__main__ import commands
from reproduction.published import published
from reproduction.shrink import shrink
from secateur.errors import DataError


def photograph(path: Path, width: int, height: int, **more: object) -> Path:
    """Smooth, so that what scaling and JPEG change is little."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([255 * x, 255 * y, 127 * (x + y)], 2).astype(np.uint8)
    Image.fromarray(pixels).save(path, **more)  # type: ignore[arg-type]
    return path


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    source = tmp_path / "birds"
    for part in ("train", "test"):
        photograph(source / part / "001.Albatross" / "a.jpg", 120, 80)
        photograph(source / part / "002.Auklet" / "b.jpg", 60, 90)
    photograph(source / "train" / "002.Auklet" / "small.png", 24, 20)
    (source / "notes.txt").write_text("which birds")
    return source


def test_the_copy_is_smaller_and_shows_the_same(birds: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    assert shrink(birds, out, 40) == 4
    names = [{str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} for folder in (birds, out)]
    assert names[0] == names[1]
    assert (out / "notes.txt").read_text() == "which birds"
    assert (out / "train/002.Auklet/small.png").read_bytes() == (birds / "train/002.Auklet/small.png").read_bytes()
    for name, size in (("001.Albatross/a.jpg", (60, 40)), ("002.Auklet/b.jpg", (40, 60))):
        with Image.open(out / "train" / name) as made, Image.open(birds / "train" / name) as given:
            assert made.size == size
            assert made.format == "JPEG"
            expected = given.resize(size, Image.Resampling.BICUBIC)
            assert np.abs(np.asarray(made, float) - np.asarray(expected, float)).mean() < 3
    first, second = (published("birds", folder) for folder in (birds, out))
    assert first.classes == second.classes == ("001.Albatross", "002.Auklet")
    assert first.train.labels == second.train.labels == (0, 1, 1)
    assert first.test.labels == second.test.labels == (0, 1)


def test_what_is_turned_stays_turned(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[274] = 6  # the camera was held upright
    photograph(tmp_path / "in" / "a.jpg", 120, 80, exif=turned)
    shrink(tmp_path / "in", tmp_path / "out", 40)
    with Image.open(tmp_path / "out" / "a.jpg") as made:
        assert made.getexif()[274] == 6


def test_what_a_camera_wrote_besides_does_no_harm(tmp_path: Path) -> None:
    photograph(tmp_path / "in" / "a.jpg", 120, 80, exif=camera_notes(8))
    assert shrink(tmp_path / "in", tmp_path / "out", 40) == 1
    with Image.open(tmp_path / "out" / "a.jpg") as made:
        assert made.size == (60, 40)
        assert made.getexif()[274] == 8


def test_a_stopped_copy_goes_on(birds: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    shrink(birds, out, 40)
    kept, gone = out / "test" / "001.Albatross" / "a.jpg", out / "test" / "002.Auklet" / "b.jpg"
    before, whole = kept.stat().st_mtime_ns, gone.read_bytes()
    gone.unlink()
    assert shrink(birds, out, 40) == 1
    assert kept.stat().st_mtime_ns == before
    assert gone.read_bytes() == whole


def test_what_cannot_be_copied_is_named(birds: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        shrink(tmp_path / "none", tmp_path / "out")
    with pytest.raises(DataError, match="is inside"):
        shrink(birds, birds / "small")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no picture")
    with pytest.raises(DataError, match="no photographs"):
        shrink(tmp_path / "texts", tmp_path / "out")
    broken = birds / "train" / "001.Albatross" / "a.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    with pytest.raises(DataError, match=r"a\.jpg cannot be made smaller"):
        shrink(birds, tmp_path / "out", 40)
    assert not list((tmp_path / "out").rglob("*.part"))


def test_the_command(birds: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(commands, ["shrink", str(birds), str(tmp_path / "out"), "--side", "40"])
    assert result.exit_code == 0, result.output
    assert "4 photographs were made smaller" in result.output
    assert (tmp_path / "out" / "notes.txt").exists()
