"""Calls to a tracking server that may fail: create things only once, and say in one line what went wrong.

MLflow itself waits for a server that is away: MLFLOW_HTTP_REQUEST_MAX_RETRIES tries (7 if not set) with growing
pauses, about four minutes in all.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from csc.distributed.process import environment
from csc.errors import CscError, TrackingError, TrackingUnavailable
from csc.tracking.server import artifact_location, connect, quiet, tracking_uri, without_secrets

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = ["connected", "find_or_create", "find_or_create_experiment", "translate_errors"]

TRIES = 3  # to create something, each after looking whether it is there
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"

# After these errors the thing may have been created all the same, or the next try may create it.
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


@contextlib.contextmanager
def connected() -> Iterator["MlflowClient"]:
    """A client for the tracking server; errors are translated."""
    with translate_errors():
        yield connect()


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Turn whatever MLflow raises into one clear line."""
    quiet()
    try:
        yield
    except Exception as error:
        # Databases and buckets that clients use themselves have errors of their own. An answer of another form than
        # MLflow expects is whatever error its code then runs into.
        theirs = type(error).__module__.partition(".")[0] in ("mlflow", "sqlalchemy", "botocore", "boto3")
        if theirs or isinstance(error, OSError):
            kind, reason = _meaning(str(error))
        elif _in_mlflow(error) and not isinstance(error, CscError):
            kind, reason = TrackingError, f"gives an answer that its client cannot read ({_short(error)})"
        else:
            raise
        raise kind(f"MLflow at {without_secrets(tracking_uri())} {reason}") from None


def _in_mlflow(error: Exception) -> bool:
    """Whether MLflow's code was at work."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("mlflow.") for frame, _ in frames)


def _meaning(message: str) -> tuple[type[TrackingError], str]:
    """The error that a message of MLflow stands for, which may pass or not, and the reason in one line."""
    for pattern, meaning in _AWAY.items():
        if found := re.search(pattern, message):
            return TrackingUnavailable, meaning.format(*found.groups()) + _REMEDY
    for pattern, meaning in _REFUSED.items():
        if re.search(pattern, message):
            return TrackingError, meaning
    return TrackingError, f"says: {_short(message)}"


def _short(message: object) -> str:
    return without_secrets(" ".join(str(message).split()))[:300]


def find_or_create(
    find: Callable[[], T | None], create: Callable[[], T], settle: Callable[[T, T], object] | None = None
) -> T:
    """Return what `find` finds or else what `create` creates; there is one of it in the end, even if answers get lost.

    MLflow repeats a request that got no answer; repeated, a creation makes a second run, model or version. So a
    creation is sent once, and after a failure we look before trying again. Looking waits for a server that is away.
    The same run elsewhere may create it at the same time: then `settle` is given ours and the first, and removes ours.
    """
    for left in reversed(range(TRIES)):
        if (found := find()) is not None:
            return found
        try:
            with environment({RETRIES: "0"}):  # MLflow reads it for each request
                made = create()
            if settle is None or (first := find()) is None:
                return made
            settle(made, first)
            return first
        except Exception as error:
            if not left or getattr(error, "error_code", "") not in _UNSURE:
                raise
    raise AssertionError("the last try returns or raises")


def find_or_create_experiment(client: "MlflowClient", name: str, tags: Mapping[str, str] = {}) -> str:
    """The id of the experiment of this name."""
    kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI shows training runs, not traces

    def find() -> str | None:
        found = client.get_experiment_by_name(name)
        return str(found.experiment_id) if found is not None else None

    return find_or_create(find, lambda: str(client.create_experiment(name, artifact_location(), {**kind, **tags})))
