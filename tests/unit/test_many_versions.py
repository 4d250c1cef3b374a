"""A registry that many share: whatever is asked of it, MLflow reads the few versions and runs that are meant."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from mlflow.store.model_registry.dbmodels.models import SqlModelVersion
from mlflow.store.tracking.dbmodels.models import SqlRun
from sqlalchemy import event

from benchmarks.registry import add_versions
from csc.tracking.names import model_name
from csc.tracking.registry import fetch_model, find_registered_task, point_aliases
from csc.tracking.runs import run_key
from csc.tracking.tracked_run import find_run, finished_tasks
from csc.tracking.versions import registered_task_at
from tests.tracked import fresh_database
from tests.trained import SCENARIO, Trained, trained

NAME = model_name(SCENARIO, "csc")
OTHERS = 500


@contextmanager
def rows_read() -> Iterator[Callable[[], int]]:
    """Count the versions and runs that MLflow reads from its database."""
    rows = 0

    def count(*_: object) -> None:
        nonlocal rows
        rows += 1

    for table in (SqlModelVersion, SqlRun):
        event.listen(table, "load", count)
    try:
        yield lambda: rows
    finally:
        for table in (SqlModelVersion, SqlRun):
            event.remove(table, "load", count)


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Trained]]:
    """Two tasks of a run that are registered, a third that is not, and hundreds of versions of others."""
    folder = tmp_path_factory.mktemp("registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", fresh_database(folder))
        tasks = [trained(folder, task) for task in (1, 2, 3)]
        for before, task in zip([None, *tasks[:1]], tasks[:2], strict=True):
            task.train()
            task.register(before)
        add_versions(folder / "mlflow.db", NAME, OTHERS)
        yield tasks


ASKED: dict[str, Callable[[list[Trained]], object]] = {
    "a tracked run": lambda tasks: find_run(SCENARIO),
    "the tasks that are finished": lambda tasks: finished_tasks(run_key(tasks[0].card)),
    "the model of the task before": lambda tasks: find_registered_task(NAME, 2, run_key(tasks[0].card)),
    "the aliases of a run": lambda tasks: point_aliases(NAME, run_key(tasks[0].card)),
    "a version by its number": lambda tasks: registered_task_at(f"models:/{NAME}/1"),
    "a version by its alias": lambda tasks: registered_task_at(f"models:/{NAME}@task-02"),
    "the files of a version": lambda tasks: fetch_model(f"models:/{NAME}@task-02"),
    "to register the next task": lambda tasks: (tasks[2].train(), tasks[2].register(tasks[1])),
}


@pytest.mark.parametrize("what", ASKED)
def test_no_call_reads_the_versions_and_runs_of_others(what: str, registered: list[Trained]):
    with rows_read() as rows:
        ASKED[what](registered)
    assert 0 < rows() < OTHERS / 5
