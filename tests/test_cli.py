"""The command line on a small trained network and made photographs: results, files, errors, interruption."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import shlex
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
import typer
from PIL import Image
from torch import nn

import secateur as sc
from command import Place, fail, furnished, invoke, step_done, succeed
from html_page import parse
from photos import write_photos
from secateur.cli import image_task
from secateur.cli import recover as recover_command
from secateur.cli.app import app
from secateur.cli.messages import as_option
from secateur.cli.output import Printer, ProgressLines
from secateur.data.images import read
from secateur.data.views import View
from secateur.errors import Argument
from secateur.files import onnx, session
from secateur.models import build, open_model
from secateur.recover.trainer import Trainer
from secateur.running.accuracy import interval
from secateur.running.progress import Evaluating, Repairing
from secateur.runtimes import Setup
from secateur.runtimes.clock import Clock
from secateur.runtimes.onnx import Onnx
from secateur.structure.cost import size_of


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return furnished(tmp_path_factory.mktemp("place"))


# -- prune -------------------------------------------------------------------------------------------------------------
def test_prune_writes_a_smaller_model_that_is_the_same_everywhere(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "small"
    found = succeed("prune", *place.job, "--out", out, "--keep-macs", 0.6, "--onnx", "--report")
    assert sorted(p.name for p in out.iterdir()) == ["history.csv", "model", "model.onnx", "report.html", "run.json"]
    page = (out / "report.html").read_text()
    assert all(name in page for name in ("red", "green", "blue"))
    assert "data:image/png;base64" in page  # heat maps
    # MACs by hand: two convolutions on 16 x 16 and 8 x 8, one linear layer.
    assert found["before"]["macs"] == 16 * 16 * 9 * 3 * 8 + 8 * 8 * 9 * 8 * 8 + 8 * 3
    small = open_model(str(out), original=place.net).model
    first, second = small[0].out_channels, small[3].out_channels
    assert found["after"]["macs"] == 16 * 16 * 9 * 3 * first + 8 * 8 * 9 * first * second + second * 3
    assert found["after"]["macs"] <= 0.6 * found["before"]["macs"]
    assert found["after"]["params"] == sum(p.numel() for p in small.parameters())
    x, y = read(place.test, size=16).tensors()
    with torch.no_grad():
        outputs = small(x)
    assert found["accuracy"]["after"]["overall"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    (exported,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.abs(exported - outputs.numpy()).max() <= 1e-4 * np.abs(exported).max()
    rows = list(csv.DictReader((out / "history.csv").open()))
    assert len(rows) == found["steps"] + 1
    assert int(rows[-1]["macs"]) == found["after"]["macs"]
    assert {"overall", "red", "green", "blue"} <= set(rows[0])


def test_prune_speaks_to_people_too(place: Place, tmp_path: Path) -> None:
    result = invoke("prune", *place.job, "--out", tmp_path / "s", "--remove", 0.25, "--per-class", 2)
    assert result.exit_code == 0
    assert "MACs per image" in result.stdout
    assert "accuracy" in result.stdout
    assert "red: output 2; 2 images to score on, 5 to test on" in result.stderr


def test_both_models_are_timed_in_both_runtimes(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # long times break no line
    args = [word for word in place.job if word not in ("--no-latency", "--no-report")]
    result = invoke("prune", *args, "--out", tmp_path / "s", "--keep-macs", 0.6, "--onnx", "--threads", 1)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "s" / "run.json").read_text())
    page = (tmp_path / "s" / "report.html").read_text()
    moved = found["reasons"]  # of the six images of the report
    assert moved["samples"] == 6
    assert set(moved["by_class"]) == {"red", "green", "blue"}
    assert moved["drift"] == pytest.approx(sum(moved["by_class"].values()) / 3)
    assert f"drift of the heat maps of 6 samples: {moved['drift']:.2f} (" in result.stdout
    assert f"SRG {moved['srg']['before']:.2f} → {moved['srg']['after']:.2f}" in result.stdout
    for name, own in moved["srg_by_class"].items():
        row = [name, "2", f"{moved['by_class'][name]:.3f}", f"{own['before']:.3f}", f"{own['after']:.3f}"]
        assert row in [line.split()[:5] for line in result.stdout.splitlines()]
    assert f"{moved['srg']['after']:.3f}".replace("-", "−") in page
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    for runtime, key in (("PyTorch", "latency"), ("ONNX Runtime", "onnx_latency")):
        for batch in (1, 32):
            before, after = (found[side][f"{key}_{batch}"] for side in ("before", "after"))
            line = lines[f"latency, batch {batch}, {runtime}, 1 thread"]
            assert f"{1000 * before:.1f} ms" in line
            assert f"{1000 * after:.1f} ms" in line
            assert f"{before / after:.2f}x as fast" in line
            assert f"{runtime}, 1 thread, batch of {batch}" in page
            assert f"{before / after:.2f} times as fast" in page
    told = " ".join(result.stdout.split())
    scaled = "(short side scaled to 18, bilinear, then the centre of 16 x 16)"
    assert f"model.onnx: input N x 3 x 16 x 16 {scaled}, pixels from 0 to 1, less" in told
    assert f"images: {scaled[1:-1]}" in " ".join(result.stderr.split())
    assert "less 0.485, 0.456, 0.406" in told
    assert "outputs: blue, green, red" in result.stdout
    assert not list((tmp_path / "s").glob("unpruned*"))


def test_onnx_files_are_written_once_and_measure_accuracy(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, asked, usual = list[str](), list[int](), onnx.export
    monkeypatch.setattr(image_task, "_MANY", 15)
    monkeypatch.setattr(onnx, "export", lambda *args, **kwargs: written.append(args[1].name) or usual(*args, **kwargs))
    forward = session.Session.forward
    monkeypatch.setattr(session.Session, "forward", lambda self, x: asked.append(len(x)) or forward(self, x))
    args = [word for word in place.job if word != "--no-latency"]
    result = invoke("prune", *args, "--out", tmp_path / "s", "--keep-macs", 0.6, "--onnx")
    assert "accuracy is measured in ONNX Runtime" in result.stderr
    assert len(written) == 2  # the unpruned and the smaller model, each once for accuracy, timing and --out
    assert sum(asked) == 2 * 15
    found = json.loads((tmp_path / "s" / "run.json").read_text())
    x, y = read(place.test, size=16).tensors()
    whole = build(place.net).eval()
    whole.load_state_dict(safetensors.torch.load_file(place.weights))
    for model, when in ((whole, "before"), (open_model(str(tmp_path / "s"), original=place.net).model, "after")):
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float()
        assert found["accuracy"][when]["overall"] == pytest.approx(float(right.mean()))
        assert found["accuracy"][when]["red"] == pytest.approx(float(right[y == 2].mean()))


@pytest.mark.parametrize("how", ["fixed batch", "no export"])
def test_pytorch_measures_what_onnx_runtime_cannot(
    how: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise sc.SecateurError("no.")

    usual = onnx.export
    other = fail if how == "no export" else partial(usual, dynamic_batch=False)
    with monkeypatch.context() as patch:
        patch.setattr(onnx, "export", other)
        exports, x = onnx.Exports(), torch.rand(2, 3, 16, 16)
        net = build(place.net).eval()
        assert exports.module(net, x) is net
        assert exports.module(net, x) is net


def test_a_poor_model_is_worth_a_warning(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.3]
    assert "right on only" not in invoke(*args, "--out", tmp_path / "good").stderr
    outputs = ["--outputs", "red=0", "--outputs", "green=1", "--outputs", "blue=2"]  # red and blue the wrong way round
    said = invoke(*args, *outputs, "--out", tmp_path / "poor").stderr
    assert said.count("secateur: warning: the unpruned model is right on only") == 1
    assert "(chance is 33.3 %)" in said


def test_logs_say_how_a_run_gets_on(place: Place, tmp_path: Path) -> None:
    result = invoke("prune", *place.job, "--remove", 0.3, "--out", tmp_path / "s")
    said = result.stderr.splitlines()
    stages = [
        "measuring accuracy",
        "16 units left (0 % gone)",
        "scoring units by lrp",
        "repair: ",
        "12 units left (25 %",
    ]
    places = [next(i for i, line in enumerate(said) if line.startswith(stage)) for stage in stages]
    assert places == sorted(places)


def test_lines_that_differ_in_numbers_only_wait(monkeypatch) -> None:
    said: list[str] = []
    printer = Printer(False)
    printer.note = said.append  # type: ignore[method-assign]
    lines = ProgressLines(printer, seconds=20)
    layer = [Repairing("ridge", number, 9) for number in range(10)]
    first, second = step_done(8), step_done(6)
    told = [(0, layer[1]), (1, layer[2]), (2, Evaluating()), (3, first), (4, layer[3]), (5, second), (24, layer[4]),
            (25, layer[5]), (44, layer[6]), (44, Repairing("norm", 1, 9))]  # fmt: skip
    for now, event in told:
        monkeypatch.setattr("secateur.cli.output.time.monotonic", lambda now=now: float(now))
        lines(event)
    known = ["repair: ridge, layer 1/9", "measuring accuracy", str(first), str(second), "repair: ridge, layer 5/9"]
    assert said == [*known, "repair: norm, layer 1/9"]


def test_images_are_held_out_where_there_is_no_test_folder(place: Place, tmp_path: Path) -> None:
    args = [*place.model, "--images", place.train, "--round-to", 1, "--no-latency", "--remove", 0.3, "--no-report"]
    found = succeed("prune", *args, "--per-class", 2, "--out", tmp_path / "a")
    assert found["images"] == {"reference": 6, "test": 12}
    without = succeed("prune", *args, "--out", tmp_path / "b")  # up to ten of six
    assert without["images"] == {"reference": 18, "test": 0}
    assert without["accuracy"] is None
    assert "--max-drop needs images" in fail("prune", *args, "--max-drop", 0.1, "--out", tmp_path / "c")


def test_many_images_are_read_in_batches_to_the_same_effect(place: Place, tmp_path: Path, monkeypatch) -> None:
    states = []
    for name, share in (("pair", 6), ("batches", 2**30)):
        monkeypatch.setattr(image_task, "_HELD", share)
        succeed("prune", *place.job, "--out", tmp_path / name, "--remove", 0.4, "--step", 0.2, "--repair", "none")
        states.append(safetensors.torch.load_file(tmp_path / name / "model" / "model.safetensors"))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_missing_packages_are_named_before_the_work(place: Place, tmp_path: Path, monkeypatch) -> None:
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "onnxruntime" else usual(name, *a)
    )
    said = fail("prune", *place.job, "--out", tmp_path / "s", "--remove", 0.3, "--onnx")
    assert "onnxruntime is missing. Fix: pip install 'secateur[export]', or no --onnx." in said
    assert not (tmp_path / "s").exists()


def test_outputs_are_kept_and_merged(place: Place, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "two", ["red", "green"], 4, (16, 16))
    args = [*place.model, "--images", photos, "--round-to", 1, "--no-latency", "--remove", 0.3, "--no-report"]
    given = ["--outputs", "red=2", "--outputs", "green=0,1", "--merge", "sum"]
    found = succeed("prune", *args, *given, "--out", tmp_path / "merged")
    assert found["after"]["params"] < found["before"]["params"]
    merged = open_model(str(tmp_path / "merged"), original=place.net)
    assert merged.origin.classes == ("green", "red")  # folders are sorted
    x = torch.rand(3, 3, 16, 16)
    assert torch.allclose(merged.model(x).exp().sum(1), torch.ones(3), atol=1e-5)
    said = fail("prune", *args, "--out", tmp_path / "x")
    assert "2 class folders (green, red) for a model with 3 outputs" in said
    succeed("prune", *args, "--outputs", "red=2", "--outputs", "green=1", "--no-specialize", "--out", tmp_path / "wide")
    assert open_model(str(tmp_path / "wide"), original=place.net).model(x).shape == (3, 3)
    said = fail(
        "prune", *args, "--outputs", "red=2", "--outputs", "green=0,1", "--no-specialize", "--out", tmp_path / "y"
    )
    assert "leave out --no-specialize" in said


def test_merged_outputs_are_exported_for_any_batch(place: Place, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "two", ["red", "green"], 4, (16, 16))
    args = [*place.model, "--images", photos, "--round-to", 1, "--no-latency", "--remove", 0.3, "--no-report"]
    outputs = ["--outputs", "red=2", "--outputs", "green=0,1"]
    result = invoke("prune", *args, *outputs, "--onnx", "--out", tmp_path / "merged")
    assert "model.onnx: input N x 3 x 16 x 16" in result.stdout
    x = torch.rand(5, 3, 16, 16)
    session = onnxruntime.InferenceSession(tmp_path / "merged" / "model.onnx", providers=["CPUExecutionProvider"])
    (exported,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = open_model(str(tmp_path / "merged"), original=place.net).model(x)
    assert np.abs(exported - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("fairest", ["sum", "mean"])
def test_outputs_are_merged_by_what_suits_the_images(tmp_path: Path, fairest: str) -> None:
    """A network that sees nothing but red and says so in one of five outputs; four are for anything else.

    Its answer to red is right by the mean of the four or by their sum, as the biases have it.
    """
    bias = {"sum": "[1.2, 0.0, 0.0, 0.0, 0.0]", "mean": "[-1.0, 0.0, 0.0, 0.0, 0.0]"}[fairest]
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    layers = nn.Conv2d(3, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)\n"
        "    net = nn.Sequential(*layers)\n"
        "    nn.init.constant_(net[0].weight, 0.1)\n"
        "    nn.init.zeros_(net[0].bias)\n"
        "    nn.init.zeros_(net[4].weight)\n"
        "    with torch.no_grad():\n"
        "        net[0].weight[0, :, 0, 0] = torch.tensor([1.0, -0.5, -0.5])\n"
        "        net[4].weight[0, 0] = 0.8\n"
        f"        net[4].bias.copy_(torch.tensor({bias}))\n"
        "    return net\n"
    )
    photos = write_photos(tmp_path / "photos", ["red", "green"], 4, (16, 16))
    spec, outputs = f"{tmp_path / 'net.py'}:make", {"green": [1, 2, 3, 4], "red": [0]}
    x, y = read(photos, size=16).tensors()  # green is 0, red is 1
    with torch.no_grad():
        shares = build(spec)(x).softmax(1)
    losses = {}
    for name, size in (("sum", 1), ("mean", 4)):
        merged = torch.stack([shares[:, 1:].sum(1) / size, shares[:, 0]], 1)
        right = merged[torch.arange(len(y)), y] / merged.sum(1)
        losses[name] = -float(right.log().sum())
    assert min(losses, key=losses.__getitem__) == fairest
    args = ["prune", spec, "--input-size", 16, "--images", photos, "--round-to", 1, "--remove", 0.2, "--no-latency"]
    args += [
        word for name, members in outputs.items() for word in ("--outputs", f"{name}={','.join(map(str, members))}")
    ]
    result = invoke(*args, "--no-report", "--per-class", 4, "--out", tmp_path / "s")
    assert result.exit_code == 0, result.stderr
    assert f"outputs that mean the same become one: {fairest} of their probabilities" in result.stderr
    assert json.loads((tmp_path / "s" / "run.json").read_text())["asked"]["merge"] == fairest


def test_a_saved_folder_is_pruned_on(place: Place, tmp_path: Path) -> None:
    succeed("prune", *place.job, "--out", tmp_path / "one", "--remove", 0.2)
    again = [tmp_path / "one", "--original", place.net, "--images", place.train, "--test", place.test]
    more = ["--round-to", 1, "--no-latency", "--no-report", "--remove", 0.3, "--out", tmp_path / "two"]
    found = succeed("prune", *again, *more)  # its view and classes are known
    small = open_model(str(tmp_path / "two"), original=place.net).model
    assert found["after"]["params"] == sum(p.numel() for p in small.parameters()) < found["before"]["params"]


def test_outputs_that_were_reordered_are_still_matched_by_name(place: Place, tmp_path: Path) -> None:
    given = ["--outputs", "red=2", "--outputs", "green=1", "--outputs", "blue=0"]  # not the order of folders
    succeed("specialize", *place.model, *given, "--out", tmp_path / "one")
    again = [tmp_path / "one", "--original", place.net, "--images", place.train, "--test", place.test]
    more = ["--round-to", 1, "--no-latency", "--no-report", "--remove", 0.1, "--out", tmp_path / "two"]
    found = succeed("prune", *again, *more)
    x, y = read(place.test, size=16).tensors()
    with torch.no_grad():
        right = build(place.net, place.weights)(x).argmax(1) == y
    assert found["accuracy"]["before"]["overall"] == pytest.approx(float(right.float().mean()))


def test_an_interrupted_run_goes_on_and_ends_the_same(place: Place, tmp_path: Path, monkeypatch) -> None:
    args = ["prune", *place.job, "--remove", 0.5, "--step", 0.1, "--epochs", 1]
    succeed(*args, "--out", tmp_path / "whole")
    calls = []
    usual = image_task.Task.accuracy

    def impatient(self, model):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return usual(self, model)

    monkeypatch.setattr(image_task.Task, "accuracy", impatient)
    stopped = invoke(*args, "--out", tmp_path / "parts")
    assert stopped.exit_code == 130
    assert "the same command goes on" in stopped.stderr
    assert not (tmp_path / "parts" / "model").exists()
    monkeypatch.setattr(image_task.Task, "accuracy", usual)
    said = fail(*args, "--out", tmp_path / "parts", "--per-class", 3)
    assert "unfinished run that differs: reference was 18 images" in said
    resumed = invoke(*args, "--out", tmp_path / "parts")
    assert resumed.exit_code == 0
    assert "going on with the unfinished run" in resumed.stderr
    states = [safetensors.torch.load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "parts")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["history.csv", "model", "run.json"]


def test_recover_trains_what_prune_wrote(place: Place, tmp_path: Path) -> None:
    small, out = tmp_path / "small", tmp_path / "better"
    succeed("prune", *place.job, "--remove", 0.5, "--out", small)
    given = [small, "--original", place.net, "--images", place.train, "--test", place.test, "--out", out]
    teacher = ["--teacher", place.net, "--teacher-weights", place.weights]
    found = succeed("recover", *given, *teacher, "--epochs", 2)
    assert [row["epoch"] for row in found["epochs"]] == [1, 2]
    assert set(found["accuracy"]["after"]) == set(found["accuracy"]["before"])
    for when, shares in found["accuracy"].items():
        low, high = found["intervals"][when]["overall"]
        assert low <= shares["overall"] <= high
    assert sorted(path.name for path in out.iterdir()) == ["model", "run.json"]
    assert "parameters" in invoke("inspect", out, "--original", place.net).output
    note = json.loads((small / "run.json").read_text())
    (small / "model.onnx").write_bytes(b"of the smaller model")
    (small / "run.json").write_text(json.dumps({**note, "files": {**note["files"], "onnx": "model.onnx"}}))
    succeed("recover", *given[:-1], small, *teacher, "--epochs", 1)
    assert not (small / "model.onnx").exists()  # it is no longer that model
    without = succeed("recover", *given[:-1], tmp_path / "labels", "--minutes", 0.01)
    assert without["stopped"] == "the minutes are over"
    whole = fail("recover", *place.model, "--images", place.train, "--epochs", 1, "--out", tmp_path / "whole")
    assert "was not pruned by secateur" in whole  # and nothing is trained for that
    bare = invoke(
        "recover", *given[:-1], tmp_path / "bare", "--teacher", "torchvision:resnet18?num_classes=3", "--epochs", 1
    )
    told = "no --teacher-weights were given, and torchvision:resnet18?num_classes=3 has random weights"
    assert told in bare.stderr
    assert "Fix: --teacher-weights FILE, or --teacher-weights default to download" in bare.stderr
    wide = fail("recover", *given[:-1], tmp_path / "wide", "--teacher", f"{place.net}?classes=7")
    assert "has 7 outputs, the smaller model 3" in wide


def test_a_teacher_may_have_been_pruned_itself(place: Place, tmp_path: Path) -> None:
    """It is rebuilt from the same file as its student, as the last line of `prune` says."""
    first, second = tmp_path / "first", tmp_path / "second"
    succeed("prune", *place.job, "--remove", 0.3, "--out", first)
    again = ["--images", place.train, "--test", place.test, "--round-to", 1, "--no-latency", "--no-report"]
    told = invoke("prune", first, "--original", place.net, *again, "--remove", 0.3, "--out", second)
    line = told.stdout.replace("\n ", " ").splitlines()[-1]
    assert f"--original {place.net} --teacher {first} --images" in line
    trained = invoke(*shlex.split(line.partition(": ")[2])[1:], "--epochs", 1)
    assert trained.exit_code == 0, trained.stderr
    small, better = (open_model(str(path), original=place.net).model for path in (second, f"{second}-recovered"))
    assert [p.shape for p in small.parameters()] == [p.shape for p in better.parameters()]


def test_steps_without_a_repair_that_lose_accuracy_say_so(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.7, "--step", 0.35, "--criterion", "random", "--round-to", 1]
    told = [
        invoke(*args, *more, "--out", tmp_path / str(i)).stderr
        for i, more in enumerate(([], ["--repair", "none"], ["--repair", "best"]))
    ]
    assert ["nothing was repaired" in text for text in told] == [True, False, False]
    assert "Fix: --repair best, or leave them out" in told[0]


def test_training_that_does_harm_is_named(place: Place, tmp_path: Path) -> None:
    """And the smaller model is not called the unpruned one, whose weights might be wrong."""
    small = tmp_path / "small"
    succeed("prune", *place.job, "--keep-macs", 0.8, "--out", small)
    given = [small, "--original", place.net, "--images", place.train, "--test", place.test, "--epochs", 10]
    untrained = ["--teacher", place.net, "--learning-rate", 0.2]  # a teacher without weights knows nothing
    wild = invoke("recover", *given, *untrained, "--out", tmp_path / "wild")
    assert wild.exit_code == 0
    told = wild.stdout + wild.stderr
    assert "training made it worse. Fix: a smaller --learning-rate than 0.2" in told
    assert f"--teacher {place.net} is right on only" in told
    assert "the smaller model on 100.0 %: it would teach mistakes. Fix: --teacher-weights FILE" in told
    nothing = fail("recover", small, "--original", place.net, "--out", tmp_path / "nothing")
    assert "there is nothing to train on. Fix: --images FOLDER" in nothing
    assert "unpruned" not in told
    calm = invoke("recover", *given, "--learning-rate", 1e-6, "--out", tmp_path / "calm")
    assert "made it worse" not in calm.stdout + calm.stderr


def test_an_option_that_took_another_for_its_value_is_named(place: Place, tmp_path: Path) -> None:
    found = invoke("export", *place.model, "--int8", "--out", tmp_path / "net.onnx")
    assert found.exit_code == 2
    assert "--int8 needs a value, and took --out for it" in " ".join(found.output.replace("│", " ").split())
    found = invoke("prune", *place.job, "--max-drop", 7, "--out", tmp_path / "small")  # after `--no-report`, a flag
    assert found.exit_code == 2
    assert "Invalid value for '--max-drop'" in found.output
    assert "needs a value" not in found.output


def test_only_commands_that_go_on_say_so(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("secateur.cli.export.run_export", interrupted)
    monkeypatch.setattr("secateur.cli.prune.run_prune", interrupted)
    export = invoke("export", *place.model, "--out", tmp_path / "net.onnx")
    prune = invoke("prune", *place.job, "--remove", 0.5, "--out", tmp_path / "small")
    assert export.exit_code == prune.exit_code == 130
    assert "goes on" not in export.stderr
    assert "stopped. What was finished is kept; the same command goes on from there." in prune.stderr


def test_every_option_that_training_names_is_an_option() -> None:
    """Messages of the package name arguments, which the command line spells as options."""
    never = {"temperature", "tokens"}  # which cannot be wrong here, and which --tokens checks
    named = set()
    for file in (Path(sc.__file__).parent / "recover").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Argument":
                named |= {first.value for first in node.args[:1] if isinstance(first, ast.Constant)}
    assert named >= {"lr", "clip", "batch_size", "lora", "teacher"}
    commands = typer.main.get_command(app).commands
    known = {name: {word for p in commands[name].params for word in p.opts} for name in ("recover", "prune")}
    for name in named - never:
        assert as_option(Argument(name)) in known["recover"]
        assert as_option(Argument(name)) in known["prune"] or name == "teacher"  # it always has one


def test_training_says_which_option_is_wrong(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    succeed("prune", *place.job, "--remove", 0.5, "--out", small)
    given = [small, "--original", place.net, "--images", place.train, "--test", place.test]
    wild = fail("recover", *given, "--epochs", 2, "--learning-rate", 1e30, "--out", tmp_path / "wild")
    assert "a smaller --learning-rate 1e+30" in wild
    assert "--clip" not in wild  # gradients are limited already
    wild = fail("recover", *given, "--epochs", 2, "--learning-rate", 1e30, "--clip", 0, "--out", tmp_path / "wilder")
    assert "a smaller --learning-rate 1e+30, or --clip 1 to limit the gradient" in wild
    succeed("recover", *given, "--epochs", 1, "--learning-rate", 0.01, "--clip", 1, "--out", tmp_path / "clipped")
    usual, sizes = Trainer._gradients, []

    def small_memory(self: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sizes.append(len(inputs))
        if len(inputs) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return usual(self, inputs, targets)

    monkeypatch.setattr(Trainer, "_gradients", small_memory)
    full = fail("recover", *given, "--epochs", 1, "--batch-size", 8, "--out", tmp_path / "full")
    assert sizes[0] == 8
    assert "a batch of 8 does not fit into the memory of cpu; 4 samples fit. Fix: --batch-size 4." in full
    succeed("recover", *given, "--epochs", 1, "--batch-size", 4, "--out", tmp_path / "fits")
    pruned = fail("prune", *place.job, "--remove", 0.5, "--epochs", 1, "--batch-size", 8, "--out", tmp_path / "both")
    assert "4 samples fit. Fix: --batch-size 4." in pruned


def test_prune_trains_for_minutes(place: Place, tmp_path: Path) -> None:
    args = [*place.job, "--remove", 0.5, "--batch-size", 4, "--learning-rate", 0.02]
    plain, trained = (tmp_path / name / "model" / "model.safetensors" for name in ("plain", "trained"))
    succeed("prune", *args, "--out", plain.parents[1])
    succeed("prune", *args, "--minutes", 0.01, "--out", trained.parents[1])
    first, second = map(safetensors.torch.load_file, (plain, trained))
    assert {name: t.shape for name, t in first.items()} == {name: t.shape for name, t in second.items()}
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("merged", [False, True])
def test_a_teacher_gets_the_outputs_of_its_student(place: Place, tmp_path: Path, merged: bool) -> None:
    net, names = f"{place.net}?classes=7", sorted(path.name for path in Path(place.train).iterdir())
    weights, numbers = tmp_path / "seven.safetensors", ["5", "0,2" if merged else "0", "6"]
    torch.manual_seed(0)
    whole = build(net)
    safetensors.torch.save_file(whole.state_dict(), weights)
    outputs = [word for name, number in zip(names, numbers, strict=True) for word in ("--outputs", f"{name}={number}")]
    images = ["--input-size", 16, "--images", place.train, "--test", place.test]
    small = tmp_path / "small"
    rest = ["--round-to", 1, "--no-latency", "--no-report", "--remove", 0.4, "--out", small]
    succeed("prune", net, "--weights", weights, *images, *outputs, *(["--merge", "mean"] if merged else []), *rest)
    student = open_model(str(small), original=net)
    teacher = recover_command._teacher(net, str(weights), student).eval()
    x = torch.rand(4, 3, 16, 16)
    if merged:
        p = whole(x)[:, [0, 2, 5, 6]].softmax(1)
        expected = torch.stack([p[:, 2], p[:, :2].mean(1), p[:, 3]], 1).log()
    else:
        expected = whole(x)[:, [5, 0, 6]]
    torch.testing.assert_close(teacher(x), expected)


def test_broken_images_are_named(place: Place, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "set", per_class=3, size=(16, 16))
    (photos / "red" / "torn.jpg").write_bytes(b"\xff\xd8 not much of a picture")
    args = ["prune", *place.model, "--images", photos, "--round-to", 1, "--no-latency", "--remove", 0.3, "--no-report"]
    result = invoke(*args, "--out", tmp_path / "a")
    assert result.exit_code == 0
    assert "secateur: warning: 1 broken image:" in result.stderr
    assert "torn.jpg" in result.stderr
    said = fail(*args, "--out", tmp_path / "b", "--strict")
    assert "secateur: error: 1 broken image:" in said
    assert [line for line in said.splitlines() if "torn.jpg" in line] == said.splitlines()[-1:]  # one line
    assert "torn.jpg" in said


def test_broken_test_images_count_neither_as_tested_nor_as_wrong(place: Place, tmp_path: Path) -> None:
    test = write_photos(tmp_path / "test", per_class=4)

    def cut(*paths: Path) -> None:
        for path in paths:  # their heads are fine
            path.write_bytes(path.read_bytes()[:200])

    cut(test / "red" / "00.png")
    job = [*place.model, "--images", place.train, "--test", test, "--round-to", 1, "--no-latency", "--no-report"]
    found = succeed("prune", *job, "--remove", 0.3, "--out", tmp_path / "out")
    assert found["images"]["test"] == 11
    assert found["intervals"]["before"]["red"][1] == 1 > found["intervals"]["before"]["red"][0]
    assert found["intervals"]["before"]["red"] == list(interval(1.0, 3))
    cut(*(test / "red").glob("*.png"))
    said = fail("prune", *job, "--remove", 0.3, "--out", tmp_path / "other")
    assert "no image to test on can be read of red." in said


def test_a_drop_that_is_not_allowed(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--max-drop", 0.0, "--step", 0.9, "--out", tmp_path / "s", "--criterion", "random"]
    args += ["--repair", "none"]
    assert "nothing was removed" in fail(*args)
    assert not (tmp_path / "s" / "model").exists()


def test_the_page_of_a_run_says_what_was_lost_and_shows_its_steps(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.75, "--step", 0.25, "--repair", "none", "--round-to", 1, "--report"]
    succeed(*args, "--out", tmp_path / "s")
    page = parse((tmp_path / "s" / "report.html").read_text("utf-8"))
    x, y = read(place.test, size=16).tensors()
    small = open_model(str(tmp_path / "s"), original=place.net).model
    whole = open_model(place.net, place.weights).model
    before, after = (model(x).argmax(1) for model in (whole, small))
    gone, new = int(((before == y) & (after != y)).sum()), int(((before != y) & (after == y)).sum())
    words = f"Of {len(y)} test samples: right before and wrong now {gone}, wrong before and right now {new}."
    assert words in page.by_id("lost").text
    assert len(page.by_id("lost").find("figure", class_="sample")) == min(gone, 4) + min(new, 2)
    frames = page.by_id("steps").find("article")
    assert len(frames) == 4
    assert all(len(frame.find("img")) == 4 for frame in frames)


def test_reasons_may_be_a_target(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--step", 0.1, "--round-to", 1, "--repair", "none"]
    succeed(*args, "--remove", 0.7, "--max-drift", 2, "--out", tmp_path / "free")
    moved = [float(row["drift"]) for row in csv.DictReader((tmp_path / "free" / "history.csv").open())]
    assert moved[0] == pytest.approx(0, abs=1e-6)
    limit = (moved[1] + max(moved)) / 2
    found = succeed(*args, "--max-drift", limit, "--out", tmp_path / "s")
    assert "changed the reasons more than allowed" in found["stopped"]
    rows = [float(row["drift"]) for row in csv.DictReader((tmp_path / "s" / "history.csv").open())]
    assert rows == pytest.approx(moved[: len(rows)], abs=1e-6)
    assert max(rows[:-1]) <= limit < rows[-1]


def test_nothing_of_the_user_is_replaced(place: Place, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.txt").write_text("mine")
    assert "was not written by secateur" in fail("prune", *place.job, "--remove", 0.3, "--out", tmp_path)
    assert (tmp_path / "model" / "precious.txt").read_text() == "mine"


# -- errors ------------------------------------------------------------------------------------------------------------
def test_usage_and_errors(place: Place, tmp_path: Path) -> None:
    assert "say how small" in fail("prune", *place.job, "--out", tmp_path / "s", code=2)
    assert "Missing" in fail("prune", place.net, code=2)
    said = fail("inspect", "torchvision:resnet51")
    assert "torchvision:resnet50" in said
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("secateur: error")]) == 1
    assert "cannot be used" in fail("inspect", place.net, "--device", "warp")
    assert "is not a folder" in fail("prune", *place.model, "--images", "nowhere", "--out", "x", "--remove", 0.5)


def test_debug_shows_the_traceback(monkeypatch) -> None:
    monkeypatch.setenv("SECATEUR_DEBUG", "")
    result = invoke("inspect", "torchvision:resnet51", "--debug")
    assert isinstance(result.exception, sc.SecateurError)


def test_random_weights_are_worth_a_warning(tmp_path: Path) -> None:
    result = invoke("specialize", "torchvision:squeezenet1_1", "--outputs", "tench,5", "--out", tmp_path)
    assert result.exit_code == 0
    assert "has random weights" in result.stderr
    found = succeed("inspect", tmp_path)  # a zoo's model needs no --original
    assert found["classes"] == ["tench", "electric ray"]
    assert found["layers"][-1]["units"] == 2


def test_every_command_has_help_with_an_example() -> None:
    for command in ("prune", "explain", "inspect", "compare", "specialize", "export"):
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert f"secateur {command} " in result.stdout


# -- the other commands ------------------------------------------------------------------------------------------------
def test_inspect(place: Place) -> None:
    found = succeed("inspect", place.net, "--input-size", 16)
    graph = sc.analyze(build(place.net), torch.zeros(1, 3, 16, 16))
    assert [row["layer"] for row in found["layers"]] == [layer.name for layer in graph.layers]
    assert found["macs"] == 16 * 16 * 9 * 3 * 8 + 8 * 8 * 9 * 8 * 8 + 8 * 3
    assert found["removable_units"] == 16
    text = invoke("inspect", place.net, "--input-size", 16).stdout
    assert "must stay: 8: model output" in text


def test_models_with_attention_are_explained_by_their_own_composite(place: Place, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Small(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.patches, self.mix = nn.Conv2d(3, 8, 4, 4), nn.MultiheadAttention(8, 2, batch_first=True)\n"
        "        self.last = nn.Linear(8, 3)\n"
        "    def forward(self, x):\n"
        "        x = self.patches(x).flatten(2).mT\n"
        "        return self.last(self.mix(x, x, x, need_weights=False)[0].mean(1))\n"
    )
    said = {}
    for spec in (f"{tmp_path / 'net.py'}:Small", place.net):
        args = ["explain", spec, place.test, "--input-size", 16, "--limit", 2, "--out", tmp_path / "maps"]
        said[spec] = succeed(*args)["composite"]
        assert succeed(*args, "--composite", "flat")["composite"] == "flat"
    assert list(said.values()) == ["attnlrp", "epsilon_gamma_box"]


def test_explain(place: Place, tmp_path: Path) -> None:
    found = succeed("explain", *place.model, place.test, "--limit", 4, "--out", tmp_path / "maps")
    photos = read(place.test, size=16)
    turn = [0, 5, 10, 1]  # one of each class, then again
    x, _ = photos.tensors()
    with torch.no_grad():
        expected = build(place.net, place.weights)(x[turn]).softmax(1)
    assert [item["output"] for item in found["images"]] == expected.argmax(1).tolist()
    assert [item["image"] for item in found["images"]] == [str(photos.paths[i]) for i in turn]
    assert [item["probability"] for item in found["images"]] == pytest.approx(expected.amax(1).tolist(), rel=1e-4)
    for item in found["images"]:
        assert Image.open(item["heat_map"]).size[0] > 300
    assert found["conservation"] < 0.01
    assert [row["layer"] for row in found["layers"]] == ["0", "3", "8"]
    assert all(1 <= row["hold_90"] <= row["units"] for row in found["layers"])
    one = succeed("explain", *place.model, photos.paths[0], "--target", 1, "--out", tmp_path / "one")
    assert one["images"][0]["explained_output"] == 1
    assert "no composite" in fail("explain", *place.model, place.test, "--composite", "magic", "--out", tmp_path)
    assert "one of the model's outputs" in fail("explain", *place.model, place.test, "--target", 3, "--out", tmp_path)
    succeed("specialize", *place.model, "--outputs", "warm=2", "--outputs", "cold=0-1", "--out", tmp_path / "named")
    called = fail(
        "explain", tmp_path / "named", "--original", place.net, place.test, "--target", "hot", "--out", tmp_path
    )
    assert "'hot' is no output of this model. Fix: one of warm, cold, or a number from 0." in called
    assert "no image" in fail("explain", *place.model, tmp_path / "absent.png", "--out", tmp_path)


def test_compare(place: Place, tmp_path: Path) -> None:
    args = [*place.model, "--images", place.train, "--test", place.test, "--remove", 0.5, "--step", 0.25]
    args += ["--criterion", "weight", "--criterion", "random", "--out", tmp_path]
    found = succeed("compare", *args)
    assert set(found["criteria"]) == {"weight", "random"}
    assert found["criteria"]["weight"]["removed"] == [0.0, 0.25, 0.5]
    assert found["images"]["test"] == 15
    assert sorted(p.name for p in tmp_path.iterdir()) == ["comparison.json", "comparison.png", "run.json"]
    assert json.loads((tmp_path / "comparison.json").read_text())["best"] == found["best"]
    direct = sc.compare(
        build(place.net, place.weights), read(place.train, size=16).draw(10, at_most=True).tensors(), ["weight"],
        evaluate=lambda m: 1.0, remove=0.5, schedule=0.25, progress=False,
    )  # fmt: skip
    assert found["criteria"]["weight"]["macs"] == direct.curves["weight"].macs.tolist()


def test_specialize_keeps_outputs_exactly(place: Place, tmp_path: Path) -> None:
    found = succeed("specialize", *place.model, "--outputs", "2,0", "--out", tmp_path / "two")
    assert found["outputs"] == {"output 2": [2], "output 0": [0]}
    x = torch.rand(4, 3, 16, 16)
    narrow, whole = open_model(str(tmp_path / "two"), original=place.net).model, build(place.net, place.weights)
    assert torch.allclose(narrow(x), whole(x)[:, [2, 0]], atol=1e-6)
    succeed("specialize", *place.model, "--outputs", "warm=2", "--outputs", "cold=0-1", "--out", tmp_path / "merged")
    merged = open_model(str(tmp_path / "merged"), original=place.net).model
    shares = whole(x).softmax(1)
    assert torch.allclose(merged(x).exp(), torch.stack([shares[:, 2], shares[:, :2].sum(1)], 1), atol=1e-6)
    grouped = ("--outputs", "warm=2", "--outputs", "cold=0-1", "--merge", "mean")
    succeed("specialize", *place.model, *grouped, "--out", tmp_path / "mean")
    fair = open_model(str(tmp_path / "mean"), original=place.net).model
    assert torch.allclose(fair(x).exp(), torch.stack([shares[:, 2], shares[:, :2].mean(1)], 1), atol=1e-6)
    one = fail("specialize", *place.model, "--outputs", "cold=0-1", "--out", tmp_path / "x")
    assert "'cold' is the only group: its probability would be 1 for every input" in one
    assert "nothing to remove" in fail("specialize", *place.model, "--outputs", "0-2", "--out", tmp_path / "x")
    assert "each must be named once" in fail("specialize", *place.model, "--outputs", "1,1", "--out", tmp_path / "x")
    mixed = fail("specialize", *place.model, "--outputs", "a=1", "--outputs", "2", "--out", tmp_path / "x")
    assert "do not mix" in mixed


@pytest.mark.parametrize("fixed", [None, 3])
def test_export(place: Place, tmp_path: Path, fixed: int | None) -> None:
    succeed("specialize", *place.model, "--outputs", "2,0", "--out", tmp_path / "two")
    file = tmp_path / "net.onnx"
    more = [] if fixed is None else ["--fixed-batch", fixed]
    found = succeed("export", tmp_path / "two", "--original", place.net, "--out", file, *more)
    assert found["classes"] == ["output 2", "output 0"]
    assert found["input"] == [fixed, 3, 16, 16]  # as noted in the folder
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = torch.rand(fixed or 5, 3, 16, 16)
    (exported,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = build(place.net, place.weights)(x)[:, [2, 0]]
    assert np.abs(exported - expected.numpy()).max() < 1e-4
    assert "a name that ends in .onnx or .pt2" in fail("export", *place.model, "--out", tmp_path / "net.txt")


def test_a_latency_is_planned_for_and_measured_in_the_runtime_that_is_named(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stopwatch that cannot be disturbed: a microsecond for each weight."""
    monkeypatch.setenv("COLUMNS", "200")
    asked: list[Setup] = []

    def passes(self: Clock, models: Any, seconds: Any = None) -> list[list[float]]:
        asked.append(self.setup)
        return [[weighed(model)] for model, _ in models]

    def weighed(model: torch.nn.Module) -> float:
        return 1e-6 * sum(p.numel() for p in model.parameters())

    def profile(_: Onnx, model: torch.nn.Module, plan: Any, paths: list[str]) -> Any:
        return lambda: {path: weighed(model.get_submodule(path)) for path in paths}

    monkeypatch.setattr(Clock, "passes", passes)
    monkeypatch.setattr(Onnx, "profile", profile)
    args = [word for word in place.job if word not in ("--no-latency", "--no-report")]
    more = ["--keep-latency", 0.7, "--runtime", "onnxruntime", "--batch", 2, "--threads", 1, "--repair", "mean"]
    result = invoke("prune", *args, *more, "--out", tmp_path / "s")
    assert result.exit_code == 0, result.stderr
    assert Setup("onnxruntime", 2, 1) in asked
    found = json.loads((tmp_path / "s" / "run.json").read_text())
    assert found["after"]["params"] <= 0.7 * found["before"]["params"]
    assert found["timed"] == {"threads": 1, "device": "cpu"}
    assert {"onnx_latency_1", "onnx_latency_2", "onnx_latency_32", "latency_2"} <= set(found["after"])
    assert (tmp_path / "s" / "model.onnx").exists()  # what runs there
    assert "latency, batch 2, ONNX Runtime, 1 thread" in result.stdout
    assert "ONNX Runtime, 1 thread, batch of 2" in (tmp_path / "s" / "report.html").read_text()
    saved = json.loads((tmp_path / "s" / "model" / "plan.json").read_text())["about"]["latency"]
    assert (saved["runtime"], saved["batch"], saved["threads"]) == ("onnxruntime", 2, 1)
    assert saved["after"] == pytest.approx(1e-6 * found["after"]["params"])


