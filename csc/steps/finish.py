"""finish: close the runs of a scenario that ended early, so that none of them looks as if it were still running."""

from csc.config import resolve
from csc.data.dataset import Dataset
from csc.errors import BadData, Unavailable
from csc.retry import with_retries
from csc.scenario import Scenario
from csc.tracking.queries import close_runs
from csc.version import code_version

__all__ = ["close", "finish"]


def close(scenario: str, data: str, config: str, state: str, extended: str = "") -> None:
    """Mark what is still open of a scenario run as failed or killed; a run that was completed is left alone.

    Args:
        scenario: name.
        data: folder or `s3://` prefix of the data set.
        config: settings as JSON.
        state: how the steps ended, in the words of Kubeflow Pipelines; only `CANCELED` makes a difference.
        extended: fingerprint of the model that the run extends, if it does.
    """
    try:
        fingerprint = Dataset.open(data).fingerprint
    except Unavailable:
        raise
    except BadData as error:
        print(f"nothing to close: no task has begun ({error})")
        return
    made_from = (scenario, fingerprint, code_version(), *([extended] if extended else []))
    key = resolve(Scenario.parse(scenario).dataset, config).fingerprint(*made_from)
    status = "KILLED" if state.upper().startswith("CANCEL") else "FAILED"
    closed = close_runs([key], status)
    print(f"marked as {status}: {', '.join(closed)}" if closed else "nothing is left open")


finish = with_retries(close)  # the step; a command whose server has just failed calls `close`, which does not wait
