"""The toy experiment from end to end: the ordering it must show, its files, its cache, and an interruption."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from browser import SCHEMES, WIDTHS, check, opened
from reproduction.__main__ import commands
from reproduction.criteria import CRITERIA
from reproduction.toy import campaign, experiment, reference, tables
from reproduction.toy.recipe import QUICK, READINGS, SETS, Recipe, readings
from reproduction.toy.store import digest, get, put
from reproduction.toy.tables import Index
from secateur.errors import SecateurError

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

TINY = Recipe("tiny", width=24, sizes=(1, 5), seeds=7, training_points=40, test_points=10, steps=20, spiral_steps=20)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The quick path, as the command line runs it, for the network of the script."""
    folder = tmp_path_factory.mktemp("toy")
    arguments = ["toy", "--quick", "--net", "script", "--workers", "1"]
    done = CliRunner().invoke(commands, [*arguments, "--out", str(folder / "out"), "--cache", str(folder / "cache")])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def results(quick):
    return json.loads((quick / "out" / "results.json").read_text())


def mean(results, table, **where):
    columns = {name: i for i, name in enumerate(results["columns"])}
    found = [
        r for r in results["rows"] if r[columns["table"]] == table and all(r[columns[k]] == v for k, v in where.items())
    ]
    assert len(found) == 1
    return found[0][columns["mean"]]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("view", QUICK.views)
def test_lrp_keeps_more_than_taylor_and_gradient(results, name, view):
    for n in (5, 20, 100):
        by = {c: mean(results, "accuracy", set=name, view=view, n=n, criterion=c) for c in CRITERIA}
        assert by["lrp"] > by["taylor"], (name, view, n, by)
        assert by["lrp"] > by["gradient"], (name, view, n, by)


def test_lrp_hardly_hurts_where_the_task_is_easy(results):
    for name in ("moon", "circle"):
        before = mean(results, "unpruned", set=name, view="train")
        assert before > 99
        assert all(
            mean(results, "accuracy", set=name, view="train", n=n, criterion="lrp") > before - 1.5 for n in (5, 20, 100)
        )


def test_one_reference_point_is_too_little_for_everyone_but_weight(results):
    for name in SETS:
        by = {c: mean(results, "accuracy", set=name, view="train", n=1, criterion=c) for c in CRITERIA}
        assert by["weight"] > max(by["lrp"], by["taylor"], by["gradient"]) + 10


def test_lrp_ranks_most_alike_over_seeds(results):
    for name in SETS:
        by = {c: mean(results, "self", set=name, n=20, measure="rank correlation", criterion=c) for c in CRITERIA}
        assert by["weight"] == pytest.approx(1)
        assert by["lrp"] > 0.97 > max(by["taylor"], by["gradient"])


def test_networks_lose_exactly_a_third(results):
    assert results["nets"]
    for net in results["nets"]:
        for by in net["removed"].values():
            assert all(sum(layers) == pytest.approx(QUICK.width, abs=0.2) for layers in by.values())


def test_the_page_stands_alone(quick):
    page = (quick / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href|srcset)="(?!data:|#)', page)
    assert "url(" not in page
    assert "<script" not in page
    images = re.findall(r"<img [^>]*>", page)
    assert len(images) == 3
    assert all(len(re.search(r'alt="([^"]*)"', image)[1]) > 60 for image in images)
    assert "prefers-color-scheme: dark" in page
    for erratum in reference.numbers()["errata"]:
        assert erratum["what"][:30].replace("'", "&#39;") in page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_in_a_browser(quick, browser, width, scheme):
    with opened(browser, quick / "out" / "report.html", width, scheme) as page:
        check(page)


