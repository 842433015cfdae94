"""Images are prepared as a zoo's own transforms prepare them: timm's, torchvision's, transformers' processors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

import secateur as sc
from command import invoke, succeed
from photos import write_photos
from secateur.cli.options import Seen
from secateur.cli.output import prepared
from secateur.data.images import load
from secateur.data.views import View
from secateur.errors import DataError, ModelError
from secateur.models import Origin, build, open_model
from secateur.models.hub import hub_view
from secateur.models.origin import view_of
from secateur.models.preparation import processor_view, timm_view, torchvision_view

timm = pytest.importorskip("timm")

NOTES = {"input_size": (3, 24, 24), "crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.2,) * 3}
# Wide, high, smaller than the input, and as long as it is wide; the spare pixels are even and odd.
SIZES = ((411, 301), (97, 150), (20, 31), (60, 60), (101, 64))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    paths = [folder / f"{wide}x{high}.png" for wide, high in SIZES]
    for path, (wide, high) in zip(paths, SIZES, strict=True):
        Image.fromarray(rng.integers(0, 256, (high, wide, 3), dtype=np.uint8)).save(path)
    return paths


def same(view: View, theirs: Any, paths: list[Path]) -> None:
    """Both scale with Pillow, so the bytes are equal; the division after it may be rounded differently."""
    ours, _ = load(paths, view)
    expected = torch.stack([theirs(Image.open(path)) for path in paths])
    assert ours.shape == expected.shape
    assert float((ours - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("mode", ["center", "squash", "border", None])
@pytest.mark.parametrize("share", [0.875, 0.9, 1.0, 1.15, None])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest", "lanczos", None])
def test_what_timm_notes_is_what_its_transform_does(mode, share, interpolation, pictures) -> None:
    notes = {**NOTES, "crop_mode": mode, "crop_pct": share, "interpolation": interpolation}
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(notes))
    same(timm_view("timm:some", notes), theirs, pictures)


@pytest.mark.parametrize("share", [0.9, 1.15])
@pytest.mark.parametrize("size", [(1200, 3), (3, 1200)])
def test_thin_pictures(share: float, size: tuple[int, int], tmp_path: Path) -> None:
    path, rng = tmp_path / "thin.png", np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    notes = {**NOTES, "crop_pct": share, "interpolation": "bilinear", "mean": (0.0,) * 3, "std": (1.0,) * 3}
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(notes))(Image.open(path))
    ours = load([path], timm_view("timm:some", notes))[0][0]
    # Only their centre is computed, from a place that is a few millionths of a pixel off: one more or less of 255.
    assert round(255 * float((ours - theirs).abs().max())) <= 1


@pytest.mark.parametrize("name", ["test_resnet.r160_in1k", "test_vit3.r160_in1k", "test_efficientnet.r160_in1k"])
def test_a_model_of_timm_sees_what_timm_shows_it(name: str, pictures: list[Path]) -> None:
    opened = open_model(f"timm:{name}")
    config = timm.data.resolve_data_config({}, model=opened.model)
    same(opened.origin.view, timm.data.create_transform(**config), pictures)


def test_every_kind_of_notes_in_timm_can_be_followed(pictures: list[Path]) -> None:
    seen = set()
    for name in timm.list_pretrained():
        notes = timm.models.get_pretrained_cfg(name).to_dict()
        key = notes.get("crop_mode"), notes.get("interpolation"), notes.get("crop_pct"), tuple(notes["input_size"])
        if key[3][1] != key[3][2]:
            with pytest.raises(ModelError, match="no squares"):
                timm_view(f"timm:{name}", notes)
            continue
        view = timm_view(f"timm:{name}", notes)
        if key not in seen and view.size < 200:
            same(view, timm.data.create_transform(**timm.data.resolve_data_config(notes)), pictures[:1])
        seen.add(key)
    assert len(seen) > 50


def test_torchvision_presets(pictures: list[Path]) -> None:
    done = set()
    for name in torchvision.models.list_models(module=torchvision.models):
        for weights in torchvision.models.get_model_weights(name):
            preset = weights.transforms()
            view = torchvision_view(f"torchvision:{name}", Path("some") / weights.url.rpartition("/")[2])
            assert (view.mean, view.std) == (tuple(preset.mean), tuple(preset.std))
            if view not in done:
                same(view, preset, pictures[:2])
            done.add(view)
    assert len(done) > 15


def test_the_file_of_older_weights_has_its_own_recipe() -> None:
    newest = torchvision.models.ResNet50_Weights.DEFAULT.transforms().resize_size[0]
    old = torchvision.models.ResNet50_Weights.IMAGENET1K_V1
    for weights in (None, "default"):
        assert torchvision_view("torchvision:resnet50?num_classes=3", weights).resize == newest
    for file in (old.url.rpartition("/")[2], "mine.pt"):  # torchvision's training script, too, scales to 256
        assert torchvision_view("torchvision:resnet50", file).resize == 256 != newest


def test_a_network_for_another_size_keeps_the_proportion() -> None:
    net = nn.Identity()
    net.image_size = 448
    view = view_of(net, "torchvision:resnet50")
    assert (view.size, view.resize) == (448, 464)
    assert Seen(size=112).over(view).resize == 116


# -- transformers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "notes"),
    [
        ("ViT", {"size": {"height": 24, "width": 24}}),
        ("ViT", {"size": {"height": 24, "width": 24}, "resample": 3, "do_normalize": False}),
        ("Beit", {"size": 32, "do_center_crop": True, "crop_size": 24}),
        ("DeiT", {"size": 32, "crop_size": 24, "rescale_factor": 1 / 127.5}),
        ("CLIP", {"size": 28, "crop_size": 24}),
        ("Bit", {"size": {"shortest_edge": 32}, "crop_size": {"height": 24, "width": 24}, "do_rescale": False}),
        ("ConvNext", {"size": {"shortest_edge": 24}, "crop_pct": 0.75}),
        ("ConvNext", {"size": {"shortest_edge": 384}, "crop_pct": 0.875}),
        ("PoolFormer", {"size": {"shortest_edge": 24}, "crop_pct": 0.75, "crop_size": 24}),
        ("Levit", {"size": {"shortest_edge": 28}, "crop_size": 24}),
        ("EfficientNet", {"size": 24, "resample": 0, "rescale_offset": True}),
        ("EfficientNet", {"size": 24, "include_top": False}),
        ("MobileNetV2", {}),
    ],
)
def test_processors_of_transformers(kind: str, notes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, rng = tmp_path / "a.png", np.random.default_rng(0)
    # Of an odd number of spare pixels transformers cuts one more away on one side, torchvision sometimes on the other.
    Image.fromarray(rng.integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(path)
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")(**notes)
    view = processor_view("hf:some", theirs.to_dict())
    expected = torch.as_tensor(theirs(Image.open(path))["pixel_values"][0])
    ours = load([path], view)[0][0]
    assert ours.shape == expected.shape
    # In units of the bytes that both began with.
    byte = torch.tensor(view.std).view(-1, 1, 1) * 255
    assert float(((ours - expected) * byte).abs().max()) < 1e-2


def vit(folder: Path, **notes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(folder)
    if notes:
        (folder / "preprocessor_config.json").write_text(json.dumps(notes))
    return model


def test_what_a_processors_file_leaves_open_is_as_in_its_class(tmp_path: Path) -> None:
    notes = {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 16, "crop_pct": 0.8}
    model = vit(tmp_path, **notes)
    assert hub_view(f"hf:{tmp_path}", model) == View(16, "crop", (0.5,) * 3, (0.5,) * 3, 20, "bicubic")
    (tmp_path / "preprocessor_config.json").unlink()
    assert hub_view(f"hf:{tmp_path}", model) == View(16)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Some"}))  # of texts alone
    assert hub_view(f"hf:{tmp_path}", model) == View(16)
    model.config.pretrained_cfg = NOTES
    assert hub_view(f"hf:{tmp_path}", model) == timm_view("", NOTES)


def test_processors_of_images_and_texts_note_both_in_one_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", "5")
    model = vit(tmp_path)
    theirs = transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=16)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": theirs.to_dict()}))
    view = hub_view(f"hf:{tmp_path}", model)
    assert (view.size, view.scaled, view.interpolation) == (16, 20, "bicubic")
    assert (view.mean, view.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    (tmp_path / "processor_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"processor_config.json is damaged: it holds no settings"):
        open_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ({"image_processor_type": "MobileViTImageProcessor"}, "do_flip_channel_order"),
        ({"do_resize": False}, "do_resize = false"),
        ({"size": {"height": 16, "width": 24}}, "no squares"),
        ({"resample": 9}, "resample 9"),
    ],
)
def test_a_processor_that_cannot_be_followed_is_refused(notes: dict[str, Any], says: str, tmp_path: Path) -> None:
    vit(tmp_path, **notes)
    with pytest.raises(ModelError, match=rf"cannot be prepared as its image processor says .*{says}.*Fix"):
        open_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    "notes", [{"crop_mode": "spiral"}, {"interpolation": "random"}, {"input_size": (3, 8, 16)}, {"crop_pct": "much"}]
)
def test_notes_that_cannot_be_followed_are_refused(notes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"timm:some: images cannot be prepared as timm says.*Fix"):
        timm_view("timm:some", NOTES | notes)
    with pytest.raises(DataError, match=r"interpolation='random' is not known. Fix: one of"):
        View(interpolation="random")  # type: ignore[arg-type]


# -- commands ----------------------------------------------------------------------------------------------------------
def test_options_win() -> None:
    view = View(24, "squash", resize=30, interpolation="bicubic")
    assert Seen().over(view) == view
    assert Seen(size=48).over(view) == replace(view, size=48, resize=60)
    assert Seen(resize=26, interpolation="box").over(view) == replace(view, resize=26, interpolation="box")
    assert Seen(fit="squash").over(view) == view
    assert Seen(fit="crop").over(view).scaled == 27  # 8/7 of 24: the 30 were for another fit
    assert Seen(fit="pad").over(view).scaled == 24
    assert prepared(view) == "squeezed to 30 x 30, bicubic, then the centre of 24 x 24"
    assert prepared(View(fit="pad")) == "long side scaled to 224, bilinear, with borders in the colour of the mean"
    cut = "then the centre of 24 x 24, black around the image"
    assert prepared(View(24, resize=20)) == f"short side scaled to 20, bilinear, {cut}"
    assert prepared(View(24, "squash", resize=20)) == f"squeezed to 20 x 20, bilinear, {cut}"


def test_folders_without_these_notes_are_read_as_before(tmp_path: Path) -> None:
    origin = Origin("timm:test_resnet", View(24, "crop", (0.5,) * 3, (0.2,) * 3))
    old = json.loads(json.dumps(origin.to_dict()))
    assert old["view"] == {"size": 24, "fit": "crop", "mean": [0.5] * 3, "std": [0.2] * 3}  # so were they written
    assert Origin.from_dict(old, tmp_path) == origin
    new = replace(origin, view=timm_view("", NOTES))
    assert Origin.from_dict(json.loads(json.dumps(new.to_dict())), tmp_path) == new


@pytest.mark.parametrize("spec", ["timm:test_resnet.r160_in1k", "torchvision:shufflenet_v2_x0_5"])
def test_a_folder_written_in_python_sees_what_its_original_does(spec: str, tmp_path: Path) -> None:
    net = build(spec)
    small = sc.prune(net, (torch.rand(4, 3, 64, 64), torch.arange(4)), criterion="weight", remove=0.2, progress=False)
    sc.save(small, tmp_path / "m")
    assert open_model(str(tmp_path / "m"), original=spec).origin.view == view_of(net, spec, "mine.safetensors")


def test_commands_without_images_note_how_they_are_prepared(tmp_path: Path) -> None:
    spec, out = "timm:test_resnet.r160_in1k", tmp_path / "two"
    torch.save(build(spec).state_dict(), tmp_path / "w.pt")
    view = View(64, "squash", (0.5,) * 3, (0.5,) * 3, 70, "box")
    seen = ["--input-size", 64, "--fit", "squash", "--resize", 70, "--interpolation", "box"]
    seen += ["--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5"]
    succeed("specialize", spec, "--weights", tmp_path / "w.pt", "--outputs", "1,2", "--out", out, *seen)
    assert open_model(str(out)).origin.view == view
    found = succeed("export", spec, "--weights", tmp_path / "w.pt", "--out", tmp_path / "s.onnx", *seen)
    assert (found["fit"], found["resize"], found["interpolation"]) == ("squash", 70, "box")
    again = ["specialize", out, "--outputs", 1, "--onnx", "--out", tmp_path / "one"]
    assert f"({prepared(view)}), pixels from 0 to 1" in invoke(*again).stdout


def test_commands_agree_on_how_images_are_prepared(tmp_path: Path) -> None:
    spec, out = "timm:test_resnet.r160_in1k", tmp_path / "s"
    photos = write_photos(tmp_path / "set", ("cat", "dog"), per_class=3, size=(90, 70))
    args = ["--images", photos, "--outputs", "cat=1", "--outputs", "dog=2", "--per-class", 2, "--input-size", 64]
    args += ["--interpolation", "bicubic", "--keep-params", 0.7, "--no-latency"]
    torch.save(build(spec).state_dict(), tmp_path / "w.pt")
    succeed("prune", spec, "--weights", tmp_path / "w.pt", *args, "--out", out)
    view = open_model(str(out)).origin.view
    assert view == Seen(size=64, interpolation="bicubic").over(open_model(spec).origin.view)
    assert (view.resize, view.interpolation) == (67, "bicubic")
    assert json.loads((out / "run.json").read_text())["asked"]["view"] == json.loads(json.dumps(view.to_dict()))
    assert "short side scaled to 67, bicubic, then the centre of 64 x 64" in (out / "report.html").read_text()
    found = succeed("export", out, "--out", tmp_path / "s.onnx")
    assert (found["fit"], found["resize"], found["interpolation"]) == ("crop", 67, "bicubic")
    first = sorted(photos.rglob("*.png"))[0]
    shown = succeed("explain", out, first, "--out", tmp_path / "maps")["images"][0]
    logits: Tensor = open_model(str(out)).model(load([first], view)[0])
    assert shown["predicted"] == ("cat", "dog")[int(logits.argmax())]
