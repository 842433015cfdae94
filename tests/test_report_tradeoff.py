"""The trade-off of a run of one step: plans around the chosen one, and what each keeps of the scores."""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from html_page import Element, parse
from secateur.loop import Schedule
from secateur.plans import Limits
from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.report import Page
from test_report import network

WEIGHTS = {"0": "0.weight", "3": "3.weight", "7": "7.weight"}  # of the layers that may lose units
THIS = "the model of this page"


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    return network()


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return torch.randn(18, 3, 9, 9, generator=torch.Generator().manual_seed(1)), torch.arange(18) % 3


def page_of(result: sc.Result, folder: Path) -> Element:
    return parse(result.report(folder / "r.html", page=Page(latency=False)).read_text("utf-8"))


def kept(scores: Scores, plan: Plan, mean: bool = False, only: Any = tuple(WEIGHTS)) -> float:
    """In %: by what is cut from the weights, not by groups."""
    sums = []
    for site, values in scores.units.items():
        if site.path in only:
            gone = list(plan.cuts.get(WEIGHTS[site.path], {}).get(0, ()))
            sums.append((values.sum(), np.delete(values, gone).sum()))
    whole, left = np.array(sums).T
    return 100 * float((left / whole).mean() if mean else left.sum() / whole.sum())


def row(plan: Plan, share: float) -> list[float]:
    had, has = plan.units
    costs = plan.after.macs / plan.before.macs, plan.after.params / plan.before.params
    return [100 * has / had, *(100 * cost for cost in costs), share]


@pytest.mark.parametrize("repair", ["best", None])
def test_plans_for_other_targets_by_the_same_scores(
    net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path, repair: str | None
) -> None:
    schedule = Schedule(one_shot=True)
    limits = Limits("cost")
    result = sc.prune(net, data, keep={"macs": 0.4}, schedule=schedule, repair=repair, limits=limits, progress=False)
    figure = page_of(result, tmp_path).by_id("tradeoff-macs")
    # a third and two thirds of the 60 % leave; then two thirds of what is left stay, twice
    plans = [
        sc.plan(result.graph, result.scores, keep={"macs": left}, limits=limits)
        for left in (0.8, 0.6, 0.4, 0.4 * 2 / 3, 0.4 * 4 / 9)
    ]
    assert plans[2] == result.plan
    expected = [[100.0] * 4, *(row(plan, kept(result.scores, plan)) for plan in plans)]
    assert figure.heads == ["plan", "units left, %", "MACs left, %", "parameters left, %", "relevance kept, %"]
    assert [line[0] for line in figure.rows] == ["unpruned", *["planned only"] * 2, THIS, *["planned only"] * 2]
    assert np.abs(np.array([[float(cell) for cell in line[1:]] for line in figure.rows]) - expected).max() <= 0.005001
    (ring,) = figure.find("g", class_="chosen")
    assert ring.attributes["tabindex"] == "0"
    assert THIS in ring.attributes["aria-label"]
    caption = figure.find("figcaption")[0].text
    for words, place in ((f"The ring is {THIS}", 3), ("The plan before it", 2), ("The plan behind it", 4)):
        assert f"{words}: {expected[place][3]:.1f} % at {expected[place][1]:.1f} % of the MACs." in caption
    assert "it is no accuracy" in caption


