"""Talking to a tracking server: wait for it, make things once, and say in one line what went wrong.

A server that is away is waited for with MLflow's own patience: MLFLOW_HTTP_REQUEST_MAX_RETRIES tries (7 if not set)
with growing pauses, about four minutes in all.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from csc.errors import TrackingError, TrackingUnavailable

__all__ = ["at_second_try", "once", "one_line", "quiet", "tracking_uri", "without_secrets"]

TRIES = 3  # to make something, each after looking whether it is there
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"

# After these a thing may have been made all the same, or may be made by the next try.
_UNSURE = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "RESOURCE_ALREADY_EXISTS")

# What MLflow says when it cannot talk to a server, or a client to the bucket of its models, and what it means for the
# person who reads it. These may pass.
_AWAY = {
    r"too many (\d+) error responses": "answers only with errors ({0}); its log says why",
    r"Connection refused": "does not answer (connection refused)",
    r"Failed to resolve|Name or service not known|nodename nor servname": "does not answer (no such host)",
    r"timed out|timeout exception": "does not answer (timed out)",
    r"Connection aborted|Connection reset|Remote end closed|IncompleteRead": "does not answer (the connection broke)",
    r"\((\w+)\) when calling the \w+ operation \(reached max retries": (
        "keeps its models in an object store that answers only with errors ({0})"
    ),
    r"(on|to|from) (the )?endpoint URL": "keeps its models in an object store that does not answer",
}
_REMEDY = "; check MLFLOW_TRACKING_URI and the server, then repeat the command: nothing finished is lost"

# These do not.
_REFUSED = {
    r"Invalid Host header": "refuses to be called by this name; add it to the server's --allowed-hosts",
    r"error code 401 |not authenticated": (
        "does not let us in; check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    ),
}

T = TypeVar("T")


def tracking_uri() -> str:
    """Where runs go: `MLFLOW_TRACKING_URI`, or a database in the present folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').absolute()}"


def quiet() -> None:
    """Keep MLflow from calling home and from drawing progress bars into logs; it looks at this when imported."""
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # that it made tables is no news
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn whatever MLflow raises into one clear line."""
    quiet()
    try:
        yield
    except Exception as error:
        # Databases and buckets that clients use themselves have errors of their own.
        theirs = type(error).__module__.partition(".")[0] in ("mlflow", "sqlalchemy", "botocore", "boto3")
        if not (theirs or isinstance(error, OSError)):
            raise
        kind, reason = _translate(str(error))
        raise kind(f"MLflow at {without_secrets(tracking_uri())} {reason}") from None


def _translate(message: str) -> tuple[type[TrackingError], str]:
    """What MLflow's message comes to: whether it may pass, and why in one line."""
    for pattern, meaning in _AWAY.items():
        if found := re.search(pattern, message):
            return TrackingUnavailable, meaning.format(*found.groups()) + _REMEDY
    for pattern, meaning in _REFUSED.items():
        if re.search(pattern, message):
            return TrackingError, meaning
    return TrackingError, f"says: {without_secrets(' '.join(message.split()))[:300]}"


def without_secrets(text: str) -> str:
    """Text without what only the owner of a server should see."""
    names = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
    login = tracking_uri().partition("://")[2].rpartition("@")[0]
    for secret in (login, *(os.environ.get(name, "") for name in names)):
        text = text.replace(f"{secret}@", "").replace(secret, "***") if secret else text
    return re.sub(r"://[^/@\s]*@", "://", text)


def once(find: Callable[[], T | None], make: Callable[[], T], *, looked: bool = False) -> T:
    """Find a thing, or make it, so that there is one whatever becomes of the answers on their way.

    MLflow repeats a request that got no answer; repeated, a creation makes a second run, model or version. So a
    creation is sent once, and after a failure we look before trying again. Looking waits for a server that is away.

    Args:
        find: the thing if it is there.
        make: makes it.
        looked: whether it is known already that it is not there.
    """
    for left in reversed(range(TRIES)):
        if not looked and (found := find()) is not None:
            return found
        looked = False
        try:
            with _sent_once():
                return make()
        except Exception as error:
            if not left or getattr(error, "error_code", "") not in _UNSURE:
                raise
    raise AssertionError("the last try returns or raises")


def at_second_try(call: Callable[[], None]) -> None:
    """Make a call that may collide with the same call of another run; repeated, it finds what the other has made."""
    try:
        call()
    except Exception as error:
        if getattr(error, "error_code", "") != "BAD_REQUEST":
            raise
        call()


@contextlib.contextmanager
def _sent_once() -> Iterator[None]:
    """Keep MLflow from repeating requests by itself; it looks at the environment for each of them."""
    patience = os.environ.get(RETRIES)
    os.environ[RETRIES] = "0"
    try:
        yield
    finally:
        if patience is None:
            del os.environ[RETRIES]
        else:
            os.environ[RETRIES] = patience
