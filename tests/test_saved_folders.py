"""What saving does to folders: nothing of the user's is removed, and a model is there at every moment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import secateur as sc
from secateur import atomic
from secateur.errors import FileFormatError, SecateurError
from secateur.files import fingerprint

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def smaller(share: float = 0.5) -> nn.Module:
    net = network()
    graph = sc.analyze(net, X)
    return sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=share))


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_folder_of_the_users_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis" / "figures").mkdir(parents=True)
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(
        SecateurError, match=r"not written by secateur \(chapter\.tex, figures\).*Fix: the name"
    ) as found:
        sc.save(smaller(), tmp_path / "thesis")
    assert found.value.where == str(tmp_path / "thesis")
    assert content(tmp_path) == {"thesis/chapter.tex": b"years of work"}


def test_what_lies_beside_a_saved_model_is_the_users(tmp_path: Path) -> None:
    sc.save(smaller(), tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(SecateurError, match=r"notes\.txt"):
        sc.save(smaller(0.25), tmp_path / "m")
    assert content(tmp_path) == before


@pytest.mark.parametrize("names", [["model.safetensors"], ["plan.json"], ["model.safetensors", "plan.json"]])
def test_files_of_our_names_that_others_wrote_are_refused(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in names:
        (tmp_path / "m" / name).write_text('{"format": "mine"}')
    with pytest.raises(SecateurError, match="not written by secateur"):
        sc.save(smaller(), tmp_path / "m")
    assert sorted(content(tmp_path / "m")) == names


def test_files_links_and_the_current_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = smaller()
    sc.save(small, "m")
    Path("file").write_text("mine")
    Path("link").symlink_to("m")
    Path("m2").mkdir()
    Path("m2/plan.json").symlink_to("../m/plan.json")
    before = content(tmp_path)
    for path, why in {
        "file": "is a file", "link": "is a link", ".": "not a folder for one", "..": "not a folder", "m2": "plan.json",
        "file/m": "could not be written",
    }.items():  # fmt: skip
        with pytest.raises(SecateurError, match=why):
            sc.save(small, path)
    assert content(tmp_path) == before
    Path("empty").mkdir()
    sc.save(small, "empty")
    assert sorted(content(tmp_path / "empty")) == ["model.safetensors", "plan.json"]


_AGAIN = "import test_saved_folders as t, sys; t.sc.save(t.smaller(), sys.argv[1], about={'z': 1, 'a': 2})"


def test_equal_models_give_equal_files_with_ordinary_permissions(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sc.save(smaller(), tmp_path / name, about={"z": 1, "a": 2})
    again = subprocess.run(  # the order of metadata differed between processes
        [sys.executable, "-c", _AGAIN, str(tmp_path / "c")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert again.returncode == 0
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")
    mask = os.umask(0)
    os.umask(mask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a").iterdir()} == {0o666 & ~mask}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o777 & ~mask


_OPERATIONS = ("os.replace", "os.fsync", "os.open", "os.unlink", "os.rmdir", "os.mkdir", "io.open")


def forked(number: int, end: str, path: Path, small: nn.Module) -> bool:
    """Save in a copy of this process that fails or is killed at its n-th file operation. Whether it got that far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    seen = 0

    def counted(original):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal seen
            seen += 1
            if seen == number:
                if end == "kill":
                    os._exit(9)
                raise OSError(28, "No space left on device")
            return original(*args, **kwargs)

        return call

    status = 70
    try:
        for operation in _OPERATIONS:
            module, name = operation.split(".")
            setattr(sys.modules[module], name, counted(getattr(sys.modules[module], name)))
        sc.save(small, path)
        status = 0 if seen < number else 4
    except SecateurError:
        status = 3
    finally:
        os._exit(status)


