"""finish: close what a scenario run left open in MLflow; let the aliases name the models of one that is complete."""

from csc.config import resolve
from csc.data.dataset import Dataset
from csc.errors import BadData, Unavailable
from csc.retry import with_retries
from csc.scenario import Scenario
from csc.tracking.names import model_name
from csc.tracking.queries import close_runs
from csc.tracking.registry import point_aliases
from csc.version import code_version

__all__ = ["close", "finish"]


def close(scenario: str, data: str, config: str, state: str, extended: str = "") -> bool:
    """Mark what is still open of a scenario run as failed or killed; return whether there was anything.

    A complete run of which every step was reused changes nothing by itself, yet whoever asks for it expects that
    `final` is its model. Aliases that another run has moved since are moved back, with a line for each.

    Args:
        scenario: name.
        data: folder or `s3://` prefix of the data set.
        config: settings as JSON.
        state: how the steps ended, in the words of Kubeflow Pipelines.
        extended: fingerprint of the model that the run extends, if it does.
    """
    try:
        fingerprint = Dataset.open(data).fingerprint
    except Unavailable:
        raise
    except BadData as error:
        print(f"nothing to close: no task has begun ({error})")
        return False
    settings = resolve(Scenario.parse(scenario).dataset, config)
    key = settings.run_key(scenario, fingerprint, code_version(), extended)
    status = "KILLED" if state.upper().startswith("CANCEL") else "FAILED"
    closed = close_runs([key], status)
    if closed:
        print(f"marked as {status}: {', '.join(closed)}")
    elif not state.upper().startswith(("CANCEL", "FAIL")):
        for line in point_aliases(model_name(scenario, settings.method), key).moved:
            print(f"alias {line}")
    return bool(closed)


@with_retries
def finish(scenario: str, data: str, config: str, state: str, extended: str = "") -> None:
    """The step; a command whose server has just failed calls `close`, which does not wait."""
    if not close(scenario, data, config, state, extended):
        print("nothing is left open")
