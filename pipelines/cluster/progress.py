"""What MLflow knows of a run on a cluster: its tasks, their epochs and results. A slow server is not waited for.

The scenario runs in MLflow are found by scenario, method, seed and settings, and by something having happened to them
since the run on the cluster began. Data and code are not compared: the newest one is shown.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from csc.config import resolve
from csc.config.schema import Config
from csc.distributed.process import environment
from csc.errors import CscError, TrackingError
from csc.pipelines.cluster.steps import RunStatus
from csc.pipelines.cluster.titles import loops
from csc.report.text import single_line
from csc.scenario import Scenario

if TYPE_CHECKING:
    from csc.tracking.queries import ScenarioRun, TaskProgress

__all__ = ["kill_tracked", "progress_lines", "scenarios_of"]

_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5  # of one request
_TOTAL_SECONDS = 20.0  # for all scenario runs of a study


def progress_lines(status: RunStatus, uri: str) -> list[str]:
    """How far every task has come, one line each; none without a uri, or if nothing answers there at once."""
    wanted = scenarios_of(status) if uri else []
    lines = []
    with contextlib.suppress(TrackingError, ImportError), _reached(uri) as deadline:
        for scenario, config in wanted:
            before = f"{scenario} {config.method} seed {config.seed} · " if len(wanted) > 1 else ""
            for _, tasks in _matching(status, scenario, config, deadline)[:1]:
                lines += [f"{f'MLflow · {before}task {task.task}':<24} {_progress(task, config)}" for task in tasks]
    return lines


def kill_tracked(status: RunStatus, uri: str) -> list[str] | None:
    """Mark what is open as killed; return the names of these runs, or none if the server does not answer."""
    wanted = scenarios_of(status) if uri else []
    if not wanted:
        return []
    closed = []
    with contextlib.suppress(TrackingError, ImportError), _reached(uri) as deadline:
        from csc.tracking.names import run_title
        from csc.tracking.queries import close_runs

        for scenario, config in wanted:
            title = run_title(scenario, config)
            keys = [run.tags["csc.run_key"] for run, _ in _matching(status, scenario, config, deadline)]
            names = map(single_line, close_runs(keys, "KILLED"))
            closed += [name if name == title else f"{title} {name}" for name in names]
        return closed
    return None


def scenarios_of(status: RunStatus) -> list[tuple[str, Config]]:
    """The scenarios that a run works on, with their settings: one, or those of a study's loops."""
    asked = [(name, settings) for name, items in loops(status.spec) for settings in items]
    if not asked:
        name = status.spec.pipeline_info.name.removeprefix("csc-")
        arguments = status.run.runtime_config.parameters or {}
        asked = [(name, str(arguments.get("config") or "{}"))]
    found = []
    for name, settings in asked:
        with contextlib.suppress(CscError, ValueError, TypeError, AttributeError, RecursionError):
            scenario = Scenario.parse(name)
            given = json.loads(settings)
            own = {key: given[key] for key in ("method", "seed") if key in given}
            # An older run has more settings than it reads.
            found.append((scenario.name, resolve(scenario.dataset, own, shared=given)))
    return found


def _matching(
    status: RunStatus, scenario: str, config: Config, deadline: float
) -> "list[tuple[ScenarioRun, list[TaskProgress]]]":
    from csc.tracking.queries import progress_since

    if time.monotonic() > deadline:
        return []
    since = status.run.created_at.timestamp() if status.run.created_at else time.time()
    wanted = {key: str(value) for key, value in config.decisive().items()}
    return [
        (run, tasks)
        for run, tasks in progress_since(scenario, config.method, config.seed, since)
        if all(run.params.get(key) == value for key, value in wanted.items())
    ]


@contextlib.contextmanager
def _reached(uri: str) -> Iterator[float]:
    """Let MLflow's client talk to a server, without its retries; gives the time at which to stop asking."""
    if not uri or not _answers(uri):
        raise TrackingError("nothing answers")
    from csc.tracking.calls import RETRIES

    seconds = str(_ANSWER_SECONDS)
    with environment({"MLFLOW_TRACKING_URI": uri, RETRIES: "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": seconds}):
        yield time.monotonic() + _TOTAL_SECONDS


def _progress(task: "TaskProgress", config: Config) -> str:
    if "mAP" in task.metrics:
        return f"mAP {task.metrics['mAP']:.1f}"
    if not task.epoch:
        return "begun" if task.status == "RUNNING" else task.status.lower()
    state = "" if task.status == "RUNNING" else f"{task.status.lower()} after "
    return f"{state}epoch {task.epoch} of {config.train.epochs}, loss {task.metrics['train/loss']:.4f}"


def _answers(uri: str) -> bool:
    """Whether somebody takes connections at an address at once; files and databases always do."""
    try:
        address = urlsplit(uri)
        if address.scheme not in ("http", "https"):
            return True
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=_CONNECT_SECONDS):
            return True
    except (OSError, ValueError):
        return False
