"""The commands of `csc` about a run on a Kubeflow cluster: status, logs, stop and retry."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from csc.cli.command import Command
from csc.pipelines.cluster.steps import ENDED, FAILED
from csc.pipelines.profile import SHIPPED, Profile, read_profile
from csc.report.text import single_line

if TYPE_CHECKING:
    from csc.pipelines.cluster.endpoint import Endpoint
    from csc.pipelines.cluster.run import RemoteRun

__all__ = ["LOGS", "RETRY", "STATUS", "STOP", "endpoint_arguments", "open_endpoint"]

_AGAIN = "submit it again with the command that started it: finished steps are reused"


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


def _arguments(parser: ArgumentParser) -> None:
    """Declare which run, and how to reach its cluster."""
    parser.add_argument("run", help="id of a run, or the address of its page")
    parser.add_argument("--profile", help=f"YAML file, or one of {', '.join(SHIPPED)}, that names the cluster")
    endpoint_arguments(parser)
    parser.add_argument(
        "--namespace", help="where the pods of the run are (default: the profile's, or as Kubeflow says)"
    )


def _wait_argument(parser: ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument("--wait", action="store_true", help="tell every change until the run has ended")


def _logs_arguments(parser: ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument(
        "step", nargs="?", help="such as ingest or 2/train (default: the one that failed, else the last)"
    )


def _remote(arguments: Namespace) -> "RemoteRun":
    from csc.pipelines.cluster.run import RemoteRun

    profile = read_profile(arguments.profile) if arguments.profile else Profile()
    run_id = arguments.run.rstrip("/").rpartition("/")[2]
    return RemoteRun(run_id, open_endpoint(arguments, profile), arguments, profile)


def _status(arguments: Namespace) -> int:
    remote = _remote(arguments)
    return remote.wait() if arguments.wait else remote.status()


def _logs(arguments: Namespace) -> int:
    from csc.pipelines.cluster.logs import choose_step

    remote = _remote(arguments)
    status = remote.look()
    print("\n".join(remote.log(status, choose_step(status, arguments.step))))
    return 0


def _stop(arguments: Namespace) -> int:
    from csc.pipelines.cluster.progress import kill_tracked
    from csc.pipelines.cluster.run import outcome

    remote = _remote(arguments)
    status = remote.look()
    if status.run.state in ENDED:
        print(f"nothing to stop: {outcome(status)}")
    else:
        remote.endpoint.terminate(remote.id)
        print("the run is being stopped; its pods end within their grace period")
    killed = kill_tracked(status, remote.tracking_uri)
    if killed is None:
        print("MLflow      does not answer: what this run has open there stays open")
    elif killed:
        print(f"MLflow      marked as killed: {', '.join(killed)}")
    print(f"status      {remote.command('status')}")
    return 0


def _retry(arguments: Namespace) -> int:
    from csc.pipelines.cluster.endpoint import EndpointError

    remote = _remote(arguments)
    status = remote.look()
    where = f"{remote.endpoint.host}: run {remote.id}"
    if status.run.state not in FAILED:
        state = single_line(status.run.state or "PENDING").lower()
        raise EndpointError(f"{where} is {state}; only a run that failed can be tried again")
    if not status.named:
        raise EndpointError(f"{where}: its workflow has grown over 1 MiB, which Kubeflow cannot write back; {_AGAIN}")
    try:
        remote.endpoint.retry(remote.id)
    except EndpointError as error:
        if error.status < 400 or error.status in (401, 403, 404):
            raise
        raise EndpointError(f"{error}; {_AGAIN}", error.status) from None
    print("the failed steps are tried again")
    if arguments.wait:
        return remote.wait()
    print(f"status      {remote.command('status')}")
    return 0


STATUS = Command("tell how a run on a Kubeflow cluster stands", _status, _wait_argument)
LOGS = Command("print what a step of a run on a Kubeflow cluster has printed", _logs, _logs_arguments)
STOP = Command("stop a run on a Kubeflow cluster", _stop, _arguments)
RETRY = Command("try the failed steps of a run on a Kubeflow cluster again", _retry, _wait_argument)
