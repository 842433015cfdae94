"""Commands side by side, in the order of a list, until the minutes are over."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import portions
from benchmarks.league import named
from benchmarks.league_models import SEEDS
from benchmarks.portions import Command, commands, further, missing, small, whole, work
from reproduction.published import names


def python(name: str, code: str, *needs: str) -> Command:
    """A command that runs code, which holds no spaces."""
    return Command(name, f"-c {code}", needs)


def test_commands_begin_when_their_data_are_there_and_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "EVERY", 0.1)
    monkeypatch.setattr(portions, "PATIENCE", 0.0)
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    written = "__import__('pathlib').Path('{out}/%s').write_text('there')"
    todo = [
        python("late", written % "late.json", "late.ready", "{out}/first.json"),
        python("never", "pass", "missing.ready"),
        python("first", written % "first.json"),
        python("fails", "raise(SystemExit(3))"),
        python("long", "print('here',flush=True);__import__('time').sleep(600)"),
    ]
    found, begin = [], time.time()
    for line in work(todo, data, out, minutes=0.15, most=2):
        found.append(line)
        if line.startswith("fails: failed"):
            (data / "late.ready").touch()  # data that arrive meanwhile
    assert time.time() - begin < 60
    order = [line.split(":")[0] for line in found if line.endswith("begins")]
    assert order[:2] == ["first", "fails"]
    assert order.count("fails") == 1 + portions.AGAIN  # what fails is begun again, but not for ever
    assert set(order) == {"first", "fails", "late", "long"}
    assert any(line.startswith("fails: failed with 3") for line in found)
    assert any(line.startswith("long: ended") for line in found)
    assert found[-1] == "never: not begun"
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert {"out/first.json", "out/late.json", "out/logs/long.log"} <= set(archive.getnames())
        log = archive.extractfile("out/logs/long.log")
        assert log is not None
        assert log.read() == b"here\n"


def test_nothing_overtakes_what_waits_for_data_while_data_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PATIENCE", 2.0)
    data, out = tmp_path / "data", tmp_path / "out"
    todo = [
        python("made", "pass", "{out}/made.json"),  # by another command, which may take long
        python("late", "pass", "late.ready"),
        python("free", "pass"),
    ]
    begin, found = time.time(), list[str]()
    for line in work(todo[1:], data, out, minutes=0.2, most=4):  # no data come
        found.append(line)
    assert found[0] == "free: begins"
    assert time.time() - begin > 2
    (data / ".come" / "late").mkdir(parents=True)
    (data / ".come" / "late" / "0").touch()
    assert portions.next_ones(todo, data, out, begin) == []  # a part has just come
    (data / "late.ready").touch()
    assert portions.next_ones(todo, data, out, begin) == todo[1:]


def test_processes_have_a_limit_of_memory(tmp_path: Path) -> None:
    shown = "print(__import__('os').environ.get('PYTORCH_CUDA_ALLOC_CONF'))"
    list(work([Command("one", f"-c {shown}", memory=35)], tmp_path, tmp_path / "out", 0.5, 1, memory=100, total=140))
    assert (tmp_path / "out" / "logs" / "one.log").read_text() == "per_process_memory_fraction:0.250\n"


def test_commands_leave_room_in_the_memory(tmp_path: Path) -> None:
    two = [Command(name, f"-c print('{name}')", width=2, memory=10) for name in ("first", "second")]
    found = list(work(two, tmp_path, tmp_path / "out", minutes=0.5, most=16, memory=39))
    assert [line.split(" after")[0] for line in found] == [
        "first: begins", "first: done", "second: begins", "second: done"
    ]  # fmt: skip
    found = list(work(two, tmp_path, tmp_path / "out", minutes=0.5, most=16, memory=40))
    assert [line.split(" after")[0] for line in found[:2]] == ["first: begins", "second: begins"]


def test_runs_of_the_page_are_not_repeated() -> None:
    kept = [json.loads(line) for line in (portions.KEPT / "results.jsonl").open()]
    known = {(line["row"], line["epochs"], line["seed"]) for line in kept if line["speed"] == 2.55}
    for seed in SEEDS[1:]:
        todo = {(str(job.row), job.epochs, job.seed) for job in missing(seed)}
        assert not todo & known
        wanted = {(row, 20) for row, epochs, _ in known if epochs == 20}
        assert wanted == {(row, n) for row, n, number in todo | known if number == seed and n == 20}


def test_only_small_results_travel(tmp_path: Path) -> None:
    sizes = {"a.json": 10, "models/b.safetensors": 10, "whole/c.safetensors": 10, "large.json": portions.LARGEST}
    for name, size in sizes.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    portions.keep(tmp_path / "out")
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert archive.getnames() == ["out/a.json", "out/whole/c.safetensors"]


def test_the_commands_of_the_list_exist() -> None:
    found = commands()
    assert len({command.name for command in found}) == len(found)
    for command in found:
        words = command.text.format(data="DATA", out="OUT", minutes=1).split()
        module = Path(portions.__file__).parents[1].joinpath(*words[1].split("."))
        assert words[0] == "-m"
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        if "fine-tune" in words:
            assert words[words.index("--data") + 1] in names()
    for jobs in (*map(missing, SEEDS), [whole(1)], small(), *map(further, SEEDS)):
        chosen = named(",".join(job.name for job in jobs))
        assert set(chosen) == set(jobs)  # names of no others
