"""What the command line refuses before it writes, what it notes, and the words it uses."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from command import NET, Place, fail, furnished, invoke, step_done, succeed
from photos import write_photos
from secateur.cli import image_task
from secateur.cli.app import app
from secateur.cli.messages import message_of, warnings_as_lines
from secateur.cli.output import Printer, ProgressLines
from secateur.cli.run_folder import Run
from secateur.errors import Argument, SecateurError
from secateur.models import build
from secateur.running.progress import Scoring


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return furnished(tmp_path_factory.mktemp("place"))


# -- the folder that is written to -------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", [".", "red", "red/new", "sub/../red", ".."])
@pytest.mark.parametrize("role", ["images", "test"])
def test_nothing_is_written_among_the_images(place: Place, tmp_path: Path, where: str, role: str) -> None:
    mine = write_photos(tmp_path / "all" / "mine", per_class=2, size=(16, 16))
    other = {"images": "test", "test": "images"}[role]
    folders = [f"--{role}", mine, f"--{other}", place.test]
    before = sorted(tmp_path.rglob("*"))
    for command in ("prune", "compare"):
        said = fail(command, *place.model, *folders, "--remove", 0.3, "--out", mine / where)
        assert f"the folder of --{role}, {mine}" in said
        assert "Fix: another --out" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_an_image_folder_by_another_name_is_the_same(place: Place, tmp_path: Path) -> None:
    mine = write_photos(tmp_path / "mine", per_class=2, size=(16, 16))
    (tmp_path / "link").symlink_to(mine)
    said = fail("prune", *place.model, "--images", mine, "--remove", 0.3, "--out", tmp_path / "link" / "small")
    assert "lies inside the folder of --images" in said


def test_a_single_class_is_refused(place: Place, tmp_path: Path) -> None:
    """A network with one output is right on every image of that class, whatever became of it."""
    mine = write_photos(tmp_path / "mine", per_class=4, size=(16, 16))
    for folder in list(mine.iterdir())[1:]:
        shutil.rmtree(folder)
    (name,) = (folder.name for folder in mine.iterdir())
    given = ["prune", *place.model, "--images", mine, "--remove", 0.3, "--no-latency", "--no-report"]
    for outputs in ("1", "0-1"):
        said = fail(*given, "--outputs", f"{name}={outputs}", "--out", tmp_path / "small")
        assert f"{mine} has one class folder, '{name}': a model for one class is right whatever it sees. Fix: " in said
    assert not (tmp_path / "small" / "model").exists()
    more = ["--outputs", f"{name}=1", "--no-specialize", "--round-to", 1, "--out", tmp_path / "small"]
    assert succeed(*given, *more)["files"]


def test_heat_maps_are_kept_apart_from_images(place: Place, tmp_path: Path) -> None:
    mine = write_photos(tmp_path / "mine", per_class=1, size=(16, 16))
    for out in (mine, mine / "maps"):
        assert "mixed with your images" in fail("explain", *place.model, mine, "--out", out)
    assert not (mine / "maps").exists()
    assert succeed("explain", *place.model, mine, "--limit", 1, "--out", tmp_path)["images"]


def test_an_unwritable_place_is_named_before_the_work(place: Place, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("mine")
    said = fail("prune", *place.job, "--remove", 0.3, "--out", tmp_path / "file" / "small")
    assert f"secateur: error: {tmp_path / 'file'} is a file; --out is a folder." in said.splitlines()
    assert "is a file; --out is a folder" in fail("demo", "--out", tmp_path / "file").splitlines()[-1]
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    for command in ("prune", "compare"):
        args = [word for word in place.job if command == "prune" or word not in ("--round-to", "1", "--no-latency")]
        args = [word for word in args if command == "prune" or word != "--no-report"]
        said = fail(command, *args, "--remove", 0.3, "--out", tmp_path / "new" / "small")
        assert said.splitlines() == [
            f"secateur: error: --out {tmp_path / 'new' / 'small'} cannot be made: {tmp_path} may not be written to. "
            f"Fix: another --out."
        ]


# -- going on, and replacing -------------------------------------------------------------------------------------------
def stop_at(call: int, monkeypatch) -> None:
    """Interrupt a run when accuracy is measured for the n-th time."""
    calls: list[int] = []
    usual = image_task.Task.accuracy

    def impatient(self, model):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return usual(self, model)

    monkeypatch.setattr(image_task.Task, "accuracy", impatient)


def test_an_unfinished_run_of_another_request_says_what_differs(place: Place, tmp_path: Path, monkeypatch) -> None:
    args = ["prune", *place.job, "--step", 0.1, "--out", tmp_path / "s"]
    with monkeypatch.context() as patched:
        stop_at(3, patched)
        assert invoke(*args, "--remove", 0.5).exit_code == 130
    kept = (tmp_path / "s" / "run.json").read_text()
    torch.manual_seed(1)
    other = {k: v + 0.1 if v.is_floating_point() else v for k, v in build(place.net).state_dict().items()}
    safetensors.torch.save_file(other, tmp_path / "other.safetensors")
    cases = {
        "--remove was 0.5, is now 0.4": ["--remove", 0.4],
        "--remove was 0.5, is now not given; --keep-macs": ["--keep-macs", 0.5],
        "--criterion was lrp, is now weight": ["--remove", 0.5, "--criterion", "weight"],
        "--round-to was 1, is now 2": ["--remove", 0.5, "--round-to", 2],
        "--seed was 0, is now 3": ["--remove", 0.5, "--seed", 3],
        "other weights": ["--remove", 0.5, "--weights", tmp_path / "other.safetensors"],
    }
    for what, more in cases.items():
        said = fail(*args, *more)
        assert all(part in said for part in what.split("; "))
        assert said.rstrip().endswith("Fix: --fresh, or another --out.")
        assert "going on" not in said
        assert not re.search("[0-9a-f]{16}", said)
        assert (tmp_path / "s" / "run.json").read_text() == kept
    (tmp_path / "s" / "run.json").unlink()
    assert "its run.json is missing or damaged. Fix: --fresh" in fail(*args, "--remove", 0.5)
    assert invoke(*args, "--remove", 0.4, "--fresh").exit_code == 0


def test_the_same_weights_in_another_file_go_on(place: Place, tmp_path: Path, monkeypatch) -> None:
    args = ["prune", *place.job, "--remove", 0.5, "--step", 0.1, "--out", tmp_path / "s"]
    with monkeypatch.context() as patched:
        stop_at(3, patched)
        assert invoke(*args).exit_code == 130
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(place.weights).read_bytes())
    assert "going on with the unfinished run" in invoke(*args, "--weights", copy).stderr


def test_what_is_only_written_may_change_between_the_calls(place: Place, tmp_path: Path, monkeypatch) -> None:
    args = ["prune", *place.job, "--remove", 0.3, "--step", 0.1, "--epochs", 1]  # without a report
    succeed(*args, "--out", tmp_path / "whole")
    for number, (before, after) in enumerate([([], ["--report"]), (["--report"], [])]):
        out = tmp_path / str(number)
        with monkeypatch.context() as patched:
            stop_at(3, patched)
            assert invoke(*args, *before, "--out", out).exit_code == 130
        resumed = invoke(*args, *after, "--onnx", "--latency", "--out", out)
        assert resumed.exit_code == 0, resumed.stderr
        assert "going on with the unfinished run" in resumed.stderr
        assert (out / "report.html").exists() == ("--report" in after)
        states = [safetensors.torch.load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", out)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_two_runs_never_write_into_one_folder_at_once(place: Place, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("fcntl")
    usual, said = image_task.Task.accuracy, []

    def meanwhile(self, model):
        monkeypatch.setattr(image_task.Task, "accuracy", usual)
        args = [sys.executable, "-m", "secateur", "prune", *place.job, "--remove", "0.6", "--out", str(tmp_path / "s")]
        said.append(subprocess.run(args, capture_output=True, text=True).stderr)
        return usual(self, model)

    monkeypatch.setattr(image_task.Task, "accuracy", meanwhile)
    succeed("prune", *place.job, "--remove", 0.3, "--out", tmp_path / "s")
    assert f"another run is writing to {tmp_path / 's'}. Fix: wait for it, or another --out." in said[0]
    assert json.loads((tmp_path / "s" / "run.json").read_text())["asked"]["remove"] == 0.3
    succeed("prune", *place.job, "--remove", 0.6, "--out", tmp_path / "s")


def test_an_impossible_target_leaves_nothing_behind(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "s"
    args = ["prune", *place.job, "--out", out]
    assert "cannot reach" in fail(*args, "--keep-macs", 0.0001)
    assert list(out.iterdir()) == []
    assert invoke(*args, "--keep-macs", 0.6).exit_code == 0
    kept = (out / "run.json").read_text()
    assert "cannot reach" in fail(*args, "--keep-macs", 0.0001)
    assert (out / "run.json").read_text() == kept  # of the result that is still there


def test_run_json_holds_what_was_asked_for(place: Place, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(place.root)
    args = ["net.py:make", "--weights", "net.safetensors", "--images", "train", "--test", "test", "--input-size", 16]
    args += ["--keep-params", 0.7, "--max-drop", 0.9, "--criterion", "taylor", "--scope", "layer", "--step", 0.2]
    args += ["--no-rescore", "--round-to", 2, "--ignore", "8", "--ignore", "[3]", "--repair", "ridge"]
    args += ["--per-class", 4, "--test-per-class", 3, "--seed", 7, "--learning-rate", 0.5, "--device", "cpu"]
    args += ["--no-report", "--no-latency", "--fit", "squash", "--mean", "0.5,0.5,0.5", "--std", "0.2,0.2,0.2"]
    succeed("prune", *args, "--out", tmp_path / "s")
    text = (tmp_path / "s" / "run.json").read_text()
    asked = json.loads(text)["asked"]
    expected = {
        "command": "prune", "model": "net.py:make", "weights": "net.safetensors", "images": "train", "test": "test",
        "size": 16, "keep_macs": None, "keep_params": 0.7, "keep_latency": None, "remove": None, "max_drop": 0.9,
        "criterion": "taylor", "scope": "layer", "step": 0.2, "rescore": False, "round_to": 2,
        "ignore": ["8", "[3]"], "repair": "ridge", "per_class": 4, "test_per_class": 3, "seed": 7,
        "learning_rate": 0.5, "epochs": 0, "device": "cpu", "report": False, "latency": False, "onnx": False,
        "specialize": True, "strict": False, "outputs": {"blue": [0], "green": [1], "red": [2]},
        "view": {"size": 16, "fit": "squash", "mean": [0.5] * 3, "std": [0.2] * 3},
    }  # fmt: skip
    assert {key: asked.get(key) for key in expected} == expected
    assert str(place.root) not in text  # names as given
    words = ["net.py:make", "--weights", "net.safetensors", "--images", "train", "--test", "test", "--input-size", 16]
    words += ["--criterion", "weight", "--remove", 0.3, "--step", 0.15, "--seed", 5]
    succeed("compare", *words, "--out", tmp_path / "c")
    asked = json.loads((tmp_path / "c" / "run.json").read_text())["asked"]
    expected = {"command": "compare", "criteria": ["weight"], "remove": 0.3, "step": 0.15, "seed": 5}
    assert {key: asked.get(key) for key in expected} == expected


def test_a_result_that_is_replaced_is_said_and_leaves_nothing_over(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--out", tmp_path / "s"]
    first = invoke(*args, "--remove", 0.2, "--onnx", "--report")
    assert first.exit_code == 0
    assert "replaces" not in first.stderr
    (tmp_path / "s" / "notes.txt").write_text("mine")
    again = invoke(*args, "--remove", 0.4)
    assert f"replaces the earlier result in {tmp_path / 's'} (--remove was 0.2, is now 0.4)" in again.stderr
    names = sorted(p.name for p in (tmp_path / "s").iterdir())
    assert names == ["history.csv", "model", "notes.txt", "run.json"]  # no ONNX of the model before
    assert "(the same command)" in invoke(*args, "--remove", 0.4).stderr


# -- targets and other options -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--keep-macs", 0.5, "--remove", 0.3], ["--keep-macs and --remove are different targets", "give one of them"]),
        (["--keep-macs", 0.5, "--keep-latency", 0.5], ["--keep-macs and --keep-latency", "approached alone"]),
        (["--keep-macs", 50], ["--keep-macs 50 is no share", "--keep-macs 0.5 for 50 per cent"]),
        (["--keep-params", 75], ["--keep-params 0.75 for 75 per cent"]),
        (["--keep-latency", 60], ["--keep-latency 0.6 for 60 per cent"]),
        (["--keep-latency", 600], ["--keep-latency 600 must be a share"]),
        (["--keep-macs", 0], ["--keep-macs 0 must be above 0"]),
        (["--remove", 30], ["--remove 30 must lie strictly between 0 and 1", "--remove 0.3 for 30 per cent"]),
        (["--remove", 0], ["--remove 0 must lie strictly between 0 and 1"]),
        (["--remove", 0.5, "--step", 5], ["--step 5 must lie", "--step 0.05 for 5 per cent"]),
        (["--remove", 0.5, "--criterion", "lpr"], ["--criterion lpr is not known", "Did you mean lrp?"]),
        (["--remove", 0.5, "--criterion", "LRP"], ["Did you mean lrp?"]),
        (["--remove", 0.5, "--criterion", "lrp:epsilon_pls"], ["Did you mean lrp:epsilon_plus?"]),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(given, words, tmp_path: Path) -> None:
    said = fail("prune", "nowhere.py:make", "--images", "nowhere", *given, "--out", tmp_path / "s")
    assert all(word in said for word in words)
    assert len(said.splitlines()) == 1
    assert "Criterion" not in said
    assert not re.search(r"\b(keep|remove|step)=", said)
    assert not (tmp_path / "s").exists()


def test_options_without_what_they_speak_of_are_not_passed_over(tmp_path: Path) -> None:
    args = ["prune", "nowhere.py:make", "--remove", 0.5, "--out", tmp_path / "s"]
    training = ["--images", "nowhere", "--learning-rate", 0.1, "--lora", 4]
    said = fail(*args, *training)
    assert "warning: --learning-rate says how to train, but nothing asks for training, so it has no effect." in said
    assert "Fix: --epochs or --minutes, or leave out --lora." in said
    for asking in (["--epochs", 0], ["--minutes", 1]):
        assert "has no effect" not in fail(*args, *training, *asking)
    assert "--columns says more about --labels, which is missing" in fail(*args, "--text", "a.csv", "--columns", "a,b")


def test_a_count_of_macs_is_still_a_count(place: Place, tmp_path: Path) -> None:
    wanted = 50_000  # of 92 184
    found = succeed("prune", *place.job, "--keep-macs", wanted, "--out", tmp_path / "s")
    assert 0 < found["after"]["macs"] <= wanted < found["before"]["macs"]


def test_lists_are_given_as_repeated_options(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.5, "--out", tmp_path / "s"]
    said = fail(*args, "--criterion", "lrp,taylor")
    assert "--criterion lrp,taylor names several. Fix: once for each: --criterion lrp --criterion taylor." in said
    said = fail(*args, "--outputs", "red=0,2,green=1")
    assert "red=0,2,green=1 names several class folders. Fix: once for each, such as --outputs red=0,2." in said
    said = " ".join(fail(*args, "--max-drop", 5, code=2).replace("│", " ").split())
    assert "5 is no share from 0 to 1; 0.05 is for 5 points of accuracy" in said


def test_models_of_nearly_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    assert fail("inspect", "net:make").rstrip().endswith("Did you mean net.py:make?")
    for right in ("resnet18", "ResNet18"):
        assert fail("inspect", right).rstrip().endswith("Did you mean torchvision:resnet18?")


def test_what_differs_is_told_in_short(tmp_path: Path) -> None:
    printer, note, asked = Printer(as_json=True), tmp_path / "run.json", {"outputs": {"a": list(range(100))}, "seed": 1}
    note.write_text(json.dumps({"asked": asked, "finished": True}))
    with pytest.MonkeyPatch.context() as patched:
        told: list[str] = []
        patched.setattr(printer, "note", told.append)
        Run.begin(tmp_path, {"outputs": {"a": [1]}, "seed": 2}, False, printer)
    assert told[0].endswith("(outputs differs; --seed was 1, is now 2)")


def test_compare_refuses_the_same(tmp_path: Path) -> None:
    args = ["compare", "nowhere.py:make", "--images", "nowhere", "--out", tmp_path / "s"]
    assert "Did you mean taylor?" in fail(*args, "--criterion", "lrp", "--criterion", "tailor")
    assert "--remove 50 must lie" in fail(*args, "--remove", 50)
    twice = [word for name in ("lrp", "weight", "lrp") for word in ("--criterion", name)]
    assert "--criterion lrp is given 2 times. Fix: each one once." in fail(*args, *twice)


def test_pixels_run_from_0_to_1(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.3, "--out", tmp_path / "s"]
    said = fail(*args, "--mean", "123,116,103", "--std", "58,57,57")
    assert "--mean 123,116,103 is for pixels from 0 to 255" in said
    assert "Fix: divide by 255, --mean 0.482,0.455,0.404." in said
    for odd in ("nan", "inf", "-inf"):
        said = invoke(*args, f"--mean={odd},0,0", "--std", "1,1,1")
        assert said.exit_code == 2
        assert "is not a list of numbers such as 0.5,0.5,0.5" in " ".join(said.stderr.replace("│", " ").split())
    assert "--std 0.227,0.224,0.224." in fail(*args, "--mean", "0.5,0.5,0.5", "--std", "58,57,57")
    assert invoke(*args, "--mean", "0,0,0", "--std", "1,1,1").exit_code == 0


def test_grey_and_colour_are_told_in_options(place: Place, tmp_path: Path) -> None:
    def told(text: str) -> str:
        return " ".join(text.replace("│", " ").split())

    grey, both = tmp_path / "grey.py", ["--mean", "0.5", "--std", "0.5"]
    grey.write_text(NET.replace("Conv2d(3,", "Conv2d(1,"))
    data = ["--images", place.train, "--keep-macs", 0.5, "--out", tmp_path / "s"]
    for args in (["inspect", *place.model, *both], ["prune", *place.model, *data, *both]):
        said = fail(*args)
        assert "--mean and --std have one number each, which makes grey images, and Sequential takes colour" in said
        assert "Fix: --mean and --std of its training, three numbers each." in said
        assert "expand" not in said
    assert "Fix: --mean and --std of its training, one number each." in fail("inspect", f"{grey}:make")
    assert invoke("inspect", f"{grey}:make", *both).exit_code == 0
    # Found before anything is built: the file of the network is not there.
    mixed = fail("inspect", "nowhere.py:make", "--mean", "0.5", "--std", "0.5,0.5,0.5")
    assert "--mean and --std need one number each (grey) or three (colour), --std above 0" in mixed
    for option in ("--mean", "--std"):
        said = told(fail("inspect", "nowhere.py:make", option, "0.5", code=2))
        assert "give both or none, with three numbers each, or one for grey" in said


def test_a_network_may_make_its_own_colours(tmp_path: Path) -> None:
    """Then its first convolution says nothing about what it takes, and other errors are not put down to colour."""
    (tmp_path / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self, least=1):\n        super().__init__()\n"
        "        self.least, self.a, self.b = least, torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 2)\n\n"
        "    def forward(self, x):\n"
        "        assert x.shape[1] == 1 and x.shape[-1] >= self.least, 'too small'\n"
        "        return self.b(self.a(x.repeat(1, 3, 1, 1)).relu().amax((2, 3)))\n"
    )
    args = ["--mean", "0.5", "--std", "0.5", "--input-size", 8]
    assert invoke("inspect", f"{tmp_path / 'net.py'}:Net", *args).exit_code == 0
    said = fail("inspect", f"{tmp_path / 'net.py'}:Net?least=9", *args)
    assert "too small" in said
    assert "--mean" not in said


def test_devices_that_are_not_called_so(place: Place) -> None:
    assert "there is no device 'gpu'. Fix: --device cuda, or auto" in fail("inspect", place.net, "--device", "gpu")
    assert "--device cuda:1, or auto" in fail("inspect", place.net, "--device", "GPU:1")


def test_parts_of_a_data_set_are_no_classes(place: Place, tmp_path: Path) -> None:
    net = f"{place.net}?classes=2"  # as many outputs as there are parts
    said = fail("prune", net, "--images", place.root, "--remove", 0.3, "--out", tmp_path / "s")
    assert f"the folders in {place.root} are parts of a data set (test, train), not classes" in said
    assert f"Fix: one of them, such as {place.root / 'train'}" in said


def test_images_to_test_on_must_be_others(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.model, "--images", place.train, "--test", place.train, "--remove", 0.3]
    said = fail(*args, "--out", tmp_path / "s")
    assert "18 images are in --images and in --test" in said
    assert "Fix: a --test with other images, or none: then some of --images are held out." in said


def test_a_network_without_weights_is_as_it_was_built(place: Place, tmp_path: Path) -> None:
    args = [place.net, "--input-size", 16, "--outputs", "0,1"]
    said = invoke("specialize", *args, "--out", tmp_path / "a").stderr
    assert "secateur: warning: no --weights were given: the network is as make() built it." in said
    assert "random" not in said  # make may load them
    said = invoke("specialize", *args, "--weights", place.weights, "--out", tmp_path / "b").stderr
    assert "warning" not in said
    again = [tmp_path / "b", "--original", place.net, "--outputs", "0", "--out", tmp_path / "c"]
    assert "warning" not in invoke("specialize", *again).stderr  # a saved folder has its weights


# -- the words of the command line -------------------------------------------------------------------------------------
def test_errors_of_the_functions_speak_of_options(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--out", tmp_path / "s"]
    said = fail(*args, "--keep-macs", 0.0001)
    assert "Fix: a larger target, a smaller --round-to, or fewer ignored layers." in said
    said += fail(*args, "--remove", 0.95)
    assert re.search(r"--remove 0\.9\d+ asks for 15 of 16 units", said)
    assert "every layer keeps at least 1, and ignored layers keep all" in said
    assert "Fix: a smaller share, or fewer ignored layers." in said
    said += fail(*args, "--remove", 0.01)
    assert "--remove 0.01 of 16 units is less than the smallest group" in said
    said += fail(*args, "--remove", 0.5, "--ignore", "*")
    assert "--ignore '*'" in said
    assert "see `secateur inspect`, which shows every layer" in said
    torn = write_photos(tmp_path / "set", per_class=3, size=(16, 16))
    (torn / "red" / "torn.jpg").write_bytes(b"\xff\xd8")
    said += fail("prune", *place.model, "--images", torn, "--remove", 0.3, "--strict", "--out", tmp_path / "s")
    assert "or leave out --strict to skip them" in said
    drop = invoke(*args, "--max-drop", 0.0, "--step", 0.3, "--criterion", "random", "--seed", 2)
    said += drop.stdout + drop.stderr
    assert "would have lost more accuracy than allowed" in said
    said += fail(*args, "--keep-latency", 1e-6, "--round-to", 2, "--fresh")
    assert "cannot reach" in said
    assert not re.search(r"min_units|round_to|max_drop|\b(keep|remove|ignore|only)=|print\(graph\)", said)


def test_texts_are_never_searched_for_arguments() -> None:
    for text in ("net.py:make?step=2", "`block.round_to` has 3 {units}", "/data/max_drop/a.png", "remove=0.9"):
        assert message_of(SecateurError(text)) == text
        named = SecateurError("{text} and {remove}.", fix="a smaller {remove}", text=text, remove=Argument("remove"))
        assert message_of(named) == f"{text} and --remove. Fix: a smaller --remove."
        assert str(named) == f"{text} and remove. Fix: a smaller remove."


def test_a_checkpoint_of_another_run_is_refused_in_terms_of_options(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.3, "--step", 0.1, "--out", tmp_path / "s"]
    (tmp_path / "s").mkdir()
    for settings, what in ((None, "is not a checkpoint of this version"), ({"weights": "0" * 64}, "other weights")):
        header = {"format": "secateur-loop-1", "settings": settings} if settings else {}
        metadata = {"secateur": json.dumps(header)}

        def instead(out: Path, asked, fresh, printer, metadata=metadata) -> Run:
            safetensors.torch.save_file({"a": torch.zeros(1)}, out / "checkpoint.safetensors", metadata)
            return Run(out, asked, None)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Run, "begin", instead)
            said = fail(*args)
        assert what in said
        assert said.rstrip().endswith("Fix: --fresh, or another --out.")


def test_a_state_is_said_once() -> None:
    said: list[str] = []
    printer = Printer(False)
    printer.note = said.append  # type: ignore[method-assign]
    lines = ProgressLines(printer, seconds=0)  # even where everything may be said
    full, less = step_done(8), step_done(6)
    for event in (full, Scoring("lrp"), full, full, less):
        lines(event)
    assert said == [str(full), "scoring units by lrp", str(less)]


def test_small_steps_do_not_repeat_themselves(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.3, "--step", 0.02, "--out", tmp_path / "s"]  # of 16 units
    states = [line for line in invoke(*args).stderr.splitlines() if " units left " in line]
    assert [int(line.split()[0]) for line in states] == [16, 15, 14, 13, 12]


def test_exporters_keep_their_remarks_to_themselves(capsys) -> None:
    logger = logging.getLogger("onnxscript.optimizer._constant_folding")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for debugging in (False, True):
            with warnings_as_lines(sys.stderr, debugging):
                logger.warning("Skipping constant folding, %s", debugging)
                logging.getLogger("torch.onnx.a").error("this is wrong")
                if not debugging:
                    warnings.warn("# The axis name: batch will not be used", stacklevel=1)
        logger.warning("afterwards")
    finally:
        logger.removeHandler(handler)
    assert heard == ["Skipping constant folding, True", "afterwards"]
    assert "axis name" not in capsys.readouterr().err


def test_fresh_deletes_checkpoints_of_ours_only(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.3, "--out", tmp_path, "--fresh"]
    mine = tmp_path / "checkpoint-of-mine.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, mine)
    raw = mine.read_bytes()
    said = fail(*args)
    assert "checkpoint-of-mine.safetensors is not a checkpoint of secateur" in said
    assert said.rstrip().endswith("Fix: move it away, or another --out.")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {mine.name: raw}


def test_a_model_folder_with_files_of_the_users_is_refused_before_the_work(place: Place, tmp_path: Path) -> None:
    args = ["prune", *place.job, "--remove", 0.3, "--out", tmp_path]
    succeed(*args)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert "model holds what was not written by secateur (notes.txt)" in fail(*args)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_escape_sequences_in_names_do_not_reach_the_terminal(place: Place, tmp_path: Path) -> None:
    odd = tmp_path / "a\x1b[2J\x07\u202eb"
    outputs = [
        invoke("prune", *place.job, "--remove", 0.3, "--out", odd / "out") for _ in range(2)
    ]  # replaces the first
    (odd / "out" / "model" / "\x1b[31mred").write_text("")
    outputs += [
        invoke("prune", *place.job, "--remove", 0.3, "--out", odd / "out"),
        invoke("prune", odd / "net.py:make", "--images", place.train, "--remove", 0.3, "--out", tmp_path / "c"),
        invoke("prune", *place.model, "--images", odd / "none", "--remove", 0.3, "--out", tmp_path / "d"),
        invoke("\x1b[2J"),
        invoke("inspect", place.net, "--weights", odd / "none.safetensors"),
    ]
    assert [result.exit_code for result in outputs[:2]] == [0, 0]
    for result in outputs:
        said = result.stdout + result.stderr
        assert not set(said) & set("\x1b\x07\u202e"), repr(said)
        assert "\\x1b[" in said


def test_a_terminal_of_few_letters_loses_no_result(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.train, tmp_path / "set")
    (tmp_path / "set" / "red").rename(tmp_path / "set" / "röt→")
    args = ["prune", *place.model, "--images", tmp_path / "set", "--remove", 0.3, "--round-to", 1, "--no-latency"]
    args += ["--per-class", 3, "--no-report", "--out", tmp_path / "s"]
    found = CliRunner(charset="latin-1").invoke(app, [str(arg) for arg in args])
    assert found.exit_code == 0, found.output
    assert "röt\\u2192" in found.stdout


def test_a_full_disk_is_named_with_the_file(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    said = fail("explain", *place.model, place.test, "--limit", 1, "--out", tmp_path / "maps")
    assert re.search(r"maps/000-\S+\.png could not be written: No space left on device. Fix: make room", said)
    assert not list((tmp_path / "maps").iterdir())
    monkeypatch.setattr("torch.onnx.export", full)
    said = fail("export", *place.model, "--out", tmp_path / "net.onnx")
    assert "net.onnx could not be written: No space left on device. Fix: make room" in said
    assert not (tmp_path / "net.onnx").exists()
