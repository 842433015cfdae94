"""The report page: the numbers of the run, nothing from outside, nothing unescaped."""

from __future__ import annotations

import base64
import copy
import csv
import functools
import io
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc
from html_page import Element, parse
from secateur.analysis.reasons import drift
from secateur.errors import DataError, SecateurError, SecateurWarning
from secateur.latency.timing import Timing
from secateur.loop import Schedule
from secateur.plans import Limits
from secateur.report import Page
from secateur.report import page as page_module
from secateur.report.changes import kept, regions
from secateur.report.charts import spread, ticks
from secateur.report.page import ranges
from secateur.results.comparison import Comparison

NASTY = "<script>alert(1)</script>"
CLASSES = [NASTY, 'b "quoted" & co', "c"]
QUIET = Page(latency=False)
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 12, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 3),
    ).eval()  # fmt: skip


@dataclass
class Run:
    net: nn.Sequential
    data: tuple[Tensor, Tensor]
    result: sc.Result
    comparison: Comparison
    path: Path
    page: Element


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    net = network()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(18, 3, 9, 9, generator=generator), torch.arange(18) % 3

    def evaluate(model: nn.Module) -> dict[str, float]:
        right = (model(data[0]).argmax(1) == data[1]).float()
        return {"overall": float(right.mean()), **{name: float(right[i::3].mean()) for i, name in enumerate(CLASSES)}}

    result = sc.prune(net, data, remove=0.6, schedule=Schedule(step=0.1, seed=7), evaluate=evaluate, progress=False)
    comparison = sc.compare(net, data, ["lrp", "weight"], evaluate=evaluate, remove=0.6, schedule=0.2, progress=False)
    path = result.report(
        tmp_path_factory.mktemp("report") / "deep" / "report.html", inputs=(data[0][:4], data[1][:4]),
        comparison=comparison, classes=CLASSES,
        page=Page(f"A {NASTY} & more", mean=MEAN, std=STD),
    )  # fmt: skip
    return Run(net, data, result, comparison, path, parse(path.read_text(encoding="utf-8")))


def numbers(rows: list[list[str]], *columns: int) -> np.ndarray:
    return np.array([[float(row[c].replace("−", "-")) for c in columns] for row in rows])


# -- the numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chart", ["units", "macs"])
def test_charts_and_their_tables_show_the_history(run: Run, chart: str) -> None:
    whole = run.result.history[0].macs
    expected = np.array(
        [(100 * (r.removed if chart == "units" else r.macs / whole), 100 * r.overall) for r in run.result.history]
    )
    figure = run.page.by_id(chart)
    assert np.abs(numbers(figure.rows, 1, 2) - expected).max() <= 0.005001
    drawn = np.array([_place(dot) for dot in figure.find("g", class_="point")])
    across, up = _axes(figure)
    assert np.abs(np.polyval(across, drawn[:, 0]) - expected[:, 0]).max() < 0.1
    assert np.abs(np.polyval(up, drawn[:, 1]) - expected[:, 1]).max() < 0.1


def _place(point: Element) -> tuple[float, float]:
    (dot,) = point.find("path", class_="dot")
    x, y = re.fullmatch(r"translate\(([\d.]+),([\d.]+)\)", dot.attributes["transform"]).groups()
    return float(x), float(y)


def _axes(figure: Element) -> tuple[np.ndarray, np.ndarray]:
    """From pixels to values, by the ticks alone."""
    (grid,) = figure.find("g", class_="grid")
    marks = [(t.attributes, float(t.text.replace("−", "-"))) for t in grid.find("text")[:-1]]
    rows = [(float(a["y"]) - 4, v) for a, v in marks if a["text-anchor"] == "end"]
    columns = [(float(a["x"]), v) for a, v in marks if a["text-anchor"] == "middle"]
    return tuple(np.polyfit(*zip(*pairs, strict=True), 1) for pairs in (columns, rows))


def test_the_comparison_shows_every_curve(run: Run) -> None:
    rows = run.page.by_id("compare-units").rows
    assert rows == run.page.by_id("compare-macs").rows
    expected = [
        (name, 100 * u, 100 * m, 100 * v)
        for name, c in run.comparison.curves.items()
        for u, m, v in zip(c.removed, c.macs, c.overall, strict=True)
    ]
    assert [row[0] for row in rows] == [row[0] for row in expected]
    assert np.abs(numbers(rows, 1, 2, 3) - np.array([row[1:] for row in expected])).max() <= 0.005001
    section = run.page.by_id("criteria")
    assert {label.text for label in section.find("text", class_="name")} == {"lrp", "weight"}
    best = max(run.comparison.curves, key=lambda name: run.comparison.areas()[name][1])
    assert section.find("strong")[0].text == best


def test_results_by_name_are_compared_too(run: Run, tmp_path: Path) -> None:
    path = run.result.report(tmp_path / "r.html", comparison={"one": run.result, "two": run.result}, page=QUIET)
    rows = parse(path.read_text("utf-8")).by_id("compare-units").rows
    assert [row[0] for row in rows] == ["one"] * len(run.result.history) + ["two"] * len(run.result.history)


def test_layers_are_those_of_the_smaller_model(run: Run) -> None:
    small = run.result.model
    sizes = {
        "0": (10, small[0].out_channels), "3": (12, small[3].out_channels), "7": (16, small[7].out_features),
    }  # fmt: skip
    section = run.page.by_id("layers")
    assert {row[0]: (int(row[2]), int(row[3])) for row in section.rows} == sizes
    bars = [svg.find("rect")[1].attributes["width"] for svg in section.find("svg")]
    assert bars == [f"{100 * after / before:.2f}%" for before, after in sizes.values()]


