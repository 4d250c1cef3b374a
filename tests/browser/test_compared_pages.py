"""The pages that set runs next to each other, a comparison and a study, in a browser: on a desk and on a phone."""

from collections.abc import Callable
from typing import Any

import pytest

from csc.artifacts import RegisteredTask, RegisteredVersion, RunResults
from csc.study import cells as cells_module
from csc.study import claims as claims_module
from csc.study import compare as compare_module
from csc.study import page as page_module
from csc.study.cells import DataSource, cells, results
from csc.study.compare import compare, comparison_page
from csc.study.outcome import Outcome
from csc.study.page import study_page
from csc.study.reading import read_study
from csc.tracking.queries import ScenarioRun
from csc.tracking.tracked_run import TrackedRun
from tests.browser.conftest import DESK, PHONE, keep_screenshot, too_wide
from tests.unit.test_report import make_run

pytestmark = pytest.mark.slow
MODEL = RegisteredVersion("voc-b4c2-csc", "1", "m", "f", "r", "p")
SIZES = (4, *[2] * 8)
COLUMNS = {"last mAP": "mAP", "CF1": "CF1", "OF1": "OF1", "FPR": "FPR", "ECE": "ECE"}


@pytest.fixture(scope="module")
def runs() -> dict[str, RunResults]:
    """Runs with and without max-entropy, with real metrics of made-up scores."""
    names = {"without H": 1, "with H": 2}
    return {name: make_run("voc-b4c2", "csc", sizes=SIZES, seed=seed) for name, seed in names.items()}


@pytest.fixture
def compared(runs: dict[str, RunResults], monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of `csc compare` for two runs and a third with a long name."""
    monkeypatch.setattr(compare_module, "resampled", lambda run_id, task: None)
    names = ("csc", "csc · max_entropy.beta=0", "csc · backbone.name=tf_efficientnet_lite0 · train.epochs=3")
    found = []
    for number, name in enumerate(names):
        record = RegisteredTask(MODEL, runs["with H" if number % 2 else "without H"])
        title = f"voc-b4c2 · {name} · seed 7"
        found.append(TrackedRun(str(number) * 32, title, "FINISHED", 0, "voc-b4c2", {"name": name}, record))
    return comparison_page(compare(found))


@pytest.fixture
def study(runs: dict[str, RunResults], monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of the study `figure3`, all of it finished."""
    asked = cells(read_study("figure3"), {"voc": DataSource("/data/voc", 20, "v" * 64)})
    known = {f"{cell.row.name} {cell.seed}": runs[cell.row.name] for cell in asked}
    found = []
    for cell in asked:
        last = known[f"{cell.row.name} {cell.seed}"].last.metrics
        numbers = {"last_mAP": last.mAP, "last_CF1": last.CF1, "last_OF1": last.OF1, "avg_mAP": 50.0}
        numbers |= {name: last[name] for name in ("H", "FPR", "CR", "CP", "OR", "OP")}
        found.append(ScenarioRun(f"{cell.row.name} {cell.seed}", {"csc.run_key": cell.key}, {}, numbers))
    curves = {name: tuple(task.metrics.mAP for task in run.tasks) for name, run in known.items()}
    monkeypatch.setattr(cells_module, "finished_runs", lambda scenario: found)
    monkeypatch.setattr(cells_module, "map_after_tasks", curves.get)
    monkeypatch.setattr(claims_module, "resampled", lambda run_id, task: None)
    monkeypatch.setattr(page_module, "results_of", known.get)
    return study_page(Outcome(read_study("figure3"), tuple(results(asked))))


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_comparison_shows_the_metrics_of_its_runs_and_fits(
    compared: str, runs: dict[str, RunResults], open_page: Callable[..., Any], width: int
):
    page = open_page(compared, width)
    keep_screenshot(page, f"compare-{'phone' if width == PHONE else 'desk'}")
    row = page.locator("table").first.locator("tbody tr").first
    last = runs["without H"].last.metrics
    for column, name in COLUMNS.items():
        assert row.locator(f"td[data-name='{column}']").inner_text() == f"{last[name]:.1f}"
    shown = page.locator("svg:visible", has_text="threshold 0.8").first
    bars = shown.locator("rect[data-tip*='labels absent']")
    assert bars.count() == sum(count > 0 for run in [*runs.values(), runs["without H"]] for count in _absent(run))
    assert too_wide(page) == []


def _absent(run: RunResults) -> list[int]:
    return [int(count) for count in run.last.metrics.confidence["negatives"]]


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_study_of_figure_3_shows_its_metrics_and_both_histograms_and_fits(
    study: str, runs: dict[str, RunResults], open_page: Callable[..., Any], width: int
):
    page = open_page(study, width)
    keep_screenshot(page, f"study-{'phone' if width == PHONE else 'desk'}")
    rows = page.locator("table").first.locator("tbody tr")
    for index, run in enumerate(runs.values()):
        for column, text in {"H": f"{run.last.metrics.H:.2f}", "FPR": f"{run.last.metrics.FPR:.1f}"}.items():
            assert rows.nth(index).locator(f"td[data-name='{column}']").inner_text().startswith(text)
    histograms = page.locator("svg:visible", has_text="threshold 0.8").first
    assert [name for name in ("without H", "with H") if histograms.get_by_text(name, exact=True).count()] == [*runs]
    assert too_wide(page) == []


def test_a_table_of_a_study_sorts_by_a_click_on_its_head(study: str, open_page: Callable[..., Any]):
    page = open_page(study)
    page.locator("table").first.locator("th button", has_text="H").first.click()
    cells_shown = page.locator("table").first.locator("tbody td[data-name='H']").all_inner_texts()
    values = [float(text.split("±")[0]) for text in cells_shown]
    assert values == sorted(values, reverse=True)
