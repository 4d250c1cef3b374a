"""The page of a run in a browser: its numbers, its slider, on a desk, on a phone and without script."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from csc import metrics
from csc.report.page import run_page
from tests.browser.conftest import PHONE, keep_screenshot, too_wide
from tests.reported import Reported, reported

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    return reported(tmp_path_factory.mktemp("reported"))


@pytest.fixture
def opened(made: Reported, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Open the page of the run."""
    return partial(open_page, run_page(made.run, made.evidence))


def test_the_page_shows_the_numbers_of_the_metrics(opened: Callable[..., Any], made: Reported):
    page = opened()
    last = made.run.last.metrics
    tiles = page.locator("dl.numbers").first.inner_text()
    for value in (last.mAP, last.CF1, last.OF1):
        assert f"{value:.1f}" in tiles
    rows = page.locator("table.classes tbody tr")
    assert rows.count() == len(made.run.last.seen)
    for index, name in enumerate(made.run.last.seen):
        assert rows.nth(index).locator("td").nth(2).inner_text() == f"{last.AP[name]:.1f}"
    keep_screenshot(page, "run-desk")


@pytest.mark.parametrize("step", [0, 47, 50, 52, 99])
def test_the_slider_shows_what_the_scores_give_at_its_threshold(opened: Callable[..., Any], made: Reported, step: int):
    page = opened()
    assert page.locator("#live-CF1").inner_text() == f"{made.run.last.metrics.CF1:.1f}"
    page.locator("#threshold").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", step
    )
    expected = metrics.precision_recall_f1(made.scores.confidences, made.scores.targets, step / 100)
    for name in ("CP", "CR", "CF1", "OP", "OR", "OF1"):
        assert page.locator(f"#live-{name}").inner_text() == f"{100 * expected[name]:.1f}"


def test_a_class_of_its_own_can_be_chosen(opened: Callable[..., Any], made: Reported):
    page = opened()
    page.locator("#class").select_option("3")
    expected = metrics.precision_recall_f1(made.scores.confidences[:, 3:4], made.scores.targets[:, 3:4], 0.5)
    assert page.locator("#live-CF1").inner_text() == f"{100 * expected['CF1']:.1f}"
    page.locator("#chips button").nth(3).click()
    assert page.locator("details.class:visible summary b").all_inner_texts() == [made.run.last.seen[3]]


def test_a_table_sorts_by_a_click_on_its_head(opened: Callable[..., Any]):
    page = opened()
    page.locator("table.classes th button").nth(2).click()
    values = [float(text) for text in page.locator("table.classes tbody tr td:nth-child(3)").all_inner_texts()]
    assert values == sorted(values, reverse=True)


def test_a_tooltip_is_shown_at_once(opened: Callable[..., Any]):
    page = opened()
    page.locator("#course circle:visible").first.hover()
    assert "task 1, 4 classes" in page.locator(".tip").inner_text()


def test_where_the_model_looks_can_be_hidden(opened: Callable[..., Any]):
    page = opened()
    heat = page.locator("details.class:visible .heat").first
    assert heat.is_visible()
    page.locator("#looks").uncheck()
    assert not heat.is_visible()


def test_nothing_is_wider_than_a_phone(opened: Callable[..., Any]):
    page = opened(PHONE)
    keep_screenshot(page, "run-phone")
    assert too_wide(page) == []


def test_the_page_can_be_read_without_a_script(opened: Callable[..., Any], made: Reported):
    page = opened(java_script_enabled=False)
    assert page.locator("#live-CF1").inner_text() == f"{made.run.last.metrics.CF1:.1f}"
    assert not page.locator("#try-threshold").is_visible()
    assert page.locator("details.class").count() == len(made.run.last.seen)
    assert page.locator("details.class .picture:visible").count() > 0


def test_dark_and_print_have_colours_of_their_own(opened: Callable[..., Any]):
    page = opened(color_scheme="dark")
    keep_screenshot(page, "run-dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(17, 20, 24)"
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert not page.locator(".bar").is_visible()