def test_headline(run: Run) -> None:
    tiles = {tile.find("dt")[0].text: tile.text for tile in run.page.find("div", class_="tile")}
    times = {f"PyTorch, batch of {batch}" for batch in (1, 32)}
    assert set(tiles) == {"Accuracy", "Parameters", "MACs"} | times
    before, after = (sum(p.numel() for p in model.parameters()) for model in (run.net, run.result.model))
    assert f"{after / 1000:.2f} k" in tiles["Parameters"] or f" {after} " in tiles["Parameters"]
    assert f"{before / 1000:.2f} k" in tiles["Parameters"]
    first, last = run.result.history[0].overall, run.result.history[-1].overall
    assert f"{100 * last:.1f} % was {100 * first:.1f} %" in tiles["Accuracy"]
    assert all(re.search(r"[\d.]+ ms was [\d.]+ ms [\d.]+ times as fast", tiles[name]) for name in times)


def test_accuracy_on_held_out_data_is_measured(run: Run, tmp_path: Path) -> None:
    x, y = run.data
    path = run.result.report(tmp_path / "r.html", test=[(x[:10], y[:10]), (x[10:], y[10:])], classes={0: NASTY})
    page = parse(path.read_text("utf-8"))
    found = {row[0]: row[1:3] for row in page.by_id("accuracy").find("div", class_="small")[0].rows}
    for c, name in enumerate([NASTY, "1", "2"]):
        for model, cell in zip((run.net, run.result.model), found[name], strict=True):
            right = [int(model(image[None]).argmax()) == c for image in x[y == c]]
            assert float(cell) == pytest.approx(100 * sum(right) / len(right), abs=0.005001)
    assert "Accuracy on 18 held-out samples" in page.text
    # Every accuracy has its interval: Wilson's, as the roots of (p − share)² = z² p (1 − p) / n.
    rows = {row[0]: row[4:] for row in page.by_id("accuracy").find("div", class_="small")[0].rows}
    tile = page.find("div", class_="tile")[0].text
    for name, share, told in [
        *((name, float(found[name][1]) / 100, rows[name][1]) for name in found),
        ("overall", float(run.result.history[-1].overall), re.search(r"\(([^)]*)\)", tile)[1]),
    ]:
        n, z = 18 if name == "overall" else 6, 1.959964
        ends = np.roots([1 + z * z / n, -(2 * share + z * z / n), share * share])
        assert [float(end) for end in told.split(" to ")] == pytest.approx(sorted(100 * ends.real), abs=0.51), name


@pytest.mark.filterwarnings("ignore:right for other reasons")  # of random weights
@pytest.mark.parametrize("real", [False, True])
def test_a_model_with_one_output(tmp_path: Path, real: bool) -> None:
    net = network()
    net[-1] = nn.Linear(16, 1)
    x, y = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 2
    with torch.no_grad():
        middle = net(x).flatten().sort().values[3:5]
        net[-1].bias -= middle.mean()  # so that both answers occur, and none hangs on a rounding error
    data = (x, y.float()[:, None] if real else y)
    result = sc.prune(net, data, remove=0.3, progress=False)
    page = parse(result.report(tmp_path / "r.html", data=data, test=data).read_text("utf-8"))
    found = {row[0]: row[1:3] for row in page.by_id("accuracy").find("div", class_="small")[0].rows}
    for c in (0, 1):
        for model, cell in zip((net, result.model), found[str(c)], strict=True):
            right = [float(model(image[None]).detach()) * (2 * c - 1) > 0 for image in x[y == c]]
            assert float(cell) == pytest.approx(100 * sum(right) / len(right), abs=0.005001)
    with pytest.raises(sc.errors.DataError, match="0 or 1"):
        result.report(tmp_path / "r.html", test=(x, torch.rand(8, 1)))


def test_plan_settings_seed_and_environment(run: Run) -> None:
    tables = run.page.by_id("plan").find("table")
    shapes = {row.children[0].text: row.children[2].text for row in tables[0].find("tbody")[0].children}
    state = run.result.model.state_dict()
    assert shapes == {
        n: " × ".join(map(str, t.shape)) for n, t in state.items() if t.shape != run.net.state_dict()[n].shape
    }
    facts = {row.children[0].text: row.children[1].text for row in run.page.by_id("run").find("tr")}
    assert facts["seed"] == "7"
    assert facts["remove"] == "0.6"
    assert facts["criterion"] == "lrp"
    assert facts["torch"] == torch.__version__
    removed = run.page.by_id("plan").find("dl")[0]
    listed = {dt.text: dd.text for dt, dd in zip(removed.find("dt"), removed.find("dd"), strict=True)}
    assert {n: _expanded(t) for n, t in listed.items()} == {
        n: list(run.result.plan.cuts[f"{n}.weight"][0]) for n in listed
    }


def _expanded(text: str) -> list[int]:
    ends = [[int(i) for i in part.split("–")] for part in text.split(", ")]
    return [i for first, *last in ends for i in range(first, (last or [first])[0] + 1)]


def test_books_survive_a_checkpoint(run: Run, tmp_path: Path) -> None:
    options = {"remove": 0.3, "schedule": 0.1, "progress": False, "checkpoint": tmp_path / "run.safetensors"}
    once = sc.prune(run.net, run.data, **options)
    again = sc.prune(run.net, run.data, **options)  # all steps are in the checkpoint: nothing is scored
    assert once.scores.conservation is not None
    assert again.scores.conservation == once.scores.conservation
    assert again.settings == once.settings
    texts = []
    for result in (once, again):
        page = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
        texts.append(page.by_id("conservation").text)
        assert [row[0] for row in page.by_id("conservation").rows] == [f.name for f in once.scores.conservation.flows]
    assert texts[0] == texts[1]


