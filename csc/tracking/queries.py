"""Questions to the tracking server: which scenario runs there are and how far they have come; and closing them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from csc.errors import TrackingError
from csc.tracking.calls import connected
from csc.tracking.saved_pages import saved_pages
from csc.tracking.server import nothing_tracked, tracking_uri, without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.store.entities import PagedList
    from mlflow.tracking import MlflowClient

__all__ = [
    "FINISHED",
    "NEWEST",
    "ScenarioRun",
    "TaskProgress",
    "add_saved_pages",
    "close_runs",
    "finished_runs",
    "map_after_tasks",
    "newest_runs",
    "number_of",
    "ping_server",
    "progress_since",
    "search_runs",
    "tag_filter",
    "task_of",
]

FINISHED = "attributes.status = 'FINISHED'"
NEWEST = ["attributes.start_time DESC"]


@dataclass(frozen=True)
class ScenarioRun:
    """A run of a whole scenario, as the server knows it."""

    run_id: str
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, float]


@dataclass(frozen=True)
class TaskProgress:
    """How far a task has come."""

    task: int
    status: str  # of its run: RUNNING, FINISHED, FAILED or KILLED
    epoch: int  # the last one that was logged, from 1; 0 before the first, and of a task with results
    metrics: dict[str, float]  # the latest value of each; with results, `mAP` is among them
    changed: int  # when something last happened, in milliseconds since 1970


def ping_server() -> str:
    """Ask the tracking server something small; return its address, without secrets, once it has answered."""
    with connected() as client:
        client.search_experiments(max_results=1)
    return without_secrets(tracking_uri())


def tag_filter(tags: Mapping[str, str]) -> str:
    """The filter for what has all these tags.

    >>> tag_filter({"csc.role": "task", "csc.task": "1"})
    "tags.`csc.role` = 'task' and tags.`csc.task` = '1'"
    """
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def task_of(tags: Mapping[str, str]) -> int:
    """The number of the task that a run or a version is of, as its tags say."""
    return number_of("tag csc.task", tags.get("csc.task", ""), "a task's number")


def number_of(what: str, text: str, expected: str = "a number") -> int:
    """A number that MLflow has as text."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise TrackingError(f"MLflow has a run or version with the {what}={text!r}; expected {expected}")
    return int(text)


def add_saved_pages() -> dict[str, str]:
    """The ids of our experiments by name, each with its saved pages; those that it misses are added."""
    with connected() as client:
        found = client.search_experiments(filter_string="name LIKE 'csc-%' AND name != 'csc-studies'")
        for experiment in found:
            for tag, value in saved_pages().items():
                if tag not in experiment.tags:
                    client.set_experiment_tag(experiment.experiment_id, tag, value)
    return {str(experiment.name): str(experiment.experiment_id) for experiment in found}


def finished_runs(scenario: str) -> list[ScenarioRun]:
    """The finished runs of a scenario, in whatever experiment, newest first; looking changes nothing."""
    if nothing_tracked():
        return []
    tags = {"csc.role": "scenario", "csc.scenario": scenario}
    with connected() as client:
        return [_scenario_run(run) for run in _all_pages(client, tag_filter(tags), FINISHED)]


def newest_runs(count: int) -> list[str]:
    """The ids of the scenario runs that were finished last, newest first."""
    if nothing_tracked():
        return []
    scenarios, last = tag_filter({"csc.role": "scenario"}), ["attributes.end_time DESC"]
    with connected() as client:
        found = search_runs(client, scenarios, FINISHED, max_results=count, order_by=last)
        return [str(run.info.run_id) for run in found]


def map_after_tasks(run_id: str) -> tuple[float, ...]:
    """The mAP after each task of a scenario run."""
    with connected() as client:
        history = client.get_metric_history(run_id, "mAP")
    return tuple(metric.value for metric in sorted(history, key=lambda metric: metric.step))


def progress_since(scenario: str, method: str, seed: int, since: float) -> list[tuple[ScenarioRun, list[TaskProgress]]]:
    """Scenario runs on which something happened since a time, newest first, each with its tasks; nothing is changed.

    `since` is in seconds since 1970.
    """
    if nothing_tracked():
        return []
    tags = {"csc.role": "scenario", "csc.scenario": scenario, "csc.method": method, "csc.seed": str(seed)}
    found = []
    with connected() as client:
        for run in search_runs(client, tag_filter(tags), max_results=10, order_by=NEWEST):
            tasks = _task_progress(client, run)
            changed = max(run.info.start_time, run.info.end_time or 0, *(task.changed for task in tasks))
            if changed >= since * 1000:
                found.append((_scenario_run(run), tasks))
    return found


def close_runs(keys: Iterable[str], status: str) -> list[str]:
    """Close what is still open of scenario runs that ended early, and return the names of what was open.

    These are their own runs and those of their tasks: one that stays open looks as if somebody were still at work on
    it. The next try opens it again. `keys` are those of `csc.tracking.runs.run_key`, `status` is `FAILED` or `KILLED`.
    """
    if nothing_tracked():
        return []
    running = "attributes.status = 'RUNNING'"
    with connected() as client:
        still_open = [run for key in keys for run in _all_pages(client, tag_filter({"csc.run_key": key}), running)]
        for run in still_open:
            client.set_terminated(run.info.run_id, status)
    return [str(run.info.run_name) for run in still_open]


def search_runs(client: "MlflowClient", *conditions: str, **options: Any) -> "PagedList":
    """The runs that meet all conditions, in whatever experiment; with the options of MLflow's own search."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client.search_runs(experiments, " and ".join(conditions), **options)


def _all_pages(client: "MlflowClient", *conditions: str) -> Iterator["Run"]:
    token, known = None, set[str]()
    while token not in known:
        known |= {token} if token else set()
        page = search_runs(client, *conditions, page_token=token)
        yield from page
        if not (token := page.token):
            return
    raise TrackingError(f"MLflow at {without_secrets(tracking_uri())} gives out the same page of runs without end")


def _scenario_run(run: "Run") -> ScenarioRun:
    return ScenarioRun(run.info.run_id, run.data.tags, run.data.params, run.data.metrics)


def _task_progress(client: "MlflowClient", scenario: "Run") -> list[TaskProgress]:
    """The tasks of a scenario run, in their order."""
    query = tag_filter({"csc.role": "task", "csc.scenario_run": scenario.info.run_id})
    tasks = []
    for run in client.search_runs([scenario.info.experiment_id], query):
        metrics, epoch = run.data.metrics, 0
        changed = max(run.info.start_time, run.info.end_time or 0)
        if "train/loss" in metrics and "mAP" not in metrics:
            newest = max(client.get_metric_history(run.info.run_id, "train/loss"), key=lambda point: point.step)
            epoch, changed = newest.step, max(changed, newest.timestamp)
        tasks.append(TaskProgress(task_of(run.data.tags), run.info.status, epoch, metrics, changed))
    return sorted(tasks, key=lambda task: task.task)
