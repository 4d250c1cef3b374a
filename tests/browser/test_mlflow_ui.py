"""MLflow's own pages as `csc ui` opens them: our saved pages show which run was best, and how each went."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from csc.steps.report import report
from tests.tracked import fresh_database
from tests.trained import SCENARIO, trained

pytestmark = pytest.mark.slow
SECONDS = 120_000  # milliseconds in which a page must show something, on a busy machine


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[dict[str, str]]:
    """The addresses that `csc ui` prints for a work folder with two runs of which the second is better."""
    del browser  # before anything is made, for where there is none
    folder = tmp_path_factory.mktemp("ui")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", fresh_database(folder / "work"))
        for seed, reached in ((0, 60.0), (1, 80.0)):
            tasks = [trained(folder, number, seed, mean_ap=reached - number) for number in (1, 2, 3)]
            for before, task in zip([None, *tasks], tasks, strict=False):
                task.register(before)
            report(str(tasks[-1].registered), str(folder / "page.html"), str(folder / "table.md"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "csc", "ui", "--workdir", str(folder / "work"), "--port", str(port)]
    own = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=own, start_new_session=True) as server:
        try:
            yield _printed(server)
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def _printed(server: "subprocess.Popen[str]") -> dict[str, str]:
    found: dict[str, str] = {}
    assert server.stdout is not None
    for line in server.stdout:
        if match := re.match(r"csc-digits (\w+) +(http\S+)", line):
            found[match[1]] = match[2]
        if "stop with Ctrl-C" in line:
            return found
    raise AssertionError("the server ended before it answered")


def _opened(browser: Any, address: str) -> Any:
    page = browser.new_page(viewport={"width": 1800, "height": 900})
    page.set_default_timeout(SECONDS)
    page.goto(address)
    return page


def test_the_results_are_a_table_of_scenario_runs_best_first(pages: dict[str, str], browser: Any, tmp_path: Path):
    page = _opened(browser, pages["results"])
    page.get_by_text("77", exact=True).first.wait_for()
    page.screenshot(path=str(tmp_path / "results.png"))
    names = [text for text in page.get_by_role("link").all_inner_texts() if text.startswith(SCENARIO)]
    assert [name.rpartition(" ")[2] for name in names] == ["1", "0"]  # the seeds: neither tasks, nor the worse first
    shown = page.inner_text("body")
    for word in ("last_mAP", "avg_mAP", "last_CF1", "forgetting", "Model training"):
        assert word in shown
    page.close()


def test_the_curves_have_the_task_as_step(pages: dict[str, str], browser: Any, tmp_path: Path):
    page = _opened(browser, pages["curves"])
    page.get_by_text("After each task").wait_for()
    page.locator(".scatterlayer .trace").nth(1).wait_for(state="attached")
    page.screenshot(path=str(tmp_path / "curves.png"))
    for name in ("mAP", "CF1", "OF1", "ECE", "FPR"):
        assert page.get_by_text(name, exact=True).count()
    page.get_by_text("Figures", exact=True).scroll_into_view_if_needed()
    assert _figures(page, 4) == ["AP by task", "AP by task", "mAP by task", "mAP by task"]
    page.screenshot(path=str(tmp_path / "figures.png"))
    page.close()


def test_a_run_shows_its_figures_above_the_charts_of_its_metrics(pages: dict[str, str], browser: Any, tmp_path: Path):
    page = _opened(browser, pages["results"])
    page.get_by_role("link", name=SCENARIO).first.click()
    page.get_by_role("tab", name="Model metrics").click()
    assert _figures(page, 2) == ["AP by task", "mAP by task"]
    page.screenshot(path=str(tmp_path / "run.png"))
    sections = [text for text in page.inner_text("body").splitlines() if text in ("figures", "Model metrics")]
    assert sections == ["Model metrics", "figures", "Model metrics"]  # the tab, then what it shows
    page.close()


def _figures(page: Any, count: int) -> list[str]:
    """The names of our figures that a page shows, as soon as so many are loaded."""
    ours = "[...document.images].filter(i => i.src.includes('figures~') && i.naturalWidth > 100).map(i => i.src)"
    page.wait_for_function(f"{ours}.length >= {count}")
    return sorted(re.search(r"figures~(.*?)\+", unquote(address))[1] for address in page.evaluate(ours))