# -- what was lost -----------------------------------------------------------------------------------------------------
@dataclass
class Lost:
    section: Element
    y: Tensor
    before: Tensor
    after: Tensor


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Targets are what the unpruned network says, but for one sample: that one is gained, all others are lost."""
    net, x = network(), torch.randn(18, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        net[-1].bias -= net(x).mean(0)  # so that all classes occur
        before = net(x).argmax(1)
    result = sc.prune(net, (x, before), remove=0.6, repair=None, progress=False)
    after, y = result.model(x).argmax(1), before.clone()
    other = int((after != before).nonzero()[0])
    y[other] = after[other]
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    path = result.report(tmp_path_factory.mktemp("lost") / "r.html", test=batches, classes=CLASSES, page=QUIET)
    return Lost(parse(path.read_text("utf-8")).by_id("lost"), y, before, after)


def test_samples_that_are_lost_or_gained_are_counted_and_shown(lost: Lost) -> None:
    y, before, after, section = lost.y, lost.before, lost.after, lost.section
    gone, new = (before == y) & (after != y), (before != y) & (after == y)
    assert gone.sum() > 1
    assert new.sum() == 1
    words = f"18 test samples: right before and wrong now {gone.sum()}, wrong before and right now {new.sum()}"
    assert words in section.text
    assert [h.text for h in section.find("h3")] == [
        "Wrong now" if gone.sum() <= 4 else f"Wrong now, 4 of {gone.sum()}", "Newly right", "Which classes are confused"
    ]  # fmt: skip
    assert "The maps are for the true class: red speaks for it" in section.text
    first, second = section.find("div", class_="samples")
    assert len(first.find("figure", class_="sample")) == min(4, int(gone.sum()))
    for figures, chosen in ((first, gone), (second, new)):
        said = {tuple(CLASSES[int(c[i])] for c in (y, before, after)) for i in range(len(y)) if chosen[i]}
        for figure in figures.find("figure", class_="sample"):
            caption = figure.find("figcaption")[0].text
            assert any(
                caption.startswith(t) and f"Said before: {b} (" in caption and f"Says now: {a} (" in caption
                for t, b, a in said
            )


def test_confusion_before_and_after(lost: Lost) -> None:
    y, before, after = lost.y, lost.before, lost.after
    matrix, listed = lost.section.find("table")
    body = matrix.find("tbody")[0].find("tr")
    assert len(body) == 3
    for wanted, row in enumerate(body):
        for said, cell in enumerate(row.find("td")):
            was, now = (int(((y == wanted) & (answer == said)).sum()) for answer in (before, after))
            shown = cell.text.split(" was ")
            assert shown[0] == (str(now) if now or was else "·")
            assert shown[1:] == ([str(was)] if was != now else [])
    total = [sum(int(row.children[i].text) for row in listed.find("tbody")[0].find("tr")) for i in (2, 3)]
    assert total == [18, 18]


def test_many_classes_are_confused_in_pairs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30))
    x = torch.randn(200, 6)
    with torch.no_grad():
        net[-1].bias -= net(x).mean(0)
    data = x, net(x).argmax(1).detach()
    assert len(set(data[1].tolist())) > 12
    result = sc.prune(net, data, remove=0.6, repair=None, progress=False)
    page = parse(result.report(tmp_path / "r.html", test=data, page=QUIET).read_text("utf-8")).by_id("lost")
    first, whole = page.find("table")
    rows = first.find("tbody")[0].find("tr")
    assert len(rows) == 15
    changes = [abs(int(row.children[4].text)) for row in rows]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] > 0
    assert sum(int(row.children[3].text) for row in whole.find("tbody")[0].find("tr")) == 200


def test_tables_can_be_saved(run: Run) -> None:
    links = [link for link in run.page.find("a") if "download" in link.attributes]
    files = {link.attributes["download"]: _csv(link) for link in links}
    assert files["all-steps.csv"][0][:3] == ["step", "units", "removed, %"]
    assert [row[1] for row in files["all-steps.csv"][1:]] == [str(row.units) for row in run.result.history]
    assert {row[0] for row in files["accuracy-by-class.csv"][1:]} == set(CLASSES)
    assert "−" not in "".join(cell for table in files.values() for row in table for cell in row)


def _csv(link: Element) -> list[list[str]]:
    content = base64.b64decode(link.attributes["href"].partition(",")[2]).decode("utf-8-sig")
    return list(csv.reader(io.StringIO(content)))


# -- step by step ------------------------------------------------------------------------------------------------------
def test_the_chosen_point_and_its_neighbours_are_named(run: Run, tmp_path: Path) -> None:
    rows = list(run.result.history)
    (chosen,) = run.page.by_id("macs").find("g", class_="chosen")
    assert "the model of this page" in chosen.attributes["aria-label"]
    assert _place(chosen) == _place(run.page.by_id("macs").find("g", class_="point")[-1])
    caption = run.page.by_id("macs").find("figcaption")[0].text
    assert f"One step less: {100 * rows[-2].overall:.1f} % at {100 * rows[-2].macs / rows[0].macs:.1f} %" in caption
    assert caption.endswith("The run ended there.")
    falling = iter([0.9, 0.89, 0.5])
    result = sc.prune(run.net, run.data, max_drop=0.1, schedule=0.1, evaluate=lambda _: next(falling), progress=False)
    page = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
    assert "89.0 % at" in page.by_id("macs").find("figcaption")[0].text
    assert "One step more: 50.0 % at" in page.by_id("macs").find("figcaption")[0].text


def test_every_step_is_a_frame(run: Run) -> None:
    film = run.page.by_id("steps")
    radios, frames = film.find("input"), film.find("article")
    assert len(radios) == len(frames) == len(run.result.history)
    assert [("checked" in r.attributes) for r in radios] == [False] * (len(radios) - 1) + [True]
    for frame, row in zip(frames, run.result.history, strict=True):
        facts = dict(zip((d.text for d in frame.find("dt")), (d.text for d in frame.find("dd")), strict=True))
        assert facts["Accuracy"] == f"{100 * row.overall:.1f} %"
        assert "Latency" not in facts  # nothing was watched
        assert f"{100 * row.macs / run.result.history[0].macs:.1f} % left" in facts["MACs"]
    assert not film.find("img")  # nothing was watched


def test_heat_maps_of_every_step(run: Run, tmp_path: Path) -> None:
    x, y = run.data[0][:5], run.data[1][:5]
    models = []
    result = sc.prune(
        run.net, run.data, remove=0.3, schedule=0.1, watch=(x, y), evaluate=lambda m: models.append(m) or 0.5,
        progress=False,
    )  # fmt: skip
    page = parse(result.report(tmp_path / "r.html", classes=CLASSES, page=QUIET).read_text("utf-8")).by_id("steps")
    assert len(page.find("figure")) == 4
    frames = page.find("article")
    assert len(frames) == len(models) == 4
    for frame, model in zip(frames, models, strict=True):
        heat = sc.explain(model, x, y).heat
        images = frame.find("img")
        assert len(images) == 4
        for image, map in zip(images, heat, strict=False):
            levels, flat = np.asarray(_decoded(image), int).ravel(), map.double().numpy().ravel()
            order = np.argsort(flat, kind="stable")
            assert (np.diff(levels[order]) >= 0).all()
            assert (levels[flat > 0] >= 127).all()
        facts = dict(zip((d.text for d in frame.find("dt")), (d.text for d in frame.find("dd")), strict=True))
        first = sc.explain(run.net, x, y).heat
        alike = [np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in zip(first, heat, strict=True)]
        assert float(facts["Drift of the heat maps"]) == pytest.approx(1 - np.mean(alike), abs=0.00051)
        assert re.fullmatch(r"[\d.]+ ms", facts["Latency"])


def test_a_long_run_is_shown_in_twelve_frames(run: Run, tmp_path: Path) -> None:
    result = sc.prune(run.net, run.data, "weight", remove=0.8, schedule=0.04, evaluate=lambda _: 0.5, progress=False)
    assert len(result.history) > 14
    section = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8")).by_id("steps")
    names = [frame.attributes["aria-label"] for frame in section.find("article")]
    assert 8 <= len(names) <= 12
    assert names[0] == "unpruned"
    assert names[-2:] == [f"step {row.step}" for row in result.history][-2:]
    assert f"{len(result.history) - len(names)} steps between are left out" in section.text


class Words(nn.Module):
    """A classifier of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.last = nn.Embedding(20, 8), nn.Linear(8, 12), nn.Linear(12, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.last((self.inner(self.table(input_ids)).relu() * attention_mask[:, :, None]).mean(1))


@pytest.mark.filterwarnings("ignore:right for other reasons")  # of random weights
def test_texts_are_shown_in_words_at_every_step_and_where_they_are_lost(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net, names = Words().eval(), [f"<w{i}>" for i in range(20)]
    mask = torch.ones(24, 6, dtype=torch.long)
    mask[::2, 4:] = 0
    inputs = {"input_ids": torch.randint(20, (24, 6)), "attention_mask": mask}
    with torch.no_grad():
        net.last.bias -= net(**inputs).mean(0)
        y = net(**inputs).argmax(1)
    few = {name: part[:3] for name, part in inputs.items()}
    result = sc.prune(net, (inputs, y), "weight", remove=0.6, schedule=0.2, watch=(few, y[:3]), progress=False)
    path = result.report(tmp_path / "r.html", test=[(inputs, y)], page=Page(latency=False, tokenizer=names))
    page = parse(path.read_text("utf-8"))
    frames = page.by_id("steps").find("article")
    assert len(frames) == len(result.history) == 4
    wanted = [
        [names[i] for i, m in zip(*row, strict=True) if m]
        for row in zip(*(p.tolist() for p in few.values()), strict=True)
    ]
    for frame, heat in zip(frames, result.seen.values(), strict=True):
        texts = frame.find("p", class_="words")
        assert [[word.text for word in text.find("span")] for text in texts] == wanted
        for text, row in zip(texts, heat, strict=True):
            for word, value in zip(text.find("span"), row.tolist(), strict=False):
                red, _, blue = map(int, re.findall(r"\d+", word.attributes["style"]))
                assert red >= blue if value > 0 else red <= blue
    gone = int((result.model(**inputs).argmax(1) != y).sum())
    assert f"right before and wrong now {gone}," in page.by_id("lost").text
    assert gone
    assert len(page.by_id("lost").find("figure", class_="passage")) == min(gone, 4)


# -- reasons -----------------------------------------------------------------------------------------------------------
def test_reasons_by_class(run: Run) -> None:
    x, y = run.data[0][:4], run.data[1][:4]
    found = drift(run.net, run.result.model, (x, y))
    rows = {row.children[0].text: row for row in run.page.by_id("seen").find("table")[0].find("tbody")[0].children}
    assert set(rows) == {"all", *(CLASSES[c] for c in set(y.tolist()))}
    for name, row in rows.items():
        mine = torch.ones(4, dtype=torch.bool) if name == "all" else y == CLASSES.index(name)
        cells = [float(cell.text.replace("−", "-")) for cell in row.children[2:6]]
        alike = float(found.agreement[mine].mean())
        faithful = [float(part[mine].mean()) for part in found.srg]
        assert cells == pytest.approx([alike, 1 - alike, *faithful], abs=0.00051)


def test_right_for_other_reasons_is_said_on_the_page(tmp_path: Path) -> None:
    """Two networks that give the same answers, and look at different halves of the picture."""
    net = nn.Sequential(nn.Conv2d(1, 2, (1, 8), (1, 8)), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
        net[0].weight[0, 0, 0, :4] = 1
        net[0].weight[1, 0, 0, 4:] = 0.9
        net[3].weight[0], net[3].weight[1] = 1.0, -1.0
        net[3].bias.zero_()
    x, y = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
    small = copy.deepcopy(net)
    with torch.no_grad():
        net[0].weight[1] *= 0.01  # this one looks at the left half,
        small[0].weight[0] = 0  # and this one at the right half
    result = sc.prune(net, (x, y), "weight", remove=0.5, repair=None, progress=False)
    other = replace(result, model=small, plan=None)
    with pytest.warns(SecateurWarning, match="right for other reasons: class left"):
        path = other.report(tmp_path / "r.html", inputs=(x, y), classes=["left", "right"], page=QUIET)
    section = parse(path.read_text("utf-8")).by_id("seen")
    assert "Right for other reasons" in section.text
    rows = section.find("table")[0].find("tbody")[0].children
    assert [row.children[-1].text for row in rows][1:] == ["right for other reasons"]


# -- heat maps and what changed ----------------------------------------------------------------------------------------
def test_heat_maps_are_those_of_both_models(run: Run) -> None:
    x, y = run.data[0][:4], run.data[1][:4]
    before, after = sc.explain(run.net, x, y), sc.explain(run.result.model, x, y)
    plain = (x * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)).clamp(0, 1)
    figures = run.page.by_id("seen").find("figure", class_="sample")
    assert len(figures) == 4
    agreements = [np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in zip(before.heat, after.heat, strict=True)]
    for figure, i in zip(figures, np.argsort(agreements), strict=True):
        picture, old, new, _ = (_decoded(image) for image in figure.find("img"))
        shown = np.asarray(picture.convert("RGB"), float).transpose(2, 0, 1) / 255
        assert np.abs(shown - plain[i].numpy()).max() <= 0.5 / 255 + 1e-6
        for image, seen in ((old, before), (new, after)):
            levels, heat = np.asarray(image, int).ravel(), seen.heat[i].double().numpy().ravel()
            order = np.argsort(heat, kind="stable")
            assert (np.diff(levels[order]) >= 0).all()
            assert (levels[heat > 0] >= 127).all()
            assert (levels[heat < 0] <= 128).all()
        caption = figure.find("figcaption")[0].text
        assert f"correlate by {agreements[i]:.3f}".replace("-", "−") in caption
        assert caption.startswith(CLASSES[int(y[i])])
        for word, seen in (("Said before", before), ("Says now", after)):
            assert f"{word}: {CLASSES[int(seen.output[i].argmax())]}" in caption


def test_signs_are_those_of_attention(tmp_path: Path) -> None:
    """Relevance starts with the logit there. If it started with 1, a negative logit would turn all signs around."""

    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.mix = nn.Conv2d(3, 8, 4, 4), nn.MultiheadAttention(8, 2, batch_first=True)
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x).flatten(2).mT
            return self.last(self.mix(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    net, x = Attentive().eval(), torch.rand(2, 3, 8, 8)
    y = net(x).argmin(1)
    assert (net(x).amin(1) < 0).all()
    result = sc.prune(net, (x, y), remove=0.2, repair=None, progress=False)
    seen = sc.explain(net, x, y)
    assert seen.composite == "attnlrp"
    page = parse(result.report(tmp_path / "r.html", data=(x, y), page=QUIET).read_text("utf-8")).by_id("seen")
    after = sc.explain(result.model, x, y).heat
    alike = [np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in zip(seen.heat, after, strict=True)]
    for figure, i in zip(page.find("figure", class_="sample"), np.argsort(alike), strict=True):
        levels, heat = np.asarray(_decoded(figure.find("img")[1]), int), seen.heat[i].numpy()
        assert (levels[heat > 0] >= 127).all()
        assert (levels[heat < 0] <= 128).all()
    shares = [float(row.children[2].text) for row in page.find("table")[1].find("tbody")[0].children]
    size = float(net(x).amin(1).abs().sum())
    gone = [float(seen.weights[name][i]) for name, cut in result.plan.cuts.items() if name in seen.weights
            for i in cut.get(0, ())]  # fmt: skip
    assert shares[0] == pytest.approx(100 * max(gone) / size, abs=0.006)


def _decoded(image: Element) -> Image.Image:
    kind, _, content = image.attributes["src"].partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_units_that_changed_most(run: Run) -> None:
    x, y = run.data[0][:4], run.data[1][:4]
    before, after = sc.explain(run.net, x, y).units, sc.explain(run.result.model, x, y).units
    gone, stayed = [], []
    for layer, values in before.items():
        cut = run.result.plan.cuts[f"{layer}.weight"].get(0, ())
        left = [i for i in range(len(values)) if i not in cut]
        gone += [(float(values[i]) / 4, layer, str(i)) for i in cut]
        stayed += [(float(after[layer][k] - values[i]) / 4, layer, str(i)) for k, i in enumerate(left)]
    _, first, second = run.page.by_id("seen").find("table")
    for table, expected in ((first, gone), (second, stayed)):
        rows = [[cell.text for cell in row.children] for row in table.find("tbody")[0].children]
        assert [tuple(row[:2]) for row in rows] == [e[1:] for e in sorted(expected, reverse=True)[:5]]
    shares = {layer: sum(value for value, name, _ in gone if name == layer) for _, layer, _ in gone}
    layer = max(shares, key=lambda name: shares[name])
    assert f"units that left {layer} had carried {100 * shares[layer]:.1f} %" in run.page.by_id("seen").text
    lost = [float(row.children[2].text) for row in first.find("tbody")[0].children]
    assert lost == pytest.approx([100 * e[0] for e in sorted(gone, reverse=True)[:5]], abs=0.006)


def test_regions_by_definition() -> None:
    change = np.random.default_rng(0).normal(size=(7, 8))
    found = regions(change)
    rows, columns = [(0, 3), (3, 5), (5, 7)], [(0, 3), (3, 6), (6, 8)]
    for (name, value), ((a, b), (c, d)) in zip(found.items(), itertools.product(rows, columns), strict=True):
        assert value == pytest.approx(sum(change[i, j] for i in range(a, b) for j in range(c, d))), name
    assert list(found)[4] == "centre"


def test_units_of_transposed_convolutions_keep_their_places() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2), nn.ReLU(), nn.Conv2d(4, 2, 1))
    graph = sc.analyze(net, torch.rand(1, 2, 4, 4))
    plan = sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5)
    for name in ("0.weight", "2.weight"):
        layer = name.partition(".")[0]
        assert len(kept(net, name, 4, plan)) == plan.layers[layer][1]
    assert list(kept(net, "4.weight", 2, plan)) == [0, 1]


