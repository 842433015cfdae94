"""The report page in a real browser: light and dark, narrow and wide, by keyboard, without a network."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from browser import A4, SCHEMES, WIDTHS, check, opened, reached_by_keyboard
from secateur.report import Page

pytestmark = pytest.mark.filterwarnings("ignore:right for other reasons")  # of random weights

LONG = "a.class.whose.name.has.no.space.in.it.and.goes.on.and.on.until.nobody.reads.it.any.more"


class Deep(nn.Module):
    """Fifty layers with long names."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, *(12 + i % 5 for i in range(49))]
        self.a_part_with_a_rather_long_name = nn.ModuleDict(
            {f"layer_number_{i}": nn.Linear(a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))}
        )
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.a_part_with_a_rather_long_name.values():
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small network with everything on the page, and a deep one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pages")
    small = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    data = torch.rand(12, 1, 8, 8), torch.arange(12) % 3
    options = {"remove": 0.5, "schedule": 0.1, "evaluate": lambda m: float(m(data[0]).std()), "progress": False}
    table = sc.compare(small, data, ["lrp", "taylor", "gradient", "weight"], **options)
    result = sc.prune(small, data, watch=data, **options)
    full = result.report(
        folder / "full.html", data=data, test=data, comparison=table, classes=["0", LONG, "<b>two</b>"]
    )  # fmt: skip
    vectors = torch.rand(6, 8), torch.arange(6) % 3
    found = sc.prune(Deep(), vectors, "weight", remove=0.4, schedule=0.2, evaluate=lambda _: 0.5, progress=False)
    return {"full": full, "deep": found.report(folder / "deep.html", page=Page(title=LONG))}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["full", "deep"])
def test_the_page_fits_and_can_be_read(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    with opened(browser, pages[name], width, scheme) as page:
        check(page)
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")


@pytest.mark.parametrize("name", ["full", "deep"])
def test_the_page_fits_on_paper(browser: Any, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name], A4, "dark") as page:
        page.emulate_media(media="print")
        check(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [*WIDTHS, 360, 800, 860])
def test_letters_in_charts_keep_their_size(browser: Any, pages: dict[str, Path], width: int) -> None:
    with opened(browser, pages["full"], width, "light") as page:
        heights = page.evaluate(
            "[...document.querySelectorAll('.chart .grid text')].map(e => e.getBoundingClientRect().height)"
        )
        assert len(heights) > 20
        assert min(heights) >= 11
        assert max(heights) <= 24
        inside = page.evaluate(
            "[...document.querySelectorAll('.chart svg')].map(svg => Math.max("
            "...[...svg.querySelectorAll('text')].filter(e => e.checkVisibility())"
            ".map(e => e.getBoundingClientRect().right))"
            " - svg.getBoundingClientRect().right)"
        )
        assert max(inside) <= 1


def test_everything_is_reached_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], 1280, "light") as page:
        count, order = reached_by_keyboard(page)
        assert count > 50
        assert order == list(range(count))


def test_arrow_keys_go_through_the_steps(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], 1280, "light") as page:
        frames = page.locator("#steps article")
        seen = [i for i in range(frames.count()) if frames.nth(i).is_visible()]
        assert seen == [frames.count() - 1]  # the model of the page
        page.locator("#steps input:checked").focus()
        for step in reversed(range(frames.count() - 1)):
            page.keyboard.press("ArrowLeft")
            assert [i for i in range(frames.count()) if frames.nth(i).is_visible()] == [step]
        assert frames.nth(0).locator("img").count() == 4


def test_the_page_has_no_script_to_miss(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["full"].resolve().as_uri())
    assert page.locator("#steps article").last.is_visible()
    page.locator("#steps label").first.click()
    assert page.locator("#steps article").first.is_visible()
    assert not page.locator("#steps article").last.is_visible()
    context.close()


def test_a_table_is_saved_without_a_network(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    context = browser.new_context(offline=True, accept_downloads=True)
    page = context.new_page()
    page.goto(pages["full"].resolve().as_uri())
    with page.expect_download() as saved:
        page.locator("#lost details summary").click()
        page.locator("#lost details a[download]").click()
    saved.value.save_as(tmp_path / "t.csv")
    assert saved.value.suggested_filename == "every-class-and-answer.csv"
    assert (tmp_path / "t.csv").read_text("utf-8-sig").startswith("class,answer,before,after,change\n")
    context.close()


def test_a_point_shows_its_number_when_it_has_the_focus(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], 420, "dark") as page:
        point = page.locator("#units .point").nth(2)
        assert not point.locator(".tip").is_visible()
        point.focus()
        assert point.locator(".tip").is_visible()
        assert point.locator(".tip").text_content() == point.get_attribute("aria-label")
        page.locator("#macs .point").nth(1).hover()
        assert page.locator("#macs .tip:visible").count() == 1