def test_the_table_can_be_saved(net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    figure = page_of(sc.prune(net, data, keep={"macs": 0.5}, progress=False), tmp_path).by_id("tradeoff-macs")
    (link,) = figure.find("a", download="relevance-kept-at-other-targets.csv")
    content = base64.b64decode(link.attributes["href"].partition(",")[2]).decode("utf-8-sig")
    assert list(csv.reader(io.StringIO(content))) == [figure.heads, *figure.rows]


def test_scores_without_a_common_scale_are_told_by_layer(
    net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    result = sc.prune(net, data, "weight", remove=0.5, repair="best", progress=False)
    figure = page_of(result, tmp_path).by_id("tradeoff-macs")
    assert figure.heads[-1] == "score kept, %"
    chosen = next(line for line in figure.rows if line[0] == THIS)
    assert float(chosen[-1]) == pytest.approx(kept(result.scores, result.plan, mean=True), abs=0.005001)
    assert "the mean share of a layer's scores" in figure.find("figcaption")[0].text
    half = [sc.plan(result.graph, result.scores, remove=r, limits=Limits("layer")) for r in (0.5 / 3, 1 / 3, 0.5)]
    expected = [100 * plan.after.macs / plan.before.macs for plan in half]
    assert [float(line[2]) for line in figure.rows[1:4]] == pytest.approx(expected, abs=0.005001)


def test_limits_of_the_run_hold(net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    limits = Limits(ignore=["0"], only=["0", "3"], round_to=4)
    result = sc.prune(net, data, remove=0.2, limits=limits, progress=False)
    rows = page_of(result, tmp_path).by_id("tradeoff-macs").rows
    chosen = next(line for line in rows if line[0] == THIS)
    assert float(chosen[-1]) == pytest.approx(kept(result.scores, result.plan, only=["3"]), abs=0.005001)
    units = {round(38 * float(line[1]) / 100) for line in rows}  # only the 12 of the second layer leave, by fours
    assert units <= {38, 34, 30}


def test_predicted_latency_where_there_is_a_table(
    net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    result = sc.prune(net, data, keep={"macs": 0.5}, progress=False)

    def table(removed: np.ndarray) -> float:
        return 0.002 - 0.0001 * np.count_nonzero(removed)

    timed = replace(result, table=table)
    page = page_of(timed, tmp_path)
    assert page.by_id("tradeoff-latency").rows == page.by_id("tradeoff-macs").rows
    chosen = next(line for line in page.by_id("tradeoff-macs").rows if line[0] == THIS)
    assert float(chosen[-1]) == pytest.approx(2 - 0.1 * len(result.plan.groups), rel=1e-3)
    told = page.by_id("tradeoff-latency").find("figcaption")[0].text
    left = 100 - 5 * len(result.plan.groups)  # of 2 ms, each takes 0.1
    assert f"The ring is {THIS}: {float(chosen[4]):.1f} % at {left:.1f} % of the predicted latency." in told
    assert "MACs" not in told


def test_signed_scores_have_no_share(net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    result = sc.prune(net, data, keep={"macs": 0.5}, progress=False)
    signed = {site: values - values.mean() for site, values in result.scores.units.items()}
    page = page_of(replace(result, scores=replace(result.scores, units=signed)), tmp_path)
    assert "no share of them can be told" in page.by_id("tradeoff").text
    assert not page.by_id("tradeoff").find("svg")


def test_steps_have_the_curve_of_what_was_measured(
    net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    result = sc.prune(net, data, remove=0.4, schedule=0.2, evaluate=lambda _: 0.5, progress=False)
    page = page_of(result, tmp_path)
    assert {figure.attributes["id"] for figure in page.find("figure", class_="chart")} == {"units", "macs"}


def test_a_target_in_time_is_varied_in_time(net: nn.Sequential, data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    result = sc.prune(net, data, keep={"macs": 0.5}, progress=False)
    price = result.graph.cost_of.prices["macs"]  # as if every MAC took a second
    timed = replace(result, table=price, settings={**result.settings, "keep": {"latency": 0.5}})
    figure = page_of(timed, tmp_path).by_id("tradeoff-latency")
    left, whole = result.plan.after.macs / result.plan.before.macs, result.plan.before.macs
    goals = [1 - (1 - left) / 3, 1 - (1 - left) * 2 / 3, left, left * 2 / 3, left * 4 / 9]
    expected = []
    for goal in goals:
        keep = {"seconds": goal * whole}
        plan = sc.plan(result.graph, result.scores, keep=keep, limits=Limits("cost"), latency=price)
        expected.append(100 * plan.after.macs / whole)
    assert [float(line[2]) for line in figure.rows[1:]] == pytest.approx(expected, abs=0.005001)
    assert [float(line[5]) for line in figure.rows] == pytest.approx(
        [1000 * whole * float(line[2]) / 100 for line in figure.rows], rel=1e-3
    )


def test_a_run_remembers_its_table(net: nn.Sequential, data: tuple[Tensor, Tensor]) -> None:
    table = sc.latency(net, data[0][:1], cache=False)
    assert sc.prune(net, data, keep={"macs": 0.5}, latency=table, progress=False).table is table
    assert sc.prune(net, data, keep={"macs": 0.5}, progress=False).table is None