def test_units_that_leave_a_transposed_convolution_are_its_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.ConvTranspose2d(6, 6, 2), nn.ReLU(), nn.Conv2d(6, 2, 1))
    result = sc.prune(net, (torch.rand(2, 2, 4, 4), None), "weight", remove=0.5, limits=Limits("layer"), progress=False)
    listed = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8")).by_id("plan").find("dl")[0]
    found = {dt.text: _expanded(dd.text) for dt, dd in zip(listed.find("dt"), listed.find("dd"), strict=True)}
    assert found == {name: list(result.plan.cuts[f"{name}.bias"][0]) for name in ("0", "2")}
    assert found["2"] != list(result.plan.cuts["2.weight"].get(0, ()))


def test_heads_that_leave_are_listed(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.mix = nn.Linear(6, 16), nn.MultiheadAttention(16, 4, batch_first=True)
            self.last = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.read(x)
            return self.last(self.mix(h, h, h, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    data = torch.rand(4, 5, 6), torch.arange(4) % 3
    result = sc.prune(Both(), data, "weight", remove=0.5, limits=Limits("layer"), progress=False)
    listed = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8")).by_id("plan").find("dl")[0]
    found = {dt.text: _expanded(dd.text) for dt, dd in zip(listed.find("dt"), listed.find("dd"), strict=True)}
    (heads,) = result.plan.heads
    assert heads.removed
    assert found["mix"] == list(heads.removed)
    assert found["read"] == list(result.plan.cuts["read.bias"][0])


# -- the page as a whole -----------------------------------------------------------------------------------------------
def test_the_page_needs_nothing_and_escapes_everything(run: Run) -> None:
    text = run.path.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert not run.page.find("script")
    for element in run.page.walk():
        for key, value in element.attributes.items():
            assert not key.startswith("on"), f"{key} on <{element.tag}>"
            if key in ("src", "href", "srcset", "action", "data", "poster"):
                kind = "text/csv;charset=utf-8" if "download" in element.attributes else "image/png"
                assert value.startswith(("#", f"data:{kind};base64,")), value[:60]
    style = run.page.find("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    policies = {
        e.attributes["http-equiv"]: e.attributes["content"]
        for e in run.page.find("meta")
        if "http-equiv" in e.attributes
    }
    assert policies["Content-Security-Policy"].startswith("default-src 'none'")
    assert run.page.find("h1")[0].text == f"A {NASTY} & more"
    assert {row[0] for row in run.page.by_id("accuracy").find("div", class_="small")[0].rows} == set(CLASSES)


def test_the_page_can_be_read_without_seeing_it(run: Run) -> None:
    ids = [e.attributes["id"] for e in run.page.walk() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    for link in run.page.find("a"):
        if "download" in link.attributes:
            continue
        assert link.attributes["href"].removeprefix("#") in ids
    for image in run.page.find("img"):
        assert image.attributes["alt"]
    charts = run.page.find("figure", class_="chart")
    assert len(charts) == 4
    for chart in charts:
        (svg,) = chart.find("svg")
        assert svg.attributes["aria-label"].startswith(chart.find("h3")[0].text)
        points = chart.find("g", class_="point")
        assert all(p.attributes["tabindex"] == "0" for p in points)
        assert all(p.attributes["aria-label"] == p.find("title")[0].text for p in points)
        assert len(points) == len(chart.rows)
        assert chart.find("details")
    for table in run.page.find("table"):
        assert all("scope" in head.attributes for head in table.find("th"))
    levels = [int(e.tag[1]) for e in run.page.walk() if re.fullmatch(r"h\d", e.tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_a_run_without_accuracy_says_so(run: Run, tmp_path: Path) -> None:
    result = sc.prune(run.net, run.data, "weight", remove=0.3, progress=False)
    page = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
    assert "No accuracy was measured" in page.text
    assert not any(e.attributes.get("id") == "accuracy" for e in page.walk())
    assert not any(e.attributes.get("id") == "conservation" for e in page.walk())
    assert {t.find("dt")[0].text for t in page.find("div", class_="tile")} == {"Parameters", "MACs"}


def test_a_single_step_is_no_curve_of_accuracies(run: Run, tmp_path: Path) -> None:
    result = sc.prune(run.net, run.data, keep={"macs": 0.5}, evaluate=lambda _: 0.75, progress=False)
    told = Page(latency=False, about={"weather": "fine & dry"})
    page = parse(result.report(tmp_path / "r.html", page=told).read_text("utf-8"))
    assert [figure.attributes["id"] for figure in page.find("figure", class_="chart")] == ["tradeoff-macs"]
    assert "in 1 step by lrp, with repair after it" in page.text
    assert "75.0 % was 75.0 %" in page.find("dl", class_="tiles")[0].text
    assert "No accuracy was measured" not in page.text
    facts = dict(tuple(cell.text for cell in row.children) for row in page.by_id("run").find("tr"))
    assert facts["weather"] == "fine & dry"


def test_a_step_that_was_taken_back_is_marked(run: Run, tmp_path: Path) -> None:
    falling = iter([0.9, 0.89, 0.5])
    result = sc.prune(run.net, run.data, max_drop=0.1, schedule=0.1, evaluate=lambda _: next(falling), progress=False)
    page = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
    rows = page.by_id("units").rows
    assert [row[3] for row in rows] == ["", "the model of this page", "taken back"]
    assert [float(row[2]) for row in rows] == [90, 89, 50]
    assert len(page.by_id("units").find("g", class_="hollow")) == 1
    assert "89.0 % was 90.0 % −1.0 points" in page.find("dl", class_="tiles")[0].text


def test_many_classes_are_folded(run: Run, tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(40)]
    steps = iter([0.0, 1.0])

    def evaluate(_: nn.Module) -> dict[str, float]:
        step = next(steps)
        return {"overall": 0.5, **{name: 0.9 - step * (i % 7) / 10 for i, name in enumerate(names)}}

    result = sc.prune(run.net, run.data, remove=0.2, schedule=0.2, evaluate=evaluate, progress=False)
    page = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
    first, folded = page.by_id("accuracy").find("div", class_="small")[0].find("table")
    worst = [row.children[0].text for row in first.find("tbody")[0].children]
    assert len(worst) == 10
    assert {int(name.split()[1]) % 7 for name in worst} == {6, 5}
    assert {row.children[0].text for row in folded.find("tbody")[0].children} == set(names)


def test_latencies_of_the_run_are_not_measured_again(run: Run, tmp_path: Path) -> None:
    before, after = replace(run.result.cost_before, latency=0.0123), replace(run.result.cost_after, latency=0.0041)
    timed = replace(run.result, cost_before=before, cost_after=after)
    page = parse(timed.report(tmp_path / "r.html").read_text("utf-8"))
    assert "4.10 ms was 12.3 ms 3.00 times as fast" in page.find("dl", class_="tiles")[1].text
    assert "during the run" in page.text
    given = [Timing(1, 0.020, 0.010), Timing(32, 0.4, 0.1, "ONNX Runtime")]
    page = parse(timed.report(tmp_path / "r.html", page=Page(latency=given)).read_text("utf-8"))
    tiles = {tile.find("dt")[0].text: tile.text for tile in page.find("div", class_="tile")}
    assert "10.0 ms was 20.0 ms 2.00 times as fast" in tiles["PyTorch, batch of 1"]
    assert "100 ms was 400 ms 4.00 times as fast" in tiles["ONNX Runtime, batch of 32"]
    page = parse(run.result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
    assert "atency" not in page.text


def test_the_demonstration_writes_its_page_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from secateur.cli import app, demo

    fewer = functools.partial(demo.demonstrate, remove=0.4, step=0.1)  # four steps by each criterion instead of 16
    monkeypatch.setattr(demo, "demonstrate", fewer)
    monkeypatch.setattr(demo, "REFERENCE", 5)
    done = CliRunner().invoke(app, ["demo", "--epochs", "1", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    path = tmp_path / "out" / "report.html"
    assert path.as_uri() in done.output
    page = parse(path.read_text("utf-8"))
    labels = {label.text for label in page.by_id("criteria").find("text", class_="name")}
    assert labels == {"lrp", "taylor", "gradient", "weight"}
    assert len(page.by_id("seen").find("figure", class_="sample")) == 4
    assert "95 % intervals" in page.find("div", class_="tile")[0].text
    assert "95 % interval before" in page.text
    row = next(line for line in done.output.splitlines() if "accuracy  " in line)
    assert len(re.findall(r"\d+\.\d % \(\d+(?:\.\d)? to \d+(?:\.\d)?\)", row)) == 2


def test_a_metric_that_is_no_share_is_written_as_it_is(run: Run, tmp_path: Path) -> None:
    losses = iter([-1.5, -2.25, -3.125])
    result = sc.prune(run.net, run.data, remove=0.2, schedule=0.1, evaluate=lambda _: next(losses), progress=False)
    page = parse(result.report(tmp_path / "r.html", page=QUIET).read_text("utf-8"))
    assert [row[2] for row in page.by_id("units").rows] == ["−1.5", "−2.25", "−3.125"]
    assert "%" not in page.by_id("units").heads[2]


def test_inputs_that_are_no_pictures(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    data = torch.rand(16, 4), torch.arange(16) % 3
    result = sc.prune(net, data, remove=0.5, progress=False)
    page = parse(result.report(tmp_path / "r.html", data=data).read_text("utf-8"))
    assert "no pictures" in page.by_id("seen").text
    assert not page.find("img")
    assert len(page.by_id("seen").find("table")) == 3


def test_what_is_missing_is_named(run: Run, tmp_path: Path) -> None:
    alone = replace(run.result, original=None)
    with pytest.raises(SecateurError, match="original=model"):
        alone.report(tmp_path / "r.html", test=run.data)
    assert alone.report(tmp_path / "r.html", test=run.data, original=run.net).exists()
    silent = sc.prune(run.net, run.data, "weight", remove=0.3, progress=False)
    with pytest.raises(SecateurError, match=r"comparison\['x'\]"):
        run.result.report(tmp_path / "q.html", comparison={"x": silent}, page=QUIET)
    with pytest.raises(DataError, match="no input"):
        run.result.report(tmp_path / "q.html", inputs=(run.data[0][:0], None), page=QUIET)
    with pytest.raises(DataError, match="std has 2 numbers"):
        run.result.report(tmp_path / "q.html", inputs=run.data, page=Page(std=[0.5, 0.5], latency=False))
    for wrong in ({"page": "a title"}, {"comparison": run.result}, {"inputs": run.data[0]}):
        with pytest.raises(SecateurError, match=rf"{next(iter(wrong))} is a .* Fix: "):
            run.result.report(tmp_path / "q.html", **{"page": QUIET, **wrong})
    with pytest.raises(SecateurError, match="test data are empty"):
        run.result.report(tmp_path / "q.html", test=[], page=QUIET)
    assert not (tmp_path / "q.html").exists()


class Two(nn.Module):
    """Pictures and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.read, self.out = nn.Conv2d(3, 8, 3), nn.Linear(6, 8), nn.Linear(16, 4)

    def forward(self, pictures: Tensor, table: Tensor) -> Tensor:
        return self.out(torch.cat([self.look(pictures).relu().mean((2, 3)), self.read(table).relu()], 1))


@pytest.mark.parametrize("named", [False, True])
def test_without_heat_maps_the_page_says_why(named: bool, tmp_path: Path) -> None:
    x, table, y = torch.rand(12, 3, 8, 8), torch.rand(12, 6), torch.arange(12) % 4
    data = ({"pictures": x, "table": table}, y) if named else [((x, table), y)]
    result = sc.prune(Two().eval(), data, remove=0.3, progress=False)
    with pytest.warns(SecateurWarning, match="no heat maps"):
        path = result.report(tmp_path / "r.html", data=data, test=data, page=QUIET)
    page = parse(path.read_text(encoding="utf-8"))
    assert f"heat maps need a tensor of inputs, not {'dict' if named else 'tuple'}" in page.by_id("seen").text
    assert not page.find("img")
    with pytest.raises(DataError, match="no input"):  # asked for by name, they are not left out
        result.report(tmp_path / "q.html", inputs=((x, table), y), page=QUIET)  # type: ignore[arg-type]


def test_segmentation_has_heat_maps_of_as_many_samples_as_others(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    data = torch.rand(12, 3, 8, 8), torch.randint(0, 4, (12, 8, 8))
    result = sc.prune(net.eval(), data, remove=0.3, progress=False)
    page = parse(result.report(tmp_path / "r.html", data=data, page=QUIET).read_text(encoding="utf-8"))
    assert len(page.find("figure", class_="sample")) == 4
    unknown = data[0], data[1].clone()
    unknown[1][:, 0] = 255  # the usual mark of pixels that do not count
    with pytest.warns(SecateurWarning, match="no heat maps"):
        path = result.report(tmp_path / "u.html", data=unknown, page=QUIET)
    assert "255" in parse(path.read_text(encoding="utf-8")).by_id("seen").text
    with pytest.raises(DataError, match="std has 2 numbers"):
        result.report(tmp_path / "q.html", data=data, page=Page(std=[0.5, 0.5], latency=False))


def test_a_run_that_removed_nothing(run: Run, tmp_path: Path) -> None:
    falling = iter([0.9, 0.1])
    result = sc.prune(run.net, run.data, max_drop=0.1, schedule=0.2, evaluate=lambda _: next(falling), progress=False)
    assert result.plan is None
    page = parse(result.report(tmp_path / "r.html", data=run.data, page=QUIET).read_text("utf-8"))
    assert "None of 38 units was removed" in page.text
    assert "Nothing was removed" in page.by_id("plan").text
    assert all(row[2] == row[3] for row in page.by_id("layers").rows)
    assert "correlate by 1.000" in page.by_id("seen").text


# -- layout ------------------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_enclose_their_range_evenly(low: float, size: float) -> None:
    high = low + size
    found = ticks(low, high)
    room = 1e-6 * max(1.0, abs(low), abs(high))
    assert found[0] <= low + room
    assert found[-1] >= high - room
    assert 2 <= len(found) <= 9
    assert np.allclose(np.diff(found), found[1] - found[0], rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 200), min_size=1, max_size=8))
def test_labels_never_overlap_nor_leave(wanted: list[float]) -> None:
    placed = spread(wanted, 14, 0, 200)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert all(placed[b] - placed[a] >= 14 - 1e-9 for a, b in itertools.pairwise(order))
    assert min(placed) >= -1e-9
    assert max(placed) <= 200 + 1e-9


@given(st.sets(st.integers(0, 40)))
def test_ranges_say_every_number(numbers: set[int]) -> None:
    assert _expanded(ranges(sorted(numbers))) == sorted(numbers) if numbers else ranges([]) == ""


def test_a_loader_that_shuffles_shows_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models must see the samples in one order, and so must whoever picks some of them."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    x = torch.randn(64, 4)
    labels = whole(x).argmax(1)
    result = sc.prune(whole, (x, labels), remove=0.8, repair=None, schedule=0.8, progress=False)
    wrong = x[result.model(x).argmax(1) != labels]
    seen: list[Any] = []
    monkeypatch.setattr(page_module, "differences", lambda *given: seen.append(given[2]))
    loader = DataLoader(TensorDataset(x, labels), batch_size=16, shuffle=True)
    result.report(tmp_path / "a.html", test=loader, page=Page(latency=False))
    (answers,) = seen
    picked = torch.cat(list(answers.pick(answers.lost)))
    assert 0 < len(answers.lost) == len(wrong) == len(picked)
    assert all(bool((wrong == row).all(1).any()) for row in picked)
