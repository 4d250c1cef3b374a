"""A run on a cluster as the commands show it: its steps, what changes, why it failed, and what to type next."""

import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import datetime
from typing import Any

from csc.data.progress import duration
from csc.pipelines.cluster.answers import seconds_between
from csc.pipelines.cluster.endpoint import Endpoint, EndpointError
from csc.pipelines.cluster.logs import log_lines
from csc.pipelines.cluster.progress import progress_lines
from csc.pipelines.cluster.steps import ENDED, FAILED, STARTING, RunStatus, StepStatus, run_status
from csc.pipelines.profile import Profile
from csc.report.text import single_line

__all__ = ["RemoteRun", "outcome"]

POLL_SECONDS = 5.0
MAX_FAILURES = 60  # looks in a row that may fail
LAST_LINES = 15  # of the log of a step that failed
DEFAULT_NAMESPACE = "kubeflow"  # of the pods, where Kubeflow has one user
UNNAMED = "Kubeflow no longer tells how the steps stand: the workflow has grown over 1 MiB"
_FINAL = (400, 401, 403, 404)  # answers that will not change by waiting


class RemoteRun:
    """A run, the endpoint it is at, and the flags by which a person named that."""

    def __init__(self, run_id: str, endpoint: Endpoint, arguments: Namespace, profile: Profile) -> None:
        self.id = run_id
        self.endpoint = endpoint
        self._namespace = arguments.namespace or profile.cluster.namespace
        self.tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or profile.tracking.uri
        names = ("profile", "host", "token_env", "cookie_env", "namespace")
        given = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names}
        self._flags = [word for flag, value in given.items() if value for word in (flag, value)]

    def command(self, word: str) -> str:
        """A command for this run that works as it is, in the same folder and environment."""
        return shlex.join(["csc", word, self.id, *self._flags])

    def look(self) -> RunStatus:
        """How the run stands."""
        run = self.endpoint.run(self.id)
        return run_status(run, self.endpoint.spec(run))

    def log(self, status: RunStatus, step: StepStatus) -> list[str]:
        """The lines that a step has printed; if they cannot be had, the error names the command that prints them."""
        namespace = self._namespace or self.endpoint.namespace(status.run) or DEFAULT_NAMESPACE
        return log_lines(self.endpoint, status, step, namespace)

    def status(self) -> int:
        """Print the steps so far, what MLflow knows, and where the run stands; return the exit code."""
        status = self.look()
        print(single_line(status.run.display_name or self.id))
        for step in status.steps:
            print(step)
        if not status.named:
            more = f"; at least {status.unnamed} more have finished since" if status.unnamed else ""
            print(f"{UNNAMED}{more}")
        for line in progress_lines(status, self.tracking_uri):
            print(line)
        code = self._conclude(status)
        print(self.endpoint.page(self.id))
        return code

    def wait(self) -> int:
        """Print every change until the run has ended; return the exit code."""
        again = f"the run goes on: {self.command('status')}"
        try:
            status = self._follow()
        except KeyboardInterrupt:
            print(f"csc: no longer watching; {again}", file=sys.stderr)
            return 130
        except EndpointError as error:
            raise EndpointError(f"{error}; {again}", error.status) from None
        return self._conclude(status)

    def _follow(self) -> RunStatus:
        """Print every change until the run has ended; a server that goes away for a while is waited for."""
        run = _retry(self.endpoint.run, self.id)
        spec = _retry(self.endpoint.spec, run)
        shown: set[object] = set()

        def report(line: str, mark: object) -> None:
            if mark not in shown:
                shown.add(mark)
                print(f"{datetime.now():%H:%M:%S}  {line}", flush=True)

        while True:
            status = run_status(run, spec)
            for step in status.steps:
                if step.state != STARTING:  # a driver takes seconds; of one that hangs 'csc status' tells
                    report(str(step), (step.key, step.state, step.tries))
            if not status.named:
                report(UNNAMED, "unnamed")
                for line in progress_lines(status, self.tracking_uri):
                    report(line, line)
            if run.state in ENDED:
                return status
            time.sleep(POLL_SECONDS)
            run = _retry(self.endpoint.run, self.id)

    def _conclude(self, status: RunStatus) -> int:
        """Print where the run stands and, if it failed, at what and how that ended; return the exit code."""
        print(outcome(status), flush=True)
        failed = status.failed if status.run.state in ENDED else None
        if failed is not None:
            if failed.pod:
                print(f"pod         {failed.pod}")
            try:
                lines = self.log(status, failed)[-LAST_LINES:]
            except EndpointError as error:
                print(f"log         {error}")
            else:
                print(f"log         {self.command('logs')}, which ends in")
                print("\n".join(f"  {line}" for line in lines))
        return 1 if status.run.state in FAILED else 0


def outcome(status: RunStatus) -> str:
    """One line about where a run stands, with what it failed at."""
    run, failed = status.run, status.failed
    line = f"run {single_line(run.state or 'PENDING').lower()}"
    if run.state in ENDED and (seconds := seconds_between(run.created_at, run.finished_at)):
        line += f" after {duration(seconds)}"
    reason = single_line(run.error.message)
    at = f" at {failed.title}" if failed else ""
    return line + at + (f": {reason}" if reason and run.state in FAILED else "")


def _retry(look: Callable[[Any], Any], at: Any) -> Any:
    """The answer to a look, again and again while the server is away."""
    for _ in range(MAX_FAILURES):
        try:
            return look(at)
        except EndpointError as error:
            if error.status in _FINAL:
                raise
        time.sleep(POLL_SECONDS)
    return look(at)
