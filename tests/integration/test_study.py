"""A study on this machine: cells side by side, killed, interrupted, failed, and never done twice."""

import os
import re
import signal
import subprocess

import pytest
import yaml

from tests.faults.starter import Forked
from tests.integration.conftest import command, csc, environment
from tests.tracked import fresh_database

pytestmark = pytest.mark.slow

SMALL = ("train.batch_size=32", "input.size=32", "backbone.name=test_byobnet", "cigcn.width=16")
STUDY = {
    "title": "Two methods and a mistake",
    "scenarios": ["digits-b0c5"],
    "seeds": [0],
    "rows": [
        {"label": "LwF", "method": "lwf", "settings": {"train": {"epochs": 1}}},
        {"label": "CSC", "method": "csc", "settings": {"train": {"epochs": 4}}},  # far from its end when the other ends
        {"label": "broken", "method": "lwf", "settings": {"init": "/no/such/weights.safetensors"}},
    ],
    "order": [["CSC", "LwF"]],
}


@pytest.fixture
def words(scenes, tmp_path):
    """The command line of the study."""
    fresh_database(tmp_path / "work")
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    sets = [word for setting in SMALL for word in ("--set", setting)]
    return ["study", file, "--data", scenes, "--workdir", tmp_path / "work", "--parallel", "2", *sets]


def finished(workdir):
    """When each finished scenario run ended, by method and seed, and the steps of its curve."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    experiment = client.get_experiment_by_name("csc-digits")
    runs = client.search_runs([experiment.experiment_id], "tags.`csc.role` = 'scenario'")
    done = [run for run in runs if run.info.status == "FINISHED"]
    curves = [[metric.step for metric in client.get_metric_history(run.info.run_id, "mAP")] for run in done]
    assert curves == [[1, 2]] * len(done)
    return {(run.data.tags["csc.method"], run.data.tags["csc.seed"]): run.info.end_time for run in done}


def test_a_study_that_is_killed_goes_on_and_finished_cells_are_never_run_again(words, tmp_path):
    work = tmp_path / "work"
    victim = Forked(command(*words), environment())
    with victim.stdout as lines:
        assert any(line.startswith("[1/3]") for line in lines), "no cell ended"
        os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    before = finished(work)
    assert 1 <= len(before) <= 2

    done = csc(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"{3 - len(before)} runs? to do, on digits-b0c5", done.stdout)
    assert "broken · seed 0: failed after" in done.stdout
    table = done.stdout.partition(STUDY["title"] + "\n")[2]
    assert "failed (1 of 3 cells): broken: init=/no/such/weights.safetensors: no such file" in table
    assert "CSC > LwF" in table
    assert "claims by last mAP: " in table
    assert "2 of 3 finished, 1 failed, 0 not run" in table
    assert "the same command tries them again" in done.stderr
    after = finished(work)
    assert after.keys() == {("csc", "0"), ("lwf", "0")}
    assert before.items() <= after.items()
    logs = [path.name for path in (work / "logs").iterdir()]
    assert len({name.rpartition("-seed")[0] for name in logs}) == 2
    files = {path.suffix: path.read_text() for path in (work / "studies").iterdir()}
    assert files.keys() == {".txt", ".md", ".tex", ".csv", ".html"}
    assert files[".txt"].strip() in done.stdout
    assert files[".html"].count("<polyline") == 4  # two rows, drawn for a desk and for a phone
    assert not list((work / "checkpoints").iterdir())

    # As a person starts it; the others were forks, and so were their cells.
    again = subprocess.run(command(*words), capture_output=True, text=True, env=environment(), timeout=600)
    assert again.returncode == 1, again.stderr
    assert "1 run to do, on digits-b0c5" in again.stdout
    assert "failed (1 of 3 cells): broken: init=/no/such/weights.safetensors: no such file" in again.stdout
    assert finished(work) == after
    narrow = csc(*words, "--methods", "csc")
    assert narrow.returncode == 0, narrow.stdout + narrow.stderr
    assert " to do, on" not in narrow.stdout
    assert "1 of 1 finished, 0 failed, 0 not run" in narrow.stdout


def test_an_interrupt_stops_all_cells_and_leaves_no_run_open(words, tmp_path):
    from mlflow.tracking import MlflowClient

    victim, training = Forked(command(*words, "--methods", "csc", "--seeds", "0,1", "--verbose"), environment()), set()
    with victim.stdout as lines:
        for line in lines:
            training |= {line.partition(" | ")[0]} if "task 1/2 · epoch 1/4" in line else set()
            if len(training) == 2:
                break
        os.kill(victim.pid, signal.SIGINT)
        rest = lines.read()
    assert victim.wait() == 130, rest
    assert "[1/" not in rest
    client = MlflowClient(f"sqlite:///{tmp_path}/work/mlflow.db")
    experiment = client.get_experiment_by_name("csc-digits")
    states = {run.info.status for run in client.search_runs([experiment.experiment_id])}
    assert "KILLED" in states
    assert "RUNNING" not in states
