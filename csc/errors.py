"""The errors a person may cause and must understand: one line that says what, where, and what would be right."""

import re

__all__ = [
    "BadConfig",
    "BadData",
    "BadModel",
    "BadScenario",
    "CscError",
    "HubUnavailable",
    "NotFinite",
    "StoreUnavailable",
    "Terminated",
    "TrackingError",
    "TrackingUnavailable",
    "Unavailable",
    "explained",
    "resumable_error",
]


class CscError(Exception):
    """Base of all errors that the command line prints as one line, with exit code 2.

    The text of a library in it may have several lines: they become one.
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


class BadScenario(CscError):
    """A scenario that does not exist or does not fit its data set."""


class BadConfig(CscError):
    """A setting with an unknown key, a wrong type or an impossible value."""


class BadData(CscError):
    """Annotations, images or a data set that cannot be used."""


class BadModel(CscError):
    """A model folder, weights file or registered model that cannot be used."""


class NotFinite(CscError):
    """Training whose loss or gradient is no longer a number."""


class TrackingError(CscError):
    """The tracking server or registry refused or did not answer."""


class Unavailable(CscError):
    """Something outside this process that does not answer or has too much to do, and may be back at the next try.

    A step is tried again after these and after no other error (`csc.retry`).
    """


class StoreUnavailable(Unavailable, BadData):
    """An object store that does not answer or answers only with errors of its own."""


class HubUnavailable(Unavailable, BadModel):
    """The hub of pretrained weights does not answer or answers only with errors of its own."""


class TrackingUnavailable(Unavailable, TrackingError):
    """A tracking server, or the store of its models, that does not answer or answers only with errors of its own."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, but from a program; what is finished is kept, and the same command resumes."""


def resumable_error(reason: object) -> CscError:
    """The error for work stopped by a store, a disk or a lost process: the same command resumes it."""
    kind = type(reason) if isinstance(reason, Unavailable) else CscError
    return kind(f"{reason}; what is finished is kept, the same command goes on from there")


def explained(error: Exception) -> str:
    """The text of an error; what msgspec found wrong is said in our words.

    >>> explained(ValueError("Object missing required field `seed` - at `$.run`"))
    "missing key 'seed' in run"
    >>> explained(ValueError("Expected `int`, got `str` - at `$.tasks[0].task`"))
    'expected int, got str in tasks[0].task'
    """
    what, _, path = str(error).partition(" - at `$")
    what = re.sub(r"^Object missing required field `(.*)`$", r"missing key '\1'", what)
    what = re.sub(r"^Object contains unknown field `(.*)`$", r"unknown key '\1'", what)
    what = what.replace("Expected", "expected").replace("`", "")
    inside = path.strip("`.")
    return f"{what} in {inside}" if inside else what