@pytest.mark.parametrize("end", ["kill", "fail"])
@pytest.mark.parametrize("replace", [True, False])
def test_at_every_file_operation(end: str, replace: bool, tmp_path: Path) -> None:
    """A save that is killed or fails anywhere leaves the old model or the new one, and the next one clears up."""
    old, new = smaller(0.5), smaller(0.25)
    expected = {len(model[0].weight): model(X) for model in (old, new)}
    sc.save(new, tmp_path / "warm")  # what is imported late is imported
    for number in range(1, 100):
        place = tmp_path / str(number)
        if replace:
            sc.save(old, place / "m")
        reached = forked(number, end, place / "m", new)
        try:
            found = sc.load(place / "m", network())
            assert torch.equal(found(X), expected[len(found[0].weight)])
        except FileFormatError:
            assert not replace
            assert not reached or end == "kill" or not place.exists()
        if end == "fail" and (place / "m").exists():
            staged = [name for name in os.listdir(place / "m") if name.startswith(".")]
            assert staged == [] or sc.load(place / "m", network()) is not None
        sc.save(new, place / "m")
        assert sorted(content(place)) == ["m/model.safetensors", "m/plan.json"]
        if not reached:
            break
    assert 8 < number < 99


def test_a_full_disk_is_named_and_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    small, result = smaller(), sc.prune(network(), (X, torch.arange(2)), "weight", remove=0.4, progress=False)
    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda path: sc.save(small, path / "m"),
        lambda path: sc.export(small, path / "m.pt2", X),
        lambda path: result.history.to_json(path / "h.json"),
        lambda path: result.report(path / "r.html"),
    ):
        with pytest.raises(SecateurError, match=r"could not be written: No space left on device\. Fix: make room"):
            write(tmp_path / "new")
        assert list(tmp_path.iterdir()) == []


def test_no_changed_bit_loads(tmp_path: Path) -> None:
    small = smaller()
    sc.save(small, tmp_path / "m")
    for name in ("model.safetensors", "plan.json"):
        file = tmp_path / "m" / name
        raw = file.read_bytes()
        for at in range(0, len(raw), max(1, len(raw) // 150)):
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
            with pytest.raises(FileFormatError):
                sc.load(tmp_path / "m", network())
        file.write_bytes(raw)
    assert torch.equal(sc.load(tmp_path / "m", network())(X), small(X))


@pytest.mark.parametrize("plans", [[], [{}] * 20_000], ids=["none", "many"])
def test_a_number_of_plans_that_no_model_has(plans: list[object], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "plan.json").write_text(json.dumps({"format": "secateur-model-1", "plans": plans}))
    with pytest.raises(FileFormatError, match=f"it has {len(plans)} plans"):
        sc.load(tmp_path / "m", network())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" + "[]," * 2**20 + "[]]", " " * (2**26 + 1)])
def test_deep_and_large_plans_are_refused_before_the_work(text: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "plan.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"plan\.json is damaged: it is"):
        sc.load(tmp_path / "m", network())


def test_a_fingerprint_cannot_ask_for_large_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"shape": [1, 4], "low": 0, "high": 1, "kind": "real"}
    saved = fingerprint.answer(network(), json.dumps(form))
    assert saved is not None
    monkeypatch.setattr(fingerprint, "_made", lambda *_: pytest.fail("made the inputs"))
    for inputs in ({**form, "shape": [1, 2**24]}, {"items": [{**form, "shape": [2**16]}] * 2**10}):
        assert fingerprint.answer_gap({**saved, "samples": 0, "inputs": inputs}, network()) is None


def test_a_model_that_is_saved_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the plan and the look at the weights, both are replaced."""
    first, second = smaller(), smaller(0.3)
    sc.save(first, tmp_path / "m")
    candidates = atomic.candidates
    later = [second]

    def looked(path: Path) -> list[Path]:
        if later:
            sc.save(later.pop(), tmp_path / "m")
        return candidates(path)

    monkeypatch.setattr(atomic, "candidates", looked)
    found = sc.load(tmp_path / "m", network())
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), second.parameters(), strict=True))


def test_a_note_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = sc.analyze(net, torch.zeros(1, 4))
    small = sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5))
    with pytest.raises(SecateurError, match="the note cannot be saved: Object of type Tensor"):
        sc.save(small, tmp_path / "small", about={"a": torch.zeros(1)})
    assert not list(tmp_path.iterdir())
