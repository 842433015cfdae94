"""A real browser to look at pages with, and what every page must pass in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (420, 1280)
A4 = 720  # a page without its margins
SCHEMES = ("light", "dark")

# The contrast of every text that is seen with what lies behind it, by the formula of WCAG 2.
_CONTRAST = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => .2126 * light(r) + .7152 * light(g) + .0722 * light(b);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const [r, g, b, a] = channels(getComputedStyle(e).backgroundColor);
      if (a === undefined || a > .99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const poor = [];
  let seen = 0;
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.tagName === 'title') continue;
    const style = getComputedStyle(e);
    const front = channels(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(front), luminance(behind(e))].sort((x, y) => y - x);
    seen += 1;
    if ((a + .05) / (b + .05) < 4.5) poor.push(e.tagName + ' ' + e.textContent.slice(0, 40));
  }
  return [seen, poor];
}"""

_FOCUSABLE = """() => {
  const wanted = 'a[href], summary, [tabindex="0"], input:checked';
  const all = [...document.querySelectorAll(wanted)].filter(e => e.checkVisibility());
  all.forEach((e, i) => e.dataset.order = i);
  return all.length;
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium, or a skip that says why; where SECATEUR_NEED_BROWSER is set, a failure instead."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _without("playwright is not installed (pip install 'secateur[dev]')")
    if program is None:
        _without("there is no Chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, timeout=0)  # a busy machine may take its time
        yield browser
        browser.close()


def _without(reason: str) -> None:
    if os.environ.get("SECATEUR_NEED_BROWSER"):
        pytest.fail(f"pages must be looked at in a browser here, but {reason}")
    pytest.skip(reason)


@contextmanager
def opened(browser: Any, path: Path, width: int, scheme: str) -> Iterator[Any]:
    """The page in a window of that width; it must load without a word on the console and ask for nothing else."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(0)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(path.resolve().as_uri())
        yield page
        assert said == []
        assert [url for url in asked if not url.startswith("data:")] == [path.resolve().as_uri()]
    finally:
        context.close()


def check(page: Any) -> None:
    """Nothing runs over the right edge, folded or not; all text can be read; all pictures are there and have words."""
    for unfold in (False, True):
        if unfold:
            page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
        wide, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window, f"{wide} px of content in a window of {window} px (unfolded: {unfold})"
        seen, poor = page.evaluate(_CONTRAST)
        assert seen > 20
        assert poor == []
    images = page.evaluate("[...document.images].map(e => [e.complete && e.naturalWidth > 0, e.alt.length > 0])")
    assert all(loaded and named for loaded, named in images)


def reached_by_keyboard(page: Any) -> tuple[int, list[int]]:
    """How many elements take the focus, and the order in which the Tab key visits them."""
    count = page.evaluate(_FOCUSABLE)
    order = []
    for _ in range(count):
        page.keyboard.press("Tab")
        order.append(int(page.evaluate("document.activeElement.dataset.order ?? -1")))
    return count, order
