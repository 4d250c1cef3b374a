"""Any runs of the tracking store next to each other: which are one row, and what their differences are worth."""

import dataclasses
from html import unescape

import numpy as np
import pytest
from msgspec.structs import replace

from csc.artifacts import RegisteredTask, RegisteredVersion, RunResults, TaskResult
from csc.cli import main
from csc.errors import BadData
from csc.report.columns import CALIBRATION
from csc.study import compare as compare_module
from csc.study.claims import Resampled
from csc.study.compare import compare, comparison_page, comparison_text
from csc.tracking.tracked_run import TrackedRun
from tests.trained import metrics

MODEL = RegisteredVersion("voc-b0c4-csc", "1", "m", "f", "r", "p")


def tracked(name, seed, last, scenario="voc-b0c4", **settings):
    """A finished run of two tasks."""
    tasks = [
        TaskResult(task, (f"c{task}",), seen, metrics(seen, last + 10 * (2 - task)), 10, 1.0)
        for task, seen in ((1, ("c1",)), (2, ("c1", "c2")))
    ]
    record = RegisteredTask(MODEL, RunResults(scenario, name, seed, "scratch", "d" * 64, "1.0", tuple(tasks)))
    run_id = f"{name}-{seed}-{len(settings)}".ljust(32, "0")
    settings |= {"seed": str(seed), "method": name}
    return TrackedRun(run_id, f"{scenario} · {name} · seed {seed}", "FINISHED", 0, scenario, settings, record)


@pytest.fixture(autouse=True)
def kept_scores(monkeypatch):
    """Scores on the same test images, whose mAP moves by a point or so when they are drawn again."""
    shared = np.random.default_rng(0).normal(50, 1, 500)

    def resampled(run_id, task):
        assert task == 2
        own = np.random.default_rng(len(run_id.rstrip("0"))).normal(0, 0.3, 500)
        return Resampled(shared + own, 400, "same")

    monkeypatch.setattr(compare_module, "resampled", resampled)


def test_runs_that_differ_in_their_seed_alone_are_one_row():
    groups = compare(
        [tracked("csc", 0, 70.0), tracked("csc", 1, 72.0), tracked("lwf", 0, 60.0), tracked("lwf", 1, 61.5)]
    )
    assert [(group.name, list(group.runs)) for group in groups] == [
        ("csc", [0, 1]),
        ("lwf", [0, 1]),
    ]
    assert groups[0].number("last_mAP").mean == 71.0
    found = groups[1].minus(groups[0])
    assert (found.seeds, found.images) == (2, 400)
    assert found.mean == pytest.approx(-10.25)


def test_settings_that_change_no_result_make_no_row_of_their_own():
    one, other = (tracked("csc", seed, 70.0, **{"train.workers": str(seed)}) for seed in (0, 1))
    assert [list(group.runs) for group in compare([one, other])] == [[0, 1]]


def test_extensions_of_two_models_are_two_rows():
    first = [tracked("csc", seed, 70.0, scenario="voc-b0c4+2") for seed in (0, 1)]
    second = [dataclasses.replace(run, run_id=f"{index}".ljust(32, "f")) for index, run in enumerate(first)]
    groups = compare([*first, *second])
    assert [[run_id for run_id, _ in group.runs.values()] for group in groups] == [
        [run.run_id for run in runs] for runs in (first, second)
    ]


def test_rows_of_one_name_are_told_apart():
    groups = compare([tracked("csc", 0, 70.0), tracked("csc", 0, 71.0, **{"max_entropy.beta": "0"})])
    assert [group.name for group in groups] == ["voc-b0c4 · csc (csc-0-00)", "voc-b0c4 · csc (csc-0-10)"]


@pytest.mark.parametrize("seed", [0, 5])
def test_two_single_runs_are_compared_on_the_same_images_whatever_their_seeds(seed):
    text = comparison_text(compare([tracked("csc", 0, 70.0), tracked("lwf", seed, 80.0)]))
    (line,) = [line for line in text.splitlines() if "+10.0" in line]
    assert line.split()[-1] == "higher"
    assert "one seed: the interval is of these two models" in text


def test_runs_of_other_scenarios_are_shown_and_not_compared():
    text = comparison_text(compare([tracked("csc", 0, 70.0), tracked("csc", 0, 80.0, scenario="voc-b4c2")]))
    assert "not comparable" in text
    assert "scenario differs: voc-b0c4, voc-b4c2" in text


def test_the_errors_of_old_and_new_classes_stand_below_the_results():
    one = tracked("csc", 0, 10.0)
    last = one.registered_task.run.last.metrics
    text = comparison_text(compare([one, tracked("lwf", 0, 20.0)]))
    lines = text.partition(" Calibration\n")[2].splitlines()
    assert lines[1].split() == ["ECE", "old", "ECE", "new", "ECE", "old/T", "ECE", "new/T", "T"]
    shown = [f"{last[name]:.1f}" for name in ("ECE_old", "ECE_new", "ECE_old_T", "ECE_new_T")]
    assert lines[3].split() == ["csc", *shown, f"{last.temperature:.2f}"]
    assert "ECE old/T" in comparison_page(compare([one, one]))


def test_runs_of_a_version_without_calibration_have_no_table_of_it():
    run = tracked("csc", 0, 10.0).registered_task.run
    plain = {name: 0.0 for name in (*CALIBRATION, "AECE", "ECE_T", "AECE_T")} | {"temperature": 1.0}
    bare = replace(run, tasks=tuple(replace(task, metrics=replace(task.metrics, **plain)) for task in run.tasks))
    old = dataclasses.replace(tracked("csc", 0, 10.0), registered_task=RegisteredTask(MODEL, bare))
    assert "Calibration" not in comparison_text(compare([old, old]))


def test_the_page_has_every_row_its_course_and_the_ap_of_each_class():
    page = unescape(comparison_page(compare([tracked("csc", 0, 70.0), tracked("lwf", 0, 60.0)])))
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<polyline") == 4  # in two widths
    for word in (">csc</td>", "lwf − csc", "−10.0", "lower", ">c2</td>", "Differences in last mAP"):
        assert word in page


def test_a_run_without_results_is_refused_by_its_name():
    empty = TrackedRun("r" * 32, "voc-b0c4 · csc · seed 0", "RUNNING", 0, "voc-b0c4", {}, None)
    with pytest.raises(BadData, match="run voc-b0c4 · csc · seed 0: no task of it is finished yet"):
        compare([empty])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name at least two runs, or give --last N"),
        (["one"], "expected at least two runs"),
        (["--last", "1"], "expected at least two runs"),
        (["a", "b", "--last", "2"], "name at least two runs, or give --last N"),
        (["a", "b"], "no runs there yet"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["compare", *words, "--workdir", str(tmp_path / "work")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
