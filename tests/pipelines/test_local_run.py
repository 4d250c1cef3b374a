"""What a person sees of a run on this machine, and what a run keeps to itself in a shared work folder."""

import io
import time
from pathlib import Path

import pytest
from kfp import components

from csc.errors import BadData
from csc.pipelines.local import view as views
from csc.pipelines.local.cache import cache_folder
from csc.pipelines.local.lock import locked
from csc.pipelines.local.reporter import RunReporter, step_titles
from csc.pipelines.local.view import PlainView
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.window import Window
from csc.scenario import Scenario

DIGITS = Scenario.parse("digits-b0c4")


def titles(path: Path, tasks: str | None = None) -> dict[str, str]:
    compile_pipeline(DIGITS, 10, path, window=Window.parse(tasks, DIGITS, 10))
    return step_titles(components.load_component_from_file(str(path)).pipeline_spec)


@pytest.fixture(scope="module")
def all_titles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return titles(tmp_path_factory.mktemp("pipeline") / "p.yaml")


@pytest.fixture
def reporter(all_titles: dict[str, str]) -> RunReporter:
    return RunReporter(PlainView(io.StringIO()), io.StringIO(), all_titles)


def said(reporter: RunReporter) -> list[str]:
    return reporter.view.out.getvalue().splitlines()


def test_titles_are_those_of_the_pipeline_whatever_kfp_calls_the_steps(all_titles: dict[str, str], tmp_path: Path):
    assert len(all_titles) == 1 + 3 * 5 + 1
    assert all_titles["train"] == "task 1 · train"
    assert all_titles["split-labels-3"] == "task 3 · split-labels"
    assert all_titles["ingest"] == "ingest"
    window = titles(tmp_path / "window.yaml", "2-3")
    assert (window["train"], window["train-2"], window["prior"]) == ("task 2 · train", "task 3 · train", "prior")


def test_reused_steps_have_the_titles_of_their_tasks(reporter: RunReporter):
    for name in ("train", "train-2", "evaluate-2", "report"):
        reporter.reuse(name)
    assert reporter.reused == ["task 1 · train", "task 2 · train", "task 2 · evaluate", "report"]
    assert said(reporter)[0] == "task 1 · train           reused"
    assert "task 2 · evaluate reused" in reporter.log.getvalue()


def test_lines_of_our_steps_are_shown_all_others_only_logged(reporter: RunReporter):
    reporter.begin("train")
    for line in ("task 1/3 · epoch 1/2", "some library talks", "retry: no answer; trying again in 60 s"):
        reporter.line(line)
    assert said(reporter)[1:] == ["  task 1/3 · epoch 1/2", "  retry: no answer; trying again in 60 s"]
    assert "some library talks" in reporter.log.getvalue()


def test_a_step_that_says_nothing_for_long_is_reported_ever_more_rarely(reporter: RunReporter):
    reporter.begin("register-2")
    reporter.line("Retrying: connection refused")
    start = time.monotonic()
    for seconds in range(0, 500, 10):
        reporter.view.break_silence(start + seconds)
    last = "its last line: Retrying: connection refused"
    assert said(reporter)[1:] == [f"  running for {seconds} s; {last}" for seconds in (60, 120, 240, 480)]


def test_silence_is_watched_while_kfp_runs(reporter: RunReporter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "_SILENCE", 0.5)
    with reporter.view:
        reporter.begin("train")
        time.sleep(1.2)
    assert said(reporter)[1].endswith("its last line: no output yet")


def test_the_same_run_twice_at_once_is_refused_and_other_runs_are_not(tmp_path: Path):
    with locked(tmp_path, "one", {}) as folder, locked(tmp_path, "two", {}) as other:
        assert folder != other
        with pytest.raises(BadData, match="the same run is going on there"), locked(tmp_path, "one", {}):
            pass
    with locked(tmp_path, "one", {}):
        pass


def test_runs_reuse_only_their_own_steps(tmp_path: Path):
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    Path(tmp_path, "mlflow.db").touch()
    caches = {cache_folder(tmp_path, name, tracking) for name in ("one", "two")}
    assert len(caches) == 2
    kept = cache_folder(tmp_path, "one", tracking) / "step.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert cache_folder(tmp_path, "one", tracking) == kept.parent
    assert kept.is_file()
    Path(tmp_path, "mlflow.db").unlink()
    cache_folder(tmp_path, "one", tracking)
    assert not kept.exists()
