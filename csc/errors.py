"""The errors a person may cause and must understand: one line that says what, where, and what would be right."""

__all__ = ["BadConfig", "BadData", "BadModel", "BadScenario", "CscError", "TrackingError"]


class CscError(Exception):
    """Base of all errors that the command line prints as one line, with exit code 2."""


class BadScenario(CscError):
    """A scenario that does not exist or does not fit its data set."""


class BadConfig(CscError):
    """A setting with an unknown key, a wrong type or an impossible value."""


class BadData(CscError):
    """Annotations, images or a data set that cannot be used."""


class BadModel(CscError):
    """A model folder, weights file or registered model that cannot be used."""


class TrackingError(CscError):
    """The tracking server or registry refused or did not answer."""