def test_a_second_run_computes_nothing_and_gives_the_same_numbers(quick, results):
    before = {p: p.stat().st_mtime_ns for p in (quick / "cache").rglob("*.safetensors")}
    again = campaign.run(QUICK, readings(["script"]), quick / "cache", workers=1)
    assert {p: p.stat().st_mtime_ns for p in (quick / "cache").rglob("*.safetensors")} == before
    made = tables.rows(again, QUICK)
    assert [[tables.short(value) for value in vars(row).values()] for row in made] == results["rows"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A very small experiment, whole."""
    return campaign.run(TINY, [READINGS["paper"]], tmp_path_factory.mktemp("tiny"), workers=1)


def same(one, two):
    return all(
        a.trained_accuracy == b.trained_accuracy and all((a.arrays[key] == b.arrays[key]).all() for key in a.arrays)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
def test_several_processes_give_the_same_numbers_and_pictures(tmp_path, tiny):
    chosen = [READINGS["paper"]]
    one, two = (experiment.reproduce(tmp_path / str(n), TINY, chosen, tmp_path / f"cache{n}", n) for n in (1, 2))
    assert same(one.outcomes, tiny)
    assert same(two.outcomes, tiny)
    files = [path.relative_to(one.folder) for path in one.folder.rglob("*") if path.suffix in (".png", ".csv", ".json")]
    assert len(files) == 12
    for path in files:
        if path.name != "run.json":
            assert (one.folder / path).read_bytes() == (two.folder / path).read_bytes()


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, tiny):
    chosen = [READINGS["paper"]]

    def stop(text, done):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign.run(TINY, chosen, tmp_path, workers=1, progress=stop)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "toy").iterdir()}
    assert len(kept) == 5
    assert all(get(path) is not None for path in kept)
    outcomes = campaign.run(TINY, chosen, tmp_path, workers=1)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert same(outcomes, tiny)  # from scratch elsewhere, in one go: equal seeds, equal numbers


def test_damaged_files_are_computed_again(tmp_path):
    path = put(tmp_path / "a.safetensors", {"x": np.arange(6.0)}, {"what": 1})
    arrays, about = get(path)
    assert arrays["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert about == {"what": 1}
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-3], b"\xff" * 40, b'{"not": "safetensors"}'):
        path.write_bytes(content)
        assert get(path) is None
    assert get(tmp_path / "missing") is None
    assert digest("a", [1]) != digest("a[1]") != digest("a", 1)


def test_rows_compare_with_print_unless_it_is_wrong():
    good = reference.accuracy("moon", "train", 20, "lrp")
    assert good.value == good.printed == 99.85
    wrong = reference.with_lrp("moon", 10, "first-1000", "weight")
    assert wrong.printed == 0.381
    assert wrong.value == pytest.approx(0.42, abs=1e-3)
    assert reference.accuracy("multi", "0.3", 10, "lrp").printed is None
    assert reference.self_similarity("circle", 10, "last-250", "taylor").value == 0.483
    assert reference.across("multi", 10, 200, "first-250").value == 0.762
    assert reference.accuracy("moon", "0.01", 2, "lrp").value is None  # the logs have no n=2 there


def test_tables_hold_every_number_once(tiny):
    made = tables.rows(tiny, TINY)
    assert len({(r.table, r.net, r.set, r.view, r.n, r.m, r.measure, r.criterion) for r in made}) == len(made)
    index = Index(made)
    row = index.accuracy("paper", "moon", "train", 5, "lrp")
    assert row.mean == pytest.approx(tiny[0].arrays["accuracy"][1, :, 3, 0].mean(), abs=1e-4)
    assert row.difference == pytest.approx(row.mean - 99.86)
    assert index.similarity("with_lrp", "paper", "moon", 5, "last-250", "lrp").mean == 1
    assert tables.as_csv(made).count("\n") == len(made) + 1


def test_errors_are_one_line_unless_debugging(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise SecateurError("the reason.\nAnd the way out.")

    monkeypatch.setattr(experiment, "reproduce", fail)
    monkeypatch.delenv("SECATEUR_DEBUG", raising=False)
    arguments = ["toy", "--out", str(tmp_path)]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 1
    assert done.stderr == "secateur: error: the reason. And the way out.\n"
    monkeypatch.setenv("SECATEUR_DEBUG", "")
    debugged = CliRunner().invoke(commands, [*arguments, "--debug"])
    assert isinstance(debugged.exception, SecateurError)


def test_interruption_says_how_to_go_on(monkeypatch, tmp_path):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "reproduce", stop)
    done = CliRunner().invoke(commands, ["toy", "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert "goes on from there" in done.stderr


def test_unknown_networks_are_refused():
    done = CliRunner().invoke(commands, ["toy", "--net", "resnet"])
    assert done.exit_code == 2
    with pytest.raises(SecateurError, match="use paper or script"):
        readings(["resnet"])
