"""The tracking server: its address, a client for it, and what of it must never be printed."""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from csc.errors import TrackingError
from csc.tracking.database import ARTIFACTS, check_database, follow_move, make_database

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = [
    "artifact_location",
    "check_store",
    "connect",
    "database_of",
    "nothing_tracked",
    "quiet",
    "tracking_uri",
    "without_secrets",
]

_SQLITE = "sqlite:///"


def tracking_uri() -> str:
    """Where runs go: `MLFLOW_TRACKING_URI`, or a database in the present folder if that is not set."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is not None and not uri.strip():  # a mistake: MLflow would take it for a database in the present folder
        raise TrackingError(
            "MLFLOW_TRACKING_URI is empty; set it to the address of a tracking server, for instance http://mlflow:5000"
        )
    try:
        urlsplit(uri or "").port  # noqa: B018  # both say what no address can be
    except ValueError:  # it may hold a password, so that it is not repeated
        raise TrackingError(
            "MLFLOW_TRACKING_URI is no address; set it to that of a tracking server, for instance http://mlflow:5000"
        ) from None
    return uri or f"{_SQLITE}{Path('mlflow.db').absolute()}"


def database_of(uri: str) -> Path | None:
    """The file of an SQLite database, from its address; none for a server."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def without_secrets(text: str) -> str:
    """Text without what only the owner of a server should see."""
    names = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
    uri = tracking_uri()
    # Only an address with a host has a login; the path of a database may have an @ of its own.
    login = uri.partition("://")[2].rpartition("@")[0] if urlsplit(uri).netloc else ""
    for secret in (login, *(os.environ.get(name, "") for name in names)):
        text = text.replace(f"{secret}@", "").replace(secret, "***") if secret else text
    return re.sub(r"://[^/@\s]*@", "://", text)


def quiet() -> None:
    """Keep MLflow from sending telemetry and from drawing progress bars into logs; it reads this when imported."""
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it reports every table that it makes
    logging.getLogger("mlflow.exceptions").setLevel(logging.ERROR)  # it repeats what servers say, as they say it
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def connect() -> "MlflowClient":
    """A client for the tracking server; a database that is not there yet is made."""
    quiet()
    if (database := database_of(tracking_uri())) is not None:
        make_database(database)
    import mlflow

    mlflow.set_tracking_uri(tracking_uri())  # some calls of the client look there, not at their own address
    return mlflow.MlflowClient(tracking_uri())


def check_store() -> None:
    """Before work starts: refuse a database that could not be used, and put one right whose folder was moved."""
    if (database := database_of(tracking_uri())) is not None:
        check_database(database)
        follow_move(database)


def nothing_tracked() -> bool:
    """Whether the database does not exist yet; a client that looked into it would create it."""
    database = database_of(tracking_uri())
    return database is not None and not database.is_file()


def artifact_location() -> str | None:
    """Where models go: next to an SQLite database; otherwise none, for the server's own choice."""
    database = database_of(tracking_uri())
    return None if database is None else (database.absolute().parent / ARTIFACTS).as_uri()
