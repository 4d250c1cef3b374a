"""A run on a cluster as the commands see it: how to reach it, how it stands, why it failed, and what to type next."""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from csc.pipelines.cluster.steps import ENDED, FAILED, REUSED, RunSteps, Step, steps_of
from csc.pipelines.cluster.terminal import printable
from csc.pipelines.cluster.titles import Spec
from csc.pipelines.profile import Profile

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from csc.pipelines.cluster.endpoint import Endpoint
    from csc.pipelines.cluster.progress import Tracked

__all__ = ["RemoteRun", "endpoint_arguments", "open_endpoint"]

LAST_LINES = 15  # of the log of a step that failed
DEFAULT_NAMESPACE = "kubeflow"  # of the pods, where Kubeflow has one user


def endpoint_arguments(parser: ArgumentParser) -> None:
    """Declare how to reach a cluster."""
    parser.add_argument("--host", metavar="URL", default="", help="address of Kubeflow Pipelines")
    access = parser.add_mutually_exclusive_group()
    access.add_argument("--token-env", metavar="NAME", help="environment variable that holds a bearer token")
    access.add_argument("--cookie-env", metavar="NAME", help="environment variable that holds a cookie")


def open_endpoint(arguments: Namespace, profile: Profile) -> "Endpoint":
    """The cluster that the command line or the profile names."""
    from csc.pipelines.cluster.endpoint import Endpoint

    return Endpoint(arguments.host or profile.cluster.host, arguments.token_env, arguments.cookie_env)


class RemoteRun:
    """A run, the endpoint it is at, and the flags by which a person named that."""

    def __init__(self, run_id: str, endpoint: "Endpoint", arguments: Namespace, profile: Profile) -> None:
        self.id = run_id
        self.endpoint = endpoint
        self._namespace = arguments.namespace or profile.cluster.namespace
        self._tracking = os.environ.get("MLFLOW_TRACKING_URI") or profile.tracking.uri
        given = {
            "--profile": arguments.profile,
            "--host": arguments.host,
            "--token-env": arguments.token_env,
            "--cookie-env": arguments.cookie_env,
            "--namespace": arguments.namespace,
        }
        self._flags = [word for flag, value in given.items() if value for word in (flag, value)]

    def command(self, word: str) -> str:
        """A command for this run that works as it is, in the same folder and environment."""
        return shlex.join(["csc", word, self.id, *self._flags])

    def look(self) -> tuple["V2beta1Run", Spec, RunSteps]:
        """How the run stands."""
        run = self.endpoint.run(self.id)
        spec = self.endpoint.spec(run)
        return run, spec, steps_of(run, spec)

    def tracked(self, run: "V2beta1Run", spec: Spec) -> "Tracked":
        """What MLflow knows of it."""
        from csc.pipelines.cluster.progress import Tracked

        return Tracked(run, spec, self._tracking)

    def log(self, run: "V2beta1Run", spec: Spec, step: Step) -> list[str]:
        """The log of a step; if it cannot be had, the error names the command that prints it on the cluster."""
        from csc.pipelines.cluster.logs import NoLog, kubectl, log_lines

        namespace = self._namespace or self.endpoint.namespace(run) or DEFAULT_NAMESPACE
        try:
            return log_lines(self.endpoint, run, step, spec, namespace)
        except NoLog as error:
            if step.state == REUSED:
                raise
            raise NoLog(f"{error}; try: {kubectl(run, step, namespace)}", error.status) from None

    def status(self) -> int:
        """Print the steps so far, what MLflow knows, and where the run stands; return the exit code."""
        from csc.pipelines.cluster.watch import unnamed_note

        run, spec, found = self.look()
        print(printable(run.display_name or self.id))
        for step in found.steps:
            print(step)
        if not found.named:
            print(unnamed_note(found))
        for line in self.tracked(run, spec).lines():
            print(line)
        code = self._conclude(run, spec, found)
        print(self.endpoint.page(self.id))
        return code

    def wait(self) -> int:
        """Print every change until the run has ended; return the exit code."""
        from csc.pipelines.cluster.endpoint import EndpointError
        from csc.pipelines.cluster.watch import follow

        again = f"the run goes on: {self.command('status')}"
        try:
            run, spec, found = follow(
                self.endpoint,
                self.id,
                lambda line: print(line, flush=True),
                lambda run, spec: self.tracked(run, spec).lines(),
            )
        except KeyboardInterrupt:
            print(f"csc: no longer watching; {again}", file=sys.stderr)
            return 130
        except EndpointError as error:
            raise EndpointError(f"{error}; {again}", error.status) from None
        return self._conclude(run, spec, found)

    def _conclude(self, run: "V2beta1Run", spec: Spec, found: RunSteps) -> int:
        """Print where the run stands and, if it failed, at what and how that ended; return the exit code."""
        from csc.pipelines.cluster.logs import NoLog
        from csc.pipelines.cluster.watch import outcome

        print(outcome(run, found), flush=True)
        failed = found.failed if run.state in ENDED else None
        if failed is not None:
            if failed.pod:
                print(f"pod         {failed.pod}")
            try:
                lines = self.log(run, spec, failed)[-LAST_LINES:]
            except NoLog as error:
                print(f"log         {error}")
            else:
                print(f"log         {self.command('logs')}, which ends in")
                print("\n".join(f"  {line}" for line in lines))
        return 1 if run.state in FAILED else 0
