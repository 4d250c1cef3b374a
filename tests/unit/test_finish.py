"""finish: what a run that ended early leaves open in MLflow is closed, and a later try opens it again."""

import json

import pytest

from csc.config import differences, resolve
from csc.data.ingest.digits import ingest_digits
from csc.model import ModelCard
from csc.steps.finish import finish
from csc.tracking.queries import close_runs
from csc.tracking.runs import Tracker, finish_scenario
from csc.version import code_version
from tests.tracked import fresh_database

SCENARIO = "digits-b0c5"
CONFIG = resolve("digits", {"seed": 3})


@pytest.fixture
def data(tmp_path):
    return ingest_digits(tmp_path / "digits", train=20, test=10, size=32)


@pytest.fixture
def tracker(data, tmp_path, monkeypatch):
    """The second task of a scenario run whose first one is finished."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path))
    trackers = [Tracker(_card(task, data.fingerprint)) for task in (1, 2)]
    for one in trackers:
        assert one.task_run.info.status == "RUNNING"
    trackers[0].finish("done")
    return trackers[1]


def _card(task, data_fingerprint):
    return ModelCard(
        method="csc",
        scenario=SCENARIO,
        task=task,
        tasks=2,
        classes=tuple("0123456789"[: 5 * task]),
        new=tuple("01234"),
        config=json.loads(CONFIG.to_json()),
        initialisation={"text": "scratch"},
        mean=(),
        std=(),
        data_fingerprint=data_fingerprint,
        prior_fingerprint="",
        code_version=code_version(),
    )


def statuses(tracker):
    """Of the scenario's run and of its tasks' runs."""
    client = tracker.client
    tasks = sorted(
        client.search_runs([tracker.experiment_id], "tags.`csc.role` = 'task'"), key=lambda r: r.info.run_name
    )
    return [client.get_run(tracker.scenario_run_id).info.status, *(run.info.status for run in tasks)]


@pytest.mark.parametrize(
    ("state", "status"), [("FAILED", "FAILED"), ("CANCELED", "KILLED"), ("COMPLETE", "FAILED"), ("RUNNING", "FAILED")]
)
def test_what_is_open_is_closed_and_what_is_finished_is_left_alone(tracker, data, state, status, capsys):
    finish(SCENARIO, str(data.path), differences("digits", CONFIG), state)
    assert statuses(tracker) == [status, "FINISHED", status]
    assert f"marked as {status}: " in capsys.readouterr().out


def test_a_completed_run_stays_finished(tracker, data, capsys):
    tracker.finish("done")
    finish_scenario(tracker.scenario_run_id, {"last_mAP": 50.0}, 2, {"report.html": "page"}, "done")
    finish(SCENARIO, str(data.path), differences("digits", CONFIG), "COMPLETE")
    assert statuses(tracker) == ["FINISHED"] * 3
    assert "nothing is left open" in capsys.readouterr().out


def test_the_next_try_opens_the_runs_again(tracker, data):
    finish(SCENARIO, str(data.path), differences("digits", CONFIG), "FAILED")
    again = Tracker(tracker.card)
    assert again.task_run.info.run_id == tracker.task_run.info.run_id
    assert statuses(again) == ["RUNNING", "FINISHED", "RUNNING"]


def test_runs_of_other_settings_are_not_touched(tracker, data):
    finish(SCENARIO, str(data.path), differences("digits", resolve("digits", {"seed": 4})), "FAILED")
    assert statuses(tracker) == ["RUNNING", "FINISHED", "RUNNING"]


def test_a_run_that_never_began_has_nothing_to_close(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    finish(SCENARIO, str(tmp_path / "nowhere"), differences("digits", CONFIG), "FAILED")
    assert "nothing to close" in capsys.readouterr().out
    assert close_runs(["0" * 16], "FAILED") == []
    assert not list(tmp_path.glob("*.db"))


@pytest.mark.parametrize(("scenario", "extended"), [(SCENARIO, ""), (f"{SCENARIO}+3", "f" * 64)])
def test_a_complete_run_that_is_asked_for_again_gets_its_aliases_back(tracker, data, scenario, extended, capsys):
    tracker.finish("done")
    finish_scenario(tracker.scenario_run_id, {"last_mAP": 50.0}, 2, {"report.html": "page"}, "done")
    name, client = f"{SCENARIO}-csc", tracker.client
    client.create_registered_model(name)
    own = CONFIG.run_key(scenario, data.fingerprint, code_version(), extended)
    for key in (own, "another run"):
        tags = {"csc.run_key": key, "csc.task": "2", "csc.tasks": "2"}
        task_run = tracker.task_run.info
        version = client.create_model_version(name, f"{task_run.artifact_uri}/model", task_run.run_id, tags)
        client.set_registered_model_alias(name, "final", version.version)
    finish(scenario, str(data.path), differences("digits", CONFIG), "FAILED", extended)
    assert str(client.get_model_version_by_alias(name, "final").version) == "2"
    finish(scenario, str(data.path), differences("digits", CONFIG), "SUCCEEDED", extended)
    assert str(client.get_model_version_by_alias(name, "final").version) == "1"
    assert "alias final is version 1 again (was 2)" in capsys.readouterr().out
