"""A browser for the tests that look at pages: Debian's Chromium, headless."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.debian import install

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
DESK, PHONE = 1100, 390
NAMES = ("chromium", "chromium-browser", "google-chrome")


def _browser() -> str:
    """The path of a browser; it is installed only where tests may install something."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        install("chromium", missing="no browser")
    return found or "/usr/bin/chromium"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = _browser()
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])  # which root has to do without
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the HTML of a page; whatever a script complains of, and any request to elsewhere, fails the test."""
    complaints, contexts = [], []

    def opened(html: str, width: int = DESK, **options: Any) -> Any:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, is_mobile=width == PHONE, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def keep_screenshot(page: Any, name: str) -> None:
    """Keep what the page looks like as a test artifact."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def too_wide(page: Any) -> list[str]:
    """What of a page is cut off at its sides or by a figure's frame, or has to be scrolled sideways."""
    beyond = """() => {
        const wide = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
        for (const element of document.querySelectorAll("main *")) {
            const box = element.getBoundingClientRect();
            let above = element.parentElement;
            while (above && getComputedStyle(above).overflowX === "visible") above = above.parentElement;
            const cut = !above && box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
            const scrolls = element.matches(".wide, figure") && element.scrollWidth > element.clientWidth + 1;
            if (cut || scrolls) wide.push(element.outerHTML.slice(0, 120));
        }
        for (const text of document.querySelectorAll("svg text")) {
            const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
            if (box.right > frame.right + 1 || box.left < frame.left - 1) wide.push(text.outerHTML.slice(0, 120));
        }
        return wide;
    }"""
    found: list[str] = page.evaluate(beyond)
    return found