FOURIER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x):
        return self.c(torch.fft.fft2(self.b(torch.relu(self.a(x)))).abs().mean((2, 3)))

def make():
    torch.manual_seed(0)
    return Net()
"""


def test_a_model_that_cannot_be_explained_has_a_report_without_heat_maps(place: Place, tmp_path: Path) -> None:
    """The run is done by then. It used to end with an error, each time that it was started again."""
    (tmp_path / "fourier.py").write_text(FOURIER)
    job = [
        f"{tmp_path / 'fourier.py'}:make",
        "--images",
        place.train,
        "--input-size",
        16,
        "--no-latency",
        "--round-to",
        1,
    ]
    result = invoke("prune", *job, "--criterion", "weight", "--remove", 0.3, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "the report has no heat maps: no relevance rule is known for the complex numbers" in result.stderr
    assert "no relevance rule is known" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(("asked", "steps", "repair"), [
    (["--remove", 0.3], False, True), (["--max-drop", 0.9], True, True), (["--max-drift", 1.9], True, True),
    (["--remove", 0.3, "--step", 0.3], True, False), (["--remove", 0.3, "--step", 0.3, "--repair", "mean"], True, True),
    (["--remove", 0.3, "--repair", "none"], True, False),
])  # fmt: skip
def test_the_estimate_is_of_what_the_run_will_do(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list, steps: bool, repair: bool
) -> None:
    seen: dict = {}

    class Enough(Exception):
        """What comes after the estimate is not of interest."""

    def stop(*args: object, **options: object) -> None:
        seen.update(options)
        raise Enough

    monkeypatch.setattr(importlib.import_module("secateur.cli.prune"), "outlook", stop)
    assert isinstance(invoke("prune", *place.job, *asked, "--out", tmp_path / "out").exception, Enough)
    assert (seen["steps"], seen["repair"]) == (steps, repair)


def test_nothing_is_done_twice(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a whole run, with ONNX, timings and report: each photograph is decoded once, each model measured once."""
    decoded, measured = Counter[str](), Counter[int]()
    usual, accuracy = View.decode, image_task.accuracy

    def decode(self: View, path: Path, training: bool = False) -> Any:
        decoded[str(path)] += 1
        return usual(self, path, training)

    def measure(model: nn.Module, *args: Any, **options: Any) -> Any:
        measured[size_of(model)] += 1
        return accuracy(model, *args, **options)

    monkeypatch.setattr(View, "decode", decode)
    monkeypatch.setattr(image_task, "accuracy", measure)
    job = [item for item in place.job if item not in ("--no-report", "--no-latency")]
    found = succeed("prune", *job, "--out", tmp_path / "s", "--remove", 0.3, "--onnx")
    assert found["images"] == {"reference": 18, "test": 15}
    assert set(decoded.values()) == {1}
    assert len(decoded) == 18 + 15
    assert measured == {found["before"]["params"]: 1, found["after"]["params"]: 1}
