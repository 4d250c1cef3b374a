"""What MLflow knows of a run on a cluster: its tasks, their epochs and results. A slow server is not waited for."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from csc.config import resolve
from csc.config.schema import EXECUTION_ONLY, Config
from csc.errors import CscError, TrackingError
from csc.pipelines.cluster.titles import Spec, loops
from csc.scenario import Scenario

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from csc.tracking.queries import ScenarioRun, TaskProgress

__all__ = ["Tracked"]

_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5  # of one request
_TOTAL_SECONDS = 20.0  # for all scenario runs of a study


class Tracked:
    """The scenario runs in MLflow that a run of Kubeflow Pipelines works on.

    They are found by scenario, method, seed and settings, and by something having happened to them since the run began.
    Data and code are not compared: the newest one is shown.
    """

    def __init__(self, run: "V2beta1Run", spec: Spec, uri: str) -> None:
        """Prepare to look at the tracking server with this uri, if it is not empty; nothing is sent yet."""
        self._uri = uri
        self._since = run.created_at.timestamp() if run.created_at else time.time()
        self._wanted = list(_scenarios(run, spec)) if uri else []
        self._end = 0.0

    def lines(self) -> list[str]:
        """How far every task has come, one line each; none if the server does not answer at once."""
        found = []
        with contextlib.suppress(TrackingError, ImportError), self._reached() as reached:
            for scenario, config in self._wanted if reached else ():
                matching = self._matching(scenario, config)
                before = f"{scenario} {config.method} seed {config.seed} · " if len(self._wanted) > 1 else ""
                for task in matching[0][1] if matching else ():
                    found.append(f"{f'MLflow · {before}task {task.task}':<24} {_progress(task, config)}")
        return found

    def kill(self) -> list[str] | None:
        """Mark what is open as killed; return the names of these runs, or none if the server does not answer."""
        closed: list[str] = []
        with contextlib.suppress(TrackingError, ImportError), self._reached() as reached:
            for scenario, config in self._wanted if reached else ():
                from csc.tracking.queries import close_runs

                title = f"{scenario} {config.method} seed {config.seed}"
                runs = [run for run, _ in self._matching(scenario, config)]
                names = close_runs([run.tags["csc.run_key"] for run in runs], "KILLED")
                closed += [name if name == title else f"{title} {name}" for name in names]
            if reached or not self._wanted:
                return closed
        return None

    def _matching(self, scenario: str, config: Config) -> "list[tuple[ScenarioRun, list[TaskProgress]]]":
        from csc.tracking.queries import progress_since

        if time.monotonic() > self._end:
            return []
        who = set(EXECUTION_ONLY)
        wanted = {key: str(value) for key, value in config.flat().items() if key not in who}
        return [
            (run, tasks)
            for run, tasks in progress_since(scenario, config.method, config.seed, self._since)
            if all(run.params.get(key) == value for key, value in wanted.items())
        ]

    @contextlib.contextmanager
    def _reached(self) -> Iterator[bool]:
        """Let MLflow's client talk to the server, without its retries; false if nothing answers there."""
        if not self._wanted or not _answers(self._uri):
            yield False
            return
        self._end = time.monotonic() + _TOTAL_SECONDS
        names = ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(zip(names, (self._uri, "0", str(_ANSWER_SECONDS)), strict=True))
        try:
            yield True
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _scenarios(run: "V2beta1Run", spec: Spec) -> Iterator[tuple[str, Config]]:
    """The scenarios that a run works on, with their settings: one, or those of a study's loops."""
    arguments = (run.runtime_config.parameters if run.runtime_config else None) or {}
    asked = [(name, settings) for name, items in loops(spec) for settings in items]
    if not asked:
        name = str(spec.get("pipelineInfo", {}).get("name", "")).removeprefix("csc-")
        asked = [(name, str(arguments.get("config") or "{}"))]
    for name, settings in asked:
        with contextlib.suppress(CscError, ValueError, TypeError):
            scenario = Scenario.parse(name)
            given = json.loads(settings)
            own = {key: given[key] for key in ("method", "seed") if key in given}
            yield scenario.name, resolve(scenario.dataset, own, shared=given)  # an older run has more than it reads


def _progress(task: "TaskProgress", config: Config) -> str:
    if "mAP" in task.metrics:
        return f"mAP {task.metrics['mAP']:.1f}"
    if not task.epoch:
        return "begun" if task.status == "RUNNING" else task.status.lower()
    state = "" if task.status == "RUNNING" else f"{task.status.lower()} after "
    return f"{state}epoch {task.epoch} of {config.train.epochs}, loss {task.metrics['train/loss']:.4f}"


def _answers(uri: str) -> bool:
    """Whether somebody takes connections at an address at once; files and databases always do."""
    address = urlsplit(uri)
    if address.scheme not in ("http", "https"):
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=_CONNECT_SECONDS):
            return True
    except (OSError, ValueError):
        return False
