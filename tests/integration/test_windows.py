"""A scenario in windows of tasks is the same run as the scenario at once."""

import pytest

from tests.integration.conftest import csc, last_results
from tests.tracked import fresh_database

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

NAME = "digits-b0c4-csc"


def test_a_scenario_in_two_windows_gives_the_numbers_and_the_run_of_one(undisturbed, scenes, tmp_path):
    fresh_database(tmp_path)
    words = ("run", "digits-b0c4", "--data", scenes, "--workdir", tmp_path)
    begun = csc(*words, "--tasks", "1-2")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert f"models:/{NAME}@task-02" in begun.stdout
    assert "the same command with --tasks 3-" in begun.stdout
    assert last_results(tmp_path) == last_results(undisturbed[0])[:2]  # the report has the tasks that exist
    assert list(tmp_path.glob("digits-b0c4-csc-seed0-*.html"))

    ended = csc(*words, "--tasks", "3-")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"task 2: continues models:/{NAME}/2" in ended.stdout
    assert "task 3 · train" in ended.stdout
    assert "task 1 ·" not in ended.stdout
    assert last_results(tmp_path) == last_results(undisturbed[0])

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("csc-digits").experiment_id])
    (parent,) = [run for run in found if run.data.tags["csc.role"] == "scenario"]
    assert len(found) == 4
    assert parent.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(parent.info.run_id, "mAP")] == [1, 2, 3]
    assert int(client.get_model_version_by_alias(NAME, "final").version) == 3


@pytest.mark.parametrize("change", [["--seed", "1"], ["--set", "train.lr=0.001"]], ids=["seed", "settings"])
def test_a_window_never_continues_another_run(undisturbed, scenes, change):
    done = csc("run", "digits-b0c4", "--data", scenes, "--workdir", undisturbed[0], "--tasks", "2-", *change)
    assert done.returncode == 2
    seed = change[1] if change[0] == "--seed" else "0"
    assert f"csc: no registered model '{NAME}' of task 1 with seed {seed}, these settings, data " in done.stderr
    assert "run the tasks up to it with the same arguments first" in done.stderr
    assert len(done.stderr.splitlines()) == 1
