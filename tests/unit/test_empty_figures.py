"""Pages of runs with little to show: no figure is left with bare axes, a sentence replaces it."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from csc import metrics
from csc.artifacts import Metrics, RegisteredTask, RegisteredVersion, RunResults, TaskResult
from csc.data.evidence import THRESHOLDS, Evidence, Reliability, TaskFacts
from csc.report.page import run_page
from csc.study import compare as compare_module
from csc.study.compare import compare, comparison_page
from csc.tracking.tracked_run import TrackedRun

SVG = "{http://www.w3.org/2000/svg}"
IMAGES = 30


def scored(kind: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and targets of a kind."""
    generator = np.random.default_rng(0)
    targets = generator.random((IMAGES, classes)) < 0.3
    scores = generator.random((IMAGES, classes)).astype(np.float32)
    changes = {
        "no positives": (scores, np.zeros_like(targets)),
        "nothing but positives": (scores, np.ones_like(targets)),
        "no score above anything": (np.zeros_like(scores), targets),
        "no score above the threshold": (scores / 2, targets),
        "every score is 1": (np.ones_like(scores), targets),
        "one value for all": (np.full_like(scores, 0.5), np.zeros_like(targets)),
    }
    return changes.get(kind, (scores, targets))


def made(kind: str, sizes: tuple[int, ...], **changed: object) -> tuple[RunResults, list[Evidence]]:
    """A run and its evidence without images."""
    names, tasks, evidence, best = [f"class {number}" for number in range(sum(sizes))], [], [], {}
    for task, size in enumerate(sizes, 1):
        seen = sum(sizes[:task])
        scores, targets = scored(kind, seen)
        numbers = metrics.evaluate(scores, targets, names[:seen], 0.8, best, old=seen - size)
        best = numbers["best_AP"]
        tasks.append(
            TaskResult(task, tuple(names[seen - size : seen]), tuple(names[:seen]), Metrics(**numbers), 5, 0.0)
        )
        evidence.append(Evidence(facts(task, names[:seen], seen - size, scores, targets, **changed), ()))
    return RunResults("digits-b0c2", "csc", 0, "scratch", "d" * 64, "1.0", tuple(tasks)), evidence


def facts(
    task: int, classes: list[str], old: int, scores: np.ndarray, targets: np.ndarray, **changed: object
) -> TaskFacts:
    groups = {"old": slice(old), "new": slice(old, None)}
    counted = {
        name: Reliability(*(part.tolist() for part in metrics.confidence_bins(scores[:, columns], targets[:, columns])))
        for name, columns in groups.items()
        if scores[:, columns].size
    }
    known = {
        "epochs": [],
        "correlation": [],
        "correlation_name": "",
        "reliability": counted,
        "present": targets.sum(axis=0).tolist(),
        "predicted": [[int((column > limit).sum()) for limit in THRESHOLDS] for column in scores.T],
        "found": [[int((column > limit).sum()) for limit in THRESHOLDS] for column in np.where(targets, scores, 0).T],
    }
    same = {"settings": "{}", "data": "data", "packages": {}, "thresholds": [], "threshold": 0.8, "exemplars": 0}
    times = {"train_images": 5, "train_seconds": 0.0, "test_images": IMAGES, "test_seconds": 0.0}
    return TaskFacts(task=task, classes=classes, old=old, **(same | times | known | changed))


def empty_figures(html: str) -> list[str]:
    """The names of figures without a visible mark, which is a picture or whatever has a tooltip."""
    root = ET.fromstring(html.replace("<!DOCTYPE html>", ""))
    return [figure.get("aria-label") for figure in root.iter(f"{SVG}svg") if not any(map(visible, figure.iter()))]


def visible(node: ET.Element) -> bool:
    if node.tag == f"{SVG}image":
        return True
    if node.find(f"{SVG}title") is None or node.tag == f"{SVG}text":
        return False
    return all(float(node.get(side, "1")) >= 0.5 for side in ("width", "height")) and node.get("fill-opacity") != "0"


KINDS = (
    "plain",
    "no positives",
    "nothing but positives",
    "no score above anything",
    "no score above the threshold",
    "every score is 1",
    "one value for all",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2, 2, 2)], ids=str)
def test_no_figure_of_a_run_is_empty(kind: str, sizes: tuple[int, ...]):
    run, evidence = made(kind, sizes)
    for html in (
        run_page(run, evidence),
        run_page(run),
        run_page(run, evidence, {"without": run, "with": run}, run.last.metrics),
    ):
        assert html.count('class="csc-figure"') >= 6
        assert empty_figures(html) == []


def test_what_is_not_drawn_is_said():
    run, evidence = made("no score above the threshold", (2, 2))
    assert "Nothing is predicted correctly above 0.8 after any task: precision and recall are 0." in run_page(
        run, evidence
    )
    assert "No epoch was logged." in run_page(run, evidence)
    run, evidence = made("plain", (2, 2), epochs=[{"images_per_second": 9.0}], correlation_name="A_g")
    assert "No loss was logged." in run_page(run, evidence)
    zeros = [[0.0] * 4] * 4
    run, evidence = made("plain", (4,), correlation=zeros, correlation_name="A_g")
    assert "It is zero everywhere" in run_page(run, evidence)
    assert empty_figures(run_page(run, evidence)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_figure_of_a_comparison_is_empty(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare_module, "resampled", lambda run_id, task: None)
    model = RegisteredVersion("digits-b0c2-csc", "1", "m", "f", "r", "p")
    found = []
    for number, sizes in enumerate([(2, 2), (2,)]):
        record = RegisteredTask(model, made(kind, sizes)[0])
        found.append(TrackedRun(str(number), f"run {number}", "FINISHED", 0, "digits-b0c2", {"n": str(number)}, record))
    assert empty_figures(comparison_page(compare(found))) == []
    assert empty_figures(comparison_page(compare(found[::-1]))) == []


def test_the_test_sees_an_empty_figure():
    run, evidence = made("plain", (2,))
    html = run_page(run, evidence)
    bare = re.sub(r"<(circle|polyline|rect|image)\b.*?(/>|</\1>)", "", html, flags=re.DOTALL)
    assert len(empty_figures(bare)) == html.count('class="csc-figure"')
