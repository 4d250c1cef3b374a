"""What the cluster's commands learn from MLflow, and do to it: a real store, and servers that never answer."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from csc.cli import main
from csc.config.tree import flatten
from csc.pipelines.cluster import progress as tracked
from csc.pipelines.cluster.progress import scenarios_of
from csc.pipelines.cluster.steps import run_status
from tests.kfp_recorded import as_run, as_spec, recorded
from tests.kfp_server import KfpServer
from tests.tracked import fresh_database
from tests.trained import EPOCHS, SCENARIO, trained

pytest_plugins = ["tests.cluster"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine")]

Csc = Callable[..., tuple[int, list[str], str]]
SAME = ("--set", f"train.epochs={EPOCHS}")  # the settings of what `trained` makes


@pytest.fixture
def client(machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store of the test's own, which the commands use too."""
    from mlflow.tracking import MlflowClient

    uri = fresh_database(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    return MlflowClient(uri)


@pytest.fixture
def started(server: KfpServer, csc: Csc) -> Callable[..., tuple[str, ...]]:
    """Submit a scenario of three tasks; returns the words that name the run and how to reach it."""

    def start(*more: object) -> tuple[str, ...]:
        flags = ("--host", server.host, "--token-env", "MY_TOKEN")
        code, _, error = csc("submit", SCENARIO, "--profile", "mine.yaml", *flags, *more)
        assert (code, error) == (0, "")
        return list(server.runs)[-1], *flags

    return start


def about_mlflow(lines: list[str]) -> list[str]:
    return [line for line in lines if "MLflow" in line]


def test_status_shows_how_far_every_task_has_come(
    client: Any, started: Callable[..., tuple[str, ...]], csc: Csc, tmp_path: Path
):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    first.register()
    second.train()
    before = dict(os.environ)
    code, lines, _ = csc("status", *started(*SAME))
    assert code == 0
    assert about_mlflow(lines) == [
        "MLflow · task 1          mAP 10.0",
        "MLflow · task 2          epoch 2 of 2, loss 0.5000",
    ]
    assert lines[-2] == "run running"
    assert {key: value for key, value in os.environ.items() if "MLFLOW_HTTP" in key} == {
        key: value for key, value in before.items() if "MLFLOW_HTTP" in key
    }


def test_a_task_that_ended_early_says_where(
    client: Any, started: Callable[..., tuple[str, ...]], csc: Csc, tmp_path: Path
):
    trained(tmp_path, 1).train()
    (task,) = client.search_runs(["1"], "tags.`csc.role` = 'task'")
    client.set_terminated(task.info.run_id, "FAILED")
    assert about_mlflow(csc("status", *started(*SAME))[1]) == [
        "MLflow · task 1          failed after epoch 2 of 2, loss 0.5000"
    ]


@pytest.mark.parametrize("other", [("--set", "train.epochs=3"), (*SAME, "--seed", "1"), (*SAME, "--method", "lwf")])
def test_runs_with_other_settings_are_not_shown(
    client: Any, started: Callable[..., tuple[str, ...]], csc: Csc, tmp_path: Path, other: tuple[str, ...]
):
    trained(tmp_path, 1).register()
    assert about_mlflow(csc("status", *started(*other))[1]) == []


def test_what_happened_before_the_run_is_not_shown(
    client: Any, started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc, tmp_path: Path
):
    trained(tmp_path, 1).train()
    words = started(*SAME)
    server.runs[words[0]]["created_at"] = "2099-01-01T00:00:00Z"
    assert about_mlflow(csc("status", *words)[1]) == []


def test_waiting_shows_it_once_steps_are_no_longer_named(client: Any, server: KfpServer, csc: Csc, tmp_path: Path):
    trained(tmp_path, 1).register()
    server.named_steps = 3
    words = ("--profile", "mine.yaml", "--host", server.host, "--token-env", "MY_TOKEN", *SAME)
    code, lines, _ = csc("submit", SCENARIO, *words, "--wait")
    assert code == 0
    assert [line[10:] for line in about_mlflow(lines)] == ["MLflow · task 1          mAP 10.0"]


def test_stop_marks_what_is_open_as_killed_and_nothing_else(
    client: Any, started: Callable[..., tuple[str, ...]], csc: Csc, tmp_path: Path
):
    trained(tmp_path, 1).register()
    trained(tmp_path, 2).train()
    trained(tmp_path, 1, seed=1).train()
    code, lines, _ = csc("stop", *started(*SAME))
    assert code == 0
    (line,) = about_mlflow(lines)
    assert line.startswith("MLflow      marked as killed: ")
    title = "digits-b0c4 · csc · train.epochs=2 · seed 0"
    assert set(line.partition(": ")[2].split(", ")) == {title, f"{title} task 02"}
    states = {
        (run.data.tags["csc.seed"], run.data.tags["csc.role"], run.data.tags.get("csc.task")): run.info.status
        for run in client.search_runs(["1"])
    }
    assert states == {
        ("0", "scenario", None): "KILLED",
        ("0", "task", "1"): "FINISHED",
        ("0", "task", "2"): "KILLED",
        ("1", "scenario", None): "RUNNING",
        ("1", "task", "1"): "RUNNING",
    }


def test_a_tracking_server_that_never_answers_is_not_waited_for(
    started: Callable[..., tuple[str, ...]],
    server: KfpServer,
    csc: Csc,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setattr(tracked, "_ANSWER_SECONDS", 1)
    words = started()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (tmp_path / "there.yaml").write_text(f"tracking: {{uri: '{uri}'}}")
        for command, code in (("status", 0), ("stop", 0)):
            start = time.monotonic()
            assert csc(command, *words, "--profile", "there.yaml")[::2] == (code, "")
            assert time.monotonic() - start < 20  # the import of mlflow, and one second for the request
        silent.settimeout(1)
        silent.accept()[0].close()  # the profile's address was asked


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:9", "http://no-such-host.invalid", "http://127.0.0.1:99999", "http://"]
)
def test_a_tracking_server_that_is_not_there_is_not_waited_for(
    started: Callable[..., tuple[str, ...]], csc: Csc, monkeypatch: pytest.MonkeyPatch, uri: str
):
    words = started()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    start = time.monotonic()
    assert csc("status", *words)[::2] == (0, "")
    code, lines, error = csc("stop", *words)
    assert (code, error) == (0, "")
    assert about_mlflow(lines) == ["MLflow      does not answer: what this run has open there stays open"]
    assert time.monotonic() - start < 10


def test_a_database_that_is_not_there_is_not_made(
    started: Callable[..., tuple[str, ...]], csc: Csc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    words = started()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    assert csc("status", *words)[::2] == (0, "")
    assert not (tmp_path / "none.db").exists()


def test_a_study_has_the_scenario_runs_of_its_loops(tmp_path: Path):
    (tmp_path / "there.yaml").write_text("storage: {data: 's3://bucket/{dataset}'}")
    words = ["--methods", "csc,lwf", "--seeds", "0,1", "--profile", "there.yaml", "--compile", "study.yaml"]
    assert main(["study", "digits", *words]) == 0
    spec = next(yaml.load_all((tmp_path / "study.yaml").read_text(), yaml.CSafeLoader))
    wanted = scenarios_of(run_status(as_run({"run_id": "r", "created_at": "2026-01-01T00:00:00Z"}), as_spec(spec)))
    assert sorted((scenario, config.method, config.seed) for scenario, config in wanted) == [
        ("digits-b0c2", "csc", 0),
        ("digits-b0c2", "csc", 1),
        ("digits-b0c2", "lwf", 0),
        ("digits-b0c2", "lwf", 1),
    ]


def test_the_settings_of_a_recorded_run_are_those_of_its_arguments():
    answer = recorded("running")
    spec = {"root": {}, "pipelineInfo": {"name": "csc-digits-b0c2"}}
    ((scenario, config),) = scenarios_of(run_status(as_run(answer), as_spec(spec)))
    assert scenario == "digits-b0c2"
    given = dict(flatten(json.loads(answer["runtime_config"]["parameters"]["config"])))
    assert {key: given[key] for key in config.flat() if key in given} == {
        key: value for key, value in config.flat().items() if key in given
    }
    assert config.train.epochs == 1
