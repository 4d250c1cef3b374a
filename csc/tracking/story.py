"""A scenario run, found by what a person calls it, with its settings and the results of its last finished task."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from csc.artifacts import RegisteredTask
from csc.config import Config, methods, resolve
from csc.config.tree import nested
from csc.errors import TrackingError
from csc.scenario import Scenario
from csc.tracking.names import changed_settings, model_name
from csc.tracking.queries import task_of, with_tags
from csc.tracking.registry import find_record
from csc.tracking.retry import translate_errors
from csc.tracking.server import connect

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

__all__ = ["Story", "find_story", "finished_tasks"]

_NEWEST = ["attributes.start_time DESC"]


@dataclass(frozen=True)
class Story:
    """What the tracking server knows of a scenario run.

    Attributes:
        run_id: of its run in MLflow.
        name: of that run.
        status: `RUNNING`, `FINISHED`, `FAILED` or `KILLED`.
        started: milliseconds since 1970.
        scenario: name.
        settings: those of the run, by their dotted keys.
        record: its last finished task with the results up to it; none before the first.
    """

    run_id: str
    name: str
    status: str
    started: int
    scenario: str
    settings: dict[str, str]
    record: RegisteredTask | None

    @property
    def config(self) -> Config:
        """The settings, checked."""
        return resolve(Scenario.parse(self.scenario).dataset, nested(self.settings))

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from those that the method has on the data set anyway."""
        return changed_settings(self.scenario, self.config)


def find_story(words: str = "") -> Story:
    """The run that words mean: its id or name, a registered model, or the newest of a scenario; none for the newest."""
    with translate_errors():
        client = connect()
        run = _run_of_model(client, words) if words.startswith("models:/") else _run(client, words)
        if run is None:
            named = f"run '{words}'" if words else "run"
            raise TrackingError(
                f"no {named} in the tracking store; give the id or the name of a run, a scenario, or models:/NAME"
            )
        tags = run.data.tags
        if missing := {"csc.run_key", "csc.scenario", "csc.method"} - tags.keys():
            raise TrackingError(f"run {run.info.run_id}: no tag {min(missing)}; not a run of this project, or changed")
        done = finished_tasks(tags["csc.run_key"])
        name = model_name(tags["csc.scenario"], tags["csc.method"])
        record = find_record(name, max(done), tags["csc.run_key"]) if done else None
    settings = {key: value for key, value in run.data.params.items() if key not in ("scenario", "code_version")}
    info = run.info
    return Story(info.run_id, info.run_name, info.status, info.start_time, tags["csc.scenario"], settings, record)


def finished_tasks(key: str) -> dict[int, float]:
    """The mAP of each finished task of a scenario run, by its key; see `csc.tracking.runs.run_key`."""
    with translate_errors():
        client = connect()
        query = f"{with_tags({'csc.role': 'task', 'csc.run_key': key})} and attributes.status = 'FINISHED'"
        found = client.search_runs(_experiments(client), query)
    return {task_of(run.data.tags): run.data.metrics["mAP"] for run in found if "mAP" in run.data.metrics}


def _run(client: "MlflowClient", words: str) -> "Run | None":
    """The run with this id or name, or the newest of this scenario or registered model."""
    if "'" in words:  # nothing of ours has one, and a query would end there
        return None
    conditions = [f"attributes.run_id = '{words}'", f"attributes.run_name = '{words}'"]
    conditions.append(with_tags({"csc.scenario": words}))
    for method in methods():
        if words.endswith(f"-{method}"):
            conditions.append(with_tags({"csc.scenario": words.removesuffix(f"-{method}"), "csc.method": method}))
    every = with_tags({"csc.role": "scenario"})
    for query in [f"{every} and {condition}" for condition in conditions] if words else [every]:
        for run in client.search_runs(_experiments(client), query, max_results=1, order_by=_NEWEST):
            return run
    return None


def _run_of_model(client: "MlflowClient", uri: str) -> "Run | None":
    """The run whose task a registered version is."""
    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))?", uri)
    if match is None:
        raise TrackingError(f"{uri}: expected models:/NAME, models:/NAME@ALIAS or models:/NAME/VERSION")
    name, alias, number = match.groups()
    version = (
        client.get_model_version(name, number) if number else client.get_model_version_by_alias(name, alias or "final")
    )
    tags = {"csc.role": "scenario", "csc.run_key": version.tags.get("csc.run_key", "")}
    found = client.search_runs(_experiments(client), with_tags(tags), max_results=1, order_by=_NEWEST)
    return next(iter(found), None)


def _experiments(client: "MlflowClient") -> Sequence[str]:
    return [experiment.experiment_id for experiment in client.search_experiments()]
