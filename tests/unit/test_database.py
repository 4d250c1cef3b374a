"""The SQLite database of a work folder: whole or not there, checked before work, and moved with its folder."""

import multiprocessing
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from csc.cli.workdir import use_workdir
from csc.errors import TrackingError
from csc.tracking.database import check_database, make_database
from csc.tracking.registry import fetch_model
from tests.tracked import fresh_database
from tests.trained import SCENARIO, trained

FORKS = multiprocessing.get_context("fork")  # which have MLflow


@pytest.mark.slow
def test_a_kill_at_any_moment_of_making_leaves_a_folder_that_works(tmp_path: Path):
    """Killed at random moments, again and again in one folder; what is there in between is a whole database or none."""
    database, chance = tmp_path / "mlflow.db", random.Random(0)
    for _ in range(4):
        process = FORKS.Process(target=make_database, args=(database,))
        process.start()
        while process.is_alive() and not list(tmp_path.glob(".mlflow.db.new*")):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.5))
        process.kill()
        process.join()
        check_database(database)
        database.unlink(missing_ok=True)  # so that the next one has something to make
    make_database(database)
    check_database(database)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
def test_processes_that_start_together_share_one_database(tmp_path: Path):
    database = tmp_path / "mlflow.db"
    with FORKS.Pool(2) as pool:
        pool.map(make_database, [database] * 2, chunksize=1)
    check_database(database)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be one " * 100)


def spoil_a_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 512] = b"\xff" * 512
    path.write_bytes(content)


def age(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")


def leave_unfinished(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM alembic_version")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "damaged, or no database of MLflow"),
        (overwrite, "file is not a database"),
        (spoil_a_page, "damaged, or no database of MLflow"),
        (age, "made by another version of MLflow (schema 451aebb31d03, expected "),
        (leave_unfinished, "(schema unfinished, expected "),
    ],
)
def test_a_database_that_cannot_be_used_is_one_line_before_any_work(
    spoil: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fresh_database(tmp_path)
    use_workdir(str(tmp_path))
    spoil(tmp_path / "mlflow.db")
    with pytest.raises(TrackingError) as error:
        use_workdir(str(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}/mlflow.db: ")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_schema_is_the_one_that_mlflow_itself_expects(tmp_path: Path):
    from mlflow.store.db.utils import _get_latest_schema_revision

    from csc.tracking.database import _schema_version

    assert _schema_version() == _get_latest_schema_revision()


@pytest.mark.parametrize("move", [shutil.move, pytest.param(shutil.copytree, marks=pytest.mark.slow)])
def test_a_work_folder_predicts_where_it_was_moved_to(
    move: Callable[[Path, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before, after = tmp_path / "here", tmp_path / "there (2)"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(before))
    first = trained(tmp_path / "steps", 1)
    first.register()
    move(before, after)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    use_workdir(str(after))
    shutil.rmtree(before, ignore_errors=True)
    card = fetch_model(f"models:/{SCENARIO}-csc@task-01", tmp_path / "fetched") / "model.json"
    assert '"task": 1' in card.read_text()
    location = trained(tmp_path / "steps", 2).register(first)["model"]["location"]
    assert location.startswith((after / "mlflow-artifacts").as_uri())
