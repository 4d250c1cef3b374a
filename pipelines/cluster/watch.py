"""Watch a run on a cluster: one line for each change of its steps, in the words of a local run."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from csc.pipelines.cluster.steps import ENDED, FAILED, STARTING, RunSteps, elapsed, steps_of
from csc.pipelines.cluster.terminal import duration, printable
from csc.pipelines.cluster.titles import Spec

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from csc.pipelines.cluster.endpoint import Endpoint

__all__ = ["follow", "outcome", "unnamed_note"]

POLL_SECONDS = 5.0
MAX_FAILURES = 60  # looks in a row that may fail
_FINAL = (400, 401, 403, 404)  # answers that will not change by waiting


def follow(
    endpoint: "Endpoint",
    run_id: str,
    say: Callable[[str], None],
    progress: "Callable[[V2beta1Run, Spec], list[str]]" = lambda run, spec: [],
    pause: Callable[[float], None] = time.sleep,
) -> tuple["V2beta1Run", Spec, RunSteps]:
    """Say what changes until the run has ended; a server that goes away for a while is waited for.

    Args:
        endpoint: where the run is.
        run_id: of the run.
        say: takes one line for each change.
        progress: what is known of a run from elsewhere, in lines; asked for when the server no longer names steps.
        pause: waits between two looks.
    """
    run = _retry(pause, endpoint.run, run_id)
    spec = _retry(pause, endpoint.spec, run)
    shown: set[object] = set()

    def tell(line: str, mark: object) -> None:
        if mark not in shown:
            shown.add(mark)
            say(f"{datetime.now():%H:%M:%S}  {line}")

    while True:
        found = steps_of(run, spec)
        for step in found.steps:
            if step.state != STARTING:  # a driver takes seconds; of one that hangs 'csc status' tells
                tell(str(step), (step.key, step.state, step.tries))
        if not found.named:
            tell(unnamed_note(), "unnamed")
            for line in progress(run, spec):
                tell(line, line)
        if run.state in ENDED:
            return run, spec, found
        pause(POLL_SECONDS)
        run = _retry(pause, endpoint.run, run_id)


def _retry(pause: Callable[[float], None], look: Callable[[Any], Any], at: Any) -> Any:
    from csc.pipelines.cluster.endpoint import EndpointError

    for _ in range(MAX_FAILURES):
        try:
            return look(at)
        except EndpointError as error:
            if error.status in _FINAL:
                raise
        pause(POLL_SECONDS)
    return look(at)


def unnamed_note(found: RunSteps | None = None) -> str:
    """What it means that the server no longer names steps; with the steps, how many more have finished since."""
    more = f"; at least {found.unnamed} more have finished since" if found and found.unnamed else ""
    return f"Kubeflow no longer tells how the steps stand: the workflow has grown over 1 MiB{more}"


def outcome(run: "V2beta1Run", found: RunSteps) -> str:
    """One line about where a run stands, with what it failed at."""
    line = f"run {printable(run.state or 'PENDING').lower()}"
    if run.state in ENDED and (seconds := elapsed(run.created_at, run.finished_at)):
        line += f" after {duration(seconds)}"
    reason = printable(run.error.message or "") if run.error else ""
    at = f" at {found.failed.title}" if found.failed else ""
    return line + at + (f": {reason}" if reason and run.state in FAILED else "")
