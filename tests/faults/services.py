"""Servers that refuse, hang, cut off uploads, answer with errors, and come back; and two runs that share one."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from csc import storage
from csc.data.ingest.digits import ingest_digits
from csc.errors import CscError
from tests.faults.commands import SCENARIO, SMALL, Lost, Workspace
from tests.faults.judge import judge
from tests.faults.lab import Lab
from tests.faults.proxy import MODES, proxied

if TYPE_CHECKING:
    from tests.mlflow_server import Servers

# As a profile sets it for a cluster, with shorter pauses.
RETRY_SETTINGS = {
    "CSC_RETRY_TIMES": "5",
    "CSC_RETRY_WAIT": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
}


def disturb_services(lab: Lab, rng: Random) -> None:
    """Every run goes through a proxy that spoils bursts of its requests, to the tracking server or to the store."""
    servers = lab.start_servers()
    undisturbed = on_servers_undisturbed(lab, servers)
    for number, (service, mode) in enumerate((s, m) for s in ("MLflow", "store") for m in MODES):
        if not lab.chosen([f"{service}-{mode}"]):
            continue
        target = servers.tracking.uri if service == "MLflow" else servers.store.endpoint
        with proxied(target, mode, rng) as (address, bursts):
            through = {"MLFLOW_TRACKING_URI" if service == "MLflow" else "AWS_ENDPOINT_URL_S3": address}
            data = _data(servers, f"faults-{number}", address) if service == "store" else ""  # uploaded through it, too
            workspace = on_servers(servers, lab.folder / f"{number}", number, through, data)
            workspace.finish(tries=4)
        lab.tried(f"{service} {mode}")
        if not bursts.spoilt:
            raise Lost(f"{service} {mode}: no request was spoilt")
        workspace.variables = {**workspace.variables, "MLFLOW_TRACKING_URI": servers.tracking.uri}
        judge(workspace, undisturbed)
        lab.survived()


def two_runs(lab: Lab, rng: Random) -> None:
    """Two runs at once on one server: different ones, and the same one from two work folders."""
    servers = lab.start_servers()
    undisturbed = on_servers_undisturbed(lab, servers)
    for kind, numbers in (("different", (20, 21)), ("the same", (22, 22))):
        workspaces = [
            on_servers(servers, lab.folder / f"{kind} {index}", number, {}) for index, number in enumerate(numbers)
        ]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(workspaces[0].finish, tries=3)
            time.sleep(rng.uniform(0, 3))
            for running in (pool.submit(workspaces[1].finish, tries=3), first):
                running.result()
        lab.tried(f"two runs at once, {kind}")
        if kind == "different":  # only one of them can have the aliases, whoever was last
            final = [judged(workspace, {**undisturbed, "aliases": None}) for workspace in workspaces]
            if sorted(final) != [False, True]:
                raise Lost(f"the aliases name models of both runs or of none: {final}")
        else:
            for workspace in workspaces:
                judge(workspace, undisturbed)
        lab.survived()


def judged(workspace: Workspace, undisturbed: dict[str, Any]) -> bool:
    """Judge a run but for its aliases; return whether they name its models."""
    from tests.faults.judge import facts

    aliases = facts(workspace)["aliases"]
    judge(workspace, {**undisturbed, "aliases": aliases})
    return aliases == {"task-01": 1, "task-02": 2, "final": 2}


def on_servers_undisturbed(lab: Lab, servers: "Servers") -> dict[str, Any]:
    return lab.undisturbed("servers", lambda: on_servers(servers, lab.shared / "servers", 99, {}))


def on_servers(servers: "Servers", folder: Path, number: int, through: dict[str, str], data: str = "") -> Workspace:
    """A run with nothing of value on this machine. The number makes it a run of its own, with the same results.

    It is a limit of the gradient that none ever comes to.
    """
    variables = {**servers.store.environment(), **RETRY_SETTINGS, "MLFLOW_TRACKING_URI": servers.tracking.uri}
    variables |= {"CSC_CACHE": str(folder / "cache"), **through}
    words = ("run", SCENARIO, "--data", data or _data(servers, "faults"), "--workdir", folder / "work")
    return Workspace(folder, words, (*SMALL, f"train.clip={1_000_000 + number}"), variables, forked=bool(through))


def _data(servers: "Servers", name: str, endpoint: str = "") -> str:
    """The small data set, in the store; through a proxy, as often as it takes."""
    address = f"s3://{servers.store.bucket}/{name}/digits"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in servers.store.environment().items():
            patch.setenv(variable, value)
        if endpoint:
            patch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        storage.s3._client.cache_clear()
        for left in reversed(range(5)):
            try:
                ingest_digits(address, train=120, test=40, size=32)
                break
            except CscError:
                if not left:
                    raise
        storage.s3._client.cache_clear()
    return address
