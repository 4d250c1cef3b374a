"""The SQLite database of a work folder: made whole or not at all, checked before work starts, moved with its folder."""

import contextlib
import os
import re
import sqlite3
from importlib.util import find_spec
from pathlib import Path

from csc.errors import TrackingError
from csc.storage import locked

__all__ = ["ARTIFACTS", "check_database", "follow_move", "make_database"]

ARTIFACTS = "mlflow-artifacts"  # the folder of models and files, next to the database
_HOLDS_LOCATIONS = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}


def make_database(path: Path) -> None:
    """Make a database with all tables unless it is there; a process that is killed in between leaves none.

    MLflow makes the tables step by step, and never repairs a database with only some of them. So they are made in
    another file, which then gets the name; it waits for the disk once, not after each of their thousand changes.
    Processes that start together wait for the first.
    """
    if _is_made(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    with locked(path.parent):
        if _is_made(path):
            return
        for left in path.parent.glob(f"{aside.name}*"):  # by a process that was killed, with SQLite's journal
            left.unlink()
        from mlflow.store.db import utils
        from sqlalchemy import create_engine, event

        engine = create_engine(f"sqlite:///{aside}")
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        utils._initialize_tables(engine)
        engine.dispose()
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)


def _is_made(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def check_database(path: Path) -> None:
    """Refuse a database that is damaged or of another version of MLflow; one that is not there yet is right."""
    if not _is_made(path):
        return
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            versions = {version for (version,) in connection.execute("SELECT version_num FROM alembic_version")}
    except sqlite3.Error as error:
        if "locked" in str(error):  # by a process that writes it
            return
        found = str(error)
    if found != "ok":
        raise TrackingError(
            f"{path}: damaged, or no database of MLflow ({' '.join(found.split())}); put a copy of it back, or move it "
            "away to start again without the runs it held"
        )
    expected = _schema_version()
    if expected is not None and versions != {expected}:
        raise TrackingError(
            f"{path}: made by another version of MLflow (schema {', '.join(versions) or 'unfinished'}, expected "
            f"{expected}); use that version, or copy the file and run 'mlflow db upgrade sqlite:///{path}'"
        )


def _schema_version() -> str | None:
    """The newest schema that the installed MLflow knows: the migration that no other one follows.

    Read from the files of the migrations: to import MLflow would take seconds, before every command.
    """
    package = find_spec("mlflow")
    if package is None or package.origin is None:
        return None
    texts = [file.read_text() for file in (Path(package.origin).parent / "store/db_migrations/versions").glob("*.py")]
    found = {name: _assigned(name, texts) for name in ("revision", "down_revision")}
    newest = found["revision"] - found["down_revision"]
    return newest.pop() if len(newest) == 1 else None


def _assigned(name: str, texts: list[str]) -> set[str]:
    pattern = re.compile(rf"^{name}\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
    return {match[1] for text in texts if (match := pattern.search(text))}


def follow_move(path: Path) -> None:
    """Where a work folder was moved or copied, let its database name the models and files next to it.

    MLflow writes absolute locations only, and would look for them, and write, where the folder was before.
    """
    here = path.absolute().parent / ARTIFACTS
    if not (_is_made(path) and here.is_dir()):
        return
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        known = connection.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall()
        for (before,) in known:
            if before == here.as_uri() or not (before.startswith("file:///") and before.endswith(f"/{ARTIFACTS}")):
                continue
            for table, column in _HOLDS_LOCATIONS.items():
                moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                connection.execute(moved, (here.as_uri(), len(before) + 1, len(before), before))
