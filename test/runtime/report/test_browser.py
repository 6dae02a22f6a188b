"""The page in Chromium: every figure is drawn, in both themes, without errors and requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alpa.runtime.questions.compare import compare
from alpa.runtime.report.comparison import comparison_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright (pip install playwright)"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")

_DARK = "rgb(18, 22, 28)"
_LIGHT = "rgb(244, 246, 249)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def file(report: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    path.write_text(report.text, encoding="utf-8")
    return path


class Seen:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any, file: Path, theme: str, width: int = 1280) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page.set_default_timeout(120_000)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_function("!document.querySelector('main > * > figure > script.figure')")
        self.page.wait_for_function(
            "[...document.querySelectorAll('.drawing')].filter(it => it.offsetParent)"
            ".every(it => it.firstElementChild?.shadowRoot?.querySelector('*'))"
        )

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def check(self, file: Path) -> None:
        others = [url for url in self.requests if not url.startswith("data:")]
        assert others == [file.as_uri()]
        assert self.problems == []


@pytest.mark.parametrize(("theme", "color"), [("light", _LIGHT), ("dark", _DARK)])
def test_it_draws_in_both_themes(browser: Any, file: Path, theme: str, color: str) -> None:
    seen = Seen(browser, file, theme)
    page = seen.page
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == color
    sections = page.locator("main > section")
    assert sections.count() == 7
    for number in range(sections.count()):
        assert sections.nth(number).is_visible()
        assert sections.nth(number).bounding_box()["height"] > 80
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(background) == (_LIGHT if theme == "dark" else _DARK)
    assert page.locator("#theme").get_attribute("aria-pressed") == str(theme == "light").lower()
    seen.check(file)
    page.close()


@pytest.mark.parametrize("width", [1280, 1920])
def test_nothing_is_wider_than_the_window(browser: Any, file: Path, width: int) -> None:
    seen = Seen(browser, file, "light", width)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    seen.check(file)
    seen.page.close()


@pytest.mark.parametrize(("theme", "color"), [("light", _LIGHT), ("dark", _DARK)])
def test_a_comparison(browser: Any, report: Any, tmp_path: Path, theme: str, color: str) -> None:
    numbers = json.loads(report.content.numbers.to_json())
    path = tmp_path / "difference.html"
    path.write_text(comparison_page(compare(numbers, numbers, ("a", "b"))), encoding="utf-8")
    seen = Seen(browser, path, theme)
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == color
    assert [it.bounding_box()["height"] > 15 for it in seen.page.locator(".bar").all()] == [
        True
    ] * 2
    seen.check(path)
    seen.page.close()


def test_the_table_of_shardings_opens(browser: Any, file: Path) -> None:
    seen = Seen(browser, file, "light")
    table = seen.page.locator("#shardings details").first
    assert not table.locator("table").is_visible()
    table.locator("summary").click()
    assert table.locator("table").is_visible()
    seen.check(file)
    seen.page.close()


def test_figures_fit_on_paper(browser: Any, file: Path) -> None:
    """They are drawn at the width of the screen, which is more than a sheet has."""
    seen = Seen(browser, file, "dark", 1920)
    widths = (
        "[...document.querySelectorAll('.drawing')].map(it => it.getBoundingClientRect().width)"
    )
    on_screen = seen.page.evaluate(widths)
    assert max(on_screen) > 1400
    seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == _LIGHT
    assert 850 < max(seen.page.evaluate(widths)) < 901
    seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == _DARK
    assert max(seen.page.evaluate(widths)) == max(on_screen)
    seen.check(file)
    seen.page.close()


def test_the_keyboard_reaches_links_tables_and_tools(browser: Any, file: Path) -> None:
    seen = Seen(browser, file, "light")
    reached = list[str]()
    for _ in range(80):
        seen.page.keyboard.press("Tab")
        label = seen.page.evaluate(
            """() => {
              let at = document.activeElement
              while (at.shadowRoot?.activeElement) at = at.shadowRoot.activeElement
              return at.getAttribute("aria-label") || at.title || at.textContent
            }"""
        )
        reached.append(label)
    assert reached[0] == "Skip to the report"
    assert {"Limits", "Search", "Dark theme", "Zoom In (x-axis)", "Reset"} <= set(reached)
    assert {"Seconds of each mesh, and shares of the step", "Plans that were tried"} <= set(reached)
    seen.page.close()
