"""A scenario run, found by what a person calls it, with its settings and the results of its last finished task.

And the end of one that stopped early: `close_run`.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from csc.artifacts import RegisteredTask, RunResults
from csc.config import Config, methods, resolve
from csc.config.schema import EXECUTION_ONLY
from csc.config.tree import nested
from csc.data.dataset import Dataset
from csc.errors import BadData, CscError, TrackingError, Unavailable
from csc.scenario import Scenario
from csc.tracking.calls import connected
from csc.tracking.names import changed_settings
from csc.tracking.queries import FINISHED, NEWEST, close_runs, search_runs, tag_filter, task_of
from csc.tracking.registry import load_registered_task, model_names, point_aliases
from csc.tracking.versions import Address
from csc.version import code_version

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

__all__ = ["TrackedRun", "close_run", "find_run", "finished_tasks", "max_entropy_pair", "results_of"]

_BETA = "max_entropy.beta"


@dataclass(frozen=True)
class TrackedRun:
    """What the tracking server knows of a scenario run."""

    run_id: str  # of its run in MLflow
    name: str  # of that run
    status: str  # RUNNING, FINISHED, FAILED or KILLED
    started: int  # milliseconds since 1970
    scenario: str
    settings: dict[str, str]  # by their dotted keys
    registered_task: RegisteredTask | None  # the last finished one, with the results up to it; none before the first

    @property
    def config(self) -> Config:
        """The settings, checked."""
        return resolve(Scenario.parse(self.scenario).dataset, nested(self.settings))

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from those that the method has on the data set anyway."""
        return changed_settings(self.scenario, self.config)


def find_run(words: str = "") -> TrackedRun:
    """The run that words mean: its id or name, a registered model, or the newest of a scenario; none for the newest."""
    with connected() as client:
        run = _run_of_model(client, words) if words.startswith("models:/") else _run(client, words)
        if run is None:
            named = f"run '{words}'" if words else "run"
            raise TrackingError(
                f"no {named} in the tracking store; give the id or the name of a run, a scenario, or models:/NAME"
            )
        return _tracked(client, run)


def _tracked(client: "MlflowClient", run: "Run") -> TrackedRun:
    if missing := {"csc.run_key", "csc.scenario", "csc.method"} - run.data.tags.keys():
        raise TrackingError(f"run {run.info.run_id}: no tag {min(missing)}; not a run of this project, or changed")
    done = _finished_tasks(client, run.data.tags["csc.run_key"])
    last = load_registered_task(client, done[max(done)].info.run_id) if done else None
    settings = {key: value for key, value in run.data.params.items() if key not in ("scenario", "code_version")}
    info, scenario = run.info, run.data.tags["csc.scenario"]
    return TrackedRun(info.run_id, info.run_name, info.status, info.start_time, scenario, settings, last)


@functools.cache
def results_of(run_id: str) -> RunResults | None:
    """The results of a finished scenario run; none of one whose version kept them in another form."""
    with contextlib.suppress(CscError):
        last = find_run(run_id).registered_task
        return None if last is None else last.run
    return None


def max_entropy_pair(run_id: str) -> dict[str, RunResults]:
    """The results of a scenario run and of another that differs from it only in having no max-entropy, or in having it.

    The captions are the keys, the one without max-entropy comes first; empty if there is no such other run.
    """
    with connected() as client:
        own = client.get_run(run_id)
        same = {key: own.data.tags[key] for key in ("csc.role", "csc.scenario", "csc.method", "csc.seed", "csc.data")}
        for other in search_runs(client, tag_filter(same), FINISHED, order_by=NEWEST):
            pair = {float(run.data.params.get(_BETA, 0)): run for run in (own, other)}
            if len(pair) == 2 and 0 in pair and _params_without_beta(own) == _params_without_beta(other):
                names = {0.0: "without max-entropy", max(pair): f"with max-entropy, β = {max(pair):g}"}
                tasks = {name: _tracked(client, pair[beta]).registered_task for beta, name in names.items()}
                found = {name: task.run for name, task in tasks.items() if task is not None}
                return found if len(found) == 2 else {}
    return {}


def _params_without_beta(run: "Run") -> dict[str, str]:
    return {key: value for key, value in run.data.params.items() if key not in (_BETA, *EXECUTION_ONLY)}


def finished_tasks(key: str) -> dict[int, float]:
    """The mAP of each finished task of a scenario run, by its key; see `csc.tracking.runs.run_key`."""
    with connected() as client:
        return {task: run.data.metrics["mAP"] for task, run in _finished_tasks(client, key).items()}


def _finished_tasks(client: "MlflowClient", key: str) -> "dict[int, Run]":
    found = search_runs(client, tag_filter({"csc.role": "task", "csc.run_key": key}), FINISHED)
    return {task_of(run.data.tags): run for run in found if "mAP" in run.data.metrics}


def _run(client: "MlflowClient", words: str) -> "Run | None":
    """The run with this id or name, or the newest of this scenario or registered model."""
    if "'" in words:  # no name here has one, and it would end the text in a query
        return None
    conditions = [f"attributes.run_id = '{words}'", f"attributes.run_name = '{words}'"]
    conditions.append(tag_filter({"csc.scenario": words}))
    for method in methods():
        if words.endswith(f"-{method}"):
            conditions.append(tag_filter({"csc.scenario": words.removesuffix(f"-{method}"), "csc.method": method}))
    scenarios = tag_filter({"csc.role": "scenario"})
    for query in [(scenarios, condition) for condition in conditions] if words else [(scenarios,)]:
        if found := search_runs(client, *query, max_results=1, order_by=NEWEST):
            return found[0]
    return None


def _run_of_model(client: "MlflowClient", uri: str) -> "Run | None":
    """The run whose task a registered version is."""
    address = Address.parse(uri)
    if address is None:
        raise TrackingError(f"{uri}: expected models:/NAME, models:/NAME@ALIAS or models:/NAME/VERSION")
    tags = {"csc.role": "scenario", "csc.run_key": address.version(client).tags.get("csc.run_key", "")}
    return next(iter(search_runs(client, tag_filter(tags), max_results=1, order_by=NEWEST)), None)


def close_run(scenario: str, data: str, config_json: str, state: str, extended: str = "") -> bool:
    """Mark what is still open of a scenario run as failed or killed; return whether there was anything.

    A complete run of which every step was reused changes nothing by itself, yet whoever asks for it expects that
    `final` is its model. Aliases that another run has moved since are moved back, with a line for each.

    `data` is the uri of the data set, `config_json` settings, `state` how the steps ended, in the words of Kubeflow
    Pipelines, and `extended` the fingerprint of the model that the run extends, if it does.
    """
    try:
        fingerprint = Dataset.open(data).fingerprint
    except Unavailable:
        raise
    except BadData as error:
        print(f"nothing to close: no task has begun ({error})")
        return False
    config = resolve(Scenario.parse(scenario).dataset, config_json)
    key = config.run_key(scenario, fingerprint, code_version(), extended)
    status = "KILLED" if state.upper().startswith("CANCEL") else "FAILED"
    closed = close_runs([key], status)
    if closed:
        print(f"marked as {status}: {', '.join(closed)}")
    elif not state.upper().startswith(("CANCEL", "FAIL")):
        for line in [line for name in model_names(key) for line in point_aliases(name, key).moved]:
            print(f"alias {line}")
    return bool(closed)
