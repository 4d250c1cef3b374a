"""The tracking server: its address, a client for it, and what of it must never be printed."""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from csc.errors import TrackingError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = ["artifact_location", "connect", "nothing_tracked", "quiet", "tracking_uri", "without_secrets"]

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


def without_secrets(text: str) -> str:
    """Text without what only the owner of a server should see."""
    names = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
    login = tracking_uri().partition("://")[2].rpartition("@")[0]
    for secret in (login, *(os.environ.get(name, "") for name in names)):
        text = text.replace(f"{secret}@", "").replace(secret, "***") if secret else text
    return re.sub(r"://[^/@\s]*@", "://", text)


def quiet() -> None:
    """Keep MLflow from sending telemetry and from drawing progress bars into logs; it reads this when imported."""
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it reports every table that it makes
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def connect() -> "MlflowClient":
    """A client for the tracking server."""
    quiet()
    import mlflow

    mlflow.set_tracking_uri(tracking_uri())  # some calls of the client look there, not at their own address
    return mlflow.MlflowClient(tracking_uri())


def nothing_tracked() -> bool:
    """Whether the database does not exist yet; a client that looked into it would create it."""
    database = _database()
    return database is not None and not database.is_file()


def artifact_location() -> str | None:
    """Where models go: next to an SQLite database; otherwise none, for the server's own choice."""
    database = _database()
    return None if database is None else (database.absolute().parent / "mlflow-artifacts").as_uri()


def _database() -> Path | None:
    """The file of an SQLite database; none for a server."""
    uri = tracking_uri()
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None
