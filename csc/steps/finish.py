"""finish: close what a scenario run left open in MLflow; let the aliases name the models of one that is complete."""

from csc.retry import with_retries
from csc.tracking.tracked_run import close_run

__all__ = ["finish"]


@with_retries
def finish(scenario: str, data: str, config_json: str, state: str, extended: str = "") -> None:
    """Close what a run has left open in MLflow; commands call `close_run`, which does not try again."""
    if not close_run(scenario, data, config_json, state, extended):
        print("nothing is left open")
